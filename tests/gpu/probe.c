/* What there is on this machine, a line KEY=VALUE each: the driver's CUDA version, the devices, the
 * communicator library's version. Exit code 77 and a reason where cuda cannot be used. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Puts the address of a library's function into a pointer of that function's type. Returns whether
 * there is one. */
static int find(void *library, const char *name, void *function_out)
{
  void *address = library == NULL ? NULL : dlsym(library, name);
  memcpy(function_out, &address, sizeof address);
  return address != NULL;
}

static int none(const char *why, int code)
{
  printf("WHY=%s (%d)\n", why, code);
  return 77;
}

int main(void)
{
  int (*get_number)(int *) = NULL, (*init)(unsigned) = NULL, (*device_get)(int *, int) = NULL, (*device_name)(char *, int, int) = NULL;
  const char *name = getenv("DM_CCL_LIBRARY");
  int version = 0, count = 0, device = 0;
  char text[128] = "unknown";

  void *nccl = dlopen(name == NULL || *name == '\0' ? "libnccl.so.2" : name, RTLD_NOW | RTLD_LOCAL);
  if (nccl == NULL) printf("NCCL_WHY=%s\n", dlerror());
  else if (find(nccl, "ncclGetVersion", &get_number) && get_number(&version) == 0) printf("NCCL_VERSION=%d\n", version);

  void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (cuda == NULL) return none("no CUDA driver: libcuda.so.1 cannot be opened", 0);
  if (!find(cuda, "cuInit", &init)) return none("libcuda.so.1 has no cuInit", 0);
  const int code = init(0);
  if (code != 0) return none("cuInit fails", code);
  if (find(cuda, "cuDriverGetVersion", &get_number) && get_number(&version) == 0) printf("CUDA_DRIVER_VERSION=%d\n", version);
  if (!find(cuda, "cuDeviceGetCount", &get_number) || get_number(&count) != 0 || count < 1) return none("the driver sees no device", count);
  printf("DEVICES=%d\n", count);
  if (find(cuda, "cuDeviceGet", &device_get) && device_get(&device, 0) == 0 && find(cuda, "cuDeviceGetName", &device_name))
    (void)device_name(text, (int)sizeof text, device);
  printf("DEVICE=%s\n", text);
  /* CU_DEVICE_ATTRIBUTE_*; what NCCL asks for before it uses cuMem and NVLS. */
  static const struct {
    const char *name;
    int attribute;
  } attributes[] = {{"COMPUTE_CAPABILITY_MAJOR", 75},          {"COMPUTE_CAPABILITY_MINOR", 76},
                    {"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", 102}, {"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", 103},
                    {"GPU_DIRECT_RDMA_SUPPORTED", 116},         {"HANDLE_TYPE_FABRIC_SUPPORTED", 128},
                    {"MULTICAST_SUPPORTED", 132},               {"HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", 141}};
  int (*get_attribute)(int *, int, int) = NULL, value = 0;
  if (!find(cuda, "cuDeviceGetAttribute", &get_attribute)) return 0;
  for (size_t at = 0; at < sizeof attributes / sizeof *attributes; ++at)
    if (get_attribute(&value, attributes[at].attribute, device) == 0) printf("%s=%d\n", attributes[at].name, value);
  return 0;
}
