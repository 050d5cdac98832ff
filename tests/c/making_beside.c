/* ranks: 2 4 */
/* One thread sums along a dimension while the main thread makes and ends meshes. Their
 * communicators are split from the communicator of the sums, so both threads take turns. */
#include "check.h"

#include <pthread.h>

enum { kSums = 1000, kMeshes = 20 };

static dm_mesh *line;
static int32_t ranks;

static void *sum(void *unused)
{
  (void)unused;
  for (int at = 0; at < kSums; ++at) {
    double value = at;
    REQUIRE(dm_all_reduce(line, NULL, &value, &value, 1, DM_FLOAT64, DM_SUM, NULL));
    CHECK(value == (double)ranks * at);
  }
  return NULL;
}

int main(void)
{
  const char *size = getenv("WORLD_SIZE");
  ranks = size == NULL ? 1 : (size_t)atoi(size);
  REQUIRE(dm_init("cpu", &ranks, 1, NULL, NULL, &line));
  pthread_t thread;
  if (pthread_create(&thread, NULL, sum, NULL) != 0) return 1;
  const int32_t shape[2] = {ranks / 2, 2};
  const char *names[] = {"outer", "inner"}, *again[] = {"one", "two"};
  for (int at = 0; at < kMeshes; ++at) {
    dm_mesh *mesh = NULL, *reshaped = NULL;
    REQUIRE(dm_init("cpu", shape, 2, names, NULL, &mesh));
    double value = 1;
    REQUIRE(dm_all_reduce(mesh, "inner", &value, &value, 1, DM_FLOAT64, DM_SUM, NULL));
    CHECK(value == 2);
    const int32_t turned[2] = {2, ranks / 2};
    REQUIRE(dm_reshape(mesh, turned, 2, again, NULL, &reshaped));
    dm_free(reshaped);
    REQUIRE(dm_finalize(mesh, NULL));
    dm_free(mesh);
  }
  pthread_join(thread, NULL);
  OK(dm_finalize(line, NULL));
  dm_free(line);
  return finish();
}
