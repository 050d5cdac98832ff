/* ranks: 6 */
/* dm_shrink where ranks disagree on what was lost: some have aborted, some share communicators
 * that others do not, and some take each other for lost. They never wait until the deadline, and a
 * mesh never joins other ranks than it says. A "lost" rank in this test is alive and makes no
 * call. */
#include "blocked.h"

static dm_world *sync_world;
static int32_t me;
static const char *const kNames[] = {"dp", "tp"};

static dm_mesh *made(int32_t dp, int32_t tp, uint32_t flags, const int32_t *ranks)
{
  dm_mesh *mesh = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {dp, tp};
  options.flags = flags;
  options.ranks = ranks;
  options.num_ranks = ranks == NULL ? 0 : (size_t)(dp * tp);
  REQUIRE(dm_init("cpu", shape, 2, kNames, &options, &mesh));
  return mesh;
}

/* Checks that each communicator of the mesh joins the ranks that the mesh says. */
static void holds(const dm_mesh *mesh, const char *expected)
{
  CHECK(strcmp(describe(mesh), expected) == 0);
  for (size_t index = 0; index < dm_ndim(mesh); ++index) {
    const char *name = dm_dim_name(mesh, index);
    int32_t group[6], gathered[6];
    size_t length = 0;
    OK(dm_group_ranks(mesh, name, group, 6, &length));
    OK(dm_all_gather(mesh, name, &me, gathered, 1, DM_INT32, NULL));
    CHECK(memcmp(group, gathered, length * sizeof *group) == 0);
  }
}

static void together(void) { REQUIRE(dm_world_barrier(sync_world, 0)); }

/* Two halves that take each other for lost go on apart, each with its own ranks, in later calls
 * too. */
static void halves(void)
{
  const int32_t upper[] = {3, 4, 5}, lower[] = {0, 1, 2};
  for (int attempt = 0; attempt < 5; ++attempt) {
    dm_mesh *mesh = made(2, 3, DM_INIT_LAZY, NULL), *half = NULL, *flat = NULL;
    REQUIRE(dm_shrink(mesh, "dp", me < 3 ? upper : lower, 3, NULL, &half));
    holds(half, "DeviceMesh((dp=1, tp=3), 'cpu', stride=((), 1))");
    REQUIRE(dm_flatten(half, "flat", NULL, &flat));
    holds(flat, "DeviceMesh((flat=3), 'cpu', stride=(1,))");
    dm_free(flat);
    dm_free(half);
    dm_free(mesh);
    together();
  }
}

/* Default names stay with their dimensions when a view transposes them. */
static void unnamed(void)
{
  dm_mesh *mesh = NULL, *turned = NULL, *left = NULL;
  const char *names[] = {"dim_1", "dim_0"};
  const int32_t shape[] = {3, 2};
  const int32_t lost[] = {5};
  REQUIRE(dm_init("cpu", shape, 2, NULL, NULL, &mesh));
  REQUIRE(dm_slice(mesh, names, 2, &turned));
  if (me != 5) {
    REQUIRE(dm_shrink(turned, "dim_0", lost, 1, NULL, &left));
    int32_t size = 0;
    OK(dm_size(left, "dim_1", &size));
    CHECK(size == 2);
    if (me < 4) holds(left, "DeviceMesh((dim_1=2, dim_0=2), 'cpu', stride=(2, 1))");
  } else {
    OK(dm_abort(mesh)); /* otherwise a later mesh over these ranks would share its communicators on this rank alone */
  }
  dm_free(left);
  dm_free(turned);
  dm_free(mesh);
  together();
}

static dm_mesh *ended, *left;

static dm_status shrink(void *none)
{
  const int32_t lost[] = {5};
  (void)none;
  return dm_shrink(ended, "dp", lost, 1, NULL, &left);
}

/* Some ranks have aborted the mesh before. The first dm_shrink succeeds nevertheless. */
static void aborted_before(void)
{
  ended = made(3, 2, 0, NULL);
  if (me == 0 || me == 3) OK(dm_abort(ended));
  const double began = seconds_now();
  if (me != 5) {
    REQUIRE(shrink(NULL));
    if (me < 4) holds(left, "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))");
  } else {
    OK(dm_abort(ended));
  }
  CHECK(seconds_now() - began < 10);
  dm_free(left);
  dm_free(ended);
  left = NULL;
  together();
}

/* Another thread aborts the mesh while it is being shrunk, as an error handler may. All ranks
 * still get the new mesh. */
static void aborted_meanwhile(void)
{
  ended = made(3, 2, 0, NULL);
  if (me == 0) {
    blocked one;
    start_blocked(&one, shrink, NULL);
    OK(dm_abort(ended));
    together();
    join_blocked(&one);
    CHECK(one.status == DM_STATUS_OK);
  } else {
    together();
    OK(me == 5 ? dm_abort(ended) : shrink(NULL));
  }
  if (me < 4 && left != NULL) holds(left, "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))");
  int32_t count = 0;
  OK(dm_submesh_count(ended, kNames, 1, &count)); /* a question, which an ended mesh answers too */
  CHECK(count == 2);
  dm_mesh *part = NULL;
  FAILS(DM_STATUS_ABORTED, me == 5 ? "dm_abort" : "dm_shrink", dm_slice(ended, kNames, 1, &part));
  dm_free(left);
  dm_free(ended);
  left = NULL;
  together();
}

/* An earlier mesh over the surviving ranks has ended on one of them, so this rank cannot share its
 * communicators. */
static void ended_on_one(void)
{
  const int32_t four[] = {0, 1, 2, 3}, lost[] = {4, 5};
  dm_mesh *mesh = made(3, 2, 0, NULL), *earlier = made(2, 2, 0, four), *again = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {2, 2};
  if (me == 0) OK(dm_abort(earlier));
  const double began = seconds_now();
  options.ranks = four;
  options.num_ranks = 4;
  REQUIRE(dm_init("cpu", shape, 2, (const char *const *)kNames, &options, &again));
  if (me < 4) holds(again, "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))");
  OK(dm_abort(again));
  dm_free(again);
  if (me < 4) {
    REQUIRE(dm_shrink(mesh, "dp", lost, 2, NULL, &left));
    holds(left, "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))");
  } else {
    OK(dm_abort(mesh));
  }
  CHECK(seconds_now() - began < 10);
  dm_free(left);
  dm_free(earlier);
  dm_free(mesh);
  left = NULL;
  together();
}

/* Inside a group a library would queue the making of communicators, and dm_shrink would wait for a
 * group end that never comes. */
static void in_a_group(void)
{
  dm_mesh *mesh = made(3, 2, 0, NULL), *other = NULL, *range = NULL;
  const int32_t shape[] = {2, 3};
  int32_t sum = 0;
  OK(dm_group_start(mesh));
  OK(dm_all_reduce(mesh, "dp", &me, &sum, 1, DM_INT32, DM_SUM, NULL));
  REQUIRE(dm_init("cpu", shape, 2, (const char *const *)kNames, NULL, &other));
  REQUIRE(dm_slice_range(mesh, "dp", 0, 2, 1, NULL, &range));
  CHECK(sum == 0);
  OK(dm_group_end(mesh));
  CHECK(sum == 6 + 3 * (me % 2));
  holds(other, "DeviceMesh((dp=2, tp=3), 'cpu', stride=(3, 1))");
  if (me < 4) holds(range, "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))");
  dm_free(range);
  dm_free(other);
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(mesh);
  together();
}

int main(void)
{
  REQUIRE(dm_world_init("cpu", NULL, &sync_world));
  REQUIRE(dm_world_rank(sync_world, &me));
  in_a_group();
  halves();
  unnamed();
  aborted_before();
  aborted_meanwhile();
  ended_on_one();
  dm_world_free(sync_world);
  return finish();
}
