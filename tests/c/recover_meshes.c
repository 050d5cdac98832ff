/* ranks: 4 */
/* dm_recover in a world with several root meshes: all ranks pass the same one, the others end with
 * the epoch, and are made anew by dm_init. */
#include "recover.h"

static dm_mesh *made(const int32_t *shape, size_t ndim, const int32_t *ranks, size_t num_ranks)
{
  static const char *const names[] = {"dp", "tp"};
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  init.world = world;
  init.timeout_ms = 45000;
  init.ranks = ranks;
  init.num_ranks = num_ranks;
  REQUIRE(dm_init("cpu", shape, ndim, names, &init, &mesh));
  sums(mesh);
  return mesh;
}

/* The mesh has ended with its epoch, and still answers questions. */
static void has_ended(const dm_mesh *mesh, int32_t size, const char *why)
{
  dm_mesh *none = NULL;
  int32_t sum = 0, there = 0;
  FAILS(DM_STATUS_ABORTED, why, dm_all_reduce(mesh, "dp", &me, &sum, 1, DM_INT32, DM_SUM, NULL));
  FAILS(DM_STATUS_ABORTED, why, dm_barrier(mesh, "dp", 0));
  FAILS(DM_STATUS_ABORTED, why, dm_recover(mesh, NULL, &none, NULL));
  OK(dm_size(mesh, NULL, &there));
  CHECK(there == size);
}

/* Ends the calls of all ranks on the mesh, which is a reason to recover. */
static void disturb(const dm_mesh *mesh)
{
  if (me == 0) OK(dm_abort(mesh));
  else notice(mesh);
}

int main(void)
{
  const int32_t square[] = {2, 2}, line[] = {4}, pair[] = {2}, all[] = {0, 1, 2, 3}, turned[] = {0, 2, 1, 3}, two[] = {1, 2};
  dm_recovery recovery;
  dm_mesh *none = NULL;
  begin();
  dm_mesh *mesh = made(square, 2, NULL, 0), *permuted = made(square, 2, turned, 4), *flat = made(line, 1, NULL, 0);
  dm_mesh *part = NULL;
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  init.world = world;
  init.ranks = two;
  init.num_ranks = 2;
  REQUIRE(dm_init("cpu", pair, 1, NULL, &init, &part));
  /* A range of all indices is the view itself, so the next mesh has the dimensions that are made
   * through the range, too. */
  dm_mesh *range = NULL, *view = NULL, *split = NULL;
  const int32_t parts[] = {2, 2};
  const char *const part_names[] = {"outer", "inner"};
  REQUIRE(dm_slice_range(mesh, "dp", 0, 2, 1, NULL, &range));
  REQUIRE(dm_flatten(range, "all", NULL, &view));
  dm_free(range);
  dm_free(view);
  REQUIRE(dm_slice_range(mesh, "all", 0, 4, 1, NULL, &range));
  REQUIRE(dm_unflatten(range, "all", parts, 2, part_names, NULL, &split));
  REQUIRE(dm_register(split, "split"));
  dm_free(range);
  dm_free(split);
  disturb(mesh);
  meet_world();

  /* Different meshes, the second time of the same shape and with the same names. */
  FAILS(DM_STATUS_MISMATCH, "shape=(4)", dm_recover(me == 3 ? flat : mesh, NULL, &none, NULL));
  meet_world();
  FAILS(DM_STATUS_MISMATCH, "ranks=", dm_recover(me == 3 ? permuted : mesh, NULL, &none, NULL));
  meet_world();

  dm_mesh *next = recovered(mesh, NULL, &recovery);
  CHECK(recovery.epoch == 3 && recovery.num_lost == 0 && recovery.num_joined == 0);
  holds(next, all, 4);
  sum_along(next, "all");
  view = named_view("split");
  holds(view, all, 4);
  dm_free(view);
  OK(dm_unregister("split"));
  const char *why = "belongs to epoch 0, and the job is in epoch 3";
  has_ended(mesh, 4, why);
  has_ended(permuted, 4, why);
  has_ended(flat, 4, why);
  if (me == 1 || me == 2) {
    int32_t sum = 0;
    FAILS(DM_STATUS_ABORTED, why, dm_all_reduce(part, NULL, &me, &sum, 1, DM_INT32, DM_SUM, NULL));
  }

  /* Another root mesh of the new epoch. It is not the one that is recovered. */
  dm_mesh *other = made(square, 2, turned, 4);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "is not the mesh that the last dm_recover gave", dm_recover(other, NULL, &none, NULL));
  sums(other);
  together(other);
  disturb(next);
  dm_mesh *last = recovered(next, NULL, &recovery);
  CHECK(recovery.epoch == 4);
  holds(last, all, 4);
  has_ended(other, 4, "belongs to epoch 3, and the job is in epoch 4");
  REQUIRE(dm_world_finalize(world, 0));
  dm_free(permuted);
  dm_free(flat);
  dm_free(part);
  dm_free(other);
  dm_free(next);
  return end(mesh, last);
}
