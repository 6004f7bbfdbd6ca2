// Writing events into the ring, from any thread, with or without the interpreter's lock.
//
// A slot is four 64-bit integers, see ring/event.py: meta, time, value, stamp.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sequence_boundaries.h"

namespace modtrace {

constexpr int kNameBits = 24, kThreadShift = 24, kKindShift = 40, kLapShift = 48;
constexpr int kSequenceBits = 38, kNumberBits = 25;
constexpr int64_t kNoName = (1 << kNameBits) - 1;
constexpr int64_t kSequenceMask = (int64_t{1} << kSequenceBits) - 1;
constexpr int64_t kNumberMask = (int64_t{1} << kNumberBits) - 1;
constexpr uint64_t kLapMask = (1 << 15) - 1;
constexpr int kAhead = 24;
enum Kind : int64_t {
  kForwardEnter = 1,
  kForwardExit,
  kRecomputeEnter,
  kRecomputeExit,
  kNodeBegin,
  kNodeEnd,
  kNodeSequence,
  kBackwardOver = 9,
  kAccumulated = 14,
  kStretch,
};

// The words are atomic so that a reader beside us never sees half a word, and in order so that it can tell half a slot.
struct Slot {
  std::atomic<int64_t> meta, time, value, stamp;
};

struct Session {
  Slot* slots;
  uint64_t capacity;
  int lap_bits;  // of a capacity that is a power of two, else -1: a division is the dearest step of a write
  Py_buffer buffer;
  PyObject* find;
  PyObject* add_thread;
  PyObject* sync;
  PyObject* fail;
  std::unordered_map<PyObject*, std::vector<std::pair<int64_t, int64_t>>> names;  // module → (parent's name, name)
  std::vector<int64_t> forward_calls, recompute_calls;                             // by name
  int uses = 1;  // guarded by the interpreter's lock
};

struct Frame {
  PyObject* module;  // owned
  int64_t name, exit_meta, value;
};

// One per thread, never freed: `stop` looks at it, and a thread may end at any time.
struct Thread {
  std::atomic<bool> busy{false};
  uint64_t generation = 0;  // of the session that `bits` and `stack` belong to
  int64_t bits = 0;
  int passes = 0;  // that it has called and not returned from
  std::vector<Frame> stack;
  Boundaries boundaries;
};

inline std::atomic<Session*> current{nullptr};
inline std::atomic<uint64_t> head{0};
inline uint64_t generation = 0;  // changes only while no session is current
inline std::mutex threads_mutex;
// Never destroyed: threads that the end of the process does not wait for may still write.
inline std::vector<std::unique_ptr<Thread>>& threads = *new std::vector<std::unique_ptr<Thread>>;

inline Thread& this_thread() {
  thread_local struct Own {
    Thread* thread = nullptr;
    ~Own() {
      if (thread != nullptr) thread->boundaries.forget();
    }
  } own;
  if (own.thread == nullptr) {
    std::lock_guard<std::mutex> lock(threads_mutex);
    threads.push_back(std::make_unique<Thread>());
    own.thread = threads.back().get();
  }
  return *own.thread;
}

inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

inline void put(Session& session, uint64_t serial, int64_t meta, int64_t value) {
  const uint64_t lap = session.lap_bits >= 0 ? serial >> session.lap_bits : serial / session.capacity;
  Slot& slot = session.slots[serial - lap * session.capacity];
  // The ring is larger than the caches, and taking the next serial waits for this slot's line: fetch lines ahead.
  __builtin_prefetch(&slot + kAhead, 1);
  slot.meta.store(static_cast<int64_t>((lap & kLapMask) << kLapShift) | meta, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.time.store(now(), std::memory_order_relaxed);
  slot.value.store(value, std::memory_order_relaxed);
  slot.stamp.store(static_cast<int64_t>(serial + 1), std::memory_order_release);
}

// Writes from a thread that holds the interpreter's lock, which `stop` needs too.
inline void write(Session& session, int64_t meta, int64_t value) {
  put(session, head.fetch_add(1, std::memory_order_relaxed), meta, value);
}

// Calls Python of ours. torch.compile evaluates the frames of what it compiles, and would compile this with it.
inline PyObject* call_ours(PyObject* callable, PyObject* first = nullptr, PyObject* second = nullptr) {
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  const _PyFrameEvalFunction evaluates = _PyInterpreterState_GetEvalFrameFunc(interpreter);
  const bool watched = evaluates != _PyEval_EvalFrameDefault;
  if (watched) _PyInterpreterState_SetEvalFrameFunc(interpreter, _PyEval_EvalFrameDefault);
  PyObject* result = PyObject_CallFunctionObjArgs(callable, first, second, nullptr);
  if (watched) _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluates);
  return result;
}

// Hands the pending Python error to the recording, which stops; the user's call goes on. Where the error is the user's own
// it stays pending.
inline void report(Session& session) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  PyObject* fail = session.fail;
  Py_INCREF(fail);
  PyObject* done = call_ours(fail, value != nullptr ? value : Py_None);
  Py_XDECREF(done);
  Py_DECREF(fail);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
}

inline void drop_frames(Thread& thread, size_t down_to) {
  while (thread.stack.size() > down_to) {
    PyObject* module = thread.stack.back().module;
    thread.stack.pop_back();
    Py_DECREF(module);
  }
}

inline void release(Session& session) {
  if (--session.uses > 0) return;
  for (PyObject* callable : {session.find, session.add_thread, session.sync, session.fail}) Py_DECREF(callable);
  delete &session;
}

// Holds a session while Python runs: another thread may stop it meanwhile.
class Use {
 public:
  explicit Use(Session& session) : session_(session) { ++session_.uses; }
  ~Use() { release(session_); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Session& session_;
};

inline bool is_current(const Session& session) { return current.load(std::memory_order_relaxed) == &session; }

// Gives the thread its number in this session; false where that failed or the session ended. Needs the interpreter's lock.
inline bool add_thread(Session& session, Thread& thread) {
  const Use use(session);
  drop_frames(thread, 0);
  PyObject* torch_thread = PyLong_FromUnsignedLongLong(at::RecordFunction::currentThreadId());
  PyObject* number = torch_thread == nullptr ? nullptr : call_ours(session.add_thread, torch_thread);
  Py_XDECREF(torch_thread);
  if (number == nullptr) {
    report(session);
    return false;
  }
  const int64_t bits = PyLong_AsLongLong(number) << kThreadShift;
  Py_DECREF(number);
  if (!is_current(session)) return false;
  thread.bits = bits;
  thread.passes = 0;
  thread.generation = generation;
  return true;
}

// Names a thread that the interpreter may not know; `stop` may hold its lock, so this thread must not be busy.
inline void add_observing_thread(Thread& thread) {
  if (!Py_IsInitialized()) return;
  PyGILState_STATE gil = PyGILState_Ensure();
  Session* session = current.load();
  if (session != nullptr && thread.generation != generation && !add_thread(*session, thread) && PyErr_Occurred()) {
    PyErr_WriteUnraisable(nullptr);
  }
  PyGILState_Release(gil);
}

// Writes from a thread that does not hold the interpreter's lock. `stop` waits for those that are busy.
inline void write_observed(Thread& thread, int64_t meta, int64_t value) {
  // A thread that has no number yet must not take a serial: the reader would miss an event.
  if (C10_UNLIKELY(thread.generation != generation)) return;
  thread.busy.store(true, std::memory_order_relaxed);
  // Taking the serial is a full fence: `stop` either sees us busy, or we see that there is no session.
  const uint64_t serial = head.fetch_add(1, std::memory_order_seq_cst);
#if !defined(__x86_64__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  Session* session = current.load(std::memory_order_seq_cst);
  if (C10_LIKELY(session != nullptr && thread.generation == generation)) {
    put(*session, serial, meta | thread.bits, value);
  }
  thread.busy.store(false, std::memory_order_release);
}

}  // namespace modtrace
