/* dm_local_shard: blocks of a tensor for any rank, in an offline world, and what it refuses.
 * PyTorch's answers are replayed in tests/sharding.rs. */
#include "check.h"

static dm_mesh *offline(int32_t world_size, int32_t rank, const int32_t *shape, const char *const *names, size_t ndim, const int32_t *ranks)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = world_size;
  join.rank = rank;
  REQUIRE(dm_world_init("cuda", &join, &world));
  options.world = world;
  options.ranks = ranks;
  size_t size = 1;
  for (size_t dim = 0; dim < ndim; ++dim) size *= (size_t)shape[dim];
  options.num_ranks = ranks != NULL ? size : 0;
  REQUIRE(dm_init("cuda", shape, ndim, names, &options, &mesh));
  dm_world_free(world);
  return mesh;
}

/* Checks which rows of a [rows, 6] tensor the rank holds. */
static void has_rows(int line, const dm_mesh *mesh, const dm_placement *placements, size_t rows, int32_t rank, size_t first, size_t count)
{
  const size_t tensor[] = {rows, 6};
  size_t shape[2] = {77, 77}, offset[2] = {77, 77};
  OK(dm_local_shard(mesh, placements, dm_ndim(mesh), tensor, 2, rank, shape, offset));
  if (shape[0] != count || offset[0] != first || shape[1] != 6 || offset[1] != 0) {
    ++failures;
    fprintf(stderr, "line %d: rank %d has (%zu, %zu) at (%zu, %zu), expected (%zu, 6) at (%zu, 0)\n", line, (int)rank,
            shape[0], shape[1], offset[0], offset[1], count, first);
  }
}
#define ROWS(...) has_rows(__LINE__, __VA_ARGS__)

static void orders(void)
{
  const int32_t shape[] = {2, 4};
  const char *names[] = {"fsdp", "tp"};
  dm_mesh *mesh = offline(8, 6, shape, names, 2, NULL); /* 6 is at (1, 2) */
  const dm_placement fsdp_first[] = {DM_PLACEMENT_SHARD(0, 0), DM_PLACEMENT_SHARD(0, 0)},
                     tp_first[] = {DM_PLACEMENT_SHARD(0, 1), DM_PLACEMENT_SHARD(0, 0)};
  const dm_placement tp_only[] = {{DM_REPLICATE, -9, -9, {0}}, DM_PLACEMENT_SHARD(0, 0)}; /* DM_REPLICATE ignores the other fields */
  ROWS(mesh, fsdp_first, 16, -1, 12, 2);
  ROWS(mesh, tp_first, 16, -1, 10, 2);
  ROWS(mesh, tp_first, 16, 3, 12, 2);
  ROWS(mesh, tp_only, 5, 0, 0, 2);
  ROWS(mesh, tp_only, 5, 2, 4, 1);
  ROWS(mesh, tp_only, 5, 7, 5, 0); /* no rows: at the end, as DTensor has it */
  ROWS(mesh, tp_only, SIZE_MAX, 3, SIZE_MAX / 4 * 3 + 3, SIZE_MAX / 4);
  dm_free(mesh);
}

static void views(void)
{
  const int32_t shape[] = {2, 2, 2};
  const char *names[] = {"dp", "cp", "tp"}, *dp_cp[] = {"dp", "cp"}, *tp_dp[] = {"tp", "dp"};
  const int32_t ranks[] = {10, 11, 12, 13, 14, 15, 17, 16};
  const dm_placement rows[] = {DM_PLACEMENT_SHARD(0, 0), DM_PLACEMENT_SHARD(0, 0)};
  dm_mesh *mesh = offline(20, 16, shape, names, 3, ranks), *pair = NULL, *flat = NULL, *transposed = NULL;
  REQUIRE(dm_slice(mesh, dp_cp, 2, &pair)); /* the view of rank 16, at (1, 1, 1): {11, 13, 15, 16} */
  REQUIRE(dm_flatten(pair, "fsdp", NULL, &flat));
  REQUIRE(dm_slice(mesh, tp_dp, 2, &transposed)); /* {{12, 17}, {13, 16}} */
  ROWS(pair, rows, 8, 15, 4, 2);
  ROWS(flat, rows, 8, 15, 4, 2);
  ROWS(flat, rows, 8, -1, 6, 2);
  ROWS(transposed, rows, 8, 17, 2, 2);
  ROWS(transposed, rows, 8, 13, 4, 2);
  size_t block[2] = {77, 77}, offset[2] = {77, 77};
  const size_t tensor[] = {8, 6};
  /* 10 and 19 are ranks of the world, 10 also one of the root, but not of this view. */
  FAILS(DM_STATUS_NOT_MEMBER, "rank 10 is not in DeviceMesh", dm_local_shard(pair, rows, 2, tensor, 2, 10, block, offset));
  FAILS(DM_STATUS_NOT_MEMBER, "rank 19 is not in DeviceMesh", dm_local_shard(pair, rows, 2, tensor, 2, 19, block, offset));
  CHECK(block[0] == 77 && block[1] == 77 && offset[0] == 77 && offset[1] == 77);
  dm_free(transposed);
  dm_free(flat);
  dm_free(pair);
  dm_free(mesh);
}

static void refusals(void)
{
  const int32_t shape[] = {2, 2};
  const size_t tensor[] = {8, 6};
  const char *names[] = {"dp", "tp"};
  dm_mesh *mesh = offline(8, 7, shape, names, 2, NULL), *outside = mesh; /* rank 7 is not in it */
  size_t block[2] = {77, 77}, offset[2] = {77, 77};
  dm_placement placements[] = {DM_PLACEMENT_REPLICATE, DM_PLACEMENT_SHARD(1, 0)};
  GIVES(DM_STATUS_NOT_MEMBER, dm_local_shard(outside, placements, 2, tensor, 2, -1, block, offset));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "world_rank is -2", dm_local_shard(mesh, placements, 2, tensor, 2, -2, block, offset));
  FAILS(DM_STATUS_INVALID_HANDLE, "not a live dm_mesh", dm_local_shard(NULL, placements, 2, tensor, 2, 0, block, offset));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "placements is NULL", dm_local_shard(mesh, NULL, 2, tensor, 2, 0, block, offset));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "tensor_shape is NULL", dm_local_shard(mesh, placements, 2, NULL, 2, 0, block, offset));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "local_shape_out is NULL", dm_local_shard(mesh, placements, 2, tensor, 2, 0, NULL, offset));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "offset_out is NULL", dm_local_shard(mesh, placements, 2, tensor, 2, 0, block, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "the count of tensor_shape", dm_local_shard(mesh, placements, 2, tensor, SIZE_MAX, 0, block, offset));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dimension tp shards tensor dimension 1, but the tensor has 1",
        dm_local_shard(mesh, placements, 2, tensor, 1, 0, block, offset));
  placements[1].tensor_dim = -1;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "placements[1].tensor_dim is -1", dm_local_shard(mesh, placements, 2, tensor, 2, 0, block, offset));
  placements[1].kind = 3;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "placements[1].kind is 3", dm_local_shard(mesh, placements, 2, tensor, 2, 0, block, offset));
  const dm_placement partial = DM_PLACEMENT_PARTIAL;
  placements[1] = partial;
  placements[1].reserved[4] = 7;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "placements[1].reserved is 0x7", dm_local_shard(mesh, placements, 2, tensor, 2, 0, block, offset));
  placements[1].reserved[4] = 0;
  CHECK(block[0] == 77 && block[1] == 77 && offset[0] == 77 && offset[1] == 77);

  /* A scalar has no dimensions to shard, and nothing to write. */
  placements[1].kind = DM_REPLICATE;
  OK(dm_local_shard(mesh, placements, 2, NULL, 0, 0, NULL, NULL));
  /* The block can take the place of the tensor's shape. */
  size_t both[] = {8, 6};
  placements[1].kind = DM_SHARD;
  placements[1].tensor_dim = 1;
  OK(dm_local_shard(mesh, placements, 2, both, 2, 3, both, offset));
  CHECK(both[0] == 8 && both[1] == 3 && offset[0] == 0 && offset[1] == 3);
  dm_free(mesh);
}

int main(void)
{
  CHECK(DM_REPLICATE == 0 && DM_SHARD == 1 && DM_PARTIAL == 2 && sizeof(dm_placement) == 32);
  CHECK(offsetof(dm_placement, tensor_dim) == 4 && offsetof(dm_placement, order) == 8);
  orders();
  views();
  refusals();
  return finish();
}
