/* Ranks over the recorder, one of which calls a function of NCCL that does not return. The argument
 * names the case. tests/test_nccl_hangs.py runs them. */
#include "rank.h"

/* The call of a step, and what it took. RECORDER_HANG holds while the call runs. */
static void step(const char *hang, const char *name, dm_status (*call)(void *), void *argument)
{
  if (hang != NULL) setenv("RECORDER_HANG", hang, 1);
  const double began = seconds_now();
  const dm_status status = call(argument);
  const double took = seconds_now() - began;
  unsetenv("RECORDER_HANG");
  printf("step %s %s %.2f %s\n", name, dm_status_name(status), took, status == DM_STATUS_OK ? "" : dm_last_error());
  fflush(stdout);
}

static const int32_t *hang_shape;
static size_t hang_ndim = 1;

static dm_status step_init(void *out)
{
  return dm_init("cuda", hang_shape, hang_ndim, NULL, &options, (dm_mesh **)out);
}

/* Makes the mesh of step_init, whose timeout may be short. */
static dm_mesh *made_for_hang(void)
{
  return made_in_time("cuda", hang_shape, hang_ndim, NULL, &options);
}

static dm_status step_first_use(void *mesh)
{
  ncclComm_t comm = NULL;
  return dm_get_comm((dm_mesh *)mesh, NULL, &comm);
}

static dm_status step_adopt(void *comm)
{
  const char *names[] = {"mine"};
  dm_init_options none = DM_INIT_OPTIONS_INIT;
  dm_mesh *adopted = NULL;
  const dm_status status = dm_from_comms("cuda", hang_shape, 1, names, (ncclComm_t *)comm, &none, &adopted);
  dm_free(adopted);
  return status;
}

static dm_status step_check(void *mesh)
{
  return dm_check((dm_mesh *)mesh, NULL);
}

static dm_status step_lost_ranks(void *mesh)
{
  size_t count = 0;
  return dm_lost_ranks((dm_mesh *)mesh, NULL, 0, &count);
}

static dm_status step_finalize(void *mesh)
{
  return dm_finalize((dm_mesh *)mesh, NULL);
}

static dm_status step_abort(void *mesh)
{
  return dm_abort((dm_mesh *)mesh);
}

static dm_status step_world_finalize(void *nothing)
{
  (void)nothing;
  return dm_world_finalize(world, 3000);
}

static dm_status step_world_abort(void *nothing)
{
  (void)nothing;
  return dm_world_abort(world);
}

static dm_status step_shrink(void *mesh)
{
  const int32_t lost[] = {2, 3};
  dm_mesh *left = NULL;
  dm_call_options call = DM_CALL_OPTIONS_INIT;
  call.timeout_ms = 3000;
  const dm_status status = dm_shrink((dm_mesh *)mesh, "dim_0", lost, 2, &call, &left);
  dm_free(left);
  return status;
}

/* A thread of the program whose call does not return. */
static void *stuck_in_a_group(void *mesh)
{
  float mine = 1, sum = 0;
  OK(dm_group_start((dm_mesh *)mesh));
  OK(dm_all_reduce((dm_mesh *)mesh, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  (void)dm_group_end((dm_mesh *)mesh);
  return NULL;
}

static void *stuck_in_an_operation(void *mesh)
{
  float mine = 1, sum = 0;
  (void)dm_all_reduce((dm_mesh *)mesh, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
  return NULL;
}

/* Sets the timeout of a call that makes a mesh. HANG_FAILS lists the calls that will not be done in
 * time. */
static void set_timeout_of(const char *call)
{
  const char *list = getenv("HANG_FAILS");
  options.timeout_ms = list != NULL && strstr(list, call) != NULL ? 1000 : 30000;
}

/* Sets the timeout of a mesh whose ends and questions take as long as it allows. */
static void set_timeout_of_ends(void)
{
  const char *list = getenv("HANG_FAILS");
  const char *ends[] = {"dm_check", "dm_finalize", "dm_abort"};
  options.timeout_ms = 30000;
  for (size_t at = 0; at < sizeof ends / sizeof *ends; ++at)
    if (list != NULL && strstr(list, ends[at]) != NULL) options.timeout_ms = 3000;
}

/* dm_shrink is tried while two of four ranks are gone. */
static void hang_in_shrink(void)
{
  const int32_t square[] = {2, 2};
  hang_shape = square;
  hang_ndim = 2;
  dm_mesh *mesh = made_for_hang();
  OK(dm_world_barrier(world, 0));
  if (rank > 1) _exit(0);
  step(getenv("HANG"), "dm_shrink", step_shrink, mesh);
}

/* One function of the library does not return on one rank ("rank function 0"). Every call of ours
 * that makes, asks or ends communicators is tried, each with a communicator of its own. */
static void hang(void)
{
  const char *which = getenv("HANG");
  const int32_t line[] = {size};
  dm_mesh *mesh = NULL;
  char function[64];
  int where = -1;
  CHECK(sscanf(which, "%d %63s", &where, function) == 2);
  hang_shape = line;
  set_timeout_of("dm_init");
  step(which, "dm_init", step_init, &mesh);
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));
  set_timeout_of("dm_get_comm");
  dm_dim_options own = DM_DIM_OPTIONS_INIT;
  own.flags = DM_DIM_OWN_COMM;
  options.dim_options = &own;
  options.num_dim_options = 1;
  options.flags = DM_INIT_LAZY;
  mesh = made_for_hang();
  options.flags = 0;
  options.dim_options = NULL;
  options.num_dim_options = 0;
  OK(dm_world_barrier(world, 0));
  step(which, "dm_get_comm", step_first_use, mesh);
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));

  /* Ends and questions take as long as the timeout of the mesh allows. The mesh shares no
   * communicator, so its communicator ends with it. */
  set_timeout_of_ends();
  options.dim_options = &own;
  options.num_dim_options = 1;
  mesh = made_for_hang();
  options.dim_options = NULL;
  options.num_dim_options = 0;
  ncclComm_t comm = comm_of(mesh, NULL);
  setenv("DM_CCL_LIBRARY", getenv("RECORDER"), 1);
  step(which, "dm_from_comms", step_adopt, &comm);
  unsetenv("DM_CCL_LIBRARY");
  OK(dm_world_barrier(world, 0));
  step(which, "dm_check", step_check, mesh);
  OK(dm_world_barrier(world, 0));
  step(which, "dm_lost_ranks", step_lost_ranks, mesh);
  OK(dm_world_barrier(world, 0));
  step(which, "dm_finalize", step_finalize, mesh);
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));

  mesh = made_for_hang();
  OK(dm_world_barrier(world, 0));
  const int is_group = strcmp(function, "ncclGroupEnd") == 0;
  if (where == rank && (is_group || strcmp(function, "ncclAllReduce") == 0)) {
    /* The call of another thread does not return. That thread has no deadline. Before the end of a
     * group, an operation in it is inside the library only for a moment, so this waits for the call
     * that hangs. */
    int (*hanging)(void) = NULL;
    REQUIRE(dm_get_proc(mesh, "recorder_hanging", (void **)&hanging));
    setenv("RECORDER_HANG", which, 1);
    (void)begun(is_group ? stuck_in_a_group : stuck_in_an_operation, mesh);
    while (hanging() == 0) usleep(1000);
  }
  OK(dm_world_barrier(world, 0));
  step(which, "dm_abort", step_abort, mesh);
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));

  mesh = made_for_hang();
  OK(dm_world_barrier(world, 0));
  step(which, "dm_world_finalize", step_world_finalize, NULL);
  dm_free(mesh);
  const dm_world_options join = how_to_join();
  dm_world_free(world);
  REQUIRE(join_world(&join));
  mesh = made_for_hang();
  OK(dm_world_barrier(world, 0));
  step(which, "dm_world_abort", step_world_abort, NULL);
  dm_free(mesh);
}

/* A call that does not return for a while. What it held is given back when it returns. */
static void late(void)
{
  const int32_t line[] = {size};
  /* dm_abort waits for one second at least. */
  options.timeout_ms = 1000;
  hang_shape = line;
  dm_mesh *mesh = made_for_hang();
  REQUIRE(dm_get_proc(mesh, "recorder_living", (void **)&living));
  const int before = living();
  step("1 ncclCommAbort 4500", "dm_abort", step_abort, mesh);
  CHECK(rank != 1 || living() == before);
  if (rank == 1) step(NULL, "again", step_abort, mesh);
  dm_free(mesh);
  mesh = NULL;
  OK(dm_world_barrier(world, 0));
  step("1 ncclCommInitRankConfig 3000", "dm_init", step_init, &mesh);
  const double until = seconds_now() + 60;
  while (living() > 0 && seconds_now() < until) usleep(10000);
  CHECK(living() == 0);
  dm_free(mesh);
}

static const rank_case kCases[] = {
    {"hang", hang}, {"hang in shrink", hang_in_shrink}, {"late", late}, {"chosen", one_mesh},
};

int main(int count, char **arguments)
{
  const char *name = case_name(count, arguments);
  RUN_IN_WORLD(name, kCases);
  /* Threads of the library stay inside the functions that do not return. */
  if (strncmp(name, "hang", 4) != 0) check_library_threads(0);
  return finish();
}
