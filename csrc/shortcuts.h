/* What the files of compile_backend._shortcuts share: each one's functions, and how it begins.
 *
 * Every function handles the plain case and declines all others, errors included, by returning
 * None or False: the general code then does the work from the start, and says what is wrong.
 * Nothing here knows models, graphs or devices. See compile_backend/shortcuts.py.
 */

#ifndef SHORTCUTS_H
#define SHORTCUTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

extern PyMethodDef batch_methods[], step_methods[], tensor_methods[], launch_methods[],
    copy_methods[];

/* Each returns false with an error. */
int begin_batches(void);
int begin_steps(void);
int begin_tensors(void);
int begin_launches(void);

/* --- what steps.c uses of batches.c --- */

/* The tokens of a batch, and whether all requests have query_len; false if it is not plain. */
int count(PyObject *query_lens, long query_len, int64_t *num_tokens, int *is_uniform);

/* Requests of a batch that was counted. */
Py_ssize_t num_requests(PyObject *query_lens);

/* Whether every request is longer than what a step adds; -1 if they are not plain. */
int are_longer(PyObject *seq_lens, PyObject *query_lens);

/* Put the values of the first rows; how many were put, up to the first that is not plain.
 *
 * A row is (name, target, axis, whether it changes with tokens (0), requests (1) or requests + 1
 * (2), pad).
 */
Py_ssize_t put_rows(PyObject *rows, Py_ssize_t num_rows, PyObject *values, Py_ssize_t num_tokens,
                    Py_ssize_t num_reqs);

/* What AttentionMetadataBuilder.fill does: whether it was done, in part if not.
 *
 * The batch is (query_lens, seq_lens, block_table, slot_mapping | None); held are (starts,
 * held_lens, held_table, held_slots, max_model_len, num_blocks, block_size). With is_refill the
 * held table has valid blocks all over, which may stay where nobody looks.
 */
int fill(PyObject *const *batch, PyObject *const *held, int is_refill);

/* --- what launches.c, copies.c and tensors.c use --- */

/* Functions of torch's stable C interface (aoti_torch/c/shim.h), handed over by Python. */
typedef int32_t (*CurrentDevice)(int32_t *device);
typedef int32_t (*CurrentStream)(int32_t device, void **stream);
typedef int32_t (*GetDataPtr)(void *tensor, void **address);
typedef int32_t (*GetDim)(void *tensor, int64_t *num_dims);
typedef int32_t (*GetNumbers)(void *tensor, int64_t **numbers);

/* A device, and what tells whether it is current, and its stream. */
typedef struct {
    int32_t device;
    CurrentDevice current_device;
    CurrentStream current_stream;
} Way;

/* The way to a device, of a number and the addresses of two functions; PyErr_Occurred if not. */
static inline Way way_to(PyObject *device, PyObject *current_device, PyObject *current_stream)
{
    return (Way){(int32_t)PyLong_AsLong(device),
                 (CurrentDevice)PyLong_AsVoidPtr(current_device),
                 (CurrentStream)PyLong_AsVoidPtr(current_stream)};
}

/* The current stream; false unless the device is current. */
static inline int find_stream(const Way *way, void **stream)
{
    int32_t device = -1;
    return way->current_device(&device) == 0 && device == way->device &&
           way->current_stream(device, stream) == 0;
}

/* Where a Python object holds its tensor; -1 if nowhere that is known. */
Py_ssize_t offset_of(PyObject *object, void *tensor);

/* --- what launches.c uses of the other two; args is a tuple --- */

/* Whether the arguments are the tensors of the Places, where they were. */
int args_in_place(PyObject *places, PyObject *args);

/* Copy the arguments of the Inputs on the current stream: whether all is on its way.
 *
 * With must_be_apart only if none of them lies in memory that the graph writes.
 */
int send_inputs(PyObject *inputs, PyObject *args, int must_be_apart);

#endif
