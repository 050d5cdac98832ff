/* ranks: 8 */
/* A (2, 2, 2) mesh on eight ranks. The test compares answers with numbers worked out by hand, and
 * checks views and their communicators, shared communicators, and permuted and smaller meshes. */
#include "check.h"

typedef ncclResult_t (*query_t)(ncclComm_t, int *);

static query_t query(const dm_mesh *mesh, const char *symbol)
{
  void *address = NULL;
  query_t function = NULL;
  REQUIRE(dm_get_proc(mesh, symbol, &address));
  memcpy(&function, &address, sizeof function);
  return function;
}

static ncclComm_t comm_of(const dm_mesh *mesh, const char *dim)
{
  ncclComm_t comm = NULL;
  REQUIRE(dm_get_comm(mesh, dim, &comm));
  return comm;
}

/* The rank in each communicator is the coordinate, and its ranks are the group's. */
static void communicators_fit(const dm_mesh *mesh)
{
  for (size_t index = 0; index < dm_ndim(mesh); ++index) {
    const char *name = dm_dim_name(mesh, index);
    int32_t group[16], gathered[16], local = -1, mine = rank_of(mesh);
    int32_t size = 0;
    size_t length = 0;
    int count = -1, rank = -1;
    ncclComm_t comm = comm_of(mesh, name);
    REQUIRE(dm_size(mesh, name, &size));
    REQUIRE(dm_get_local_rank(mesh, name, &local));
    REQUIRE(dm_group_ranks(mesh, name, group, 16, &length));
    CHECK(query(mesh, "ncclCommCount")(comm, &count) == ncclSuccess && count == size && length == (size_t)size);
    CHECK(query(mesh, "ncclCommUserRank")(comm, &rank) == ncclSuccess && rank == local && group[local] == mine);
    OK(dm_all_gather(mesh, name, &mine, gathered, 1, DM_INT32, NULL));
    CHECK(memcmp(group, gathered, length * sizeof *group) == 0);
    OK(dm_check(mesh, name));
  }
}

static void answers(const dm_mesh *mesh)
{
  const int32_t rank = rank_of(mesh);
  int32_t sizes[3], coordinate[3], size = 0, ranks[8], groups[8];
  size_t length = 0;
  CHECK(strcmp(describe(mesh), "DeviceMesh((dp=2, cp=2, tp=2), 'cpu', stride=(4, 2, 1))") == 0);
  CHECK(dm_ndim(mesh) == 3 && strcmp(dm_dim_name(mesh, 1), "cp") == 0);
  OK(dm_shape(mesh, sizes, 3, &length));
  CHECK(length == 3 && sizes[0] == 2 && sizes[1] == 2 && sizes[2] == 2);
  OK(dm_size(mesh, NULL, &size));
  CHECK(size == 8);
  OK(dm_get_coordinate(mesh, coordinate, 3, &length));
  CHECK(length == 3 && coordinate[0] == rank / 4 && coordinate[1] == rank / 2 % 2 && coordinate[2] == rank % 2);
  OK(dm_ranks(mesh, ranks, 8, &length));
  for (int32_t at = 0; at < 8; ++at) CHECK(ranks[at] == at);
  OK(dm_group_ranks(mesh, "dp", ranks, 8, &length));
  CHECK(length == 2 && ranks[0] == rank % 4 && ranks[1] == rank % 4 + 4);
  OK(dm_replica_groups(mesh, "cp", groups, 8, &length));
  const int32_t expected[] = {0, 2, 1, 3, 4, 6, 5, 7};
  CHECK(length == 8 && memcmp(groups, expected, sizeof expected) == 0);

  dm_mesh *copy = NULL, *tp = slice1(mesh, "tp");
  bool equal = false;
  uint64_t hash = 0, other = 1;
  REQUIRE(dm_clone(mesh, &copy));
  OK(dm_equal(mesh, copy, &equal));
  CHECK(equal);
  OK(dm_hash(mesh, &hash));
  OK(dm_hash(copy, &other));
  CHECK(hash == other);
  OK(dm_equal(mesh, tp, &equal));
  CHECK(!equal);
  uint64_t largest = 0;
  OK(dm_hash(tp, &other));
  CHECK(hash != other);
  /* Every rank finds these values. */
  dm_mesh *all = NULL;
  REQUIRE(dm_flatten(mesh, NULL, NULL, &all));
  OK(dm_all_reduce(all, NULL, &hash, &largest, 1, DM_UINT64, DM_MAX, NULL));
  CHECK(hash == largest);
  dm_free(all);
  dm_free(copy);
  dm_free(tp);
}

static void views(const dm_mesh *mesh)
{
  dm_mesh *tp_dp = NULL, *dp_cp = NULL, *again = NULL, *other = NULL, *split = NULL, *joined = NULL, *named = NULL, *root = NULL;
  const char *transposed[] = {"tp", "dp"}, *pair[] = {"dp", "cp"}, *flat_name[] = {"dp_cp"}, *dp[] = {"dp"};
  const int32_t rank = rank_of(mesh);
  int32_t ranks[8];
  size_t length = 0;
  int32_t count = 0;

  REQUIRE(dm_slice(mesh, transposed, 2, &tp_dp));
  CHECK(strcmp(describe(tp_dp), "DeviceMesh((tp=2, dp=2), 'cpu', stride=(1, 4))") == 0);
  CHECK(comm_of(tp_dp, "tp") == comm_of(mesh, "tp"));
  communicators_fit(tp_dp);

  /* Flattening again under one name gives the same dimension. Another name shares the
   * communicator, unless the options ask for one of its own. */
  REQUIRE(dm_slice(mesh, pair, 2, &dp_cp));
  dm_mesh *flat = NULL;
  REQUIRE(dm_flatten(dp_cp, NULL, NULL, &flat));
  CHECK(strcmp(dm_dim_name(flat, 0), "dp_cp") == 0);
  communicators_fit(flat);
  REQUIRE(dm_flatten(dp_cp, "dp_cp", NULL, &again));
  CHECK(comm_of(again, NULL) == comm_of(flat, NULL));
  REQUIRE(dm_flatten(dp_cp, "data", NULL, &other));
  CHECK(comm_of(other, NULL) == comm_of(flat, NULL));
  dm_dim_options own = DM_DIM_OPTIONS_INIT;
  own.flags = DM_DIM_OWN_COMM;
  dm_call_options apart = DM_CALL_OPTIONS_INIT;
  apart.dim_options = &own;
  apart.num_dim_options = 1;
  dm_mesh *mine = NULL;
  REQUIRE(dm_flatten(dp_cp, "own", &apart, &mine));
  CHECK(comm_of(mine, NULL) != comm_of(flat, NULL));
  communicators_fit(mine);
  REQUIRE(dm_slice(dp_cp, flat_name, 1, &named)); /* by name from a view that holds its dimensions */
  CHECK(comm_of(named, NULL) == comm_of(flat, NULL));
  FAILS(DM_STATUS_NOT_FOUND, "dp_cp", dm_slice(tp_dp, flat_name, 1, &root));
  /* The name also works as the name of a dimension, as in PyTorch's get_group. */
  int32_t local = -1, sum = 0;
  CHECK(comm_of(mesh, "dp_cp") == comm_of(flat, NULL) && comm_of(dp_cp, "dp_cp") == comm_of(flat, NULL));
  OK(dm_get_local_rank(mesh, "dp_cp", &local));
  CHECK(local == rank / 2);
  dm_mesh *cp = slice1(mesh, "cp"), *second = NULL; /* a view with another single dimension finds the flattened name too */
  REQUIRE(dm_flatten(cp, "second", NULL, &second));
  CHECK(comm_of(flat, "second") == comm_of(mesh, "cp"));
  dm_free(second);
  dm_free(cp);
  int32_t four = 0;
  OK(dm_size(mesh, "dp_cp", &four));
  CHECK(four == 4);
  OK(dm_group_ranks(mesh, "dp_cp", ranks, 8, &length));
  CHECK(length == 4 && ranks[local] == rank);
  OK(dm_all_reduce(mesh, "dp_cp", &local, &sum, 1, DM_INT32, DM_SUM, NULL));
  CHECK(sum == 6);
  OK(dm_check(mesh, "dp_cp"));
  FAILS(DM_STATUS_NOT_FOUND, "dp_cp", dm_get_local_rank(tp_dp, "dp_cp", &local));

  /* Transposed, the ranks of the flattened dimension come in another order. */
  dm_mesh *flat_transposed = NULL;
  REQUIRE(dm_flatten(tp_dp, "tp_dp", NULL, &flat_transposed));
  OK(dm_group_ranks(flat_transposed, NULL, ranks, 8, &length));
  const int32_t base = rank & 2;
  CHECK(length == 4 && ranks[0] == base && ranks[1] == base + 4 && ranks[2] == base + 1 && ranks[3] == base + 5);
  communicators_fit(flat_transposed);

  /* Unflatten the flattened dimension in another way, and concatenate views of one root. */
  const int32_t sizes[] = {4, 1};
  const char *parts[] = {"outer", "inner"};
  REQUIRE(dm_unflatten(flat, "dp_cp", sizes, 2, parts, NULL, &split));
  CHECK(strcmp(describe(split), "DeviceMesh((outer=4, inner=1), 'cpu', stride=(2, ()))") == 0);
  communicators_fit(split);
  const int32_t halves[] = {2, 2};
  const char *half_names[] = {"a", "b"};
  dm_mesh *halved = NULL, *a = NULL;
  REQUIRE(dm_unflatten(flat, "dp_cp", halves, 2, half_names, NULL, &halved));
  communicators_fit(halved);
  CHECK(comm_of(halved, "a") == comm_of(mesh, "dp") && comm_of(halved, "b") == comm_of(mesh, "cp"));
  a = slice1(halved, "a");
  dm_mesh *tp = slice1(mesh, "tp");
  const dm_mesh *side_by_side[] = {tp, a};
  REQUIRE(dm_concatenate(side_by_side, 2, &joined));
  CHECK(strcmp(describe(joined), "DeviceMesh((tp=2, a=2), 'cpu', stride=(1, 4))") == 0);
  communicators_fit(joined);

  /* The parallel copies of a submesh: this rank's and the others. */
  OK(dm_submesh_count(mesh, dp, 1, &count));
  CHECK(count == 4);
  for (int32_t index = 0; index < count; ++index) {
    dm_mesh *submesh = NULL;
    int32_t local = -1;
    ncclComm_t comm = NULL;
    REQUIRE(dm_submesh(mesh, dp, 1, index, &submesh));
    OK(dm_ranks(submesh, ranks, 8, &length));
    CHECK(length == 2 && ranks[0] == (int32_t)index && ranks[1] == (int32_t)index + 4);
    if (rank % 4 == (int32_t)index) {
      OK(dm_get_local_rank(submesh, NULL, &local));
      CHECK(local == rank / 4 && comm_of(submesh, NULL) == comm_of(mesh, "dp"));
    } else {
      FAILS(DM_STATUS_NOT_MEMBER, "is not in", dm_get_local_rank(submesh, NULL, &local));
      GIVES(DM_STATUS_NOT_MEMBER, dm_get_comm(submesh, NULL, &comm));
      GIVES(DM_STATUS_NOT_MEMBER, dm_flatten(submesh, "elsewhere", NULL, &root));
    }
    dm_free(submesh);
  }

  REQUIRE(dm_root(joined, &root));
  bool equal = false;
  OK(dm_equal(root, mesh, &equal));
  CHECK(equal);

  /* Meshes are found by a registered name, for XLA handlers, which get only attributes. */
  dm_mesh *found = NULL;
  OK(dm_register(joined, "trainer"));
  OK(dm_lookup("trainer", &found));
  CHECK(comm_of(found, "tp") == comm_of(mesh, "tp"));
  OK(dm_unregister("trainer"));
  FAILS(DM_STATUS_NOT_FOUND, "trainer", dm_lookup("trainer", &found));

  dm_mesh *all[] = {tp_dp, dp_cp, flat, again, other, mine, named, flat_transposed, split, halved, a, tp, joined, root, found};
  for (size_t at = 0; at < sizeof all / sizeof *all; ++at) dm_free(all[at]);
}

static void others_of_the_same_world(const dm_mesh *mesh)
{
  const int32_t shape[] = {2, 4}, ones[] = {1, 8, 1}, small[] = {3}, whole[] = {8};
  const char *names[] = {"replicate", "shard"}, *one_names[] = {"x", "y", "z"};
  dm_mesh *second = NULL, *flat = NULL, *permuted = NULL, *unit = NULL, *part = NULL, *line = NULL;
  const int32_t rank = rank_of(mesh);

  /* Equal groups share a communicator: shard of (2, 4), and (cp, tp) of (2, 2, 2) flattened. */
  REQUIRE(dm_init("cpu", shape, 2, names, NULL, &second));
  communicators_fit(second);
  const char *cp_tp[] = {"cp", "tp"};
  dm_mesh *view = NULL;
  REQUIRE(dm_slice(mesh, cp_tp, 2, &view));
  REQUIRE(dm_flatten(view, NULL, NULL, &flat));
  CHECK(comm_of(flat, NULL) == comm_of(second, "shard"));
  CHECK(comm_of(second, "replicate") == comm_of(mesh, "dp")); /* stride 4, size 2 */

  /* In any order of ranks the coordinate, the local rank and the rank in the communicator are one
   * number. */
  const int32_t order[] = {5, 3, 1, 7, 0, 2, 4, 6};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.ranks = order;
  options.num_ranks = 8;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &permuted));
  communicators_fit(permuted);
  int32_t group[4];
  size_t length = 0;
  OK(dm_group_ranks(permuted, "shard", group, 4, &length));
  CHECK(memcmp(group, rank == 5 || rank == 3 || rank == 1 || rank == 7 ? order : order + 4, sizeof group) == 0);

  /* Dimensions of size 1 have no communicator until a program asks for it. Then they all share
   * one. */
  REQUIRE(dm_init("cpu", ones, 3, one_names, NULL, &unit));
  communicators_fit(unit);
  CHECK(comm_of(unit, "x") == comm_of(unit, "z"));
  REQUIRE(dm_init("cpu", whole, 1, NULL, NULL, &line));
  CHECK(comm_of(unit, "y") == comm_of(line, NULL) && strcmp(dm_dim_name(line, 0), "dim_0") == 0);

  /* The mesh is smaller than the world. All ranks make the call, and some are outside the mesh. */
  const int32_t three[] = {6, 2, 4};
  options.ranks = three;
  options.num_ranks = 3;
  REQUIRE(dm_init("cpu", small, 1, NULL, &options, &part));
  if (rank == 2 || rank == 4 || rank == 6) {
    communicators_fit(part);
  } else {
    ncclComm_t comm = NULL;
    int32_t local = 0, seen = -1;
    FAILS(DM_STATUS_NOT_MEMBER, "is not in", dm_get_comm(part, NULL, &comm));
    GIVES(DM_STATUS_NOT_MEMBER, dm_get_local_rank(part, NULL, &local));
    GIVES(DM_STATUS_NOT_MEMBER, dm_group_ranks(part, NULL, &local, 1, &length));
    OK(dm_rank(part, &seen));
    CHECK(seen == rank);
  }
  OK(dm_finalize(part, NULL));

  /* Finalizing one mesh leaves the communicators that other meshes share. */
  OK(dm_finalize(second, NULL));
  GIVES(DM_STATUS_ABORTED, dm_slice(second, names, 1, &view));
  float one = 1, sum = 0;
  OK(dm_all_reduce(flat, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 4);
  OK(dm_finalize(unit, NULL));
  OK(dm_all_reduce(line, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 8);
  OK(dm_finalize(line, NULL));
  OK(dm_finalize(permuted, NULL));

  dm_mesh *all[] = {second, view, flat, permuted, unit, line, part};
  for (size_t at = 0; at < sizeof all / sizeof *all; ++at) dm_free(all[at]);
}

typedef ncclResult_t (*init_all_t)(ncclComm_t *, int, const int *);

/* DM_INIT_OWN_COMMS: finalizing the mesh destroys what it adopted. */
static void adopted_for_good(const dm_mesh *mesh)
{
  const int32_t shape[] = {1};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  void *address = NULL;
  init_all_t init_all = NULL;
  ncclComm_t comm = NULL;
  dm_mesh *over = NULL;
  int count = 0;
  REQUIRE(dm_get_proc(mesh, "ncclCommInitAll", &address));
  memcpy(&init_all, &address, sizeof init_all);
  for (int owned = 0; owned < 2; ++owned) {
    CHECK(init_all(&comm, 1, NULL) == ncclSuccess);
    options.flags = owned ? DM_INIT_OWN_COMMS : 0;
    REQUIRE(dm_from_comms("cpu", shape, 1, NULL, &comm, &options, &over));
    CHECK(comm_of(over, NULL) == comm);
    OK(dm_finalize(over, NULL));
    CHECK((query(mesh, "ncclCommCount")(comm, &count) == ncclSuccess) == !owned);
    dm_free(over);
  }
}

static void adopted(const dm_mesh *mesh)
{
  /* A mesh over existing communicators and without a world numbers its ranks by coordinate. */
  const int32_t shape[] = {2, 2}, wrong[] = {2, 3};
  const char *names[] = {"cp", "tp"};
  ncclComm_t comms[2] = {comm_of(mesh, "cp"), comm_of(mesh, "tp")}, missing[2] = {comms[0], NULL};
  dm_mesh *over = NULL, *none = NULL;
  OK(dm_from_comms("cpu", shape, 2, names, comms, NULL, &over));
  CHECK(comm_of(over, "tp") == comms[1] && rank_of(over) == rank_of(mesh) % 4);
  communicators_fit(slice1(over, "tp"));
  FAILS(DM_STATUS_UNSUPPORTED, "without a world", dm_flatten(over, NULL, NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "has 2 ranks", dm_from_comms("cpu", wrong, 2, names, comms, NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "comms[1] is NULL", dm_from_comms("cpu", shape, 2, names, missing, NULL, &none));
  const int32_t negative[] = {-1, -1, -1, -1};
  dm_init_options listed = DM_INIT_OPTIONS_INIT;
  listed.ranks = negative;
  listed.num_ranks = 4;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank -1 at index 0 is out of range", dm_from_comms("cpu", shape, 2, names, comms, &listed, &none));
  /* device_type NULL means the world's device type. A shape that is too large is refused before
   * its ranks are read. */
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t huge[] = {1 << 20, 1 << 10};
  const int32_t one[] = {0};
  join.flags = DM_WORLD_OFFLINE;
  REQUIRE(dm_world_init("cuda", &join, &options.world));
  options.ranks = one;
  options.num_ranks = 1;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "has 1073741824 ranks, but the world has 8", dm_init(NULL, huge, 2, names, &options, &none));
  options.ranks = NULL;
  options.num_ranks = 0;
  REQUIRE(dm_init(NULL, shape, 2, names, &options, &none));
  CHECK(strstr(describe(none), "'cuda'") != NULL);
  dm_free(none);
  dm_world_free(options.world);

  OK(dm_finalize(over, NULL));
  CHECK(comm_of(mesh, "tp") == comms[1]); /* borrowed: still alive */
  communicators_fit(mesh);
  dm_free(over);
}

int main(void)
{
  const int32_t shape[] = {2, 2, 2};
  const char *names[] = {"dp", "cp", "tp"};
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cpu", shape, 3, names, NULL, &mesh));
  answers(mesh);
  communicators_fit(mesh);
  views(mesh);
  others_of_the_same_world(mesh);
  adopted(mesh);
  adopted_for_good(mesh);
  OK(dm_finalize(mesh, NULL));
  FAILS(DM_STATUS_ABORTED, "finalized", dm_check(mesh, "dp"));
  dm_free(mesh);
  return finish();
}
