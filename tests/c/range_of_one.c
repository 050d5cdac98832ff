/* ranks: 4 */
/* A range of one index. Ranks outside it keep their communicator with one rank, which all their
 * dimensions of size 1 share. */
#include "check.h"

int main(void)
{
  const char *names[] = {"dp", "tp"};
  const int32_t square[] = {2, 2}, column[] = {4, 1};
  dm_mesh *mesh, *stage, *wide, *dp;
  OK(dm_init("cpu", square, 2, names, NULL, &mesh));
  OK(dm_slice_range(mesh, "tp", 1, 1, 1, NULL, &stage));
  OK(dm_init("cpu", column, 2, names, NULL, &wide));

  int32_t tp = -1;
  OK(dm_get_local_rank(mesh, "tp", &tp));
  float value = 3;
  OK(dm_all_reduce(wide, "tp", &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(value == 3);
  if (tp == 1) {
    OK(dm_all_reduce(stage, "tp", &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(value == 3);
  } else {
    ncclComm_t comm;
    GIVES(DM_STATUS_NOT_MEMBER, dm_get_comm(stage, "tp", &comm));
  }
  value = 1;
  OK(dm_slice(mesh, names, 1, &dp));
  OK(dm_all_reduce(dp, "dp", &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(value == 2);
  OK(dm_finalize(mesh, NULL));
  OK(dm_finalize(wide, NULL));
  dm_free(dp);
  dm_free(stage);
  dm_free(wide);
  dm_free(mesh);
  return finish();
}
