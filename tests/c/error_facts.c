/* ranks: 6 */
/* A failure says as data which ranks it is about, which of them are lost, the dimension, the time
 * and the call: for ranks that disagree, are late, or abort. None of these ranks is lost. */
#include "facts.h"

static dm_world *world;
static int32_t me;
static const int32_t kShape[] = {3, 2};
static const char *const kNames[] = {"dp", "tp"};

static dm_mesh *mesh_of_all(const char *name, int64_t timeout_ms)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {6};
  options.world = world;
  options.timeout_ms = timeout_ms;
  return made_in_time("cpu", shape, 1, &name, &options);
}

static dm_status reduce(const dm_mesh *mesh, size_t count)
{
  float data[8] = {0};
  return dm_all_reduce(mesh, NULL, data, data, count, DM_FLOAT32, DM_SUM, NULL);
}

static void is_about(int32_t rank, const char *dim)
{
  const dm_error_info info = facts();
  CHECK(info.num_ranks == 1 && info.ranks[0] == rank);
  CHECK(info.num_lost == 0 && info.lost_ranks == NULL);
  CHECK(dim == NULL ? info.dim == NULL : info.dim != NULL && strcmp(info.dim, dim) == 0);
}

/* One rank passes another count than the others. */
static void in_the_minority(void)
{
  dm_mesh *mesh = mesh_of_all("count", 0);
  GIVES(DM_STATUS_MISMATCH, reduce(mesh, me == 4 ? 3 : 2));
  is_about(4, "count");
  CHECK(facts().call == -1);
  GIVES(DM_STATUS_MISMATCH, reduce(mesh, 2));
  is_about(4, "count");
  /* A call that is refused here has its dimension, too. */
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_all_reduce(mesh, NULL, NULL, NULL, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(facts().dim != NULL && strcmp(facts().dim, "count") == 0);
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_barrier(mesh, NULL, -1));
  CHECK(facts().dim != NULL && strcmp(facts().dim, "count") == 0);
  OK(dm_abort(mesh));
  dm_free(mesh);
}

/* One rank makes another collective call than the others. */
static void another_call(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *flat = NULL;
  options.world = world;
  REQUIRE(dm_init("cpu", kShape, 2, kNames, &options, &mesh));
  GIVES(DM_STATUS_MISMATCH, dm_flatten(mesh, me == 1 ? "mine" : "ours", NULL, &flat));
  is_about(1, NULL);
  CHECK(facts().call > 0 && facts().waited_seconds >= 0);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* Two meshes have equal names, and the ranks finalize different ones. The message tells them
 * apart. */
static void equal_names(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *meshes[2] = {NULL, NULL};
  const int32_t other[] = {2, 3};
  options.world = world;
  REQUIRE(dm_init("cpu", kShape, 2, kNames, &options, &meshes[0]));
  REQUIRE(dm_init("cpu", other, 2, kNames, &options, &meshes[1]));
  FAILS(DM_STATUS_MISMATCH, "rank 5 called dm_finalize(dp, tp) on the mesh of shape (2, 3)", dm_finalize(meshes[me == 5], NULL));
  CHECK(strstr(dm_last_error(), "rank 0 called it on the mesh of shape (3, 2)") != NULL);
  is_about(5, NULL);
  OK(dm_finalize(meshes[0], NULL));
  OK(dm_finalize(meshes[1], NULL));
  dm_free(meshes[0]);
  dm_free(meshes[1]);
}

/* One rank comes after the deadline of the others, and is told so. The rank that called first tells
 * the others when its time is up, so a rank that a busy machine held up has waited for less. */
static void too_late(void)
{
  bool again = true;
  for (int64_t timeout_ms = 1500; again; timeout_ms *= 3) {
    dm_mesh *mesh = mesh_of_all("late", timeout_ms);
    if (me != 5) GIVES(DM_STATUS_TIMEOUT, reduce(mesh, 2));
    OK(dm_world_barrier(world, 0));
    if (me == 5) FAILS(DM_STATUS_TIMEOUT, "came too late", reduce(mesh, 2));
    const dm_error_info info = facts();
    const bool is_alone = info.num_ranks == 1 && info.ranks[0] == 5 && (me == 5 || info.waited_seconds > 0.1);
    again = on_any_rank(world, !is_alone) && timeout_ms < kLongestScene;
    if (!again) {
      CHECK(me == 5 || info.waited_seconds > 0.1);
      is_about(5, "late");
    }
    OK(dm_abort(mesh));
    dm_free(mesh);
  }
}

/* One rank has aborted its mesh before the others call. It lives. */
static void aborted_before(void)
{
  dm_mesh *mesh = mesh_of_all("aborted", 0);
  if (me == 2) OK(dm_abort(mesh));
  OK(dm_world_barrier(world, 0));
  if (me != 2) {
    int32_t lost[6];
    size_t count = 99;
    GIVES(DM_STATUS_PEER_LOST, reduce(mesh, 2));
    is_about(2, "aborted");
    OK(dm_lost_ranks(mesh, lost, 6, &count));
    CHECK(count == 0);
  }
  OK(dm_world_barrier(world, 0));
  if (me != 2) OK(dm_abort(mesh));
  dm_free(mesh);
}

/* A rank aborts its world. Messages of that rank name the call that did it. */
static void the_right_call(void)
{
  dm_mesh *mesh = mesh_of_all("left", 0);
  OK(dm_world_barrier(world, 0));
  if (me == 3) {
    OK(dm_world_abort(world));
    FAILS(DM_STATUS_ABORTED, "dm_world_abort", reduce(mesh, 2));
    CHECK(facts().num_ranks == 0);
  } else {
    GIVES(DM_STATUS_PEER_LOST, dm_world_barrier(world, 0));
    const dm_error_info info = facts();
    CHECK(info.num_ranks == 1 && info.ranks[0] == 3);
    CHECK(info.num_lost == 1 && info.lost_ranks[0] == 3);
    const int32_t gone = 3;
    int32_t lost[6];
    size_t count = 0;
    GIVES(DM_STATUS_BUFFER_TOO_SMALL, dm_lost_ranks(mesh, NULL, 0, &count));
    /* Other ranks may be done by now, and have left too. */
    CHECK(count >= 1);
    OK(dm_lost_ranks(mesh, lost, 6, &count));
    CHECK(within(&gone, 1, lost, count));
  }
  dm_free(mesh);
}

int main(void)
{
  const dm_world_options options = DM_WORLD_OPTIONS_INIT;
  const dm_error_info none = facts();
  CHECK(none.num_ranks == 0 && none.num_lost == 0 && none.dim == NULL && none.waited_seconds < 0 && none.call == -1);
  REQUIRE(dm_world_init("cpu", &options, &world));
  REQUIRE(dm_world_rank(world, &me));
  in_the_minority();
  another_call();
  equal_names();
  too_late();
  aborted_before();
  the_right_call();
  dm_world_free(world);
  return finish();
}
