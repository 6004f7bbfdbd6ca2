#include "backward.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <exception>
#include <memory>

#include "backward_order.h"
#include "ring_writer.h"
#include "segment_hook.h"

namespace modtrace {
namespace {

// --- The observer, which torch calls around each node that runs ---

bool is_hooked(int graph_task) {
  return hooked_slot(graph_task).graph_task.load(std::memory_order_relaxed) == graph_task;
}

// The graph task whose node runs, or kNoGraphTask where the node is not to be noted.
int observed_graph_task() {
  const int graph_task = is_tracing() ? kNoGraphTask : current_graph_task();
  return graph_task >= 0 && is_hooked(graph_task) ? kNoGraphTask : graph_task;
}

// Ends a pass's segment where the observer took the pass over.
bool end_if_observed(uint64_t number) {
  const BackwardPass& pass = pass_slot(number);
  if (number == 0 || pass.number.load() != number || !pass.observed.load()) return false;
  end_pass(number);
  return true;
}

// Before a node runs: ends the segment before it on this thread where the observer took its pass over, and lets the
// node be noted itself where it is of such a pass. The thread that runs the nodes does both: a node whose begin was
// not noted has no end.
void end_observed_segments(ThreadState& thread) {
  if (end_if_observed(thread.segment_pass)) thread.segment_pass = 0;
  const int graph_task = current_graph_task();
  if (graph_task >= 0 && is_hooked(graph_task) && end_if_observed(hooked_slot(graph_task).pass.load())) {
    hooked_slot(graph_task).graph_task.store(kNoGraphTask);
  }
}

// A node that builds a graph makes nodes itself, which belong to the call that it belongs to itself.
void write_graph_built(ThreadState& thread) {
  if (C10_LIKELY(!at::GradMode::is_enabled())) return;
  write_without_gil(thread, kGraphBuilt << kKindShift | kNoName,
                    static_cast<int64_t>(at::sequence_number::peek() & kSequenceMask));
}

// An AccumulateGrad has no sequence number. It runs right after the node that made the gradient, and counts to that
// one.
bool is_accumulate_grad(const at::RecordFunction& function) { return function.seqNr() < 0; }

std::unique_ptr<at::ObserverContext> on_node_begin(const at::RecordFunction& function) {
  if (is_accumulate_grad(function)) return nullptr;
  ThreadState& thread = registered_thread();
  end_observed_segments(thread);
  const int graph_task = observed_graph_task();
  if (C10_UNLIKELY(graph_task < 0)) return nullptr;
  write_without_gil(thread, node_meta(kNodeBegin, function.forwardThreadId(), graph_task), function.seqNr());
  write_graph_built(thread);
  return nullptr;
}

void on_node_end(const at::RecordFunction& function, at::ObserverContext*) {
  const int graph_task = observed_graph_task();
  if (C10_UNLIKELY(graph_task < 0)) return;
  ThreadState& thread = this_thread();
  if (is_accumulate_grad(function)) {
    write_without_gil(thread, node_meta(kAccumulateEnd, function.forwardThreadId(), graph_task), 0);
    return;
  }
  write_graph_built(thread);
  write_without_gil(thread, node_meta(kNodeEnd, function.forwardThreadId(), graph_task), function.seqNr());
}

// Calls nest: the observer is on from the first add to the last remove. Both need the interpreter's lock.
void add_observer() {
  if (engine.observed_passes++ > 0) return;
  engine.observer = at::addGlobalCallback(
      at::RecordFunctionCallback(on_node_begin, on_node_end).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

void remove_observer() {
  if (--engine.observed_passes == 0) at::removeCallback(engine.observer);
}

// --- The hooks, one for each segment ---

// Two passes on one device take turns there, node by node. One inside of the other does not.
bool runs_beside_others(const ThreadState& thread) {
  return engine.running_passes > thread.open_passes && current_graph_task() < 0;
}

bool shares_device(const ThreadState& thread) {
  engine.device_shared |= runs_beside_others(thread);
  return engine.device_shared;
}

// Lets the observer take over the hooked passes on devices.
void observe_passes_on_devices() {
  for (BackwardPass& pass : engine.pass_slots) {
    if (pass.number.load() != 0 && pass.on_device && !pass.observed.exchange(true)) add_observer();
  }
}

// Hooks the segments of the graph behind the outputs, and returns the number of the pass; 0 where hooks cannot tell
// all.
uint64_t hook_segments(ThreadState& thread, PyObject* outputs) {
  thread.boundaries.add(at::sequence_number::peek());
  if (!thread.boundaries.allocated()) return 0;
  try {
    BackwardOrder order(thread.boundaries);
    if (!order.find(outputs) || (order.is_on_device() && shares_device(thread))) return 0;
    // One that runs around this one, or beside it, needs its hooks on the nodes that both run.
    if (engine.running_passes > 0 && order.meets_live_hook()) return 0;
    const uint64_t number = ++engine.last_pass;
    BackwardPass& pass = pass_slot(number);
    if (pass.number.load() != 0) return 0;
    const bool device_times =
        engine.device_times_active.load(std::memory_order_relaxed) && thread.device_boundaries.allocated();
    if (C10_UNLIKELY(device_times)) thread.device_boundaries.add(at::sequence_number::peek());
    order.hook_segments(number, device_times ? &thread.device_boundaries : nullptr);
    pass.graph_task.store(kNoGraphTask);
    pass.begun.store(false);
    pass.over.store(false);
    pass.observed.store(false);
    pass.on_device = order.is_on_device();
    pass.device_times = device_times;
    pass.number.store(number);
    return number;
  } catch (const std::exception&) {
    return 0;  // torch itself will say what is wrong with the graph
  }
}

// Whether a pass runs each node at most once, builds no graph, and runs all that its outputs lead to.
bool is_plain_backward(PyObject* const* args, Py_ssize_t count) {
  return count == 5 && args[3] == Py_False && PyTuple_Check(args[4]) && PyTuple_GET_SIZE(args[4]) == 0;
}

// Whether one of the tensors is a leaf; there are none where a pass runs all that its outputs lead to.
bool any_is_leaf(PyObject* inputs) {
  const Py_ssize_t count = PyTuple_GET_SIZE(inputs);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* input = PyTuple_GET_ITEM(inputs, i);
    if (THPVariable_Check(input) && THPVariable_Unpack(input).is_leaf()) return true;
  }
  return count == 0;
}

// Whether a pass builds a graph that another one goes on with: torch.func.grad always builds one, which its outermost
// level drops.
bool builds_graph(PyObject* create_graph) {
  if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return create_graph != Py_False;
  }
  const PyRef functorch = PyRef::steal(PyImport_ImportModule("torch._C._functorch"));
  const PyRef level =
      PyRef::steal(functorch ? PyObject_CallMethod(functorch.get(), "maybe_current_level", nullptr) : nullptr);
  PyErr_Clear();
  return !level || !PyLong_Check(level.get()) || PyLong_AsLong(level.get()) != 1;
}

// Whether the argument of this name is True.
bool is_true(const char* name, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  for (Py_ssize_t i = 0; keywords != nullptr && i < PyTuple_GET_SIZE(keywords); ++i) {
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, i), name) == 0) return args[count + i] == Py_True;
  }
  return false;
}

// Notes a pass that has given gradients to leaf tensors, where it may so have ended a training step.
void note_gradients(Session& session, const ThreadState& thread, PyObject* const* args, Py_ssize_t count,
                    PyObject* keywords) {
  if (session.steps_told || current_graph_task() >= 0 || count < 5 || !PyTuple_Check(args[4])) return;
  if (builds_graph(args[3]) || !any_is_leaf(args[4])) return;
  const int64_t returned = is_true("accumulate_grad", args, count, keywords) ? 0 : 1;
  write_with_gil(session, int64_t{kGradients} << kKindShift | thread.meta_bits | returned,
                 session.gradient_passes[returned]++);
}

// Whether the session of this generation runs.
bool is_running(uint64_t generation) {
  return engine.active_session.load(std::memory_order_relaxed) != nullptr && generation == current_generation();
}

// Ends a pass whose end torch told nobody of, as it failed. An event of the device may wait, see
// queue_device_event_without_gil.
void end_pass_without_gil(uint64_t number) {
  if (C10_LIKELY(pass_slot(number).over.load())) return;
  Py_BEGIN_ALLOW_THREADS end_pass(number);
  Py_END_ALLOW_THREADS
}

// Notes that this thread calls what runs a pass, or that it is back.
void write_pass_edge(Session& session, const ThreadState& thread, Kind kind, int64_t call) {
  write_with_gil(session, kind << kKindShift | thread.meta_bits | kNoName, call);
}

// What one wrapper of the function that runs a pass wraps, and whether it notes passes.
struct BackwardWrapper {
  PyRef wrapped;
  bool active = false;
};

BackwardWrapper* wrapper_in(PyObject* capsule) {
  return static_cast<BackwardWrapper*>(PyCapsule_GetPointer(capsule, nullptr));
}

PyObject* run_backward(PyObject* capsule, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  const BackwardWrapper* wrapper = wrapper_in(capsule);
  if (wrapper == nullptr) return nullptr;
  const PyRef wrapped = PyRef::borrow(wrapper->wrapped.get());
  Session* session = wrapper->active ? engine.active_session.load(std::memory_order_relaxed) : nullptr;
  ThreadState& thread = this_thread();
  if (session == nullptr || is_tracing() ||
      (thread.generation != current_generation() && !register_thread(*session, thread))) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  }
  const uint64_t generation = current_generation();
  const uint64_t number = is_plain_backward(args, count) ? hook_segments(thread, args[0]) : 0;
  const uint64_t first_sequence = at::sequence_number::peek();
  if (number == 0) {
    add_observer();
    if (runs_beside_others(thread)) observe_passes_on_devices();
  }
  ++engine.running_passes;
  ++thread.open_passes;
  const int64_t call = ++engine.pass_calls;
  write_pass_edge(*session, thread, kPassBegin, call);
  PyObject* result = PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  // Another thread may have ended the session meanwhile, and abandoned this pass.
  if (!is_running(generation)) return result;
  Session& running = *engine.active_session.load();
  write_pass_edge(running, thread, kPassEnd, call);
  if (result != nullptr) note_gradients(running, thread, args, count, keywords);
  --engine.running_passes;
  --thread.open_passes;
  if (number != 0) {
    end_pass_without_gil(number);
    if (!is_running(generation)) return result;
    pass_slot(number).number.store(0);
    if (pass_slot(number).observed.load()) remove_observer();
  } else {
    remove_observer();
    // The nodes that an observed pass made belong to many calls.
    thread.boundaries.add_all(first_sequence, at::sequence_number::peek());
  }
  return result;
}

// Takes its arguments as a C array: not the type that PyMethodDef has for all.
PyMethodDef run_backward_definition = {
    "run_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_backward)), METH_FASTCALL | METH_KEYWORDS,
    "run_backward(outputs, ...): run a backward pass, and note whose nodes run."};

}  // namespace

PyObject* wrap_backward(PyObject*, PyObject* wrapped) {
  const PyRef capsule = PyRef::steal(PyCapsule_New(new BackwardWrapper{PyRef::borrow(wrapped)}, nullptr,
                                                   [](PyObject* object) { delete wrapper_in(object); }));
  return capsule ? PyCFunction_New(&run_backward_definition, capsule.get()) : nullptr;
}

PyObject* set_backward_active(PyObject*, PyObject* args) {
  PyObject* function;
  int active;
  if (!PyArg_ParseTuple(args, "O!p", &PyCFunction_Type, &function, &active)) return nullptr;
  BackwardWrapper* wrapper = wrapper_in(PyCFunction_GetSelf(function));
  if (wrapper == nullptr) return nullptr;
  wrapper->active = active != 0;
  Py_RETURN_NONE;
}

void abandon_backward_passes() {
  for (BackwardPass& pass : engine.pass_slots) pass.number.store(0);
  engine.running_passes = 0;
  while (engine.observed_passes > 0) remove_observer();
}

}  // namespace modtrace
