// Ranges: what torch and users name by record_function, as torch's own callbacks tell it, without a profiler.

#pragma once

#include "py_ref.h"

namespace modtrace {

// Has torch call us at each range from now on, once per process; a session that wants none is told none.
void watch_ranges();

// expect_range(): torch prepares an optimizer's range, or a fetch's, on this thread; it begins now.
PyObject* py_expect_range(PyObject*, PyObject*);

}  // namespace modtrace
