// The example's device on a GPU: the functions of device_cpu.h as small CUDA kernels (compile with nvcc -x cu -DDM_EXAMPLE_CUDA).
// The kernels are simple on purpose: the example is about communicators.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace device {

constexpr const char *type = "cuda";

inline void check(cudaError_t error, const char *what)
{
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}

inline cudaStream_t stream()
{
  static cudaStream_t ours = [] {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return made;
  }();
  return ours;
}

inline float *allocate(std::size_t count)
{
  float *data = nullptr;
  check(cudaMalloc(&data, count * sizeof(float) + sizeof(float)), "cudaMalloc");
  check(cudaMemsetAsync(data, 0, count * sizeof(float), stream()), "cudaMemsetAsync");
  return data;
}
inline void release(float *data)
{
  check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  check(cudaFree(data), "cudaFree");
}
inline void upload(float *device, const float *host, std::size_t count)
{
  check(cudaMemcpyAsync(device, host, count * sizeof(float), cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
}
inline void download(float *host, const float *device, std::size_t count)
{
  check(cudaMemcpyAsync(host, device, count * sizeof(float), cudaMemcpyDeviceToHost, stream()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
}

namespace kernel {

__global__ void matmul(float *out, const float *a, bool ta, const float *b, bool tb, int m, int k, int n)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= m * n) return;
  const int i = at / n, j = at % n;
  float sum = 0;
  for (int p = 0; p < k; ++p) sum += (ta ? a[p * m + i] : a[i * k + p]) * (tb ? b[j * k + p] : b[p * n + j]);
  out[at] = sum;
}

__global__ void bias_relu(float *h, const float *bias, int count, int cols)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) h[at] = fmaxf(0.0f, h[at] + bias[at % cols]);
}

__global__ void relu_backward(float *dh, const float *h, int count)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count && h[at] <= 0) dh[at] = 0;
}

__global__ void softmax_cross_entropy(float *logits, const float *bias, const float *labels, int rows, int cols,
                                      float scale, float *loss, float *hit)
{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  float *row = logits + i * cols;
  const int label = static_cast<int>(labels[i]);
  int best = 0;
  for (int j = 0; j < cols; ++j) {
    row[j] += bias[j];
    if (row[j] > row[best]) best = j;
  }
  const float top = row[best], mine = row[label];
  float sum = 0;
  for (int j = 0; j < cols; ++j) sum += expf(row[j] - top);
  loss[i] = logf(sum) + top - mine;
  hit[i] = best == label ? 1.0f : 0.0f;
  for (int j = 0; j < cols; ++j) row[j] = scale * (expf(row[j] - top) / sum - (j == label ? 1.0f : 0.0f));
}

__global__ void column_sum(float *out, const float *in, int rows, int cols)
{
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= cols) return;
  float sum = 0;
  for (int i = 0; i < rows; ++i) sum += in[i * cols + j];
  out[j] = sum;
}

__global__ void sgd(float *weights, float *velocity, const float *gradient, int count, float rate, float momentum)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  velocity[at] = momentum * velocity[at] + gradient[at];
  weights[at] -= rate * velocity[at];
}

}  // namespace kernel

inline int blocks(std::size_t count) { return static_cast<int>((count + 127) / 128); }

inline void matmul(float *out, const float *a, bool ta, const float *b, bool tb, int m, int k, int n)
{
  kernel::matmul<<<blocks(static_cast<std::size_t>(m) * n), 128, 0, stream()>>>(out, a, ta, b, tb, m, k, n);
}
inline void bias_relu(float *h, const float *bias, int rows, int cols)
{
  kernel::bias_relu<<<blocks(static_cast<std::size_t>(rows) * cols), 128, 0, stream()>>>(h, bias, rows * cols, cols);
}
inline void relu_backward(float *dh, const float *h, std::size_t count)
{
  kernel::relu_backward<<<blocks(count), 128, 0, stream()>>>(dh, h, static_cast<int>(count));
}
inline void softmax_cross_entropy(float *logits, const float *bias, const float *labels, int rows, int cols, float scale,
                                  float *loss, float *hit)
{
  kernel::softmax_cross_entropy<<<blocks(rows), 128, 0, stream()>>>(logits, bias, labels, rows, cols, scale, loss, hit);
}
inline void column_sum(float *out, const float *in, int rows, int cols)
{
  kernel::column_sum<<<blocks(cols), 128, 0, stream()>>>(out, in, rows, cols);
}
inline void sgd(float *weights, float *velocity, const float *gradient, std::size_t count, float rate, float momentum)
{
  kernel::sgd<<<blocks(count), 128, 0, stream()>>>(weights, velocity, gradient, static_cast<int>(count), rate, momentum);
}

}  // namespace device
