/* The ABI as numbers: the enum values, struct sizes and offsets of version 0.2 on 64-bit machines,
 * and every byte of the INIT macros. */
#include "check.h"

#define AT(type, field, offset) CHECK(offsetof(type, field) == (offset))

int main(void)
{
  const int32_t statuses[] = {DM_STATUS_OK, DM_STATUS_INVALID_ARGUMENT, DM_STATUS_INVALID_HANDLE, DM_STATUS_NOT_FOUND,
                              DM_STATUS_NOT_MEMBER, DM_STATUS_BUFFER_TOO_SMALL, DM_STATUS_MISMATCH, DM_STATUS_TIMEOUT,
                              DM_STATUS_STORE, DM_STATUS_CCL, DM_STATUS_DEVICE, DM_STATUS_LIBRARY, DM_STATUS_UNSUPPORTED,
                              DM_STATUS_ABORTED, DM_STATUS_PEER_LOST, DM_STATUS_INTERNAL, DM_STATUS_EXHAUSTED};
  for (int32_t number = 0; number < 17; ++number) {
    CHECK(statuses[number] == number);
    CHECK(strncmp(dm_status_name(number), "DM_STATUS_", 10) == 0);
    for (int32_t other = 0; other < number; ++other) CHECK(strcmp(dm_status_name(number), dm_status_name(other)) != 0);
  }
  CHECK(strcmp(dm_status_name(DM_STATUS_TIMEOUT), "DM_STATUS_TIMEOUT") == 0);
  CHECK(dm_status_name(17) != NULL && dm_status_name(-1) != NULL);

  const int32_t types[] = {DM_INT8,    DM_UINT8,   DM_INT32,   DM_UINT32,   DM_INT64,      DM_UINT64,
                           DM_FLOAT16, DM_FLOAT32, DM_FLOAT64, DM_BFLOAT16, DM_FLOAT8E4M3, DM_FLOAT8E5M2};
  const int32_t nccl_types[] = {ncclInt8,    ncclUint8,   ncclInt32,   ncclUint32,   ncclInt64,      ncclUint64,
                                ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2};
  for (int32_t number = 0; number < 10; ++number) CHECK(types[number] == number && nccl_types[number] == number);
  CHECK(DM_SUM == (int)ncclSum && DM_PROD == (int)ncclProd && DM_MAX == (int)ncclMax && DM_MIN == (int)ncclMin && DM_AVG == (int)ncclAvg);
  CHECK(DM_LOG_OFF == 0 && DM_LOG_ERROR == 1 && DM_LOG_WARN == 2 && DM_LOG_INFO == 3 && DM_LOG_DEBUG == 4);
  CHECK(DM_WORLD_OFFLINE == 1u && DM_DIM_OWN_COMM == 1u && DM_INIT_LAZY == 1u && DM_INIT_OWN_COMMS == 2u);
  CHECK(DM_WORLD_DEVICE == 2u);

  CHECK(sizeof(dm_error_info) == 88);
  AT(dm_error_info, status, 8); AT(dm_error_info, ccl_result, 12); AT(dm_error_info, device_error, 16);
  AT(dm_error_info, os_error, 20); AT(dm_error_info, message, 24);
  AT(dm_error_info, ranks, 32); AT(dm_error_info, num_ranks, 40); AT(dm_error_info, lost_ranks, 48);
  AT(dm_error_info, num_lost, 56); AT(dm_error_info, dim, 64); AT(dm_error_info, waited_seconds, 72);
  AT(dm_error_info, call, 80);
  CHECK(sizeof(dm_world_options) == 72);
  AT(dm_world_options, flags, 8); AT(dm_world_options, world_size, 12); AT(dm_world_options, rank, 16);
  AT(dm_world_options, local_rank, 20); AT(dm_world_options, device, 24); AT(dm_world_options, join, 28);
  AT(dm_world_options, timeout_ms, 32); AT(dm_world_options, init_method, 40);
  AT(dm_world_options, ccl_library, 48); AT(dm_world_options, store, 56);
  AT(dm_world_options, joining_out, 64);
  CHECK(sizeof(dm_world_info) == 72);
  AT(dm_world_info, rank, 8); AT(dm_world_info, size, 12); AT(dm_world_info, local_rank, 16); AT(dm_world_info, local_size, 20);
  AT(dm_world_info, host, 24); AT(dm_world_info, num_hosts, 28); AT(dm_world_info, device, 32); AT(dm_world_info, ccl_version, 36);
  AT(dm_world_info, device_type, 40); AT(dm_world_info, library, 48); AT(dm_world_info, epoch, 56); AT(dm_world_info, ticket, 64);
  CHECK(sizeof(dm_store_callbacks) == 64);
  AT(dm_store_callbacks, user_data, 8); AT(dm_store_callbacks, set, 16); AT(dm_store_callbacks, get, 24);
  AT(dm_store_callbacks, add, 32); AT(dm_store_callbacks, drop, 40);
  AT(dm_store_callbacks, remove, 48); AT(dm_store_callbacks, compare_set, 56);
  CHECK(sizeof(dm_dim_options) == 32);
  AT(dm_dim_options, flags, 8); AT(dm_dim_options, reserved, 12); AT(dm_dim_options, nccl_config, 16); AT(dm_dim_options, comm_name, 24);
  CHECK(sizeof(dm_init_options) == 64);
  AT(dm_init_options, flags, 8); AT(dm_init_options, reserved, 12); AT(dm_init_options, world, 16); AT(dm_init_options, ranks, 24);
  AT(dm_init_options, num_ranks, 32); AT(dm_init_options, dim_options, 40); AT(dm_init_options, num_dim_options, 48);
  AT(dm_init_options, timeout_ms, 56);
  CHECK(sizeof(dm_call_options) == 40);
  AT(dm_call_options, flags, 8);
  AT(dm_call_options, reserved, 12);
  AT(dm_call_options, timeout_ms, 16);
  AT(dm_call_options, dim_options, 24);
  AT(dm_call_options, num_dim_options, 32);
  CHECK(sizeof(dm_plan_options) == 48);
  AT(dm_plan_options, flags, 8); AT(dm_plan_options, world_size, 12); AT(dm_plan_options, locations, 16); AT(dm_plan_options, shape, 24);
  AT(dm_plan_options, ndim, 32); AT(dm_plan_options, traffic, 40);
  CHECK(sizeof(dm_recover_options) == 72);
  AT(dm_recover_options, flags, 8); AT(dm_recover_options, min_size, 12); AT(dm_recover_options, dim, 16);
  AT(dm_recover_options, timeout_ms, 24); AT(dm_recover_options, replace_ms, 32); AT(dm_recover_options, silent_ms, 40);
  AT(dm_recover_options, dim_options, 48); AT(dm_recover_options, num_dim_options, 56);
  AT(dm_recover_options, max_size, 64); AT(dm_recover_options, reserved, 68);
  CHECK(sizeof(dm_recovery) == 88);
  AT(dm_recovery, epoch, 8); AT(dm_recovery, previous_epoch, 16); AT(dm_recovery, lost_ranks, 24); AT(dm_recovery, num_lost, 32);
  AT(dm_recovery, joined_ranks, 40); AT(dm_recovery, num_joined, 48); AT(dm_recovery, old_coordinate, 56);
  AT(dm_recovery, new_coordinate, 64); AT(dm_recovery, ndim, 72); AT(dm_recovery, state_root, 80); AT(dm_recovery, has_joined, 84);
  CHECK(DM_RECOVER_HAS_STATE == 1u && DM_RECOVER_ANY_STATE == 2u && DM_RECOVER_GROW == 4u);
  CHECK(sizeof(dm_placement) == 32);
  AT(dm_placement, kind, 0); AT(dm_placement, tensor_dim, 4); AT(dm_placement, order, 8); AT(dm_placement, reserved, 12);

  /* Every field but the size is zero. The fields are compared one by one, because the values of
   * padding bytes are not defined. */
  dm_error_info error = DM_ERROR_INFO_INIT;
  CHECK(error.struct_size == sizeof error && error.status == 0 && error.ccl_result == 0 && error.device_error == 0 &&
        error.os_error == 0 && error.message == NULL);
  dm_world_options world = DM_WORLD_OPTIONS_INIT;
  CHECK(world.struct_size == sizeof world && world.flags == 0 && world.world_size == 0 && world.rank == 0 && world.local_rank == 0 &&
        world.timeout_ms == 0 && world.init_method == NULL && world.ccl_library == NULL && world.store == NULL && world.device == 0 &&
        world.join == DM_JOIN_AUTO && world.joining_out == NULL);
  dm_world_info about = DM_WORLD_INFO_INIT;
  CHECK(about.struct_size == sizeof about && about.rank == 0 && about.size == 0 && about.local_rank == 0 &&
        about.local_size == 0 && about.host == 0 && about.num_hosts == 0 && about.device == 0 &&
        about.ccl_version == 0 && about.device_type == NULL && about.library == NULL && about.epoch == 0 && about.ticket == 0);
  dm_store_callbacks store = DM_STORE_CALLBACKS_INIT;
  CHECK(store.struct_size == sizeof store && store.user_data == NULL && !store.set && !store.get && !store.add && !store.drop);
  dm_dim_options dim = DM_DIM_OPTIONS_INIT;
  CHECK(dim.struct_size == sizeof dim && dim.flags == 0 && dim.nccl_config == NULL && dim.comm_name == NULL);
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  CHECK(init.struct_size == sizeof init && init.flags == 0 && init.world == NULL && init.ranks == NULL && init.dim_options == NULL &&
        init.num_ranks == 0 && init.num_dim_options == 0 && init.timeout_ms == 0 && init.reserved == 0);
  dm_call_options call = DM_CALL_OPTIONS_INIT;
  CHECK(call.struct_size == sizeof call && call.flags == 0 && call.reserved == 0 && call.timeout_ms == 0 && call.dim_options == NULL &&
        call.num_dim_options == 0);
  dm_plan_options plan = DM_PLAN_OPTIONS_INIT;
  CHECK(plan.struct_size == sizeof plan && plan.flags == 0 && plan.world_size == 0 && plan.locations == NULL && plan.shape == NULL &&
        plan.ndim == 0 && plan.traffic == NULL);

  dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
  CHECK(wishes.struct_size == sizeof wishes && wishes.flags == 0 && wishes.min_size == 0 && wishes.dim == NULL && wishes.timeout_ms == 0 &&
        wishes.replace_ms == 0 && wishes.silent_ms == 0 && wishes.dim_options == NULL && wishes.num_dim_options == 0);
  dm_recovery recovery = DM_RECOVERY_INIT;
  CHECK(recovery.struct_size == sizeof recovery && recovery.epoch == -1 && recovery.lost_ranks == NULL && recovery.num_lost == 0 &&
        recovery.joined_ranks == NULL && recovery.num_joined == 0 && recovery.old_coordinate == NULL && recovery.new_coordinate == NULL &&
        recovery.ndim == 0 && recovery.state_root == DM_RANK_NONE && recovery.has_joined == 0);

  CHECK(dm_version() == DEVICEMESH_VERSION);
  CHECK(DM_RANK_NONE == -1 && DM_STORE_NOT_YET == 100 && DM_STATUS_INVALID_STATE == 17);
  CHECK(strcmp(dm_last_error(), "") == 0);
  dm_error_info info = DM_ERROR_INFO_INIT;
  OK(dm_last_error_info(&info));
  CHECK(info.status == DM_STATUS_OK && strcmp(info.message, "") == 0);
  return finish();
}
