/* ranks: 8 */
/* dm_shrink without a list: the ranks that are left agree on who is lost. (dp=4, tp=2) loses ranks
 * that exit, leave by dm_world_abort, or die while the others wait in dm_shrink. */
#include "facts.h"

#include <unistd.h>

static dm_world *world, *other_world;
static int32_t me;
static const char *const kNames[] = {"dp", "tp"};

static dm_mesh *replicas(uint32_t flags, int64_t timeout_ms)
{
  dm_mesh *mesh = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {4, 2};
  options.flags = flags;
  options.timeout_ms = timeout_ms;
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 2, kNames, &options, &mesh));
  return mesh;
}

static dm_mesh *shrunk(const dm_mesh *mesh)
{
  dm_mesh *left = NULL;
  REQUIRE(dm_shrink(mesh, "dp", NULL, 0, NULL, &left));
  return left;
}

/* Checks which ranks a mesh has, and that its communicators join them. */
static void holds(const dm_mesh *mesh, const int32_t *expected, size_t count)
{
  int32_t ranks[8];
  size_t length = 0;
  OK(dm_ranks(mesh, ranks, 8, &length));
  CHECK(same(ranks, length, expected, count));
  for (size_t index = 0; index < 2 && within(&me, 1, expected, count); ++index) {
    int32_t group[8], gathered[8];
    OK(dm_group_ranks(mesh, kNames[index], group, 8, &length));
    OK(dm_all_gather(mesh, kNames[index], &me, gathered, 1, DM_INT32, NULL));
    CHECK(memcmp(group, gathered, length * sizeof *group) == 0);
  }
  if (within(&me, 1, expected, count)) meet(mesh);
}

/* No rank is lost: all ranks are told so. A rank that refuses its own call tells the others. */
static void nobody(void)
{
  dm_mesh *mesh = replicas(0, 0), *none = NULL;
  if (me == 3) FAILS(DM_STATUS_NOT_FOUND, "pp", dm_shrink(mesh, "pp", NULL, 0, NULL, &none));
  else FAILS(DM_STATUS_NOT_FOUND, "rank 3 refused its own dm_shrink", dm_shrink(mesh, "dp", NULL, 0, NULL, &none));
  /* num_lost 0 is no list, whatever the pointer is. */
  FAILS(DM_STATUS_INVALID_STATE, "no rank is lost", dm_shrink(mesh, "dp", me % 2 == 0 ? &me : NULL, 0, NULL, &none));
  CHECK(none == NULL);
  GIVES(DM_STATUS_ABORTED, dm_all_reduce(mesh, "dp", &me, &me, 1, DM_INT32, DM_SUM, NULL));
  dm_free(mesh);
}

/* A rank that comes after the others' deadline is missed, and told that it was late. */
static void late(void)
{
  dm_mesh *mesh = replicas(0, 0), *none = NULL;
  dm_call_options options = DM_CALL_OPTIONS_INIT;
  bool again = true;
  for (options.timeout_ms = 2000; again; options.timeout_ms *= 3) {
    if (me == 6) REQUIRE(dm_world_barrier(other_world, 0));
    GIVES(DM_STATUS_TIMEOUT, dm_shrink(mesh, "dp", NULL, 0, &options, &none));
    const dm_error_info info = facts();
    const bool is_alone = info.num_ranks == 1 && info.ranks[0] == 6;
    CHECK(info.num_lost == 0);
    if (me == 6) CHECK(strstr(dm_last_error(), "came too late") != NULL);
    else REQUIRE(dm_world_barrier(other_world, 0));
    again = on_any_rank(other_world, !is_alone) && options.timeout_ms < kLongestScene;
    CHECK(is_alone || again);
  }
  FAILS(DM_STATUS_INVALID_STATE, "no rank is lost", dm_shrink(mesh, "dp", NULL, 0, NULL, &none));
  dm_free(mesh);
}

int main(void)
{
  const int32_t six[] = {0, 1, 2, 3, 6, 7}, four[] = {0, 1, 2, 3}, eight[] = {0, 1, 2, 3, 4, 5, 6, 7};
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", &options, &world));
  REQUIRE(dm_world_init("cpu", &options, &other_world));
  REQUIRE(dm_world_rank(world, &me));
  nobody();
  late();

  /* Rank 5 is lost. Rank 2 has aborted its mesh, so it is left like the others. Rank 0 comes
     late. */
  dm_mesh *lazy = replicas(DM_INIT_LAZY, 0), *mesh = replicas(0, 45000);
  holds(mesh, eight, 8);
  if (me == 5) _exit(0);
  if (me == 2) OK(dm_abort(mesh));
  if (me == 0) usleep(100000);
  dm_mesh *left = shrunk(mesh), *lazily = shrunk(lazy);
  holds(left, six, 6);
  holds(lazily, six, 6);
  dm_free(mesh);
  dm_free(lazy);
  if (me == 4) { /* it went with rank 5 */
    dm_free(left);
    dm_free(lazily);
    return finish();
  }

  /* Some ranks name the lost rank, and others do not. All are told what the others said. */
  dm_mesh *none = NULL;
  if (me == 6) usleep(100000);
  if (me == 7) _exit(0);
  const int32_t seven[] = {7};
  const dm_status status = me == 1 ? dm_shrink(lazily, "dp", seven, 1, NULL, &none) : dm_shrink(lazily, "dp", NULL, 0, NULL, &none);
  GIVES(DM_STATUS_MISMATCH, status);
  CHECK(strstr(dm_last_error(), "lost=(7)") != NULL && strstr(dm_last_error(), "without a list") != NULL);

  /* Rank 7 is lost, and rank 6 is lost while the others wait for it. Both are left out by one
     call. */
  if (me == 6) { /* it leaves in order, which is a loss too */
    usleep(300000);
    OK(dm_world_abort(world));
    GIVES(DM_STATUS_ABORTED, dm_shrink(left, "dp", NULL, 0, NULL, &none));
    dm_free(left);
    dm_free(lazily);
    return finish();
  }
  dm_mesh *last = shrunk(left);
  holds(last, four, 4);
  REQUIRE(dm_finalize(last, NULL));

  /* Ranks of one replica end one after another. */
  dm_mesh *rest = shrunk(lazily), *one = NULL;
  holds(rest, four, 4);
  if (me == 3) _exit(0);
  if (me == 2) {
    usleep(300000);
    _exit(0);
  }
  OK(dm_shrink(rest, "dp", NULL, 0, NULL, &one));
  const int32_t two[] = {0, 1};
  holds(one, two, 2);
  REQUIRE(dm_finalize(one, NULL));
  dm_free(one);
  dm_free(rest);
  dm_free(last);
  dm_free(left);
  dm_free(lazily);
  return finish();
}
