#include "outside_operators.h"

#include <ATen/record_function.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine.h"
#include "observers.h"

namespace modtrace {
namespace {

constexpr size_t kMaxNames = 256, kMaxModules = 4096;
constexpr char kOptimizer[] = "Optimizer.", kLoader[] = "enumerate(";   // prefixes of the names of torch's ranges
constexpr char kEvaluated[] = "autograd::engine::evaluate_function: ";  // prefix of torch's name of a node with hooks
constexpr char kCheckpoint[] = "CheckpointFunction";                    // a reentrant checkpoint
constexpr char kNodes[] = "nodes", kWithHooks[] = "nodes and hooks", kFloat64[] = " (float64)";
constexpr int64_t kOutside = -1, kInPasses = -2, kInOptimizers = -3;  // other places are ids of module names

struct Total {
  int64_t calls = 0, ns = 0;
};

using Totals = std::unordered_map<std::string, Total>;
using Places = std::unordered_map<int64_t, Totals>;

Observer outside;
std::atomic<const ThreadState*> counted{nullptr};  // the thread that is counted, or null
std::mutex totals_lock;                            // guards `totals`: another thread may end the count
Places totals;                                     // totals of each place
std::atomic<int64_t> longest_ns{INT64_MAX};        // maximum duration of a count
std::atomic<bool> is_over{false};                  // whether the count exceeded it
int64_t count_begin = 0;                           // start of the count, monotonic ns
uint32_t count_operators = 0;                      // number of operators in the count
thread_local int open_outside = 0;                 // number of open nodes and loaders: inner operators do not count
thread_local int open_optimizers = 0;              // number of torch's open ranges of optimizers
thread_local int open_operator = 0;                // number of open counted operators: inner operators do not count

// An open node or range of torch, or an open operator that is counted.
struct OpenOutside final : at::ObserverContext {
  // `name`: the name under which it is counted, or null. `boundary`: whether its end is reported to Python.
  OpenOutside(int* inside, int64_t at, const char* name, bool boundary = false, bool doubles = false)
      : around(inside), place(at), counted_as(name), is_boundary(boundary), is_float64(doubles), begin(monotonic_ns()) {
    if (around != nullptr) ++*around;
  }
  ~OpenOutside() override {
    if (around != nullptr) --*around;
  }
  int* around;  // counter of this thread: torch ends a range on the thread that started it
  int64_t place;
  const char* counted_as;
  bool is_boundary, is_float64;
  int64_t begin;
};

// Ends the count of a step that does not end, such as a long evaluation; reads the clock only now and then.
bool is_too_long() {
  constexpr uint32_t kEach = 64;
  if (++count_operators % kEach != 0 || monotonic_ns() - count_begin <= longest_ns.load()) return false;
  is_over.store(true);
  if (counted.exchange(nullptr) != nullptr) outside.turn_off();
  return true;
}

// The counter of open ranges of the same kind; null for a range that is not torch's.
int* counter_of(const char* range) {
  const auto begins = [range](const char* prefix) { return std::strncmp(range, prefix, std::strlen(prefix)) == 0; };
  return begins(kOptimizer) ? &open_optimizers : begins(kLoader) ? &open_outside : nullptr;
}

// Reports the start of a range, or with null its end, on a thread that may not hold the interpreter's lock. Nothing can
// be raised here.
void tell_range(const char* begins) {
  if (!Py_IsInitialized()) return;
  const GilLock gil;
  const bool is_pending = PyErr_Occurred() != nullptr;
  if (Session* session = engine.active_session.load()) tell_boundary(*session, begins);
  if (!is_pending) raise_later();
}

// Whether the first input tensor of an operator is of float64.
bool takes_float64(const at::RecordFunction& function) {
  for (const c10::IValue& input : function.inputs()) {
    if (input.isTensor()) {
      const at::Tensor& tensor = input.toTensor();
      return tensor.defined() && c10::toRealValueType(tensor.scalar_type()) == at::kDouble;
    }
  }
  return false;
}

std::unique_ptr<at::ObserverContext> on_outside_begin(const at::RecordFunction& function) {
  const ThreadState* thread = counted.load(std::memory_order_relaxed);
  if (thread == nullptr || thread != &this_thread() || is_too_long()) return nullptr;
  const char* name = function.name();
  const int64_t own = thread->open_passes > 0       ? kInPasses
                      : !thread->open_calls.empty() ? thread->open_calls.back().name_id
                      : open_optimizers > 0         ? kInOptimizers
                                                    : kOutside;
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    return std::make_unique<OpenOutside>(&open_outside, own, open_outside == 0 ? kNodes : nullptr);
  }
  if (function.scope() == at::RecordScope::USER_SCOPE) {
    // The range of a collective ends on another thread.
    const bool is_boundary = thread->open_passes == 0 && thread->open_calls.empty() && !function.isAsync();
    if (is_boundary) tell_range(name);
    return std::make_unique<OpenOutside>(counter_of(name), own, nullptr, is_boundary);
  }
  // Its operators belong to the modules that are called in it.
  if (std::strcmp(name, kCheckpoint) == 0) return nullptr;
  if (open_operator > 0 || open_outside > 0 || (own == kInPasses && !thread->open_calls.empty())) return nullptr;
  if (std::strncmp(name, kEvaluated, sizeof kEvaluated - 1) == 0) {
    return std::make_unique<OpenOutside>(nullptr, own, kWithHooks);
  }
  return std::make_unique<OpenOutside>(&open_operator, own, name, false, takes_float64(function));
}

void on_outside_end(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* open = static_cast<const OpenOutside*>(context);
  if (open != nullptr && open->is_boundary && counted.load(std::memory_order_relaxed) == &this_thread()) {
    tell_range(nullptr);
  }
  if (open == nullptr || open->counted_as == nullptr) return;
  const int64_t ns = monotonic_ns() - open->begin;
  const std::lock_guard<std::mutex> lock(totals_lock);
  if (totals.size() >= kMaxModules && totals.count(open->place) == 0) return;
  Totals& own = totals[open->place];
  std::string name = open->counted_as;
  if (open->is_float64) name += kFloat64;
  if (own.size() >= kMaxNames && own.count(name) == 0) return;
  Total& total = own[name];
  ++total.calls;
  total.ns += ns;
}

// Adds the totals of a place to a list. False, with an error, if there is no memory.
bool append_to(PyObject* list, int64_t place, const Totals& own) {
  for (const auto& [name, total] : own) {
    const PyRef row = steal(Py_BuildValue("(LsLL)", static_cast<long long>(place), name.c_str(),
                                          static_cast<long long>(total.calls), static_cast<long long>(total.ns)));
    if (!row || PyList_Append(list, row.get()) != 0) return false;
  }
  return true;
}

}  // namespace

void watch_outside_operators() {
  outside.install(
      at::RecordFunctionCallback(on_outside_begin, on_outside_end)
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
  // Else a child could wait forever for a lock whose thread does not exist there.
  constexpr auto unlock = [] { totals_lock.unlock(); };
  pthread_atfork([] { totals_lock.lock(); }, unlock, unlock);
}

PyObject* begin_outside(PyObject*, PyObject* on_boundary) {
  stop_outside();
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  if (session == nullptr) Py_RETURN_NONE;
  session->on_boundary = borrow(on_boundary);
  is_over.store(false);
  count_begin = monotonic_ns();
  if (outside.turn_on()) counted.store(&this_thread());
  Py_RETURN_NONE;
}

PyObject* tell_ends(PyObject*, PyObject* on_end) {
  if (Session* session = engine.active_session.load(std::memory_order_relaxed)) session->on_end = borrow(on_end);
  Py_RETURN_NONE;
}

PyObject* end_outside(PyObject*, PyObject*) {
  if (counted.load() != nullptr) outside.turn_off();
  counted.store(nullptr);
  if (Session* session = engine.active_session.load(std::memory_order_relaxed)) session->on_boundary = PyRef();
  Places ended;
  {
    const std::lock_guard<std::mutex> lock(totals_lock);
    ended.swap(totals);
  }
  if (is_over.load()) Py_RETURN_NONE;
  PyRef list = steal(PyList_New(0));
  for (const auto& [place, own] : ended) {
    if (!list || !append_to(list.get(), place, own)) return nullptr;
  }
  return list.release();
}

PyObject* limit_outside(PyObject*, PyObject* ns) {
  const long long limit = PyLong_AsLongLong(ns);
  if (limit == -1 && PyErr_Occurred() != nullptr) return nullptr;
  longest_ns.store(limit);
  Py_RETURN_NONE;
}

void stop_outside() {
  if (counted.exchange(nullptr) != nullptr) outside.turn_off();
  const std::lock_guard<std::mutex> lock(totals_lock);
  totals.clear();
}

}  // namespace modtrace
