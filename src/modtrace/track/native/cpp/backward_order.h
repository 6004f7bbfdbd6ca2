// The order in which a backward pass will run its nodes, where that is known beforehand.

#pragma once

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
constexpr size_t kUsualNodes = 256;  // of a pass: more take more allocations

// Where the engine of torch runs the node: on the device of the first gradient that is not on the CPU.
inline at::Device device_of(const torch::autograd::Node& node) {
  static const at::Device cpu(at::kCPU);  // to make one takes longer than to copy it
  for (uint32_t input = 0; input < node.num_inputs(); ++input) {
    const at::Device device = node.input_metadata(input).device();
    if (device.type() != at::kCPU) return device;
  }
  return cpu;
}

// The nodes of a pass in the order in which they run: from the newest to the oldest.
class BackwardOrder {
 public:
  // The boundaries of this thread, up to the next node that it will make.
  explicit BackwardOrder(const SequenceBoundaries& boundaries)
      : boundaries_(boundaries), forward_thread_(at::RecordFunction::currentThreadId()) {
    reached_.reserve(kUsualNodes);
    nodes_.reserve(kUsualNodes);
  }

  // Walks the graph behind the outputs. False where the order is not known; then it stops there.
  bool find(PyObject* outputs) {
    if (!PyTuple_Check(outputs)) return false;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(outputs); ++index) {
      PyObject* output = PyTuple_GET_ITEM(outputs, index);
      if (!THPVariable_Check(output)) return false;
      const auto root = THPVariable_Unpack(output).grad_fn();
      if (root && !reach(*root)) return false;
    }
    while (!reached_.empty()) {
      const NumberedNode newest = take_newest();
      if (!nodes_.empty() && newest.sequence == nodes_.back().sequence) {
        if (newest.node != nodes_.back().node) return false;
        continue;
      }
      if (!is_in_order(newest)) return false;
      nodes_.push_back(newest);
      for (const auto& edge : newest.node->next_edges()) {
        if (!edge.function) continue;
        const uint64_t sequence = edge.function->sequence_nr();
        if (sequence >= newest.sequence && sequence != kAccumulateGradSeq) return false;
        if (!reach(*edge.function)) return false;
      }
    }
    return true;
  }

  bool is_on_device() const { return device_ && device_->type() != at::kCPU; }

  // Whether any of the nodes has the hook of a pass that runs still.
  bool meets_live_hook() const {
    return std::any_of(nodes_.begin(), nodes_.end(), [](const NumberedNode& node) {
      const SegmentHook* hook = hook_of(node);
      return hook != nullptr && hook->is_live();
    });
  }

  // Hooks the first node to run of each segment.
  //
  // device_boundaries: where the nodes of calls that get events of the device begin, or null where none do.
  void hook_segments(uint64_t pass_number, const SequenceBoundaries* device_boundaries) const {
    for (size_t index = 0; index < nodes_.size(); ++index) {
      const NumberedNode& node = nodes_[index];
      const uint64_t newer = index == 0 ? 0 : nodes_[index - 1].sequence;
      if (index != 0 && !boundaries_.any(node.sequence + 1, newer)) continue;
      const bool on_device =
          device_boundaries != nullptr && (index == 0 || (device_boundaries->reaches(node.sequence) &&
                                                          device_boundaries->any(node.sequence + 1, newer)));
      add_hook(node, pass_number, on_device);
    }
  }

 private:
  struct NumberedNode {
    uint64_t sequence;
    torch::autograd::Node* node;
    bool operator<(const NumberedNode& other) const { return sequence < other.sequence; }
  };

  // Notes that the pass runs this node; a node can be noted more than once before it is taken. False for one that
  // is neither of the order nor an AccumulateGrad.
  bool reach(torch::autograd::Node& node) {
    const uint64_t sequence = node.sequence_nr();
    if (sequence == kAccumulateGradSeq) return node.num_outputs() == 0;
    reached_.push_back({sequence, &node});
    std::push_heap(reached_.begin(), reached_.end());
    return true;
  }

  NumberedNode take_newest() {
    std::pop_heap(reached_.begin(), reached_.end());
    const NumberedNode newest = reached_.back();
    reached_.pop_back();
    return newest;
  }

  // Whether the node is of this thread, on the device of the others, and not too old for its boundaries to be known.
  bool is_in_order(const NumberedNode& numbered) {
    if (numbered.node->thread_id() != forward_thread_ || !boundaries_.reaches(numbered.sequence)) return false;
    const at::Device device = device_of(*numbered.node);
    if (device_.value_or(device) != device) return false;
    device_ = device;
    return true;
  }

  static SegmentHook* hook_of(const NumberedNode& numbered) {
    for (const auto& hook : numbered.node->pre_hooks()) {
      if (auto* ours = dynamic_cast<SegmentHook*>(hook.get())) return ours;
    }
    return nullptr;
  }

  void add_hook(const NumberedNode& numbered, uint64_t pass_number, bool on_device) const {
    if (SegmentHook* hook = hook_of(numbered)) {
      hook->set_pass(pass_number, on_device);
      return;
    }
    numbered.node->add_pre_hook(
        std::make_unique<SegmentHook>(pass_number, forward_thread_, numbered.sequence, on_device));
  }

  const SequenceBoundaries& boundaries_;
  uint64_t forward_thread_;
  std::optional<at::Device> device_;
  std::vector<NumberedNode> reached_;  // a heap: the newest first
  std::vector<NumberedNode> nodes_;    // from the newest to the oldest
};

}  // namespace modtrace
