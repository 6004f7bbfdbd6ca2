// Writing events into the ring, from any thread, with or without the interpreter's lock: the hot path, all inline.

#pragma once

#include <c10/macros/Macros.h>

#include <ctime>

#include "engine_state.h"
#include "memory.h"

namespace modtrace {

constexpr int kPrefetchSlots = 24;

inline int64_t monotonic_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Fills the slot of this serial number. Meta goes first and the stamp last, by which a reader tells half a slot.
// `time`: what it says in place of now, monotonic ns.
inline void write_slot(Session& session, uint64_t serial, int64_t meta, int64_t value, const int64_t* time = nullptr) {
  const uint64_t lap = session.capacity_log2 >= 0 ? serial >> session.capacity_log2 : serial / session.capacity;
  Slot& slot = session.slots[serial - lap * session.capacity];
  // The ring is larger than the caches, and taking the next serial waits for this slot's line: fetch lines ahead.
  __builtin_prefetch(&slot + kPrefetchSlots, 1);
  slot.meta.store(static_cast<int64_t>((lap & kLapMask) << kLapShift) | meta, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.time.store(time == nullptr ? monotonic_ns() : *time, std::memory_order_relaxed);
  slot.value.store(value, std::memory_order_relaxed);
  slot.stamp.store(static_cast<int64_t>(serial + 1), std::memory_order_release);
}

// Meta of a sample of memory on the thread of this meta.
inline int64_t sample_meta(int64_t meta) {
  return memory.sample_meta.load(std::memory_order_relaxed) |
         (meta & static_cast<int64_t>(kThreadMask << kThreadShift));
}

// Writes from a thread that holds the interpreter's lock, which `stop` needs too.
inline void write_with_gil(Session& session, int64_t meta, int64_t value) {
  if (C10_UNLIKELY(memory.counting.load(std::memory_order_relaxed))) {
    sample_memory([&](int64_t bytes) {
      write_slot(session, engine.next_serial.fetch_add(1, std::memory_order_relaxed), sample_meta(meta), bytes);
    });
  }
  write_slot(session, engine.next_serial.fetch_add(1, std::memory_order_relaxed), meta, value);
}

// Writes who holds memory, where it is counted, before a step ends, or before a call where nothing ends steps.
inline void write_held(Session& session, const ThreadState& thread) {
  if (C10_LIKELY(!memory.counting.load(std::memory_order_relaxed))) return;
  sample_held(false, [&](int64_t meta, int64_t value) { write_with_gil(session, meta | thread.meta_bits, value); });
}

// Writes from a thread that does not hold the interpreter's lock, into the session of this generation only. `meta` has
// the thread's number. `stop` waits for those that are busy.
inline void write_one_without_gil(ThreadState& thread, uint64_t generation, int64_t meta, int64_t value,
                                  const int64_t* time = nullptr) {
  // Without a session to write to it must not take a serial: the reader would miss an event.
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

// The same, after a sample of memory where that is counted. An event of an earlier time has none.
inline void write_without_gil(ThreadState& thread, uint64_t generation, int64_t meta, int64_t value,
                              const int64_t* time = nullptr) {
  if (C10_UNLIKELY(memory.counting.load(std::memory_order_relaxed)) && time == nullptr &&
      generation == current_generation()) {
    sample_memory([&](int64_t bytes) { write_one_without_gil(thread, generation, sample_meta(meta), bytes); });
  }
  write_one_without_gil(thread, generation, meta, value, time);
}

// The same for a thread of the running session; `meta` without its number.
inline void write_without_gil(ThreadState& thread, int64_t meta, int64_t value) {
  write_without_gil(thread, thread.generation, meta | thread.meta_bits, value);
}

// Gives the thread its number in this session; false where that failed or the session ended. Needs the interpreter's
// lock.
bool register_thread(Session& session, ThreadState& thread);

// The same for a thread that does not hold the lock, and that the interpreter may not know. It must not be busy: `stop`
// may hold the lock and wait for it.
void register_thread_without_gil(ThreadState& thread);

// This thread, with its number where it can have one. For threads that do not hold the interpreter's lock.
inline ThreadState& registered_thread() {
  ThreadState& thread = this_thread();
  if (C10_UNLIKELY(thread.generation != current_generation())) register_thread_without_gil(thread);
  return thread;
}

// Ends the open calls above this height of the thread's stack, without writing their exits.
inline void drop_open_calls(ThreadState& thread, size_t height) {
  while (thread.open_calls.size() > height) {
    // Taken off before it dies: what dies with a module can run any code, also calls of modules.
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

// Calls a Python function of ours. torch.compile replaces the evaluation of frames, and would compile this one into the
// user's; while it runs, frames are evaluated as usual.
PyRef call_without_dynamo(const PyRef& function, PyObject* first = nullptr, PyObject* second = nullptr,
                          PyObject* third = nullptr);

// Has the pending error, if there is one, raised in the main thread: that of a handler of a signal, which ran while
// torch called us where nothing can be raised.
void raise_later();

// Hands the pending Python error to the recording, which stops; the user's call goes on. An error that the recording
// raises again is the user's own (an interrupt), and is pending afterwards.
void report_error(Session& session);

}  // namespace modtrace
