/* ranks: 2 */
/* dm_abort while four threads use the mesh, from four threads at once, and again; afterwards every
 * function of every view of the root says DM_STATUS_ABORTED where it needs communicators and still
 * answers what it can without. */
#include "blocked.h"

enum { kThreads = 4, kRounds = 5 };

static dm_mesh *root, *views[kThreads];
static int go;

static void wait_for_go(void)
{
  while (!__atomic_load_n(&go, __ATOMIC_SEQ_CST)) sched_yield();
}

/* Works along a communicator of its own until the mesh ends. */
static dm_status work(void *data)
{
  const dm_mesh *view = views[(intptr_t)data];
  const char *names[] = {"tp", "dp"};
  for (;;) {
    float one = 1, sum = 0;
    const dm_status status = dm_all_reduce(view, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
    if (status != DM_STATUS_OK) return status;
    CHECK(sum == 2);
    dm_mesh *made = NULL;
    ncclComm_t comm = NULL;
    const dm_status sliced = dm_slice(root, names, 2, &made);
    if (sliced != DM_STATUS_OK) return sliced;
    const dm_status got = dm_get_comm(made, "dp", &comm);
    dm_free(made);
    if (got != DM_STATUS_OK) return got;
  }
}

static void *abort_it(void *unused)
{
  (void)unused;
  wait_for_go();
  return (void *)(intptr_t)dm_abort(views[0]);
}

static dm_status barrier(void *world)
{
  return dm_world_barrier((const dm_world *)world, 0);
}

static void everything_says_aborted(const dm_mesh *mesh, const char *dim)
{
  const char *names[] = {"dp", "tp"}, *parts[] = {"x", "y"};
  const int32_t sizes[] = {2, 1};
  float one = 1, many[2] = {0, 0};
  dm_mesh *made = NULL;
  ncclComm_t comm = NULL;
  void *proc = NULL;
  GIVES(DM_STATUS_ABORTED, dm_get_comm(mesh, dim, &comm));
  GIVES(DM_STATUS_ABORTED, dm_check(mesh, dim));
  GIVES(DM_STATUS_ABORTED, dm_all_reduce(mesh, dim, &one, many, 1, DM_FLOAT32, DM_SUM, NULL));
  GIVES(DM_STATUS_ABORTED, dm_reduce(mesh, dim, &one, many, 1, DM_FLOAT32, DM_SUM, 0, NULL));
  GIVES(DM_STATUS_ABORTED, dm_broadcast(mesh, dim, &one, many, 1, DM_FLOAT32, 0, NULL));
  GIVES(DM_STATUS_ABORTED, dm_all_gather(mesh, dim, &one, many, 1, DM_FLOAT32, NULL));
  GIVES(DM_STATUS_ABORTED, dm_reduce_scatter(mesh, dim, many, &one, 1, DM_FLOAT32, DM_SUM, NULL));
  GIVES(DM_STATUS_ABORTED, dm_all_to_all(mesh, dim, many, &one, 1, DM_FLOAT32, NULL));
  GIVES(DM_STATUS_ABORTED, dm_send(mesh, dim, &one, 1, DM_FLOAT32, 0, NULL));
  GIVES(DM_STATUS_ABORTED, dm_recv(mesh, dim, many, 1, DM_FLOAT32, 0, NULL));
  GIVES(DM_STATUS_ABORTED, dm_group_start(mesh));
  GIVES(DM_STATUS_ABORTED, dm_flatten(mesh, "late", NULL, &made));
  GIVES(DM_STATUS_ABORTED, dm_unflatten(mesh, dim, sizes, 2, parts, NULL, &made));
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  GIVES(DM_STATUS_ABORTED, dm_slice(mesh, &dim, 1, &made));
  GIVES(DM_STATUS_ABORTED, dm_root(mesh, &made));
  GIVES(DM_STATUS_ABORTED, dm_submesh(mesh, names, 1, 0, &made));
  GIVES(DM_STATUS_ABORTED, dm_concatenate(&mesh, 1, &made));
  CHECK(made == NULL && comm == NULL);
  OK(dm_abort(mesh));

  int32_t size = 0, coordinate[2], shape[2];
  int32_t rank = -1, ranks[2];
  bool equal = false;
  size_t length = 0;
  uint64_t hash = 0;
  char text[128];
  CHECK(dm_ndim(mesh) > 0 && dm_dim_name(mesh, 0) != NULL);
  OK(dm_shape(mesh, shape, 2, &length));
  OK(dm_size(mesh, dim, &size));
  CHECK(size == 2);
  OK(dm_rank(mesh, &rank));
  OK(dm_get_local_rank(mesh, dim, &rank));
  OK(dm_get_coordinate(mesh, coordinate, 2, &length));
  OK(dm_ranks(mesh, ranks, 2, &length));
  OK(dm_group_ranks(mesh, dim, ranks, 2, &length));
  OK(dm_equal(mesh, mesh, &equal));
  OK(dm_hash(mesh, &hash));
  OK(dm_describe(mesh, text, sizeof text, &length));
  OK(dm_get_proc(mesh, "ncclAllReduce", &proc)); /* the library stays loaded */
  OK(dm_clone(mesh, &made));
  dm_free(made);
}

int main(void)
{
  const int32_t shape[] = {2, 1};
  const char *names[] = {"dp", "tp"}, *dp = "dp", *flat[kThreads] = {"f0", "f1", "f2", "f3"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_dim_options own = DM_DIM_OPTIONS_INIT;
  own.flags = DM_DIM_OWN_COMM;
  dm_call_options apart = DM_CALL_OPTIONS_INIT;
  apart.dim_options = &own;
  apart.num_dim_options = 1;
  REQUIRE(dm_world_init("cpu", NULL, &options.world));
  for (int round = 0; round < kRounds; ++round) {
    REQUIRE(dm_init("cpu", shape, 2, names, &options, &root));
    const int32_t rank = rank_of(root);
    blocked users[kThreads], waiter;
    for (intptr_t index = 0; index < kThreads; ++index) {
      REQUIRE(dm_flatten(root, flat[index], &apart, &views[index]));
      memset(&users[index], 0, sizeof users[index]);
      users[index].call = work;
      users[index].data = (void *)index;
    }
    for (int index = 0; index < kThreads; ++index) {
      if (pthread_create(&users[index].thread, NULL, run_blocked, &users[index]) != 0) return 1;
    }
    /* One call belongs to the world and not to the mesh. The abort does not end it. */
    if (rank == 0) start_blocked(&waiter, barrier, options.world);
    else pause_ms(40 + 20 * round);
    pthread_t aborters[kThreads];
    moment began = moment_now();
    if (rank == 0) {
      for (int index = 0; index < kThreads; ++index) {
        if (pthread_create(&aborters[index], NULL, abort_it, NULL) != 0) return 1;
      }
      began = moment_now();
      __atomic_store_n(&go, 1, __ATOMIC_SEQ_CST);
      for (int index = 0; index < kThreads; ++index) {
        void *status = NULL;
        pthread_join(aborters[index], &status);
        CHECK((intptr_t)status == DM_STATUS_OK);
      }
      __atomic_store_n(&go, 0, __ATOMIC_SEQ_CST);
    }
    for (int index = 0; index < kThreads; ++index) {
      const double took = end_blocked(&users[index], &began);
      CHECK(rank != 0 || took < kLongest);
      if (users[index].status != (rank == 0 ? DM_STATUS_ABORTED : DM_STATUS_PEER_LOST) ||
          strstr(users[index].message, rank == 0 ? "abort" : "rank 0") == NULL) {
        ++failures;
        fprintf(stderr, "a thread of rank %d had %s: %s\n", rank, dm_status_name(users[index].status), users[index].message);
      }
    }
    if (rank == 0) {
      dm_mesh *fresh = NULL;
      GIVES(DM_STATUS_ABORTED, dm_slice(root, &dp, 1, &fresh));
    } else {
      OK(dm_world_barrier(options.world, 0));
      OK(dm_abort(root));
    }
    if (rank == 0) {
      join_blocked(&waiter);
      CHECK(waiter.status == DM_STATUS_OK);
    }
    everything_says_aborted(root, "dp");
    everything_says_aborted(views[2], "f2");
    for (int index = 0; index < kThreads; ++index) dm_free(views[index]);
    dm_free(root);
    OK(dm_world_barrier(options.world, 0));
  }
  dm_world_free(options.world);
  return finish();
}
