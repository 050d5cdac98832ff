/* The two lines, in C.
 *
 *     devicemesh run -n 8 -- ./hello_mesh
 *
 * All ranks form a mesh (dp, tp) with tp=2 where that divides; each sums its rank over both
 * dimensions. */
#include <devicemesh.h>
#include <stdio.h>
#include <stdlib.h>

static void check(dm_status status, const char *call)
{
  if (status != DM_STATUS_OK) {
    fprintf(stderr, "%s: %s: %s\n", call, dm_status_name(status), dm_last_error());
    exit(1);
  }
}
#define CHECK(call) check(call, #call)

int main(void)
{
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  ncclComm_t tp = NULL;
  int32_t ranks, rank, dp_rank, tp_rank;

  /* Only to learn how many ranks there are; a program that knows its shape needs no world of its
   * own. */
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  CHECK(dm_world_init("cpu", &join, &world));
  CHECK(dm_world_size(world, &ranks));

  const char *names[2] = {"dp", "tp"};
  int32_t shape[2];
  shape[1] = ranks % 2 == 0 ? 2 : 1;
  shape[0] = ranks / shape[1];
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = world;

  CHECK(dm_init("cpu", shape, 2, names, &options, &mesh)); /* line one: every rank says the same */
  CHECK(dm_get_comm(mesh, "tp", &tp));                     /* line two: a raw ncclComm_t, ready */

  CHECK(dm_rank(mesh, &rank));
  CHECK(dm_get_local_rank(mesh, "dp", &dp_rank));
  CHECK(dm_get_local_rank(mesh, "tp", &tp_rank));
  float mine = (float)rank, over_tp = 0, over_dp = 0;
  CHECK(dm_all_reduce(mesh, "tp", &mine, &over_tp, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(dm_all_reduce(mesh, "dp", &mine, &over_dp, 1, DM_FLOAT32, DM_SUM, NULL));
  printf("rank %d at (dp=%d, tp=%d): sum over tp %g, over dp %g\n", rank, dp_rank, tp_rank, over_tp, over_dp);

  CHECK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(world);
  return 0;
}
