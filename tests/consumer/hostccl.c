/* NCCL's C API without NCCL: two ranks of one process sum their numbers. */
#include <hostccl.h>

#include <stdio.h>

int main(void)
{
  ncclComm_t comms[2];
  float values[2] = {0, 1};
  if (ncclCommInitAll(comms, 2, NULL) != ncclSuccess || ncclGroupStart() != ncclSuccess) return 1;
  for (int rank = 0; rank < 2; ++rank) ncclAllReduce(&values[rank], &values[rank], 1, ncclFloat32, ncclSum, comms[rank], NULL);
  if (ncclGroupEnd() != ncclSuccess) return 1;
  printf("sum %g\n", (double)(values[0] + values[1]) / 2);
  for (int rank = 0; rank < 2; ++rank) ncclCommDestroy(comms[rank]);
  return 0;
}
