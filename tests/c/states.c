/* ranks: 3 */
/* Calls with right arguments that may not be made now give DM_STATUS_INVALID_STATE. A collective
 * call that one rank may not make gives it on all ranks, and names that rank. The next call of all
 * ranks works. */
#include "check.h"

static const dm_mesh *mesh;
static const dm_world *world;
static int32_t rank;

static dm_status barrier(void) { return dm_barrier(mesh, NULL, 0); }
static dm_status finalize(void) { return dm_finalize(mesh, NULL); }
static dm_status world_barrier(void) { return dm_world_barrier(world, 0); }
static dm_status world_finalize(void) { return dm_world_finalize(world, 0); }

static dm_status gather(void)
{
  dm_buffers *all = NULL;
  const dm_status status = dm_all_gather_bytes(mesh, NULL, "x", 1, 0, &all);
  dm_buffers_free(all);
  return status;
}

static dm_status broadcast(void)
{
  dm_buffers *one = NULL;
  const dm_status status = dm_world_broadcast_bytes(world, "x", 1, 0, 0, &one);
  dm_buffers_free(one);
  return status;
}

static dm_status locations(void)
{
  const char *const *paths = NULL;
  return dm_world_locations(world, NULL, 60000, &paths);
}

static const struct { const char *name; dm_status (*call)(void); bool ends; } kCalls[] = {
    {"dm_barrier", barrier, false},         {"dm_all_gather_bytes", gather, false},   {"dm_world_barrier", world_barrier, false},
    {"dm_world_broadcast_bytes", broadcast, false}, {"dm_world_locations", locations, false}, {"dm_finalize", finalize, true},
    {"dm_world_finalize", world_finalize, true},
};

int main(void)
{
  const int32_t shape[] = {3};
  const float one = 1;
  float sum = 0;
  dm_mesh *made = NULL;
  dm_world *held = NULL;
  REQUIRE(dm_init("cpu", shape, 1, NULL, NULL, &made));
  REQUIRE(dm_get_world(made, &held));
  mesh = made;
  world = held;
  rank = rank_of(mesh);

  /* A group of this thread that was not begun. */
  FAILS(DM_STATUS_INVALID_STATE, "dm_group_start first", dm_group_end(mesh));

  for (size_t at = 0; at < sizeof kCalls / sizeof *kCalls; ++at) {
    char told[128];
    if (rank == 1) {
      snprintf(told, sizeof told, "%s: this thread has begun a group and not ended it; 1 operation is queued", kCalls[at].name);
      REQUIRE(dm_group_start(mesh));
      REQUIRE(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      FAILS(DM_STATUS_INVALID_STATE, told, kCalls[at].call());
      REQUIRE(dm_group_end(mesh));
    } else {
      const double began = seconds_now();
      snprintf(told, sizeof told, "rank 1 refused its own %s as call ", kCalls[at].name);
      FAILS(DM_STATUS_INVALID_STATE, told, kCalls[at].call());
      CHECK(seconds_now() - began < 60); /* the deadline is at 600 s */
      REQUIRE(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    }
    CHECK(sum == 3);
    if (!kCalls[at].ends) OK(kCalls[at].call());
  }
  OK(dm_finalize(mesh, NULL));
  OK(dm_world_finalize(world, 0));
  dm_free(made);
  dm_world_free(held);
  return finish();
}
