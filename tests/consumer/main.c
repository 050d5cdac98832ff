/* Sums the ranks of a two-rank mesh. */
#include <devicemesh.h>

#include <stdio.h>

int main(void)
{
  dm_mesh *mesh = NULL;
  const int32_t shape[] = {2};
  float mine = 0, sum = 0;
  int32_t rank = 0;
  if (dm_init("cpu", shape, 1, NULL, NULL, &mesh) != DM_STATUS_OK || dm_rank(mesh, &rank) != DM_STATUS_OK ||
      (mine = (float)rank, dm_all_reduce(mesh, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL)) != DM_STATUS_OK) {
    fprintf(stderr, "%s\n", dm_last_error());
    return 1;
  }
  printf("sum %g\n", (double)sum);
  return dm_finalize(mesh, NULL) == DM_STATUS_OK ? 0 : 1;
}
