/* ranks: 2 */
/* dm_abort from another thread wakes what waits for a peer before any communicator is touched: the
 * agreement of dm_flatten, dm_unflatten, dm_finalize and of a lazy dm_get_comm, and a thread that
 * waits for its turn behind one of those. */
#include "blocked.h"

static dm_mesh *mesh;

static dm_status flatten(void *name)
{
  dm_mesh *view = NULL;
  const dm_status status = dm_flatten(mesh, (const char *)name, NULL, &view);
  CHECK(view == NULL);
  return status;
}

static dm_status unflatten(void *none)
{
  (void)none;
  const int32_t sizes[] = {2, 1};
  const char *names[] = {"x", "y"};
  dm_mesh *view = NULL;
  return dm_unflatten(mesh, "dp", sizes, 2, names, NULL, &view);
}

static dm_status finalize(void *none)
{
  (void)none;
  return dm_finalize(mesh, NULL);
}

static dm_status get_comm(void *none)
{
  (void)none;
  ncclComm_t comm = NULL;
  return dm_get_comm(mesh, "dp", &comm);
}

static dm_status lazy_all_reduce(void *none)
{
  (void)none;
  float one = 1, sum = 0;
  return dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
}

static dm_status grouped(void *none)
{
  (void)none;
  float one = 1, sum = 0;
  OK(dm_group_start(mesh));
  const dm_status status = dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
  GIVES(DM_STATUS_ABORTED, dm_group_end(mesh)); /* the call fails, but it ends the group */
  return status;
}

/* The calls that wait for a peer, and that dm_abort must end. */
enum { kKinds = 7 };
static const struct {
  const char *name;
  dm_status (*call)(void *);
  bool lazy, second;
  /* Whether the whole world makes the call that the peer misses. Then the peer's next call in the
   * world says how that call ended. */
  bool of_world;
} kinds[kKinds] = {
    {"dm_flatten", flatten, false, false, true},       {"dm_unflatten", unflatten, false, false, true},
    {"dm_finalize", finalize, false, false, true},     {"lazy dm_get_comm", get_comm, true, false, false},
    {"lazy dm_all_reduce", lazy_all_reduce, true, false, false},
    {"lazy dm_all_reduce in a group", grouped, true, false, false}, {"the turn behind dm_flatten", flatten, false, true, true}};

static double abort_once(int kind)
{
  blocked first, second;
  start_blocked(&first, kinds[kind].call, NULL);
  if (kinds[kind].second) start_blocked(&second, flatten, (void *)"another");
  const moment began = moment_now();
  OK(dm_abort(mesh));
  double took = end_blocked(&first, &began);
  if (first.status != DM_STATUS_ABORTED) {
    ++failures;
    fprintf(stderr, "%s gives %s: %s\n", kinds[kind].name, dm_status_name(first.status), first.message);
  }
  if (kinds[kind].second) {
    took = end_blocked(&second, &began);
    CHECK(second.status == DM_STATUS_ABORTED);
  }
  return took;
}

/* The call of rank 1 in the world after rank 0 was aborted in another call. An aborted rank waits
 * for a busy store for 50 ms only. So rank 1 may see the call of rank 0 before it sees the abort,
 * and the calls differ. */
static void after_abort(const dm_world *world)
{
  const dm_status status = dm_world_barrier(world, 0);
  CHECK(status == DM_STATUS_PEER_LOST || status == DM_STATUS_MISMATCH);
  CHECK(strstr(dm_last_error(), "rank 0") != NULL);
}

int main(void)
{
  const int32_t shape[] = {2, 1};
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  ncclComm_t comm = NULL;
  dm_world *sync = NULL; /* orders the steps of the test, apart from the world that the test looks at */
  REQUIRE(dm_world_init("cpu", NULL, &options.world));
  REQUIRE(dm_world_init("cpu", NULL, &sync));
  for (int kind = 0; kind < kKinds; ++kind) {
    double times[kTries];
    int32_t rank = -1;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      options.flags = kinds[kind].lazy ? DM_INIT_LAZY : 0;
      REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
      rank = rank_of(mesh);
      if (rank == 0) times[attempt] = abort_once(kind);
      OK(dm_world_barrier(sync, 0));
      if (rank == 1) {
        const double began = seconds_now();
        if (kinds[kind].of_world) after_abort(options.world);
        if (!kinds[kind].lazy) COMES_TO_GIVE(DM_STATUS_PEER_LOST, dm_check(mesh, "dp"));
        if (!kinds[kind].lazy) FAILS(DM_STATUS_PEER_LOST, "rank 0", dm_check(mesh, "dp"));
        if (kinds[kind].lazy) FAILS(DM_STATUS_PEER_LOST, "rank 0", dm_get_comm(mesh, "dp", &comm));
        CHECK(seconds_now() - began < 60); /* the deadline would be ten minutes */
        OK(dm_abort(mesh));
      }
      GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
      dm_free(mesh);
      OK(dm_world_barrier(sync, 0));
      OK(dm_world_barrier(options.world, 0));
    }
    if (rank == 0) check_times(kinds[kind].name, times);
  }
  dm_world_free(sync);
  dm_world_free(options.world);
  return finish();
}
