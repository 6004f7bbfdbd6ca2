// Collectives of torch.distributed: a tap on the operators of c10d, and a wrapper of Work.wait.

#pragma once

#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "../engine_state.h"
#include "../py_ref.h"

namespace modtrace {

// start_collectives(name_collective, on_unseen): note collectives of the session that runs. `name_collective` takes the
// operator's name, the group's, the peer's rank (-1 where there is none) and the type of the device that runs it
// (empty for the CPU), and returns the id of a text; `on_unseen` is called once, where the collectives of a thread in
// inference mode pass the tap by. False where this torch has no c10d.
PyObject* start_collectives(PyObject*, PyObject* args);

// stop_collectives(): forget what start_collectives was given. Collectives that are under way end unseen.
PyObject* stop_collectives(PyObject*, PyObject*);

// wrap_wait(wrapped): return what stands for the method Work.wait, and notes its enter and exit while it is active.
PyObject* wrap_wait(PyObject*, PyObject* wrapped);

// set_wait_active(wrapper, active): for what wrap_wait returned; it is inactive at first.
PyObject* set_wait_active(PyObject*, PyObject* args);

// In a forked child: nobody holds the locks that other threads of the parent held.
void reset_collectives();

constexpr int64_t kNoPeer = -1, kNoCounter = -1;
constexpr size_t kRecentWorks = 4096, kWorksPerAddress = 8;

// The name of an operator on a group (for p2p: with a peer), and what counts its calls.
struct NamedOperator {
  int64_t name_id;
  std::string group;
  int64_t* counter;        // of the group; for p2p of this name
  bool no_future = false;  // its Work has none
};

// A collective that can be waited for: its name and counter, and the device that runs it where that goes on alone.
struct Awaited {
  int64_t name_id = kNoName, counter = kNoCounter;
  c10::DeviceType device = c10::kCPU;
};

// Which collective a Work or a tensor's memory is of. What lies at the same place later takes it over.
struct RecentWork {
  const void* address = nullptr;
  Awaited collective;
  uint64_t order = 0;  // of what was noted; 0 where nothing was
};

// Tap, group, peer, and the type of the device that runs it.
using OperatorKey = std::tuple<const void*, const void*, int64_t, c10::DeviceType>;

// What the tap knows in a session. Guarded by the mutex, under which nobody takes the interpreter's lock.
struct CollectiveState {
  std::mutex mutex;
  uint64_t generation = 0;
  std::map<OperatorKey, NamedOperator> operators;
  std::map<std::pair<std::string, int64_t>, int64_t> counters;  // (group, −1 or name of p2p) → calls so far
  std::array<RecentWork, kRecentWorks> works;
  uint64_t noted_works = 0;
};

// Never destroyed, as the engine's state; replaced in a forked child.
inline std::atomic<CollectiveState*> collective_state{nullptr};

// Called once where collectives pass the tap by, or null. Guarded by the interpreter's lock.
inline PyObject* on_unseen = nullptr;

// The first of the places where an address is noted.
inline RecentWork* works_of(CollectiveState& state, const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return &state.works[(bits >> 4 ^ bits >> 16) % (kRecentWorks / kWorksPerAddress) * kWorksPerAddress];
}

// Notes which collective an address is of: in its own place, or in that of what was noted longest ago.
inline void note_work(CollectiveState& state, const void* address, const Awaited& collective) {
  RecentWork* const first = works_of(state, address);
  RecentWork* chosen = first;
  for (RecentWork* work = first; work != first + kWorksPerAddress; ++work) {
    if (work->address == address) {
      chosen = work;
      break;
    }
    if (work->order < chosen->order) chosen = work;
  }
  *chosen = {address, collective, ++state.noted_works};
}

// What is waited for, or no collective.
inline Awaited find_awaited(const void* address) {
  CollectiveState& state = *collective_state.load();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (address != nullptr && state.generation == current_generation()) {
    const RecentWork* const first = works_of(state, address);
    for (const RecentWork* work = first; work != first + kWorksPerAddress; ++work) {
      if (work->address == address) return work->collective;
    }
  }
  return {};
}

}  // namespace modtrace
