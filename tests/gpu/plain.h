/* Plain NCCL: the functions of the library that made a mesh's communicators, called as a program
 * without libdevicemesh calls them. */
#ifndef PLAIN_H
#define PLAIN_H

#include "gpu.h"

typedef struct plain {
  ncclResult_t (*GetUniqueId)(ncclUniqueId *);
  ncclResult_t (*CommInitRankConfig)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
  ncclResult_t (*CommSplit)(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *);
  ncclResult_t (*CommFinalize)(ncclComm_t);
  ncclResult_t (*CommDestroy)(ncclComm_t);
  ncclResult_t (*AllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
  const char *(*GetErrorString)(ncclResult_t);
} plain;

static inline plain plain_open(const dm_mesh *mesh)
{
  plain nccl;
#define PLAIN(function) \
  do { \
    void *address_ = NULL; \
    REQUIRE(dm_get_proc(mesh, "nccl" #function, &address_)); \
    memcpy(&nccl.function, &address_, sizeof address_); \
  } while (0)
  PLAIN(GetUniqueId);
  PLAIN(CommInitRankConfig);
  PLAIN(CommSplit);
  PLAIN(CommFinalize);
  PLAIN(CommDestroy);
  PLAIN(AllReduce);
  PLAIN(GetErrorString);
#undef PLAIN
  return nccl;
}

static inline void plain_says(const plain *nccl, ncclResult_t result, const char *call)
{
  if (result == ncclSuccess) return;
  fprintf(stderr, "%s gives %d (%s)\n", call, (int)result, nccl->GetErrorString(result));
  exit(1);
}

/* Rank 0's fresh id, on all ranks, by a broadcast over `carrier` (one dimension, all ranks). */
static inline ncclUniqueId plain_id(const plain *nccl, const dm_mesh *carrier, int32_t rank)
{
  ncclUniqueId id;
  memset(&id, 0, sizeof id);
  if (rank == 0) plain_says(nccl, nccl->GetUniqueId(&id), "ncclGetUniqueId");
  void *memory = device_alloc(sizeof id);
  device_put(memory, &id, sizeof id);
  REQUIRE(dm_broadcast(carrier, NULL, memory, memory, sizeof id, DM_UINT8, 0, device_stream()));
  device_get(&id, memory, sizeof id);
  device_free(memory);
  return id;
}

static inline void plain_end(const plain *nccl, ncclComm_t comm)
{
  plain_says(nccl, nccl->CommFinalize(comm), "ncclCommFinalize");
  plain_says(nccl, nccl->CommDestroy(comm), "ncclCommDestroy");
}

#endif
