/* Every list comes with its number of elements. A number that does not fit is refused with both
 * numbers, before anything of the list is read: the lists here are shorter than their numbers. */
#include "check.h"

static dm_mesh *const kUntouched = (dm_mesh *)0x5a5a;
static const char *const kNames[] = {"dp", "tp"}, *const kParts[] = {"a", "b"};
static const int32_t kShape[] = {2, 4}, kSquare[] = {2, 2}, kHalves[] = {4, 2}, kOne[] = {0};
static dm_mesh *made = (dm_mesh *)0x5a5a;

#define REFUSED(text, call) FAILS(DM_STATUS_INVALID_ARGUMENT, text, call)

static void of_init(dm_world *world)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  const size_t wrong[] = {0, 1, 7, 9, (size_t)-1};
  options.world = world;
  for (size_t at = 0; at < sizeof wrong / sizeof *wrong; ++at) {
    char text[128];
    snprintf(text, sizeof text, "options.num_ranks is %zu, but the shape (2, 4) has 8 ranks", wrong[at]);
    options.ranks = kOne;
    options.num_ranks = wrong[at];
    REFUSED(text, dm_init("cpu", kShape, 2, kNames, &options, &made));
  }
  options.ranks = NULL;
  options.num_ranks = 8;
  REFUSED("options.ranks is NULL, but options.num_ranks is 8", dm_init("cpu", kShape, 2, kNames, &options, &made));
  options.num_ranks = 0;

  for (size_t number = 0; number < 5; ++number) {
    char text[128];
    options.dim_options = dims;
    options.num_dim_options = number;
    snprintf(text, sizeof text, "options.num_dim_options is %zu, but the mesh has 2 dimensions", number);
    if (number != 2) REFUSED(text, dm_init("cpu", kShape, 2, kNames, &options, &made));
  }
  dims[1].comm_name = "\xff";
  options.num_dim_options = 2;
  REFUSED("options.dim_options[1].comm_name is not UTF-8", dm_init("cpu", kShape, 2, kNames, &options, &made));
  dims[1].comm_name = NULL;
  options.num_dim_options = (size_t)-1;
  REFUSED("count of shape", dm_init("cpu", kShape, (size_t)-1, NULL, &options, &made));
  options.dim_options = NULL;
  options.num_dim_options = 2;
  REFUSED("options.dim_options is NULL, but options.num_dim_options is 2", dm_init("cpu", kShape, 2, kNames, &options, &made));
  CHECK(made == kUntouched);

  options.dim_options = dims;
  REQUIRE(dm_init("cpu", kShape, 2, kNames, &options, &made));
  char text[512];
  size_t length = 0;
  REQUIRE(dm_serialize(made, text, sizeof text, &length));
  dm_free(made);
  made = kUntouched;
  options.num_dim_options = 1;
  REFUSED("options.num_dim_options is 1, but the mesh has 2 dimensions", dm_deserialize(text, &options, &made));
  options.num_dim_options = 2;
  options.num_ranks = 3;
  REFUSED("options.ranks is NULL, but options.num_ranks is 3", dm_deserialize(text, &options, &made));
}

static void of_calls(const dm_mesh *mesh)
{
  dm_call_options call = DM_CALL_OPTIONS_INIT;
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  const int32_t lost[] = {7};
  call.dim_options = dims;
  call.num_dim_options = 2;
  REFUSED("options.num_dim_options is 2, but this call makes 1 dimension", dm_flatten(mesh, "all", &call, &made));
  REFUSED("options.num_dim_options is 2, but this call makes 1 dimension", dm_slice_range(mesh, "tp", 0, 2, 1, &call, &made));
  REFUSED("options.num_dim_options is 2, but this call makes 0 dimensions", dm_finalize(mesh, &call));
  call.num_dim_options = 1;
  REFUSED("options.num_dim_options is 1, but this call makes 2 dimensions", dm_unflatten(mesh, "tp", kSquare, 2, kParts, &call, &made));
  REFUSED("options.num_dim_options is 1, but this call makes 2 dimensions", dm_reshape(mesh, kHalves, 2, kParts, &call, &made));
  REFUSED("options.num_dim_options is 1, but this call makes 2 dimensions", dm_shrink(mesh, "dp", lost, 1, &call, &made));
  call.dim_options = NULL;
  REFUSED("options.dim_options is NULL, but options.num_dim_options is 1", dm_flatten(mesh, "all", &call, &made));
  REFUSED("options.dim_options is NULL, but options.num_dim_options is 1", dm_finalize(mesh, &call));
  CHECK(made == kUntouched);
  call.dim_options = dims;
  REQUIRE(dm_flatten(mesh, "all", &call, &made));
  dm_free(made);
  call.num_dim_options = 2;
  REQUIRE(dm_reshape(mesh, kHalves, 2, kParts, &call, &made));
  int32_t sizes[2] = {0, 0};
  size_t length = 0;
  OK(dm_shape(made, sizes, 2, &length));
  CHECK(sizes[0] == 4 && sizes[1] == 2 && strcmp(dm_dim_name(made, 0), "a") == 0 && strcmp(dm_dim_name(made, 1), "b") == 0);
  dm_free(made);
  REQUIRE(dm_unflatten(mesh, "tp", kSquare, 2, kParts, &call, &made));
  CHECK(strcmp(dm_dim_name(made, 0), "dp") == 0 && strcmp(dm_dim_name(made, 1), "a") == 0 && strcmp(dm_dim_name(made, 2), "b") == 0);
  dm_free(made);
}

static void of_shards(const dm_mesh *mesh)
{
  const dm_placement rows = DM_PLACEMENT_SHARD(0, 0);
  const size_t tensor[] = {16}, wrong[] = {0, 1, 3, (size_t)-1};
  size_t shape[1] = {77}, offset[1] = {77};
  for (size_t at = 0; at < sizeof wrong / sizeof *wrong; ++at) {
    char text[128];
    snprintf(text, sizeof text, "num_placements is %zu, but DeviceMesh((dp=2, tp=4)", wrong[at]);
    REFUSED(text, dm_local_shard(mesh, &rows, wrong[at], tensor, 1, -1, shape, offset));
  }
  REFUSED("placements is NULL", dm_local_shard(mesh, NULL, 2, tensor, 1, -1, shape, offset));
  CHECK(shape[0] == 77 && offset[0] == 77);
}

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 8;
  REQUIRE(dm_world_init("cpu", &join, &world));
  of_init(world);
  options.world = world;
  REQUIRE(dm_init("cpu", kShape, 2, kNames, &options, &mesh));
  made = kUntouched;
  of_calls(mesh);
  of_shards(mesh);

  /* Nobody is ever lost in an offline world. */
  made = kUntouched;
  FAILS(DM_STATUS_INVALID_STATE, "offline world", dm_shrink(mesh, "dp", NULL, 0, NULL, &made));
  FAILS(DM_STATUS_INVALID_STATE, "offline world", dm_shrink(mesh, "dp", kOne, 0, NULL, &made));
  CHECK(made == kUntouched);
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
