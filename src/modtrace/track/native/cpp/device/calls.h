// The hot path's part of device times: whether a call is chosen, and the functions that record its events.

#pragma once

#include <ATen/SequenceNumber.h>
#include <c10/core/DeviceType.h>

#include "../engine.h"

namespace modtrace {

// Records a device event on the current stream of this thread, after the thread's last event. With or without the
// interpreter's lock.
void queue_device_event(ThreadState& thread);

// The same for a caller with the interpreter's lock, which is released meanwhile: if the device accepts no more work,
// this waits until it does, and that may need another thread with the lock. The session may end meanwhile, and another
// session start.
inline void queue_device_event_without_gil(ThreadState& thread) {
  Py_BEGIN_ALLOW_THREADS queue_device_event(thread);
  Py_END_ALLOW_THREADS
}

// The same at the start or the end of a collective that a device of this type runs, or of a wait for it: with or
// without the interpreter's lock, which is released meanwhile.
void queue_device_event_of_collective(ThreadState& thread, c10::DeviceType type);

// The same at the enter or the exit of a call, if the call is chosen.
inline void queue_device_event_of_call(const Session& session, ThreadState& thread, int64_t name_id) {
  if (static_cast<size_t>(name_id) >= session.on_device.size() || !session.on_device[name_id]) return;
  thread.device_boundaries.add(at::sequence_number::peek());
  queue_device_event_without_gil(thread);
}

// await_device(begin): call begin() before each outermost call of a module, until it returns True.
PyObject* await_device(PyObject*, PyObject* begin);

// start_device_times(device_type): record device events in the running session, for the calls of choose_for_device.
// Does nothing if device times run, or the session has ended. Returns None, or the reason why there can be no events.
PyObject* start_device_times(PyObject*, PyObject* device_type);

// stop_device_times(): read the events that complete within a second, and stop. Returns None, or the reason of a
// failure.
PyObject* stop_device_times(PyObject*, PyObject*);

// choose_for_device(name_id): calls of this name get events.
PyObject* choose_for_device(PyObject*, PyObject* name_id);

// begin_capture(), end_capture(): around the capture of a graph. Meanwhile no event is recorded or queried.
PyObject* begin_capture(PyObject*, PyObject*);
PyObject* end_capture(PyObject*, PyObject*);

// In a forked child: the reader does not exist, and the device belongs to the parent.
void reset_device_times();

}  // namespace modtrace
