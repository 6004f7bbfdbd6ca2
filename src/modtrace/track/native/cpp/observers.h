// Callbacks of torch around operators and nodes, while they are on.
//
// Switching one needs torch's lock of observers. In a forked child that lock may be held for ever: another thread of
// the parent held it at the fork, while it ran an operator. So the first switch in a child tests whether the lock is
// free, on a separate thread and for a limited time. If it is not, nothing is switched in that child.

#pragma once

#include <ATen/record_function.h>

namespace modtrace {

class Observer {
 public:
  // Gives torch the callbacks, switched off. Once per process: torch's list never gets shorter.
  void install(const at::RecordFunctionCallback& callbacks);

  // False if torch's lock is held for ever: then the callbacks are not called.
  bool turn_on();

  void turn_off();

 private:
  at::CallbackHandle handle_ = 0;
};

}  // namespace modtrace
