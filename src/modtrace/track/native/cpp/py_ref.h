// Owners of what the interpreter lends: a reference, its lock, and the C++ object of torch that a Python object holds.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <typeinfo>

namespace modtrace {

struct DropReference {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};

// Owns one reference, or none. Whoever destroys it, or gives it another one, holds the interpreter's lock.
using PyRef = std::unique_ptr<PyObject, DropReference>;

// Takes over a reference that the caller owns, as Python's functions return it; null is what they return on error.
inline PyRef steal(PyObject* object) { return PyRef(object); }

// Owns a new reference beside the one that someone else owns.
inline PyRef borrow(PyObject* object) {
  Py_XINCREF(object);
  return PyRef(object);
}

// What a function of ours replaces, and whether it does more than call that. The function's own capsule owns it.
struct Wrapper {
  PyRef wrapped;
  bool active = false;
};

inline Wrapper* wrapper_in(PyObject* capsule) { return static_cast<Wrapper*>(PyCapsule_GetPointer(capsule, nullptr)); }

// Returns a new function, which gets the capsule of its wrapper; inactive at first.
PyObject* new_wrapper(PyMethodDef& definition, PyObject* wrapped);

// Holds the interpreter's lock on a thread that may not hold it.
class GilLock {
 public:
  GilLock() : state_(PyGILState_Ensure()) {}
  ~GilLock() { PyGILState_Release(state_); }
  GilLock(const GilLock&) = delete;
  GilLock& operator=(const GilLock&) = delete;

 private:
  PyGILState_STATE state_;
};

// Returns the C++ object that a Python object of torch's holds, null if it is not of this type. Only one unit
// includes pybind11, which takes 4 seconds to compile whatever is used of it.
const void* bound_object(PyObject* object, const std::type_info& type);

}  // namespace modtrace
