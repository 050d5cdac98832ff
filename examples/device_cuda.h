// The example's device on a GPU: the functions of device_cpu.h as small kernels, by the CUDA
// driver alone. libcuda.so.1 is opened at run time and the kernels are PTX (device_cuda.cu is
// their source), so that this compiles without CUDA, and the program runs wherever there is a
// driver.
#pragma once

#include <dlfcn.h>
#include <hostccl.h>  // NCCL's types; after a real nccl.h it adds nothing

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "device_cuda_ptx.h"

namespace device {

constexpr const char *type = "cuda";

// The functions of the driver that are needed, by their names in libcuda.so.1 (cuda.h maps
// cuMemAlloc to cuMemAlloc_v2 and so on).
struct Driver {
  using Result = int;
  using Address = std::uint64_t;
  Result (*init)(unsigned flags);
  Result (*error_string)(Result error, const char **text);
  Result (*device_count)(int *count);
  Result (*device_get)(int *device, int ordinal);
  Result (*context_retain)(void **context, int device);
  Result (*context_set)(void *context);
  Result (*stream_create)(cudaStream_t *stream, unsigned flags);
  Result (*stream_synchronize)(cudaStream_t stream);
  Result (*memory_allocate)(Address *address, std::size_t bytes);
  Result (*memory_free)(Address address);
  Result (*memory_set)(Address address, unsigned char value, std::size_t count, cudaStream_t stream);
  Result (*upload)(Address to, const void *from, std::size_t bytes, cudaStream_t stream);
  Result (*download)(void *to, Address from, std::size_t bytes, cudaStream_t stream);
  Result (*module_load)(void **module, const void *image);
  Result (*module_function)(void **function, void *module, const char *name);
  Result (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared_bytes, cudaStream_t stream, void **arguments, void **extra);

  cudaStream_t stream = nullptr;
  void *module = nullptr;

  // Takes the device of that index. The library has chosen it for this rank.
  explicit Driver(int index)
  {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) fail(dlerror());
    find(library, "cuInit", init);
    find(library, "cuGetErrorString", error_string);
    find(library, "cuDeviceGetCount", device_count);
    find(library, "cuDeviceGet", device_get);
    find(library, "cuDevicePrimaryCtxRetain", context_retain);
    find(library, "cuCtxSetCurrent", context_set);
    find(library, "cuStreamCreate", stream_create);
    find(library, "cuStreamSynchronize", stream_synchronize);
    find(library, "cuMemAlloc_v2", memory_allocate);
    find(library, "cuMemFree_v2", memory_free);
    find(library, "cuMemsetD8Async", memory_set);
    find(library, "cuMemcpyHtoDAsync_v2", upload);
    find(library, "cuMemcpyDtoHAsync_v2", download);
    find(library, "cuModuleLoadData", module_load);
    find(library, "cuModuleGetFunction", module_function);
    find(library, "cuLaunchKernel", launch);

    int count = 0, device = 0;
    void *context = nullptr;
    check(init(0), "cuInit");
    check(device_count(&count), "cuDeviceGetCount");
    if (count < 1) fail("the CUDA driver sees no device");
    check(device_get(&device, index), "cuDeviceGet");
    check(context_retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(context_set(context), "cuCtxSetCurrent");
    constexpr unsigned not_after_the_default_stream = 1;
    check(stream_create(&stream, not_after_the_default_stream), "cuStreamCreate");
    check(module_load(&module, ptx), "cuModuleLoadData");
  }

  void check(Result error, const char *what) const
  {
    const char *text = nullptr;
    if (error == 0) return;
    if (error_string(error, &text) != 0 || text == nullptr) text = "unknown error";
    std::fprintf(stderr, "%s gives %d: %s\n", what, error, text);
    std::exit(1);
  }

  [[noreturn]] static void fail(const char *why)
  {
    std::fprintf(stderr, "no CUDA driver: %s\n", why);
    std::exit(1);
  }

private:
  template <class Function> static void find(void *library, const char *name, Function &function)
  {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) fail(name);
  }
};

inline int &index()
{
  static int ours = 0;
  return ours;
}

// Says on which device this process works (dm_world_info.device), before anything else is called.
// A negative index is that of a library that chooses no device; all ranks then share the first.
inline void use(int device) { index() = device < 0 ? 0 : device; }

inline const Driver &driver()
{
  static const Driver ours(index());
  return ours;
}

inline cudaStream_t stream() { return driver().stream; }

inline Driver::Address address(const void *data) { return reinterpret_cast<Driver::Address>(data); }

inline float *allocate(std::size_t count)
{
  const Driver &cuda = driver();
  Driver::Address data = 0;
  cuda.check(cuda.memory_allocate(&data, (count + 1) * sizeof(float)), "cuMemAlloc");
  cuda.check(cuda.memory_set(data, 0, count * sizeof(float), stream()), "cuMemsetD8Async");
  return reinterpret_cast<float *>(data);
}
inline void release(float *data)
{
  const Driver &cuda = driver();
  cuda.check(cuda.stream_synchronize(stream()), "cuStreamSynchronize");
  cuda.check(cuda.memory_free(address(data)), "cuMemFree");
}
inline void upload(float *device, const float *host, std::size_t count)
{
  const Driver &cuda = driver();
  cuda.check(cuda.upload(address(device), host, count * sizeof(float), stream()), "cuMemcpyHtoDAsync");
  cuda.check(cuda.stream_synchronize(stream()), "cuStreamSynchronize");
}
inline void download(float *host, const float *device, std::size_t count)
{
  const Driver &cuda = driver();
  cuda.check(cuda.download(host, address(device), count * sizeof(float), stream()), "cuMemcpyDtoHAsync");
  cuda.check(cuda.stream_synchronize(stream()), "cuStreamSynchronize");
}

// A kernel of device_cuda.cu. Its arguments are passed by their addresses: each must have exactly
// the type that the kernel declares.
template <class... Arguments> class Kernel {
public:
  explicit Kernel(const char *name)
  {
    const Driver &cuda = driver();
    cuda.check(cuda.module_function(&function_, cuda.module, name), name);
  }

  // One thread for each of `threads` elements; what is over does nothing.
  void operator()(std::size_t threads, Arguments... arguments) const
  {
    constexpr unsigned block = 128;
    const Driver &cuda = driver();
    void *addresses[] = {&arguments...};
    const auto blocks = static_cast<unsigned>((threads + block - 1) / block);
    cuda.check(cuda.launch(function_, blocks, 1, 1, block, 1, 1, 0, stream(), addresses, nullptr), "cuLaunchKernel");
  }

private:
  void *function_ = nullptr;
};

inline void matmul(float *out, const float *a, bool ta, const float *b, bool tb, int m, int k, int n)
{
  static const Kernel<float *, const float *, int, const float *, int, int, int, int> kernel("matmul");
  kernel(static_cast<std::size_t>(m) * n, out, a, ta, b, tb, m, k, n);
}
inline void bias_relu(float *h, const float *bias, int rows, int cols)
{
  static const Kernel<float *, const float *, int, int> kernel("bias_relu");
  kernel(static_cast<std::size_t>(rows) * cols, h, bias, rows * cols, cols);
}
inline void relu_backward(float *dh, const float *h, std::size_t count)
{
  static const Kernel<float *, const float *, int> kernel("relu_backward");
  kernel(count, dh, h, static_cast<int>(count));
}
inline void softmax_cross_entropy(float *logits, const float *bias, const float *labels, int rows, int cols, float scale,
                                  float *loss, float *hit)
{
  static const Kernel<float *, const float *, const float *, int, int, float, float *, float *> kernel("softmax_cross_entropy");
  kernel(static_cast<std::size_t>(rows), logits, bias, labels, rows, cols, scale, loss, hit);
}
inline void column_sum(float *out, const float *in, int rows, int cols)
{
  static const Kernel<float *, const float *, int, int> kernel("column_sum");
  kernel(static_cast<std::size_t>(cols), out, in, rows, cols);
}
inline void sgd(float *weights, float *velocity, const float *gradient, std::size_t count, float rate, float momentum)
{
  static const Kernel<float *, float *, const float *, int, float, float> kernel("sgd");
  kernel(count, weights, velocity, gradient, static_cast<int>(count), rate, momentum);
}

}  // namespace device
