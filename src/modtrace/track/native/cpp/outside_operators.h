// Operators by where they run: which ones, how often and how long. They are counted in few steps, on one thread, not
// within each other nor in what torch names of loaders: by the innermost open call of a module, where none is open, in
// what torch names of optimizers, and in backward passes outside of their nodes, where the hooks of gradients run. Else
// the callback is disabled.

#pragma once

#include "py_ref.h"

namespace modtrace {

// Gives torch the callback, disabled, once per process.
void watch_outside_operators();

// begin_outside(on_boundary): count on this thread from now on, and call this at boundaries, see Session. A count that
// runs begins anew.
PyObject* begin_outside(PyObject* module, PyObject* on_boundary);

// end_outside(): count no more, and return a list of (place, name, calls, nanoseconds). A place is -1 outside of
// modules, -2 in passes, -3 in optimizers, else the number of a module's name. In passes `nodes` are the nodes
// themselves, and `nodes and hooks` these with the hooks of gradients. What takes tensors of float64 has that in its
// name. None if the count ended by itself.
PyObject* end_outside(PyObject* module, PyObject*);

// tell_ends(on_end): call this where calls or passes end that may be steps, see Session.
PyObject* tell_ends(PyObject* module, PyObject* on_end);

// limit_outside(nanoseconds): end counts by themselves after so long.
PyObject* limit_outside(PyObject* module, PyObject* ns);

// Counts no more. Needs the interpreter's lock.
void stop_outside();

}  // namespace modtrace
