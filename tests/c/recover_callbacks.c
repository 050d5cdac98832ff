/* dm_recover over a store of the caller's, for worlds of three ranks that are threads: with
 * compare_set the ranks that are left go on, again and again; without it the call is refused. */
#include "store.h"

enum { kRanks = 3 };

typedef struct {
  int32_t rank;
  const dm_store_callbacks *store;
  int decides;
} job;

static void holds(const dm_mesh *mesh, const int32_t *expected, size_t count)
{
  int32_t ranks[kRanks], gathered[kRanks];
  size_t length = 0;
  OK(dm_ranks(mesh, ranks, kRanks, &length));
  CHECK(length == count && memcmp(ranks, expected, count * sizeof *ranks) == 0);
  int32_t rank = -1;
  dm_world *world = NULL;
  OK(dm_get_world(mesh, &world));
  OK(dm_world_rank(world, &rank));
  OK(dm_all_gather(mesh, NULL, &rank, gathered, 1, DM_INT32, NULL));
  CHECK(memcmp(gathered, expected, count * sizeof *gathered) == 0);
  OK(dm_world_barrier(world, 0));
  dm_world_free(world);
}

static void *one_rank(void *data)
{
  const job *mine = (const job *)data;
  static const int32_t all[] = {0, 1, 2};
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *next = NULL;
  dm_recovery recovery = DM_RECOVERY_INIT;
  const int32_t shape[] = {kRanks};
  options.world_size = kRanks;
  options.rank = options.local_rank = mine->rank;
  options.timeout_ms = 60000;
  options.store = mine->store;
  REQUIRE(dm_world_init("cpu", &options, &init.world));
  REQUIRE(dm_init("cpu", shape, 1, NULL, &init, &mesh));
  holds(mesh, all, 3);
  for (size_t left = 3; left > 1 && mine->decides; --left) {
    /* The last rank ends its world, which is a loss for the others. */
    if ((size_t)mine->rank == left - 1) {
      OK(dm_world_abort(init.world));
      break;
    }
    CHECK(dm_barrier(mesh, NULL, 0) != DM_STATUS_OK);
    REQUIRE(dm_recover(mesh, NULL, &next, &recovery));
    dm_free(mesh);
    mesh = next;
    CHECK(recovery.num_lost == 1 && recovery.lost_ranks[0] == (int32_t)left - 1 && recovery.epoch >= (int64_t)(4 - left));
    holds(mesh, all, left - 1);
  }
  if (!mine->decides) {
    FAILS(DM_STATUS_UNSUPPORTED, "give dm_store_callbacks.compare_set", dm_recover(mesh, NULL, &next, NULL));
    OK(dm_world_finalize(init.world, 0));
  }
  dm_free(mesh);
  dm_world_free(init.world);
  return NULL;
}

int main(void)
{
  for (int decides = 0; decides < 2; ++decides) {
    pthread_t threads[kRanks];
    job jobs[kRanks];
    dm_store_callbacks callbacks = store_callbacks();
    if (decides) callbacks.compare_set = store_compare_set;
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      const job mine = {rank, &callbacks, decides};
      jobs[rank] = mine;
      if (pthread_create(&threads[rank], NULL, one_rank, &jobs[rank]) != 0) exit(1);
    }
    for (int32_t rank = 0; rank < kRanks; ++rank) pthread_join(threads[rank], NULL);
  }
  return finish();
}
