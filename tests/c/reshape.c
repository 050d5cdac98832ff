/* ranks: 8 */
/* dm_reshape gives a second factorisation of the same ranks, as expert parallelism uses it. It is
 * checked against the first and shares its communicators. */
#include "check.h"

static ncclComm_t comm_of(const dm_mesh *mesh, const char *dim)
{
  ncclComm_t comm = NULL;
  REQUIRE(dm_get_comm(mesh, dim, &comm));
  return comm;
}

int main(void)
{
  dm_mesh *dense = NULL, *sparse = NULL, *folded = NULL, *none = NULL;
  const char *names[] = {"pp", "dp", "tp"}, *experts[] = {"pp", "edp", "etp"}, *flat[] = {"pp", "ep"}, *moved[] = {"pp", "ep"};
  const int32_t shape[] = {2, 2, 2}, sizes[] = {2, 4}, moved_sizes[] = {4, 2}, wrong[] = {3, 2}, zero[] = {0, 8};
  const char *twice[] = {"ep", "ep"};
  REQUIRE(dm_init("cpu", shape, 3, names, NULL, &dense));
  const int32_t rank = rank_of(dense);

  REQUIRE(dm_reshape(dense, shape, 3, experts, NULL, &sparse));
  CHECK(strcmp(describe(sparse), "DeviceMesh((pp=2, edp=2, etp=2), 'cpu', stride=(4, 2, 1))") == 0);
  CHECK(comm_of(sparse, "pp") == comm_of(dense, "pp"));
  CHECK(comm_of(sparse, "edp") == comm_of(dense, "dp") && comm_of(sparse, "etp") == comm_of(dense, "tp"));

  REQUIRE(dm_reshape(dense, sizes, 2, flat, NULL, &folded));
  CHECK(comm_of(folded, "pp") == comm_of(dense, "pp"));
  int32_t gathered[4], local = -1;
  OK(dm_all_gather(folded, "ep", &rank, gathered, 1, DM_INT32, NULL));
  for (int32_t at = 0; at < 4; ++at) CHECK(gathered[at] == rank / 4 * 4 + at);
  OK(dm_get_local_rank(folded, "ep", &local));
  CHECK(local == rank % 4);

  /* Dimensions of both factorisations can be concatenated when they do not overlap. */
  dm_mesh *pp = slice1(dense, "pp"), *ep = slice1(folded, "ep"), *joined = NULL;
  const dm_mesh *pair[] = {pp, ep};
  REQUIRE(dm_concatenate(pair, 2, &joined));
  bool equal = false;
  OK(dm_equal(joined, folded, &equal));
  CHECK(equal);

  /* Later dimensions do not take the names for other groups, and the next call of all ranks meets. */
  const char *const outer[] = {"pp", "dp"};
  dm_mesh *stages = NULL;
  REQUIRE(dm_slice(dense, outer, 2, &stages));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "a reshaped view has a dimension ep over other ranks", dm_flatten(stages, "ep", NULL, &none));
  REQUIRE(dm_flatten(stages, "stages", NULL, &none));
  dm_free(none);
  dm_free(stages);
  none = NULL;

  /* The others are told of each wrong call of one rank, and the next call meets. */
  if (rank == 6) {
    FAILS(DM_STATUS_INVALID_ARGUMENT, "dimension pp", dm_reshape(dense, moved_sizes, 2, moved, NULL, &none));
    CHECK(strstr(dm_last_error(), "(2, 4)") != NULL && strstr(dm_last_error(), "(4, 2)") != NULL);
    FAILS(DM_STATUS_INVALID_ARGUMENT, "6", dm_reshape(dense, wrong, 2, moved, NULL, &none));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "repeated", dm_reshape(dense, sizes, 2, twice, NULL, &none));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "is 0", dm_reshape(dense, zero, 2, flat, NULL, &none));
    GIVES(DM_STATUS_INVALID_ARGUMENT, dm_reshape(dense, NULL, 2, flat, NULL, &none));
    CHECK(none == NULL);
  } else {
    for (int call = 0; call < 5; ++call)
      FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 6 refused its own dm_reshape as call ", dm_reshape(dense, shape, 3, experts, NULL, &none));
  }
  const bool other = rank == 6;
  FAILS(DM_STATUS_MISMATCH, "dm_reshape",
        dm_reshape(dense, other ? sizes : shape, other ? 2 : 3, other ? flat : experts, NULL, &none));
  CHECK(none == NULL && strstr(dm_last_error(), "sizes=(2, 4)") != NULL && strstr(dm_last_error(), "sizes=(2, 2, 2)") != NULL);

  REQUIRE(dm_finalize(dense, NULL));
  dm_free(joined);
  dm_free(ep);
  dm_free(pp);
  dm_free(folded);
  dm_free(sparse);
  dm_free(dense);
  return finish();
}
