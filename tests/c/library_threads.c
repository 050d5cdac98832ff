/* ranks: 2 */
/* flags: -D_GNU_SOURCE */
/* Makes the library start every kind of thread that it has on device type cpu. Each thread must
 * have a name, and none may run a signal handler of the program, which sends itself signals all
 * the time. tests/nccl/making.c checks the threads that the library starts beside NCCL. */
#include "library_threads.h"

#include "blocked.h"
#include "free_port.h"

#include <sys/time.h>

static dm_mesh *doomed;
static long main_thread;
static int handled, handled_elsewhere;

static void interrupted(int number)
{
  (void)number;
  __atomic_fetch_add(syscall(SYS_gettid) == main_thread ? &handled : &handled_elsewhere, 1, __ATOMIC_SEQ_CST);
}

static void interrupt_every(suseconds_t microseconds)
{
  struct itimerval every;
  memset(&every, 0, sizeof every);
  every.it_value.tv_usec = every.it_interval.tv_usec = microseconds;
  setitimer(ITIMER_REAL, &every, NULL);
}

/* Splits the raw communicator of "dp". This starts dm-make-comm, because the split goes on while
 * this thread does something else. */
static void split_raw(const dm_mesh *mesh)
{
  int (*split)(void *, int, int, void **, void *) = NULL;
  int (*get_async_error)(void *, int *) = NULL, (*destroy)(void *) = NULL;
  ncclComm_t comm = NULL;
  void *part = NULL;
  REQUIRE(dm_get_comm(mesh, "dp", &comm));
  REQUIRE(dm_get_proc(mesh, "ncclCommSplit", (void **)&split));
  REQUIRE(dm_get_proc(mesh, "ncclCommGetAsyncError", (void **)&get_async_error));
  REQUIRE(dm_get_proc(mesh, "ncclCommDestroy", (void **)&destroy));
  int state = split(comm, 0, 0, &part, NULL);
  while (state == 7) { /* ncclInProgress */
    usleep(1000);
    CHECK(get_async_error(comm, &state) == 0);
  }
  CHECK(state == 0);
  CHECK(part != NULL);
  CHECK(destroy(part) == 0);
}

static dm_status flatten(void *none)
{
  (void)none;
  dm_mesh *view = NULL;
  return dm_flatten(doomed, "never", NULL, &view);
}

int main(void)
{
  const int32_t shape[] = {2, 1};
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *sync = NULL, *own = NULL;
  dm_mesh *mesh = NULL, *lazy = NULL;
  float one = 1, sum = 0;
  int32_t rank = -1, port = 0, agreed = 0;

  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = interrupted;
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, NULL);
  main_thread = syscall(SYS_gettid);
  interrupt_every(1000);

  /* This starts dm-nonce, on rank 0 (the tool serves the store). */
  REQUIRE(dm_world_init("cpu", NULL, &options.world));
  REQUIRE(dm_world_init("cpu", NULL, &sync));
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  rank = rank_of(mesh);

  split_raw(mesh);

  /* This starts dm-make: a lazy dimension is first used inside a group. */
  options.flags = DM_INIT_LAZY;
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dims[0].flags = DM_DIM_OWN_COMM;
  options.dim_options = dims;
  options.num_dim_options = 2;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &lazy));
  OK(dm_group_start(lazy));
  OK(dm_all_reduce(lazy, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_group_end(lazy));
  CHECK(sum == 2);

  /* This starts dm-store on rank 0 and dm-resolve on both ranks. */
  if (rank == 0) port = free_port();
  OK(dm_all_reduce(mesh, "dp", &port, &agreed, 1, DM_INT32, DM_SUM, NULL));
  char method[64];
  snprintf(method, sizeof method, "tcp://localhost:%d", agreed);
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  join.world_size = 2;
  join.rank = rank;
  join.init_method = method;
  REQUIRE(dm_world_init("cpu", &join, &own));
  OK(dm_world_barrier(own, 0));
  dm_world_free(own);

  /* This starts dm-farewell: a call that is aborted while it waits tells the other ranks. */
  options.flags = 0;
  options.dim_options = NULL;
  options.num_dim_options = 0;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &doomed));
  if (rank == 0) {
    /* The program's own thread handles no signals either. So a signal that was handled was handled
     * on a thread of the library. */
    blocked call;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    starts_own_thread = 1;
    start_blocked(&call, flatten, NULL);
    starts_own_thread = 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    OK(dm_abort(doomed));
    join_blocked(&call);
    CHECK(call.status == DM_STATUS_ABORTED);
  }
  OK(dm_world_barrier(sync, 0));
  OK(dm_abort(doomed));
  OK(dm_abort(lazy));
  OK(dm_abort(mesh));
  dm_mesh *all[] = {doomed, lazy, mesh};
  for (size_t at = 0; at < sizeof all / sizeof *all; ++at) dm_free(all[at]);
  dm_world_free(options.world);
  dm_world_free(sync);
  interrupt_every(0);

  check_library_threads(1);
  const char *on_both[] = {"dm-make-comm", "dm-make", "dm-resolve"}, *on_first[] = {"dm-nonce", "dm-store", "dm-farewell"};
  for (size_t at = 0; at < sizeof on_both / sizeof *on_both; ++at)
    CHECK(has_had_thread(on_both[at]) || fprintf(stderr, "no %s\n", on_both[at]) < 0);
  for (size_t at = 0; rank == 0 && at < sizeof on_first / sizeof *on_first; ++at)
    CHECK(has_had_thread(on_first[at]) || fprintf(stderr, "no %s\n", on_first[at]) < 0);
  CHECK(handled > 0);
  CHECK(handled_elsewhere == 0);
  return finish();
}
