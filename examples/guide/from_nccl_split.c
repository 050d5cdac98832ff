/* From hand-made ncclCommSplit to a mesh: the same groups three times, on a mesh (dp=2, tp=4),
 * eight processes.
 *
 *     devicemesh run -n 8 -- ./from_nccl_split
 *
 *   by hand     an id, a communicator over all ranks, colours and keys
 *   adopted     dm_from_comms: the mesh's questions and collectives over communicators that the
 *               program made itself
 *   two lines   dm_init and dm_get_comm
 *
 * NCCL's functions come from dm_get_proc, so that the program links neither NCCL nor the host
 * engine. */
#include <devicemesh.h>
#include <hostccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS 8
#define TP 4

static void check(dm_status status, const char *call)
{
  if (status != DM_STATUS_OK) {
    fprintf(stderr, "%s: %s: %s\n", call, dm_status_name(status), dm_last_error());
    exit(1);
  }
}
#define CHECK(call) check(call, #call)

static void nccl(ncclResult_t result, const char *call)
{
  if (result != ncclSuccess) {
    fprintf(stderr, "%s: result %d\n", call, (int)result);
    exit(1);
  }
}
#define NCCL(call) nccl(call, #call)

static ncclResult_t (*get_unique_id)(ncclUniqueId *);
static ncclResult_t (*comm_init_rank)(ncclComm_t *, int, ncclUniqueId, int);
static ncclResult_t (*comm_split)(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *);
static ncclResult_t (*comm_destroy)(ncclComm_t);
static ncclResult_t (*all_gather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);

/* C has no cast from void * to a function's pointer: the bytes are copied. */
static void load(const dm_mesh *mesh, const char *symbol, void *function)
{
  void *found;
  CHECK(dm_get_proc(mesh, symbol, &found));
  memcpy(function, &found, sizeof(found));
}

/* Who is in a communicator, in the order of its ranks: every member's world rank. */
static void members(ncclComm_t comm, int32_t rank, int32_t *ranks) { NCCL(all_gather(&rank, ranks, 1, ncclInt32, comm, NULL)); }

int main(void)
{
  dm_mesh *all, *mesh, *adopted;
  ncclComm_t world, tp, dp;
  int32_t rank, by_hand[2][TP] = {{0}}, ours[2][TP] = {{0}}, theirs[TP] = {0};

  /* Only to have the library's functions, and something to bring the id to all ranks with: MPI or
   * a store of your own, in such a program. */
  CHECK(dm_init("cpu", (int[]){RANKS}, 1, (const char *[]){"all"}, NULL, &all));
  CHECK(dm_rank(all, &rank));
  load(all, "ncclGetUniqueId", &get_unique_id);
  load(all, "ncclCommInitRank", &comm_init_rank);
  load(all, "ncclCommSplit", &comm_split);
  load(all, "ncclCommDestroy", &comm_destroy);
  load(all, "ncclAllGather", &all_gather);

  /* By hand: a communicator over all ranks, then the colour says which group, the key which place
   * in it. */
  ncclUniqueId id;
  if (rank == 0) NCCL(get_unique_id(&id));
  CHECK(dm_broadcast(all, NULL, &id, &id, sizeof(id), DM_UINT8, 0, NULL));
  NCCL(comm_init_rank(&world, RANKS, id, rank));
  NCCL(comm_split(world, rank / TP, rank % TP, &tp, NULL));
  NCCL(comm_split(world, rank % TP, rank / TP, &dp, NULL));
  members(dp, rank, by_hand[0]);
  members(tp, rank, by_hand[1]);

  /* Adopted: one communicator for each dimension, in their order. Sizes and ranks are checked; it
   * talks to nobody. */
  CHECK(dm_from_comms("cpu", (int[]){RANKS / TP, TP}, 2, (const char *[]){"dp", "tp"}, (ncclComm_t[]){dp, tp}, NULL, &adopted));
  CHECK(dm_all_gather(adopted, "tp", &rank, theirs, 1, DM_INT32, NULL));
  CHECK(dm_finalize(adopted, NULL)); /* the communicators stay ours: no DM_INIT_OWN_COMMS */

  /* Two lines. Which group, which place and in which order to split follow from the shape. */
  CHECK(dm_init("cpu", (int[]){RANKS / TP, TP}, 2, (const char *[]){"dp", "tp"}, NULL, &mesh));
  ncclComm_t mesh_tp, mesh_dp;
  CHECK(dm_get_comm(mesh, "tp", &mesh_tp));
  CHECK(dm_get_comm(mesh, "dp", &mesh_dp));
  members(mesh_dp, rank, ours[0]);
  members(mesh_tp, rank, ours[1]);

  const int same = memcmp(by_hand, ours, sizeof(ours)) == 0 && memcmp(theirs, ours[1], sizeof(theirs)) == 0;
  if (rank == 0)
    printf("rank 0: dp {%d, %d}, tp {%d, %d, %d, %d}\nby hand, adopted and from the mesh: %s\n", ours[0][0], ours[0][1], ours[1][0],
           ours[1][1], ours[1][2], ours[1][3], same ? "the same groups" : "different groups");

  NCCL(comm_destroy(tp));
  NCCL(comm_destroy(dp));
  NCCL(comm_destroy(world));
  CHECK(dm_finalize(mesh, NULL));
  CHECK(dm_finalize(all, NULL));
  dm_free(adopted), dm_free(mesh), dm_free(all);
  return same ? 0 : 1;
}
