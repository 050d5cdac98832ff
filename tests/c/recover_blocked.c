/* ranks: 4 */
/* dm_recover ends calls that are blocked with a rank that hangs, in communicators without a rank
 * that recovers: their ranks come to the recovery long before the timeout of the mesh's calls. */
#include "recover.h"

#define SOON 10.0 /* A look takes a tenth of a second. The rest is for busy machines. */

/* A file by which a rank says that its call has ended. */
static const char *told_by(int32_t rank)
{
  static char path[600];
  snprintf(path, sizeof path, "%s-%d", signal_path(), rank);
  return path;
}

/* Hangs until the calls of the ranks 1 and 2 have ended. */
static void hang(void)
{
  struct stat found;
  const double until = seconds_now() + 60;
  for (int32_t rank = 1; rank <= 2; ++rank) {
    while (stat(told_by(rank), &found) != 0 && seconds_now() < until) usleep(2000);
    CHECK(unlink(told_by(rank)) == 0);
  }
}

/* Checks the failure of a call that the recovery of rank 0 has ended. */
static void ended_by_recovery(dm_status status, double began)
{
  const int32_t first = 0;
  CHECK(status == DM_STATUS_PEER_LOST);
  CHECK(strstr(dm_last_error(), "rank 0 has begun recovery 1 of the job") != NULL);
  const dm_error_info info = facts();
  CHECK(same(info.ranks, info.num_ranks, &first, 1) && info.num_lost == 0);
  CHECK(seconds_now() - began < SOON);
  FILE *file = fopen(told_by(me), "w");
  CHECK(file != NULL && fclose(file) == 0);
}

/* A collective along dp, whose other rank hangs. */
static void blocked_in_collective(const dm_mesh *mesh, double began)
{
  int32_t sum = 0;
  ended_by_recovery(dm_all_reduce(mesh, "dp", &me, &sum, 1, DM_INT32, DM_SUM, NULL), began);
}

/* Messages of a group along tp, whose other rank hangs. */
static void blocked_in_group(const dm_mesh *mesh, double began)
{
  int32_t got = 0;
  OK(dm_group_start(mesh));
  OK(dm_send(mesh, "tp", &me, 1, DM_INT32, 1, NULL));
  OK(dm_recv(mesh, "tp", &got, 1, DM_INT32, 1, NULL));
  ended_by_recovery(dm_group_end(mesh), began);
}

int main(void)
{
  const int32_t all[] = {0, 1, 2, 3}, shape[] = {2, 2};
  const char *const names[] = {"dp", "tp"};
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  dm_recovery recovery;
  dm_mesh *mesh = NULL;
  begin();
  init.world = world;
  init.timeout_ms = 600000;
  REQUIRE(dm_init("cpu", shape, 2, names, &init, &mesh));
  sums(mesh);
  meet_world();
  const double began = seconds_now();
  if (me == 0) {
    usleep(500000); /* The others most likely are in their calls by then. If not, the outcome is the same. */
    OK(dm_abort(mesh));
  }
  if (me == 1) blocked_in_collective(mesh, began);
  if (me == 2) blocked_in_group(mesh, began);
  if (me == 3) hang();
  dm_mesh *next = recovered(mesh, NULL, &recovery);
  CHECK(recovery.epoch == 1 && recovery.num_lost == 0);
  holds(next, all, 4);
  REQUIRE(dm_world_finalize(world, 0));
  return end(mesh, next);
}
