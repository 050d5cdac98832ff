/* dm_neighbor and dm_translate_rank, for every rank of a permuted mesh, compared with the lists of
 * dm_group_ranks. */
#include "check.h"

static void all_of(const dm_mesh *mesh, const char *dim)
{
  int32_t group[64], rank = -1, mine = -1, me = rank_of(mesh);
  size_t size = 0;
  REQUIRE(dm_group_ranks(mesh, dim, group, 64, &size));
  REQUIRE(dm_get_local_rank(mesh, dim, &mine));
  CHECK(group[mine] == me);
  const int32_t n = (int32_t)size;
  for (int32_t index = 0; index < n; ++index) {
    OK(dm_translate_rank(mesh, dim, index, &rank));
    CHECK(rank == group[index]);
    int32_t back = -1;
    OK(dm_translate_world_rank(mesh, dim, rank, &back));
    CHECK(back == index);
  }
  for (int32_t offset = -2 * n - 1; offset <= 2 * n + 1; ++offset) {
    const int32_t there = mine + offset;
    OK(dm_neighbor(mesh, dim, offset, false, &rank));
    CHECK(rank == (there >= 0 && there < n ? there : -1));
    OK(dm_neighbor(mesh, dim, offset, true, &rank));
    CHECK(rank == ((there % n) + n) % n);
  }
  rank = 77;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "the ranks along it are 0 to", dm_translate_rank(mesh, dim, n, &rank));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_translate_rank(mesh, dim, -1, &rank));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_translate_rank(mesh, dim, 0, NULL));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_neighbor(mesh, dim, 0, true, NULL));
  OK(dm_neighbor(mesh, dim, INT32_MIN, false, &rank));
  CHECK(rank == -1);
  OK(dm_neighbor(mesh, dim, INT32_MAX, true, &rank));
  CHECK(rank == (mine + INT32_MAX % n) % n);
}

int main(void)
{
  /* A world of 13 ranks, of which 12 are in the mesh, backwards. */
  int32_t ranks[12];
  for (int32_t index = 0; index < 12; ++index) ranks[index] = 12 - index;
  const int32_t shape[] = {2, 3, 2};
  const char *names[] = {"pp", "dp", "tp"}, *outer[] = {"pp", "tp"};
  for (int32_t me = 0; me < 13; ++me) {
    dm_world_options join = DM_WORLD_OPTIONS_INIT;
    dm_init_options options = DM_INIT_OPTIONS_INIT;
    dm_mesh *mesh = NULL, *slice = NULL, *flat = NULL;
    join.flags = DM_WORLD_OFFLINE;
    join.world_size = 13;
    join.rank = me;
    REQUIRE(dm_world_init("cpu", &join, &options.world));
    options.ranks = ranks;
    options.num_ranks = 12;
    REQUIRE(dm_init("cpu", shape, 3, names, &options, &mesh));
    int32_t rank = -1;
    if (me == 0) {
      GIVES(DM_STATUS_NOT_MEMBER, dm_translate_rank(mesh, "dp", 0, &rank));
      GIVES(DM_STATUS_NOT_MEMBER, dm_neighbor(mesh, "dp", 1, true, &rank));
    } else {
      for (size_t index = 0; index < 3; ++index) all_of(mesh, names[index]);
      REQUIRE(dm_slice(mesh, outer, 2, &slice));
      REQUIRE(dm_flatten(slice, "stage", NULL, &flat));
      all_of(flat, NULL);
      all_of(mesh, "stage");
      GIVES(DM_STATUS_NOT_FOUND, dm_neighbor(mesh, "none", 1, true, &rank));
      GIVES(DM_STATUS_INVALID_ARGUMENT, dm_neighbor(mesh, NULL, 1, true, &rank));
    }
    dm_free(flat);
    dm_free(slice);
    dm_free(mesh);
    dm_world_free(options.world);
  }
  int32_t rank = -1;
  GIVES(DM_STATUS_INVALID_HANDLE, dm_neighbor(NULL, "dp", 1, true, &rank));
  GIVES(DM_STATUS_INVALID_HANDLE, dm_translate_rank(NULL, "dp", 1, &rank));
  return finish();
}
