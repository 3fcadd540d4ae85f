/* A cache of prepared calls by what their tensors are like, in front of a dict whose keys Python makes.

   cache(tensors, how) returns what cache.keep(tensors, how, value) was given for tensors of the same shapes, strides,
   dtypes, devices and alignment, on the heap or not, at the same distance where they overlap, and for equal texts,
   numbers and tuples of integers in `how`, else the same objects; None if that is nothing, False if it cannot be: of
   subclasses, empty tensors, lazily conjugated or negated ones, those whose gradients torch records, and float32 if the
   cache `skips_float32`.  Tensors are read through DLPack's table of C functions, which takes no reference to their
   memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SLOTS = 256, WAYS = 4, MOST_TENSORS = 8, MOST_DIMS = 8, MOST_HOW = 12 };
enum { MOST_WORDS = MOST_TENSORS * (1 + 2 * MOST_DIMS + MOST_TENSORS) };
enum { DL_FLOAT = 2, DL_COMPLEX = 5 };
#define APART (UINT64_C(1) << 63) /* no distance of tensors that overlap */

typedef struct {
  void *data;
  struct { int32_t type, id; } device;
  int32_t ndim;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct {
  struct { uint32_t major, minor; } version;
  void *previous, *of_owning_tensors[3];
  int (*read)(void *object, DLTensor *out); /* returns -1 with an error set if it cannot */
} ExchangeAPI;

typedef struct {
  PyObject *value;
  size_t num_how, num_words;
  PyObject *how[MOST_HOW];
  uint64_t words[];
} Slot;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  const ExchangeAPI *api;
  PyTypeObject *tensor_type;
  PyObject *capsule, *is_grad_enabled;
  unsigned long long low, high, alignment;
  int skips_float32;
  unsigned oldest;     /* of the ways, whose slot goes next */
  Slot *slots[SLOTS]; /* in sets of WAYS */
} Cache;

static PyObject *str_requires_grad, *str_is_neg, *str_is_conj;

/* Take the reference to `answer`; return 1 or 0, or -1 with an error set. */
static int truth(PyObject *answer) {
  int is_true = answer ? PyObject_IsTrue(answer) : -1;
  Py_XDECREF(answer);
  return is_true;
}

/* Return whether a tensor's memory holds other numbers than its own, or torch records what is done: 1, 0, or -1. */
static int needs_more(Cache *self, PyObject *object, const DLTensor *tensor) {
  int needs = 0;
  if (tensor->dtype.code == DL_FLOAT || tensor->dtype.code == DL_COMPLEX) /* what a part of a complex tensor may be */
    needs = truth(PyObject_CallMethodNoArgs(object, str_is_neg));
  if (!needs && tensor->dtype.code == DL_COMPLEX)
    needs = truth(PyObject_CallMethodNoArgs(object, str_is_conj));
  if (needs)
    return needs;
  needs = truth(PyObject_GetAttr(object, str_requires_grad));
  return needs > 0 ? truth(PyObject_CallNoArgs(self->is_grad_enabled)) : needs;
}

/* Write the words that describe the tensors; return their number, 0 if the call is none for the cache, or -1. */
static Py_ssize_t describe(Cache *self, PyObject *tensors, uint64_t *words) {
  if (!PyTuple_CheckExact(tensors) || PyTuple_GET_SIZE(tensors) > MOST_TENSORS)
    return 0;
  uint64_t *word = words, begin[MOST_TENSORS], end[MOST_TENSORS];
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
    PyObject *object = PyTuple_GET_ITEM(tensors, i);
    begin[i] = end[i] = 0;
    if (object == Py_None) {
      *word++ = 0;
      continue;
    }
    DLTensor tensor;
    if (Py_TYPE(object) != self->tensor_type)
      return 0;
    if (self->api->read(object, &tensor)) {
      PyErr_Clear(); /* it has no memory, or DLPack lacks its dtype */
      return 0;
    }
    int is_float32 = tensor.dtype.code == DL_FLOAT && tensor.dtype.bits == 32;
    if (tensor.ndim > MOST_DIMS || tensor.dtype.bits % 8 || (is_float32 && self->skips_float32))
      return 0;
    int needs = needs_more(self, object, &tensor);
    if (needs)
      return needs < 0 ? -1 : 0;
    uint64_t at = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset, last = 0;
    for (int d = 0; d < tensor.ndim; d++) {
      if (tensor.shape[d] <= 0)
        return 0;
      last += (uint64_t)(tensor.shape[d] - 1) * (uint64_t)tensor.strides[d];
    }
    begin[i] = at;
    end[i] = at + (last + 1) * (tensor.dtype.bits / 8 * tensor.dtype.lanes);
    *word++ = 1 | (uint64_t)(self->low <= at && at < self->high) << 1 | (uint64_t)(at % self->alignment == 0) << 2 |
              (uint64_t)tensor.ndim << 4 | (uint64_t)tensor.dtype.code << 8 | (uint64_t)tensor.dtype.bits << 16 |
              (uint64_t)tensor.dtype.lanes << 24 | (uint64_t)(uint8_t)tensor.device.type << 40 |
              (uint64_t)(uint16_t)tensor.device.id << 48;
    for (int d = 0; d < tensor.ndim; d++) {
      *word++ = (uint64_t)tensor.shape[d];
      *word++ = (uint64_t)tensor.strides[d];
    }
    for (Py_ssize_t j = 0; j < i; j++)
      *word++ = begin[i] < end[j] && begin[j] < end[i] ? begin[i] - begin[j] : APART;
  }
  return word - words;
}

/* Return whether an object is compared by its value: operators of torch make such ones anew for each call. */
static int has_value(PyObject *object) {
  if (!PyTuple_CheckExact(object))
    return PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); i++)
    if (!PyLong_CheckExact(PyTuple_GET_ITEM(object, i)))
      return 0;
  return 1;
}

static int is_same(PyObject *one, PyObject *other) {
  if (one == other)
    return 1;
  if (Py_TYPE(one) != Py_TYPE(other) || !has_value(one) || !has_value(other))
    return 0;
  int is_equal = PyObject_RichCompareBool(one, other, Py_EQ);
  if (is_equal < 0) /* the stack is exhausted, which the next call in Python says */
    PyErr_Clear();
  return is_equal == 1;
}

/* Return the place of a call, or where it may be kept; `is_it` tells whether it is there. */
static Slot **find(Cache *self, PyObject *how, const uint64_t *words, Py_ssize_t num_words, int *is_it) {
  uint64_t hash = 0;
  for (Py_ssize_t i = 0; i < num_words; i++)
    hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(how); i++) {
    PyObject *each = PyTuple_GET_ITEM(how, i);
    hash ^= has_value(each) ? (uint64_t)PyObject_Hash(each) : (uint64_t)(uintptr_t)each;
    hash *= 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
  }
  Slot **set = &self->slots[hash % (SLOTS / WAYS) * WAYS], **place = &set[self->oldest % WAYS];
  for (int way = 0; way < WAYS; way++) {
    Slot *slot = set[way];
    if (!slot) {
      place = &set[way];
      continue;
    }
    *is_it = slot->num_words == (size_t)num_words && slot->num_how == (size_t)PyTuple_GET_SIZE(how) &&
             !memcmp(slot->words, words, num_words * sizeof *words);
    for (Py_ssize_t i = 0; *is_it && i < PyTuple_GET_SIZE(how); i++)
      *is_it = is_same(slot->how[i], PyTuple_GET_ITEM(how, i));
    if (*is_it)
      return &set[way];
  }
  *is_it = 0;
  return place;
}

static void drop(Slot *slot) {
  if (!slot)
    return;
  for (size_t i = 0; i < slot->num_how; i++)
    Py_DECREF(slot->how[i]);
  Py_DECREF(slot->value);
  PyMem_Free(slot);
}

static PyObject *call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
  Cache *self = (Cache *)object;
  uint64_t words[MOST_WORDS];
  int is_it;
  if (PyVectorcall_NARGS(flags) != 2 || (names && PyTuple_GET_SIZE(names)) || !PyTuple_Check(args[1]))
    return PyErr_Format(PyExc_TypeError, "a lookup takes two tuples: tensors, and how they are worked on");
  Py_ssize_t num_words = describe(self, args[0], words);
  if (num_words <= 0)
    return num_words ? NULL : Py_NewRef(Py_False);
  Slot **place = find(self, args[1], words, num_words, &is_it);
  return Py_NewRef(is_it ? (*place)->value : Py_None);
}

static PyObject *keep(Cache *self, PyObject *args) {
  PyObject *tensors, *how, *value;
  uint64_t words[MOST_WORDS];
  int is_it;
  if (!PyArg_ParseTuple(args, "OO!O", &tensors, &PyTuple_Type, &how, &value))
    return NULL;
  Py_ssize_t num_words = describe(self, tensors, words), num_how = PyTuple_GET_SIZE(how);
  if (num_words < 0)
    return NULL;
  for (Py_ssize_t i = 0; i < num_how; i++)
    if (PyList_Check(PyTuple_GET_ITEM(how, i))) /* the same list may name others at the next call */
      num_words = 0;
  if (!num_words || num_how > MOST_HOW)
    Py_RETURN_NONE;
  Slot **place = find(self, how, words, num_words, &is_it), *old = *place;
  Slot *slot = PyMem_Malloc(sizeof *slot + num_words * sizeof *words);
  if (!slot)
    return PyErr_NoMemory();
  slot->value = Py_NewRef(value);
  slot->num_how = num_how;
  slot->num_words = num_words;
  for (Py_ssize_t i = 0; i < num_how; i++)
    slot->how[i] = Py_NewRef(PyTuple_GET_ITEM(how, i));
  memcpy(slot->words, words, num_words * sizeof *words);
  *place = slot;
  self->oldest += old && !is_it;
  drop(old); /* last: it may run code that calls the cache */
  Py_RETURN_NONE;
}

static int clear(Cache *self) {
  for (size_t i = 0; i < SLOTS; i++) {
    Slot *slot = self->slots[i];
    self->slots[i] = NULL;
    drop(slot);
  }
  return 0;
}

static PyObject *clear_method(Cache *self, PyObject *nothing) {
  clear(self);
  Py_RETURN_NONE;
}

static PyObject *cache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"capsule", "tensor_type", "is_grad_enabled", "low", "high", "alignment", "skips_float32", NULL};
  PyObject *capsule, *tensor_type, *is_grad_enabled;
  unsigned long long low, high, alignment;
  int skips_float32;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OKKKp", names, &capsule, &PyType_Type, &tensor_type,
                                   &is_grad_enabled, &low, &high, &alignment, &skips_float32))
    return NULL;
  const ExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!api)
    return NULL;
  if (api->version.major != 1 || !api->read || !alignment)
    return PyErr_Format(PyExc_ValueError, "DLPack %u, alignment %llu: 1 and more than 0 are needed",
                        (unsigned)api->version.major, alignment);
  Cache *self = (Cache *)type->tp_alloc(type, 0); /* zeroed */
  if (!self)
    return NULL;
  self->call = call;
  self->api = api;
  self->capsule = Py_NewRef(capsule);
  self->tensor_type = (PyTypeObject *)Py_NewRef(tensor_type);
  self->is_grad_enabled = Py_NewRef(is_grad_enabled);
  self->low = low;
  self->high = high;
  self->alignment = alignment;
  self->skips_float32 = skips_float32;
  return (PyObject *)self;
}

static int traverse(Cache *self, visitproc visit, void *arg) {
  Py_VISIT(self->capsule);
  Py_VISIT(self->tensor_type);
  Py_VISIT(self->is_grad_enabled);
  for (size_t i = 0; i < SLOTS; i++) {
    if (!self->slots[i])
      continue;
    Py_VISIT(self->slots[i]->value);
    for (size_t j = 0; j < self->slots[i]->num_how; j++)
      Py_VISIT(self->slots[i]->how[j]);
  }
  return 0;
}

static void dealloc(Cache *self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  Py_XDECREF(self->capsule);
  Py_XDECREF(self->tensor_type);
  Py_XDECREF(self->is_grad_enabled);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"keep", (PyCFunction)keep, METH_VARARGS, "Keep a value for tensors like these, and the same objects in `how`."},
    {"clear", (PyCFunction)clear_method, METH_NOARGS, "Drop all."},
    {NULL},
};

static PyTypeObject cache_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "iris_call_cache.CallCache",
    .tp_basicsize = sizeof(Cache),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "Prepared calls by what their tensors are like: cache(tensors, how).",
    .tp_new = cache_new,
    .tp_dealloc = (destructor)dealloc,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Cache, call),
    .tp_methods = methods,
};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "iris_call_cache", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_iris_call_cache(void) {
  str_requires_grad = PyUnicode_InternFromString("requires_grad");
  str_is_neg = PyUnicode_InternFromString("is_neg");
  str_is_conj = PyUnicode_InternFromString("is_conj");
  if (!str_requires_grad || !str_is_neg || !str_is_conj || PyType_Ready(&cache_type) < 0)
    return NULL;
  PyObject *module = PyModule_Create(&module_def);
  if (module && PyModule_AddObjectRef(module, "CallCache", (PyObject *)&cache_type) < 0)
    Py_CLEAR(module);
  return module;
}
