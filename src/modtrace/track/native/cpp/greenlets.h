// Greenlets: threads of Python that take turns on one thread of the system, as those of gevent do.
//
// Each has open calls of its own. greenlet calls us where a thread changes from one to another (greenlet.settrace), and
// the thread's state is exchanged. Whoever has replaced our function there is found at the next call of a module.

#pragma once

#include "py_ref.h"

namespace modtrace {

// follow_greenlets(getcurrent, settrace): of greenlet, once it is imported.
PyObject* follow_greenlets(PyObject*, PyObject* args);

}  // namespace modtrace
