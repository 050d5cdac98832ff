/* Makes communicators and answers questions to them. */
#include "recorder.h"

int living;

/* The last communicator that was made by an id. The others are split from it. */
static struct ncclComm *root;

/* The number of communicators that were made and have not ended. */
int recorder_living(void);
int recorder_living(void)
{
  return __atomic_load_n(&living, __ATOMIC_SEQ_CST);
}

/* From now on that communicator (NULL: the root) has an asynchronous error on this rank. */
void recorder_break(ncclComm_t comm, int code);
void recorder_break(ncclComm_t comm, int code)
{
  if (comm == NULL) comm = root;
  note("break c%d", comm->number);
  comm->failed = (ncclResult_t)code;
}

static const char *name_of(const ncclConfig_t *config)
{
  const int named = config != NULL && config->size >= 56 && config->version >= NCCL_VERSION(2, 27, 0) && config->commName != NULL;
  return named ? config->commName : "-";
}

static struct ncclComm *made(int blocking, const ncclConfig_t *config)
{
  static int comms;
  struct ncclComm *comm = calloc(1, sizeof *comm);
  comm->blocking = blocking;
  snprintf(comm->name, sizeof comm->name, "%s", name_of(config));
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
  /* The environment counts before the configuration, which is NCCL's rule. */
  const int forced = number_from("NCCL_COMM_BLOCKING", -1);
  if (config == NULL) return 1;
  if (config->magic != 0xcafebeef || config->size < 20) note("bad config: size %zu, magic %x", config->size, config->magic);
  return forced == 0 || forced == 1 ? forced : config->blocking != 0;
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
    profile(comm->child, 0, 0);
    *comm->place = comm->child;
    comm->child = NULL;
  }
  return state;
}

ncclResult_t usable(struct ncclComm *comm, const char *call)
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
  hang("ncclGetUniqueId");
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
  *out = made(blocking, config);
  (*out)->real = comm;
  profile(*out, size, rank);
  if (size > 1) root = *out;
  note_net_name(config);
  note("init c%d size=%d rank=%d blocking=%d ids=%d name=%s device=%d", (*out)->number, size, rank, blocking, ids,
       name_of(config), device());
  note_limits((*out)->number, config);
  return blocking ? ncclSuccess : ncclInProgress;
}

#ifndef LACKS_INIT_CONFIG
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
  hang("ncclCommInitRankConfig");
  return begin(out, size, &id, rank, config, 1);
}
#endif

#ifndef LACKS_SCALABLE
ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int size, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config)
{
  hang("ncclCommInitRankScalable");
  for (int one = 0; one < ids; ++one) {
    for (int other = 0; other < one; ++other) {
      if (memcmp(&id[one], &id[other], sizeof *id) == 0) note("id %d is id %d", one, other);
    }
  }
  return begin(out, size, id, rank, config, ids);
}
#endif

/* Gives the caller the child of a parent: at once, or when a non-blocking parent has settled. */
static inline ncclResult_t hand_out(struct ncclComm *parent, struct ncclComm *child, ncclComm_t *out)
{
  if (parent->blocking) {
    if (child != NULL) profile(child, 0, 0);
    *out = child;
    return ncclSuccess;
  }
  parent->child = child;
  parent->place = out;
  parent->until = later();
  return ncclInProgress;
}

#ifndef LACKS_SPLIT
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
  hang("ncclCommSplit");
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
  struct ncclComm *comm = color < 0 ? NULL : made(blocking, config);
  code = REAL(ncclCommSplit)(parent->real, color, key, comm == NULL ? &nobody : &comm->real, &host);
  if (code != ncclSuccess && code != ncclInProgress) {
    if (comm != NULL) __atomic_sub_fetch(&living, 1, __ATOMIC_SEQ_CST);
    note("split c%d color=%d key=%d failed=%d", parent->number, color, key, code);
    return code;
  }
  note("split c%d color=%d key=%d blocking=%d name=%s -> c%d", parent->number, color, key, blocking, name_of(config),
       comm == NULL ? 0 : comm->number);
  note_limits(comm == NULL ? 0 : comm->number, config);
  return hand_out(parent, comm, out);
}
#endif

#ifndef LACKS_SHRINK
ncclResult_t ncclCommShrink(ncclComm_t parent, int *excluded, int count, ncclComm_t *out, ncclConfig_t *config, int flags)
{
  hang("ncclCommShrink");
  ncclResult_t code = usable(parent, "shrink");
  ncclConfig_t host = NCCL_CONFIG_INITIALIZER;
  if (code != ncclSuccess) return code;
  host.blocking = parent->blocking;
  *out = NULL;
  struct ncclComm *comm = made(wants_blocking(config), config);
  code = REAL(ncclCommShrink)(parent->real, excluded, count, &comm->real, &host, flags);
  if (code != ncclSuccess && code != ncclInProgress) {
    __atomic_sub_fetch(&living, 1, __ATOMIC_SEQ_CST);
    note("shrink c%d failed=%d", parent->number, code);
    return code;
  }
  note("shrink c%d without %d from %d flags=%d blocking=%d name=%s -> c%d", parent->number, count, excluded[0], flags, comm->blocking,
       name_of(config), comm->number);
  note_limits(comm->number, config);
  parent->shrinking = !parent->blocking;
  return hand_out(parent, comm, out);
}
#endif

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
  hang("ncclCommGetAsyncError");
  if (comm == NULL || comm->state != kLives) {
    note("STALE poll c%d", comm == NULL ? 0 : comm->number);
    return ncclInvalidArgument;
  }
  *state = poll_comm(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
  hang("ncclCommCount");
  const ncclResult_t code = usable(comm, "count");
  return code != ncclSuccess ? code : REAL(ncclCommCount)(comm->real, count);
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
  hang("ncclCommUserRank");
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
