// Which backward a node runs in: torch numbers each as a graph task.

#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/macros/Macros.h>

#include "slot_format.h"

// Declared as torch/csrc/autograd/graph_task.h does; to include that takes as long as to compile all else in a file.
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace modtrace {

constexpr int kNoGraphTask = -1;

// The graph task whose node this thread runs, or kNoGraphTask.
inline int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }

// Whether torch.compile traces. What it runs then, in no graph task or on fake tensors, is no backward of the user's.
inline bool is_tracing() {
  return C10_UNLIKELY(c10::impl::TorchDispatchModeTLS::any_modes_set()) &&
         c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

// Kind and name of a node's event.
inline int64_t node_meta(Kind kind, uint64_t forward_thread, int graph_task) {
  return kind << kKindShift | static_cast<int64_t>((forward_thread & kForwardThreadMask) << kForwardThreadShift |
                                                   (static_cast<uint64_t>(graph_task) & kGraphTaskMask));
}

}  // namespace modtrace
