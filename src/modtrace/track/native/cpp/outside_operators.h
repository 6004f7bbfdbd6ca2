// Operators that run where no module does: which ones, how often and how long. They are counted in few steps, on one
// thread, outside of calls of modules, backward passes and what torch names of optimizers and loaders; and in backward
// passes outside of their nodes, where the hooks of gradients run. Else the callback is disabled.

#pragma once

#include "py_ref.h"

namespace modtrace {

// Gives torch the callback, disabled, once per process.
void watch_outside_operators();

// begin_outside(on_boundary): count on this thread from now on, and call this at boundaries, see Session. A count that
// runs begins anew.
PyObject* begin_outside(PyObject* module, PyObject* on_boundary);

// end_outside(): count no more, and return (outside, in passes), each a list of (name, calls, nanoseconds).
// In passes `nodes` are the nodes themselves, and `nodes and hooks` these with the hooks of gradients. None if the
// count ended by itself.
PyObject* end_outside(PyObject* module, PyObject*);

// limit_outside(nanoseconds): end counts by themselves after so long.
PyObject* limit_outside(PyObject* module, PyObject* ns);

// Counts no more. Needs the interpreter's lock.
void stop_outside();

}  // namespace modtrace
