// Backward passes: which call's nodes run, from when on.
//
// The engine runs the ready node with the highest sequence number first. Where each node leads only to older ones, and
// all were made by this thread and run on one device, the order is therefore known before the pass: descending. A mark
// on the first node of each stretch that one call made is then enough, and the rest run unwatched. Any other pass is
// watched node by node, by an observer, which costs torch four times as much for each.

#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <limits>
#include <optional>

#include "ring_writer.h"

namespace modtrace {

constexpr uint64_t kAccumulates = std::numeric_limits<uint64_t>::max();  // sequence number of an AccumulateGrad
constexpr uint64_t kPassMask = (1 << 25) - 1;
constexpr size_t kPlaces = 256;

// A marked pass that runs. Marks outlive it where the graph is retained, and do nothing then.
struct Pass {
  std::atomic<uint64_t> number{0};
  std::atomic<bool> begun{false}, over{false};
};

inline std::array<Pass, kPlaces> running;
inline std::array<std::atomic<int>, kPlaces> marked_tasks;  // by task modulo; the observer leaves them alone

// Guarded by the interpreter's lock.
inline uint64_t last_pass = 0;
inline int passes = 0, watched = 0;
inline bool devices_shared = false;  // whether several threads had passes on devices at once
inline at::CallbackHandle observer = 0;
inline PyObject* inner_pass = nullptr;  // torch's function that runs a pass

// Whether torch.compile traces. What it runs then, in no graph task or in one on fake tensors, is no pass of the user's.
inline bool tracing() {
  return C10_UNLIKELY(c10::impl::TorchDispatchModeTLS::any_modes_set()) &&
         c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

inline int64_t node_meta(Kind kind, uint64_t forward_thread, int task) {
  return kind << kKindShift | static_cast<int64_t>(forward_thread & 0xFFFF) << 8 | (task & 0xFF);
}

inline Thread& observing_thread() {
  Thread& thread = this_thread();
  if (C10_UNLIKELY(thread.generation != generation)) add_observing_thread(thread);
  return thread;
}

// --- the observer ---

inline bool is_marked(int task) { return marked_tasks[task % kPlaces].load(std::memory_order_relaxed) == task + 1; }

// The task whose node runs, or -1 where the node is not to be noted.
inline int watched_task() {
  const int task = tracing() ? -1 : torch::autograd::get_current_graph_task_id();
  return task >= 0 && is_marked(task) ? -1 : task;
}

inline void write_sequence(Thread& thread) {
  // A backward that builds a graph makes nodes; they belong to the call whose node is running.
  if (C10_UNLIKELY(at::GradMode::is_enabled())) {
    write_observed(thread, kNodeSequence << kKindShift | kNoName,
                   static_cast<int64_t>(at::sequence_number::peek()) & kSequenceMask);
  }
}

// AccumulateGrad has no sequence number. It runs right after the node that made the gradient, and counts to that one.
inline bool accumulates(const at::RecordFunction& function) { return function.seqNr() < 0; }

inline std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& function) {
  if (accumulates(function)) return nullptr;
  const int task = watched_task();
  if (C10_UNLIKELY(task < 0)) return nullptr;
  Thread& thread = observing_thread();
  write_observed(thread, node_meta(kNodeBegin, function.forwardThreadId(), task), function.seqNr());
  write_sequence(thread);
  return nullptr;
}

inline void node_ends(const at::RecordFunction& function, at::ObserverContext*) {
  const int task = watched_task();
  if (C10_UNLIKELY(task < 0)) return;
  Thread& thread = this_thread();
  if (accumulates(function)) {
    write_observed(thread, node_meta(kAccumulated, function.forwardThreadId(), task), 0);
    return;
  }
  write_sequence(thread);
  write_observed(thread, node_meta(kNodeEnd, function.forwardThreadId(), task), function.seqNr());
}

inline void watch() {
  if (watched++ > 0) return;
  observer = at::addGlobalCallback(
      at::RecordFunctionCallback(node_begins, node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

inline void watch_no_more() {
  if (--watched == 0) at::removeCallback(observer);
}

// --- marks ---

// Notes that a pass is over, once.
inline void end_pass(uint64_t number) {
  Pass& pass = running[number % kPlaces];
  if (pass.number.load() != number || !pass.begun.load() || pass.over.exchange(true)) return;
  write_observed(observing_thread(), kBackwardOver << kKindShift | kNoName, static_cast<int64_t>(number & kPassMask));
}

// Stands on the first node of a stretch.
class Mark final : public torch::autograd::FunctionPreHook {
 public:
  Mark(uint64_t pass, uint64_t forward_thread, uint64_t sequence)
      : pass_(pass), forward_thread_(forward_thread), sequence_(sequence) {}

  void renew(uint64_t pass) { pass_.store(pass); }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const uint64_t number = pass_.load(std::memory_order_relaxed);
    Pass& pass = running[number % kPlaces];
    if (C10_LIKELY(pass.number.load(std::memory_order_acquire) == number)) begin(pass, number);
    return gradients;
  }

  // What torch.compile makes of a pass runs no marks. One of the two overrides, by torch's version.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {}

 private:
  void begin(Pass& pass, uint64_t number) const {
    const int task = torch::autograd::get_current_graph_task_id();
    if (C10_UNLIKELY(task < 0)) return;
    Thread& thread = observing_thread();
    if (C10_UNLIKELY(!pass.begun.load(std::memory_order_relaxed)) && !pass.begun.exchange(true)) {
      torch::autograd::Engine::get_default_engine().queue_callback([number] { end_pass(number); });
    }
    marked_tasks[task % kPlaces].store(task + 1, std::memory_order_relaxed);
    write_observed(thread, node_meta(kStretch, forward_thread_, 0),
                   static_cast<int64_t>((number & kPassMask) << kSequenceBits | (sequence_ & kSequenceMask)));
  }

  std::atomic<uint64_t> pass_;
  uint64_t forward_thread_, sequence_;
};

// Where the engine runs it: on the device of the first gradient that is not on the CPU.
inline at::Device device_of(const torch::autograd::Node& node) {
  for (uint32_t input = 0; input < node.num_inputs(); ++input) {
    const at::Device device = node.input_metadata(input).device();
    if (device.type() != at::kCPU) return device;
  }
  return at::kCPU;
}

// The nodes of a pass by age, where the order in which they will run is known; else it stops looking.
class Order {
 public:
  Order() : forward_thread_(at::RecordFunction::currentThreadId()), next_(at::sequence_number::peek()) {}

  bool find(PyObject* outputs) {
    if (!PyTuple_Check(outputs)) return false;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(outputs); ++at) {
      PyObject* output = PyTuple_GET_ITEM(outputs, at);
      if (!THPVariable_Check(output)) return false;
      const auto root = THPVariable_Unpack(output).grad_fn();
      if (root && !visit(*root)) return false;
    }
    while (!todo_.empty()) {
      torch::autograd::Node& node = *todo_.back();
      todo_.pop_back();
      for (const auto& edge : node.next_edges()) {
        if (!edge.function) continue;
        torch::autograd::Node& older = *edge.function;
        if (older.sequence_nr() >= node.sequence_nr() && older.sequence_nr() != kAccumulates) return false;
        if (!visit(older)) return false;
      }
    }
    return true;
  }

  bool on_device() const { return device_ && device_->type() != at::kCPU; }

  void mark(const Boundaries& boundaries, uint64_t pass) {
    bool first = true;
    for (size_t age = 0; age < nodes_.size(); ++age) {
      const uint64_t sequence = next_ - 1 - age;
      if (nodes_[age] != nullptr && first) {
        put(*nodes_[age], pass);
        first = false;
      }
      first |= boundaries.at(sequence);
    }
  }

 private:
  bool visit(torch::autograd::Node& node) {
    const uint64_t sequence = node.sequence_nr();
    if (sequence == kAccumulates) return node.num_outputs() == 0;
    const uint64_t age = next_ - 1 - sequence;
    if (age >= kReach || node.thread_id() != forward_thread_) return false;
    if (age >= nodes_.size()) nodes_.resize(std::max<size_t>(age + 1, 2 * nodes_.size()));
    if (nodes_[age] != nullptr) return nodes_[age] == &node;
    const at::Device device = device_of(node);
    if (device_.value_or(device) != device) return false;
    device_ = device;
    nodes_[age] = &node;
    todo_.push_back(&node);
    return true;
  }

  void put(torch::autograd::Node& node, uint64_t pass) const {
    for (const auto& hook : node.pre_hooks()) {
      if (auto* mark = dynamic_cast<Mark*>(hook.get())) return mark->renew(pass);
    }
    node.add_pre_hook(std::make_unique<Mark>(pass, forward_thread_, node.sequence_nr()));
  }

  uint64_t forward_thread_, next_;  // what the thread's next node will be
  std::optional<at::Device> device_;
  std::vector<torch::autograd::Node*> nodes_, todo_;  // those known, by age; those whose edges are to be followed
};

// Marks the graph behind the outputs; 0 where that cannot tell all.
inline uint64_t mark(Thread& thread, PyObject* outputs) {
  thread.boundaries.add(at::sequence_number::peek());
  if (!thread.boundaries.known()) return 0;
  try {
    Order order;
    if (!order.find(outputs)) return 0;
    if (order.on_device()) {
      // Two passes on one device take turns there, node by node. One inside of the other does not.
      devices_shared |= passes > thread.passes && torch::autograd::get_current_graph_task_id() < 0;
      if (devices_shared) return 0;
    }
    const uint64_t number = ++last_pass;
    Pass& pass = running[number % kPlaces];
    if (pass.number.load() != 0) return 0;
    order.mark(thread.boundaries, number);
    pass.begun.store(false);
    pass.over.store(false);
    pass.number.store(number);
    return number;
  } catch (const std::exception&) {
    return 0;  // what is wrong with the graph, the engine itself will say
  }
}

// Whether a pass runs each node at most once, builds no graph, and runs all that its outputs lead to.
inline bool is_plain(PyObject* const* args, Py_ssize_t count) {
  return count == 5 && args[3] == Py_False && PyTuple_Check(args[4]) && PyTuple_GET_SIZE(args[4]) == 0;
}

// In the place of torch.autograd.graph._engine_run_backward: (outputs, gradients, retain_graph, create_graph, inputs).
inline PyObject* run_pass(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  Session* session = current.load(std::memory_order_relaxed);
  Thread& thread = this_thread();
  if (session == nullptr || tracing() || (thread.generation != generation && !add_thread(*session, thread))) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(inner_pass, args, count, keywords);
  }
  const uint64_t begun_in = generation;
  const uint64_t number = is_plain(args, count) ? mark(thread, args[0]) : 0;
  const uint64_t first = at::sequence_number::peek();
  if (number == 0) watch();
  ++passes;
  ++thread.passes;
  PyObject* result = PyObject_Vectorcall(inner_pass, args, count, keywords);
  if (begun_in != generation || current.load(std::memory_order_relaxed) == nullptr) return result;
  --passes;
  --thread.passes;
  if (number != 0) {
    end_pass(number);
    running[number % kPlaces].number.store(0);
  } else {
    watch_no_more();
    // The nodes that it made are many calls'.
    thread.boundaries.add_all(first, at::sequence_number::peek());
  }
  return result;
}

inline void forget_passes() {
  for (Pass& pass : running) pass.number.store(0);
  if (watched > 0) at::removeCallback(observer);
  passes = watched = 0;
}

}  // namespace modtrace
