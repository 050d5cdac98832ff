/* What the tests of dm_recover share. */
#ifndef RECOVER_H
#define RECOVER_H

#include "facts.h"

#include <sys/stat.h>
#include <unistd.h>

/* The world that recovers, and one that only keeps ranks in step. */
static dm_world *world, *other_world;
static int32_t me, world_size;

static inline void begin(void)
{
  REQUIRE(dm_world_init("cpu", NULL, &world));
  REQUIRE(dm_world_init("cpu", NULL, &other_world));
  REQUIRE(dm_world_rank(world, &me));
  REQUIRE(dm_world_size(world, &world_size));
}

static inline int end(dm_mesh *mesh, dm_mesh *other)
{
  dm_free(mesh);
  dm_free(other);
  dm_world_free(world);
  dm_world_free(other_world);
  return finish();
}

/* Returns when all ranks have called it, also while a recovery has failed. */
static inline void meet_world(void) { REQUIRE(dm_world_barrier(other_world, 0)); }

/* Checks that a dimension's communicator joins the ranks of its group. */
static inline void sum_along(const dm_mesh *mesh, const char *dim)
{
  int32_t group[16], gathered[16], size = 0;
  size_t length = 0;
  OK(dm_size(mesh, dim, &size));
  OK(dm_group_ranks(mesh, dim, group, 16, &length));
  CHECK((size_t)size == length);
  OK(dm_all_gather(mesh, dim, &me, gathered, 1, DM_INT32, NULL));
  CHECK(memcmp(group, gathered, length * sizeof *group) == 0);
}

static inline void sums(const dm_mesh *mesh)
{
  for (size_t index = 0; index < dm_ndim(mesh); ++index) sum_along(mesh, dm_dim_name(mesh, index));
}

/* Returns when all ranks of the mesh have called it. A rank that has its result of a collective may
 * otherwise exit or abort while other ranks still wait for theirs. In epoch 0 the world has the
 * spares, too, which wait elsewhere. Later the dimension that `meet` makes exists already. */
static inline void together(const dm_mesh *mesh)
{
  dm_recovery recovery = DM_RECOVERY_INIT;
  OK(dm_get_recovery(mesh, &recovery));
  if (recovery.epoch == 0) meet(mesh);
  else OK(dm_world_barrier(world, 0));
}

/* Makes a call on a mesh that has lost a rank, or in which a rank has begun to recover. Without a
 * failed call this rank may know of no reason to recover yet. */
static inline void notice(const dm_mesh *mesh)
{
  dm_mesh *none = NULL;
  const dm_status status = dm_flatten(mesh, "gone", NULL, &none);
  CHECK(status == DM_STATUS_PEER_LOST || status == DM_STATUS_ABORTED);
}

static inline dm_mesh *recovered(const dm_mesh *mesh, const dm_recover_options *options, dm_recovery *recovery)
{
  dm_mesh *next = NULL;
  const dm_recovery init = DM_RECOVERY_INIT;
  *recovery = init;
  REQUIRE(dm_recover(mesh, options, &next, recovery));
  return next;
}

/* Checks which ranks a mesh has, and that its communicators join them. */
static inline void holds(const dm_mesh *mesh, const int32_t *expected, size_t count)
{
  int32_t ranks[16];
  size_t length = 0;
  OK(dm_ranks(mesh, ranks, 16, &length));
  CHECK(length == count && memcmp(ranks, expected, count * sizeof *ranks) == 0);
  sums(mesh);
}

static inline dm_mesh *named_view(const char *name)
{
  dm_mesh *view = NULL;
  REQUIRE(dm_lookup(name, &view));
  return view;
}

/* A file by which a rank lets another one go on, where the ranks have no world in common any
   more. */
static inline const char *signal_path(void)
{
  static char path[512];
  const char *folder = getenv("DM_TMP"), *port = getenv("MASTER_PORT");
  snprintf(path, sizeof path, "%s/recover-%s", folder == NULL ? "/tmp" : folder, port == NULL ? "" : port);
  return path;
}

static inline void send_signal(void)
{
  FILE *file = fopen(signal_path(), "w");
  CHECK(file != NULL && fclose(file) == 0);
}

static inline void await_signal(void)
{
  struct stat found;
  const double until = seconds_now() + 60;
  while (stat(signal_path(), &found) != 0 && seconds_now() < until) usleep(2000);
  CHECK(unlink(signal_path()) == 0);
}

/* Checks the calls of the world, which are those of `ranks` since a recovery. */
static inline void world_calls(const int32_t *ranks, size_t count)
{
  dm_buffers *buffers = NULL;
  OK(dm_world_barrier(world, 0));
  OK(dm_world_all_gather_bytes(world, &me, sizeof me, 0, &buffers));
  CHECK(dm_buffers_count(buffers) == (size_t)world_size);
  for (int32_t rank = 0; rank < world_size; ++rank) {
    const void *data = NULL;
    size_t length = 0;
    OK(dm_buffers_get(buffers, (size_t)rank, &data, &length));
    const bool is_in = within(&rank, 1, ranks, count);
    CHECK(length == (is_in ? sizeof rank : 0) && (!is_in || memcmp(data, &rank, sizeof rank) == 0));
  }
  dm_buffers_free(buffers);
  for (size_t index = 0; index < count; ++index) {
    const void *data = NULL;
    size_t length = 0;
    OK(dm_world_broadcast_bytes(world, &me, sizeof me, ranks[index], 0, &buffers));
    OK(dm_buffers_get(buffers, 0, &data, &length));
    CHECK(length == sizeof me && memcmp(data, &ranks[index], sizeof me) == 0);
    dm_buffers_free(buffers);
  }
  for (int32_t rank = 0; rank < world_size; ++rank)
    if (!within(&rank, 1, ranks, count))
      FAILS(DM_STATUS_INVALID_ARGUMENT, "is not in the mesh of epoch", dm_world_broadcast_bytes(world, &me, sizeof me, rank, 0, &buffers));
  /* A mesh can be made of these ranks, and of no others. */
  dm_mesh *line = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {(int32_t)count};
  options.world = world;
  options.ranks = ranks;
  options.num_ranks = count;
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &line));
  sums(line);
  OK(dm_finalize(line, NULL));
  dm_free(line);
}

#endif /* RECOVER_H */
