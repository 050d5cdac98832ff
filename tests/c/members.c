/* ranks: 4 */
/* What a mesh answers about itself on members and on other ranks, before and after its end: whether
 * this rank is in it, its device type, and with dm_check how its communicators are. */
#include "check.h"

static bool is_member(const dm_mesh *mesh)
{
  bool member = false;
  REQUIRE(dm_is_member(mesh, &member));
  return member;
}

static void of_offline(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *other = NULL;
  const int32_t shape[] = {2, 2};
  const char *names[] = {"dp", "tp"}, *tp[] = {"tp"};
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 8;
  join.rank = 3;
  REQUIRE(dm_world_init("cuda", &join, &options.world));
  REQUIRE(dm_init("cuda", shape, 2, names, &options, &mesh));
  CHECK(is_member(mesh) && strcmp(dm_device_type(mesh), "cuda") == 0);
  REQUIRE(dm_submesh(mesh, tp, 1, 0, &other)); /* ranks 0 and 1 */
  CHECK(!is_member(other));
  GIVES(DM_STATUS_UNSUPPORTED, dm_check(mesh, NULL));
  dm_free(other);
  dm_free(mesh);
  dm_world_free(options.world);
}

int main(void)
{
  const int32_t square[] = {2, 2}, pair[] = {2};
  const char *names[] = {"dp", "tp"}, *tp[] = {"tp"};
  dm_mesh *mesh = NULL, *small = NULL, *lazy = NULL, *other = NULL, *range = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const float one = 1;
  float sum = 0;
  of_offline();

  REQUIRE(dm_init("cpu", square, 2, names, NULL, &mesh));
  const int32_t rank = rank_of(mesh);
  CHECK(is_member(mesh) && strcmp(dm_device_type(mesh), "cpu") == 0);
  OK(dm_check(mesh, NULL));
  OK(dm_check(mesh, "tp"));
  GIVES(DM_STATUS_NOT_FOUND, dm_check(mesh, "pp"));
  REQUIRE(dm_submesh(mesh, tp, 1, 0, &other));
  CHECK(is_member(other) == (rank < 2));
  GIVES(rank < 2 ? DM_STATUS_OK : DM_STATUS_NOT_MEMBER, dm_check(other, NULL));
  REQUIRE(dm_slice_range(mesh, "dp", 1, 1, 1, NULL, &range));
  CHECK(is_member(range) == (rank >= 2));

  /* A mesh over two of the four ranks. */
  REQUIRE(dm_init("cpu", pair, 1, NULL, NULL, &small));
  CHECK(is_member(small) == (rank < 2));
  GIVES(rank < 2 ? DM_STATUS_OK : DM_STATUS_NOT_MEMBER, dm_check(small, NULL));

  /* dm_check makes no communicator of a lazy mesh, so one rank alone may call it. Other names than
   * those of the first mesh, so that nothing is shared: the dimensions have the options. */
  dm_dim_options own[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  own[0].flags = own[1].flags = DM_DIM_OWN_COMM;
  options.dim_options = own;
  options.num_dim_options = 2;
  options.flags = DM_INIT_LAZY;
  REQUIRE(dm_init("cpu", square, 2, names, &options, &lazy));
  if (rank == 2) {
    OK(dm_check(lazy, NULL));
    OK(dm_check(lazy, "dp"));
    GIVES(DM_STATUS_NOT_FOUND, dm_check(lazy, "pp"));
  }
  OK(dm_all_reduce(lazy, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 2);
  OK(dm_check(lazy, NULL));

  /* Along tp, which is the second dimension, ranks give different counts. dp is not made, and tp
   * has failed: dm_check of all dimensions gives the failure of tp. */
  const float twos[2] = {1, 1};
  float sums[2] = {0, 0};
  GIVES(DM_STATUS_MISMATCH, dm_all_reduce(lazy, "tp", twos, sums, rank % 2 == 0 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL));
  GIVES(DM_STATUS_MISMATCH, dm_check(lazy, "tp"));
  FAILS(DM_STATUS_MISMATCH, "dm_all_reduce", dm_check(lazy, NULL));
  dm_error_info info = DM_ERROR_INFO_INIT;
  OK(dm_last_error_info(&info));
  CHECK(info.dim != NULL && strcmp(info.dim, "tp") == 0);
  OK(dm_check(lazy, "dp"));

  REQUIRE(dm_world_barrier((dm_get_world(mesh, &options.world), options.world), 0));
  OK(dm_abort(lazy));
  GIVES(DM_STATUS_ABORTED, dm_check(lazy, NULL));
  GIVES(DM_STATUS_ABORTED, dm_check(lazy, "dp"));
  CHECK(is_member(lazy) && strcmp(dm_device_type(lazy), "cpu") == 0);
  OK(dm_finalize(small, NULL));
  CHECK(is_member(small) == (rank < 2));
  OK(dm_world_finalize(options.world, 0));
  CHECK(is_member(mesh) && strcmp(dm_device_type(mesh), "cpu") == 0);
  GIVES(DM_STATUS_ABORTED, dm_check(mesh, NULL));
  dm_free(lazy);
  CHECK(dm_device_type(lazy) == NULL);
  dm_free(range);
  dm_free(other);
  dm_free(small);
  dm_free(mesh);
  dm_world_free(options.world);
  return finish();
}
