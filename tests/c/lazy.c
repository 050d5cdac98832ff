/* ranks: 4 */
/* DM_INIT_LAZY: a dimension's communicator is made when its group first asks, by that group alone.
 * DM_DIM_OWN_COMM: never shared. A collective that nobody joins ends at the mesh's timeout. */
#include "check.h"

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *lazy = NULL, *flat = NULL, *own = NULL, *twin = NULL, *impatient = NULL;
  const int32_t shape[] = {2, 2}, line[] = {4};
  const char *names[] = {"dp", "tp"};
  ncclComm_t comm = NULL, again = NULL;
  float one = 1, sum = 0;

  options.flags = DM_INIT_LAZY;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &lazy));
  const int32_t rank = rank_of(lazy);
  if (rank < 2) { /* only one of the two tp groups asks */
    REQUIRE(dm_get_comm(lazy, "tp", &comm));
    REQUIRE(dm_get_comm(lazy, "tp", &again));
    CHECK(comm != NULL && comm == again);
  } else {
    OK(dm_all_reduce(lazy, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == 2);
  }
  /* An eager mesh over the same groups shares the communicators that exist, and makes the
     others. */
  options.flags = 0;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &twin));
  OK(dm_all_reduce(twin, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 2);
  REQUIRE(dm_get_comm(twin, "tp", &again));
  CHECK(rank >= 2 || again == comm);
  REQUIRE(dm_flatten(lazy, NULL, NULL, &flat));
  OK(dm_all_reduce(flat, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 4);

  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  dims[0].flags = DM_DIM_OWN_COMM;
  dims[1].nccl_config = &config;
  dims[1].comm_name = "tensor parallel";
  options.dim_options = dims;
  options.num_dim_options = 2;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &own));
  ncclComm_t theirs = NULL;
  for (int index = 0; index < 2; ++index) {
    REQUIRE(dm_get_comm(own, names[index], &comm));
    REQUIRE(dm_get_comm(twin, names[index], &theirs));
    CHECK(comm != theirs);
    OK(dm_all_reduce(own, names[index], &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(sum == 2);
  }

  dm_init_options hurry = DM_INIT_OPTIONS_INIT;
  dm_dim_options apart = DM_DIM_OPTIONS_INIT;
  apart.flags = DM_DIM_OWN_COMM;
  hurry.timeout_ms = 2000;
  hurry.dim_options = &apart;
  hurry.num_dim_options = 1;
  impatient = made_in_time("cpu", line, 1, NULL, &hurry);
  if (rank == 2) {
    const moment began = moment_now();
    FAILS(DM_STATUS_TIMEOUT, "did not come within 2000 ms", dm_all_reduce(impatient, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(own_seconds_since(&began) < 2 * 1.1 + 0.25);
  }
  OK(dm_all_reduce(flat, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL)); /* the others wait here for rank 2 */
  OK(dm_abort(impatient));

  OK(dm_finalize(own, NULL));
  OK(dm_finalize(lazy, NULL));
  OK(dm_all_reduce(twin, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 2);
  OK(dm_finalize(twin, NULL));
  dm_mesh *all[] = {lazy, flat, own, twin, impatient};
  for (size_t at = 0; at < sizeof all / sizeof *all; ++at) dm_free(all[at]);
  return finish();
}
