/* A program that has NCCL (the recorder) linked into itself. Rank 0 passes its own functions by
 * dm_set_ccl_resolver and calls them on the communicators that it gets. The other ranks load a
 * library. */
#include "check.h"

int recorder_living(void);

static int asked, with_abort;

/* A table with the functions that a program needs. It gives NULL for any other name. */
static void *resolve(void *user_data, const char *name)
{
#define KNOWN(function) {#function, (void *)(size_t)&function}
  const struct { const char *name; void *address; } known[] = {
    KNOWN(ncclGetVersion), KNOWN(ncclGetUniqueId), KNOWN(ncclCommInitRankConfig), KNOWN(ncclCommSplit), KNOWN(ncclCommFinalize),
    KNOWN(ncclCommDestroy), KNOWN(ncclCommAbort), KNOWN(ncclCommGetAsyncError), KNOWN(ncclCommCount), KNOWN(ncclCommUserRank),
    KNOWN(ncclGetErrorString), KNOWN(ncclGetLastError), KNOWN(ncclAllReduce), KNOWN(ncclReduce), KNOWN(ncclBroadcast), KNOWN(ncclAllGather),
    KNOWN(ncclReduceScatter), KNOWN(ncclSend), KNOWN(ncclRecv), KNOWN(ncclGroupStart), KNOWN(ncclGroupEnd),
  };
  CHECK(user_data == &asked);
  __atomic_add_fetch((int *)user_data, 1, __ATOMIC_SEQ_CST);
  if (!with_abort && strcmp(name, "ncclCommAbort") == 0) return NULL;
  for (size_t at = 0; at < sizeof known / sizeof *known; ++at)
    if (strcmp(known[at].name, name) == 0) return known[at].address;
  return NULL;
}

/* Makes a mesh of device type cpu whose type is that of its world. Device type cuda is not in use
 * afterwards, although this machine has a device. */
static void make_without_cuda(void)
{
  const int32_t shape[] = {2};
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  join.flags = DM_WORLD_OFFLINE;
  join.world_size = 2;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_init(NULL, shape, 1, NULL, &options, &mesh));
  dm_free(mesh);
  dm_world_free(options.world);
}

int main(void)
{
  const int is_linked = strcmp(getenv("RANK"), "0") == 0;
  const int32_t shape[] = {2};
  const char *names[] = {"x"};
  dm_mesh *mesh = NULL;
  ncclComm_t comm = NULL;
  float mine = 1, sum = 0;
  ncclResult_t (*version)(int *) = NULL, (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
                                                       ncclComm_t, cudaStream_t) = NULL;
  if (is_linked) {
    FAILS(DM_STATUS_LIBRARY, "dm_set_ccl_resolver) has no symbol ncclCommAbort: it says NCCL", dm_set_ccl_resolver(resolve, &asked));
    with_abort = 1;
    REQUIRE(dm_set_ccl_resolver(resolve, &asked));
    REQUIRE(dm_set_ccl_resolver(NULL, NULL));
    make_without_cuda();
    REQUIRE(dm_set_ccl_resolver(resolve, &asked));
  }
  /* Before there is a mesh. */
  OK(dm_get_device_proc("cuda", "ncclGetVersion", (void **)&version));
  CHECK((version == ncclGetVersion) == is_linked);
  OK(dm_get_device_proc("cpu", "ncclGetVersion", (void **)&version));
  CHECK(version != ncclGetVersion);
  FAILS(DM_STATUS_NOT_FOUND, "has no symbol ncclNoSuchThing", dm_get_device_proc("cuda", "ncclNoSuchThing", (void **)&version));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "device_type", dm_get_device_proc("tpu", "ncclGetVersion", (void **)&version));
  FAILS(DM_STATUS_INVALID_STATE, "in use already", dm_set_ccl_resolver(resolve, &asked));

  const int asked_before = asked;
  REQUIRE(dm_init("cuda", shape, 1, names, NULL, &mesh));
  REQUIRE(dm_get_comm(mesh, "x", &comm));
  OK(dm_all_reduce(mesh, "x", &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  /* The table was filled before. Only a question for a function asks the resolver again. */
  CHECK(asked == asked_before);
  OK(dm_get_proc(mesh, "ncclAllReduce", (void **)&all_reduce));
  CHECK((all_reduce == ncclAllReduce) == is_linked);
  CHECK(asked == asked_before + is_linked);
  CHECK((is_linked ? ncclAllReduce : all_reduce)(&mine, &sum, 1, ncclFloat, ncclSum, comm, NULL) == ncclSuccess && sum == 2);
  OK(dm_default_world_finalize(0));
  CHECK(!is_linked || recorder_living() == 0);
  dm_free(mesh);
  return finish();
}
