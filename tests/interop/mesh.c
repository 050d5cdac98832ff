/* mesh DP TP: the program of a launcher's ranks. It gives dm_init nothing but the shape (dp, tp)
 * and the names, checks an all-reduce along each dimension against the ranks' coordinates, and
 * each rank prints one line. */
#include "check.h"

int main(int argc, char **argv)
{
  if (argc != 3) return 2;
  const int32_t shape[2] = {(size_t)atoi(argv[1]), (size_t)atoi(argv[2])};
  const int32_t dp = (int32_t)shape[0], tp = (int32_t)shape[1];
  const char *names[2] = {"dp", "tp"};
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cpu", shape, 2, names, NULL, &mesh));
  const int32_t rank = rank_of(mesh);
  int32_t over_dp = -1, over_tp = -1;
  REQUIRE(dm_all_reduce(mesh, "dp", &rank, &over_dp, 1, DM_INT32, DM_SUM, NULL));
  REQUIRE(dm_all_reduce(mesh, "tp", &rank, &over_tp, 1, DM_INT32, DM_SUM, NULL));
  CHECK(over_tp == tp * (rank / tp * tp) + tp * (tp - 1) / 2);
  CHECK(over_dp == dp * (rank % tp) + tp * (dp * (dp - 1) / 2));
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(mesh);
  if (failures == 0) printf("mesh fine: rank %d of %d\n", rank, dp * tp);
  return finish();
}
