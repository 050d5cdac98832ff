/* Ranks over the recorder that lose one of them and go on by dm_recover. The argument names the
 * case. tests/test_nccl_recover.py runs them and reads what the recorder wrote. */
#include "rank.h"

#include <unistd.h>

static const char *const kNames[] = {"dp", "tp"};

/* Goes on without the lost ranks. Nothing of the mesh before is left. */
static dm_mesh *gone_on(dm_mesh *mesh, int64_t replace_ms, dm_recovery *recovery)
{
  const dm_recovery init = DM_RECOVERY_INIT;
  dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
  dm_mesh *next = NULL;
  *recovery = init;
  wishes.replace_ms = replace_ms;
  REQUIRE(dm_recover(mesh, &wishes, &next, recovery));
  dm_free(mesh);
  return next;
}

/* (dp=4, tp=2) loses rank 7. Rank 6 waits until the job ends. The others have the options of their
 * dimensions, and the dimension that was flattened. Then nobody is lost, and all make theirs
 * anew. */
static void lose(void)
{
  const int32_t shape[] = {4, 2};
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dm_mesh *flat = NULL, *none = NULL;
  dm_recovery recovery;
  dims[0].comm_name = "replicas";
  options.dim_options = dims;
  options.num_dim_options = 2;
  dm_mesh *mesh = made(shape, 2, kNames);
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  OK(dm_world_barrier(world, 0));
  dm_free(flat);
  note("lose");
  if (rank == 7) _exit(0);
  GIVES(DM_STATUS_PEER_LOST, dm_world_barrier(world, 0));
  mesh = gone_on(mesh, 0, &recovery);
  note("gone on");
  CHECK(recovery.num_lost == 1 && recovery.lost_ranks[0] == 7);
  if (rank == 6) {
    CHECK(living() == 0);
    GIVES(DM_STATUS_ABORTED, dm_recover(mesh, NULL, &none, NULL));
    dm_free(mesh);
    return;
  }
  CHECK(sum_along(mesh, "dp") == 3 && sum_along(mesh, "tp") == 2 && sum_along(mesh, "all") == 6);
  /* All ranks have their sums before one of them ends the mesh. */
  OK(dm_world_barrier(world, 0));
  if (rank == 2) OK(dm_abort(mesh));
  else GIVES(DM_STATUS_PEER_LOST, dm_flatten(mesh, "gone", NULL, &none));
  mesh = gone_on(mesh, 0, &recovery);
  note("anew");
  CHECK(recovery.num_lost == 0 && sum_along(mesh, "dp") == 3 && sum_along(mesh, "all") == 6);
  OK(dm_world_finalize(world, 0));
  CHECK(living() == 0);
  dm_free(mesh);
}

/* (dp=2, tp=2) over ranks 0 to 3 loses rank 0. Rank 4 waits, and takes its place. The mesh is
   lazy. */
static void spare(void)
{
  const int32_t shape[] = {2, 2};
  dm_recovery recovery;
  options.flags = DM_INIT_LAZY;
  dm_mesh *mesh = made(shape, 2, kNames), *none = NULL;
  if (rank < 4) CHECK(sum_along(mesh, "dp") == 2 && sum_along(mesh, "tp") == 2);
  if (rank < 4) OK(dm_barrier(mesh, "dp", 0));
  if (rank < 4) OK(dm_barrier(mesh, "tp", 0));
  if (rank == 0) _exit(0);
  if (rank < 4) GIVES(DM_STATUS_PEER_LOST, dm_flatten(mesh, "gone", NULL, &none));
  mesh = gone_on(mesh, 30000, &recovery);
  CHECK(recovery.num_joined == 1 && recovery.joined_ranks[0] == 4 && recovery.has_joined == (rank == 4));
  CHECK(recovery.new_coordinate[0] == (rank == 4 ? 0 : rank / 2) && recovery.state_root == (rank % 2 ? 0 : 1));
  CHECK(living() == 0);
  CHECK(sum_along(mesh, "dp") == 2 && sum_along(mesh, "tp") == 2);
  OK(dm_world_finalize(world, 0));
  CHECK(living() == 0);
  dm_free(mesh);
}

/* (dp=2, tp=2) grows to (dp=3, tp=2) when the ranks 4 and 5 come, which have joined a world of 6
 * ranks. The file that RECORDER_GROWS names tells them that the job runs. */
static void grow(void)
{
  const bool is_new = rank >= 4;
  const int32_t shape[] = {is_new ? 3 : 2, 2};
  dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
  dm_recovery recovery = DM_RECOVERY_INIT;
  dm_mesh *mesh = made(shape, 2, kNames), *next = NULL;
  if (!is_new) {
    CHECK(sum_along(mesh, "dp") == 2 && sum_along(mesh, "tp") == 2);
    OK(dm_world_barrier(world, 0));
    if (rank == 0) {
      FILE *file = fopen(getenv("RECORDER_GROWS"), "w");
      CHECK(file != NULL && fclose(file) == 0);
    }
    const double until = seconds_now() + 30;
    for (int32_t waiting = 0; waiting < 2 && seconds_now() < until; usleep(2000)) OK(dm_waiting(world, &waiting));
    OK(dm_world_barrier(world, 0));
    note("grow");
    wishes.flags = DM_RECOVER_GROW;
    REQUIRE(dm_recover(mesh, &wishes, &next, NULL));
    dm_free(mesh);
    mesh = next;
  }
  note("grown");
  REQUIRE(dm_get_recovery(mesh, &recovery));
  CHECK(recovery.epoch == 1 && recovery.num_lost == 0 && recovery.num_joined == 2 && recovery.has_joined == is_new);
  CHECK(recovery.new_coordinate[0] == rank / 2 && recovery.new_coordinate[1] == rank % 2);
  CHECK(sum_along(mesh, "dp") == 3 && sum_along(mesh, "tp") == 2);
  OK(dm_world_finalize(world, 0));
  CHECK(living() == 0);
  dm_free(mesh);
}

/* (dp=2, tp=2) loses rank 3, and a new process takes the place of rank 3. The first communicator
 * of the new process fails, so the recovery fails on all ranks. The second dm_init of the new
 * process takes part in the next recovery. */
static void come_again(void)
{
  const bool is_new = getenv("DM_JOIN") != NULL;
  const int32_t shape[] = {2, 2};
  dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
  dm_recovery recovery = DM_RECOVERY_INIT;
  dm_mesh *mesh = NULL, *next = NULL;
  if (is_new) {
    FAILS(DM_STATUS_CCL, "ncclCommInitRankConfig", dm_init("cuda", shape, 2, kNames, &options, &mesh));
    CHECK(mesh == NULL);
    mesh = made(shape, 2, kNames);
  } else {
    mesh = made(shape, 2, kNames);
    CHECK(sum_along(mesh, "dp") == 2 && sum_along(mesh, "tp") == 2);
    OK(dm_world_barrier(world, 0));
    if (rank == 3) _exit(finish());
    wishes.replace_ms = 30000;
    FAILS(DM_STATUS_CCL, "rank 3", dm_recover(mesh, &wishes, &next, NULL));
    CHECK(next == NULL && living() == 0);
    mesh = gone_on(mesh, 30000, &recovery);
  }
  REQUIRE(dm_get_recovery(mesh, &recovery));
  CHECK(recovery.epoch == 2 && recovery.has_joined == is_new && recovery.num_joined == 1);
  CHECK(recovery.new_coordinate[0] == rank / 2 && recovery.new_coordinate[1] == rank % 2);
  CHECK(sum_along(mesh, "dp") == 2 && sum_along(mesh, "tp") == 2);
  OK(dm_world_finalize(world, 0));
  CHECK(living() == 0);
  dm_free(mesh);
}

static const rank_case kCases[] = {{"lose", lose}, {"spare", spare}, {"grow", grow}, {"come again", come_again}};

int main(int count, char **arguments)
{
  RUN_IN_WORLD(case_name(count, arguments), kCases);
  check_library_threads(0);
  return finish();
}
