/* Makes some collectives on one rank, which a tool that listens to NVTX sees (tests/test_nvtx.py). */
#include "check.h"

int main(void)
{
  const int32_t shape[] = {1, 1};
  const char *names[] = {"dp", "tp"};
  dm_mesh *mesh = NULL;
  float values[4] = {1, 2, 3, 4}, sums[4];
  setvbuf(stdout, NULL, _IOLBF, 0);
  REQUIRE(dm_init("cpu", shape, 2, names, NULL, &mesh));
  OK(dm_all_reduce(mesh, "tp", values, sums, 4, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_group_start(mesh));
  OK(dm_broadcast(mesh, "dp", values, sums, 3, DM_FLOAT32, 0, NULL));
  OK(dm_group_end(mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "stream", dm_all_reduce(mesh, "tp", values, sums, 2, DM_FLOAT32, DM_SUM, values));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  return finish();
}
