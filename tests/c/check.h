/* A small test harness. A check that fails prints what went wrong and is counted, and the test
 * goes on. main returns finish(). */
#ifndef CHECK_H
#define CHECK_H

#include <devicemesh.h>
#include <hostccl.h>

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int failures;

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      ++failures; \
      fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, dm_last_error()); \
    } \
  } while (0)

/* Checks that a call returns this status. */
#define GIVES(expected, call) \
  do { \
    dm_status status_ = (call); \
    if (status_ != (expected)) { \
      ++failures; \
      fprintf(stderr, "%s:%d: %s gives %s, expected %s (last error: %s)\n", __FILE__, __LINE__, #call, \
              dm_status_name(status_), dm_status_name(expected), dm_last_error()); \
    } \
  } while (0)

#define OK(call) GIVES(DM_STATUS_OK, call)

/* Checks that a call fails with this status, and that its message is one line that contains this
 * text. */
#define FAILS(expected, text, call) \
  do { \
    GIVES(expected, call); \
    if (strstr(dm_last_error(), text) == NULL || strchr(dm_last_error(), '\n') != NULL) { \
      ++failures; \
      fprintf(stderr, "%s:%d: the message of %s is not one line with \"%s\": %s\n", __FILE__, __LINE__, #call, text, \
              dm_last_error()); \
    } \
  } while (0)

/* Checks a call without which the rest of the test makes no sense. A failure ends the process. */
#define REQUIRE(call) \
  do { \
    dm_status status_ = (call); \
    if (status_ != DM_STATUS_OK) { \
      fprintf(stderr, "%s:%d: %s gives %s: %s\n", __FILE__, __LINE__, #call, dm_status_name(status_), dm_last_error()); \
      exit(1); \
    } \
  } while (0)

/* How many times longer everything takes than without valgrind or a sanitizer. `make gates` sets
 * DM_TEST_SLOWNESS. */
static inline double slowness(void)
{
  const char *text = getenv("DM_TEST_SLOWNESS");
  return text == NULL ? 1 : atof(text);
}

/* The clock for upper bounds on time. Its seconds are longer under DM_TEST_SLOWNESS. */
static inline double seconds_now(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return ((double)now.tv_sec + 1e-9 * (double)now.tv_nsec) / slowness();
}

/* A moment, and how long each thread of this process had waited for a processor by then. The kernel's
 * schedstat says so, where it exists. The clock is read before and after the times of the threads
 * are read. */
typedef struct moment {
  double before, after;
  size_t count;
  struct {
    long tid;
    double waited;
  } threads[64];
} moment;

static inline moment moment_now(void)
{
  moment now;
  now.before = seconds_now();
  now.count = 0;
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *task; tasks != NULL && now.count < 64 && (task = readdir(tasks)) != NULL;) {
    const long tid = atol(task->d_name);
    unsigned long long ran = 0, waited = 0;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%ld/schedstat", tid);
    FILE *file = tid > 0 ? fopen(path, "r") : NULL;
    if (file == NULL) continue;
    if (fscanf(file, "%llu %llu", &ran, &waited) == 2) {
      now.threads[now.count].tid = tid;
      now.threads[now.count++].waited = 1e-9 * (double)waited;
    }
    fclose(file);
  }
  if (tasks != NULL) closedir(tasks);
  now.after = seconds_now();
  return now;
}

/* The seconds between two moments, without those for which two threads waited for a processor: the
 * two that waited longest, of those that live at the second moment. An abort and the call that it
 * ends run on two threads, one after the other. A test compares the result with an upper bound that
 * is a promise. */
static inline double own_seconds_between(const moment *first, const moment *second)
{
  double longest = 0, second_longest = 0;
  for (size_t at = 0; at < second->count; ++at) {
    double waited = second->threads[at].waited;
    for (size_t was = 0; was < first->count; ++was) {
      if (first->threads[was].tid == second->threads[at].tid) waited -= first->threads[was].waited;
    }
    if (waited > longest) {
      second_longest = longest;
      longest = waited;
    } else if (waited > second_longest) {
      second_longest = waited;
    }
  }
  const double own = second->before - first->after - (longest + second_longest) / slowness();
  return own > 0 ? own : 0;
}

static inline double own_seconds_since(const moment *first)
{
  const moment now = moment_now();
  return own_seconds_between(first, &now);
}

/* Checks that a call comes to return this status soon. On several hosts, the news of a failure on
 * another rank may be on the way for a moment. */
#define COMES_TO_GIVE(expected, call) \
  do { \
    const struct timespec pause_ = {0, 1000000}; \
    const double until_ = seconds_now() + 10; \
    while ((call) != (expected) && seconds_now() < until_) nanosleep(&pause_, NULL); \
    GIVES(expected, call); \
  } while (0)

static inline int32_t rank_of(const dm_mesh *mesh)
{
  int32_t rank = -1;
  REQUIRE(dm_rank(mesh, &rank));
  return rank;
}

/* Makes a mesh whose timeout is short. On a busy machine, or under valgrind, all ranks may run into
 * the deadline here, and all try again. */
static inline dm_mesh *made_in_time(const char *device, const int32_t *shape, size_t ndim, const char *const *names,
                                    const dm_init_options *options)
{
  dm_mesh *mesh = NULL;
  for (int attempt = 0; attempt < 20 && mesh == NULL; ++attempt) {
    const dm_status status = dm_init(device, shape, ndim, names, options, &mesh);
    if (status != DM_STATUS_TIMEOUT) REQUIRE(status);
  }
  if (mesh == NULL) REQUIRE(DM_STATUS_TIMEOUT);
  return mesh;
}

static inline dm_mesh *slice1(const dm_mesh *mesh, const char *name)
{
  dm_mesh *view = NULL;
  REQUIRE(dm_slice(mesh, &name, 1, &view));
  return view;
}

/* Returns when all ranks of the mesh, which has several dimensions, have called it, because
 * dm_flatten of several dimensions is an agreement. A rank that has its result of a collective may
 * otherwise exit or abort while other ranks still wait for theirs, and these then fail. */
static inline void meet(const dm_mesh *mesh)
{
  dm_mesh *flat = NULL;
  REQUIRE(dm_flatten(mesh, "met", NULL, &flat));
  dm_free(flat);
}

static inline const char *describe(const dm_mesh *mesh)
{
  static char text[512];
  size_t length = 0;
  REQUIRE(dm_describe(mesh, text, sizeof text, &length));
  return text;
}

static inline int finish(void)
{
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures > 0;
}

#endif
