/* Calls that block in a thread of their own, and how soon after an abort they return. */
#ifndef BLOCKED_H
#define BLOCKED_H

#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { kTries = 5 };

/* The seconds from the start of the abort to the return of the call, without those for which the
 * threads of this process waited for a processor. The promise is 100 ms. A machine may stop all its
 * programs for a moment, so one try may take longer. The median over the tries does not depend on
 * one such moment. */
static const double kUsual = 0.1, kLongest = 0.25;

typedef struct blocked {
  dm_status (*call)(void *data);
  void *data;
  pthread_t thread;
  long tid;
  dm_status status;
  char message[512];
  moment returned;
} blocked;

static inline void pause_ms(long millis)
{
  struct timespec pause = {millis / 1000, millis % 1000 * 1000000};
  nanosleep(&pause, NULL);
}

static inline void *run_blocked(void *data)
{
  blocked *self = (blocked *)data;
  __atomic_store_n(&self->tid, syscall(SYS_gettid), __ATOMIC_SEQ_CST);
  self->status = self->call(self->data);
  self->returned = moment_now();
  snprintf(self->message, sizeof self->message, "%s", self->status == DM_STATUS_OK ? "" : dm_last_error());
  __atomic_store_n(&self->tid, -1, __ATOMIC_SEQ_CST);
  return NULL;
}

/* Whether a thread of this process sleeps, as /proc says. */
static inline int sleeps(long tid)
{
  char path[64], line[256] = "";
  snprintf(path, sizeof path, "/proc/self/task/%ld/stat", tid);
  FILE *file = fopen(path, "r");
  if (file == NULL) return 0;
  const char *state = fgets(line, sizeof line, file) == NULL ? NULL : strrchr(line, ')');
  fclose(file);
  return state != NULL && state[1] != '\0' && state[2] == 'S';
}

/* Starts a call. Returns when the thread of the call has slept for a while, which means that the
 * call waits for another rank. */
static inline void start_blocked(blocked *self, dm_status (*call)(void *), void *data)
{
  memset(self, 0, sizeof *self);
  self->call = call;
  self->data = data;
  if (pthread_create(&self->thread, NULL, run_blocked, self) != 0) exit(1);
  const double patience = seconds_now() + 30;
  for (int asleep = 0; asleep < 20; pause_ms(2)) {
    const long tid = __atomic_load_n(&self->tid, __ATOMIC_SEQ_CST);
    asleep = tid > 0 && sleeps(tid) ? asleep + 1 : 0;
    if (tid < 0 || seconds_now() > patience) {
      fprintf(stderr, "a call that should block gave %s: %s\n", dm_status_name(self->status), self->message);
      exit(1);
    }
  }
}

/* Waits until the call has returned. */
static inline void join_blocked(blocked *self)
{
  pthread_join(self->thread, NULL);
}

/* Does what join_blocked does, and gives this process's own seconds since `began`. */
static inline double end_blocked(blocked *self, const moment *began)
{
  join_blocked(self);
  return own_seconds_between(began, &self->returned);
}

static inline int compare_times(const void *a, const void *b)
{
  const double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

static inline void check_times(const char *what, double times[kTries])
{
  qsort(times, kTries, sizeof *times, compare_times);
  printf("%s: median %.1f ms, longest %.1f ms\n", what, 1e3 * times[kTries / 2], 1e3 * times[kTries - 1]);
  if (times[kTries / 2] >= kUsual || times[kTries - 1] >= kLongest) {
    ++failures;
    fprintf(stderr, "%s: an abort woke it after %.1f ms (median) and %.1f ms (longest)\n", what, 1e3 * times[kTries / 2],
            1e3 * times[kTries - 1]);
  }
}

#endif
