/* The control plane over each kind of store, for worlds of three ranks. Where the ranks are
 * processes, a rank that is killed is reported as lost: over tcp:// by the store, and over file://
 * by the communicators of the mesh. Where the ranks are threads over a store of the caller, 2,000
 * calls leave no more keys there than 20 do. */
#include "check.h"
#include "free_port.h"
#include "store.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kRanks = 3 };

static dm_world *join(const dm_world_options *options, dm_mesh **mesh)
{
  dm_world *world = NULL;
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {kRanks};
  const char *names[] = {"all"};
  REQUIRE(dm_world_init("cpu", options, &world));
  init.world = world;
  REQUIRE(dm_init("cpu", shape, 1, names, &init, mesh));
  return world;
}

static void exchange(const dm_mesh *mesh, const dm_world *world, int32_t rank)
{
  const char *const words[kRanks] = {"zero", "", "a third word"};
  dm_buffers *all = NULL, *one = NULL, *of_world = NULL;
  const void *data = NULL;
  size_t length = 0;
  OK(dm_barrier(mesh, "all", 0));
  REQUIRE(dm_all_gather_bytes(mesh, NULL, words[rank], strlen(words[rank]), 0, &all));
  REQUIRE(dm_world_all_gather_bytes(world, words[rank], strlen(words[rank]), 0, &of_world));
  for (int32_t other = 0; other < kRanks; ++other) {
    OK(dm_buffers_get(all, (size_t)other, &data, &length));
    CHECK(strcmp((const char *)data, words[other]) == 0 && length == strlen(words[other]));
    OK(dm_buffers_get(of_world, (size_t)other, &data, &length));
    CHECK(strcmp((const char *)data, words[other]) == 0);
  }
  REQUIRE(dm_broadcast_bytes(mesh, NULL, "seed", 4, 2, 0, &one));
  OK(dm_buffers_get(one, 0, &data, &length));
  CHECK(strcmp((const char *)data, "seed") == 0);
  dm_buffers_free(all);
  dm_buffers_free(of_world);
  dm_buffers_free(one);
}

/* ---- processes, one of which is killed ---- */

static void one_process(const char *method, int32_t rank)
{
  static char large[3 << 20];
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_error_info info = DM_ERROR_INFO_INIT;
  dm_mesh *mesh = NULL;
  dm_buffers *all = NULL;
  const int over_served_store = strncmp(method, "tcp", 3) == 0;
  options.world_size = kRanks;
  options.rank = rank;
  options.local_rank = rank;
  options.timeout_ms = 120000;
  options.init_method = method;
  dm_world *world = join(&options, &mesh);
  for (int round = 0; round < 3; ++round) exchange(mesh, world, rank);
  REQUIRE(dm_all_gather_bytes(mesh, NULL, large, rank == 1 ? sizeof large : 0, 0, &all));
  dm_buffers_free(all);
  if (rank == 2) raise(SIGKILL);
  const double began = seconds_now();
  FAILS(DM_STATUS_PEER_LOST, "rank 2", over_served_store ? dm_barrier(mesh, NULL, 0) : dm_all_gather_bytes(mesh, NULL, "x", 1, 0, &all));
  OK(dm_last_error_info(&info));
  CHECK(info.num_lost == 1 && info.lost_ranks[0] == 2 && info.dim != NULL && strcmp(info.dim, "all") == 0);
  CHECK(seconds_now() - began < 60); /* the deadline is at 120 s */
  dm_free(mesh);
  dm_world_free(world);
}

static void as_processes(const char *method)
{
  pid_t children[kRanks];
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    children[rank] = fork();
    if (children[rank] == 0) {
      failures = 0;
      one_process(method, rank);
      _exit(failures > 0);
    }
  }
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    int status = -1;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    if (rank == 2) CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    else CHECK(status == 0);
  }
}

/* ---- threads over a store of the caller's ---- */

static size_t most_after_few, most_after_many;

static void *one_thread(void *data)
{
  dm_mesh *mesh = NULL;
  const int32_t rank = ((const dm_world_options *)data)->rank;
  dm_world *world = join((const dm_world_options *)data, &mesh);
  for (int call = 0; call < 500; ++call) { /* four calls in each round */
    exchange(mesh, world, rank);
    if (rank == 0 && (call == 5 || call == 499)) {
      pthread_mutex_lock(&lock);
      *(call == 5 ? &most_after_few : &most_after_many) = most;
      pthread_mutex_unlock(&lock);
    }
  }
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(world);
  return NULL;
}

static void as_threads(void)
{
  pthread_t threads[kRanks];
  dm_world_options options[kRanks];
  dm_store_callbacks callbacks = store_callbacks();
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    const dm_world_options defaults = DM_WORLD_OPTIONS_INIT;
    options[rank] = defaults;
    options[rank].world_size = kRanks;
    options[rank].rank = rank;
    options[rank].local_rank = rank;
    options[rank].timeout_ms = 120000;
    options[rank].store = &callbacks;
    if (pthread_create(&threads[rank], NULL, one_thread, &options[rank]) != 0) exit(1);
  }
  for (int32_t rank = 0; rank < kRanks; ++rank) pthread_join(threads[rank], NULL);
  /* The ranks are not in step, so a few keys more or less stand there at each moment. */
  if (most_after_many > most_after_few + 20)
    fprintf(stderr, "%zu keys at most in 2,000 calls, %zu in 24\n", most_after_many, most_after_few);
  CHECK(most_after_few > 0 && most_after_many <= most_after_few + 20);
}

int main(void)
{
  char method[256], command[300];
  /* The processes come first, because only a process without threads should fork. */
  snprintf(method, sizeof method, "tcp://localhost:%d", free_port());
  as_processes(method);
  const char *folder = getenv("DM_TMP") != NULL ? getenv("DM_TMP") : "/tmp";
  snprintf(method, sizeof method, "file://%s/control-%d", folder, (int)getpid());
  as_processes(method);
  as_threads();
  snprintf(command, sizeof command, "rm -rf '%s'.devicemesh", method + strlen("file://"));
  CHECK(system(command) == 0);
  return finish();
}
