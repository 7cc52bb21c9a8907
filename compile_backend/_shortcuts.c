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

/* count_tokens(query_lens, query_len) -> (number of tokens, whether all have query_len) | None */
static PyObject *count_tokens(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    PyArrayObject *lens = num_args == 2 ? integers(args[0], 1) : NULL;
    npy_intp num_reqs = lens == NULL ? 0 : PyArray_DIM(lens, 0);
    if (num_reqs == 0) {
        Py_RETURN_NONE;
    }
    long query_len = PyLong_AsLong(args[1]);
    if (query_len == -1 && PyErr_Occurred()) {
        return NULL;
    }
    const char *place = PyArray_BYTES(lens);
    npy_intp stride = PyArray_STRIDE(lens, 0);
    int itemsize = (int)PyArray_ITEMSIZE(lens);
    int64_t num_tokens = 0;
    int is_uniform = 1;
    for (npy_intp r = 0; r < num_reqs; r++, place += stride) {
        int64_t len = at(place, itemsize);
        if (len < 1 || len > INT32_MAX) {
            Py_RETURN_NONE;
        }
        num_tokens += len;
        is_uniform &= len == query_len;
    }
    return Py_BuildValue("LO", (long long)num_tokens, is_uniform ? Py_True : Py_False);
}

/* all_longer(seq_lens, query_lens) -> whether each is | None */
static PyObject *all_longer(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    PyArrayObject *seqs = num_args == 2 ? integers(args[0], 1) : NULL;
    PyArrayObject *queries = num_args == 2 ? integers(args[1], 1) : NULL;
    if (seqs == NULL || queries == NULL || PyArray_DIM(seqs, 0) != PyArray_DIM(queries, 0)) {
        Py_RETURN_NONE;
    }
    int seq_size = (int)PyArray_ITEMSIZE(seqs), query_size = (int)PyArray_ITEMSIZE(queries);
    for (npy_intp r = 0; r < PyArray_DIM(seqs, 0); r++) {
        if (at(PyArray_GETPTR1(seqs, r), seq_size) <= at(PyArray_GETPTR1(queries, r), query_size)) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
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

/* put_inputs(rows, num_rows, values, num_tokens, num_reqs) -> how many of the rows were put
 *
 * A row is (name, target, axis, whether it changes with tokens (0), requests (1) or requests + 1
 * (2), pad); values are a dict. It stops at the first value that is not plain.
 */
static PyObject *put_inputs(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5 || !PyTuple_CheckExact(args[0]) || !PyDict_CheckExact(args[2])) {
        return PyLong_FromLong(0);
    }
    Py_ssize_t num_rows = PyLong_AsSsize_t(args[1]), done = 0;
    Py_ssize_t num_tokens = PyLong_AsSsize_t(args[3]), num_reqs = PyLong_AsSsize_t(args[4]);
    for (; !PyErr_Occurred() && done < num_rows && done < PyTuple_GET_SIZE(args[0]); done++) {
        PyObject *row = PyTuple_GET_ITEM(args[0], done);
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 5) {
            break;
        }
        PyObject *value = PyDict_GetItemWithError(args[2], PyTuple_GET_ITEM(row, 0));
        long axis = PyLong_AsLong(PyTuple_GET_ITEM(row, 2));
        long changes_with = PyLong_AsLong(PyTuple_GET_ITEM(row, 3));
        long long pad = PyLong_AsLongLong(PyTuple_GET_ITEM(row, 4));
        npy_intp size = changes_with == 0 ? num_tokens : num_reqs + (changes_with == 2);
        if (PyErr_Occurred() || value == NULL ||
            !put(PyTuple_GET_ITEM(row, 1), axis, value, size, pad)) {
            break;
        }
    }
    PyErr_Clear();
    return PyLong_FromSsize_t(done);
}

/* The slots of a request's new tokens: where its row of the block table puts them. */
static void put_slots(int64_t *slots, const int32_t *row, int64_t first, int64_t num,
                      int64_t block_size)
{
    int64_t block = first / block_size, offset = first % block_size;
    for (int64_t i = 0; i < num; i++) {
        slots[i] = row[block] * block_size + offset;
        if (++offset == block_size) {
            block++;
            offset = 0;
        }
    }
}

/* fill_attention(query_lens, seq_lens, block_table, slot_mapping | None, starts, held_lens,
 *                held_table, held_slots, max_model_len, num_blocks, block_size, is_refill)
 *     -> whether it was done
 *
 * What AttentionMetadataBuilder.fill does. It may have written a part when it declines. With
 * is_refill the held table has valid blocks all over, which may stay where nobody looks.
 */
static PyObject *fill_attention(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 12) {
        Py_RETURN_FALSE;
    }
    PyArrayObject *queries = integers(args[0], 1), *seqs = integers(args[1], 1);
    PyArrayObject *table = integers(args[2], 2);
    PyArrayObject *slots = args[3] == Py_None ? NULL : integers(args[3], 1);
    PyArrayObject *starts = target(args[4], 1, 4), *held_lens = target(args[5], 1, 4);
    PyArrayObject *held_table = target(args[6], 2, 4), *held_slots = target(args[7], 1, 8);
    if (!queries || !seqs || !table || (args[3] != Py_None && !slots) || !starts || !held_lens ||
        !held_table || !held_slots) {
        Py_RETURN_FALSE;
    }
    int64_t max_model_len = PyLong_AsLongLong(args[8]), num_blocks = PyLong_AsLongLong(args[9]);
    int64_t block_size = PyLong_AsLongLong(args[10]);
    int is_refill = PyObject_IsTrue(args[11]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    npy_intp num_reqs = PyArray_DIM(queries, 0), num_rows = PyArray_DIM(held_lens, 0);
    npy_intp columns = PyArray_DIM(held_table, 1), most_tokens = PyArray_DIM(held_slots, 0);
    npy_intp width = PyArray_DIM(table, 1) < columns ? PyArray_DIM(table, 1) : columns;
    if (num_reqs > num_rows || PyArray_DIM(seqs, 0) != num_reqs ||
        PyArray_DIM(table, 0) != num_reqs || PyArray_DIM(starts, 0) != num_rows + 1 ||
        PyArray_DIM(held_table, 0) != num_rows || block_size < 1) {
        Py_RETURN_FALSE;
    }
    int32_t *start = PyArray_DATA(starts), *len = PyArray_DATA(held_lens);
    int32_t *row = PyArray_DATA(held_table);
    int64_t *slot = PyArray_DATA(held_slots);
    int query_size = (int)PyArray_ITEMSIZE(queries), seq_size = (int)PyArray_ITEMSIZE(seqs);
    int table_size = (int)PyArray_ITEMSIZE(table);
    int64_t num_tokens = 0;
    for (npy_intp r = 0; r < num_reqs; r++, row += columns) {
        int64_t query_len = at(PyArray_GETPTR1(queries, r), query_size);
        int64_t seq_len = at(PyArray_GETPTR1(seqs, r), seq_size);
        if (query_len < 0 || seq_len < query_len || seq_len > max_model_len ||
            (seq_len + block_size - 1) / block_size > width ||
            num_tokens + query_len > most_tokens) {
            Py_RETURN_FALSE;
        }
        if (!copy_row(PyArray_GETPTR2(table, r, 0), table_size, PyArray_STRIDE(table, 1),
                      (char *)row, 4, width, 0, num_blocks)) {
            Py_RETURN_FALSE;
        }
        if (!is_refill) {
            fill_row((char *)(row + width), 4, columns - width, 0);
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
        Py_RETURN_FALSE;
    }
    fill_row((char *)(start + num_reqs), 4, num_rows + 1 - num_reqs, num_tokens);
    fill_row((char *)(len + num_reqs), 4, num_rows - num_reqs, 0);
    if (!is_refill) {
        fill_row((char *)row, 4, (num_rows - num_reqs) * columns, 0);
    }
    fill_row((char *)(slot + num_tokens), 8, most_tokens - num_tokens, -1);
    Py_RETURN_TRUE;
}

/* --- addresses of tensors ----------------------------------------------------------------- */

/* Two functions of torch's stable C interface (aoti_torch/c/shim.h), handed over by Python. */
typedef int32_t (*GetDataPtr)(void *tensor, void **address);
typedef int32_t (*DeleteTensor)(void *tensor);

/* Tensors in dicts, each at an address. */
typedef struct {
    Py_ssize_t num;
    PyObject *tables, *names; /* lists of dicts and of their keys */
    PyObject **objects;       /* what the dicts held; only compared, never used */
    void **tensors;           /* torch's handles of the same, which see new memory of a tensor;
                                 NULL for a tensor without an address of its own */
    void **addresses;
    GetDataPtr get_data_ptr;
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
    PyMem_Free(watch->objects);
    PyMem_Free(watch->tensors);
    PyMem_Free(watch->addresses);
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
        if (PyDict_GetItemWithError(table, PyList_GET_ITEM(watch->names, i)) != watch->objects[i]) {
            PyErr_Clear();
            return 0;
        }
    }
    watch->num_changes = num_changes;
    return 1;
}

/* Remember one tensor, at the address that Python found; false if the handle tells another. */
static int watch_one(Watch *watch, Py_ssize_t i, PyObject *address)
{
    PyObject *table = PyList_GET_ITEM(watch->tables, i);
    if (!PyDict_Check(table)) {
        return 0;
    }
    watch->addresses[i] = address == Py_None ? NULL : PyLong_AsVoidPtr(address);
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
    return watch->get_data_ptr(watch->tensors[i], &told) == 0 && told == watch->addresses[i];
}

/* watch(tables, names, handles, addresses, get_data_ptr, delete_tensor) -> Watch | None
 *
 * Takes the handles over. The last two are addresses of the functions.
 */
static PyObject *watch(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 6 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1]) ||
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
    made->addresses = PyMem_Calloc(num + 1, sizeof(void *));
    made->get_data_ptr = (GetDataPtr)PyLong_AsVoidPtr(args[4]);
    made->delete_tensor = (DeleteTensor)PyLong_AsVoidPtr(args[5]);
    made->num_changes = num_dict_changes;
    int is_good = made->objects && made->tensors && made->addresses && !PyErr_Occurred();
    for (Py_ssize_t i = 0; is_good && i < num; i++) { /* all of them, to be freed with the rest */
        PyObject *capsule = PyList_GET_ITEM(args[2], i);
        made->tensors[i] = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, NULL);
    }
    for (Py_ssize_t i = 0; is_good && i < num; i++) {
        is_good = watch_one(made, i, PyList_GET_ITEM(args[3], i));
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
    for (Py_ssize_t i = 0; i < watch->num; i++) {
        if (watch->tensors[i] == NULL) {
            continue;
        }
        if (i + 8 < watch->num && watch->tensors[i + 8] != NULL) {
            __builtin_prefetch(*(void **)watch->tensors[i + 8]); /* the tensor behind the handle */
        }
        void *address = NULL;
        if (watch->get_data_ptr(watch->tensors[i], &address) != 0 ||
            address != watch->addresses[i]) {
            Py_RETURN_TRUE;
        }
    }
    Py_RETURN_FALSE;
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

/* --- the module --------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"count_tokens", (PyCFunction)(void (*)(void))count_tokens, METH_FASTCALL, NULL},
    {"all_longer", (PyCFunction)(void (*)(void))all_longer, METH_FASTCALL, NULL},
    {"put_inputs", (PyCFunction)(void (*)(void))put_inputs, METH_FASTCALL, NULL},
    {"fill_attention", (PyCFunction)(void (*)(void))fill_attention, METH_FASTCALL, NULL},
    {"watch", (PyCFunction)(void (*)(void))watch, METH_FASTCALL, NULL},
    {"have_moved", have_moved, METH_O, NULL},
    {"launch_of", (PyCFunction)(void (*)(void))launch_of, METH_FASTCALL, NULL},
    {"launch", launch, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shortcuts", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__shortcuts(void)
{
    import_array();
#if PY_VERSION_HEX >= 0x030C0000
    dict_watcher = PyDict_AddWatcher(count_change);
    PyErr_Clear(); /* all watchers are taken: then dicts are looked at in every step */
#endif
    return PyModule_Create(&definition);
}
