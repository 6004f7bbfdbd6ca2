// Owners of a Python reference and of the interpreter's lock, and access to the C++ object in a Python object of torch.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <typeinfo>

namespace modtrace {

struct DropReference {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};

// Owns one reference, or none. Destroying or replacing it needs the interpreter's lock.
using PyRef = std::unique_ptr<PyObject, DropReference>;

// Takes over a new reference, as Python's functions return it; they return null on error.
inline PyRef steal(PyObject* object) { return PyRef(object); }

// Owns an additional reference.
inline PyRef borrow(PyObject* object) {
  Py_XINCREF(object);
  return PyRef(object);
}

// The function that one of ours replaces, and whether ours does more than call it. The capsule of our function owns
// this.
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

// Returns the C++ object in a Python object of torch; null if it is not of this type. Only one unit includes pybind11,
// which costs 4 seconds of compilation.
const void* bound_object(PyObject* object, const std::type_info& type);

}  // namespace modtrace
