/* Launches on the current stream: graphs, kernels and copies, by the driver's own functions. */

#include "shortcuts.h"

/* --- replays ------------------------------------------------------------------------------ */

/* Functions of torch's stable C interface, and of the CUDA driver. */
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

/* --- copies ---------------------------------------------------------------------------------- */

typedef int (*CopyAsync)(uint64_t target, uint64_t source, size_t num_bytes, void *stream);
typedef int (*RecordEvent)(void *event, void *stream);

/* Copies between addresses that stay, and an event behind them; NULL for none. */
typedef struct {
    Py_ssize_t num;
    uint64_t *numbers; /* target, source and bytes of each */
    int32_t device;
    void *event;
    CurrentDevice current_device;
    CurrentStream current_stream;
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
    made->device = (int32_t)PyLong_AsLong(args[1]);
    made->event = PyLong_AsVoidPtr(args[2]);
    made->current_device = (CurrentDevice)PyLong_AsVoidPtr(args[3]);
    made->current_stream = (CurrentStream)PyLong_AsVoidPtr(args[4]);
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
    int32_t device = -1;
    void *stream = NULL;
    if (held->current_device(&device) != 0 || device != held->device ||
        held->current_stream(device, &stream) != 0) {
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

/* --- copies of arguments ----------------------------------------------------------------------- */

typedef int32_t (*GetDtype)(void *tensor, int32_t *dtype);

enum { MOST_INPUTS = 16, MOST_INPUT_DIMS = 5 };

/* An argument: where its copy lies, and what its tensor must be. */
typedef struct {
    Py_ssize_t position;
    uint64_t target;
    size_t num_bytes;
    int32_t dtype;
    int64_t num_dims, sizes[MOST_INPUT_DIMS], strides[MOST_INPUT_DIMS];
} Input;

/* Some of a call's arguments, each to be copied to an address that stays. */
typedef struct {
    Py_ssize_t num, offset; /* of the tensor's handle in each Python object */
    PyTypeObject *type;     /* of all of them, owned */
    Input inputs[MOST_INPUTS];
    int32_t device;
    CurrentDevice current_device;
    CurrentStream current_stream;
    CopyAsync copy;
    GetDataPtr get_data_ptr;
    GetDim get_dim;
    GetNumbers get_sizes, get_strides;
    GetDtype get_dtype;
} Inputs;

static const char INPUTS[] = "compile_backend.Inputs";

static void free_inputs_of(PyObject *capsule)
{
    Inputs *inputs = PyCapsule_GetPointer(capsule, INPUTS);
    Py_XDECREF(inputs->type);
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

/* inputs_of(args, positions, tensors, targets, bytes, device, functions) -> Inputs | None
 *
 * The third are addresses of the tensors in C++; functions are addresses of current_device,
 * current_stream, copy, get_data_ptr, get_dim, get_sizes, get_strides and get_dtype.
 */
static PyObject *inputs_of(PyObject *self, PyObject *args)
{
    PyObject *given, *lists[4];
    unsigned long long functions[8];
    int device;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!i(KKKKKKKK)", &PyTuple_Type, &given, &PyList_Type,
                          &lists[0], &PyList_Type, &lists[1], &PyList_Type, &lists[2],
                          &PyList_Type, &lists[3], &device, &functions[0], &functions[1],
                          &functions[2], &functions[3], &functions[4], &functions[5],
                          &functions[6], &functions[7])) {
        return NULL;
    }
    Py_ssize_t num = PyList_GET_SIZE(lists[0]);
    for (int i = 1; i < 4; i++) {
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
    made->device = device;
    made->current_device = (CurrentDevice)(uintptr_t)functions[0];
    made->current_stream = (CurrentStream)(uintptr_t)functions[1];
    made->copy = (CopyAsync)(uintptr_t)functions[2];
    made->get_data_ptr = (GetDataPtr)(uintptr_t)functions[3];
    made->get_dim = (GetDim)(uintptr_t)functions[4];
    made->get_sizes = (GetNumbers)(uintptr_t)functions[5];
    made->get_strides = (GetNumbers)(uintptr_t)functions[6];
    made->get_dtype = (GetDtype)(uintptr_t)functions[7];
    int is_good = 1;
    for (Py_ssize_t i = 0; is_good && i < num; i++) {
        Input *input = &made->inputs[i];
        input->position = PyLong_AsSsize_t(PyList_GET_ITEM(lists[0], i));
        void *tensor = PyLong_AsVoidPtr(PyList_GET_ITEM(lists[1], i));
        input->target = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(lists[2], i));
        input->num_bytes = PyLong_AsSize_t(PyList_GET_ITEM(lists[3], i));
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

/* copy_inputs(Inputs, args) -> whether all copies are on their way, as by copy
 *
 * False also if an argument is another kind of tensor than was noted.
 */
static PyObject *copy_inputs(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Inputs *inputs = num_args == 2 ? PyCapsule_GetPointer(args[0], INPUTS) : NULL;
    if (inputs == NULL || !PyTuple_CheckExact(args[1])) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    uint64_t sources[MOST_INPUTS];
    for (Py_ssize_t i = 0; i < inputs->num; i++) {
        const Input *noted = &inputs->inputs[i];
        if (noted->position >= PyTuple_GET_SIZE(args[1])) {
            Py_RETURN_FALSE;
        }
        PyObject *object = PyTuple_GET_ITEM(args[1], noted->position);
        if (Py_TYPE(object) != inputs->type) {
            Py_RETURN_FALSE;
        }
        Input seen;
        void *handle = (char *)object + inputs->offset, *address = NULL;
        if (!look_at(inputs, handle, &seen) || !is_as_noted(noted, &seen) ||
            inputs->get_data_ptr(handle, &address) != 0) {
            Py_RETURN_FALSE;
        }
        sources[i] = (uint64_t)(uintptr_t)address;
    }
    int32_t device = -1;
    void *stream = NULL;
    if (inputs->current_device(&device) != 0 || device != inputs->device ||
        inputs->current_stream(device, &stream) != 0) {
        Py_RETURN_FALSE;
    }
    int error = 0;
    Py_BEGIN_ALLOW_THREADS; /* it waits while the device's queue is full */
    for (Py_ssize_t i = 0; error == 0 && i < inputs->num; i++) {
        const Input *noted = &inputs->inputs[i];
        error = inputs->copy(noted->target, sources[i], noted->num_bytes, stream);
    }
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

PyMethodDef launch_methods[] = {
    {"launch_of", (PyCFunction)(void (*)(void))launch_of, METH_FASTCALL, NULL},
    {"launch", launch, METH_O, NULL},
    {"copies_of", (PyCFunction)(void (*)(void))copies_of, METH_FASTCALL, NULL},
    {"copy", copy, METH_O, NULL},
    {"copy_to", (PyCFunction)(void (*)(void))copy_to, METH_FASTCALL, NULL},
    {"inputs_of", inputs_of, METH_VARARGS, NULL},
    {"copy_inputs", (PyCFunction)(void (*)(void))copy_inputs, METH_FASTCALL, NULL},
    {"kernel_of", kernel_of, METH_VARARGS, NULL},
    {"repeat_kernel", (PyCFunction)(void (*)(void))repeat_kernel, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int begin_launches(void)
{
    return (data_ptr_name = PyUnicode_InternFromString("data_ptr")) != NULL;
}
