/* Planted: tells the library that 4 bytes are 64. The library writes past them, so the report
 * shows that the library itself is instrumented. */
#include <devicemesh.h>
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
  dm_mesh *mesh = NULL;
  if (dm_init("cpu", (int[]){1}, 1, (const char *[]){"dp"}, NULL, &mesh) != DM_STATUS_OK) return 2;
  char *text = malloc(4);
  size_t length = 0;
  const dm_status status = dm_describe(mesh, text, 64, &length);
  printf("not caught: %s\n", dm_status_name(status));
  free(text);
  return 0;
}
