/* ranks: 8 */
/* Ranks die between a decision and the making of its mesh, twice: all go on to the next turn in the
 * same call. Ranks that were to join are in the mesh of an epoch that was never made then, with
 * handles of other epochs and shapes than those of the others. */
#include "recover.h"

/* Ends this process when it begins to make the mesh of that epoch. The log says so. */
static void die_in(void *words, dm_log_level level, const char *message)
{
  (void)level;
  if (strstr(message, (const char *)words) != NULL) _exit(0);
}

int main(void)
{
  const int32_t shape[] = {3, 2}, second[] = {0, 6, 4, 5}, fourth[] = {0, 6, 2, 7};
  const char *const names[] = {"dp", "tp"};
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  dm_recover_options options = DM_RECOVER_OPTIONS_INIT;
  dm_recovery recovery;
  dm_mesh *mesh = NULL, *next = NULL, *flat = NULL;
  begin();
  init.world = world;
  init.timeout_ms = 45000;
  REQUIRE(dm_init("cpu", shape, 2, names, &init, &mesh));
  if (me < 6) {
    REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
    dm_free(flat);
    together(mesh);
  }

  /* Rank 1 is lost, and rank 6 is to take its place. Rank 3 dies in the making, and nobody has its
   * place: rank 2 is benched. */
  if (me == 3) OK(dm_set_log(DM_LOG_WARN, die_in, (void *)"goes on in epoch 1 "));
  if (me == 1) _exit(0);
  options.replace_ms = 3000;
  if (me != 7) {
    if (me < 6) notice(mesh);
    next = recovered(mesh, &options, &recovery);
    CHECK(recovery.epoch == 2 && recovery.num_lost == 2 && recovery.lost_ranks[0] == 1 && recovery.lost_ranks[1] == 3);
    if (me != 2) {
      holds(next, second, 4);
      CHECK(recovery.num_joined == 1 && recovery.joined_ranks[0] == 6);
      options.flags = DM_RECOVER_HAS_STATE;
      together(next);
      if (me == 0) send_signal();
    }
    dm_free(mesh);
    mesh = next;
  } else {
    await_signal();
  }

  /* Rank 7 comes with the handle of epoch 0, and makes the replica of rank 2 whole. Rank 5 dies in
   * the making, so ranks 2 and 7 compare their calls with those of ranks that had a smaller
   * mesh. */
  if (me == 5) OK(dm_set_log(DM_LOG_WARN, die_in, (void *)"goes on in epoch 3 "));
  if (me == 0) OK(dm_abort(mesh));
  else if (me == 4 || me == 5 || me == 6) notice(mesh);
  next = recovered(mesh, &options, &recovery);
  CHECK(recovery.epoch == 4);
  if (me == 4) {
    dm_mesh *none = NULL;
    FAILS(DM_STATUS_ABORTED, "the job has ended", dm_recover(next, &options, &none, NULL));
    return end(next, mesh);
  }
  holds(next, fourth, 4);
  CHECK(recovery.num_joined == 2 && recovery.joined_ranks[0] == 2 && recovery.joined_ranks[1] == 7);
  CHECK(recovery.previous_epoch == (me == 7 ? 0 : 2) && recovery.state_root == 0);
  REQUIRE(dm_flatten(next, "all", NULL, &flat));
  sum_along(flat, "all");
  dm_free(flat);
  world_calls(fourth, 4);
  REQUIRE(dm_world_finalize(world, 0));
  return end(next, mesh);
}
