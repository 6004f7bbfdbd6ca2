// The native engine: forward calls and autograd nodes, written straight into the ring.
//
// A slot is four 64-bit integers, see ring/event.py: meta, time, value, stamp. Autograd nodes come from a RecordFunction
// observer, on whatever thread runs them and without the interpreter's lock; calls come from the wrapper of
// nn.Module.__call__, with it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/profiler/api.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

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
  kAccumulated = 14,
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
  std::vector<Frame> stack;
};

std::atomic<Session*> current{nullptr};
std::atomic<uint64_t> head{0};
uint64_t generation = 0;  // changes only while no session is current
at::CallbackHandle observer = 0;
PyObject* inner = nullptr;  // what the wrapper of nn.Module.__call__ wraps
std::mutex threads_mutex;
std::vector<std::unique_ptr<Thread>> threads;

Thread& this_thread() {
  thread_local Thread* mine = nullptr;
  if (mine == nullptr) {
    std::lock_guard<std::mutex> lock(threads_mutex);
    threads.push_back(std::make_unique<Thread>());
    mine = threads.back().get();
  }
  return *mine;
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

void put(Session& session, uint64_t serial, int64_t meta, int64_t value) {
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
void write(Session& session, int64_t meta, int64_t value) {
  put(session, head.fetch_add(1, std::memory_order_relaxed), meta, value);
}

// Calls Python of ours. torch.compile evaluates the frames of what it compiles, and would compile this with it.
PyObject* call_ours(PyObject* callable, PyObject* first = nullptr, PyObject* second = nullptr) {
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  const _PyFrameEvalFunction evaluates = _PyInterpreterState_GetEvalFrameFunc(interpreter);
  const bool watched = evaluates != _PyEval_EvalFrameDefault;
  if (watched) _PyInterpreterState_SetEvalFrameFunc(interpreter, _PyEval_EvalFrameDefault);
  PyObject* result = PyObject_CallFunctionObjArgs(callable, first, second, nullptr);
  if (watched) _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluates);
  return result;
}

// Hands the pending Python error to the recording, which stops; the user's call goes on.
void report(Session& session) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  PyObject* fail = session.fail;
  Py_INCREF(fail);
  PyObject* done = call_ours(fail, value != nullptr ? value : Py_None);
  if (done == nullptr) PyErr_Clear();
  Py_XDECREF(done);
  Py_DECREF(fail);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
}

void drop_frames(Thread& thread, size_t down_to) {
  while (thread.stack.size() > down_to) {
    PyObject* module = thread.stack.back().module;
    thread.stack.pop_back();
    Py_DECREF(module);
  }
}

void release(Session& session) {
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

bool is_current(const Session& session) { return current.load(std::memory_order_relaxed) == &session; }

// Gives the thread its number in this session; false where that failed or the session ended. Needs the interpreter's lock.
bool add_thread(Session& session, Thread& thread) {
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
  thread.generation = generation;
  return true;
}

// Names a thread that the interpreter may not know; `stop` may hold its lock, so this thread must not be busy.
void add_observing_thread(Thread& thread) {
  if (!Py_IsInitialized()) return;
  PyGILState_STATE gil = PyGILState_Ensure();
  Session* session = current.load();
  if (session != nullptr && thread.generation != generation) add_thread(*session, thread);
  PyGILState_Release(gil);
}

// Writes from a thread that does not hold the interpreter's lock. `stop` waits for those that are busy.
void write_observed(Thread& thread, int64_t meta, int64_t value) {
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

int64_t node_meta(Kind kind, const at::RecordFunction& function, int task) {
  const int64_t origin = static_cast<int64_t>(function.forwardThreadId() & 0xFFFF);
  return kind << kKindShift | origin << 8 | (task & 0xFF);
}

void write_sequence(Thread& thread) {
  // A backward that builds a graph makes nodes; they belong to the call whose node is running.
  if (C10_UNLIKELY(at::GradMode::is_enabled())) {
    write_observed(thread, kNodeSequence << kKindShift | kNoName,
                   static_cast<int64_t>(at::sequence_number::peek()) & kSequenceMask);
  }
}

// The running graph task, or -1 for what torch.compile runs of what it traces: in no task, or in one on fake tensors.
// That is no backward of the user's.
int running_task() {
  const bool traced = C10_UNLIKELY(c10::impl::TorchDispatchModeTLS::any_modes_set()) &&
                      c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
  return traced ? -1 : torch::autograd::get_current_graph_task_id();
}

// AccumulateGrad has no sequence number. It runs right after the node that made the gradient, and counts to that one.
bool accumulates(const at::RecordFunction& function) { return function.seqNr() < 0; }

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& function) {
  if (accumulates(function)) return nullptr;
  const int task = running_task();
  if (C10_UNLIKELY(task < 0)) return nullptr;
  Thread& thread = this_thread();
  if (C10_UNLIKELY(thread.generation != generation)) add_observing_thread(thread);
  write_observed(thread, node_meta(kNodeBegin, function, task), function.seqNr());
  write_sequence(thread);
  return nullptr;
}

void node_ends(const at::RecordFunction& function, at::ObserverContext*) {
  const int task = running_task();
  if (C10_UNLIKELY(task < 0)) return;
  Thread& thread = this_thread();
  if (accumulates(function)) {
    write_observed(thread, node_meta(kAccumulated, function, task), 0);
    return;
  }
  write_sequence(thread);
  write_observed(thread, node_meta(kNodeEnd, function, task), function.seqNr());
}

// Asks for the name that the module has below the open calls; -1 where that failed or the session ended.
int64_t find_name(Session& session, Thread& thread, PyObject* module, int64_t parent) {
  const Use use(session);
  PyObject* open = PyList_New(0);
  for (auto frame = thread.stack.rbegin(); open != nullptr && frame != thread.stack.rend(); ++frame) {
    PyObject* call = Py_BuildValue("(OL)", frame->module, static_cast<long long>(frame->name));
    if (call == nullptr || PyList_Append(open, call) != 0) Py_CLEAR(open);
    Py_XDECREF(call);
  }
  PyObject* found = open == nullptr ? nullptr : call_ours(session.find, module, open);
  Py_XDECREF(open);
  if (found == nullptr) {
    report(session);
    return -1;
  }
  const int64_t name = PyLong_AsLongLong(found);
  Py_DECREF(found);
  if (!is_current(session)) return -1;
  session.names[module].emplace_back(parent, name);
  if (name != kNoName && session.forward_calls.size() <= static_cast<size_t>(name)) {
    session.forward_calls.resize(name + 1);
    session.recompute_calls.resize(name + 1);
  }
  return name;
}

int64_t name_of(Session& session, Thread& thread, PyObject* module) {
  const int64_t parent = thread.stack.empty() ? kNoName : thread.stack.back().name;
  const auto known = session.names.find(module);
  if (C10_LIKELY(known != session.names.end())) {
    for (const auto& [around, name] : known->second) {
      if (around == parent) return name;
    }
  }
  return find_name(session, thread, module, parent);
}

// Notes that a module is called. False where nothing was noted, and so nothing is to be left.
bool enter(PyObject* module) {
  Session* session = current.load(std::memory_order_relaxed);
  if (session == nullptr) return false;
  Thread& thread = this_thread();
  if (C10_UNLIKELY(thread.generation != generation) && !add_thread(*session, thread)) return false;
  if (thread.stack.empty() && C10_UNLIKELY(torch::profiler::impl::profilerEnabled())) {
    const Use use(*session);
    PyObject* done = call_ours(session->sync);
    if (done == nullptr) report(*session);
    Py_XDECREF(done);
    if (!is_current(*session)) return false;
  }
  const int64_t name = name_of(*session, thread, module);
  if (name < 0 || name == kNoName) return false;
  const bool again = torch::autograd::get_current_graph_task_id() != -1;
  int64_t& calls = (again ? session->recompute_calls : session->forward_calls)[name];
  const int64_t value = (calls++ & kNumberMask) << kSequenceBits;
  const int64_t bits = thread.bits | name;
  Py_INCREF(module);
  thread.stack.push_back({module, name, (again ? kRecomputeExit : kForwardExit) << kKindShift | bits, value});
  write(*session, (again ? kRecomputeEnter : kForwardEnter) << kKindShift | bits,
        value | (static_cast<int64_t>(at::sequence_number::peek()) & kSequenceMask));
  return true;
}

// Notes that the call at this height of the stack is over, and those that it holds.
void leave(Session& session, Thread& thread, size_t height) {
  const Frame& frame = thread.stack[height];
  write(session, frame.exit_meta, frame.value | (static_cast<int64_t>(at::sequence_number::peek()) & kSequenceMask));
  drop_frames(thread, height);
}

// What a call of the wrapper runs instead of its bytecode.
PyObject* traced_call(PyObject*, PyObject* const* args, size_t flagged, PyObject* keywords) {
  if (PyVectorcall_NARGS(flagged) == 0 || !enter(args[0])) {
    return PyObject_Vectorcall(inner, args, flagged, keywords);
  }
  Thread& thread = this_thread();
  const uint64_t entered_in = generation;
  const size_t height = thread.stack.size() - 1;
  PyObject* result = PyObject_Vectorcall(inner, args, flagged, keywords);
  Session* session = current.load(std::memory_order_relaxed);
  if (session != nullptr && entered_in == generation && thread.stack.size() > height) leave(*session, thread, height);
  return result;
}

PyObject* py_short_cut(PyObject*, PyObject* args) {
  PyObject *wrapper, *wrapped;
  if (!PyArg_ParseTuple(args, "O!O", &PyFunction_Type, &wrapper, &wrapped)) return nullptr;
  Py_INCREF(wrapped);
  Py_XSETREF(inner, wrapped);
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(reinterpret_cast<PyFunctionObject*>(wrapper), traced_call);
#else
  reinterpret_cast<PyFunctionObject*>(wrapper)->vectorcall = traced_call;
#endif
  Py_RETURN_NONE;
}

PyObject* py_event(PyObject*, PyObject* args) {
  long long meta, value;
  if (!PyArg_ParseTuple(args, "LL", &meta, &value)) return nullptr;
  Session* session = current.load(std::memory_order_relaxed);
  if (session == nullptr) Py_RETURN_NONE;
  Thread& thread = this_thread();
  if (thread.generation == generation || add_thread(*session, thread)) write(*session, thread.bits | meta, value);
  Py_RETURN_NONE;
}

PyObject* py_forget(PyObject*, PyObject* identity) {
  Session* session = current.load(std::memory_order_relaxed);
  if (session != nullptr) session->names.erase(reinterpret_cast<PyObject*>(PyLong_AsVoidPtr(identity)));
  Py_RETURN_NONE;
}

void end(Session* session) {
  at::removeCallback(observer);
  {
    std::lock_guard<std::mutex> lock(threads_mutex);
    for (const auto& thread : threads) {
      while (thread->busy.load(std::memory_order_seq_cst)) std::this_thread::yield();
    }
  }
  PyBuffer_Release(&session->buffer);
  release(*session);
}

PyObject* py_start(PyObject*, PyObject* args) {
  auto session = std::make_unique<Session>();
  Py_ssize_t offset;
  unsigned long long capacity;
  if (!PyArg_ParseTuple(args, "w*nKOOOO", &session->buffer, &offset, &capacity, &session->find, &session->add_thread,
                        &session->sync, &session->fail)) {
    return nullptr;
  }
  if (current.load() != nullptr || static_cast<unsigned long long>(session->buffer.len) < offset + capacity * sizeof(Slot)) {
    PyBuffer_Release(&session->buffer);
    PyErr_SetString(PyExc_RuntimeError, "a session runs already, or the buffer is too small");
    return nullptr;
  }
  for (PyObject* callable : {session->find, session->add_thread, session->sync, session->fail}) Py_INCREF(callable);
  session->slots = reinterpret_cast<Slot*>(static_cast<char*>(session->buffer.buf) + offset);
  session->capacity = capacity;
  session->lap_bits = (capacity & (capacity - 1)) == 0 ? __builtin_ctzll(capacity) : -1;
  ++generation;
  head.store(0);
  current.store(session.release());
  observer = at::addGlobalCallback(
      at::RecordFunctionCallback(node_begins, node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  Py_RETURN_NONE;
}

PyObject* py_stop(PyObject*, PyObject*) {
  Session* session = current.exchange(nullptr);
  if (session != nullptr) end(session);
  Py_RETURN_NONE;
}

// In a forked child: other threads are gone, and one of them may have been writing.
PyObject* py_after_fork(PyObject*, PyObject*) {
  Session* session = current.exchange(nullptr);
  for (const auto& thread : threads) thread->busy.store(false);
  if (session != nullptr) end(session);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"start", py_start, METH_VARARGS, "start(buffer, offset, capacity, find, add_thread, sync, fail): begin to note."},
    {"stop", py_stop, METH_NOARGS, "stop(): end it, once no thread writes any more."},
    {"after_fork", py_after_fork, METH_NOARGS, "after_fork(): stop, in a forked child."},
    {"short_cut", py_short_cut, METH_VARARGS, "short_cut(wrapper, wrapped): let calls of wrapper run here."},
    {"event", py_event, METH_VARARGS, "event(meta, value): write one event of this thread."},
    {"forget", py_forget, METH_O, "forget(identity): a module died."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "modtrace_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_modtrace_native() { return PyModule_Create(&definition); }
