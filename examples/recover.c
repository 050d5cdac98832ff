/* A job that heals: ranks may be killed at any time. Processes that are started again come back in
 * their places, spares take places, and where nobody is left the job goes on with fewer replicas.
 *
 *     devicemesh run -n 6 --restart rank --max-restarts 3 -- target/examples/recover 1000     (dp=3, tp=2)
 *     devicemesh run -n 7 --failure-grace 1d -- target/examples/recover 1000 1                with one spare
 *
 * The arguments are the number of steps, the number of spares, and how many milliseconds the others
 * wait for a process in the place of a lost one before they go on smaller (0 and 0). Kill a
 * rank with SIGKILL while it runs. Every replica trains on the same weights: rank (i, j) has part
 * j. A step adds the mean of the replicas' gradients, which is 1, so the weight is the number of
 * the step. The program checks that. */
#define _DEFAULT_SOURCE /* for usleep */
#include <devicemesh.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The training's state on this rank, with the weight before the last step: when a rank is lost, the
 * others may be one step apart. */
typedef struct {
  int64_t step;
  double weight, weight_before;
} training;

static int32_t rank;

static _Noreturn void give_up(const char *call)
{
  printf("rank %d: %s: %s\n", rank, call, dm_last_error());
  exit(1);
}

/* The job that this process was to join has ended. Such a process ends with exit code 0: otherwise
 * `devicemesh run` would take it for a rank that fails. */
static int too_late(dm_world *world)
{
  printf("comes too late: %s\n", dm_last_error());
  dm_world_free(world);
  return 0;
}

/* Whether somebody waits to join. A sum along both dimensions, so that all ranks get one answer. */
static dm_status look_at_door(const dm_mesh *mesh, const dm_world *world, int32_t *waiting)
{
  int32_t mine = 0, row = 0;
  dm_status status = dm_waiting(world, &mine);
  if (status == DM_STATUS_OK) status = dm_all_reduce(mesh, "dp", &mine, &row, 1, DM_INT32, DM_SUM, NULL);
  if (status == DM_STATUS_OK) status = dm_all_reduce(mesh, "tp", &row, waiting, 1, DM_INT32, DM_SUM, NULL);
  return status;
}

/* One step: the mean of the gradients along dp. */
static dm_status step(const dm_mesh *mesh, training *state)
{
  double gradient = 1, sum = 0;
  int32_t replicas = 0, parts = 0, one = 1, all = 0;
  dm_status status = dm_size(mesh, "dp", &replicas);
  if (status == DM_STATUS_OK) status = dm_size(mesh, "tp", &parts);
  if (status == DM_STATUS_OK) status = dm_all_reduce(mesh, "dp", &gradient, &sum, 1, DM_FLOAT64, DM_SUM, NULL);
  if (status == DM_STATUS_OK) status = dm_all_reduce(mesh, "tp", &one, &all, 1, DM_INT32, DM_SUM, NULL);
  if (status != DM_STATUS_OK) return status;
  state->weight_before = state->weight;
  state->weight += sum / replicas;
  state->step += 1;
  if (all != parts || state->weight != (double)state->step) {
    printf("rank %d: the weight is %g after step %lld\n", rank, state->weight, (long long)state->step);
    exit(1);
  }
  return DM_STATUS_OK;
}

/* After a recovery: the ranks go back to the first step that all of them have done, and those that
 * have joined get the weights along dp from a rank that has them. */
static dm_status share_state(const dm_mesh *mesh, const dm_recovery *recovery, training *state)
{
  int64_t mine = recovery->has_joined ? INT64_MAX : state->step, first = 0;
  dm_mesh *all = NULL;
  /* The dimension was made before the loss, so it exists, and the call is local. */
  dm_status status = dm_flatten(mesh, "all", NULL, &all);
  if (status == DM_STATUS_OK) status = dm_all_reduce(all, NULL, &mine, &first, 1, DM_INT64, DM_MIN, NULL);
  dm_free(all);
  if (status != DM_STATUS_OK) return status;
  if (!recovery->has_joined && state->step > first) state->weight = state->weight_before;
  state->step = first;
  if (recovery->num_joined == 0) return DM_STATUS_OK;
  return dm_broadcast(mesh, "dp", &state->weight, &state->weight, 1, DM_FLOAT64, recovery->state_root, NULL);
}

int main(int argc, char **argv)
{
  const int64_t steps = argc > 1 ? atoll(argv[1]) : 100;
  const int32_t spares = argc > 2 ? atoi(argv[2]) : 0;
  const int64_t patience = argc > 3 ? atoll(argv[3]) : 0;
  const char *const names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_recovery recovery = DM_RECOVERY_INIT;
  training state = {0, 0, 0};
  dm_mesh *mesh = NULL, *next = NULL, *all = NULL;
  dm_world_info place = DM_WORLD_INFO_INIT;
  int32_t size = 0, waiting = 0;
  const char *join = getenv("DM_JOIN"); /* `devicemesh run` sets it for a process that comes back */
  dm_status status = dm_world_init("cpu", NULL, &options.world);
  if (status == DM_STATUS_INVALID_STATE && join != NULL && strcmp(join, "running") == 0) return too_late(NULL);
  if (status != DM_STATUS_OK) give_up("dm_world_init");
  if (dm_world_rank(options.world, &rank) != DM_STATUS_OK || dm_world_size(options.world, &size) != DM_STATUS_OK) give_up("dm_world_rank");
  const int32_t shape[] = {(size - spares) / 2, 2};
  if (dm_world_get_info(options.world, &place) != DM_STATUS_OK) give_up("dm_world_get_info");
  printf("rank %d is process %d\n", rank, (int)getpid());
  fflush(stdout);
  /* A process that comes back waits here until a recovery lets it in, which may take long. */
  do status = dm_init("cpu", shape, 2, names, &options, &mesh);
  while (status == DM_STATUS_TIMEOUT && place.ticket > 0);
  if (status == DM_STATUS_INVALID_STATE && place.ticket > 0) return too_late(options.world);
  if (status != DM_STATUS_OK) give_up("dm_init");
  if (dm_get_recovery(mesh, &recovery) != DM_STATUS_OK) give_up("dm_get_recovery");
  bool is_in = recovery.new_coordinate != NULL, has_state = is_in && !recovery.has_joined;
  if (is_in && recovery.has_joined) {
    printf("rank %d came back in epoch %lld as process %lld of its rank\n", rank, (long long)recovery.epoch, (long long)place.ticket);
    fflush(stdout);
    status = share_state(mesh, &recovery, &state);
    has_state = status == DM_STATUS_OK;
  } else if (is_in) {
    status = dm_flatten(mesh, "all", NULL, &all);
    dm_free(all);
  }

  for (;;) {
    for (waiting = 0; is_in && status == DM_STATUS_OK && waiting == 0 && state.step < steps;) {
      status = step(mesh, &state);
      if (status == DM_STATUS_OK && state.step % 10 == 0) {
        printf("rank %d is at step %lld\n", rank, (long long)state.step);
        fflush(stdout);
        usleep(2000);
        if (state.step < steps) status = look_at_door(mesh, options.world, &waiting);
      }
    }
    if (is_in && status == DM_STATUS_OK && waiting == 0) status = dm_world_finalize(options.world, 0);
    if (is_in && status == DM_STATUS_OK && waiting == 0) break;

    /* A rank was lost, somebody waits to join, or this rank is not in the mesh and waits. */
    dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
    wishes.dim = "dp";
    wishes.replace_ms = patience;
    wishes.flags = has_state ? DM_RECOVER_HAS_STATE : 0;
    status = dm_recover(mesh, &wishes, &next, &recovery);
    if (status == DM_STATUS_ABORTED && !is_in) {
      printf("rank %d waited until the job had ended\n", rank);
      dm_free(mesh);
      dm_world_free(options.world);
      return 0;
    }
    /* A rank was lost while the job ended: the others had agreed on its end, so all were done. */
    if (status == DM_STATUS_ABORTED && state.step == steps) break;
    if (status == DM_STATUS_INVALID_STATE && waiting > 0) {
      status = DM_STATUS_OK; /* whoever waited is lost by now */
      continue;
    }
    if (status != DM_STATUS_OK) give_up("dm_recover");
    dm_free(mesh);
    mesh = next;
    is_in = recovery.new_coordinate != NULL;
    has_state = has_state && is_in && !recovery.has_joined;
    if (!is_in) {
      printf("rank %d waits: its replica has lost a rank\n", rank);
      fflush(stdout);
      continue;
    }
    printf("rank %d goes on in epoch %lld with %zu lost and %zu joined\n", rank, (long long)recovery.epoch, recovery.num_lost,
           recovery.num_joined);
    fflush(stdout);
    status = share_state(mesh, &recovery, &state);
    has_state = status == DM_STATUS_OK;
  }

  int32_t replicas = 0;
  if (dm_size(mesh, "dp", &replicas) != DM_STATUS_OK) give_up("dm_size");
  printf("rank %d is done with %d replicas\n", rank, replicas);
  dm_free(mesh);
  dm_world_free(options.world);
  return 0;
}
