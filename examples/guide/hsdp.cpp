// HSDP by hand: a linear model of 10 weights on a mesh (replicate=2, shard=4), eight processes.
//
//     devicemesh run -n 8 -- ./hsdp
//
// Every rank keeps a quarter of the weights and takes an eighth of the samples. At the end the
// weights are those of one process.
#include <devicemesh.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr std::size_t kWeights = 10, kSamples = 64;
constexpr int kSteps = 300;
constexpr float kRate = 0.5f;

// Sample number s: inputs from -1 to 1 that look random, and the output that weights 1, 2 ... 10
// give.
float input(std::size_t s, std::size_t i) { return static_cast<float>((s * kWeights + i) * (s + 7919) % 1009) / 504 - 1; }
float output(std::size_t s)
{
  float sum = 0;
  for (std::size_t i = 0; i < kWeights; ++i) sum += input(s, i) * static_cast<float>(i + 1);
  return sum;
}

// The squared error of the samples first, first + step ..., as its part of the mean over all
// samples; its gradient is written.
float loss_and_gradient(const std::vector<float> &weights, std::size_t first, std::size_t step, std::vector<float> &gradient)
{
  float loss = 0;
  std::fill(gradient.begin(), gradient.end(), 0.0f);
  for (std::size_t s = first; s < kSamples; s += step) {
    float error = -output(s);
    for (std::size_t i = 0; i < kWeights; ++i) error += weights[i] * input(s, i);
    loss += error * error / kSamples;
    for (std::size_t i = 0; i < kWeights; ++i) gradient[i] += 2 * error * input(s, i) / kSamples;
  }
  return loss;
}

std::vector<float> one_process()
{
  std::vector<float> weights(kWeights), gradient(kWeights);
  for (int step = 0; step < kSteps; ++step) {
    loss_and_gradient(weights, 0, 1, gradient);
    for (std::size_t i = 0; i < kWeights; ++i) weights[i] -= kRate * gradient[i];
  }
  return weights;
}

}  // namespace

int main()
try {
  // Replicas first: the last dimension is the fastest, so the ranks of a shard group are
  // neighbours, on one host where they can be.
  const dm::Mesh mesh = dm::init("cpu", {{"replicate", 2}, {"shard", 4}});
  const dm::Mesh data = mesh.flatten("data");  // both as one dimension: every rank has samples of its own

  const std::size_t shards = mesh.size("shard");
  const std::size_t piece = (kWeights + shards - 1) / shards;  // 3: twelve places for ten weights
  std::vector<float> mine(piece), my_gradient(piece);
  std::vector<float> weights(piece * shards), gradient(piece * shards);

  const std::size_t first = data.local_rank(), samplers = data.size();
  float loss[1] = {0}, first_loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    mesh.all_gather("shard", mine, weights);  // whole, only while it is used
    loss[0] = loss_and_gradient(weights, first, samplers, gradient);
    mesh.reduce_scatter("shard", gradient, my_gradient);  // summed over the shard group; this rank keeps its piece
    mesh.all_reduce("replicate", my_gradient);            // and over the replicas, a quarter of the data
    for (std::size_t i = 0; i < piece; ++i) mine[i] -= kRate * my_gradient[i];

    data.all_reduce(nullptr, loss);
    if (step == 0) first_loss = loss[0];
  }
  mesh.all_gather("shard", mine, weights);

  const std::vector<float> expected = one_process();
  float worst = 0;
  for (std::size_t i = 0; i < kWeights; ++i) worst = std::max(worst, std::abs(weights[i] - expected[i]));
  const bool good = worst < 1e-3f && loss[0] < 1e-3f;
  if (mesh.rank() == 0) {
    std::printf("loss %.1f at the first step, below 0.001 at the last: %s\n", first_loss, loss[0] < 1e-3f ? "yes" : "no");
    std::printf("weights");
    for (std::size_t i = 0; i < kWeights; ++i) std::printf(" %.2f", weights[i]);
    std::printf("\nthose of one process: %s\n", good ? "yes" : "no");
  }
  mesh.finalize();
  return good ? 0 : 1;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "hsdp: %s\n", error.what());
  return 1;
}
