// The observer, which torch calls around each autograd node that runs: for backward passes whose order is not known.

#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <memory>

#include "graph_task.h"
#include "ring_writer.h"

namespace modtrace {

inline bool is_hooked(int graph_task) {
  const auto& hooked = engine.hooked_graph_tasks[graph_task % kMaxConcurrentPasses];
  return hooked.load(std::memory_order_relaxed) == graph_task + 1;
}

// The graph task whose node runs, or kNoGraphTask where the node is not to be noted.
inline int observed_graph_task() {
  const int graph_task = is_tracing() ? kNoGraphTask : current_graph_task();
  return graph_task >= 0 && is_hooked(graph_task) ? kNoGraphTask : graph_task;
}

// A node that builds a graph makes nodes itself, which belong to the call that it belongs to itself.
inline void write_graph_built(ThreadState& thread) {
  if (C10_LIKELY(!at::GradMode::is_enabled())) return;
  write_without_gil(thread, kGraphBuilt << kKindShift | kNoName,
                    static_cast<int64_t>(at::sequence_number::peek() & kSequenceMask));
}

// An AccumulateGrad has no sequence number. It runs right after the node that made the gradient, and counts to that
// one.
inline bool is_accumulate_grad(const at::RecordFunction& function) { return function.seqNr() < 0; }

inline std::unique_ptr<at::ObserverContext> on_node_begin(const at::RecordFunction& function) {
  if (is_accumulate_grad(function)) return nullptr;
  const int graph_task = observed_graph_task();
  if (C10_UNLIKELY(graph_task < 0)) return nullptr;
  ThreadState& thread = registered_thread();
  write_without_gil(thread, node_meta(kNodeBegin, function.forwardThreadId(), graph_task), function.seqNr());
  write_graph_built(thread);
  return nullptr;
}

inline void on_node_end(const at::RecordFunction& function, at::ObserverContext*) {
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
inline void add_observer() {
  if (engine.observed_passes++ > 0) return;
  engine.observer = at::addGlobalCallback(
      at::RecordFunctionCallback(on_node_begin, on_node_end).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

inline void remove_observer() {
  if (--engine.observed_passes == 0) at::removeCallback(engine.observer);
}

}  // namespace modtrace
