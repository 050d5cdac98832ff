/* ranks: 4 */
/* A rank calls dm_abort and takes no part in the call in which the others wait through the store.
 * The others learn of the abort, whether they wait already or call later. Groups without the rank
 * go on, and the ranks meet again in their next common call. */
#include "check.h"

static dm_mesh *mesh;
static int32_t rank;

static dm_status flatten(void)
{
  dm_mesh *view = NULL;
  return dm_flatten(mesh, "both", NULL, &view);
}

static dm_status get_comm(void)
{
  ncclComm_t comm = NULL;
  return dm_get_comm(mesh, "tp", &comm);
}

static dm_status barrier(void) { return dm_barrier(mesh, "tp", 0); }

static dm_status gather(void)
{
  const char mine = (char)rank;
  dm_buffers *all = NULL;
  const dm_status status = dm_all_gather_bytes(mesh, "tp", &mine, 1, 0, &all);
  dm_buffers_free(all);
  return status;
}

enum { kKinds = 5 };
static const struct {
  const char *name;
  dm_status (*call)(void);
  /* The number of ranks of the mesh, 4 or the first 2. A mesh of all 4 uses the world's scope. */
  int32_t ranks;
  /* Whether the groups {0, 1} and {2, 3} make the call separately. */
  bool of_group;
} kinds[kKinds] = {{"dm_flatten", flatten, 4, false}, {"dm_flatten of two ranks", flatten, 2, false},
    {"lazy dm_get_comm", get_comm, 4, true}, {"dm_barrier", barrier, 4, true}, {"dm_all_gather_bytes", gather, 4, true}};

int main(void)
{
  const int32_t square[] = {2, 2}, line[] = {2, 1}, first[] = {0, 1};
  const char *names[] = {"dp", "tp"}, *turned[] = {"tp", "dp"};
  dm_world *sync = NULL; /* orders the steps of the test, without the world that is tested */
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.flags = DM_INIT_LAZY;
  REQUIRE(dm_world_init("cpu", NULL, &options.world));
  REQUIRE(dm_world_init("cpu", NULL, &sync));
  for (int attempt = 0; attempt < 4 * kKinds; ++attempt) {
    const int kind = attempt % kKinds;
    const bool is_early = attempt / kKinds % 2 == 0; /* the abort comes before the calls of the others */
    const bool is_whole = kinds[kind].ranks == 4;
    options.ranks = is_whole ? NULL : first;
    options.num_ranks = is_whole ? 0 : 2;
    REQUIRE(dm_init("cpu", is_whole ? square : line, 2, is_whole ? names : turned, &options, &mesh));
    REQUIRE(dm_world_rank(options.world, &rank));
    if (rank == 0 && is_early) OK(dm_abort(mesh));
    if (is_early) OK(dm_world_barrier(sync, 0));
    if (rank == 0 && !is_early) OK(dm_abort(mesh));
    const double began = seconds_now();
    const bool needs = rank != 0 && (kinds[kind].of_group ? rank == 1 : rank < kinds[kind].ranks);
    if (rank != 0 && rank < kinds[kind].ranks) {
      for (int again = 0; again < 2; ++again) {
        if (needs) FAILS(DM_STATUS_PEER_LOST, "rank 0 has ended the mesh by dm_abort, dm_recover or dm_shrink", kinds[kind].call());
        else OK(kinds[kind].call());
      }
    }
    if (seconds_now() - began > 5) {
      ++failures;
      fprintf(stderr, "%s took %.1f s\n", kinds[kind].name, seconds_now() - began);
    }
    OK(dm_world_barrier(sync, 0));
    if (rank != 0) OK(dm_abort(mesh));
    dm_free(mesh);
    OK(dm_world_barrier(options.world, 0));
  }
  dm_world_free(sync);
  dm_world_free(options.world);
  return finish();
}
