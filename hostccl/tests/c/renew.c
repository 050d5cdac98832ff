/* A program that is linked with libhostccl: ranks that other ranks join, and that revoke their
 * communicator. It forks argv[1] ranks and argv[2] new ones. Rank 0 makes the ids, and writes them
 * to pipes. The exit status is 0 when every rank found what it expected. */
#define _POSIX_C_SOURCE 200809L
#include <hostccl.h>

#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 16
/* The alarm ends a rank that hangs, and the parent reports it. */
#define DEADLINE_SECONDS 60

#define CHECK(condition)                                                                                             \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: not so: %s: %s\n", __FILE__, __LINE__, #condition, ncclGetLastError(NULL));              \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

static int pipes[MAX_RANKS][2];

/* Gives the id to all ranks from `first` on. */
static void give(ncclUniqueId id, int first, int end) {
  for (; first < end; first++) CHECK(write(pipes[first][1], &id, sizeof id) == (ssize_t)sizeof id);
}

static ncclUniqueId taken(int rank) {
  ncclUniqueId id;
  CHECK(read(pipes[rank][0], &id, sizeof id) == (ssize_t)sizeof id);
  return id;
}

static ncclResult_t sum(ncclComm_t comm, int *total) {
  const int one = 1;
  *total = 0;
  return ncclAllReduce(&one, total, 1, ncclInt, ncclSum, comm, NULL);
}

static void play(int rank, int old, int all) {
  ncclComm_t comm = NULL, grown = NULL, half = NULL;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclResult_t state = ncclInternalError;
  ncclUniqueId id;
  const struct timespec pause = {0, 200 * 1000 * 1000};
  int total = 0, answer = -1;

  config.commName = "grown";
  if (rank < old) {
    if (rank == 0) {
      CHECK(ncclGetUniqueId(&id) == ncclSuccess);
      give(id, 1, old);
    } else {
      id = taken(rank);
    }
    CHECK(ncclCommInitRank(&comm, old, id, rank) == ncclSuccess);
    if (rank == 0) {
      CHECK(ncclCommGetUniqueId(comm, &id) == ncclSuccess);
      give(id, old, all);
    }
    CHECK(ncclCommGrow(comm, all, NULL, rank, &grown, &config) == ncclInvalidArgument && grown == NULL);
    CHECK(ncclCommGrow(comm, all, rank == 0 ? &id : NULL, -1, &grown, &config) == ncclSuccess);
    CHECK(ncclCommDestroy(comm) == ncclSuccess);
  } else {
    id = taken(rank);
    CHECK(ncclCommGrow(NULL, all, &id, rank, &grown, &config) == ncclSuccess);
  }
  CHECK(ncclCommUserRank(grown, &answer) == ncclSuccess && answer == rank);
  CHECK(ncclCommCount(grown, &answer) == ncclSuccess && answer == all);
  CHECK(sum(grown, &total) == ncclSuccess && total == all);

  /* The last rank does not take part in the next sum. It revokes, and the others wake. They most
   * likely are in the sum by then. */
  if (rank == all - 1) nanosleep(&pause, NULL);
  CHECK(rank == all - 1 || sum(grown, &total) == ncclRemoteError);
  CHECK(ncclCommRevoke(grown, NCCL_REVOKE_DEFAULT) == ncclSuccess);
  CHECK(ncclCommGetAsyncError(grown, &state) == ncclSuccess && state == ncclSuccess);
  CHECK(sum(grown, &total) == ncclInvalidUsage);
  CHECK(ncclCommFinalize(grown) == ncclInvalidArgument);
  CHECK(ncclCommSplit(grown, rank % 2, 0, &half, NULL) == ncclSuccess);
  CHECK(sum(half, &total) == ncclSuccess && total == (all + 1 - rank % 2) / 2);
  CHECK(ncclCommDestroy(half) == ncclSuccess && ncclCommDestroy(grown) == ncclSuccess);
}

int main(int argc, char **argv) {
  int old = argc > 1 ? atoi(argv[1]) : 2, all = old + (argc > 2 ? atoi(argv[2]) : 1), rank, failed = 0;
  pid_t children[MAX_RANKS];

  CHECK(old >= 1 && all > old && all <= MAX_RANKS);
  for (rank = 0; rank < all; rank++) CHECK(pipe(pipes[rank]) == 0);
  for (rank = 0; rank < all; rank++) {
    children[rank] = fork();
    CHECK(children[rank] >= 0);
    if (children[rank] == 0) {
      alarm(DEADLINE_SECONDS);
      play(rank, old, all);
      exit(0);
    }
  }
  for (rank = 0; rank < all; rank++) {
    int status = -1;
    CHECK(waitpid(children[rank], &status, 0) == children[rank]);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      fprintf(stderr, "rank %d of %d ended with wait status %#x\n", rank, all, (unsigned)status);
      failed = 1;
    }
  }
  return failed;
}
