// Calls of modules, seen by the wrapper of nn.Module.__call__.

#pragma once

#include "py_ref.h"

namespace modtrace {

// The attribute of a wrapper that holds the wrapped function.
constexpr const char* kWrappedCall = "modtrace_wrapped";

// A call of the wrapper runs this instead of its bytecode: it writes enter and exit around the wrapped function.
PyObject* call_module(PyObject*, PyObject* const* args, size_t flagged_count, PyObject* keywords);

}  // namespace modtrace
