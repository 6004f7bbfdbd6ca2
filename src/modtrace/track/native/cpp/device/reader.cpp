// The thread that reads device events: whether the device has reached them, and at which time.

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <exception>
#include <optional>

#include "../engine.h"
#include "times.h"

namespace modtrace {
namespace {

constexpr std::chrono::milliseconds kPollInterval(5);
constexpr int64_t kClockIntervalNs = 100'000'000, kClockTimeoutNs = 1'000'000;
constexpr int kClockTries = 5;
constexpr int64_t kMaxClockWidthNs = kNoName - 1;      // maximum that fits a slot, 17 ms
constexpr int64_t kClockOriginNs = 1'000'000'000'000;  // a device clock's time at its anchor: no time is below 0
constexpr double kMaxElapsedMs = 500;                  // above it, a float of milliseconds is coarser than 31 ns

void write_reached(const DeviceTimes& times, const QueuedEvent& queued, int64_t device_ns) {
  write_without_gil(*times.reader_state, times.generation,
                    kDeviceReached << kKindShift | queued.thread_bits | (queued.number & kEventNumberMask), device_ns);
}

// Keeps the queries of this thread from breaking captures that torch does not report. It works for CUDA and HIP, whose
// functions are found among the loaded libraries, since there may be no headers.
void leave_captures_alone() {
  for (const char* name : {"cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"}) {
    auto* exchange = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_DEFAULT, name));
    int thread_local_mode = 1;
    if (exchange != nullptr) exchange(&thread_local_mode);
  }
}

class DeviceReader {
 public:
  explicit DeviceReader(DeviceTimes& times) : times_(times), guard_(*times.guard) {}

  // Reads the events that the device has reached. True if there are more events.
  bool read() {
    const std::lock_guard<std::mutex> asking(times_.asking);
    if (times_.abandoned) return false;
    if (device_captures.load() > 0) return true;
    for (auto& [device, clock] : times_.clocks) clock.has_moved = clock.is_awaited = false;
    bool more = false;
    for (const std::shared_ptr<DeviceStream>& stream : streams()) {
      DeviceClock& clock = clock_of(stream->stream.device());
      if (clock.next_reading == 0) read_clock(clock);
      read_stream(*stream, clock);
      more |= clock.is_awaited;
    }
    for (auto& [device, clock] : times_.clocks) {
      // If a job hangs, no events must fill the ring.
      if (clock.is_used && !clock.is_stuck() && monotonic_ns() >= clock.next_reading) read_clock(clock);
    }
    return more;
  }

  // Reads all clocks a last time. False if a clock was never read, so that no event of its device has a time.
  bool read_clocks() {
    const std::lock_guard<std::mutex> asking(times_.asking);
    if (times_.abandoned || device_captures.load() > 0) return true;
    bool read = true;
    for (auto& [device, clock] : times_.clocks) {
      if (!clock.is_stuck()) read_clock(clock);
      read &= clock.is_read;
    }
    return read;
  }

 private:
  std::vector<std::shared_ptr<DeviceStream>> streams() {
    const std::lock_guard<std::mutex> lock(times_.mutex);
    return times_.streams;
  }

  DeviceClock& clock_of(c10::Device device) {
    const auto known = times_.clocks.find(device.index());
    if (known != times_.clocks.end()) return known->second;
    guard_.setDevice(device);
    leave_captures_alone();
    return times_.clocks.emplace(device.index(), DeviceClock{nullptr, guard_.getNewStream(device, -1)}).first->second;
  }

  // The device clock's time of an event that was reached. The event may become the anchor; then `event` is set to the
  // earlier anchor.
  int64_t time_of(DeviceClock& clock, void*& event) {
    if (clock.anchor == nullptr) {
      clock.anchor = std::exchange(event, nullptr);
      return clock.anchor_ns = kClockOriginNs;
    }
    const double elapsed = guard_.elapsedTime(clock.anchor, event, clock.stream.device_index());
    const int64_t device_ns = clock.anchor_ns + std::llround(elapsed * 1e6);
    if (std::abs(elapsed) > kMaxElapsedMs) {
      std::swap(clock.anchor, event);
      clock.anchor_ns = device_ns;
    }
    return device_ns;
  }

  void read_clock(DeviceClock& clock) {
    std::optional<int64_t> best_width, best_time, best_device_ns;
    const c10::DeviceIndex device = clock.stream.device_index();
    // Other processes that share the device use it for milliseconds. Without a reading, no event has a time.
    const int64_t timeout = clock.is_read ? kClockTimeoutNs : kMaxClockWidthNs;
    for (int attempt = 0; attempt < kClockTries; ++attempt) {
      const int64_t before = monotonic_ns();
      guard_.record(&clock.event, clock.stream, device, c10::EventFlag::BACKEND_DEFAULT);
      int64_t after = before;
      bool done = false;
      do {
        // For milliseconds, sleeping is better than a busy thread.
        if (after - before > kClockTimeoutNs) std::this_thread::sleep_for(std::chrono::microseconds(100));
        done = guard_.queryEvent(clock.event);
        after = monotonic_ns();
      } while (!done && after - before < timeout);
      if (!done) break;
      const int64_t device_ns = time_of(clock, clock.event);
      if (best_width && after - before >= *best_width) continue;
      best_width = after - before;
      best_time = after;
      best_device_ns = device_ns;
      if (*best_width > kClockTimeoutNs) break;  // a thread that starts a capture waits for this one
    }
    clock.next_reading = monotonic_ns() + kClockIntervalNs;
    if (!best_width || *best_width > kMaxClockWidthNs) return;
    clock.is_used = false;
    clock.is_read = true;
    const int64_t meta = kDeviceClock << kKindShift | *best_width;
    const int64_t value = int64_t{device} << kDeviceTimeBits | *best_device_ns;
    write_without_gil(*times_.reader_state, times_.generation, meta, value, *best_time);
    // The events that map numbers to streams may have been overwritten, so they are written again.
    for (const std::shared_ptr<DeviceStream>& stream : streams()) {
      if (stream->stream.device_index() != device) continue;
      write_without_gil(*times_.reader_state, times_.generation, kDeviceStream << kKindShift | stream->key,
                        stream->stream.id());
    }
  }

  // Writes that the device has not reached an event, for `where`: only a few times, since it must not fill the ring.
  void write_pending(DeviceStream& stream, const QueuedEvent& oldest) {
    const int64_t now = monotonic_ns();
    if (stream.asked_number != oldest.number) {
      stream.asked_number = oldest.number;
      stream.asked_since = now;
      stream.next_pending = now + kDevicePendingNs;
    }
    if (now < stream.next_pending) return;
    write_without_gil(*times_.reader_state, times_.generation,
                      kDevicePending << kKindShift | oldest.thread_bits | stream.key, oldest.number);
    stream.next_pending = now + (now - stream.asked_since);
  }

  // Reads the events of the stream that the device has reached.
  void read_stream(DeviceStream& stream, DeviceClock& clock) {
    while (true) {
      QueuedEvent oldest{};
      {
        const std::lock_guard<std::mutex> lock(times_.mutex);
        if (stream.queued.empty()) return;
        oldest = stream.queued.front();
      }
      if (!guard_.queryEvent(oldest.event)) {
        write_pending(stream, oldest);
        clock.is_awaited = true;
        return;
      }
      write_reached(times_, oldest, time_of(clock, oldest.event));
      clock.is_used = clock.has_moved = true;
      const std::lock_guard<std::mutex> lock(times_.mutex);
      stream.queued.pop_front();
      --times_.events;
      if (oldest.event != nullptr) times_.unused[stream.stream.device_index()].push_back(oldest.event);
    }
  }

  DeviceTimes& times_;
  const c10::impl::DeviceGuardImplInterface& guard_;
};

void read_until_stopped(DeviceTimes& times) {
  DeviceReader reader(times);
  bool running = true;
  while (running) {
    {
      std::unique_lock<std::mutex> lock(times.mutex);
      times.wake.wait_for(lock, kPollInterval, [&times] { return !times.running; });
      if (!times.failure.empty()) return;
      running = times.running;
    }
    reader.read();
  }
  const auto until = std::chrono::steady_clock::now() + kStopTimeout;
  // The time is read before the events: if this thread did not run until the timeout, it reads the events once more.
  for (bool in_time = true; reader.read() && in_time; in_time = std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!reader.read_clocks()) fail_device_times(times, "the device was too busy for its clock to be read");
}

}  // namespace

void read_device_events(DeviceTimes& times) {
  try {
    read_until_stopped(times);
  } catch (const std::exception& error) {
    fail_device_times(times, error.what());
  }
  const std::lock_guard<std::mutex> lock(times.mutex);
  times.reader_is_over = true;
  times.wake.notify_all();
}

}  // namespace modtrace
