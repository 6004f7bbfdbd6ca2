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
enum Kind : int64_t {
  kForwardEnter = 1,
  kForwardExit,
  kRecomputeEnter,
  kRecomputeExit,
  kNodeBegin,
  kNodeEnd,
  kNodeSequence,
};

// The words are atomic so that a reader beside us never sees half a word, and in order so that it can tell half a slot.
struct Slot {
  std::atomic<int64_t> meta, time, value, stamp;
};

struct Session {
  Slot* slots;
  uint64_t capacity;
  Py_buffer buffer;
  PyObject* find;
  PyObject* add_thread;
  PyObject* sync;
  PyObject* fail;
  std::unordered_map<PyObject*, std::vector<std::pair<int64_t, int64_t>>> names;  // module → (parent's name, name)
  std::vector<int64_t> forward_calls, recompute_calls;                             // by name
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

void write(Session& session, int64_t meta, int64_t value) {
  const uint64_t serial = head.fetch_add(1, std::memory_order_relaxed);
  const uint64_t lap = serial / session.capacity;
  Slot& slot = session.slots[serial - lap * session.capacity];
  slot.meta.store(static_cast<int64_t>((lap & kLapMask) << kLapShift) | meta, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  slot.time.store(now(), std::memory_order_relaxed);
  slot.value.store(value, std::memory_order_relaxed);
  slot.stamp.store(static_cast<int64_t>(serial + 1), std::memory_order_release);
}

// Hands the pending Python error to the recording, which stops; the user's call goes on.
void report(Session& session) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  PyObject* fail = session.fail;
  Py_INCREF(fail);
  PyObject* done = PyObject_CallFunctionObjArgs(fail, value != nullptr ? value : Py_None, nullptr);
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

// Gives the thread its number in this session. Needs the interpreter's lock.
bool add_thread(Session& session, Thread& thread) {
  drop_frames(thread, 0);
  PyObject* number = PyObject_CallFunction(
      session.add_thread, "K", static_cast<unsigned long long>(at::RecordFunction::currentThreadId()));
  if (number == nullptr) {
    report(session);
    return false;
  }
  thread.bits = PyLong_AsLongLong(number) << kThreadShift;
  thread.generation = generation;
  Py_DECREF(number);
  return true;
}

// The session of an observer, which does not hold the interpreter's lock, kept from ending while it writes.
class Observing {
 public:
  Observing() : thread_(this_thread()) {
    enter();
    if (session_ != nullptr && thread_.generation != generation) {
      // Naming the thread takes the interpreter's lock, which `stop` may hold while it waits for us.
      leave();
      if (Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Session* session = current.load();
        if (session != nullptr) add_thread(*session, thread_);
        PyGILState_Release(gil);
      }
      enter();
      if (session_ != nullptr && thread_.generation != generation) session_ = nullptr;
    }
  }
  ~Observing() { leave(); }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;

  Session* session() const { return session_; }
  int64_t bits() const { return thread_.bits; }

 private:
  void enter() {
    // An exchange is a full fence on x86: `stop` either sees us busy, or we see that there is no session.
    thread_.busy.exchange(true, std::memory_order_seq_cst);
    session_ = current.load(std::memory_order_seq_cst);
  }
  void leave() { thread_.busy.store(false, std::memory_order_release); }

  Thread& thread_;
  Session* session_;
};

int64_t node_meta(Kind kind, const Observing& observing, const at::RecordFunction& function) {
  const int64_t origin = static_cast<int64_t>(function.forwardThreadId() & 0xFFFF);
  const int64_t task = torch::autograd::get_current_graph_task_id() & 0xFF;
  return kind << kKindShift | observing.bits() | origin << 8 | task;
}

void write_sequence(const Observing& observing) {
  // A backward that builds a graph makes nodes; they belong to the call whose node is running.
  if (C10_UNLIKELY(at::GradMode::is_enabled())) {
    write(*observing.session(), kNodeSequence << kKindShift | observing.bits() | kNoName,
          static_cast<int64_t>(at::sequence_number::peek()) & kSequenceMask);
  }
}

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& function) {
  const Observing observing;
  if (observing.session() != nullptr) {
    write(*observing.session(), node_meta(kNodeBegin, observing, function), function.seqNr());
    write_sequence(observing);
  }
  return nullptr;
}

void node_ends(const at::RecordFunction& function, at::ObserverContext*) {
  const Observing observing;
  if (observing.session() != nullptr) {
    write_sequence(observing);
    write(*observing.session(), node_meta(kNodeEnd, observing, function), function.seqNr());
  }
}

// Asks for the name that the module has below the open calls; -1 where that failed.
int64_t find_name(Session& session, Thread& thread, PyObject* module, int64_t parent) {
  PyObject* open = PyList_New(0);
  for (auto frame = thread.stack.rbegin(); open != nullptr && frame != thread.stack.rend(); ++frame) {
    PyObject* call = Py_BuildValue("(OL)", frame->module, static_cast<long long>(frame->name));
    if (call == nullptr || PyList_Append(open, call) != 0) Py_CLEAR(open);
    Py_XDECREF(call);
  }
  PyObject* found = open == nullptr ? nullptr : PyObject_CallFunctionObjArgs(session.find, module, open, nullptr);
  Py_XDECREF(open);
  if (found == nullptr) {
    report(session);
    return -1;
  }
  const int64_t name = PyLong_AsLongLong(found);
  Py_DECREF(found);
  session.names[module].emplace_back(parent, name);
  if (session.forward_calls.size() <= static_cast<size_t>(name)) {
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

PyObject* py_enter(PyObject*, PyObject* module) {
  Session* session = current.load(std::memory_order_relaxed);
  if (session == nullptr) Py_RETURN_NONE;
  Thread& thread = this_thread();
  if (C10_UNLIKELY(thread.generation != generation) && !add_thread(*session, thread)) Py_RETURN_NONE;
  if (thread.stack.empty() && C10_UNLIKELY(torch::profiler::impl::profilerEnabled())) {
    PyObject* done = PyObject_CallNoArgs(session->sync);
    if (done == nullptr) report(*session);
    Py_XDECREF(done);
    if (current.load(std::memory_order_relaxed) != session) Py_RETURN_NONE;
  }
  const int64_t name = name_of(*session, thread, module);
  if (name < 0 || current.load(std::memory_order_relaxed) != session) Py_RETURN_NONE;
  const bool again = torch::autograd::get_current_graph_task_id() != -1;
  int64_t& calls = (again ? session->recompute_calls : session->forward_calls)[name];
  const int64_t value = (calls++ & kNumberMask) << kSequenceBits;
  const int64_t bits = thread.bits | name;
  Py_INCREF(module);
  thread.stack.push_back({module, name, (again ? kRecomputeExit : kForwardExit) << kKindShift | bits, value});
  write(*session, (again ? kRecomputeEnter : kForwardEnter) << kKindShift | bits,
        value | (static_cast<int64_t>(at::sequence_number::peek()) & kSequenceMask));
  Py_RETURN_NONE;
}

PyObject* py_leave(PyObject*, PyObject* module) {
  Session* session = current.load(std::memory_order_relaxed);
  Thread& thread = this_thread();
  if (session == nullptr || thread.generation != generation) Py_RETURN_NONE;
  // An interrupt can keep an inner call from leaving, or this one from entering.
  size_t height = thread.stack.size();
  while (height > 0 && thread.stack[height - 1].module != module) --height;
  if (height == 0) Py_RETURN_NONE;
  const Frame& frame = thread.stack[height - 1];
  write(*session, frame.exit_meta,
        frame.value | (static_cast<int64_t>(at::sequence_number::peek()) & kSequenceMask));
  drop_frames(thread, height - 1);
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
  for (PyObject* callable : {session->find, session->add_thread, session->sync, session->fail}) Py_DECREF(callable);
  delete session;
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
    {"enter", py_enter, METH_O, "enter(module): note that it is called."},
    {"leave", py_leave, METH_O, "leave(module): note that its call is over."},
    {"event", py_event, METH_VARARGS, "event(meta, value): write one event of this thread."},
    {"forget", py_forget, METH_O, "forget(identity): a module died."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "modtrace_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_modtrace_native() { return PyModule_Create(&definition); }
