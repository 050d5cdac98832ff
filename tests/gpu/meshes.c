/* Which ranks a dimension's communicator joins, and in which order: meshes (n), (n/2, 2) and
 * (2, 2, 2), permuted ranks, slices in both orders, flattened, unflattened and restricted
 * dimensions. With the argument "lazy", communicators are made at their first use. */
#include "gpu.h"

static void check_all(const dm_mesh *mesh)
{
  for (size_t index = 0; index < dm_ndim(mesh); ++index) check_group(mesh, dm_dim_name(mesh, index));
}

static void check_and_free(dm_mesh *view)
{
  check_all(view);
  dm_free(view);
}

/* What can be made of a mesh of three dimensions. */
static void views(const dm_mesh *mesh)
{
  const char *pair[] = {"shard", "tp"}, *turned[] = {"tp", "replicate"}, *parts[] = {"low", "high"};
  const int32_t sizes[] = {2, 2};
  dm_mesh *view = NULL, *flat = NULL, *split = NULL;
  REQUIRE(dm_slice(mesh, pair, 2, &view));
  REQUIRE(dm_flatten(view, "model", NULL, &flat));
  check_group(flat, NULL);
  int32_t size = 0;
  REQUIRE(dm_size(flat, NULL, &size));
  if (size == 4) {
    REQUIRE(dm_unflatten(flat, "model", sizes, 2, parts, NULL, &split));
    check_and_free(split);
  }
  dm_free(flat);
  check_and_free(view);
  REQUIRE(dm_slice(mesh, turned, 2, &view)); /* the transposed view, and its own flattened dimension */
  REQUIRE(dm_flatten(view, NULL, NULL, &flat));
  check_and_free(flat);
  check_and_free(view);
  REQUIRE(dm_flatten(mesh, "everybody", NULL, &flat));
  check_and_free(flat);
}

int main(int argc, char **argv)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const char *names[] = {"replicate", "shard", "tp"};
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int lazy = argc > 1 && strcmp(argv[1], "lazy") == 0;
  if (lazy) options.flags |= DM_INIT_LAZY;

  const size_t n = (size_t)ranks, inner = n % 2 == 0 ? 2 : 1, middle = n % 4 == 0 ? 2 : 1;
  const int32_t line[] = {n}, plane[] = {n / inner, inner}, cube[] = {n / inner / middle, middle, inner};
  dm_mesh *mesh = NULL, *permuted = NULL, *range = NULL;
  REQUIRE(dm_init(device_type(), line, 1, names, &options, &mesh));
  check_all(mesh);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  REQUIRE(dm_init(device_type(), plane, 2, names, &options, &mesh));
  check_all(mesh);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  REQUIRE(dm_init(device_type(), cube, 3, names, &options, &mesh));
  if (lazy) check_group(mesh, "tp"); /* one dimension may be used for long before another is */
  views(mesh);
  check_all(mesh);

  /* The second mesh of the world has the ranks in reverse, and shares communicators. */
  int32_t *reverse = (int32_t *)host_alloc(n * sizeof(int32_t));
  for (int32_t at = 0; at < ranks; ++at) reverse[at] = ranks - 1 - at;
  options.ranks = reverse;
  options.num_ranks = n;
  REQUIRE(dm_init(device_type(), cube, 3, names, &options, &permuted));
  check_all(permuted);
  views(permuted);
  OK(dm_finalize(permuted, NULL));
  dm_free(permuted);
  free(reverse);

  /* Every other rank along a dimension; the others are no members of the result. */
  if (n >= 4) {
    options.ranks = NULL;
    options.num_ranks = 0;
    REQUIRE(dm_init(device_type(), line, 1, names, &options, &permuted));
    const dm_status made = dm_slice_range(permuted, "replicate", 0, n / 2, 2, NULL, &range);
    CHECK(made == DM_STATUS_OK);
    if (made == DM_STATUS_OK && rank % 2 == 0) check_all(range);
    ncclComm_t comm = NULL;
    if (made == DM_STATUS_OK && rank % 2 == 1) GIVES(DM_STATUS_NOT_MEMBER, dm_get_comm(range, NULL, &comm));
    dm_free(range);
    OK(dm_finalize(permuted, NULL));
    dm_free(permuted);
  }
  OK(dm_finalize(mesh, NULL));
  ncclComm_t comm = NULL;
  GIVES(DM_STATUS_ABORTED, dm_get_comm(mesh, "tp", &comm));
  dm_free(mesh);
  dm_world_free(options.world);
  return finish();
}
