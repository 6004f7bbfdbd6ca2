#include "observers.h"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <ctime>

namespace modtrace {
namespace {

enum class Lock { kFree, kUnknown, kHeld };
std::atomic<Lock> torch_lock{Lock::kFree};

void* take_lock(void* handle) {
  at::disableCallback(reinterpret_cast<at::CallbackHandle>(handle));
  return nullptr;
}

// Whether a thread gets torch's lock in time. If it does, it switches the observer off.
bool is_lock_free(at::CallbackHandle handle) {
  constexpr int64_t kWaitNs = 100'000'000, kSecondNs = 1'000'000'000;
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += kWaitNs;
  until.tv_sec += until.tv_nsec / kSecondNs;
  until.tv_nsec %= kSecondNs;
  pthread_t thread;
  if (pthread_create(&thread, nullptr, take_lock, reinterpret_cast<void*>(handle)) != 0) return false;
  if (pthread_timedjoin_np(thread, nullptr, &until) == 0) return true;
  pthread_detach(thread);
  return false;
}

bool may_switch(at::CallbackHandle handle) {
  if (torch_lock.load() == Lock::kUnknown) torch_lock.store(is_lock_free(handle) ? Lock::kFree : Lock::kHeld);
  return torch_lock.load() == Lock::kFree;
}

// Before a fork: lets this thread read the active observers, under torch's lock, as its next operator would. So the
// child's operators do not need the lock more often than without us. A child that forks may not get the lock.
void read_observers() {
  if (torch_lock.load() == Lock::kFree) at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

}  // namespace

void Observer::install(const at::RecordFunctionCallback& callbacks) {
  static const int watches_forks = pthread_atfork(read_observers, nullptr, [] { torch_lock.store(Lock::kUnknown); });
  static_cast<void>(watches_forks);
  handle_ = at::addGlobalCallback(callbacks);
  at::disableCallback(handle_);
}

bool Observer::turn_on() {
  if (!may_switch(handle_)) return false;
  at::reenableCallback(handle_);
  return true;
}

void Observer::turn_off() {
  if (may_switch(handle_)) at::disableCallback(handle_);
}

}  // namespace modtrace
