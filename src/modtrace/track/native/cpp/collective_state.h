// What is known of the collectives of a session: shared by the tap, which notes them, and by what waits for them.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "engine_state.h"

namespace modtrace {

constexpr int64_t kNoPeer = -1, kNoCounter = -1;
constexpr size_t kRecentWorks = 4096;

// The name of an operator on a group (for p2p: with a peer), and what counts its calls.
struct NamedOperator {
  int64_t name_id;
  std::string group;
  int64_t* counter;        // of the group; for p2p of this name
  bool no_future = false;  // its Work has none
};

// Which collective a Work or a tensor's memory is of. What lies at the same place later takes it over.
struct RecentWork {
  const void* address = nullptr;
  int64_t name_id = 0, counter = 0;
};

// What the tap knows in a session. Guarded by the mutex, under which nobody takes the interpreter's lock.
struct CollectiveState {
  std::mutex mutex;
  uint64_t generation = 0;
  std::map<std::tuple<const void*, const void*, int64_t>, NamedOperator> operators;  // (tap, group, peer) → name
  std::map<std::pair<std::string, int64_t>, int64_t> counters;  // (group, −1 or name of p2p) → calls so far
  std::array<RecentWork, kRecentWorks> works;
};

// Never destroyed, as the engine's state; replaced in a forked child.
inline std::atomic<CollectiveState*> collective_state{nullptr};

// Called once where collectives pass the tap by, or null. Guarded by the interpreter's lock.
inline PyObject* on_unseen = nullptr;

inline RecentWork& recent_work(CollectiveState& state, const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return state.works[(bits >> 4 ^ bits >> 16) % kRecentWorks];
}

// What is waited for: the name and counter of its collective, or none.
inline std::pair<int64_t, int64_t> find_awaited(const void* address) {
  CollectiveState& state = *collective_state.load();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const RecentWork& found = recent_work(state, address);
  if (address == nullptr || found.address != address || state.generation != current_generation()) {
    return {kNoName, kNoCounter};
  }
  return {found.name_id, found.counter};
}

}  // namespace modtrace
