/* ranks: 4 */
/* Meshes over existing communicators, each with some of the ranks. Only the ranks of such a mesh
 * take part in its collective calls. */
#include "check.h"

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *half = NULL, *split = NULL;
  const int32_t square[] = {2, 2}, pair[] = {2}, sizes[] = {2, 1};
  const char *names[] = {"dp", "tp"}, *parts[] = {"a", "b"};
  ncclComm_t comm = NULL;
  int32_t rank = -1;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_world_rank(options.world, &rank));
  REQUIRE(dm_init("cpu", square, 2, names, &options, &mesh));
  REQUIRE(dm_get_comm(mesh, "tp", &comm));

  /* Ranks 0 and 1 make one mesh, ranks 2 and 3 another. It is the first such mesh of each rank. */
  const int32_t ranks[] = {rank / 2 * 2, rank / 2 * 2 + 1};
  dm_dim_options own[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  own[0].flags = DM_DIM_OWN_COMM;
  dm_call_options apart = DM_CALL_OPTIONS_INIT;
  apart.dim_options = own;
  apart.num_dim_options = 2;
  options.ranks = ranks;
  options.num_ranks = 2;
  options.timeout_ms = 5000;
  REQUIRE(dm_from_comms("cpu", pair, 1, &names[1], &comm, &options, &half));
  for (int i = 0; i < 5; ++i) {
    REQUIRE(dm_unflatten(half, "tp", sizes, 2, parts, &apart, &split));
    float mine = (float)(1 << rank), sum = 0;
    OK(dm_all_reduce(split, "a", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == (rank < 2 ? 3 : 12));
    dm_free(split);
  }
  OK(dm_world_barrier(options.world, 0));
  dm_free(half);
  dm_free(mesh);
  dm_world_free(options.world);
  return finish();
}
