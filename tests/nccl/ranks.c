/* One rank of a job of device type cuda over the recorder. The argument names the case.
 * tests/test_nccl.py reads what the recorder wrote. */
#include "library_threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static dm_world *world;
static int32_t rank, size;
static dm_init_options options = DM_INIT_OPTIONS_INIT;
static const int32_t kCube[] = {2, 2, 2};
static const char *const kNames[] = {"pp", "dp", "tp"};
static void (*note)(const char *text);
static int (*living)(void);

static dm_mesh *made(const int32_t *shape, size_t ndim, const char *const *names)
{
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cuda", shape, ndim, names, &options, &mesh));
  if (note == NULL) {
    REQUIRE(dm_get_proc(mesh, "recorder_note", (void **)&note));
    REQUIRE(dm_get_proc(mesh, "recorder_living", (void **)&living));
  }
  return mesh;
}

static float sum_along(const dm_mesh *mesh, const char *dim)
{
  float mine = 1, sum = 0;
  OK(dm_all_reduce(mesh, dim, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  return sum;
}

static ncclComm_t comm_of(const dm_mesh *mesh, const char *dim)
{
  ncclComm_t comm = NULL;
  OK(dm_get_comm(mesh, dim, &comm));
  return comm;
}

/* Exchanges with a count for each rank: rank r sends r + p elements to rank p. */
static void ragged(void)
{
  const int32_t all[] = {8};
  const char *name[] = {"all"};
  dm_mesh *mesh = made(all, 1, name);
  float send[128], recv[128];
  size_t out[8], counts[8], displs[8], next = 0;
  for (int at = 0; at < 128; ++at) send[at] = (float)(1000 * rank + at);
  for (int peer = 0; peer < 8; ++peer) {
    out[peer] = (size_t)(rank + peer);
    counts[peer] = (size_t)peer;
    displs[peer] = next + 1;
    next = displs[peer] + (size_t)peer;
  }
  note("all-to-all-v");
  OK(dm_all_to_allv(mesh, NULL, send, out, NULL, recv, out, NULL, DM_FLOAT32, NULL));
  size_t at = 0;
  for (int peer = 0; peer < 8; ++peer) {
    const int place = rank * peer + rank * (rank - 1) / 2; /* of this rank's block in the peer's buffer */
    for (int i = 0; i < rank + peer; ++i, ++at) CHECK(recv[at] == (float)(1000 * peer + place + i));
  }
  note("all-gather-v");
  OK(dm_all_gatherv(mesh, NULL, send, recv, counts, displs, DM_FLOAT32, NULL));
  for (int peer = 0; peer < 8; ++peer)
    for (int i = 0; i < peer; ++i) CHECK(recv[displs[peer] + (size_t)i] == (float)(1000 * peer + i));
  note("reduce-scatter-v");
  OK(dm_group_start(mesh));
  OK(dm_reduce_scatterv(mesh, NULL, send, counts, displs, recv, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_group_end(mesh));
  for (int i = 0; i < rank; ++i) CHECK(recv[i] == (float)(28000 + 8 * ((int)displs[rank] + i)));
  note("end");
  FAILS(DM_STATUS_INVALID_ARGUMENT, "overlap", dm_all_to_allv(mesh, NULL, send, out, NULL, send, out, NULL, DM_FLOAT32, NULL));
  FAILS(DM_STATUS_UNSUPPORTED, "dtype is 42, whose size is not known here", dm_all_gatherv(mesh, NULL, send, recv, counts, displs, 42, NULL));
  OK(dm_finalize(mesh, NULL));
}

/* Element types and operators that this library does not know go to NCCL, which judges them. */
static void unknown(void)
{
  const int32_t all[] = {8};
  const char *name[] = {"all"};
  dm_mesh *mesh = made(all, 1, name);
  float buffer[16] = {1}, *apart = buffer + 8;
  note("unknown");
  FAILS(DM_STATUS_CCL, "datatype 42", dm_all_reduce(mesh, NULL, buffer, buffer, 1, 42, DM_SUM, NULL));
  FAILS(DM_STATUS_CCL, "datatype 255", dm_all_gather(mesh, NULL, buffer, buffer, 1, 255, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op 77 is none of", dm_all_reduce(mesh, NULL, buffer, apart, 1, DM_FLOAT32, 77, NULL));
  FAILS(DM_STATUS_UNSUPPORTED, "ncclAlltoAll", dm_all_to_all(mesh, NULL, buffer, apart, 1, 42, NULL));
  note("refused here");
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is 256", dm_all_reduce(mesh, NULL, buffer, apart, 1, 256, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is -1", dm_all_reduce(mesh, NULL, buffer, apart, 1, -1, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op is -1", dm_all_reduce(mesh, NULL, buffer, apart, 1, DM_FLOAT32, -1, NULL));
  note("made");
  ncclResult_t (*create)(ncclRedOp_t *, void *, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) = NULL;
  REQUIRE(dm_get_proc(mesh, "ncclRedOpCreatePreMulSum", (void **)&create));
  float scalar = 0.5f;
  ncclRedOp_t op = ncclSum;
  CHECK(create(&op, &scalar, ncclFloat32, ncclScalarHostImmediate, comm_of(mesh, NULL)) == ncclSuccess);
  OK(dm_all_reduce(mesh, NULL, buffer, apart, 1, DM_FLOAT32, (dm_op)op, NULL));
  CHECK(apart[0] == 4);
  note("end");
  OK(dm_finalize(mesh, NULL));
}

/* Makes every call that makes, shares or ends communicators, in one fixed order. */
static void path(void)
{
  const int32_t halves[] = {2, 2};
  const int32_t ones[] = {8, 1};
  const char *two[] = {"dp", "tp"}, *back[] = {"a", "b"}, *line[] = {"all", "one"};
  dm_mesh *cube = made(kCube, 3, kNames), *view = NULL, *flat = NULL, *again = NULL, *split = NULL;
  note("cube");
  CHECK(comm_of(cube, "pp") != comm_of(cube, "dp") && comm_of(cube, "dp") != comm_of(cube, "tp"));
  CHECK(sum_along(cube, "pp") == 2 && sum_along(cube, "tp") == 2);
  REQUIRE(dm_slice(cube, two, 2, &view));
  CHECK(comm_of(view, "tp") == comm_of(cube, "tp"));
  note("flatten");
  REQUIRE(dm_flatten(view, "dt", NULL, &flat));
  CHECK(sum_along(flat, "dt") == 4);
  note("flatten again");
  REQUIRE(dm_flatten(view, "dt", NULL, &again));
  CHECK(comm_of(flat, "dt") == comm_of(again, "dt"));
  note("unflatten");
  REQUIRE(dm_unflatten(flat, "dt", halves, 2, back, NULL, &split));
  CHECK(comm_of(split, "a") == comm_of(cube, "dp") && comm_of(split, "b") == comm_of(cube, "tp"));

  note("second");
  dm_mesh *second = made(kCube, 3, kNames);
  CHECK(comm_of(second, "dp") == comm_of(cube, "dp"));
  note("own");
  dm_dim_options own[3] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  own[1].flags = DM_DIM_OWN_COMM;
  options.dim_options = own;
  options.num_dim_options = 3;
  dm_mesh *third = made(kCube, 3, kNames);
  options.dim_options = NULL;
  options.num_dim_options = 0;
  CHECK(comm_of(third, "dp") != comm_of(cube, "dp") && comm_of(third, "tp") == comm_of(cube, "tp"));

  note("line");
  dm_mesh *world_line = made(ones, 2, line);
  CHECK(sum_along(world_line, "all") == 8);
  note("one");
  CHECK(sum_along(world_line, "one") == 1);
  note("lazy");
  options.flags = DM_INIT_LAZY;
  const int32_t wide[] = {4, 2};
  const char *lazily[] = {"x", "y"};
  dm_mesh *lazy = made(wide, 2, lazily);
  options.flags = 0;
  note("lazy first use");
  CHECK(sum_along(lazy, "x") == 4);
  CHECK(comm_of(lazy, "y") == comm_of(cube, "tp"));

  note("adopt");
  const char *only[] = {"mine"};
  const int32_t four[] = {4};
  ncclComm_t borrowed = comm_of(flat, "dt");
  dm_init_options none = DM_INIT_OPTIONS_INIT;
  dm_mesh *adopted = NULL;
  setenv("DM_CCL_LIBRARY", getenv("RECORDER"), 1);
  REQUIRE(dm_from_comms("cuda", four, 1, only, &borrowed, &none, &adopted));
  CHECK(sum_along(adopted, "mine") == 4);
  note("leave adopted");
  OK(dm_finalize(adopted, NULL));

  note("finalize second");
  OK(dm_finalize(second, NULL));
  note("finalize third");
  OK(dm_finalize(third, NULL));
  note("finalize lazy");
  OK(dm_finalize(lazy, NULL));
  note("finalize line");
  OK(dm_finalize(world_line, NULL));
  note("finalize cube");
  OK(dm_finalize(cube, NULL));
  note("abort");
  dm_mesh *doomed = made(kCube, 3, kNames);
  note("abort now");
  OK(dm_abort(doomed));
  OK(dm_abort(doomed));
  GIVES(DM_STATUS_ABORTED, dm_check(doomed, "tp"));
  OK(dm_world_barrier(world, 0));
  note("after");
  CHECK(living() == 1); /* the communicator with this rank alone stays until the world ends */
  dm_mesh *meshes[] = {cube, view, flat, again, split, second, third, world_line, lazy, adopted, doomed};
  for (size_t index = 0; index < sizeof meshes / sizeof *meshes; ++index) dm_free(meshes[index]);
}

/* Makes one mesh, which may fail. Prints the outcome of each call. Nothing of the mesh may be
 * left. */
static void attempt(void)
{
  dm_mesh *mesh = NULL, *flat = NULL;
  dm_status status = dm_init("cuda", kCube, 3, kNames, &options, &mesh);
  printf("init %s %s\n", dm_status_name(status), status == DM_STATUS_OK ? "" : dm_last_error());
  if (status == DM_STATUS_OK) {
    REQUIRE(dm_get_proc(mesh, "recorder_living", (void **)&living));
    int is_summed = 0;
    const dm_status flattened = dm_flatten(mesh, "all", NULL, &flat);
    printf("flatten %s %s\n", dm_status_name(flattened), flattened == DM_STATUS_OK ? "" : dm_last_error());
    if (flattened == DM_STATUS_OK) {
      float mine = 1, sum = 0;
      const dm_status summed = dm_all_reduce(flat, "all", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
      printf("sum %s %s\n", dm_status_name(summed), summed == DM_STATUS_OK ? "" : dm_last_error());
      CHECK(summed != DM_STATUS_OK || sum == 8);
      is_summed = summed == DM_STATUS_OK;
    }
    /* When an operation has failed on a rank, the others wait in it until somebody ends the mesh. */
    const dm_status finalized = flattened != DM_STATUS_OK || is_summed ? dm_finalize(mesh, NULL) : DM_STATUS_ABORTED;
    printf("finalize %s %s\n", dm_status_name(finalized), finalized == DM_STATUS_OK ? "" : dm_last_error());
    if (finalized != DM_STATUS_OK) OK(dm_abort(mesh));
  }
  dm_free(flat);
  dm_free(mesh);
  /* A world whose mesh failed can still make one. The recorder, reached through that mesh, says
   * which communicators live. */
  unsetenv("RECORDER_FAIL");
  mesh = made(kCube, 3, kNames);
  const int now = living();
  OK(dm_finalize(mesh, NULL));
  printf("left %d of %d\n", living(), now);
  dm_free(mesh);
}

/* Checks what the library and the device show before there is any communicator. */
static void chosen(void)
{
  const int32_t line[] = {size};
  dm_mesh *mesh = made(line, 1, NULL);
  CHECK(sum_along(mesh, NULL) == (float)size);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* ncclCommFinalize does not return on one rank. No rank waits for it beyond its deadline. */
static void stuck(void)
{
  options.timeout_ms = 1500;
  dm_mesh *mesh = made(kCube, 3, kNames);
  const double began = seconds_now();
  const dm_status status = dm_finalize(mesh, NULL);
  printf("finalize %s %s\n", dm_status_name(status), dm_last_error());
  CHECK(seconds_now() - began < 1.5 * 1.1 + 0.5);
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  OK(dm_abort(mesh));
  dm_free(mesh);
}

/* Aborts that can only end together: of one mesh, also inside a group, and then of a world with
 * two meshes. */
static void together(void)
{
  dm_mesh *mesh = made(kCube, 3, kNames), *other = NULL;
  const int32_t line[] = {size};
  OK(dm_group_start(mesh));
  setenv("RECORDER_TOGETHER", "4", 1);
  OK(dm_abort(mesh));
  (void)dm_group_end(mesh);
  dm_free(mesh);
  unsetenv("RECORDER_TOGETHER");
  OK(dm_world_barrier(world, 0));
  mesh = made(kCube, 3, kNames);
  other = made(line, 1, NULL);
  OK(dm_world_barrier(world, 0));
  setenv("RECORDER_TOGETHER", "9", 1);
  OK(dm_world_abort(world));
  dm_free(other);
  dm_free(mesh);
}

static void *on_a_thread(void *nothing)
{
  chosen();
  return nothing;
}

/* The program has chosen its device before it joins. */
static void choose_device(int number)
{
  void *context = NULL, *driver = dlopen("libcuda.so.1", RTLD_NOW);
  int (*retain)(void **, int) = NULL, (*set)(void *) = NULL;
  CHECK(driver != NULL);
  if (driver == NULL) return;
  *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
  *(void **)&set = dlsym(driver, "cuCtxSetCurrent");
  CHECK(retain(&context, number) == 0 && set(context) == 0);
}

/* Hands to dm_from_comms what a caller may hand to it by mistake. */
static void adopt(void)
{
  const int32_t one[] = {1}, two[] = {2};
  const char *names[] = {"mine"};
  dm_init_options none = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = made(one, 1, names), *adopted = NULL;
  ncclResult_t (*get_id)(ncclUniqueId *) = NULL;
  ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *) = NULL;
  ncclResult_t (*destroy)(ncclComm_t) = NULL;
  REQUIRE(dm_get_proc(mesh, "ncclGetUniqueId", (void **)&get_id));
  REQUIRE(dm_get_proc(mesh, "ncclCommInitRankConfig", (void **)&init));
  REQUIRE(dm_get_proc(mesh, "ncclCommDestroy", (void **)&destroy));
  setenv("DM_CCL_LIBRARY", getenv("RECORDER"), 1);
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "comms[0]", dm_from_comms("cuda", one, 1, names, &comm, &none, &adopted));
  CHECK(get_id(&id) == ncclSuccess && init(&comm, 1, id, 0, NULL) == ncclSuccess);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "has 1 ranks", dm_from_comms("cuda", two, 1, names, &comm, &none, &adopted));
  CHECK(destroy(comm) == ncclSuccess);
  note("destroyed");
  FAILS(DM_STATUS_CCL, "gives 4", dm_from_comms("cuda", one, 1, names, &comm, &none, &adopted));
  CHECK(adopted == NULL);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* New meshes after a communicator has failed and only one rank knows. First it is a dimension's
 * communicator, then the one from which the others are split. */
static void anew(void)
{
  const int32_t shape[] = {4, 2};
  const char *names[] = {"rest", "tp"};
  void (*fail)(ncclComm_t, int) = NULL;
  dm_mesh *first = made(kCube, 3, kNames);
  REQUIRE(dm_get_proc(first, "recorder_break", (void **)&fail));
  if (rank == 3) fail(comm_of(first, "dp"), ncclSystemError);
  OK(dm_world_barrier(world, 0));
  note("dimension");
  dm_mesh *second = made(kCube, 3, kNames);
  CHECK(comm_of(second, "dp") != comm_of(first, "dp"));
  CHECK(comm_of(second, "pp") == comm_of(first, "pp") && comm_of(second, "tp") == comm_of(first, "tp"));
  CHECK(sum_along(second, "pp") == 2 && sum_along(second, "dp") == 2 && sum_along(second, "tp") == 2);
  float mine = 1, sum = 0;
  if (rank == 3) FAILS(DM_STATUS_CCL, "failed earlier", dm_all_reduce(first, "dp", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  if (rank == 5) fail(NULL, ncclSystemError);
  OK(dm_world_barrier(world, 0));
  note("root");
  dm_mesh *third = made(shape, 2, names);
  CHECK(comm_of(third, "tp") == comm_of(first, "tp"));
  CHECK(sum_along(third, "rest") == 4 && sum_along(third, "tp") == 2);
  note("ends");
  FAILS(DM_STATUS_CCL, "failed earlier", dm_finalize(first, NULL));
  /* This communicator works. But its parent ends with it, and rank 5 must abort the parent. */
  const dm_status ended = dm_finalize(second, NULL);
  CHECK(ended == DM_STATUS_OK || ended == DM_STATUS_PEER_LOST);
  OK(dm_finalize(third, NULL));
  CHECK(living() == 0);
  dm_free(third);
  dm_free(second);
  dm_free(first);
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

/* Checks the threads that the library has started. With "path" it also checks that every thread
 * that it starts beside NCCL was among them. */
static int ended(int is_whole)
{
  check_library_threads(0);
  if (is_whole) CHECK(has_had_thread("dm-abort") && has_had_thread("dm-background"));
  return finish();
}

/* Begins a thread of the program, which check_library_threads does not look at. */
static pthread_t begun(void *(*work)(void *), void *argument)
{
  pthread_t thread;
  starts_own_thread = 1;
  CHECK(pthread_create(&thread, NULL, work, argument) == 0);
  starts_own_thread = 0;
  return thread;
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
  dm_mesh *first = made(kCube, 3, kNames), *second = NULL, *third = NULL;
  float mine = 1, sum = 0;
  OK(dm_group_start(first));
  note("empty group");
  OK(dm_abort(first));
  note("second");
  second = made(kCube, 3, kNames);
  CHECK(sum_along(second, "tp") == 2);

  OK(dm_group_start(second));
  /* The other ranks may have aborted already. */
  if (dm_all_reduce(second, "tp", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL) != DM_STATUS_OK) CHECK(dm_last_error()[0] != 0);
  note("full group");
  OK(dm_abort(second));
  GIVES(DM_STATUS_ABORTED, dm_group_end(second));
  OK(dm_abort(second));
  third = made(kCube, 3, kNames);
  FAILS(DM_STATUS_ABORTED, "call from another thread", dm_all_reduce(third, "tp", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_ABORTED, "call from another thread", dm_group_start(third));
  CHECK(pthread_join(begun(sum_on_a_thread, third), NULL) == 0);
  OK(dm_finalize(third, NULL));
  note("after");
  dm_free(first);
  dm_free(second);
  dm_free(third);
}

static void *many_sums(void *mesh)
{
  for (int round = 0; round < 100; ++round) CHECK(sum_along(mesh, "tp") == 2);
  return NULL;
}

/* Two threads, each with a mesh of its own, on one communicator that both meshes share. */
static void gate(void)
{
  dm_mesh *first = made(kCube, 3, kNames), *second = made(kCube, 3, kNames);
  pthread_t thread;
  CHECK(comm_of(first, "tp") == comm_of(second, "tp"));
  thread = begun(many_sums, first);
  many_sums(second);
  CHECK(pthread_join(thread, NULL) == 0);
  OK(dm_finalize(first, NULL));
  OK(dm_finalize(second, NULL));
  dm_free(first);
  dm_free(second);
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

/* dm_abort and dm_world_abort while another thread issues calls. The recorder sees when they meet. */
static void beside(void)
{
  for (int round = 0; round < 30; ++round) {
    dm_mesh *mesh = made(kCube, 3, kNames);
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
  dm_mesh *mesh = made(kCube, 3, kNames);
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

/* The names in the caller's configuration change before a lazy dimension is made. */
static void lazy_names(void)
{
  char comm_name[] = "mine", net_name[] = "mynet";
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  dm_dim_options dims[3] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  config.commName = comm_name;
  config.netName = net_name;
  dims[2].nccl_config = &config;
  options.dim_options = dims;
  options.num_dim_options = 3;
  options.flags = DM_INIT_LAZY;
  dm_mesh *mesh = made(kCube, 3, kNames);
  memset(comm_name, 'X', sizeof comm_name);
  memset(net_name, 'X', sizeof net_name);
  memset(&config, 0, sizeof config);
  memset(dims, 0, sizeof dims);
  options.dim_options = NULL;
  options.num_dim_options = 0;
  options.flags = 0;
  CHECK(sum_along(mesh, "tp") == 2);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* dm_world_finalize ends all meshes: a whole one, one that was freed, one of half of the ranks and
 * a lazy one, whose dimensions are made in another order on every other rank. */
static void finalize_world(void)
{
  const int32_t wide[] = {4, 2}, half[] = {2, 2};
  const char *lazily[] = {"x", "y"}, *parts[] = {"p", "q"};
  dm_mesh *mesh = made(kCube, 3, kNames), *freed = made(wide, 2, lazily), *part = made(half, 2, parts), *lazy = NULL;
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
  const dm_status status = dm_shrink((dm_mesh *)mesh, "dim_0", lost, 2, NULL, &left);
  dm_free(left);
  return status;
}

static void join_anew(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  join.timeout_ms = 30000;
  join.ccl_library = getenv("RECORDER");
  dm_world_free(world);
  REQUIRE(dm_world_init("cuda", &join, &world));
  options.world = world;
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

/* The timeout of a call that makes a mesh. HANG_FAILS lists the calls that will not be done in time. */
static void set_timeout_of(const char *call)
{
  const char *list = getenv("HANG_FAILS");
  options.timeout_ms = list != NULL && strstr(list, call) != NULL ? 1000 : 30000;
}

/* One function of the library does not return on one rank ("rank function 0"). Every call of ours
 * that makes, asks or ends communicators is tried, each with a communicator of its own. */
static void hang(const char *which, int shrinks)
{
  const int32_t line[] = {size}, square[] = {2, 2};
  dm_mesh *mesh = NULL;
  char function[64];
  int where = -1;
  CHECK(sscanf(which, "%d %63s", &where, function) == 2);
  hang_shape = line;
  options.timeout_ms = 3000;
  if (shrinks) {
    hang_shape = square;
    hang_ndim = 2;
    REQUIRE(dm_init("cuda", hang_shape, hang_ndim, NULL, &options, &mesh));
    OK(dm_world_barrier(world, 0));
    if (rank > 1) _exit(0);
    step(which, "dm_shrink", step_shrink, mesh);
    return;
  }
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
  REQUIRE(step_init(&mesh));
  options.flags = 0;
  options.dim_options = NULL;
  options.num_dim_options = 0;
  OK(dm_world_barrier(world, 0));
  step(which, "dm_get_comm", step_first_use, mesh);
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));

  /* Ends and questions take as long as the timeout of the mesh allows. */
  options.timeout_ms = 3000;
  mesh = made(line, 1, NULL);
  ncclComm_t comm = comm_of(mesh, NULL);
  setenv("DM_CCL_LIBRARY", getenv("RECORDER"), 1);
  step(which, "dm_from_comms", step_adopt, &comm);
  unsetenv("DM_CCL_LIBRARY");
  OK(dm_world_barrier(world, 0));
  step(which, "dm_check", step_check, mesh);
  OK(dm_world_barrier(world, 0));
  step(which, "dm_finalize", step_finalize, mesh);
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));

  options.flags = 0;
  REQUIRE(step_init(&mesh));
  OK(dm_world_barrier(world, 0));
  const int is_group = strcmp(function, "ncclGroupEnd") == 0;
  if (where == rank && (is_group || strcmp(function, "ncclAllReduce") == 0)) {
    /* The call of another thread does not return. That thread has no deadline. */
    int (*insiders)(void) = NULL;
    REQUIRE(dm_get_proc(mesh, "recorder_inside", (void **)&insiders));
    setenv("RECORDER_HANG", which, 1);
    (void)begun(is_group ? stuck_in_a_group : stuck_in_an_operation, mesh);
    while (insiders() == 0) usleep(1000);
  }
  OK(dm_world_barrier(world, 0));
  step(which, "dm_abort", step_abort, mesh);
  dm_free(mesh);
  OK(dm_world_barrier(world, 0));

  REQUIRE(step_init(&mesh));
  OK(dm_world_barrier(world, 0));
  step(which, "dm_world_finalize", step_world_finalize, NULL);
  dm_free(mesh);
  join_anew();
  REQUIRE(step_init(&mesh));
  OK(dm_world_barrier(world, 0));
  step(which, "dm_world_abort", step_world_abort, NULL);
  dm_free(mesh);
}

/* A call that does not return for a while. What it held is given back when it returns. */
static void late(void)
{
  const int32_t line[] = {size};
  options.timeout_ms = 3000;
  hang_shape = line;
  dm_mesh *mesh = made(line, 1, NULL);
  const int before = living();
  step("1 ncclCommAbort 4500", "dm_abort", step_abort, mesh);
  CHECK(rank != 1 || living() == before);
  if (rank == 1) step(NULL, "again", step_abort, mesh);
  dm_free(mesh);
  mesh = NULL;
  OK(dm_world_barrier(world, 0));
  options.timeout_ms = 1000;
  step("1 ncclCommInitRankConfig 3000", "dm_init", step_init, &mesh);
  const double until = seconds_now() + 60;
  while (living() > 0 && seconds_now() < until) usleep(10000);
  CHECK(living() == 0);
  dm_free(mesh);
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

/* Making and ending communicators while a CUDA graph is captured. */
static void capture(void)
{
  const int32_t line[] = {size};
  const char *const captured[] = {"legacy", "thread"};
  dm_mesh *mesh = made(kCube, 3, kNames), *other = NULL, *flat = NULL;
  options.flags = DM_INIT_LAZY;
  dm_mesh *lazy = made(line, 1, NULL);
  options.flags = 0;
  note("captures");
  for (size_t at = 0; at < 2; ++at) {
    if (rank == 1) setenv("CUDA_CAPTURED", captured[at], 1);
    FAILS(DM_STATUS_INVALID_STATE, "is being captured into a CUDA graph", dm_init("cuda", line, 1, NULL, &options, &other));
    FAILS(DM_STATUS_INVALID_STATE, "is being captured into a CUDA graph", dm_flatten(mesh, "all", NULL, &flat));
    FAILS(DM_STATUS_INVALID_STATE, "is being captured into a CUDA graph", dm_finalize(mesh, NULL));
    FAILS(DM_STATUS_INVALID_STATE, "is being captured into a CUDA graph", dm_world_finalize(world, 0));
    unsetenv("CUDA_CAPTURED");
  }
  float mine = 1, sum = 0;
  void *const stream = (void *)0xcafe;
  if (rank == 1) setenv("CUDA_CAPTURED", "0xcafe", 1);
  FAILS(DM_STATUS_INVALID_STATE, "stream 0xcafe is being captured", dm_all_reduce(lazy, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, stream));
  unsetenv("CUDA_CAPTURED");
  note("captured");
  /* Communicators that are made already may be captured. */
  if (rank == 1) setenv("CUDA_CAPTURED", "0xcafe", 1);
  OK(dm_all_reduce(mesh, "tp", &mine, &sum, 1, DM_FLOAT32, DM_SUM, stream));
  unsetenv("CUDA_CAPTURED");
  OK(dm_all_reduce(lazy, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, stream));
  CHECK(sum == (float)size);
  OK(dm_finalize(lazy, NULL));
  OK(dm_finalize(mesh, NULL));
  dm_free(lazy);
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

/* Prints what the world says of this rank. */
static void tell(void)
{
  dm_world_info info = DM_WORLD_INFO_INIT;
  OK(dm_world_get_info(world, &info));
  CHECK(info.rank == rank && info.size == size && strcmp(info.device_type, "cuda") == 0 && info.library[0] != '\0' && info.ccl_version >= 21400);
  printf("info rank=%d local=%d/%d host=%d/%d device=%d\n", info.rank, info.local_rank, info.local_size, info.host, info.num_hosts, info.device);
}

int main(int count, char **arguments)
{
  const char *what = count > 1 ? arguments[1] : "";
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  join.timeout_ms = 30000;
  join.ccl_library = getenv("RECORDER");
  if (strcmp(what, "current") == 0 || strcmp(what, "named") == 0) choose_device(7 - atoi(getenv("RANK")));
  if (strcmp(what, "named") == 0 || strcmp(what, "named alone") == 0) {
    join.flags = DM_WORLD_DEVICE;
    join.device = (atoi(getenv("RANK")) + 3) % 8;
  }
  if (strcmp(what, "beyond") == 0) {
    join.flags = DM_WORLD_DEVICE;
    join.device = atoi(getenv("RANK")) == 1 ? 8 : 0;
  }
  if (strncmp(what, "options", 7) == 0) {
    join.world_size = atoi(getenv("WORLD_SIZE"));
    join.rank = atoi(getenv("RANK"));
    /* One rank of "options reversed" says 0, which is what the other case says on all ranks. */
    join.local_rank = strcmp(what, "options reversed") == 0 ? 7 - join.rank : 0;
  }
  const double began = seconds_now();
  const dm_status joined = dm_world_init("cuda", &join, &world);
  if (joined != DM_STATUS_OK) {
    dm_error_info info = DM_ERROR_INFO_INIT;
    OK(dm_last_error_info(&info));
    printf("joined %s device_error=%d: %s\n", dm_status_name(joined), info.device_error, info.message);
    CHECK(seconds_now() - began < 15);
    return finish();
  }
  REQUIRE(dm_world_rank(world, &rank));
  REQUIRE(dm_world_size(world, &size));
  options.world = world;
  options.timeout_ms = 30000;
  tell();
  if (strcmp(what, "path") == 0) path();
  if (strcmp(what, "left group") == 0) left_group();
  if (strcmp(what, "group of another") == 0) group_of_another();
  if (strcmp(what, "gate") == 0) gate();
  if (strcmp(what, "beside") == 0) beside();
  if (strcmp(what, "inside") == 0) inside();
  if (strcmp(what, "lazy names") == 0) lazy_names();
  if (strcmp(what, "finalize world") == 0) finalize_world();
  if (strcmp(what, "attempt") == 0) attempt();
  if (strcmp(what, "ragged") == 0) ragged();
  if (strcmp(what, "unknown") == 0) unknown();
  if (strcmp(what, "thread") == 0) {
    CHECK(pthread_join(begun(on_a_thread, NULL), NULL) == 0);
  }
  if (strcmp(what, "adopt") == 0) adopt();
  if (strcmp(what, "stuck") == 0) stuck();
  if (strcmp(what, "together") == 0) together();
  if (strcmp(what, "anew") == 0) anew();
  if (strcmp(what, "hang") == 0) hang(getenv("HANG"), 0);
  if (strcmp(what, "hang in shrink") == 0) hang(getenv("HANG"), 1);
  if (strcmp(what, "late") == 0) late();
  if (strcmp(what, "local peers") == 0) local_peers();
  if (strcmp(what, "capture") == 0) capture();
  if (strcmp(what, "log callback") == 0) log_callback();
  if (strcmp(what, "lose") == 0) lose(DM_STATUS_OK);
  if (strcmp(what, "inherit") == 0) inherit();
  if (strcmp(what, "lose without") == 0) lose(DM_STATUS_UNSUPPORTED);
  const char *const plain[] = {"chosen", "current", "named", "named alone", "options", "options reversed"};
  for (size_t at = 0; at < sizeof plain / sizeof *plain; ++at)
    if (strcmp(what, plain[at]) == 0) chosen();
  dm_world_free(world);
  /* Threads of the library stay inside the functions that do not return. */
  if (strncmp(what, "hang", 4) == 0) return finish();
  return ended(strcmp(what, "path") == 0);
}
