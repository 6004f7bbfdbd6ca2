// The engine: the session that records, the state of each thread, and the backward passes that run. The functions that
// write events into the ring, with or without the interpreter's lock, are the hot path, and all inline.

#pragma once

#include <c10/macros/Macros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.h"
#include "py_ref.h"
#include "slot_format.h"

namespace modtrace {

// One event, see ring/slot_format.py. Words are atomic so that a reader beside the writer never sees half a word.
struct Slot {
  std::atomic<int64_t> meta, time, value, stamp;
};

// Number of sequence numbers, up to a thread's newest, whose boundaries are known; a bit for each number.
constexpr uint64_t kSequenceWindow = 1 << 20;

// A bit set over the last sequence numbers of a thread. Used only by that thread.
class SequenceBoundaries {
 public:
  // Notes that the nodes from this number on belong to another call than the nodes before it.
  void add(uint64_t sequence) {
    if (sequence == newest_) return;
    if (words_ == nullptr || sequence > newest_) advance(sequence);
    words_[sequence / 64 % kWords] |= uint64_t{1} << sequence % 64;
  }

  // Makes a boundary of each number in [first, last]: each of these nodes is a segment of its own.
  void add_all(uint64_t first, uint64_t last) {
    for (first = std::max(first, last - std::min(last, kSequenceWindow)); first <= last; ++first) add(first);
  }

  // Whether boundaries are known back to this number, which is not above the newest.
  bool reaches(uint64_t sequence) const { return newest_ / 64 - sequence / 64 < kWords; }

  // Whether there is a boundary in [first, last], which the window reaches. Only if allocated().
  bool any(uint64_t first, uint64_t last) const {
    const uint64_t first_word = first / 64, last_word = last / 64;
    const uint64_t from_first = ~uint64_t{0} << first % 64, up_to_last = ~uint64_t{0} >> (63 - last % 64);
    if (first_word == last_word) return (words_[first_word % kWords] & from_first & up_to_last) != 0;
    if ((words_[first_word % kWords] & from_first) != 0 || (words_[last_word % kWords] & up_to_last) != 0) return true;
    for (uint64_t word = first_word + 1; word < last_word; ++word) {
      if (words_[word % kWords] != 0) return true;
    }
    return false;
  }

  // False before the first boundary.
  bool allocated() const { return words_ != nullptr; }

  void reset() {
    words_.reset();
    newest_ = kNone;
  }

 private:
  static constexpr uint64_t kWords = kSequenceWindow / 64;
  static constexpr uint64_t kNone = ~uint64_t{0};

  // Moves the window up to this number, and clears the words that enter it.
  void advance(uint64_t sequence) {
    const uint64_t target = sequence / 64;
    if (words_ == nullptr) {
      words_ = std::make_unique<uint64_t[]>(kWords);
    } else {
      uint64_t cleared = newest_ / 64;
      if (target - cleared > kWords) cleared = target - kWords;
      while (cleared != target) words_[++cleared % kWords] = 0;
    }
    newest_ = sequence;
  }

  uint64_t newest_ = kNone;
  std::unique_ptr<uint64_t[]> words_;
};

constexpr size_t kMaxConcurrentPasses = 256;

// The inputs of an outermost call, or the graph of a backward pass: their number, and the serial number of the next
// event when operators were last counted with them.
struct MetInputs {
  int64_t number, counted_at;
};

// The state that decides when operators are counted, see flops.h. Guarded by the interpreter's lock.
struct FlopCounting {
  std::map<std::vector<int64_t>, MetInputs> met;
  bool passes_ended = false;            // a backward pass ended since inputs were new
  bool builds_graph = false;            // a counted call builds a graph, so that a pass may follow
  int calls = 0;                        // number of outermost calls since inputs were new
  int64_t calls_waited = 0;             // number of outermost calls while operators wait for their costs
  int64_t next_number = 0, graph = -1;  // number of the next new inputs or graph, and of the last pass's graph
};

// One recording: its ring, the Python functions that it calls, and the names it knows. A SessionRef holds it while
// Python runs.
struct Session {
  Slot* slots = nullptr;
  uint64_t capacity = 0;
  int capacity_log2 = -1;  // -1 if not a power of two; dividing by the capacity would be the slowest step of a write
  Py_buffer buffer{};      // keeps the slots' memory
  PyRef resolve_name;      // (module, [(module, name id) of the open calls, innermost first]) → name id
  PyRef dead;              // a list, not empty after modules died: new modules in `names` may have their addresses
  PyRef forget_dead;       // () → anything; empties it
  PyRef add_thread;        // (torch's number of the thread) → our number
  PyRef emit_sync_mark;    // () → anything
  PyRef on_error;          // (exception) → anything
  PyRef note_call;         // (module, inputs, sequence number) → anything; see CheckpointReruns
  PyRef name_range;        // (name) → text id of a range, see track/ranges.py; null if ranges are not recorded
  PyRef runs_again;        // (module, inputs) → whether a checkpoint makes this call, see CheckpointReruns
  PyRef operator_names;    // () → names of operators with a formula, None: unchanged; null if none are counted
  PyRef answer_operators;  // (maximum number) → anything; writes the costs of waiting operators, see flops.py
  PyRef on_boundary;  // (name of the start, or None: an end; for a call its module and inputs) → anything; null unless
                      // a step is sampled, see LineGaps
  PyRef on_end;              // (number, kind) → anything; called while calls or passes may be steps; may be null
  PyRef begin_device_times;  // () → True, or anything to be called again; null once it has returned True
  std::unordered_map<PyObject*, std::vector<std::pair<int64_t, int64_t>>>
      names;                                            // module → (parent's name id, name id)
  std::vector<int64_t> forward_calls, recompute_calls;  // numbers of calls so far, by name id
  std::vector<bool> on_device;                          // by name id, whether calls get device events
  FlopCounting flops;
  bool steps_told = false;          // whether the user or an optimizer ended a training step
  int64_t gradient_passes[2] = {};  // numbers of passes that accumulated gradients in leaf tensors, or returned them
  int64_t outermost_calls = 0;      // number of outermost calls that have ended, on any thread
  int references = 1;               // guarded by the interpreter's lock
};

// A module call that was entered and not yet exited.
struct OpenCall {
  PyRef module;
  int64_t name_id;
  int graph_task;                 // id of the graph task in which it was entered
  int64_t exit_meta, exit_value;  // words of its exit event; the value has no sequence number yet
};

// The state of a greenlet, or of a thread without greenlets.
struct GreenletState {
  uint64_t generation = 0;        // number of the session to which the fields below belong
  int64_t meta_bits = 0;          // its number, at its position in meta
  int open_passes = 0;            // number of backward passes that it has called and that have not returned
  int optimizer_steps = 0;        // number of open optimizer ranges
  int64_t range_expected_ns = 0;  // time at which torch started to prepare its next range; 0: not known
  int64_t pass_expected_ns = 0;   // time at which torch started to prepare its next backward pass; 0: not known
  std::vector<OpenCall> open_calls;
};

// The greenlets of a thread. Guarded by the interpreter's lock.
struct Greenlets {
  PyRef running;  // a weak reference to the greenlet of the thread's state; null before the first was seen
  std::unordered_map<PyObject*, std::pair<PyRef, GreenletState>> suspended;  // by weak reference, which it holds
  size_t pruned_at = 64;  // number of suspended greenlets at which dead ones are removed
  PyRef traced_before;    // the earlier function of greenlet.settrace on this thread, called after ours
  bool tracing = false;   // whether that function runs
};

// The state of a thread. Never freed: `stop` reads the states of all threads, and a thread may end at any time.
struct ThreadState : GreenletState {
  std::atomic<bool> busy{false};         // whether it writes without the interpreter's lock
  uint64_t noted_generation = 0;         // number of the session of the fields below, except the boundaries
  uint64_t noted_sequence = UINT64_MAX;  // sequence number at the last call of `note_call`
  SequenceBoundaries boundaries;
  SequenceBoundaries device_boundaries;                     // boundaries of calls that get device events
  std::map<std::string, int64_t, std::less<>> range_names;  // ids of the range names of this session so far
  std::unordered_map<std::string, int64_t> operators;       // numbers of this session's operators, by name and inputs
  Greenlets greenlets;
  ThreadState* next = nullptr;  // in the list of all threads
};

// A backward pass with hooks on its segments. If the graph is retained, the hooks outlive the pass, and do nothing.
struct BackwardPass {
  std::atomic<uint64_t> number{0};  // 0: the slot is free
  std::atomic<bool> begun{false}, over{false};
  // Set by the first hook that runs. A nested or parallel graph task that runs the same nodes does not count.
  std::atomic<int> graph_task{-1};
  bool device_times = false;  // whether a device event is recorded at its end
};

struct EngineState {
  std::atomic<Session*> active_session{nullptr};
  std::atomic<uint64_t> next_serial{0};
  // Number of the session; changes only while no session is active, so a thread that acquires a session sees its
  // number.
  std::atomic<uint64_t> generation{0};
  std::atomic<ThreadState*> threads{nullptr};
  std::atomic<bool> device_times_active{false};
  std::atomic<bool> ranges_active{false};
  std::atomic<int64_t> last_range{0};  // the highest number of a range so far

  std::array<BackwardPass, kMaxConcurrentPasses> pass_slots;  // by number modulo
  std::array<std::atomic<int>, kMaxConcurrentPasses>
      hooked_graph_tasks;  // by task modulo: id + 1 of the task whose nodes are hooked

  // Guarded by the interpreter's lock.
  uint64_t last_pass = 0;            // the highest number of a hooked pass so far
  int64_t pass_calls = 0;            // number of calls that run a pass so far
  int running_passes = 0;            // number of running passes, on all threads
  int observed_passes = 0;           // number of running passes that need the observer
  bool device_shared = false;        // whether passes of several threads ever ran on devices at once
  PyObject* call_wrapper = nullptr;  // the wrapper of nn.Module.__call__ whose calls are recorded, or null
  PyObject* wrapped_call = nullptr;  // the function that it wraps
  PyObject* get_greenlet = nullptr;  // greenlet.getcurrent, or null if it is not imported
};

// Never destroyed: threads that the end of the process does not wait for may still write.
static_assert(std::is_trivially_destructible_v<EngineState>);
inline EngineState engine;

// Makes the state of a new thread, and adds it to the list.
ThreadState* add_thread_state();

inline ThreadState& this_thread() {
  thread_local struct Owner {
    ThreadState* state = nullptr;
    ~Owner() {
      if (state == nullptr) return;
      state->boundaries.reset();
      state->device_boundaries.reset();
      state->range_names.clear();
      state->operators.clear();
    }
  } owner;
  if (owner.state == nullptr) owner.state = add_thread_state();
  return *owner.state;
}

inline uint64_t current_generation() { return engine.generation.load(std::memory_order_relaxed); }

inline bool is_active(const Session& session) {
  return engine.active_session.load(std::memory_order_relaxed) == &session;
}

constexpr int kPrefetchSlots = 24;

inline int64_t monotonic_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Fills the slot of this serial number. It writes meta first and the stamp last, so that a reader detects a
// half-written slot. `time`: the event's time if it is not now, in monotonic ns.
inline void write_slot(Session& session, uint64_t serial, int64_t meta, int64_t value, int64_t time = 0) {
  const uint64_t lap = session.capacity_log2 >= 0 ? serial >> session.capacity_log2 : serial / session.capacity;
  Slot& slot = session.slots[serial - lap * session.capacity];
  // The ring is larger than the caches, and the next serial waits for this slot's line: fetch lines ahead.
  __builtin_prefetch(&slot + kPrefetchSlots, 1);
  slot.meta.store(static_cast<int64_t>((lap & kLapMask) << kLapShift) | meta, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.time.store(time == 0 ? monotonic_ns() : time, std::memory_order_relaxed);
  slot.value.store(value, std::memory_order_relaxed);
  slot.stamp.store(static_cast<int64_t>(serial + 1), std::memory_order_release);
}

// Meta of a memory sample on the thread of this meta.
inline int64_t sample_meta(int64_t meta) {
  return memory.sample_meta.load(std::memory_order_relaxed) |
         (meta & static_cast<int64_t>(kThreadMask << kThreadShift));
}

// Writes from a thread that holds the interpreter's lock, which `stop` needs too. `time`: see `write_slot`.
inline void write_with_gil(Session& session, int64_t meta, int64_t value, int64_t time = 0) {
  if (C10_UNLIKELY(memory.counting.load(std::memory_order_relaxed))) {
    sample_memory([&](int64_t bytes) {
      write_slot(session, engine.next_serial.fetch_add(1, std::memory_order_relaxed), sample_meta(meta), bytes);
    });
  }
  write_slot(session, engine.next_serial.fetch_add(1, std::memory_order_relaxed), meta, value, time);
}

constexpr int64_t kMaxPreparationNs = 1'000'000;  // after a longer time, the event is not the prepared one

// Notes that torch prepares this thread's next event of a kind. If memory is counted, nothing is noted: a sample
// belongs to the moment at which the event is written.
inline void expect(int64_t& expected_ns) {
  expected_ns = memory.counting.load(std::memory_order_relaxed) ? 0 : monotonic_ns();
}

// Returns the noted time, and forgets it; 0 if it is not known.
inline int64_t take_expected(int64_t& expected_ns) {
  const int64_t time = std::exchange(expected_ns, 0);
  return time != 0 && monotonic_ns() - time < kMaxPreparationNs ? time : 0;
}

// If memory is counted, writes the bytes of each owner: before a step ends, or before a call if nothing ends steps.
inline void write_held(Session& session, const ThreadState& thread) {
  if (C10_LIKELY(!memory.counting.load(std::memory_order_relaxed))) return;
  sample_held(false, [&](int64_t meta, int64_t value) { write_with_gil(session, meta | thread.meta_bits, value); });
}

// Writes from a thread that does not hold the interpreter's lock, only into the session of this generation. `meta` has
// the thread's number. `stop` waits for busy threads.
inline void write_one_without_gil(ThreadState& thread, uint64_t generation, int64_t meta, int64_t value,
                                  int64_t time = 0) {
  // Without a session it must not take a serial: the reader would miss an event.
  if (C10_UNLIKELY(generation != current_generation())) return;
  thread.busy.store(true, std::memory_order_relaxed);
  // Taking the serial is a full fence: `stop` either sees us busy, or we see that there is no session.
  const uint64_t serial = engine.next_serial.fetch_add(1, std::memory_order_seq_cst);
#if !defined(__x86_64__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  Session* session = engine.active_session.load(std::memory_order_seq_cst);
  if (C10_LIKELY(session != nullptr && generation == current_generation())) {
    write_slot(*session, serial, meta, value, time);
  }
  thread.busy.store(false, std::memory_order_release);
}

// The same, after a memory sample if memory is counted. An event of an earlier time has no sample.
inline void write_without_gil(ThreadState& thread, uint64_t generation, int64_t meta, int64_t value, int64_t time = 0) {
  if (C10_UNLIKELY(memory.counting.load(std::memory_order_relaxed)) && time == 0 &&
      generation == current_generation()) {
    sample_memory([&](int64_t bytes) { write_one_without_gil(thread, generation, sample_meta(meta), bytes); });
  }
  write_one_without_gil(thread, generation, meta, value, time);
}

// The same for a thread of the running session; `meta` has no thread number.
inline void write_without_gil(ThreadState& thread, int64_t meta, int64_t value) {
  write_without_gil(thread, thread.generation, meta | thread.meta_bits, value);
}

// Exchanges the thread's state for that of the running greenlet. Needs the interpreter's lock; a pending error stays.
void find_greenlet(ThreadState& thread);

// The same if greenlets may have switched.
inline void follow_greenlet(ThreadState& thread) {
  if (C10_UNLIKELY(engine.get_greenlet != nullptr)) find_greenlet(thread);
}

// Gives the thread its number in this session; false if that failed or the session ended. Needs the interpreter's lock.
bool register_thread(Session& session, ThreadState& thread);

// The same for a thread that does not hold the lock, and that the interpreter may not know. The thread must not be
// busy: `stop` may hold the lock and wait for it.
void register_thread_without_gil(ThreadState& thread);

// This thread, with a number if possible. For threads that do not hold the interpreter's lock.
inline ThreadState& registered_thread() {
  ThreadState& thread = this_thread();
  if (C10_UNLIKELY(thread.generation != current_generation())) register_thread_without_gil(thread);
  return thread;
}

// Ends the open calls above this height of the thread's stack, without writing their exits.
inline void drop_open_calls(ThreadState& thread, size_t height) {
  while (thread.open_calls.size() > height) {
    // Removed before it dies: a dying module can run any code, also calls of modules.
    const PyRef module = std::move(thread.open_calls.back().module);
    thread.open_calls.pop_back();
  }
}

void release_session(Session& session);

// Holds a session while Python runs: another thread may stop it meanwhile. Needs the interpreter's lock.
class SessionRef {
 public:
  explicit SessionRef(Session& session) : session_(session) { ++session_.references; }
  ~SessionRef() { release_session(session_); }
  SessionRef(const SessionRef&) = delete;
  SessionRef& operator=(const SessionRef&) = delete;

 private:
  Session& session_;
};

// Calls a Python function of ours for a session, unless making its arguments has failed. Null if that or the call
// failed, which is reported, or if the session has ended. Needs the interpreter's lock.
PyRef ask(Session& session, const PyRef& function, PyObject* first = nullptr, PyObject* second = nullptr,
          PyObject* third = nullptr);

// In a sampled step, reports to Python the start of a range, pass or outermost call, or with null its end; for a call
// also its module and the tuple of its inputs. For calls inside others, only the start is reported, as kInnerCall. A
// pending error stays; else an interrupt meanwhile is pending, and the caller raises it. The session may end meanwhile.
// Needs the interpreter's lock.
void ask_at_boundary(Session& session, const char* begins, PyObject* module = nullptr, PyObject* inputs = nullptr);
inline void tell_boundary(Session& session, const char* begins) {
  if (C10_UNLIKELY(static_cast<bool>(session.on_boundary))) ask_at_boundary(session, begins);
}

// Reports to Python the number of ended calls or passes, which are steps if nothing else ends steps: at 1, 2, 4 … and
// at one more; not if an error is pending. An interrupt meanwhile is pending, and the caller raises it.
void ask_at_end(Session& session, int64_t number, const char* kind);
inline void tell_end(Session& session, int64_t number, const char* kind) {
  if (session.steps_told || !session.on_end || ((number & (number - 1)) != 0 && ((number - 1) & (number - 2)) != 0))
    return;
  ask_at_end(session, number, kind);
}

// Lets the main thread raise the pending error, if there is one. It comes from a signal's handler that ran in a
// callback of torch, where nothing can be raised.
void raise_later();

}  // namespace modtrace
