/* Prints what every rank of a (2, 2, 2) mesh computes; tests/test_same_results.py starts it under
 * the tool, under plain environment variables, and with --threads PORT as eight threads of one
 * process, and compares. */
#include "../check.h"

#include <pthread.h>

static char lines[8][512];

static void one_rank(dm_world *world)
{
  const int32_t shape[] = {2, 2, 2};
  const char *names[] = {"dp", "cp", "tp"}, *pair[] = {"tp", "dp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *view = NULL, *flat = NULL;
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 3, names, &options, &mesh));
  const int32_t rank = rank_of(mesh);
  char *line = lines[rank];
  size_t used = (size_t)snprintf(line, sizeof lines[0], "rank %d", rank);
  float values[1000], sums[1000];
  for (int at = 0; at < 1000; ++at) values[at] = 1.0f / (float)(1 + rank * 1000 + at);
  for (int dim = 0; dim < 3; ++dim) {
    uint32_t bits = 0, each = 0;
    REQUIRE(dm_all_reduce(mesh, names[dim], values, sums, 1000, DM_FLOAT32, DM_AVG, NULL));
    for (int at = 0; at < 1000; ++at) memcpy(&each, &sums[at], 4), bits = bits * 31 + each;
    used += (size_t)snprintf(line + used, sizeof lines[0] - used, " %s %08x", names[dim], bits);
  }
  REQUIRE(dm_slice(mesh, pair, 2, &view));
  REQUIRE(dm_flatten(view, NULL, NULL, &flat));
  int32_t gathered[4];
  REQUIRE(dm_all_gather(flat, NULL, &rank, gathered, 1, DM_INT32, NULL));
  uint64_t hash = 0;
  REQUIRE(dm_hash(flat, &hash));
  snprintf(line + used, sizeof lines[0] - used, " tp_dp %d %d %d %d hash %016llx", gathered[0], gathered[1], gathered[2], gathered[3],
           (unsigned long long)hash);
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(flat);
  dm_free(view);
  dm_free(mesh);
}

struct seat { int rank; const char *method; };

static void *thread(void *data)
{
  const struct seat *seat = (const struct seat *)data;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  join.world_size = 8;
  join.rank = seat->rank;
  join.init_method = seat->method;
  REQUIRE(dm_world_init("cpu", &join, &world));
  one_rank(world);
  dm_world_free(world);
  return NULL;
}

int main(int argc, char **argv)
{
  if (argc == 3 && strcmp(argv[1], "--threads") == 0) {
    pthread_t threads[8];
    struct seat seats[8];
    char method[64];
    snprintf(method, sizeof method, "tcp://127.0.0.1:%s", argv[2]);
    for (int rank = 0; rank < 8; ++rank) {
      seats[rank].rank = rank;
      seats[rank].method = method;
      if (pthread_create(&threads[rank], NULL, thread, &seats[rank]) != 0) return 1;
    }
    for (int rank = 0; rank < 8; ++rank) pthread_join(threads[rank], NULL);
  } else {
    one_rank(NULL);
  }
  for (int rank = 0; rank < 8; ++rank)
    if (lines[rank][0] != '\0') printf("%s\n", lines[rank]);
  return 0;
}
