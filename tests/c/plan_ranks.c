/* dm_plan_ranks: a rank array for a machine, its report, and what it refuses. Plans are compared
 * with brute force in tests/topology.rs. */
#include "check.h"

/* Two hosts with four ranks each. The launcher dealt the ranks out to the hosts in turn. */
static const char *const kDealt[] = {"h0", "h1", "h0", "h1", "h0", "h1", "h0", "h1"};
static const int32_t kShape[] = {2, 4};

static dm_status plan(const char *const *locations, int32_t world_size, const int32_t *shape, size_t ndim, const uint32_t *traffic,
                      int32_t *ranks_out, char *report, size_t capacity, size_t *len_out)
{
  dm_plan_options options = DM_PLAN_OPTIONS_INIT;
  options.locations = locations;
  options.world_size = world_size;
  options.shape = shape;
  options.ndim = ndim;
  options.traffic = traffic;
  return dm_plan_ranks(&options, ranks_out, report, capacity, len_out);
}

static void plans(void)
{
  const char *expected =
      "{\"ranks\":8,\"world_size\":8,\"domains\":[2],\"cost\":64,\"identity_cost\":256,\"even\":true,\"dimensions\":["
      "{\"size\":2,\"traffic\":2,\"groups\":4,\"crossing_groups\":[4],\"most_domains\":[2],\"pairs\":[8],\"cost\":64},"
      "{\"size\":4,\"traffic\":8,\"groups\":2,\"crossing_groups\":[0],\"most_domains\":[1],\"pairs\":[0],\"cost\":0}]}";
  const int32_t wanted[] = {0, 2, 4, 6, 1, 3, 5, 7};
  int32_t ranks[8];
  char report[1024];
  size_t length = 0;
  OK(plan(kDealt, 8, kShape, 2, NULL, ranks, report, sizeof report, &length));
  CHECK(memcmp(ranks, wanted, sizeof ranks) == 0);
  CHECK(strcmp(report, expected) == 0 && length == strlen(expected) + 1);

  /* dm_init takes the plan. */
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  const char *names[] = {"dp", "tp"};
  int32_t group[4];
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 8;
  join.rank = 3;
  REQUIRE(dm_world_init("cuda", &join, &world));
  options.world = world;
  options.ranks = ranks;
  options.num_ranks = 8;
  REQUIRE(dm_init("cuda", kShape, 2, names, &options, &mesh));
  OK(dm_group_ranks(mesh, "tp", group, 4, &length));
  for (size_t i = 0; i < length; ++i) CHECK(strcmp(kDealt[group[i]], "h1") == 0);
  dm_free(mesh);
  dm_world_free(world);

  /* When the first dimension talks more, it is the one that stays inside. */
  const uint32_t traffic[] = {10, 1};
  OK(plan(kDealt, 8, kShape, 2, traffic, ranks, NULL, 0, NULL));
  for (int i = 0; i < 4; ++i) CHECK(strcmp(kDealt[ranks[i]], kDealt[ranks[i + 4]]) == 0);

  /* Hosts with five and four ranks are not even, and the plan says so. A program can ask for the
   * length of the plan first. */
  const char *uneven[] = {"h0", "h0", "h0", "h0", "h0", "h1", "h1", "h1", "h1"};
  const int32_t three[] = {3, 3};
  int32_t nine[9];
  size_t needed = 0;
  OK(plan(uneven, 9, three, 2, NULL, nine, NULL, 0, &needed));
  OK(plan(uneven, 9, three, 2, NULL, nine, report, needed, &length));
  CHECK(length == needed && strlen(report) + 1 == needed && strstr(report, "\"even\":false") != NULL);

  /* A mesh without dimensions is one rank; a machine without domains costs nothing. */
  const char *flat[] = {"", ""};
  const int32_t pair[] = {2};
  ranks[1] = 77;
  OK(plan(kDealt, 8, NULL, 0, NULL, ranks, NULL, 0, NULL));
  CHECK(ranks[0] == 0 && ranks[1] == 77);
  OK(plan(flat, 2, pair, 1, NULL, ranks, report, sizeof report, &length));
  CHECK(ranks[0] == 0 && ranks[1] == 1 && strstr(report, "\"domains\":[],\"cost\":0,") != NULL);
}

static void refusals(void)
{
  int32_t ranks[8] = {77, 77, 77, 77, 77, 77, 77, 77};
  char report[64] = "77";
  size_t length = 77;
  const char *hole[] = {"h0", NULL}, *odd[] = {"h0", "h0//x"}, *latin[] = {"h0", "h\xfc"};
  const int32_t two[] = {2}, none[] = {2, 0}, nine[] = {9}, huge[] = {INT32_MAX, INT32_MAX, INT32_MAX};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options is NULL", dm_plan_ranks(NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "locations is NULL", plan(NULL, 8, kShape, 2, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "locations[1] is NULL", plan(hole, 2, two, 1, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "component 1 is empty", plan(odd, 2, two, 1, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "locations[1]: path is not UTF-8", plan(latin, 2, two, 1, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "shape is NULL", plan(kDealt, 8, NULL, 2, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "ranks_out is NULL", plan(kDealt, 8, kShape, 2, NULL, NULL, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "len_out is NULL", plan(kDealt, 8, kShape, 2, NULL, ranks, report, 64, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dimension 1 has size 0", plan(kDealt, 8, none, 2, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "has 9 ranks, but there are 8", plan(kDealt, 8, nine, 1, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "does not fit into 64 bits", plan(kDealt, 8, huge, 3, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "world_size is 0", plan(kDealt, 0, NULL, 0, NULL, ranks, NULL, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "world_size is", plan(kDealt, -1, kShape, 2, NULL, ranks, NULL, 0, NULL));
  CHECK(length == 77);
  GIVES(DM_STATUS_BUFFER_TOO_SMALL, plan(kDealt, 8, kShape, 2, NULL, ranks, report, 64, &length));
  CHECK(length > 64 && length < 1024 && strcmp(report, "77") == 0);
  for (int i = 0; i < 8; ++i) CHECK(ranks[i] == 77);
}

int main(void)
{
  plans();
  refusals();
  return finish();
}
