#include "module_calls.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/profiler/api.h>

#include <utility>
#include <vector>

#include "backward.h"
#include "device/calls.h"
#include "engine.h"
#include "flops.h"

namespace modtrace {
namespace {

constexpr int64_t kNotFound = -1;
constexpr char kInnerCall[] = "inner call";  // see INNER_CALL in line_gaps.py

// Asks Python for the module's name below the open calls; kNotFound if that failed or the session ended.
int64_t resolve_name(Session& session, ThreadState& thread, PyObject* module, int64_t parent) {
  const SessionRef hold(session);
  if (memory.counting.load(std::memory_order_relaxed)) note_parameters(module);
  // Copied first: making a Python object can run the garbage collector, and objects that die then can call modules.
  std::vector<std::pair<PyRef, int64_t>> copies;
  copies.reserve(thread.open_calls.size());
  for (auto call = thread.open_calls.rbegin(); call != thread.open_calls.rend(); ++call) {
    copies.emplace_back(borrow(call->module.get()), call->name_id);
  }
  const PyRef open_calls = steal(PyList_New(0));
  for (const auto& [open_module, name_id] : copies) {
    const PyRef pair = steal(Py_BuildValue("(OL)", open_module.get(), static_cast<long long>(name_id)));
    if (!open_calls || !pair || PyList_Append(open_calls.get(), pair.get()) != 0) break;
  }
  const PyRef found = ask(session, session.resolve_name, module, open_calls.get());
  if (!found) return kNotFound;
  const int64_t name_id = PyLong_AsLongLong(found.get());
  session.names[module].emplace_back(parent, name_id);
  if (name_id != kNoName && session.forward_calls.size() <= static_cast<size_t>(name_id)) {
    session.forward_calls.resize(name_id + 1);
    session.recompute_calls.resize(name_id + 1);
  }
  return name_id;
}

int64_t name_of(Session& session, ThreadState& thread, PyObject* module) {
  // A new module may have the address of a dead one.
  if (C10_UNLIKELY(PyList_GET_SIZE(session.dead.get()) != 0) && !ask(session, session.forget_dead)) {
    return kNotFound;
  }
  const int64_t parent = thread.open_calls.empty() ? kNoName : thread.open_calls.back().name_id;
  const auto known = session.names.find(module);
  if (C10_LIKELY(known != session.names.end())) {
    for (const auto& [known_parent, name_id] : known->second) {
      if (known_parent == parent) return name_id;
    }
  }
  return resolve_name(session, thread, module, parent);
}

// The arguments of the wrapper's vectorcall, without the module.
struct Inputs {
  PyObject* const* args;
  size_t flagged_count;
  PyObject* keywords;

  // Their number, keyword arguments included.
  Py_ssize_t count() const {
    return PyVectorcall_NARGS(flagged_count) - 1 + (keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords));
  }

  // Null, with an error, if there is no memory.
  PyRef as_tuple() const {
    PyRef inputs = steal(PyTuple_New(count()));
    for (Py_ssize_t i = 0; inputs && i < count(); ++i) {
      PyTuple_SET_ITEM(inputs.get(), i, borrow(args[i + 1]).release());
    }
    return inputs;
  }
};

// Asks whether a checkpoint makes this call inside backward: 1 or 0; below 0 if that failed or the session ended. A
// call inside a call of the same graph task has the answer of that call.
int runs_again(Session& session, ThreadState& thread, PyObject* module, const Inputs& inputs, int graph_task) {
  if (!thread.open_calls.empty() && thread.open_calls.back().graph_task == graph_task) {
    return (thread.open_calls.back().exit_meta >> kKindShift) == kRecomputeExit;
  }
  const SessionRef hold(session);
  const PyRef values = inputs.as_tuple();
  const PyRef answer = ask(session, session.runs_again, module, values.get());
  return answer ? answer.get() == Py_True : kNotFound;
}

void write_call(Session& session, ThreadState& thread, int64_t meta, int64_t value) {
  const uint64_t sequence = at::sequence_number::peek();
  thread.boundaries.add(sequence);
  write_with_gil(session, meta, value | static_cast<int64_t>(sequence & kSequenceMask));
}

// Whether a module is in eval mode. Read from its dictionary, so that no code of the user's runs.
bool is_in_eval_mode(PyObject* module) {
  static PyObject* const name = PyUnicode_InternFromString("training");
  const PyRef fields = name == nullptr ? PyRef() : steal(PyObject_GenericGetDict(module, nullptr));
  PyObject* training = fields && PyDict_Check(fields.get()) ? PyDict_GetItemWithError(fields.get(), name) : nullptr;
  if (training == nullptr) PyErr_Clear();
  return training == Py_False;
}

// Writes the enter event of a module's call. False if nothing was written, so that no exit may be written; an error
// that is the user's is pending then.
bool enter(PyObject* module, const Inputs& inputs) {
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session == nullptr) return false;
  ThreadState& thread = this_thread();
  follow_greenlet(thread);
  if (C10_UNLIKELY(thread.generation != current_generation()) && !register_thread(*session, thread)) return false;
  if (thread.open_calls.empty()) {
    // Writes a sync mark if it is due: they align the recording with torch.profiler's trace.
    if (C10_UNLIKELY(torch::profiler::impl::profilerEnabled()) && !ask(*session, session->emit_sync_mark)) return false;
    if (C10_UNLIKELY(static_cast<bool>(session->begin_device_times))) {
      const PyRef begun = ask(*session, session->begin_device_times);
      if (!begun) return false;
      if (begun.get() == Py_True) session->begin_device_times = PyRef();
    }
    if (!session->steps_told && session->gradient_passes[0] == 0) write_held(*session, thread);
  }
  const int64_t name_id = name_of(*session, thread, module);
  if (name_id < 0 || name_id == kNoName) return false;
  const uint64_t sequence = at::sequence_number::peek();
  if (C10_UNLIKELY(sequence != thread.noted_sequence && !c10::GradMode::is_enabled())) {
    thread.noted_sequence = sequence;
    // The first call after a node, if no graph is made.
    const SessionRef hold(*session);
    const PyRef values = inputs.as_tuple(), number = steal(PyLong_FromUnsignedLongLong(sequence));
    if (!ask(*session, session->note_call, module, values.get(), number.get())) return false;
  }
  const int graph_task = current_graph_task();
  bool recompute = false;
  if (C10_UNLIKELY(graph_task != kNoGraphTask)) {
    const int answer = runs_again(*session, thread, module, inputs, graph_task);
    if (answer < 0) return false;
    recompute = answer != 0;
    const bool is_inner = !thread.open_calls.empty() && thread.open_calls.back().graph_task == graph_task;
    if (C10_UNLIKELY(recompute && !is_inner && session->answer_operators)) {
      meet_rerun(*session, thread, name_id);
      if (!is_active(*session)) return false;
    }
  }
  int64_t kind = recompute ? kRecomputeEnter : kForwardEnter, met_inputs = kNotMet;
  if (!recompute && thread.open_calls.empty()) {
    const bool in_eval_mode = is_in_eval_mode(module);
    if (in_eval_mode) kind = kEvalEnter;
    if (C10_UNLIKELY(static_cast<bool>(session->answer_operators))) {
      met_inputs = meet_inputs(*session, thread, name_id, !in_eval_mode, inputs.args + 1, inputs.count());
      if (!is_active(*session)) return false;
    }
  }
  if (C10_UNLIKELY(static_cast<bool>(session->on_boundary)) &&
      (thread.open_calls.empty() || graph_task == kNoGraphTask)) {
    const PyRef values = inputs.as_tuple();
    if (!values) PyErr_Clear();  // without memory, the inputs are not reported
    const char* begins = thread.open_calls.empty() ? "forward" : kInnerCall;
    ask_at_boundary(*session, begins, values ? module : nullptr, values.get());
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr) || !is_active(*session)) return false;
  }
  int64_t& calls = (recompute ? session->recompute_calls : session->forward_calls)[name_id];
  const int64_t value = static_cast<int64_t>((static_cast<uint64_t>(calls++) & kCallIndexMask) << kSequenceBits);
  const int64_t meta = thread.meta_bits | name_id;
  const int64_t exit_meta = (recompute ? kRecomputeExit : kForwardExit) << kKindShift | meta;
  thread.open_calls.push_back({borrow(module), name_id, graph_task, exit_meta, value});
  write_call(*session, thread, kind << kKindShift | meta, value);
  if (C10_UNLIKELY(met_inputs != kNotMet)) {
    write_with_gil(*session, int64_t{kInputs} << kKindShift | thread.meta_bits | kNoName, met_inputs);
  }
  if (C10_UNLIKELY(engine.device_times_active.load(std::memory_order_relaxed))) {
    queue_device_event_of_call(*session, thread, name_id);
  }
  return true;
}

// A wrapper that other code has wrapped meanwhile cannot be removed: it passes calls on.
PyObject* pass_on(PyObject* wrapper, PyObject* const* args, size_t flagged_count, PyObject* keywords) {
  const PyRef wrapped = steal(PyObject_GetAttrString(wrapper, kWrappedCall));
  return wrapped ? PyObject_Vectorcall(wrapped.get(), args, flagged_count, keywords) : nullptr;
}

// Writes the exit event of the call at this height of the stack. Calls above it lost their exits to an interrupt.
void exit(Session& session, ThreadState& thread, size_t height) {
  const OpenCall& call = thread.open_calls[height];
  write_call(session, thread, call.exit_meta, call.exit_value);
  if (C10_UNLIKELY(engine.device_times_active.load(std::memory_order_relaxed))) {
    queue_device_event_of_call(session, thread, call.name_id);
  }
  drop_open_calls(thread, height);
  // Objects that died there may have ended the session.
  if (height != 0 || !is_active(session)) return;
  tell_boundary(session, nullptr);
  if (is_active(session) && thread.open_passes == 0) tell_end(session, ++session.outermost_calls, "forward");
}

}  // namespace

PyObject* call_module(PyObject* wrapper, PyObject* const* args, size_t flagged_count, PyObject* keywords) {
  if (C10_UNLIKELY(wrapper != engine.call_wrapper)) return pass_on(wrapper, args, flagged_count, keywords);
  PyObject* wrapped = engine.wrapped_call;  // the wrapper that is called keeps it
  if (PyVectorcall_NARGS(flagged_count) == 0 || !enter(args[0], {args, flagged_count, keywords})) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(wrapped, args, flagged_count, keywords);
  }
  ThreadState& thread = this_thread();
  const uint64_t generation = thread.generation;
  const size_t height = thread.open_calls.size() - 1;
  PyObject* result = PyObject_Vectorcall(wrapped, args, flagged_count, keywords);
  follow_greenlet(thread);
  // The session may have ended meanwhile, or another one may have started; then the thread's open calls are dropped.
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (thread.generation == generation && thread.open_calls.size() > height) {
    if (session != nullptr && generation == current_generation()) {
      exit(*session, thread, height);
      if (height == 0 && result != nullptr && C10_UNLIKELY(PyErr_Occurred() != nullptr)) Py_CLEAR(result);
    } else {
      drop_open_calls(thread, height);
    }
  }
  return result;
}

}  // namespace modtrace
