// Streams, events and a clock for the device that pretends, as torch asks a device for them. The clock is a formula of
// the host's, so that when each event was reached is known on the host's clock too.
//
// Kernels take no time of the host: a stream is the moment at which it will have run all that was launched.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int64_t kOpenEnd = int64_t{1} << 60;  // device ns of the end of a kernel that nobody has ended yet

int64_t host_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

struct Reached {
  int64_t stream, device_ns;
};

struct Event {
  int64_t device_ns = 0;
  bool of_pool = false;
};

struct State {
  std::mutex mutex;
  int64_t host_origin = host_ns(), device_origin = 0;
  double rate = 1.0;
  std::atomic<bool> held{false}, capturing{false}, broken{false}, full{false};
  std::atomic<int64_t> full_stream{0}, pool_delay{0};
  std::map<int64_t, int64_t> stream_ends;  // device ns
  int64_t last_stream = 0;
  std::vector<Reached> timed;  // events that tell the time, but for those on streams of the reader's own
  std::map<int64_t, bool> from_pool;
  std::deque<Event> events;
  std::atomic<int64_t> synchronized{0}, waiting{0};
  std::atomic<bool> ambiguous{false};
  int64_t asked_while_capturing = 0, asked = 0;

  int64_t now() const {
    return device_origin + static_cast<int64_t>(rate * static_cast<double>(host_ns() - host_origin));
  }
};

State& state() {
  static State* const instance = new State;
  return *instance;
}

thread_local int64_t current_stream = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(kType, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getNewStream({kType, 0}, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().from_pool[++state().last_stream + 100] = true;
    return stream(state().last_stream + 100);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    State& all = state();
    if (all.full && stream.id() == all.full_stream) {
      ++all.waiting;
      while (all.full && stream.id() == all.full_stream) std::this_thread::yield();
      --all.waiting;
    }
    const std::lock_guard<std::mutex> lock(all.mutex);
    TORCH_CHECK(!all.broken, "the device is lost");
    if (*event == nullptr) {
      *event = &all.events.emplace_back();
    }
    const int64_t delay = all.from_pool[stream.id()] ? all.pool_delay.load() : 0;
    const int64_t reached = std::max(all.stream_ends[stream.id()], all.now()) + delay;
    *static_cast<Event*>(*event) = {reached, all.from_pool[stream.id()]};
    if (flag == c10::EventFlag::BACKEND_DEFAULT && !all.from_pool[stream.id()])
      all.timed.push_back({stream.id(), reached});
  }
  void block(void* event, const c10::Stream& stream) const override {
    const std::lock_guard<std::mutex> lock(state().mutex);
    int64_t& end = state().stream_ends[stream.id()];
    end = std::max(end, static_cast<Event*>(event)->device_ns);
  }
  bool queryEvent(void* event) const override {
    State& all = state();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.asked_while_capturing += all.capturing;
    all.asked += !static_cast<Event*>(event)->of_pool;
    return !all.held && all.now() >= static_cast<Event*>(event)->device_ns;
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    // A float, as of CUDA.
    return static_cast<float>((static_cast<Event*>(to)->device_ns - static_cast<Event*>(from)->device_ns) / 1e6);
  }
  bool isStreamCapturing(const c10::Stream&) const {
    TORCH_CHECK(!state().ambiguous, "operation would make the legacy stream depend on a capturing blocking stream");
    return state().capturing;
  }
  void synchronizeEvent(void*) const override { ++state().synchronized; }
  void synchronizeStream(const c10::Stream&) const override { ++state().synchronized; }
  void synchronizeDevice(c10::DeviceIndex) const override { ++state().synchronized; }

 private:
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, {kType, 0}, id); }
};

}  // namespace

extern "C" {

// Puts the device in the place of the one that was registered.
void fake_register(int64_t device_origin, double rate) {
  state().device_origin = device_origin;
  state().rate = rate;
  static const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard);
  // A child uses the device too, and the reader may have been asking when it was forked.
  pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
}
void fake_launch(int64_t ns) {
  State& all = state();
  const std::lock_guard<std::mutex> lock(all.mutex);
  int64_t& end = all.stream_ends[current_stream];
  end = std::max(end, all.now()) + ns;
}
// A kernel on the current stream that takes until it is ended, and so whatever the host does meanwhile is behind it.
void fake_begin_kernel() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().stream_ends[current_stream] = kOpenEnd;
}
// Ends it so many ns of the device from now, and moves to there what was put behind it. There is one such at a time.
void fake_end_kernel(int64_t ns) {
  State& all = state();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const int64_t end = all.now() + ns;
  const auto move = [end](int64_t& device_ns) {
    if (device_ns >= kOpenEnd) device_ns += end - kOpenEnd;
  };
  for (auto& [stream, stream_end] : all.stream_ends) move(stream_end);
  for (Event& event : all.events) move(event.device_ns);
  for (Reached& reached : all.timed) move(reached.device_ns);
}
void fake_use_stream(int64_t stream) { current_stream = stream; }
void fake_hold(int held) { state().held = held != 0; }
void fake_fill(int64_t stream, int full) {
  state().full_stream = stream;
  state().full = full != 0;
}
void fake_delay_pool(int64_t ns) { state().pool_delay = ns; }
void fake_capture(int capturing) { state().capturing = capturing != 0; }
void fake_make_ambiguous(int ambiguous) { state().ambiguous = ambiguous != 0; }
void fake_break() { state().broken = true; }
int64_t fake_waiting() { return state().waiting; }
int64_t fake_asked() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().asked;
}
int64_t fake_synchronized() { return state().synchronized; }
int64_t fake_asked_while_capturing() { return state().asked_while_capturing; }
int64_t fake_events_made() { return static_cast<int64_t>(state().events.size()); }
int64_t fake_timed_count() { return static_cast<int64_t>(state().timed.size()); }
int64_t fake_timed_stream(int64_t index) { return state().timed[index].stream; }
int64_t fake_timed_device_ns(int64_t index) { return state().timed[index].device_ns; }
// The same on the host's monotonic clock.
double fake_timed_host_ns(int64_t index) {
  const State& all = state();
  return static_cast<double>(all.host_origin) +
         static_cast<double>(all.timed[index].device_ns - all.device_origin) / all.rate;
}
}
