#include "ranges.h"

#include <ATen/record_function.h>

#include <cstring>
#include <memory>

#include "engine.h"

namespace modtrace {
namespace {

constexpr int64_t kNoRangeName = -1;
constexpr size_t kMaxRangeNames = 4096;  // maximum number of names that a thread caches
constexpr char kOptimizerRange[] = "Optimizer.step#";

// An open range that was written.
struct OpenRange final : at::ObserverContext {
  OpenRange(uint64_t session, int64_t bits, int64_t value, ThreadState* stepping)
      : generation(session), end_meta(bits), number(value), steps_on(stepping) {}
  uint64_t generation;
  int64_t end_meta, number;
  ThreadState* steps_on;  // the thread on which an optimizer steps, or null
};

// Asks Python for the id of a range's name. Acquires the GIL if the thread does not hold it.
int64_t ask_range_name(const char* name) {
  if (!Py_IsInitialized()) return kNoRangeName;
  const GilLock gil;
  Session* session = engine.active_session.load();
  if (session == nullptr || !session->name_range) return kNoRangeName;
  const SessionRef hold(*session);
  const auto length = static_cast<Py_ssize_t>(std::strlen(name));
  const PyRef text = steal(PyUnicode_DecodeUTF8(name, length, "replace"));
  const PyRef found = ask(*session, session->name_range, text.get());
  if (!found) raise_later();
  return found ? PyLong_AsLongLong(found.get()) : kNoRangeName;
}

int64_t range_name(ThreadState& thread, const char* name) {
  const auto known = thread.range_names.find(name);
  if (C10_LIKELY(known != thread.range_names.end())) return known->second;
  const uint64_t generation = thread.generation;
  const int64_t name_id = ask_range_name(name);
  const bool is_same = thread.generation == generation && generation == current_generation();
  if (name_id < 0 || name_id == kNoName || !is_same) return kNoRangeName;
  if (thread.range_names.size() < kMaxRangeNames) thread.range_names.emplace(name, name_id);
  return name_id;
}

std::unique_ptr<at::ObserverContext> on_range_begin(const at::RecordFunction& function) {
  if (C10_LIKELY(!engine.ranges_active.load(std::memory_order_relaxed))) return nullptr;
  ThreadState& thread = registered_thread();
  const uint64_t generation = current_generation();
  if (thread.generation != generation) return nullptr;
  const int64_t name_id = range_name(thread, function.name());
  if (name_id == kNoRangeName) return nullptr;
  // Even numbers; Python gives its ranges odd numbers.
  const int64_t number = engine.last_range.fetch_add(2, std::memory_order_relaxed) + 2;
  const int64_t bits = thread.meta_bits | name_id;
  write_without_gil(thread, generation, kRangeBegin << kKindShift | bits, number,
                    take_expected(thread.range_expected_ns));
  const bool steps = std::strncmp(function.name(), kOptimizerRange, sizeof kOptimizerRange - 1) == 0;
  if (steps) ++thread.optimizer_steps;
  return std::make_unique<OpenRange>(generation, kRangeEnd << kKindShift | bits, number, steps ? &thread : nullptr);
}

void on_range_end(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* range = static_cast<const OpenRange*>(context);
  if (range == nullptr || engine.active_session.load() == nullptr) return;
  if (range->steps_on == &this_thread() && range->generation == current_generation())
    --range->steps_on->optimizer_steps;
  // Another thread may end the range.
  write_without_gil(this_thread(), range->generation, range->end_meta, range->number);
}

}  // namespace

PyObject* py_expect_range(PyObject*, PyObject*) {
  expect(this_thread().range_expected_ns);
  Py_RETURN_NONE;
}

void watch_ranges() {
  at::addGlobalCallback(at::RecordFunctionCallback(on_range_begin, on_range_end).scopes({at::RecordScope::USER_SCOPE}));
}

}  // namespace modtrace
