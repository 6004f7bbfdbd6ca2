// FLOPs: operators that have a formula, seen by torch's own callbacks while operators are counted. They are counted
// from an outermost call with inputs that were not met yet until its backward is over, and in a backward pass through a
// graph that was not; else the callback is disabled.
// In operators nothing of Python runs: each is noted with a number, the same for the same inputs, and what a number
// costs is asked later, between the user's calls.

#pragma once

#include "engine.h"

namespace modtrace {

constexpr int64_t kNotMet = -1;

// Gives torch the callback, disabled, once per process.
void watch_operators();

// Lets the session that runs count operators: see track/native/flops.py.
PyObject* start_flops(PyObject* module, PyObject* args);

// take_operators(at_most): (number, name, overload, device, bytes, inputs, outputs) of operators whose cost is not
// known; their tensors are on meta. Each is returned once.
PyObject* take_operators(PyObject* module, PyObject* at_most);

// Notes that an outermost call begins, and begins or ends counting. Returns the number of its inputs: the same for
// calls of the same module with inputs of the same shapes; kNotMet where there is none. Needs the interpreter's lock,
// and runs Python where counting begins, and while there are operators to ask for: the session may end.
//
// args: of the call, keyword arguments last.
int64_t meet_inputs(Session& session, ThreadState& thread, int64_t name_id, bool is_training, PyObject* const* args,
                    size_t count);

// Notes that a backward pass begins, called with these arguments of `run_backward`, and counts from here on where none
// went through the same graph. Writes the number of the graph. As above.
void meet_pass(Session& session, ThreadState& thread, PyObject* const* args, Py_ssize_t count);

// Notes that a checkpoint runs a call again, and counts from here on where the pass has not done so before. As above.
void meet_rerun(Session& session, ThreadState& thread, int64_t name_id);

// Counts no more. Needs the interpreter's lock.
void stop_counting();

}  // namespace modtrace
