/* ranks: 2 */
/* One communicator has one order of issue, whatever the threads of a rank do. Every round has two
 * threads with two names that share a communicator, with single calls and with groups: every number
 * is right. Then two threads have one name, on a communicator that blocks and on one that does not:
 * the calls overlap, and all of them are refused. DM_ORDER_ROUNDS sets the number of rounds
 * (tests/test_order.py has 1,000, beside other load). */
#include "check.h"

#include <pthread.h>

enum { kTurns = 8, kCount = 300 };

static dm_world *world;
static int32_t rank;
static dm_init_options options = DM_INIT_OPTIONS_INIT;

typedef struct caller {
  const dm_mesh *mesh;
  const char *dim;
  int value, in_groups, round;
} caller;

/* Sums whose right values no other name has. */
static void *calls(void *data)
{
  const caller *self = (const caller *)data;
  int32_t first[kCount], second[kCount];
  for (int turn = 0; turn < kTurns; ++turn) {
    const int32_t mine = self->value + 10 * turn;
    const size_t count = (size_t)(1 + (turn * 37 + self->round * 11 + self->value) % kCount);
    for (size_t at = 0; at < count; ++at) first[at] = second[at] = mine + rank;
    if (self->in_groups) OK(dm_group_start(self->mesh));
    OK(dm_all_reduce(self->mesh, self->dim, first, first, count, DM_INT32, DM_SUM, NULL));
    if (self->in_groups) {
      OK(dm_all_reduce(self->mesh, self->dim, second, second, count, DM_INT32, DM_MAX, NULL));
      OK(dm_group_end(self->mesh));
    }
    size_t wrong = 0;
    for (size_t at = 0; at < count; ++at) wrong += first[at] != 2 * mine + 1 || (self->in_groups && second[at] != mine + 1);
    CHECK(wrong == 0);
  }
  return NULL;
}

static void two_names(const dm_mesh *mesh, const dm_mesh *flat, int round)
{
  caller callers[2] = {{mesh, "x", 1, round & 1, round}, {flat, "all", 100000, round >> 1 & 1, round}};
  pthread_t threads[2];
  for (int at = 0; at < 2; ++at) CHECK(pthread_create(&threads[at], NULL, calls, &callers[(at + rank + round) % 2]) == 0);
  for (int at = 0; at < 2; ++at) CHECK(pthread_join(threads[at], NULL) == 0);
}

static void *refused(void *mesh)
{
  int32_t value = 1;
  const dm_status status = dm_all_reduce((const dm_mesh *)mesh, "x", &value, &value, 1, DM_INT32, DM_SUM, NULL);
  CHECK(status == DM_STATUS_MISMATCH && strstr(dm_last_error(), "at the same time") != NULL);
  return NULL;
}

/* Both threads of rank 0 are inside before rank 1 comes, so the overlap is certain. */
static void one_name(int is_blocking)
{
  const int32_t shape[] = {2};
  const char *names[] = {"x"};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  dm_dim_options dim = DM_DIM_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  config.blocking = is_blocking;
  dim.flags = DM_DIM_OWN_COMM;
  dim.nccl_config = &config;
  options.dim_options = &dim;
  options.num_dim_options = 1;
  REQUIRE(dm_init("cpu", shape, 1, names, &options, &mesh));
  options.dim_options = NULL;
  options.num_dim_options = 0;
  caller alone = {mesh, "x", 5, 0, 0};
  calls(&alone);
  if (rank == 0) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, refused, mesh) == 0);
    refused(mesh);
    CHECK(pthread_join(thread, NULL) == 0);
  }
  REQUIRE(dm_world_barrier(world, 0));
  if (rank == 1) refused(mesh);
  OK(dm_abort(mesh));
  dm_free(mesh);
}

int main(void)
{
  const char *wanted = getenv("DM_ORDER_ROUNDS");
  const int rounds = wanted == NULL ? 20 : atoi(wanted);
  const int32_t shape[] = {2, 1};
  const char *names[] = {"x", "one"};
  dm_mesh *mesh = NULL, *flat = NULL;
  ncclComm_t along_x = NULL, along_all = NULL;
  REQUIRE(dm_world_init("cpu", NULL, &world));
  REQUIRE(dm_world_rank(world, &rank));
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  OK(dm_get_comm(mesh, "x", &along_x));
  OK(dm_get_comm(flat, "all", &along_all));
  CHECK(along_x == along_all);
  for (int round = 0; round < rounds && failures == 0; ++round) {
    two_names(mesh, flat, round);
    if (round % 10 == 0) one_name(round % 20 == 0);
  }
  OK(dm_world_finalize(world, 0));
  dm_free(flat);
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
