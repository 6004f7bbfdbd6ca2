// Backward passes: the calls whose nodes run, and the times at which they start.
//
// The autograd engine runs the ready node with the highest sequence number first. If each node leads only to older
// nodes, and this thread made all nodes, which run on one device, the order is known before the pass: descending. Then
// a hook on the first node of each segment (a run of nodes that one call made) is enough, and all other nodes run as
// without modtrace. Any other pass is watched by an observer, node by node, at four times the cost for a node.

#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/macros/Macros.h>

#include "py_ref.h"
#include "slot_format.h"

// Declared as in torch/csrc/autograd/graph_task.h; including that header would double the compile time of a file.
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace modtrace {

constexpr int kNoGraphTask = -1;

// The graph task whose node this thread runs, or kNoGraphTask.
inline int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }

// Whether torch.compile traces. A pass that it runs then, in no graph task or on fake tensors, is not the user's.
inline bool is_tracing() {
  return C10_UNLIKELY(c10::impl::TorchDispatchModeTLS::any_modes_set()) &&
         c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

// Kind and name bits of a node's event.
inline int64_t node_meta(Kind kind, uint64_t forward_thread, int graph_task) {
  return kind << kKindShift | static_cast<int64_t>((forward_thread & kForwardThreadMask) << kForwardThreadShift |
                                                   (static_cast<uint64_t>(graph_task) & kGraphTaskMask));
}

// Returns a replacement of torch.autograd.graph._engine_run_backward with the same arguments: (outputs, gradients,
// retain_graph, create_graph, inputs). While it is active (set_active), it records the calls whose nodes run.
PyObject* wrap_backward(PyObject*, PyObject* wrapped);

// The same for torch.autograd._make_grads, with which a pass starts.
PyObject* wrap_make_gradients(PyObject*, PyObject* wrapped);

// Gives torch the observer of nodes, switched off, once per process.
void watch_nodes();

// At the end of a session: switches the observer off, and makes the hooks of running passes no-ops.
void abandon_backward_passes();

}  // namespace modtrace
