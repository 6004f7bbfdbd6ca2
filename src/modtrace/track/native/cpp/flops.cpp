#include "flops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine.h"
#include "graph_number.h"
#include "observers.h"

// From a header that takes long to compile.
namespace torch::jit {
pybind11::object toPyObject(c10::IValue value);
}

namespace modtrace {
namespace {

constexpr size_t kMaxInputs = 4096;
constexpr int kMaxValues = 1024;  // maximum number of values in a call's inputs, including those in containers
constexpr size_t kMaxKnownOperators = 1 << 16;
constexpr int kMaxDepth = 4;
constexpr size_t kUsualKey = 256;
constexpr int kMaxCallsWithoutPass = 16;
constexpr int64_t kMaxWaiting = 1024;
constexpr int64_t kCallsPerQuestion = 4;  // number of calls per computed cost, so that no call gets much slower
// Like the marks of graph_number.h.
constexpr int64_t kPassMark = -4, kRerunMark = -5;

// --- Which calls are counted ---

// Whether the sizes of a tensor need Python, or do not exist.
bool has_no_sizes(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_nested();
}

void add_shape(std::vector<int64_t>& key, const at::Tensor& tensor) {
  key.push_back(kNestingMark - 10 - static_cast<int64_t>(tensor.requires_grad()));
  if (has_no_sizes(tensor)) return;
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
}

// Adds the facts of an argument that decide which operators run, up to `left` values. Only plain containers are opened,
// so that no code of the user's runs.
void add_input(std::vector<int64_t>& key, PyObject* input, int depth, int& left) {
  if (--left < 0) return;
  if (THPVariable_Check(input)) {
    add_shape(key, THPVariable_Unpack(input));
  } else if (input == Py_None || PyBool_Check(input)) {
    key.push_back(kNestingMark - 4 - static_cast<int64_t>(input == Py_None ? 2 : input == Py_True));
  } else if (depth < kMaxDepth && (PyTuple_CheckExact(input) || PyList_CheckExact(input))) {
    key.push_back(kNestingMark);
    for (Py_ssize_t i = 0; left >= 0 && i < PySequence_Fast_GET_SIZE(input); ++i) {
      add_input(key, PySequence_Fast_GET_ITEM(input, i), depth + 1, left);
    }
    key.push_back(kNestingMark);
  } else if (depth < kMaxDepth && PyDict_Check(input)) {
    key.push_back(kNestingMark);
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    while (left >= 0 && PyDict_Next(input, &position, nullptr, &value)) add_input(key, value, depth + 1, left);
    key.push_back(kNestingMark);
  } else {
    key.push_back(kOtherMark);
  }
}

using OperatorNames = std::set<std::string, std::less<>>;

// The names of counted operators, replaced as a whole and never freed: any thread may read them.
std::atomic<const OperatorNames*> counted_operators{nullptr};
Observer operators;
std::atomic<bool> counting{false};

// Asks Python for the operators with a formula. False if that failed or the session ended.
bool ask_operators(Session& session) {
  const PyRef found = ask(session, session.operator_names);
  if (!found) return false;
  if (found.get() != Py_None) {
    auto names = std::make_unique<OperatorNames>();
    for (Py_ssize_t i = 0; PyTuple_Check(found.get()) && i < PyTuple_GET_SIZE(found.get()); ++i) {
      const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(found.get(), i));
      if (name != nullptr) names->insert(name);
    }
    PyErr_Clear();
    counted_operators.store(names.release());
  }
  return true;
}

void write_counting(Session& session, const ThreadState& thread, int64_t value) {
  write_with_gil(session, kCounting << kKindShift | thread.meta_bits | kNoName, value);
}

// --- The operators ---

thread_local int open_operators = 0;  // number of open counted operators: inner operators do not count

// An operator with unknown cost.
struct UnknownOperator {
  int64_t number = 0, bytes = 0;  // its number, and the bytes of its tensors
  uint64_t generation;
  std::string name, overload, device;
  std::vector<c10::IValue> inputs, outputs;
  UnknownOperator* next = nullptr;
};

std::atomic<UnknownOperator*> noted{nullptr};  // operators that any thread added, the newest first
UnknownOperator* taken = nullptr;              // the next operators for Python; guarded by the interpreter's lock
std::atomic<int64_t> waiting{0};               // number of operators in both lists
std::atomic<int64_t> last_number{0};

struct OpenOperator final : at::ObserverContext {
  explicit OpenOperator(uint64_t session) : generation(session) { ++open_operators; }
  ~OpenOperator() override { --open_operators; }
  uint64_t generation;
  int64_t number = 0;  // 0 if it has no number yet; only then it has the next two
  std::string key;
  std::unique_ptr<UnknownOperator> unknown;
};

constexpr c10::DispatchKeySet kBatched({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});

// Whether the tensor is a wrapper: an inner operator computes with the real tensors, or there are none.
bool is_wrapper(const at::Tensor& tensor) {
  static constexpr c10::DispatchKeySet kWrappers(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  // The kernels of fake tensors run on `meta`, in a mode or below it.
  const bool is_fake = tensor.is_meta() && (c10::impl::TorchDispatchModeTLS::any_modes_set() ||
                                            c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python) ||
                                            c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Meta));
  return tensor.key_set().has_any(kWrappers | kBatched) || tensor.is_nested() || is_fake;
}

void add_number(std::string& key, int64_t number) { key.append(reinterpret_cast<const char*>(&number), sizeof number); }

// Calls `take` with each size of a tensor, and whether the dimension is expanded: all its elements are one.
template <typename Take>
void each_size(const at::Tensor& tensor, Take take) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.layout() == at::kStrided ? tensor.strides() : sizes;
  for (size_t i = 0; i < sizes.size(); ++i) take(sizes[i], sizes[i] > 1 && strides[i] == 0);
}

// The minimum number of bytes that an operator reads or writes for a value.
int64_t bytes_of(const c10::IValue& value) {
  int64_t bytes = 0;
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || has_no_sizes(tensor) || tensor.layout() != at::kStrided) return 0;
    bytes = static_cast<int64_t>(tensor.element_size());
    each_size(tensor, [&](int64_t size, bool is_expanded) { bytes *= is_expanded ? 1 : size; });
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) bytes += bytes_of(element);
  }
  return bytes;
}

// Adds all facts of a value that a formula or the number of bytes can depend on. False if a tensor is a wrapper.
bool add_value(std::string& key, const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      key += 'u';
      return true;
    }
    if (is_wrapper(tensor)) return false;
    key += 't';
    key += static_cast<char>(tensor.scalar_type());
    key += static_cast<char>(tensor.device().type());
    add_number(key, tensor.dim());
    each_size(tensor, [&](int64_t size, bool is_expanded) { add_number(key, is_expanded ? -size : size); });
  } else if (value.isList()) {
    key += 'l';
    for (const c10::IValue& element : value.toListRef()) {
      if (!add_value(key, element)) return false;
    }
    key += 'e';
  } else if (value.isInt() || value.isBool()) {
    key += 'i';
    add_number(key, value.isInt() ? value.toInt() : static_cast<int64_t>(value.toBool()));
  } else {
    key += value.isNone() ? 'n' : 'o';
  }
  return true;
}

// The same value without the data of tensors.
c10::IValue as_meta(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || has_no_sizes(tensor)) return {};
    return at::Tensor(at::detail::empty_meta(tensor.sizes(), tensor.scalar_type()));
  }
  if (value.isList()) {
    c10::impl::GenericList copies(c10::AnyType::get());
    for (const c10::IValue& element : value.toListRef()) copies.push_back(as_meta(element));
    return copies;
  }
  const bool is_plain = value.isInt() || value.isBool() || value.isDouble() || value.isString();
  return is_plain ? value : c10::IValue();
}

using Values = c10::ArrayRef<const c10::IValue>;

// The last values of an operator's stack: a boxed call can have other values below.
template <typename Stack>
Values last(const Stack& stack, size_t count) {
  return Values(stack.data(), stack.size()).slice(stack.size() - std::min(count, stack.size()));
}

PyRef as_python(Values values) {
  PyRef list = steal(PyList_New(0));
  for (const c10::IValue& value : values) {
    const PyRef object = steal(torch::jit::toPyObject(value).release().ptr());
    if (!list || !object || PyList_Append(list.get(), object.get()) != 0) return PyRef();
  }
  return list;
}

// Gives an operator a number, and adds it to the operators with unknown costs.
int64_t note_unknown(ThreadState& thread, OpenOperator& open, Values outputs) {
  UnknownOperator& unknown = *open.unknown;
  for (const c10::IValue& output : outputs) {
    if (unknown.overload != "out") unknown.bytes += bytes_of(output);  // an `out` tensor is an input too
    unknown.outputs.push_back(as_meta(output));
  }
  const int64_t number = unknown.number = last_number.fetch_add(1) + 1;
  if (thread.operators.size() >= kMaxKnownOperators) thread.operators.clear();
  thread.operators.emplace(std::move(open.key), number);
  ++waiting;
  unknown.next = noted.load();
  while (!noted.compare_exchange_weak(unknown.next, &unknown)) {
  }
  open.unknown.release();
  return number;
}

// Lets Python compute the costs of up to `at_most` operators. False if that failed or the session ended.
bool ask_operators_cost(Session& session, int64_t at_most) {
  const SessionRef hold(session);
  const PyRef limit = steal(PyLong_FromLongLong(at_most));
  return static_cast<bool>(ask(session, session.answer_operators, limit.get()));
}

std::unique_ptr<at::ObserverContext> on_operator_begin(const at::RecordFunction& function) {
  if (!counting.load(std::memory_order_relaxed) || open_operators > 0) return nullptr;
  const OperatorNames* names = counted_operators.load(std::memory_order_acquire);
  if (names == nullptr || names->find(function.name()) == names->end() || at::in_parallel_region()) return nullptr;
  std::string key;
  key.reserve(kUsualKey);
  key.append(function.name()) += '.';
  const auto name = function.operator_name();
  if (name) key += name->overload_name;
  const auto inputs = last(function.inputs(), function.num_inputs());
  for (const c10::IValue& input : inputs) {
    if (!add_value(key, input)) return nullptr;
  }
  // A thread without a number would need the interpreter's lock, whose holder may wait for this operator.
  ThreadState& thread = this_thread();
  const uint64_t generation = current_generation();
  if (thread.generation != generation) return nullptr;
  auto open = std::make_unique<OpenOperator>(generation);
  const auto known = thread.operators.find(key);
  if (C10_LIKELY(known != thread.operators.end())) {
    open->number = known->second;
    return open;
  }
  open->key = std::move(key);
  open->unknown = std::make_unique<UnknownOperator>();
  UnknownOperator& unknown = *open->unknown;
  unknown.generation = generation;
  unknown.name = function.name();
  if (name) unknown.overload = name->overload_name;
  for (const c10::IValue& input : inputs) {
    if (unknown.device.empty() && input.isTensor() && input.toTensor().defined()) {
      unknown.device = c10::DeviceTypeName(input.toTensor().device().type(), /*lower_case=*/true);
    }
    unknown.bytes += bytes_of(input);
    unknown.inputs.push_back(as_meta(input));
  }
  return open;
}

void on_operator_end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* open = static_cast<OpenOperator*>(context);
  if (open == nullptr) return;
  const auto outputs = last(function.outputs(), function.num_outputs());
  // An operator that raised, such as the last of a checkpoint, has computed nothing.
  if (outputs.empty() && function.num_outputs() > 0) return;
  ThreadState& thread = this_thread();
  if (thread.generation != open->generation) return;
  const int64_t number = open->unknown ? note_unknown(thread, *open, outputs) : open->number;
  const int64_t with_gradients = c10::GradMode::is_enabled() ? kWithGradientsBit : 0;
  write_without_gil(thread, open->generation, kOperator << kKindShift | thread.meta_bits | kNoName,
                    number | with_gradients);
}

}  // namespace

void watch_operators() {
  operators.install(at::RecordFunctionCallback(on_operator_begin, on_operator_end)
                        .needsInputs(true)
                        .needsOutputs(true)
                        .scopes({at::RecordScope::FUNCTION}));
}

PyObject* start_flops(PyObject*, PyObject* args) {
  PyObject *operator_names, *answer_operators;
  if (!PyArg_ParseTuple(args, "OO", &operator_names, &answer_operators)) return nullptr;
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session == nullptr) Py_RETURN_NONE;
  session->operator_names = borrow(operator_names);
  session->answer_operators = borrow(answer_operators);
  Py_RETURN_NONE;
}

PyObject* take_operators(PyObject*, PyObject* at_most) {
  PyRef operators = steal(PyList_New(0));
  for (Py_ssize_t left = PyLong_AsSsize_t(at_most); operators && left > 0; --left) {
    if (taken == nullptr) taken = noted.exchange(nullptr);
    if (taken == nullptr) break;
    const std::unique_ptr<UnknownOperator> next(std::exchange(taken, taken->next));
    --waiting;
    if (next->generation != current_generation()) continue;
    const PyRef inputs = as_python(last(next->inputs, next->inputs.size())),
                outputs = as_python(last(next->outputs, next->outputs.size()));
    const PyRef found =
        steal(inputs && outputs ? Py_BuildValue("(LsssLOO)", static_cast<long long>(next->number), next->name.c_str(),
                                                next->overload.c_str(), next->device.c_str(),
                                                static_cast<long long>(next->bytes), inputs.get(), outputs.get())
                                : nullptr);
    if (!found || PyList_Append(operators.get(), found.get()) != 0) return nullptr;
  }
  return PyErr_Occurred() ? nullptr : operators.release();
}

namespace {

struct Met {
  int64_t number = kNotMet;  // the same for equal keys
  bool is_counted = false;   // whether operators are counted from now on because of it
};

// Looks up a key of the facts that decide which operators run. Starts counting if the key is new, or was counted so
// long ago that the ring may have lost the events. `always`: start even if it is known, since the key misses some
// facts.
Met meet(Session& session, ThreadState& thread, std::vector<int64_t>&& key, bool builds_graph, bool always) {
  FlopCounting& state = session.flops;
  auto met = state.met.find(key);
  const int64_t serial = static_cast<int64_t>(engine.next_serial.load(std::memory_order_relaxed));
  const bool is_new = met == state.met.end();
  if (is_new && state.met.size() >= kMaxInputs) state.met.clear();
  if (is_new) met = state.met.emplace(std::move(key), MetInputs{state.next_number++, serial}).first;
  const int64_t number = met->second.number;
  if (!is_new && !always && serial - met->second.counted_at <= static_cast<int64_t>(session.capacity / 2)) {
    return {number, false};
  }
  met->second.counted_at = serial;
  state.passes_ended = false;
  state.calls = 0;
  state.builds_graph = state.builds_graph || builds_graph;
  if (!counting.load()) {
    if (!operators.turn_on()) return {};
    if (!ask_operators(session)) {
      operators.turn_off();
      return {};
    }
    write_counting(session, thread, 1);
    counting.store(true);
  }
  return {number, true};
}

// torch.func hides the sizes of batches.
bool hides_sizes() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode); }

// Whether a gradient for a pass has a hidden batch size: `autograd.grad(…, is_grads_batched=True)`.
bool is_batched(PyObject* gradient) {
  return THPVariable_Check(gradient) && THPVariable_Unpack(gradient).key_set().has_any(kBatched);
}

}  // namespace

int64_t meet_inputs(Session& session, ThreadState& thread, int64_t name_id, bool is_training, PyObject* const* args,
                    size_t count) {
  const bool builds_graph = c10::GradMode::is_enabled();
  std::vector<int64_t> key{name_id, is_training, builds_graph, c10::InferenceMode::is_enabled()};
  int left = kMaxValues;
  for (size_t i = 0; i < count; ++i) add_input(key, args[i], 0, left);
  if (left < 0) return kNotMet;
  const Met met = meet(session, thread, std::move(key), builds_graph, hides_sizes());
  if (met.number == kNotMet) return kNotMet;
  FlopCounting& state = session.flops;
  if (!met.is_counted && counting.load() &&
      (state.passes_ended || !state.builds_graph || ++state.calls >= kMaxCallsWithoutPass)) {
    stop_counting();
    state.builds_graph = false;
    write_counting(session, thread, 0);
  }
  const int64_t unasked = waiting.load(std::memory_order_relaxed);
  const bool too_many = unasked > kMaxWaiting;
  const bool is_turn = unasked > 0 && !counting.load() && ++state.calls_waited % kCallsPerQuestion == 0;
  if ((too_many || is_turn) && !ask_operators_cost(session, too_many ? unasked : 1)) return kNotMet;
  return met.number;
}

void meet_pass(Session& session, ThreadState& thread, PyObject* const* args, Py_ssize_t count) {
  GraphNumber graph;
  bool is_known = count >= 5;
  try {
    is_known = is_known && graph.add_outputs(args[0]) && graph.add_inputs(args[4]);
  } catch (const std::exception&) {
    is_known = false;  // torch itself will report the error in the graph
  }
  for (Py_ssize_t i = 0; is_known && PyTuple_Check(args[1]) && i < PyTuple_GET_SIZE(args[1]); ++i) {
    is_known = !is_batched(PyTuple_GET_ITEM(args[1], i));
  }
  graph.add(is_known);
  graph.add(count >= 5 && args[3] != Py_False);
  const Met met = meet(session, thread, {kPassMark, graph.number()}, true, !is_known || hides_sizes());
  if (is_active(session)) session.flops.graph = met.number;
}

void meet_rerun(Session& session, ThreadState& thread, int64_t name_id) {
  meet(session, thread, {kRerunMark, name_id, session.flops.graph}, true, false);
}

void stop_counting() {
  if (counting.exchange(false)) operators.turn_off();
}

}  // namespace modtrace
