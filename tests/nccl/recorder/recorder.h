/* A library with NCCL's C API that logs every call on communicators and passes it on to
 * libhostccl. The C files of this folder are compiled together (tests/support/nccl.py) and loaded
 * in NCCL's place. The library checks NCCL's rules: it marks in the log a call on a communicator
 * that is still in progress or has ended. The handle of a communicator that is split from a
 * non-blocking parent stays NULL until the parent has settled.
 *
 * Environment, read at each use:
 *   RECORDER_HOST           the path of libhostccl.so
 *   RECORDER_LOG            a folder for one file per rank
 *   RECORDER_VERSION        what ncclGetVersion says; RECORDER_VERSION_<rank> is for one rank
 *   RECORDER_SLOW           milliseconds for which non-blocking work stays in progress
 *   RECORDER_FAIL           "rank call code": which call of which rank (-1: of each rank) fails
 *                           with which code
 *   RECORDER_LATE           milliseconds for which an operation stays in progress; it is then never
 *                           done
 *   RECORDER_INSIDE         microseconds that an operation and the end of a group last on the host
 *   RECORDER_STUCK          the rank whose ncclCommFinalize does not return
 *   RECORDER_STUCK_DESTROY  the rank whose ncclCommDestroy does not return (of a communicator that
 *                           blocks)
 *   RECORDER_HANG           "rank function milliseconds": which rank does not return from which
 *                           function, for how long (0: never)
 *   RECORDER_LOCAL_PEERS    a folder in which ranks say that they have begun an abort; where it is
 *                           set, ncclCommAbort waits for the other ranks of the communicator
 *   RECORDER_TOGETHER       how many ncclCommAbort must have begun (in all) before one returns
 *   RECORDER_IDLE           operations move no data, so ranks may make different ones
 *   NCCL_PROFILER_PLUGIN    the profiler plugin, as for NCCL
 *   RECORDER_DEAF           nothing is noticed of a peer's end, as over NVLink
 *
 * Built with -DLACKS_SPLIT (_INIT_CONFIG, _SCALABLE, _SHRINK, _FINALIZE, _ABORT) the library lacks
 * that function. Built with -DHIP it is RCCL with AMD's runtime. */
#ifndef RECORDER_H
#define RECORDER_H

#include <hostccl.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct ncclComm {
  int number; /* its name in the log, counted from 1 on each rank */
  int blocking, device;
  ncclComm_t real; /* libhostccl's communicator */
  enum { kLives, kDestroyed, kAborted } state;
  double until;           /* the time until which it is in progress */
  ncclResult_t failed;    /* the asynchronous error of the communicator */
  struct ncclComm *child; /* the child of a split that is in progress */
  ncclComm_t *place;      /* where the child's handle is written */
  int shrinking; /* whether the child is made by ncclCommShrink */
  int inside; /* threads in an operation on it */
  char name[64];
  void *context; /* the profiler plugin's */
};

/* Programs that load the library see only NCCL's functions and those named recorder_. */
#pragma GCC visibility push(hidden)

/* environment.c has what the environment asks for, the log, and the device. */

/* Returns a function of libhostccl. */
void *real(const char *name);
/* Calls libhostccl's function: REAL(ncclCommSplit)(...), with the function's type. */
#define REAL(name) ((__typeof__(&name))real(#name))
/* Returns the number that a variable of the environment holds. */
int number_from(const char *name, int otherwise);
/* Returns the seconds of the monotonic clock. */
double now(void);
/* Returns the time at which non-blocking work that begins now is done. */
double later(void);
/* Writes a line into the log of this rank. */
__attribute__((format(printf, 1, 2))) void note(const char *format, ...);
/* Returns what RECORDER_FAIL gives to this call, which is the n-th call of this process that may
 * fail. */
ncclResult_t told_to(const char *call);
/* Does not return where RECORDER_HANG names this function on this rank. */
void hang(const char *function);
/* How many threads are inside an operation. */
extern int insiders;
/* Returns the calling thread's device, -1 when there is none. */
int device(void);
/* Notes the calling thread's device before a call of RCCL that needs one. */
void note_device(const char *call);

/* communicators.c makes communicators and answers questions to them. */

/* How many communicators were made and have not ended. */
extern int living;
/* Whether a call may be made on the communicator: it lives, and nothing is in progress on it. */
ncclResult_t usable(struct ncclComm *comm, const char *call);

/* profiler.c tells a profiler plugin of a communicator that was made (0 ranks: as libhostccl says), of
 * an operation, and of the end of a communicator. */
void profile(struct ncclComm *comm, int ranks, int rank);
void profile_operation(struct ncclComm *comm, const char *function, size_t count);
void profile_end(struct ncclComm *comm);

#pragma GCC visibility pop

#endif
