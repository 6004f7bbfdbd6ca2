// Backward passes: whose nodes run, and from when on.
//
// The engine of torch runs the ready node with the highest sequence number first. Where each node leads only to older
// ones, and all were made by this thread and run on one device, the order is therefore known before the pass:
// descending. A hook on the first node of each segment (a run of nodes that one call made) is then enough, and all
// other nodes run as without modtrace. Any other pass is watched by an observer, node by node, which costs torch four
// times as much for each.

#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/macros/Macros.h>

#include "py_ref.h"
#include "slot_format.h"

// Declared as torch/csrc/autograd/graph_task.h does; to include that takes as long as to compile all else in a file.
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace modtrace {

constexpr int kNoGraphTask = -1;

// The graph task whose node this thread runs, or kNoGraphTask.
inline int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }

// Whether torch.compile traces. What it runs then, in no graph task or on fake tensors, is not a pass of the user's.
inline bool is_tracing() {
  return C10_UNLIKELY(c10::impl::TorchDispatchModeTLS::any_modes_set()) &&
         c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

// Kind and name of a node's event.
inline int64_t node_meta(Kind kind, uint64_t forward_thread, int graph_task) {
  return kind << kKindShift | static_cast<int64_t>((forward_thread & kForwardThreadMask) << kForwardThreadShift |
                                                   (static_cast<uint64_t>(graph_task) & kGraphTaskMask));
}

// Returns a function that stands in the place of torch.autograd.graph._engine_run_backward, and takes what that takes:
// (outputs, gradients, retain_graph, create_graph, inputs). It notes whose nodes run while it is active (set_active).
PyObject* wrap_backward(PyObject*, PyObject* wrapped);

// The same for torch.autograd._make_grads, which runs first: the pass begins with it.
PyObject* wrap_make_gradients(PyObject*, PyObject* wrapped);

// Gives torch the observer of nodes, switched off, once per process.
void watch_nodes();

// Where a session ends: takes the observer off, and lets the hooks of passes that still run do nothing.
void abandon_backward_passes();

}  // namespace modtrace
