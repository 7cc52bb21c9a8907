/* Launches on the current stream, of graphs and of kernels, by the driver's own functions. */

#include "shortcuts.h"

/* --- replays ------------------------------------------------------------------------------ */

/* Of the CUDA driver. */
typedef int (*LaunchGraph)(void *exec, void *stream);
typedef int (*IsCapturing)(void *stream, int *status);

typedef struct {
    void *exec;
    Way way;
    LaunchGraph launch_graph;
    IsCapturing is_capturing;
} Launch;

static const char LAUNCH[] = "compile_backend.Launch";

static void free_launch_of(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, LAUNCH));
}

/* launch_of(exec, device, current_device, current_stream, launch_graph, is_capturing) -> Launch
 *
 * The executable graph must outlive it. The last four are addresses of functions.
 */
static PyObject *launch_of(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 6) {
        PyErr_SetString(PyExc_TypeError, "launch_of takes six numbers");
        return NULL;
    }
    Launch *made = PyMem_Calloc(1, sizeof(Launch));
    if (made == NULL) {
        return PyErr_NoMemory();
    }
    made->exec = PyLong_AsVoidPtr(args[0]);
    made->way = way_to(args[1], args[2], args[3]);
    made->launch_graph = (LaunchGraph)PyLong_AsVoidPtr(args[4]);
    made->is_capturing = (IsCapturing)PyLong_AsVoidPtr(args[5]);
    if (PyErr_Occurred()) {
        PyMem_Free(made);
        return NULL;
    }
    return PyCapsule_New(made, LAUNCH, free_launch_of);
}

static int launch_on(const Launch *held, void *stream)
{
    int error;
    Py_BEGIN_ALLOW_THREADS; /* it waits while the device's queue is full */
    error = held->launch_graph(held->exec, stream);
    Py_END_ALLOW_THREADS;
    return error == 0;
}

/* launch(Launch) -> whether the graph was launched, on the current stream of its device
 *
 * False on another current device, and for errors, which torch's own replay then raises.
 */
static PyObject *launch(PyObject *self, PyObject *capsule)
{
    Launch *held = PyCapsule_GetPointer(capsule, LAUNCH);
    void *stream = NULL;
    if (held == NULL) {
        return NULL;
    }
    return PyBool_FromLong(find_stream(&held->way, &stream) && launch_on(held, stream));
}

/* What replay_call did. */
enum { NOTHING = 0, INPUTS_SENT = 1, LAUNCHED = 2 };

/* replay_call(Places, Inputs | None, Launch, args) -> how much of it was done
 *
 * A call as one replay, if its arguments are as noted: 0 nothing, 1 its inputs are on their way,
 * 2 the graph as well. Nothing if an input lies in memory that the graph writes, or the current
 * stream is being captured.
 */
static PyObject *replay_call(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    int done = NOTHING, status = 1;
    void *stream = NULL;
    if (num_args == 4 && PyTuple_CheckExact(args[3]) && args_in_place(args[0], args[3])) {
        Launch *held = PyCapsule_GetPointer(args[2], LAUNCH);
        if (held != NULL && find_stream(&held->way, &stream) &&
            held->is_capturing(stream, &status) == 0 && status == 0 &&
            (args[1] == Py_None || send_inputs(args[1], args[3], 1))) {
            done = launch_on(held, stream) ? LAUNCHED : INPUTS_SENT;
        }
        PyErr_Clear();
    }
    return PyLong_FromLong(done);
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
    Way way;
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
    PyObject *functions[3], *device, *function;
    if (!PyArg_ParseTuple(args, "(OOO)OO(IIIII)y*nO!O!O", &functions[0], &functions[1],
                          &functions[2], &device, &function, &made->grid[0], &made->grid[1],
                          &made->grid[2], &made->num_threads, &made->shared, &params,
                          &made->num_fresh, &PyTuple_Type, &made->tensors, &PyTuple_Type,
                          &made->addresses, &made->facts)) {
        PyMem_Free(made);
        return NULL;
    }
    Py_INCREF(made->tensors);
    Py_INCREF(made->addresses);
    Py_INCREF(made->facts);
    made->way = way_to(device, functions[0], functions[1]);
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
    void *stream = NULL;
    if (is_same != 1 || !find_stream(&kernel->way, &stream)) {
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
    {"replay_call", (PyCFunction)(void (*)(void))replay_call, METH_FASTCALL, NULL},
    {"kernel_of", kernel_of, METH_VARARGS, NULL},
    {"repeat_kernel", (PyCFunction)(void (*)(void))repeat_kernel, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int begin_launches(void)
{
    return (data_ptr_name = PyUnicode_InternFromString("data_ptr")) != NULL;
}
