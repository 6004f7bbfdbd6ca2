// What the hot path knows of device times: whether a call is chosen, and where to note it.

#pragma once

#include <ATen/SequenceNumber.h>
#include <c10/core/DeviceType.h>

#include "../engine.h"

namespace modtrace {

// Records an event on the current stream of this thread, after what the thread wrote last. With or without the
// interpreter's lock.
void queue_device_event(ThreadState& thread);

// The same for who holds the interpreter's lock, and gives it back meanwhile: where a device takes no more work, this
// waits until it does, and what lets it go on may be another thread that needs the lock. The session may end in here,
// and another one begin.
inline void queue_device_event_without_gil(ThreadState& thread) {
  Py_BEGIN_ALLOW_THREADS queue_device_event(thread);
  Py_END_ALLOW_THREADS
}

// The same at the begin or the end of a collective that a device of this type runs, or of a wait for it: with or
// without the interpreter's lock, which it gives back.
void queue_device_event_of_collective(ThreadState& thread, c10::DeviceType type);

// Notes the enter or the exit of a call where it is chosen, as above.
inline void queue_device_event_of_call(const Session& session, ThreadState& thread, int64_t name_id) {
  if (static_cast<size_t>(name_id) >= session.on_device.size() || !session.on_device[name_id]) return;
  thread.device_boundaries.add(at::sequence_number::peek());
  queue_device_event_without_gil(thread);
}

// await_device(begin): call begin() before each outermost call of a module, until it returns True.
PyObject* await_device(PyObject*, PyObject* begin);

// start_device_times(device_type): record events of the session that runs, for the calls that choose_for_device names;
// nothing where that has begun, or the session is over. None, or a text: why there can be none.
PyObject* start_device_times(PyObject*, PyObject* device_type);

// stop_device_times(): read what is done within a second, and end. None, or a text: what went wrong.
PyObject* stop_device_times(PyObject*, PyObject*);

// choose_for_device(name_id): calls of this name get events.
PyObject* choose_for_device(PyObject*, PyObject* name_id);

// begin_capture(), end_capture(): around the capture of a graph, in which nothing is recorded and nothing is asked.
PyObject* begin_capture(PyObject*, PyObject*);
PyObject* end_capture(PyObject*, PyObject*);

// In a forked child: the reader does not exist, and the device is its parent's.
void reset_device_times();

}  // namespace modtrace
