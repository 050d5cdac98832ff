/* Ranks of a mesh (3, 2) lose some of them to SIGKILL, and go on without them. The program reads no
 * message. tests/test_blame.py kills the ranks that the arguments name, after all ranks have said
 * "ready". The first argument says where the survivors wait: in a "collective" or a "barrier". */
#include <unistd.h>

#include "../facts.h"

static int32_t victims[6];
static size_t num_victims;

/* Waits until this rank knows of all lost ranks. */
static void learn(const dm_mesh *mesh)
{
  int32_t lost[6];
  size_t count = 0;
  const double end = seconds_now() + 30;
  do {
    REQUIRE(dm_lost_ranks(mesh, lost, 6, &count));
    if (!within(lost, count, victims, num_victims)) break;
    if (count < num_victims) usleep(1000);
  } while (count < num_victims && seconds_now() < end);
  CHECK(same(lost, count, victims, num_victims));
}

/* The last failure is about ranks that were killed, and says that they are lost. */
static void about_the_lost(bool all)
{
  const dm_error_info info = facts();
  CHECK(info.status == DM_STATUS_PEER_LOST);
  CHECK(info.num_ranks > 0 && within(info.ranks, info.num_ranks, victims, num_victims));
  CHECK(same(info.ranks, info.num_ranks, info.lost_ranks, info.num_lost));
  if (all) CHECK(same(info.lost_ranks, info.num_lost, victims, num_victims));
}

int main(int argc, char **argv)
{
  const dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *flat = NULL, *smaller = NULL;
  int32_t me = -1;
  const int32_t shape[] = {3, 2};
  const char *const names[] = {"dp", "tp"};
  float data = 1, sum = 0;
  if (argc < 3) return 2;
  for (int i = 2; i < argc; ++i) victims[num_victims++] = atoi(argv[i]);
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_world_rank(options.world, &me));
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  printf("ready\n");
  fflush(stdout);
  if (within(&me, 1, victims, num_victims)) {
    for (;;) pause();
  }

  const bool in_collective = strcmp(argv[1], "collective") == 0;
  if (in_collective) {
    GIVES(DM_STATUS_PEER_LOST, dm_all_reduce(flat, NULL, &data, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(facts().dim != NULL && strcmp(facts().dim, "all") == 0 && facts().call == -1 && facts().waited_seconds >= 0);
  } else {
    GIVES(DM_STATUS_PEER_LOST, dm_world_barrier(options.world, 0));
    CHECK(facts().dim == NULL && facts().call > 0 && facts().waited_seconds >= 0);
  }
  about_the_lost(false);
  learn(mesh);
  GIVES(DM_STATUS_PEER_LOST, dm_world_barrier(options.world, 0));
  about_the_lost(true);

  int32_t lost[6];
  size_t count = 0;
  REQUIRE(dm_lost_ranks(mesh, lost, 6, &count));
  REQUIRE(dm_shrink(mesh, "dp", lost, count, NULL, &smaller));
  const dm_status gone = dm_all_reduce(smaller, "tp", &data, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
  if (gone != DM_STATUS_NOT_MEMBER) {
    CHECK(gone == DM_STATUS_OK && sum == 2);
    OK(dm_finalize(smaller, NULL));
  }
  dm_free(smaller);
  dm_free(flat);
  dm_free(mesh);
  dm_world_free(options.world);
  return finish();
}
