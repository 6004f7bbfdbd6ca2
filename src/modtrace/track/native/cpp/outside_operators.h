// Operators by the place that runs them: names, numbers of calls and times. They are counted in sampled steps, on one
// thread. Places are the innermost open call of a module, code outside all calls, torch's ranges of optimizers, and
// backward passes outside their nodes, in which the hooks of gradients run. Operators inside other operators or inside
// torch's ranges of loaders are not counted. In other steps the callback is disabled.

#pragma once

#include "py_ref.h"

namespace modtrace {

// Gives torch the callback, disabled, once per process.
void watch_outside_operators();

// begin_outside(on_boundary): start to count on this thread, and call `on_boundary` at boundaries, see Session. A
// running count starts again.
PyObject* begin_outside(PyObject* module, PyObject* on_boundary);

// end_outside(): stop counting, and return a list of (place, name, calls, nanoseconds). A place is -1 outside modules,
// -2 in passes, -3 in optimizers, or else the id of a module's name. In passes, `nodes` are the nodes themselves, and
// `nodes and hooks` are the nodes with the hooks of gradients. The name of an operator on float64 contains that. None
// if the count ended by itself.
PyObject* end_outside(PyObject* module, PyObject*);

// tell_ends(on_end): call `on_end` at the ends of calls or passes that may be steps, see Session.
PyObject* tell_ends(PyObject* module, PyObject* on_end);

// limit_outside(nanoseconds): set the maximum duration of a count.
PyObject* limit_outside(PyObject* module, PyObject* ns);

// Stops counting. Needs the interpreter's lock.
void stop_outside();

}  // namespace modtrace
