/* ranks: 3 */
/* A rank that refuses its own dm_shrink tells the ranks that it would go on with, with a list and
 * without one, so they do not wait for their deadline of ten minutes. The next call meets. Rank 2
 * lives, and is named as lost. */
#include "check.h"

int main(void)
{
  const int32_t shape[] = {3}, lost[] = {2}, twice[] = {2, 1}, outside[] = {2, 9};
  const char *name = "x", *const told = "rank 1 refused its own dm_shrink as call ";
  dm_call_options late = DM_CALL_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *other = NULL, *none = NULL, *left = NULL;
  float one = 1, sum = 0;
  late.timeout_ms = -1;
  REQUIRE(dm_init("cpu", shape, 1, &name, NULL, &mesh));
  REQUIRE(dm_init("cpu", shape, 1, &name, NULL, &other));
  const int32_t rank = rank_of(mesh);
  const double began = seconds_now();

  /* Without a list, with wrong options and a wrong dimension. In the last call of all ranks nobody
   * is lost. */
  if (rank == 1) {
    FAILS(DM_STATUS_INVALID_ARGUMENT, "timeout_ms is -1", dm_shrink(mesh, "x", NULL, 0, &late, &none));
    FAILS(DM_STATUS_NOT_FOUND, "nowhere", dm_shrink(mesh, "nowhere", NULL, 0, NULL, &none));
  } else {
    FAILS(DM_STATUS_INVALID_ARGUMENT, told, dm_shrink(mesh, "x", NULL, 0, NULL, &none));
    FAILS(DM_STATUS_NOT_FOUND, told, dm_shrink(mesh, "x", NULL, 0, NULL, &none));
  }
  FAILS(DM_STATUS_INVALID_STATE, "no rank is lost", dm_shrink(mesh, "x", NULL, 0, NULL, &none));

  /* With a list. A list that is wrong in itself says nothing about the other ranks, which are not
   * told of it. */
  if (rank == 1) {
    FAILS(DM_STATUS_NOT_FOUND, "nowhere", dm_shrink(other, "nowhere", lost, 1, NULL, &none));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "mesh_out", dm_shrink(other, "x", lost, 1, NULL, NULL));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "timeout_ms is -1", dm_shrink(other, "x", lost, 1, &late, &none));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 9", dm_shrink(other, "x", outside, 2, NULL, &none));
  } else if (rank == 0) {
    FAILS(DM_STATUS_NOT_FOUND, told, dm_shrink(other, "x", lost, 1, NULL, &none));
    for (int at = 0; at < 2; ++at) FAILS(DM_STATUS_INVALID_ARGUMENT, told, dm_shrink(other, "x", lost, 1, NULL, &none));
  } else {
    OK(dm_abort(other));
  }
  /* The calls without a list count as attempts on every rank, also those that a rank refused. So
   * attempts with a list on the same mesh have equal numbers. */
  if (rank == 2) {
    OK(dm_abort(mesh));
  } else {
    dm_mesh *second = NULL;
    REQUIRE(dm_shrink(mesh, "x", lost, 1, NULL, &second));
    OK(dm_all_reduce(second, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == 2);
    OK(dm_finalize(second, NULL));
    dm_free(second);
  }
  if (rank < 2) {
    if (rank == 1) FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 1 is this one", dm_shrink(other, "x", twice, 2, NULL, &none));
    REQUIRE(dm_shrink(other, "x", lost, 1, NULL, &left));
    OK(dm_all_reduce(left, "x", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == 2);
    OK(dm_finalize(left, NULL));
  }
  CHECK(none == NULL && seconds_now() - began < 120);
  dm_free(left);
  dm_free(other);
  dm_free(mesh);
  return finish();
}
