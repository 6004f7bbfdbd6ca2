// The native engine: forward calls and backward passes, written straight into the ring.
//
// Calls come from the wrapper of nn.Module.__call__, with the interpreter's lock; passes from the wrapper of torch's
// function that runs one, and from what that puts on autograd nodes, on whatever thread runs them and without the lock.

#include <torch/csrc/profiler/api.h>

#include "backward.h"
#include "ring_writer.h"

namespace modtrace {
namespace {

PyObject* inner_call = nullptr;  // what the wrapper of nn.Module.__call__ wraps

// Asks for the name that the module has below the open calls; -1 where that failed or the session ended.
int64_t find_name(Session& session, Thread& thread, PyObject* module, int64_t parent) {
  const Use use(session);
  PyObject* open = PyList_New(0);
  for (auto frame = thread.stack.rbegin(); open != nullptr && frame != thread.stack.rend(); ++frame) {
    PyObject* call = Py_BuildValue("(OL)", frame->module, static_cast<long long>(frame->name));
    if (call == nullptr || PyList_Append(open, call) != 0) Py_CLEAR(open);
    Py_XDECREF(call);
  }
  PyObject* found = open == nullptr ? nullptr : call_ours(session.find, module, open);
  Py_XDECREF(open);
  if (found == nullptr) {
    report(session);
    return -1;
  }
  const int64_t name = PyLong_AsLongLong(found);
  Py_DECREF(found);
  if (!is_current(session)) return -1;
  session.names[module].emplace_back(parent, name);
  if (name != kNoName && session.forward_calls.size() <= static_cast<size_t>(name)) {
    session.forward_calls.resize(name + 1);
    session.recompute_calls.resize(name + 1);
  }
  return name;
}

int64_t name_of(Session& session, Thread& thread, PyObject* module) {
  const int64_t parent = thread.stack.empty() ? kNoName : thread.stack.back().name;
  const auto known = session.names.find(module);
  if (C10_LIKELY(known != session.names.end())) {
    for (const auto& [around, name] : known->second) {
      if (around == parent) return name;
    }
  }
  return find_name(session, thread, module, parent);
}

void write_call(Session& session, Thread& thread, int64_t meta, int64_t value) {
  const uint64_t sequence = at::sequence_number::peek();
  thread.boundaries.add(sequence);
  write(session, meta, value | (static_cast<int64_t>(sequence) & kSequenceMask));
}

// Notes that a module is called. False where nothing was noted, and so nothing is to be left; an error that is the user's
// is pending then.
bool enter(PyObject* module) {
  Session* session = current.load(std::memory_order_relaxed);
  if (session == nullptr) return false;
  Thread& thread = this_thread();
  if (C10_UNLIKELY(thread.generation != generation) && !add_thread(*session, thread)) return false;
  if (thread.stack.empty() && C10_UNLIKELY(torch::profiler::impl::profilerEnabled())) {
    const Use use(*session);
    PyObject* done = call_ours(session->sync);
    if (done == nullptr) {
      report(*session);
      return false;
    }
    Py_DECREF(done);
    if (!is_current(*session)) return false;
  }
  const int64_t name = name_of(*session, thread, module);
  if (name < 0 || name == kNoName) return false;
  const bool again = torch::autograd::get_current_graph_task_id() != -1;
  int64_t& calls = (again ? session->recompute_calls : session->forward_calls)[name];
  const int64_t value = (calls++ & kNumberMask) << kSequenceBits;
  const int64_t bits = thread.bits | name;
  Py_INCREF(module);
  thread.stack.push_back({module, name, (again ? kRecomputeExit : kForwardExit) << kKindShift | bits, value});
  write_call(*session, thread, (again ? kRecomputeEnter : kForwardEnter) << kKindShift | bits, value);
  return true;
}

// Notes that the call at this height of the stack is over, and those that it holds.
void leave(Session& session, Thread& thread, size_t height) {
  const Frame& frame = thread.stack[height];
  write_call(session, thread, frame.exit_meta, frame.value);
  drop_frames(thread, height);
}

// What a call of the wrapper runs instead of its bytecode.
PyObject* traced_call(PyObject*, PyObject* const* args, size_t flagged, PyObject* keywords) {
  if (PyVectorcall_NARGS(flagged) == 0 || !enter(args[0])) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(inner_call, args, flagged, keywords);
  }
  Thread& thread = this_thread();
  const uint64_t entered_in = generation;
  const size_t height = thread.stack.size() - 1;
  PyObject* result = PyObject_Vectorcall(inner_call, args, flagged, keywords);
  Session* session = current.load(std::memory_order_relaxed);
  if (session != nullptr && entered_in == generation && thread.stack.size() > height) leave(*session, thread, height);
  return result;
}

PyObject* py_short_cut(PyObject*, PyObject* args) {
  PyObject *wrapper, *wrapped;
  if (!PyArg_ParseTuple(args, "O!O", &PyFunction_Type, &wrapper, &wrapped)) return nullptr;
  Py_INCREF(wrapped);
  Py_XSETREF(inner_call, wrapped);
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(reinterpret_cast<PyFunctionObject*>(wrapper), traced_call);
#else
  reinterpret_cast<PyFunctionObject*>(wrapper)->vectorcall = traced_call;
#endif
  Py_RETURN_NONE;
}

PyObject* py_wrap_pass(PyObject*, PyObject* wrapped) {
  Py_INCREF(wrapped);
  Py_XSETREF(inner_pass, wrapped);
  Py_RETURN_NONE;
}

PyObject* py_event(PyObject*, PyObject* args) {
  long long meta, value;
  if (!PyArg_ParseTuple(args, "LL", &meta, &value)) return nullptr;
  Session* session = current.load(std::memory_order_relaxed);
  if (session == nullptr) Py_RETURN_NONE;
  Thread& thread = this_thread();
  if (thread.generation == generation || add_thread(*session, thread)) write(*session, thread.bits | meta, value);
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject*, PyObject* identity) {
  Session* session = current.load(std::memory_order_relaxed);
  if (session != nullptr) session->names.erase(reinterpret_cast<PyObject*>(PyLong_AsVoidPtr(identity)));
  Py_RETURN_NONE;
}

void end(Session* session) {
  forget_passes();
  {
    std::lock_guard<std::mutex> lock(threads_mutex);
    for (const auto& thread : threads) {
      while (thread->busy.load(std::memory_order_seq_cst)) std::this_thread::yield();
    }
  }
  PyBuffer_Release(&session->buffer);
  release(*session);
}

PyObject* py_start(PyObject*, PyObject* args) {
  auto session = std::make_unique<Session>();
  Py_ssize_t offset;
  unsigned long long capacity;
  if (!PyArg_ParseTuple(args, "w*nKOOOO", &session->buffer, &offset, &capacity, &session->find, &session->add_thread,
                        &session->sync, &session->fail)) {
    return nullptr;
  }
  if (current.load() != nullptr || static_cast<unsigned long long>(session->buffer.len) < offset + capacity * sizeof(Slot)) {
    PyBuffer_Release(&session->buffer);
    PyErr_SetString(PyExc_RuntimeError, "a session runs already, or the buffer is too small");
    return nullptr;
  }
  for (PyObject* callable : {session->find, session->add_thread, session->sync, session->fail}) Py_INCREF(callable);
  session->slots = reinterpret_cast<Slot*>(static_cast<char*>(session->buffer.buf) + offset);
  session->capacity = capacity;
  session->lap_bits = (capacity & (capacity - 1)) == 0 ? __builtin_ctzll(capacity) : -1;
  ++generation;
  head.store(0);
  current.store(session.release());
  Py_RETURN_NONE;
}

PyObject* py_stop(PyObject*, PyObject*) {
  Session* session = current.exchange(nullptr);
  if (session != nullptr) end(session);
  Py_RETURN_NONE;
}

// In a forked child: other threads are gone, and one of them may have been writing.
PyObject* py_after_fork(PyObject*, PyObject*) {
  Session* session = current.exchange(nullptr);
  for (const auto& thread : threads) thread->busy.store(false);
  if (session != nullptr) end(session);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"start", py_start, METH_VARARGS, "start(buffer, offset, capacity, find, add_thread, sync, fail): begin to note."},
    {"stop", py_stop, METH_NOARGS, "stop(): end it, once no thread writes any more."},
    {"after_fork", py_after_fork, METH_NOARGS, "after_fork(): stop, in a forked child."},
    {"short_cut", py_short_cut, METH_VARARGS, "short_cut(wrapper, wrapped): let calls of wrapper run here."},
    {"wrap_pass", py_wrap_pass, METH_O, "wrap_pass(wrapped): let run_pass run this."},
    {"run_pass", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_pass)), METH_FASTCALL | METH_KEYWORDS,
     "run_pass(outputs, ...): run a backward pass, and note when whose nodes run."},
    {"event", py_event, METH_VARARGS, "event(meta, value): write one event of this thread."},
    {"forget", py_forget, METH_O, "forget(identity): a module died."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "modtrace_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace modtrace

PyMODINIT_FUNC PyInit_modtrace_native() { return PyModule_Create(&modtrace::definition); }
