/* A communicator library that is libhostccl, but for a rank that stops (SIGSTOP), ends or fails in
 * the middle of making or ending a communicator. */
#include <hostccl.h>

#include <dlfcn.h>
#include <signal.h>
#include <string.h>

static const char *at = "";
static int let_through, stop, fails;
static void (*runs)(void);

/* From now on `function` lets this many calls through. The next call stops this process first, or
 * fails at once. */
void stall_at(const char *function, int calls, int stops);

void stall_at(const char *function, int calls, int stops)
{
  at = function;
  let_through = calls;
  stop = stops;
  fails = !stops;
  runs = NULL;
}

/* The next call of `function` runs `first` of the program before it does its work, or before it
 * fails. */
void run_at(const char *function, void (*first)(void), int then_fails);

void run_at(const char *function, void (*first)(void), int then_fails)
{
  at = function;
  let_through = stop = 0;
  fails = then_fails;
  runs = first;
}

/* Whether the call is to fail. */
static int met(const char *function)
{
  if (strcmp(function, at) != 0 || let_through-- > 0) return 0;
  at = "";
  if (runs != NULL) runs();
  if (stop) raise(SIGSTOP);
  return fails;
}

#define FORWARD(name, parameters, arguments) \
  ncclResult_t name parameters \
  { \
    ncclResult_t (*real) parameters; \
    *(void **)&real = dlsym(RTLD_NEXT, #name); \
    return met(#name) ? ncclSystemError : real arguments; \
  }

FORWARD(hostcclGetUniqueIdFor, (ncclUniqueId * id, int hosts), (id, hosts))
FORWARD(ncclCommInitRankConfig, (ncclComm_t * comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config),
        (comm, size, id, rank, config))
FORWARD(ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config), (comm, color, key, child, config))
FORWARD(ncclCommFinalize, (ncclComm_t comm), (comm))
FORWARD(ncclCommDestroy, (ncclComm_t comm), (comm))
