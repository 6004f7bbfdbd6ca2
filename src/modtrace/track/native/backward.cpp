#include "backward.h"

#include <ATen/SequenceNumber.h>

#include <exception>

#include "backward_order.h"
#include "graph_task.h"
#include "node_observer.h"
#include "ring_writer.h"
#include "segment_hook.h"

namespace modtrace {
namespace {

// Two passes on one device take turns there, node by node. One inside of the other does not.
bool shares_device(const ThreadState& thread) {
  engine.device_shared |= engine.running_passes > thread.open_passes && current_graph_task() < 0;
  return engine.device_shared;
}

// Hooks the segments of the graph behind the outputs, and returns the number of the pass; 0 where hooks cannot tell
// all.
uint64_t hook_segments(ThreadState& thread, PyObject* outputs) {
  thread.boundaries.add(at::sequence_number::peek());
  if (!thread.boundaries.allocated()) return 0;
  try {
    BackwardOrder order;
    if (!order.find(outputs) || (order.is_on_device() && shares_device(thread))) return 0;
    const uint64_t number = ++engine.last_pass;
    BackwardPass& pass = pass_slot(number);
    if (pass.number.load() != 0) return 0;
    order.hook_segments(thread.boundaries, number);
    pass.begun.store(false);
    pass.over.store(false);
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

}  // namespace

PyObject* run_backward(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  ThreadState& thread = this_thread();
  if (session == nullptr || is_tracing() ||
      (thread.generation != engine.generation && !register_thread(*session, thread))) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(engine.wrapped_backward, args, count, keywords);
  }
  const uint64_t generation = engine.generation;
  const uint64_t number = is_plain_backward(args, count) ? hook_segments(thread, args[0]) : 0;
  const uint64_t first_sequence = at::sequence_number::peek();
  if (number == 0) add_observer();
  ++engine.running_passes;
  ++thread.open_passes;
  PyObject* result = PyObject_Vectorcall(engine.wrapped_backward, args, count, keywords);
  // Another thread may have ended the session meanwhile, and abandoned this pass.
  if (generation != engine.generation || engine.active_session.load(std::memory_order_relaxed) == nullptr)
    return result;
  --engine.running_passes;
  --thread.open_passes;
  if (number != 0) {
    end_pass(number);
    pass_slot(number).number.store(0);
  } else {
    remove_observer();
    // The nodes that an observed pass made belong to many calls.
    thread.boundaries.add_all(first_sequence, at::sequence_number::peek());
  }
  return result;
}

void abandon_backward_passes() {
  for (BackwardPass& pass : engine.pass_slots) pass.number.store(0);
  engine.running_passes = 0;
  while (engine.observed_passes > 0) remove_observer();
}

}  // namespace modtrace
