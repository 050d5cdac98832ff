/* Provokes one error and prints its status and its message: tests/test_errors_page.py compares
 * them with docs/errors.md.
 *
 *     provoke CASE        on as many ranks as the case needs (0: no launcher); rank 0 prints. */
#include <devicemesh.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const NAMES[] = {"dp", "tp"};

static void expect(dm_status status, const char *call)
{
  if (status != DM_STATUS_OK) {
    fprintf(stderr, "%s: %s: %s\n", call, dm_status_name(status), dm_last_error());
    exit(2);
  }
}
#define EXPECT(call) expect(call, #call)

static dm_world *offline(int32_t size, int32_t rank)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world;
  options.flags = DM_WORLD_OFFLINE, options.world_size = size, options.rank = rank;
  EXPECT(dm_world_init("cpu", &options, &world));
  return world;
}

static dm_mesh *offline_mesh(int32_t size, int32_t rank, size_t dp, size_t tp)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh;
  options.world = offline(size, rank);
  EXPECT(dm_init("cpu", (int[]){dp, tp}, 2, NAMES, &options, &mesh));
  return mesh;
}

static dm_status exhausted(void)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  const struct rlimit three = {3, 3};
  dm_world *world;
  options.world_size = 2, options.rank = 1, options.init_method = "tcp://127.0.0.1:9";
  if (setrlimit(RLIMIT_NOFILE, &three) != 0) exit(2);
  return dm_world_init("cpu", &options, &world);
}

static dm_status too_large(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh;
  options.world = offline(6, 0);
  return dm_init("cpu", (int[]){2, 4}, 2, NAMES, &options, &mesh);
}

static dm_status struct_size(void)
{
  dm_init_options options = {0};
  dm_mesh *mesh;
  return dm_init("cpu", (int[]){2, 4}, 2, NAMES, &options, &mesh);
}

static dm_status partial_environment(void)
{
  dm_world *world;
  setenv("RANK", "1", 1);
  return dm_world_init("cpu", NULL, &world);
}

static dm_status freed(void)
{
  dm_mesh *mesh = offline_mesh(8, 6, 2, 4);
  int32_t rank;
  dm_free(mesh);
  return dm_rank(mesh, &rank);
}

static dm_status no_dimension(void)
{
  int32_t rank;
  return dm_get_local_rank(offline_mesh(8, 6, 2, 4), "pp", &rank);
}

static dm_status not_member(void)
{
  int32_t coordinate[2];
  size_t length;
  return dm_get_coordinate(offline_mesh(8, 6, 2, 2), coordinate, 2, &length);
}

static dm_status small_buffer(void)
{
  char text[16];
  size_t length;
  return dm_describe(offline_mesh(8, 6, 2, 4), text, sizeof(text), &length);
}

static dm_status no_communicators(void)
{
  ncclComm_t comm;
  return dm_get_comm(offline_mesh(8, 6, 2, 4), "tp", &comm);
}

static dm_status forked(void)
{
  const int32_t shape[] = {1, 1};
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh;
  options.world_size = 1;
  EXPECT(dm_world_init("cpu", &options, &init.world));
  EXPECT(dm_init("cpu", shape, 2, NAMES, &init, &mesh));
  /* The child goes on from here. The parent prints nothing and waits for the child. */
  const pid_t child = fork();
  if (child > 0) _exit(waitpid(child, NULL, 0) != child);
  return dm_finalize(mesh, NULL);
}

static dm_status no_library(void)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world;
  options.world_size = 1, options.ccl_library = "/opt/nccl/libnccl.so.2";
  return dm_world_init("cpu", &options, &world);
}

static dm_status port_in_use(void)
{
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof(address);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  char method[64];
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world;
  if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 1) ||
      getsockname(listener, (struct sockaddr *)&address, &length))
    exit(2);
  snprintf(method, sizeof(method), "tcp://127.0.0.1:%d", ntohs(address.sin_port));
  options.world_size = 2, options.init_method = method, options.timeout_ms = 1000;
  return dm_world_init("cpu", &options, &world);
}

static dm_status nobody_there(void)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world;
  options.world_size = 2, options.rank = 1, options.init_method = "tcp://127.0.0.1:1", options.timeout_ms = 300;
  return dm_world_init("cpu", &options, &world);
}

static dm_status aborted(void)
{
  dm_mesh *mesh;
  ncclComm_t comm;
  EXPECT(dm_init("cpu", (int[]){1, 1}, 2, NAMES, NULL, &mesh));
  EXPECT(dm_abort(mesh));
  return dm_get_comm(mesh, "tp", &comm);
}

static dm_status no_communicator(void)
{
  const ncclComm_t comm = (ncclComm_t)0x1234;
  dm_mesh *mesh;
  return dm_from_comms("cpu", (int[]){1}, 1, NULL, &comm, NULL, &mesh);
}

static dm_status no_group(void)
{
  dm_mesh *mesh;
  EXPECT(dm_init("cpu", (int[]){1, 1}, 2, NAMES, NULL, &mesh));
  return dm_group_end(mesh);
}

/* ---- on several ranks ---- */

static dm_world *world;
static int32_t rank;

static void join(int64_t timeout_ms)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  EXPECT(dm_world_init("cpu", &options, &world));
  EXPECT(dm_world_rank(world, &rank));
}

static dm_mesh *row(int32_t ranks)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh;
  options.world = world;
  EXPECT(dm_init("cpu", &ranks, 1, NAMES, &options, &mesh));
  return mesh;
}

static dm_status mismatch(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh;
  join(30000);
  options.world = world;
  return dm_init("cpu", rank == 3 ? (int[]){4, 1} : (int[]){2, 2}, 2, NAMES, &options, &mesh);
}

static dm_status never_came(void)
{
  join(0);
  if (rank != 3) return dm_world_barrier(world, 500);
  sleep(3); /* this rank is alive, but does not make the call */
  return dm_world_barrier(world, 500);
}

static dm_status came_too_late(void)
{
  join(0);
  if (rank == 0) sleep(3); /* rank 1 has given the call up by then */
  return dm_world_barrier(world, 500);
}

static dm_status other_counts(void)
{
  float buffer[2] = {0};
  join(30000);
  return dm_all_reduce(row(4), NULL, buffer, buffer, rank == 3 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL);
}

/* dp has ranks 0 and 2, which are ranks 0 and 1 in the communicator. */
static dm_mesh *square(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh;
  join(30000);
  options.world = world;
  EXPECT(dm_init("cpu", (int[]){2, 2}, 2, NAMES, &options, &mesh));
  return mesh;
}

static dm_status refused(void)
{
  dm_mesh *mesh = square(), *flat;
  return dm_flatten(mesh, rank == 3 ? "dp" : "all", NULL, &flat);
}

static dm_status other_counts_along_dp(void)
{
  float buffer[2] = {0};
  dm_mesh *mesh = square();
  return dm_all_reduce(mesh, "dp", buffer, buffer, rank == 2 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL);
}

static dm_status failed_earlier(void)
{
  float buffer[2] = {0};
  dm_mesh *mesh = square();
  dm_all_reduce(mesh, "dp", buffer, buffer, rank == 2 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL);
  return dm_broadcast(mesh, "dp", buffer, buffer, 2, DM_FLOAT32, 0, NULL);
}

static dm_status late_along_dp(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  float buffer[2] = {0};
  dm_mesh *mesh;
  join(30000);
  options.world = world, options.timeout_ms = 500;
  EXPECT(dm_init("cpu", (int[]){2, 2}, 2, NAMES, &options, &mesh));
  if (rank == 2) return sleep(2) ? DM_STATUS_OK : DM_STATUS_OK; /* this rank is alive, but does not make the call */
  return rank == 0 ? dm_all_reduce(mesh, "dp", buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL) : DM_STATUS_OK;
}

static dm_status others_finalize(void)
{
  float buffer[2] = {0};
  dm_mesh *mesh = square();
  const dm_status status = rank == 0 ? dm_all_reduce(mesh, "dp", buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL) : DM_STATUS_OK;
  char text[1024];
  snprintf(text, sizeof(text), "%s", dm_last_error());
  dm_finalize(mesh, NULL);
  if (rank == 0) printf("%s: %s\n", dm_status_name(status), text), fflush(stdout);
  _exit(0);
}

static dm_status died(void)
{
  float buffer[2] = {0};
  join(30000);
  dm_mesh *mesh = row(4);
  if (rank == 3) _exit(0);
  return dm_all_reduce(mesh, NULL, buffer, buffer, 2, DM_FLOAT32, DM_SUM, NULL);
}

int main(int argc, char **argv)
{
  const struct {
    const char *name;
    dm_status (*provoke)(void);
  } cases[] = {
      {"too_large", too_large}, {"exhausted", exhausted}, {"struct_size", struct_size}, {"partial_environment", partial_environment},
      {"freed", freed}, {"no_dimension", no_dimension}, {"not_member", not_member}, {"small_buffer", small_buffer},
      {"no_communicators", no_communicators}, {"forked", forked}, {"no_library", no_library}, {"port_in_use", port_in_use},
      {"nobody_there", nobody_there}, {"aborted", aborted}, {"no_group", no_group}, {"no_communicator", no_communicator},
      {"mismatch", mismatch}, {"never_came", never_came}, {"came_too_late", came_too_late}, {"refused", refused},
      {"other_counts", other_counts}, {"died", died}, {"other_counts_along_dp", other_counts_along_dp},
      {"failed_earlier", failed_earlier}, {"late_along_dp", late_along_dp}, {"others_finalize", others_finalize},
  };
  for (size_t at = 0; argc == 2 && at < sizeof(cases) / sizeof(cases[0]); ++at)
    if (strcmp(argv[1], cases[at].name) == 0) {
      const dm_status status = cases[at].provoke();
      if (rank == 0) printf("%s: %s\n", dm_status_name(status), status == DM_STATUS_OK ? "" : dm_last_error());
      fflush(stdout);
      _exit(0); /* the end of the process frees what the case left open */
    }
  fprintf(stderr, "usage: provoke CASE\n");
  return 2;
}
