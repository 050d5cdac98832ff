/* ranks: 1 4 */
/* dm_world_finalize ends a world with all its meshes, also those whose handles were freed. The
 * default world ends in the same way, and dm_init then joins it anew. */
#include "check.h"

static void everything_ended(dm_world *world, dm_mesh *mesh, dm_mesh *lazy)
{
  float one = 1, sum = 0;
  ncclComm_t comm = NULL;
  dm_mesh *made = NULL;
  int32_t shape[] = {1};
  const char *text = "finalized by dm_finalize or dm_world_finalize";
  FAILS(DM_STATUS_ABORTED, text, dm_get_comm(mesh, "x", &comm));
  FAILS(DM_STATUS_ABORTED, text, dm_get_comm(lazy, "x", &comm));
  FAILS(DM_STATUS_ABORTED, text, dm_all_reduce(mesh, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_ABORTED, text, dm_flatten(mesh, "all", NULL, &made));
  FAILS(DM_STATUS_ABORTED, text, dm_finalize(mesh, NULL));
  if (world == NULL) return;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = world;
  text = "the world was finalized by dm_world_finalize";
  FAILS(DM_STATUS_ABORTED, text, dm_world_barrier(world, 0));
  FAILS(DM_STATUS_ABORTED, text, dm_init("cpu", shape, 1, NULL, &options, &made));
  FAILS(DM_STATUS_ABORTED, text, dm_world_finalize(world, 0));
}

/* A world of its own, with a mesh, one of some of its ranks, a lazy one and a freed one. */
static void a_world(void)
{
  dm_world *world = NULL;
  dm_mesh *mesh = NULL, *lazy = NULL, *freed = NULL, *part = NULL;
  int32_t size = 0;
  float one = 1, sum = 0;
  const char *names[] = {"x"};
  REQUIRE(dm_world_init("cpu", NULL, &world));
  REQUIRE(dm_world_size(world, &size));
  const int32_t line[] = {size}, half[] = {(size + 1) / 2};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = world;
  REQUIRE(dm_init("cpu", line, 1, names, &options, &mesh));
  REQUIRE(dm_init("cpu", half, 1, names, &options, &part));
  REQUIRE(dm_init("cpu", line, 1, names, &options, &freed));
  options.flags = DM_INIT_LAZY;
  REQUIRE(dm_init("cpu", line, 1, names, &options, &lazy));
  dm_free(freed);
  OK(dm_all_reduce(mesh, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == (float)size);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "timeout_ms is -1", dm_world_finalize(world, -1));
  OK(dm_group_start(mesh));
  OK(dm_all_reduce(mesh, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_STATE, "call dm_group_end first", dm_world_finalize(world, 0));
  OK(dm_group_end(mesh));
  OK(dm_world_finalize(world, 0));
  everything_ended(world, mesh, lazy);
  dm_free(mesh);
  dm_free(part);
  dm_free(lazy);
  dm_world_free(world);
  GIVES(DM_STATUS_INVALID_HANDLE, dm_world_finalize(world, 0));
}

static void the_default_world(int size)
{
  const int32_t line[] = {size};
  const char *names[] = {"x"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  for (int life = 0; life < 3; ++life) {
    dm_mesh *mesh = NULL, *lazy = NULL;
    float one = 1, sum = 0;
    options.flags = 0;
    REQUIRE(dm_init("cpu", line, 1, names, &options, &mesh));
    options.flags = DM_INIT_LAZY;
    REQUIRE(dm_init("cpu", line, 1, names, &options, &lazy));
    OK(dm_all_reduce(mesh, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == (float)size);
    OK(dm_default_world_finalize(0));
    everything_ended(NULL, mesh, lazy);
    /* Half of the lives keep the handles, as a program that forgets them does. */
    if (life != 1) {
      dm_free(mesh);
      dm_free(lazy);
    }
  }
  OK(dm_default_world_finalize(0)); /* it was finalized, and nobody joined it since */
}

/* One rank does not come. The world is as before, until it is aborted. */
static void a_rank_that_does_not_come(int size)
{
  dm_world *world = NULL, *other = NULL;
  dm_mesh *mesh = NULL;
  int32_t rank = -1;
  float one = 1, sum = 0;
  const int32_t line[] = {size};
  const char *names[] = {"x"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", NULL, &world));
  REQUIRE(dm_world_init("cpu", NULL, &other));
  REQUIRE(dm_world_rank(world, &rank));
  options.world = world;
  REQUIRE(dm_init("cpu", line, 1, names, &options, &mesh));
  if (rank > 0) FAILS(DM_STATUS_TIMEOUT, "rank 0", dm_world_finalize(world, 2000));
  OK(dm_world_barrier(other, 0));
  OK(dm_all_reduce(mesh, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == (float)size);
  OK(dm_world_barrier(other, 0));
  OK(dm_world_abort(world));
  FAILS(DM_STATUS_ABORTED, "dm_world_abort", dm_world_finalize(world, 0));
  OK(dm_world_finalize(other, 0));
  dm_free(mesh);
  dm_world_free(world);
  dm_world_free(other);
}

static void an_offline_world(void)
{
  dm_world *world = NULL;
  dm_mesh *mesh = NULL, *made = NULL;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {4, 2};
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 8;
  REQUIRE(dm_world_init("cpu", &join, &world));
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 2, NULL, &options, &mesh));
  OK(dm_world_finalize(world, 0));
  GIVES(DM_STATUS_ABORTED, dm_flatten(mesh, "all", NULL, &made));
  dm_free(mesh);
  dm_world_free(world);
}

int main(void)
{
  const char *text = getenv("WORLD_SIZE");
  const int size = text == NULL ? 1 : atoi(text);
  OK(dm_default_world_finalize(0)); /* there is none yet */
  a_world();
  an_offline_world();
  if (size > 1) a_rank_that_does_not_come(size);
  the_default_world(size);
  return finish();
}
