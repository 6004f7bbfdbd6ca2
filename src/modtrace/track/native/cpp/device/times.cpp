#include "times.h"

#include <ATen/Context.h>

#include <csignal>
#include <exception>

#include "../engine.h"

namespace modtrace {
namespace {

constexpr std::chrono::seconds kReaderTimeout = kStopTimeout + std::chrono::seconds(1);

// Whether the device is in use already; recording an event on another device would initialize it.
bool has_context(DeviceTimes& times, c10::Device device) {
  std::atomic<bool>& known = times.has_context[static_cast<size_t>(device.index()) % kMaxDevices];
  if (C10_LIKELY(known.load(std::memory_order_relaxed))) return true;
  if (device.index() < 0 ||
      !at::globalContext().getAcceleratorHooksInterface(device.type()).hasPrimaryContext(device.index())) {
    return false;
  }
  known.store(true, std::memory_order_relaxed);
  return true;
}

// Whether a graph is captured from the stream, as far as this torch reports. For CUDA's legacy default stream the query
// throws while other streams capture: any work on it would end their captures.
bool captures(const auto& guard, const c10::Stream& stream) {
  try {
    if constexpr (requires { guard.isStreamCapturing(stream); }) return guard.isStreamCapturing(stream);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

// The entry of a stream; null if there are too many streams. Under the mutex.
std::shared_ptr<DeviceStream> find_stream(DeviceTimes& times, ThreadState& thread, const c10::Stream& stream) {
  for (const std::shared_ptr<DeviceStream>& known : times.streams) {
    if (known->stream == stream) return known;
  }
  if (times.streams.size() >= kMaxDeviceStreams) return nullptr;
  const int64_t key = static_cast<int64_t>(times.streams.size()) | int64_t{stream.device_index()} << kStreamNumberBits;
  times.streams.push_back(std::make_shared<DeviceStream>(stream, key));
  write_without_gil(thread, kDeviceStream << kKindShift | key, stream.id());
  return times.streams.back();
}

// An unused event of the device, or null if the next record must make one. Under the mutex.
void* take_unused_event(DeviceTimes& times, c10::DeviceIndex device) {
  std::vector<void*>& unused = times.unused[device];
  if (unused.empty()) return nullptr;
  void* event = unused.back();
  unused.pop_back();
  return event;
}

// Whether the session of this generation records. Under the mutex.
bool is_recording(const DeviceTimes& times, uint64_t generation) {
  return times.running && times.generation == generation;
}

void record_event(DeviceTimes& times, ThreadState& thread, const c10::Stream& stream) {
  const uint64_t generation = thread.generation;
  std::shared_ptr<DeviceStream> own;
  {
    const std::lock_guard<std::mutex> lock(times.mutex);
    if (!is_recording(times, generation)) return;
    own = find_stream(times, thread, stream);
  }
  std::unique_lock<std::mutex> recording;
  if (own != nullptr) recording = std::unique_lock<std::mutex>(own->recording);
  void* event = nullptr;
  int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(times.mutex);
    if (!is_recording(times, generation)) return;
    number = times.next_number++;
    if (own == nullptr || times.events == kMaxDeviceEvents) {
      write_without_gil(thread, kDeviceQueued << kKindShift | kNoName, number);
      return;
    }
    // Written before the device can reach it.
    write_without_gil(thread, kDeviceQueued << kKindShift | own->key, number);
    event = take_unused_event(times, stream.device_index());
    ++times.events;
  }
  times.guard->record(&event, stream, stream.device_index(), c10::EventFlag::BACKEND_DEFAULT);
  const std::lock_guard<std::mutex> lock(times.mutex);
  if (times.generation == generation) {
    own->queued.push_back({event, number, thread.meta_bits});
  } else {
    times.unused[stream.device_index()].push_back(event);
  }
}

// Starts the reader, which gets no signals.
void start_reader(DeviceTimes& times) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    times.reader = std::thread(read_device_events, std::ref(times));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Ends the reader. False if it still waits for the device: then it is abandoned.
bool end_reader(DeviceTimes& times, std::thread reader) {
  std::unique_lock<std::mutex> lock(times.mutex);
  times.running = false;
  times.wake.notify_all();
  if (!times.wake.wait_for(lock, kReaderTimeout, [&times] { return times.reader_is_over; })) {
    times.abandoned = true;
    reader.detach();
    return false;
  }
  lock.unlock();
  reader.join();
  return true;
}

// Makes the events that will not be read unused; they may be recorded again at any time.
void take_back_events(DeviceTimes& times) {
  for (const std::shared_ptr<DeviceStream>& stream : times.streams) {
    for (const QueuedEvent& queued : stream->queued) {
      times.unused[stream->stream.device_index()].push_back(queued.event);
    }
  }
  for (const auto& [device, clock] : times.clocks) {
    for (void* event : {clock.event, clock.anchor}) {
      if (event != nullptr) times.unused[device].push_back(event);
    }
  }
  times.streams.clear();
  times.clocks.clear();
  times.events = 0;
}

}  // namespace

void fail_device_times(DeviceTimes& times, const char* message) {
  if (&times == device_times.load()) engine.device_times_active.store(false);
  const std::lock_guard<std::mutex> lock(times.mutex);
  times.running = false;
  if (times.failure.empty()) times.failure = message;
}

void queue_device_event(ThreadState& thread) {
  if (!engine.device_times_active.load(std::memory_order_acquire)) return;
  DeviceTimes* const current = device_times.load();
  if (C10_UNLIKELY(current == nullptr)) return;
  DeviceTimes& times = *current;
  try {
    const c10::Device device = times.guard->getDevice();
    if (device_captures.load() > 0 || !has_context(times, device)) return;
    const c10::Stream stream = times.guard->getStream(device);
    if (!captures(*times.guard, stream)) record_event(times, thread, stream);
  } catch (const std::exception& error) {
    fail_device_times(times, error.what());
  }
}

void queue_device_event_of_collective(ThreadState& thread, c10::DeviceType type) {
  if (!engine.device_times_active.load(std::memory_order_acquire)) return;
  const DeviceTimes* times = device_times.load();
  if (times == nullptr || times->guard->type() != type) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    queue_device_event_without_gil(thread);
  } else {
    queue_device_event(thread);
  }
}

PyObject* start_device_times(PyObject*, PyObject* device_type) {
  const char* name = PyUnicode_AsUTF8(device_type);
  if (name == nullptr) return nullptr;
  try {
    const c10::DeviceType type = c10::Device(name).type();
    const auto* guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].load();
    if (guard == nullptr || guard->deviceCount() == 0) return PyUnicode_FromFormat("there is no device %s", name);
    if (device_times.load() == nullptr) device_times.store(new DeviceTimes);
    DeviceTimes& times = *device_times.load();
    // Device times run already, or a signal's handler or another thread has ended the recording meanwhile.
    if (times.reader.joinable() || times.ending || engine.active_session.load() == nullptr) Py_RETURN_NONE;
    {
      const std::lock_guard<std::mutex> lock(times.mutex);
      take_back_events(times);
      times.guard = guard;
      times.generation = current_generation();
      times.next_number = 0;
      times.failure.clear();
      times.reader_is_over = false;
      times.running = true;
    }
    start_reader(times);
    engine.device_times_active.store(true);
  } catch (const std::exception& error) {
    return PyUnicode_FromString(error.what());
  }
  Py_RETURN_NONE;
}

PyObject* stop_device_times(PyObject*, PyObject*) {
  engine.device_times_active.store(false);
  DeviceTimes* times = device_times.load();
  if (times == nullptr || !times->reader.joinable()) {
    // The ends of running captures will not be seen. While the reader runs, it must know of captures.
    if (times == nullptr || !times->ending) device_captures.store(0);
    Py_RETURN_NONE;
  }
  std::thread reader = std::move(times->reader);
  times->ending = true;
  bool is_over = false;
  Py_BEGIN_ALLOW_THREADS is_over = end_reader(*times, std::move(reader));
  Py_END_ALLOW_THREADS times->ending = false;
  device_captures.store(0);
  if (!is_over) {
    // The reader may continue at any time, with its state; the next session gets a new state.
    if (times == device_times.load()) device_times.store(nullptr);
    return PyUnicode_FromString("the device has not answered for two seconds");
  }
  if (times->failure.empty()) Py_RETURN_NONE;
  return PyUnicode_DecodeUTF8(times->failure.data(), static_cast<Py_ssize_t>(times->failure.size()), "replace");
}

PyObject* await_device(PyObject*, PyObject* begin) {
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session != nullptr) session->begin_device_times = borrow(begin);
  Py_RETURN_NONE;
}

PyObject* choose_for_device(PyObject*, PyObject* name_id) {
  const long long id = PyLong_AsLongLong(name_id);
  if (id < 0 || id >= kNoName) return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_None);
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session != nullptr) {
    if (session->on_device.size() <= static_cast<size_t>(id)) session->on_device.resize(id + 1);
    session->on_device[id] = true;
  }
  Py_RETURN_NONE;
}

PyObject* begin_capture(PyObject*, PyObject*) {
  device_captures.fetch_add(1);
  if (DeviceTimes* times = device_times.load()) {
    // Wait for the reader's current query; then it makes no more. The wait can last until the device accepts work.
    Py_BEGIN_ALLOW_THREADS { const std::lock_guard<std::mutex> lock(times->asking); }
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

PyObject* end_capture(PyObject*, PyObject*) {
  if (device_captures.load() > 0) device_captures.fetch_sub(1);
  Py_RETURN_NONE;
}

void reset_device_times() {
  engine.device_times_active.store(false);
  device_times.store(nullptr);
  device_captures.store(0);
}

}  // namespace modtrace
