/* Calls each of the quick functions N times and then 2 N times, for tests/instructions.py to count
 * the processor's instructions: under `valgrind --tool=callgrind --dump-before=mark` there is one
 * dump from each mark() to the next. Prints "name N dump" a line: the counts are in dump and dump
 * + 2 (one-based). */
#include "../check.h"

enum { kMost = 512, kRanks = 1 << 20 };

static dm_world *offline, *alone_world;
static dm_mesh *mesh, *same, *pair, *flat, *alone;
static dm_mesh *given[2 * kMost], *fresh[2 * kMost];
static int32_t *listed;
static const char *const names[] = {"pp", "dp", "cp", "tp"}, *const dp_cp[] = {"dp", "cp"}, *const parts[] = {"outer", "inner"};
static const int32_t shape[] = {64, 32, 64, 8}, ones[] = {1, 1, 1, 1}, sizes[] = {64, 32};
static int marks;

__attribute__((noinline)) void mark(void)
{
  __asm__ volatile("" ::: "memory");
  ++marks;
}

static void init_as(const int32_t *ranks, dm_mesh **out)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = offline;
  options.ranks = ranks;
  options.num_ranks = ranks == NULL ? 0 : 64 * 32 * 64 * 8;
  REQUIRE(dm_init("cpu", shape, 4, names, &options, out));
}

/* The calls that are counted, and what is made before them and freed after them. */
static void get_comm(int i) { ncclComm_t comm; (void)i; REQUIRE(dm_get_comm(alone, "cp", &comm)); }
static void get_local_rank(int i) { int32_t rank; (void)i; REQUIRE(dm_get_local_rank(mesh, "cp", &rank)); }
static void get_coordinate(int i) { int32_t at[4]; size_t length; (void)i; REQUIRE(dm_get_coordinate(mesh, at, 4, &length)); }
static void hash(int i) { uint64_t value; (void)i; REQUIRE(dm_hash(mesh, &value)); }
static void equal(int i) { bool value; (void)i; REQUIRE(dm_equal(mesh, same, &value)); }
static void init(int i) { init_as(NULL, &given[i]); }
static void init_ranks(int i) { init_as(listed, &given[i]); }
static void slice(int i) { REQUIRE(dm_slice(mesh, dp_cp, 2, &given[i])); }
static void flatten(int i) { REQUIRE(dm_flatten(fresh[i], NULL, NULL, &given[i])); }
static void unflatten(int i) { REQUIRE(dm_unflatten(flat, "dp_cp", sizes, 2, parts, NULL, &given[i])); }
static void free_one(int i) { dm_free(given[i]); given[i] = NULL; }

/* These functions call the operations on data along a dimension that has this rank alone, so no count
 * has a wait for other ranks. The send and its receive are in one group, because no other rank takes
 * the message. */
static float from[4] = {1, 2, 3, 4}, to[4];
static const size_t four[] = {4};
static void all_reduce(int i) { (void)i; REQUIRE(dm_all_reduce(alone, "cp", from, to, 4, DM_FLOAT32, DM_SUM, NULL)); }
static void reduce(int i) { (void)i; REQUIRE(dm_reduce(alone, "cp", from, to, 4, DM_FLOAT32, DM_SUM, 0, NULL)); }
static void broadcast(int i) { (void)i; REQUIRE(dm_broadcast(alone, "cp", from, to, 4, DM_FLOAT32, 0, NULL)); }
static void all_gather(int i) { (void)i; REQUIRE(dm_all_gather(alone, "cp", from, to, 4, DM_FLOAT32, NULL)); }
static void reduce_scatter(int i) { (void)i; REQUIRE(dm_reduce_scatter(alone, "cp", from, to, 4, DM_FLOAT32, DM_SUM, NULL)); }
static void all_to_all(int i) { (void)i; REQUIRE(dm_all_to_all(alone, "cp", from, to, 4, DM_FLOAT32, NULL)); }
static void all_to_allv(int i) { (void)i; REQUIRE(dm_all_to_allv(alone, "cp", from, four, NULL, to, four, NULL, DM_FLOAT32, NULL)); }
static void all_gatherv(int i) { (void)i; REQUIRE(dm_all_gatherv(alone, "cp", from, to, four, NULL, DM_FLOAT32, NULL)); }
static void reduce_scatterv(int i) { (void)i; REQUIRE(dm_reduce_scatterv(alone, "cp", from, four, NULL, to, DM_FLOAT32, DM_SUM, NULL)); }
static void send_recv(int i)
{
  (void)i;
  REQUIRE(dm_group_start(alone));
  REQUIRE(dm_send(alone, "cp", from, 4, DM_FLOAT32, 0, NULL));
  REQUIRE(dm_recv(alone, "cp", to, 4, DM_FLOAT32, 0, NULL));
  REQUIRE(dm_group_end(alone));
}

/* Each root gets the name for the first time, as in a program. */
static void fresh_pair(int i)
{
  dm_mesh *root = NULL;
  init_as(NULL, &root);
  REQUIRE(dm_slice(root, dp_cp, 2, &fresh[i]));
  dm_free(root);
}

static void clean(int calls)
{
  int32_t rank;
  for (int i = 0; i < calls; ++i) {
    dm_free(given[i]);
    dm_free(fresh[i]);
    given[i] = fresh[i] = NULL;
  }
  /* A lookup also reclaims a little of what was freed. These lookups reclaim all of it, so the
   * counted ones do not. */
  for (int i = 0; i < 40000; ++i) REQUIRE(dm_rank(mesh, &rank));
}

static void count(const char *name, int calls, void (*prepare)(int), void (*call)(int))
{
  int first = 0;
  for (int times = 0; times <= 2; ++times) { /* round 0 is not counted; it makes as many calls as round 2 */
    const int now = times == 1 ? calls : 2 * calls;
    for (int i = 0; prepare != NULL && i < now; ++i) prepare(i);
    mark();
    if (times == 1) first = marks;
    for (int i = 0; i < now; ++i) call(i);
    mark();
    clean(now);
  }
  printf("%s %d %d\n", name, calls, first + 1);
}

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  join.world_size = 1;
  REQUIRE(dm_world_init("cpu", &join, &alone_world));
  options.world = alone_world;
  REQUIRE(dm_init("cpu", ones, 4, names, &options, &alone));
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = kRanks;
  join.rank = 777777;
  REQUIRE(dm_world_init("cpu", &join, &offline));
  init_as(NULL, &mesh);
  init_as(NULL, &same);
  REQUIRE(dm_slice(mesh, dp_cp, 2, &pair));
  REQUIRE(dm_flatten(pair, NULL, NULL, &flat));
  listed = (int32_t *)malloc(kRanks * sizeof *listed);
  if (listed == NULL) return 1;
  for (int i = 0; i < kRanks; ++i) listed[i] = kRanks - 1 - i;

  count("dm_get_comm", kMost, NULL, get_comm);
  count("dm_get_local_rank", kMost, NULL, get_local_rank);
  count("dm_get_coordinate", kMost, NULL, get_coordinate);
  count("dm_hash", kMost, NULL, hash);
  count("dm_equal", kMost, NULL, equal);
  count("dm_init", kMost, NULL, init);
  count("dm_init(ranks)", 1, NULL, init_ranks);
  count("dm_slice", kMost, NULL, slice);
  count("dm_flatten", kMost, fresh_pair, flatten);
  count("dm_unflatten", kMost, NULL, unflatten);
  count("dm_free", kMost, slice, free_one);
  count("dm_all_reduce", kMost, NULL, all_reduce);
  count("dm_reduce", kMost, NULL, reduce);
  count("dm_broadcast", kMost, NULL, broadcast);
  count("dm_all_gather", kMost, NULL, all_gather);
  count("dm_reduce_scatter", kMost, NULL, reduce_scatter);
  count("dm_all_to_all", kMost, NULL, all_to_all);
  count("dm_all_to_allv", kMost, NULL, all_to_allv);
  count("dm_all_gatherv", kMost, NULL, all_gatherv);
  count("dm_reduce_scatterv", kMost, NULL, reduce_scatterv);
  count("dm_send,dm_recv", kMost, NULL, send_recv);
  free(listed);
  return finish();
}
