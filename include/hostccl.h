/* hostccl.h: NCCL's C API over host memory on one machine (libhostccl).
 *
 * A program written against the host-side API of nccl.h compiles against this header and links with -lhostccl: names,
 * argument orders, enum values and struct layouts are NCCL's. What differs:
 *
 *   - Buffers are host memory. Ranks are threads or processes of one machine.
 *   - A communication call returns when its result is in place (inside a group: when ncclGroupEnd returns). The stream
 *     is ignored; pass NULL.
 *   - A peer that dies makes the calls of the others return ncclRemoteError instead of hanging.
 *   - Ranks whose collective calls do not fit together get ncclInvalidUsage instead of a hang.
 *
 * Words used below
 *   Local         returns without talking to any other rank.
 *   Collective    every rank of the communicator makes the same call, in the same order.
 *
 * Threads: each rank's communicator is used by one thread at a time, but for ncclCommAbort and ncclCommGetAsyncError,
 * which may be called from any thread at any time. A communicator is a token: NULL, made-up and destroyed ones give
 * ncclInvalidArgument, never undefined behaviour. Groups belong to the calling thread.
 * Out-parameters are written only on success, but for those of new communicators: they are NULL until there is one, and
 * stay NULL after a failure and for NCCL_SPLIT_NOCOLOR.
 *
 * Environment: HOSTCCL_TIMEOUT_MS ends every wait for peers after so many milliseconds, with ncclTimeout. Unset, ranks
 * wait 600 seconds for each other to join, and as long as all live for everything else; 0 means the same. What is no whole
 * number of milliseconds is refused by the calls that make a communicator of an id, with ncclInvalidArgument.
 *
 * After a real nccl.h this header adds only the hostccl* functions; a real nccl.h after this header adds nothing. */
#ifndef HOSTCCL_H_
#define HOSTCCL_H_

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifndef NCCL_H_
#define NCCL_H_

/* The NCCL release whose API this is (with ncclAlltoAll, ncclGather and ncclScatter, which NCCL has since 2.28);
 * ncclGetVersion answers the same at run time. */
#define NCCL_MAJOR 2
#define NCCL_MINOR 27  /* as NCCL_MAJOR */
#define NCCL_PATCH 7   /* as NCCL_MAJOR */
#define NCCL_SUFFIX "" /* as NCCL_MAJOR */
/* A release as one number: 22707 is 2.27.7. */
#define NCCL_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
/* This release as one number. */
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/* One rank's end of a communicator. Made by ncclCommInitRank and its relatives, freed by ncclCommDestroy or ncclCommAbort. */
typedef struct ncclComm *ncclComm_t;
#define NCCL_COMM_NULL NULL /* no communicator */

/* This line is CUDA's own, so both headers can be included. Streams are ignored here. */
typedef struct CUstream_st *cudaStream_t;

/* The size of an ncclUniqueId. */
#define NCCL_UNIQUE_ID_BYTES 128
/* One rank makes an id, and all ranks start a communicator from it. Plain bytes: copy it by any means. */
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES]; /* what it means is the library's own affair */
} ncclUniqueId;

/* Outcome of a call; ncclGetLastError has the details. */
typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1, /* never returned by this library */
  ncclSystemError = 2,        /* the operating system refused something */
  ncclInternalError = 3,      /* a bug in this library, or the communicator was aborted by this process */
  ncclInvalidArgument = 4,    /* NULL, out of range, or not a live communicator */
  ncclInvalidUsage = 5,       /* calls of several ranks that do not fit together, or an order that is not allowed */
  ncclRemoteError = 6,        /* a peer died, left or never came */
  ncclInProgress = 7,         /* a non-blocking call is still at work: ask ncclCommGetAsyncError */
  ncclTimeout = 8,            /* peers did not come before the deadline (HOSTCCL_TIMEOUT_MS, hostcclCommSetTimeout) */
  ncclNumResults = 9
} ncclResult_t;

/* Element types. Half precision is rounded once per reduction, not once per addition. */
typedef enum {
  ncclInt8 = 0,
  ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclHalf = 6,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclFloat64 = 8,
  ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclNumTypes = 10
} ncclDataType_t;

/* Reductions. Integers wrap; their average is truncated towards zero. Maximum and minimum of floats ignore NaNs. Values from
 * ncclNumOps to ncclMaxRedOp are those of ncclRedOpCreatePreMulSum. */
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

/* When the scalar of ncclRedOpCreatePreMulSum is read. */
typedef enum {
  ncclScalarDevice = 0,       /* whenever an operation uses it: it has to stay valid until then */
  ncclScalarHostImmediate = 1 /* during the creating call */
} ncclScalarResidence_t;

/* Colour of ncclCommSplit for a rank that takes part in the call but in no new communicator. */
#define NCCL_SPLIT_NOCOLOR (-1)
/* Flags of ncclCommShrink: the communicator is whole and nothing is under way on it, or its calls are to end first. */
#define NCCL_SHRINK_DEFAULT 0
#define NCCL_SHRINK_ABORT 1 /* as NCCL_SHRINK_DEFAULT */

#define NCCL_CONFIG_UNDEF_INT INT_MIN /* a field of ncclConfig_t that nobody has set */
#define NCCL_CONFIG_UNDEF_PTR NULL    /* a field of ncclConfig_t that nobody has set */
/* How a communicator is made. Start from NCCL_CONFIG_INITIALIZER and set fields by name: NCCL appends fields from release
 * to release, and size tells the library which ones there are. The library uses blocking and commName. */
typedef struct ncclConfig_v22700 {
  size_t size;           /* sizeof(ncclConfig_t) */
  unsigned int magic;    /* 0xcafebeef */
  unsigned int version;  /* NCCL_VERSION_CODE */
  int blocking;          /* 0: making communicators returns ncclInProgress at once; else it waits (the default) */
  int cgaClusterSize;    /* NCCL's; not used here */
  int minCTAs;           /* NCCL's; not used here */
  int maxCTAs;           /* NCCL's; not used here */
  const char *netName;   /* NCCL's; not used here */
  int splitShare;        /* NCCL's; not used here */
  int trafficClass;      /* NCCL's; not used here */
  const char *commName;  /* what messages call the communicator; copied */
  int collnetEnable;     /* NCCL's; not used here */
  int CTAPolicy;         /* NCCL's; not used here */
  int shrinkShare;       /* NCCL's; not used here */
  int nvlsCTAs;          /* NCCL's; not used here */
} ncclConfig_t;

/* An ncclConfig_t in which nothing is set. */
#define NCCL_CONFIG_INITIALIZER                                                                                       \
  {                                                                                                                    \
    sizeof(ncclConfig_t),  /* size */                                                                                  \
    0xcafebeef,            /* magic */                                                                                 \
    NCCL_VERSION_CODE,     /* version */                                                                               \
    NCCL_CONFIG_UNDEF_INT, /* blocking */                                                                              \
    NCCL_CONFIG_UNDEF_INT, /* cgaClusterSize */                                                                        \
    NCCL_CONFIG_UNDEF_INT, /* minCTAs */                                                                               \
    NCCL_CONFIG_UNDEF_INT, /* maxCTAs */                                                                               \
    NCCL_CONFIG_UNDEF_PTR, /* netName */                                                                               \
    NCCL_CONFIG_UNDEF_INT, /* splitShare */                                                                            \
    NCCL_CONFIG_UNDEF_INT, /* trafficClass */                                                                          \
    NCCL_CONFIG_UNDEF_PTR, /* commName */                                                                              \
    NCCL_CONFIG_UNDEF_INT, /* collnetEnable */                                                                         \
    NCCL_CONFIG_UNDEF_INT, /* CTAPolicy */                                                                             \
    NCCL_CONFIG_UNDEF_INT, /* shrinkShare */                                                                           \
    NCCL_CONFIG_UNDEF_INT  /* nvlsCTAs */                                                                              \
  }

/* ---- versions and errors (Local) ------------------------------------------------------------------------------- */

/* Writes NCCL_VERSION_CODE of the loaded library. */
ncclResult_t ncclGetVersion(int *version);
/* A static sentence for a result, never NULL. */
const char *ncclGetErrorString(ncclResult_t result);
/* This thread's last error in one line, "" when none; for a comm that failed in the background, its error. comm may be NULL.
 * Borrowed: valid until this thread's next failing call. */
const char *ncclGetLastError(ncclComm_t comm);

/* ---- making communicators -------------------------------------------------------------------------------------- */

/* Makes an id for one communicator. The calling process has to live until every rank's init is done. Local. */
ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
/* Joins as rank (0 .. nranks - 1) of nranks the communicator of commId. Collective over the nranks. Inside a group it
 * happens at ncclGroupEnd, so that one thread can join as several ranks. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
/* ncclCommInitRank with a configuration, or NULL. With config->blocking = 0 it returns ncclInProgress, and the communicator may
 * be used once ncclCommGetAsyncError says ncclSuccess. Collective. */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config);
/* ncclCommInitRankConfig with several ids, equal on every rank. Collective. */
ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
                                      ncclConfig_t *config);
/* Makes all ndev ranks of a communicator in this process: comms[i] is rank i, and devlist[i] (NULL: i) what
 * ncclCommCuDevice answers. Local. */
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devlist);
/* Makes one communicator per color (>= 0, or NCCL_SPLIT_NOCOLOR) of the ranks of comm that passed it, ordered by key, ties
 * by rank. config NULL: that of comm, but for its name. Collective over comm, in the same order on every rank. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config);
/* Makes a communicator of the ranks of comm that are not listed, in their order. Collective over those, the same list on
 * each; a listed rank does not call. With NCCL_SHRINK_ABORT the calls under way on comm end first, on all ranks, and comm
 * may have failed, as by the death of a listed rank; it can only be freed afterwards. */
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
                            ncclConfig_t *config, int shrinkFlags);

/* ---- their life ------------------------------------------------------------------------------------------------ */

/* Ends the use of comm: later operations are refused; destroy it next. Local. */
ncclResult_t ncclCommFinalize(ncclComm_t comm);
/* Frees comm. Local: never waits for peers; one that still needs this rank gets ncclRemoteError. */
ncclResult_t ncclCommDestroy(ncclComm_t comm);
/* Frees comm and ends its calls on every rank: blocked ones return ncclInternalError in this process, ncclRemoteError at
 * the peers. Local, from any thread. */
ncclResult_t ncclCommAbort(ncclComm_t comm);
/* Writes how comm stands: ncclSuccess, ncclInProgress, or the error that ended it. Local, from any thread. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);
/* The number of ranks. Local. */
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
/* The device number given to ncclCommInitAll, else 0. Local. */
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
/* The rank of this end. Local. */
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);

/* ---- reductions of one's own (Local) --------------------------------------------------------------------------- */

/* A reduction of comm that multiplies each rank's elements by that rank's *scalar (of type datatype) and sums. */
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm);
/* Frees one. */
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

/* ---- collective operations ------------------------------------------------------------------------------------- */
/* Counts are in elements, not bytes. Buffers may overlap only in place, as said for each. */

/* recvbuff[0 .. count) of every rank = the reduction of all sendbuff[0 .. count), the same bits everywhere. In place:
 * sendbuff == recvbuff. */
ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
/* Reduces to the root only. On other ranks recvbuff is not used and may be NULL. In place: sendbuff == recvbuff. */
ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. count) of every rank = sendbuff[0 .. count) of root; elsewhere sendbuff is not used. In place: sendbuff ==
 * recvbuff. */
ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                           ncclComm_t comm, cudaStream_t stream);
/* ncclBroadcast in place. */
ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. nranks * sendcount) of every rank = sendbuff[0 .. sendcount) of rank 0, rank 1, ... In place: sendbuff ==
 * recvbuff + rank * sendcount elements. */
ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. recvcount) of rank r = elements r * recvcount ... of the reduction of all sendbuff[0 .. nranks *
 * recvcount). In place: recvbuff == sendbuff + rank * recvcount elements. */
ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
/* Block p of recvbuff of rank r = block r of sendbuff of rank p; blocks have count elements. In place: sendbuff ==
 * recvbuff. */
ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                          cudaStream_t stream);
/* Block p of recvbuff of root = sendbuff[0 .. count) of rank p; elsewhere recvbuff may be NULL. In place on root: sendbuff
 * == recvbuff + root * count elements. */
ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. count) of rank r = block r of sendbuff of root; elsewhere sendbuff may be NULL. In place on root: recvbuff
 * == sendbuff + root * count elements. */
ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                         ncclComm_t comm, cudaStream_t stream);

/* ---- point to point -------------------------------------------------------------------------------------------- */

/* Sends count elements to peer, which receives as many of that type; returns when the peer has them. Sends and receives
 * between two ranks match in their order. Several that need each other belong into one group. */
ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);
/* Receives count elements from peer. */
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);

/* ---- groups ---------------------------------------------------------------------------------------------------- */

/* From here to the matching ncclGroupEnd this thread's calls are only noted. Groups nest. Local. */
ncclResult_t ncclGroupStart(void);
/* The outermost one performs the calls noted, all together, and reports the first error of any. */
ncclResult_t ncclGroupEnd(void);

/* ---- memory (Local) -------------------------------------------------------------------------------------------- */

/* Page-aligned host memory. Any other memory serves as well. */
ncclResult_t ncclMemAlloc(void **ptr, size_t size);
/* Frees what ncclMemAlloc gave; NULL is a no-op. */
ncclResult_t ncclMemFree(void *ptr);
/* Accepted for compatibility: host memory needs no registration. */
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle);
/* Does nothing, like ncclCommRegister. */
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);

#ifdef __cplusplus
}
#endif

#endif /* NCCL_H_ */

#ifdef __cplusplus
extern "C" {
#endif

/* ---- beyond NCCL ------------------------------------------------------------------------------------------------- */

/* Writes the rank of comm that was found dead or gone, or the first one that did not come in time; -1 when none is known. Local. */
ncclResult_t hostcclCommLostRank(ncclComm_t comm, int *rank);

/* Extension: how long an operation of this rank that begins later may wait for its peers without any progress before comm ends with
 * ncclTimeout, in milliseconds; 0: as the environment variable HOSTCCL_TIMEOUT_MS says (unset: for ever). It holds for comm's making
 * too, where that goes on in the background, and for splits of comm. Local. */
ncclResult_t hostcclCommSetTimeout(ncclComm_t comm, int64_t timeout_ms);

/* Extension: names the calling thread's next operation or split. tag is the same on all ranks that take part, 0 for none; name, for messages, is
 * NULL or has 32 bytes, filled up with zeros. Operations of one communicator under different tags may come in any order from several
 * threads: each pairs with those of its tag, as if each tag had a communicator of its own. Two threads in operations of one tag at the same time
 * are refused. Local. */
ncclResult_t hostcclNextCallName(uint64_t tag, const char *name);

/* Messages about comm call its ranks by these count numbers, one for each rank, such as their ranks in a larger set. Numbers that were set stay.
 * Communicators that are split off comm or shrunk from it inherit them. Local. */
ncclResult_t hostcclCommSetNames(ncclComm_t comm, const int *names, int count);

/* For a rank that is in another call (said in call) and makes no more collectives on comm: the error of comm when it has failed. When another
 * rank waits in a collective that this rank has not begun, comm ends with ncclInvalidUsage for both, and the message says who is where. Local. */
ncclResult_t hostcclCommRefuse(ncclComm_t comm, const char *call);

/* The calling thread's open group fails at its end with why, before any of its operations runs. Does nothing when no group is open. Local. */
ncclResult_t hostcclGroupFail(const char *why);

/* ncclCommGetAsyncError that waits, for at most timeout_ms milliseconds, while it would answer ncclInProgress. Local. */
ncclResult_t hostcclCommWait(ncclComm_t comm, int64_t timeout_ms, ncclResult_t *async_error);

#ifdef __cplusplus
}
#endif

#endif /* HOSTCCL_H_ */
