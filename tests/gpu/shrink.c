/* The last rank dies by SIGKILL while an all-reduce is under way, and the others go on: dm_shrink
 * gives them a mesh without it, on which collectives are right. run.sh looks for the survivors'
 * last lines. */
#include "experiment.h"

#include <signal.h>

static dm_mesh *mesh, *rest;

static dm_status shrink(void *unused)
{
  dm_call_options within = DM_CALL_OPTIONS_INIT;
  (void)unused;
  within.timeout_ms = 40000;
  return dm_shrink(mesh, NULL, NULL, 0, &within, &rest);
}

int main(void)
{
  enum { kCount = 1 << 16 };
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks};
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  ncclResult_t (*rawCommShrink)(ncclComm_t, int *, int, ncclComm_t *, ncclConfig_t *, int) = NULL;
  if (!library_has(mesh, "ncclCommShrink", &rawCommShrink)) experiment_skip("this NCCL has no ncclCommShrink (2.27)");
  float *data = (float *)device_alloc(kCount * sizeof(float));
  OK(dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream()));
  device_sync();
  OK(dm_world_barrier(options.world, 0));
  if (rank == ranks - 1) kill(getpid(), SIGKILL);
  /* On a GPU this is on the stream and cannot end; on the host it fails. */
  const dm_status stuck = dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream());
  CHECK(on_gpu() || stuck == DM_STATUS_PEER_LOST);
  FAILS(DM_STATUS_PEER_LOST, "rank", dm_world_barrier(options.world, 20000));
  trial attempt = {.what = "dm_shrink after kill -9 of the last rank", .call = shrink};
  const int made = trial_run(&attempt, rank, 45) && attempt.status == DM_STATUS_OK;
  CHECK(made);
  if (made) {
    if (rank == 0) figure("dm_shrink after kill -9 of a rank", 1e3 * attempt.seconds, "ms");
    device_sync();
    check_group(rest, NULL);
    OK(dm_finalize(rest, NULL));
    dm_free(rest);
  }
  printf("survivor %d %s\n", rank, failures == 0 ? "fine" : "not fine");
  experiment_end();
}
