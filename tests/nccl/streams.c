/* Ranks of a job of device type cuda over the recorder that wait for streams, and that pass memory
 * which NCCL cannot use. The argument names the case. tests/test_nccl_streams.py runs them. */
#include "rank.h"

#include <time.h>

static const int32_t kSquare[] = {2, 2};
static const char *const kSquareNames[] = {"dp", "tp"};
static void (*set_query)(int code);
static void (*count_queries)(int *all, int *by_relaxed);
static void (*break_comm)(ncclComm_t comm, int code);

enum { kDone = 0, kBusy = 600, kLaunchFailure = 719 };

static void *stream_of(size_t number)
{
  return (void *)number;
}

static dm_mesh *made_square(void)
{
  dm_mesh *mesh = made(kSquare, 2, kSquareNames);
  REQUIRE(dm_get_proc(mesh, "recorder_break", (void **)&break_comm));
  *(void **)&set_query = of_driver("cuda_set_query");
  *(void **)&count_queries = of_driver("cuda_count_queries");
  return mesh;
}

static double cpu_seconds(void)
{
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static dm_error_info failure(void)
{
  dm_error_info info = DM_ERROR_INFO_INIT;
  OK(dm_last_error_info(&info));
  return info;
}

static void *end_work(void *nothing)
{
  usleep(300000);
  set_query(kDone);
  return nothing;
}

static void *abort_soon(void *mesh)
{
  usleep(300000);
  OK(dm_abort((dm_mesh *)mesh));
  return NULL;
}

/* Waits without a failure of another rank. */
static void wait_for_work(void)
{
  dm_mesh *mesh = made_square();
  OK(dm_stream_wait(mesh, NULL, stream_of(7), 0));
  OK(dm_stream_wait(mesh, "tp", NULL, 0));
  FAILS(DM_STATUS_INVALID_STATE, "captured", dm_stream_wait(mesh, NULL, stream_of(0xca), 0));

  set_query(kBusy);
  const double began = seconds_now(), cpu = cpu_seconds();
  FAILS(DM_STATUS_TIMEOUT, "not done after 2000 ms", dm_stream_wait(mesh, "tp", stream_of(7), 2000));
  const double spent = cpu_seconds() - cpu, waited = seconds_now() - began;
  dm_error_info info = failure();
  CHECK(info.dim != NULL && strcmp(info.dim, "tp") == 0 && info.num_ranks == 0);
  CHECK(info.waited_seconds >= 2 && info.waited_seconds < waited + 0.001);
  int all = 0, relaxed = 0;
  count_queries(&all, &relaxed);
  printf("waited %.3f s: %d queries, %.2f ms of CPU\n", waited, all, 1e3 * spent);
  CHECK(all > 100 && all < 1000 && relaxed == all);

  const pthread_t thread = begun(end_work, NULL);
  OK(dm_stream_wait(mesh, NULL, stream_of(7), 0));
  CHECK(pthread_join(thread, NULL) == 0);
  set_query(kLaunchFailure);
  FAILS(DM_STATUS_DEVICE, "gives 719", dm_stream_wait(mesh, NULL, stream_of(7), 0));
  CHECK(failure().device_error == 719);
  set_query(kDone);
  OK(dm_world_barrier(world, 0));
  OK(dm_finalize(mesh, NULL));
  FAILS(DM_STATUS_ABORTED, "finalized", dm_stream_wait(mesh, NULL, stream_of(7), 0));
  dm_free(mesh);
}

/* Waits that end because a communicator fails or the mesh is aborted. */
static void wait_for_failures(void)
{
  dm_mesh *mesh = made_square(), *other = made_square();
  ncclComm_t comm = NULL;
  set_query(kBusy);
  OK(dm_get_comm(mesh, "dp", &comm));
  break_comm(comm, ncclSystemError);
  FAILS(DM_STATUS_CCL, "dm_stream_wait", dm_stream_wait(mesh, "dp", stream_of(7), 0));
  /* Both meshes share the communicators. */
  GIVES(DM_STATUS_CCL, dm_stream_wait(other, NULL, stream_of(7), 0));
  FAILS(DM_STATUS_TIMEOUT, "not done after 50 ms", dm_stream_wait(other, "tp", stream_of(7), 50));
  set_query(kDone);
  GIVES(DM_STATUS_CCL, dm_stream_wait(mesh, NULL, stream_of(7), 0));
  OK(dm_stream_wait(mesh, "tp", stream_of(7), 0));
  set_query(kBusy);
  OK(dm_get_comm(mesh, "tp", &comm));
  break_comm(comm, ncclRemoteError);
  const double began = seconds_now();
  GIVES(DM_STATUS_PEER_LOST, dm_stream_wait(mesh, "tp", stream_of(7), 0));
  CHECK(seconds_now() - began < 5 && failure().num_ranks == 0);
  OK(dm_world_barrier(world, 0));
  OK(dm_abort(other));
  OK(dm_abort(mesh));
  GIVES(DM_STATUS_ABORTED, dm_stream_wait(mesh, NULL, stream_of(7), 0));
  dm_free(mesh);
  dm_free(other);
  OK(dm_world_barrier(world, 0));
  mesh = made_square();
  const pthread_t thread = begun(abort_soon, mesh);
  GIVES(DM_STATUS_ABORTED, dm_stream_wait(mesh, NULL, stream_of(7), 0));
  CHECK(pthread_join(thread, NULL) == 0);
  dm_free(mesh);
}

/* A collective that waits for the other rank along tp. */
static void *reduce_along_tp(void *mesh)
{
  CHECK(sum_along((dm_mesh *)mesh, "tp") == 2);
  return NULL;
}

/* Whether the event is about a dm_stream_wait along that dimension. dim is NULL for a wait
 * without a dimension. */
static int is_of_wait(const dm_event *event, const char *dim)
{
  if (event->kind != DM_EVENT_SLOW || event->operation == NULL || strcmp(event->operation, "dm_stream_wait") != 0) return 0;
  return dim == NULL ? event->dim == NULL : event->dim != NULL && strcmp(event->dim, dim) == 0;
}

/* The message of the next event of such a wait. */
static const char *slow_wait(const dm_events *events, const char *dim)
{
  dm_event event = DM_EVENT_INIT;
  do {
    REQUIRE(dm_events_next(events, 10000, &event));
    CHECK(event.kind != DM_EVENT_NONE);
  } while (event.kind != DM_EVENT_NONE && !is_of_wait(&event, dim));
  CHECK(event.rank == rank && event.world_size == size && event.call == -1 && event.waited_seconds >= 0.1);
  CHECK(event.num_ranks == (rank == 2 && dim == NULL ? 1u : 0u) && (event.num_ranks == 0 || event.ranks[0] == 3));
  return event.message == NULL ? "" : event.message;
}

/* A wait that lasts is an event. Rank 3 is behind rank 2 along tp. */
static void slow_waits(void)
{
  dm_mesh *mesh = made_square();
  dm_events *events = NULL;
  dm_event_options options = DM_EVENT_OPTIONS_INIT;
  char expected[64];
  options.slow_ms = 100;
  REQUIRE(dm_events_open(&options, &events));
  OK(dm_world_barrier(world, 0));
  if (rank < 3) {
    pthread_t thread = 0;
    if (rank == 2) thread = begun(reduce_along_tp, mesh);
    set_query(kBusy);
    FAILS(DM_STATUS_TIMEOUT, "not done after 1500 ms", dm_stream_wait(mesh, "dp", stream_of(7), 1500));
    snprintf(expected, sizeof expected, "rank %d has waited in dm_stream_wait along dp for ", rank);
    CHECK(strstr(slow_wait(events, "dp"), expected) != NULL);
    FAILS(DM_STATUS_TIMEOUT, "not done after 1500 ms", dm_stream_wait(mesh, NULL, stream_of(7), 1500));
    const char *message = slow_wait(events, NULL);
    CHECK(strstr(message, rank == 2 ? ": rank 3 is behind; rank 3 has made no call of mesh/tp" : ": no rank of this host is behind") != NULL);
    OK(dm_world_barrier(world, 0));
    if (rank == 2) CHECK(pthread_join(thread, NULL) == 0);
  } else {
    OK(dm_world_barrier(world, 0));
    reduce_along_tp(mesh);
  }
  set_query(kDone);
  dm_events_free(events);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* The last rank dies, and NCCL does not notice, as over NVLink. */
static void wait_for_the_dead(void)
{
  const int32_t lost = size - 1;
  dm_mesh *mesh = made_square();
  set_query(kBusy);
  OK(dm_world_barrier(world, 0));
  if (rank == lost) _exit(0);
  const double began = seconds_now();
  FAILS(DM_STATUS_PEER_LOST, "rank 3 was lost", dm_stream_wait(mesh, NULL, stream_of(7), 0));
  dm_error_info info = failure();
  CHECK(info.num_lost == 1 && info.lost_ranks[0] == lost && info.num_ranks == 1 && info.ranks[0] == lost);
  CHECK(info.waited_seconds > 1 && seconds_now() - began < 15);
  /* The lost rank is in the group along dp of rank 1 and along tp of rank 2. */
  GIVES(rank == 1 ? DM_STATUS_PEER_LOST : DM_STATUS_TIMEOUT, dm_stream_wait(mesh, "dp", stream_of(7), 3000));
  CHECK(strcmp(failure().dim, "dp") == 0);
  /* Neither of the ranks 0 and 2 ends the mesh while the other one waits along dp. */
  if (rank != 1) OK(dm_barrier(mesh, "dp", 30000));
  if (rank == 2) {
    /* NCCL has noticed, and the store knows who it was. */
    ncclComm_t comm = NULL;
    OK(dm_get_comm(mesh, "tp", &comm));
    break_comm(comm, ncclRemoteError);
    GIVES(DM_STATUS_PEER_LOST, dm_stream_wait(mesh, "tp", stream_of(7), 0));
    info = failure();
    CHECK(info.num_lost == 1 && info.lost_ranks[0] == lost);
  }
  /* Work that is done may have ended by the abort of a rank that knew of the loss. */
  set_query(kDone);
  if (rank == 1) FAILS(DM_STATUS_PEER_LOST, "may be wrong", dm_stream_wait(mesh, "dp", stream_of(7), 0));
  OK(dm_abort(mesh));
  dm_free(mesh);
}

/* The last rank aborts, and the work of the others ends, as it does over NVLink, where NCCL tells
 * nobody. */
static void wait_beside_an_abort(void)
{
  const int32_t leaver = size - 1;
  dm_mesh *mesh = made_square(), *other = made_square();
  set_query(kDone);
  OK(dm_stream_wait(mesh, NULL, stream_of(7), 0));
  OK(dm_world_barrier(world, 0));
  /* Both meshes share the communicators, so the end of one is the end of the other's work. */
  if (rank == leaver) OK(dm_abort(other));
  OK(dm_world_barrier(world, 0));
  if (rank != leaver) {
    FAILS(DM_STATUS_PEER_LOST, "rank 3 has ended the mesh by dm_abort, dm_recover or dm_shrink",
          dm_stream_wait(mesh, NULL, stream_of(7), 0));
    CHECK(failure().num_ranks == 1 && failure().ranks[0] == leaver && failure().num_lost == 0);
    GIVES(rank == 0 ? DM_STATUS_OK : DM_STATUS_PEER_LOST, dm_stream_wait(other, rank == 1 ? "dp" : "tp", stream_of(7), 0));
  }
  OK(dm_world_barrier(world, 0));
  OK(dm_abort(mesh));
  dm_free(mesh);
  dm_free(other);
}

/* Rank 0 recovers while the work of the others is not done, and NCCL tells nobody. */
static void wait_beside_a_recovery(void)
{
  dm_mesh *mesh = made_square(), *next = NULL;
  set_query(kBusy);
  OK(dm_world_barrier(world, 0));
  if (rank == 0) {
    OK(dm_abort(mesh));
  } else {
    const double began = seconds_now();
    FAILS(DM_STATUS_PEER_LOST, "rank 0 has begun recovery 1 of the job", dm_stream_wait(mesh, NULL, stream_of(7), 0));
    CHECK(failure().num_ranks == 1 && failure().ranks[0] == 0 && failure().num_lost == 0);
    CHECK(seconds_now() - began < 10);
  }
  set_query(kDone);
  REQUIRE(dm_recover(mesh, NULL, &next, NULL));
  OK(dm_stream_wait(next, NULL, stream_of(7), 0));
  OK(dm_world_finalize(world, 0));
  dm_free(mesh);
  dm_free(next);
}

/* Rank 0 shrinks the mesh while rank 1 waits along a dimension in which no rank is lost. */
static void wait_beside_a_shrink(void)
{
  const int32_t lost[] = {3};
  dm_mesh *mesh = made_square(), *left = NULL;
  set_query(kDone);
  OK(dm_world_barrier(world, 0));
  if (rank == 1) {
    /* The waits succeed until rank 0 has begun to end the mesh. */
    const double until = seconds_now() + 60;
    while (dm_stream_wait(mesh, "tp", stream_of(7), 0) == DM_STATUS_OK && seconds_now() < until) usleep(1000);
    FAILS(DM_STATUS_PEER_LOST, "rank 0 has ended the mesh by dm_abort, dm_recover or dm_shrink",
          dm_stream_wait(mesh, "tp", stream_of(7), 0));
    CHECK(failure().num_ranks == 1 && failure().ranks[0] == 0 && failure().num_lost == 0);
  }
  if (rank != lost[0]) REQUIRE(dm_shrink(mesh, "dp", lost, 1, NULL, &left));
  if (rank < 2) {
    CHECK(sum_along(left, "tp") == 2);
    OK(dm_finalize(left, NULL));
  }
  OK(dm_world_barrier(world, 0));
  OK(dm_abort(mesh));
  dm_free(left);
  dm_free(mesh);
}

static void (*own)(void *start, size_t bytes, int device);
static int (*asked)(void);

static dm_status sum(const dm_mesh *mesh, float *send, float *recv)
{
  return dm_all_reduce(mesh, "tp", send, recv, 16, DM_FLOAT32, DM_SUM, NULL);
}

/* Memory that is not of the communicator's device. The argument is what DM_CHECK_POINTERS says. */
static void pointers(const char *mode)
{
  enum { kBytes = 1 << 16, kCalls = 1000 };
  dm_mesh *mesh = made_square();
  float *mine = calloc(2, kBytes), *theirs = calloc(1, kBytes), *host = calloc(1, kBytes), *pinned = calloc(1, kBytes),
        *managed = calloc(1, kBytes);
  float *recv = mine + kBytes / sizeof *mine;
  const int device = rank, another = (rank + 1) % size;
  *(void **)&own = of_driver("cuda_own");
  *(void **)&asked = of_driver("cuda_asked");
  own(mine, 2 * kBytes, device);
  own(theirs, kBytes, another);
  own(pinned, kBytes, -1);
  own(managed, kBytes, -2);
  if (strcmp(mode, "0") == 0 || getenv("CUDA_PAGEABLE") != NULL) {
    OK(sum(mesh, host, recv));
    if (strcmp(mode, "0") == 0) {
      OK(sum(mesh, theirs, recv));
      CHECK(asked() == 0);
    }
  } else {
    char text[64];
    FAILS(DM_STATUS_INVALID_ARGUMENT, "dm_all_reduce: send is 0x", sum(mesh, host, recv));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "host memory", sum(mesh, mine, host));
    snprintf(text, sizeof text, "made on device %d: join the world", device);
    FAILS(DM_STATUS_INVALID_ARGUMENT, text, sum(mesh, theirs, recv));
    snprintf(text, sizeof text, "memory of device %d", another);
    FAILS(DM_STATUS_INVALID_ARGUMENT, text, sum(mesh, theirs, recv));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "host memory", dm_send(mesh, "tp", host, 1, DM_FLOAT32, 1 - rank % 2, NULL));
    const size_t counts[] = {1, 1};
    FAILS(DM_STATUS_INVALID_ARGUMENT, "recv is", dm_all_to_allv(mesh, "tp", mine, counts, NULL, host, counts, NULL, DM_FLOAT32, NULL));
    OK(dm_all_reduce(mesh, "tp", host, host, 0, DM_FLOAT32, DM_SUM, NULL));
    /* A group fails as a whole. */
    OK(dm_group_start(mesh));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "host memory", sum(mesh, host, recv));
    GIVES(DM_STATUS_INVALID_ARGUMENT, dm_group_end(mesh));
  }
  OK(sum(mesh, mine, recv));
  OK(sum(mesh, pinned, recv));
  OK(sum(mesh, managed, recv));
  const int before = asked();
  const double began = cpu_seconds();
  for (int call = 0; call < kCalls; ++call) OK(dm_all_reduce(mesh, "tp", mine + call, recv + call, 1, DM_FLOAT32, DM_SUM, NULL));
  printf("%d calls asked %d times, %.2f us each\n", kCalls, asked() - before, 1e6 * (cpu_seconds() - began) / kCalls);
  const int expected = strcmp(mode, "0") == 0 ? 0 : strcmp(mode, "1") == 0 ? 2 * kCalls : 0;
  /* The two buffers may meet in one of the places for ranges, but they are in one range. */
  CHECK(asked() - before <= expected + (expected == 0 && strcmp(mode, "0") != 0 ? 4 : 0) && asked() - before >= expected);
  if (strcmp(mode, "1") == 0) {
    /* Memory that was freed and belongs to another device now is found each time. */
    own(mine, 2 * kBytes, another);
    FAILS(DM_STATUS_INVALID_ARGUMENT, "memory of device", sum(mesh, mine, recv));
    own(mine, 2 * kBytes, device);
  }
  /* Memory that was refused is asked about again. */
  own(host, kBytes, device);
  OK(sum(mesh, host, recv));
  OK(dm_world_barrier(world, 0));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  free(mine);
  free(theirs);
  free(host);
  free(pinned);
  free(managed);
}

/* Communicators of one of two copies of NCCL. OTHER is the path of the second one, which the
 * program loads and uses itself. DM_CCL_LIBRARY names the first. */
static void adopt(void)
{
  const int32_t one[] = {1};
  const char *names[] = {"mine"};
  dm_init_options none = DM_INIT_OPTIONS_INIT, in_world = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *adopted = NULL;
  void *other = dlopen(getenv("OTHER"), RTLD_NOW | RTLD_LOCAL), *proc = NULL, *expected = NULL;
  ncclResult_t (*get_id)(ncclUniqueId *) = NULL;
  ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *) = NULL;
  CHECK(other != NULL);
  if (other == NULL) return;
  *(void **)&get_id = dlsym(other, "ncclGetUniqueId");
  *(void **)&init = dlsym(other, "ncclCommInitRankConfig");
  expected = dlsym(other, "recorder_living");
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  CHECK(get_id(&id) == ncclSuccess && init(&comm, 1, id, 0, NULL) == ncclSuccess);

  /* One copy is loaded, and it is not the one of DM_CCL_LIBRARY. */
  REQUIRE(dm_from_comms("cuda", one, 1, names, &comm, &none, &adopted));
  REQUIRE(dm_get_proc(adopted, "recorder_living", &proc));
  CHECK(proc == expected);
  OK(dm_finalize(adopted, NULL));
  dm_free(adopted);

  /* A world that nobody told which copy to take brings the second one into the process. */
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  REQUIRE(dm_world_init("cuda", &join, &world));
  FAILS(DM_STATUS_LIBRARY, "2 copies of NCCL are in this process", dm_from_comms("cuda", one, 1, names, &comm, &none, &adopted));
  CHECK(strstr(dm_last_error(), getenv("OTHER")) != NULL && strstr(dm_last_error(), getenv("DM_CCL_LIBRARY")) != NULL);
  CHECK(strstr(dm_last_error(), "dm_world_options.ccl_library") != NULL && strstr(dm_last_error(), "dm_set_ccl_resolver") != NULL);
  in_world.world = world;
  GIVES(DM_STATUS_LIBRARY, dm_from_comms("cuda", one, 1, names, &comm, &in_world, &adopted));
  dm_world_free(world);

  /* The program names the copy. */
  join.ccl_library = getenv("OTHER");
  REQUIRE(dm_world_init("cuda", &join, &world));
  in_world.world = world;
  REQUIRE(dm_from_comms("cuda", one, 1, names, &comm, &in_world, &adopted));
  float value = 3, sum_of = 0;
  OK(dm_all_reduce(adopted, NULL, &value, &sum_of, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum_of == 3);
  OK(dm_finalize(adopted, NULL));
  dm_free(adopted);
  dm_free(mesh);
  dm_world_free(world);
}

/* The program names no copy, none is loaded, and DM_CCL_LIBRARY names one. */
static void adopt_from_nowhere(void)
{
  const int32_t one[] = {1};
  ncclComm_t comm = (ncclComm_t)(size_t)0x1000;
  dm_mesh *adopted = NULL;
  FAILS(DM_STATUS_LIBRARY, "no shared NCCL", dm_from_comms("cuda", one, 1, NULL, &comm, NULL, &adopted));
}

/* Another thread has chosen another device than the world's. */
static void *make_on_another_device(void *nothing)
{
  dm_mesh *mesh = NULL;
  choose_device((rank + 1) % size);
  FAILS(DM_STATUS_DEVICE, "is current on this thread, but the world was joined on device",
        dm_init("cuda", kSquare, 2, kSquareNames, &options, &mesh));
  CHECK(strstr(dm_last_error(), "DM_WORLD_DEVICE") != NULL);
  return nothing;
}

static void another_device(void)
{
  dm_mesh *mesh = made_square();
  CHECK(pthread_join(begun(make_on_another_device, NULL), NULL) == 0);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  mesh = made_square();
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* RCCL and AMD's runtime, without a CUDA driver. The program has chosen its device. */
static void choose_amd_device(void)
{
  void *rccl = dlopen(getenv("RECORDER"), RTLD_NOW | RTLD_LOCAL);
  int (*set)(int) = NULL;
  CHECK(rccl != NULL);
  if (rccl == NULL) return;
  *(void **)&set = dlsym(rccl, "hipSetDevice");
  CHECK(set(7 - atoi(getenv("RANK"))) == 0);
}

static void amd(void)
{
  dm_mesh *mesh = NULL;
  float mine = 1, sum_of = 0;
  REQUIRE(dm_init("cuda", kSquare, 2, kSquareNames, &options, &mesh));
  OK(dm_all_reduce(mesh, "tp", &mine, &sum_of, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum_of == 2);
  OK(dm_stream_wait(mesh, NULL, NULL, 0));
  FAILS(DM_STATUS_TIMEOUT, "not done after 100 ms", dm_stream_wait(mesh, NULL, stream_of(600), 100));
  FAILS(DM_STATUS_INVALID_STATE, "captured into a HIP graph", dm_stream_wait(mesh, NULL, stream_of(0xca), 100));
  FAILS(DM_STATUS_DEVICE, "illegal memory access", dm_stream_wait(mesh, NULL, stream_of(700), 100));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  REQUIRE(dm_init("cuda", kSquare, 2, kSquareNames, &options, &mesh));
  OK(dm_abort(mesh));
  dm_free(mesh);
  REQUIRE(dm_init("cuda", kSquare, 2, kSquareNames, &options, &mesh));
  OK(dm_world_finalize(world, 0));
  dm_free(mesh);
}

static void check_pointers(void)
{
  pointers(getenv("DM_CHECK_POINTERS") == NULL ? "" : getenv("DM_CHECK_POINTERS"));
}

static const rank_case kCases[] = {
    {"work", wait_for_work}, {"failures", wait_for_failures}, {"dead", wait_for_the_dead}, {"abort", wait_beside_an_abort}, {"amd", amd},
    {"slow", slow_waits},
    {"another device", another_device}, {"pointers", check_pointers}, {"recovery", wait_beside_a_recovery},
    {"shrink", wait_beside_a_shrink},
};

int main(int count, char **arguments)
{
  const char *name = case_name(count, arguments);
  /* These cases join worlds of their own, or none. */
  if (strncmp(name, "adopt", 5) == 0) {
    strcmp(name, "adopt") == 0 ? adopt() : adopt_from_nowhere();
    return finish();
  }
  if (strcmp(name, "amd") == 0) choose_amd_device();
  RUN_IN_WORLD(name, kCases);
  check_library_threads(0);
  return finish();
}
