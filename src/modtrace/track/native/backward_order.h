// The order in which a backward pass will run its nodes, where that is known beforehand.

#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "segment_hook.h"

namespace modtrace {

constexpr uint64_t kAccumulateGradSeq = std::numeric_limits<uint64_t>::max();

// Where the engine of torch runs the node: on the device of the first gradient that is not on the CPU.
inline at::Device device_of(const torch::autograd::Node& node) {
  for (uint32_t input = 0; input < node.num_inputs(); ++input) {
    const at::Device device = node.input_metadata(input).device();
    if (device.type() != at::kCPU) return device;
  }
  return at::kCPU;
}

// The nodes of a pass by age: how many nodes this thread has made since.
class BackwardOrder {
 public:
  BackwardOrder() : forward_thread_(at::RecordFunction::currentThreadId()), next_(at::sequence_number::peek()) {}

  // Walks the graph behind the outputs. False where the order is not known; then it stops there.
  bool find(PyObject* outputs) {
    if (!PyTuple_Check(outputs)) return false;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(outputs); ++index) {
      PyObject* output = PyTuple_GET_ITEM(outputs, index);
      if (!THPVariable_Check(output)) return false;
      const auto root = THPVariable_Unpack(output).grad_fn();
      if (root && !visit(*root)) return false;
    }
    while (!to_visit_.empty()) {
      torch::autograd::Node& node = *to_visit_.back();
      to_visit_.pop_back();
      for (const auto& edge : node.next_edges()) {
        if (!edge.function) continue;
        torch::autograd::Node& older = *edge.function;
        if (older.sequence_nr() >= node.sequence_nr() && older.sequence_nr() != kAccumulateGradSeq) return false;
        if (!visit(older)) return false;
      }
    }
    return true;
  }

  bool is_on_device() const { return device_ && device_->type() != at::kCPU; }

  // Hooks the first node to run of each segment.
  void hook_segments(const SequenceBoundaries& boundaries, uint64_t pass_number) {
    bool first = true;
    for (size_t age = 0; age < nodes_.size(); ++age) {
      const uint64_t sequence = next_ - 1 - age;
      if (nodes_[age] != nullptr && first) {
        add_hook(*nodes_[age], pass_number);
        first = false;
      }
      first |= boundaries.is_boundary(sequence);
    }
  }

 private:
  bool visit(torch::autograd::Node& node) {
    const uint64_t sequence = node.sequence_nr();
    if (sequence == kAccumulateGradSeq) return node.num_outputs() == 0;
    const uint64_t age = next_ - 1 - sequence;
    if (age >= kSequenceWindow || node.thread_id() != forward_thread_) return false;
    if (age >= nodes_.size()) nodes_.resize(std::max<size_t>(age + 1, 2 * nodes_.size()));
    if (nodes_[age] != nullptr) return nodes_[age] == &node;
    const at::Device device = device_of(node);
    if (device_.value_or(device) != device) return false;
    device_ = device;
    nodes_[age] = &node;
    to_visit_.push_back(&node);
    return true;
  }

  void add_hook(torch::autograd::Node& node, uint64_t pass_number) const {
    for (const auto& hook : node.pre_hooks()) {
      if (auto* ours = dynamic_cast<SegmentHook*>(hook.get())) return ours->set_pass(pass_number);
    }
    node.add_pre_hook(std::make_unique<SegmentHook>(pass_number, forward_thread_, node.sequence_nr()));
  }

  uint64_t forward_thread_;
  uint64_t next_;  // the sequence number of the next node that the thread will make
  std::optional<at::Device> device_;
  std::vector<torch::autograd::Node*> nodes_;  // by age; null where the pass does not run the node
  std::vector<torch::autograd::Node*> to_visit_;
};

}  // namespace modtrace
