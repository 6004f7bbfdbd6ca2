// Device times: events of an accelerator around chosen calls, and what the thread that reads them shares with those
// that record them.

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

// A stream that has had events. The deque is the reader's at its front, and the recording threads' at its end.
struct DeviceStream {
  DeviceStream(const c10::Stream& stream, int64_t key) : stream(stream), key(key) {}

  const c10::Stream stream;
  const int64_t key;     // number and device index, as slots have them
  std::mutex recording;  // held while an event is recorded, so that they are queued as they are reached
  std::deque<QueuedEvent> queued;

  // The reader's: the event that it asks for, since when, and when it tells next that it is not done.
  int64_t asked_number = -1, asked_since = 0, next_pending = 0;
};

// The clock of one device; the reader's alone.
struct DeviceClock {
  void* event = nullptr;  // recorded to read the clock, on a stream where nothing else runs
  c10::Stream stream;
  void* anchor = nullptr;    // elapsed times are taken from this one …
  int64_t anchor_ns = 0;     // … and this is what the clock showed there
  int64_t next_reading = 0;  // when it is due, monotonic ns
  bool is_used = true;       // whether any time was told by it since it was read
  bool is_read = false;      // whether it was ever

  // In the last round: whether the device reached any event, and whether it has others to reach.
  bool has_moved = false, is_awaited = false;

  // Where it may be that the device takes no more work, which who records an event would wait for.
  bool is_stuck() const { return is_awaited && !has_moved; }
};

// Never destroyed, as the engine's state; replaced in a forked child, and where the device never answers its reader.
struct DeviceTimes {
  const c10::impl::DeviceGuardImplInterface* guard = nullptr;
  std::array<std::atomic<bool>, kMaxDevices> has_context{};
  std::mutex asking;    // the reader holds it while it asks the device; taken before `mutex`
  bool ending = false;  // whether somebody waits for the reader to end; guarded by the interpreter's lock

  // Guards what follows, and `queued` of each stream. Nobody takes the interpreter's lock under it, nor calls the
  // device: to record waits where the device takes no more work, and then the reader has to go on. Taken last.
  std::mutex mutex;
  uint64_t generation = 0;  // of the session whose events these are
  bool running = false;
  std::vector<std::shared_ptr<DeviceStream>> streams;  // by number; shared with who records when the session ends
  std::map<c10::DeviceIndex, std::vector<void*>> unused;
  size_t events = 0;  // recorded and not read
  int64_t next_number = 0;
  std::string failure;
  bool reader_is_over = false;
  std::condition_variable wake;

  // The reader's.
  std::map<c10::DeviceIndex, DeviceClock> clocks;
  ThreadState* const reader_state = add_thread_state();
  std::thread reader;
  std::atomic<bool> abandoned{false};  // no thread waits for the reader any more, which still waits for the device
};

inline std::atomic<DeviceTimes*> device_times{nullptr};

// Of graphs that torch captures now; a capture may have begun before device times.
inline std::atomic<int> device_captures{0};

constexpr std::chrono::seconds kStopTimeout(1);  // how long the reader waits at stop for events that are queued still

// Stops after an error of the device; the training goes on.
void fail_device_times(DeviceTimes& times, const char* message);

// What the reader's thread runs.
void read_device_events(DeviceTimes& times);

}  // namespace modtrace
