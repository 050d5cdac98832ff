/* ncclCommRevoke, ncclCommShrink and ncclCommGrow of plain NCCL, one after the other: what they do
 * when the last rank does not join a collective. The library calls only the second of them today;
 * what is seen here says whether it may call the others. Nothing is required but that the calls
 * end. All is on non-blocking communicators, whose state is asked for until it has settled. */
#include "experiment.h"
#include "plain.h"

static ncclResult_t (*rawCommGetAsyncError)(ncclComm_t, ncclResult_t *);
static ncclResult_t (*rawCommRevoke)(ncclComm_t, int);
static ncclResult_t (*rawCommShrink)(ncclComm_t, int *, int, ncclComm_t *, ncclConfig_t *, int);
static ncclResult_t (*rawCommGrow)(ncclComm_t, int, const ncclUniqueId *, int, ncclComm_t *, ncclConfig_t *);
static ncclResult_t (*rawCommGetUniqueId)(ncclComm_t, ncclUniqueId *);
static int32_t rank, ranks;

/* Asks until the communicator is no longer in progress; 20 seconds at most. */
static ncclResult_t settled(ncclComm_t comm, ncclResult_t result)
{
  const double until = seconds_now() + 20;
  while (result == ncclInProgress && comm != NULL && seconds_now() < until) {
    ncclResult_t state = ncclSuccess;
    pause_ms(1);
    const ncclResult_t asked = rawCommGetAsyncError(comm, &state);
    result = asked == ncclSuccess ? state : asked;
  }
  return result;
}

/* One step: its result and how long it took to settle; whether it succeeded. */
static int step(const char *what, ncclComm_t comm, double began, ncclResult_t result)
{
  result = settled(comm, result);
  seen(rank, what, "ncclResult %d after %.3f s", (int)result, seconds_now() - began);
  return result == ncclSuccess;
}

static void sum_of(const plain *nccl, const char *what, ncclComm_t comm, int32_t size)
{
  float one = 1, sum = 0, *data = (float *)device_alloc(sizeof one);
  device_put(data, &one, sizeof one);
  const double began = seconds_now();
  if (step(what, comm, began, nccl->AllReduce(data, data, 1, ncclFloat, ncclSum, comm, (cudaStream_t)device_stream()))) {
    device_get(&sum, data, sizeof sum);
    CHECK(sum == (float)size);
  }
  device_free(data);
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *carrier = NULL;
  if (!on_gpu()) experiment_skip("a call of the host engine returns when it is done");
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks}, last = ranks - 1;
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &carrier));
  const plain nccl = plain_open(carrier);
  PROC(carrier, CommGetAsyncError);
  if (!library_has(carrier, "ncclCommRevoke", &rawCommRevoke) || !library_has(carrier, "ncclCommShrink", &rawCommShrink) ||
      !library_has(carrier, "ncclCommGrow", &rawCommGrow) || !library_has(carrier, "ncclCommGetUniqueId", &rawCommGetUniqueId))
    experiment_skip("this NCCL has no ncclCommRevoke and ncclCommGrow (2.29)");

  const ncclUniqueId id = plain_id(&nccl, carrier, rank);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm = NULL, fewer = NULL, more = NULL;
  config.blocking = 0;
  double began = seconds_now();
  const ncclResult_t begun = nccl.CommInitRankConfig(&comm, ranks, id, rank, &config);
  if (!step("ncclCommInitRankConfig", comm, began, begun)) experiment_end();
  sum_of(&nccl, "all-reduce before", comm, ranks);
  OK(dm_world_barrier(options.world, 0));

  /* Stuck: the last rank never joins. All ranks but the last revoke. */
  float *stuck = (float *)device_alloc(sizeof(float));
  if (rank != last) {
    (void)settled(comm, nccl.AllReduce(stuck, stuck, 1, ncclFloat, ncclSum, comm, (cudaStream_t)device_stream()));
    began = seconds_now();
    const int is_revoked = step("ncclCommRevoke of a stuck all-reduce", comm, began, rawCommRevoke(comm, 0));
    began = seconds_now();
    while (is_revoked && !device_is_done() && seconds_now() - began < 20) pause_ms(1);
    seen(rank, "the stream of the revoked all-reduce", "%s after %.3f s",
         is_revoked && device_is_done() ? "is free" : "is stuck", seconds_now() - began);
    int excluded[1] = {last};
    began = seconds_now();
    if (is_revoked &&
        step("ncclCommShrink after the revoke", comm, began, rawCommShrink(comm, excluded, 1, &fewer, &config, 0)) &&
        fewer != NULL && step("the shrunk communicator", fewer, began, ncclInProgress))
      sum_of(&nccl, "all-reduce after the shrink", fewer, ranks - 1);
  }
  OK(dm_world_barrier(options.world, 60000));

  /* The last rank joins again, as a new one. */
  ncclUniqueId grow;
  int32_t can_grow = rank == last || fewer != NULL;
  memset(&grow, 0, sizeof grow);
  if (rank == 0 && fewer != NULL) can_grow = settled(fewer, rawCommGetUniqueId(fewer, &grow)) == ncclSuccess;
  dm_buffers *all = NULL;
  REQUIRE(dm_world_all_gather_bytes(options.world, &can_grow, sizeof can_grow, 0, &all));
  for (int32_t at = 0; at < ranks; ++at) {
    const void *data = NULL;
    size_t length = 0;
    REQUIRE(dm_buffers_get(all, (size_t)at, &data, &length));
    if (*(const int32_t *)data == 0) can_grow = 0;
  }
  dm_buffers_free(all);
  const void *data = NULL;
  size_t length = 0;
  REQUIRE(dm_world_broadcast_bytes(options.world, rank == 0 ? &grow : NULL, rank == 0 ? sizeof grow : 0, 0, 0, &all));
  REQUIRE(dm_buffers_get(all, 0, &data, &length));
  CHECK(length == sizeof grow);
  memcpy(&grow, data, sizeof grow);
  dm_buffers_free(all);
  if (can_grow) {
    began = seconds_now();
    const ncclResult_t result =
        rawCommGrow(rank == last ? NULL : fewer, ranks, rank == 0 || rank == last ? &grow : NULL,
                    rank == last ? last : -1, &more, &config);
    const int grown = step("ncclCommGrow by one rank", rank == last ? more : fewer, began, result);
    if (grown && more != NULL && step("the grown communicator", more, began, ncclInProgress))
      sum_of(&nccl, "all-reduce after the growth", more, ranks);
  } else {
    seen(rank, "ncclCommGrow by one rank", "was not reached");
  }
  OK(dm_world_barrier(options.world, 60000));
  experiment_end();
}
