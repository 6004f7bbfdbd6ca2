// Collectives of torch.distributed: a tap on the operators of c10d, and a wrapper of Work.wait.

#pragma once

#include "py_ref.h"

namespace modtrace {

// start_collectives(name_collective): record collectives in the running session. `name_collective` gets the names of
// the operator and of the group, the peer's rank (-1 without a peer) and the type of the device that runs it (empty for
// the CPU), and returns the id of a text.
PyObject* start_collectives(PyObject*, PyObject* name);

// stop_collectives(): forget `name_collective`. The ends of running collectives are not recorded.
PyObject* stop_collectives(PyObject*, PyObject*);

// wrap_wait(wrapped): return a replacement of the method Work.wait, which writes its enter and exit while it is active
// (set_active).
PyObject* wrap_wait(PyObject*, PyObject* wrapped);

// In a forked child: releases the locks that other threads of the parent held.
void reset_collectives();

}  // namespace modtrace
