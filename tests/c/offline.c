/* DM_WORLD_OFFLINE: layout and planning for any rank of any world, here one of 1,048,576 ranks,
 * without a second process. */
#include "check.h"

static void at_a_million(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL, *pair = NULL, *flat = NULL, *split = NULL;
  const int32_t shape[] = {64, 32, 64, 8}, sizes[] = {256, 2};
  const char *names[] = {"pp", "dp", "cp", "tp"}, *dp_cp[] = {"dp", "cp"}, *parts[] = {"outer", "inner"};
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 1 << 20;
  join.rank = 777777; /* at (47, 15, 6, 1) */
  REQUIRE(dm_world_init("cuda", &join, &world));
  int32_t rank = 0, size = 0;
  OK(dm_world_rank(world, &rank));
  OK(dm_world_size(world, &size));
  CHECK(rank == 777777 && size == 1 << 20);
  GIVES(DM_STATUS_UNSUPPORTED, dm_world_barrier(world, 0));

  options.world = world;
  const clock_t began = clock();
  REQUIRE(dm_init("cuda", shape, 4, names, &options, &mesh));
  REQUIRE(dm_slice(mesh, dp_cp, 2, &pair));
  REQUIRE(dm_flatten(pair, NULL, NULL, &flat));
  /* The calls take microseconds of processor time, which other processes do not lengthen. */
  CHECK((double)(clock() - began) / CLOCKS_PER_SEC < 0.1 * slowness());
  int32_t coordinate[4];
  size_t length = 0;
  int32_t count = 0;
  OK(dm_get_coordinate(mesh, coordinate, 4, &length));
  CHECK(coordinate[0] == 47 && coordinate[1] == 15 && coordinate[2] == 6 && coordinate[3] == 1);
  int32_t group[64];
  OK(dm_group_ranks(mesh, "pp", group, 64, &length));
  CHECK(length == 64 && group[0] == 777777 - 47 * 16384 && group[47] == 777777);
  CHECK(strcmp(describe(flat), "DeviceMesh((dp_cp=2048), 'cuda', stride=(8,))") == 0);
  OK(dm_get_local_rank(flat, NULL, &rank));
  CHECK(rank == 15 * 64 + 6);
  const int32_t large[] = {1024, 2};
  REQUIRE(dm_unflatten(flat, "dp_cp", large, 2, parts, NULL, &split));
  CHECK(strcmp(describe(split), "DeviceMesh((outer=1024, inner=2), 'cuda', stride=(16, 8))") == 0);
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_unflatten(flat, "dp_cp", sizes, 2, parts, NULL, &split));
  const char *tp[] = {"tp"};
  OK(dm_submesh_count(mesh, tp, 1, &count));
  CHECK(count == (1 << 20) / 8);

  /* The mesh as another rank sees it is equal and has the same hash. */
  dm_world *elsewhere = NULL;
  dm_mesh *other = NULL;
  bool equal = false;
  uint64_t ours = 0, theirs = 1;
  join.rank = 3;
  REQUIRE(dm_world_init("cuda", &join, &elsewhere));
  options.world = elsewhere;
  REQUIRE(dm_init("cuda", shape, 4, names, &options, &other));
  OK(dm_equal(mesh, other, &equal));
  OK(dm_hash(mesh, &ours));
  OK(dm_hash(other, &theirs));
  CHECK(equal && ours == theirs);

  ncclComm_t comm = NULL;
  FAILS(DM_STATUS_UNSUPPORTED, "DM_WORLD_OFFLINE", dm_get_comm(mesh, "tp", &comm));
  GIVES(DM_STATUS_UNSUPPORTED, dm_check(mesh, "tp"));
  dm_buffers *bytes = NULL;
  FAILS(DM_STATUS_UNSUPPORTED, "DM_WORLD_OFFLINE", dm_barrier(mesh, "tp", 0));
  FAILS(DM_STATUS_UNSUPPORTED, "DM_WORLD_OFFLINE", dm_all_gather_bytes(mesh, "tp", "x", 1, 0, &bytes));
  FAILS(DM_STATUS_UNSUPPORTED, "DM_WORLD_OFFLINE", dm_world_broadcast_bytes(world, "x", 1, 0, 0, &bytes));
  OK(dm_finalize(mesh, NULL));
  GIVES(DM_STATUS_ABORTED, dm_slice(mesh, tp, 1, &pair));
  dm_free(mesh);
  dm_free(other);
  dm_world_free(world);
  dm_world_free(elsewhere);
}

static void explicit_ranks(void)
{
  /* A mesh from a rank array is equal to a mesh whose layout gives the same ranks. */
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 12;
  join.rank = 4;
  REQUIRE(dm_world_init("cpu", &join, &world));
  options.world = world;
  dm_mesh *mesh = NULL, *listed = NULL;
  const int32_t shape[] = {3, 4}, column[] = {3};
  const char *names[] = {"a", "b"}, *a[] = {"a"};
  const int32_t ranks[] = {0, 4, 8};
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  options.ranks = ranks;
  options.num_ranks = 3;
  REQUIRE(dm_init("cpu", column, 1, a, &options, &listed));
  dm_mesh *sliced = slice1(mesh, "a");
  bool equal = false;
  uint64_t ours = 0, theirs = 1;
  OK(dm_equal(sliced, listed, &equal));
  OK(dm_hash(sliced, &ours));
  OK(dm_hash(listed, &theirs));
  CHECK(equal && ours == theirs);
  dm_free(sliced);
  dm_free(listed);
  dm_free(mesh);
  dm_world_free(world);
}

int main(void)
{
  at_a_million();
  explicit_ranks();
  return finish();
}
