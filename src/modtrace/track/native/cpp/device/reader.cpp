// The thread that reads events of the device: which are done, and when the device was there.

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
constexpr int64_t kMaxClockWidthNs = kNoName - 1;      // what a slot can hold, 17 ms
constexpr int64_t kClockOriginNs = 1'000'000'000'000;  // what a device's clock shows at first: nothing is before 0
constexpr double kMaxElapsedMs = 500;                  // above that a float of milliseconds is coarser than 31 ns

void write_reached(const DeviceTimes& times, const QueuedEvent& queued, int64_t device_ns) {
  write_without_gil(*times.reader_state, times.generation,
                    kDeviceReached << kKindShift | queued.thread_bits | (queued.number & kEventNumberMask), device_ns);
}

// Lets questions of this thread be no error for who captures a graph in a way that torch does not tell. It is for
// CUDA and HIP, and known by what is loaded, as there are no headers of them.
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

  // Reads what is done. True where there is more.
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
      // Where a job hangs, nothing is to fill the ring.
      if (clock.is_used && !clock.is_stuck() && monotonic_ns() >= clock.next_reading) read_clock(clock);
    }
    return more;
  }

  // Reads all clocks a last time. False where one was never read, so that nothing on its device has a time.
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

  // What the device's clock showed at an event that is done. The event may become the anchor; then the one that was is
  // returned instead of it.
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
    // Other processes that share the device keep it for milliseconds. Without a reading nothing has a time.
    const int64_t timeout = clock.is_read ? kClockTimeoutNs : kMaxClockWidthNs;
    for (int attempt = 0; attempt < kClockTries; ++attempt) {
      const int64_t before = monotonic_ns();
      guard_.record(&clock.event, clock.stream, device, c10::EventFlag::BACKEND_DEFAULT);
      int64_t after = before;
      bool done = false;
      do {
        // What takes milliseconds needs no busy thread.
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
      if (*best_width > kClockTimeoutNs) break;  // who begins a capture waits for this thread
    }
    clock.next_reading = monotonic_ns() + kClockIntervalNs;
    if (!best_width || *best_width > kMaxClockWidthNs) return;
    clock.is_used = false;
    clock.is_read = true;
    const int64_t meta = kDeviceClock << kKindShift | *best_width;
    const int64_t value = int64_t{device} << kDeviceTimeBits | *best_device_ns;
    write_without_gil(*times_.reader_state, times_.generation, meta, value, *best_time);
    // What says which stream a number means may have been overwritten since it was written.
    for (const std::shared_ptr<DeviceStream>& stream : streams()) {
      if (stream->stream.device_index() != device) continue;
      write_without_gil(*times_.reader_state, times_.generation, kDeviceStream << kKindShift | stream->key,
                        stream->stream.id());
    }
  }

  // Writes that the device has not reached an event, so that `where` knows that it was asked: a few times
  // only, as that must not fill the ring.
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

  // Reads the events of the stream that are done.
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
  // The time is looked at before the events are: where this thread did not run for all of it, it reads once more.
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
