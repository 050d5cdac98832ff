// Hybrid-sharded data parallel x tensor parallel training on a mesh (replicate=2, shard=2, tp=2),
// eight processes:
//
//     devicemesh run -n 8 -- target/examples/hsdp_tp --data examples/data/digits.csv --check
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

#include "digits.h"

#include <cstdio>
#include <string>
#include <vector>

namespace {

constexpr int kEpochs = 20;

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
  Place place() const { return {rank, size}; }
};

// ---- the training ----

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
  Network net(digits, data.place(), shard.place(), tp.place());
  Order order(digits.count());
  const cudaStream_t stream = device::stream();

  // This rank's tensor-parallel weights, whole, and the logits of the images that are loaded.
  auto forward = [&] {
    nccl.check(nccl.all_gather(net.mine.data, net.weights.data, net.piece, ncclFloat, shard.comm, stream), "ncclAllGather");
    net.forward();
    nccl.check(nccl.all_reduce(net.logits.data, net.logits.data, net.num_logits(), ncclFloat, ncclSum, tp.comm, stream),
               "ncclAllReduce over tp");
    net.loss();
  };

  Result result;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    double total = 0;
    for (int batch = 0; batch < kTrain; batch += kBatch) {
      net.load_batch(order.in_epoch(epoch), batch);
      forward();
      net.backward();

      // Sum the gradient over the data: reduce-scatter over shard leaves this rank its piece,
      // all-reduce over replicate the rest.
      nccl.check(nccl.reduce_scatter(net.gradient.data, net.my_gradient.data, net.piece, ncclFloat, ncclSum, shard.comm, stream),
                 "ncclReduceScatter");
      nccl.check(nccl.all_reduce(net.my_gradient.data, net.my_gradient.data, net.piece, ncclFloat, ncclSum, replicate.comm, stream),
                 "ncclAllReduce over replicate");
      net.update();

      net.sum_losses();
      nccl.check(nccl.all_reduce(net.sums.data, net.sums.data, 1, ncclFloat, ncclSum, data.comm, stream), "ncclAllReduce over data");
      total += net.sum();
    }
    result.losses.push_back(total / kTrain);
    if (talk) std::printf("epoch %2d  loss %.6f\n", epoch + 1, result.losses.back());
  }

  const int tests = net.load_tests(order.in_epoch(kEpochs - 1));
  forward();
  net.sum_hits();
  result.accuracy = net.sum() / tests;
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
