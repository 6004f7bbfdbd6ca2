// Calls of modules, as the wrapper of nn.Module.__call__ sees them.

#pragma once

#include "py_ref.h"

namespace modtrace {

// The attribute of a wrapper that holds what it wraps.
constexpr const char* kWrappedCall = "modtrace_wrapped";

// What a call of the wrapper runs instead of its bytecode: notes enter and exit around what it wraps.
PyObject* call_module(PyObject*, PyObject* const* args, size_t flagged_count, PyObject* keywords);

}  // namespace modtrace
