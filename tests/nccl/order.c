/* Ranks of a job of device type cuda over the recorder that make different collectives, which NCCL
 * does not notice: operations return when they are on their streams, and the recorder moves no data
 * (RECORDER_IDLE). The argument names the case. tests/test_nccl_order.py runs them. */
#include "rank.h"

static const int32_t kSquare[] = {2, 2};
static const char *const kSquareNames[] = {"dp", "tp"};
static float memory[64];

static void sum(const dm_mesh *mesh, const char *dim, size_t count)
{
  OK(dm_all_reduce(mesh, dim, memory, memory, count, DM_FLOAT32, DM_SUM, NULL));
}

/* Checks the ranks and the dimension of the last failure. */
static void is_about(const char *dim, int32_t first, int32_t second)
{
  dm_error_info info = DM_ERROR_INFO_INIT;
  OK(dm_last_error_info(&info));
  CHECK(info.num_ranks == 2 && info.ranks[0] == first && info.ranks[1] == second && info.num_lost == 0);
  CHECK(info.dim == NULL || strcmp(info.dim, dim) == 0);
}

/* Rank 3 makes another second call along tp than rank 2. The group of ranks 0 and 1 is right. */
static void other_count(void)
{
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  sum(mesh, "dp", 8);
  sum(mesh, "tp", 8);
  sum(mesh, "tp", rank == 3 ? 9 : 8);
  sum(mesh, "tp", 8);
  FAILS(DM_STATUS_MISMATCH, "ranks 2, 3 have not made the same collectives along mesh/tp", dm_finalize(mesh, NULL));
  CHECK(strstr(dm_last_error(), "the first call of mesh/tp in which these ranks differ is call 2: rank 2 all-reduce of 8 "
                                "float32 (sum), rank 3 all-reduce of 9 float32 (sum)") != NULL);
  is_about("tp", 2, 3);
  /* The mesh has ended all the same. */
  FAILS(DM_STATUS_ABORTED, "finalized", dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* Rank 1 leaves its last call along dp out, and rank 3 has made it. */
static void one_call_less(void)
{
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  for (int call = 0; call < (rank == 1 ? 2 : 3); ++call) sum(mesh, "dp", 8);
  FAILS(DM_STATUS_MISMATCH, "ranks 1, 3 have not made the same collectives along mesh/dp", dm_finalize(mesh, NULL));
  CHECK(strstr(dm_last_error(), "rank 1 has made 2 collective calls of mesh/dp, and rank 3 has made 3: call 3 is "
                                "all-reduce of 8 float32 (sum)") != NULL);
  is_about("dp", 1, 3);
  dm_free(mesh);
}

/* The first call differs, and the recordings hold only the last 2048 calls. */
static void long_ago(void)
{
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  sum(mesh, "dp", rank == 0 ? 4 : 5);
  for (int call = 0; call < 3000; ++call) sum(mesh, "dp", 8);
  FAILS(DM_STATUS_MISMATCH, "ranks 0 and 2 have made different calls of mesh/dp before call ", dm_finalize(mesh, NULL));
  CHECK(strstr(dm_last_error(), "which is the oldest that both recordings hold") != NULL);
  dm_free(mesh);
}

/* These may differ: messages, calls without elements, counts of a call in which each rank has its
 * own, a call that failed and was made again, and the places of groups. */
static void legal(void)
{
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  const int32_t peer = 1 - rank % 2;
  for (int call = 0; call < (rank < 2 ? 3 : 5); ++call) sum(mesh, "tp", 8);
  if (rank % 2 == 0) OK(dm_send(mesh, "tp", memory, 4, DM_FLOAT32, peer, NULL));
  else OK(dm_recv(mesh, "tp", memory, 4, DM_FLOAT32, peer, NULL));
  if (rank == 1) sum(mesh, "tp", 0);
  const size_t counts[] = {rank == 2 ? 2 : 1, 1};
  OK(dm_all_to_allv(mesh, "tp", memory, counts, NULL, memory + 32, counts, NULL, DM_FLOAT32, NULL));
  if (rank == 3) FAILS(DM_STATUS_INVALID_ARGUMENT, "root", dm_broadcast(mesh, "tp", memory, memory, 4, DM_FLOAT32, 7, NULL));
  OK(dm_broadcast(mesh, "tp", memory, memory, 4, DM_FLOAT32, 1, NULL));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* An aborted mesh is compared with nothing, and neither is one whose operation has failed. */
static void ended(void)
{
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  sum(mesh, "tp", (size_t)(1 + rank));
  OK(dm_abort(mesh));
  FAILS(DM_STATUS_ABORTED, "aborted", dm_finalize(mesh, NULL));
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));
  mesh = made(kSquare, 2, kSquareNames);
  sum(mesh, "tp", 4);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* The comparison before each call: dp and tp are crossed, and nothing reaches the library. */
static void checked(void)
{
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  const char *first = rank == 0 || rank == 3 ? "dp" : "tp";
  FAILS(DM_STATUS_MISMATCH, "each waits for the one before",
        dm_all_reduce(mesh, first, memory, memory, 8, DM_FLOAT32, DM_SUM, NULL));
  CHECK(strstr(dm_last_error(), "along mesh/dp as call 1") != NULL && strstr(dm_last_error(), "along mesh/tp as call 1") != NULL);
  note("nothing");
  if (rank == 1) sum(mesh, "tp", 0);
  sum(mesh, "tp", 8);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* Work on a stream is late, and rank 3 has issued less than rank 1. NCCL does nothing in a collective without
 * elements, so no rank is behind along tp, where only rank 1 has called it. */
static void behind(void)
{
  void (*set_query)(int) = NULL;
  *(void **)&set_query = of_driver("cuda_set_query");
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  sum(mesh, "tp", 8);
  for (int call = 0; call < (rank == 3 ? 1 : 3); ++call) sum(mesh, "dp", 8);
  if (rank == 1) sum(mesh, "tp", 0);
  OK(dm_world_barrier(world, 0));
  set_query(600);
  if (rank == 1) {
    FAILS(DM_STATUS_TIMEOUT, "; rank 3 is at all-reduce 1 of mesh/dp, 2 calls behind", dm_stream_wait(mesh, NULL, (void *)7, 100));
    GIVES(DM_STATUS_TIMEOUT, dm_stream_wait(mesh, "dp", (void *)7, 100));
    CHECK(strstr(dm_last_error(), "; this rank is in all-reduce 3 of mesh/dp") != NULL);
    FAILS(DM_STATUS_TIMEOUT, "the work on the stream (dimension tp)", dm_stream_wait(mesh, "tp", (void *)7, 100));
    CHECK(strstr(dm_last_error(), "mesh/tp") == NULL);
  }
  set_query(0);
  OK(dm_world_barrier(world, 0));
  OK(dm_abort(mesh));
  dm_free(mesh);
}

/* NCCL tells of all calls (NCCL_PROFILER_PLUGIN), so calls on the raw communicator count. */
static void profiled(void)
{
  ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) = NULL;
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  REQUIRE(dm_get_proc(mesh, "ncclAllReduce", (void **)&all_reduce));
  sum(mesh, "tp", 8);
  CHECK(all_reduce(memory, memory, rank == 0 ? 3 : 4, ncclFloat32, ncclSum, comm_of(mesh, "tp"), NULL) == ncclSuccess);
  sum(mesh, "dp", 8);
  FAILS(DM_STATUS_MISMATCH, "ranks 0, 1 have not made the same collectives along mesh/tp", dm_finalize(mesh, NULL));
  CHECK(strstr(dm_last_error(), "differ is call 2: rank 0 all-reduce of 3 float32 (sum), rank 1 all-reduce of 4 float32 (sum)") != NULL);
  dm_free(mesh);
}

/* Only rank 0 has the profiler plugin. NCCL does not tell it the reduction, so rank 0 knows less of its
 * calls than the others, and their records cannot be compared. */
static void profiled_on_one_rank(void)
{
  if (rank == 0) CHECK(setenv("NCCL_PROFILER_PLUGIN", getenv("PLUGIN_OF_RANK_0"), 1) == 0);
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  sum(mesh, "tp", 8);
  OK(dm_all_reduce(mesh, "tp", memory, memory, 8, DM_FLOAT32, DM_MAX, NULL));
  OK(dm_all_reduce(mesh, "dp", memory, memory, 8, DM_FLOAT32, DM_MAX, NULL));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

static const rank_case kCases[] = {{"other count", other_count}, {"one call less", one_call_less}, {"long ago", long_ago},
                                   {"legal", legal}, {"ended", ended}, {"checked", checked}, {"behind", behind}, {"profiled", profiled},
                                   {"profiled on one rank", profiled_on_one_rank}};

int main(int count, char **arguments)
{
  RUN_IN_WORLD(case_name(count, arguments), kCases);
  return finish();
}
