// Shows which rank holds what: the shards of a layer under HSDP, and under FSDP x TP, on eight
// processes.
//
//     devicemesh run -n 8 -- ./shards
//
// 1. HSDP, mesh (dp=2, fsdp=4): the weights 101..200 of a 10x10 layer. Along dp the replicas are
//    whole. Along fsdp each rank keeps a quarter. Rank 6 is at (1, 2) and holds 151..175.
// 2. FSDP x TP, mesh (fsdp=2, tp=4): the rows 0..11 of a 12x12 layer. Tensor parallelism splits
//    the rows first (3 each), then FSDP splits each block (2 rows and 1). So the order of the
//    splits is tp, fsdp, although the order of the mesh is fsdp, tp. Reading the shards in mesh
//    order gives the rows in the wrong order (PyTorch's FSDP2 + TP needs its "strided sharding"
//    for that). The right way back is the way there in reverse: gather over fsdp, then over tp.
#include <devicemesh.hpp>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

namespace {

// Every rank's line, in rank order, on rank 0: short texts gathered as bytes over all ranks.
void print_in_order(const dm::Mesh &everybody, const std::string &line)
{
  constexpr std::size_t kWidth = 160;
  std::string mine = line.substr(0, kWidth - 1), all(kWidth * everybody.size(), '\0');
  mine.resize(kWidth, '\0');
  everybody.all_gather(nullptr, mine, all);
  if (everybody.rank() == 0)
    for (std::size_t at = 0; at < all.size(); at += kWidth) std::printf("%s\n", all.data() + at);
}

bool hsdp()
{
  const dm::Mesh mesh = dm::init("cpu", {{"dp", 2}, {"fsdp", 4}}), everybody = mesh.flatten();

  std::vector<float> layer(100);
  std::iota(layer.begin(), layer.end(), 101.0f);
  const std::size_t piece = layer.size() / 4;
  const int rank = mesh.rank(), dp = mesh.local_rank("dp"), fsdp = mesh.local_rank("fsdp");
  const std::vector<float> shard(layer.begin() + fsdp * piece, layer.begin() + (fsdp + 1) * piece);

  print_in_order(everybody, "rank " + std::to_string(rank) + "  dp " + std::to_string(dp) + "  fsdp " + std::to_string(fsdp) +
                                "  holds " + std::to_string(static_cast<int>(shard.front())) + ".." +
                                std::to_string(static_cast<int>(shard.back())));

  // Gathered over fsdp the layer is whole again; averaged over dp it stays what it is, because the
  // replicas are equal.
  std::vector<float> whole(layer.size());
  mesh.all_gather("fsdp", shard, whole);
  mesh.all_reduce("dp", whole, dm::Op::avg);
  const bool rank_6 = rank != 6 || (shard.front() == 151 && shard.back() == 175);
  const bool good = whole == layer && rank_6;

  mesh.finalize();
  return good;
}

bool fsdp_tp()
{
  constexpr int kRows = 12, kColumns = 12, kFsdp = 2, kTp = 4;
  const dm::Mesh mesh = dm::init("cpu", {{"fsdp", kFsdp}, {"tp", kTp}}), everybody = mesh.flatten();

  std::vector<float> layer(kRows * kColumns);
  std::iota(layer.begin(), layer.end(), 1.0f);
  const int rank = mesh.rank(), fsdp = mesh.local_rank("fsdp"), tp = mesh.local_rank("tp");

  // First tp: block of 3 rows. Then fsdp: chunks of ceil(3 / 2) rows, the last one smaller (as
  // torch.chunk cuts).
  constexpr int kBlock = kRows / kTp, kChunk = (kBlock + kFsdp - 1) / kFsdp;
  const int first = tp * kBlock + fsdp * kChunk;
  const int rows = std::min(kChunk, kBlock - fsdp * kChunk);
  std::vector<float> shard(kChunk * kColumns, 0.0f);  // padded to the largest chunk
  std::copy_n(layer.begin() + first * kColumns, rows * kColumns, shard.begin());

  print_in_order(everybody, "rank " + std::to_string(rank) + "  fsdp " + std::to_string(fsdp) + "  tp " +
                                std::to_string(tp) + "  holds row" + (rows > 1 ? "s " : " ") + std::to_string(first) +
                                (rows > 1 ? ".." + std::to_string(first + rows - 1) : ""));

  // Back: over fsdp the block (without the padding behind it), then over tp the layer.
  std::vector<float> block(kFsdp * kChunk * kColumns), whole(kRows * kColumns);
  mesh.all_gather("fsdp", shard, block);
  block.resize(kBlock * kColumns);
  mesh.all_gather("tp", block, whole);

  // The wrong way, for comparison: all shards in mesh order (fsdp, tp).
  std::vector<float> in_mesh_order(kFsdp * kTp * shard.size());
  everybody.all_gather(nullptr, shard, in_mesh_order);
  if (rank == 0) {
    std::printf("rows in mesh order (wrong):");
    for (std::size_t at = 0; at < in_mesh_order.size(); at += kColumns)
      if (in_mesh_order[at] > 0) std::printf(" %d", static_cast<int>(in_mesh_order[at] - 1) / kColumns);
    std::printf("\nrows over fsdp, then tp:   ");
    for (std::size_t at = 0; at < whole.size(); at += kColumns) std::printf(" %d", static_cast<int>(whole[at] - 1) / kColumns);
    std::printf("\n");
  }
  const bool good = whole == layer;

  mesh.finalize();
  return good;
}

}  // namespace

int main(int argc, char **argv)
try {
  if (argc > 2 || (argc == 2 && std::string(argv[1]) != "--check")) {
    std::fprintf(stderr, "usage: shards [--check]\n");
    return 1;
  }
  const bool hsdp_good = hsdp(), fsdp_tp_good = fsdp_tp();
  if (!hsdp_good) std::fprintf(stderr, "shards: HSDP: the gathered layer is not the layer\n");
  if (!fsdp_tp_good) std::fprintf(stderr, "shards: FSDP x TP: the gathered layer is not the layer\n");
  return hsdp_good && fsdp_tp_good ? 0 : 1;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "shards: %s\n", error.what());
  return 1;
}
