// Collectives of torch.distributed: a tap on the operators of c10d, and a wrapper of Work.wait.

#pragma once

#include "py_ref.h"

namespace modtrace {

// start_collectives(name_collective): note collectives of the session that runs. `name_collective` takes the
// operator's name, the group's, the peer's rank (-1 where there is none) and the type of the device that runs it
// (empty for the CPU), and returns the id of a text.
PyObject* start_collectives(PyObject*, PyObject* name);

// stop_collectives(): forget what start_collectives was given. Collectives that are under way end unseen.
PyObject* stop_collectives(PyObject*, PyObject*);

// wrap_wait(wrapped): return what replaces the method Work.wait, and notes its enter and exit while it is active
// (set_active).
PyObject* wrap_wait(PyObject*, PyObject* wrapped);

// In a forked child: releases the locks that other threads of the parent held.
void reset_collectives();

}  // namespace modtrace
