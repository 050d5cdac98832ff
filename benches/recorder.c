/* Measures what the recording of calls costs. It makes the same calls in several builds of the
 * library, in turn, in the same processes. benches/recorder.py makes the builds and reads the
 * lines.
 *
 *     recorder RANKS ROUNDS CALLS SCRATCH CASE,... NAME=LIBRARY...
 *     recorder count CALLS SCRATCH LIBRARY
 *
 * Each rank is a process, which loads all libraries. A library with "off" in its name joins with
 * DM_RECORDER=0. A round makes a block of calls in each library, and rank 0 prints one line of JSON
 * for each block. `count` makes the calls on one rank in one library. An instruction counter runs
 * this command. */
#define _GNU_SOURCE
#include <devicemesh.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 8, WARM_UP = 64, LARGE = 16384 };

struct contestant {
  const char *name, *library;
  dm_status (*world_init)(const char *, const dm_world_options *, dm_world **);
  dm_status (*init)(const char *, const int32_t *, size_t, const char *const *, const dm_init_options *, dm_mesh **);
  dm_status (*all_reduce)(const dm_mesh *, const char *, const void *, void *, size_t, int32_t, int32_t, void *);
  dm_status (*send)(const dm_mesh *, const char *, const void *, size_t, int32_t, int32_t, void *);
  dm_status (*recv)(const dm_mesh *, const char *, void *, size_t, int32_t, int32_t, void *);
  dm_status (*finalize)(dm_mesh *, const dm_call_options *);
  void (*free)(dm_mesh *);
  void (*world_free)(dm_world *);
  const char *(*last_error)(void);
  dm_world *world;
  dm_mesh *mesh;
};

static int rank, ranks;
static float data[LARGE];

static void check(const struct contestant *in, dm_status status)
{
  if (status != DM_STATUS_OK) {
    fprintf(stderr, "%s: %s\n", in->name, in->last_error());
    exit(1);
  }
}

static int64_t now_ns(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void find(void *library, const char *symbol, void *function)
{
  void *found = dlsym(library, symbol);
  if (found == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  memcpy(function, &found, sizeof found);
}

static void join(struct contestant *one, const char *scratch)
{
  void *library = dlopen(one->library, RTLD_NOW | RTLD_LOCAL);
  char place[4096];
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  find(library, "dm_world_init", &one->world_init);
  find(library, "dm_init", &one->init);
  find(library, "dm_all_reduce", &one->all_reduce);
  find(library, "dm_send", &one->send);
  find(library, "dm_recv", &one->recv);
  find(library, "dm_finalize", &one->finalize);
  find(library, "dm_free", &one->free);
  find(library, "dm_world_free", &one->world_free);
  find(library, "dm_last_error", &one->last_error);
  snprintf(place, sizeof place, "file://%s/%s", scratch, one->name);
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  options.world_size = ranks;
  options.rank = rank;
  options.timeout_ms = 60000;
  options.init_method = place;
  if (strstr(one->name, "off") != NULL)
    setenv("DM_RECORDER", "0", 1);
  check(one, one->world_init("cpu", &options, &one->world));
  unsetenv("DM_RECORDER");
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  init.world = one->world;
  check(one, one->init("cpu", &ranks, 1, NULL, &init, &one->mesh));
}

/* Makes calls of a case. */
static void call(const struct contestant *in, const char *name, int calls)
{
  if (strcmp(name, "init") == 0) {
    dm_init_options options = DM_INIT_OPTIONS_INIT;
    options.world = in->world;
    for (int index = 0; index < calls; index++) {
      dm_mesh *mesh = NULL;
      check(in, in->init("cpu", &ranks, 1, NULL, &options, &mesh));
      in->free(mesh);
    }
    return;
  }
  if (strcmp(name, "send_recv") == 0) {
    for (int index = 0; index < calls && rank < 2; index++)
      for (int turn = 0; turn < 2; turn++)
        check(in, turn == rank ? in->send(in->mesh, NULL, data, 1, DM_FLOAT32, 1 - rank, NULL)
                               : in->recv(in->mesh, NULL, data, 1, DM_FLOAT32, 1 - rank, NULL));
    return;
  }
  const size_t count = strcmp(name, "all_reduce_large") == 0 ? LARGE : 1;
  for (int index = 0; index < calls; index++)
    check(in, in->all_reduce(in->mesh, NULL, data, data, count, DM_FLOAT32, DM_SUM, NULL));
}

static int calls_of(const char *name, int calls)
{
  const int fewer = strcmp(name, "init") == 0 ? 100 : strcmp(name, "all_reduce_large") == 0 ? 10 : 1;
  return calls / fewer > 0 ? calls / fewer : 1;
}

static void round_of(struct contestant *contestants, int count, const char *name, int number, int calls)
{
  for (int index = 0; index < count; index++) {
    /* Each library is the first of a round, the second and so on equally often. */
    const struct contestant *one = &contestants[(index + number) % count];
    const int many = calls_of(name, calls);
    call(one, "all_reduce", WARM_UP);
    call(one, name, many / 10 + 1);
    const int64_t began = now_ns();
    call(one, name, many);
    const int64_t ended = now_ns();
    if (rank == 0)
      printf("{\"case\": \"%s\", \"ranks\": %d, \"round\": %d, \"name\": \"%s\", \"ns\": %.3f}\n", name, ranks, number,
             one->name, (double)(ended - began) / many / (strcmp(name, "send_recv") == 0 ? 2 : 1));
  }
}

static int count_only(char **argv)
{
  struct contestant one = {.name = "counted", .library = argv[4]};
  ranks = 1;
  join(&one, argv[3]);
  call(&one, "all_reduce", atoi(argv[2]));
  one.finalize(one.mesh, NULL);
  return 0;
}

static int measure(int argc, char **argv)
{
  struct contestant contestants[MOST];
  int count = 0;
  memset(contestants, 0, sizeof contestants);
  for (int index = 6; index < argc && count < MOST; index++) {
    contestants[count].name = strtok(argv[index], "=");
    contestants[count++].library = strtok(NULL, "=");
  }
  for (int index = 0; index < count; index++)
    join(&contestants[index], argv[4]);
  for (const char *name = strtok(argv[5], ","); name != NULL; name = strtok(NULL, ","))
    for (int number = 0; number < atoi(argv[2]); number++)
      round_of(contestants, count, name, number, atoi(argv[3]));
  fflush(stdout);
  for (int index = 0; index < count; index++) {
    contestants[index].finalize(contestants[index].mesh, NULL);
    contestants[index].free(contestants[index].mesh);
    contestants[index].world_free(contestants[index].world);
  }
  return 0;
}

int main(int argc, char **argv)
{
  if (argc == 5 && strcmp(argv[1], "count") == 0)
    return count_only(argv);
  if (argc < 7) {
    fprintf(stderr, "usage: %s RANKS ROUNDS CALLS SCRATCH CASE,... NAME=LIBRARY...\n", argv[0]);
    return 2;
  }
  ranks = atoi(argv[1]);
  /* The last rank is this process, and rank 0 the first child. */
  for (rank = 0; rank < ranks - 1; rank++)
    if (fork() == 0)
      return measure(argc, argv);
  int code = measure(argc, argv), status;
  while (wait(&status) > 0)
    code |= !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  return code;
}
