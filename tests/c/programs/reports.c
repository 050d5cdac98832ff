/* Four ranks on two hosts, with dp between the hosts and tp inside each. Rank 3 comes to no call any
 * more after the first ones: ranks 1 and 2 wait for it until their deadlines. Then dp has another
 * count on rank 2 than on rank 0. Each rank prints the errors of its calls. The ranks wait for each
 * other at the end, so that all recordings can be read meanwhile. */
#include "check.h"

static int32_t rank;

static dm_mesh *make(void)
{
  const int32_t shape[] = {2, 2};
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  options.timeout_ms = 2000; /* also the time to make the mesh */
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  return mesh;
}

static dm_status sum(const dm_mesh *mesh, const char *dim, size_t count)
{
  float values[16] = {0};
  return dm_all_reduce(mesh, dim, values, values, count, DM_FLOAT32, DM_SUM, NULL);
}

int main(void)
{
  dm_world *world = NULL;
  /* The ranks may start at different times, and dm_init would join within its own timeout. */
  REQUIRE(dm_default_world("cpu", 0, &world));
  dm_mesh *mesh = make();
  REQUIRE(dm_rank(mesh, &rank));
  for (int call = 0; call < 2; ++call) OK(sum(mesh, "dp", 8));
  OK(sum(mesh, "tp", 8));
  OK(dm_world_barrier(world, 0));
  if (rank == 1) {
    GIVES(DM_STATUS_TIMEOUT, sum(mesh, "dp", 8));
    printf("rank 1 late: %s\n", dm_last_error());
  }
  if (rank == 2) GIVES(DM_STATUS_TIMEOUT, sum(mesh, "tp", 8));
  OK(dm_world_barrier(world, 0));
  dm_mesh *next = make();
  OK(sum(next, "dp", 4));
  if (rank % 2 == 0) {
    GIVES(DM_STATUS_MISMATCH, sum(next, "dp", rank == 0 ? 5 : 6));
    printf("rank %d different: %s\n", rank, dm_last_error());
  }
  OK(dm_world_barrier(world, 0));
  OK(dm_abort(next));
  OK(dm_abort(mesh));
  dm_free(next);
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
