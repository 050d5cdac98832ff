/* A program that is written against nccl.h and linked with libhostccl. It forks argv[1] processes,
 * each a rank of one communicator. The parent makes the id before the fork (argv[2] is "inherit"),
 * or rank 0 makes it and writes it to pipes (argv[2] is "pipe"). The exit status is 0 when every
 * rank found what it expected. */
#define _POSIX_C_SOURCE 200809L
#include <hostccl.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __cplusplus
#define STATIC_ASSERT static_assert
#else
#define STATIC_ASSERT _Static_assert
#endif

/* The layout of all releases of NCCL that have these fields. */
STATIC_ASSERT(sizeof(ncclUniqueId) == 128, "ncclUniqueId");
STATIC_ASSERT(offsetof(ncclConfig_t, magic) == 8, "magic");
STATIC_ASSERT(offsetof(ncclConfig_t, version) == 12, "version");
STATIC_ASSERT(offsetof(ncclConfig_t, blocking) == 16, "blocking");
STATIC_ASSERT(offsetof(ncclConfig_t, cgaClusterSize) == 20, "cgaClusterSize");
STATIC_ASSERT(offsetof(ncclConfig_t, minCTAs) == 24, "minCTAs");
STATIC_ASSERT(offsetof(ncclConfig_t, maxCTAs) == 28, "maxCTAs");
STATIC_ASSERT(offsetof(ncclConfig_t, netName) == 32, "netName");
STATIC_ASSERT(offsetof(ncclConfig_t, splitShare) == 40, "splitShare");
STATIC_ASSERT(offsetof(ncclConfig_t, trafficClass) == 44, "trafficClass");
STATIC_ASSERT(offsetof(ncclConfig_t, commName) == 48, "commName");
STATIC_ASSERT(offsetof(ncclConfig_t, collnetEnable) == 56, "collnetEnable");
STATIC_ASSERT(offsetof(ncclConfig_t, CTAPolicy) == 60, "CTAPolicy");
STATIC_ASSERT(offsetof(ncclConfig_t, shrinkShare) == 64, "shrinkShare");
STATIC_ASSERT(offsetof(ncclConfig_t, nvlsCTAs) == 68, "nvlsCTAs");
STATIC_ASSERT(sizeof(ncclConfig_t) == 72, "ncclConfig_t");

#define MAX_RANKS 16
#define COUNT 100003
/* The alarm ends a rank that hangs, and the parent reports it. */
#define DEADLINE_SECONDS 60

#define NCCL(call)                                                                                                   \
  do {                                                                                                                 \
    ncclResult_t result_ = (call);                                                                                     \
    if (result_ != ncclSuccess) {                                                                                      \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, ncclGetErrorString(result_), ncclGetLastError(NULL));     \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

#define CHECK(condition)                                                                                             \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                          \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

static float *floats(size_t count) {
  float *memory = (float *)malloc(count * sizeof(float));
  CHECK(memory != NULL);
  return memory;
}

static void play(int rank, int size, ncclUniqueId id) {
  const cudaStream_t stream = NULL;
  ncclComm_t comm = NULL, part = NULL;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclResult_t state = ncclInternalError;
  int answer = -1, next = (rank + 1) % size, previous = (rank + size - 1) % size;
  float *send = floats(COUNT), *recv = floats(COUNT);
  size_t i;

  config.commName = "world";
  NCCL(ncclCommInitRankConfig(&comm, size, id, rank, &config));
  NCCL(ncclCommCount(comm, &answer));
  CHECK(answer == size);
  NCCL(ncclCommUserRank(comm, &answer));
  CHECK(answer == rank);

  for (i = 0; i < COUNT; i++) send[i] = (float)(rank + (int)(i % 100));
  NCCL(ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, comm, stream));
  for (i = 0; i < COUNT; i++) CHECK(recv[i] == (float)(size * (size - 1) / 2 + size * (int)(i % 100)));

  NCCL(ncclGroupStart());
  NCCL(ncclSend(send, COUNT, ncclFloat, next, comm, stream));
  NCCL(ncclRecv(recv, COUNT, ncclFloat, previous, comm, stream));
  NCCL(ncclGroupEnd());
  for (i = 0; i < COUNT; i++) CHECK(recv[i] == (float)(previous + (int)(i % 100)));

  NCCL(ncclCommSplit(comm, rank == 0 ? NCCL_SPLIT_NOCOLOR : 0, -rank, &part, NULL));
  CHECK((part == NULL) == (rank == 0));
  if (part != NULL) {
    NCCL(ncclCommUserRank(part, &answer));
    CHECK(answer == size - 1 - rank);
    NCCL(ncclBroadcast(send, recv, COUNT, ncclFloat, 0, part, stream));
    CHECK(recv[0] == (float)(size - 1));
    NCCL(ncclCommDestroy(part));
  }

  NCCL(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclSuccess);
  NCCL(hostcclCommWait(comm, 100, &state));
  CHECK(state == ncclSuccess);
  NCCL(hostcclCommLostRank(comm, &answer));
  CHECK(answer == -1);
  NCCL(ncclCommFinalize(comm));
  NCCL(ncclCommDestroy(comm));
  CHECK(ncclCommCount(comm, &answer) == ncclInvalidArgument);
  free(send);
  free(recv);
}

/* Makes the id on rank 0, and gives it to the other ranks. */
static ncclUniqueId exchange(int rank, int size, int (*pipes)[2]) {
  ncclUniqueId id;
  int other;
  if (rank != 0) {
    CHECK(read(pipes[rank][0], &id, sizeof id) == (ssize_t)sizeof id);
    return id;
  }
  NCCL(ncclGetUniqueId(&id));
  for (other = 1; other < size; other++) CHECK(write(pipes[other][1], &id, sizeof id) == (ssize_t)sizeof id);
  return id;
}

int main(int argc, char **argv) {
  int size = argc > 1 ? atoi(argv[1]) : 4, through_pipe = argc > 2 && strcmp(argv[2], "pipe") == 0;
  int pipes[MAX_RANKS][2], rank, failed = 0, version = 0;
  pid_t children[MAX_RANKS];
  ncclUniqueId id;

  CHECK(size >= 1 && size <= MAX_RANKS);
  NCCL(ncclGetVersion(&version));
  CHECK(version == NCCL_VERSION_CODE);
  memset(&id, 0, sizeof id);
  if (!through_pipe) NCCL(ncclGetUniqueId(&id));
  for (rank = 0; rank < size; rank++) CHECK(pipe(pipes[rank]) == 0);
  for (rank = 0; rank < size; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      alarm(DEADLINE_SECONDS);
      play(rank, size, through_pipe ? exchange(rank, size, pipes) : id);
      exit(0);
    }
  }
  for (rank = 0; rank < size; rank++) {
    int status = -1;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      fprintf(stderr, "rank %d of %d ended with wait status %#x\n", rank, size, (unsigned)status);
      failed = 1;
    }
  }
  return failed;
}
