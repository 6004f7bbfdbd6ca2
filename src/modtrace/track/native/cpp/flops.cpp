#include "flops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ring_writer.h"

// From a header that takes long to compile.
namespace torch::jit {
pybind11::object toPyObject(c10::IValue value);
}

namespace modtrace {
namespace {

constexpr size_t kMaxInputs = 4096;
constexpr int kMaxValues = 1024;  // of one call's inputs, with those in containers
constexpr size_t kMaxKnownOperators = 1 << 16;
constexpr int kMaxDepth = 4;
constexpr int kMaxCallsWithoutPass = 16;
constexpr int64_t kNestingMark = -2, kOtherMark = -3;  // no size of a tensor is below zero

// --- Which calls are counted ---

// Whether the sizes of a tensor take Python to tell, or are none.
bool has_no_sizes(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_nested();
}

void add_shape(std::vector<int64_t>& key, const at::Tensor& tensor) {
  key.push_back(kNestingMark - 10 - static_cast<int64_t>(tensor.requires_grad()));
  if (has_no_sizes(tensor)) return;
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
}

// Adds what of an argument decides which operators run, unless it holds more values than `left`. Of containers alone no
// code of the user's runs.
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

// What is counted, replaced as a whole and never freed: any thread may look at it.
std::atomic<const OperatorNames*> counted_operators{nullptr};
at::CallbackHandle callback = 0;
std::atomic<bool> counting{false};

// Asks Python which operators have a formula. False where that failed or the session ended.
bool ask_operators(Session& session) {
  const SessionRef hold(session);
  const PyRef found = call_without_dynamo(session.operator_names);
  if (!found) {
    report_error(session);
    return false;
  }
  if (found.get() != Py_None) {
    auto names = std::make_unique<OperatorNames>();
    for (Py_ssize_t i = 0; PyTuple_Check(found.get()) && i < PyTuple_GET_SIZE(found.get()); ++i) {
      const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(found.get(), i));
      if (name != nullptr) names->insert(name);
    }
    PyErr_Clear();
    counted_operators.store(names.release());
  }
  return is_active(session);
}

void write_counting(Session& session, const ThreadState& thread, int64_t value) {
  write_with_gil(session, kCounting << kKindShift | thread.meta_bits | kNoName, value);
}

// --- The operators ---

thread_local int open_operators = 0;  // that are counted: those inside are a part of them
thread_local uint64_t noted_operators = 0;

struct OpenOperator final : at::ObserverContext {
  OpenOperator(uint64_t session, bool looks_inside) : generation(session), only_if_none_inside(looks_inside) {
    open_operators += !only_if_none_inside;
  }
  ~OpenOperator() override { open_operators -= !only_if_none_inside; }
  uint64_t generation;
  bool only_if_none_inside;  // count it only if none inside is
  uint64_t noted_before = noted_operators;
  int exceptions = std::uncaught_exceptions();
  std::string key;
  const CountedOperator* known = nullptr;
  std::string name, overload, device;
  std::vector<c10::IValue> inputs;  // only where it is not known
};

// Whether another operator inside has the tensors that are computed with, or there are none.
bool is_wrapper(const at::Tensor& tensor) {
  static constexpr c10::DispatchKeySet kWrappers(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize});
  return tensor.key_set().has_any(kWrappers) || tensor.is_nested() || tensor.is_meta();
}

// Whether that may be so: torch.func.grad wraps what vmap wraps, or what is computed with.
bool may_be_wrapper(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

void add_number(std::string& key, int64_t number) { key.append(reinterpret_cast<const char*>(&number), sizeof number); }

// Adds all that a formula can ask of a value. False where one of its tensors is a wrapper.
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
    for (const int64_t size : tensor.sizes()) add_number(key, size);
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

// The same value without what tensors hold.
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

// The last values of an operator's stack: a boxed call can have others below.
template <typename Stack>
Values last(const Stack& stack, size_t count) {
  return Values(stack.data(), stack.size()).slice(stack.size() - std::min(count, stack.size()));
}

PyRef as_python(Values values) {
  PyRef list = PyRef::steal(PyList_New(0));
  for (const c10::IValue& value : values) {
    const PyRef object = PyRef::steal(torch::jit::toPyObject(as_meta(value)).release().ptr());
    if (!list || !object || PyList_Append(list.get(), object.get()) != 0) return PyRef();
  }
  return list;
}

// Asks Python what an operator costs, on a thread that may not hold the lock; null where nothing is to be noted.
const CountedOperator* ask_flops(ThreadState& thread, const OpenOperator& open, Values outputs) {
  if (!Py_IsInitialized()) return nullptr;
  const GilLock gil;
  Session* session = engine.active_session.load();
  if (session == nullptr || !session->count_operator || thread.generation != current_generation()) return nullptr;
  const SessionRef hold(*session);
  const PyRef inputs = as_python(last(open.inputs, open.inputs.size())), results = as_python(outputs);
  const PyRef asked =
      PyRef::steal(inputs && results ? Py_BuildValue("(sssOO)", open.name.c_str(), open.overload.c_str(),
                                                     open.device.c_str(), inputs.get(), results.get())
                                     : nullptr);
  const PyRef found = asked ? call_without_dynamo(session->count_operator, asked.get()) : PyRef();
  long long flops = 0, text = 0;
  if (!found || !PyArg_ParseTuple(found.get(), "LL", &flops, &text)) {
    report_error(*session);
    raise_later();
    return nullptr;
  }
  if (thread.generation != open.generation || open.generation != current_generation()) return nullptr;
  if (thread.operators.size() >= kMaxKnownOperators) thread.operators.clear();
  return &(thread.operators[open.key] = {flops, text});
}

std::unique_ptr<at::ObserverContext> on_operator_begin(const at::RecordFunction& function) {
  if (!counting.load(std::memory_order_relaxed) || open_operators > 0) return nullptr;
  const OperatorNames* names = counted_operators.load(std::memory_order_acquire);
  if (names == nullptr || names->find(function.name()) == names->end() || at::in_parallel_region()) return nullptr;
  std::string key(function.name());
  key += '.';
  const auto name = function.operator_name();
  if (name) key += name->overload_name;
  const auto inputs = last(function.inputs(), function.num_inputs());
  for (const c10::IValue& input : inputs) {
    if (!add_value(key, input)) return nullptr;
  }
  ThreadState& thread = registered_thread();
  const uint64_t generation = current_generation();
  if (thread.generation != generation) return nullptr;
  auto open = std::make_unique<OpenOperator>(generation, std::any_of(inputs.begin(), inputs.end(), may_be_wrapper));
  const auto known = thread.operators.find(key);
  if (C10_LIKELY(known != thread.operators.end())) {
    open->known = &known->second;
    return open;
  }
  open->key = std::move(key);
  open->name = function.name();
  open->overload = name ? name->overload_name : "";
  for (const c10::IValue& input : inputs) {
    if (open->device.empty() && input.isTensor() && input.toTensor().defined()) {
      open->device = c10::DeviceTypeName(input.toTensor().device().type(), /*lower_case=*/true);
    }
    open->inputs.push_back(as_meta(input));
  }
  return open;
}

void on_operator_end(const at::RecordFunction& function, at::ObserverContext* context) {
  const auto* open = static_cast<const OpenOperator*>(context);
  // One that raised has computed nothing.
  if (open == nullptr || std::uncaught_exceptions() > open->exceptions) return;
  ThreadState& thread = this_thread();
  if (thread.generation != open->generation) return;
  if (open->only_if_none_inside && noted_operators != open->noted_before) return;
  const CountedOperator* found =
      open->known != nullptr ? open->known : ask_flops(thread, *open, last(function.outputs(), function.num_outputs()));
  if (found == nullptr) return;
  ++noted_operators;
  write_without_gil(thread, open->generation, kOperator << kKindShift | thread.meta_bits | found->text, found->flops);
}

}  // namespace

void watch_operators() {
  callback = at::addGlobalCallback(at::RecordFunctionCallback(on_operator_begin, on_operator_end)
                                       .needsInputs(true)
                                       .needsOutputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  at::disableCallback(callback);
}

PyObject* start_flops(PyObject*, PyObject* args) {
  PyObject *operator_names, *count_operator;
  if (!PyArg_ParseTuple(args, "OO", &operator_names, &count_operator)) return nullptr;
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session == nullptr) Py_RETURN_NONE;
  session->operator_names = PyRef::borrow(operator_names);
  session->count_operator = PyRef::borrow(count_operator);
  Py_RETURN_NONE;
}

int64_t meet_inputs(Session& session, ThreadState& thread, int64_t name_id, bool is_training, PyObject* const* args,
                    size_t count) {
  const bool builds_graph = c10::GradMode::is_enabled();
  std::vector<int64_t> key{name_id, is_training, builds_graph, c10::InferenceMode::is_enabled()};
  int left = kMaxValues;
  for (size_t i = 0; i < count; ++i) add_input(key, args[i], 0, left);
  if (left < 0) return kNotMet;
  FlopCounting& state = session.flops;
  auto met = state.met.find(key);
  const int64_t serial = static_cast<int64_t>(engine.next_serial.load(std::memory_order_relaxed));
  const bool is_new = met == state.met.end();
  if (is_new && state.met.size() >= kMaxInputs) return kNotMet;
  if (is_new) met = state.met.emplace(std::move(key), MetInputs{static_cast<int64_t>(state.met.size()), serial}).first;
  const int64_t number = met->second.number;
  // torch.func hides the sizes of batches. What was counted is overwritten some time.
  const bool is_hidden = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  if (is_new || is_hidden || serial - met->second.counted_at > static_cast<int64_t>(session.capacity / 2)) {
    met->second.counted_at = serial;
    state.passes_ended = false;
    state.calls = 0;
    state.builds_graph = state.builds_graph || builds_graph;
    if (counting.load()) return number;
    if (!ask_operators(session)) return kNotMet;
    write_counting(session, thread, 1);
    counting.store(true);
    at::reenableCallback(callback);
  } else if (counting.load()) {
    if (state.passes_ended || !state.builds_graph || ++state.calls >= kMaxCallsWithoutPass) {
      stop_counting();
      state.builds_graph = false;
      write_counting(session, thread, 0);
    }
  }
  return number;
}

void stop_counting() {
  if (!counting.exchange(false)) return;
  at::disableCallback(callback);
}

}  // namespace modtrace
