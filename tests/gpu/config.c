/* An ncclConfig_t for each dimension is taken as it is, also with the size of an older release, and
 * its communicator is never shared with one that was made without. Ranks that ask for different
 * configurations are told. Bytes that are no ncclConfig_t are refused. */
#include "gpu.h"

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t inner = ranks % 2 == 0 ? 2 : 1, shape[] = {ranks / inner, inner};
  const char *names[] = {"dp", "tp"};
  ncclConfig_t few = NCCL_CONFIG_INITIALIZER, shares = NCCL_CONFIG_INITIALIZER, older = NCCL_CONFIG_INITIALIZER,
               garbage = NCCL_CONFIG_INITIALIZER;
  few.minCTAs = few.maxCTAs = 1;
  few.commName = "two_wide";
  /* Its own splits may take over its channels and buffers. */
  shares.splitShare = 1;
  shares.maxCTAs = 2;
  /* As a program built with NCCL 2.18 has it: up to splitShare. */
  older.size = offsetof(ncclConfig_t, trafficClass);
  older.version = NCCL_VERSION(2, 18, 3);
  older.maxCTAs = 1;
  garbage.magic = 0;

  dm_mesh *plain = NULL, *with = NULL, *flat = NULL, *none = NULL;
  REQUIRE(dm_init(device_type(), shape, 2, names, &options, &plain));
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dims[0].nccl_config = &shares;
  dims[1].nccl_config = &few;
  dims[1].comm_name = "tensor_parallel";
  options.dim_options = dims;
  options.num_dim_options = 2;
  REQUIRE(dm_init(device_type(), shape, 2, names, &options, &with));
  check_group(with, "dp");
  check_group(with, "tp");
  ncclComm_t without_config = NULL, with_config = NULL;
  for (int index = 0; index < 2; ++index) {
    REQUIRE(dm_get_comm(plain, names[index], &without_config));
    REQUIRE(dm_get_comm(with, names[index], &with_config));
    CHECK(without_config != with_config);
  }
  /* Flattened: split from a communicator of the root; a config of its own again. */
  dm_dim_options own = DM_DIM_OPTIONS_INIT;
  own.nccl_config = &older;
  dm_call_options apart = DM_CALL_OPTIONS_INIT;
  apart.dim_options = &own;
  apart.num_dim_options = 1;
  REQUIRE(dm_flatten(with, "all", &apart, &flat));
  check_group(flat, NULL);
  OK(dm_finalize(with, NULL));
  dm_free(flat);
  dm_free(with);
  check_group(plain, "tp"); /* the other mesh's communicators go on */

  /* Ranks that disagree, and one that hands in no config at all but something else. */
  if (ranks > 1) {
    ncclConfig_t differs = NCCL_CONFIG_INITIALIZER;
    differs.maxCTAs = rank == 0 ? 1 : 2;
    dims[0].nccl_config = NULL;
    dims[1].nccl_config = &differs;
    FAILS(DM_STATUS_MISMATCH, "config=", dm_init(device_type(), shape, 2, names, &options, &none));
  }
  dims[1].nccl_config = &garbage;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "not an ncclConfig_t", dm_init(device_type(), shape, 2, names, &options, &none));
  OK(dm_finalize(plain, NULL));
  dm_free(plain);
  dm_world_free(options.world);
  return finish();
}
