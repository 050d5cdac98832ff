// A libcuda.so.1 for the dry run: one device whose memory is the host's, whose streams are always
// done, and which runs the kernels of examples/device_cuda.cu by loops. With it the very programs
// for a GPU run here, through the same calls with the same arguments. It cannot say what a GPU or
// NCCL would make of them.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
static thread_local struct Index {
  int x;
} blockIdx, blockDim, threadIdx;
#include "../../examples/device_cuda.cu"

namespace {

constexpr int kOk = 0, kInvalidValue = 1, kNotFound = 500;

// Takes a kernel's arguments from their addresses, as the driver does, by the types that the kernel
// declares.
template <class... Arguments, std::size_t... At>
void call(void (*kernel)(Arguments...), void **addresses, std::integer_sequence<std::size_t, At...>)
{
  kernel(*static_cast<Arguments *>(addresses[At])...);
}
template <class... Arguments> void call(void (*kernel)(Arguments...), void **addresses)
{
  call(kernel, addresses, std::make_index_sequence<sizeof...(Arguments)>());
}

struct Kernel {
  const char *name;
  void (*run)(void **addresses);
};
#define KERNEL(name) {#name, [](void **addresses) { call(name, addresses); }}
const Kernel kKernels[] = {KERNEL(matmul),     KERNEL(bias_relu), KERNEL(relu_backward), KERNEL(softmax_cross_entropy),
                           KERNEL(column_sum), KERNEL(sgd)};

int context, module;
thread_local void *current;
thread_local bool is_capturing;

int copy(void *to, const void *from, std::size_t bytes)
{
  if (current == nullptr) return kInvalidValue;
  std::memcpy(to, from, bytes);
  return kOk;
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) { return flags == 0 ? kOk : kInvalidValue; }
int cuDriverGetVersion(int *version) { return *version = 12010, kOk; }
int cuGetErrorString(int, const char **text) { return *text = "the stand-in driver says no", kOk; }
int cuGetErrorName(int, const char **text) { return *text = "STAND_IN", kOk; }
int cuDeviceGetCount(int *count) { return *count = 1, kOk; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? kOk : kInvalidValue; }
int cuDeviceGetName(char *name, int size, int)
{
  return std::snprintf(name, static_cast<std::size_t>(size), "no GPU: the stand-in driver"), kOk;
}
int cuDevicePrimaryCtxRetain(void **out, int) { return *out = &context, kOk; }
int cuCtxSetCurrent(void *context) { return current = context, kOk; }
int cuCtxGetCurrent(void **out) { return *out = current, kOk; }
int cuCtxGetDevice(int *device) { return *device = 0, current == nullptr ? kInvalidValue : kOk; }
// The null stream, because the host engine takes no other.
int cuStreamCreate(void **stream, unsigned) { return *stream = nullptr, current == nullptr ? kInvalidValue : kOk; }
int cuStreamSynchronize(void *) { return current == nullptr ? kInvalidValue : kOk; }
int cuStreamQuery(void *) { return kOk; }
int cuMemGetInfo_v2(std::size_t *free, std::size_t *total) { return *free = *total = std::size_t{1} << 34, kOk; }
int cuMemAlloc_v2(std::uint64_t *address, std::size_t bytes)
{
  if (current == nullptr) return kInvalidValue;
  void *memory = std::malloc(bytes);
  if (memory != nullptr) std::memset(memory, 0x5a, bytes);
  *address = reinterpret_cast<std::uintptr_t>(memory);
  return memory == nullptr ? 2 : kOk;
}
int cuMemFree_v2(std::uint64_t address) { return std::free(reinterpret_cast<void *>(address)), kOk; }
int cuMemsetD8Async(std::uint64_t address, unsigned char value, std::size_t count, void *)
{
  return std::memset(reinterpret_cast<void *>(address), value, count), kOk;
}
int cuMemcpyHtoDAsync_v2(std::uint64_t to, const void *from, std::size_t bytes, void *)
{
  return copy(reinterpret_cast<void *>(to), from, bytes);
}
int cuMemcpyDtoHAsync_v2(void *to, std::uint64_t from, std::size_t bytes, void *)
{
  return copy(to, reinterpret_cast<void *>(from), bytes);
}
int cuMemcpyDtoDAsync_v2(std::uint64_t to, std::uint64_t from, std::size_t bytes, void *)
{
  return copy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
}

// Capturing runs the work at once, as the host engine does, and a launch of the graph does nothing.
// So a captured collective leaves its result, and a program that replays it sees that result.
int cuStreamBeginCapture_v2(void *, int) { return is_capturing = true, kOk; }
int cuStreamEndCapture(void *, void **graph) { return is_capturing = false, *graph = &module, kOk; }
// During a capture the legacy default stream (handle 1) answers with
// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
int cuStreamIsCapturing(void *stream, int *status)
{
  *status = 0;
  return stream == reinterpret_cast<void *>(1) && is_capturing ? 906 : kOk;
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long) { return *executable = graph, kOk; }
int cuGraphLaunch(void *, void *) { return current == nullptr ? kInvalidValue : kOk; }
int cuGraphExecDestroy(void *) { return kOk; }
int cuGraphDestroy(void *) { return kOk; }
// No attribute: neither cuMem nor multicast.
int cuDeviceGetAttribute(int *value, int, int) { return *value = 0, kOk; }

// The image must at least be PTX that has every kernel of the source.
int cuModuleLoadData(void **out, const void *image)
{
  const char *ptx = static_cast<const char *>(image);
  if (std::strstr(ptx, ".version") == nullptr) return kInvalidValue;
  for (const Kernel &kernel : kKernels) {
    char entry[64];
    std::snprintf(entry, sizeof entry, ".visible .entry %s(", kernel.name);
    if (std::strstr(ptx, entry) == nullptr) return kNotFound;
  }
  return *out = &module, kOk;
}
int cuModuleGetFunction(void **function, void *, const char *name)
{
  for (const Kernel &kernel : kKernels)
    if (std::strcmp(kernel.name, name) == 0) return *function = const_cast<Kernel *>(&kernel), kOk;
  return kNotFound;
}
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned, void *, void **arguments, void **)
{
  if (current == nullptr || grid_y * grid_z * block_y * block_z != 1) return kInvalidValue;
  blockDim.x = static_cast<int>(block_x);
  for (blockIdx.x = 0; blockIdx.x < static_cast<int>(grid_x); ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < static_cast<int>(block_x); ++threadIdx.x) static_cast<Kernel *>(function)->run(arguments);
  return kOk;
}

}  // extern "C"
