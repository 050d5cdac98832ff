/* ranks: 4 */
/* one host */
/* The ranks of a world say where they are, and dm_plan_ranks makes a plan from these locations.
 * All ranks get the same plan. */
#include "check.h"

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  join.timeout_ms = 60000;
  REQUIRE(dm_world_init("cpu", &join, &world));
  int32_t rank = -1;
  OK(dm_world_rank(world, &rank));

  const char *const *given = NULL, *const *hosts = NULL;
  const char *mine = rank % 2 == 0 ? "rack0/even" : "rack0/odd";
  REQUIRE(dm_world_locations(world, mine, 0, &given));
  for (int32_t other = 0; other < 4; ++other) CHECK(strcmp(given[other], other % 2 == 0 ? "rack0/even" : "rack0/odd") == 0);
  /* A rank that gives no location has its host's name, which is the same for all ranks here. Some
   * ranks may give a location and others not. */
  REQUIRE(dm_world_locations(world, NULL, 0, &hosts));
  CHECK(hosts[0][0] != '\0' && strcmp(hosts[0], hosts[3]) == 0 && strcmp(hosts[1], hosts[2]) == 0 && strcmp(hosts[0], hosts[1]) == 0);
  CHECK(strcmp(given[1], "rack0/odd") == 0); /* the locations of the earlier call stay valid */
  const char *const *mixed = NULL;
  REQUIRE(dm_world_locations(world, rank == 2 ? "" : NULL, 0, &mixed));
  CHECK(strcmp(mixed[2], "") == 0 && strcmp(mixed[3], hosts[0]) == 0);

  /* Even and odd ranks share a domain, so the later dimension, which talks more, joins 0 with 2
   * and 1 with 3. */
  const int32_t shape[] = {2, 2};
  int32_t ranks[4] = {-1, -1, -1, -1};
  dm_plan_options machine = DM_PLAN_OPTIONS_INIT;
  machine.world_size = 4;
  machine.locations = given;
  machine.shape = shape;
  machine.ndim = 2;
  REQUIRE(dm_plan_ranks(&machine, ranks, NULL, 0, NULL));
  CHECK(ranks[0] == 0 && ranks[1] == 2 && ranks[2] == 1 && ranks[3] == 3);
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  options.world = world;
  options.ranks = ranks;
  options.num_ranks = 4;
  REQUIRE(dm_init("cpu", shape, 2, NULL, &options, &mesh));
  int32_t sum = 0;
  OK(dm_all_reduce(mesh, "dim_1", &rank, &sum, 1, DM_INT32, DM_SUM, NULL));
  CHECK(sum == (rank % 2 == 0 ? 2 : 4));

  const char *const *none = NULL;
  static char longest[4098];
  memset(longest, 'x', sizeof longest - 1);
  if (rank == 1) {
    FAILS(DM_STATUS_INVALID_ARGUMENT, "4097 bytes", dm_world_locations(world, longest, 0, &none));
    GIVES(DM_STATUS_INVALID_ARGUMENT, dm_world_locations(world, NULL, 0, NULL));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_world_locations(NULL, NULL, 0, &none));
  } else {
    for (int call = 0; call < 2; ++call)
      FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 1 refused its own dm_world_locations as call ", dm_world_locations(world, NULL, 0, &none));
  }
  /* A rank that makes another call causes a mismatch, as in every collective call. */
  if (rank == 3)
    FAILS(DM_STATUS_MISMATCH, "dm_world_locations", dm_world_barrier(world, 0));
  else
    FAILS(DM_STATUS_MISMATCH, "dm_world_barrier", dm_world_locations(world, NULL, 0, &none));
  CHECK(none == NULL);
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
