/* The functions that Go calls: those of devicemesh.h, each with the reason of a failure in its
 * result. dm_last_error belongs to the calling thread. A goroutine may be on another thread at its
 * next call, so the reason is fetched inside the call that failed. Tokens are integers here,
 * because Go's collector follows pointers. */

#ifndef DEVICEMESH_GO_SHIM_H
#define DEVICEMESH_GO_SHIM_H

#include <devicemesh.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The result of a call. The pointers are NULL on success, and otherwise copies that go_drop_outcome
 * frees. */
typedef struct outcome {
  int32_t status, ccl_result, device_error, os_error;
  char *message;
  int32_t *ranks; /* The world ranks that the failure is about, and after those the lost ones. */
  size_t num_ranks, num_lost;
  char *dim; /* NULL for a call without a dimension. */
  double waited_seconds;
  int64_t call;
} outcome;

static inline outcome go_outcome(dm_status status)
{
  outcome result = {.status = status};
  if (status != DM_STATUS_OK) {
    dm_error_info info = DM_ERROR_INFO_INIT;
    dm_last_error_info(&info);
    result.ccl_result = info.ccl_result;
    result.device_error = info.device_error;
    result.os_error = info.os_error;
    result.message = strdup(info.message);
    result.dim = info.dim ? strdup(info.dim) : NULL;
    result.waited_seconds = info.waited_seconds;
    result.call = info.call;
    result.ranks = (int32_t *)malloc((info.num_ranks + info.num_lost + 1) * sizeof(int32_t));
    if (result.ranks) {
      if (info.num_ranks > 0) memcpy(result.ranks, info.ranks, info.num_ranks * sizeof(int32_t));
      if (info.num_lost > 0) memcpy(result.ranks + info.num_ranks, info.lost_ranks, info.num_lost * sizeof(int32_t));
      result.num_ranks = info.num_ranks;
      result.num_lost = info.num_lost;
    }
  }
  return result;
}

/* Frees what an outcome holds. */
static inline void go_drop_outcome(outcome result)
{
  free(result.message);
  free(result.ranks);
  free(result.dim);
}

/* Sets the callbacks of a store that is written in Go. Defined in callbacks.c. */
void go_store_callbacks(dm_store_callbacks *callbacks, uintptr_t store, bool decides);

/* The resolver that asks the one written in Go. Defined in callbacks.c. */
void *go_resolver(void *user_data, const char *name);

/* The log that passes each record to Go. Defined in callbacks.c. */
void go_log(void *user_data, dm_log_level level, const char *message);

/* The handler that passes each event to Go. Defined in callbacks.c. */
void go_event(void *user_data, const dm_event *event);

static inline long go_thread(void) { return syscall(SYS_gettid); }
static inline void go_free(uintptr_t mesh) { dm_free((dm_mesh *)mesh); }
static inline void go_world_free(uintptr_t world) { dm_world_free((dm_world *)world); }
static inline size_t go_buffers_count(uintptr_t buffers) { return dm_buffers_count((dm_buffers *)buffers); }
static inline void go_buffers_free(uintptr_t buffers) { dm_buffers_free((dm_buffers *)buffers); }
static inline void go_events_free(uintptr_t events) { dm_events_free((dm_events *)events); }
static inline size_t go_ndim(uintptr_t mesh) { return dm_ndim((dm_mesh *)mesh); }
static inline const char *go_dim_name(uintptr_t mesh, size_t index) { return dm_dim_name((dm_mesh *)mesh, index); }
static inline void go_set_world(dm_init_options *options, uintptr_t world) { options->world = (dm_world *)world; }

/* Writes "cuda" or "cpu", which is static. */
static inline outcome go_device_type(uintptr_t mesh, const char **type_out)
{
  *type_out = dm_device_type((dm_mesh *)mesh);
  return go_outcome(*type_out ? DM_STATUS_OK : DM_STATUS_INVALID_HANDLE);
}

#define MESH (dm_mesh *)mesh
#define STREAM (void *)stream
#define WORLD (dm_world *)world
#define MESH_OUT (dm_mesh **)mesh_out
#define WORLD_OUT (dm_world **)world_out
#define BUFFERS_OUT (dm_buffers **)buffers_out
#define SHIM(name, parameters, arguments) \
  static inline outcome go_##name parameters { return go_outcome(dm_##name arguments); }

SHIM(world_init, (const char *device_type, const dm_world_options *options, uintptr_t *world_out), (device_type, options, WORLD_OUT))
SHIM(world_rank, (uintptr_t world, int32_t *rank_out), (WORLD, rank_out))
SHIM(world_size, (uintptr_t world, int32_t *size_out), (WORLD, size_out))
SHIM(world_barrier, (uintptr_t world, int64_t timeout_ms), (WORLD, timeout_ms))
SHIM(world_locations, (uintptr_t world, const char *location, int64_t timeout_ms, const char *const **locations_out),
     (WORLD, location, timeout_ms, locations_out))
SHIM(world_abort, (uintptr_t world), (WORLD))
SHIM(world_finalize, (uintptr_t world, int64_t timeout_ms), (WORLD, timeout_ms))
SHIM(world_get_info, (uintptr_t world, dm_world_info *info_out), (WORLD, info_out))
SHIM(waiting, (uintptr_t world, int32_t *count_out), (WORLD, count_out))
SHIM(get_world, (uintptr_t mesh, uintptr_t *world_out), (MESH, WORLD_OUT))
SHIM(default_world, (const char *device_type, int64_t timeout_ms, uintptr_t *world_out), (device_type, timeout_ms, WORLD_OUT))
SHIM(default_world_abort, (void), ())
SHIM(default_world_finalize, (int64_t timeout_ms), (timeout_ms))

SHIM(init, (const char *device_type, const int32_t *shape, size_t ndim, const char *const *names, const dm_init_options *options, uintptr_t *mesh_out),
     (device_type, shape, ndim, names, options, MESH_OUT))
SHIM(from_comms,
     (const char *device_type, const int32_t *shape, size_t ndim, const char *const *names, const uintptr_t *comms, const dm_init_options *options,
      uintptr_t *mesh_out),
     (device_type, shape, ndim, names, (const ncclComm_t *)comms, options, MESH_OUT))
SHIM(deserialize, (const char *text, const dm_init_options *options, uintptr_t *mesh_out), (text, options, MESH_OUT))
SHIM(lookup, (const char *name, uintptr_t *mesh_out), (name, MESH_OUT))
SHIM(register, (uintptr_t mesh, const char *name), (MESH, name))
SHIM(unregister, (const char *name), (name))
SHIM(check, (uintptr_t mesh, const char *dim), (MESH, dim))
SHIM(stream_wait, (uintptr_t mesh, const char *dim, uintptr_t stream, int64_t timeout_ms), (MESH, dim, STREAM, timeout_ms))
SHIM(abort, (uintptr_t mesh), (MESH))
SHIM(finalize, (uintptr_t mesh, const dm_call_options *options), (MESH, options))
SHIM(lost_ranks, (uintptr_t mesh, int32_t *ranks, size_t capacity, size_t *len_out), (MESH, ranks, capacity, len_out))

SHIM(slice, (uintptr_t mesh, const char *const *names, size_t n, uintptr_t *mesh_out), (MESH, names, n, MESH_OUT))
SHIM(flatten, (uintptr_t mesh, const char *name, const dm_call_options *options, uintptr_t *mesh_out), (MESH, name, options, MESH_OUT))
SHIM(unflatten,
     (uintptr_t mesh, const char *dim, const int32_t *shape, size_t ndim, const char *const *names, const dm_call_options *options, uintptr_t *mesh_out),
     (MESH, dim, shape, ndim, names, options, MESH_OUT))
SHIM(reshape, (uintptr_t mesh, const int32_t *shape, size_t ndim, const char *const *names, const dm_call_options *options, uintptr_t *mesh_out),
     (MESH, shape, ndim, names, options, MESH_OUT))
SHIM(slice_range,
     (uintptr_t mesh, const char *dim, int32_t start, int32_t len, int32_t step, const dm_call_options *options, uintptr_t *mesh_out),
     (MESH, dim, start, len, step, options, MESH_OUT))
SHIM(shrink, (uintptr_t mesh, const char *dim, const int32_t *lost, size_t n, const dm_call_options *options, uintptr_t *mesh_out),
     (MESH, dim, lost, n, options, MESH_OUT))
SHIM(recover, (uintptr_t mesh, const dm_recover_options *options, uintptr_t *mesh_out), (MESH, options, MESH_OUT, NULL))
SHIM(get_recovery, (uintptr_t mesh, dm_recovery *recovery_out), (MESH, recovery_out))
SHIM(concatenate, (const uintptr_t *meshes, size_t n, uintptr_t *mesh_out), ((const dm_mesh *const *)meshes, n, MESH_OUT))
SHIM(root, (uintptr_t mesh, uintptr_t *mesh_out), (MESH, MESH_OUT))
SHIM(clone, (uintptr_t mesh, uintptr_t *mesh_out), (MESH, MESH_OUT))
SHIM(submesh_count, (uintptr_t mesh, const char *const *names, size_t n, int32_t *count_out), (MESH, names, n, count_out))
SHIM(submesh, (uintptr_t mesh, const char *const *names, size_t n, int32_t index, uintptr_t *mesh_out), (MESH, names, n, index, MESH_OUT))

SHIM(shape, (uintptr_t mesh, int32_t *sizes, size_t capacity, size_t *len_out), (MESH, sizes, capacity, len_out))
SHIM(size, (uintptr_t mesh, const char *dim, int32_t *size_out), (MESH, dim, size_out))
SHIM(is_member, (uintptr_t mesh, bool *member_out), (MESH, member_out))
SHIM(rank, (uintptr_t mesh, int32_t *rank_out), (MESH, rank_out))
SHIM(get_local_rank, (uintptr_t mesh, const char *dim, int32_t *rank_out), (MESH, dim, rank_out))
SHIM(get_coordinate, (uintptr_t mesh, int32_t *coordinate, size_t capacity, size_t *len_out), (MESH, coordinate, capacity, len_out))
SHIM(coordinate_of, (uintptr_t mesh, int32_t world_rank, int32_t *coordinate, size_t capacity, size_t *len_out),
     (MESH, world_rank, coordinate, capacity, len_out))
SHIM(ranks, (uintptr_t mesh, int32_t *ranks, size_t capacity, size_t *len_out), (MESH, ranks, capacity, len_out))
SHIM(group_ranks, (uintptr_t mesh, const char *dim, int32_t *ranks, size_t capacity, size_t *len_out), (MESH, dim, ranks, capacity, len_out))
SHIM(replica_groups, (uintptr_t mesh, const char *dim, int32_t *ranks, size_t capacity, size_t *len_out), (MESH, dim, ranks, capacity, len_out))
SHIM(translate_rank, (uintptr_t mesh, const char *dim, int32_t dim_rank, int32_t *world_rank_out), (MESH, dim, dim_rank, world_rank_out))
SHIM(translate_world_rank, (uintptr_t mesh, const char *dim, int32_t world_rank, int32_t *dim_rank_out), (MESH, dim, world_rank, dim_rank_out))
SHIM(neighbor, (uintptr_t mesh, const char *dim, int32_t offset, bool wrap, int32_t *dim_rank_out), (MESH, dim, offset, wrap, dim_rank_out))
SHIM(equal, (uintptr_t mesh, uintptr_t other, bool *equal_out), (MESH, (dm_mesh *)other, equal_out))
SHIM(hash, (uintptr_t mesh, uint64_t *hash_out), (MESH, hash_out))
SHIM(describe, (uintptr_t mesh, char *text, size_t capacity, size_t *len_out), (MESH, text, capacity, len_out))
SHIM(serialize, (uintptr_t mesh, char *text, size_t capacity, size_t *len_out), (MESH, text, capacity, len_out))
SHIM(local_shard,
     (uintptr_t mesh, const dm_placement *placements, size_t num_placements, const size_t *shape, size_t ndim, int32_t rank, size_t *local_shape_out,
      size_t *offset_out),
     (MESH, placements, num_placements, shape, ndim, rank, local_shape_out, offset_out))
SHIM(plan_ranks, (const dm_plan_options *options, int32_t *ranks_out, char *report, size_t capacity, size_t *len_out),
     (options, ranks_out, report, capacity, len_out))

SHIM(get_comm, (uintptr_t mesh, const char *dim, uintptr_t *comm_out), (MESH, dim, (ncclComm_t *)comm_out))
SHIM(get_proc, (uintptr_t mesh, const char *symbol, void **proc_out), (MESH, symbol, proc_out))
SHIM(get_device_proc, (const char *device_type, const char *symbol, void **proc_out), (device_type, symbol, proc_out))
SHIM(set_ccl_resolver, (bool given), (given ? go_resolver : NULL, NULL))
/* Addresses of buffers are integers too. cgo looks through a pointer at the whole Go object, and
 * refuses an object that holds pointers. */
#define SEND (const void *)send
#define RECV (void *)recv
SHIM(all_reduce, (uintptr_t mesh, const char *dim, uintptr_t send, uintptr_t recv, size_t count, int32_t dtype, int32_t op, uintptr_t stream),
     (MESH, dim, SEND, RECV, count, dtype, op, STREAM))
SHIM(reduce, (uintptr_t mesh, const char *dim, uintptr_t send, uintptr_t recv, size_t count, int32_t dtype, int32_t op, int32_t root, uintptr_t stream),
     (MESH, dim, SEND, RECV, count, dtype, op, root, STREAM))
SHIM(broadcast, (uintptr_t mesh, const char *dim, uintptr_t send, uintptr_t recv, size_t count, int32_t dtype, int32_t root, uintptr_t stream),
     (MESH, dim, SEND, RECV, count, dtype, root, STREAM))
SHIM(all_gather, (uintptr_t mesh, const char *dim, uintptr_t send, uintptr_t recv, size_t send_count, int32_t dtype, uintptr_t stream),
     (MESH, dim, SEND, RECV, send_count, dtype, STREAM))
SHIM(reduce_scatter, (uintptr_t mesh, const char *dim, uintptr_t send, uintptr_t recv, size_t recv_count, int32_t dtype, int32_t op, uintptr_t stream),
     (MESH, dim, SEND, RECV, recv_count, dtype, op, STREAM))
SHIM(all_to_all, (uintptr_t mesh, const char *dim, uintptr_t send, uintptr_t recv, size_t count_per_peer, int32_t dtype, uintptr_t stream),
     (MESH, dim, SEND, RECV, count_per_peer, dtype, STREAM))
SHIM(send, (uintptr_t mesh, const char *dim, uintptr_t send, size_t count, int32_t dtype, int32_t peer, uintptr_t stream),
     (MESH, dim, SEND, count, dtype, peer, STREAM))
SHIM(recv, (uintptr_t mesh, const char *dim, uintptr_t recv, size_t count, int32_t dtype, int32_t peer, uintptr_t stream),
     (MESH, dim, RECV, count, dtype, peer, STREAM))
SHIM(all_to_allv,
     (uintptr_t mesh, const char *dim, uintptr_t send, const size_t *send_counts, const size_t *send_displs, uintptr_t recv, const size_t *recv_counts,
      const size_t *recv_displs, int32_t dtype, uintptr_t stream),
     (MESH, dim, SEND, send_counts, send_displs, RECV, recv_counts, recv_displs, dtype, STREAM))
SHIM(all_gatherv,
     (uintptr_t mesh, const char *dim, uintptr_t send, uintptr_t recv, const size_t *recv_counts, const size_t *recv_displs, int32_t dtype, uintptr_t stream),
     (MESH, dim, SEND, RECV, recv_counts, recv_displs, dtype, STREAM))
SHIM(reduce_scatterv,
     (uintptr_t mesh, const char *dim, uintptr_t send, const size_t *send_counts, const size_t *send_displs, uintptr_t recv, int32_t dtype, int32_t op,
      uintptr_t stream),
     (MESH, dim, SEND, send_counts, send_displs, RECV, dtype, op, STREAM))
SHIM(group_start, (uintptr_t mesh), (MESH))
SHIM(group_end, (uintptr_t mesh), (MESH))

/* Bytes are addressed by integers, as the buffers of collectives are. */
#define DATA (const void *)data
SHIM(barrier, (uintptr_t mesh, const char *dim, int64_t timeout_ms), (MESH, dim, timeout_ms))
SHIM(all_gather_bytes, (uintptr_t mesh, const char *dim, uintptr_t data, size_t len, int64_t timeout_ms, uintptr_t *buffers_out),
     (MESH, dim, DATA, len, timeout_ms, BUFFERS_OUT))
SHIM(broadcast_bytes, (uintptr_t mesh, const char *dim, uintptr_t data, size_t len, int32_t root, int64_t timeout_ms, uintptr_t *buffers_out),
     (MESH, dim, DATA, len, root, timeout_ms, BUFFERS_OUT))
SHIM(world_all_gather_bytes, (uintptr_t world, uintptr_t data, size_t len, int64_t timeout_ms, uintptr_t *buffers_out),
     (WORLD, DATA, len, timeout_ms, BUFFERS_OUT))
SHIM(world_broadcast_bytes, (uintptr_t world, uintptr_t data, size_t len, int32_t root, int64_t timeout_ms, uintptr_t *buffers_out),
     (WORLD, DATA, len, root, timeout_ms, BUFFERS_OUT))
SHIM(buffers_get, (uintptr_t buffers, size_t index, const void **data_out, size_t *len_out), ((dm_buffers *)buffers, index, data_out, len_out))

SHIM(set_log, (int32_t level, bool given), (level, given ? go_log : NULL, NULL))

SHIM(set_event_handler, (bool given, const dm_event_options *options), (given ? go_event : NULL, NULL, options))
SHIM(events_open, (const dm_event_options *options, uintptr_t *events_out), (options, (dm_events **)events_out))
SHIM(events_fd, (uintptr_t events, int32_t *fd_out), ((dm_events *)events, fd_out))
SHIM(events_next, (uintptr_t events, int64_t timeout_ms, dm_event *event_out), ((dm_events *)events, timeout_ms, event_out))
SHIM(metrics, (char *text, size_t capacity, size_t *len_out), (text, capacity, len_out))

/* Checks that a group can begin on this mesh: begins an empty one and ends it. */
static inline outcome go_group_check(uintptr_t mesh)
{
  outcome begun = go_group_start(mesh);
  return begun.status == DM_STATUS_OK ? go_group_end(mesh) : begun;
}

#endif
