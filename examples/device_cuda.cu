// The example's kernels. Simple on purpose: the example is about communicators.
//
// device_cuda_ptx.h is what NVRTC makes of this file (examples/generate_ptx.py), so that building
// the example needs no CUDA.

extern "C" __global__ void matmul(float *out, const float *a, int ta, const float *b, int tb, int m, int k, int n)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= m * n) return;
  const int i = at / n, j = at % n;
  float sum = 0;
  for (int p = 0; p < k; ++p) sum += (ta ? a[p * m + i] : a[i * k + p]) * (tb ? b[j * k + p] : b[p * n + j]);
  out[at] = sum;
}

extern "C" __global__ void bias_relu(float *h, const float *bias, int count, int cols)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) h[at] = fmaxf(0.0f, h[at] + bias[at % cols]);
}

extern "C" __global__ void relu_backward(float *dh, const float *h, int count)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count && h[at] <= 0) dh[at] = 0;
}

extern "C" __global__ void softmax_cross_entropy(float *logits, const float *bias, const float *labels, int rows, int cols,
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

extern "C" __global__ void column_sum(float *out, const float *in, int rows, int cols)
{
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= cols) return;
  float sum = 0;
  for (int i = 0; i < rows; ++i) sum += in[i * cols + j];
  out[j] = sum;
}

extern "C" __global__ void sgd(float *weights, float *velocity, const float *gradient, int count, float rate, float momentum)
{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  velocity[at] = momentum * velocity[at] + gradient[at];
  weights[at] -= rate * velocity[at];
}
