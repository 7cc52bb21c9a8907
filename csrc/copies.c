/* Copies on the current stream, by the driver's own functions. */

#include "shortcuts.h"

typedef int (*CopyAsync)(uint64_t target, uint64_t source, size_t num_bytes, void *stream);
typedef int (*RecordEvent)(void *event, void *stream);

/* --- between addresses that stay --------------------------------------------------------------- */

/* Copies between addresses that stay, and an event behind them; NULL for none. */
typedef struct {
    Py_ssize_t num;
    uint64_t *numbers; /* target, source and bytes of each */
    void *event;
    Way way;
    CopyAsync copy;
    RecordEvent record;
} Copies;

static const char COPIES[] = "compile_backend.Copies";

static void free_copies(Copies *copies)
{
    PyMem_Free(copies->numbers);
    PyMem_Free(copies);
}

static void free_copies_of(PyObject *capsule)
{
    free_copies(PyCapsule_GetPointer(capsule, COPIES));
}

/* copies_of(numbers, device, event, current_device, current_stream, copy, record) -> Copies
 *
 * The first are target, source and bytes of each copy, one after the other, in memory that must
 * outlive it, as must the event; 0 for none. The last four are addresses of functions.
 */
static PyObject *copies_of(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 7 || !PyList_CheckExact(args[0]) || PyList_GET_SIZE(args[0]) % 3 != 0) {
        PyErr_SetString(PyExc_TypeError, "copies_of takes a list of threes and six numbers");
        return NULL;
    }
    Copies *made = PyMem_Calloc(1, sizeof(Copies));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    Py_ssize_t num_numbers = PyList_GET_SIZE(args[0]);
    made->num = num_numbers / 3;
    made->numbers = PyMem_Calloc(num_numbers + 1, sizeof(uint64_t));
    if (made->numbers == NULL) {
        free_copies(made);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < num_numbers && !PyErr_Occurred(); i++) {
        made->numbers[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[0], i));
    }
    made->way = way_to(args[1], args[3], args[4]);
    made->event = PyLong_AsVoidPtr(args[2]);
    made->copy = (CopyAsync)PyLong_AsVoidPtr(args[5]);
    made->record = (RecordEvent)PyLong_AsVoidPtr(args[6]);
    if (PyErr_Occurred()) {
        free_copies(made);
        return NULL;
    }
    return PyCapsule_New(made, COPIES, free_copies_of);
}

/* Put the copies on the current stream, the first to another target unless that is 0; false on
 * another current device, and for errors. */
static int put_copies(const Copies *held, uint64_t first_target)
{
    void *stream = NULL;
    if (!find_stream(&held->way, &stream)) {
        return 0;
    }
    int error = 0;
    Py_BEGIN_ALLOW_THREADS; /* it waits while the device's queue is full */
    for (Py_ssize_t i = 0; error == 0 && i < held->num; i++) {
        const uint64_t *numbers = &held->numbers[3 * i];
        uint64_t target = i == 0 && first_target != 0 ? first_target : numbers[0];
        error = held->copy(target, numbers[1], (size_t)numbers[2], stream);
    }
    if (error == 0 && held->event != NULL) {
        error = held->record(held->event, stream);
    }
    Py_END_ALLOW_THREADS;
    return error == 0;
}

/* copy(Copies) -> whether all of it is on its way, on the current stream of its device
 *
 * False on another current device, and for errors, which torch's own copies then raise.
 */
static PyObject *copy(PyObject *self, PyObject *capsule)
{
    Copies *held = PyCapsule_GetPointer(capsule, COPIES);
    return held == NULL ? NULL : PyBool_FromLong(put_copies(held, 0));
}

/* copy_to(Copies, address) -> the same of a single copy, to another target */
static PyObject *copy_to(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Copies *held = num_args == 2 ? PyCapsule_GetPointer(args[0], COPIES) : NULL;
    uint64_t target = held == NULL ? 0 : PyLong_AsUnsignedLongLong(args[1]);
    if (held == NULL || PyErr_Occurred() || held->num != 1 || target == 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    return PyBool_FromLong(put_copies(held, target));
}

/* --- of arguments ------------------------------------------------------------------------------ */

typedef int32_t (*GetDtype)(void *tensor, int32_t *dtype);
typedef int32_t (*GetOffset)(void *tensor, int64_t *num_elements);

enum { MOST_INPUTS = 16, MOST_INPUT_DIMS = 5 };

/* An argument: where its copy lies, and what its tensor must be. */
typedef struct {
    Py_ssize_t position;
    uint64_t target;
    size_t num_bytes, element_bytes;
    int32_t dtype;
    int64_t num_dims, sizes[MOST_INPUT_DIMS], strides[MOST_INPUT_DIMS];
} Input;

/* Some of a call's arguments, each to be copied to an address that stays. */
typedef struct {
    Py_ssize_t num, offset; /* of the tensor's handle in each Python object */
    PyTypeObject *type;     /* of all of them, owned */
    Input inputs[MOST_INPUTS];
    Way way;
    CopyAsync copy;
    GetDataPtr get_data_ptr;
    GetDim get_dim;
    GetNumbers get_sizes, get_strides;
    GetDtype get_dtype;
    GetOffset get_offset;
    Py_ssize_t num_written;
    uint64_t *written; /* where memory starts that the graph writes */
} Inputs;

static const char INPUTS[] = "compile_backend.Inputs";

static void free_inputs_of(PyObject *capsule)
{
    Inputs *inputs = PyCapsule_GetPointer(capsule, INPUTS);
    Py_XDECREF(inputs->type);
    PyMem_Free(inputs->written);
    PyMem_Free(inputs);
}

/* What a tensor is now; false if it cannot be told. */
static int look_at(const Inputs *inputs, void *tensor, Input *seen)
{
    int64_t *sizes = NULL, *strides = NULL;
    if (inputs->get_dtype(tensor, &seen->dtype) != 0 ||
        inputs->get_dim(tensor, &seen->num_dims) != 0 || seen->num_dims < 0 ||
        seen->num_dims > MOST_INPUT_DIMS || inputs->get_sizes(tensor, &sizes) != 0 ||
        inputs->get_strides(tensor, &strides) != 0) {
        return 0;
    }
    memcpy(seen->sizes, sizes, sizeof(int64_t) * (size_t)seen->num_dims);
    memcpy(seen->strides, strides, sizeof(int64_t) * (size_t)seen->num_dims);
    return 1;
}

static int is_as_noted(const Input *noted, const Input *seen)
{
    size_t num = sizeof(int64_t) * (size_t)noted->num_dims;
    return seen->dtype == noted->dtype && seen->num_dims == noted->num_dims &&
           memcmp(seen->sizes, noted->sizes, num) == 0 &&
           memcmp(seen->strides, noted->strides, num) == 0;
}

static int note_written(Inputs *made, PyObject *written)
{
    made->num_written = PyList_GET_SIZE(written);
    made->written = PyMem_Calloc(made->num_written + 1, sizeof(uint64_t));
    for (Py_ssize_t i = 0; made->written != NULL && i < made->num_written; i++) {
        made->written[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(written, i));
    }
    return made->written != NULL && !PyErr_Occurred();
}

/* inputs_of(args, positions, tensors, targets, bytes, element_bytes, written, device, functions)
 *     -> Inputs | None
 *
 * The third are addresses of the tensors in C++; written are those of all memory that the graph
 * writes and that is not copied; functions are addresses of current_device, current_stream, copy,
 * get_data_ptr, get_dim, get_sizes, get_strides, get_dtype and get_storage_offset.
 */
static PyObject *inputs_of(PyObject *self, PyObject *args)
{
    PyObject *given, *lists[5], *written;
    unsigned long long functions[9];
    int device;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!i(KKKKKKKKK)", &PyTuple_Type, &given, &PyList_Type,
                          &lists[0], &PyList_Type, &lists[1], &PyList_Type, &lists[2],
                          &PyList_Type, &lists[3], &PyList_Type, &lists[4], &PyList_Type, &written,
                          &device, &functions[0], &functions[1], &functions[2], &functions[3],
                          &functions[4], &functions[5], &functions[6], &functions[7],
                          &functions[8])) {
        return NULL;
    }
    Py_ssize_t num = PyList_GET_SIZE(lists[0]);
    for (int i = 1; i < 5; i++) {
        if (PyList_GET_SIZE(lists[i]) != num) {
            Py_RETURN_NONE;
        }
    }
    if (num > MOST_INPUTS) {
        Py_RETURN_NONE;
    }
    Inputs *made = PyMem_Calloc(1, sizeof(Inputs));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *capsule = PyCapsule_New(made, INPUTS, free_inputs_of);
    if (capsule == NULL) {
        PyMem_Free(made);
        return NULL;
    }
    made->num = num;
    made->way.device = device;
    made->way.current_device = (CurrentDevice)(uintptr_t)functions[0];
    made->way.current_stream = (CurrentStream)(uintptr_t)functions[1];
    made->copy = (CopyAsync)(uintptr_t)functions[2];
    made->get_data_ptr = (GetDataPtr)(uintptr_t)functions[3];
    made->get_dim = (GetDim)(uintptr_t)functions[4];
    made->get_sizes = (GetNumbers)(uintptr_t)functions[5];
    made->get_strides = (GetNumbers)(uintptr_t)functions[6];
    made->get_dtype = (GetDtype)(uintptr_t)functions[7];
    made->get_offset = (GetOffset)(uintptr_t)functions[8];
    int is_good = note_written(made, written);
    for (Py_ssize_t i = 0; is_good && i < num; i++) {
        Input *input = &made->inputs[i];
        input->position = PyLong_AsSsize_t(PyList_GET_ITEM(lists[0], i));
        void *tensor = PyLong_AsVoidPtr(PyList_GET_ITEM(lists[1], i));
        input->target = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(lists[2], i));
        input->num_bytes = PyLong_AsSize_t(PyList_GET_ITEM(lists[3], i));
        input->element_bytes = PyLong_AsSize_t(PyList_GET_ITEM(lists[4], i));
        is_good = !PyErr_Occurred() && tensor != NULL && input->position >= 0 &&
                  input->position < PyTuple_GET_SIZE(given);
        if (is_good) {
            PyObject *object = PyTuple_GET_ITEM(given, input->position);
            Py_ssize_t offset = offset_of(object, tensor);
            if (i == 0) {
                made->type = (PyTypeObject *)Py_NewRef(Py_TYPE(object));
                made->offset = offset;
            }
            is_good = offset >= 0 && offset == made->offset && Py_TYPE(object) == made->type &&
                      look_at(made, (char *)object + offset, input);
        }
    }
    if (!is_good) {
        PyErr_Clear();
        Py_DECREF(capsule);
        Py_RETURN_NONE;
    }
    return capsule;
}

/* Whether a tensor at an address is in no memory that the graph writes; false if unknown. */
static int is_apart(const Inputs *inputs, const Input *noted, void *handle, uint64_t address)
{
    int64_t offset = 0;
    if (inputs->num_written == 0 || noted->num_bytes == 0) {
        return 1;
    }
    if (inputs->get_offset(handle, &offset) != 0) {
        return 0;
    }
    uint64_t start = address - (uint64_t)offset * noted->element_bytes;
    for (Py_ssize_t i = 0; i < inputs->num_written; i++) {
        if (inputs->written[i] == start) {
            return 0;
        }
    }
    return 1;
}

int send_inputs(PyObject *capsule, PyObject *args, int must_be_apart)
{
    Inputs *inputs = PyCapsule_GetPointer(capsule, INPUTS);
    if (inputs == NULL) {
        PyErr_Clear();
        return 0;
    }
    uint64_t sources[MOST_INPUTS];
    for (Py_ssize_t i = 0; i < inputs->num; i++) {
        const Input *noted = &inputs->inputs[i];
        if (noted->position >= PyTuple_GET_SIZE(args)) {
            return 0;
        }
        PyObject *object = PyTuple_GET_ITEM(args, noted->position);
        if (Py_TYPE(object) != inputs->type) {
            return 0;
        }
        Input seen;
        void *handle = (char *)object + inputs->offset, *address = NULL;
        if (!look_at(inputs, handle, &seen) || !is_as_noted(noted, &seen) ||
            inputs->get_data_ptr(handle, &address) != 0) {
            return 0;
        }
        sources[i] = (uint64_t)(uintptr_t)address;
        if (must_be_apart && !is_apart(inputs, noted, handle, sources[i])) {
            return 0;
        }
    }
    void *stream = NULL;
    if (!find_stream(&inputs->way, &stream)) {
        return 0;
    }
    int error = 0;
    Py_BEGIN_ALLOW_THREADS; /* it waits while the device's queue is full */
    for (Py_ssize_t i = 0; error == 0 && i < inputs->num; i++) {
        const Input *noted = &inputs->inputs[i];
        error = inputs->copy(noted->target, sources[i], noted->num_bytes, stream);
    }
    Py_END_ALLOW_THREADS;
    return error == 0;
}

/* copy_inputs(Inputs, args) -> whether all copies are on their way, as by copy
 *
 * False also if an argument is another kind of tensor than was noted.
 */
static PyObject *copy_inputs(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    return PyBool_FromLong(num_args == 2 && PyTuple_CheckExact(args[1]) &&
                           send_inputs(args[0], args[1], 0));
}

PyMethodDef copy_methods[] = {
    {"copies_of", (PyCFunction)(void (*)(void))copies_of, METH_FASTCALL, NULL},
    {"copy", copy, METH_O, NULL},
    {"copy_to", (PyCFunction)(void (*)(void))copy_to, METH_FASTCALL, NULL},
    {"inputs_of", inputs_of, METH_VARARGS, NULL},
    {"copy_inputs", (PyCFunction)(void (*)(void))copy_inputs, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
