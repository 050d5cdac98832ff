// Two threads of a rank on dimensions that share one communicator: two processes.
//
//     devicemesh run -n 2 -- ./threads
//
// With one replica, pp and the flattened dimension all join the same ranks. One thread sums along
// pp, the other along all, in whatever order the machine runs them. All numbers are small
// integers, so each sum must be exact.
#include <devicemesh.hpp>

#include <cstdio>
#include <future>
#include <vector>

namespace {

constexpr int kTurns = 100;

// Sums `mine` over the ranks of dim again and again; how many sums are wrong.
int sums(const dm::Mesh &mesh, const char *dim, float mine)
{
  int wrong = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    std::vector<float> values(4, mine);
    mesh.all_reduce(dim, values);
    for (float value : values) wrong += value != 2 * mine;
  }
  return wrong;
}

}  // namespace

int main()
try {
  const dm::Mesh mesh = dm::init("cpu", {{"pp", 2}, {"dp", 1}});
  const dm::Mesh all = mesh.flatten("all");
  const bool shared = mesh.comm("pp") == all.comm("all");

  // The future hands on an exception of its thread.
  std::future<int> along_pp = std::async(std::launch::async, [&] { return sums(mesh, "pp", 1); });
  const int wrong_along_all = sums(all, "all", 1000);
  const int wrong_along_pp = along_pp.get();

  if (mesh.rank() == 0)
    std::printf("pp and all share a communicator: %s; wrong sums: %d along pp, %d along all\n", shared ? "yes" : "no", wrong_along_pp,
                wrong_along_all);
  mesh.finalize();
  return wrong_along_pp + wrong_along_all > 0;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
