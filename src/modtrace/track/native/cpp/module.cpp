// The Python module of the native engine: it starts and stops a session, and receives events from Python.
//
// Module calls come from the wrapper of nn.Module.__call__ (module_calls.h), with the interpreter's lock. Backward
// passes come from the wrapper of torch's function that runs a pass (backward.h), and from hooks on autograd nodes,
// which run on any thread and without the lock.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

#include "backward.h"
#include "collectives.h"
#include "device/calls.h"
#include "engine.h"
#include "flops.h"
#include "greenlets.h"
#include "memory.h"
#include "module_calls.h"
#include "outside_operators.h"
#include "ranges.h"

namespace modtrace {

const void* bound_object(PyObject* object, const std::type_info& type) {
  try {
    pybind11::detail::type_caster_generic caster(type);
    return caster.load(object, /*convert=*/false) ? caster.value : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

PyObject* new_wrapper(PyMethodDef& definition, PyObject* wrapped) {
  const PyRef capsule =
      steal(PyCapsule_New(new Wrapper{borrow(wrapped)}, nullptr, [](PyObject* object) { delete wrapper_in(object); }));
  return capsule ? PyCFunction_New(&definition, capsule.get()) : nullptr;
}

namespace {

// set_active(wrapper, active): switch a wrapper of wrap_backward, wrap_make_gradients or wrap_wait.
PyObject* py_set_active(PyObject*, PyObject* args) {
  PyObject* function;
  int active;
  if (!PyArg_ParseTuple(args, "Op", &function, &active)) return nullptr;
  if (PyInstanceMethod_Check(function)) function = PyInstanceMethod_GET_FUNCTION(function);
  Wrapper* wrapper = wrapper_in(PyCFunction_GetSelf(function));
  if (wrapper == nullptr) return nullptr;
  wrapper->active = active != 0;
  Py_RETURN_NONE;
}

// Makes an attribute of the engine's state own another object.
void set_owned(PyObject*& attribute, PyObject* object) {
  Py_XINCREF(object);
  Py_XSETREF(attribute, object);
}

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
// CPython 3.11 inlines a call of an object that is exactly a function, such as super().__call__(x), and runs its
// bytecode; later versions check its vectorcall first. So a wrapper is of a subclass there, which has the same layout,
// and is never inlined.
PyObject* reduce_call_wrapper(PyObject* wrapper, PyObject*) { return PyObject_GetAttrString(wrapper, "__qualname__"); }

PyMethodDef call_wrapper_methods[] = {
    {"__reduce__", reduce_call_wrapper, METH_NOARGS, "__reduce__(): copied and pickled as functions are, by name."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject* call_wrapper_type() {
  static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  if (type.tp_base != nullptr) return &type;
  type.tp_name = "function";
  type.tp_base = &PyFunction_Type;
  type.tp_basicsize = PyFunction_Type.tp_basicsize;
  type.tp_dictoffset = PyFunction_Type.tp_dictoffset;
  type.tp_weaklistoffset = PyFunction_Type.tp_weaklistoffset;
  type.tp_vectorcall_offset = PyFunction_Type.tp_vectorcall_offset;
  type.tp_dealloc = PyFunction_Type.tp_dealloc;
  type.tp_traverse = PyFunction_Type.tp_traverse;
  type.tp_clear = PyFunction_Type.tp_clear;
  type.tp_repr = PyFunction_Type.tp_repr;
  type.tp_call = PyFunction_Type.tp_call;
  type.tp_descr_get = PyFunction_Type.tp_descr_get;
  type.tp_methods = call_wrapper_methods;
  type.tp_flags = PyFunction_Type.tp_flags &
                  (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR);
  return PyType_Ready(&type) == 0 ? &type : nullptr;
}
#endif

// wrap_call(wrapper, wrapped): let calls of the function `wrapper` run here, around `wrapped`.
PyObject* py_wrap_call(PyObject*, PyObject* args) {
  PyObject *wrapper, *wrapped;
  if (!PyArg_ParseTuple(args, "O!O", &PyFunction_Type, &wrapper, &wrapped)) return nullptr;
  if (PyObject_SetAttrString(wrapper, kWrappedCall, wrapped) != 0) return nullptr;
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(reinterpret_cast<PyFunctionObject*>(wrapper), call_module);
#else
  reinterpret_cast<PyFunctionObject*>(wrapper)->vectorcall = call_module;
#endif
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
  PyTypeObject* type = call_wrapper_type();
  if (type == nullptr) return nullptr;
  Py_SET_TYPE(wrapper, type);
#endif
  Py_RETURN_NONE;
}

// set_call_wrapper(wrapper): record the calls of this wrapper, or with None of no wrapper. Others only pass calls on.
PyObject* py_set_call_wrapper(PyObject*, PyObject* wrapper) {
  const bool none = wrapper == Py_None;
  const PyRef wrapped = steal(none ? nullptr : PyObject_GetAttrString(wrapper, kWrappedCall));
  if (!none && !wrapped) return nullptr;
  set_owned(engine.wrapped_call, wrapped.get());
  set_owned(engine.call_wrapper, none ? nullptr : wrapper);
  Py_RETURN_NONE;
}

// write_event(meta, value): write one event of this thread.
PyObject* py_write_event(PyObject*, PyObject* args) {
  long long meta, value;
  if (!PyArg_ParseTuple(args, "LL", &meta, &value)) return nullptr;
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session == nullptr) Py_RETURN_NONE;
  ThreadState& thread = this_thread();
  follow_greenlet(thread);
  if (thread.generation == current_generation() || register_thread(*session, thread)) {
    const int64_t kind = meta >> kKindShift;
    if (kind == kStep || kind == kOptimizerStep) {
      session->steps_told = true;
      write_held(*session, thread);
    }
    write_with_gil(*session, thread.meta_bits | meta, value);
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_RETURN_NONE;
}

// Functions of Python's gc, read before the first collection: a collection can start in code without builtins, which
// cannot import.
PyObject *get_threshold, *get_count;

bool find_thresholds() {
  const PyRef gc = steal(PyImport_ImportModule("gc"));
  get_threshold = gc ? PyObject_GetAttrString(gc.get(), "get_threshold") : nullptr;
  get_count = get_threshold != nullptr ? PyObject_GetAttrString(gc.get(), "get_count") : nullptr;
  return get_count != nullptr;
}

// The trigger of a collection that is about to start. Python collects if the youngest generation exceeds its threshold
// above 0. If not, or while the collector is disabled, a call of gc.collect() started the collection.
int64_t collection_trigger() {
  const auto youngest = [](PyObject* function) {
    const PyRef numbers = steal(PyObject_CallNoArgs(function));
    return numbers ? PyLong_AsLong(PyTuple_GetItem(numbers.get(), 0)) : 0;
  };
  const long threshold = PyGC_IsEnabled() ? youngest(get_threshold) : 0;
  return threshold > 0 && youngest(get_count) > threshold ? kAutomaticBit : kRequestedBit;
}

// on_collection(phase, info): called by Python's gc at the start and the end of a collection. It is in C, because
// Python ignores an interrupt in a callback with bytecode. Threads without a number are left out: numbering them runs
// Python.
PyObject* py_on_collection(PyObject*, PyObject* args) {
  // Only one thread collects at a time. Meanwhile other threads run, and finalizers, which may fork: the session can
  // change.
  static int64_t began = 0, trigger = 0;
  static uint64_t began_in = 0;
  const char* phase;
  PyObject* info;
  if (!PyArg_ParseTuple(args, "sO!", &phase, &PyDict_Type, &info)) return nullptr;
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  const ThreadState& thread = this_thread();
  const uint64_t generation = current_generation();
  const bool is_noted = session != nullptr && engine.ranges_active.load() && thread.generation == generation;
  const int64_t now = monotonic_ns();
  if (std::strcmp(phase, "start") == 0) {
    began = is_noted ? now : 0;
    began_in = generation;
    trigger = is_noted ? collection_trigger() : 0;
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
  }
  const int64_t duration = began == 0 ? 0 : now - began;
  began = 0;
  if (!is_noted || began_in != generation || duration < kMinCollectionNs) Py_RETURN_NONE;
  const auto number = [info](const char* key, uint64_t mask) {
    PyObject* found = PyDict_GetItemString(info, key);
    return found == nullptr ? 0 : static_cast<int64_t>(std::min<uint64_t>(PyLong_AsUnsignedLongLong(found), mask));
  };
  const int64_t objects = number("collected", kCollectedMask), oldest = number("generation", kGenerationMask);
  if (PyErr_Occurred() != nullptr) return nullptr;
  write_with_gil(*session, kCollection << kKindShift | thread.meta_bits | kNoName,
                 trigger | duration << (kCollectedBits + kGenerationBits) | objects << kGenerationBits | oldest);
  Py_RETURN_NONE;
}

// forget_module(id): the module with this id() died.
PyObject* py_forget_module(PyObject*, PyObject* module_id) {
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session != nullptr) session->names.erase(reinterpret_cast<PyObject*>(PyLong_AsVoidPtr(module_id)));
  Py_RETURN_NONE;
}

// start(buffer, offset, capacity, resolve_name, dead, forget_dead, add_thread, emit_sync_mark, on_error, note_call,
// runs_again, name_range): start a session, which writes `capacity` slots from byte `offset` of the buffer on.
// RuntimeError if a session runs already.
PyObject* py_start(PyObject*, PyObject* args) {
  auto session = std::make_unique<Session>();
  Py_ssize_t offset;
  unsigned long long capacity;
  PyObject *resolve_name, *dead, *forget_dead, *add_thread, *emit_sync_mark, *on_error, *note_call, *runs_again,
      *name_range;
  if (!PyArg_ParseTuple(args, "w*nKOO!OOOOOOO", &session->buffer, &offset, &capacity, &resolve_name, &PyList_Type,
                        &dead, &forget_dead, &add_thread, &emit_sync_mark, &on_error, &note_call, &runs_again,
                        &name_range)) {
    return nullptr;
  }
  const auto length = static_cast<unsigned long long>(session->buffer.len);
  if (engine.active_session.load() != nullptr || length < offset + capacity * sizeof(Slot)) {
    PyBuffer_Release(&session->buffer);
    PyErr_SetString(PyExc_RuntimeError, "a session runs already, or the buffer is too small");
    return nullptr;
  }
  session->slots = reinterpret_cast<Slot*>(static_cast<char*>(session->buffer.buf) + offset);
  session->capacity = capacity;
  session->capacity_log2 = (capacity & (capacity - 1)) == 0 ? __builtin_ctzll(capacity) : -1;
  session->resolve_name = borrow(resolve_name);
  session->dead = borrow(dead);
  session->forget_dead = borrow(forget_dead);
  session->add_thread = borrow(add_thread);
  session->emit_sync_mark = borrow(emit_sync_mark);
  session->on_error = borrow(on_error);
  session->note_call = borrow(note_call);
  session->runs_again = borrow(runs_again);
  const bool with_ranges = name_range != Py_None;
  if (with_ranges) session->name_range = borrow(name_range);
  engine.generation.fetch_add(1, std::memory_order_relaxed);
  engine.next_serial.store(0);
  engine.active_session.store(session.release());
  engine.ranges_active.store(with_ranges);
  Py_RETURN_NONE;
}

// Waits for the threads that write, and releases the ring.
void end_session(Session& session) {
  stop_memory();
  stop_counting();
  stop_outside();
  engine.ranges_active.store(false);
  abandon_backward_passes();
  for (ThreadState* thread = engine.threads.load(); thread != nullptr; thread = thread->next) {
    while (thread->busy.load(std::memory_order_seq_cst)) std::this_thread::yield();
  }
  PyBuffer_Release(&session.buffer);
  release_session(session);
}

// stop(): end the session once no thread writes any more.
PyObject* py_stop(PyObject*, PyObject*) {
  Session* session = engine.active_session.exchange(nullptr);
  if (session != nullptr) end_session(*session);
  Py_RETURN_NONE;
}

// after_fork(): end the session of the parent, in a forked child.
PyObject* py_after_fork(PyObject*, PyObject*) {
  Session* session = engine.active_session.exchange(nullptr);
  // The other threads are gone, and one of them may have been writing.
  for (ThreadState* thread = engine.threads.load(); thread != nullptr; thread = thread->next) thread->busy.store(false);
  reset_collectives();
  reset_device_times();
  if (session != nullptr) end_session(*session);
  Py_RETURN_NONE;
}

// Each function is described at its declaration, or above in this file.
PyMethodDef methods[] = {
    {"start", py_start, METH_VARARGS, nullptr},
    {"stop", py_stop, METH_NOARGS, nullptr},
    {"after_fork", py_after_fork, METH_NOARGS, nullptr},
    {"expect_range", modtrace::py_expect_range, METH_NOARGS, nullptr},
    {"wrap_call", py_wrap_call, METH_VARARGS, nullptr},
    {"set_call_wrapper", py_set_call_wrapper, METH_O, nullptr},
    {"wrap_backward", wrap_backward, METH_O, nullptr},
    {"wrap_make_gradients", wrap_make_gradients, METH_O, nullptr},
    {"wrap_wait", wrap_wait, METH_O, nullptr},
    {"set_active", py_set_active, METH_VARARGS, nullptr},
    {"start_collectives", start_collectives, METH_O, nullptr},
    {"stop_collectives", stop_collectives, METH_NOARGS, nullptr},
    {"await_device", await_device, METH_O, nullptr},
    {"start_device_times", start_device_times, METH_O, nullptr},
    {"stop_device_times", stop_device_times, METH_NOARGS, nullptr},
    {"choose_for_device", choose_for_device, METH_O, nullptr},
    {"begin_capture", begin_capture, METH_NOARGS, nullptr},
    {"end_capture", end_capture, METH_NOARGS, nullptr},
    {"start_memory", start_memory, METH_VARARGS, nullptr},
    {"watch_cuda_memory", watch_cuda_memory, METH_NOARGS, nullptr},
    {"start_flops", start_flops, METH_VARARGS, nullptr},
    {"take_operators", take_operators, METH_O, nullptr},
    {"begin_outside", begin_outside, METH_O, nullptr},
    {"end_outside", end_outside, METH_NOARGS, nullptr},
    {"tell_ends", tell_ends, METH_O, nullptr},
    {"limit_outside", limit_outside, METH_O, nullptr},
    {"write_event", py_write_event, METH_VARARGS, nullptr},
    {"on_collection", py_on_collection, METH_VARARGS, nullptr},
    {"forget_module", py_forget_module, METH_O, nullptr},
    {"follow_greenlets", follow_greenlets, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "modtrace_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace modtrace

PyMODINIT_FUNC PyInit_modtrace_native() {
  PyObject* module = modtrace::find_thresholds() ? PyModule_Create(&modtrace::definition) : nullptr;
  if (module != nullptr) {
    modtrace::watch_ranges();
    modtrace::watch_nodes();
    modtrace::watch_operators();
    modtrace::watch_outside_operators();
  }
  return module;
}
