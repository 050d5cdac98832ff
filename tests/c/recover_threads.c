/* ranks: 4 */
/* dm_recover ends calls in which other threads of the process are blocked, and one thread recovers
 * at a time. dm_world_abort ends a dm_recover that waits. */
#include "recover.h"

#include "blocked.h"

static dm_status in_barrier(void *mesh) { return dm_barrier((const dm_mesh *)mesh, NULL, 0); }

static dm_status in_collective(void *mesh)
{
  int32_t mine = 1, sum = 0;
  return dm_all_reduce((const dm_mesh *)mesh, NULL, &mine, &sum, 1, DM_INT32, DM_SUM, NULL);
}

static dm_status in_recovery(void *mesh)
{
  dm_mesh *none = NULL;
  return dm_recover((const dm_mesh *)mesh, NULL, &none, NULL);
}

static dm_mesh *line(void)
{
  dm_mesh *mesh = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {4};
  options.world = world;
  options.timeout_ms = 45000;
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &mesh));
  return mesh;
}

int main(void)
{
  const int32_t all[] = {0, 1, 2, 3};
  dm_recovery recovery;
  begin();
  dm_mesh *mesh = line();

  /* Rank 0 is blocked in a barrier, and rank 1 in a collective. Rank 2 ends the mesh, and all
     recover. */
  blocked call;
  if (me < 2) start_blocked(&call, me == 0 ? in_barrier : in_collective, mesh);
  meet_world();
  if (me == 2) OK(dm_abort(mesh));
  dm_mesh *next = recovered(mesh, NULL, &recovery);
  if (me < 2) {
    join_blocked(&call);
    CHECK(call.status == DM_STATUS_ABORTED || call.status == DM_STATUS_PEER_LOST);
  }
  holds(next, all, 4);
  dm_free(mesh);

  /* Rank 3 does not come. A second thread of rank 0 is refused while the first one waits. */
  meet_world();
  if (me == 0) OK(dm_abort(next));
  else if (me != 3) notice(next);
  if (me == 0) {
    blocked first;
    dm_mesh *none = NULL;
    start_blocked(&first, in_recovery, next);
    FAILS(DM_STATUS_INVALID_STATE, "another thread of this rank is inside dm_recover", dm_recover(next, NULL, &none, NULL));
    /* The rank leaves the world while it waits. */
    OK(dm_world_abort(world));
    join_blocked(&first);
    CHECK(first.status == DM_STATUS_ABORTED);
    return end(next, NULL);
  }
  if (me == 3) {
    int32_t lost = -1;
    size_t count = 0;
    const double until = seconds_now() + 60;
    while (dm_lost_ranks(next, &lost, 1, &count) == DM_STATUS_OK && count == 0 && seconds_now() < until) pause_ms(2);
    CHECK(lost == 0);
  }
  mesh = recovered(next, NULL, &recovery);
  holds(mesh, all + 1, 3);
  CHECK(recovery.num_lost == 1 && recovery.lost_ranks[0] == 0);
  REQUIRE(dm_world_finalize(world, 0));
  return end(mesh, next);
}
