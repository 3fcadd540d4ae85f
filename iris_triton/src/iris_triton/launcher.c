/* Launches a compiled CUDA kernel again with all its parameters but some addresses.

   launch(stream, tensor, ...) puts the tensors' addresses among the parameters and calls cuLaunchKernelEx.  A call
   changes nothing of the object: what varies lies on the stack, so threads may share it.  The GIL is released while the
   driver works: it waits when its queue is full, perhaps for a launch of another thread. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

enum { MOST_PARAMS = 128, MOST_TENSORS = 16 };

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*set_context)(CUcontext);
  CUresult (*error_string)(CUresult, const char **);
  CUcontext context;
  CUfunction function;
  CUlaunchConfig config; /* all but the stream */
  CUlaunchAttribute early;
  PyObject *current_stream; /* returns the raw stream of `device` */
  PyObject *device;
  PyObject *knobs, *through_triton; /* whose hooks a profiler sets; what launches if it did */
  Py_ssize_t num_params, num_tensors;
  uint64_t values[MOST_PARAMS]; /* little endian, in 8 bytes each */
  int places[MOST_TENSORS];     /* of the tensors among the parameters */
} Launch;

static PyObject *str_enter, *str_exit, *str_calls, *str_data_ptr, *str_cuda_stream;

/* Takes the reference to `number`; returns 0, or -1 with an error set. */
static int read_address(PyObject *number, uint64_t *address) {
  if (!number)
    return -1;
  *address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Return whether a launch hook is set: 1, 0, or -1 with an error set.  Triton's hook is a chain, which may be empty; a
   user may put any function, or None, in its place. */
static int is_watched(PyObject *knobs, PyObject *name) {
  PyObject *hook = PyObject_GetAttr(knobs, name);
  if (!hook)
    return -1;
  PyObject *calls = PyObject_GetAttr(hook, str_calls);
  if (!calls) {
    PyErr_Clear();
    calls = Py_NewRef(hook);
  }
  int found = PyObject_IsTrue(calls);
  Py_DECREF(calls);
  Py_DECREF(hook);
  return found;
}

static PyObject *call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
  Launch *self = (Launch *)object;
  Py_ssize_t given = PyVectorcall_NARGS(flags);
  if (given != self->num_tensors + 1 || (names && PyTuple_GET_SIZE(names)))
    return PyErr_Format(PyExc_TypeError, "a launch takes a stream and %zd tensors, got %zd arguments",
                        self->num_tensors, given + (names ? PyTuple_GET_SIZE(names) : 0));
  int watched = is_watched(self->knobs, str_enter);
  if (!watched)
    watched = is_watched(self->knobs, str_exit);
  if (watched)
    return watched < 0 ? NULL : PyObject_Vectorcall(self->through_triton, args, given, NULL);

  CUlaunchConfig config = self->config;
  uint64_t stream, addresses[MOST_TENSORS];
  void *params[MOST_PARAMS];
  if (read_address(args[0] == Py_None ? PyObject_CallOneArg(self->current_stream, self->device)
                                      : PyObject_GetAttr(args[0], str_cuda_stream), &stream))
    return NULL;
  config.hStream = (CUstream)(uintptr_t)stream;
  for (Py_ssize_t i = 0; i < self->num_params; i++)
    params[i] = &self->values[i];
  for (Py_ssize_t i = 0; i < self->num_tensors; i++) {
    if (read_address(PyObject_CallMethodNoArgs(args[i + 1], str_data_ptr), &addresses[i]))
      return NULL;
    params[self->places[i]] = &addresses[i];
  }
  CUresult code;
  Py_BEGIN_ALLOW_THREADS
  code = self->launch(&config, self->function, params, NULL);
  if (code == CUDA_ERROR_INVALID_CONTEXT && self->set_context(self->context) == CUDA_SUCCESS)
    code = self->launch(&config, self->function, params, NULL); /* a thread's first call of CUDA: it had no context */
  Py_END_ALLOW_THREADS
  if (code == CUDA_SUCCESS)
    Py_RETURN_NONE;
  const char *text = NULL;
  self->error_string(code, &text);
  return PyErr_Format(PyExc_RuntimeError, "CUDA refused a launch: %s (%d)", text ? text : "unknown error", (int)code);
}

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"driver", "context", "function", "programs", "threads", "shared_nbytes", "early", "values",
                          "places", "current_stream", "device", "knobs", "through_triton", NULL};
  unsigned long long launch, set_context, error_string, context, function;
  unsigned int programs, threads, shared;
  int early;
  Py_buffer values;
  PyObject *places, *current_stream, *device, *knobs, *through_triton;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(KKK)KKIIIpy*O!OOOO", names, &launch, &set_context, &error_string,
                                   &context, &function, &programs, &threads, &shared, &early, &values, &PyTuple_Type,
                                   &places, &current_stream, &device, &knobs, &through_triton))
    return NULL;
  Launch *self = NULL;
  Py_ssize_t num_params = values.len / 8, num_tensors = PyTuple_GET_SIZE(places);
  if (values.len % 8 || num_params > MOST_PARAMS || num_tensors > MOST_TENSORS) {
    PyErr_Format(PyExc_ValueError, "%zd bytes of parameters and %zd tensors: at most %d of 8 bytes, and %d", values.len,
                 num_tensors, MOST_PARAMS, MOST_TENSORS);
    goto end;
  }
  self = (Launch *)type->tp_alloc(type, 0); /* zeroed */
  if (!self)
    goto end;
  memcpy(self->values, values.buf, values.len);
  for (Py_ssize_t i = 0; i < num_tensors; i++) {
    long place = PyLong_AsLong(PyTuple_GET_ITEM(places, i));
    if (place < 0 || place >= num_params) {
      if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "there is no parameter %ld", place);
      Py_CLEAR(self);
      goto end;
    }
    self->places[i] = (int)place;
  }
  self->call = call;
  self->launch = (CUresult(*)(const CUlaunchConfig *, CUfunction, void **, void **))(uintptr_t)launch;
  self->set_context = (CUresult(*)(CUcontext))(uintptr_t)set_context;
  self->error_string = (CUresult(*)(CUresult, const char **))(uintptr_t)error_string;
  self->context = (CUcontext)(uintptr_t)context;
  self->function = (CUfunction)(uintptr_t)function;
  self->current_stream = Py_NewRef(current_stream);
  self->device = Py_NewRef(device);
  self->knobs = Py_NewRef(knobs);
  self->through_triton = Py_NewRef(through_triton);
  self->num_params = num_params;
  self->num_tensors = num_tensors;
  self->early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  self->early.value.programmaticStreamSerializationAllowed = 1;
  self->config.attrs = &self->early;
  self->config.numAttrs = early;
  self->config.gridDimX = programs;
  self->config.blockDimX = threads;
  self->config.gridDimY = self->config.gridDimZ = self->config.blockDimY = self->config.blockDimZ = 1;
  self->config.sharedMemBytes = shared;
end:
  PyBuffer_Release(&values);
  return (PyObject *)self;
}

static int traverse(Launch *self, visitproc visit, void *arg) {
  Py_VISIT(self->current_stream);
  Py_VISIT(self->device);
  Py_VISIT(self->knobs);
  Py_VISIT(self->through_triton);
  return 0;
}

static void dealloc(Launch *self) {
  PyObject_GC_UnTrack(self);
  Py_XDECREF(self->current_stream);
  Py_XDECREF(self->device);
  Py_XDECREF(self->knobs);
  Py_XDECREF(self->through_triton);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject launch_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "iris_launcher.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "A CUDA kernel with all parameters but some addresses: launch(stream, tensor, ...).",
    .tp_new = launch_new,
    .tp_dealloc = (destructor)dealloc,
    .tp_traverse = (traverseproc)traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, call),
};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "iris_launcher", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_iris_launcher(void) {
  str_enter = PyUnicode_InternFromString("launch_enter_hook");
  str_exit = PyUnicode_InternFromString("launch_exit_hook");
  str_calls = PyUnicode_InternFromString("calls");
  str_data_ptr = PyUnicode_InternFromString("data_ptr");
  str_cuda_stream = PyUnicode_InternFromString("cuda_stream");
  if (!str_enter || !str_exit || !str_calls || !str_data_ptr || !str_cuda_stream || PyType_Ready(&launch_type) < 0)
    return NULL;
  PyObject *module = PyModule_Create(&module_def);
  if (module && PyModule_AddObjectRef(module, "Launch", (PyObject *)&launch_type) < 0)
    Py_CLEAR(module);
  return module;
}
