/* ranks: 8 */
/* A job goes on after ranks have died: (dp=4, tp=2) loses the replicas that hold them, several
 * times, while calls are blocked. */
#include "check.h"

#include <pthread.h>
#include <unistd.h>

static void holds(const dm_mesh *mesh, const int32_t *expected, size_t count)
{
  int32_t ranks[8], mine = rank_of(mesh);
  size_t length = 0;
  OK(dm_ranks(mesh, ranks, 8, &length));
  CHECK(length == count && memcmp(ranks, expected, count * sizeof *expected) == 0);
  bool member = false;
  for (size_t at = 0; at < count; ++at) member |= expected[at] == mine;
  for (size_t index = 0; index < dm_ndim(mesh); ++index) {
    const char *name = dm_dim_name(mesh, index);
    int32_t group[8], gathered[8];
    if (!member) {
      GIVES(DM_STATUS_NOT_MEMBER, dm_group_ranks(mesh, name, group, 8, &length));
      continue;
    }
    OK(dm_group_ranks(mesh, name, group, 8, &length));
    OK(dm_all_gather(mesh, name, &mine, gathered, 1, DM_INT32, NULL));
    CHECK(memcmp(group, gathered, length * sizeof *group) == 0);
  }
}

static dm_mesh *replicas(uint32_t flags)
{
  dm_mesh *mesh = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const char *names[] = {"dp", "tp"};
  const int32_t shape[] = {4, 2};
  options.flags = flags;
  options.timeout_ms = 60000;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  return mesh;
}

/* A call that no other rank makes. It blocks until the mesh ends. */
static void *blocked(void *mesh)
{
  int32_t value = 0;
  GIVES(DM_STATUS_ABORTED, dm_recv((const dm_mesh *)mesh, "tp", &value, 1, DM_INT32, 1, NULL));
  return NULL;
}

static void refused(const dm_mesh *mesh)
{
  dm_mesh *none = NULL, *tp = slice1(mesh, "tp");
  const int32_t me = rank_of(mesh), one[] = {5}, outside[] = {8}, self[] = {me}, all[] = {0, 2, 4, 6, 1, 3, 5, 7};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 8", dm_shrink(mesh, "dp", outside, 1, NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "is this one", dm_shrink(mesh, "dp", self, 1, NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "num_lost is 9", dm_shrink(mesh, "dp", all, 9, NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "lost_ranks is NULL", dm_shrink(mesh, "dp", NULL, 1, NULL, &none));
  FAILS(DM_STATUS_NOT_FOUND, "pp", dm_shrink(mesh, "pp", one, 1, NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "2 dimensions", dm_shrink(mesh, NULL, one, 1, NULL, &none));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "2 of the 8 ranks", dm_shrink(tp, "tp", one, 1, NULL, &none));
  if (me != 4 && me != 5) {
    const int32_t pair[] = {4, 5};
    FAILS(DM_STATUS_INVALID_ARGUMENT, "each index of dimension tp", dm_shrink(mesh, "tp", pair, 2, NULL, &none));
  } else if (me == 4) { /* a refused call counts, so each rank refuses as many */
    FAILS(DM_STATUS_NOT_FOUND, "pp", dm_shrink(mesh, "pp", one, 1, NULL, &none));
  }
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_shrink(mesh, "dp", one, 1, NULL, NULL));
  GIVES(DM_STATUS_INVALID_HANDLE, dm_shrink(NULL, "dp", one, 1, NULL, &none));
  CHECK(none == NULL);
  dm_free(tp);
}

int main(void)
{
  dm_mesh *lazy = replicas(DM_INIT_LAZY), *mesh = replicas(0), *left = NULL, *fewer = NULL, *last = NULL;
  const int32_t me = rank_of(mesh), three[] = {0, 1, 2, 3, 6, 7}, two[] = {0, 1, 2, 3}, first[] = {0, 1};
  const int32_t five[] = {5, 5}, seven[] = {7}, two_and_three[] = {3, 2};
  refused(mesh);
  int32_t sum = 0;
  OK(dm_all_reduce(mesh, "dp", &me, &sum, 1, DM_INT32, DM_SUM, NULL)); /* the refused calls have changed nothing */
  meet(mesh);
  if (me == 5) _exit(0); /* without telling the other ranks */

  if (me % 2 == 1) GIVES(DM_STATUS_PEER_LOST, dm_all_reduce(mesh, "dp", &me, &sum, 1, DM_INT32, DM_SUM, NULL));
  pthread_t thread;
  if (me == 0) {
    CHECK(pthread_create(&thread, NULL, blocked, mesh) == 0);
    usleep(50000); /* most likely the thread waits by now; if not, the outcome is equal */
  }
  REQUIRE(dm_shrink(mesh, "dp", five, me % 2 + 1, NULL, &left));
  if (me == 0) pthread_join(thread, NULL);
  CHECK(strcmp(describe(left), "DeviceMesh((dp=3, tp=2), 'cpu', stride=(2, 1))") == 0);
  holds(left, three, 6);
  ncclComm_t comm = NULL;
  FAILS(DM_STATUS_ABORTED, "dm_shrink", dm_get_comm(mesh, "tp", &comm));
  FAILS(DM_STATUS_ABORTED, "dm_shrink", dm_flatten(mesh, NULL, NULL, &fewer));

  /* A lazy mesh whose communicators are not made yet. */
  dm_mesh *lazily = NULL;
  REQUIRE(dm_shrink(lazy, "dp", five, 1, NULL, &lazily));
  holds(lazily, three, 6);

  if (me == 4) { /* rank 4 was in the replica of rank 5, so it is in no mesh, and no rank waits for it */
    FAILS(DM_STATUS_NOT_MEMBER, "is not in", dm_shrink(left, "dp", seven, 1, NULL, &fewer));
    dm_free(lazily);
    dm_free(left);
    dm_free(lazy);
    dm_free(mesh);
    return finish();
  }
  /* The new mesh works like any other: it can be flattened and shrunk. */
  dm_mesh *flat = NULL;
  REQUIRE(dm_flatten(left, "all", NULL, &flat));
  holds(flat, three, 6);
  dm_free(flat);
  meet(left);
  if (me == 7) _exit(0);

  /* Ranks that name different lost ranks are told which rank named which. Then they agree. */
  const int32_t wrong[] = {6};
  const dm_status differing = dm_shrink(left, "dp", me == 2 ? wrong : seven, 1, NULL, &fewer);
  /* Rank 2 waits for rank 7, which it did not name as lost. When rank 2 calls before rank 0, all
   * ranks are told of that. */
  if (differing == DM_STATUS_PEER_LOST) CHECK(strstr(dm_last_error(), "rank 7 was lost") != NULL);
  else CHECK(differing == DM_STATUS_MISMATCH && strstr(dm_last_error(), "lost=(7)") != NULL);
  CHECK(fewer == NULL && strstr(dm_last_error(), "lost=(6)") != NULL);
  GIVES(DM_STATUS_ABORTED, dm_get_comm(left, "tp", &comm));
  REQUIRE(dm_shrink(left, "dp", seven, 1, NULL, &fewer));
  holds(fewer, two, 4);

  /* The mesh is aborted first, as an error handler does. Another rank is lost too and not named,
   * and the call finds it. */
  if (me != 6) meet(fewer);
  if (me == 2 || me == 3) _exit(0);
  if (me != 6) {
    OK(dm_abort(fewer));
    FAILS(DM_STATUS_PEER_LOST, "rank 3", dm_shrink(fewer, "dp", two_and_three + 1, 1, NULL, &last));
    REQUIRE(dm_shrink(fewer, "dp", two_and_three, 2, NULL, &last));
    holds(last, first, 2);
    REQUIRE(dm_finalize(last, NULL));
    FAILS(DM_STATUS_ABORTED, "dm_finalize", dm_shrink(last, "tp", me == 0 ? first + 1 : first, 1, NULL, &flat));
  }
  dm_free(last);
  dm_free(fewer);
  dm_free(lazily);
  dm_free(left);
  dm_free(lazy);
  dm_free(mesh);
  return finish();
}
