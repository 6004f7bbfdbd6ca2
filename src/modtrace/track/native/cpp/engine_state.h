// The engine's state: the session that records, what each thread is doing, and the backward passes that run.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "py_ref.h"
#include "slot_format.h"

namespace modtrace {

// One event, see ring/slot_format.py. Words are atomic so that a reader beside the writer never sees half a word.
struct Slot {
  std::atomic<int64_t> meta, time, value, stamp;
};

// How far back from a thread's newest sequence number boundaries are known; a bit for each number.
constexpr uint64_t kSequenceWindow = 1 << 20;

// A bit set over the last sequence numbers of a thread, and above it a bit for each of its words that is not empty, so
// that to look through a long range takes no longer than through a short one. Used by that thread alone.
class SequenceBoundaries {
 public:
  // Notes that the nodes from this number on belong to another call than those before it.
  void add(uint64_t sequence) {
    if (sequence == newest_) return;
    if (words_ == nullptr || sequence > newest_) advance(sequence);
    if (words_ == nullptr) return;
    words_[word_index(sequence)] |= bit(sequence);
    filled()[word_index(sequence) / 64] |= bit(word_index(sequence));
  }

  // Makes a boundary of each number in [first, last]: each of these nodes is a segment of its own.
  void add_all(uint64_t first, uint64_t last) {
    for (first = std::max(first, last - std::min(last, kSequenceWindow)); first <= last; ++first) add(first);
  }

  // Whether boundaries are known as far back as this number, which is not above the newest.
  bool reaches(uint64_t sequence) const { return newest_ / 64 - sequence / 64 < kWords; }

  // Whether there is one in [first, last], which the window reaches. Only where allocated().
  bool any(uint64_t first, uint64_t last) const {
    const uint64_t first_word = first / 64, last_word = last / 64;
    const uint64_t from_first = ~uint64_t{0} << first % 64, up_to_last = ~uint64_t{0} >> (63 - last % 64);
    if (first_word == last_word) return (words_[first_word % kWords] & from_first & up_to_last) != 0;
    if ((words_[first_word % kWords] & from_first) != 0 || (words_[last_word % kWords] & up_to_last) != 0) return true;
    for (uint64_t word = first_word + 1; word < last_word;) {
      // All words of the range that one word of the upper level has a bit for.
      const uint64_t count = std::min(64 - word % 64, last_word - word);
      const uint64_t bits = filled()[word % kWords / 64] >> word % 64;
      if ((bits & (~uint64_t{0} >> (64 - count))) != 0) return true;
      word += count;
    }
    return false;
  }

  // False before the first boundary, and where there is no memory for them.
  bool allocated() const { return words_ != nullptr; }

  void reset() {
    words_.reset();
    newest_ = kNone;
  }

 private:
  static constexpr uint64_t kWords = kSequenceWindow / 64;
  static constexpr uint64_t kNone = ~uint64_t{0};

  struct Free {
    void operator()(uint64_t* words) const { std::free(words); }
  };

  static uint64_t bit(uint64_t index) { return uint64_t{1} << index % 64; }
  static uint64_t word_index(uint64_t sequence) { return sequence / 64 % kWords; }
  uint64_t* filled() const { return words_.get() + kWords; }

  // Moves the window up to this number, and clears the words that enter it.
  void advance(uint64_t sequence) {
    const uint64_t target = sequence / 64;
    if (words_ == nullptr) {
      // Pages of it that are never written take no memory.
      words_.reset(static_cast<uint64_t*>(std::calloc(kWords + kWords / 64, sizeof(uint64_t))));
    } else {
      uint64_t cleared = newest_ / 64;
      if (target - cleared > kWords) cleared = target - kWords;
      while (cleared != target) {
        const uint64_t index = ++cleared % kWords;
        words_[index] = 0;
        filled()[index / 64] &= ~bit(index);
      }
    }
    newest_ = sequence;
  }

  uint64_t newest_ = kNone;
  std::unique_ptr<uint64_t[], Free> words_;
};

constexpr size_t kMaxConcurrentPasses = 256;

// The inputs of an outermost call: their number, and the next event's when operators were counted with them last.
struct MetInputs {
  int64_t number, counted_at;
};

// When operators are counted, see flops.h. Guarded by the interpreter's lock.
struct FlopCounting {
  std::map<std::vector<int64_t>, MetInputs> met;
  bool passes_ended = false;  // a backward pass ended since inputs were new
  bool builds_graph = false;  // a call that is counted builds a graph, so that a pass may follow
  int calls = 0;              // outermost calls since inputs were new
  int64_t calls_waited = 0;   // outermost calls while operators wait to be asked for
};

// One recording: the ring that it writes, what it calls in Python, and the names it knows. Reached through SessionRef
// where Python runs in between.
struct Session {
  Slot* slots = nullptr;
  uint64_t capacity = 0;
  int capacity_log2 = -1;    // of a power of two, else -1: dividing by the capacity is the dearest step of a write
  Py_buffer buffer{};        // keeps the slots' memory
  PyRef resolve_name;        // (module, [(module, name id) of the open calls, innermost first]) → name id
  PyRef dead;                // a list, not empty where modules died and `names` may hold what has their addresses now
  PyRef forget_dead;         // () → anything; empties it
  PyRef add_thread;          // (torch's number of the thread) → our number
  PyRef emit_sync_mark;      // () → anything
  PyRef on_error;            // (exception) → anything
  PyRef note_call;           // (module, inputs, sequence number) → anything; see CheckpointReruns, also for the next
  PyRef name_range;          // (name) → text id of a range, see track/ranges.py; null where ranges are left out
  PyRef runs_again;          // (module, inputs) → whether a checkpoint makes this call
  PyRef operator_names;      // () → names of operators with a formula, None: as before; null where none are counted
  PyRef answer_operators;    // (how many at most) → anything; notes what those cost that wait, see track/flops.py
  PyRef begin_device_times;  // () → True, or anything where it is to be called again; null once it has returned True
  std::unordered_map<PyObject*, std::vector<std::pair<int64_t, int64_t>>>
      names;                                            // module → (parent's name id, name id)
  std::vector<int64_t> forward_calls, recompute_calls;  // so far, by name id
  std::vector<bool> on_device;                          // by name id, whether calls get events of the device
  FlopCounting flops;
  bool steps_told = false;          // whether the user or an optimizer ended a training step
  int64_t gradient_passes[2] = {};  // how many passes added gradients to those of leaf tensors, or returned them
  int references = 1;               // guarded by the interpreter's lock
};

// A module call that has begun and not ended.
struct OpenCall {
  PyRef module;
  int64_t name_id;
  int graph_task;                 // that runs where it was entered
  int64_t exit_meta, exit_value;  // of its exit event; the value still without the sequence number
};

// What one thread is doing. Never freed: `stop` looks at all of them, and a thread may end at any time.
struct ThreadState {
  std::atomic<bool> busy{false};  // while it writes without the interpreter's lock
  uint64_t generation = 0;        // of the session that all below belongs to, but for the boundaries
  int64_t meta_bits = 0;          // its number, where meta has it
  int open_passes = 0;            // backward passes that it has called and not returned from
  int optimizer_steps = 0;        // ranges of optimizers that it is in
  uint64_t segment_pass = 0;      // the pass of the last segment that began on it; 0 where there was none
  std::vector<OpenCall> open_calls;
  uint64_t outermost_sequence = 0;                        // the sequence number at the enter of its outermost open call
  int64_t last_call_name = kNoName, last_call_index = 0;  // the outermost call that made nodes last
  uint64_t noted_sequence = UINT64_MAX;                   // at the last call that `note_call` was told of
  SequenceBoundaries boundaries;
  SequenceBoundaries device_boundaries;                     // of the calls that get events of the device
  std::map<std::string, int64_t, std::less<>> range_names;  // the ids of those that it has met in this session
  std::unordered_map<std::string, int64_t> operators;       // their numbers, by name and inputs, in this session
  ThreadState* next = nullptr;                              // in the list of all threads
};

// A backward pass with hooks on its segments. The hooks outlive it where the graph is retained, and do nothing then.
struct BackwardPass {
  std::atomic<uint64_t> number{0};  // 0: the slot is free
  std::atomic<bool> begun{false}, over{false};
  // Set by the first hook that runs. Another one that runs the same nodes from within, or beside, does not count.
  std::atomic<int> graph_task{-1};
  // Whether the observer took it over, as other passes take turns with it: from its next node on, hooks write nothing.
  std::atomic<bool> observed{false};
  bool on_device = false;     // guarded by the interpreter's lock
  bool device_times = false;  // whether an event of the device is recorded when it is over
};

// A graph task whose nodes hooks tell of, and its pass.
struct HookedGraphTask {
  std::atomic<int> graph_task{-1};
  std::atomic<uint64_t> pass{0};
};

struct EngineState {
  std::atomic<Session*> active_session{nullptr};
  std::atomic<uint64_t> next_serial{0};
  // Number of the session; changes only while none is active, so whoever acquires a session sees its number.
  std::atomic<uint64_t> generation{0};
  std::atomic<ThreadState*> threads{nullptr};
  std::atomic<bool> device_times_active{false};
  std::atomic<bool> ranges_active{false};
  std::atomic<int64_t> last_range{0};  // the highest number that a range had

  std::array<BackwardPass, kMaxConcurrentPasses> pass_slots;             // by number modulo
  std::array<HookedGraphTask, kMaxConcurrentPasses> hooked_graph_tasks;  // by task modulo

  // Guarded by the interpreter's lock.
  uint64_t last_pass = 0;            // the highest number that a pass had
  int64_t pass_calls = 0;            // how often what runs a pass was called
  int running_passes = 0;            // of all threads
  int observed_passes = 0;           // of these, those that need the observer
  uint64_t observer = 0;             // its at::CallbackHandle
  bool device_shared = false;        // whether passes of several threads ever ran on devices at once
  PyObject* call_wrapper = nullptr;  // the wrapper of nn.Module.__call__ whose calls are noted, or null
  PyObject* wrapped_call = nullptr;  // what it wraps
};

// Never destroyed: threads that the end of the process does not wait for may still write.
static_assert(std::is_trivially_destructible_v<EngineState>);
inline EngineState engine;

// Makes the state of a thread that had none, and puts it on the list.
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

}  // namespace modtrace
