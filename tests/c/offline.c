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

/* dm_shrink keeps its rules in an offline world. */
static void shrinking(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *smaller = NULL, *view = NULL;
  const int32_t shape[] = {2, 2}, lost[] = {2}, one = 1;
  const char *names[] = {"dp", "tp"}, *dp[] = {"dp"};
  int32_t size = 0;
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 4;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  /* A refused call changes nothing, and one that succeeds ends the mesh. */
  FAILS(DM_STATUS_NOT_FOUND, "pp", dm_shrink(mesh, "pp", lost, 1, NULL, &smaller));
  REQUIRE(dm_slice(mesh, dp, 1, &view));
  dm_free(view);
  REQUIRE(dm_shrink(mesh, "dp", lost, 1, NULL, &smaller));
  OK(dm_size(smaller, NULL, &size));
  CHECK(size == 2);
  GIVES(DM_STATUS_ABORTED, dm_slice(mesh, dp, 1, &view));
  OK(dm_finalize(smaller, NULL));
  GIVES(DM_STATUS_ABORTED, dm_shrink(smaller, "tp", &one, 1, NULL, &view));
  dm_free(smaller);
  dm_free(mesh);
  dm_world_free(options.world);
}

/* The size and the groups of a flattened dimension do not depend on this rank's place. */
static void elsewhere(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *pair = NULL, *flat = NULL, *copy = NULL;
  const int32_t shape[] = {2, 2, 2}, expected[] = {0, 2, 4, 6, 1, 3, 5, 7};
  const char *names[] = {"dp", "cp", "tp"}, *dp_cp[] = {"dp", "cp"};
  int32_t size = 0, ranks[8];
  size_t length = 0;
  bool member = true;
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 8;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_init("cpu", shape, 3, names, &options, &mesh));
  REQUIRE(dm_slice(mesh, dp_cp, 2, &pair));
  REQUIRE(dm_flatten(pair, NULL, NULL, &flat));
  REQUIRE(dm_submesh(mesh, dp_cp, 2, 1, &copy));
  OK(dm_is_member(copy, &member));
  CHECK(!member);
  OK(dm_size(copy, "dp_cp", &size));
  CHECK(size == 4);
  OK(dm_replica_groups(copy, "dp_cp", ranks, 8, &length));
  CHECK(length == 8 && memcmp(ranks, expected, sizeof ranks) == 0);
  FAILS(DM_STATUS_NOT_FOUND, "there are (dp, cp, dp_cp)", dm_size(copy, "tp", &size));
  FAILS(DM_STATUS_NOT_FOUND, "there are (dp, cp, dp_cp)", dm_replica_groups(copy, "tp", ranks, 8, &length));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dim", dm_replica_groups(copy, NULL, ranks, 8, &length));
  /* A rank has no group in a copy that it is not in, but the size of the groups is known. */
  const char *const all[] = {"dp", "dp_cp", "only_dp"};
  dm_mesh *dp = slice1(mesh, "dp"), *only_dp = NULL;
  REQUIRE(dm_flatten(dp, "only_dp", NULL, &only_dp));
  for (size_t at = 0; at < 3; ++at) {
    length = 0;
    GIVES(DM_STATUS_NOT_MEMBER, dm_group_ranks(copy, all[at], NULL, 0, &length));
    CHECK(length == (at == 1 ? 4 : 2));
  }
  dm_free(only_dp);
  dm_free(dp);
  dm_free(copy);
  dm_free(flat);
  dm_free(pair);
  dm_free(mesh);
  dm_world_free(options.world);
}

static int flat_group_is(const dm_mesh *mesh, const int32_t (*expected)[4])
{
  int32_t ranks[4];
  size_t length = 0;
  return dm_group_ranks(mesh, "x", ranks, 4, &length) == DM_STATUS_OK && length == 4 && memcmp(ranks, expected, sizeof ranks) == 0;
}

/* In a mesh, and in a range of it, a flattened name means one set of groups, in whatever order the
 * dimensions were made. */
static void names(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *sparse = NULL, *again = NULL, *dp_tp = NULL, *dp_cp = NULL, *flat = NULL, *none = NULL;
  const int32_t shape[] = {2, 2, 2, 2}, near[] = {0, 1, 4, 5}, far[] = {0, 2, 4, 6};
  const char *dense[] = {"pp", "dp", "cp", "tp"}, *experts[] = {"pp", "edp", "ep", "etp"}, *named_x[] = {"pp", "edp", "x", "etp"};
  const char *outer[] = {"dp", "tp"}, *inner[] = {"dp", "cp"};
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 16;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_init("cpu", shape, 4, dense, &options, &mesh));
  REQUIRE(dm_slice(mesh, outer, 2, &dp_tp));
  REQUIRE(dm_slice(mesh, inner, 2, &dp_cp));

  /* The same shape may be made again. Its names stay free for the same groups. */
  for (int time = 0; time < 2; ++time) {
    REQUIRE(dm_reshape(mesh, shape, 4, experts, NULL, &sparse));
    dm_free(sparse);
  }
  FAILS(DM_STATUS_INVALID_ARGUMENT, "a reshaped view has a dimension ep over other ranks", dm_flatten(dp_tp, "ep", NULL, &none));
  dm_mesh *only_cp = slice1(mesh, "cp");
  REQUIRE(dm_flatten(only_cp, "ep", NULL, &flat));
  dm_free(flat);
  dm_free(only_cp);

  /* The range has the name first, and keeps it when the whole mesh gives it to other groups. */
  dm_mesh *range = NULL, *in_range = NULL, *holds_far = NULL;
  REQUIRE(dm_slice_range(mesh, "pp", 0, 1, 1, NULL, &range));
  REQUIRE(dm_slice(range, outer, 2, &in_range));
  REQUIRE(dm_slice(range, inner, 2, &holds_far));
  REQUIRE(dm_flatten(in_range, "x", NULL, &flat));
  dm_free(flat);
  REQUIRE(dm_flatten(dp_cp, "x", NULL, &flat));
  CHECK(flat_group_is(flat, &far) && flat_group_is(mesh, &far) && flat_group_is(range, &near) && flat_group_is(in_range, &near));
  int32_t size = 0;
  FAILS(DM_STATUS_NOT_FOUND, "there are (dp, cp, ep)", dm_size(holds_far, "x", &size));
  dm_free(flat);
  REQUIRE(dm_flatten(in_range, "x", NULL, &flat)); /* as before */
  FAILS(DM_STATUS_INVALID_ARGUMENT, "x over other ranks exists already", dm_flatten(holds_far, "x", NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "one name would mean two", dm_reshape(mesh, shape, 4, named_x, NULL, &again));

  dm_free(flat);
  dm_free(holds_far);
  dm_free(in_range);
  dm_free(range);
  dm_free(dp_cp);
  dm_free(dp_tp);
  dm_free(mesh);
  dm_world_free(options.world);
}

int main(void)
{
  shrinking();
  names();
  elsewhere();
  at_a_million();
  explicit_ranks();
  return finish();
}
