/* A job that survives the loss of ranks. It reads no message: which ranks are lost, and whether to
 * go on, it learns from statuses and structs alone.
 *
 *     devicemesh run -n 8 --failure-grace 60 -- target/examples/survive 1000
 *
 * Kill some of its processes meanwhile (kill -9). The mesh is (dp, tp=2). A rank that is lost takes
 * its replica with it, so the job goes on with fewer replicas. */
#define _DEFAULT_SOURCE /* for nanosleep */
#include <devicemesh.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MOST = 64 };
static int32_t me;

/* An error that this program does not survive. The message is for people. */
static void give_up(const char *what)
{
  fprintf(stderr, "rank %d: %s: %s\n", me, what, dm_last_error());
  exit(1);
}

/* One step: each rank adds its world rank over all ranks of the mesh, and checks the sum. */
static dm_status train(const dm_mesh *mesh)
{
  int32_t along_dp = 0, sum = 0, expected = 0;
  dm_status status = dm_all_reduce(mesh, "dp", &me, &along_dp, 1, DM_INT32, DM_SUM, NULL);
  if (status == DM_STATUS_OK) status = dm_all_reduce(mesh, "tp", &along_dp, &sum, 1, DM_INT32, DM_SUM, NULL);
  if (status != DM_STATUS_OK) return status;
  int32_t ranks[MOST];
  size_t count = 0;
  if (dm_ranks(mesh, ranks, MOST, &count) != DM_STATUS_OK) give_up("dm_ranks");
  for (size_t i = 0; i < count; ++i) expected += ranks[i];
  if (sum != expected) give_up("a wrong sum");
  nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); /* the rest of the work */
  return DM_STATUS_OK;
}

/* A loss may reach some ranks one step later than others. All go on from the earliest step. */
static dm_status meet_at(const dm_mesh *mesh, int32_t *step)
{
  int32_t along_dp = 0;
  dm_status status = dm_all_reduce(mesh, "dp", step, &along_dp, 1, DM_INT32, DM_MIN, NULL);
  if (status == DM_STATUS_OK) status = dm_all_reduce(mesh, "tp", &along_dp, step, 1, DM_INT32, DM_MIN, NULL);
  return status;
}

/* The mesh without the replicas that hold lost ranks. All ranks that are left call this. */
static dm_mesh *without_the_lost(dm_mesh *mesh)
{
  dm_mesh *smaller = NULL;
  dm_error_info info = DM_ERROR_INFO_INIT;
  if (dm_last_error_info(&info) != DM_STATUS_OK) give_up("dm_last_error_info");
  printf("rank %d has heard of %zu lost ranks\n", me, info.num_lost); /* 0: only a survivor that left was seen */
  fflush(stdout);
  for (int tries = 1;; ++tries) { /* PEER_LOST: a further rank is lost, or the rank that served the store */
    const dm_status status = dm_shrink(mesh, "dp", NULL, 0, NULL, &smaller);
    if (status == DM_STATUS_OK) break;
    if (status != DM_STATUS_PEER_LOST || tries == 5) give_up("dm_shrink");
  }
  int32_t lost[MOST];
  size_t count = 0;
  if (dm_lost_ranks(mesh, lost, MOST, &count) != DM_STATUS_OK) give_up("dm_lost_ranks");
  printf("rank %d goes on without", me);
  for (size_t i = 0; i < count; ++i) printf(" %d", lost[i]);
  printf("\n");
  fflush(stdout);
  dm_free(mesh);
  return smaller;
}

int main(int argc, char **argv)
{
  const int32_t steps = argc > 1 ? atoi(argv[1]) : 200;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t size = 0;
  if (dm_world_init("cpu", NULL, &world) != DM_STATUS_OK) give_up("dm_world_init");
  if (dm_world_rank(world, &me) != DM_STATUS_OK || dm_world_size(world, &size) != DM_STATUS_OK) give_up("the world");
  options.world = world;
  if (size % 2 != 0 || size > MOST) {
    fprintf(stderr, "survive: start an even number of ranks, %d at most; these are %d\n", MOST, size);
    return 1;
  }
  const int32_t shape[] = {size / 2, 2};
  const char *names[] = {"dp", "tp"};
  if (dm_init("cpu", shape, 2, names, &options, &mesh) != DM_STATUS_OK) give_up("dm_init");

  int is_met = 1;
  for (int32_t step = 0; step < steps;) {
    const dm_status status = is_met ? train(mesh) : meet_at(mesh, &step);
    if (status == DM_STATUS_OK) {
      step += is_met;
      is_met = 1;
      if (step == 10) {
        printf("rank %d is at step 10\n", me);
        fflush(stdout);
      }
      continue;
    }
    if (status != DM_STATUS_PEER_LOST) give_up("a step");
    mesh = without_the_lost(mesh);
    is_met = 0;
    int32_t replica = 0;
    if (dm_get_local_rank(mesh, "dp", &replica) == DM_STATUS_NOT_MEMBER) { /* it went with a lost rank */
      printf("rank %d is out\n", me);
      dm_free(mesh);
      dm_world_free(world);
      return 0;
    }
  }
  int32_t replicas = 0;
  if (dm_size(mesh, "dp", &replicas) != DM_STATUS_OK) give_up("dm_size");
  if (dm_finalize(mesh, NULL) != DM_STATUS_OK) give_up("dm_finalize");
  printf("rank %d is done with %d replicas\n", me, replicas);
  dm_free(mesh);
  dm_world_free(world);
  return 0;
}
