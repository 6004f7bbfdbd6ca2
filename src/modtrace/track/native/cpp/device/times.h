// Device times: events of an accelerator around chosen calls, and the state shared by the reader's thread and the
// threads that record events.

#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../engine.h"
#include "../py_ref.h"
#include "calls.h"

namespace modtrace {

constexpr size_t kMaxDeviceEvents = 1 << 14;  // recorded and not read
constexpr size_t kMaxDevices = 128;           // a c10::DeviceIndex is a signed byte
constexpr size_t kMaxDeviceStreams = (1 << 16) - 1;

// An event that was recorded.
struct QueuedEvent {
  void* event;
  int64_t number, thread_bits;
};

// A stream with events. The reader uses the front of the deque, and the recording threads its end.
struct DeviceStream {
  DeviceStream(const c10::Stream& stream, int64_t key) : stream(stream), key(key) {}

  const c10::Stream stream;
  const int64_t key;     // number and device index, as in slots
  std::mutex recording;  // held while an event is recorded, so that events are queued in the stream's order
  std::deque<QueuedEvent> queued;

  // Used by the reader: the awaited event, the time of its first query, and the time of the next pending event.
  int64_t asked_number = -1, asked_since = 0, next_pending = 0;
};

// The clock of one device, used only by the reader.
struct DeviceClock {
  void* event = nullptr;  // recorded to read the clock, on a stream of its own
  c10::Stream stream;
  void* anchor = nullptr;    // the event from which elapsed times are measured
  int64_t anchor_ns = 0;     // the clock's time at the anchor
  int64_t next_reading = 0;  // time of the next reading, monotonic ns
  bool is_used = true;       // whether the clock gave any time since its last reading
  bool is_read = false;      // whether it was ever read

  // In the last round: whether the device reached any event, and whether it has not reached others.
  bool has_moved = false, is_awaited = false;

  // Whether the device may accept no more work, so that recording an event would wait.
  bool is_stuck() const { return is_awaited && !has_moved; }
};

// Never destroyed, like the engine's state; replaced in a forked child, and if the device never answers its reader.
struct DeviceTimes {
  const c10::impl::DeviceGuardImplInterface* guard = nullptr;
  std::array<std::atomic<bool>, kMaxDevices> has_context{};
  std::mutex asking;    // held by the reader while it queries the device; acquired before `mutex`
  bool ending = false;  // whether a thread waits for the reader's end; guarded by the interpreter's lock

  // Guards the fields below, and `queued` of each stream. A thread that holds it acquires no other lock and does not
  // call the device: recording waits if the device accepts no more work, and then the reader must go on.
  std::mutex mutex;
  uint64_t generation = 0;  // number of the session of these events
  bool running = false;
  std::vector<std::shared_ptr<DeviceStream>> streams;  // by number; shared with threads that still record at the end
  std::map<c10::DeviceIndex, std::vector<void*>> unused;
  size_t events = 0;  // number of events that were recorded and not read
  int64_t next_number = 0;
  std::string failure;
  bool reader_is_over = false;
  std::condition_variable wake;

  // Used by the reader.
  std::map<c10::DeviceIndex, DeviceClock> clocks;
  ThreadState* const reader_state = add_thread_state();
  std::thread reader;
  std::atomic<bool> abandoned{false};  // whether no thread waits for the reader any more, which waits for the device
};

inline std::atomic<DeviceTimes*> device_times{nullptr};

// Number of running captures of graphs; a capture may have started before device times.
inline std::atomic<int> device_captures{0};

constexpr std::chrono::seconds kStopTimeout(1);  // maximum time that the reader waits at stop for queued events

// Stops after an error of the device; the training goes on.
void fail_device_times(DeviceTimes& times, const char* message);

// The function of the reader's thread.
void read_device_events(DeviceTimes& times);

}  // namespace modtrace
