// FLOPs: operators with a formula, seen by torch's own callbacks while operators are counted. Counting starts with an
// outermost call that has new inputs, and lasts until its backward ends, or starts with a backward pass through a new
// graph. In between, the callback is disabled.
// No Python runs inside operators: each is written with a number, the same for the same inputs. The cost of a number is
// computed later, between the user's calls.

#pragma once

#include "engine.h"

namespace modtrace {

constexpr int64_t kNotMet = -1;

// Gives torch the callback, disabled, once per process.
void watch_operators();

// Lets the running session count operators: see track/native/flops.py.
PyObject* start_flops(PyObject* module, PyObject* args);

// take_operators(at_most): (number, name, overload, device, bytes, inputs, outputs) of operators with unknown costs;
// their tensors are on meta. Each operator is returned once.
PyObject* take_operators(PyObject* module, PyObject* at_most);

// Handles the start of an outermost call: starts or ends counting. Returns the number of its inputs, which is the same
// for calls of the same module with inputs of the same shapes; kNotMet if there is none. Needs the interpreter's lock,
// and may run Python, so the session may end.
//
// args: the call's arguments, keyword arguments last.
int64_t meet_inputs(Session& session, ThreadState& thread, int64_t name_id, bool is_training, PyObject* const* args,
                    size_t count);

// Handles the start of a backward pass with these arguments of `run_backward`: starts counting if no pass went through
// the same graph. Writes the number of the graph. It has the same needs as `meet_inputs`.
void meet_pass(Session& session, ThreadState& thread, PyObject* const* args, Py_ssize_t count);

// Handles a call that a checkpoint runs again: starts counting if the pass has not run it before. It has the same needs
// as `meet_inputs`.
void meet_rerun(Session& session, ThreadState& thread, int64_t name_id);

// Stops counting. Needs the interpreter's lock.
void stop_counting();

}  // namespace modtrace
