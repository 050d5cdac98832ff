/* A dead peer and a stream that waits for it: the last rank dies by SIGKILL while the others have
 * an all-reduce on the stream that cannot end. cudaStreamSynchronize would wait for ever over
 * NVLink; dm_stream_wait must give PEER_LOST or TIMEOUT within its own deadline, and dm_abort must
 * free the stream afterwards. Before that, it must give OK for work that ends, and TIMEOUT for a
 * rank that lives and does not come. run.sh looks for the survivors' last lines. */
#include "experiment.h"

#include <signal.h>

enum { kCount = 1 << 16, kLate = 2000, kDeadline = 15000 };

static dm_mesh *mesh;
static int64_t timeout_ms;

static dm_status wait_for_stream(void *unused)
{
  (void)unused;
  return dm_stream_wait(mesh, NULL, device_stream(), timeout_ms);
}

static dm_status abort_it(void *unused)
{
  (void)unused;
  return dm_abort(mesh);
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  if (!on_gpu()) experiment_skip("a call of the host engine returns when it is done");
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks};
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  float *data = (float *)device_alloc(kCount * sizeof(float));
  timeout_ms = kDeadline;
  for (int round = 0; round < 3; ++round) {
    OK(dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream()));
    OK(wait_for_stream(NULL));
  }
  const double began = seconds_now();
  OK(wait_for_stream(NULL));
  if (rank == 0) figure("dm_stream_wait of an empty stream", 1e6 * (seconds_now() - began), "us");
  OK(dm_world_barrier(options.world, 0));

  if (getenv("DM_GPU_STANDIN") == NULL && rank != ranks - 1) { /* the stand-in has no streams that wait */
    OK(dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream()));
    timeout_ms = kLate;
    trial late = {.what = "dm_stream_wait, a rank lives and does not come", .call = wait_for_stream};
    CHECK(trial_run(&late, rank, 30) && late.status == DM_STATUS_TIMEOUT);
  }
  OK(dm_world_barrier(options.world, 60000));
  if (rank == ranks - 1) kill(getpid(), SIGKILL);
  timeout_ms = kDeadline;
  trial lost = {.what = "dm_stream_wait after kill -9 of the last rank", .call = wait_for_stream};
  trial end = {.what = "dm_abort after that", .call = abort_it};
  if (getenv("DM_GPU_STANDIN") == NULL) {
    CHECK(trial_run(&lost, rank, 30) && (lost.status == DM_STATUS_PEER_LOST || lost.status == DM_STATUS_TIMEOUT));
    if (rank == 0) figure("kill -9 of a rank: until dm_stream_wait returns", 1e3 * lost.seconds, "ms");
  }
  CHECK(trial_run(&end, rank, 30));
  printf("survivor %d %s\n", rank, failures == 0 ? "fine" : "not fine");
  experiment_end();
}
