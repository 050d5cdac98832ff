/* Ends communicators. */
#include "recorder.h"

#ifndef LACKS_FINALIZE
ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
  hang("ncclCommFinalize");
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

/* The proxy of a rank runs while ranks of its host are connected to it, and NCCL's abort joins the
 * proxy. The folder has a file for each rank that has begun an abort. */
static void wait_for_local_peers(void)
{
  const char *folder = getenv("RECORDER_LOCAL_PEERS");
  char path[4096];
  if (folder == NULL || *folder == '\0') return;
  snprintf(path, sizeof path, "%s/%d", folder, number_from("RANK", 0));
  FILE *mine = fopen(path, "w");
  if (mine != NULL) fclose(mine);
  const double until = now() + 60;
  for (int peer = 0; peer < number_from("WORLD_SIZE", 1) && now() < until;) {
    snprintf(path, sizeof path, "%s/%d", folder, peer);
    if (access(path, F_OK) == 0) ++peer;
    else usleep(1000);
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
  profile_end(comm);
  note("%s c%d", call, comm->number);
  note_device(call);
  if (__atomic_load_n(&comm->inside, __ATOMIC_SEQ_CST) > 0) note("BUSY %s c%d: a thread is inside", call, comm->number);
  if (state == kAborted) {
    wait_for_other_aborts(comm);
    wait_for_local_peers();
  }
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
  hang("ncclCommDestroy");
  if (number_from("RECORDER_STUCK_DESTROY", -1) == number_from("RANK", 0) && comm != NULL && comm->blocking) {
    note("stuck in destroy c%d", comm->number);
    sleep(60);
  }
  return end(comm, kDestroyed, REAL(ncclCommDestroy), "destroy");
}

#ifndef LACKS_ABORT
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
  hang("ncclCommAbort");
  return end(comm, kAborted, REAL(ncclCommAbort), "abort");
}
#endif
