// Hybrid-sharded data parallel x tensor parallel training on a mesh (replicate=2, shard=2, tp=2),
// eight processes:
//
//     devicemesh run -n 8 -- ./hsdp_tp --data examples/data/digits.csv --check
//
// An MLP 64-128-10 learns the UCI digits. It is parallel in four ways, each with a communicator:
//
//   tp         The hidden units are split: the first layer by columns, the second by rows. An
//              all-reduce adds the partial sums of the second layer.
//   shard      Each tensor-parallel part of the weights is split again. An all-gather gathers it
//              before use, and a reduce-scatter sums its gradient and splits it again.
//   replicate  An all-reduce sums the shards of the gradient over the replicas.
//   data       (replicate, shard) flattened. Every rank along it takes its part of each batch, and
//              the loss is summed over it.
//
// The collectives are NCCL's, on the raw communicators: this file is the same for a GPU
// (device_cuda.h, -DDM_EXAMPLE_CUDA).
#include <devicemesh.hpp>

#ifdef DM_EXAMPLE_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#ifndef DM_EXAMPLE_DATA  // where the images are when --data does not say; the Makefile gives the full path
#define DM_EXAMPLE_DATA "examples/data/digits.csv"
#endif

namespace {

constexpr int kPixels = 64, kHidden = 128, kDigits = 10;
constexpr int kTrain = 1440;  // of 1797 images; the rest tests
constexpr int kBatch = 60;    // over all data-parallel ranks
constexpr int kEpochs = 20;
constexpr float kRate = 0.05f, kMomentum = 0.9f;

[[noreturn]] void fail(const std::string &message)
{
  std::fprintf(stderr, "hsdp_tp: %s\n", message.c_str());
  std::exit(1);
}

// ---- the communicators of one dimension, and the library's own functions to use them with ----

// The functions of the library that made the communicators: NCCL on cuda, the host engine on cpu.
struct Nccl {
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclGetErrorString) error_string;

  explicit Nccl(const dm::Mesh &mesh)
      : all_reduce(mesh.proc<decltype(all_reduce)>("ncclAllReduce")),
        all_gather(mesh.proc<decltype(all_gather)>("ncclAllGather")),
        reduce_scatter(mesh.proc<decltype(reduce_scatter)>("ncclReduceScatter")),
        error_string(mesh.proc<decltype(error_string)>("ncclGetErrorString"))
  {
  }

  void check(ncclResult_t result, const char *call) const
  {
    if (result != ncclSuccess) fail(std::string(call) + ": " + error_string(result));
  }
};

struct Dimension {
  ncclComm_t comm;
  int rank, size;

  Dimension(const dm::Mesh &mesh, const char *name)
      : comm(mesh.comm(name)), rank(mesh.local_rank(name)), size(mesh.size(name))
  {
  }
};

// ---- data ----

struct Digits {
  std::vector<float> pixels;  // [images, 64], 0 to 1
  std::vector<float> labels;  // [images]
  int count() const { return static_cast<int>(labels.size()); }
};

Digits read_digits(const std::string &path)
{
  std::ifstream file(path);
  if (!file) fail("cannot read " + path + " (say where digits.csv is with --data)");
  Digits digits;
  std::string line, field;
  while (std::getline(file, line)) {
    std::stringstream fields(line);
    std::vector<float> numbers;
    while (std::getline(fields, field, ',')) numbers.push_back(std::strtof(field.c_str(), nullptr));
    if (numbers.size() != kPixels + 1) fail(path + ": a line with " + std::to_string(numbers.size()) + " numbers instead of 65");
    for (int pixel = 0; pixel < kPixels; ++pixel) digits.pixels.push_back(numbers[pixel] / 16.0f);
    digits.labels.push_back(numbers[kPixels]);
  }
  if (digits.count() <= kTrain) fail(path + " has " + std::to_string(digits.count()) + " images; more than 1440 are needed");
  return digits;
}

// ---- the model: this rank's tensor-parallel part, flat, sharded ----

// The part of the hidden units that this tp rank has, one after another in one flat array: w1 [64,
// units], b1 [units], w2 [units, 10], b2 [10]. b2 is the same on every tp rank.
struct Parts {
  int units;
  std::size_t w1() const { return 0; }
  std::size_t b1() const { return w1() + static_cast<std::size_t>(kPixels) * units; }
  std::size_t w2() const { return b1() + units; }
  std::size_t b2() const { return w2() + static_cast<std::size_t>(units) * kDigits; }
  std::size_t count() const { return b2() + kDigits; }
};

// Makes the full weights, which do not depend on the mesh, and gives this tp rank's part of them.
std::vector<float> initial_part(const Parts &parts, const Dimension &tp)
{
  std::mt19937 random(20240607);
  auto uniform = [&random](float limit) {
    return limit * (2.0f * static_cast<float>(random() >> 8) / static_cast<float>(1 << 24) - 1.0f);
  };
  std::vector<float> w1(static_cast<std::size_t>(kPixels) * kHidden), w2(static_cast<std::size_t>(kHidden) * kDigits);
  for (float &weight : w1) weight = uniform(std::sqrt(6.0f / kPixels));
  for (float &weight : w2) weight = uniform(std::sqrt(6.0f / (kHidden + kDigits)));

  std::vector<float> part(parts.count(), 0.0f);
  const int first = tp.rank * parts.units;
  for (int pixel = 0; pixel < kPixels; ++pixel)  // columns of w1
    for (int unit = 0; unit < parts.units; ++unit)
      part[parts.w1() + static_cast<std::size_t>(pixel) * parts.units + unit] =
          w1[static_cast<std::size_t>(pixel) * kHidden + first + unit];
  for (int unit = 0; unit < parts.units; ++unit)  // rows of w2
    for (int digit = 0; digit < kDigits; ++digit)
      part[parts.w2() + static_cast<std::size_t>(unit) * kDigits + digit] = w2[static_cast<std::size_t>(first + unit) * kDigits + digit];
  return part;
}

// Device memory that frees itself.
struct Buffer {
  float *data;
  explicit Buffer(std::size_t count) : data(device::allocate(count)) {}
  ~Buffer() { device::release(data); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
};

struct Result {
  std::vector<double> losses;  // mean per epoch
  double accuracy = 0;         // on the test images
};

Result train(const dm::Mesh &mesh, const Digits &digits, bool talk)
{
  const Dimension replicate(mesh, "replicate"), shard(mesh, "shard"), tp(mesh, "tp");

  // Data is split over (replicate, shard) as one dimension, which gets a communicator of its own.
  const Dimension data(mesh({"replicate", "shard"}).flatten("data"), "data");
  const Nccl nccl(mesh);

  if (kHidden % tp.size != 0) fail("tp=" + std::to_string(tp.size) + " does not divide the 128 hidden units");
  if (kBatch % data.size != 0) fail("replicate*shard=" + std::to_string(data.size) + " does not divide the batch of 60");
  const Parts parts{kHidden / tp.size};
  const int rows = kBatch / data.size;
  const std::size_t piece = (parts.count() + shard.size - 1) / shard.size;  // of the flat array, the last one padded
  const std::size_t padded = piece * shard.size;

  Buffer weights(padded), gradient(padded);                      // whole part: only while it is used
  Buffer mine(piece), my_gradient(piece), velocity(piece);       // what this rank keeps
  const int most = std::max(rows, digits.count() - kTrain);
  Buffer images(static_cast<std::size_t>(most) * kPixels), labels(most), losses(most), hits(most);
  Buffer hidden(static_cast<std::size_t>(most) * parts.units), hidden_gradient(static_cast<std::size_t>(most) * parts.units);
  Buffer logits(static_cast<std::size_t>(most) * kDigits), sums(2);

  std::vector<float> start = initial_part(parts, tp);
  start.resize(padded, 0.0f);
  device::upload(mine.data, start.data() + piece * shard.rank, piece);

  // All-gather over shard: this rank's tensor-parallel weights, whole.
  auto gather_weights = [&] {
    nccl.check(nccl.all_gather(mine.data, weights.data, piece, ncclFloat, shard.comm, device::stream()), "ncclAllGather");
  };
  // hidden = relu(images w1 + b1), logits = sum over tp of hidden w2, then the loss: all for
  // `count` images.
  auto forward = [&](int count, float scale) {
    float *w = weights.data;
    device::matmul(hidden.data, images.data, false, w + parts.w1(), false, count, kPixels, parts.units);
    device::bias_relu(hidden.data, w + parts.b1(), count, parts.units);
    device::matmul(logits.data, hidden.data, false, w + parts.w2(), false, count, parts.units, kDigits);
    nccl.check(nccl.all_reduce(logits.data, logits.data, static_cast<std::size_t>(count) * kDigits, ncclFloat, ncclSum, tp.comm,
                               device::stream()), "ncclAllReduce over tp");
    device::softmax_cross_entropy(logits.data, w + parts.b2(), labels.data, count, kDigits, scale, losses.data, hits.data);
  };
  auto load = [&](const std::vector<int> &order, int first, int count) {
    std::vector<float> pixels, digit;
    for (int at = first; at < first + count; ++at) {
      const float *image = digits.pixels.data() + static_cast<std::size_t>(order[at]) * kPixels;
      pixels.insert(pixels.end(), image, image + kPixels);
      digit.push_back(digits.labels[order[at]]);
    }
    device::upload(images.data, pixels.data(), pixels.size());
    device::upload(labels.data, digit.data(), digit.size());
  };

  // One order of the images for all ranks; the first 1440 train.
  std::vector<int> order(digits.count());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(7);
  auto shuffle = [&random, &order](int count) {
    for (int at = count - 1; at > 0; --at) std::swap(order[at], order[random() % (at + 1)]);
  };
  shuffle(digits.count());

  Result result;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    shuffle(kTrain);
    double total = 0;
    for (int batch = 0; batch < kTrain; batch += kBatch) {
      load(order, batch + data.rank * rows, rows);
      gather_weights();
      forward(rows, 1.0f / kBatch);

      // Backward: the logits hold their gradient now, the same on all tp ranks.
      float *w = weights.data, *g = gradient.data;
      device::matmul(g + parts.w2(), hidden.data, true, logits.data, false, parts.units, rows, kDigits);
      device::column_sum(g + parts.b2(), logits.data, rows, kDigits);
      device::matmul(hidden_gradient.data, logits.data, false, w + parts.w2(), true, rows, kDigits, parts.units);
      device::relu_backward(hidden_gradient.data, hidden.data, static_cast<std::size_t>(rows) * parts.units);
      device::matmul(g + parts.w1(), images.data, true, hidden_gradient.data, false, kPixels, rows, parts.units);
      device::column_sum(g + parts.b1(), hidden_gradient.data, rows, parts.units);

      // Sum the gradient over the data: reduce-scatter over shard leaves this rank its piece,
      // all-reduce over replicate the rest.
      nccl.check(nccl.reduce_scatter(g, my_gradient.data, piece, ncclFloat, ncclSum, shard.comm, device::stream()), "ncclReduceScatter");
      nccl.check(nccl.all_reduce(my_gradient.data, my_gradient.data, piece, ncclFloat, ncclSum, replicate.comm, device::stream()),
                 "ncclAllReduce over replicate");
      device::sgd(mine.data, velocity.data, my_gradient.data, piece, kRate, kMomentum);

      device::column_sum(sums.data, losses.data, rows, 1);
      nccl.check(nccl.all_reduce(sums.data, sums.data, 1, ncclFloat, ncclSum, data.comm, device::stream()), "ncclAllReduce over data");
      float batch_loss = 0;
      device::download(&batch_loss, sums.data, 1);
      total += batch_loss;
    }
    result.losses.push_back(total / kTrain);
    if (talk) std::printf("epoch %2d  loss %.6f\n", epoch + 1, result.losses.back());
  }

  const int tests = digits.count() - kTrain;
  load(order, kTrain, tests);
  gather_weights();
  forward(tests, 1.0f);
  device::column_sum(sums.data, hits.data, tests, 1);
  float correct = 0;
  device::download(&correct, sums.data, 1);
  result.accuracy = correct / tests;
  return result;
}

// ---- what is printed ----

// The group of every rank along every dimension, from the mesh alone: no communication.
void print_groups(const dm::Mesh &mesh)
{
  for (std::int32_t rank = 0; rank < mesh.size(); ++rank) {
    std::printf("rank %d:", rank);
    for (const std::string &name : mesh.dim_names()) {
      const std::size_t size = mesh.size(name);
      const std::vector<std::int32_t> groups = mesh.replica_groups(name);
      for (std::size_t first = 0; first < groups.size(); first += size)
        for (std::size_t at = first; at < first + size; ++at)
          if (groups[at] == rank) {
            std::printf("  %s {", name.c_str());
            for (std::size_t member = first; member < first + size; ++member)
              std::printf("%s%d", member > first ? ", " : "", groups[member]);
            std::printf("}");
          }
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char **argv)
try {
  bool compare = false;
  std::string path = DM_EXAMPLE_DATA;
  std::vector<std::size_t> shape = {2, 2, 2};
  for (int at = 1; at < argc; ++at) {
    const std::string option = argv[at];
    if (option == "--check") compare = true;
    else if (option == "--data" && at + 1 < argc) path = argv[++at];
    else if (option == "--shape" && at + 3 < argc) for (std::size_t &size : shape) size = std::strtoul(argv[++at], nullptr, 10);
    else fail("usage: hsdp_tp [--data digits.csv] [--shape REPLICATE SHARD TP] [--check], got " + option);
  }
  const Digits digits = read_digits(path);

  // The two lines: make the mesh; every dimension then has its communicator (Dimension, above).
  const dm::Mesh mesh = dm::init(device::type, {{"replicate", shape[0]}, {"shard", shape[1]}, {"tp", shape[2]}});
  device::use(mesh.world().info().device);

  const int rank = mesh.rank();
  if (rank == 0) {
    std::printf("%s\n", mesh.describe().c_str());
    print_groups(mesh);
  }
  const Result result = train(mesh, digits, rank == 0);
  if (rank == 0) std::printf("test accuracy %.2f %%\n", 100 * result.accuracy);
  mesh.finalize();

  bool good = result.accuracy >= 0.95;
  if (!good && rank == 0) std::printf("the accuracy is below 95 %%\n");
  if (compare && rank == 0) {
    // The same training by one process: a world of one rank, the same mesh dimensions, each of
    // size 1.
    dm::WorldOptions alone;
    alone.world_size = 1;
    const dm::World world = dm::World::init(device::type, alone);
    dm::InitOptions options;
    options.world = world;
    const dm::Mesh single = dm::init({{"replicate", 1}, {"shard", 1}, {"tp", 1}}, options);
    const Result reference = train(single, digits, false);
    double worst = 0;
    for (int epoch = 0; epoch < kEpochs; ++epoch)
      worst = std::max(worst, std::abs(result.losses[epoch] - reference.losses[epoch]) / reference.losses[epoch]);
    std::printf("check: one process gets the same losses up to %.1e relative, accuracy %.2f %%\n", worst, 100 * reference.accuracy);
    if (!(worst <= 1e-4)) {
      std::printf("check: more than 1e-4\n");
      good = false;
    }
    single.finalize();
  }
  return good ? 0 : 1;
} catch (const dm::Error &error) {
  fail(error.what());
}
