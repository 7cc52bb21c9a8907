/* Steps that are known: a batch is told by its numbers, and brought to the memory of its step. */

#include "shortcuts.h"

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
    plain->num_reqs = num_requests(found[QUERY_LENS]);
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

PyMethodDef step_methods[] = {
    {"event_of", (PyCFunction)(void (*)(void))event_of, METH_FASTCALL, NULL},
    {"plain_key", (PyCFunction)(void (*)(void))plain_key, METH_FASTCALL, NULL},
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int begin_steps(void)
{
    int has_names = (held_name = PyUnicode_InternFromString("held")) != NULL;
    for (int i = 0; i < NUM_OF_BATCH; i++) {
        has_names &= (batch_names[i] = PyUnicode_InternFromString(OF_BATCH[i])) != NULL;
    }
    for (int i = 0; i < NUM_OF_ATTENTION; i++) {
        has_names &= (attention_names[i] = PyUnicode_InternFromString(OF_ATTENTION[i])) != NULL;
    }
    return has_names;
}
