#include "collectives.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceType.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "device/calls.h"
#include "engine.h"

namespace modtrace {
namespace {

constexpr int64_t kNoPeer = -1, kNoCounter = -1;
constexpr size_t kRecentWorks = 4096;

// The name of an operator on a group (for p2p: with a peer), and the counter of its calls.
struct NamedOperator {
  int64_t name_id;
  std::string group;
  int64_t* counter;        // counter of the group; for p2p, of this name
  bool no_future = false;  // whether its Work has no future
};

// A collective that can be waited for: its name and counter, and its device, or kCPU if the host waits.
struct Awaited {
  int64_t name_id = kNoName, counter = kNoCounter;
  c10::DeviceType device = c10::kCPU;
};

// Tap, group, peer, and the type of the device that runs it.
using OperatorKey = std::tuple<const void*, const void*, int64_t, c10::DeviceType>;

// The state of the tap in a session. Guarded by the mutex; a thread that holds it never acquires the GIL.
struct CollectiveState {
  std::mutex mutex;
  uint64_t generation = 0;
  std::map<OperatorKey, NamedOperator> operators;
  std::map<std::pair<std::string, int64_t>, int64_t> counters;  // (group, −1 or name of p2p) → calls so far
  // The collective of the Work, or of the tensor's memory, at an address. A later object at the address replaces it.
  std::unordered_map<const void*, Awaited> works, older_works;
};

// Never destroyed, as the engine's state; replaced in a forked child.
std::atomic<CollectiveState*> collective_state{nullptr};

// The collective of the Work, or of the tensor's memory, at this address; without a name if there is none.
Awaited find_awaited(const void* address) {
  CollectiveState& state = *collective_state.load();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (address == nullptr || state.generation != current_generation()) return {};
  for (const auto* works : {&state.works, &state.older_works}) {
    const auto known = works->find(address);
    if (known != works->end()) return known->second;
  }
  return {};
}

// --- The tensors of a collective ---

int64_t tensor_bytes(const at::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
  }
  int64_t bytes = 0;
  if (value.isList()) {
    for (const at::IValue& element : value.toListRef()) {
      if (element.isTensor() || element.isList()) bytes += tensor_bytes(element);
    }
  }
  return bytes;
}

const at::Tensor* first_tensor(const at::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? &value.toTensor() : nullptr;
  if (!value.isList()) return nullptr;
  for (const at::IValue& element : value.toListRef()) {
    if (!element.isTensor() && !element.isList()) return nullptr;
    if (const at::Tensor* tensor = first_tensor(element)) return tensor;
  }
  return nullptr;
}

// Whether a tensor is only traced: a fake tensor, or a wrapper in Python.
bool is_traced(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_meta(); }

// --- The tap on the operators of c10d ---

using torch::jit::Stack;

// Below autograd, Python's modes and fake tensors, and above all backends: an operator that runs comes here once.
constexpr c10::DispatchKey kTapKey = c10::DispatchKey::BackendSelect;
const c10::DispatchKeySet kBelowTap(c10::DispatchKeySet::FULL_AFTER, kTapKey);

// Guarded by the GIL.
PyObject* name_collective = nullptr;
torch::Library* taps = nullptr;

thread_local bool inside_tap = false;

// A collective that was entered.
struct Entered {
  ThreadState* thread;
  uint64_t generation;
  int64_t name_id, counter, bytes;
  const void* tap;
  const void* group;
  int64_t peer;
  c10::DeviceType device;  // kCPU for a barrier: the host waits
  bool no_future;          // completion is not observed

  OperatorKey key() const { return {tap, group, peer, device}; }
};

// Asks Python for the text id of an operator on a group. Acquires the GIL if the thread does not hold it.
std::optional<int64_t> ask_name(const std::string& operator_name, const std::string& group, int64_t peer,
                                c10::DeviceType device) {
  if (!Py_IsInitialized()) return std::nullopt;
  const GilLock gil;
  Session* session = engine.active_session.load();
  if (session == nullptr || name_collective == nullptr) return std::nullopt;
  const SessionRef hold(*session);
  const PyRef function = borrow(name_collective);
  const std::string device_name = device == c10::kCPU ? "" : c10::DeviceTypeName(device, true);
  const PyRef args = steal(
      Py_BuildValue("(ssLs)", operator_name.c_str(), group.c_str(), static_cast<long long>(peer), device_name.c_str()));
  const PyRef found = ask(*session, function, args.get());
  if (!found) raise_later();
  return found ? std::optional<int64_t>(PyLong_AsLongLong(found.get())) : std::nullopt;
}

void write_done(const Entered& entered) {
  write_without_gil(*entered.thread, entered.generation,
                    kCollectiveDone << kKindShift | entered.thread->meta_bits | entered.name_id, entered.counter);
}

void note_done(const c10::intrusive_ptr<c10d::Work>& work, const Entered& entered) {
  const bool on_cpu = entered.device == c10::kCPU;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    // On a device, getFuture's future is complete once the work is queued, and getFutureResult's once a watchdog sees
    // the end of the work, which can be 100 ms later.
    future = on_cpu ? work->getFuture() : work->getFutureResult();
  } catch (const std::exception&) {
  }
  if (!future) {
    CollectiveState& state = *collective_state.load();
    const std::lock_guard<std::mutex> lock(state.mutex);
    const auto known = state.operators.find(entered.key());
    if (known != state.operators.end()) known->second.no_future = true;
    return;
  }
  const int64_t meta = kCollectiveDone << kKindShift | entered.thread->meta_bits | entered.name_id;
  // It captures only numbers: it may run at any time on any thread, even after the end of the interpreter.
  future->addCallback(
      [meta, counter = entered.counter, generation = entered.generation](c10::ivalue::Future&) {
        if (generation != current_generation() || engine.active_session.load() == nullptr) return;
        write_without_gil(this_thread(), generation, meta, counter);
      },
      false);
}

// The kernel of one operator: writes its call, and passes the call on to the kernel below.
class Tap final : public c10::OperatorKernel {
 public:
  Tap(std::string name, size_t arguments, size_t group_index, std::optional<size_t> peer_index, bool has_message)
      : name_(std::move(name)),
        arguments_(arguments),
        group_index_(group_index),
        peer_index_(peer_index),
        has_message_(has_message) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const c10::DispatchKeySet below = keys & kBelowTap;
    std::optional<Entered> entered;
    if (engine.active_session.load(std::memory_order_relaxed) != nullptr && !inside_tap) entered = enter(*stack);
    if (!entered) {
      op.redispatchBoxed(below, stack);
      return;
    }
    const at::Tensor* tensor = first_tensor(torch::jit::peek(*stack, 0, arguments_));
    const void* memory =
        tensor != nullptr && tensor->has_storage() ? tensor->storage().unsafeGetStorageImpl() : nullptr;
    c10::intrusive_ptr<c10d::Work> work;
    queue_device_event_of_collective(*entered->thread, entered->device);
    {
      inside_tap = true;
      // Writes the exit, even if the operator raises.
      const auto exit = c10::make_scope_exit([&entered, &work] {
        inside_tap = false;
        const int64_t not_awaited = entered->device != c10::kCPU && !work ? kNotAwaitedBit : 0;
        write_without_gil(*entered->thread, entered->generation,
                          kCollectiveExit << kKindShift | entered->thread->meta_bits | entered->name_id,
                          entered->bytes | not_awaited);
      });
      op.redispatchBoxed(below, stack);
      work = !stack->empty() && stack->back().isObject() ? stack->back().toCustomClass<c10d::Work>() : nullptr;
      // A barrier that needs no wait, such as NCCL's.
      if (!work && !has_message_) write_done(*entered);
    }
    // Without a Work, the current stream runs the collective; with a Work, the backend's stream, and wait() shows the
    // end.
    if (work) {
      remember(work, memory, *entered);
    } else if (entered->thread->generation == entered->generation) {
      queue_device_event_of_collective(*entered->thread, entered->device);
    }
  }

 private:
  std::optional<Entered> enter(const Stack& stack) {
    const at::IValue& group_value = torch::jit::peek(stack, group_index_, arguments_);
    if (!group_value.isObject()) return std::nullopt;
    int64_t bytes = 0;
    c10::DeviceType device = c10::kCPU;
    for (size_t index = 0; index < std::min<size_t>(group_index_, 2); ++index) {
      const at::IValue& value = torch::jit::peek(stack, index, arguments_);
      const at::Tensor* tensor = first_tensor(value);
      if (tensor != nullptr && is_traced(*tensor)) return std::nullopt;
      if (tensor != nullptr) device = tensor->device().type();
      if (has_message_) bytes = std::max(bytes, tensor_bytes(value));
    }
    ThreadState& thread = registered_thread();
    const uint64_t generation = current_generation();
    if (thread.generation != generation) return std::nullopt;
    const auto group = group_value.toCustomClass<c10d::ProcessGroup>();
    const int64_t peer = peer_index_ ? torch::jit::peek(stack, *peer_index_, arguments_).toInt() : kNoPeer;
    const std::string& group_name = group->getGroupName();
    CollectiveState& state = *collective_state.load();
    // A barrier has a tensor of the device too. The end of the wait for the barrier shows its completion.
    const bool no_future = !has_message_ && device != c10::kCPU;
    if (!has_message_) device = c10::kCPU;
    Entered entered{&thread, generation, 0, 0, bytes, this, group.get(), peer, device, no_future};
    if (!count(state, group_name, entered)) {
      const std::optional<int64_t> name_id = ask_name(name_, group_name, peer, device);
      if (!name_id || *name_id < 0 || *name_id == kNoName) return std::nullopt;
      const std::lock_guard<std::mutex> lock(state.mutex);
      if (state.generation != generation) return std::nullopt;
      int64_t* counter = &state.counters[{group_name, peer_index_ ? *name_id : kNoPeer}];
      state.operators[entered.key()] = {*name_id, group_name, counter};
      entered.name_id = *name_id;
      entered.counter = (*counter)++;
    }
    write_without_gil(thread, generation, kCollectiveEnter << kKindShift | thread.meta_bits | entered.name_id,
                      entered.counter);
    return entered;
  }

  // Counts the call if its name is known.
  bool count(CollectiveState& state, const std::string& group_name, Entered& entered) {
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (state.generation != entered.generation) return false;
    const auto known = state.operators.find(entered.key());
    // Another group may have the address of a deleted group.
    if (known == state.operators.end() || known->second.group != group_name) return false;
    entered.name_id = known->second.name_id;
    entered.no_future |= known->second.no_future;
    entered.counter = (*known->second.counter)++;
    return true;
  }

  static void remember(const c10::intrusive_ptr<c10d::Work>& work, const void* memory, const Entered& entered) {
    {
      CollectiveState& state = *collective_state.load();
      const std::lock_guard<std::mutex> lock(state.mutex);
      if (state.generation != entered.generation) return;
      // Older works are rarely awaited.
      if (state.works.size() >= kRecentWorks) state.older_works = std::exchange(state.works, {});
      for (const void* address : {static_cast<const void*>(work.get()), memory}) {
        state.works[address] = {entered.name_id, entered.counter, entered.device};
      }
    }
    if (!entered.no_future) note_done(work, entered);
  }

  const std::string name_;
  const size_t arguments_, group_index_;
  const std::optional<size_t> peer_index_;
  const bool has_message_;
};

// The kernel of `wait_tensor` and `wait_tensors`, which wait for functional collectives; of several tensors, only the
// collective that made the first is recorded.
void tap_wait_tensor(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::DispatchKeySet below = keys & kBelowTap;
  const at::Tensor* tensor = first_tensor(stack->back());
  if (engine.active_session.load(std::memory_order_relaxed) == nullptr || tensor == nullptr || is_traced(*tensor) ||
      !tensor->has_storage()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  ThreadState& thread = registered_thread();
  const uint64_t generation = thread.generation;
  const Awaited awaited = find_awaited(tensor->storage().unsafeGetStorageImpl());
  const int64_t meta = thread.meta_bits | awaited.name_id;
  write_without_gil(thread, generation, kWaitEnter << kKindShift | meta, awaited.counter);
  queue_device_event_of_collective(thread, awaited.device);
  op.redispatchBoxed(below, stack);
  write_without_gil(thread, generation, kWaitExit << kKindShift | meta, awaited.counter);
  queue_device_event_of_collective(thread, awaited.device);
}

bool is_object(const c10::Argument& argument, const char* name) {
  return argument.type()->str().find(name) != std::string::npos;
}

// Registers the taps, for good: removing a kernel while other threads dispatch is not safe.
void register_taps() {
  taps = new torch::Library(torch::Library::IMPL, "c10d", kTapKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    const auto& arguments = op->schema().arguments();
    const auto group = std::find_if(arguments.begin(), arguments.end(),
                                    [](const auto& argument) { return is_object(argument, "ProcessGroup"); });
    if (group == arguments.end()) continue;
    const auto peer = std::find_if(arguments.begin(), arguments.end(), [](const auto& argument) {
      return argument.name() == "dst" || argument.name() == "src";
    });
    const std::string short_name = name.name.substr(6);
    std::optional<size_t> peer_index;
    if (peer != arguments.end()) peer_index = peer - arguments.begin();
    taps->impl(name.overload_name.empty() ? short_name.c_str() : (short_name + "." + name.overload_name).c_str(),
               torch::CppFunction::makeFromBoxedFunctor(
                   std::make_unique<Tap>(short_name, arguments.size(), group - arguments.begin(), peer_index,
                                         short_name.find("barrier") == std::string::npos)));
  }
  static torch::Library functional(torch::Library::IMPL, "_c10d_functional", kTapKey, __FILE__, __LINE__);
  for (const char* name : {"wait_tensor", "wait_tensors"}) {  // torch has the latter from 2.15 on
    if (!c10::Dispatcher::singleton().findSchema({std::string("_c10d_functional::") + name, ""})) continue;
    functional.impl(name, torch::CppFunction::makeFromBoxedFunction<&tap_wait_tensor>());
  }
}

// --- The method Work.wait, wrapped ---

PyObject* wait(PyObject* capsule, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  const Wrapper* wrapper = wrapper_in(capsule);
  const PyRef wrapped = borrow(wrapper->wrapped.get());
  Session* session = wrapper->active ? engine.active_session.load(std::memory_order_relaxed) : nullptr;
  ThreadState& thread = this_thread();
  if (session == nullptr || count == 0 ||
      (thread.generation != current_generation() && !register_thread(*session, thread))) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  }
  const Awaited awaited = find_awaited(bound_object(args[0], typeid(c10d::Work)));
  const uint64_t generation = thread.generation;
  const int64_t meta = thread.meta_bits | awaited.name_id;
  write_without_gil(thread, generation, kWaitEnter << kKindShift | meta, awaited.counter);
  queue_device_event_of_collective(thread, awaited.device);
  PyObject* result = PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  write_without_gil(thread, generation, kWaitExit << kKindShift | meta, awaited.counter);
  queue_device_event_of_collective(thread, awaited.device);
  return result;
}

PyMethodDef wait_definition = {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(wait)),
                               METH_FASTCALL | METH_KEYWORDS,
                               "wait(work, timeout): wait for a work, and note from when to when."};

}  // namespace

PyObject* start_collectives(PyObject*, PyObject* name) {
  Py_INCREF(name);
  Py_XSETREF(name_collective, name);
  if (collective_state.load() == nullptr) collective_state.store(new CollectiveState);
  {
    CollectiveState& state = *collective_state.load();
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.generation = current_generation();
    state.operators.clear();
    state.counters.clear();
    state.works.clear();
    state.older_works.clear();
  }
  try {
    if (taps == nullptr) register_taps();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* stop_collectives(PyObject*, PyObject*) {
  Py_CLEAR(name_collective);
  Py_RETURN_NONE;
}

PyObject* wrap_wait(PyObject*, PyObject* wrapped) {
  PyObject* function = PyInstanceMethod_Check(wrapped) ? PyInstanceMethod_GET_FUNCTION(wrapped) : wrapped;
  const PyRef wrapper = steal(new_wrapper(wait_definition, function));
  return wrapper ? PyInstanceMethod_New(wrapper.get()) : nullptr;
}

void reset_collectives() {
  if (collective_state.load() != nullptr) collective_state.store(new CollectiveState);
}

}  // namespace modtrace
