/* Ranks over the recorder that make, share and adopt communicators. The argument names the case.
 * tests/test_nccl.py runs them and reads what the recorder wrote. */
#include "rank.h"

/* Makes every call that makes, shares or ends communicators, in one fixed order. */
static void path(void)
{
  const int32_t halves[] = {2, 2};
  const int32_t ones[] = {8, 1};
  const char *two[] = {"dp", "tp"}, *back[] = {"a", "b"}, *line[] = {"all", "one"};
  dm_mesh *cube = made_cube(), *view = NULL, *flat = NULL, *again = NULL, *split = NULL;
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
  dm_mesh *second = made_cube();
  CHECK(comm_of(second, "dp") == comm_of(cube, "dp"));
  note("own");
  dm_dim_options own[3] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  own[1].flags = DM_DIM_OWN_COMM;
  options.dim_options = own;
  options.num_dim_options = 3;
  dm_mesh *third = made_cube();
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
  dm_mesh *doomed = made_cube();
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
  dm_status status = dm_init("cuda", kCube, 3, kCubeNames, &options, &mesh);
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
    /* When an operation has failed on a rank, the others wait in it until the mesh is ended. */
    const dm_status finalized = flattened != DM_STATUS_OK || is_summed ? dm_finalize(mesh, NULL) : DM_STATUS_ABORTED;
    printf("finalize %s %s\n", dm_status_name(finalized), finalized == DM_STATUS_OK ? "" : dm_last_error());
    if (finalized != DM_STATUS_OK) OK(dm_abort(mesh));
  }
  dm_free(flat);
  dm_free(mesh);
  /* A world whose mesh failed can still make one. The recorder, reached through that mesh, says
   * which communicators live. */
  unsetenv("RECORDER_FAIL");
  mesh = made_cube();
  const int now = living();
  OK(dm_finalize(mesh, NULL));
  printf("left %d of %d\n", living(), now);
  dm_free(mesh);
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
  dm_mesh *first = made_cube();
  REQUIRE(dm_get_proc(first, "recorder_break", (void **)&fail));
  if (rank == 3) fail(comm_of(first, "dp"), ncclSystemError);
  OK(dm_world_barrier(world, 0));
  note("dimension");
  dm_mesh *second = made_cube();
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
  dm_mesh *mesh = made_cube();
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

/* Making and ending communicators while a CUDA graph is captured. */
static void capture(void)
{
  const int32_t line[] = {size};
  const char *const captured[] = {"legacy", "thread"};
  dm_mesh *mesh = made_cube(), *other = NULL, *flat = NULL;
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

static const rank_case kCases[] = {
    {"path", path}, {"chosen", one_mesh}, {"attempt", attempt}, {"adopt", adopt}, {"anew", anew},
    {"lazy names", lazy_names}, {"capture", capture},
};

int main(int count, char **arguments)
{
  const char *name = case_name(count, arguments);
  RUN_IN_WORLD(name, kCases);
  check_library_threads(0);
  /* The case "path" starts every thread that the library starts beside NCCL. */
  if (strcmp(name, "path") == 0) CHECK(has_had_thread("dm-abort") && has_had_thread("dm-background"));
  return finish();
}
