/* ranks: 3 */
/* dm_world_abort from another thread wakes all blocked calls of the world, also those without a
 * mesh to abort (dm_init, dm_world_barrier). From then on the world gives DM_STATUS_ABORTED on
 * this rank, and the others' errors name this rank. */
#include "blocked.h"

static dm_world *world;
static dm_mesh *mesh;
static dm_init_options options = DM_INIT_OPTIONS_INIT;
static const int32_t kLine[] = {3};

static dm_status init(void *none)
{
  (void)none;
  dm_mesh *made = NULL;
  return dm_init("cpu", kLine, 1, NULL, &options, &made);
}

static dm_status barrier(void *none)
{
  (void)none;
  return dm_world_barrier(world, 0);
}

static dm_status flatten(void *none)
{
  (void)none;
  dm_mesh *made = NULL;
  return dm_flatten(mesh, "flat", NULL, &made);
}

static dm_status slice_range(void *none)
{
  (void)none;
  dm_mesh *made = NULL;
  return dm_slice_range(mesh, NULL, 0, 2, 1, NULL, &made);
}

static dm_status shrink(void *none)
{
  (void)none;
  dm_mesh *made = NULL;
  const int32_t lost[] = {2};
  return dm_shrink(mesh, NULL, lost, 1, NULL, &made);
}

static dm_status all_reduce(void *none)
{
  (void)none;
  float one = 1, sum = 0;
  return dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
}

static dm_status lazy_get_comm(void *none)
{
  (void)none;
  ncclComm_t comm = NULL;
  return dm_get_comm(mesh, NULL, &comm);
}

static dm_status default_init(void *none)
{
  (void)none;
  dm_mesh *made = NULL;
  return dm_init("cpu", kLine, 1, NULL, NULL, &made);
}

static void all_aborted(dm_world *gone)
{
  int32_t number = -1;
  dm_mesh *made = NULL;
  FAILS(DM_STATUS_ABORTED, "dm_world_abort", dm_world_barrier(gone, 0));
  options.world = gone;
  FAILS(DM_STATUS_ABORTED, "dm_world_abort", dm_init("cpu", kLine, 1, NULL, &options, &made));
  GIVES(DM_STATUS_ABORTED, all_reduce(NULL));
  GIVES(DM_STATUS_ABORTED, flatten(NULL));
  GIVES(DM_STATUS_ABORTED, lazy_get_comm(NULL));
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  OK(dm_world_rank(gone, &number));
  OK(dm_world_size(gone, &number));
  CHECK(number == 3 && made == NULL);
  OK(dm_world_abort(gone));
  OK(dm_abort(mesh));
}

enum { kKinds = 7 };
static const struct {
  const char *name;
  dm_status (*call)(void *);
  bool lazy;
  /* The call of the other ranks, and whether it begins before or after the abort. */
  dm_status (*others)(void *);
  bool before;
} kinds[kKinds] = {{"dm_init", init, false, init, true},
                   {"dm_world_barrier", barrier, false, barrier, false},
                   {"dm_flatten", flatten, false, init, false},
                   {"dm_slice_range", slice_range, false, barrier, false},
                   {"dm_shrink", shrink, false, barrier, false},
                   {"dm_all_reduce", all_reduce, false, barrier, true},
                   {"lazy dm_get_comm", lazy_get_comm, true, lazy_get_comm, false}};

int main(void)
{
  dm_world *sync = NULL;
  int32_t rank = -1;
  REQUIRE(dm_world_init("cpu", NULL, &sync));
  REQUIRE(dm_world_rank(sync, &rank));
  for (int kind = 0; kind < kKinds; ++kind) {
    double times[kTries];
    for (int attempt = 0; attempt < kTries; ++attempt) {
      REQUIRE(dm_world_init("cpu", NULL, &world));
      options.world = world;
      options.flags = kinds[kind].lazy ? DM_INIT_LAZY : 0;
      REQUIRE(dm_init("cpu", kLine, 1, NULL, &options, &mesh));
      OK(dm_world_barrier(sync, 0));
      if (rank == 0) {
        blocked one;
        start_blocked(&one, kinds[kind].call, NULL);
        OK(dm_world_barrier(sync, 0));
        const moment began = moment_now();
        OK(dm_world_abort(world));
        CHECK(own_seconds_since(&began) < kLongest);
        times[attempt] = end_blocked(&one, &began);
        if (one.status != DM_STATUS_ABORTED) {
          ++failures;
          fprintf(stderr, "%s gives %s: %s\n", kinds[kind].name, dm_status_name(one.status), one.message);
        }
        all_aborted(world);
        OK(dm_world_barrier(sync, 0));
      } else {
        blocked one;
        /* Rank 2 never makes rank 0's call, so rank 0's call blocks. */
        const bool waits = rank == 1 && kinds[kind].before;
        if (waits) start_blocked(&one, kinds[kind].others, NULL);
        OK(dm_world_barrier(sync, 0));
        const moment began = moment_now();
        if (waits) CHECK(end_blocked(&one, &began) < 2 && one.status == DM_STATUS_PEER_LOST && strstr(one.message, " 0") != NULL);
        OK(dm_world_barrier(sync, 0));
        const double later = seconds_now();
        /* By then others may have aborted their worlds as well: "rank 0 was", "ranks 0, 1 were". */
        FAILS(DM_STATUS_PEER_LOST, " 0", waits ? barrier(NULL) : kinds[kind].others(NULL));
        if (attempt == 0) { /* every later call fails in this way */
          FAILS(DM_STATUS_PEER_LOST, " 0", barrier(NULL));
          FAILS(DM_STATUS_PEER_LOST, " 0", init(NULL));
        }
        CHECK(seconds_now() - later < 4);
        OK(dm_world_abort(world));
      }
      dm_free(mesh);
      dm_world_free(world);
      OK(dm_world_barrier(sync, 0));
    }
    if (rank == 0) check_times(kinds[kind].name, times);
  }
  /* The worlds that dm_init joins by itself. */
  if (rank == 0) {
    blocked one;
    start_blocked(&one, default_init, NULL);
    const moment began = moment_now();
    OK(dm_default_world_abort());
    const double took = end_blocked(&one, &began);
    CHECK(one.status == DM_STATUS_ABORTED && took < kLongest);
  }
  OK(dm_world_barrier(sync, 0));
  /* The aborted join is over. The next join succeeds. */
  OK(default_init(NULL));
  OK(dm_world_barrier(sync, 0));
  dm_world_free(sync);
  GIVES(DM_STATUS_INVALID_HANDLE, dm_world_abort(sync));
  return finish();
}
