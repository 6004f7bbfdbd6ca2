// Preloaded into a process: the next lock that the engine takes while `holds` is 1 is held half a second longer, and
// then `holds` is 2. HELD_LOCK_OF is another library that takes it, by a part of its name.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Atomic int holds;

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static int (*lock)(pthread_mutex_t*);
  if (lock == NULL) lock = (int (*)(pthread_mutex_t*))dlsym(RTLD_NEXT, "pthread_mutex_lock");
  Dl_info caller;
  int result = lock(mutex);
  const char* library = getenv("HELD_LOCK_OF");
  if (library == NULL) library = "modtrace_native";
  if (holds == 1 && dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, library)) {
    holds = 2;
    usleep(500000);
  }
  return result;
}
