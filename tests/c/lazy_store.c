/* The store of a caller is let go with its world, also where the first use of a lazy mesh has
 * failed. Its keys are printable ASCII, whatever the names of dimensions are. The two ranks are
 * threads of this process. */
#include "store.h"

enum { kRanks = 2 };

static pthread_barrier_t ranks_meet;

typedef struct {
  int32_t rank;
  int mesh_first, dropped;
} job;

static const char *const kNames[] = {"d\xc3\xa9pth of\nall"};

static void check_key(const char *key)
{
  int is_plain = strlen(key) < 160;
  for (const char *at = key; *at != '\0'; ++at) is_plain = is_plain && *at > ' ' && *at <= '~';
  if (!is_plain) {
    ++failures;
    fprintf(stderr, "the key \"%s\" is not short printable ASCII\n", key);
  }
}

static int32_t checked_set(void *data, const char *key, const void *value, size_t length)
{
  check_key(key);
  return store_set(data, key, value, length);
}

static int32_t checked_add(void *data, const char *key, int64_t amount, int64_t *value_out)
{
  check_key(key);
  return store_add(data, key, amount, value_out);
}

static void drop(void *data)
{
  __atomic_add_fetch(&((job *)data)->dropped, 1, __ATOMIC_SEQ_CST);
}

static dm_status is_dropped(job *mine)
{
  return __atomic_load_n(&mine->dropped, __ATOMIC_SEQ_CST) == 1 ? DM_STATUS_OK : DM_STATUS_INVALID_STATE;
}

static void *one_rank(void *data)
{
  job *mine = (job *)data;
  dm_store_callbacks store = store_callbacks();
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_init_options eagerly = DM_INIT_OPTIONS_INIT, lazily = DM_INIT_OPTIONS_INIT;
  dm_dim_options own = DM_DIM_OPTIONS_INIT;
  const int32_t shape[] = {kRanks};
  dm_mesh *mesh = NULL, *eager = NULL;
  float value = 1;
  ncclComm_t comm = NULL;
  store.set = checked_set;
  store.add = checked_add;
  store.drop = drop;
  store.user_data = mine;
  options.world_size = kRanks;
  options.rank = options.local_rank = mine->rank;
  options.timeout_ms = 60000;
  options.store = &store;
  REQUIRE(dm_world_init("cpu", &options, &lazily.world));
  own.flags = DM_DIM_OWN_COMM;
  eagerly.world = lazily.world;
  eagerly.dim_options = &own;
  eagerly.num_dim_options = 1;
  REQUIRE(dm_init("cpu", shape, 1, kNames, &eagerly, &eager));
  OK(dm_all_reduce(eager, NULL, &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
  dm_free(eager);
  lazily.flags = DM_INIT_LAZY;
  lazily.timeout_ms = 2000;
  mesh = made_in_time("cpu", shape, 1, kNames, &lazily);
  /* The other rank does not come. */
  if (mine->rank == 0) GIVES(DM_STATUS_TIMEOUT, dm_get_comm(mesh, NULL, &comm));
  pthread_barrier_wait(&ranks_meet);
  if (mine->mesh_first) {
    dm_free(mesh);
    dm_world_free(lazily.world);
    OK(is_dropped(mine));
  } else {
    dm_world_free(lazily.world);
    dm_free(mesh);
    /* A thread of the library ends the world. */
    COMES_TO_GIVE(DM_STATUS_OK, is_dropped(mine));
  }
  return NULL;
}

int main(void)
{
  /* The ranks compare their collectives through the store. */
  if (setenv("DM_CHECK_COLLECTIVES", "1", 1) != 0) return 1;
  if (pthread_barrier_init(&ranks_meet, NULL, kRanks) != 0) return 1;
  for (int round = 0; round < 2; ++round) {
    pthread_t threads[kRanks];
    job jobs[kRanks] = {{0, round == 0, 0}, {1, round == 0, 0}};
    for (int rank = 0; rank < kRanks; ++rank)
      if (pthread_create(&threads[rank], NULL, one_rank, &jobs[rank]) != 0) return 1;
    for (int rank = 0; rank < kRanks; ++rank) pthread_join(threads[rank], NULL);
  }
  pthread_barrier_destroy(&ranks_meet);
  return finish();
}
