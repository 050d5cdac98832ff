/* ranks: 8 */
/* dm_recover: (dp=4, tp=2) loses ranks that exit, leave by dm_world_abort, or die while the others
 * recover. Names, made dimensions, registered views and the world's calls go on in each epoch.
 * spares.c has ranks that wait outside the mesh. */
#include "recover.h"

static const char *const kNames[] = {"dp", "tp"};

static dm_mesh *replicas(uint32_t flags)
{
  dm_mesh *mesh = NULL;
  dm_dim_options dims[] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {4, 2};
  dims[1].flags = DM_DIM_OWN_COMM;
  options.flags = flags;
  options.world = world;
  options.timeout_ms = 45000;
  options.dim_options = dims;
  options.num_dim_options = 2;
  REQUIRE(dm_init("cpu", shape, 2, kNames, &options, &mesh));
  return mesh;
}

/* Nothing is wrong: the caller alone is told so, and its mesh works. */
static void nothing(const dm_mesh *mesh)
{
  dm_mesh *none = NULL;
  dm_recovery recovery = DM_RECOVERY_INIT;
  FAILS(DM_STATUS_INVALID_STATE, "nothing to recover", dm_recover(mesh, NULL, &none, NULL));
  CHECK(none == NULL);
  sums(mesh);
  OK(dm_get_recovery(mesh, &recovery));
  CHECK(recovery.epoch == 0 && recovery.previous_epoch == 0 && recovery.num_lost == 0 && recovery.num_joined == 0);
  CHECK(recovery.ndim == 2 && recovery.new_coordinate[0] == me / 2 && recovery.has_joined == 0);
}

/* A mesh without dimensions has no replicas. */
static void without_dimensions(void)
{
  dm_mesh *point = NULL, *none = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = world;
  REQUIRE(dm_init("cpu", NULL, 0, NULL, &options, &point));
  if (me == 0) FAILS(DM_STATUS_INVALID_ARGUMENT, "the mesh has no dimension", dm_recover(point, NULL, &none, NULL));
  CHECK(none == NULL);
  dm_free(point);
}

/* Options that are wrong in themselves are told to the others, whose recovery fails with them. */
static void refused(const dm_mesh *mesh)
{
  dm_mesh *none = NULL;
  dm_recover_options options = DM_RECOVER_OPTIONS_INIT;
  dm_recovery small = DM_RECOVERY_INIT;
  GIVES(DM_STATUS_INVALID_HANDLE, dm_recover(NULL, NULL, &none, NULL));
  /* Rank 1 ends the mesh, so the others have a reason. */
  if (me == 1) OK(dm_abort(mesh));
  meet_world();
  for (int bad = 0; bad < 8; ++bad) {
    dm_recover_options wrong = options;
    dm_status expected = DM_STATUS_INVALID_ARGUMENT;
    if (bad == 0) wrong.dim = "pp", expected = DM_STATUS_NOT_FOUND;
    if (bad == 1) wrong.silent_ms = 100;
    if (bad == 2) wrong.min_size = 5;
    if (bad == 3) wrong.flags = 64;
    if (bad == 4) wrong.replace_ms = -1;
    if (bad == 5) wrong.silent_ms = -1;
    if (bad == 6) wrong.num_dim_options = 1;
    if (bad == 7) small.struct_size = 8;
    const char *text = bad == 4 ? "0 to take the processes that wait already" : bad == 5 ? "0 to leave out no silent rank" : "";
    if (me == 3) FAILS(expected, text, dm_recover(mesh, &wrong, &none, bad == 7 ? &small : NULL));
    else FAILS(expected, "rank 3 refused its own call in recovery", dm_recover(mesh, NULL, &none, NULL));
    meet_world();
  }
  /* Options that differ between ranks: all are told of both sides. */
  if (me == 6) options.min_size = 2;
  FAILS(DM_STATUS_MISMATCH, "min_size=2", dm_recover(mesh, &options, &none, NULL));
  CHECK(strstr(dm_last_error(), "min_size=0") != NULL && none == NULL);
  meet_world();
}

/* A rank that does not come: the others are told which one, and it is told the same later. */
static void late(const dm_mesh *mesh)
{
  dm_mesh *none = NULL;
  dm_recover_options options = DM_RECOVER_OPTIONS_INIT;
  bool again = true;
  for (options.timeout_ms = 2000; again; options.timeout_ms *= 3) {
    if (me == 5) REQUIRE(dm_world_barrier(other_world, 0));
    GIVES(DM_STATUS_TIMEOUT, dm_recover(mesh, &options, &none, NULL));
    const dm_error_info info = facts();
    const bool is_alone = info.num_ranks == 1 && info.ranks[0] == 5 &&
                          strstr(dm_last_error(), "rank 5 did not come to the recovery within ") != NULL;
    CHECK(info.num_lost == 0);
    if (me != 5) REQUIRE(dm_world_barrier(other_world, 0));
    again = on_any_rank(other_world, !is_alone) && options.timeout_ms < kLongestScene;
    CHECK(is_alone || again);
  }
}

/* Handles of an earlier epoch say so, and still answer what needs no other rank. */
static void is_over(const dm_mesh *mesh, const dm_mesh *view, long long epoch)
{
  dm_mesh *none = NULL;
  int32_t size = 0, shape[2];
  size_t length = 0;
  char sentence[128];
  snprintf(sentence, sizeof sentence, "belongs to epoch 0, and the job is in epoch %lld: use the mesh that dm_recover gave", epoch);
  FAILS(DM_STATUS_ABORTED, sentence, dm_recover(mesh, NULL, &none, NULL));
  FAILS(DM_STATUS_ABORTED, sentence, dm_shrink(mesh, "dp", NULL, 0, NULL, &none));
  FAILS(DM_STATUS_ABORTED, sentence, dm_flatten(mesh, "again", NULL, &none));
  FAILS(DM_STATUS_ABORTED, sentence, dm_barrier(mesh, "dp", 0));
  FAILS(DM_STATUS_ABORTED, sentence, dm_all_reduce(view, "tp", &me, &me, 1, DM_INT32, DM_SUM, NULL));
  FAILS(DM_STATUS_ABORTED, sentence, dm_slice(mesh, kNames, 1, &none));
  FAILS(DM_STATUS_ABORTED, sentence, dm_finalize(mesh, NULL));
  OK(dm_size(mesh, "dp", &size));
  OK(dm_shape(mesh, shape, 2, &length));
  CHECK(size == 4 && length == 2 && shape[0] == 4 && shape[1] == 2);
}

int main(void)
{
  const int32_t six[] = {0, 1, 2, 3, 6, 7}, eight[] = {0, 1, 2, 3, 4, 5, 6, 7}, four[] = {0, 1, 6, 7}, two[] = {6, 7};
  begin();
  dm_mesh *mesh = replicas(0), *flat = NULL, *split = NULL, *both = NULL, *named = NULL;
  nothing(mesh);
  without_dimensions();
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  REQUIRE(dm_register(mesh, "whole"));
  REQUIRE(dm_register(flat, "flat"));
  both = slice1(mesh, "tp");
  REQUIRE(dm_register(both, "tensor"));
  const int32_t halves[] = {2, 2}, ways[] = {2, 4};
  const char *const half_names[] = {"far", "near"}, *const way_names[] = {"pp", "ep"};
  REQUIRE(dm_unflatten(mesh, "dp", halves, 2, half_names, NULL, &split));
  REQUIRE(dm_register(split, "split"));
  dm_mesh *other = NULL;
  REQUIRE(dm_reshape(mesh, ways, 2, way_names, NULL, &other));
  REQUIRE(dm_register(other, "other"));

  refused(mesh);
  late(mesh);
  /* Nobody is lost: the same ranks get new communicators. The epoch counts decisions. */
  dm_recovery recovery;
  dm_mesh *next = recovered(mesh, NULL, &recovery);
  holds(next, eight, 8);
  CHECK(recovery.num_lost == 0 && recovery.num_joined == 0 && recovery.state_root == 0 && recovery.previous_epoch == 0);
  CHECK(recovery.old_coordinate[0] == me / 2 && recovery.new_coordinate[0] == me / 2 && recovery.new_coordinate[1] == me % 2);
  is_over(mesh, both, (long long)recovery.epoch);
  dm_mesh *again = named_view("split");
  sum_along(again, "near");
  dm_free(again);
  again = named_view("other");
  sum_along(again, "ep");
  dm_free(again);
  dm_free(mesh);
  mesh = next;

  /* Rank 5 exits. Rank 2 has aborted the mesh, and rank 0 comes late. Rank 4 loses its place. */
  together(mesh);
  if (me == 5) _exit(0);
  if (me == 2) OK(dm_abort(mesh));
  if (me == 0) usleep(100000);
  notice(mesh);
  next = recovered(mesh, NULL, &recovery);
  CHECK(recovery.num_lost == 1 && recovery.lost_ranks[0] == 5 && recovery.num_joined == 0);
  if (me == 4) { /* it went with rank 5, and waits until the job ends */
    dm_mesh *none = NULL;
    CHECK(recovery.new_coordinate == NULL && recovery.ndim == 2 && recovery.old_coordinate[0] == 2);
    bool is_member = true;
    CHECK(dm_is_member(next, &is_member) == DM_STATUS_OK && !is_member && recovery.state_root == DM_RANK_NONE);
    GIVES(DM_STATUS_NOT_MEMBER, dm_all_reduce(next, "dp", &me, &me, 1, DM_INT32, DM_SUM, NULL));
    GIVES(DM_STATUS_NOT_MEMBER, dm_world_barrier(world, 0));
    FAILS(DM_STATUS_ABORTED, "the job has ended", dm_recover(next, NULL, &none, NULL));
    GIVES(DM_STATUS_ABORTED, dm_world_barrier(world, 0));
    return end(next, NULL);
  }
  holds(next, six, 6);
  CHECK(recovery.new_coordinate[0] == (me < 4 ? me / 2 : 2) && recovery.old_coordinate[0] == me / 2);
  /* The flattened dimension exists, so making it is local; the dimensions of other sizes are
     gone. */
  if (me == 1) {
    dm_mesh *known = NULL;
    OK(dm_flatten(next, "all", NULL, &known));
    dm_free(known);
  }
  named = named_view("flat");
  sum_along(named, "all");
  dm_free(named);
  named = named_view("tensor");
  sum_along(named, "tp");
  dm_free(named);
  named = named_view("whole");
  int32_t size = 0;
  CHECK(dm_size(named, "dp", &size) == DM_STATUS_OK && size == 3);
  dm_free(named);
  named = named_view("split");
  GIVES(DM_STATUS_ABORTED, dm_barrier(named, "near", 0));
  dm_free(named);
  world_calls(six, 6);

  /* Ranks 2 and 3 are lost one after the other, the second one during the recovery. */
  if (me == 3) usleep(30000);
  if (me == 2 || me == 3) _exit(0);
  mesh = next;
  notice(mesh);
  next = recovered(mesh, NULL, &recovery);
  holds(next, four, 4);
  dm_free(mesh);
  world_calls(four, 4);
  mesh = next;

  /* Rank 0 is lost, and with it rank 1 goes. dm_world_abort is a loss like any other. */
  if (me == 0) {
    OK(dm_world_abort(world));
    dm_mesh *none = NULL;
    GIVES(DM_STATUS_ABORTED, dm_recover(mesh, NULL, &none, NULL));
    return end(mesh, NULL);
  }
  notice(mesh);
  next = recovered(mesh, NULL, &recovery);
  CHECK(recovery.num_lost == 1 && recovery.lost_ranks[0] == 0);
  if (me == 1) {
    dm_mesh *none = NULL;
    FAILS(DM_STATUS_ABORTED, "the job has ended", dm_recover(next, NULL, &none, NULL));
    return end(next, mesh);
  }
  holds(next, two, 2);
  world_calls(two, 2);
  dm_free(flat);
  dm_free(split);
  dm_free(both);
  dm_free(other);
  REQUIRE(dm_world_finalize(world, 0));
  GIVES(DM_STATUS_ABORTED, dm_barrier(next, "tp", 0));
  return end(next, mesh);
}
