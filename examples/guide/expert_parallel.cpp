// Expert parallelism beside tensor parallelism: a second factorisation of the same ranks, eight
// processes.
//
//     devicemesh run -n 8 -- ./expert_parallel
//
// Attention runs on (dp=4, tp=2), the experts on (edp=2, ep=4): four experts, each on two ranks.
// Every rank has eight tokens, sends each to its expert and gets the answer back. Expert e answers
// t with t * (e + 1), so the answers can be checked.
#include <devicemesh.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr std::size_t kTokens = 8;  // of a rank; also the most that it sends to one expert

std::int64_t token(std::size_t rank, std::size_t i) { return 100 * rank + i * i + 1; }
std::size_t expert_of(std::int64_t token, std::size_t experts) { return token * 7 % 11 % experts; }

}  // namespace

int main()
try {
  const dm::Mesh dense = dm::init("cpu", {{"dp", 4}, {"tp", 2}});
  const dm::Mesh sparse = dense.reshape({{"edp", 2}, {"ep", 4}});  // the same eight ranks, with communicators of their own

  const std::size_t experts = sparse.size("ep"), me = dense.rank(), expert = sparse.local_rank("ep");

  // Tokens by expert, a block of kTokens for each, and where each one went.
  std::vector<std::int64_t> out(experts * kTokens), in(experts * kTokens);
  std::vector<std::int32_t> sent(experts), received(experts);
  std::vector<std::size_t> place(kTokens);
  for (std::size_t i = 0; i < kTokens; ++i) {
    const std::size_t to = expert_of(token(me, i), experts);
    place[i] = to * kTokens + sent[to]++;
    out[place[i]] = token(me, i);
  }
  sparse.all_to_all("ep", sent, received);  // how many there are in each block
  sparse.all_to_all("ep", out, in);

  // This rank's expert, for the tokens of all ranks of its ep group.
  std::int64_t work[1] = {0};
  for (std::size_t from = 0; from < experts; ++from)
    for (std::int32_t i = 0; i < received[from]; ++i) {
      in[from * kTokens + i] *= expert + 1;
      work[0] += 1;
    }
  sparse.all_to_all("ep", in, out);  // and back: the blocks are where they were

  std::int32_t wrong[1] = {0};
  for (std::size_t i = 0; i < kTokens; ++i)
    wrong[0] += out[place[i]] != token(me, i) * std::int64_t(expert_of(token(me, i), experts) + 1);

  // Along edp: the copies of one expert, whose gradients a program sums. Along ep: all experts.
  sparse.all_reduce("edp", work);
  std::vector<std::int64_t> load(experts);
  sparse.all_gather("ep", work, load);
  dense.flatten().all_reduce(nullptr, wrong);

  std::vector<std::int64_t> expected(experts);
  for (std::int32_t rank = 0; rank < dense.size(); ++rank)
    for (std::size_t i = 0; i < kTokens; ++i) expected[expert_of(token(rank, i), experts)] += 1;
  const bool good = wrong[0] == 0 && load == expected;

  if (me == 0) {
    const std::vector<std::int32_t> group = sparse.group_ranks("ep"), copies = sparse.group_ranks("edp");
    std::printf("rank 0 exchanges tokens with ranks");
    for (const std::int32_t rank : group) std::printf(" %d", rank);
    std::printf(" and shares its expert with rank %d\ntokens per expert:", copies[1]);
    for (const std::int64_t tokens : load) std::printf(" %lld", static_cast<long long>(tokens));
    std::printf("\nwrong answers: %d of %zu\n", wrong[0], kTokens * dense.size());
  }
  dense.finalize();
  return good ? 0 : 1;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "expert_parallel: %s\n", error.what());
  return 1;
}
