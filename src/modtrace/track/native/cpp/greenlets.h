// Greenlets: Python threads that alternate on one thread of the system, such as those of gevent.
//
// Each has its own open calls. `greenlet` calls us when a thread switches between greenlets (greenlet.settrace), and
// the thread's state is exchanged. If other code replaced our function there, the next call of a module notices it.

#pragma once

#include "py_ref.h"

namespace modtrace {

// follow_greenlets(getcurrent, settrace): called with greenlet's functions once it is imported.
PyObject* follow_greenlets(PyObject*, PyObject* args);

}  // namespace modtrace
