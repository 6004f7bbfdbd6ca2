// Backward passes: whose nodes run, and from when on.
//
// The engine of torch runs the ready node with the highest sequence number first. Where each node leads only to older
// ones, and all were made by this thread and run on one device, the order is therefore known before the pass:
// descending. A hook on the first node of each segment (a run of nodes that one call made) is then enough, and all
// other nodes run as if nobody looked. Any other pass is watched by an observer, node by node, which costs torch four
// times as much for each.

#pragma once

#include "py_ref.h"

namespace modtrace {

// Stands in the place of torch.autograd.graph._engine_run_backward, and takes what that takes: (outputs, gradients,
// retain_graph, create_graph, inputs).
PyObject* run_backward(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords);

// Where a session ends: takes the observer off, and lets the hooks of passes that still run do nothing.
void abandon_backward_passes();

}  // namespace modtrace
