// Sums the ranks of a two-rank mesh.
#include <devicemesh.h>

#include <cstdio>

int main()
{
  dm_mesh *mesh = nullptr;
  const std::size_t shape[] = {2};
  float mine = 0, sum = 0;
  int32_t rank = 0;
  if (dm_init("cpu", shape, 1, nullptr, nullptr, &mesh) != DM_STATUS_OK || dm_rank(mesh, &rank) != DM_STATUS_OK ||
      (mine = static_cast<float>(rank), dm_all_reduce(mesh, nullptr, &mine, &sum, 1, DM_FLOAT32, DM_SUM, nullptr)) != DM_STATUS_OK) {
    std::fprintf(stderr, "%s\n", dm_last_error());
    return 1;
  }
  std::printf("sum %g\n", static_cast<double>(sum));
  return dm_finalize(mesh) == DM_STATUS_OK ? 0 : 1;
}
