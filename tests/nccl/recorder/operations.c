/* Operations on communicators, and groups of them. */
#include "recorder.h"

#include <dlfcn.h>

/* Tells the stand-in for the driver (device.c) which operation was put on which stream. */
static void runs_on(const char *operation, cudaStream_t stream)
{
  void (*runs)(cudaStream_t, const char *) = NULL;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == NULL) return;
  *(void **)&runs = dlsym(driver, "device_runs");
  if (runs != NULL) runs(stream, operation);
  dlclose(driver);
}

/* The communicators with operations in the calling thread's group. */
enum { kMostInGroup = 64 };
static __thread struct {
  int depth, count;
  struct ncclComm *comms[kMostInGroup];
} group;

static void enter(struct ncclComm *comm, const char *call)
{
  __atomic_add_fetch(&insiders, 1, __ATOMIC_SEQ_CST);
  if (__atomic_fetch_add(&comm->inside, 1, __ATOMIC_SEQ_CST) > 0) note("BUSY %s c%d: another thread is inside", call, comm->number);
}

static void leave(struct ncclComm *comm)
{
  __atomic_fetch_sub(&comm->inside, 1, __ATOMIC_SEQ_CST);
  __atomic_sub_fetch(&insiders, 1, __ATOMIC_SEQ_CST);
}

static void stay_inside(void)
{
  const int micros = number_from("RECORDER_INSIDE", 0);
  if (micros > 0) usleep((useconds_t)micros);
}

/* Whether an operation may go on after it has entered. Another thread must not have ended the
 * communicator meanwhile. */
static ncclResult_t begun(struct ncclComm *comm, const char *call)
{
  stay_inside();
  if (comm->state != kLives) {
    note("STALE %s c%d: it ended while the thread was inside", call, comm->number);
    return ncclInvalidArgument;
  }
  if (group.depth > 0 && group.count < kMostInGroup) group.comms[group.count++] = comm;
  return told_to(call);
}

/* With a non-blocking communicator an operation returns before the work is on the stream. Using
 * one here is an error that only a device would show. */
#define OPERATION(name, parameters, arguments) \
  ncclResult_t name parameters \
  { \
    ncclResult_t code = usable(comm, #name); \
    if (code != ncclSuccess) return code; \
    enter(comm, #name); \
    hang(#name); \
    code = begun(comm, #name); \
    if (code == ncclSuccess) { \
      note(#name " c%d%s", comm->number, comm->blocking ? "" : " NONBLOCKING"); \
      if (number_from("RECORDER_LATE", 0) > 0) { \
        comm->until = now() + 1e-3 * number_from("RECORDER_LATE", 0); \
        code = ncclInProgress; \
      } else { \
        runs_on(#name, stream); \
        code = number_from("RECORDER_IDLE", 0) ? ncclSuccess : REAL(name) arguments; \
        if (code == ncclSuccess) profile_operation(comm, &#name[4], count); \
      } \
    } \
    leave(comm); \
    return code; \
  }

OPERATION(ncclAllReduce,
          (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
           cudaStream_t stream),
          (send, recv, count, type, op, comm->real, stream))
OPERATION(ncclReduce,
          (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
           cudaStream_t stream),
          (send, recv, count, type, op, root, comm->real, stream))
OPERATION(ncclBroadcast, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream),
          (send, recv, count, type, root, comm->real, stream))
OPERATION(ncclAllGather, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream),
          (send, recv, count, type, comm->real, stream))
OPERATION(ncclReduceScatter,
          (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
           cudaStream_t stream),
          (send, recv, count, type, op, comm->real, stream))
OPERATION(ncclSend, (const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream),
          (send, count, type, peer, comm->real, stream))
OPERATION(ncclRecv, (void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream),
          (recv, count, type, peer, comm->real, stream))

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t comm)
{
  return REAL(ncclRedOpCreatePreMulSum)(op, scalar, type, residence, comm->real);
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
  return REAL(ncclRedOpDestroy)(op, comm->real);
}

ncclResult_t ncclGroupStart(void)
{
  ++group.depth;
  return REAL(ncclGroupStart)();
}

ncclResult_t ncclGroupEnd(void)
{
  hang("ncclGroupEnd");
  note("group end");
  if (--group.depth > 0) return REAL(ncclGroupEnd)();
  for (int at = 0; at < group.count; ++at) {
    __atomic_add_fetch(&insiders, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&group.comms[at]->inside, 1, __ATOMIC_SEQ_CST);
    if (group.comms[at]->state != kLives) note("STALE group end c%d", group.comms[at]->number);
  }
  stay_inside();
  const ncclResult_t code = REAL(ncclGroupEnd)();
  for (int at = 0; at < group.count; ++at) leave(group.comms[at]);
  group.count = 0;
  return code;
}
