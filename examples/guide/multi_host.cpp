// Places the ranks by their hosts: data parallelism over the hosts, tensor parallelism within one.
//
//     devicemesh run -n 8 -- ./multi_host
//     devicemesh run -n 8 -- ./multi_host --pretend 2
//
// The second command acts as if the ranks had been dealt out to two hosts in turn.
#include <devicemesh.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

// How many of a dimension's groups have ranks on different hosts.
std::size_t across(const dm::Mesh &mesh, const char *dim, const std::vector<std::string> &hosts)
{
  const std::vector<std::int32_t> groups = mesh.replica_groups(dim);
  const std::size_t size = mesh.size(dim);
  std::size_t crossing = 0;
  for (std::size_t first = 0; first < groups.size(); first += size) {
    bool same = true;
    for (std::size_t at = first; at < first + size; ++at)
      same = same && hosts[groups[at]] == hosts[groups[first]];
    crossing += !same;
  }
  return crossing;
}

}  // namespace

int main(int argc, char **argv)
try {
  const int pretend = argc == 3 && std::strcmp(argv[1], "--pretend") == 0 ? std::atoi(argv[2]) : 0;
  if (argc != 1 && pretend < 1) {
    std::fprintf(stderr, "usage: multi_host [--pretend HOSTS]\n");
    return 1;
  }

  // Joins the job: torchrun, srun, mpirun or devicemesh run says which rank this is. A location of
  // one's own is "rack/host/nvlink domain".
  const dm::World world = dm::World::init("cpu");
  const std::string mine = pretend > 0 ? "host" + std::to_string(world.rank() % pretend) : "";
  const std::vector<std::string> hosts = world.locations(pretend > 0 ? mine.c_str() : nullptr);

  const std::int32_t ranks = world.size(), tp = ranks % 4 == 0 ? 4 : 1;
  const dm::Plan plan = dm::plan_ranks(hosts, {ranks / tp, tp});

  dm::InitOptions options;
  options.world = world;
  options.ranks = plan.ranks;
  const dm::Mesh mesh = dm::init({{"dp", ranks / tp}, {"tp", tp}}, options);

  // The sum over both dimensions, one after the other, is the sum over all ranks, wherever they
  // are.
  std::vector<std::int32_t> sum = {world.rank()};
  mesh.all_reduce("tp", sum);
  mesh.all_reduce("dp", sum);
  const bool good = sum[0] == ranks * (ranks - 1) / 2;

  if (world.rank() == 0) {
    std::printf("%s\nranks by row:", mesh.describe().c_str());
    for (const std::int32_t rank : mesh.ranks()) std::printf(" %d", rank);
    for (const char *dim : {"dp", "tp"})
      std::printf("\n%s: %zu of %d groups across hosts", dim, across(mesh, dim, hosts), ranks / mesh.size(dim));
    std::printf("\nsum of all ranks: %d\n", sum[0]);
  }
  mesh.finalize();
  return good ? 0 : 1;
} catch (const dm::Error &error) {
  std::fprintf(stderr, "multi_host: %s\n", error.what());
  return 1;
}
