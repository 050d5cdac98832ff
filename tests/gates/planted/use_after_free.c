/* Planted: the library stores one number into memory that has been freed; no function of the C
 * library, which a sanitizer replaces anyway, takes part. */
#include <devicemesh.h>
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
  dm_mesh *mesh = NULL;
  if (dm_init("cpu", (int[]){1}, 1, (const char *[]){"dp"}, NULL, &mesh) != DM_STATUS_OK) return 2;
  int32_t *volatile rank = malloc(sizeof *rank);
  free(rank);
  const dm_status status = dm_rank(mesh, rank);
  printf("not caught: %s\n", dm_status_name(status));
  return 0;
}
