#include "greenlets.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "engine.h"

namespace modtrace {
namespace {

PyObject* set_trace = nullptr;       // greenlet.settrace
PyObject* trace_function = nullptr;  // ours

bool is_busy(const GreenletState& state) {
  return state.generation == current_generation() && (!state.open_calls.empty() || state.open_passes > 0);
}

// Writes that another greenlet makes the nodes from now on, if one of the two is in a call.
void write_switch(ThreadState& thread, bool was_busy, int64_t left_bits) {
  Session* session = engine.active_session.load(std::memory_order_relaxed);
  const bool goes_on = is_busy(thread);
  if (session == nullptr || !(was_busy || goes_on)) return;
  const uint64_t sequence = at::sequence_number::peek();
  thread.boundaries.add(sequence);
  if (thread.device_boundaries.allocated()) thread.device_boundaries.add(sequence);
  write_with_gil(*session,
                 int64_t{goes_on ? kGreenletResumed : kGreenletSuspended} << kKindShift |
                     (goes_on ? thread.meta_bits : left_bits) | kNoName,
                 static_cast<int64_t>(sequence & kSequenceMask));
}

// Removes and returns the states of dead greenlets.
std::vector<std::pair<PyRef, GreenletState>> take_dead(Greenlets& greenlets) {
  std::vector<std::pair<PyRef, GreenletState>> dead;
  for (auto entry = greenlets.suspended.begin(); entry != greenlets.suspended.end();) {
    const PyRef greenlet = steal(PyObject_CallNoArgs(entry->first));
    if (greenlet.get() == Py_None) {
      dead.push_back(std::move(entry->second));
      entry = greenlets.suspended.erase(entry);
    } else {
      ++entry;
    }
  }
  greenlets.pruned_at = std::max<size_t>(64, 2 * greenlets.suspended.size());
  return dead;
}

// Exchanges the thread's state for that of this greenlet. Returns whether it was another greenlet's.
bool exchange(ThreadState& thread, PyObject* greenlet) {
  PyRef running = steal(PyWeakref_NewRef(greenlet, nullptr));  // the same reference for an object, while it is held
  Greenlets& greenlets = thread.greenlets;
  if (!running || running.get() == greenlets.running.get()) return false;
  std::vector<std::pair<PyRef, GreenletState>> dead;  // freed last: dying objects can run any code
  if (greenlets.suspended.size() >= greenlets.pruned_at) dead = take_dead(greenlets);
  const bool was_busy = is_busy(thread);
  const int64_t left_bits = thread.meta_bits;
  PyRef left = std::exchange(greenlets.running, std::move(running));
  GreenletState state = std::exchange(static_cast<GreenletState&>(thread), GreenletState());
  if (left) {
    PyObject* key = left.get();
    greenlets.suspended.insert_or_assign(key, std::make_pair(std::move(left), std::move(state)));
  }
  const auto found = greenlets.suspended.find(greenlets.running.get());
  if (found != greenlets.suspended.end()) {
    static_cast<GreenletState&>(thread) = std::move(found->second.second);
    dead.push_back(std::move(found->second));
    greenlets.suspended.erase(found);
  }
  write_switch(thread, was_busy, left_bits);
  return true;
}

// The first greenlet of a thread.
PyRef main_greenlet(PyRef greenlet) {
  while (greenlet) {
    PyRef parent = steal(PyObject_GetAttrString(greenlet.get(), "parent"));
    if (!parent || parent.get() == Py_None) break;
    greenlet = std::move(parent);
  }
  return greenlet;
}

// trace(event, (origin, target)): called by greenlet in the target.
PyObject* trace(PyObject*, PyObject* args) {
  ThreadState& thread = this_thread();
  const PyRef before = borrow(thread.greenlets.traced_before.get());
  PyObject *origin, *target;
  const char* event;
  if (thread.greenlets.tracing) Py_RETURN_NONE;  // the earlier function calls us
  if (engine.active_session.load(std::memory_order_relaxed) != nullptr && thread.greenlets.running &&
      PyArg_ParseTuple(args, "s(OO)", &event, &origin, &target)) {
    exchange(thread, target);
  }
  PyErr_Clear();
  if (!before) Py_RETURN_NONE;
  thread.greenlets.tracing = true;
  PyObject* result = PyObject_Call(before.get(), args, nullptr);
  thread.greenlets.tracing = false;
  return result;
}

PyMethodDef trace_definition = {"trace", trace, METH_VARARGS,
                                "trace(event, greenlets): greenlets of this thread have switched."};

void begin_trace(Greenlets& greenlets) {
  PyRef before = steal(PyObject_CallOneArg(set_trace, trace_function));
  if (before && before.get() != trace_function) {
    greenlets.traced_before = before.get() == Py_None ? PyRef() : std::move(before);
  }
}

}  // namespace

void find_greenlet(ThreadState& thread) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyRef greenlet = steal(PyObject_CallNoArgs(engine.get_greenlet));
  if (greenlet) {
    if (!thread.greenlets.running) {
      // The thread's state from before greenlet was imported belongs to its main greenlet.
      const PyRef main = main_greenlet(borrow(greenlet.get()));
      thread.greenlets.running = steal(PyWeakref_NewRef(main.get(), nullptr));
      begin_trace(thread.greenlets);
      exchange(thread, greenlet.get());
    } else if (exchange(thread, greenlet.get())) {
      begin_trace(thread.greenlets);
    }
  }
  PyErr_Clear();
  PyErr_Restore(type, value, traceback);
}

PyObject* follow_greenlets(PyObject*, PyObject* args) {
  PyObject *get_current, *settrace;
  if (!PyArg_ParseTuple(args, "OO", &get_current, &settrace)) return nullptr;
  if (engine.get_greenlet != nullptr) Py_RETURN_NONE;
  trace_function = PyCFunction_New(&trace_definition, nullptr);
  if (trace_function == nullptr) return nullptr;
  Py_INCREF(settrace);
  set_trace = settrace;
  Py_INCREF(get_current);
  engine.get_greenlet = get_current;
  find_greenlet(this_thread());  // the calls that are open now belong to the main greenlet
  Py_RETURN_NONE;
}

}  // namespace modtrace
