/* Ranks over the recorder that issue operations on communicators. The argument names the case.
 * tests/test_nccl_operations.py runs them and reads what the recorder wrote. */
#include "rank.h"

/* Exchanges with a count for each rank: rank r sends r + p elements to rank p. */
static void ragged(void)
{
  const int32_t all[] = {8};
  const char *name[] = {"all"};
  dm_mesh *mesh = made(all, 1, name);
  float send[128], recv[128];
  size_t out[8], counts[8], displs[8], next = 0;
  for (int at = 0; at < 128; ++at) send[at] = (float)(1000 * rank + at);
  for (int peer = 0; peer < 8; ++peer) {
    out[peer] = (size_t)(rank + peer);
    counts[peer] = (size_t)peer;
    displs[peer] = next + 1;
    next = displs[peer] + (size_t)peer;
  }
  note("all-to-all-v");
  OK(dm_all_to_allv(mesh, NULL, send, out, NULL, recv, out, NULL, DM_FLOAT32, NULL));
  size_t at = 0;
  for (int peer = 0; peer < 8; ++peer) {
    const int place = rank * peer + rank * (rank - 1) / 2; /* of this rank's block in the peer's buffer */
    for (int i = 0; i < rank + peer; ++i, ++at) CHECK(recv[at] == (float)(1000 * peer + place + i));
  }
  note("all-gather-v");
  OK(dm_all_gatherv(mesh, NULL, send, recv, counts, displs, DM_FLOAT32, NULL));
  for (int peer = 0; peer < 8; ++peer)
    for (int i = 0; i < peer; ++i) CHECK(recv[displs[peer] + (size_t)i] == (float)(1000 * peer + i));
  note("reduce-scatter-v");
  OK(dm_group_start(mesh));
  OK(dm_reduce_scatterv(mesh, NULL, send, counts, displs, recv, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_group_end(mesh));
  for (int i = 0; i < rank; ++i) CHECK(recv[i] == (float)(28000 + 8 * ((int)displs[rank] + i)));
  note("end");
  FAILS(DM_STATUS_INVALID_ARGUMENT, "overlap", dm_all_to_allv(mesh, NULL, send, out, NULL, send, out, NULL, DM_FLOAT32, NULL));
  FAILS(DM_STATUS_UNSUPPORTED, "dtype is 42, whose size is not known here",
        dm_all_gatherv(mesh, NULL, send, recv, counts, displs, 42, NULL));
  OK(dm_finalize(mesh, NULL));
}

/* Element types and operators that this library does not know go to NCCL, which judges them. */
static void unknown(void)
{
  const int32_t all[] = {8};
  const char *name[] = {"all"};
  dm_mesh *mesh = made(all, 1, name);
  float buffer[16] = {1}, *apart = buffer + 8;
  note("unknown");
  FAILS(DM_STATUS_CCL, "datatype 42", dm_all_reduce(mesh, NULL, buffer, buffer, 1, 42, DM_SUM, NULL));
  FAILS(DM_STATUS_CCL, "datatype 255", dm_all_gather(mesh, NULL, buffer, buffer, 1, 255, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op 77 is not in", dm_all_reduce(mesh, NULL, buffer, apart, 1, DM_FLOAT32, 77, NULL));
  FAILS(DM_STATUS_UNSUPPORTED, "ncclAlltoAll", dm_all_to_all(mesh, NULL, buffer, apart, 1, 42, NULL));
  note("refused here");
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is 256", dm_all_reduce(mesh, NULL, buffer, apart, 1, 256, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is -1", dm_all_reduce(mesh, NULL, buffer, apart, 1, -1, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op is -1", dm_all_reduce(mesh, NULL, buffer, apart, 1, DM_FLOAT32, -1, NULL));
  note("made");
  ncclResult_t (*create)(ncclRedOp_t *, void *, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) = NULL;
  REQUIRE(dm_get_proc(mesh, "ncclRedOpCreatePreMulSum", (void **)&create));
  float scalar = 0.5f;
  ncclRedOp_t op = ncclSum;
  CHECK(create(&op, &scalar, ncclFloat32, ncclScalarHostImmediate, comm_of(mesh, NULL)) == ncclSuccess);
  OK(dm_all_reduce(mesh, NULL, buffer, apart, 1, DM_FLOAT32, (dm_op)op, NULL));
  CHECK(apart[0] == 4);
  note("end");
  OK(dm_finalize(mesh, NULL));
}

static void *many_sums(void *mesh)
{
  for (int round = 0; round < 100; ++round) CHECK(sum_along(mesh, "tp") == 2);
  return NULL;
}

/* Two threads, each with a mesh of its own, on one communicator that both meshes share. */
static void gate(void)
{
  dm_mesh *first = made_cube(), *second = made_cube();
  pthread_t thread;
  CHECK(comm_of(first, "tp") == comm_of(second, "tp"));
  thread = begun(many_sums, first);
  many_sums(second);
  CHECK(pthread_join(thread, NULL) == 0);
  OK(dm_finalize(first, NULL));
  OK(dm_finalize(second, NULL));
  dm_free(first);
  dm_free(second);
}

static const rank_case kCases[] = {
    {"ragged", ragged}, {"unknown", unknown}, {"gate", gate},
};

int main(int count, char **arguments)
{
  RUN_IN_WORLD(case_name(count, arguments), kCases);
  check_library_threads(0);
  return finish();
}
