/* A library with NCCL's C API that logs every call on communicators and passes it on to
 * libhostccl. tests/test_nccl.py builds it and loads it in NCCL's place. It checks NCCL's rules:
 * it marks in the log a call on a communicator that is still in progress or has ended. The handle
 * of a communicator that is split from a non-blocking parent stays NULL until the parent has
 * settled.
 *
 * Environment, read at each use: RECORDER_HOST, the path of libhostccl.so; RECORDER_LOG, a folder
 * for one file per rank; RECORDER_VERSION (and RECORDER_VERSION_<rank>), what ncclGetVersion says;
 * RECORDER_SLOW, milliseconds for which non-blocking work stays in progress; RECORDER_FAIL, "rank
 * call code": which call of which rank (-1: every one) fails with what; RECORDER_LATE,
 * milliseconds for which an operation stays in progress, and it is then never done;
 * RECORDER_INSIDE, microseconds that an operation and the end of a group last on the host;
 * RECORDER_STUCK, the rank whose ncclCommFinalize (RECORDER_STUCK_DESTROY: ncclCommDestroy of a
 * communicator that was split) does not return; RECORDER_TOGETHER, how many
 * ncclCommAbort must have begun (in all) before one returns; RECORDER_DEAF, nothing is noticed of a
 * peer's end, as over NVLink. Built with -DLACKS_SPLIT and so on,
 * it lacks that function; built with -DHIP it is RCCL with AMD's runtime. */
#include <hostccl.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct ncclComm {
  int number, blocking, device;
  ncclComm_t real;
  enum { kLives, kDestroyed, kAborted } state;
  double until;           /* the time until which it is in progress */
  ncclResult_t failed;    /* the asynchronous error of the communicator */
  struct ncclComm *child; /* the child of a split that is in progress */
  ncclComm_t *place;      /* where the child's handle is written */
  int shrinking;
  int inside; /* threads in an operation on it */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;
static int comms, living, calls;

static void *real(const char *name)
{
  static void *host;
  if (host == NULL) host = dlopen(getenv("RECORDER_HOST"), RTLD_NOW | RTLD_LOCAL);
  void *function = host == NULL ? NULL : dlsym(host, name);
  if (function == NULL) {
    fprintf(stderr, "recorder: %s\n", dlerror());
    abort();
  }
  return function;
}

/* Calls libhostccl's function: real(ncclCommSplit)(...), with the function's type. */
#define REAL(name) ((__typeof__(&name))real(#name))

static int number_from(const char *name, int otherwise)
{
  const char *text = getenv(name);
  return text == NULL || *text == '\0' ? otherwise : atoi(text);
}

static double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double later(void)
{
  return now() + 1e-3 * number_from("RECORDER_SLOW", 0);
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  if (file == NULL && getenv("RECORDER_LOG") != NULL) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", getenv("RECORDER_LOG"), number_from("RANK", 0));
    file = fopen(path, "a");
    if (file != NULL) setvbuf(file, NULL, _IOLBF, 0);
  }
  if (file != NULL) {
    vfprintf(file, format, arguments);
    fputc('\n', file);
  }
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}

/* Writes a line of the test into the log. */
void recorder_note(const char *text);
void recorder_note(const char *text)
{
  note("# %s", text);
}

/* The number of communicators that were made and have not ended. */
int recorder_living(void);
int recorder_living(void)
{
  return __atomic_load_n(&living, __ATOMIC_SEQ_CST);
}

/* The last communicator that was made by an id. The others are split from it. */
static struct ncclComm *root;

/* How many threads are inside an operation. */
static int insiders;
int recorder_inside(void);
int recorder_inside(void)
{
  return __atomic_load_n(&insiders, __ATOMIC_SEQ_CST);
}

/* From now on that communicator (NULL: the root) has an asynchronous error on this rank. */
void recorder_break(ncclComm_t comm, int code);
void recorder_break(ncclComm_t comm, int code)
{
  if (comm == NULL) comm = root;
  note("break c%d", comm->number);
  comm->failed = (ncclResult_t)code;
}

/* The result that RECORDER_FAIL gives to this call, which is the n-th call of this process that
 * may fail. */
static ncclResult_t told_to(const char *call)
{
  int rank = -2, which = 0, code = 0;
  const int number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  const char *wish = getenv("RECORDER_FAIL");
  if (wish == NULL || sscanf(wish, "%d %d %d", &rank, &which, &code) != 3) return ncclSuccess;
  if (which != number || (rank != -1 && rank != number_from("RANK", 0))) return ncclSuccess;
  note("failing %s with %d", call, code);
  return (ncclResult_t)code;
}

#ifdef HIP
/* As RCCL it is linked to AMD's runtime, in which every thread begins with device 0. */
static __thread int hip_device;

int hipGetDevice(int *number);
int hipGetDevice(int *number)
{
  *number = hip_device;
  return 0;
}

int hipSetDevice(int number);
int hipSetDevice(int number)
{
  hip_device = number;
  return 0;
}

int hipGetDeviceCount(int *count);
int hipGetDeviceCount(int *count)
{
  *count = number_from("HIP_COUNT", 8);
  return 0;
}

int hipStreamQuery(void *stream);
int hipStreamQuery(void *stream)
{
  return (int)(size_t)stream;
}

const char *hipGetErrorString(int code);
const char *hipGetErrorString(int code)
{
  return code == 700 ? "an illegal memory access was encountered" : "an error";
}
#endif

/* Notes the calling thread's device before a call of RCCL that needs one. */
static void note_device(const char *call)
{
#ifdef HIP
  note("device %d: %s", hip_device, call);
#else
  (void)call;
#endif
}

static int device(void)
{
#ifdef HIP
  return hip_device;
#endif
  int (*current)(int *) = NULL, number = -1;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver != NULL) *(void **)&current = dlsym(driver, "cuCtxGetDevice");
  if (current == NULL || current(&number) != 0) number = -1;
  if (driver != NULL) dlclose(driver);
  return number;
}

static struct ncclComm *made(int blocking)
{
  struct ncclComm *comm = calloc(1, sizeof *comm);
  comm->blocking = blocking;
  comm->device = device();
  comm->until = blocking ? 0 : later();
  comm->number = __atomic_add_fetch(&comms, 1, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&living, 1, __ATOMIC_SEQ_CST);
  return comm;
}

static void note_net_name(const ncclConfig_t *config)
{
  if (config != NULL && config->netName != NULL) note("net %s", config->netName);
}

/* The caller's configuration as any release lays it out. */
static int wants_blocking(const ncclConfig_t *config)
{
  if (config == NULL) return 1;
  if (config->magic != 0xcafebeef || config->size < 20) note("bad config: size %zu, magic %x", config->size, config->magic);
  return config->blocking != 0;
}

/* Notes which of the limits of a communicator without operations its configuration sets. */
static void note_limits(int number, const ncclConfig_t *config)
{
  const int *fields = (const int *)(const void *)config;
  const int has = config != NULL && config->size >= 32 && config->version >= NCCL_VERSION(2, 17, 0);
  const int more = has && config->size >= 72 && config->version >= NCCL_VERSION(2, 27, 0);
  int values[4] = {NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT}, set = 0;
  const int places[4] = {6, 7, 14, 17}, newest = has && config->size >= 120 && config->version >= NCCL_VERSION(2, 32, 0);
  for (int at = 0; at < 4; ++at) {
    if (at < 2 ? has : more) values[at] = fields[places[at]];
    set |= values[at] != NCCL_CONFIG_UNDEF_INT;
  }
  if (set) note("limits c%d minCTAs=%d maxCTAs=%d collnetEnable=%d nvlsCTAs=%d", number, values[0], values[1], values[2], values[3]);
  if (newest && fields[28] != NCCL_CONFIG_UNDEF_INT) note("limits c%d nvlsHostMode=%d", number, fields[28]);
}

static const char *name_of(const ncclConfig_t *config)
{
  const int named = config != NULL && config->size >= 56 && config->version >= NCCL_VERSION(2, 27, 0) && config->commName != NULL;
  return named ? config->commName : "-";
}

static ncclResult_t poll_comm(struct ncclComm *comm)
{
  ncclResult_t state = ncclSuccess, asked;
  if (comm->failed != ncclSuccess) return comm->failed;
  if (number_from("RECORDER_DEAF", 0) && comm->child == NULL && comm->blocking) return ncclSuccess;
  asked = REAL(ncclCommGetAsyncError)(comm->real, &state);
  if (asked != ncclSuccess) state = asked;
  /* The parent of a shrink has failed. As in NCCL, only the making of the child is checked. */
  if (comm->shrinking && state != ncclInProgress && comm->child != NULL && comm->child->real != NULL) state = ncclSuccess;
  if (state == ncclSuccess && comm->child != NULL && comm->child->real != NULL) {
    asked = REAL(ncclCommGetAsyncError)(comm->child->real, &state);
    if (asked != ncclSuccess) state = asked;
  }
  if (state == ncclSuccess && now() < comm->until) state = ncclInProgress;
  if (state == ncclSuccess && comm->child != NULL) {
    *comm->place = comm->child;
    comm->child = NULL;
  }
  return state;
}

/* Whether a call may be made on the communicator: it lives, and nothing is in progress on it. */
static ncclResult_t usable(struct ncclComm *comm, const char *call)
{
  if (comm == NULL) {
    note("NULL in %s", call);
    return ncclInvalidArgument;
  }
  if (comm->state != kLives) {
    note("STALE %s c%d", call, comm->number);
    return ncclInvalidArgument;
  }
  if (!comm->blocking && poll_comm(comm) == ncclInProgress) {
    note("BUSY %s c%d", call, comm->number);
    return ncclInvalidArgument;
  }
  return comm->failed;
}

ncclResult_t ncclGetVersion(int *version)
{
  char mine[64];
  snprintf(mine, sizeof mine, "RECORDER_VERSION_%d", number_from("RANK", 0));
  *version = number_from(mine, number_from("RECORDER_VERSION", NCCL_VERSION_CODE));
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
  const ncclResult_t told = told_to("id");
  note("id");
  return told != ncclSuccess ? told : REAL(ncclGetUniqueId)(id);
}

static ncclResult_t begin(ncclComm_t *out, int size, const ncclUniqueId *id, int rank, ncclConfig_t *config, int ids)
{
  const int blocking = wants_blocking(config);
  ncclConfig_t host = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm = NULL;
  ncclResult_t code = told_to("init");
  host.blocking = blocking;
  if (code == ncclSuccess) code = REAL(ncclCommInitRankConfig)(&comm, size, *id, rank, &host);
  if (code != ncclSuccess && code != ncclInProgress) {
    note("init size=%d rank=%d failed=%d", size, rank, code);
    return code;
  }
  *out = made(blocking);
  (*out)->real = comm;
  if (size > 1) root = *out;
  note_net_name(config);
  note("init c%d size=%d rank=%d blocking=%d ids=%d name=%s device=%d", (*out)->number, size, rank, blocking, ids, name_of(config), device());
  note_limits((*out)->number, config);
  return blocking ? ncclSuccess : ncclInProgress;
}

#ifndef LACKS_INIT_CONFIG
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
  return begin(out, size, &id, rank, config, 1);
}
#endif

#ifndef LACKS_SCALABLE
ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int size, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config)
{
  for (int one = 0; one < ids; ++one) {
    for (int other = 0; other < one; ++other) {
      if (memcmp(&id[one], &id[other], sizeof *id) == 0) note("id %d is id %d", one, other);
    }
  }
  return begin(out, size, id, rank, config, ids);
}
#endif

#ifndef LACKS_SPLIT
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
  ncclResult_t code = usable(parent, "split");
  ncclConfig_t host = NCCL_CONFIG_INITIALIZER;
  ncclComm_t nobody = NULL;
  const int blocking = wants_blocking(config);
  note_device("split");
  if (code != ncclSuccess) return code;
  note_net_name(config);
  host.blocking = parent->blocking;
  *out = NULL;
  code = told_to("split");
  if (code != ncclSuccess) {
    note("split c%d color=%d key=%d failed=%d", parent->number, color, key, code);
    return code;
  }
  /* The host engine writes the new handle when the communicator is made. */
  struct ncclComm *comm = color < 0 ? NULL : made(blocking);
  code = REAL(ncclCommSplit)(parent->real, color, key, comm == NULL ? &nobody : &comm->real, &host);
  if (code != ncclSuccess && code != ncclInProgress) {
    if (comm != NULL) __atomic_sub_fetch(&living, 1, __ATOMIC_SEQ_CST);
    note("split c%d color=%d key=%d failed=%d", parent->number, color, key, code);
    return code;
  }
  note("split c%d color=%d key=%d blocking=%d name=%s -> c%d", parent->number, color, key, blocking, name_of(config), comm == NULL ? 0 : comm->number);
  note_limits(comm == NULL ? 0 : comm->number, config);
  if (parent->blocking) {
    *out = comm;
    return ncclSuccess;
  }
  parent->child = comm;
  parent->place = out;
  parent->until = later();
  return ncclInProgress;
}
#endif

#ifndef LACKS_SHRINK
ncclResult_t ncclCommShrink(ncclComm_t parent, int *excluded, int count, ncclComm_t *out, ncclConfig_t *config, int flags)
{
  ncclResult_t code = usable(parent, "shrink");
  ncclConfig_t host = NCCL_CONFIG_INITIALIZER;
  if (code != ncclSuccess) return code;
  host.blocking = parent->blocking;
  *out = NULL;
  struct ncclComm *comm = made(wants_blocking(config));
  code = REAL(ncclCommShrink)(parent->real, excluded, count, &comm->real, &host, flags);
  if (code != ncclSuccess && code != ncclInProgress) {
    __atomic_sub_fetch(&living, 1, __ATOMIC_SEQ_CST);
    note("shrink c%d failed=%d", parent->number, code);
    return code;
  }
  note("shrink c%d without %d from %d flags=%d blocking=%d name=%s -> c%d", parent->number, count, excluded[0], flags, comm->blocking,
       name_of(config), comm->number);
  note_limits(comm->number, config);
  if (parent->blocking) {
    *out = comm;
    return ncclSuccess;
  }
  parent->child = comm;
  parent->place = out;
  parent->shrinking = 1;
  parent->until = later();
  return ncclInProgress;
}
#endif

#ifndef LACKS_FINALIZE
ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
  ncclResult_t code = usable(comm, "finalize");
  if (code == ncclSuccess) code = told_to("finalize");
  if (code != ncclSuccess) return code;
  note("finalize c%d", comm->number);
  note_device("finalize");
  if (__atomic_load_n(&comm->inside, __ATOMIC_SEQ_CST) > 0) note("BUSY finalize c%d: a thread is inside", comm->number);
  /* A blocking communicator waits for its work, which may wait for a peer that has gone. */
  if (comm->blocking && number_from("RECORDER_STUCK", -1) == number_from("RANK", 0)) sleep(60);
  if (!comm->blocking) comm->until = later();
  code = REAL(ncclCommFinalize)(comm->real);
  return code == ncclSuccess && !comm->blocking ? ncclInProgress : code;
}
#endif

/* An abort waits for the communicator's stream. Its work lies behind the work of other
 * communicators on that stream, until those are aborted too. */
static void wait_for_other_aborts(ncclComm_t comm)
{
  static int begun;
  const int together = number_from("RECORDER_TOGETHER", 0);
  if (together == 0) return;
  const double until = now() + 10;
  for (__atomic_add_fetch(&begun, 1, __ATOMIC_SEQ_CST); __atomic_load_n(&begun, __ATOMIC_SEQ_CST) < together; usleep(1000))
    if (now() > until) {
      note("ALONE abort c%d", comm->number);
      return;
    }
}

static ncclResult_t end(ncclComm_t comm, int state, ncclResult_t (*how)(ncclComm_t), const char *call)
{
  if (comm == NULL) return ncclSuccess;
  if (comm->state != kLives) {
    note("STALE %s c%d", call, comm->number);
    return ncclInvalidArgument;
  }
  comm->state = state;
  note("%s c%d", call, comm->number);
  note_device(call);
  if (__atomic_load_n(&comm->inside, __ATOMIC_SEQ_CST) > 0) note("BUSY %s c%d: a thread is inside", call, comm->number);
  if (state == kAborted) wait_for_other_aborts(comm);
  struct ncclComm *child = comm->child;
  const ncclResult_t code = how(comm->real);
  if (child != NULL) {
    note("with it c%d, which was not there yet", child->number);
    if (child->real != NULL) REAL(ncclCommAbort)(child->real);
    __atomic_sub_fetch(&living, 1, __ATOMIC_SEQ_CST);
  }
  __atomic_sub_fetch(&living, 1, __ATOMIC_SEQ_CST);
  return code;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
  if (number_from("RECORDER_STUCK_DESTROY", -1) == number_from("RANK", 0) && comm != NULL && comm->blocking) {
    note("stuck in destroy c%d", comm->number);
    sleep(60);
  }
  return end(comm, kDestroyed, REAL(ncclCommDestroy), "destroy");
}

#ifndef LACKS_ABORT
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
  return end(comm, kAborted, REAL(ncclCommAbort), "abort");
}
#endif

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
  if (comm == NULL || comm->state != kLives) {
    note("STALE poll c%d", comm == NULL ? 0 : comm->number);
    return ncclInvalidArgument;
  }
  *state = poll_comm(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
  const ncclResult_t code = usable(comm, "count");
  return code != ncclSuccess ? code : REAL(ncclCommCount)(comm->real, count);
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
  const ncclResult_t code = usable(comm, "rank");
  return code != ncclSuccess ? code : REAL(ncclCommUserRank)(comm->real, rank);
}

const char *ncclGetErrorString(ncclResult_t result)
{
  return (int)result > ncclTimeout ? "unknown result code" : REAL(ncclGetErrorString)(result);
}

const char *ncclGetLastError(ncclComm_t comm)
{
  return REAL(ncclGetLastError)(comm == NULL || comm->state != kLives ? NULL : comm->real);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *number)
{
  *number = comm->device;
  return ncclSuccess;
}

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
    code = begun(comm, #name); \
    if (code == ncclSuccess) { \
      note(#name " c%d%s", comm->number, comm->blocking ? "" : " NONBLOCKING"); \
      if (number_from("RECORDER_LATE", 0) > 0) { \
        comm->until = now() + 1e-3 * number_from("RECORDER_LATE", 0); \
        code = ncclInProgress; \
      } else { \
        runs_on(#name, stream); \
        code = REAL(name) arguments; \
      } \
    } \
    leave(comm); \
    return code; \
  }

OPERATION(ncclAllReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),
          (send, recv, count, type, op, comm->real, stream))
OPERATION(ncclReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream),
          (send, recv, count, type, op, root, comm->real, stream))
OPERATION(ncclBroadcast, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream),
          (send, recv, count, type, root, comm->real, stream))
OPERATION(ncclAllGather, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream),
          (send, recv, count, type, comm->real, stream))
OPERATION(ncclReduceScatter, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream),
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
