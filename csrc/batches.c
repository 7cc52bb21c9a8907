/* Arrays of integers: a step's batch is counted, and written to where the step reads it. */

#include "shortcuts.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>

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

int count(PyObject *query_lens, long query_len, int64_t *num_tokens, int *is_uniform)
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

int are_longer(PyObject *seq_lens, PyObject *query_lens)
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

/* The rows of a value, `size` of them in dimension `axis`, and behind them the padding. Numbers of
 * the value are below `limit` and from 0 on; without one, which is negative, all are good.
 */
static int put(PyObject *held_object, long axis, PyObject *value_object, npy_intp size, int64_t pad,
               int64_t limit)
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
    if (limit >= 0) {
        low = 0;
        end = limit < end ? limit : end;
    }
    if (!copy_row(PyArray_BYTES(value), from_size, from_size, PyArray_BYTES(held), itemsize,
                  num_own, low, end)) {
        return 0; /* also for the largest int64, which an exclusive end leaves out */
    }
    fill_row(PyArray_BYTES(held) + num_own * itemsize, itemsize, num_all - num_own, pad);
    return 1;
}

/* A size that changes: of tokens, of requests, or one more than these. */
static inline npy_intp size_of(long dim, Py_ssize_t num_tokens, Py_ssize_t num_reqs)
{
    return dim == 0 ? num_tokens : num_reqs + (dim == 2);
}

Py_ssize_t put_rows(PyObject *rows, Py_ssize_t num_rows, PyObject *values, Py_ssize_t num_tokens,
                    Py_ssize_t num_reqs)
{
    Py_ssize_t done = 0;
    for (; done < num_rows && done < PyTuple_GET_SIZE(rows); done++) {
        PyObject *row = PyTuple_GET_ITEM(rows, done);
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 6) {
            break;
        }
        long axis = PyLong_AsLong(PyTuple_GET_ITEM(row, 2));
        long changes_with = PyLong_AsLong(PyTuple_GET_ITEM(row, 3));
        long long pad = PyLong_AsLongLong(PyTuple_GET_ITEM(row, 4));
        long indexes = PyLong_AsLong(PyTuple_GET_ITEM(row, 5));
        /* Last: it is borrowed, and numbers of other classes run Python. */
        PyObject *value = PyDict_GetItemWithError(values, PyTuple_GET_ITEM(row, 0));
        npy_intp size = size_of(changes_with, num_tokens, num_reqs);
        npy_intp limit = indexes < 0 ? -1 : size_of(indexes, num_tokens, num_reqs);
        if (PyErr_Occurred() || value == NULL ||
            !put(PyTuple_GET_ITEM(row, 1), axis, value, size, pad, limit)) {
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

/* A loop of steps finds the caller's table and the held one cold, each row at another place: rows
 * are asked for this many before their turn, so that they come while others are copied.
 */
#define ROWS_AHEAD 16
#define CACHE_LINE 64

static inline void expect(const char *from, const int32_t *to, int64_t num_bytes)
{
    for (int64_t byte = 0; byte < num_bytes; byte += CACHE_LINE) {
        __builtin_prefetch(from + byte);
        __builtin_prefetch((const char *)to + byte, 1);
    }
}

int fill(PyObject *const *batch, PyObject *const *held, int is_refill)
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
    int32_t *rows = PyArray_DATA(held_table);
    int64_t *slot = PyArray_DATA(held_slots);
    int query_size = (int)PyArray_ITEMSIZE(queries), seq_size = (int)PyArray_ITEMSIZE(seqs);
    int table_size = (int)PyArray_ITEMSIZE(table);
    npy_intp table_stride = PyArray_STRIDE(table, 1);
    int is_dense = table_size == 4 && table_stride == 4 && num_blocks <= INT32_MAX;
    int64_t num_tokens = 0;
    for (npy_intp r = -ROWS_AHEAD; r < num_reqs; r++) {
        npy_intp ahead = r + ROWS_AHEAD;
        if (ahead < num_reqs) {
            int64_t num = at(PyArray_GETPTR1(seqs, ahead), seq_size) / block_size + 1;
            expect(PyArray_GETPTR2(table, ahead, 0), rows + ahead * columns,
                   (num < width ? num : width) * table_size);
        }
        if (r < 0) {
            continue;
        }
        int32_t *row = rows + r * columns;
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
        fill_row((char *)(rows + num_reqs * columns), 4, (num_rows - num_reqs) * columns, 0);
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

Py_ssize_t num_requests(PyObject *query_lens)
{
    return PyArray_DIM((PyArrayObject *)query_lens, 0);
}

PyMethodDef batch_methods[] = {
    {"count_tokens", (PyCFunction)(void (*)(void))count_tokens, METH_FASTCALL, NULL},
    {"all_longer", (PyCFunction)(void (*)(void))all_longer, METH_FASTCALL, NULL},
    {"lengths", (PyCFunction)(void (*)(void))lengths, METH_FASTCALL, NULL},
    {"put_inputs", (PyCFunction)(void (*)(void))put_inputs, METH_FASTCALL, NULL},
    {"fill_attention", (PyCFunction)(void (*)(void))fill_attention, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int begin_batches(void)
{
    import_array1(0);
    return 1;
}
