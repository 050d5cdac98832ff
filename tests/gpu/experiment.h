/* What the experiments of tests/gpu have in common: a call that may never return runs on a thread
 * of its own, and what was seen becomes a line for run.sh. */
#ifndef EXPERIMENT_H
#define EXPERIMENT_H

#include "gpu.h"

#include <pthread.h>
#include <stdarg.h>

/* One call on a thread of its own. The thread is left behind when the call does not return, so a
 * program with a trial ends by experiment_end(). */
typedef struct trial {
  const char *what;            /* the name of the trial in what was seen */
  dm_status (*call)(void *at); /* runs on the thread */
  void *at;                    /* its argument */
  double began, seconds;       /* how long the call took */
  dm_status status;            /* what the call returned */
  char message[1024];          /* dm_last_error() of the thread, "" after success */
  int has_ended;               /* read and written atomically, after all other fields */
} trial;

static inline void pause_ms(long millis)
{
  struct timespec pause = {millis / 1000, millis % 1000 * 1000000};
  nanosleep(&pause, NULL);
}

/* One line of what was seen, with this rank's number: run.sh puts it into results.md. */
static inline void seen(int32_t rank, const char *what, const char *format, ...)
{
  char text[1400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  printf("SEEN|%s|rank %d: %s\n", what, rank, text);
  fflush(stdout);
}

static inline void *trial_thread(void *at)
{
  trial *is = (trial *)at;
  device_attach();
  is->status = is->call(is->at);
  snprintf(is->message, sizeof is->message, "%s", is->status == DM_STATUS_OK ? "" : dm_last_error());
  is->seconds = seconds_now() - is->began;
  __atomic_store_n(&is->has_ended, 1, __ATOMIC_SEQ_CST);
  return NULL;
}

/* Waits until the trial has ended, or that many seconds; returns whether it has ended. */
static inline int trial_wait(trial *is, double seconds)
{
  const double until = seconds_now() + seconds;
  while (!__atomic_load_n(&is->has_ended, __ATOMIC_SEQ_CST) && seconds_now() < until) pause_ms(1);
  return __atomic_load_n(&is->has_ended, __ATOMIC_SEQ_CST);
}

/* Begins the call on a thread, waits so many seconds, and says what was seen. */
static inline int trial_run(trial *is, int32_t rank, double seconds)
{
  pthread_t thread;
  is->has_ended = 0;
  is->began = seconds_now();
  if (pthread_create(&thread, NULL, trial_thread, is) != 0) exit(1);
  pthread_detach(thread);
  if (!trial_wait(is, seconds)) {
    seen(rank, is->what, "had not returned after %.0f s", seconds);
    return 0;
  }
  seen(rank, is->what, "%s after %.3f s%s%s", dm_status_name(is->status), is->seconds, is->message[0] == '\0' ? "" : ": ", is->message);
  return 1;
}

/* The function of that name in the communicator library, or NULL; `at` is a function pointer. */
static inline int library_has(const dm_mesh *mesh, const char *name, void *at)
{
  void *address = NULL;
  const dm_status status = dm_get_proc(mesh, name, &address);
  memcpy(at, &address, sizeof address);
  return status == DM_STATUS_OK && address != NULL;
}

/* Ends the process without the handlers of exit: NCCL's would wait for a thread that is stuck. */
static inline void experiment_end(void)
{
  const int code = finish();
  fflush(NULL);
  _exit(code);
}

/* Ends the process as a case that cannot run here. */
static inline void experiment_skip(const char *why)
{
  printf("WHY=%s\n", why);
  fflush(NULL);
  _exit(77);
}

#endif
