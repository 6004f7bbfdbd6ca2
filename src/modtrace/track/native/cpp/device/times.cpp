#include "times.h"

#include <ATen/Context.h>

#include <csignal>
#include <exception>

#include "../ring_writer.h"

namespace modtrace {
namespace {

// Whether the device is in use already; to record an event where it is not would begin that.
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

// The stream among those that have had events; null where there are too many. Under the mutex.
DeviceStream* find_stream(DeviceTimes& times, const c10::Stream& stream) {
  for (DeviceStream& known : times.streams) {
    if (known.stream == stream) return &known;
  }
  if (times.streams.size() >= kMaxDeviceStreams) return nullptr;
  const auto number = static_cast<int64_t>(times.streams.size());
  times.streams.push_back({stream, number | int64_t{stream.device_index()} << kStreamNumberBits});
  return &times.streams.back();
}

void record_event(DeviceTimes& times, ThreadState& thread, const c10::Stream& stream) {
  // Held while it is recorded, so that the order of a stream's events is the one in which they are reached.
  const std::lock_guard<std::mutex> lock(times.mutex);
  if (!times.running || times.generation != thread.generation) return;
  const size_t known_streams = times.streams.size();
  DeviceStream* own = find_stream(times, stream);
  const int64_t number = times.next_number++;
  if (own == nullptr || times.events == kMaxDeviceEvents) {
    write_without_gil(thread, kDeviceQueued << kKindShift | kNoName, number);
    return;
  }
  if (times.streams.size() != known_streams) {
    write_without_gil(thread, kDeviceStream << kKindShift | own->key, stream.id());
  }
  // Written before the device can come by.
  write_without_gil(thread, kDeviceQueued << kKindShift | own->key, number);
  void* event = take_unused_event(times, stream.device_index());
  times.guard->record(&event, stream, stream.device_index(), c10::EventFlag::BACKEND_DEFAULT);
  own->queued.push_back({event, number, thread.meta_bits});
  ++times.events;
}

// Starts the reader, whose signals are all other threads'.
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

// Takes back the events that nobody will read; to record one again is allowed at any time.
void take_back_events(DeviceTimes& times) {
  for (DeviceStream& stream : times.streams) {
    for (const QueuedEvent& queued : stream.queued) {
      times.unused[stream.stream.device_index()].push_back(queued.event);
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

void* take_unused_event(DeviceTimes& times, c10::DeviceIndex device) {
  std::vector<void*>& unused = times.unused[device];
  if (unused.empty()) return nullptr;
  void* event = unused.back();
  unused.pop_back();
  return event;
}

void fail_device_times(DeviceTimes& times, const char* message) {
  engine.device_times_active.store(false);
  const std::lock_guard<std::mutex> lock(times.mutex);
  times.running = false;
  if (times.failure.empty()) times.failure = message;
}

void queue_device_event(ThreadState& thread) {
  if (!engine.device_times_active.load(std::memory_order_acquire)) return;
  DeviceTimes& times = *device_times.load();
  try {
    const c10::Device device = times.guard->getDevice();
    if (times.captures.load() > 0 || !has_context(times, device)) return;
    const c10::Stream stream = times.guard->getStream(device);
    if (!is_capturing(*times.guard, stream, 0)) record_event(times, thread, stream);
  } catch (const std::exception& error) {
    fail_device_times(times, error.what());
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
    {
      const std::lock_guard<std::mutex> lock(times.mutex);
      take_back_events(times);
      times.guard = guard;
      times.generation = current_generation();
      times.captures.store(0);
      times.next_number = 0;
      times.failure.clear();
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
  if (times == nullptr || !times->reader.joinable()) Py_RETURN_NONE;
  std::thread reader = std::move(times->reader);
  {
    const std::lock_guard<std::mutex> lock(times->mutex);
    times->running = false;
  }
  times->wake.notify_all();
  Py_BEGIN_ALLOW_THREADS reader.join();
  Py_END_ALLOW_THREADS if (times->failure.empty()) Py_RETURN_NONE;
  return PyUnicode_DecodeUTF8(times->failure.data(), static_cast<Py_ssize_t>(times->failure.size()), "replace");
}

PyObject* choose_for_device(PyObject*, PyObject* name_id) {
  const long long chosen = PyLong_AsLongLong(name_id);
  if (chosen < 0 || chosen >= kNoName) return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_None);
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session != nullptr) {
    if (session->on_device.size() <= static_cast<size_t>(chosen)) session->on_device.resize(chosen + 1);
    session->on_device[chosen] = true;
  }
  Py_RETURN_NONE;
}

PyObject* begin_capture(PyObject*, PyObject*) {
  if (DeviceTimes* times = device_times.load()) {
    times->captures.fetch_add(1);
    // Once the reader has asked what it asks now, it asks no more.
    const std::lock_guard<std::mutex> lock(times->asking);
  }
  Py_RETURN_NONE;
}

PyObject* end_capture(PyObject*, PyObject*) {
  DeviceTimes* times = device_times.load();
  if (times != nullptr && times->captures.load() > 0) times->captures.fetch_sub(1);
  Py_RETURN_NONE;
}

void reset_device_times() {
  engine.device_times_active.store(false);
  device_times.store(nullptr);
}

}  // namespace modtrace
