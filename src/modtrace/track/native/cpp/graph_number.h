#pragma once

#include <Python.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <functional>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace modtrace {

// Below zero, unlike sizes of tensors and ids of module names.
constexpr int64_t kNestingMark = -2, kOtherMark = -3;

// A hash of the facts that decide the work of a backward pass: the kinds, shapes and edges of the nodes to which its
// outputs lead; the nodes' sequence numbers, which differ for modules of the same shapes; and the requested gradients.
class GraphNumber {
 public:
  // False if an output is not a tensor, but an edge of the graph.
  bool add_outputs(PyObject* outputs) {
    const bool are_tensors = add_tensors(outputs, true);
    for (size_t i = 0; i < nodes_.size(); ++i) add_node(*nodes_[i]);
    return are_tensors;
  }
  bool add_inputs(PyObject* inputs) { return add_tensors(inputs, false); }
  void add(int64_t value) {
    number_ = (number_ ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15;
    number_ ^= number_ >> 32;
  }
  int64_t number() const { return static_cast<int64_t>(number_); }

 private:
  using Node = torch::autograd::Node;

  bool add_tensors(PyObject* tensors, bool are_roots) {
    if (!PyTuple_Check(tensors)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
      PyObject* object = PyTuple_GET_ITEM(tensors, i);
      if (!THPVariable_Check(object)) return false;
      const at::Tensor& tensor = THPVariable_Unpack(object);
      const auto accumulator = tensor.grad_fn() ? nullptr : torch::autograd::impl::try_get_grad_accumulator(tensor);
      Node* node = accumulator ? accumulator.get() : tensor.grad_fn().get();
      add(tensor.output_nr());
      if (are_roots) {
        reach(node);
      } else {
        const auto found = places_.find(node);
        add(found == places_.end() ? -1 : found->second);
      }
    }
    return true;
  }

  void add_node(const Node& node) {
    const char* kind = typeid(node).name();
    add(reinterpret_cast<int64_t>(kind));
    if (const uint64_t sequence = node.sequence_nr(); sequence != UINT64_MAX)
      add(static_cast<int64_t>(sequence - base_));
    // All nodes of Python functions have the same C++ type.
    if (std::strstr(kind, "PyNode") != nullptr) add(static_cast<int64_t>(std::hash<std::string>()(node.name())));
    for (uint32_t i = 0; i < node.num_inputs(); ++i) {
      const auto& metadata = node.input_metadata(i);
      add(kNestingMark);
      if (metadata.is_cpp_nested_tensor()) continue;
      for (const c10::SymInt& size : metadata.shape_as_dim_vector()) {
        add(size.is_heap_allocated() ? kOtherMark : size.as_int_unchecked());
      }
    }
    for (const auto& edge : node.next_edges()) {
      add(edge.input_nr);
      reach(edge.function.get());
    }
  }

  void reach(Node* node) {
    if (nodes_.empty() && node != nullptr) base_ = node->sequence_nr();
    const auto [place, is_new] = places_.emplace(node, static_cast<int64_t>(nodes_.size()));
    if (is_new && node != nullptr) nodes_.push_back(node);
    add(node == nullptr ? -1 : place->second);
  }

  uint64_t base_ = 0;  // the sequence number of the first output's node
  uint64_t number_ = 0;
  std::unordered_map<const Node*, int64_t> places_;
  std::vector<const Node*> nodes_;
};

}  // namespace modtrace
