/* Passes NULL for every pointer of every function, one at a time. A handle gives INVALID_HANDLE,
 * and any other pointer that may not be NULL gives INVALID_ARGUMENT. The message is one line that
 * names the argument, and no output is written. */
#include "check.h"

static dm_mesh *const kUntouched = (dm_mesh *)0x5a5a;

#define NO_HANDLE(call) FAILS(DM_STATUS_INVALID_HANDLE, "not a live dm_", call)
#define NO(what, call) FAILS(DM_STATUS_INVALID_ARGUMENT, what " is NULL", call)

static void worlds(void)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  int32_t number = 77;
  options.world_size = 1;
  NO("world_out", dm_world_init("cpu", &options, NULL));
  REQUIRE(dm_world_init("cpu", &options, &world));
  NO_HANDLE(dm_world_rank(NULL, &number));
  NO_HANDLE(dm_world_size(NULL, &number));
  NO_HANDLE(dm_world_barrier(NULL, 0));
  NO_HANDLE(dm_waiting(NULL, &number));
  dm_buffers *bytes = NULL;
  NO_HANDLE(dm_world_all_gather_bytes(NULL, "x", 1, 0, &bytes));
  NO_HANDLE(dm_world_broadcast_bytes(NULL, "x", 1, 0, 0, &bytes));
  NO("data", dm_world_all_gather_bytes(world, NULL, 1, 0, &bytes));
  NO("buffers_out", dm_world_all_gather_bytes(world, "x", 1, 0, NULL));
  NO("data", dm_world_broadcast_bytes(world, NULL, 1, 0, 0, &bytes));
  NO("buffers_out", dm_world_broadcast_bytes(world, "x", 1, 0, 0, NULL));
  CHECK(bytes == NULL);
  /* dm_world_abort takes NULL for the default worlds: tests/c/world_abort.c. */
  NO("rank_out", dm_world_rank(world, NULL));
  NO("size_out", dm_world_size(world, NULL));
  NO("count_out", dm_waiting(world, NULL));
  dm_world_info info = DM_WORLD_INFO_INIT;
  NO_HANDLE(dm_world_get_info(NULL, &info));
  NO("info_out", dm_world_get_info(world, NULL));
  CHECK(info.size == 0 && info.device_type == NULL);
  NO("world_out", dm_default_world("cpu", 0, NULL));
  CHECK(number == 77);
  OK(dm_set_log(DM_LOG_OFF, NULL, NULL)); /* NULL stands for stderr */
  dm_events *events = NULL;
  dm_event event = DM_EVENT_INIT;
  size_t length = 77;
  OK(dm_set_event_handler(NULL, NULL, NULL)); /* NULL stands for no handler, and for the defaults */
  NO("events_out", dm_events_open(NULL, NULL));
  NO_HANDLE(dm_events_fd(NULL, &number));
  NO_HANDLE(dm_events_next(NULL, 0, &event));
  REQUIRE(dm_events_open(NULL, &events));
  NO("fd_out", dm_events_fd(events, NULL));
  NO("event_out", dm_events_next(events, 0, NULL));
  dm_events_free(NULL);
  dm_events_free(events);
  NO("len_out", dm_metrics(NULL, 0, NULL));
  NO("buffer", dm_metrics(NULL, 1 << 20, &length));
  CHECK(number == 77 && event.kind == DM_EVENT_NONE);
  dm_world_free(NULL);
  dm_world_free(world);
}

static void control(const dm_mesh *mesh)
{
  const void *data = NULL;
  size_t length = 77;
  dm_buffers *bytes = NULL;
  NO_HANDLE(dm_barrier(NULL, "tp", 0));
  NO_HANDLE(dm_all_gather_bytes(NULL, "tp", "x", 1, 0, &bytes));
  NO_HANDLE(dm_broadcast_bytes(NULL, "tp", "x", 1, 0, 0, &bytes));
  NO("data", dm_all_gather_bytes(mesh, "tp", NULL, 1, 0, &bytes));
  NO("buffers_out", dm_all_gather_bytes(mesh, "tp", "x", 1, 0, NULL));
  NO("data", dm_broadcast_bytes(mesh, "tp", NULL, 1, 0, 0, &bytes));
  NO("buffers_out", dm_broadcast_bytes(mesh, "tp", "x", 1, 0, 0, NULL));
  CHECK(bytes == NULL);
  REQUIRE(dm_all_gather_bytes(mesh, "tp", "x", 1, 0, &bytes));
  NO_HANDLE(dm_buffers_get(NULL, 0, &data, &length));
  NO("data_out", dm_buffers_get(bytes, 0, NULL, &length));
  NO("len_out", dm_buffers_get(bytes, 0, &data, NULL));
  CHECK(data == NULL && length == 77 && dm_buffers_count(NULL) == 0);
  dm_buffers_free(NULL);
  dm_buffers_free(bytes);
}

static void making(const dm_mesh *mesh, ncclComm_t comm)
{
  const int32_t ones[] = {1, 1};
  const char *names[] = {"dp", "tp"}, *holes[] = {"dp", NULL}, *parts[] = {"a", "b"};
  const dm_mesh *nothing[] = {NULL};
  ncclComm_t comms[] = {comm, comm}, no_comm[] = {comm, NULL};
  dm_mesh *made = kUntouched;
  int32_t count = 77;

  NO("shape", dm_init("cpu", NULL, 2, names, NULL, &made));
  NO("dim_names[1]", dm_init("cpu", ones, 2, holes, NULL, &made));
  NO("mesh_out", dm_init("cpu", ones, 2, names, NULL, NULL));
  NO("shape", dm_from_comms("cpu", NULL, 2, names, comms, NULL, &made));
  NO("dim_names[1]", dm_from_comms("cpu", ones, 2, holes, comms, NULL, &made));
  NO("comms", dm_from_comms("cpu", ones, 2, names, NULL, NULL, &made));
  NO("comms[1]", dm_from_comms("cpu", ones, 2, names, no_comm, NULL, &made));
  NO("mesh_out", dm_from_comms("cpu", ones, 2, names, comms, NULL, NULL));

  NO("text", dm_deserialize(NULL, NULL, &made));
  NO("mesh_out", dm_deserialize("{}", NULL, NULL));
  NO_HANDLE(dm_slice(NULL, names, 2, &made));
  NO("dim_names", dm_slice(mesh, NULL, 2, &made));
  NO("dim_names[1]", dm_slice(mesh, holes, 2, &made));
  NO("mesh_out", dm_slice(mesh, names, 2, NULL));
  NO_HANDLE(dm_flatten(NULL, NULL, NULL, &made));
  NO("mesh_out", dm_flatten(mesh, NULL, NULL, NULL));
  NO_HANDLE(dm_unflatten(NULL, "dp", ones, 2, parts, NULL, &made));
  NO("dim", dm_unflatten(mesh, NULL, ones, 2, parts, NULL, &made));
  NO("shape", dm_unflatten(mesh, "dp", NULL, 2, parts, NULL, &made));
  NO("dim_names", dm_unflatten(mesh, "dp", ones, 2, NULL, NULL, &made));
  NO("dim_names[1]", dm_unflatten(mesh, "dp", ones, 2, holes, NULL, &made));
  NO("mesh_out", dm_unflatten(mesh, "dp", ones, 2, parts, NULL, NULL));
  NO("meshes", dm_concatenate(NULL, 1, &made));
  NO_HANDLE(dm_concatenate(nothing, 1, &made));
  NO("mesh_out", dm_concatenate(&mesh, 1, NULL));
  NO_HANDLE(dm_root(NULL, &made));
  NO("mesh_out", dm_root(mesh, NULL));
  NO_HANDLE(dm_submesh_count(NULL, names, 1, &count));
  NO("dim_names", dm_submesh_count(mesh, NULL, 1, &count));
  NO("count_out", dm_submesh_count(mesh, names, 1, NULL));
  NO_HANDLE(dm_submesh(NULL, names, 1, 0, &made));
  NO("dim_names", dm_submesh(mesh, NULL, 1, 0, &made));
  NO("mesh_out", dm_submesh(mesh, names, 1, 0, NULL));
  dm_world *world = NULL;
  NO_HANDLE(dm_get_world(NULL, &world));
  NO("world_out", dm_get_world(mesh, NULL));
  CHECK(world == NULL);
  NO_HANDLE(dm_clone(NULL, &made));
  NO("mesh_out", dm_clone(mesh, NULL));
  dm_free(NULL);

  NO("name", dm_register(mesh, NULL));
  NO("name", dm_unregister(NULL));
  NO("name", dm_lookup(NULL, &made));
  NO("mesh_out", dm_lookup("trainer", NULL));
  CHECK(made == kUntouched && count == 77);
}

static void asking(const dm_mesh *mesh)
{
  int32_t size = 77, sizes[2] = {77, 77};
  size_t length = 77;
  int32_t rank = 77, ranks[2] = {77, 77};
  int32_t groups[2] = {77, 77};
  uint64_t hash = 77;
  char text[64] = "77";
  bool equal = false;

  CHECK(dm_ndim(NULL) == 0 && dm_dim_name(NULL, 0) == NULL);
  NO_HANDLE(dm_shape(NULL, sizes, 2, &length));
  NO_HANDLE(dm_size(NULL, "dp", &size));
  NO_HANDLE(dm_rank(NULL, &rank));
  NO_HANDLE(dm_get_local_rank(NULL, "dp", &rank));
  NO_HANDLE(dm_get_coordinate(NULL, sizes, 2, &length));
  NO_HANDLE(dm_is_member(NULL, &equal));
  CHECK(dm_device_type(NULL) == NULL && strstr(dm_last_error(), "not a live dm_mesh") != NULL);
  NO_HANDLE(dm_ranks(NULL, ranks, 2, &length));
  NO_HANDLE(dm_group_ranks(NULL, "dp", ranks, 2, &length));
  NO_HANDLE(dm_replica_groups(NULL, "dp", groups, 2, &length));
  NO_HANDLE(dm_equal(NULL, mesh, &equal));
  NO_HANDLE(dm_equal(mesh, NULL, &equal));
  NO_HANDLE(dm_hash(NULL, &hash));
  NO_HANDLE(dm_describe(NULL, text, sizeof text, &length));
  NO_HANDLE(dm_serialize(NULL, text, sizeof text, &length));
  CHECK(length == 77);

  NO("len_out", dm_shape(mesh, sizes, 2, NULL));
  NO("size_out", dm_size(mesh, "dp", NULL));
  NO("member_out", dm_is_member(mesh, NULL));
  NO("world_rank_out", dm_rank(mesh, NULL));
  NO("dim_rank_out", dm_get_local_rank(mesh, "dp", NULL));
  NO("len_out", dm_get_coordinate(mesh, sizes, 2, NULL));
  NO("len_out", dm_ranks(mesh, ranks, 2, NULL));
  NO("len_out", dm_group_ranks(mesh, "dp", ranks, 2, NULL));
  NO("len_out", dm_replica_groups(mesh, "dp", groups, 2, NULL));
  NO("equal_out", dm_equal(mesh, mesh, NULL));
  NO("hash_out", dm_hash(mesh, NULL));
  NO("len_out", dm_describe(mesh, text, sizeof text, NULL));
  NO("len_out", dm_serialize(mesh, text, sizeof text, NULL));
  NO("info_out", dm_last_error_info(NULL));

  /* With a NULL buffer the length is still written, whatever the capacity is. */
  NO("sizes", dm_shape(mesh, NULL, 2, &length));
  CHECK(length == 2);
  NO("coordinate", dm_get_coordinate(mesh, NULL, 2, &length));
  CHECK(length == 2);
  NO("ranks", dm_ranks(mesh, NULL, 1, &length));
  CHECK(length == 1);
  length = 77;
  NO("ranks", dm_group_ranks(mesh, "dp", NULL, 1, &length));
  CHECK(length == 1);
  length = 77;
  NO("ranks", dm_replica_groups(mesh, "dp", NULL, 1, &length));
  CHECK(length == 1);
  NO("text", dm_describe(mesh, NULL, 64, &length));
  CHECK(length == strlen("DeviceMesh((dp=1, tp=1), 'cpu', stride=((), ()))") + 1);

  NO("text", dm_serialize(mesh, NULL, 1024, &length));
  CHECK(length > 64 && length < 1024);

  /* dim NULL stands for the only dimension; this mesh has two. */
  const char *two = "2 dimensions";
  FAILS(DM_STATUS_INVALID_ARGUMENT, two, dm_get_local_rank(mesh, NULL, &rank));
  FAILS(DM_STATUS_INVALID_ARGUMENT, two, dm_group_ranks(mesh, NULL, ranks, 2, &length));
  FAILS(DM_STATUS_INVALID_ARGUMENT, two, dm_replica_groups(mesh, NULL, groups, 2, &length));
  CHECK(size == 77 && rank == 77 && hash == 77 && !equal && strcmp(text, "77") == 0);
  CHECK(sizes[0] == 77 && sizes[1] == 77 && ranks[0] == 77 && ranks[1] == 77 && groups[0] == 77 && groups[1] == 77);
  OK(dm_size(mesh, NULL, &size)); /* in dm_size NULL stands for all ranks */
  CHECK(size == 1);
}

static void communicating(const dm_mesh *mesh)
{
  ncclComm_t comm = (ncclComm_t)0x5a5a;
  void *address = &comm;
  const char *two = "2 dimensions";
  float send[1] = {1}, recv[1] = {77};
  NO_HANDLE(dm_get_comm(NULL, "dp", &comm));
  NO("comm_out", dm_get_comm(mesh, "dp", NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, two, dm_get_comm(mesh, NULL, &comm));
  NO_HANDLE(dm_get_proc(NULL, "ncclAllReduce", &address));
  NO("symbol", dm_get_proc(mesh, NULL, &address));
  NO("proc_out", dm_get_proc(mesh, "ncclAllReduce", NULL));
  CHECK(comm == (ncclComm_t)0x5a5a && address == &comm);

  NO_HANDLE(dm_all_reduce(NULL, "dp", send, recv, 1, DM_FLOAT32, DM_SUM, NULL));
  NO_HANDLE(dm_reduce(NULL, "dp", send, recv, 1, DM_FLOAT32, DM_SUM, 0, NULL));
  NO_HANDLE(dm_broadcast(NULL, "dp", send, recv, 1, DM_FLOAT32, 0, NULL));
  NO_HANDLE(dm_all_gather(NULL, "dp", send, recv, 1, DM_FLOAT32, NULL));
  NO_HANDLE(dm_reduce_scatter(NULL, "dp", send, recv, 1, DM_FLOAT32, DM_SUM, NULL));
  NO_HANDLE(dm_all_to_all(NULL, "dp", send, recv, 1, DM_FLOAT32, NULL));
  NO_HANDLE(dm_send(NULL, "dp", send, 1, DM_FLOAT32, 0, NULL));
  NO_HANDLE(dm_recv(NULL, "dp", recv, 1, DM_FLOAT32, 0, NULL));
  NO("send", dm_all_reduce(mesh, "dp", NULL, recv, 1, DM_FLOAT32, DM_SUM, NULL));
  NO("send", dm_reduce(mesh, "dp", NULL, recv, 1, DM_FLOAT32, DM_SUM, 0, NULL));
  NO("send", dm_broadcast(mesh, "dp", NULL, recv, 1, DM_FLOAT32, 0, NULL));
  NO("send", dm_all_gather(mesh, "dp", NULL, recv, 1, DM_FLOAT32, NULL));
  NO("send", dm_reduce_scatter(mesh, "dp", NULL, recv, 1, DM_FLOAT32, DM_SUM, NULL));
  NO("send", dm_all_to_all(mesh, "dp", NULL, recv, 1, DM_FLOAT32, NULL));
  NO("send", dm_send(mesh, "dp", NULL, 1, DM_FLOAT32, 0, NULL));
  NO("recv", dm_all_reduce(mesh, "dp", send, NULL, 1, DM_FLOAT32, DM_SUM, NULL));
  NO("recv", dm_reduce(mesh, "dp", send, NULL, 1, DM_FLOAT32, DM_SUM, 0, NULL));
  NO("recv", dm_broadcast(mesh, "dp", send, NULL, 1, DM_FLOAT32, 0, NULL));
  NO("recv", dm_all_gather(mesh, "dp", send, NULL, 1, DM_FLOAT32, NULL));
  NO("recv", dm_reduce_scatter(mesh, "dp", send, NULL, 1, DM_FLOAT32, DM_SUM, NULL));
  NO("recv", dm_all_to_all(mesh, "dp", send, NULL, 1, DM_FLOAT32, NULL));
  NO("recv", dm_recv(mesh, "dp", NULL, 1, DM_FLOAT32, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, two, dm_all_reduce(mesh, NULL, send, recv, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(recv[0] == 77);

  NO_HANDLE(dm_group_start(NULL));
  NO_HANDLE(dm_group_end(NULL));
  NO_HANDLE(dm_check(NULL, "dp"));
  OK(dm_check(mesh, NULL)); /* all dimensions */
  NO_HANDLE(dm_stream_wait(NULL, "dp", NULL, 0));
  OK(dm_stream_wait(mesh, NULL, NULL, 0));
  OK(dm_stream_wait(mesh, "dp", NULL, 1));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "device type cpu has no streams", dm_stream_wait(mesh, "dp", recv, 0));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "timeout_ms is -1", dm_stream_wait(mesh, "dp", NULL, -1));
  FAILS(DM_STATUS_NOT_FOUND, "nowhere", dm_stream_wait(mesh, "nowhere", NULL, 0));
  NO_HANDLE(dm_abort(NULL));
  dm_mesh *recovered = kUntouched;
  dm_recovery recovery = DM_RECOVERY_INIT;
  NO_HANDLE(dm_recover(NULL, NULL, &recovered, NULL));
  NO("mesh_out", dm_recover(mesh, NULL, NULL, NULL));
  NO_HANDLE(dm_get_recovery(NULL, &recovery));
  NO("recovery_out", dm_get_recovery(mesh, NULL));
  CHECK(recovered == kUntouched && recovery.epoch == -1);
  NO_HANDLE(dm_finalize(NULL, NULL));

  /* The mesh and the world still work. */
  OK(dm_all_reduce(mesh, "dp", send, recv, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(recv[0] == 1);
}

int main(void)
{
  const int32_t ones[] = {1, 1};
  const char *names[] = {"dp", "tp"};
  dm_mesh *mesh = NULL;
  ncclComm_t comm = NULL;
  worlds();
  REQUIRE(dm_init("cpu", ones, 2, names, NULL, &mesh));
  REQUIRE(dm_get_comm(mesh, "dp", &comm));
  making(mesh, comm);
  control(mesh);
  asking(mesh);
  communicating(mesh);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  return finish();
}
