/* ranks: 8 */
/* Ranges of a dimension on (pp=4, tp=2): who is in them, their communicators, what they share,
 * views and ranges of them, and their end. */
#include "check.h"

static ncclComm_t comm_of(const dm_mesh *mesh, const char *dim)
{
  ncclComm_t comm = NULL;
  REQUIRE(dm_get_comm(mesh, dim, &comm));
  return comm;
}

static dm_mesh *range_of(const dm_mesh *mesh, const char *dim, size_t start, size_t len, size_t step)
{
  dm_mesh *range = NULL;
  REQUIRE(dm_slice_range(mesh, dim, start, len, step, NULL, &range));
  return range;
}

static dm_mesh *pipeline(uint32_t flags)
{
  dm_mesh *mesh = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const char *names[] = {"pp", "tp"};
  const int32_t shape[] = {4, 2};
  options.flags = flags;
  options.timeout_ms = 60000;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  return mesh;
}

/* Checks that the view has these ranks. On a rank in the view it also checks that every
 * communicator joins the rank's group in the order of coordinates. */
static void holds(const dm_mesh *view, const int32_t *expected, size_t count)
{
  int32_t ranks[8], mine = rank_of(view), local = -1;
  size_t length = 0;
  bool member = false;
  OK(dm_ranks(view, ranks, 8, &length));
  CHECK(length == count && memcmp(ranks, expected, count * sizeof *expected) == 0);
  for (size_t at = 0; at < count; ++at) member |= expected[at] == mine;
  for (size_t index = 0; index < dm_ndim(view); ++index) {
    const char *name = dm_dim_name(view, index);
    ncclComm_t comm = NULL;
    if (!member) {
      FAILS(DM_STATUS_NOT_MEMBER, "is not in", dm_get_comm(view, name, &comm));
      GIVES(DM_STATUS_NOT_MEMBER, dm_get_local_rank(view, name, &local));
      continue;
    }
    int32_t group[8], gathered[8];
    OK(dm_group_ranks(view, name, group, 8, &length));
    OK(dm_get_local_rank(view, name, &local));
    CHECK(group[local] == mine);
    OK(dm_all_gather(view, name, &mine, gathered, 1, DM_INT32, NULL));
    CHECK(memcmp(group, gathered, length * sizeof *group) == 0);
  }
}

static void stages(const dm_mesh *mesh)
{
  const int32_t middle[] = {2, 3, 4, 5}, even[] = {0, 1, 4, 5}, rank = rank_of(mesh);
  const bool inside = rank >= 2 && rank < 6;
  dm_mesh *range = range_of(mesh, "pp", 1, 2, 1), *again = range_of(mesh, "pp", 1, 2, 1), *both = NULL;
  holds(range, middle, 4);
  CHECK(strcmp(describe(range), "DeviceMesh((pp=2, tp=2), 'cpu', stride=(2, 1))") == 0);
  if (inside) {
    int32_t at = -1;
    CHECK(comm_of(range, "tp") == comm_of(mesh, "tp"));
    CHECK(comm_of(range, "pp") != comm_of(mesh, "pp"));
    CHECK(comm_of(range, "pp") == comm_of(again, "pp"));
    OK(dm_neighbor(range, "pp", 1, false, &at));
    CHECK(at == (rank < 4 ? 1 : -1));
    /* This call is collective over the range alone. The other ranks do not make it. */
    REQUIRE(dm_flatten(range, "both", NULL, &both));
    holds(both, middle, 4);
    int32_t count = 0;
    const char *tp[] = {"tp"};
    OK(dm_submesh_count(range, tp, 1, &count));
    CHECK(count == 2);
  } else {
    FAILS(DM_STATUS_NOT_MEMBER, "is not in", dm_flatten(range, "both", NULL, &both));
  }
  int32_t groups[8];
  size_t length = 0;
  const int32_t expected[] = {2, 4, 3, 5};
  OK(dm_replica_groups(range, "pp", groups, 8, &length));
  CHECK(length == 4 && memcmp(groups, expected, sizeof expected) == 0);
  dm_mesh *root = NULL;
  bool equal = false;
  OK(dm_root(range, &root));
  OK(dm_equal(root, mesh, &equal));
  CHECK(equal);
  dm_mesh *joined = NULL, *tp = slice1(mesh, "tp");
  const dm_mesh *pair[] = {range, tp};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "range", dm_concatenate(pair, 2, &joined));

  dm_mesh *steps = range_of(mesh, "pp", 0, 2, 2);
  holds(steps, even, 4);
  dm_free(tp);
  dm_free(root);
  dm_free(both);
  dm_free(steps);
  dm_free(again);
  dm_free(range);
}

/* Ranges of a view and of a range, with one index and with all indices. */
static void further(const dm_mesh *mesh)
{
  const int32_t rank = rank_of(mesh);
  const int32_t column[] = {rank % 2, 2 + rank % 2, 4 + rank % 2}, last[] = {4, 5}, all[] = {0, 1, 2, 3, 4, 5, 6, 7};
  dm_mesh *pp = slice1(mesh, "pp"), *three = range_of(pp, NULL, 0, 3, 1);
  holds(three, column, 3);
  dm_mesh *whole = range_of(mesh, "pp", 0, 4, 1);
  holds(whole, all, 8);
  CHECK(comm_of(whole, "pp") == comm_of(mesh, "pp"));
  dm_mesh *outer = range_of(mesh, "pp", 1, 3, 1), *inner = NULL;
  if (rank >= 2) {
    REQUIRE(dm_slice_range(outer, "pp", 1, 1, 1, NULL, &inner)); /* stage 2 of 4 */
    holds(inner, last, 2);
    dm_free(inner);
  } else {
    FAILS(DM_STATUS_NOT_MEMBER, "is not in", dm_slice_range(outer, "pp", 1, 1, 1, NULL, &inner));
  }
  dm_free(outer);
  dm_free(whole);
  dm_free(three);
  dm_free(pp);
}

/* The range knows a flattened dimension that does not contain the cut dimension, also one that was
 * made after the range. */
static void names(void)
{
  dm_mesh *mesh = NULL, *pair = NULL, *early = NULL, *late = NULL, *split = NULL, *dt = NULL;
  const char *dims[] = {"dp", "pp", "tp"}, *outer[] = {"dp", "tp"};
  const int32_t shape[] = {2, 2, 2};
  REQUIRE(dm_init("cpu", shape, 3, dims, NULL, &mesh));
  REQUIRE(dm_slice(mesh, outer, 2, &pair));
  REQUIRE(dm_flatten(pair, "early", NULL, &early));
  dm_mesh *range = range_of(mesh, "pp", 1, 1, 1);
  REQUIRE(dm_flatten(pair, "late", NULL, &late));
  const bool inside = rank_of(mesh) / 2 % 2 == 1;
  if (inside) {
    const int32_t ranks[] = {2, 3, 6, 7};
    const char *flat[] = {"early"};
    /* Ranks 2 and 3 were outside a range of one index earlier. */
    holds(range, ranks, 4);
    REQUIRE(dm_slice(range, flat, 1, &split));
    holds(split, ranks, 4);
    CHECK(comm_of(split, NULL) == comm_of(early, NULL));
    CHECK(comm_of(range, "late") == comm_of(late, NULL));
    /* A communicator that the range makes over the same ranks is shared as well. */
    dm_mesh *view = NULL;
    REQUIRE(dm_slice(range, outer, 2, &view));
    REQUIRE(dm_flatten(view, "own", NULL, &dt));
    holds(dt, ranks, 4);
    CHECK(comm_of(dt, NULL) == comm_of(early, NULL));
    dm_free(view);
  }
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(dt);
  dm_free(split);
  dm_free(range);
  dm_free(late);
  dm_free(early);
  dm_free(pair);
  dm_free(mesh);
}

/* A refused call says why, the other ranks are told, and the next call meets. */
static void refused(const dm_mesh *mesh)
{
  dm_mesh *range = NULL;
  if (rank_of(mesh) == 3) {
    FAILS(DM_STATUS_INVALID_ARGUMENT, "0 indices", dm_slice_range(mesh, "pp", 0, 0, 1, NULL, &range));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "steps of 0", dm_slice_range(mesh, "pp", 0, 2, 0, NULL, &range));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "end at 4", dm_slice_range(mesh, "pp", 2, 3, 1, NULL, &range));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "indices 0 to 3", dm_slice_range(mesh, "pp", INT32_MAX, 2, INT32_MAX, NULL, &range));
    FAILS(DM_STATUS_NOT_FOUND, "xx", dm_slice_range(mesh, "xx", 0, 1, 1, NULL, &range));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "2 dimensions", dm_slice_range(mesh, NULL, 0, 1, 1, NULL, &range));
    GIVES(DM_STATUS_INVALID_ARGUMENT, dm_slice_range(mesh, "pp", 0, 1, 1, NULL, NULL));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_slice_range(NULL, "pp", 0, 1, 1, NULL, &range));
    CHECK(range == NULL);
  } else {
    for (int call = 0; call < 7; ++call)
      FAILS(call == 4 ? DM_STATUS_NOT_FOUND : DM_STATUS_INVALID_ARGUMENT, "rank 3 refused its own dm_slice_range as call ",
            dm_slice_range(mesh, "pp", 0, 3, 1, NULL, &range));
  }
  range = range_of(mesh, "pp", 0, 3, 1);
  dm_free(range);
  range = NULL;
  /* Ranks ask for different ranges. All are told which rank asked for what, and nothing is left
   * behind. */
  const size_t start = rank_of(mesh) == 5 ? 2 : 1;
  FAILS(DM_STATUS_MISMATCH, "start=2", dm_slice_range(mesh, "pp", start, 2, 1, NULL, &range));
  CHECK(range == NULL && strstr(dm_last_error(), "start=1") != NULL && strstr(dm_last_error(), "5") != NULL);
}

static long resident_kb(void)
{
  long kb = -1;
  char line[128];
  FILE *status = fopen("/proc/self/status", "r");
  while (status != NULL && fgets(line, sizeof line, status) != NULL)
    if (sscanf(line, "VmRSS: %ld", &kb) == 1) break;
  if (status != NULL) fclose(status);
  return kb;
}

/* Making one range again gives the existing range, so a loop that does so does not use more
 * memory. */
static void over_and_over(const dm_mesh *mesh)
{
  long before = 0;
  for (int round = 0; round < 700; ++round) {
    if (round == 100) before = resident_kb();
    dm_free(range_of(mesh, "pp", 1, 2, 1));
  }
  const long grown = resident_kb() - before;
  if (grown >= 400) fprintf(stderr, "600 ranges took %ld KiB\n", grown);
  /* Sanitizers keep freed memory for a while. */
  CHECK(before > 0 && (grown < 400 || getenv("DM_TEST_SLOWNESS") != NULL));
}

int main(void)
{
  dm_mesh *mesh = pipeline(0), *other = pipeline(DM_INIT_LAZY);
  stages(mesh);
  further(mesh);
  stages(other);
  further(other);
  names();
  refused(mesh);
  over_and_over(mesh);
  /* A range ends with its root: finalized through any view of it, by the ranks outside the range
   * too. */
  dm_mesh *range = range_of(mesh, "pp", 1, 2, 1), *late = NULL;
  REQUIRE(dm_finalize(range, NULL));
  FAILS(DM_STATUS_ABORTED, "dm_finalize", dm_slice_range(mesh, "pp", 1, 2, 1, NULL, &late));
  ncclComm_t comm = NULL;
  GIVES(DM_STATUS_ABORTED, dm_get_comm(range, "pp", &comm));
  dm_free(range);
  /* A range also ends when its root is aborted. */
  range = range_of(other, "pp", 1, 2, 1);
  REQUIRE(dm_abort(range));
  GIVES(DM_STATUS_ABORTED, dm_get_comm(range, "pp", &comm));
  GIVES(DM_STATUS_ABORTED, dm_get_comm(other, "tp", &comm));
  dm_free(range);
  dm_free(other);
  dm_free(mesh);
  return finish();
}
