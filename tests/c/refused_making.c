/* ranks: 2 */
/* Rank 1 refuses its own dm_init, dm_deserialize or dm_world_locations, in the default world that
 * both ranks have joined, and in the world of the options. Rank 0 gets the same status at once, and
 * not at the deadline of ten minutes. The next call of both ranks meets. */
#include "check.h"

#define TYPED(type) "{\"devicemesh\":1,\"device_type\":\"" type "\",\"shape\":[2],\"names\":[\"x\"],\"layout\":[[[2,1]]],\"base\":0,"
#define HEAD TYPED("cpu")

static const char *const kGood = HEAD "\"ranks\":[[0,2]]}", *const kWords = "rank 1 refused its own dm_init as call ";
static const char *const kPlaces = "rank 1 refused its own dm_world_locations as call ";
static const int32_t kShape[] = {2};
static int32_t rank;
static dm_mesh *none;

/* A call of both ranks that works. */
static void meets(const dm_init_options *options)
{
  float one = 1, sum = 0;
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cpu", kShape, 1, NULL, options, &mesh));
  OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 2 && none == NULL);
  dm_free(mesh);
}

/* Makes the call of rank 0, while rank 1 makes a wrong call. */
static dm_status right(const dm_init_options *options)
{
  return dm_init("cpu", kShape, 1, NULL, options, &none);
}

#define REFUSED(words, call)                                                                       \
  do {                                                                                             \
    if (rank == 1) FAILS(DM_STATUS_INVALID_ARGUMENT, words, call);                                 \
    else FAILS(DM_STATUS_INVALID_ARGUMENT, kWords, right(options));                                \
    meets(options);                                                                                \
  } while (0)

static void making(const dm_init_options *options)
{
  dm_init_options owning = *options, late = *options, ranks = *options;
  owning.flags = DM_INIT_OWN_COMMS;
  late.timeout_ms = -1;
  ranks.ranks = kShape;
  ranks.num_ranks = 1;
  REFUSED("mesh_out", dm_init("cpu", kShape, 1, NULL, options, NULL));
  REFUSED("DM_INIT_OWN_COMMS", dm_init("cpu", kShape, 1, NULL, &owning, &none));
  REFUSED("timeout_ms is -1", dm_init("cpu", kShape, 1, NULL, &late, &none));
  REFUSED("shape is NULL", dm_init("cpu", NULL, 1, NULL, options, &none));
  REFUSED("device_type", dm_init("tpu", kShape, 1, NULL, options, &none));
  REFUSED("device_type is not UTF-8", dm_init("\xff", kShape, 1, NULL, options, &none));

  REFUSED("mesh_out", dm_deserialize(kGood, options, NULL));
  REFUSED("text is NULL", dm_deserialize(NULL, options, &none));
  REFUSED("not the text of a mesh", dm_deserialize("", options, &none));
  REFUSED("ranks lists only 1 ranks", dm_deserialize(HEAD "\"ranks\":[[0,1]]}", options, &none));
  REFUSED("cpux", dm_deserialize(TYPED("cpux") "\"ranks\":[[0,2]]}", options, &none));
  REFUSED("text is not UTF-8", dm_deserialize("\xff", options, &none));
  REFUSED("options.ranks is not NULL", dm_deserialize(kGood, &ranks, &none));
  REFUSED("DM_INIT_OWN_COMMS", dm_deserialize(kGood, &owning, &none));
}

static void locations(const dm_world *world)
{
  const char *const *places = NULL;
  if (rank == 1) {
    FAILS(DM_STATUS_INVALID_ARGUMENT, "locations_out", dm_world_locations(world, NULL, 0, NULL));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "location is not UTF-8", dm_world_locations(world, "\xff", 0, &places));
  } else {
    for (int at = 0; at < 2; ++at) FAILS(DM_STATUS_INVALID_ARGUMENT, kPlaces, dm_world_locations(world, NULL, 0, &places));
  }
  CHECK(places == NULL);
  REQUIRE(dm_world_locations(world, rank == 0 ? "here" : "there", 0, &places));
  CHECK(strcmp(places[0], "here") == 0 && strcmp(places[1], "there") == 0);
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  REQUIRE(dm_default_world("cpu", 0, &world));
  REQUIRE(dm_world_rank(world, &rank));
  const double began = seconds_now();
  making(&options);
  options.world = world;
  making(&options);
  locations(world);
  CHECK(seconds_now() - began < 120);
  OK(dm_world_finalize(world, 0));
  dm_world_free(world);
  return finish();
}
