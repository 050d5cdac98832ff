/* ranks: 1 4 */
/* static */
/* flags: -D_GNU_SOURCE */
/* A forked child has none of its parent's sockets, shared memory or calls. Nothing that the child
 * does changes the parent. tests/test_fork.py kills parents. */
#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static dm_world *world;
static dm_mesh *mesh;
static ncclComm_t comm;
static int32_t rank, size;

/* The work of a child. Its failed checks become its exit status. */
typedef void body(void);

static void ended(pid_t child)
{
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) {
    perror("fork or waitpid");
    exit(1);
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    fprintf(stderr, "a child ended with status %#x\n", (unsigned)status);
    ++failures;
  }
}

static void in_child(body *body)
{
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    body();
    _exit(finish());
  }
  ended(child);
}

/* Forks by the system call itself, so that the handlers of pthread_atfork do not run. */
static void in_clone(body *body)
{
  const pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (child == 0) {
    failures = 0;
    body();
    _exit(finish());
  }
  ended(child);
}

static void reduce(void)
{
  float one = 1, sum = 0;
  OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == (float)size);
}

#define REFUSED(call) FAILS(DM_STATUS_UNSUPPORTED, "was forked from process", call)

static void is_refused(void)
{
  dm_mesh *made = NULL;
  dm_world *joined = NULL;
  ncclComm_t raw = NULL;
  void *address = NULL;
  float one = 1, sum = 0;
  const int32_t shape[] = {1};
  const char *const name = "x";
  REFUSED(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  REFUSED(dm_get_comm(mesh, NULL, &raw));
  REFUSED(dm_get_proc(mesh, "ncclAllReduce", &address));
  REFUSED(dm_world_barrier(world, 1000));
  REFUSED(dm_flatten(mesh, name, NULL, &made));
  REFUSED(dm_slice(mesh, &name, 1, &made));
  REFUSED(dm_init("cpu", shape, 1, NULL, NULL, &made));
  REFUSED(dm_world_init("cpu", NULL, &joined));
  REFUSED(dm_register(mesh, name));
  REFUSED(dm_group_start(mesh));
  REFUSED(dm_group_end(mesh));
  REFUSED(dm_check(mesh, NULL));
  REFUSED(dm_finalize(mesh, NULL));
  REFUSED(dm_abort(mesh));
  REFUSED(dm_world_abort(world));
  REFUSED(dm_default_world_abort());
  CHECK(made == NULL && joined == NULL && raw == NULL && sum == 0);
}

/* Functions of the host engine, to which the parent got pointers. */
static void *engine(const char *name)
{
  void *address = NULL;
  REQUIRE(dm_get_proc(mesh, name, &address));
  return address;
}

static ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
static ncclResult_t (*destroy)(ncclComm_t), (*abort_comm)(ncclComm_t), (*group_start)(void), (*unique_id)(ncclUniqueId *);
static ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);

static void engine_refuses(void)
{
  float one = 1, sum = 0;
  ncclUniqueId id;
  ncclResult_t state = ncclSuccess;
  CHECK(all_reduce(&one, &sum, 1, ncclFloat, ncclSum, comm, NULL) == ncclInvalidUsage);
  CHECK(unique_id(&id) == ncclInvalidUsage);
  CHECK(group_start() == ncclInvalidUsage);
  CHECK(async_error(comm, &state) == ncclInvalidUsage);
  CHECK(destroy(comm) == ncclInvalidUsage);
  CHECK(abort_comm(comm) == ncclInvalidUsage);
}

static void may_ask(void)
{
  int32_t number = -1;
  int32_t coordinate[1] = {999};
  size_t length = 0;
  OK(dm_rank(mesh, &number));
  CHECK(number == rank);
  OK(dm_world_rank(world, &number));
  CHECK(number == rank);
  OK(dm_get_local_rank(mesh, NULL, &number));
  CHECK(number == rank);
  OK(dm_size(mesh, NULL, &number));
  CHECK(number == size);
  OK(dm_get_coordinate(mesh, coordinate, 1, &length));
  CHECK(coordinate[0] == rank && dm_ndim(mesh) == 1);
  CHECK(strstr(describe(mesh), "DeviceMesh") != NULL);
}

/* Frees the parent's handles, as a destructor does, or Python when a forked worker ends. */
static void may_free(void)
{
  int32_t number = -1;
  dm_free(mesh);
  dm_world_free(world);
  OK(dm_rank(mesh, &number)); /* the handle is the parent's */
}

/* Whether this process has a descriptor that leads to that kind of file. */
static int descriptors(const char *kind)
{
  int found = 0;
  DIR *folder = opendir("/proc/self/fd");
  for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
    char path[300], target[300] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
    if (readlink(path, target, sizeof target - 1) > 0 && strncmp(target, kind, strlen(kind)) == 0) ++found;
  }
  if (folder != NULL) closedir(folder);
  return found;
}

static int mappings(void)
{
  char line[600];
  int found = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps != NULL && fgets(line, sizeof line, maps) != NULL) found += strstr(line, "memfd:hostccl") != NULL;
  if (maps != NULL) fclose(maps);
  return found;
}

static int sockets_before;

static void has_nothing(void)
{
  CHECK(descriptors("socket:") == sockets_before);
  CHECK(descriptors("anon_inode:[event") == 0);
  CHECK(descriptors("anon_inode:[pidfd]") + descriptors("pidfd:") == 0);
  CHECK(descriptors("/memfd:hostccl") == 0);
  CHECK(mappings() == 0);
}

static void all_at_once(void)
{
  may_ask();
  is_refused();
  engine_refuses();
  may_free();
  has_nothing();
}

static void daemon_like(void)
{
  in_child(all_at_once);
}

static void without_handlers(void)
{
  is_refused();
  engine_refuses();
  may_free();
  CHECK(mappings() == 0);
}

static void leaves_by_exit(void)
{
  exit(finish());
}

/* The child may leave by exit while a group is open. It cannot end the group. */
static void inside_a_group(void)
{
  float one = 1, sum = 0;
  OK(dm_group_start(mesh));
  OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  in_child(leaves_by_exit);
  OK(dm_group_end(mesh));
  CHECK(sum == (float)size);
}

/* A child that is forked before the parent holds anything may do everything. */
static void is_free(void)
{
  dm_world_options alone = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {1};
  dm_mesh *own = NULL;
  float one = 1, sum = 0;
  alone.world_size = 1;
  REQUIRE(dm_world_init("cpu", &alone, &options.world));
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &own));
  OK(dm_all_reduce(own, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 1);
  OK(dm_finalize(own, NULL));
  dm_free(own);
  dm_world_free(options.world);
}

/* Returns how many threads of the library this process has. The thread of ThreadSanitizer does not
 * count: its name begins in another way. */
static int library_threads(void)
{
  int threads = 0;
  DIR *tasks = opendir("/proc/self/task");
  for (const struct dirent *task = NULL; tasks != NULL && (task = readdir(tasks)) != NULL;) {
    char path[300], name[17] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
    FILE *comm_file = fopen(path, "r");
    if (comm_file == NULL) continue;
    if (fgets(name, sizeof name, comm_file) != NULL) threads += strncmp(name, "dm-", 3) == 0;
    fclose(comm_file);
  }
  if (tasks != NULL) closedir(tasks);
  return threads;
}

/* Waits until the library has no threads. Threads that served other hosts end a moment after the
 * last communicator. */
static void wait_for_threads(void)
{
  const double until = seconds_now() + 10;
  while (library_threads() > 0 && seconds_now() < until) {
    const struct timespec pause = {0, 1000000};
    nanosleep(&pause, NULL);
  }
  CHECK(library_threads() == 0);
}

/* The calls of other threads go on while this process forks. */
enum { kRounds = 3000 };
static int done;

static void *reduce_on(void *unused)
{
  (void)unused;
  for (int round = 0; round < kRounds; ++round) reduce();
  __atomic_store_n(&done, 1, __ATOMIC_SEQ_CST);
  return NULL;
}

static void refused_quickly(void)
{
  float one = 1, sum = 0;
  REFUSED(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  dm_free(mesh);
}

int main(int argc, char **argv)
{
  if (argc > 1 && strcmp(argv[1], "inherited") == 0) {
    sockets_before = atoi(argv[2]);
    has_nothing();
    return finish();
  }
  sockets_before = descriptors("socket:");
  in_child(is_free);

  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", &join, &world));
  options.world = world;
  REQUIRE(dm_world_rank(world, &rank));
  REQUIRE(dm_world_size(world, &size));
  const int32_t shape[] = {size};
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &mesh));
  REQUIRE(dm_get_comm(mesh, NULL, &comm));
  *(void **)&all_reduce = engine("ncclAllReduce");
  *(void **)&destroy = engine("ncclCommDestroy");
  *(void **)&abort_comm = engine("ncclCommAbort");
  *(void **)&group_start = engine("ncclGroupStart");
  *(void **)&unique_id = engine("ncclGetUniqueId");
  *(void **)&async_error = engine("ncclCommGetAsyncError");
  reduce();
  CHECK(mappings() > 0);

  in_child(all_at_once);
  in_child(daemon_like);
  in_child(leaves_by_exit);
  inside_a_group();
  in_clone(without_handlers);
  /* A process that runs another program (exec) has nothing of the parent either. */
  char command[600], path[500] = "";
  CHECK(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
  snprintf(command, sizeof command, "'%s' inherited %d", path, sockets_before);
  CHECK(system(command) == 0);
  const pid_t child = fork();
  if (child == 0) {
    char count[20];
    snprintf(count, sizeof count, "%d", sockets_before);
    execl(path, path, "inherited", count, (char *)NULL);
    _exit(1);
  }
  ended(child);
  reduce();
  OK(dm_world_barrier(world, 0));

  pthread_t thread;
  if (pthread_create(&thread, NULL, reduce_on, NULL) != 0) exit(1);
  int forks = 0;
  do {
    in_child(refused_quickly);
  } while (!__atomic_load_n(&done, __ATOMIC_SEQ_CST) && ++forks < 200);
  pthread_join(thread, NULL);

  OK(dm_world_barrier(world, 0));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(world);
  /* The parent holds nothing any more, except the communicator of one rank alone, which lasts as
   * long as the process. */
  wait_for_threads();
  if (size > 1) in_child(is_free);
  return finish();
}
