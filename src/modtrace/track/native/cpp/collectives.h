// Collectives of torch.distributed: a tap on the operators of c10d, and a wrapper of Work.wait.

#pragma once

#include <c10/core/DeviceType.h>

#include "engine_state.h"
#include "py_ref.h"

namespace modtrace {

// start_collectives(name_collective, on_unseen): note collectives of the session that runs. `name_collective` takes the
// operator's name, the group's, the peer's rank (-1 where there is none) and the type of the device that runs it
// (empty for the CPU), and returns the id of a text; `on_unseen` is called once, where the collectives of a thread in
// inference mode pass the tap by. False where this torch has no c10d.
PyObject* start_collectives(PyObject*, PyObject* args);

// stop_collectives(): forget what start_collectives was given. Collectives that are under way end unseen.
PyObject* stop_collectives(PyObject*, PyObject*);

// wrap_wait(wrapped): return what stands for the method Work.wait, and notes its enter and exit while it is active
// (set_active).
PyObject* wrap_wait(PyObject*, PyObject* wrapped);

// In a forked child: nobody holds the locks that other threads of the parent held.
void reset_collectives();

constexpr int64_t kNoCounter = -1;

// A collective that can be waited for: its name and counter, and the device that runs it where that goes on alone.
struct Awaited {
  int64_t name_id = kNoName, counter = kNoCounter;
  c10::DeviceType device = c10::kCPU;
};

// The collective that a Work or a tensor's memory at this address is of, or none.
Awaited find_awaited(const void* address);

// Called once where collectives pass the tap by, or null. Guarded by the interpreter's lock.
inline PyObject* on_unseen = nullptr;

}  // namespace modtrace
