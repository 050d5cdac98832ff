/* ranks: 4 */
/* A wrong call fails on its caller alone, with the values, before anything is sent. One rank makes
 * the wrong call, in an offline world and in a real one. The next collective call of all ranks
 * then works. */
#include "check.h"

static dm_mesh *const kUntouched = (dm_mesh *)0x5a5a;
static const int32_t kHuge = 1 << 30;

/* The meshes and worlds for the wrong calls. Ranks 2 and 0 are in pair, 1 and 3 are not. */
struct place {
  dm_world *world;
  dm_mesh *mesh, *dp, *tp, *all, *pair, *other;
};

static dm_mesh *made; /* an output that no refused call may write */

static dm_status init(const struct place *at, size_t ndim, const int32_t *shape, const char *const *names, const int32_t *ranks)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = at->world;
  options.ranks = ranks;
  options.num_ranks = ranks != NULL ? 4 : 0;
  return dm_init("cpu", shape, ndim, names, &options, &made);
}

static dm_status ranks_are(const struct place *at, int32_t a, int32_t b, int32_t c, int32_t d)
{
  const int32_t ranks[] = {a, b, c, d};
  const int32_t shape[] = {2, 2};
  return init(at, 2, shape, NULL, ranks);
}

static dm_status shape_is(const struct place *at, int32_t first, int32_t second)
{
  const int32_t shape[] = {first, second};
  return init(at, 2, shape, NULL, NULL);
}

static dm_status names_are(const struct place *at, const char *first, const char *second)
{
  const int32_t shape[] = {2, 2};
  const char *names[] = {first, second};
  return init(at, 2, shape, names, NULL);
}

static dm_status split(const struct place *at, int32_t first, int32_t second, const char *first_name, const char *second_name)
{
  const int32_t sizes[] = {first, second};
  const char *names[] = {first_name, second_name};
  return dm_unflatten(at->all, "all", sizes, 2, names, NULL, &made);
}

static dm_status split_tp(const struct place *at, const char *first_name, const char *second_name)
{
  const int32_t sizes[] = {1, 2};
  const char *names[] = {first_name, second_name};
  return dm_unflatten(at->mesh, "tp", sizes, 2, names, NULL, &made);
}

static dm_status reshape(const struct place *at, int32_t first, int32_t second, const char *first_name, const char *second_name)
{
  const int32_t sizes[] = {first, second};
  const char *names[] = {first_name, second_name};
  return dm_reshape(at->mesh, sizes, 2, names, NULL, &made);
}

static dm_status slice(const dm_mesh *mesh, const char *first, const char *second)
{
  const char *names[] = {first, second};
  return dm_slice(mesh, names, 2, &made);
}

static dm_status beside(const dm_mesh *first, const dm_mesh *second)
{
  const dm_mesh *meshes[] = {first, second};
  return dm_concatenate(meshes, 2, &made);
}

static dm_status copy(const struct place *at, int32_t index)
{
  const char *names[] = {"tp"};
  return dm_submesh(at->mesh, names, 1, index, &made);
}

/* The copy of tp that does not hold the calling rank. The rank asks for its own place in it, or
 * flattens it. */
static dm_status elsewhere(const struct place *at, bool flatten)
{
  dm_mesh *theirs = NULL;
  int32_t rank = -1;
  const char *names[] = {"tp"};
  REQUIRE(dm_submesh(at->mesh, names, 1, rank_of(at->mesh) < 2, &theirs));
  const dm_status status = flatten ? dm_flatten(theirs, "theirs", NULL, &made) : dm_get_local_rank(theirs, "tp", &rank);
  CHECK(rank == -1);
  dm_free(theirs);
  return status;
}

static dm_status local_rank(const dm_mesh *mesh)
{
  int32_t rank = -1;
  const dm_status status = dm_get_local_rank(mesh, NULL, &rank);
  CHECK(rank == -1);
  return status;
}

static dm_status coordinate(const dm_mesh *mesh)
{
  int32_t numbers[1] = {77};
  size_t length = 77;
  const dm_status status = dm_get_coordinate(mesh, numbers, 1, &length);
  CHECK(numbers[0] == 77 && length == (status == DM_STATUS_INVALID_HANDLE ? 77 : 1));
  return status;
}

static dm_status translate(const struct place *at, int32_t member)
{
  int32_t rank = -1;
  const dm_status status = dm_translate_rank(at->mesh, "tp", member, &rank);
  CHECK(rank == -1);
  return status;
}

static dm_status neighbor(const dm_mesh *mesh)
{
  int32_t rank = -7;
  const dm_status status = dm_neighbor(mesh, NULL, 1, true, &rank);
  CHECK(rank == -7);
  return status;
}

static dm_status shard(const struct place *at, int32_t kind, int32_t tensor_dim)
{
  const dm_placement placements[] = {DM_PLACEMENT_REPLICATE, {kind, tensor_dim, 0, {0}}};
  const size_t tensor[] = {8};
  size_t shape[] = {77}, offset[] = {77};
  const dm_status status = dm_local_shard(at->mesh, placements, 2, tensor, 1, -1, shape, offset);
  CHECK(shape[0] == 77 && offset[0] == 77);
  return status;
}

/* Each row of the table: the rank that calls (1 and 3 are outside of pair), whether the call is
 * also made in an offline world, the status, values in the message, and the call. */
#define BAD DM_STATUS_INVALID_ARGUMENT
#define OUT DM_STATUS_NOT_MEMBER
#define TABLE(ROW) \
  ROW(0, BAD, "has 1152921504606846976 ranks", "the world has 4", shape_is(at, kHuge, kHuge)) \
  ROW(3, BAD, "has 1073741824 ranks", "the world has 4", shape_is(at, 1, kHuge)) \
  ROW(1, BAD, "dimension 0 has size 0", "at least 1", shape_is(at, 0, 4)) \
  ROW(2, BAD, "(3, 2) has 6 ranks", "the world has 4", shape_is(at, 3, 2)) \
  ROW(0, BAD, "rank 2 is listed twice", "index 0 and index 3", ranks_are(at, 2, 0, 1, 2)) \
  ROW(1, BAD, "rank -7 at index 1", "0 to 3", ranks_are(at, 0, -7, 2, 3)) \
  ROW(2, BAD, "rank 4 at index 3", "0 to 3", ranks_are(at, 0, 1, 2, 4)) \
  ROW(3, BAD, "dimension name dp is repeated", "(dp, dp)", names_are(at, "dp", "dp")) \
  ROW(0, BAD, "name of dimension 1 is empty", "", names_are(at, "dp", "")) \
  ROW(1, BAD, "count of shape is 65537", "65536", init(at, 65537, &kHuge, NULL, NULL)) \
  ROW(2, BAD, "at least one dimension", "ndim 0", dm_from_comms("cpu", NULL, 0, NULL, NULL, NULL, &made)) \
  ROW(3, BAD, "count of dim_names is 65537", "65536", dm_slice(at->mesh, NULL, 65537, &made)) \
  ROW(0, BAD, "tp is repeated", "(tp, tp)", slice(at->mesh, "tp", "tp")) \
  ROW(1, DM_STATUS_NOT_FOUND, "dimension pp", "(dp, tp, all)", slice(at->mesh, "tp", "pp")) \
  ROW(2, DM_STATUS_NOT_FOUND, "dimension all", "(tp)", slice(at->tp, "tp", "all")) \
  ROW(3, BAD, "overlapping", "(tp, all)", slice(at->mesh, "tp", "all")) \
  ROW(0, BAD, "overlapping", "(tp=2)", beside(at->tp, at->tp)) \
  ROW(1, BAD, "overlapping", "(all=4)", beside(at->tp, at->all)) \
  ROW(2, BAD, "different root meshes", "(elsewhere=4)", beside(at->tp, at->other)) \
  ROW(3, BAD, "at least one mesh", "got 0", dm_concatenate(NULL, 0, &made)) \
  ROW(0, BAD, "count of meshes is 65537", "65536", dm_concatenate(NULL, 65537, &made)) \
  ROW(1, BAD, "dp is already a dimension", "(dp=2, tp=2)", dm_flatten(at->mesh, "dp", NULL, &made)) \
  ROW(2, BAD, "flattened dimension all", "other ranks", dm_flatten(at->tp, "all", NULL, &made)) \
  ROW(3, BAD, "(2, 3) is 6", "has size 4", split(at, 2, 3, "a", "b")) \
  ROW(0, BAD, "(1073741824, 1073741824) is 1152921504606846976", "has size 4", split(at, kHuge, kHuge, "a", "b")) \
  ROW(1, BAD, "size 0 of dimension all is 0", "at least 1", split(at, 0, 4, "a", "b")) \
  ROW(2, BAD, "dimension name a is repeated", "(a, a)", split(at, 2, 2, "a", "a")) \
  ROW(3, BAD, "dimension name dp is repeated", "(dp, a, dp)", split_tp(at, "a", "dp")) \
  ROW(0, DM_STATUS_NOT_FOUND, "dimension pp", "(dp, tp)", dm_unflatten(at->mesh, "pp", NULL, 0, NULL, NULL, &made)) \
  ROW(1, BAD, "of sizes () is 1", "has size 2", dm_unflatten(at->mesh, "tp", NULL, 0, NULL, NULL, &made)) \
  ROW(2, BAD, "(3, 2) is 6", "has size 4", reshape(at, 3, 2, "a", "b")) \
  ROW(3, BAD, "size 1 is 0", "at least 1", reshape(at, 4, 0, "a", "b")) \
  ROW(0, BAD, "dimension dp of shape (1, 4)", "(2, 2)", reshape(at, 1, 4, "a", "dp")) \
  ROW(1, BAD, "0 indices", "at least 1", dm_slice_range(at->mesh, "tp", 0, 0, 1, NULL, &made)) \
  ROW(2, BAD, "2 indices from 1 in steps of 1 end at 2", "0 to 1", dm_slice_range(at->mesh, "tp", 1, 2, 1, NULL, &made)) \
  ROW(3, BAD, "step is -1", "negative", dm_slice_range(at->mesh, "tp", 1, 3, -1, NULL, &made)) \
  ROW(0, DM_STATUS_NOT_FOUND, "dimension pp", "(dp, tp", dm_slice_range(at->mesh, "pp", 0, 1, 1, NULL, &made)) \
  ROW(1, BAD, "submesh 2 of (tp)", "has 2 of them", copy(at, 2)) \
  ROW(2, BAD, "rank 2 along dimension tp", "0 to 1", translate(at, 2)) \
  ROW(3, BAD, "dim_rank is -1", "", translate(at, -1)) \
  ROW(0, BAD, "placements[1].kind is 3", "DM_PARTIAL (2)", shard(at, 3, 0)) \
  ROW(1, BAD, "tp shards tensor dimension 1", "has 1 dimensions", shard(at, DM_SHARD, 1)) \
  ROW(2, BAD, "timeout_ms is -5", "", dm_world_barrier(at->world, -5)) \
  ROW(0, OUT, "rank 0 is not in DeviceMesh((tp=2)", "", elsewhere(at, false)) \
  ROW(offline ? -1 : 3, OUT, "rank 3 is not in DeviceMesh((tp=2)", "", elsewhere(at, true)) \
  ROW(1, OUT, "rank 1 is not in DeviceMesh((x=2)", "", local_rank(at->pair)) \
  ROW(3, OUT, "rank 3 is not in DeviceMesh((x=2)", "", coordinate(at->pair)) \
  ROW(1, OUT, "rank 1 is not in DeviceMesh((x=2)", "", neighbor(at->pair)) \
  ROW(3, OUT, "rank 3 is not in DeviceMesh((x=2)", "", dm_slice(at->pair, NULL, 0, &made)) \
  ROW(offline ? -1 : 1, OUT, "rank 1 is not in DeviceMesh((x=2)", "", dm_flatten(at->pair, "y", NULL, &made))

/* Calls that all ranks make: some agree through the store, some run on communicators, and some are
 * made by the ranks of the small mesh. */
static void together(const struct place *at, int32_t rank, int row)
{
  float one = 1, sum = 0;
  /* A rank that refuses its own call tells those that make a call of the same function. */
  if (dm_world_barrier(at->world, 0) != DM_STATUS_OK) {
    CHECK(strstr(dm_last_error(), "refused its own dm_world_barrier as call ") != NULL);
    REQUIRE(dm_world_barrier(at->world, 0));
  }
  REQUIRE(dm_all_reduce(at->mesh, "all", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  if (sum != 4) fprintf(stderr, "after row %d the sum over all ranks is %g\n", row, (double)sum);
  CHECK(sum == 4);
  if (rank % 2 == 0) {
    REQUIRE(dm_all_reduce(at->pair, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == 2);
  }
}

static void refused(const struct place *at, int32_t rank, bool offline)
{
  int row = 0;
#define ROW(who, expected, first, second, call) \
  ++row; \
  if (rank == (who)) { \
    const double began = seconds_now(); \
    FAILS(expected, first, call); \
    CHECK(strstr(dm_last_error(), second) != NULL); \
    CHECK(made == kUntouched); \
    CHECK(seconds_now() - began < 5); /* no rank waits; the deadline would be ten minutes */ \
  } \
  if (!offline) together(at, rank, row);
  TABLE(ROW)
#undef ROW
}

static struct place place(int32_t rank, bool offline)
{
  struct place at;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t square[] = {2, 2}, two[] = {2}, four[] = {4};
  const char *names[] = {"dp", "tp"}, *x[] = {"x"}, *elsewhere_name[] = {"elsewhere"};
  const int32_t ranks[] = {2, 0};
  if (offline) {
    join.flags = DM_WORLD_OFFLINE;
    join.world_size = 4;
    join.rank = rank;
  }
  REQUIRE(dm_world_init("cpu", &join, &at.world));
  options.world = at.world;
  REQUIRE(dm_init("cpu", square, 2, names, &options, &at.mesh));
  REQUIRE(dm_init("cpu", four, 1, elsewhere_name, &options, &at.other));
  REQUIRE(dm_flatten(at.mesh, "all", NULL, &at.all));
  at.dp = slice1(at.mesh, "dp");
  at.tp = slice1(at.mesh, "tp");
  options.ranks = ranks;
  options.num_ranks = 2;
  REQUIRE(dm_init("cpu", two, 1, x, &options, &at.pair));
  made = kUntouched;
  return at;
}

static void leave(struct place *at)
{
  dm_mesh *all[] = {at->mesh, at->dp, at->tp, at->all, at->pair, at->other};
  for (size_t index = 0; index < sizeof all / sizeof *all; ++index) dm_free(all[index]);
  dm_world_free(at->world);
}

int main(void)
{
  const int32_t rank = atoi(getenv("RANK"));
  struct place at = place(rank, true);
  refused(&at, rank, true);
  leave(&at);
  at = place(rank, false);
  refused(&at, rank, false);
  /* Names in another order are allowed in this call. */
  REQUIRE(slice(at.mesh, "tp", "dp"));
  CHECK(strcmp(describe(made), "DeviceMesh((tp=2, dp=2), 'cpu', stride=(1, 2))") == 0);
  dm_free(made);
  /* Collective calls of the meshes work as well. */
  OK(dm_finalize(at.pair, NULL));
  OK(dm_finalize(at.mesh, NULL));
  leave(&at);
  return finish();
}
