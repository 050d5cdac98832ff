// The example's device: host memory and plain loops. device_cuda.h has the same functions for a
// GPU.
#pragma once

#include <hostccl.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace device {

constexpr const char *type = "cpu";
inline void use(int) {}  // there is one host memory
inline cudaStream_t stream() { return nullptr; }

inline float *allocate(std::size_t count) { return new float[count](); }
inline void release(float *data) { delete[] data; }
inline void upload(float *device, const float *host, std::size_t count) { std::memcpy(device, host, count * sizeof(float)); }
inline void download(float *host, const float *device, std::size_t count) { std::memcpy(host, device, count * sizeof(float)); }

// out[m, n] = a[m, k] b[k, n]; a is stored transposed when ta, b when tb. All row-major.
inline void matmul(float *out, const float *a, bool ta, const float *b, bool tb, int m, int k, int n)
{
  for (int i = 0; i < m; ++i) {
    float *row = out + static_cast<std::size_t>(i) * n;
    std::fill(row, row + n, 0.0f);
    for (int p = 0; p < k; ++p) {
      const float left = ta ? a[static_cast<std::size_t>(p) * m + i] : a[static_cast<std::size_t>(i) * k + p];
      if (tb)
        for (int j = 0; j < n; ++j) row[j] += left * b[static_cast<std::size_t>(j) * k + p];
      else
        for (int j = 0; j < n; ++j) row[j] += left * b[static_cast<std::size_t>(p) * n + j];
    }
  }
}

// h = max(0, h + bias), row by row.
inline void bias_relu(float *h, const float *bias, int rows, int cols)
{
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) {
      float &value = h[static_cast<std::size_t>(i) * cols + j];
      value = std::max(0.0f, value + bias[j]);
    }
}

// Sets dh to 0 where h is not positive.
inline void relu_backward(float *dh, const float *h, std::size_t count)
{
  for (std::size_t i = 0; i < count; ++i)
    if (h[i] <= 0) dh[i] = 0;
}

// For each row of logits + bias, writes the cross entropy with its label into loss[row], 1 into
// hit[row] when the label is the largest, and scale * (softmax - onehot) in place of the logits.
// Labels are floats so that everything is one type of buffer.
inline void softmax_cross_entropy(float *logits, const float *bias, const float *labels, int rows, int cols, float scale,
                                  float *loss, float *hit)
{
  for (int i = 0; i < rows; ++i) {
    float *row = logits + static_cast<std::size_t>(i) * cols;
    const int label = static_cast<int>(labels[i]);
    int best = 0;
    for (int j = 0; j < cols; ++j) {
      row[j] += bias[j];
      if (row[j] > row[best]) best = j;
    }
    const float top = row[best], mine = row[label];
    float sum = 0;
    for (int j = 0; j < cols; ++j) sum += std::exp(row[j] - top);
    loss[i] = std::log(sum) + top - mine;
    hit[i] = best == label ? 1.0f : 0.0f;
    for (int j = 0; j < cols; ++j) row[j] = scale * (std::exp(row[j] - top) / sum - (j == label ? 1.0f : 0.0f));
  }
}

// out[j] = sum of column j.
inline void column_sum(float *out, const float *in, int rows, int cols)
{
  std::fill(out, out + cols, 0.0f);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) out[j] += in[static_cast<std::size_t>(i) * cols + j];
}

// Stochastic gradient descent with momentum.
inline void sgd(float *weights, float *velocity, const float *gradient, std::size_t count, float rate, float momentum)
{
  for (std::size_t i = 0; i < count; ++i) {
    velocity[i] = momentum * velocity[i] + gradient[i];
    weights[i] -= rate * velocity[i];
  }
}

}  // namespace device
