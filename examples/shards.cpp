// Who holds what: the shards of a layer under HSDP, and under FSDP x TP, on eight processes.
//
//     devicemesh run -n 8 -- ./shards
//
// 1. HSDP, mesh (dp=2, fsdp=4): the weights 101..200 of a 10x10 layer. Replicas are whole along dp; along fsdp each rank keeps a
//    quarter. Rank 6 is at (1, 2) and holds 151..175.
// 2. FSDP x TP, mesh (fsdp=2, tp=4): the rows 0..11 of a 12x12 layer. Tensor parallelism splits the rows first (3 each), then
//    FSDP splits each block (2 rows and 1). So the order of the splits is tp, fsdp, although the order of the mesh is fsdp, tp.
//    Reading the shards in mesh order gives the rows in the wrong order (PyTorch's FSDP2 + TP needs its "strided sharding" for
//    that). The right way back is the way there in reverse: gather over fsdp, then over tp.
#include <devicemesh.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string &message)
{
  std::fprintf(stderr, "shards: %s\n", message.c_str());
  std::exit(1);
}

void require(dm_status status, const char *call)
{
  if (status != DM_STATUS_OK) fail(std::string(call) + ": " + dm_status_name(status) + ": " + dm_last_error());
}
#define DM(call) require(call, #call)

int local_rank(const dm_mesh *mesh, const char *dim)
{
  int rank = 0;
  DM(dm_get_local_rank(mesh, dim, &rank));
  return rank;
}

// Every rank's line, in rank order, on rank 0: short texts gathered as bytes over all ranks.
void print_in_order(const dm_mesh *everybody, const std::string &line)
{
  constexpr std::size_t kWidth = 160;
  std::size_t ranks = 0;
  int rank = 0;
  DM(dm_size(everybody, nullptr, &ranks));
  DM(dm_rank(everybody, &rank));
  std::vector<char> mine(kWidth, '\0'), all(kWidth * ranks);
  std::copy_n(line.begin(), std::min(line.size(), kWidth - 1), mine.begin());
  DM(dm_all_gather(everybody, nullptr, mine.data(), all.data(), kWidth, DM_INT8, nullptr));
  if (rank == 0)
    for (std::size_t at = 0; at < ranks; ++at) std::printf("%s\n", all.data() + at * kWidth);
}

bool hsdp()
{
  dm_mesh *mesh = nullptr, *everybody = nullptr;
  const std::size_t shape[] = {2, 4};
  const char *names[] = {"dp", "fsdp"};
  DM(dm_init("cpu", shape, 2, names, nullptr, &mesh));
  DM(dm_flatten(mesh, nullptr, nullptr, &everybody));

  std::vector<float> layer(100);
  std::iota(layer.begin(), layer.end(), 101.0f);
  const std::size_t piece = layer.size() / 4;
  const int dp = local_rank(mesh, "dp"), fsdp = local_rank(mesh, "fsdp");
  const std::vector<float> shard(layer.begin() + fsdp * piece, layer.begin() + (fsdp + 1) * piece);

  int rank = 0;
  DM(dm_rank(mesh, &rank));
  print_in_order(everybody, "rank " + std::to_string(rank) + "  dp " + std::to_string(dp) + "  fsdp " + std::to_string(fsdp) +
                                "  holds " + std::to_string(static_cast<int>(shard.front())) + ".." +
                                std::to_string(static_cast<int>(shard.back())));

  // Gathered over fsdp the layer is whole again; averaged over dp it stays what it is, because the replicas are equal.
  std::vector<float> whole(layer.size());
  DM(dm_all_gather(mesh, "fsdp", shard.data(), whole.data(), piece, DM_FLOAT32, nullptr));
  DM(dm_all_reduce(mesh, "dp", whole.data(), whole.data(), whole.size(), DM_FLOAT32, DM_AVG, nullptr));
  const bool rank_6 = rank != 6 || (shard.front() == 151 && shard.back() == 175);
  const bool good = whole == layer && rank_6;

  DM(dm_finalize(mesh));
  dm_free(everybody);
  dm_free(mesh);
  return good;
}

bool fsdp_tp()
{
  constexpr int kRows = 12, kColumns = 12, kFsdp = 2, kTp = 4;
  dm_mesh *mesh = nullptr, *everybody = nullptr;
  const std::size_t shape[] = {kFsdp, kTp};
  const char *names[] = {"fsdp", "tp"};
  DM(dm_init("cpu", shape, 2, names, nullptr, &mesh));
  DM(dm_flatten(mesh, nullptr, nullptr, &everybody));

  std::vector<float> layer(kRows * kColumns);
  std::iota(layer.begin(), layer.end(), 1.0f);
  const int fsdp = local_rank(mesh, "fsdp"), tp = local_rank(mesh, "tp");

  // First tp: block of 3 rows. Then fsdp: chunks of ceil(3 / 2) rows, the last one smaller (as torch.chunk cuts).
  constexpr int kBlock = kRows / kTp, kChunk = (kBlock + kFsdp - 1) / kFsdp;
  const int first = tp * kBlock + fsdp * kChunk;
  const int rows = std::min(kChunk, kBlock - fsdp * kChunk);
  std::vector<float> shard(kChunk * kColumns, 0.0f);  // padded to the largest chunk
  std::copy_n(layer.begin() + first * kColumns, rows * kColumns, shard.begin());

  int rank = 0;
  DM(dm_rank(mesh, &rank));
  print_in_order(everybody, "rank " + std::to_string(rank) + "  fsdp " + std::to_string(fsdp) + "  tp " + std::to_string(tp) + "  holds row" +
                                (rows > 1 ? "s " : " ") + std::to_string(first) + (rows > 1 ? ".." + std::to_string(first + rows - 1) : ""));

  // Back: over fsdp the block (without the padding behind it), then over tp the layer.
  std::vector<float> block(kFsdp * kChunk * kColumns), whole(kRows * kColumns);
  DM(dm_all_gather(mesh, "fsdp", shard.data(), block.data(), shard.size(), DM_FLOAT32, nullptr));
  DM(dm_all_gather(mesh, "tp", block.data(), whole.data(), kBlock * kColumns, DM_FLOAT32, nullptr));

  // The wrong way, for comparison: all shards in mesh order (fsdp, tp).
  std::vector<float> in_mesh_order(kFsdp * kTp * shard.size());
  DM(dm_all_gather(everybody, nullptr, shard.data(), in_mesh_order.data(), shard.size(), DM_FLOAT32, nullptr));
  if (rank == 0) {
    std::printf("rows in mesh order (wrong):");
    for (std::size_t at = 0; at < in_mesh_order.size(); at += kColumns)
      if (in_mesh_order[at] > 0) std::printf(" %d", static_cast<int>(in_mesh_order[at] - 1) / kColumns);
    std::printf("\nrows over fsdp, then tp:   ");
    for (std::size_t at = 0; at < whole.size(); at += kColumns) std::printf(" %d", static_cast<int>(whole[at] - 1) / kColumns);
    std::printf("\n");
  }
  const bool good = whole == layer;

  DM(dm_finalize(mesh));
  dm_free(everybody);
  dm_free(mesh);
  return good;
}

}  // namespace

int main(int argc, char **argv)
{
  if (argc > 2 || (argc == 2 && std::string(argv[1]) != "--check")) fail("usage: shards [--check]");
  const bool hsdp_good = hsdp(), fsdp_tp_good = fsdp_tp();
  if (!hsdp_good) std::fprintf(stderr, "shards: HSDP: the gathered layer is not the layer\n");
  if (!fsdp_tp_good) std::fprintf(stderr, "shards: FSDP x TP: the gathered layer is not the layer\n");
  return hsdp_good && fsdp_tp_good ? 0 : 1;
}
