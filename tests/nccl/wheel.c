/* Tests one release of the real NCCL, without a device. tests/test_nccl_wheels.py compiles this
 * file with the release's nccl.h, and with the layout of hostccl/src/nccl_config.rs as static
 * assertions (layout.h). Arguments: the path of libnccl.so.2, and whether there is a stand-in for
 * libcuda (of CUDA 11.4; it only counts devices). */
#include <nccl.h>

#include <stddef.h>

#include "check.h"
#include "layout.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

static dm_mesh *mesh;

/* Checks that the library has the function if and only if it is of that release or a later one. */
static void has(const char *symbol, int since)
{
  void *function = NULL;
  const dm_status status = dm_get_proc(mesh, symbol, &function);
  if ((status == DM_STATUS_OK) != (NCCL_VERSION_CODE >= since)) {
    ++failures;
    fprintf(stderr, "%s: %s in NCCL %d, expected since %d\n", symbol, dm_status_name(status), NCCL_VERSION_CODE, since);
  }
}

static void with_driver(dm_world_options join)
{
  const int32_t one[] = {1};
  dm_world *world = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int version = 0;
  ncclUniqueId first, second;
  ncclComm_t comm = NULL;
  ncclResult_t (*get_version)(int *) = NULL;
  ncclResult_t (*get_id)(ncclUniqueId *) = NULL;
  ncclResult_t (*group_end)(void) = NULL;
  REQUIRE(dm_world_init("cuda", &join, &world));
  options.world = world;
  /* A dimension with one rank has no communicator until the program asks for it. */
  REQUIRE(dm_init("cuda", one, 1, NULL, &options, &mesh));
  REQUIRE(dm_get_proc(mesh, "ncclGetVersion", (void **)&get_version));
  CHECK(get_version(&version) == ncclSuccess && version == NCCL_VERSION_CODE);

  has("ncclCommInitRankConfig", 21800);
  has("ncclCommSplit", 21800);
  has("ncclCommFinalize", 21800);
  has("ncclCommAbort", 21800);
  has("ncclCommGetAsyncError", 21800);
  has("ncclGetLastError", 21800);
  has("ncclMemAlloc", 21900);
  has("ncclCommRegister", 21900);
  has("ncclCommInitRankScalable", 22300);
  has("ncclGroupSimulateEnd", 22200);
  has("ncclCommShrink", 22700);
  has("ncclCommWindowRegister", 22700);
  has("ncclAlltoAll", 22800);
  has("ncclCommRevoke", 22800);
  has("ncclCommGrow", 22900);
  has("ncclCommGetUniqueId", 22900);
  has("hostcclCommLostRank", 1 << 30);

  REQUIRE(dm_get_proc(mesh, "ncclGetUniqueId", (void **)&get_id));
  CHECK(get_id(&first) == ncclSuccess && get_id(&second) == ncclSuccess && memcmp(&first, &second, sizeof first) != 0);

  /* The driver is older than the runtime inside NCCL, so the call fails, also the second time. It
   * must not leave this thread inside a group, which would queue the thread's next calls. */
  for (int time = 0; time < 2; ++time) {
    FAILS(DM_STATUS_CCL, "gives 1 (unhandled cuda error", dm_get_comm(mesh, NULL, &comm));
    CHECK(strstr(dm_last_error(), "; the driver supports CUDA 11.4") != NULL && comm == NULL);
    REQUIRE(dm_get_proc(mesh, "ncclGroupEnd", (void **)&group_end));
    CHECK(group_end() == ncclInvalidUsage);
  }
  printf("comm: %s\n", dm_last_error());
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(world);

  /* An unused id leaves a thread and a socket behind. Neither keeps the process or its children
   * from ending. */
  const pid_t child = fork();
  if (child == 0) _exit(0);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int count, char **arguments)
{
  dm_world *world = NULL;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  if (count < 3) return 2;
  join.world_size = 1;
  join.ccl_library = arguments[1];
  FAILS(DM_STATUS_LIBRARY, "is for devices, and device type cpu needs a library for host memory", dm_world_init("cpu", &join, &world));
  printf("cpu: %s\n", dm_last_error());
  if (strcmp(arguments[2], "driver") == 0) {
    with_driver(join);
  } else {
    FAILS(DM_STATUS_DEVICE, "no CUDA driver that works: libcuda.so.1", dm_world_init("cuda", &join, &world));
    printf("cuda: %s\n", dm_last_error());
    const int32_t one[] = {1};
    dm_mesh *none = NULL;
    setenv("DM_CCL_LIBRARY", arguments[1], 1);
    FAILS(DM_STATUS_DEVICE, "no CUDA driver that works: libcuda.so.1", dm_init("cuda", one, 1, NULL, NULL, &none));
    OK(dm_init(NULL, one, 1, NULL, NULL, &none)); /* device type NULL: what this machine has */
    CHECK(strstr(describe(none), "'cpu'") != NULL);
    dm_free(none);
  }
  return finish();
}
