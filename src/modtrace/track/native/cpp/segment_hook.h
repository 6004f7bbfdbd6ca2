// The hook on the first node of a segment, and the backward pass that it belongs to.

#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>

#include "backward.h"
#include "device/calls.h"
#include "ring_writer.h"

namespace modtrace {

inline BackwardPass& pass_slot(uint64_t number) { return engine.pass_slots[number % kMaxConcurrentPasses]; }

inline HookedGraphTask& hooked_slot(int graph_task) {
  return engine.hooked_graph_tasks[graph_task % kMaxConcurrentPasses];
}

// Notes that a pass is over: once, and only where it began.
inline void end_pass(uint64_t number) {
  BackwardPass& pass = pass_slot(number);
  if (pass.number.load() != number || !pass.begun.load() || pass.over.exchange(true)) return;
  ThreadState& thread = registered_thread();
  write_without_gil(thread, kBackwardOver << kKindShift | kNoName, static_cast<int64_t>(number & kBackwardPassMask));
  if (C10_UNLIKELY(pass.device_times)) queue_device_event(thread);
}

// Notes that the nodes from this one on belong to another call than those before.
class SegmentHook final : public torch::autograd::FunctionPreHook {
 public:
  SegmentHook(uint64_t pass_number, uint64_t forward_thread, uint64_t sequence, bool on_device)
      : pass_number_(pass_number), on_device_(on_device), forward_thread_(forward_thread), sequence_(sequence) {}

  // Whether the pass that it is of runs still.
  bool is_live() const {
    const uint64_t number = pass_number_.load();
    return number != 0 && pass_slot(number).number.load() == number;
  }

  // Takes the hook over for another pass: the graph was retained, and runs again.
  void set_pass(uint64_t pass_number, bool on_device) {
    on_device_.store(on_device);
    pass_number_.store(pass_number);
  }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const uint64_t number = pass_number_.load(std::memory_order_relaxed);
    BackwardPass& pass = pass_slot(number);
    if (C10_LIKELY(pass.number.load(std::memory_order_acquire) == number)) begin_segment(pass, number);
    return gradients;
  }

  // What torch.compile makes of a backward runs no hooks of ours. One of the two overrides, by torch's version.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {}

 private:
  void begin_segment(BackwardPass& pass, uint64_t number) const {
    const int graph_task = current_graph_task();
    if (C10_UNLIKELY(graph_task < 0 || pass.observed.load())) return;
    int of_pass = kNoGraphTask;
    if (!pass.graph_task.compare_exchange_strong(of_pass, graph_task) && of_pass != graph_task) return;
    ThreadState& thread = registered_thread();
    if (C10_UNLIKELY(!pass.begun.load(std::memory_order_relaxed)) && !pass.begun.exchange(true)) {
      torch::autograd::Engine::get_default_engine().queue_callback([number] { end_pass(number); });
    }
    HookedGraphTask& hooked = hooked_slot(graph_task);
    hooked.pass.store(number, std::memory_order_relaxed);
    hooked.graph_task.store(graph_task, std::memory_order_relaxed);
    thread.segment_pass = number;
    write_without_gil(
        thread, node_meta(kSegmentBegin, forward_thread_, 0),
        static_cast<int64_t>((number & kBackwardPassMask) << kSequenceBits | (sequence_ & kSequenceMask)));
    if (C10_UNLIKELY(on_device_.load(std::memory_order_relaxed))) queue_device_event(thread);
  }

  std::atomic<uint64_t> pass_number_;
  std::atomic<bool> on_device_;  // whether an event of the device is recorded here
  uint64_t forward_thread_, sequence_;
};

}  // namespace modtrace
