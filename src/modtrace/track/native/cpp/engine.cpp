#include "engine.h"

#include <ATen/record_function.h>

#include <cstring>
#include <memory>

namespace modtrace {
namespace {

// Replaces torch.compile's callback for frames of this thread, and returns the earlier one. Null, with no error, if
// torch does not allow that.
PyRef exchange_compiler(PyObject* compiler) {
  static PyObject* set_eval_frame = nullptr;
  if (set_eval_frame == nullptr) {
    const PyRef module = steal(PyImport_ImportModule("torch._C._dynamo.eval_frame"));
    if (module) set_eval_frame = PyObject_GetAttrString(module.get(), "set_eval_frame");
  }
  PyRef before =
      steal(set_eval_frame == nullptr ? nullptr : PyObject_CallFunctionObjArgs(set_eval_frame, compiler, nullptr));
  if (!before) PyErr_Clear();
  return before;
}

// Calls a Python function. torch.compile replaces the evaluation of frames, and would compile this function into the
// user's; while it runs, frames are evaluated as usual.
PyRef call_without_dynamo(const PyRef& function, PyObject* first, PyObject* second = nullptr,
                          PyObject* third = nullptr) {
  const bool replaced = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault;
  const PyRef compiler = replaced ? exchange_compiler(Py_None) : PyRef();
  PyRef result = steal(PyObject_CallFunctionObjArgs(function.get(), first, second, third, nullptr));
  if (compiler) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    exchange_compiler(compiler.get());
    PyErr_Restore(type, value, traceback);
  }
  return result;
}

// Passes the pending Python error to the recording, which stops; the user's call goes on. If the recording raises the
// error again, it is the user's (an interrupt), and is pending afterwards.
void report_error(Session& session) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  const PyRef owned_type = steal(type), error = steal(value), owned_traceback = steal(traceback);
  // The session may end in this call.
  const PyRef on_error = borrow(session.on_error.get());
  call_without_dynamo(on_error, error ? error.get() : Py_None);
}

struct PendingError {
  PyObject *type, *value, *traceback;
};

// Called by the interpreter, in the main thread.
int raise_pending(void* argument) {
  const std::unique_ptr<PendingError> error(static_cast<PendingError*>(argument));
  PyErr_Restore(error->type, error->value, error->traceback);
  return -1;
}

}  // namespace

ThreadState* add_thread_state() {
  auto* state = new ThreadState;
  state->next = engine.threads.load();
  while (!engine.threads.compare_exchange_weak(state->next, state)) {
  }
  return state;
}

bool register_thread(Session& session, ThreadState& thread) {
  const SessionRef hold(session);
  follow_greenlet(thread);
  if (thread.generation == current_generation()) return true;
  drop_open_calls(thread, 0);
  const PyRef torch_thread_id = steal(PyLong_FromUnsignedLongLong(at::RecordFunction::currentThreadId()));
  const PyRef number = ask(session, session.add_thread, torch_thread_id.get());
  if (!number) return false;
  thread.meta_bits = PyLong_AsLongLong(number.get()) << kThreadShift;
  thread.open_passes = 0;
  thread.optimizer_steps = 0;
  thread.generation = current_generation();
  if (thread.noted_generation == thread.generation) return true;
  thread.noted_sequence = UINT64_MAX;
  thread.range_names.clear();
  thread.operators.clear();
  thread.noted_generation = thread.generation;
  return true;
}

void register_thread_without_gil(ThreadState& thread) {
  if (!Py_IsInitialized()) return;
  const GilLock gil;
  Session* session = engine.active_session.load();
  if (session == nullptr || thread.generation == current_generation()) return;
  if (!register_thread(*session, thread)) raise_later();
}

void release_session(Session& session) {
  if (--session.references == 0) delete &session;
}

PyRef ask(Session& session, const PyRef& function, PyObject* first, PyObject* second, PyObject* third) {
  const SessionRef hold(session);
  const PyRef held = borrow(function.get());  // the session may release it meanwhile
  PyRef answer = PyErr_Occurred() == nullptr ? call_without_dynamo(held, first, second, third) : PyRef();
  if (!answer) report_error(session);
  return is_active(session) ? std::move(answer) : PyRef();
}

namespace {

// Near the end of the stack, the program goes on as without modtrace.
void forget_recursion_error() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_RecursionError)) PyErr_Clear();
}

}  // namespace

void ask_at_boundary(Session& session, const char* begins, PyObject* module, PyObject* inputs) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const PyRef text = begins == nullptr
                         ? borrow(Py_None)
                         : steal(PyUnicode_DecodeUTF8(begins, static_cast<Py_ssize_t>(std::strlen(begins)), "replace"));
  ask(session, session.on_boundary, text.get(), module, inputs);
  forget_recursion_error();
  if (type == nullptr) return;
  raise_later();
  PyErr_Restore(type, value, traceback);
}

void ask_at_end(Session& session, int64_t number, const char* kind) {
  if (PyErr_Occurred() != nullptr) return;
  ask(session, session.on_end, steal(PyLong_FromLongLong(number)).get(), steal(PyUnicode_FromString(kind)).get());
  forget_recursion_error();
}

void raise_later() {
  if (PyErr_Occurred() == nullptr) return;
  auto* error = new PendingError;
  PyErr_Fetch(&error->type, &error->value, &error->traceback);
  if (Py_AddPendingCall(raise_pending, error) == 0) return;
  raise_pending(error);  // too many are waiting
  PyErr_WriteUnraisable(nullptr);
}

}  // namespace modtrace
