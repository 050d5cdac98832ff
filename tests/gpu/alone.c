/* What the end of a communicator waits for when the other ranks still hold theirs and have not been
 * told: rank 0 ends alone, the others wait in dm_world_barrier until rank 0 has given up or ended.
 *   abort    dm_abort of a mesh; must return, because nothing of it may wait for a peer
 *   destroy  plain ncclCommDestroy, for what NCCL itself does; nothing is required of it
 *   aborts   plain ncclCommAbort, likewise
 * A collective ran before, so the proxies of the ranks are connected. */
#include "experiment.h"
#include "plain.h"

enum { kCount = 1 << 20 };

static dm_mesh *mesh;
static plain nccl;
static ncclComm_t comm;
static ncclResult_t (*rawCommAbort)(ncclComm_t);

static dm_status abort_it(void *unused)
{
  (void)unused;
  return dm_abort(mesh);
}

/* A result of plain NCCL as a status, for the line of what was seen. */
static dm_status status_of(ncclResult_t result)
{
  return result == ncclSuccess ? DM_STATUS_OK : DM_STATUS_CCL;
}

static dm_status destroy_plainly(void *unused)
{
  (void)unused;
  return status_of(nccl.CommDestroy(comm));
}

static dm_status abort_plainly(void *unused)
{
  (void)unused;
  return status_of(rawCommAbort(comm));
}

int main(int argc, char **argv)
{
  const char *mode = argc > 1 ? argv[1] : "abort";
  const int is_plain = strcmp(mode, "abort") != 0;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks};
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  nccl = plain_open(mesh);
  PROC(mesh, CommAbort);
  float *data = (float *)device_alloc(kCount * sizeof(float));
  if (is_plain) {
    const ncclUniqueId id = plain_id(&nccl, mesh, rank);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    plain_says(&nccl, nccl.CommInitRankConfig(&comm, ranks, id, rank, &config), "ncclCommInitRankConfig");
    plain_says(&nccl, nccl.AllReduce(data, data, kCount, ncclFloat, ncclSum, comm, (cudaStream_t)device_stream()), "ncclAllReduce");
  } else {
    OK(dm_all_reduce(mesh, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, device_stream()));
  }
  device_sync();
  OK(dm_world_barrier(options.world, 0));

  trial end = {.what = "dm_abort on rank 0 alone", .call = abort_it};
  if (is_plain) end.call = strcmp(mode, "destroy") == 0 ? destroy_plainly : abort_plainly;
  if (is_plain) end.what = strcmp(mode, "destroy") == 0 ? "ncclCommDestroy on rank 0 alone" : "ncclCommAbort on rank 0 alone";
  if (rank == 0) {
    const int returned = trial_run(&end, rank, 15);
    CHECK(returned || is_plain);
  }
  OK(dm_world_barrier(options.world, 60000));
  if (rank != 0) {
    end.what = is_plain ? "the same call on the others, afterwards" : "dm_abort on the others, afterwards";
    CHECK(trial_run(&end, rank, 15) || is_plain);
  } else if (!trial_wait(&end, 15)) {
    seen(rank, end.what, "had not returned 15 s after the others ended theirs either");
  }
  OK(dm_world_barrier(options.world, 60000));
  experiment_end();
}
