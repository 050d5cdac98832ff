/* A CUDA graph that holds collectives of a mesh, and the end of that mesh while the graph lives.
 *
 * ncclCommAbort and ncclCommDestroy loop while a captured graph refers to the communicator. So the
 * ends below must return by a deadline of ours and name the graph. Each mode is a process of its
 * own, because what NCCL has left behind cannot be used again:
 *   works     captured through dm_all_reduce and through the raw function, replayed, freed, ended
 *   abort     dm_abort while the graph lives
 *   finalize  dm_finalize while the graph lives
 *   world     dm_world_abort while the graph lives
 *   making    dm_init and dm_finalize while this thread captures a stream that waits for the legacy
 *             default stream: both must be refused
 *   unseen    dm_init while this thread captures a non-blocking stream, of which no function of the
 *             driver tells: what comes of it is printed, and nothing is required
 *   behind    a capture in global mode right after dm_init: nothing of the making may go on behind
 *             dm_init, because a communicator that is destroyed meanwhile breaks the capture */
#include "experiment.h"

enum { kCount = 1024, kDeadline = 5000 };

/* The driver's graph functions; handles are pointers. */
static struct {
  int (*begin)(void *stream, int mode);
  int (*end)(void *stream, void **graph);
  int (*instantiate)(void **executable, void *graph, unsigned long long flags);
  int (*launch)(void *executable, void *stream);
  int (*free_executable)(void *executable);
  int (*free_graph)(void *graph);
} graph;

static dm_init_options options = DM_INIT_OPTIONS_INIT;
static dm_mesh *mesh;
static int32_t rank, ranks;

static void open_graphs(void)
{
  const struct {
    const char *name;
    void *at;
  } wanted[] = {{"cuStreamBeginCapture_v2", &graph.begin}, {"cuStreamEndCapture", &graph.end},
                {"cuGraphInstantiateWithFlags", &graph.instantiate}, {"cuGraphLaunch", &graph.launch},
                {"cuGraphExecDestroy", &graph.free_executable}, {"cuGraphDestroy", &graph.free_graph}};
  for (size_t at = 0; at < sizeof wanted / sizeof *wanted; ++at)
    if (!driver_has(wanted[at].name, wanted[at].at)) experiment_skip("this driver has no CUDA graphs");
}

static dm_status abort_it(void *unused)
{
  (void)unused;
  return dm_abort(mesh);
}

static dm_status abort_world(void *unused)
{
  (void)unused;
  return dm_world_abort(options.world);
}

static dm_status finalize(void *unused)
{
  dm_call_options within = DM_CALL_OPTIONS_INIT;
  (void)unused;
  within.timeout_ms = kDeadline;
  return dm_finalize(mesh, &within);
}

static dm_status make_another(void *unused)
{
  const int32_t shape[] = {ranks};
  dm_mesh *second = NULL;
  (void)unused;
  const dm_status made = dm_init(device_type(), shape, 1, NULL, &options, &second);
  dm_free(second);
  return made;
}

/* A call on this thread, because the thread that captures is what matters. It must be refused. The
 * dry run has the host engine in NCCL's place, for which nothing is refused, because it has no
 * streams. */
static void refused_while_capturing(const char *what, dm_status (*call)(void *))
{
  const dm_status status = call(NULL);
  seen(rank, what, "%s: %s", dm_status_name(status), status == DM_STATUS_OK ? "" : dm_last_error());
  if (getenv("DM_GPU_STANDIN") == NULL) CHECK(status == DM_STATUS_INVALID_STATE && strstr(dm_last_error(), "captur") != NULL);
}

/* The end must have returned; where it failed, the message says that a graph may be the reason. */
static void end_with_a_graph(const char *what, dm_status (*call)(void *))
{
  trial end = {.what = what, .call = call};
  const int returned = trial_run(&end, rank, 30);
  CHECK(returned);
  if (returned && end.status != DM_STATUS_OK) CHECK(strstr(end.message, "graph") != NULL);
}

int main(int argc, char **argv)
{
  const char *mode = argc > 1 ? argv[1] : "works";
  if (!on_gpu()) experiment_skip("the host engine has no graphs");
  void *stream = NULL;
  options.world = join_world(&rank, &ranks);
  open_graphs();
  const int32_t shape[] = {ranks};
  options.timeout_ms = 15000;
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  ncclComm_t comm = NULL;
  ncclResult_t (*rawAllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) = NULL;
  REQUIRE(dm_get_comm(mesh, NULL, &comm));
  PROC(mesh, AllReduce);
  float *send = (float *)device_alloc(kCount * sizeof(float)), *recv = (float *)device_alloc(2 * kCount * sizeof(float));
  float host[2 * kCount];
  for (size_t at = 0; at < kCount; ++at) host[at] = (float)(rank + 1);
  device_put(send, host, kCount * sizeof(float));
  /* A blocking stream, which waits for the legacy default stream, is one that the library can ask
   * about. */
  if (strcmp(mode, "making") == 0) driver_says(driver.stream_create(&stream, 0), "cuStreamCreate");
  else stream = device_stream();
  /* NCCL may connect at the first use, which a capture would hold. */
  OK(dm_all_reduce(mesh, NULL, send, recv, kCount, DM_FLOAT32, DM_SUM, stream));
  driver_says(driver.stream_synchronize(stream), "cuStreamSynchronize");
  OK(dm_world_barrier(options.world, 0));

  void *captured = NULL, *executable = NULL;
  const int is_behind = strcmp(mode, "behind") == 0;
  dm_mesh *fresh = NULL;
  if (is_behind) {
    dm_dim_options own = DM_DIM_OPTIONS_INIT;
    own.flags = DM_DIM_OWN_COMM;
    options.dim_options = &own;
    options.num_dim_options = 1;
    REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &fresh));
  }
  driver_says(graph.begin(stream, is_behind ? 0 /* global */ : 1 /* thread-local */), "cuStreamBeginCapture");
  OK(dm_all_reduce(mesh, NULL, send, recv, kCount, DM_FLOAT32, DM_SUM, stream));
  const ncclResult_t raw = rawAllReduce(send, recv + kCount, kCount, ncclFloat, ncclSum, comm, (cudaStream_t)stream);
  CHECK(raw == ncclSuccess);
  if (strcmp(mode, "making") == 0) {
    refused_while_capturing("dm_init while this thread captures", make_another);
    refused_while_capturing("dm_finalize while this thread captures", finalize);
    if (getenv("DM_GPU_STANDIN") != NULL) experiment_end();
  } else if (strcmp(mode, "unseen") == 0) {
    const dm_status made = make_another(NULL);
    seen(rank, "dm_init while this thread captures a non-blocking stream", "%s: %s", dm_status_name(made),
         made == DM_STATUS_OK ? "" : dm_last_error());
    seen(rank, "the end of that capture", "CUresult %d", graph.end(stream, &captured));
    experiment_end();
  }
  if (is_behind) pause_ms(1000); /* NCCL takes half a second to destroy a communicator */
  driver_says(graph.end(stream, &captured), "cuStreamEndCapture");
  driver_says(graph.instantiate(&executable, captured, 0), "cuGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) driver_says(graph.launch(executable, stream), "cuGraphLaunch");
  driver_says(driver.stream_synchronize(stream), "cuStreamSynchronize");
  device_get(host, recv, sizeof host);
  for (size_t at = 0; at < 2 * kCount; ++at) CHECK(host[at] == (float)(ranks * (ranks + 1) / 2));
  OK(dm_world_barrier(options.world, 0));

  if (strcmp(mode, "abort") == 0) end_with_a_graph("dm_abort while a captured graph lives", abort_it);
  else if (strcmp(mode, "finalize") == 0) end_with_a_graph("dm_finalize while a captured graph lives", finalize);
  else if (strcmp(mode, "world") == 0) end_with_a_graph("dm_world_abort while a captured graph lives", abort_world);
  const double began = seconds_now();
  driver_says(graph.free_executable(executable), "cuGraphExecDestroy");
  driver_says(graph.free_graph(captured), "cuGraphDestroy");
  seen(rank, "freeing the graph", "took %.3f s", seconds_now() - began);
  if (is_behind) {
    check_group(fresh, NULL);
    OK(dm_finalize(fresh, NULL));
    dm_free(fresh);
  }
  if (strcmp(mode, "works") == 0 || strcmp(mode, "making") == 0 || is_behind) {
    trial end = {.what = "dm_finalize after the graph was freed", .call = finalize};
    CHECK(trial_run(&end, rank, 30) && end.status == DM_STATUS_OK);
  }
  experiment_end();
}
