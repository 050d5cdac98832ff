/* ranks: 1 4 */
/* one host */
/* A mesh gives its world, and the default world can be had, asked, left and joined anew, by an
 * abort or by a finalize, several times in one process. */
#include "check.h"

static int32_t size = 1;

static dm_world_info asked(const dm_world *world)
{
  dm_world_info info = DM_WORLD_INFO_INIT;
  OK(dm_world_get_info(world, &info));
  return info;
}

/* Checks what holds on this one host, whoever started the ranks. */
static void on_this_host(const dm_world *world)
{
  int32_t rank = -1, ranks = -1;
  const dm_world_info info = asked(world);
  OK(dm_world_rank(world, &rank));
  OK(dm_world_size(world, &ranks));
  CHECK(info.struct_size == sizeof info && info.rank == rank && info.size == ranks && ranks == size);
  CHECK(info.local_rank == rank && info.local_size == ranks && info.host == 0 && info.num_hosts == 1);
  CHECK(info.device == -1 && strcmp(info.device_type, "cpu") == 0 && info.library[0] != '\0' && info.ccl_version >= 21400);
}

static dm_mesh *line_of(dm_world *world)
{
  const int32_t line[] = {size};
  const char *names[] = {"x"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  float one = 1, sum = 0;
  options.world = world;
  REQUIRE(dm_init("cpu", line, 1, names, &options, &mesh));
  OK(dm_all_reduce(mesh, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == (float)size);
  return mesh;
}

static void the_world_of_a_mesh(void)
{
  dm_world *world = NULL, *again = NULL, *from_view = NULL;
  dm_mesh *mesh = line_of(NULL), *view = NULL, *other = NULL;
  const char *names[] = {"x"};
  OK(dm_get_world(mesh, &world));
  on_this_host(world);
  OK(dm_default_world("cpu", 0, &again)); /* this process is in it, so it waits for nobody */
  on_this_host(again);
  REQUIRE(dm_slice(mesh, names, 1, &view));
  OK(dm_get_world(view, &from_view));
  /* A handle is as good as any other: a mesh in the same world, made through it. */
  other = line_of(from_view);
  OK(dm_world_barrier(again, 0));
  /* Handles are freed one by one, and the world stays. */
  dm_world_free(again);
  GIVES(DM_STATUS_INVALID_HANDLE, dm_world_barrier(again, 0));
  dm_world_free(from_view);
  OK(dm_world_barrier(world, 0));
  const dm_world_info info = asked(world);
  dm_world_free(world);
  CHECK(strcmp(info.device_type, "cpu") == 0 && strlen(info.library) > 0); /* the meshes keep the world */
  OK(dm_finalize(other, NULL));
  dm_free(other);
  dm_free(view);
  /* The world can be had after the end of the mesh. */
  OK(dm_finalize(mesh, NULL));
  OK(dm_get_world(mesh, &world));
  on_this_host(world);
  dm_world_free(world);
  dm_free(mesh);
}

/* Leaves the default world in one of four ways, and joins it anew. */
static void left_and_joined_anew(void)
{
  for (int life = 0; life < 8; ++life) {
    dm_world *world = NULL, *anew = NULL;
    OK(dm_default_world("cpu", 60000, &world));
    on_this_host(world);
    dm_mesh *mesh = line_of(NULL);
    switch (life % 4) {
      case 0: OK(dm_world_barrier(world, 0)); OK(dm_default_world_abort()); break;
      case 1: OK(dm_world_barrier(world, 0)); OK(dm_world_abort(world)); break;
      case 2: OK(dm_default_world_finalize(0)); break;
      default: OK(dm_world_finalize(world, 0)); break;
    }
    GIVES(DM_STATUS_ABORTED, dm_world_barrier(world, 0));
    CHECK(asked(world).size == size); /* a world that has ended still answers */
    dm_world *ended = NULL;
    OK(dm_get_world(mesh, &ended));
    GIVES(DM_STATUS_ABORTED, dm_world_barrier(ended, 0));
    if (life < 4) { /* otherwise the program keeps the handles of the ended world for now */
      dm_free(mesh);
      dm_world_free(world);
      dm_world_free(ended);
    }
    OK(dm_default_world("cpu", 60000, &anew));
    on_this_host(anew);
    dm_mesh *next = line_of(anew);
    OK(dm_finalize(next, NULL));
    dm_free(next);
    dm_world_free(anew);
    if (life >= 4) {
      dm_free(mesh);
      dm_world_free(world);
      dm_world_free(ended);
    }
  }
}

static void an_offline_world(void)
{
  dm_world *world = NULL, *given = NULL;
  dm_mesh *mesh = NULL;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {4, 2};
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 8;
  join.rank = 5;
  REQUIRE(dm_world_init("cuda", &join, &world));
  options.world = world;
  REQUIRE(dm_init("cuda", shape, 2, NULL, &options, &mesh));
  OK(dm_get_world(mesh, &given));
  const dm_world_info info = asked(given);
  CHECK(info.rank == 5 && info.size == 8 && info.local_rank == 5 && info.local_size == 8 && info.host == 0 && info.num_hosts == 1);
  CHECK(info.device == -1 && info.ccl_version == 0 && strcmp(info.device_type, "cuda") == 0 && strcmp(info.library, "") == 0);
  dm_free(mesh);
  dm_world_free(given);
  dm_world_free(world);
}

static void refused(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_world_info info = DM_WORLD_INFO_INIT;
  join.world_size = 1;
  join.device = 3;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.device is 3, but options.flags does not have DM_WORLD_DEVICE",
        dm_world_init("cpu", &join, &world));
  join.flags = DM_WORLD_DEVICE;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "the options name device 3, but device type cpu has none", dm_world_init("cpu", &join, &world));
  join.device = -1;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.device is -1", dm_world_init("cpu", &join, &world));
  join.device = 0;
  join.flags = 0;
  join.join = 3;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.join is 3: it must be", dm_world_init("cpu", &join, &world));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "device_type is \"gpu\"", dm_default_world("gpu", 0, &world));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "timeout_ms is -1", dm_default_world("cpu", -1, &world));
  CHECK(world == NULL);
  OK(dm_default_world("cpu", 0, &world));
  info.struct_size = 8;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "info_out.struct_size is 8", dm_world_get_info(world, &info));
  dm_world_free(world);
  GIVES(DM_STATUS_INVALID_HANDLE, dm_world_get_info(world, &info));

  /* A mesh over communicators that exist has the world that it was given, or none. */
  dm_mesh *mesh = line_of(NULL), *without = NULL;
  ncclComm_t comm = NULL;
  const int32_t line[] = {size};
  OK(dm_get_comm(mesh, NULL, &comm));
  REQUIRE(dm_from_comms("cpu", line, 1, NULL, &comm, NULL, &without));
  world = NULL;
  FAILS(DM_STATUS_UNSUPPORTED, "without a world", dm_get_world(without, &world));
  CHECK(world == NULL);
  dm_free(without);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

int main(void)
{
  const char *text = getenv("WORLD_SIZE");
  size = text == NULL ? 1 : atoi(text);
  the_world_of_a_mesh();
  left_and_joined_anew();
  refused();
  an_offline_world();
  OK(dm_default_world_finalize(0));
  return finish();
}
