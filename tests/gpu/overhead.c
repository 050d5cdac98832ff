/* dm_all_reduce beside a direct call of the library's ncclAllReduce on the same communicator,
 * buffer and stream: batches in turn, and medians over the rounds. Two times are taken: that to
 * put one call on the stream, and that until all of a batch are done. On the host a call returns
 * when its result is there, so both times are one. */
#include "gpu.h"

enum { kRounds = 21, kMaxBatch = 50 };

typedef struct times {
  double issue[kRounds], total[kRounds];
} times;

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks};
  const size_t most = on_gpu() ? (size_t)4 << 20 : (size_t)64 << 10, counts[] = {1, 16384, most};
  dm_mesh *mesh = NULL;
  ncclComm_t comm = NULL;
  ncclResult_t (*rawAllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) = NULL;
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  REQUIRE(dm_get_comm(mesh, NULL, &comm));
  PROC(mesh, AllReduce);
  float *host = (float *)host_alloc(most * sizeof(float)), *data = (float *)device_alloc(most * sizeof(float));
  for (size_t at = 0; at < most; ++at) host[at] = (float)(at % 100);
  static times taken[2];

  for (size_t size = 0; size < sizeof counts / sizeof *counts; ++size) {
    const size_t count = counts[size];
    const int batch = count == most ? 5 : kMaxBatch;
    for (int round = -1; round < kRounds; ++round) { /* the first is not counted */
      for (int turn = 0; turn < 2; ++turn) {
        const int direct = (turn + round) & 1;
        device_put(data, host, count * sizeof(float));
        REQUIRE(dm_world_barrier(options.world, 0));
        const double began = seconds_now();
        for (int call = 0; call < batch; ++call) {
          if (direct) {
            const ncclResult_t result = rawAllReduce(data, data, count, ncclFloat, ncclMax, comm, (cudaStream_t)device_stream());
            /* A non-blocking communicator may say that it is not on the stream yet. */
            CHECK(result == ncclSuccess);
          } else {
            OK(dm_all_reduce(mesh, NULL, data, data, count, DM_FLOAT32, DM_MAX, device_stream()));
          }
        }
        const double issued = seconds_now();
        device_sync();
        const double done = seconds_now();
        if (round >= 0) {
          taken[direct].issue[round] = (issued - began) / batch;
          taken[direct].total[round] = (done - began) / batch;
        }
      }
    }
    float *got = (float *)host_alloc(count * sizeof(float));
    device_get(got, data, count * sizeof(float));
    CHECK(memcmp(got, host, count * sizeof(float)) == 0); /* the maximum of equal values */
    free(got);
    if (rank == 0) {
      static const char *const caller[] = {"dm_all_reduce", "ncclAllReduce called directly"};
      for (int direct = 0; direct < 2; ++direct) {
        char what[120];
        snprintf(what, sizeof what, "%s of %zu bytes: the call", caller[direct], count * sizeof(float));
        figure(what, 1e6 * median(taken[direct].issue, kRounds), "us");
        snprintf(what, sizeof what, "%s of %zu bytes: until done", caller[direct], count * sizeof(float));
        figure(what, 1e6 * median(taken[direct].total, kRounds), "us");
      }
    }
  }
  device_free(data);
  free(host);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(options.world);
  return finish();
}
