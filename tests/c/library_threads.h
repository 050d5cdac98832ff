/* Looks at every thread that starts in this process. The program's own pthread_create stands in
 * front of the C library's, so no thread is missed, however short it lives. A library's thread has
 * a name that begins with "dm-" and handles none of the program's signals. */
#ifndef LIBRARY_THREADS_H
#define LIBRARY_THREADS_H

#include "check.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { kMostThreads = 1024 };

typedef struct looked_at {
  void *(*start)(void *);
  void *argument;
  int ended;
  char name[32];
  /* Blocked signals, bit 0 for signal 1: before the thread's first instruction of its own, and at
   * its end as /proc has them. */
  unsigned long long first, last;
} looked_at;

static looked_at threads_seen[kMostThreads];
static int thread_count;
/* Whether the thread that is being started belongs to the program. The calling thread sets it. */
static __thread int starts_own_thread;

static void read_about_thread(const char *file, const char *format, void *value)
{
  char path[64], line[256];
  snprintf(path, sizeof path, "/proc/self/task/%ld/%s", (long)syscall(SYS_gettid), file);
  FILE *about = fopen(path, "r");
  while (about != NULL && fgets(line, sizeof line, about) != NULL && sscanf(line, format, value) != 1) continue;
  if (about != NULL) fclose(about);
}

static void *look_at_thread(void *data)
{
  looked_at *self = (looked_at *)data;
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  for (int number = 1; number <= 64; ++number)
    if (sigismember(&blocked, number) == 1) self->first |= 1ULL << (number - 1);
  void *result = self->start(self->argument);
  read_about_thread("comm", "%31[^\n]", self->name);
  read_about_thread("status", "SigBlk: %llx", &self->last);
  __atomic_store_n(&self->ended, 1, __ATOMIC_SEQ_CST);
  return result;
}

typedef int create_thread(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

#ifdef __cplusplus
extern "C" {
#define NO_EXCEPTION noexcept
#else
#define NO_EXCEPTION
#endif
/* The sanitizer's own function, because a sanitizer must know every thread. */
create_thread __interceptor_pthread_create __attribute__((weak));

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) NO_EXCEPTION
{
  create_thread *next = __interceptor_pthread_create;
  if (next == NULL) *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
  const int at = starts_own_thread ? kMostThreads : __atomic_fetch_add(&thread_count, 1, __ATOMIC_SEQ_CST);
  if (at >= kMostThreads) return next(thread, attributes, start, argument);
  threads_seen[at].start = start;
  threads_seen[at].argument = argument;
  const int code = next(thread, attributes, look_at_thread, &threads_seen[at]);
  if (code != 0) threads_seen[at].start = NULL;
  return code;
}
#ifdef __cplusplus
}
#endif

/* Every signal but those that cannot be blocked, those that the C library (32, 33) and valgrind
 * (64) keep for themselves, and faults of the thread itself. */
static inline unsigned long long program_signals(void)
{
  const int others[] = {SIGKILL, SIGSTOP, 32, 33, 64, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
  unsigned long long all = ~0ULL;
  for (size_t at = 0; at < sizeof others / sizeof *others; ++at) all &= ~(1ULL << (others[at] - 1));
  return all;
}

/* Checks the library's threads that have ended; threads that are about to end are waited for. A
 * thread that is left behind in another library does not end. */
static inline void check_library_threads(int wait_for_all)
{
  const unsigned long long wanted = program_signals();
  const double patience = seconds_now() + 30;
  const int count = __atomic_load_n(&thread_count, __ATOMIC_SEQ_CST);
  CHECK(count <= kMostThreads);
  for (int at = 0; at < count && at < kMostThreads; ++at) {
    const looked_at *thread = &threads_seen[at];
    while (wait_for_all && thread->start != NULL && !__atomic_load_n(&thread->ended, __ATOMIC_SEQ_CST) &&
           seconds_now() < patience)
      usleep(1000);
    if (!__atomic_load_n(&thread->ended, __ATOMIC_SEQ_CST)) {
      if (wait_for_all && thread->start != NULL) {
        ++failures;
        fprintf(stderr, "a thread of the library has not ended\n");
      }
      continue;
    }
    if (strncmp(thread->name, "dm-", 3) != 0 || strlen(thread->name) > 15 || (thread->first & wanted) != wanted ||
        (thread->last & wanted) != wanted) {
      ++failures;
      fprintf(
          stderr,
          "a thread of the library is named \"%s\" and blocks the signals %#llx, at its start %#llx; expected \"dm-...\" and %#llx\n",
          thread->name, thread->last, thread->first, wanted);
    }
  }
}

/* Whether the library has had a thread of that name, which has ended. */
static inline int has_had_thread(const char *name)
{
  for (int at = 0; at < thread_count && at < kMostThreads; ++at)
    if (__atomic_load_n(&threads_seen[at].ended, __ATOMIC_SEQ_CST) && strcmp(threads_seen[at].name, name) == 0) return 1;
  return 0;
}

#endif
