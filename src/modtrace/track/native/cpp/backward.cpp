#include "backward.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "device/calls.h"
#include "engine.h"
#include "flops.h"
#include "observers.h"

namespace modtrace {
namespace {

// --- The hook on the first node of a segment, and the backward pass that it belongs to ---

BackwardPass& pass_slot(uint64_t number) { return engine.pass_slots[number % kMaxConcurrentPasses]; }

std::atomic<int>& hooked_slot(int graph_task) { return engine.hooked_graph_tasks[graph_task % kMaxConcurrentPasses]; }

// Writes the end of a pass: once, and only if its start was written.
void end_pass(uint64_t number) {
  BackwardPass& pass = pass_slot(number);
  if (pass.number.load() != number || !pass.begun.load() || pass.over.exchange(true)) return;
  ThreadState& thread = registered_thread();
  write_without_gil(thread, kBackwardOver << kKindShift | kNoName, static_cast<int64_t>(number & kBackwardPassMask));
  if (C10_UNLIKELY(pass.device_times)) queue_device_event(thread);
}

// Writes that the nodes from this one on belong to another call than the nodes before.
class SegmentHook final : public torch::autograd::FunctionPreHook {
 public:
  SegmentHook(uint64_t pass_number, uint64_t forward_thread, uint64_t sequence, bool on_device)
      : pass_number_(pass_number), on_device_(on_device), forward_thread_(forward_thread), sequence_(sequence) {}

  // Whether the hook's pass still runs.
  bool is_live() const {
    const uint64_t number = pass_number_.load();
    return number != 0 && pass_slot(number).number.load() == number;
  }

  // Assigns the hook to another pass: the graph was retained, and runs again.
  void set_pass(uint64_t pass_number, bool on_device) {
    on_device_.store(on_device);
    pass_number_.store(pass_number);
  }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const uint64_t number = pass_number_.load(std::memory_order_relaxed);
    BackwardPass& pass = pass_slot(number);
    if (C10_LIKELY(pass.number.load(std::memory_order_acquire) == number)) begin_segment(pass, number);
    return gradients;
  }

  // A compiled backward does not run our hooks.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  void begin_segment(BackwardPass& pass, uint64_t number) const {
    const int graph_task = current_graph_task();
    if (C10_UNLIKELY(graph_task < 0)) return;
    int pass_task = kNoGraphTask;
    if (!pass.graph_task.compare_exchange_strong(pass_task, graph_task) && pass_task != graph_task) return;
    ThreadState& thread = registered_thread();
    if (C10_UNLIKELY(!pass.begun.load(std::memory_order_relaxed)) && !pass.begun.exchange(true)) {
      torch::autograd::Engine::get_default_engine().queue_callback([number] { end_pass(number); });
    }
    hooked_slot(graph_task).store(graph_task + 1, std::memory_order_relaxed);
    write_without_gil(
        thread, node_meta(kSegmentBegin, forward_thread_, 0),
        static_cast<int64_t>((number & kBackwardPassMask) << kSequenceBits | (sequence_ & kSequenceMask)));
    if (C10_UNLIKELY(on_device_.load(std::memory_order_relaxed))) queue_device_event(thread);
  }

  std::atomic<uint64_t> pass_number_;
  std::atomic<bool> on_device_;  // whether a device event is recorded here
  uint64_t forward_thread_, sequence_;
};

// --- The order in which a backward pass will run its nodes, if it is known before the pass ---

constexpr uint64_t kAccumulateGradSeq = std::numeric_limits<uint64_t>::max();
constexpr size_t kUsualNodes = 256;  // number of nodes of a pass without further allocations

// The device on which the autograd engine runs the node: that of the first gradient that is not on the CPU.
at::Device device_of(const torch::autograd::Node& node) {
  static const at::Device cpu(at::kCPU);  // copying a device is faster than making it
  for (uint32_t input = 0; input < node.num_inputs(); ++input) {
    const at::Device device = node.input_metadata(input).device();
    if (device.type() != at::kCPU) return device;
  }
  return cpu;
}

// The nodes of a pass in the order in which they run: from the newest to the oldest.
class BackwardOrder {
 public:
  // `boundaries`: of this thread, up to the next node that it will make.
  explicit BackwardOrder(const SequenceBoundaries& boundaries)
      : boundaries_(boundaries), forward_thread_(at::RecordFunction::currentThreadId()) {
    reached_.reserve(kUsualNodes);
    nodes_.reserve(kUsualNodes);
  }

  // Walks the graph that leads to the outputs. False if the order is not known; then the walk stops.
  bool find(PyObject* outputs) {
    if (!PyTuple_Check(outputs)) return false;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(outputs); ++index) {
      PyObject* output = PyTuple_GET_ITEM(outputs, index);
      if (!THPVariable_Check(output)) return false;
      const auto root = THPVariable_Unpack(output).grad_fn();
      if (root && !reach(*root)) return false;
    }
    while (!reached_.empty()) {
      const NumberedNode newest = take_newest();
      if (!nodes_.empty() && newest.sequence == nodes_.back().sequence) {
        if (newest.node != nodes_.back().node) return false;
        continue;
      }
      if (!is_in_order(newest)) return false;
      nodes_.push_back(newest);
      for (const auto& edge : newest.node->next_edges()) {
        if (!edge.function) continue;
        const uint64_t sequence = edge.function->sequence_nr();
        if (sequence >= newest.sequence && sequence != kAccumulateGradSeq) return false;
        if (!reach(*edge.function)) return false;
      }
    }
    return true;
  }

  bool is_on_device() const { return device_ && device_->type() != at::kCPU; }

  // Whether a node has the hook of a pass that still runs.
  bool meets_live_hook() const {
    return std::any_of(nodes_.begin(), nodes_.end(), [](const NumberedNode& node) {
      const SegmentHook* hook = hook_of(node);
      return hook != nullptr && hook->is_live();
    });
  }

  // Hooks the first node to run of each segment.
  //
  // device_boundaries: boundaries of the nodes of calls that get device events, or null if no call gets any.
  void hook_segments(uint64_t pass_number, const SequenceBoundaries* device_boundaries) const {
    for (size_t index = 0; index < nodes_.size(); ++index) {
      const NumberedNode& node = nodes_[index];
      const uint64_t newer = index == 0 ? 0 : nodes_[index - 1].sequence;
      if (index != 0 && !boundaries_.any(node.sequence + 1, newer)) continue;
      const bool on_device =
          device_boundaries != nullptr && (index == 0 || (device_boundaries->reaches(node.sequence) &&
                                                          device_boundaries->any(node.sequence + 1, newer)));
      add_hook(node, pass_number, on_device);
    }
  }

 private:
  struct NumberedNode {
    uint64_t sequence;
    torch::autograd::Node* node;
    bool operator<(const NumberedNode& other) const { return sequence < other.sequence; }
  };

  // Adds a node that the pass runs; a node can be added more than once before it is taken. False for a node without a
  // sequence number that is not an AccumulateGrad.
  bool reach(torch::autograd::Node& node) {
    const uint64_t sequence = node.sequence_nr();
    if (sequence == kAccumulateGradSeq) return node.num_outputs() == 0;
    reached_.push_back({sequence, &node});
    std::push_heap(reached_.begin(), reached_.end());
    return true;
  }

  NumberedNode take_newest() {
    std::pop_heap(reached_.begin(), reached_.end());
    const NumberedNode newest = reached_.back();
    reached_.pop_back();
    return newest;
  }

  // Whether this thread made the node, on the same device as the others, and the boundaries reach back to it.
  bool is_in_order(const NumberedNode& numbered) {
    if (numbered.node->thread_id() != forward_thread_ || !boundaries_.reaches(numbered.sequence)) return false;
    const at::Device device = device_of(*numbered.node);
    if (device_.value_or(device) != device) return false;
    device_ = device;
    return true;
  }

  static SegmentHook* hook_of(const NumberedNode& numbered) {
    for (const auto& hook : numbered.node->pre_hooks()) {
      if (auto* ours = dynamic_cast<SegmentHook*>(hook.get())) return ours;
    }
    return nullptr;
  }

  void add_hook(const NumberedNode& numbered, uint64_t pass_number, bool on_device) const {
    if (SegmentHook* hook = hook_of(numbered)) {
      hook->set_pass(pass_number, on_device);
      return;
    }
    numbered.node->add_pre_hook(
        std::make_unique<SegmentHook>(pass_number, forward_thread_, numbered.sequence, on_device));
  }

  const SequenceBoundaries& boundaries_;
  uint64_t forward_thread_;
  std::optional<at::Device> device_;
  std::vector<NumberedNode> reached_;  // a heap: the newest first
  std::vector<NumberedNode> nodes_;    // from the newest to the oldest
};

// --- The observer, which torch calls around each node that runs ---

bool is_hooked(int graph_task) { return hooked_slot(graph_task).load(std::memory_order_relaxed) == graph_task + 1; }

// The graph task whose node runs, or kNoGraphTask if the node is not recorded.
int observed_graph_task() {
  const int graph_task = is_tracing() ? kNoGraphTask : current_graph_task();
  return graph_task >= 0 && is_hooked(graph_task) ? kNoGraphTask : graph_task;
}

// A node that builds a graph makes nodes, which belong to the same call as the node.
void write_graph_built(ThreadState& thread) {
  if (C10_LIKELY(!at::GradMode::is_enabled())) return;
  write_without_gil(thread, kGraphBuilt << kKindShift | kNoName,
                    static_cast<int64_t>(at::sequence_number::peek() & kSequenceMask));
}

// An AccumulateGrad has no sequence number. It runs right after the node that made the gradient, and counts for that
// node.
bool is_accumulate_grad(const at::RecordFunction& function) { return function.seqNr() < 0; }

std::unique_ptr<at::ObserverContext> on_node_begin(const at::RecordFunction& function) {
  if (is_accumulate_grad(function)) return nullptr;
  ThreadState& thread = registered_thread();
  const int graph_task = observed_graph_task();
  if (C10_UNLIKELY(graph_task < 0)) return nullptr;
  write_without_gil(thread, node_meta(kNodeBegin, function.forwardThreadId(), graph_task), function.seqNr());
  write_graph_built(thread);
  return nullptr;
}

void on_node_end(const at::RecordFunction& function, at::ObserverContext*) {
  const int graph_task = observed_graph_task();
  if (C10_UNLIKELY(graph_task < 0)) return;
  ThreadState& thread = this_thread();
  if (is_accumulate_grad(function)) {
    write_without_gil(thread, node_meta(kAccumulateEnd, function.forwardThreadId(), graph_task), 0);
    return;
  }
  write_graph_built(thread);
  write_without_gil(thread, node_meta(kNodeEnd, function.forwardThreadId(), graph_task), function.seqNr());
}

Observer nodes;

// Calls nest: the observer is on from the first add to the last remove. Both need the interpreter's lock.
void add_observer() {
  if (engine.observed_passes++ == 0) nodes.turn_on();
}

void remove_observer() {
  if (--engine.observed_passes == 0) nodes.turn_off();
}

// --- The hooks, one for each segment ---

// Whether passes of several threads ever ran at once: on one device, their nodes alternate. Nested passes do not count.
bool shares_device(const ThreadState& thread) {
  engine.device_shared |= engine.running_passes > thread.open_passes && current_graph_task() < 0;
  return engine.device_shared;
}

// Hooks the segments of the outputs' graph, and returns the number of the pass; 0 if hooks are not enough.
uint64_t hook_segments(ThreadState& thread, PyObject* outputs) {
  thread.boundaries.add(at::sequence_number::peek());
  if (!thread.boundaries.allocated()) return 0;
  try {
    BackwardOrder order(thread.boundaries);
    if (!order.find(outputs) || (order.is_on_device() && shares_device(thread))) return 0;
    // An outer or parallel pass needs its hooks on the nodes that both passes run.
    if (engine.running_passes > 0 && order.meets_live_hook()) return 0;
    const uint64_t number = ++engine.last_pass;
    BackwardPass& pass = pass_slot(number);
    if (pass.number.load() != 0) return 0;
    const bool device_times =
        engine.device_times_active.load(std::memory_order_relaxed) && thread.device_boundaries.allocated();
    if (C10_UNLIKELY(device_times)) thread.device_boundaries.add(at::sequence_number::peek());
    order.hook_segments(number, device_times ? &thread.device_boundaries : nullptr);
    pass.graph_task.store(kNoGraphTask);
    pass.begun.store(false);
    pass.over.store(false);
    pass.device_times = device_times;
    pass.number.store(number);
    return number;
  } catch (const std::exception&) {
    return 0;  // torch itself will report the error in the graph
  }
}

// Whether a pass runs each node at most once, builds no graph, and runs all nodes to which its outputs lead.
bool is_plain_backward(PyObject* const* args, Py_ssize_t count) {
  return count == 5 && args[3] == Py_False && PyTuple_Check(args[4]) && PyTuple_GET_SIZE(args[4]) == 0;
}

// Whether one of the tensors is a leaf, or there are no tensors: such a pass runs all nodes to which its outputs lead.
bool any_is_leaf(PyObject* inputs) {
  const Py_ssize_t count = PyTuple_GET_SIZE(inputs);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* input = PyTuple_GET_ITEM(inputs, i);
    if (THPVariable_Check(input) && THPVariable_Unpack(input).is_leaf()) return true;
  }
  return count == 0;
}

// Whether a pass builds a graph that another pass can use: the outermost level of torch.func.grad drops its graph.
bool builds_graph(PyObject* create_graph) {
  if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return create_graph != Py_False;
  }
  const PyRef functorch = steal(PyImport_ImportModule("torch._C._functorch"));
  const PyRef level = steal(functorch ? PyObject_CallMethod(functorch.get(), "maybe_current_level", nullptr) : nullptr);
  PyErr_Clear();
  return !level || !PyLong_Check(level.get()) || PyLong_AsLong(level.get()) != 1;
}

// Whether the argument of this name is True.
bool is_true(const char* name, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  for (Py_ssize_t i = 0; keywords != nullptr && i < PyTuple_GET_SIZE(keywords); ++i) {
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, i), name) == 0) return args[count + i] == Py_True;
  }
  return false;
}

// Writes that a pass has given gradients to leaf tensors, if that may end a training step.
void note_gradients(Session& session, const ThreadState& thread, PyObject* const* args, Py_ssize_t count,
                    PyObject* keywords) {
  if (session.steps_told || current_graph_task() >= 0 || count < 5 || !PyTuple_Check(args[4])) return;
  if (builds_graph(args[3]) || !any_is_leaf(args[4])) return;
  const int64_t returned = is_true("accumulate_grad", args, count, keywords) ? 0 : 1;
  write_held(session, thread);
  write_with_gil(session, int64_t{kGradients} << kKindShift | thread.meta_bits | returned,
                 session.gradient_passes[returned]++);
}

// Whether the session of this generation runs.
bool is_running(uint64_t generation) {
  return engine.active_session.load(std::memory_order_relaxed) != nullptr && generation == current_generation();
}

// Writes the end of a pass that failed, which torch does not report. A device event may block, see
// queue_device_event_without_gil.
void end_pass_without_gil(uint64_t number) {
  if (C10_LIKELY(pass_slot(number).over.load())) return;
  Py_BEGIN_ALLOW_THREADS end_pass(number);
  Py_END_ALLOW_THREADS
}

// Writes that this thread calls torch's function that runs a pass, or that the call returned.
void write_pass_edge(Session& session, const ThreadState& thread, Kind kind, int64_t call, int64_t time = 0) {
  write_with_gil(session, kind << kKindShift | thread.meta_bits | kNoName, call, time);
}

PyObject* make_gradients(PyObject* capsule, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  const Wrapper* wrapper = wrapper_in(capsule);
  const PyRef wrapped = borrow(wrapper->wrapped.get());
  if (wrapper->active) expect(this_thread().pass_expected_ns);
  return PyObject_Vectorcall(wrapped.get(), args, count, keywords);
}

PyObject* run_backward(PyObject* capsule, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  const Wrapper* wrapper = wrapper_in(capsule);
  const PyRef wrapped = borrow(wrapper->wrapped.get());
  Session* session = wrapper->active ? engine.active_session.load(std::memory_order_relaxed) : nullptr;
  ThreadState& thread = this_thread();
  follow_greenlet(thread);
  if (session == nullptr || is_tracing() ||
      (thread.generation != current_generation() && !register_thread(*session, thread))) {
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    return PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  }
  const uint64_t generation = current_generation();
  tell_boundary(*session, "backward");
  if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
  if (!is_running(generation)) return PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  const int64_t call = ++engine.pass_calls;
  write_pass_edge(*session, thread, kPassBegin, call, take_expected(thread.pass_expected_ns));
  if (C10_UNLIKELY(static_cast<bool>(session->answer_operators))) {
    meet_pass(*session, thread, args, count);
    if (C10_UNLIKELY(PyErr_Occurred() != nullptr)) return nullptr;
    if (!is_running(generation)) return PyObject_Vectorcall(wrapped.get(), args, count, keywords);
    write_with_gil(*session, int64_t{kPassGraph} << kKindShift | thread.meta_bits | kNoName, session->flops.graph);
  }
  const uint64_t number = is_plain_backward(args, count) ? hook_segments(thread, args[0]) : 0;
  const uint64_t first_sequence = at::sequence_number::peek();
  if (number == 0) add_observer();
  ++engine.running_passes;
  ++thread.open_passes;
  if (current_graph_task() == kNoGraphTask) ++memory.passes;
  PyObject* result = PyObject_Vectorcall(wrapped.get(), args, count, keywords);
  follow_greenlet(thread);
  // Another thread may have ended the session meanwhile, and abandoned this pass.
  if (!is_running(generation)) return result;
  Session& running = *engine.active_session.load();
  write_pass_edge(running, thread, kPassEnd, call);
  const int64_t passes_before = running.gradient_passes[0] + running.gradient_passes[1];
  if (result != nullptr) note_gradients(running, thread, args, count, keywords);
  running.flops.passes_ended = running.flops.passes_ended || current_graph_task() < 0;
  --engine.running_passes;
  --thread.open_passes;
  if (number != 0) {
    end_pass_without_gil(number);
    if (!is_running(generation)) return result;
    pass_slot(number).number.store(0);
  } else {
    remove_observer();
    // The nodes that an observed pass made belong to many calls.
    thread.boundaries.add_all(first_sequence, at::sequence_number::peek());
  }
  tell_boundary(running, nullptr);
  if (result != nullptr && is_running(generation)) {
    const int64_t passes = running.gradient_passes[0] + running.gradient_passes[1];
    if (passes > passes_before) tell_end(running, passes, "backward");
  }
  if (result != nullptr && PyErr_Occurred() != nullptr) Py_CLEAR(result);
  return result;
}

// These functions get their arguments as C arrays, so they do not have the type of PyMethodDef's field.
PyMethodDef make_gradients_definition = {
    "make_gradients", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(make_gradients)),
    METH_FASTCALL | METH_KEYWORDS, "make_gradients(outputs, ...): the start of a backward pass."};
PyMethodDef run_backward_definition = {
    "run_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_backward)), METH_FASTCALL | METH_KEYWORDS,
    "run_backward(outputs, ...): run a backward pass, and record the calls whose nodes run."};

}  // namespace

PyObject* wrap_backward(PyObject*, PyObject* wrapped) { return new_wrapper(run_backward_definition, wrapped); }

PyObject* wrap_make_gradients(PyObject*, PyObject* wrapped) { return new_wrapper(make_gradients_definition, wrapped); }

void watch_nodes() {
  nodes.install(at::RecordFunctionCallback(on_node_begin, on_node_end).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

void abandon_backward_passes() {
  for (BackwardPass& pass : engine.pass_slots) pass.number.store(0);
  engine.running_passes = 0;
  while (engine.observed_passes > 0) remove_observer();
}

}  // namespace modtrace
