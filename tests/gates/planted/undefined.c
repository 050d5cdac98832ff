/* Planted: adds 1 to the greatest int, which a call of the library gives. */
#include <devicemesh.h>
#include <limits.h>
#include <stdio.h>

int main(void)
{
  dm_mesh *mesh = NULL;
  int32_t rank = -1;
  if (dm_init("cpu", (int[]){1}, 1, (const char *[]){"dp"}, NULL, &mesh) != DM_STATUS_OK || dm_rank(mesh, &rank) != DM_STATUS_OK) return 2;
  int sum = INT_MAX - rank;
  ++sum;
  printf("not caught: %d\n", sum);
  return 0;
}
