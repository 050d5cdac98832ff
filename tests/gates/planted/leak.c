/* Planted: the only pointer to a block is overwritten. */
#include <devicemesh.h>
#include <stdio.h>
#include <stdlib.h>

static char *volatile lost;

int main(void)
{
  lost = malloc(1000 + dm_version() % 2);
  lost = NULL;
  printf("done\n");
  return 0;
}
