/* One rank of four, of which one stops (SIGSTOP) or ends in the middle of a collective call
 * (tests/test_lost_ranks.py). The arguments are the case and the rank that stops or ends. The other
 * ranks have an error that names that rank, at their deadline or at once, and nothing is left of
 * what they made. */
#include "blocked.h"

#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>

enum { kRanks = 4 };
static const int32_t kShape[] = {2, 2}, kLine[] = {kRanks};
static const char *const kNames[] = {"dp", "tp"};

static dm_world *world, *sync_world;
static dm_init_options options = DM_INIT_OPTIONS_INIT;
static dm_mesh *mesh;
static int32_t rank, victim, pids[kRanks];
static void (*stall_at)(const char *function, int calls, int stops);
static void (*run_at)(const char *function, void (*first)(void), int then_fails);

/* How many descriptors and mappings of communicators this process has. */
static void count_left(int *descriptors, int *mappings)
{
  char path[512], target[256], line[1024];
  *descriptors = *mappings = 0;
  DIR *folder = opendir("/proc/self/fd");
  for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
    snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
    const ssize_t length = readlink(path, target, sizeof target - 1);
    target[length < 0 ? 0 : length] = '\0';
    *descriptors += strncmp(target, "/memfd:hostccl", 14) == 0;
  }
  closedir(folder);
  FILE *maps = fopen("/proc/self/maps", "r");
  while (fgets(line, sizeof line, maps) != NULL) *mappings += strstr(line, "/memfd:hostccl") != NULL;
  fclose(maps);
}

static dm_status init(void *none)
{
  (void)none;
  return dm_init("cpu", kShape, 2, kNames, &options, &mesh);
}

static dm_status flatten(void *none)
{
  (void)none;
  dm_mesh *view = NULL;
  return dm_flatten(mesh, "all", NULL, &view);
}

static dm_status unflatten(void *none)
{
  (void)none;
  /* These groups differ from those of dp and tp, so a new communicator must be split. */
  const int32_t sizes[] = {2, 2};
  const char *names[] = {"x", "y"};
  dm_mesh *line = NULL, *view = NULL;
  dm_dim_options own[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  own[0].flags = own[1].flags = DM_DIM_OWN_COMM;
  dm_call_options apart = DM_CALL_OPTIONS_INIT;
  apart.dim_options = own;
  apart.num_dim_options = 2;
  const char *all = "all";
  REQUIRE(dm_slice(mesh, &all, 1, &line));
  return dm_unflatten(line, "all", sizes, 2, names, &apart, &view);
}

static dm_status finalize(void *none)
{
  (void)none;
  return dm_finalize(mesh, NULL);
}

static dm_status get_comm(void *none)
{
  (void)none;
  ncclComm_t comm = NULL;
  return dm_get_comm(mesh, "tp", &comm);
}

static dm_status all_reduce(void *none)
{
  (void)none;
  float one = 1, sum = 0;
  return dm_all_reduce(mesh, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
}

static dm_status barrier(void *none)
{
  (void)none;
  return dm_world_barrier(world, options.timeout_ms);
}

/* Each case: the call that the ranks make, what they make before it, and where the victim stops.
 * The place is a call of a library function, or "" for a stop before the victim makes the call. */
static const struct {
  const char *name;
  dm_status (*call)(void *);
  bool has_mesh, lazy;
  const char *at;
  int calls;
} kinds[] = {{"barrier", barrier, false, false, "", 0},
             {"init", init, false, false, "", 0},
             {"init-id", init, false, false, "hostcclGetUniqueIdFor", 0},
             {"init-root", init, false, false, "ncclCommInitRankConfig", 0},
             {"init-split", init, false, false, "ncclCommSplit", 0},
             {"init-second-split", init, false, false, "ncclCommSplit", 1},
             {"flatten", flatten, true, false, "", 0},
             {"unflatten-split", unflatten, true, false, "ncclCommSplit", 0},
             {"finalize", finalize, true, false, "", 0},
             {"finalize-flush", finalize, true, false, "ncclCommFinalize", 0},
             {"finalize-destroy", finalize, true, false, "ncclCommDestroy", 1},
             {"lazy", get_comm, true, true, "", 0},
             {"lazy-id", get_comm, true, true, "hostcclGetUniqueIdFor", 0},
             {"lazy-init", get_comm, true, true, "ncclCommInitRankConfig", 0},
             {"all-reduce", all_reduce, true, false, "", 0}};

static int kind_of(const char *name)
{
  for (int kind = 0; kind < (int)(sizeof kinds / sizeof *kinds); ++kind) {
    if (strcmp(kinds[kind].name, name) == 0) return kind;
  }
  fprintf(stderr, "no kind %s\n", name);
  exit(2);
}

/* The others go on when the victim has stopped (its state in /proc is T). */
static void wait_until_stopped(void)
{
  char path[64], line[256];
  const double patience = seconds_now() + 30;
  for (const char *state = NULL; state == NULL || state[1] == '\0' || state[2] != 'T'; pause_ms(1)) {
    snprintf(path, sizeof path, "/proc/%d/stat", pids[victim]);
    FILE *file = fopen(path, "r");
    state = file != NULL && fgets(line, sizeof line, file) != NULL ? strrchr(line, ')') : NULL;
    if (file != NULL) fclose(file);
    if (seconds_now() > patience) {
      fprintf(stderr, "rank %d never stopped\n", victim);
      exit(1);
    }
  }
}

/* Whether a message says that the victim is missing. */
static bool names_victim(const char *message)
{
  static const char *const ways[] = {"never called", "did not come", "did not publish", "did not get through", "was lost"};
  char text[64];
  for (size_t way = 0; way < sizeof ways / sizeof *ways; ++way) {
    snprintf(text, sizeof text, "rank %d %s", victim, ways[way]);
    if (strstr(message, text) != NULL) return true;
  }
  /* The host engine's message also has the victim's rank in the communicator. */
  snprintf(text, sizeof text, "rank %d (rank ", victim);
  return strstr(message, text) != NULL && strstr(message, "did not come") != NULL;
}

/* Makes the call in which the victim stops. On the others it must return by the deadline. */
static void stop_one(int kind)
{
  const double seconds = 1e-3 * (double)options.timeout_ms;
  /* In a lazy dimension only the victim's own group, ranks 0 and 1 or 2 and 3, waits for it. */
  const bool needs_it = !(kinds[kind].lazy || kinds[kind].call == all_reduce) || rank / 2 == victim / 2;
  if (rank == victim) {
    if (kinds[kind].at[0] == '\0') raise(SIGSTOP);
    else stall_at(kinds[kind].at, kinds[kind].calls, 1);
    const dm_status status = kinds[kind].call(NULL); /* its peers have given up, and the error says so */
    CHECK(status == DM_STATUS_TIMEOUT || status == DM_STATUS_PEER_LOST);
  } else if (needs_it) {
    if (kinds[kind].at[0] == '\0') wait_until_stopped();
    const moment began = moment_now();
    const dm_status status = kinds[kind].call(NULL);
    const double took = own_seconds_since(&began);
    printf("%s: %s after %.0f ms: %s\n", kinds[kind].name, dm_status_name(status), 1e3 * took, dm_last_error());
    CHECK(status == DM_STATUS_TIMEOUT || status == DM_STATUS_PEER_LOST);
    CHECK(names_victim(dm_last_error()));
    CHECK(took < 1.1 * seconds + 0.25);
    wait_until_stopped();
  }
  if (rank == (victim ^ 1)) { /* this rank needs the victim in every case */
    pause_ms(options.timeout_ms / 2); /* all ranks are late by then */
    kill(pids[victim], SIGCONT);
  }
}

static void end_here(void) { _exit(0); }

/* Waits until the process of the victim is gone. Its parent, the tool, takes its number away. */
static void wait_until_gone(void)
{
  const double patience = seconds_now() + 30;
  while (kill(pids[victim], 0) == 0 && seconds_now() < patience) pause_ms(1);
}

/* Rank 0 ends when the others have its unique id, and they join when it is gone. Their own failure
 * is a consequence of that death: rank 0 held the memory that the id names. With `then_fails` their
 * library fails without naming anybody. */
static void end_before_the_others_join(bool then_fails)
{
  run_at("ncclCommInitRankConfig", rank == victim ? end_here : wait_until_gone, rank != victim && then_fails);
  GIVES(DM_STATUS_PEER_LOST, init(NULL));
  printf("%s\n", dm_last_error());
  CHECK(names_victim(dm_last_error()));
}

/* dm_abort and dm_world_abort while a communicator is being made. The victim stops inside the
 * call, another rank waits in it and aborts, and the remaining ranks get PEER_LOST. */
static void abort_in_the_middle(bool of_world)
{
  const int aborter = (victim + 1) % kRanks;
  dm_status (*call)(void *) = of_world ? init : unflatten;
  if (rank == victim) stall_at(of_world ? "ncclCommInitRankConfig" : "ncclCommSplit", 0, 1);
  if (rank != aborter) {
    GIVES(DM_STATUS_PEER_LOST, call(NULL));
    return;
  }
  blocked one;
  start_blocked(&one, call, NULL);
  wait_until_stopped();
  pause_ms(20);
  const moment began = moment_now();
  OK(of_world ? dm_world_abort(world) : dm_abort(mesh));
  const double took = end_blocked(&one, &began);
  printf("woken after %.1f ms with %s: %s\n", 1e3 * took, dm_status_name(one.status), one.message);
  CHECK(took < kLongest && one.status == DM_STATUS_ABORTED);
  kill(pids[victim], SIGCONT);
}

int main(int count, char **arguments)
{
  if (count != 3) return 2;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_mesh *line = NULL;
  join.ccl_library = getenv("DM_CCL_LIBRARY");
  void *library = dlopen(join.ccl_library, RTLD_NOW);
  if (library == NULL) return 2;
  *(void **)&stall_at = dlsym(library, "stall_at");
  *(void **)&run_at = dlsym(library, "run_at");
  victim = atoi(arguments[2]);
  REQUIRE(dm_world_init("cpu", &join, &sync_world));
  REQUIRE(dm_world_init("cpu", &join, &world));
  options.world = sync_world;
  REQUIRE(dm_init("cpu", kLine, 1, NULL, &options, &line));
  rank = rank_of(line);
  const int32_t pid = getpid();
  REQUIRE(dm_all_gather(line, NULL, &pid, pids, 1, DM_INT32, NULL));

  int descriptors, mappings, descriptors_after, mappings_after;
  options.world = world;
  options.timeout_ms = 2000; /* what the ranks make before is made in the same time */
  count_left(&descriptors, &mappings);
  if (strcmp(arguments[1], "gone") == 0 || strcmp(arguments[1], "gone-failing") == 0) {
    end_before_the_others_join(strcmp(arguments[1], "gone-failing") == 0);
    dm_free(line);
    dm_world_free(world);
    dm_world_free(sync_world);
    return finish();
  }
  if (strcmp(arguments[1], "leaks") == 0) {
    /* One rank cannot take part, at every place in turn. */
    options.timeout_ms = 20000; /* no rank waits for a deadline here */
    static const struct { const char *at; int calls; } places[] = {
        {"ncclCommInitRankConfig", 0}, {"ncclCommSplit", 0}, {"ncclCommSplit", 1}, {"hostcclGetUniqueIdFor", 0}};
    for (int round = 0; round < 20; ++round) {
      const int place = round % 4;
      if (rank == (place == 3 ? 0 : victim)) stall_at(places[place].at, places[place].calls, 0);
      char text[64];
      snprintf(text, sizeof text, "rank %d failed in dm_init", place == 3 ? 0 : victim);
      FAILS(DM_STATUS_CCL, text, init(NULL));
    }
  } else if (strcmp(arguments[1], "unmade") == 0) {
    /* An eager mesh makes the communicators that a lazy mesh has planned, and one rank fails at
     * its second communicator. The lazy mesh is unchanged on all ranks. */
    dm_mesh *lazy = NULL;
    options.flags = DM_INIT_LAZY;
    REQUIRE(init(NULL));
    lazy = mesh;
    options.flags = 0;
    if (rank == victim) stall_at("ncclCommInitRankConfig", 1, 0);
    GIVES(DM_STATUS_CCL, init(NULL));
    for (int dim = 0; dim < 2; ++dim) {
      float one = 1, sum = 0;
      OK(dm_all_reduce(lazy, kNames[dim], &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      CHECK(sum == 2);
    }
    OK(dm_finalize(lazy, NULL));
  } else {
    const char *name = arguments[1];
    const bool of_world = strcmp(name, "world-abort") == 0, aborts = of_world || strcmp(name, "abort") == 0;
    const int kind = kind_of(of_world ? "init-root" : aborts ? "unflatten-split" : name);
    if (aborts) options.timeout_ms = 20000;
    if (kinds[kind].has_mesh) {
      options.flags = kinds[kind].lazy ? DM_INIT_LAZY : 0;
      REQUIRE(init(NULL));
      dm_mesh *flat = NULL;
      if (kinds[kind].call == unflatten) REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
      dm_free(flat);
    }
    REQUIRE(dm_world_barrier(sync_world, 0));
    if (aborts) abort_in_the_middle(of_world);
    else stop_one(kind);
    if (mesh != NULL) OK(dm_abort(mesh));
  }
  /* A background thread frees its memory a moment after it has reported that it is done. A rank
   * that made an id and then gave it up at its own deadline keeps that id's descriptor until it
   * makes the next id, so that later ranks read the reason. */
  int given_up = 0;
  const double patience = seconds_now() + 5;
  do {
    pause_ms(5);
    count_left(&descriptors_after, &mappings_after);
    given_up = rank == 0 && descriptors_after == descriptors + 1;
  } while (((descriptors_after != descriptors && !given_up) || mappings_after != mappings) && seconds_now() < patience);
  if ((descriptors_after != descriptors && !given_up) || mappings_after != mappings) {
    ++failures;
    fprintf(stderr, "%d descriptors and %d mappings before, %d and %d after\n", descriptors, mappings, descriptors_after, mappings_after);
  }
  OK(dm_world_barrier(sync_world, 0));
  dm_free(line);
  dm_free(mesh);
  dm_world_free(world);
  dm_world_free(sync_world);
  return finish();
}
