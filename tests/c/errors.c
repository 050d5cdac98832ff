/* static */
/* Every bad input gives its status and a message of one line with the values. No output is
 * written, and nothing crashes. The test is one process without other ranks. */
#include <stddef.h>

#include "check.h"

static dm_mesh *const kUntouched = (dm_mesh *)0x5a5a;

static dm_world *offline(int32_t size, int32_t rank)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  options.flags = DM_WORLD_OFFLINE;
  options.world_size = size;
  options.rank = rank;
  REQUIRE(dm_world_init("cpu", &options, &world));
  return world;
}

static void shapes_and_names(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = kUntouched;
  const char *names[] = {"dp", "tp"}, *same[] = {"dp", "dp"}, *empty[] = {"dp", ""}, *none[] = {"dp", NULL}, *latin[] = {"dp", "\xff"};
  const int32_t shape[] = {2, 4}, zero[] = {2, 0}, huge[] = {1 << 30, 1 << 30}, below[] = {2, -4}, many[] = {3, 4};
  options.world = offline(8, 5);

  FAILS(DM_STATUS_INVALID_ARGUMENT, "dimension 1 has size 0", dm_init("cpu", zero, 2, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "1073741824", dm_init("cpu", huge, 2, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "shape[1] is -4", dm_init("cpu", below, 2, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "has 12 ranks, but the world has 8", dm_init("cpu", many, 2, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "repeated", dm_init("cpu", shape, 2, same, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "empty", dm_init("cpu", shape, 2, empty, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dim_names[1] is NULL", dm_init("cpu", shape, 2, none, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "UTF-8", dm_init("cpu", shape, 2, latin, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "shape is NULL", dm_init("cpu", NULL, 2, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "mesh_out is NULL", dm_init("cpu", shape, 2, names, &options, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "count of shape", dm_init("cpu", shape, (size_t)-1, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "tpu", dm_init("tpu", shape, 2, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "cpu:0", dm_init("cpu:0", shape, 2, names, &options, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "cuda", dm_init("cuda", shape, 2, names, &options, &mesh)); /* the world is for cpu */

  const int32_t twice[] = {0, 1, 2, 3, 4, 5, 6, 1}, outside[] = {0, 1, 2, 3, 4, 5, 6, 8}, negative[] = {0, 1, 2, 3, 4, 5, 6, -1};
  options.ranks = twice;
  options.num_ranks = 8;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 1 is listed twice, at index 1 and index 7", dm_init("cpu", shape, 2, names, &options, &mesh));
  options.ranks = outside;
  options.num_ranks = 8;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 8 at index 7", dm_init("cpu", shape, 2, names, &options, &mesh));
  options.ranks = negative;
  options.num_ranks = 8;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank -1", dm_init("cpu", shape, 2, names, &options, &mesh));
  options.ranks = NULL;
  options.num_ranks = 0;

  options.flags = 1u << 30;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "0x40000000", dm_init("cpu", shape, 2, names, &options, &mesh));
  options.flags = DM_INIT_OWN_COMMS;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dm_from_comms", dm_init("cpu", shape, 2, names, &options, &mesh));
  options.flags = 0;
  options.timeout_ms = -5;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "-5", dm_init("cpu", shape, 2, names, &options, &mesh));
  options.timeout_ms = 0;

  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dims[1].flags = 8;
  options.dim_options = dims;
  options.num_dim_options = 2;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dim_options[1]", dm_init("cpu", shape, 2, names, &options, &mesh));
  dims[1].flags = 0;
  const char garbage[128] = {0};
  dims[1].nccl_config = garbage;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "ncclConfig_t", dm_init("cpu", shape, 2, names, &options, &mesh));
  CHECK(mesh == kUntouched);
  dm_world_free(options.world);
}

static void struct_sizes(void)
{
  struct { dm_world_options known; char later[16]; } grown;
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  /* The first release with this SONAME has joining_out. */
  const size_t wrong[] = {0, 1, offsetof(dm_world_options, joining_out), 5000, (size_t)-1};
  for (size_t at = 0; at < sizeof wrong / sizeof *wrong; ++at) {
    options.struct_size = wrong[at];
    FAILS(DM_STATUS_INVALID_ARGUMENT, wrong[at] < 5000 ? "but the struct has at least" : "but no struct has more than 4096 bytes",
          dm_world_init("cpu", &options, &world));
  }
  memset(&grown, 0, sizeof grown);
  grown.known.struct_size = sizeof grown;
  grown.known.flags = DM_WORLD_OFFLINE;
  grown.known.world_size = 2;
  OK(dm_world_init("cpu", &grown.known, &world)); /* compiled with a newer header, but uses none of its new fields */
  dm_world_free(world);
  world = NULL;
  grown.later[3] = 1;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "older than the header", dm_world_init("cpu", &grown.known, &world));
  CHECK(world == NULL);

  dm_error_info info = DM_ERROR_INFO_INIT;
  info.struct_size = 4;
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_last_error_info(&info));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_last_error_info(NULL));
  info.struct_size = sizeof info;
  OK(dm_last_error_info(&info));
  CHECK(info.status == DM_STATUS_INVALID_ARGUMENT && strcmp(info.message, dm_last_error()) == 0);

  /* Freeing a freed handle does not fail, so the last error stays. */
  grown.later[3] = 0;
  REQUIRE(dm_world_init("cpu", &grown.known, &world));
  dm_world_free(world);
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_last_error_info(NULL));
  dm_world_free(world);
  dm_free((dm_mesh *)world);
  dm_free(NULL);
  CHECK(strstr(dm_last_error(), "info_out is NULL") != NULL);
}

static void worlds(void)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "world_out is NULL", dm_world_init("cpu", &options, NULL));
  options.flags = 4;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "unknown bits 0x4", dm_world_init("cpu", &options, &world));
  options.flags = 0;
  options.world_size = -2;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "-2", dm_world_init("cpu", &options, &world));
  options.world_size = 2;
  options.rank = 2;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank is 2", dm_world_init("cpu", &options, &world));
  options.rank = -1;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "-1", dm_world_init("cpu", &options, &world));
  options.rank = 1;
  const char *methods[] = {"", "tcp://", "tcp://host", "tcp://:1", "tcp://host:x", "tcp://host:70000",
                           "tcp://host:0", "file://relative", "zk://host"};
  for (size_t at = 0; at < sizeof methods / sizeof *methods; ++at) {
    options.init_method = methods[at];
    FAILS(DM_STATUS_INVALID_ARGUMENT, "init_method", dm_world_init("cpu", &options, &world));
  }

  /* Nobody listens at this address. The call ends at its deadline, at most 10 % + 250 ms late. */
  options.init_method = "tcp://127.0.0.1:1";
  options.timeout_ms = 500;
  const moment began = moment_now();
  FAILS(DM_STATUS_STORE, "tcp://127.0.0.1:1", dm_world_init("cpu", &options, &world));
  CHECK(own_seconds_since(&began) < 0.5 * 1.1 + 0.25);
  dm_error_info info = DM_ERROR_INFO_INIT;
  OK(dm_last_error_info(&info));
  CHECK(info.status == DM_STATUS_STORE && info.os_error != 0);

  options.init_method = NULL;
  options.ccl_library = "/nonexistent/libnccl.so.2";
  FAILS(DM_STATUS_LIBRARY, "/nonexistent/libnccl.so.2", dm_world_init("cpu", &options, &world));
  options.ccl_library = "libc.so.6";
  FAILS(DM_STATUS_LIBRARY, "ncclGetVersion", dm_world_init("cpu", &options, &world));
  options.ccl_library = NULL;

  dm_store_callbacks callbacks = DM_STORE_CALLBACKS_INIT;
  options.store = &callbacks;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "is NULL", dm_world_init("cpu", &options, &world));
  callbacks.struct_size = 3;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "struct_size is 3", dm_world_init("cpu", &options, &world));
  options.store = NULL;

  /* When the launcher's variables are used and only some are set, the error names the variables. */
  dm_world_options from_environment = DM_WORLD_OPTIONS_INIT;
  setenv("RANK", "1", 1);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "WORLD_SIZE", dm_world_init("cpu", &from_environment, &world));
  setenv("WORLD_SIZE", "1", 1);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "RANK is 1, but WORLD_SIZE is 1", dm_world_init("cpu", &from_environment, &world));
  setenv("WORLD_SIZE", "two", 1);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "two", dm_world_init("cpu", &from_environment, &world));
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  CHECK(world == NULL);
}

static void handles(void)
{
  int32_t rank = 77;
  size_t length = 77;
  dm_mesh *mesh = NULL, *other = kUntouched;
  const int32_t shape[] = {2, 2};
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = offline(4, 0);
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  dm_mesh *freed = NULL;
  REQUIRE(dm_clone(mesh, &freed));
  dm_free(freed);
  dm_free(freed);
  dm_free(NULL);

  dm_mesh *const bad[] = {NULL, (dm_mesh *)1, (dm_mesh *)&rank, (dm_mesh *)(intptr_t)-1, freed, (dm_mesh *)options.world,
                          (dm_mesh *)((char *)mesh + 1)};
  for (size_t at = 0; at < sizeof bad / sizeof *bad; ++at) {
    FAILS(DM_STATUS_INVALID_HANDLE, "not a live dm_mesh", dm_rank(bad[at], &rank));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_shape(bad[at], &rank, 1, &length));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_slice(bad[at], names, 1, &other));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_flatten(bad[at], NULL, NULL, &other));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_root(bad[at], &other));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_clone(bad[at], &other));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_abort(bad[at]));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_finalize(bad[at], NULL));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_check(bad[at], NULL));
    GIVES(DM_STATUS_INVALID_HANDLE, dm_group_start(bad[at]));
    CHECK(dm_ndim(bad[at]) == 0 && dm_dim_name(bad[at], 0) == NULL);
    ncclComm_t comm = NULL;
    GIVES(DM_STATUS_INVALID_HANDLE, dm_get_comm(bad[at], "dp", &comm));
  }
  GIVES(DM_STATUS_INVALID_HANDLE, dm_concatenate((const dm_mesh *const *)&freed, 1, &other));
  options.world = (dm_world *)mesh;
  GIVES(DM_STATUS_INVALID_HANDLE, dm_init("cpu", shape, 2, names, &options, &other));
  GIVES(DM_STATUS_INVALID_HANDLE, dm_world_rank(NULL, &rank));
  GIVES(DM_STATUS_INVALID_HANDLE, dm_world_barrier(NULL, 0));
  CHECK(other == kUntouched && rank == 77 && length == 77);
  dm_world_free(NULL);
  dm_free(mesh);
}

static void questions(void)
{
  dm_mesh *mesh = NULL, *other = kUntouched;
  const int32_t shape[] = {2, 4};
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = offline(8, 5);
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));

  int32_t sizes[2] = {9, 9}, size = 9;
  size_t length = 0;
  int32_t ranks[8] = {9}, rank = 9;
  char text[8];
  FAILS(DM_STATUS_BUFFER_TOO_SMALL, "holds 1 elements, but the answer has 2", dm_shape(mesh, sizes, 1, &length));
  CHECK(length == 2 && sizes[0] == 9);
  GIVES(DM_STATUS_BUFFER_TOO_SMALL, dm_ranks(mesh, NULL, 0, &length));
  CHECK(length == 8);
  GIVES(DM_STATUS_BUFFER_TOO_SMALL, dm_describe(mesh, text, sizeof text, &length));
  CHECK(length == strlen("DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))") + 1);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "len_out is NULL", dm_shape(mesh, sizes, 2, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "ranks is NULL", dm_ranks(mesh, NULL, 8, &length));
  FAILS(DM_STATUS_NOT_FOUND, "there are (dp, tp)", dm_size(mesh, "pp", &size));
  FAILS(DM_STATUS_NOT_FOUND, "pp", dm_get_local_rank(mesh, "pp", &rank));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "2 dimensions", dm_get_local_rank(mesh, NULL, &rank));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "2 dimensions", dm_group_ranks(mesh, NULL, ranks, 8, &length));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_size(mesh, "dp", NULL));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_rank(mesh, NULL));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_equal(mesh, mesh, NULL));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_hash(mesh, NULL));
  CHECK(dm_dim_name(mesh, 2) == NULL && dm_dim_name(mesh, (size_t)-1) == NULL);

  const char *unknown[] = {"dp", "pp"}, *twice[] = {"tp", "tp"};
  FAILS(DM_STATUS_NOT_FOUND, "pp", dm_slice(mesh, unknown, 2, &other));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_slice(mesh, twice, 2, &other));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dp is already a dimension", dm_flatten(mesh, "dp", NULL, &other));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "empty", dm_flatten(mesh, "", NULL, &other));
  const int32_t parts[] = {2, 3}, good[] = {2, 2}, zero[] = {0, 4};
  const char *part_names[] = {"a", "b"}, *clash[] = {"a", "dp"};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "is 6, but the dimension has size 4", dm_unflatten(mesh, "tp", parts, 2, part_names, NULL, &other));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_unflatten(mesh, "tp", zero, 2, part_names, NULL, &other));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dp is repeated", dm_unflatten(mesh, "tp", good, 2, clash, NULL, &other));
  GIVES(DM_STATUS_NOT_FOUND, dm_unflatten(mesh, "pp", good, 2, part_names, NULL, &other));
  const dm_mesh *overlapping[] = {mesh, mesh};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "overlapping", dm_concatenate(overlapping, 2, &other));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_concatenate(NULL, 0, &other));
  const char *tp[] = {"tp"};
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_submesh(mesh, tp, 1, 2, &other));
  CHECK(other == kUntouched);

  ncclComm_t comm = NULL;
  void *address = NULL;
  float value = 0;
  FAILS(DM_STATUS_UNSUPPORTED, "DM_WORLD_OFFLINE", dm_get_comm(mesh, "dp", &comm));
  GIVES(DM_STATUS_UNSUPPORTED, dm_get_proc(mesh, "ncclAllReduce", &address));
  GIVES(DM_STATUS_UNSUPPORTED, dm_all_reduce(mesh, "dp", &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_register(mesh, ""));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_register(mesh, NULL));
  FAILS(DM_STATUS_NOT_FOUND, "nobody", dm_lookup("nobody", &other));
  dm_free(mesh);
  dm_world_free(options.world);
}

static void operands(void)
{
  /* A world of one rank has real communicators. */
  dm_mesh *mesh = NULL;
  const int32_t shape[] = {1};
  REQUIRE(dm_init("cpu", shape, 1, NULL, NULL, &mesh));
  float send[4] = {1, 2, 3, 4}, recv[4] = {0};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is 12", dm_all_reduce(mesh, NULL, send, recv, 4, 12, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is -1", dm_broadcast(mesh, NULL, send, recv, 4, -1, 0, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op is 5", dm_all_reduce(mesh, NULL, send, recv, 4, DM_FLOAT32, 5, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "root is 1", dm_reduce(mesh, NULL, send, recv, 4, DM_FLOAT32, DM_SUM, 1, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "peer is -1", dm_send(mesh, NULL, send, 4, DM_FLOAT32, -1, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "send is NULL", dm_all_reduce(mesh, NULL, NULL, recv, 4, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "recv is NULL", dm_all_gather(mesh, NULL, send, NULL, 4, DM_FLOAT32, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "more than memory", dm_all_reduce(mesh, NULL, send, recv, (size_t)-1, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "stream", dm_all_reduce(mesh, NULL, send, recv, 4, DM_FLOAT32, DM_SUM, send));
  OK(dm_all_reduce(mesh, NULL, NULL, NULL, 0, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_all_reduce(mesh, NULL, send, recv, 4, DM_FLOAT32, DM_SUM, NULL));
  CHECK(memcmp(send, recv, sizeof send) == 0);
  void *address = NULL;
  FAILS(DM_STATUS_NOT_FOUND, "ncclNoSuchThing", dm_get_proc(mesh, "ncclNoSuchThing", &address));
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_get_proc(mesh, NULL, &address));
  FAILS(DM_STATUS_INVALID_STATE, "begun no group", dm_group_end(mesh));
  CHECK(address == NULL);
  OK(dm_finalize(mesh, NULL));
  FAILS(DM_STATUS_ABORTED, "finalized", dm_all_reduce(mesh, NULL, send, recv, 4, DM_FLOAT32, DM_SUM, NULL));
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  ncclComm_t comm = NULL;
  GIVES(DM_STATUS_ABORTED, dm_get_comm(mesh, NULL, &comm));
  GIVES(DM_STATUS_ABORTED, dm_slice(mesh, NULL, 0, &mesh));
  dm_free(mesh);
}

static void no_gpu(void)
{
  /* On a machine with a GPU this is no error. */
  dm_mesh *mesh = NULL;
  const int32_t shape[] = {1};
  dm_status status = dm_init("cuda", shape, 1, NULL, NULL, &mesh);
  CHECK(status == DM_STATUS_OK || status == DM_STATUS_LIBRARY || status == DM_STATUS_DEVICE);
  if (status == DM_STATUS_LIBRARY) CHECK(strstr(dm_last_error(), "libnccl.so.2") != NULL);
  dm_free(mesh);
}

int main(void)
{
  shapes_and_names();
  struct_sizes();
  worlds();
  handles();
  questions();
  operands();
  no_gpu();
  return finish();
}
