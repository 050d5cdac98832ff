// Trains a linear model on a mesh (replicate=2, shard=4). Each rank keeps a part of the weights and
// has samples of its own.
#include <devicemesh.hpp>

#include <cstdio>
#include <vector>

constexpr std::size_t kWeights = 64, kSamples = 8;
constexpr int kSteps = 200;
constexpr float kRate = 0.2f;

// The inputs of a sample. Replace this by your data.
static float input(std::size_t sample, std::size_t i)
{
  return static_cast<float>((sample * kWeights + i) * (sample + 7919) % 1009) / 504 - 1;
}

int main()
try {
  // Two lines give a communicator for each dimension. Along the last one, ranks are neighbours.
  const dm::Mesh mesh = dm::init("cpu", {{"replicate", 2}, {"shard", 4}});
  const dm::Mesh data = mesh.flatten("data");

  std::vector<float> mine(kWeights / mesh.size("shard")), my_gradient(mine.size());
  std::vector<float> weights(kWeights), gradient(kWeights);
  float loss[1] = {0};
  for (int step = 0; step < kSteps; ++step) {
    mesh.all_gather("shard", mine, weights);
    loss[0] = 0;
    gradient.assign(kWeights, 0);
    for (std::size_t s = 0; s < kSamples; ++s) {
      const std::size_t sample = data.local_rank() * kSamples + s;
      float error = 0;  // The model should find that all weights are 1.
      for (std::size_t i = 0; i < kWeights; ++i) error += (weights[i] - 1) * input(sample, i);
      loss[0] += error * error / kSamples;
      for (std::size_t i = 0; i < kWeights; ++i) gradient[i] += error * input(sample, i) / kSamples;
    }
    // The gradient is averaged over all ranks: first over the shards, each of which keeps its
    // part, and then over the replicas.
    mesh.reduce_scatter("shard", gradient, my_gradient, dm::Op::avg);
    mesh.all_reduce("replicate", my_gradient, dm::Op::avg);
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] -= kRate * my_gradient[i];
    data.all_reduce(nullptr, loss, dm::Op::avg);
    if (mesh.rank() == 0 && (step == 0 || (step + 1) % 50 == 0)) std::printf("step %3d: loss %.4f\n", step + 1, loss[0]);
  }
  mesh.finalize();
  return 0;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "@NAME@: %s\n", error.what());
  return 1;
}
