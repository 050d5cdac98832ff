// FSDP of a tensor-parallel model: two layers on a mesh (fsdp=2, tp=2), four processes.
//
//     devicemesh run -n 4 -- ./fsdp_tp
//
// y = V relu(W x): the six hidden units are split over tp, and each part once more over fsdp. All
// numbers are small integers, so the gradients must be exactly those of one process.
#include <devicemesh.hpp>

#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

constexpr std::size_t kIn = 4, kHidden = 6, kOut = 2, kBatch = 4;
constexpr std::size_t kRow = kIn + kOut;  // a hidden unit: its row of W, then its column of V

using Numbers = std::vector<float>;

float weight(std::size_t unit, std::size_t i) { return static_cast<float>((unit * kRow + i) * 7 % 5) - 2; }
float input(std::size_t sample, std::size_t i) { return static_cast<float>((sample * kIn + i) * 3 % 7) - 3; }

// h = relu(W x) of these units.
Numbers hidden(const Numbers &units, std::size_t sample)
{
  Numbers h(units.size() / kRow);
  for (std::size_t u = 0; u < h.size(); ++u) {
    for (std::size_t i = 0; i < kIn; ++i) h[u] += units[u * kRow + i] * input(sample, i);
    h[u] = std::max(0.0f, h[u]);
  }
  return h;
}

// What these units add to y = V h.
Numbers output(const Numbers &units, const Numbers &h)
{
  Numbers y(kOut);
  for (std::size_t u = 0; u < h.size(); ++u)
    for (std::size_t o = 0; o < kOut; ++o) y[o] += units[u * kRow + kIn + o] * h[u];
  return y;
}

// Adds the gradient of y * y / 2 by these units' weights.
void backward(const Numbers &units, const Numbers &h, const Numbers &y, std::size_t sample, Numbers &gradient)
{
  for (std::size_t u = 0; u < h.size(); ++u) {
    float slope = 0;
    for (std::size_t o = 0; o < kOut; ++o) {
      gradient[u * kRow + kIn + o] += y[o] * h[u];
      slope += y[o] * units[u * kRow + kIn + o];
    }
    for (std::size_t i = 0; h[u] > 0 && i < kIn; ++i) gradient[u * kRow + i] += slope * input(sample, i);
  }
}

Numbers one_process()
{
  Numbers units, gradient(kHidden * kRow);
  for (std::size_t at = 0; at < kHidden * kRow; ++at) units.push_back(weight(at / kRow, at % kRow));
  for (std::size_t sample = 0; sample < kBatch; ++sample) {
    const Numbers h = hidden(units, sample);
    backward(units, h, output(units, h), sample, gradient);
  }
  return gradient;
}

}  // namespace

int main()
try {
  const dm::Mesh mesh = dm::init("cpu", {{"fsdp", 2}, {"tp", 2}});

  // Which units this rank keeps: tp cuts first (order 0), fsdp cuts what tp left (order 1).
  const std::vector<dm::Placement> placements = {dm::shard(0, 1), dm::shard(0, 0)};
  const dm::LocalShard kept = mesh.local_shard(placements, {kHidden, kRow});
  const std::size_t part = kHidden / mesh.size("tp");                          // 3 units of this tp rank
  const std::size_t padded = (part + mesh.size("fsdp") - 1) / mesh.size("fsdp");  // 2 of them, or 1 and one that is padding
  Numbers mine(padded * kRow);
  for (std::size_t at = 0; at < kept.shape[0] * kRow; ++at) mine[at] = weight(kept.offset[0] + at / kRow, at % kRow);

  // Over fsdp: the units of this tp rank, whole while they are used.
  Numbers units(mesh.size("fsdp") * mine.size());
  mesh.all_gather("fsdp", mine, units);
  units.resize(part * kRow);

  // FSDP is data parallel: each fsdp rank takes its part of the batch, and the ranks of a tp group
  // the same one.
  Numbers gradient(mesh.size("fsdp") * mine.size());
  for (std::size_t sample = mesh.local_rank("fsdp"); sample < kBatch; sample += mesh.size("fsdp")) {
    const Numbers h = hidden(units, sample);
    Numbers y = output(units, h);
    mesh.all_reduce("tp", y);  // the other units' part of y
    backward(units, h, y, sample, gradient);
  }
  Numbers my_gradient(mine.size());
  mesh.reduce_scatter("fsdp", gradient, my_gradient);

  const Numbers expected = one_process();
  int same = 1;
  for (std::size_t at = 0; at < kept.shape[0] * kRow; ++at) same = same && my_gradient[at] == expected[kept.offset[0] * kRow + at];

  // On rank 0: what every rank keeps, and whether all have the right gradient.
  const dm::Mesh all = mesh.flatten();
  const std::vector<int> line = {static_cast<int>(kept.offset[0]), static_cast<int>(kept.shape[0]), same};
  std::vector<int> lines(line.size() * all.size());
  all.all_gather(nullptr, line, lines);
  bool good = true;
  for (std::int32_t rank = 0; rank < all.size(); ++rank) {
    const int from = lines[3 * rank], count = lines[3 * rank + 1];
    good = good && lines[3 * rank + 2] == 1;
    if (mesh.rank() == 0)
      std::printf("rank %d keeps %s %d%s\n", rank, count > 1 ? "units" : "unit", from,
                  count > 1 ? (" and " + std::to_string(from + 1)).c_str() : "");
  }
  if (mesh.rank() == 0) std::printf("gradients of one process: %s\n", good ? "yes" : "no");
  mesh.finalize();
  return good ? 0 : 1;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "fsdp_tp: %s\n", error.what());
  return 1;
}
