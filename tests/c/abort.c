/* ranks: 3 */
/* dm_abort from another thread wakes a blocked call here, and the peers that wait for this rank
 * learn of it. */
#include "check.h"

#include <pthread.h>

static dm_mesh *mesh;
static int32_t rank;
static dm_status blocked_status;
static double woken;

static void *blocked(void *unused)
{
  (void)unused;
  float one = 1, sum = 0;
  blocked_status = dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
  woken = seconds_now();
  return NULL;
}

int main(void)
{
  const int32_t shape[] = {3};
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &mesh));
  rank = rank_of(mesh);
  float one = 1, sum = 0;
  OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));

  if (rank == 0) {
    /* Ranks 0 and 1 wait for rank 2, which never comes; then rank 0 is aborted. */
    pthread_t thread;
    struct timespec pause = {0, 300000000};
    if (pthread_create(&thread, NULL, blocked, NULL) != 0) exit(1);
    nanosleep(&pause, NULL);
    const double began = seconds_now();
    OK(dm_abort(mesh));
    CHECK(seconds_now() - began < 2);
    pthread_join(thread, NULL);
    CHECK(blocked_status == DM_STATUS_ABORTED && woken - began < 2);
    OK(dm_abort(mesh)); /* a second abort does nothing */
  } else if (rank == 1) {
    const double began = seconds_now();
    FAILS(DM_STATUS_PEER_LOST, "rank 0", dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(seconds_now() - began < 60); /* the deadline would be ten minutes */
    GIVES(DM_STATUS_PEER_LOST, dm_check(mesh, NULL));
    OK(dm_abort(mesh));
  } else {
    OK(dm_world_barrier(options.world, 0)); /* the world is no part of the mesh, so its barrier still works */
    COMES_TO_GIVE(DM_STATUS_PEER_LOST, dm_check(mesh, NULL));
    OK(dm_abort(mesh));
  }
  if (rank != 2) OK(dm_world_barrier(options.world, 0));
  ncclComm_t comm = NULL;
  dm_mesh *view = NULL;
  FAILS(DM_STATUS_ABORTED, "dm_abort", dm_get_comm(mesh, NULL, &comm));
  GIVES(DM_STATUS_ABORTED, dm_flatten(mesh, "other", NULL, &view));
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  GIVES(DM_STATUS_ABORTED, dm_group_start(mesh));
  int32_t size = 0;
  OK(dm_size(mesh, NULL, &size)); /* a question that needs no communicator still has an answer */

  /* A new mesh over the same ranks has communicators of its own, also while one rank has not
   * noticed that the earlier mesh has ended. */
  dm_mesh *fresh = NULL, *first = NULL;
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &first));
  if (rank == 1) OK(dm_abort(first));
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &fresh));
  if (rank != 1) OK(dm_abort(first));
  dm_free(first);
  OK(dm_all_reduce(fresh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 3);
  OK(dm_finalize(fresh, NULL));
  dm_free(fresh);

  /* A rank that waits in a collective call for an aborted rank learns of the abort long before the
   * deadline (ten minutes here). */
  dm_dim_options apart = DM_DIM_OPTIONS_INIT;
  dm_mesh *beside = NULL;
  apart.flags = DM_DIM_OWN_COMM;
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &fresh));
  options.dim_options = &apart;
  options.num_dim_options = 1;
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &beside));
  if (rank == 0) {
    OK(dm_abort(fresh));
  } else {
    const double began = seconds_now();
    FAILS(DM_STATUS_PEER_LOST, "rank 0", dm_finalize(fresh, NULL));
    CHECK(seconds_now() - began < 60);
    OK(dm_abort(fresh));
  }
  OK(dm_all_reduce(beside, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL)); /* rank 0 waits here for the others */
  /* The others missed this rank in their call, whose number this rank passes over. */
  OK(dm_world_barrier(options.world, 0));
  OK(dm_finalize(beside, NULL));
  dm_free(beside);
  dm_free(fresh);
  dm_free(mesh);
  dm_world_free(options.world);
  return finish();
}
