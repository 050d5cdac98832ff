/* ranks: 4 */
/* Every disagreement between ranks, while they join and in each collective call, gives all ranks
 * the same message at once. */
#include "check.h"

#include <string.h>

static int32_t rank;
static double began;

/* Each error comes long before the deadline of ten minutes. */
static void soon(const char *what)
{
  const double took = seconds_now() - began;
  if (took > 3) fprintf(stderr, "%s took %.3f s\n", what, took);
  CHECK(took < 3);
  began = seconds_now();
}

static void joining(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  /* Another device type, whether or not this machine has it. */
  FAILS(DM_STATUS_MISMATCH, "rank 2 called dm_world_init(device_type=cuda, world_size=4, version=",
        dm_world_init(rank == 2 ? "cuda" : "cpu", &join, &world));
  soon("another device type");
  /* A rank that cannot take part tells all ranks. */
  if (rank == 1) join.ccl_library = "/nowhere/libnccl.so.2";
  FAILS(DM_STATUS_LIBRARY, "/nowhere/libnccl.so.2", dm_world_init("cpu", &join, &world));
  if (rank != 1) CHECK(strstr(dm_last_error(), "rank 1 failed in dm_world_init(device_type=cpu") != NULL);
  soon("a missing library");
  /* Another world size, where the program sets it and not a launcher. */
  char method[4096];
  const char *folder = getenv("DM_TMP"), *port = getenv("MASTER_PORT");
  snprintf(method, sizeof method, "file://%s/disagree-%s", folder != NULL ? folder : "/tmp", port);
  join.ccl_library = NULL;
  join.init_method = method;
  join.rank = rank;
  join.world_size = rank == 3 ? 8 : 4;
  FAILS(DM_STATUS_MISMATCH, "rank 3 called dm_world_init(device_type=cpu, world_size=8", dm_world_init("cpu", &join, &world));
  CHECK(strstr(dm_last_error(), "rank 0 called dm_world_init(device_type=cpu, world_size=4") != NULL);
  soon("another world size");
}

static void calling(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_dim_options own[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dm_mesh *mesh = NULL, *half = NULL, *view = NULL;
  const int32_t square[] = {2, 2}, four[] = {4}, pair[] = {2};
  const int32_t wide[] = {1, 4}, long_one[] = {4, 1};
  const char *names[] = {"dp", "tp"}, *whole[] = {"all"};
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  began = seconds_now();
  /* Options of a dimension. */
  if (rank == 3) {
    own[1].flags = DM_DIM_OWN_COMM;
    options.dim_options = own;
    options.num_dim_options = 2;
  }
  FAILS(DM_STATUS_MISMATCH, "rank 3 called dm_init(shape=(2, 2), names=(dp, tp)", dm_init("cpu", square, 2, names, &options, &mesh));
  options.dim_options = NULL;
  options.num_dim_options = 0;
  soon("options of a dimension");
  /* Several ranks disagree at once. The message names each with what it asked for. */
  FAILS(DM_STATUS_MISMATCH, "ranks 1, 2 called dm_init(shape=(1, 4), names=(dp, tp)) as call",
        rank == 3 ? dm_world_barrier(options.world, 0) : dm_init("cpu", rank == 0 ? square : wide, 2, names, &options, &mesh));
  CHECK(strstr(dm_last_error(), "rank 3 called dm_world_barrier(), rank 0 called dm_init(shape=(2, 2), names=(dp, tp))") != NULL);
  soon("several");
  REQUIRE(dm_init("cpu", square, 2, names, &options, &mesh));
  /* The ranks flatten or split different dimensions, split them differently, or give other
     names. */
  const char *both[] = {"dp", "tp"}, *turned[] = {"tp", "dp"};
  dm_mesh *flat = NULL, *transposed = NULL;
  REQUIRE(dm_slice(mesh, turned, 2, &transposed));
  FAILS(DM_STATUS_MISMATCH, "dm_flatten(dims=(tp, dp)", dm_flatten(rank == 1 ? transposed : mesh, "flat", NULL, &view));
  REQUIRE(dm_flatten(mesh, "flat", NULL, &flat));
  soon("what to flatten");
  FAILS(DM_STATUS_MISMATCH, "sizes=(4, 1)", dm_unflatten(flat, "flat", rank == 2 ? long_one : square, 2, both, NULL, &view));
  FAILS(DM_STATUS_MISMATCH, "names=(tp, dp)", dm_unflatten(flat, "flat", square, 2, rank == 2 ? turned : both, NULL, &view));
  soon("how to split");
  /* The ranks make their calls in different orders, on two meshes over the same ranks and on
   * meshes over different ranks. */
  dm_mesh *second = NULL, *third = NULL;
  REQUIRE(dm_init("cpu", four, 1, whole, &options, &second));
  FAILS(DM_STATUS_MISMATCH, "dm_finalize(", dm_finalize(rank == 2 ? mesh : second, NULL));
  soon("order on meshes of the same ranks");
  const int32_t low[] = {1, 0};
  options.ranks = low;
  options.num_ranks = 2;
  REQUIRE(dm_init("cpu", pair, 1, whole, &options, &half));
  options.ranks = NULL;
  options.num_ranks = 0;
  /* Rank 1 makes a call of the small mesh while all others make a call of the world. */
  if (rank == 1)
    FAILS(DM_STATUS_MISMATCH, "each waits for the other", dm_finalize(half, NULL));
  else
    FAILS(DM_STATUS_MISMATCH, "each waits for the other", dm_init("cpu", square, 2, names, &options, &third));
  soon("order on meshes of other ranks");
  /* After all these errors every mesh works. */
  float one = 1, sum = 0;
  OK(dm_all_reduce(flat, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 4);
  if (rank < 2) {
    OK(dm_all_reduce(half, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == 2);
  }
  /* The others missed rank 1 in their last call of the world. It knows how theirs ended, so its
   * next call meets their next one. */
  OK(dm_world_barrier(options.world, 0));
}

int main(void)
{
  rank = atoi(getenv("RANK"));
  began = seconds_now();
  joining();
  calling();
  return finish();
}
