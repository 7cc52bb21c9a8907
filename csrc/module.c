/* compile_backend._shortcuts: what a step does on the host, in C. */

#include "shortcuts.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_shortcuts", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__shortcuts(void)
{
    if (!begin_batches() || !begin_steps() || !begin_tensors() || !begin_launches()) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    PyMethodDef *const methods[] = {batch_methods, step_methods, tensor_methods, launch_methods,
                                    copy_methods};
    for (size_t i = 0; module != NULL && i < sizeof(methods) / sizeof(methods[0]); i++) {
        if (PyModule_AddFunctions(module, methods[i]) != 0) {
            Py_CLEAR(module);
        }
    }
    return module;
}
