/* ranks: 2 4 */
/* Communicators that have failed are not shared again. After a mismatch and after a timeout a new
 * mesh over the same ranks works, also where a rank has not noticed the failure. Every mesh with
 * the failed communicator says that it failed earlier, and in which call. Hundreds of rounds leave
 * nothing behind. */
#include "check.h"

#include <dirent.h>

static dm_world *world;
static int32_t rank, ranks;
static const char *NAMES[] = {"dp", "tp"};

/* dp has two ranks, which are `ranks / 2` apart; tp has the others. */
static dm_mesh *mesh_with(int64_t timeout_ms)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {2, ranks / 2};
  options.world = world, options.timeout_ms = timeout_ms;
  return made_in_time("cpu", shape, 2, NAMES, &options);
}

/* The sum over the group, which every rank enters with its number and 1. */
#define sums(mesh, name) sums_at(__LINE__, mesh, name)
static void sums_at(int line, const dm_mesh *mesh, const char *name)
{
  int32_t group[4], sum[2] = {rank, 1}, expected[2] = {0, 0};
  size_t length = 0;
  const dm_mesh *view = slice1(mesh, name);
  REQUIRE(dm_ranks(view, group, 4, &length));
  for (size_t at = 0; at < length; ++at) expected[0] += group[at], ++expected[1];
  OK(dm_all_reduce(mesh, name, sum, sum, 2, DM_INT32, DM_SUM, NULL));
  if (sum[0] != expected[0] || sum[1] != expected[1]) {
    ++failures;
    fprintf(stderr, "line %d, rank %d: the sums along %s are %d and %d, expected %d and %d\n", line, rank, name, sum[0],
            sum[1], expected[0], expected[1]);
  }
  dm_free((dm_mesh *)view);
}

/* Ranks 0 and ranks / 2 disagree. The other ranks take no part and notice nothing. */
static void disagree(const dm_mesh *mesh)
{
  float buffer[2] = {0};
  if (rank % (ranks / 2) == 0)
    FAILS(DM_STATUS_MISMATCH, "the ranks make different calls",
          dm_all_reduce(mesh, "dp", buffer, buffer, rank == 0 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL));
}

static int in_failed_group(void) { return rank % (ranks / 2) == 0; }

/* Checks the errors of another mesh that shares the failed communicator. */
static void failed_earlier(dm_status status, const dm_mesh *mesh)
{
  float buffer[2] = {0};
  ncclComm_t comm = NULL;
  if (!in_failed_group()) return;
  FAILS(status, "failed earlier", dm_all_reduce(mesh, "dp", buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL));
  CHECK(strncmp(dm_last_error(), "dm_all_reduce: ", 15) == 0);
  CHECK(strstr(dm_last_error(), "ncclAllReduce(") != NULL && strstr(dm_last_error(), "make the mesh anew") != NULL);
  FAILS(status, "failed earlier", dm_broadcast(mesh, "dp", buffer, buffer, 2, DM_FLOAT32, 0, NULL));
  CHECK(strncmp(dm_last_error(), "dm_broadcast: ", 14) == 0);
  FAILS(status, "ncclAllReduce(", dm_check(mesh, "dp"));
  OK(dm_get_comm(mesh, "dp", &comm)); /* the raw handle is still given out, for the library's own questions */
}

static void after_a_mismatch(void)
{
  dm_mesh *first = mesh_with(0), *shares = mesh_with(0);
  ncclComm_t a = NULL, b = NULL;
  OK(dm_get_comm(first, "dp", &a));
  OK(dm_get_comm(shares, "dp", &b));
  CHECK(a == b);
  disagree(first);
  OK(dm_world_barrier(world, 0));
  failed_earlier(DM_STATUS_MISMATCH, shares);

  dm_mesh *second = mesh_with(0), *third = mesh_with(0);
  sums(second, "dp");
  sums(second, "tp");
  sums(third, "dp");
  if (in_failed_group()) {
    OK(dm_get_comm(second, "dp", &b));
    CHECK(a != b);
    OK(dm_get_comm(third, "dp", &a));
    CHECK(a == b); /* a communicator that works is still shared */
  }
  sums(shares, "tp"); /* the other dimension works */

  /* A mesh with a failed dimension can make further dimensions, and can make the failed one
     anew. */
  dm_mesh *flat = NULL, *other = NULL;
  const int32_t sizes[] = {2, ranks / 2};
  const char *names[] = {"outer", "inner"};
  OK(dm_flatten(shares, "all", NULL, &flat));
  sums(flat, "all");
  OK(dm_reshape(shares, sizes, 2, names, NULL, &other));
  sums(other, "outer");
  dm_free(other);

  failed_earlier(DM_STATUS_MISMATCH, first);
  dm_free(flat);
  dm_free(first); /* not dm_abort, which would also end tp, which other meshes share */
  GIVES(DM_STATUS_MISMATCH, dm_finalize(shares, NULL)); /* on all ranks, at once, with the reason */
  CHECK(strstr(dm_last_error(), "failed earlier") != NULL);
  GIVES(DM_STATUS_ABORTED, dm_finalize(shares, NULL));
  dm_free(shares);
  sums(second, "dp");
  sums(third, "tp");
  OK(dm_finalize(second, NULL));
  sums(third, "dp");
  OK(dm_finalize(third, NULL));
  dm_free(second);
  dm_free(third);
}

/* The failed dimension can have the communicator over all ranks, from which the others are
   split. */
static void after_a_failure_of_all(void)
{
  dm_mesh *beside = mesh_with(0), *first = mesh_with(0), *flat = NULL, *again = NULL;
  float buffer[2] = {0};
  OK(dm_flatten(first, "all", NULL, &flat));
  FAILS(DM_STATUS_MISMATCH, "rank 0 calls", dm_all_reduce(flat, NULL, buffer, buffer, rank == 0 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL));
  dm_mesh *second = mesh_with(0);
  sums(second, "dp");
  OK(dm_flatten(second, "everything", NULL, &again));
  sums(again, "everything");
  dm_free(again);
  OK(dm_flatten(first, "all", NULL, &again)); /* this dimension exists, so the call is local and makes nothing */
  FAILS(DM_STATUS_MISMATCH, "failed earlier", dm_all_reduce(again, NULL, buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL));
  dm_free(again);
  OK(dm_flatten(first, "all2", NULL, &again)); /* a new name needs a call of all ranks, which makes the communicator anew */
  sums(again, "all2");
  dm_free(again);
  dm_free(flat);
  dm_free(first);
  if (ranks > 2) {
    sums(beside, "dp"); /* this communicator was split from the failed one, and works */
    OK(dm_finalize(beside, NULL));
  }
  dm_free(beside);
  OK(dm_finalize(second, NULL));
  dm_free(second);
}

/* A rank comes so late that the others have given up. Its next call makes a new mesh with them. */
static void after_a_timeout(void)
{
  dm_mesh *hasty = mesh_with(2000), *shares = mesh_with(0);
  float buffer[2] = {0};
  char text[64];
  snprintf(text, sizeof text, "rank %d", ranks / 2);
  if (rank == 0) {
    FAILS(DM_STATUS_TIMEOUT, "did not come within 2000 ms", dm_all_reduce(hasty, "dp", buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL));
    CHECK(strstr(dm_last_error(), text) != NULL);
  }
  dm_mesh *second = mesh_with(0);
  sums(second, "dp");
  sums(second, "tp");
  failed_earlier(DM_STATUS_TIMEOUT, shares);
  failed_earlier(DM_STATUS_TIMEOUT, hasty);
  dm_free(hasty);
  dm_free(shares);
  OK(dm_finalize(second, NULL));
  dm_free(second);
}

/* One rank ends a mesh whose communicators another one shares. */
static void after_an_abort(void)
{
  dm_mesh *first = mesh_with(0), *shares = mesh_with(0);
  float buffer[2] = {0};
  if (rank == 0) OK(dm_abort(first));
  OK(dm_world_barrier(world, 0));
  if (rank == 0) FAILS(DM_STATUS_ABORTED, "make the mesh anew", dm_all_reduce(shares, "dp", buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL));
  dm_mesh *second = mesh_with(0);
  sums(second, "dp");
  sums(second, "tp");
  if (rank == ranks / 2) FAILS(DM_STATUS_PEER_LOST, "rank 0 ", dm_all_reduce(shares, "dp", buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_abort(shares));
  OK(dm_abort(first));
  dm_free(first);
  dm_free(shares);
  OK(dm_finalize(second, NULL));
  dm_free(second);
}

/* The failed communicator belongs to a lazy dimension, to a range, or to a second factorisation. */
static void of_every_kind(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *lazy[2], *wide = NULL, *range[2], *other[2];
  float buffer[2] = {0};
  const int32_t shape[] = {2, ranks / 2}, row = ranks;
  options.world = world, options.flags = DM_INIT_LAZY;
  for (int attempt = 0; attempt < 2; ++attempt) {
    REQUIRE(dm_init("cpu", shape, 2, NAMES, &options, &lazy[attempt]));
    if (attempt == 0) disagree(lazy[0]);
  }
  sums(lazy[1], "dp");
  sums(lazy[1], "tp");
  options.flags = 0;
  REQUIRE(dm_init("cpu", &row, 1, NAMES, &options, &wide));
  const int32_t sizes[] = {ranks / 2, 2};
  const char *names[] = {"a", "b"};
  const int at = rank % 2; /* with two ranks the range is the whole dimension, which keeps its communicator */
  for (int attempt = 0; attempt < 2; ++attempt) {
    OK(dm_slice_range(wide, "dp", 0, 2, 1, NULL, &range[attempt]));
    OK(dm_reshape(wide, sizes, 2, names, NULL, &other[attempt]));
    if (attempt == 1) break;
    if (rank < 2)
      FAILS(DM_STATUS_MISMATCH, "different calls",
            dm_all_reduce(range[0], NULL, buffer, buffer, rank == 0 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL));
    if (rank >= ranks - 2 && ranks > 2)
      FAILS(DM_STATUS_MISMATCH, "different calls", dm_all_reduce(other[0], "b", buffer, buffer, at == 0 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL));
  }
  if (rank < 2 && ranks > 2) sums(range[1], "dp");
  sums(other[1], "b");
  sums(other[1], "a");
  for (int attempt = 0; attempt < 2; ++attempt) {
    dm_free(range[attempt]);
    dm_free(other[attempt]);
    dm_free(lazy[attempt]);
  }
  OK(dm_abort(wide));
  dm_free(wide);
}

/* A mesh over fewer ranks than the world. */
static void of_some_ranks(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t two = 2;
  float buffer[2] = {0};
  options.world = world;
  for (int attempt = 0; attempt < 3; ++attempt) {
    dm_mesh *pair = NULL;
    REQUIRE(dm_init("cpu", &two, 1, NAMES, &options, &pair));
    if (rank < 2) {
      sums(pair, "dp");
      FAILS(DM_STATUS_MISMATCH, "different calls", dm_all_reduce(pair, NULL, buffer, buffer, rank == 0 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL));
    }
    dm_free(pair);
  }
}

static int mappings(void)
{
  char line[512];
  int count = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps != NULL && fgets(line, sizeof line, maps) != NULL) count += strstr(line, "memfd:hostccl") != NULL;
  if (maps != NULL) fclose(maps);
  return count;
}

static int descriptors(void)
{
  int count = 0;
  DIR *open_files = opendir("/proc/self/fd");
  while (open_files != NULL && readdir(open_files) != NULL) ++count;
  if (open_files != NULL) closedir(open_files);
  return count;
}

/* Communicators that replace failed ones do not pile up. The last ones may still be ending, so what
 * is open differs from round to round, and the most of the first 12 rounds is compared. */
static void leaves_nothing(int rounds)
{
  int before = 0, open_before = 0;
  for (int round = 0; round < rounds; ++round) {
    dm_mesh *mesh = mesh_with(0);
    sums(mesh, "dp");
    disagree(mesh);
    if (round % 3 == 0) GIVES(DM_STATUS_MISMATCH, dm_finalize(mesh, NULL));
    if (round % 3 == 1) OK(dm_abort(mesh));
    dm_free(mesh);
    if (round < 12) {
      const int mapped = mappings(), open_now = descriptors();
      before = mapped > before ? mapped : before;
      open_before = open_now > open_before ? open_now : open_before;
    }
  }
  /* Only ranks whose communicator works keep it. Its mesh was freed and not ended, so its raw
   * pointer may still be in use. */
  const int kept = in_failed_group() ? 0 : rounds / 3 + 1;
  const int after = mappings(), open_after = descriptors();
  if (after > before + kept + 2 || open_after > open_before + 4) {
    ++failures;
    fprintf(stderr, "rank %d: %d mappings and %d descriptors at most in 12 rounds, %d and %d after %d\n", rank, before,
            open_before, after, open_after, rounds);
  }
}

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  join.timeout_ms = 60000;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_rank(world, &rank));
  REQUIRE(dm_world_size(world, &ranks));
  after_a_mismatch();
  after_a_failure_of_all();
  after_a_timeout();
  after_an_abort();
  of_every_kind();
  of_some_ranks();
  leaves_nothing(150);
  OK(dm_world_barrier(world, 0));
  dm_world_free(world);
  return finish();
}
