/* Where tensors are: those of a model's tables, and those among the arguments of a call. */

#include "shortcuts.h"

typedef int32_t (*DeleteTensor)(void *tensor);

/* So many sizes and strides lie in a tensor itself, at places that stay; torch allocates memory
 * for more, which may be gone later. */
enum { MOST_DIMS = 5 };

/* Where a tensor and its storage are in C++: asked for ahead, since they lie all over memory and
 * looking at hundreds of them would wait for each. What is there may be gone. */
typedef struct {
    const void *tensor, *storage;
} Cold;

enum { AHEAD = 8, TENSOR_BYTES = 128, LINE_BYTES = 64 };

static inline void ask_for(const Cold *cold)
{
    for (size_t at = 0; at <= TENSOR_BYTES; at += LINE_BYTES) {
        __builtin_prefetch((const char *)cold->tensor + at);
    }
    __builtin_prefetch(cold->storage);
}

/* A tensor with an address: where it was, and where it has its sizes and strides itself. */
typedef struct {
    void *tensor, *address; /* the first is torch's handle */
    const int64_t *sizes, *strides;
    Py_ssize_t num_dims;
    Cold cold;
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
static Py_ssize_t note_own(Watch *watch, void *tensor, void *address, const void *storage,
                           int64_t *noted)
{
    Own *own = &watch->own[watch->num_own];
    int64_t num_dims = 0, *sizes = NULL, *strides = NULL;
    if (watch->get_dim(tensor, &num_dims) != 0 || num_dims < 0 || num_dims > MOST_DIMS ||
        watch->get_sizes(tensor, &sizes) != 0 || watch->get_strides(tensor, &strides) != 0) {
        return -1;
    }
    Cold cold = {*(void **)tensor, storage};
    *own = (Own){tensor, address, sizes, strides, (Py_ssize_t)num_dims, cold};
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

/* Whether the first arguments are lists of one length. */
static int are_lists(PyObject *const *args, int num_lists)
{
    for (int i = 0; i < num_lists; i++) {
        if (!PyList_CheckExact(args[i]) ||
            PyList_GET_SIZE(args[i]) != PyList_GET_SIZE(args[0])) {
            return 0;
        }
    }
    return 1;
}

/* Remember one tensor, at the address that Python found; false if the handle tells another.
 *
 * Its sizes and strides go to `*noted`, which moves on.
 */
static int watch_one(Watch *watch, Py_ssize_t i, PyObject *address, PyObject *storage,
                     int64_t **noted)
{
    PyObject *table = PyList_GET_ITEM(watch->tables, i);
    if (!PyDict_Check(table)) {
        return 0;
    }
    void *known = address == Py_None ? NULL : PyLong_AsVoidPtr(address);
    const void *cold = PyLong_AsVoidPtr(storage);
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
    Py_ssize_t num = note_own(watch, watch->tensors[i], known, cold, *noted);
    *noted += num < 0 ? 0 : num;
    return num >= 0;
}

/* watch(tables, names, handles, addresses, storages, get_data_ptr, get_dim, get_sizes,
 *       get_strides, delete_tensor) -> Watch | None
 *
 * Takes the handles over. The fifth are addresses of the tensors' storages in C++, the last five
 * those of the functions.
 */
static PyObject *watch(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 10 || !are_lists(args, 5)) {
        Py_RETURN_NONE;
    }
    Py_ssize_t num = PyList_GET_SIZE(args[0]);
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
    made->get_data_ptr = (GetDataPtr)PyLong_AsVoidPtr(args[5]);
    made->get_dim = (GetDim)PyLong_AsVoidPtr(args[6]);
    made->get_sizes = (GetNumbers)PyLong_AsVoidPtr(args[7]);
    made->get_strides = (GetNumbers)PyLong_AsVoidPtr(args[8]);
    made->delete_tensor = (DeleteTensor)PyLong_AsVoidPtr(args[9]);
    made->num_changes = num_dict_changes;
    int64_t *noted = made->noted;
    int is_good = made->objects && made->tensors && made->table_sizes && made->own && noted &&
                  !PyErr_Occurred();
    for (Py_ssize_t i = 0; is_good && i < num; i++) { /* all of them, to be freed with the rest */
        PyObject *capsule = PyList_GET_ITEM(args[2], i);
        made->tensors[i] = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, NULL);
    }
    for (Py_ssize_t i = 0; is_good && i < num; i++) {
        is_good = watch_one(made, i, PyList_GET_ITEM(args[3], i), PyList_GET_ITEM(args[4], i),
                            &noted);
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
        if (i + AHEAD < watch->num_own) {
            __builtin_prefetch(own[AHEAD].tensor);
            ask_for(&own[AHEAD].cold);
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
    void **addresses;
    Cold *tensors; /* each the very tensor */
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

Py_ssize_t offset_of(PyObject *object, void *tensor)
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
    return Py_TYPE(object) == places->types[i] && *(void **)handle == places->tensors[i].tensor &&
           places->get_data_ptr(handle, &address) == 0 && address == places->addresses[i];
}

static int note_place(Places *places, PyObject *object, PyObject *tensor, PyObject *address,
                      PyObject *storage)
{
    Py_ssize_t i = places->num;
    places->types[i] = (PyTypeObject *)Py_NewRef(Py_TYPE(object));
    places->num++;
    void *noted = PyLong_AsVoidPtr(tensor);
    places->tensors[i] = (Cold){noted, PyLong_AsVoidPtr(storage)};
    places->addresses[i] = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred() || noted == NULL) {
        return 0;
    }
    Py_ssize_t offset = offset_of(object, noted);
    if (i == 0) {
        places->offset = offset;
    }
    return offset >= 0 && offset == places->offset && is_at(places, i, object);
}

/* places_of(positions, tensors, addresses, storages, args, get_data_ptr) -> Places | None
 *
 * The second are addresses of the tensors in C++, the third those of their data, the fourth those
 * of their storages in C++, the last that of the function that tells where data is.
 */
static PyObject *places_of(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 6 || !are_lists(args, 4) || !PyTuple_CheckExact(args[4])) {
        Py_RETURN_NONE;
    }
    Py_ssize_t num = PyList_GET_SIZE(args[0]);
    Places *made = PyMem_Calloc(1, sizeof(Places));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    made->positions = PyMem_Calloc(num + 1, sizeof(Py_ssize_t));
    made->types = PyMem_Calloc(num + 1, sizeof(PyTypeObject *));
    made->tensors = PyMem_Calloc(num + 1, sizeof(Cold));
    made->addresses = PyMem_Calloc(num + 1, sizeof(void *));
    made->get_data_ptr = (GetDataPtr)PyLong_AsVoidPtr(args[5]);
    int is_good = made->positions && made->types && made->tensors && made->addresses &&
                  made->get_data_ptr && !PyErr_Occurred();
    for (Py_ssize_t i = 0; is_good && i < num; i++) {
        Py_ssize_t position = PyLong_AsSsize_t(PyList_GET_ITEM(args[0], i));
        is_good = position >= 0 && position < PyTuple_GET_SIZE(args[4]);
        if (is_good) {
            made->positions[i] = position;
            is_good = note_place(made, PyTuple_GET_ITEM(args[4], position),
                                 PyList_GET_ITEM(args[1], i), PyList_GET_ITEM(args[2], i),
                                 PyList_GET_ITEM(args[3], i));
        }
    }
    if (!is_good) {
        PyErr_Clear();
        free_places(made);
        Py_RETURN_NONE;
    }
    return PyCapsule_New(made, PLACES, free_places_of);
}

int args_in_place(PyObject *capsule, PyObject *args)
{
    Places *places = PyCapsule_GetPointer(capsule, PLACES);
    if (places == NULL) {
        PyErr_Clear();
        return 0;
    }
    for (Py_ssize_t i = 0; i < places->num; i++) {
        if (i + AHEAD < places->num) {
            ask_for(&places->tensors[i + AHEAD]);
        }
        if (places->positions[i] >= PyTuple_GET_SIZE(args) ||
            !is_at(places, i, PyTuple_GET_ITEM(args, places->positions[i]))) {
            return 0;
        }
    }
    return 1;
}

/* are_in_place(Places, args) -> whether the arguments are those tensors, where they were */
static PyObject *are_in_place(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    return PyBool_FromLong(num_args == 2 && PyTuple_CheckExact(args[1]) &&
                           args_in_place(args[0], args[1]));
}

PyMethodDef tensor_methods[] = {
    {"watch", (PyCFunction)(void (*)(void))watch, METH_FASTCALL, NULL},
    {"have_moved", have_moved, METH_O, NULL},
    {"places_of", (PyCFunction)(void (*)(void))places_of, METH_FASTCALL, NULL},
    {"are_in_place", (PyCFunction)(void (*)(void))are_in_place, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int begin_tensors(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    dict_watcher = PyDict_AddWatcher(count_change);
    PyErr_Clear(); /* all watchers are taken: then dicts are looked at in every step */
#endif
    return 1;
}
