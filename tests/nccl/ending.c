/* Ranks over the recorder that finalize, abort or shrink their meshes. The argument names the case.
 * tests/test_nccl_ends.py runs them and reads what the recorder wrote. */
#include "rank.h"

/* ncclCommFinalize does not return on one rank. No rank waits for it beyond its deadline. */
static void stuck(void)
{
  dm_call_options hasty = DM_CALL_OPTIONS_INIT;
  hasty.timeout_ms = 3000;
  dm_mesh *mesh = made_cube();
  OK(dm_world_barrier(world, 0));
  const moment began = moment_now();
  const dm_status status = dm_finalize(mesh, &hasty);
  const double took = own_seconds_since(&began);
  printf("finalize %s %s\n", dm_status_name(status), dm_last_error());
  CHECK(took < 3 * 1.1 + 0.5);
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  OK(dm_abort(mesh));
  dm_free(mesh);
}

/* The threads of the library cannot have the caller's device. No call of NCCL is made there, and so
 * the communicators are aborted. */
static void without_device(void)
{
  dm_mesh *mesh = made_cube();
  OK(dm_world_barrier(world, 0));
  setenv("CUDA_REFUSE", "1", 1);
  GIVES(DM_STATUS_DEVICE, dm_finalize(mesh, NULL));
  unsetenv("CUDA_REFUSE");
  CHECK(living() == 0);
  dm_free(mesh);
}

/* Aborts that can only end together: of one mesh, also inside a group, and then of a world with
 * two meshes. */
static void together(void)
{
  dm_mesh *mesh = made_cube(), *other = NULL;
  const int32_t line[] = {size};
  OK(dm_group_start(mesh));
  setenv("RECORDER_TOGETHER", "4", 1);
  OK(dm_abort(mesh));
  (void)dm_group_end(mesh);
  dm_free(mesh);
  unsetenv("RECORDER_TOGETHER");
  OK(dm_world_barrier(world, 0));
  mesh = made_cube();
  other = made(line, 1, NULL);
  OK(dm_world_barrier(world, 0));
  setenv("RECORDER_TOGETHER", "9", 1);
  OK(dm_world_abort(world));
  dm_free(other);
  dm_free(mesh);
}

static void *sum_on_a_thread(void *mesh)
{
  CHECK(sum_along(mesh, "tp") == 2);
  return NULL;
}

/* The operation of a group stays in progress on the communicator of another mesh than the one that
 * dm_group_end is given. */
static void group_of_another(void)
{
  const int32_t line[] = {size};
  float mine = 1, sum = 0;
  dm_dim_options own = DM_DIM_OPTIONS_INIT;
  own.flags = DM_DIM_OWN_COMM;
  options.dim_options = &own;
  options.num_dim_options = 1;
  dm_mesh *given = made(line, 1, NULL), *used = made(line, 1, NULL);
  setenv("RECORDER_LATE", "400", 1);
  OK(dm_group_start(given));
  const double began = seconds_now();
  OK(dm_all_reduce(used, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_group_end(given));
  CHECK(seconds_now() - began >= 0.4);
  unsetenv("RECORDER_LATE");
  dm_free(given);
  dm_free(used);
  OK(dm_world_finalize(world, 0));
}

/* The thread that calls dm_abort has a group open. dm_abort ends a group without operations. It
 * leaves a group that holds an operation, because NCCL cannot end that. */
static void left_group(void)
{
  dm_mesh *first = made_cube(), *second = NULL, *third = NULL;
  float mine = 1, sum = 0;
  OK(dm_group_start(first));
  note("empty group");
  OK(dm_abort(first));
  note("second");
  second = made_cube();
  CHECK(sum_along(second, "tp") == 2);

  OK(dm_group_start(second));
  /* The other ranks may have aborted already. */
  if (dm_all_reduce(second, "tp", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL) != DM_STATUS_OK) CHECK(dm_last_error()[0] != 0);
  note("full group");
  OK(dm_abort(second));
  GIVES(DM_STATUS_ABORTED, dm_group_end(second));
  OK(dm_abort(second));
  third = made_cube();
  FAILS(DM_STATUS_ABORTED, "make them on another thread", dm_all_reduce(third, "tp", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_ABORTED, "make them on another thread", dm_group_start(third));
  CHECK(pthread_join(begun(sum_on_a_thread, third), NULL) == 0);
  OK(dm_finalize(third, NULL));
  note("after");
  dm_free(first);
  dm_free(second);
  dm_free(third);
}

/* Adds up along pp and tp until the mesh has ended, in single calls or in groups. */
typedef struct adder {
  dm_mesh *mesh;
  int in_groups, begun;
} adder;

static void *add_until_the_end(void *data)
{
  adder *self = (adder *)data;
  for (;;) {
    float mine = 1, along_pp = 0, along_tp = 0;
    if (self->in_groups && dm_group_start(self->mesh) != DM_STATUS_OK) break;
    dm_status status = dm_all_reduce(self->mesh, "pp", &mine, &along_pp, 1, DM_FLOAT32, DM_SUM, NULL);
    if (status == DM_STATUS_OK) status = dm_all_reduce(self->mesh, "tp", &mine, &along_tp, 1, DM_FLOAT32, DM_SUM, NULL);
    if (self->in_groups) {
      const dm_status ended = dm_group_end(self->mesh);
      if (status == DM_STATUS_OK) status = ended;
    }
    __atomic_store_n(&self->begun, 1, __ATOMIC_SEQ_CST);
    if (status != DM_STATUS_OK) {
      CHECK(status == DM_STATUS_ABORTED || status == DM_STATUS_PEER_LOST || status == DM_STATUS_CCL);
      break;
    }
    CHECK(along_pp == 2 && along_tp == 2);
  }
  return NULL;
}

/* dm_abort comes while another thread issues calls. The recorder sees when they meet. */
static void beside(void)
{
  for (int round = 0; round < 30; ++round) {
    dm_mesh *mesh = made_cube();
    adder adds = {mesh, round % 2, 0};
    pthread_t thread = begun(add_until_the_end, &adds);
    while (!__atomic_load_n(&adds.begun, __ATOMIC_SEQ_CST)) usleep(100);
    usleep((useconds_t)((round * 131 + rank * 57) % 1000));
    OK(dm_abort(mesh));
    CHECK(pthread_join(thread, NULL) == 0);
    dm_free(mesh);
    OK(dm_world_barrier(world, 0));
  }
  CHECK(living() == 0);
}

/* A call stays inside the library for longer than dm_abort waits. The communicator ends when the
 * call returns. */
static void *add_once(void *mesh)
{
  float mine = 1, sum = 0;
  (void)dm_all_reduce((dm_mesh *)mesh, "tp", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
  return NULL;
}

static void inside(void)
{
  int (*insiders)(void) = NULL;
  dm_mesh *mesh = made_cube();
  REQUIRE(dm_get_proc(mesh, "recorder_inside", (void **)&insiders));
  pthread_t thread = begun(add_once, mesh);
  while (insiders() == 0) usleep(1000);
  FAILS(DM_STATUS_TIMEOUT, "a thread was inside a call", dm_abort(mesh));
  note("gave up");
  CHECK(living() == 1);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(living() == 0);
  dm_free(mesh);
}

/* dm_world_finalize ends all meshes: a whole one, one that was freed, one of half of the ranks and
 * a lazy one, whose dimensions are made in another order on every other rank. */
static void finalize_world(void)
{
  const int32_t wide[] = {4, 2}, half[] = {2, 2};
  const char *lazily[] = {"x", "y"}, *parts[] = {"p", "q"};
  dm_mesh *mesh = made_cube(), *freed = made(wide, 2, lazily), *part = made(half, 2, parts), *lazy = NULL;
  options.flags = DM_INIT_LAZY;
  dm_dim_options own[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  own[0].flags = own[1].flags = DM_DIM_OWN_COMM;
  options.dim_options = own;
  options.num_dim_options = 2;
  lazy = made(wide, 2, lazily);
  options.dim_options = NULL;
  options.num_dim_options = 0;
  options.flags = 0;
  dm_free(freed);
  if (rank % 4 < 2) CHECK(sum_along(lazy, "y") == 2);
  CHECK(sum_along(lazy, "x") == 4);
  if (rank % 4 >= 2) CHECK(sum_along(lazy, "y") == 2);
  CHECK(sum_along(mesh, "dp") == 2);
  note("finalize");
  OK(dm_world_finalize(world, 0));
  CHECK(living() == 0);
  GIVES(DM_STATUS_ABORTED, dm_check(mesh, "tp"));
  GIVES(DM_STATUS_ABORTED, dm_world_finalize(world, 0));
  dm_free(mesh);
  dm_free(part);
  dm_free(lazy);
}

/* NCCL's abort waits for the ranks of this host. Rank 0 aborts, and the others wait for it. */
static void local_peers(void)
{
  const int32_t line[] = {size};
  options.timeout_ms = 30000;
  dm_mesh *mesh = made(line, 1, NULL);
  OK(dm_world_barrier(world, 0));
  setenv("RECORDER_LOCAL_PEERS", getenv("PEERS"), 1);
  if (rank > 0) GIVES(DM_STATUS_PEER_LOST, dm_world_barrier(world, 30000));
  OK(dm_world_abort(world));
  CHECK(living() == 0);
  dm_free(mesh);
}

/* The program's log callback ends the mesh when an operation has failed. */
static dm_mesh *to_abort;
static double abort_took = -1;
static void abort_from_log(void *nothing, dm_log_level level, const char *message)
{
  (void)nothing;
  if (level != DM_LOG_WARN || strstr(message, "has failed") == NULL || abort_took >= 0) return;
  const double began = seconds_now();
  abort_took = 0;
  OK(dm_abort(to_abort));
  abort_took = seconds_now() - began;
}

static void log_callback(void)
{
  const int32_t line[] = {size};
  void (*fail)(ncclComm_t, int) = NULL;
  dm_mesh *mesh = made(line, 1, NULL);
  REQUIRE(dm_get_proc(mesh, "recorder_break", (void **)&fail));
  to_abort = mesh;
  OK(dm_set_log(DM_LOG_WARN, abort_from_log, NULL));
  fail(comm_of(mesh, NULL), ncclSystemError);
  float mine = 1, sum = 0;
  CHECK(dm_all_reduce(mesh, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL) != DM_STATUS_OK);
  /* dm_abort would wait 5 s for its own thread if that were inside the communicator. */
  CHECK(abort_took >= 0 && abort_took < 4);
  OK(dm_set_log(DM_LOG_OFF, NULL, NULL));
  CHECK(living() == 0);
  dm_free(mesh);
}

/* The job goes on without the replica of rank 7, which has died. */
static void lose(int expected)
{
  const int32_t shape[] = {4, 2};
  const char *names[] = {"dp", "tp"};
  const int32_t lost[] = {7};
  dm_mesh *mesh = made(shape, 2, names), *left = NULL;
  CHECK(sum_along(mesh, "dp") == 4);
  OK(dm_world_barrier(world, 0));
  note("lose");
  if (rank == 7) _exit(0);
  GIVES(expected, dm_shrink(mesh, "dp", lost, 1, NULL, &left));
  if (expected == DM_STATUS_OK && rank < 6) {
    CHECK(sum_along(left, "dp") == 3 && sum_along(left, "tp") == 2);
    note("finalize");
    OK(dm_finalize(left, NULL));
    CHECK(living() == 0);
  } else if (expected != DM_STATUS_OK) {
    CHECK(strstr(dm_last_error(), "2.27") != NULL);
    OK(dm_abort(mesh));
  }
  dm_free(left);
  dm_free(mesh);
}

static void lose_one(void)
{
  lose(DM_STATUS_OK);
}

/* The library has no function that shrinks a communicator. */
static void lose_without_shrink(void)
{
  lose(DM_STATUS_UNSUPPORTED);
}

/* The mesh that is left after a shrink inherits the options, unless the call has others. */
static void inherit(void)
{
  const int32_t shape[] = {4, 2};
  const char *names[] = {"dp", "tp"};
  char net_name[] = "mynet";
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.netName = net_name;
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT}, others[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dims[0].comm_name = "replicas";
  dims[1].comm_name = "shards";
  dims[1].nccl_config = &config;
  options.dim_options = dims;
  options.num_dim_options = 2;
  dm_mesh *mesh = made(shape, 2, names), *left = NULL, *lazily = NULL;
  options.flags = DM_INIT_LAZY;
  dm_mesh *lazy = made(shape, 2, names);
  options.flags = 0;
  options.dim_options = NULL;
  options.num_dim_options = 0;
  memset(net_name, 'X', sizeof net_name);
  OK(dm_world_barrier(world, 0));
  if (rank == 7) _exit(0);
  note("inherited");
  REQUIRE(dm_shrink(mesh, "dp", NULL, 0, NULL, &left));
  note("replaced");
  dm_call_options call = DM_CALL_OPTIONS_INIT;
  others[0].comm_name = "others";
  call.dim_options = others;
  call.num_dim_options = 2;
  REQUIRE(dm_shrink(lazy, "dp", NULL, 0, &call, &lazily));
  note("made");
  if (rank < 6) {
    CHECK(sum_along(left, "dp") == 3 && sum_along(left, "tp") == 2);
    CHECK(sum_along(lazily, "dp") == 3);
    OK(dm_finalize(left, NULL));
    OK(dm_finalize(lazily, NULL));
    CHECK(living() == 0);
  }
  dm_free(left);
  dm_free(lazily);
  dm_free(mesh);
  dm_free(lazy);
}

static const rank_case kCases[] = {
    {"stuck", stuck}, {"without device", without_device}, {"together", together}, {"left group", left_group},
    {"group of another", group_of_another}, {"beside", beside}, {"inside", inside},
    {"finalize world", finalize_world}, {"local peers", local_peers}, {"log callback", log_callback},
    {"lose", lose_one}, {"lose without", lose_without_shrink}, {"inherit", inherit},
};

int main(int count, char **arguments)
{
  RUN_IN_WORLD(case_name(count, arguments), kCases);
  check_library_threads(0);
  return finish();
}
