/* ranks: 8 */
/* dm_recover with ranks that wait outside the mesh: ranks 6 and 7 are spares of (dp=3, tp=2), take
 * the places of lost ranks, and bring ranks back whose replica had gone. */
#include "recover.h"

static const char *const kNames[] = {"dp", "tp"};

static dm_mesh *with_spares(dm_world *its_world)
{
  dm_mesh *mesh = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {3, 2};
  options.world = its_world;
  options.timeout_ms = 45000;
  REQUIRE(dm_init("cpu", shape, 2, kNames, &options, &mesh));
  return mesh;
}

/* Where nothing is lost, the spares wait until the others end the world. A call of the whole world
 * that needs them fails meanwhile, and they go on waiting. */
static void nothing_lost(void)
{
  dm_world *quiet = NULL;
  dm_mesh *none = NULL;
  REQUIRE(dm_world_init("cpu", NULL, &quiet));
  dm_mesh *mesh = with_spares(quiet);
  if (me >= 6) {
    FAILS(DM_STATUS_ABORTED, "the job has ended", dm_recover(mesh, NULL, &none, NULL));
    GIVES(DM_STATUS_ABORTED, dm_world_finalize(quiet, 0));
  } else {
    sums(mesh);
    FAILS(DM_STATUS_MISMATCH, "dm_recover(", dm_world_barrier(quiet, 0));
    CHECK(strstr(dm_last_error(), "dm_world_barrier") != NULL);
    OK(dm_world_finalize(quiet, 0));
  }
  CHECK(none == NULL);
  dm_free(mesh);
  dm_world_free(quiet);
}

/* Gives the joined ranks their state, along dp from the rank that has it. */
static void share(const dm_mesh *mesh, const dm_recovery *recovery, int32_t *state)
{
  if (recovery->state_root != DM_RANK_NONE) OK(dm_broadcast(mesh, "dp", state, state, 1, DM_INT32, recovery->state_root, NULL));
}

int main(void)
{
  const int32_t first[] = {0, 6, 2, 3, 4, 5}, second[] = {0, 6}, third[] = {0, 6, 2, 7};
  dm_recover_options options = DM_RECOVER_OPTIONS_INIT;
  dm_recovery recovery;
  begin();
  nothing_lost();
  dm_mesh *mesh = with_spares(world), *flat = NULL, *next = NULL, *none = NULL;
  int32_t state = me % 2; /* the same on all replicas */
  if (me >= 6) {
    state = -1;
    bool is_member = true;
    CHECK(dm_is_member(mesh, &is_member) == DM_STATUS_OK && !is_member);
    OK(dm_register(mesh, "job"));
  } else {
    REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
    dm_free(flat);
    sums(mesh);
    together(mesh);
  }

  /* Rank 1 is lost. Rank 6 takes its place; it must not say that it has the state. */
  if (me == 1) _exit(0);
  if (me == 7) {
    await_signal();
    /* It reads all decisions that it has missed. For a rank that waits this failure is the end,
       but it may call again. */
    FAILS(DM_STATUS_INVALID_STATE, "no rank that is left has the state of position 1", dm_recover(mesh, &options, &none, NULL));
  }
  if (me != 7) {
    options.flags = me == 6 ? DM_RECOVER_HAS_STATE : 0;
    if (me != 6) notice(mesh);
    options.replace_ms = 30000; /* until rank 6 is there */
    next = recovered(mesh, &options, &recovery);
    holds(next, first, 6);
    CHECK(recovery.num_lost == 1 && recovery.lost_ranks[0] == 1 && recovery.num_joined == 1 && recovery.joined_ranks[0] == 6);
    CHECK(recovery.has_joined == (me == 6) && recovery.state_root == (me == 6 || me % 2 ? 1 : 0));
    CHECK((recovery.old_coordinate == NULL) == (me == 6) && recovery.new_coordinate[0] == (me == 6 ? 0 : me / 2));
    OK(dm_flatten(next, "all", NULL, &flat));
    sum_along(flat, "all");
    dm_free(flat);
    share(next, &recovery, &state);
    CHECK(state == (me == 6 ? 1 : me % 2));
    together(next);
    if (me == 6) {
      dm_mesh *named = named_view("job");
      holds(named, first, 6);
      dm_free(named);
    } else {
      sums(next);
    }
    dm_free(mesh);
    mesh = next;

    /* Ranks 3 and 5 are lost. Rank 6 is the only one of its part, and says that it has the state at
     * its second try only. */
    together(mesh);
    if (me == 3 || me == 5) _exit(0);
    options.flags = 0;
    options.replace_ms = 0;
    notice(mesh);
    FAILS(DM_STATUS_INVALID_STATE, "no rank that is left has the state of position 1", dm_recover(mesh, &options, &none, NULL));
    if (me == 6) options.flags = DM_RECOVER_HAS_STATE;
    next = recovered(mesh, &options, &recovery);
    CHECK(recovery.num_lost == 2 && recovery.lost_ranks[0] == 3 && recovery.lost_ranks[1] == 5 && recovery.num_joined == 0);
    dm_free(mesh);
    mesh = next;
    if (me == 0 || me == 6) {
      holds(mesh, second, 2);
      CHECK(recovery.state_root == 0);
      together(mesh);
      if (me == 0) send_signal();
      /* The other spare comes. Nothing is lost, so a rank ends the mesh to let it in. */
      together(mesh);
      if (me == 6) OK(dm_abort(mesh));
      else notice(mesh);
    } else {
      CHECK(recovery.new_coordinate == NULL);
    }
    options.flags = 0;
    options.replace_ms = 3000;
  }

  /* Rank 7 makes the replica of rank 2 whole, which comes back. Rank 4 goes on waiting. */
  if (me == 4) {
    FAILS(DM_STATUS_ABORTED, "the job has ended", dm_recover(mesh, &options, &none, NULL));
    return end(mesh, NULL);
  }
  next = recovered(mesh, &options, &recovery);
  holds(next, third, 4);
  const bool is_new = me == 2 || me == 7;
  CHECK(recovery.num_joined == 2 && recovery.joined_ranks[0] == 2 && recovery.joined_ranks[1] == 7 && recovery.has_joined == is_new);
  CHECK(recovery.state_root == 0 && recovery.new_coordinate[0] == (is_new ? 1 : 0));
  if (is_new) state = -1;
  share(next, &recovery, &state);
  CHECK(state == (me == 6 || me == 7 ? 1 : 0));
  OK(dm_flatten(next, "all", NULL, &flat));
  sum_along(flat, "all");
  dm_free(flat);
  world_calls(third, 4);
  REQUIRE(dm_world_finalize(world, 0));
  return end(next, mesh);
}
