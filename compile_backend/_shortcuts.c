/* What a step does on the host, in C: see compile_backend/shortcuts.py.
 *
 * Every function handles the plain case (arrays of integers that agree with each other) and
 * declines all others, errors included, by returning None or False: the general code then does the
 * work from the start, and says what is wrong. Nothing here knows models, graphs or devices.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>
#include <stdint.h>

/* --- arrays of integers ------------------------------------------------------------------- */

/* An array of signed integers of 4 or 8 bytes; NULL for anything else. */
static PyArrayObject *integers(PyObject *object, int num_dims)
{
    if (!PyArray_CheckExact(object)) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    int itemsize = (int)PyArray_ITEMSIZE(array);
    if (PyArray_NDIM(array) != num_dims || !PyTypeNum_ISSIGNED(PyArray_TYPE(array)) ||
        !PyArray_ISBEHAVED_RO(array) || (itemsize != 4 && itemsize != 8)) {
        return NULL;
    }
    return array;
}

/* The same, to be written to: contiguous, with elements of one size. */
static PyArrayObject *target(PyObject *object, int num_dims, int itemsize)
{
    PyArrayObject *array = integers(object, num_dims);
    if (array == NULL || PyArray_ITEMSIZE(array) != itemsize || !PyArray_IS_C_CONTIGUOUS(array) ||
        !PyArray_ISWRITEABLE(array)) {
        return NULL;
    }
    return array;
}

static inline int64_t at(const char *place, int itemsize)
{
    return itemsize == 4 ? *(const int32_t *)place : *(const int64_t *)place;
}

/* Copy a row of integers to int32 or int64; false if one is outside of [low, end). */
#define COPY_ROW(NAME, FROM, TO)                                                                  \
    static inline int NAME(const char *from, npy_intp stride, TO *to, npy_intp num, int64_t low,  \
                           int64_t end)                                                           \
    {                                                                                             \
        int is_inside = 1;                                                                        \
        if (stride == (npy_intp)sizeof(FROM)) {                                                   \
            const FROM *row = (const FROM *)from;                                                 \
            for (npy_intp i = 0; i < num; i++) {                                                  \
                is_inside &= (row[i] >= low) & (row[i] < end);                                    \
                to[i] = (TO)row[i];                                                               \
            }                                                                                     \
        } else {                                                                                  \
            for (npy_intp i = 0; i < num; i++) {                                                  \
                FROM number = *(const FROM *)(from + i * stride);                                 \
                is_inside &= (number >= low) & (number < end);                                    \
                to[i] = (TO)number;                                                               \
            }                                                                                     \
        }                                                                                         \
        return is_inside;                                                                         \
    }
COPY_ROW(copy_4_to_4, int32_t, int32_t)
COPY_ROW(copy_4_to_8, int32_t, int64_t)
COPY_ROW(copy_8_to_4, int64_t, int32_t)
COPY_ROW(copy_8_to_8, int64_t, int64_t)

static inline int copy_row(const char *from, int from_size, npy_intp stride, char *to, int to_size,
                           npy_intp num, int64_t low, int64_t end)
{
    if (from_size == 4) {
        return to_size == 4 ? copy_4_to_4(from, stride, (int32_t *)to, num, low, end)
                            : copy_4_to_8(from, stride, (int64_t *)to, num, low, end);
    }
    return to_size == 4 ? copy_8_to_4(from, stride, (int32_t *)to, num, low, end)
                        : copy_8_to_8(from, stride, (int64_t *)to, num, low, end);
}

/* The same for int32 in [0, end), several at once: the sign of any difference tells. */
static inline int copy_blocks(const int32_t *from, int32_t *to, npy_intp num, int32_t end)
{
    int32_t signs = 0;
    for (npy_intp i = 0; i < num; i++) {
        signs |= from[i] | (int32_t)((uint32_t)end - 1 - (uint32_t)from[i]);
        to[i] = from[i];
    }
    return signs >= 0;
}

static inline void fill_row(char *to, int itemsize, npy_intp num, int64_t number)
{
    for (npy_intp i = 0; i < num; i++) {
        if (itemsize == 4) {
            ((int32_t *)to)[i] = (int32_t)number;
        } else {
            ((int64_t *)to)[i] = number;
        }
    }
}

/* --- a step's batch ----------------------------------------------------------------------- */

/* The tokens of a batch, and whether all requests have query_len; false if it is not plain. */
static int count(PyObject *query_lens, long query_len, int64_t *num_tokens, int *is_uniform)
{
    PyArrayObject *lens = integers(query_lens, 1);
    npy_intp num_reqs = lens == NULL ? 0 : PyArray_DIM(lens, 0);
    if (num_reqs == 0) {
        return 0;
    }
    const char *place = PyArray_BYTES(lens);
    npy_intp stride = PyArray_STRIDE(lens, 0);
    int itemsize = (int)PyArray_ITEMSIZE(lens);
    *num_tokens = 0;
    *is_uniform = 1;
    for (npy_intp r = 0; r < num_reqs; r++, place += stride) {
        int64_t len = at(place, itemsize);
        if (len < 1 || len > INT32_MAX) {
            return 0;
        }
        *num_tokens += len;
        *is_uniform &= len == query_len;
    }
    return 1;
}

/* count_tokens(query_lens, query_len) -> (number of tokens, whether all have query_len) | None */
static PyObject *count_tokens(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t num_tokens;
    int is_uniform;
    long query_len = num_args == 2 ? PyLong_AsLong(args[1]) : 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (num_args != 2 || !count(args[0], query_len, &num_tokens, &is_uniform)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("LO", (long long)num_tokens, is_uniform ? Py_True : Py_False);
}

/* Whether every request is longer than what a step adds; -1 if they are not plain. */
static int are_longer(PyObject *seq_lens, PyObject *query_lens)
{
    PyArrayObject *seqs = integers(seq_lens, 1), *queries = integers(query_lens, 1);
    if (seqs == NULL || queries == NULL || PyArray_DIM(seqs, 0) != PyArray_DIM(queries, 0)) {
        return -1;
    }
    int seq_size = (int)PyArray_ITEMSIZE(seqs), query_size = (int)PyArray_ITEMSIZE(queries);
    for (npy_intp r = 0; r < PyArray_DIM(seqs, 0); r++) {
        if (at(PyArray_GETPTR1(seqs, r), seq_size) <= at(PyArray_GETPTR1(queries, r), query_size)) {
            return 0;
        }
    }
    return 1;
}

/* all_longer(seq_lens, query_lens) -> whether each is | None */
static PyObject *all_longer(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    int known = num_args == 2 ? are_longer(args[0], args[1]) : -1;
    if (known < 0) {
        Py_RETURN_NONE;
    }
    return PyBool_FromLong(known);
}

/* lengths(query_lens, seq_lens) -> (longest query, longest sequence, the query length of all or 0)
 *     | None
 */
static PyObject *lengths(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    PyArrayObject *queries = num_args == 2 ? integers(args[0], 1) : NULL;
    PyArrayObject *seqs = num_args == 2 ? integers(args[1], 1) : NULL;
    npy_intp num_reqs = queries == NULL ? 0 : PyArray_DIM(queries, 0);
    if (num_reqs == 0 || seqs == NULL || PyArray_DIM(seqs, 0) != num_reqs) {
        Py_RETURN_NONE;
    }
    int query_size = (int)PyArray_ITEMSIZE(queries), seq_size = (int)PyArray_ITEMSIZE(seqs);
    int64_t first = at(PyArray_GETPTR1(queries, 0), query_size);
    int64_t longest_query = 0, longest_seq = 0;
    int is_uniform = 1;
    for (npy_intp r = 0; r < num_reqs; r++) {
        int64_t query_len = at(PyArray_GETPTR1(queries, r), query_size);
        int64_t seq_len = at(PyArray_GETPTR1(seqs, r), seq_size);
        longest_query = query_len > longest_query ? query_len : longest_query;
        longest_seq = seq_len > longest_seq ? seq_len : longest_seq;
        is_uniform &= query_len == first;
    }
    return Py_BuildValue("LLL", (long long)longest_query, (long long)longest_seq,
                         (long long)(is_uniform ? first : 0));
}

/* The rows of a value, `size` of them in dimension `axis`, and behind them the padding. */
static int put(PyObject *held_object, long axis, PyObject *value_object, npy_intp size, int64_t pad)
{
    if (!PyArray_CheckExact(held_object)) {
        return 0;
    }
    int num_dims = PyArray_NDIM((PyArrayObject *)held_object);
    int itemsize = (int)PyArray_ITEMSIZE((PyArrayObject *)held_object);
    PyArrayObject *held = target(held_object, num_dims, itemsize);
    PyArrayObject *value = integers(value_object, num_dims);
    if (held == NULL || value == NULL || !PyArray_IS_C_CONTIGUOUS(value)) {
        return 0;
    }
    npy_intp num_inner = 1;
    for (int dim = 0; dim < num_dims; dim++) {
        npy_intp wanted = dim == axis ? size : PyArray_DIM(held, dim);
        if (PyArray_DIM(value, dim) != wanted || (dim < axis && wanted != 1)) {
            return 0;
        }
        num_inner *= dim > axis ? wanted : 1;
    }
    npy_intp num_own = size * num_inner, num_all = PyArray_SIZE(held);
    if (size < 0 || num_own > num_all) {
        return 0;
    }
    int from_size = (int)PyArray_ITEMSIZE(value);
    int64_t low = itemsize == 4 ? INT32_MIN : INT64_MIN;
    int64_t end = itemsize == 4 ? (int64_t)INT32_MAX + 1 : INT64_MAX;
    if (!copy_row(PyArray_BYTES(value), from_size, from_size, PyArray_BYTES(held), itemsize,
                  num_own, low, end)) {
        return 0; /* also for the largest int64, which an exclusive end leaves out */
    }
    fill_row(PyArray_BYTES(held) + num_own * itemsize, itemsize, num_all - num_own, pad);
    return 1;
}

/* Put the values of the first rows; how many were put, up to the first that is not plain.
 *
 * A row is (name, target, axis, whether it changes with tokens (0), requests (1) or requests + 1
 * (2), pad).
 */
static Py_ssize_t put_rows(PyObject *rows, Py_ssize_t num_rows, PyObject *values,
                           npy_intp num_tokens, npy_intp num_reqs)
{
    Py_ssize_t done = 0;
    for (; done < num_rows && done < PyTuple_GET_SIZE(rows); done++) {
        PyObject *row = PyTuple_GET_ITEM(rows, done);
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 5) {
            break;
        }
        long axis = PyLong_AsLong(PyTuple_GET_ITEM(row, 2));
        long changes_with = PyLong_AsLong(PyTuple_GET_ITEM(row, 3));
        long long pad = PyLong_AsLongLong(PyTuple_GET_ITEM(row, 4));
        /* Last: it is borrowed, and numbers of other classes run Python. */
        PyObject *value = PyDict_GetItemWithError(values, PyTuple_GET_ITEM(row, 0));
        npy_intp size = changes_with == 0 ? num_tokens : num_reqs + (changes_with == 2);
        if (PyErr_Occurred() || value == NULL ||
            !put(PyTuple_GET_ITEM(row, 1), axis, value, size, pad)) {
            break;
        }
    }
    PyErr_Clear();
    return done;
}

/* put_inputs(rows, num_rows, values, num_tokens, num_reqs) -> how many of the rows were put */
static PyObject *put_inputs(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5 || !PyTuple_CheckExact(args[0]) || !PyDict_CheckExact(args[2])) {
        return PyLong_FromLong(0);
    }
    Py_ssize_t num_rows = PyLong_AsSsize_t(args[1]);
    Py_ssize_t num_tokens = PyLong_AsSsize_t(args[3]), num_reqs = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromSsize_t(put_rows(args[0], num_rows, args[2], num_tokens, num_reqs));
}

/* The slots of a request's new tokens: where its row of the block table puts them. */
static void put_slots(int64_t *slots, const int32_t *row, int64_t first, int64_t num,
                      int64_t block_size)
{
    int is_power = (block_size & (block_size - 1)) == 0; /* dividing takes tens of cycles */
    int64_t block = is_power ? first >> __builtin_ctzll(block_size) : first / block_size;
    int64_t offset = first - block * block_size;
    for (int64_t i = 0; i < num; i++) {
        slots[i] = row[block] * block_size + offset;
        if (++offset == block_size) {
            block++;
            offset = 0;
        }
    }
}

/* What AttentionMetadataBuilder.fill does: whether it was done, in part if not.
 *
 * The batch is (query_lens, seq_lens, block_table, slot_mapping | None); held are (starts,
 * held_lens, held_table, held_slots, max_model_len, num_blocks, block_size). With is_refill the
 * held table has valid blocks all over, which may stay where nobody looks.
 */
static int fill(PyObject *const *batch, PyObject *const *held, int is_refill)
{
    PyArrayObject *queries = integers(batch[0], 1), *seqs = integers(batch[1], 1);
    PyArrayObject *table = integers(batch[2], 2);
    PyArrayObject *slots = batch[3] == Py_None ? NULL : integers(batch[3], 1);
    PyArrayObject *starts = target(held[0], 1, 4), *held_lens = target(held[1], 1, 4);
    PyArrayObject *held_table = target(held[2], 2, 4), *held_slots = target(held[3], 1, 8);
    if (!queries || !seqs || !table || (batch[3] != Py_None && !slots) || !starts || !held_lens ||
        !held_table || !held_slots) {
        return 0;
    }
    int64_t max_model_len = PyLong_AsLongLong(held[4]), num_blocks = PyLong_AsLongLong(held[5]);
    int64_t block_size = PyLong_AsLongLong(held[6]);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    npy_intp num_reqs = PyArray_DIM(queries, 0), num_rows = PyArray_DIM(held_lens, 0);
    npy_intp columns = PyArray_DIM(held_table, 1), most_tokens = PyArray_DIM(held_slots, 0);
    npy_intp width = PyArray_DIM(table, 1) < columns ? PyArray_DIM(table, 1) : columns;
    if (num_reqs > num_rows || PyArray_DIM(seqs, 0) != num_reqs ||
        PyArray_DIM(table, 0) != num_reqs || PyArray_DIM(starts, 0) != num_rows + 1 ||
        PyArray_DIM(held_table, 0) != num_rows || block_size < 1) {
        return 0;
    }
    int32_t *start = PyArray_DATA(starts), *len = PyArray_DATA(held_lens);
    int32_t *row = PyArray_DATA(held_table);
    int64_t *slot = PyArray_DATA(held_slots);
    int query_size = (int)PyArray_ITEMSIZE(queries), seq_size = (int)PyArray_ITEMSIZE(seqs);
    int table_size = (int)PyArray_ITEMSIZE(table);
    npy_intp table_stride = PyArray_STRIDE(table, 1);
    int is_dense = table_size == 4 && table_stride == 4 && num_blocks <= INT32_MAX;
    int64_t num_tokens = 0;
    for (npy_intp r = 0; r < num_reqs; r++, row += columns) {
        int64_t query_len = at(PyArray_GETPTR1(queries, r), query_size);
        int64_t seq_len = at(PyArray_GETPTR1(seqs, r), seq_size);
        if (query_len < 0 || seq_len < query_len || seq_len > max_model_len ||
            seq_len > width * block_size ||
            num_tokens + query_len > most_tokens) {
            return 0;
        }
        const char *blocks = PyArray_GETPTR2(table, r, 0);
        npy_intp used = (npy_intp)((seq_len + block_size - 1) / block_size);
        if (is_dense ? !copy_blocks((const int32_t *)blocks, row, used, (int32_t)num_blocks)
                     : !copy_row(blocks, table_size, table_stride, (char *)row, 4, used, 0,
                                 num_blocks)) {
            return 0;
        }
        if (!is_refill) {
            fill_row((char *)(row + used), 4, columns - used, 0);
        }
        if (slots == NULL) {
            put_slots(slot + num_tokens, row, seq_len - query_len, query_len, block_size);
        }
        start[r] = (int32_t)num_tokens;
        len[r] = (int32_t)seq_len;
        num_tokens += query_len;
    }
    if (slots != NULL &&
        (PyArray_DIM(slots, 0) != num_tokens ||
         !copy_row(PyArray_BYTES(slots), (int)PyArray_ITEMSIZE(slots), PyArray_STRIDE(slots, 0),
                   (char *)slot, 8, num_tokens, -1, num_blocks * block_size))) {
        return 0;
    }
    fill_row((char *)(start + num_reqs), 4, num_rows + 1 - num_reqs, num_tokens);
    fill_row((char *)(len + num_reqs), 4, num_rows - num_reqs, 0);
    if (!is_refill) {
        fill_row((char *)row, 4, (num_rows - num_reqs) * columns, 0);
    }
    fill_row((char *)(slot + num_tokens), 8, most_tokens - num_tokens, -1);
    return 1;
}

/* fill_attention(*batch, *held, is_refill) -> whether it was done; see fill */
static PyObject *fill_attention(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    int is_refill = num_args == 12 ? PyObject_IsTrue(args[11]) : -1;
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PyBool_FromLong(is_refill >= 0 && fill(args, args + 4, is_refill));
}

/* --- steps that are known ------------------------------------------------------------------ */

/* Functions of the CUDA driver. */
typedef int (*OfEvent)(void *event);

typedef struct {
    void *event;
    OfEvent query, synchronize;
} Event;

static const char EVENT[] = "compile_backend.Event";

static void free_event_of(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, EVENT));
}

/* event_of(event, query, synchronize) -> Event
 *
 * The event must outlive it. The last two are addresses of functions.
 */
static PyObject *event_of(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Event *made = num_args == 3 ? PyMem_Calloc(1, sizeof(Event)) : NULL;
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    made->event = PyLong_AsVoidPtr(args[0]);
    made->query = (OfEvent)PyLong_AsVoidPtr(args[1]);
    made->synchronize = (OfEvent)PyLong_AsVoidPtr(args[2]);
    if (PyErr_Occurred()) {
        PyMem_Free(made);
        return NULL;
    }
    return PyCapsule_New(made, EVENT, free_event_of);
}

/* Wait for an event that there is; false for errors. */
static int wait_for(PyObject *capsule)
{
    if (capsule == Py_None) {
        return 1;
    }
    Event *held = PyCapsule_GetPointer(capsule, EVENT);
    if (held == NULL) {
        PyErr_Clear();
        return 0;
    }
    if (held->query(held->event) == 0) {
        return 1;
    }
    int error;
    Py_BEGIN_ALLOW_THREADS;
    error = held->synchronize(held->event);
    Py_END_ALLOW_THREADS;
    return error == 0;
}

enum { QUERY_LENS, INPUTS, ATTENTION, ALL_DECODE, LORAS, CASCADE, EXTRA, NUM_OF_BATCH };
enum { SEQ_LENS, BLOCK_TABLE, SLOT_MAPPING, NUM_OF_ATTENTION };
static const char *const OF_BATCH[] = {
    "query_lens", "inputs", "attention", "all_decode", "num_active_loras", "use_cascade_attn",
    "extra",
};
static const char *const OF_ATTENTION[] = {"seq_lens", "block_table", "slot_mapping"};
static PyObject *batch_names[NUM_OF_BATCH], *attention_names[NUM_OF_ATTENTION], *held_name;

/* The attributes of a batch that only has what decodes and prompts need; they are owned. */
typedef struct {
    PyObject *of_batch[NUM_OF_BATCH];
    PyObject *of_attention[1 + NUM_OF_ATTENTION]; /* the query lengths first; or all NULL */
    int64_t num_tokens, num_reqs;
    int is_decode;
} Plain;

static void let_go(Plain *plain)
{
    for (int i = 0; i < NUM_OF_BATCH; i++) {
        Py_XDECREF(plain->of_batch[i]);
    }
    for (int i = 0; i < 1 + NUM_OF_ATTENTION; i++) {
        Py_XDECREF(plain->of_attention[i]);
    }
}

static int get_all(PyObject *owner, PyObject **names, int num, PyObject **values)
{
    for (int i = 0; i < num; i++) {
        values[i] = PyObject_GetAttr(owner, names[i]);
        if (values[i] == NULL) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* Read a batch; false if it asks for more than its lengths tell. To be let go in any case. */
static int read_batch(PyObject *batch, long query_len, Plain *plain)
{
    memset(plain, 0, sizeof(Plain));
    PyObject **found = plain->of_batch;
    int is_uniform;
    if (!get_all(batch, batch_names, NUM_OF_BATCH, found) || !PyDict_CheckExact(found[INPUTS]) ||
        found[ALL_DECODE] != Py_None || found[CASCADE] != Py_False ||
        !PyLong_CheckExact(found[LORAS]) || PyObject_IsTrue(found[LORAS]) != 0 ||
        !PyTuple_CheckExact(found[EXTRA]) || PyTuple_GET_SIZE(found[EXTRA]) != 0 ||
        !count(found[QUERY_LENS], query_len, &plain->num_tokens, &is_uniform)) {
        return 0;
    }
    plain->num_reqs = PyArray_DIM((PyArrayObject *)found[QUERY_LENS], 0);
    plain->is_decode = is_uniform;
    if (found[ATTENTION] == Py_None) {
        return 1;
    }
    plain->of_attention[0] = Py_NewRef(found[QUERY_LENS]);
    if (!get_all(found[ATTENTION], attention_names, NUM_OF_ATTENTION, plain->of_attention + 1)) {
        return 0;
    }
    int longer = are_longer(plain->of_attention[1 + SEQ_LENS], found[QUERY_LENS]);
    plain->is_decode &= longer;
    return longer >= 0;
}

/* What tells plain batches apart: tokens, requests, whether all decode, whether attention is there.
 * NULL without an error if they are too many for one number.
 */
static PyObject *key_of(const Plain *plain)
{
    if (plain->num_tokens >= (int64_t)1 << 31 || plain->num_reqs >= (int64_t)1 << 29) {
        return NULL;
    }
    int has_attention = plain->of_attention[0] != NULL;
    return PyLong_FromLongLong(plain->num_tokens << 31 | plain->num_reqs << 2 |
                               plain->is_decode << 1 | has_attention);
}

/* plain_key(batch, query_len) -> the key of a plain batch | None */
static PyObject *plain_key(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    long query_len = num_args == 2 ? PyLong_AsLong(args[1]) : 0;
    if (num_args != 2 || PyErr_Occurred()) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    Plain plain;
    PyObject *key = read_batch(args[0], query_len, &plain) ? key_of(&plain) : NULL;
    let_go(&plain);
    return key == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : key;
}

enum { ROWS, NUM_ROWS, MEMORY, LAYOUT, COPIED, HELD, STEP, NUM_OF_KNOWN };

/* Bring a plain batch to the memory of a known step; false if it is not plain after all. */
static int bring(PyObject *known, const Plain *plain)
{
    PyObject *rows = PyTuple_GET_ITEM(known, ROWS), *memory = PyTuple_GET_ITEM(known, MEMORY);
    PyObject *layout = PyTuple_GET_ITEM(known, LAYOUT), *held = PyTuple_GET_ITEM(known, HELD);
    Py_ssize_t num_rows = PyLong_AsSsize_t(PyTuple_GET_ITEM(known, NUM_ROWS));
    int has_attention = plain->of_attention[0] != NULL;
    if (num_rows < 0 || !PyTuple_CheckExact(rows) ||
        PyDict_GET_SIZE(plain->of_batch[INPUTS]) != num_rows ||
        has_attention != PyTuple_CheckExact(held) ||
        (has_attention && PyTuple_GET_SIZE(held) != 7) ||
        !wait_for(PyTuple_GET_ITEM(known, COPIED))) {
        return 0;
    }
    /* `held` tells what is filled of attention, so it may stay while inputs are put. */
    if (put_rows(rows, num_rows, plain->of_batch[INPUTS], plain->num_tokens, plain->num_reqs) !=
        num_rows) {
        return 0;
    }
    PyObject *last = PyObject_GetAttr(memory, held_name);
    int is_refill = last == layout;
    Py_XDECREF(last);
    if (last == NULL || PyObject_SetAttr(memory, held_name, Py_None) != 0 ||
        (has_attention && !fill(plain->of_attention, &PyTuple_GET_ITEM(held, 0), is_refill))) {
        return 0;
    }
    return PyObject_SetAttr(memory, held_name, layout) == 0;
}

/* prepare(known, query_len, batch) -> the step of a known batch | None
 *
 * What is known is a tuple for each plain_key: (rows, number of them that are the model's, owner of
 * the memory, layout, Event | None, what fill holds | None, step). The batch lies in the step's
 * memory when it is returned; it may lie there in part if not, and then the owner's `held` is None.
 */
static PyObject *prepare(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 3 || !PyDict_CheckExact(args[0]) || PyDict_GET_SIZE(args[0]) == 0) {
        Py_RETURN_NONE;
    }
    long query_len = PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Plain plain;
    PyObject *key = read_batch(args[2], query_len, &plain) ? key_of(&plain) : NULL;
    PyObject *known = key == NULL ? NULL : PyDict_GetItemWithError(args[0], key);
    PyObject *step = NULL;
    if (known != NULL && PyTuple_CheckExact(known) && PyTuple_GET_SIZE(known) == NUM_OF_KNOWN) {
        Py_INCREF(known); /* others run while it waits */
        if (bring(known, &plain)) {
            step = Py_NewRef(PyTuple_GET_ITEM(known, STEP));
        }
        Py_DECREF(known);
    }
    Py_XDECREF(key);
    let_go(&plain);
    PyErr_Clear();
    return step == NULL ? Py_NewRef(Py_None) : step;
}

/* --- addresses of tensors ----------------------------------------------------------------- */

/* Functions of torch's stable C interface (aoti_torch/c/shim.h), handed over by Python. */
typedef int32_t (*GetDataPtr)(void *tensor, void **address);
typedef int32_t (*GetDim)(void *tensor, int64_t *num_dims);
typedef int32_t (*GetNumbers)(void *tensor, int64_t **numbers);
typedef int32_t (*DeleteTensor)(void *tensor);

/* So many sizes and strides lie in a tensor itself, at places that stay; torch allocates memory
 * for more, which may be gone later. */
enum { MOST_DIMS = 5 };

/* A tensor with an address: where it was, and where it has its sizes and strides itself. */
typedef struct {
    void *tensor, *address;
    const int64_t *sizes, *strides;
    Py_ssize_t num_dims;
} Own;

/* Tensors in dicts, each at an address. */
typedef struct {
    Py_ssize_t num;
    PyObject *tables, *names; /* lists of dicts and of their keys */
    Py_ssize_t *table_sizes;
    PyObject **objects;       /* what the dicts held; only compared, never used */
    void **tensors;           /* torch's handles of the same, which see new memory of a tensor;
                                 NULL for a tensor without an address of its own, and for None */
    Py_ssize_t num_own;
    Own *own;       /* those with an address */
    int64_t *noted; /* the sizes, then the strides of each of them, one after the other */
    GetDataPtr get_data_ptr;
    GetDim get_dim;
    GetNumbers get_sizes, get_strides;
    DeleteTensor delete_tensor;
    uint64_t num_changes; /* of any watched dict, up to which the tables were compared */
} Watch;

static const char WATCH[] = "compile_backend.Watch";

/* Changes of watched dicts are counted where Python can tell of them (from 3.12 on). */
static uint64_t num_dict_changes = 0;
static int dict_watcher = -1;

#if PY_VERSION_HEX >= 0x030C0000
static int count_change(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value)
{
    num_dict_changes++;
    return 0;
}
#endif

static void free_watch(Watch *watch)
{
    for (Py_ssize_t i = 0; watch->tensors != NULL && i < watch->num; i++) {
        if (watch->tensors[i] != NULL) {
            watch->delete_tensor(watch->tensors[i]);
        }
    }
    Py_XDECREF(watch->tables);
    Py_XDECREF(watch->names);
    PyMem_Free(watch->table_sizes);
    PyMem_Free(watch->own);
    PyMem_Free(watch->noted);
    PyMem_Free(watch->objects);
    PyMem_Free(watch->tensors);
    PyMem_Free(watch);
}

static void free_watch_of(PyObject *capsule)
{
    free_watch(PyCapsule_GetPointer(capsule, WATCH));
}

static int tables_are_the_same(Watch *watch)
{
    if (dict_watcher >= 0 && watch->num_changes == num_dict_changes) {
        return 1;
    }
    uint64_t num_changes = num_dict_changes;
    for (Py_ssize_t i = 0; i < watch->num; i++) {
        PyObject *table = PyList_GET_ITEM(watch->tables, i);
        if (PyDict_GET_SIZE(table) != watch->table_sizes[i] ||
            PyDict_GetItemWithError(table, PyList_GET_ITEM(watch->names, i)) !=
                watch->objects[i]) {
            PyErr_Clear();
            return 0;
        }
    }
    watch->num_changes = num_changes;
    return 1;
}

/* Note a tensor with an address, whose numbers come at `noted`; how many there are, or -1 if they
 * do not lie in the tensor, or cannot be told. */
static Py_ssize_t note_own(Watch *watch, void *tensor, void *address, int64_t *noted)
{
    Own *own = &watch->own[watch->num_own];
    int64_t num_dims = 0, *sizes = NULL, *strides = NULL;
    if (watch->get_dim(tensor, &num_dims) != 0 || num_dims < 0 || num_dims > MOST_DIMS ||
        watch->get_sizes(tensor, &sizes) != 0 || watch->get_strides(tensor, &strides) != 0) {
        return -1;
    }
    *own = (Own){tensor, address, sizes, strides, (Py_ssize_t)num_dims};
    memcpy(noted, sizes, sizeof(int64_t) * (size_t)num_dims);
    memcpy(noted + num_dims, strides, sizeof(int64_t) * (size_t)num_dims);
    watch->num_own++;
    return 2 * (Py_ssize_t)num_dims;
}

static inline int lies_as_noted(const Own *own, const int64_t *noted)
{
    int64_t differs = 0;
    for (Py_ssize_t dim = 0; dim < own->num_dims; dim++) {
        differs |= own->sizes[dim] ^ noted[dim];
        differs |= own->strides[dim] ^ noted[own->num_dims + dim];
    }
    return differs == 0;
}

/* Remember one tensor, at the address that Python found; false if the handle tells another.
 *
 * Its sizes and strides go to `*noted`, which moves on.
 */
static int watch_one(Watch *watch, Py_ssize_t i, PyObject *address, int64_t **noted)
{
    PyObject *table = PyList_GET_ITEM(watch->tables, i);
    if (!PyDict_Check(table)) {
        return 0;
    }
    void *known = address == Py_None ? NULL : PyLong_AsVoidPtr(address);
    watch->table_sizes[i] = PyDict_GET_SIZE(table);
    watch->objects[i] = PyDict_GetItemWithError(table, PyList_GET_ITEM(watch->names, i));
    if (PyErr_Occurred() || watch->objects[i] == NULL) {
        return 0;
    }
#if PY_VERSION_HEX >= 0x030C0000
    if (dict_watcher >= 0 && PyDict_Watch(dict_watcher, table) != 0) {
        return 0;
    }
#endif
    void *told = NULL;
    if (watch->tensors[i] == NULL) {
        return address == Py_None;
    }
    if (watch->get_data_ptr(watch->tensors[i], &told) != 0 || told != known) {
        return 0;
    }
    Py_ssize_t num = note_own(watch, watch->tensors[i], known, *noted);
    *noted += num < 0 ? 0 : num;
    return num >= 0;
}

/* watch(tables, names, handles, addresses, get_data_ptr, get_dim, get_sizes, get_strides,
 *       delete_tensor) -> Watch | None
 *
 * Takes the handles over. The last five are addresses of the functions.
 */
static PyObject *watch(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 9 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
        !PyList_CheckExact(args[2]) || !PyList_CheckExact(args[3])) {
        Py_RETURN_NONE;
    }
    Py_ssize_t num = PyList_GET_SIZE(args[0]);
    for (int i = 1; i < 4; i++) {
        if (PyList_GET_SIZE(args[i]) != num) {
            Py_RETURN_NONE;
        }
    }
    Watch *made = PyMem_Calloc(1, sizeof(Watch));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    made->num = num;
    made->tables = Py_NewRef(args[0]);
    made->names = Py_NewRef(args[1]);
    made->objects = PyMem_Calloc(num + 1, sizeof(PyObject *));
    made->tensors = PyMem_Calloc(num + 1, sizeof(void *));
    made->table_sizes = PyMem_Calloc(num + 1, sizeof(Py_ssize_t));
    made->own = PyMem_Calloc(num + 1, sizeof(Own));
    made->noted = PyMem_Calloc(num + 1, 2 * MOST_DIMS * sizeof(int64_t));
    made->get_data_ptr = (GetDataPtr)PyLong_AsVoidPtr(args[4]);
    made->get_dim = (GetDim)PyLong_AsVoidPtr(args[5]);
    made->get_sizes = (GetNumbers)PyLong_AsVoidPtr(args[6]);
    made->get_strides = (GetNumbers)PyLong_AsVoidPtr(args[7]);
    made->delete_tensor = (DeleteTensor)PyLong_AsVoidPtr(args[8]);
    made->num_changes = num_dict_changes;
    int64_t *noted = made->noted;
    int is_good = made->objects && made->tensors && made->table_sizes && made->own && noted &&
                  !PyErr_Occurred();
    for (Py_ssize_t i = 0; is_good && i < num; i++) { /* all of them, to be freed with the rest */
        PyObject *capsule = PyList_GET_ITEM(args[2], i);
        made->tensors[i] = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, NULL);
    }
    for (Py_ssize_t i = 0; is_good && i < num; i++) {
        is_good = watch_one(made, i, PyList_GET_ITEM(args[3], i), &noted);
    }
    if (!is_good) {
        PyErr_Clear();
        free_watch(made);
        Py_RETURN_NONE;
    }
    return PyCapsule_New(made, WATCH, free_watch_of);
}

/* have_moved(Watch) -> whether a tensor is elsewhere, or replaced */
static PyObject *have_moved(PyObject *self, PyObject *capsule)
{
    Watch *watch = PyCapsule_GetPointer(capsule, WATCH);
    if (watch == NULL) {
        return NULL;
    }
    if (!tables_are_the_same(watch)) {
        Py_RETURN_TRUE;
    }
    const int64_t *noted = watch->noted;
    for (Py_ssize_t i = 0; i < watch->num_own; i++) {
        const Own *own = &watch->own[i];
        if (i + 8 < watch->num_own) {
            __builtin_prefetch(*(void **)own[8].tensor); /* the tensor behind the handle */
        }
        void *address = NULL;
        if (watch->get_data_ptr(own->tensor, &address) != 0 || address != own->address ||
            !lies_as_noted(own, noted)) {
            Py_RETURN_TRUE;
        }
        noted += 2 * own->num_dims;
    }
    Py_RETURN_FALSE;
}

/* --- tensors among arguments ------------------------------------------------------------------ */

/* Where some of a call's arguments were. It keeps none of them alive: an argument counts only if
 * its Python object leads to the very tensor that was noted, which the caller keeps alive. */
typedef struct {
    Py_ssize_t num, offset; /* of the tensor's handle in each Python object */
    Py_ssize_t *positions;
    PyTypeObject **types; /* owned */
    void **tensors, **addresses;
    GetDataPtr get_data_ptr;
} Places;

static const char PLACES[] = "compile_backend.Places";

static void free_places(Places *places)
{
    for (Py_ssize_t i = 0; places->types != NULL && i < places->num; i++) {
        Py_XDECREF(places->types[i]);
    }
    PyMem_Free(places->positions);
    PyMem_Free(places->types);
    PyMem_Free(places->tensors);
    PyMem_Free(places->addresses);
    PyMem_Free(places);
}

static void free_places_of(PyObject *capsule)
{
    free_places(PyCapsule_GetPointer(capsule, PLACES));
}

static inline void *handle_in(PyObject *object, Py_ssize_t offset)
{
    return (char *)object + offset;
}

/* Where a Python object holds its tensor; -1 if nowhere that is known. */
static Py_ssize_t offset_of(PyObject *object, void *tensor)
{
    Py_ssize_t end = Py_TYPE(object)->tp_basicsize - (Py_ssize_t)sizeof(void *);
    for (Py_ssize_t offset = sizeof(PyObject); offset <= end; offset += sizeof(void *)) {
        if (*(void **)handle_in(object, offset) == tensor) {
            return offset;
        }
    }
    return -1;
}

static int is_at(const Places *places, Py_ssize_t i, PyObject *object)
{
    void *handle = handle_in(object, places->offset), *address = NULL;
    return Py_TYPE(object) == places->types[i] && *(void **)handle == places->tensors[i] &&
           places->get_data_ptr(handle, &address) == 0 && address == places->addresses[i];
}

static int note_place(Places *places, PyObject *object, PyObject *tensor, PyObject *address)
{
    Py_ssize_t i = places->num;
    places->types[i] = (PyTypeObject *)Py_NewRef(Py_TYPE(object));
    places->num++;
    places->tensors[i] = PyLong_AsVoidPtr(tensor);
    places->addresses[i] = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred() || places->tensors[i] == NULL) {
        return 0;
    }
    Py_ssize_t offset = offset_of(object, places->tensors[i]);
    if (i == 0) {
        places->offset = offset;
    }
    return offset >= 0 && offset == places->offset && is_at(places, i, object);
}

/* places_of(args, positions, tensors, addresses, get_data_ptr) -> Places | None
 *
 * The third are addresses of the tensors in C++, the fourth those of their data, the last that of
 * the function that tells it.
 */
static PyObject *places_of(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5 || !PyTuple_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
        !PyList_CheckExact(args[2]) || !PyList_CheckExact(args[3]) ||
        PyList_GET_SIZE(args[1]) != PyList_GET_SIZE(args[2]) ||
        PyList_GET_SIZE(args[1]) != PyList_GET_SIZE(args[3])) {
        Py_RETURN_NONE;
    }
    Py_ssize_t num = PyList_GET_SIZE(args[1]);
    Places *made = PyMem_Calloc(1, sizeof(Places));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    made->positions = PyMem_Calloc(num + 1, sizeof(Py_ssize_t));
    made->types = PyMem_Calloc(num + 1, sizeof(PyTypeObject *));
    made->tensors = PyMem_Calloc(num + 1, sizeof(void *));
    made->addresses = PyMem_Calloc(num + 1, sizeof(void *));
    made->get_data_ptr = (GetDataPtr)PyLong_AsVoidPtr(args[4]);
    int is_good = made->positions && made->types && made->tensors && made->addresses &&
                  made->get_data_ptr && !PyErr_Occurred();
    for (Py_ssize_t i = 0; is_good && i < num; i++) {
        Py_ssize_t position = PyLong_AsSsize_t(PyList_GET_ITEM(args[1], i));
        is_good = position >= 0 && position < PyTuple_GET_SIZE(args[0]);
        if (is_good) {
            made->positions[i] = position;
            is_good = note_place(made, PyTuple_GET_ITEM(args[0], position),
                                 PyList_GET_ITEM(args[2], i), PyList_GET_ITEM(args[3], i));
        }
    }
    if (!is_good) {
        PyErr_Clear();
        free_places(made);
        Py_RETURN_NONE;
    }
    return PyCapsule_New(made, PLACES, free_places_of);
}

/* are_in_place(Places, args) -> whether the arguments are those tensors, where they were */
static PyObject *are_in_place(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Places *places = num_args == 2 ? PyCapsule_GetPointer(args[0], PLACES) : NULL;
    if (places == NULL) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (!PyTuple_CheckExact(args[1])) {
        Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < places->num; i++) {
        if (places->positions[i] >= PyTuple_GET_SIZE(args[1]) ||
            !is_at(places, i, PyTuple_GET_ITEM(args[1], places->positions[i]))) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

/* --- replays ------------------------------------------------------------------------------ */

/* Functions of torch's stable C interface again, and of the CUDA driver. */
typedef int32_t (*CurrentDevice)(int32_t *device);
typedef int32_t (*CurrentStream)(int32_t device, void **stream);
typedef int (*LaunchGraph)(void *exec, void *stream);

typedef struct {
    void *exec;
    int32_t device;
    CurrentDevice current_device;
    CurrentStream current_stream;
    LaunchGraph launch_graph;
} Launch;

static const char LAUNCH[] = "compile_backend.Launch";

static void free_launch_of(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, LAUNCH));
}

/* launch_of(exec, device, current_device, current_stream, launch_graph) -> Launch
 *
 * The executable graph must outlive it. The last three are addresses of functions.
 */
static PyObject *launch_of(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Launch *made = num_args == 5 ? PyMem_Calloc(1, sizeof(Launch)) : NULL;
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    made->exec = PyLong_AsVoidPtr(args[0]);
    made->device = (int32_t)PyLong_AsLong(args[1]);
    made->current_device = (CurrentDevice)PyLong_AsVoidPtr(args[2]);
    made->current_stream = (CurrentStream)PyLong_AsVoidPtr(args[3]);
    made->launch_graph = (LaunchGraph)PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred()) {
        PyMem_Free(made);
        return NULL;
    }
    return PyCapsule_New(made, LAUNCH, free_launch_of);
}

/* launch(Launch) -> whether the graph was launched, on the current stream of its device
 *
 * False on another current device, and for errors, which torch's own replay then raises.
 */
static PyObject *launch(PyObject *self, PyObject *capsule)
{
    Launch *held = PyCapsule_GetPointer(capsule, LAUNCH);
    if (held == NULL) {
        return NULL;
    }
    int32_t device = -1;
    void *stream = NULL;
    if (held->current_device(&device) != 0 || device != held->device ||
        held->current_stream(device, &stream) != 0) {
        Py_RETURN_FALSE;
    }
    int error;
    Py_BEGIN_ALLOW_THREADS; /* it waits while the device's queue is full */
    error = held->launch_graph(held->exec, stream);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(error == 0);
}

/* --- launches of kernels -------------------------------------------------------------------- */

typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            void *stream, void **params, void **extra);

enum { MOST_PARAMS = 64 };

/* A launch with all that it depends on. It keeps no tensor alive. */
typedef struct {
    PyObject *tensors, *addresses; /* tuples: weak references, and where each was */
    PyObject *facts;
    int32_t device;
    CurrentDevice current_device;
    CurrentStream current_stream;
    LaunchKernel launch_kernel;
    void *function;
    unsigned grid[3], num_threads, shared;
    Py_ssize_t num_fresh, num_params;
    uint64_t values[MOST_PARAMS]; /* one for each parameter, whatever its size */
} Kernel;

static const char KERNEL[] = "compile_backend.Kernel";

static void free_kernel(Kernel *kernel)
{
    Py_XDECREF(kernel->tensors);
    Py_XDECREF(kernel->addresses);
    Py_XDECREF(kernel->facts);
    PyMem_Free(kernel);
}

static void free_kernel_of(PyObject *capsule)
{
    free_kernel(PyCapsule_GetPointer(capsule, KERNEL));
}

/* kernel_of((current_device, current_stream, launch_kernel), device, function,
 *           (grid_x, grid_y, grid_z, threads, shared), params, num_fresh, tensors, addresses, facts)
 *     -> Kernel
 *
 * The first are addresses of functions. params are 8 bytes for each parameter, of which the first
 * num_fresh are replaced at every launch.
 */
static PyObject *kernel_of(PyObject *self, PyObject *args)
{
    Kernel *made = PyMem_Calloc(1, sizeof(Kernel));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    Py_buffer params = {0};
    PyObject *functions[3], *function;
    if (!PyArg_ParseTuple(args, "(OOO)iO(IIIII)y*nO!O!O", &functions[0], &functions[1],
                          &functions[2], &made->device, &function, &made->grid[0], &made->grid[1],
                          &made->grid[2], &made->num_threads, &made->shared, &params,
                          &made->num_fresh, &PyTuple_Type, &made->tensors, &PyTuple_Type,
                          &made->addresses, &made->facts)) {
        PyMem_Free(made);
        return NULL;
    }
    Py_INCREF(made->tensors);
    Py_INCREF(made->addresses);
    Py_INCREF(made->facts);
    made->current_device = (CurrentDevice)PyLong_AsVoidPtr(functions[0]);
    made->current_stream = (CurrentStream)PyLong_AsVoidPtr(functions[1]);
    made->launch_kernel = (LaunchKernel)PyLong_AsVoidPtr(functions[2]);
    made->function = PyLong_AsVoidPtr(function);
    made->num_params = params.len / 8;
    int is_good = !PyErr_Occurred() && params.len % 8 == 0 && made->num_params <= MOST_PARAMS &&
                  made->num_fresh >= 0 && made->num_fresh <= made->num_params &&
                  PyTuple_GET_SIZE(made->tensors) == PyTuple_GET_SIZE(made->addresses);
    if (is_good) {
        memcpy(made->values, params.buf, (size_t)params.len);
    }
    PyBuffer_Release(&params);
    if (!is_good) {
        free_kernel(made);
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "these are no parameters of one kernel");
        }
        return NULL;
    }
    return PyCapsule_New(made, KERNEL, free_kernel_of);
}

static PyObject *data_ptr_name;

/* Whether a weak reference is to this very tensor, and that is where it was; -1 for errors. */
static int is_where_it_was(PyObject *reference, PyObject *address, PyObject *tensor)
{
    if (!PyWeakref_CheckRef(reference) || PyWeakref_GetObject(reference) != tensor) {
        return 0;
    }
    PyObject *now = PyObject_CallMethodNoArgs(tensor, data_ptr_name);
    int is_same = now == NULL ? -1 : PyObject_RichCompareBool(now, address, Py_EQ);
    Py_XDECREF(now);
    return is_same;
}

/* repeat_kernel(Kernel, tensors, facts, fresh) -> whether it was launched
 *
 * On the current stream. False for other tensors, facts or another device, and for errors, which
 * the general launch then raises.
 */
static PyObject *repeat_kernel(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Kernel *kernel = num_args == 4 ? PyCapsule_GetPointer(args[0], KERNEL) : NULL;
    if (kernel == NULL) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    Py_ssize_t num = PyTuple_GET_SIZE(kernel->tensors);
    if (!PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[1]) != num ||
        !PyTuple_CheckExact(args[3]) || PyTuple_GET_SIZE(args[3]) != kernel->num_fresh) {
        Py_RETURN_FALSE;
    }
    int is_same = PyObject_RichCompareBool(args[2], kernel->facts, Py_EQ);
    for (Py_ssize_t i = 0; is_same == 1 && i < num; i++) {
        is_same = is_where_it_was(PyTuple_GET_ITEM(kernel->tensors, i),
                                  PyTuple_GET_ITEM(kernel->addresses, i),
                                  PyTuple_GET_ITEM(args[1], i));
    }
    uint64_t values[MOST_PARAMS]; /* of this launch: others may run while it waits */
    void *params[MOST_PARAMS];
    for (Py_ssize_t i = 0; is_same == 1 && i < kernel->num_params; i++) {
        params[i] = &values[i];
        values[i] = kernel->values[i];
        if (i < kernel->num_fresh) {
            PyObject *now =
                PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(args[3], i), data_ptr_name);
            values[i] = now == NULL ? 0 : PyLong_AsUnsignedLongLong(now);
            Py_XDECREF(now);
            is_same = !PyErr_Occurred() && values[i] % 16 == 0;
        }
    }
    int32_t device = -1;
    void *stream = NULL;
    if (is_same != 1 || kernel->current_device(&device) != 0 || device != kernel->device ||
        kernel->current_stream(device, &stream) != 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    const unsigned *grid = kernel->grid;
    LaunchKernel launch_kernel = kernel->launch_kernel;
    void *function = kernel->function;
    unsigned num_threads = kernel->num_threads, shared = kernel->shared;
    unsigned x = grid[0], y = grid[1], z = grid[2];
    int error;
    Py_BEGIN_ALLOW_THREADS; /* it waits while the device's queue is full */
    error = launch_kernel(function, x, y, z, num_threads, 1, 1, shared, stream, params, NULL);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(error == 0);
}

/* --- the module --------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"count_tokens", (PyCFunction)(void (*)(void))count_tokens, METH_FASTCALL, NULL},
    {"all_longer", (PyCFunction)(void (*)(void))all_longer, METH_FASTCALL, NULL},
    {"lengths", (PyCFunction)(void (*)(void))lengths, METH_FASTCALL, NULL},
    {"put_inputs", (PyCFunction)(void (*)(void))put_inputs, METH_FASTCALL, NULL},
    {"fill_attention", (PyCFunction)(void (*)(void))fill_attention, METH_FASTCALL, NULL},
    {"event_of", (PyCFunction)(void (*)(void))event_of, METH_FASTCALL, NULL},
    {"plain_key", (PyCFunction)(void (*)(void))plain_key, METH_FASTCALL, NULL},
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL, NULL},
    {"watch", (PyCFunction)(void (*)(void))watch, METH_FASTCALL, NULL},
    {"have_moved", have_moved, METH_O, NULL},
    {"places_of", (PyCFunction)(void (*)(void))places_of, METH_FASTCALL, NULL},
    {"are_in_place", (PyCFunction)(void (*)(void))are_in_place, METH_FASTCALL, NULL},
    {"launch_of", (PyCFunction)(void (*)(void))launch_of, METH_FASTCALL, NULL},
    {"launch", launch, METH_O, NULL},
    {"kernel_of", kernel_of, METH_VARARGS, NULL},
    {"repeat_kernel", (PyCFunction)(void (*)(void))repeat_kernel, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shortcuts", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__shortcuts(void)
{
    import_array();
    held_name = PyUnicode_InternFromString("held");
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    int has_names = held_name != NULL && data_ptr_name != NULL;
    for (int i = 0; i < NUM_OF_BATCH; i++) {
        has_names &= (batch_names[i] = PyUnicode_InternFromString(OF_BATCH[i])) != NULL;
    }
    for (int i = 0; i < NUM_OF_ATTENTION; i++) {
        has_names &= (attention_names[i] = PyUnicode_InternFromString(OF_ATTENTION[i])) != NULL;
    }
    if (!has_names) {
        return NULL;
    }
#if PY_VERSION_HEX >= 0x030C0000
    dict_watcher = PyDict_AddWatcher(count_change);
    PyErr_Clear(); /* all watchers are taken: then dicts are looked at in every step */
#endif
    return PyModule_Create(&definition);
}
