// Preloaded into a process: its clocks go on by the processor time that it takes, and by what it sleeps, which takes no
// time. So a busy machine stops neither: what others do between two readings is in none.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const long long kSecond = 1000000000;
static long long start[2];
static _Atomic long long slept;

static long long read_clock(clockid_t clock) {
  struct timespec time;
  syscall(SYS_clock_gettime, clock, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

static long long passed(void) { return read_clock(CLOCK_PROCESS_CPUTIME_ID) + slept; }

static long long at_fork;
static void before_fork(void) { at_fork = passed(); }
// Its processor time begins at zero again.
static void in_child(void) { slept = at_fork; }

__attribute__((constructor)) static void begin(void) {
  start[CLOCK_REALTIME] = read_clock(CLOCK_REALTIME);
  start[CLOCK_MONOTONIC] = read_clock(CLOCK_MONOTONIC);
  pthread_atfork(before_fork, NULL, in_child);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  if (clock != CLOCK_REALTIME && clock != CLOCK_MONOTONIC) return (int)syscall(SYS_clock_gettime, clock, time);
  const long long now = start[clock] + passed();
  time->tv_sec = now / kSecond;
  time->tv_nsec = now % kSecond;
  return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *rest) {
  (void)rest;
  const long long given = time->tv_sec * kSecond + time->tv_nsec;
  const long long left = flags & TIMER_ABSTIME ? given - start[clock] - passed() : given;
  if (left > 0) slept += left;
  return 0;
}

// A thread waits for the interpreter's lock up to a moment, which the pretended clock says: by the real one, which is
// further, it is over, and the thread would ask for the lock without end.
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (wait == NULL) *(void **)&wait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  const long long behind = read_clock(CLOCK_MONOTONIC) - start[CLOCK_MONOTONIC] - passed();
  const long long real = until->tv_sec * kSecond + until->tv_nsec + behind;
  const struct timespec time = {real / kSecond, real % kSecond};
  return wait(condition, mutex, &time);
}

// By which CPython 3.10 sleeps.
int select(int count, fd_set *reads, fd_set *writes, fd_set *others, struct timeval *time) {
  if (count == 0 && time != NULL) {
    slept += time->tv_sec * kSecond + time->tv_usec * 1000;
    return 0;
  }
  struct timespec limit = {time != NULL ? time->tv_sec : 0, time != NULL ? time->tv_usec * 1000 : 0};
  return (int)syscall(SYS_pselect6, count, reads, writes, others, time != NULL ? &limit : NULL, NULL);
}
