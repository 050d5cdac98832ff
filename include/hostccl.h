/* hostccl.h: NCCL's C API over host memory, on one host or several (libhostccl).
 *
 * A program that is written for the host side of nccl.h compiles against this header and links
 * with -lhostccl. The names, the order of arguments, the values of enums and the layouts of
 * structs are NCCL's. These are the differences:
 *
 *   - Buffers are host memory. Ranks are threads or processes, on one host or on several.
 *   - A call that communicates returns when its result is in place. In a group, ncclGroupEnd
 *     returns when all results are in place. Streams are ignored: pass NULL.
 *   - When a peer dies, the calls of the other ranks return ncclRemoteError and do not hang.
 *   - Ranks whose collective calls do not fit together get ncclInvalidUsage and do not hang.
 *
 * Words used below
 *   Local         The call returns without waiting for any other rank.
 *   Collective    Every rank of the communicator makes this call, in the same order.
 *
 * Threads: one thread at a time uses a rank's communicator. There are two exceptions. Any thread
 * may call ncclCommAbort and ncclCommGetAsyncError at any time. And several threads may make
 * operations under different names (hostcclNextCallName). Groups belong to the calling thread.
 *
 * Communicators: a communicator is a token. NULL, invented and destroyed tokens give
 * ncclInvalidArgument and never undefined behaviour.
 *
 * Out-parameters are written only on success. The place for a new communicator is an exception: it
 * is NULL until there is a communicator, and stays NULL after a failure and for
 * NCCL_SPLIT_NOCOLOR. A non-blocking init writes the communicator at once.
 *
 * Environment: HOSTCCL_TIMEOUT_MS is how many milliseconds a wait for peers may last without any
 * progress. Then the call returns ncclTimeout. When the variable is unset or 0, init, split, shrink
 * and grow wait for 600 seconds, and all other calls wait as long as their peers live. If the value
 * is not a whole number of milliseconds, the calls that start a communicator from an id return
 * ncclInvalidArgument.
 *
 * If a real nccl.h comes before this header, this header adds only the hostccl* functions. If a
 * real nccl.h comes after this header, nccl.h adds nothing. */
#ifndef HOSTCCL_H_
#define HOSTCCL_H_

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifndef NCCL_H_
#define NCCL_H_

/* The NCCL release whose API this is. It also has these functions of later releases: ncclAlltoAll,
 * ncclGather, ncclScatter and ncclCommRevoke (2.28), ncclCommGetUniqueId and ncclCommGrow (2.29).
 * ncclGetVersion returns this release at run time. */
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

/* One rank's end of a communicator. The functions under "making communicators" make it, and
 * ncclCommDestroy or ncclCommAbort frees it. */
typedef struct ncclComm *ncclComm_t;
#define NCCL_COMM_NULL NULL /* no communicator */

/* CUDA's headers have the same line, so a program can include both. Streams are ignored here. */
typedef struct CUstream_st *cudaStream_t;

/* The size of an ncclUniqueId in bytes. */
#define NCCL_UNIQUE_ID_BYTES 128
/* One rank makes an id, and all ranks start a communicator from it. It consists of plain bytes, so
 * it can be copied and sent in any way. */
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES]; /* opaque bytes */
} ncclUniqueId;

/* The outcome of a call. ncclGetLastError has the details. */
typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1, /* never returned by this library */
  ncclSystemError = 2,        /* the operating system refused something */
  ncclInternalError = 3,      /* a bug in this library, or this process aborted the communicator */
  ncclInvalidArgument = 4,    /* NULL, out of range, or not a live communicator */
  ncclInvalidUsage = 5,       /* calls of several ranks do not fit together */
  ncclRemoteError = 6,        /* a peer died, left or never came */
  ncclInProgress = 7,         /* a non-blocking call has not ended: ask ncclCommGetAsyncError */
  ncclTimeout = 8,            /* peers did not come in time (HOSTCCL_TIMEOUT_MS) */
  ncclNumResults = 9
} ncclResult_t;

/* Element types. Reductions of ncclFloat16, ncclBfloat16 and the 8-bit types compute in single
 * precision and round once, at the end. Over several hosts, a reduction of ncclFloat16 and
 * ncclBfloat16 also rounds the result of each host. Results of the 8-bit types that are beyond the
 * largest number become the largest number, as in NCCL. */
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
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

/* Reductions. Sums and products of integers wrap. An average does not overflow. An average of
 * integers is the exact sum divided by the number of ranks, truncated towards zero. The maximum and
 * the minimum of floating-point numbers are NaN where a rank has NaN.
 * ncclRedOpCreatePreMulSum returns values from ncclNumOps to ncclMaxRedOp. */
typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

/* Says when the scalar of ncclRedOpCreatePreMulSum is read. With ncclScalarDevice it stays valid
 * until ncclRedOpDestroy. */
typedef enum {
  ncclScalarDevice = 0,       /* each time an operation uses the reduction */
  ncclScalarHostImmediate = 1 /* during ncclRedOpCreatePreMulSum */
} ncclScalarResidence_t;

/* The colour of ncclCommSplit for a rank that makes the call but joins no new communicator. */
#define NCCL_SPLIT_NOCOLOR (-1)
/* The flag of ncclCommRevoke. There is no other one. */
#define NCCL_REVOKE_DEFAULT 0x00
/* Flags of ncclCommShrink. With NCCL_SHRINK_DEFAULT the communicator has not failed, and no call
 * is under way on it. NCCL_SHRINK_ABORT first ends the calls that are under way. */
#define NCCL_SHRINK_DEFAULT 0
#define NCCL_SHRINK_ABORT 1 /* as NCCL_SHRINK_DEFAULT */

#define NCCL_CONFIG_UNDEF_INT INT_MIN /* a field of ncclConfig_t that nobody has set */
#define NCCL_CONFIG_UNDEF_PTR NULL    /* a field of ncclConfig_t that nobody has set */
/* The configuration of a new communicator. Start from NCCL_CONFIG_INITIALIZER and set fields by
 * name. NCCL appends fields from release to release, and size tells the library which fields there
 * are. This library uses blocking and commName. */
typedef struct ncclConfig_v22700 {
  size_t size;           /* sizeof(ncclConfig_t) */
  unsigned int magic;    /* 0xcafebeef */
  unsigned int version;  /* NCCL_VERSION_CODE */
  int blocking;          /* 0: init, split, shrink, grow return at once */
  int cgaClusterSize;    /* NCCL's; not used here */
  int minCTAs;           /* NCCL's; not used here */
  int maxCTAs;           /* NCCL's; not used here */
  const char *netName;   /* NCCL's; not used here */
  int splitShare;        /* NCCL's; not used here */
  int trafficClass;      /* NCCL's; not used here */
  const char *commName;  /* the communicator's name in messages; copied */
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
/* Returns a static sentence for a result, never NULL. */
const char *ncclGetErrorString(ncclResult_t result);
/* Returns this thread's last error in one line. If this thread has had none, it returns the error
 * of a comm that failed in the background, or "". comm may be NULL. The string belongs to the
 * library and is valid until this thread's next failing call. */
const char *ncclGetLastError(ncclComm_t comm);

/* ---- making communicators -------------------------------------------------------------------------------------- */

/* Makes an id that starts one communicator. The calling process must live until every rank's init
 * is done. Local. */
ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
/* Joins the communicator of commId as rank (0 .. nranks - 1) of nranks. Inside a group,
 * ncclGroupEnd joins, so that one thread can join as several ranks. Collective over the nranks
 * ranks. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
/* Joins as ncclCommInitRank does, with a configuration or NULL. With config->blocking = 0 it
 * returns ncclInProgress at once, and the communicator may be used when ncclCommGetAsyncError
 * writes ncclSuccess. Collective. */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config);
/* Joins as ncclCommInitRankConfig does, with nId ids, which are equal on every rank. The first one
 * is used. Collective. */
ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
                                      ncclConfig_t *config);
/* Makes all ndev ranks of a communicator in this process. comms[i] is rank i, and ncclCommCuDevice
 * returns devlist[i] for it, or i if devlist is NULL. Local. */
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devlist);
/* Makes one communicator for each color, of the ranks of comm that pass this color. They are
 * ordered by key, and by rank where keys are equal. color is 0 or more, or NCCL_SPLIT_NOCOLOR. If
 * config is NULL, the configuration of comm applies, without its name. Collective over comm. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config);
/* Makes a communicator of the ranks of comm that are not listed, in their order. With
 * NCCL_SHRINK_ABORT, the calls under way on comm are first ended on all ranks, and comm may have
 * failed, for example by the death of a listed rank. After a shrink with NCCL_SHRINK_ABORT, comm
 * takes no operations: it can be freed, revoked, or shrunk again with NCCL_SHRINK_ABORT. Without the
 * flag, comm can be used as before. Collective over the ranks that are not listed, which all pass
 * one set of excluded ranks. */
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
                            ncclConfig_t *config, int shrinkFlags);

/* Makes the id with which new ranks join the next ncclCommGrow of comm. One rank of comm calls
 * this, and lives until the growth is done. It can make another id when the growth has used this
 * one. Local. */
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId);
/* Makes a communicator of the ranks of comm and of new ones, nRanks together. The ranks of comm pass
 * rank -1 and keep their ranks. The one that has made the id passes it, and the others pass NULL.
 * New ranks pass NULL as comm, the id, and a rank that is not less than the size of comm. If config
 * is NULL, the configuration of comm applies, without its name. With blocking = 0 it returns
 * ncclInProgress at once, and ncclCommGetAsyncError of newcomm tells when it is done. comm can be
 * used afterwards, or destroyed. When a rank of comm has died, all ranks get ncclRemoteError.
 * Collective. */
ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t *newcomm,
                          ncclConfig_t *config);

/* ---- their life ------------------------------------------------------------------------------------------------ */

/* Ends the calls under way on comm, on all ranks: they return ncclRemoteError. It returns when no
 * call of this rank is under way. If that takes more than some seconds, it returns ncclTimeout, and
 * comm is revoked all the same. Afterwards this rank may split, shrink, destroy and abort comm;
 * operations and ncclCommGrow are refused with ncclInvalidUsage, and ncclCommFinalize with
 * ncclInvalidArgument. comm may have failed before. The other ranks call this, too, before they
 * split or shrink comm. revokeFlags is NCCL_REVOKE_DEFAULT. Waits for no other rank. */
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
/* Ends the use of comm. It returns when no call of this rank is under way. If a timeout is set and a
 * call is still under way after that time, it returns ncclTimeout, and comm is finalized all the
 * same. Later operations are refused, so ncclCommDestroy is the next call. Local. */
ncclResult_t ncclCommFinalize(ncclComm_t comm);
/* Frees comm, and waits for no call of a peer. While a call on comm is in progress in the
 * background (blocking = 0), it does what ncclCommAbort does. Over several hosts it waits until its last messages
 * are safe, for two seconds at most. A peer that still needs this rank gets ncclRemoteError.
 * Local. */
ncclResult_t ncclCommDestroy(ncclComm_t comm);
/* Frees comm and ends its calls on every rank. Blocked calls of this process return
 * ncclInternalError, and blocked calls of the peers return ncclRemoteError. Any thread may call
 * it. Local. Where comm is being made and is not connected yet to the process that made the unique
 * id, it waits until that process knows of the abort, for half a second at most. It also waits until
 * a call that makes a communicator in the background has ended, for five seconds at most. */
ncclResult_t ncclCommAbort(ncclComm_t comm);
/* Writes the state of comm: ncclSuccess, ncclInProgress, or the error that ended it. Any thread
 * may call it. Local. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);
/* Writes the number of ranks. Local. */
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
/* Writes the device number that ncclCommInitAll got for this rank, or 0. Local. */
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
/* Writes the rank whose end comm is. Local. */
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);

/* ---- reductions that a program makes (Local) ------------------------------------------------------------------- */

/* Makes a reduction for comm that multiplies each rank's elements by that rank's *scalar and then
 * sums them. The scalar and the elements are of type datatype. */
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm);
/* Frees a reduction that ncclRedOpCreatePreMulSum made. */
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);

/* ---- collective operations ------------------------------------------------------------------------------------- */
/* Counts are in elements, not in bytes. The two buffers of a call do not overlap, except exactly
 * in place, which is defined at each function. */

/* recvbuff[0 .. count) of every rank = the reduction of sendbuff[0 .. count) of all ranks. Every
 * rank gets the same bits. In place: sendbuff == recvbuff. */
ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. count) of root = the reduction of sendbuff[0 .. count) of all ranks. On the other
 * ranks recvbuff is not used and may be NULL. In place: sendbuff == recvbuff. */
ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. count) of every rank = sendbuff[0 .. count) of root. On the other ranks sendbuff
 * is not used and may be NULL. In place: sendbuff == recvbuff. */
ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                           ncclComm_t comm, cudaStream_t stream);
/* Broadcasts in place: buff is both buffers of ncclBroadcast. */
ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
/* Block p of recvbuff of every rank = sendbuff[0 .. sendcount) of rank p. A block has sendcount
 * elements. In place: sendbuff == recvbuff + rank * sendcount elements. */
ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. recvcount) of rank r = block r of the reduction of sendbuff[0 .. nranks *
 * recvcount) of all ranks. A block has recvcount elements. In place: recvbuff == sendbuff + rank *
 * recvcount elements. */
ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
/* Block p of recvbuff of rank r = block r of sendbuff of rank p. A block has count elements. In
 * place: sendbuff == recvbuff. */
ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                          cudaStream_t stream);
/* Block p of recvbuff of root = sendbuff[0 .. count) of rank p. A block has count elements. On the
 * other ranks recvbuff may be NULL. In place on root: sendbuff == recvbuff + root * count
 * elements. */
ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, cudaStream_t stream);
/* recvbuff[0 .. count) of rank r = block r of sendbuff of root. A block has count elements. On the
 * other ranks sendbuff may be NULL. In place on root: recvbuff == sendbuff + root * count
 * elements. */
ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                         ncclComm_t comm, cudaStream_t stream);

/* ---- point to point -------------------------------------------------------------------------------------------- */

/* Sends count elements to peer, which receives as many elements of this type. It returns when the
 * peer has taken all of them. Sends and receives between two ranks match in their order. Sends and
 * receives that wait for each other belong in one group. */
ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);
/* Receives count elements from peer. The count and the type are those of the send. */
ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);

/* ---- groups ---------------------------------------------------------------------------------------------------- */

/* Starts a group. This thread's calls up to the matching ncclGroupEnd are only collected. Groups
 * nest. Local. */
ncclResult_t ncclGroupStart(void);
/* Ends a group. The end of the outermost group performs the collected calls together, and returns
 * the first error of any of them. */
ncclResult_t ncclGroupEnd(void);

/* ---- memory (Local) -------------------------------------------------------------------------------------------- */

/* Allocates size bytes of host memory, aligned to a page. Buffers may lie in any other memory,
 * too. */
ncclResult_t ncclMemAlloc(void **ptr, size_t size);
/* Frees memory that ncclMemAlloc returned. NULL is allowed and does nothing. */
ncclResult_t ncclMemFree(void *ptr);
/* Does nothing: programs for NCCL make this call, and host memory needs no registration. */
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle);
/* Ends a registration of ncclCommRegister. It does nothing either. */
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);

#ifdef __cplusplus
}
#endif

#endif /* NCCL_H_ */

#ifdef __cplusplus
extern "C" {
#endif

/* ---- beyond NCCL ------------------------------------------------------------------------------------------------- */

/* Makes an id as ncclGetUniqueId does, where the caller knows whether all ranks are on one host.
 * With hosts 0 all ranks share memory, and no socket is opened. With hosts 1 they do not, and the
 * ranks meet over the network at once. Local. */
ncclResult_t hostcclGetUniqueIdFor(ncclUniqueId *uniqueId, int hosts);

/* Writes the rank of comm that was found dead or gone, or the first rank that did not come in
 * time. It writes -1 when none is known. Local. */
ncclResult_t hostcclCommLostRank(ncclComm_t comm, int *rank);

/* Extension: says which ranks the calling thread's last error is about, as ranks of the
 * communicator of the failed call. ranks and lost have room for capacity numbers, and count gets how
 * many ranks there are. A place of lost is 1 where the rank's process has ended. waited_ms gets how
 * long the call waited for its peers without any progress, or -1. code gets the error's code, or
 * ncclSuccess when the thread had no error since its last hostcclNextCallName. Local. */
ncclResult_t hostcclLastErrorRanks(ncclResult_t *code, int *ranks, int *lost, int capacity, int *count,
                                   int64_t *waited_ms);

/* Sets how many milliseconds an operation of this rank that begins later may wait for its peers
 * without any progress. Then comm ends with ncclTimeout. With 0, HOSTCCL_TIMEOUT_MS applies. The
 * time also holds for splits and shrinks of comm. For a growth of comm, it is the time for the whole
 * making of newcomm, unless newcomm has a time of its own. Where it is set while comm itself is
 * being made in the background, it is the time for the whole making, with or without progress.
 * Local. */
ncclResult_t hostcclCommSetTimeout(ncclComm_t comm, int64_t timeout_ms);

/* Names the calling thread's next operation, split or growth. tag is the same on all ranks that take part,
 * and 0 stands for no name. The two largest tags, UINT64_MAX - 1 and UINT64_MAX, are refused with
 * ncclInvalidArgument. name is for messages: NULL, or 32 bytes that are filled up with zeros.
 * Several threads may make operations of one communicator under different tags, in any order. Each
 * operation pairs with those of its tag, as if each tag had a communicator of its own. Two threads
 * that are in operations of one tag at the same time are refused. Between hosts, each tag of messages
 * takes some memory until the communicator ends, so use few tags. It also takes back the time of
 * hostcclNextCallTimeout, which therefore comes after it. Local. */
ncclResult_t hostcclNextCallName(uint64_t tag, const char *name);

/* Sets how many milliseconds the calling thread's next operation or split may wait for its peers
 * without any progress. For this one call it replaces the time of hostcclCommSetTimeout, so calls of
 * several threads on one communicator may have different times. 0 means no replacement. The next call
 * uses it up, even if that call is refused. Local. */
ncclResult_t hostcclNextCallTimeout(int64_t timeout_ms);

/* Sets the numbers by which messages name the ranks of comm: one number for each rank, for example
 * its rank in a larger set. count is the number of ranks. The first numbers that are set stay.
 * Communicators that are split or shrunk from comm inherit them. Local. */
ncclResult_t hostcclCommSetNames(ncclComm_t comm, const int *names, int count);

/* Checks once whether another rank waits in a collective on comm that this rank has not begun and
 * will not begin, because it is in another call. If so, comm ends with ncclInvalidUsage on both
 * ranks, and the message names both calls. The string call describes the call of this rank. A rank
 * that begins to wait later is found only by another call of this function. The function also fails
 * when comm has failed. Local. */
ncclResult_t hostcclCommRefuse(ncclComm_t comm, const char *call);

/* Makes the blocked calls of this rank on comm ask question(data, reason, capacity): for the first
 * time when they have waited for a quarter of a second without progress, and then ten times per
 * second. The question returns 0 while the calls go on waiting. To end comm for all of its ranks,
 * the question writes the reason to reason, as a string, and returns 1. The calls then end with
 * ncclRemoteError. The reason and its final 0 have room for capacity bytes, which is 1024. The other
 * ranks get at most 512 bytes of it. Only the first question that is set counts. The question must answer soon, on any thread, and call no function of this
 * library. release(data) is called once, on any thread, when nobody asks any more, and also where
 * this call fails. release may be NULL. Local. */
ncclResult_t hostcclCommSetInterrupt(ncclComm_t comm, int (*question)(void *data, char *reason, size_t capacity),
                                     void (*release)(void *data), void *data);

/* Makes the calling thread's open group fail at its end with the reason why, before any of its
 * operations runs. It does nothing when no group is open. Local. */
ncclResult_t hostcclGroupFail(const char *why);

/* Collectives in which each rank has a count of its own. The lists have a number for each rank and
 * are copied. Block r of a buffer has counts[r] elements and begins displs[r] elements after the
 * buffer's address; without displs (NULL) the blocks follow each other. What one rank sends is what
 * the other expects; otherwise all ranks get ncclInvalidUsage and nothing is written. Blocks that are
 * received overlap nothing. Collective. */

/* Sends block r of sendbuff to rank r, and receives block r of recvbuff from it. */
ncclResult_t hostcclAlltoAllv(const void *sendbuff, const size_t *sendcounts, const size_t *sdispls, void *recvbuff,
                              const size_t *recvcounts, const size_t *rdispls, ncclDataType_t datatype,
                              ncclComm_t comm, cudaStream_t stream);
/* Block r of recvbuff = sendbuff of rank r, which has as many elements. In place: sendbuff == recvbuff
 * + rdispls[rank] elements. */
ncclResult_t hostcclAllGatherv(const void *sendbuff, void *recvbuff, const size_t *recvcounts, const size_t *rdispls,
                               ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
/* recvbuff of rank r = the reduction of block r of sendbuff of all ranks. In place: recvbuff ==
 * sendbuff + sdispls[rank] elements. */
ncclResult_t hostcclReduceScatterv(const void *sendbuff, const size_t *sendcounts, const size_t *sdispls,
                                   void *recvbuff, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                   cudaStream_t stream);

/* Writes what ncclCommGetAsyncError writes, but does not check whether the processes of the other
 * ranks live. Before that it waits while the state is ncclInProgress, for timeout_ms milliseconds
 * at most. Local. */
ncclResult_t hostcclCommWait(ncclComm_t comm, int64_t timeout_ms, ncclResult_t *async_error);

#ifdef __cplusplus
}
#endif

#endif /* HOSTCCL_H_ */
