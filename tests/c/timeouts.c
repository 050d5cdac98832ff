/* ranks: 2 */
/* Each call waits as long as its own mesh says, also where meshes with different timeouts share a
 * communicator and their calls meet in it. */
#include "blocked.h"
#include "facts.h"

enum { kShort = 2000, kLong = 60000 };

static dm_mesh *mesh_within(int64_t timeout_ms)
{
  const int32_t shape[] = {2};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  return made_in_time("cpu", shape, 1, NULL, &options);
}

static dm_status sum(void *mesh)
{
  float value = 1;
  return dm_all_reduce((dm_mesh *)mesh, NULL, &value, &value, 1, DM_FLOAT32, DM_SUM, NULL);
}

static ncclComm_t comm_of(dm_mesh *mesh)
{
  ncclComm_t comm = NULL;
  REQUIRE(dm_get_comm(mesh, NULL, &comm));
  return comm;
}

static void *meet_world(void *world)
{
  OK(dm_world_barrier((const dm_world *)world, 0));
  return NULL;
}

/* Returns what the call of the hasty mesh gives. */
static dm_status meet_in_one_communicator(void)
{
  dm_mesh *first = mesh_within(kLong), *second = mesh_within(kLong), *hasty = mesh_within(kShort);
  CHECK(comm_of(first) == comm_of(second) && comm_of(first) == comm_of(hasty));
  dm_world *world = NULL;
  int32_t rank = 0;
  dm_status status;
  REQUIRE(dm_default_world("cpu", 0, &world));
  OK(dm_get_local_rank(first, NULL, &rank));
  if (rank == 0) {
    /* The second call waits for its turn behind the first one, and has no deadline yet. */
    blocked inside, waiting;
    start_blocked(&inside, sum, first);
    start_blocked(&waiting, sum, second);
    /* This call is made at the end of the group, when the others are over. It has its value until
     * then. */
    float value = 1;
    OK(dm_group_start(hasty));
    OK(dm_all_reduce(hasty, NULL, &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
    /* A thread inside a group may not wait for the world. */
    pthread_t meeting;
    if (pthread_create(&meeting, NULL, meet_world, world) != 0) exit(1);
    pthread_join(meeting, NULL);
    join_blocked(&inside);
    join_blocked(&waiting);
    CHECK(inside.status == DM_STATUS_OK);
    if (waiting.status != DM_STATUS_OK) {
      ++failures;
      fprintf(stderr, "the call of the patient mesh: %s\n", waiting.message);
    }
    status = dm_group_end(hasty);
    CHECK(status != DM_STATUS_OK || value == 2);
  } else {
    meet_world(world);
    OK(sum(first));
    pause_ms(kShort + kShort / 2);
    OK(sum(second));
    status = sum(hasty);
  }
  dm_free(hasty);
  dm_free(second);
  dm_free(first);
  dm_world_free(world);
  return status;
}

int main(void)
{
  /* On a busy machine a rank may need more time than the hasty mesh has. The ranks then make all
   * calls again. */
  bool again = true;
  for (int attempt = 1; again; ++attempt) {
    const dm_status status = meet_in_one_communicator();
    dm_world *world = NULL;
    REQUIRE(dm_default_world("cpu", 0, &world));
    again = on_any_rank(world, status == DM_STATUS_TIMEOUT) && attempt < 3;
    if (!again) GIVES(DM_STATUS_OK, status);
    dm_world_free(world);
  }
  return finish();
}
