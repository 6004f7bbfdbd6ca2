// What torch calls around operators and nodes, while it is on.
//
// To switch one takes torch's lock of observers. In a forked child that lock may be held for ever: another thread of
// the parent was in it, as it ran an operator, and is gone. So the first switch in a child finds out whether the lock
// can be had, on a thread of its own and for a limited time. Where it cannot, nothing is switched in that child.

#pragma once

#include <ATen/record_function.h>

namespace modtrace {

class Observer {
 public:
  // Gives torch the callbacks, switched off. Once per process: torch's list is never made shorter.
  void install(const at::RecordFunctionCallback& callbacks);

  // False where torch's lock is held for ever: the callbacks are not called then.
  bool turn_on();

  void turn_off();

 private:
  at::CallbackHandle handle_ = 0;
};

}  // namespace modtrace
