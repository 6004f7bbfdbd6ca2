// Ranges that torch and users name by record_function, reported by torch's own callbacks, without a profiler.

#pragma once

#include "py_ref.h"

namespace modtrace {

// Makes torch call us at each range, once per process; a session without ranges gets none.
void watch_ranges();

// expect_range(): torch prepares the range of an optimizer or of a fetch on this thread; the range starts now.
PyObject* py_expect_range(PyObject*, PyObject*);

}  // namespace modtrace
