/* ranks: 1 2 4 8 */
/* Every collective along every dimension of a mesh (n/2, 2), in place and out of place. The
 * results are compared with sums worked out by hand. Groups hold sends and receives in an order
 * that would block without the group. */
#include "check.h"

enum { kCount = 1001 };

static void along(const dm_mesh *mesh, const char *dim)
{
  int32_t local = -1;
  int32_t size = 0;
  REQUIRE(dm_get_local_rank(mesh, dim, &local));
  REQUIRE(dm_size(mesh, dim, &size));
  const int32_t n = (int32_t)size;
  int32_t *send = (int32_t *)malloc(sizeof(int32_t) * kCount * size), *recv = (int32_t *)malloc(sizeof(int32_t) * kCount * size);
  if (send == NULL || recv == NULL) exit(1);
#define FILL() for (int32_t at = 0; at < kCount * n; ++at) send[at] = 1000 * local + at, recv[at] = -1
#define EACH(count, expected) \
  do { \
    int wrong_ = 0; \
    for (int32_t at = 0; at < (count); ++at) wrong_ += recv[at] != (expected); \
    CHECK(wrong_ == 0); \
  } while (0)
  const int32_t ranks_sum = n * (n - 1) / 2;

  FILL();
  OK(dm_all_reduce(mesh, dim, send, recv, kCount, DM_INT32, DM_SUM, NULL));
  EACH(kCount, 1000 * ranks_sum + n * at);
  OK(dm_all_reduce(mesh, dim, send, recv, kCount, DM_INT32, DM_MAX, NULL));
  EACH(kCount, 1000 * (n - 1) + at);
  OK(dm_all_reduce(mesh, dim, send, recv, kCount, DM_INT32, DM_MIN, NULL));
  EACH(kCount, at);
  memcpy(recv, send, sizeof(int32_t) * kCount);
  OK(dm_all_reduce(mesh, dim, recv, recv, kCount, DM_INT32, DM_SUM, NULL));
  EACH(kCount, 1000 * ranks_sum + n * at);
  OK(dm_all_reduce(mesh, dim, send, recv, 0, DM_INT32, DM_SUM, NULL));

  for (int32_t root = 0; root < n; ++root) {
    FILL();
    OK(dm_reduce(mesh, dim, send, local == root ? recv : NULL, kCount, DM_INT32, DM_SUM, root, NULL));
    if (local == root) EACH(kCount, 1000 * ranks_sum + n * at);
    FILL();
    OK(dm_broadcast(mesh, dim, local == root ? send : NULL, recv, kCount, DM_INT32, root, NULL));
    EACH(kCount, 1000 * root + at);
  }

  FILL();
  OK(dm_all_gather(mesh, dim, send, recv, kCount, DM_INT32, NULL));
  EACH(kCount * n, 1000 * (at / kCount) + at % kCount);
  memset(recv, 0, sizeof(int32_t) * kCount * size);
  memcpy(recv + local * kCount, send, sizeof(int32_t) * kCount);
  OK(dm_all_gather(mesh, dim, recv + local * kCount, recv, kCount, DM_INT32, NULL));
  EACH(kCount * n, 1000 * (at / kCount) + at % kCount);

  FILL();
  OK(dm_reduce_scatter(mesh, dim, send, recv, kCount, DM_INT32, DM_SUM, NULL));
  EACH(kCount, 1000 * ranks_sum + n * (local * kCount + at));
  OK(dm_reduce_scatter(mesh, dim, send, send + local * kCount, kCount, DM_INT32, DM_SUM, NULL));
  CHECK(memcmp(send + local * kCount, recv, sizeof(int32_t) * kCount) == 0);

  FILL();
  OK(dm_all_to_all(mesh, dim, send, recv, kCount, DM_INT32, NULL));
  EACH(kCount * n, 1000 * (at / kCount) + local * kCount + at % kCount);

  /* Every rank receives from the left before it sends to the right. Without a group all ranks
   * would block. */
  FILL();
  OK(dm_group_start(mesh));
  OK(dm_recv(mesh, dim, recv, kCount, DM_INT32, (local + n - 1) % n, NULL));
  OK(dm_send(mesh, dim, send, kCount, DM_INT32, (local + 1) % n, NULL));
  OK(dm_group_end(mesh));
  EACH(kCount, 1000 * ((local + n - 1) % n) + at);

  double average[2] = {(double)local, 1}, out[2] = {0, 0};
  OK(dm_all_reduce(mesh, dim, average, out, 2, DM_FLOAT64, DM_AVG, NULL));
  CHECK(out[0] == (double)ranks_sum / n && out[1] == 1);
  uint16_t half = 0x3c00, bf = 0x3f80, half_sum = 0, bf_sum = 0; /* 1.0 each */
  const uint16_t halves[] = {0, 0x3c00, 0x4000, 0x4200, 0x4400, 0, 0, 0, 0x4800},
                 bfs[] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0, 0, 0, 0x4100};
  OK(dm_all_reduce(mesh, dim, &half, &half_sum, 1, DM_FLOAT16, DM_SUM, NULL));
  OK(dm_all_reduce(mesh, dim, &bf, &bf_sum, 1, DM_BFLOAT16, DM_SUM, NULL));
  CHECK(n > 8 || (half_sum == halves[n] && bf_sum == bfs[n]));
  free(send);
  free(recv);
}

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  int32_t ranks = 0;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_size(world, &ranks));
  const int32_t inner = ranks % 2 == 0 ? 2 : 1, shape[] = {ranks / inner, inner};
  const char *names[] = {"outer", "inner"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *flat = NULL;
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  along(mesh, "outer");
  along(mesh, "inner");
  along(flat, NULL);
  OK(dm_world_barrier(world, 0));
  OK(dm_finalize(mesh, NULL));
  dm_free(flat);
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
