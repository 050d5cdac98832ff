/* One rank that lives long: tests/test_lives.py starts it with RANK, WORLD_SIZE, MASTER_ADDR and
 * MASTER_PORT.
 *   lives rejoin N        joins and frees the world N times
 *   lives barriers N      makes N barriers; rank 0 says "done" and reads a line before all leave
 *   lives meshes N        makes, flattens twice and finalizes N meshes in one world, and then ends
 *                         as "barriers" does
 *   lives late            rank 0 does not come at first: dm_init of the others ends in time, and
 *                         works when all ranks come
 *   lives aborted         rank 0 ends its first dm_init by dm_default_world_abort(); the second
 *                         dm_init of all ranks works */
#include "../check.h"

#include <pthread.h>
#include <unistd.h>

static int32_t rank, size;

static long resident_kib(void)
{
  long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (file == NULL || fscanf(file, "%*d %ld", &pages) != 1) exit(1);
  fclose(file);
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void say(const char *word)
{
  printf("%s\n", word);
  fflush(stdout);
}

static void listen_for_a_line(void)
{
  while (getchar() != '\n' && !feof(stdin)) {}
}

static void join(dm_world **world)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  options.timeout_ms = 120000;
  REQUIRE(dm_world_init("cpu", &options, world));
}

static void rejoin(int count)
{
  for (int at = 0; at < count; ++at) {
    dm_world *world = NULL;
    join(&world);
    if (at % 3 == 0) REQUIRE(dm_world_barrier(world, 0));
    dm_world_free(world);
  }
}

static void one_mesh(dm_world *world)
{
  const int32_t shape[] = {2, 1, (size_t)size / 2};
  const char *names[] = {"a", "b", "c"}, *all[] = {"a", "b", "c"}, *two[] = {"a", "b"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *part = NULL, *first = NULL, *second = NULL;
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 3, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "abc", NULL, &first));
  REQUIRE(dm_slice(mesh, two, 2, &part));
  REQUIRE(dm_flatten(part, "ab", NULL, &second));
  int32_t one = 1, sum = 0;
  REQUIRE(dm_all_reduce(first, NULL, &one, &sum, 1, DM_INT32, DM_SUM, NULL));
  CHECK(sum == size);
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(second);
  dm_free(part);
  dm_free(first);
  dm_free(mesh);
  (void)all;
}

static void stay_and_measure(dm_world *world, int count, bool meshes)
{
  long before = 0;
  for (int at = 0; at < count; ++at) {
    if (at == count / 4) before = resident_kib();
    if (meshes) one_mesh(world);
    else REQUIRE(dm_world_barrier(world, 0));
  }
  const long grown = resident_kib() - before;
  if (grown > 1024) {
    ++failures;
    fprintf(stderr, "rank %d grew by %ld KiB in %d %s\n", rank, grown, count - count / 4, meshes ? "meshes" : "barriers");
  }
  REQUIRE(dm_world_barrier(world, 0));
  if (rank == 0) {
    say("done");
    listen_for_a_line();
  }
  REQUIRE(dm_world_barrier(world, 0));
}

static dm_status init(int64_t timeout_ms, dm_mesh **mesh)
{
  const int32_t shape[] = {(size_t)size};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  return dm_init("cpu", shape, 1, NULL, &options, mesh);
}

/* In the end all ranks make this call. */
static void works(void)
{
  dm_mesh *mesh = NULL;
  int32_t one = 1, sum = 0;
  REQUIRE(init(120000, &mesh));
  REQUIRE(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_INT32, DM_SUM, NULL));
  CHECK(sum == size);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

static void late(void)
{
  if (rank > 0) {
    dm_mesh *mesh = NULL;
    for (int at = 0; at < 2; ++at) {
      const double began = seconds_now();
      const dm_status status = init(700, &mesh);
      const double took = seconds_now() - began;
      CHECK(status == DM_STATUS_STORE || status == DM_STATUS_TIMEOUT);
      CHECK(took > 0.5 && took < 30); /* the default timeout is ten minutes */
    }
  }
  say("late");
  listen_for_a_line(); /* from now on all ranks make the call */
  works();
}

static void *blocked_init(void *status)
{
  dm_mesh *mesh = NULL;
  *(dm_status *)status = init(0, &mesh);
  return NULL;
}

static void aborted(void)
{
  if (rank == 0) {
    pthread_t thread;
    dm_status status = DM_STATUS_OK;
    const double began = seconds_now();
    if (pthread_create(&thread, NULL, blocked_init, &status) != 0) exit(1);
    /* An abort before the join begins ends nothing, so the abort is repeated. */
    do {
      OK(dm_default_world_abort());
      usleep(20000);
    } while (pthread_tryjoin_np(thread, NULL) != 0 && seconds_now() - began < 60);
    CHECK(status == DM_STATUS_ABORTED);
    CHECK(seconds_now() - began < 60);
  }
  say("late");
  listen_for_a_line();
  works();
  /* A joined default world that was aborted is joined anew as well, where all ranks do so. */
  OK(dm_default_world_abort());
  works();
}

int main(int argc, char **argv)
{
  if (argc < 2) return 2;
  rank = atoi(getenv("RANK"));
  size = atoi(getenv("WORLD_SIZE"));
  const int count = argc > 2 ? atoi(argv[2]) : 0;
  if (strcmp(argv[1], "rejoin") == 0) rejoin(count);
  else if (strcmp(argv[1], "late") == 0) late();
  else if (strcmp(argv[1], "aborted") == 0) aborted();
  else {
    dm_world *world = NULL;
    join(&world);
    stay_and_measure(world, count, strcmp(argv[1], "meshes") == 0);
    dm_world_free(world);
  }
  return finish();
}
