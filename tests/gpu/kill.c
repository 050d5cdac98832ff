/* The last rank dies by SIGKILL among all-reduces. Every other rank then meets three things. An
 * all-reduce or dm_check fails, or neither does within a while, because NCCL notices only what its
 * proxy or bootstrap meets (tests/gpu/README.md). An agreement of the library names the dead rank.
 * After dm_abort nothing waits any more. The launcher must not end the survivors for some seconds;
 * run.sh looks for their last lines. */
#include "gpu.h"

#include <signal.h>

int main(void)
{
  enum { kRounds = 5, kCount = 1 << 16 };
  const double patience = on_gpu() ? 20 : 5;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks};
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  float *data = (float *)device_alloc(kCount * sizeof(float));
  char dead[32];
  snprintf(dead, sizeof dead, "rank %d", ranks - 1);

  double began = 0;
  dm_status said = DM_STATUS_OK;
  const char *by = "nobody";
  for (int round = 0; said == DM_STATUS_OK; ++round) {
    if (round == kRounds) {
      OK(dm_world_barrier(options.world, 0)); /* nobody is in an earlier round any more */
      if (rank == ranks - 1) kill(getpid(), SIGKILL);
      began = seconds_now();
    }
    by = "dm_all_reduce";
    said = dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream());
    while (said == DM_STATUS_OK && !device_is_done()) {
      struct timespec pause = {0, 1000000};
      nanosleep(&pause, NULL);
      by = "dm_check";
      if ((said = dm_check(mesh, NULL)) == DM_STATUS_OK && began > 0 && seconds_now() - began > patience) break;
    }
    if (began > 0 && seconds_now() - began > patience) break;
  }
  const double noticed = seconds_now() - began;
  printf("rank %d: %s by %s after %.2f s: %s\n", rank, dm_status_name(said), said == DM_STATUS_OK ? "nobody" : by,
         noticed, said == DM_STATUS_OK ? "" : dm_last_error());
  if (rank == 0 && said != DM_STATUS_OK) figure("kill -9 of a rank: until a survivor's call or dm_check fails", 1e3 * noticed, "ms");
  if (!on_gpu()) CHECK(said == DM_STATUS_PEER_LOST && strstr(dm_last_error(), dead) != NULL);

  /* Ours knows, whatever the library has noticed. */
  began = seconds_now();
  FAILS(DM_STATUS_PEER_LOST, dead, dm_world_barrier(options.world, 20000));
  const double agreed = seconds_now() - began;
  CHECK(agreed < 10);
  began = seconds_now();
  OK(dm_abort(mesh));
  device_sync();
  const double aborted = seconds_now() - began;
  CHECK(aborted < 10);
  if (rank == 0) {
    figure("kill -9 of a rank: until dm_world_barrier names it", 1e3 * agreed, "ms");
    figure("kill -9 of a rank: dm_abort and the stream's end", 1e3 * aborted, "ms");
  }
  GIVES(DM_STATUS_ABORTED, dm_check(mesh, NULL));
  dm_free(mesh);
  dm_world_free(options.world);
  printf("survivor %d %s\n", rank, failures == 0 ? "fine" : "not fine");
  fflush(stdout);
  return finish();
}
