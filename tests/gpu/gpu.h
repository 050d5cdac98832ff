/* The parts that the programs of tests/gpu share: memory that the collectives work on, and how
 * figures are told to run.sh.
 *
 * DM_DEVICE=cuda: a GPU's memory and one stream of the program, by the CUDA driver, which is
 * opened at run time, so that this compiles and links without CUDA. DM_DEVICE=cpu: the host's
 * memory. An error of either ends the program. */
#ifndef GPU_H
#define GPU_H

#include "check.h"

#include <dlfcn.h>
#include <unistd.h>

typedef unsigned long long device_address;

/* The driver's functions by their names in libcuda.so.1. Results are CUresult. */
typedef struct driver_functions {
  int (*init)(unsigned flags);
  int (*device_count)(int *count);
  int (*device_get)(int *device, int ordinal);
  int (*context_retain)(void **context, int device);
  int (*context_set)(void *context);
  int (*stream_create)(void **stream, unsigned flags);
  int (*stream_synchronize)(void *stream);
  int (*stream_query)(void *stream);
  int (*memory_info)(size_t *free_bytes, size_t *total);
  int (*memory_allocate)(device_address *address, size_t bytes);
  int (*memory_free)(device_address address);
  int (*upload)(device_address to, const void *from, size_t bytes, void *stream);
  int (*download)(void *to, device_address from, size_t bytes, void *stream);
  void *context;
  void *stream;
} driver_functions;

static driver_functions driver;

static inline const char *device_type(void)
{
  const char *type = getenv("DM_DEVICE");
  return type != NULL && strcmp(type, "cuda") == 0 ? "cuda" : "cpu";
}

static inline int on_gpu(void)
{
  return strcmp(device_type(), "cuda") == 0;
}

static inline void driver_says(int code, const char *what)
{
  if (code == 0) return;
  fprintf(stderr, "%s gives CUresult %d\n", what, code);
  exit(1);
}

/* Makes the process's device current on the calling thread. */
static inline void device_attach(void)
{
  if (on_gpu()) driver_says(driver.context_set(driver.context), "cuCtxSetCurrent");
}

/* Puts the address of a function of the driver into a function pointer. Returns whether there is
 * one. */
static inline int driver_has(const char *name, void *function_out)
{
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  void *address = library == NULL ? NULL : dlsym(library, name);
  memcpy(function_out, &address, sizeof address);
  return address != NULL;
}

/* Takes the device that LOCAL_RANK says (all ranks may share one) and makes the stream. */
static inline void device_open(void)
{
  if (!on_gpu()) return;
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "no CUDA driver: %s\n", dlerror());
    exit(1);
  }
  const struct {
    const char *name;
    void *at;
  } wanted[] = {
      {"cuInit", &driver.init},
      {"cuDeviceGetCount", &driver.device_count},
      {"cuDeviceGet", &driver.device_get},
      {"cuDevicePrimaryCtxRetain", &driver.context_retain},
      {"cuCtxSetCurrent", &driver.context_set},
      {"cuStreamCreate", &driver.stream_create},
      {"cuStreamSynchronize", &driver.stream_synchronize},
      {"cuStreamQuery", &driver.stream_query},
      {"cuMemGetInfo_v2", &driver.memory_info},
      {"cuMemAlloc_v2", &driver.memory_allocate},
      {"cuMemFree_v2", &driver.memory_free},
      {"cuMemcpyHtoDAsync_v2", &driver.upload},
      {"cuMemcpyDtoHAsync_v2", &driver.download},
  };
  for (size_t at = 0; at < sizeof wanted / sizeof *wanted; ++at) {
    void *address = dlsym(library, wanted[at].name);
    if (address == NULL) {
      fprintf(stderr, "libcuda.so.1 has no %s\n", wanted[at].name);
      exit(1);
    }
    memcpy(wanted[at].at, &address, sizeof address);
  }
  int count = 0, device = 0;
  const char *local_rank = getenv("LOCAL_RANK");
  driver_says(driver.init(0), "cuInit");
  driver_says(driver.device_count(&count), "cuDeviceGetCount");
  if (count < 1) {
    fprintf(stderr, "the CUDA driver sees no device\n");
    exit(1);
  }
  driver_says(driver.device_get(&device, (local_rank == NULL ? 0 : atoi(local_rank)) % count), "cuDeviceGet");
  driver_says(driver.context_retain(&driver.context, device), "cuDevicePrimaryCtxRetain");
  device_attach();
  driver_says(driver.stream_create(&driver.stream, 1 /* CU_STREAM_NON_BLOCKING */), "cuStreamCreate");
}

static inline void *device_stream(void)
{
  return driver.stream;
}

/* Waits for what is on the stream. */
static inline void device_sync(void)
{
  if (on_gpu()) driver_says(driver.stream_synchronize(driver.stream), "cuStreamSynchronize");
}

/* Whether nothing is on the stream any more. */
static inline int device_is_done(void)
{
  enum { kNotReady = 600 };
  const int code = on_gpu() ? driver.stream_query(driver.stream) : 0;
  if (code != kNotReady) driver_says(code, "cuStreamQuery");
  return code == 0;
}

static inline void *host_alloc(size_t bytes)
{
  void *memory = calloc(1, bytes > 0 ? bytes : 1);
  if (memory == NULL) exit(1);
  return memory;
}

static inline void *device_alloc(size_t bytes)
{
  device_address address = 0;
  if (!on_gpu()) return host_alloc(bytes);
  driver_says(driver.memory_allocate(&address, bytes), "cuMemAlloc");
  return (void *)(uintptr_t)address;
}

static inline void device_free(void *memory)
{
  if (!on_gpu()) free(memory);
  else driver_says(driver.memory_free((device_address)(uintptr_t)memory), "cuMemFree");
}

static inline void device_put(void *device, const void *host, size_t bytes)
{
  if (!on_gpu()) {
    memcpy(device, host, bytes);
    return;
  }
  driver_says(driver.upload((device_address)(uintptr_t)device, host, bytes, driver.stream), "cuMemcpyHtoDAsync");
  device_sync();
}

/* Waits for what was put on the stream before, and copies. */
static inline void device_get(void *host, const void *device, size_t bytes)
{
  if (!on_gpu()) {
    memcpy(host, device, bytes);
    return;
  }
  driver_says(driver.download(host, (device_address)(uintptr_t)device, bytes, driver.stream), "cuMemcpyDtoHAsync");
  device_sync();
}

/* Free memory of the whole device in bytes, over all processes that share it; 0 on the host. */
static inline size_t device_free_bytes(void)
{
  size_t free_bytes = 0, total = 0;
  if (on_gpu()) driver_says(driver.memory_info(&free_bytes, &total), "cuMemGetInfo");
  return free_bytes;
}

/* ---- worlds and meshes ---- */

/* Opens the device and joins the world. */
static inline dm_world *join_world(int32_t *rank_out, int32_t *size_out)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  device_open();
  REQUIRE(dm_world_init(device_type(), &join, &world));
  REQUIRE(dm_world_rank(world, rank_out));
  REQUIRE(dm_world_size(world, size_out));
  return world;
}

/* The function of the library that made the mesh's communicators. */
#define PROC(mesh, function) \
  do { \
    void *address_ = NULL; \
    REQUIRE(dm_get_proc(mesh, "nccl" #function, &address_)); \
    memcpy(&raw##function, &address_, sizeof address_); \
  } while (0)

/* One all-gather of world ranks along dim: who is in its communicator, in which order. */
static inline void check_group(const dm_mesh *mesh, const char *dim)
{
  int32_t size = 0;
  size_t length = 0;
  REQUIRE(dm_size(mesh, dim, &size));
  int32_t mine = rank_of(mesh), local = -1;
  int32_t *wanted = (int32_t *)host_alloc(size * sizeof(int32_t)), *got = (int32_t *)host_alloc(size * sizeof(int32_t));
  REQUIRE(dm_group_ranks(mesh, dim, wanted, size, &length));
  REQUIRE(dm_get_local_rank(mesh, dim, &local));
  CHECK(length == (size_t)size && local >= 0 && local < size && wanted[local] == mine);
  int32_t *send = (int32_t *)device_alloc(sizeof mine), *recv = (int32_t *)device_alloc(size * sizeof(int32_t));
  device_put(send, &mine, sizeof mine);
  OK(dm_all_gather(mesh, dim, send, recv, 1, DM_INT32, device_stream()));
  device_get(got, recv, size * sizeof(int32_t));
  if (memcmp(got, wanted, size * sizeof(int32_t)) != 0) {
    ++failures;
    fprintf(stderr, "%s along %s: the communicator's ranks are not those of dm_group_ranks\n", describe(mesh),
            dim == NULL ? "its dimension" : dim);
  }
  device_free(send);
  device_free(recv);
  free(wanted);
  free(got);
}

/* ---- figures ---- */

static inline int compare_doubles(const void *a, const void *b)
{
  const double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

static inline double median(double *values, size_t count)
{
  qsort(values, count, sizeof *values, compare_doubles);
  return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* One line of the results' table. */
static inline void figure(const char *what, double value, const char *unit)
{
  printf("FIGURE|%s|%.4g|%s\n", what, value, unit);
  fflush(stdout);
}

#endif
