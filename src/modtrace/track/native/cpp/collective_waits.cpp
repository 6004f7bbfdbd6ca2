#include <torch/csrc/distributed/c10d/Work.hpp>
#include <typeinfo>
#include <utility>

#include "collectives.h"
#include "device/calls.h"
#include "engine.h"

namespace modtrace {
namespace {

PyObject* wait(PyObject* capsule, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  const Wrapper* wrapper = wrapper_in(capsule);
  const PyRef wrapped = borrow(wrapper->wrapped.get());
  Session* session = wrapper->active ? engine.active_session.load(std::memory_order_relaxed) : nullptr;
  ThreadState& thread = this_thread();
  if (session == nullptr || count == 0 ||
      (thread.generation != current_generation() && !register_thread(*session, thread))) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  }
  const Awaited awaited = find_awaited(bound_object(args[0], typeid(c10d::Work)));
  const uint64_t generation = thread.generation;
  const int64_t meta = thread.meta_bits | awaited.name_id;
  write_without_gil(thread, generation, kWaitEnter << kKindShift | meta, awaited.counter);
  queue_device_event_of_collective(thread, awaited.device);
  PyObject* result = PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  write_without_gil(thread, generation, kWaitExit << kKindShift | meta, awaited.counter);
  queue_device_event_of_collective(thread, awaited.device);
  return result;
}

PyMethodDef wait_definition = {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(wait)),
                               METH_FASTCALL | METH_KEYWORDS,
                               "wait(work, timeout): wait for a work, and note from when to when."};

}  // namespace

PyObject* wrap_wait(PyObject*, PyObject* wrapped) {
  PyObject* function = PyInstanceMethod_Check(wrapped) ? PyInstanceMethod_GET_FUNCTION(wrapped) : wrapped;
  const PyRef wrapper = steal(new_wrapper(wait_definition, function));
  return wrapper ? PyInstanceMethod_New(wrapper.get()) : nullptr;
}

}  // namespace modtrace
