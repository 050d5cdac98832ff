// Pipeline, data and tensor parallelism together: a mesh (pp=2, dp=2, tp=2), eight processes.
//
//     devicemesh run -n 8 -- ./pipeline_3d
//
// Each stage of the pipeline is a layer y = A x of four rows, two rows on each tp rank. Each
// replica sends its own microbatches through, all forward, then all backward (GPipe's schedule).
// All numbers are small integers, so the gradients must be exactly those of one process.
#include <devicemesh.hpp>

#include <cstdio>
#include <vector>

namespace {

constexpr std::size_t kStages = 2, kReplicas = 2, kWidth = 4, kMicrobatches = 3;

using Numbers = std::vector<float>;

float weight(std::size_t stage, std::size_t row, std::size_t column)
{
  return static_cast<float>((stage * 11 + row * kWidth + column) * 5 % 7) - 3;
}

Numbers input(std::size_t replica, std::size_t microbatch)
{
  Numbers x;
  for (std::size_t i = 0; i < kWidth; ++i) x.push_back(static_cast<float>((replica * 13 + microbatch * kWidth + i) * 3 % 5) - 2);
  return x;
}

// A layer's rows first, first + 1 ..., rows of them.
struct Layer {
  std::size_t stage, first, rows;
  Numbers gradient = Numbers(rows * kWidth);

  Numbers forward(const Numbers &x) const
  {
    Numbers y(rows);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t c = 0; c < kWidth; ++c) y[r] += weight(stage, first + r, c) * x[c];
    return y;
  }

  // Adds to the gradient of the weights; gives what these rows add to that of x. slope is the
  // gradient by all of y.
  Numbers backward(const Numbers &x, const Numbers &slope)
  {
    Numbers back(kWidth);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t c = 0; c < kWidth; ++c) {
        gradient[r * kWidth + c] += slope[first + r] * x[c];
        back[c] += slope[first + r] * weight(stage, first + r, c);
      }
    return back;
  }
};

// The gradients of both layers, all rows, over all microbatches of all replicas; the loss is y * y
// / 2.
Numbers one_process()
{
  Layer first{0, 0, kWidth}, second{1, 0, kWidth};
  for (std::size_t replica = 0; replica < kReplicas; ++replica)
    for (std::size_t m = 0; m < kMicrobatches; ++m) {
      const Numbers x = input(replica, m), middle = first.forward(x), y = second.forward(middle);
      first.backward(x, second.backward(middle, y));
    }
  first.gradient.insert(first.gradient.end(), second.gradient.begin(), second.gradient.end());
  return first.gradient;
}

}  // namespace

int main()
try {
  // tp talks most, so it is last: its ranks are neighbours. Stages talk least.
  const dm::Mesh mesh = dm::init("cpu", {{"pp", kStages}, {"dp", kReplicas}, {"tp", 2}});
  const int stage = mesh.local_rank("pp");
  const bool is_first = stage == 0, is_last = stage + 1 == kStages;
  const std::size_t replica = mesh.local_rank("dp"), tp = mesh.local_rank("tp");

  const std::size_t rows = kWidth / mesh.size("tp");
  Layer layer{std::size_t(stage), tp * rows, rows};
  std::vector<Numbers> inputs(kMicrobatches, Numbers(kWidth)), outputs(kMicrobatches, Numbers(kWidth));

  // A peer in send and recv is a coordinate along pp: the stage. tp rank 0 talks to tp rank 0, and
  // tp rank 1 to tp rank 1.
  for (std::size_t m = 0; m < kMicrobatches; ++m) {
    if (is_first) inputs[m] = input(replica, m);
    else mesh.recv("pp", inputs[m], stage - 1);
    mesh.all_gather("tp", layer.forward(inputs[m]), outputs[m]);  // the rows of the other tp ranks
    if (!is_last) mesh.send("pp", outputs[m], stage + 1);
  }
  for (std::size_t m = 0; m < kMicrobatches; ++m) {
    Numbers slope = outputs[m];  // of y * y / 2
    if (!is_last) mesh.recv("pp", slope, stage + 1);
    Numbers back = layer.backward(inputs[m], slope);
    mesh.all_reduce("tp", back);
    if (!is_first) mesh.send("pp", back, stage - 1);
  }
  mesh.all_reduce("dp", layer.gradient);

  // All weights' gradients on every rank, to compare: (pp, tp) is one dimension in which the rows
  // lie in order.
  Numbers all(kStages * kWidth * kWidth);
  mesh({"pp", "tp"}).flatten("model").all_gather(nullptr, layer.gradient, all);
  const bool good = all == one_process();

  if (mesh.rank() == 0) {
    const std::vector<std::int32_t> stages = mesh.group_ranks("pp"), copies = mesh.group_ranks("dp"), parts = mesh.group_ranks("tp");
    std::printf("rank 0 sends to rank %d, sums gradients with rank %d, shares a layer with rank %d\n", stages[1], copies[1], parts[1]);
    std::printf("row 0 of the first layer's gradient: %g %g %g %g\n", all[0], all[1], all[2], all[3]);
    std::printf("gradients of one process: %s\n", good ? "yes" : "no");
  }
  mesh.finalize();
  return good ? 0 : 1;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "pipeline_3d: %s\n", error.what());
  return 1;
}
