/* A rank dies by SIGKILL while an all-reduce is under way, and the others go on by dm_recover. The
 * argument says how:
 *   lose    the last rank dies, and the mesh goes on without it
 *   spare   the last rank is a spare, the rank before it dies, and the spare takes its place
 * Collectives of the new mesh are right on the stream on which the old one was stuck. Then the job
 * ends. run.sh looks for the survivors' last lines. */
#include "experiment.h"

#include <signal.h>

static dm_mesh *mesh, *next;
static dm_recovery recovery = DM_RECOVERY_INIT;

static dm_status recover(void *unused)
{
  dm_recover_options options = DM_RECOVER_OPTIONS_INIT;
  (void)unused;
  options.timeout_ms = 40000;
  return dm_recover(mesh, &options, &next, &recovery);
}

int main(int argc, char **argv)
{
  enum { kCount = 1 << 16 };
  const int with_spare = argc > 1 && strcmp(argv[1], "spare") == 0;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0, size = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks - with_spare}, victim = ranks - 1 - with_spare;
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  const int is_in = rank < shape[0];
  float *data = (float *)device_alloc(kCount * sizeof(float));
  if (is_in) {
    OK(dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream()));
    device_sync();
    OK(dm_barrier(mesh, NULL, 0));
    if (rank == victim) kill(getpid(), SIGKILL);
    /* On a GPU this is on the stream and cannot end; on the host it fails. */
    const dm_status stuck = dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream());
    CHECK(shape[0] == 1 || on_gpu() || stuck == DM_STATUS_PEER_LOST);
    if (on_gpu() && getenv("DM_GPU_STANDIN") == NULL) FAILS(DM_STATUS_PEER_LOST, "lost", dm_stream_wait(mesh, NULL, device_stream(), 20000));
  }
  trial attempt = {.what = "dm_recover after kill -9 of a rank", .call = recover};
  const int made = trial_run(&attempt, rank, 45) && attempt.status == DM_STATUS_OK;
  CHECK(made);
  if (made) {
    const double began = seconds_now();
    REQUIRE(dm_size(next, NULL, &size));
    CHECK(size == shape[0] - !with_spare && recovery.num_lost == 1 && recovery.lost_ranks[0] == victim);
    CHECK(recovery.has_joined == !is_in && recovery.num_joined == (size_t)with_spare);
    check_group(next, NULL);
    if (rank == 0) {
      figure(with_spare ? "dm_recover with a spare" : "dm_recover without the lost rank", 1e3 * attempt.seconds, "ms");
      figure("the first collective after dm_recover", 1e3 * (seconds_now() - began), "ms");
    }
    OK(dm_world_finalize(options.world, 0));
    dm_free(next);
  }
  dm_free(mesh);
  printf("survivor %d %s\n", rank, failures == 0 ? "fine" : "not fine");
  experiment_end();
}
