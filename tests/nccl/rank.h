/* What the programs of one rank share that run over the recorder: the world, its meshes, and the
 * table of a program's cases. */
#ifndef RANK_H
#define RANK_H

#include "library_threads.h"

static dm_world *world;
static int32_t rank, size;
/* The options with which `made` makes meshes. A case sets them back after it has changed them. */
static dm_init_options options = DM_INIT_OPTIONS_INIT;
static const int32_t kCube[] = {2, 2, 2};
static const char *const kCubeNames[] = {"pp", "dp", "tp"};
/* Functions of the recorder (tests/nccl/recorder). `made` finds them. */
static void (*note)(const char *text);
static int (*living)(void);

/* A case of a program, by the name that the command line gives. */
typedef struct rank_case {
  const char *name;
  void (*run)(void);
} rank_case;

static inline dm_mesh *made(const int32_t *shape, size_t ndim, const char *const *names)
{
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cuda", shape, ndim, names, &options, &mesh));
  if (note == NULL) {
    REQUIRE(dm_get_proc(mesh, "recorder_note", (void **)&note));
    REQUIRE(dm_get_proc(mesh, "recorder_living", (void **)&living));
  }
  return mesh;
}

static inline dm_mesh *made_cube(void)
{
  return made(kCube, 3, kCubeNames);
}

static inline float sum_along(const dm_mesh *mesh, const char *dim)
{
  float mine = 1, sum = 0;
  OK(dm_all_reduce(mesh, dim, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  return sum;
}

static inline ncclComm_t comm_of(const dm_mesh *mesh, const char *dim)
{
  ncclComm_t comm = NULL;
  OK(dm_get_comm(mesh, dim, &comm));
  return comm;
}

/* Makes one mesh of all ranks, adds up along it, and ends it. */
static inline void one_mesh(void)
{
  const int32_t line[] = {size};
  dm_mesh *mesh = made(line, 1, NULL);
  CHECK(sum_along(mesh, NULL) == (float)size);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* Begins a thread of the program, which check_library_threads does not look at. */
static inline pthread_t begun(void *(*work)(void *), void *argument)
{
  pthread_t thread;
  starts_own_thread = 1;
  CHECK(pthread_create(&thread, NULL, work, argument) == 0);
  starts_own_thread = 0;
  return thread;
}

/* Returns a function of the stand-in for the driver. Without it the rest of the test makes no
 * sense. */
static inline void *of_driver(const char *name)
{
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *function = driver == NULL ? NULL : dlsym(driver, name);
  if (function == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  return function;
}

/* Makes a device current on the calling thread. */
static inline void choose_device(int number)
{
  void *context = NULL;
  int (*retain)(void **, int) = NULL, (*set)(void *) = NULL;
  *(void **)&retain = of_driver("cuDevicePrimaryCtxRetain");
  *(void **)&set = of_driver("cuCtxSetCurrent");
  CHECK(retain(&context, number) == 0 && set(context) == 0);
}

static inline dm_world_options how_to_join(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  join.timeout_ms = 30000;
  join.ccl_library = getenv("RECORDER");
  return join;
}

static inline dm_status join_world(const dm_world_options *join)
{
  const dm_status status = dm_world_init("cuda", join, &world);
  options.world = world;
  return status;
}

/* Learns of the world that this rank has joined, and prints what the world says of this rank. */
static inline void learn_world(void)
{
  dm_world_info info = DM_WORLD_INFO_INIT;
  REQUIRE(dm_world_rank(world, &rank));
  REQUIRE(dm_world_size(world, &size));
  options.timeout_ms = 30000;
  OK(dm_world_get_info(world, &info));
  CHECK(info.rank == rank && info.size == size && strcmp(info.device_type, "cuda") == 0 && info.library[0] != '\0' &&
        info.ccl_version >= 21400);
  printf("info rank=%d local=%d/%d host=%d/%d device=%d\n", info.rank, info.local_rank, info.local_size, info.host,
         info.num_hosts, info.device);
}


/* The case that the command line names. */
static inline const char *case_name(int count, char **arguments)
{
  return count > 1 ? arguments[1] : "";
}

static inline void run_case(const char *name, const rank_case *cases, size_t num_cases)
{
  for (size_t at = 0; at < num_cases; ++at)
    if (strcmp(name, cases[at].name) == 0) {
      cases[at].run();
      return;
    }
  fprintf(stderr, "this program has no case \"%s\"\n", name);
  exit(2);
}

/* Joins the world, runs a case in it and leaves it. */
static inline void run_in_world(const char *name, const rank_case *cases, size_t num_cases)
{
  const dm_world_options join = how_to_join();
  REQUIRE(join_world(&join));
  learn_world();
  run_case(name, cases, num_cases);
  dm_world_free(world);
}

#define RUN_CASE(name, cases) run_case(name, cases, sizeof cases / sizeof *cases)
#define RUN_IN_WORLD(name, cases) run_in_world(name, cases, sizeof cases / sizeof *cases)

#endif
