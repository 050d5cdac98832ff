/* ranks: 4 */
/* dm_recover with a rank that lives and does not come: with silent_ms the others go on without it,
 * and it is told so when it comes. min_size keeps a single impatient rank from going on alone. */
#include "recover.h"

int main(void)
{
  const int32_t three[] = {0, 1, 3}, shape[] = {4};
  dm_recover_options options = DM_RECOVER_OPTIONS_INIT;
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  dm_recovery recovery;
  dm_mesh *mesh = NULL, *next = NULL, *none = NULL;
  begin();
  init.world = world;
  init.timeout_ms = 45000;
  REQUIRE(dm_init("cpu", shape, 1, NULL, &init, &mesh));
  sums(mesh);
  meet_world();
  options.silent_ms = 2000; /* all ranks but 2 must come within it */
  options.min_size = 3;
  if (me == 2) { /* it makes no call for a while */
    meet_world();
    FAILS(DM_STATUS_NOT_MEMBER, "the other ranks have gone on without rank 2", dm_recover(mesh, &options, &none, NULL));
    FAILS(DM_STATUS_NOT_MEMBER, "the other ranks have gone on without rank 2", dm_recover(mesh, &options, &none, NULL));
    GIVES(DM_STATUS_ABORTED, dm_all_reduce(mesh, NULL, &me, &me, 1, DM_INT32, DM_SUM, NULL));
    OK(dm_world_abort(world));
    meet_world();
    return end(mesh, NULL);
  }
  if (me == 0) OK(dm_abort(mesh));
  else notice(mesh);
  const double began = seconds_now();
  next = recovered(mesh, &options, &recovery);
  CHECK(seconds_now() - began < 20);
  holds(next, three, 3);
  CHECK(recovery.num_lost == 1 && recovery.lost_ranks[0] == 2 && recovery.new_coordinate[0] == (me == 3 ? 2 : me));
  meet_world();
  meet_world();
  sums(next);
  together(next);
  /* Two replicas would be too few. */
  if (me == 0) OK(dm_abort(next));
  else notice(next);
  options.min_size = 4;
  FAILS(DM_STATUS_INVALID_STATE, "3 of 4 replicas along dimension 0 are left, and 4 must be", dm_recover(next, &options, &none, NULL));
  options.min_size = 3;
  dm_mesh *last = recovered(next, &options, &recovery);
  holds(last, three, 3);
  dm_free(mesh);
  mesh = last;
  REQUIRE(dm_world_finalize(world, 0));
  return end(mesh, next);
}
