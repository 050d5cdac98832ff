/* A job of (dp, tp=2) that grows along dp when processes beyond its ranks come
 * (tests/test_grow.py).
 *
 *     grow FOLDER MAX_SIZE WORDS
 *
 * The ranks make steps until the file FOLDER/stop is there. WORDS has some of: "fixed" (the mesh
 * must not grow), "deaf" (only a loss begins a recovery; a process that waits does not), "old" (a
 * process asks for the mesh of the start, which it is not in), "short" (a process does not wait
 * long at the door), "brief" (a recovery may take 3 s, and is tried again). MAX_SIZE 0: no limit.
 * A rank of the mesh says how many processes it sees at the door. */
#include <devicemesh.h>

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int32_t rank;

static void say(const char *format, ...)
{
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  printf("rank %d %s\n", rank, line);
  fflush(stdout);
}

static _Noreturn void give_up(const char *call, dm_status status)
{
  say("%s: %s: %s", call, dm_status_name(status), dm_last_error());
  exit(1);
}

static void need(const char *call, dm_status status)
{
  if (status != DM_STATUS_OK) give_up(call, status);
}

static void list(char *text, const int32_t *ranks, size_t count)
{
  strcpy(text, count == 0 ? " nobody" : "");
  for (size_t index = 0; index < count; ++index) sprintf(text + strlen(text), " %d", ranks[index]);
}

/* Says what the mesh is, and who has come and gone. */
static void tell(const dm_mesh *mesh, const dm_world *world, const dm_recovery *recovery)
{
  char lost[200], joined[200], all[200];
  int32_t ranks[32], world_size = 0, replicas = 0;
  size_t count = 0;
  need("dm_ranks", dm_ranks(mesh, ranks, 32, &count));
  need("dm_world_size", dm_world_size(world, &world_size));
  need("dm_size", dm_size(mesh, "dp", &replicas));
  list(all, ranks, count);
  list(lost, recovery->lost_ranks, recovery->num_lost);
  list(joined, recovery->joined_ranks, recovery->num_joined);
  if (recovery->new_coordinate == NULL) {
    say("waits outside the mesh of epoch %lld", (long long)recovery->epoch);
    return;
  }
  say("is at (%d, %d) in epoch %lld: dp=%d, world=%d, ranks%s, lost%s, joined%s", recovery->new_coordinate[0],
      recovery->new_coordinate[1], (long long)recovery->epoch, replicas, world_size, all, lost, joined);
}

/* Checks the communicators of every dimension against the layout, and gives the joined ranks the
 * number of steps. */
static dm_status share(const dm_mesh *mesh, const dm_recovery *recovery, int64_t *steps)
{
  static const char *const dims[] = {"dp", "tp", "all"};
  dm_status status = DM_STATUS_OK;
  dm_mesh *flat = NULL;
  status = dm_flatten(mesh, "all", NULL, &flat);
  if (status != DM_STATUS_OK) return status;
  for (int index = 0; index < 3 && status == DM_STATUS_OK; ++index) {
    const dm_mesh *view = index == 2 ? flat : mesh;
    int32_t group[32], gathered[32];
    size_t count = 0;
    status = dm_group_ranks(view, dims[index], group, 32, &count);
    if (status == DM_STATUS_OK) status = dm_all_gather(view, dims[index], &rank, gathered, 1, DM_INT32, NULL);
    if (status == DM_STATUS_OK && memcmp(group, gathered, count * sizeof *group) != 0) {
      say("has another group along %s", dims[index]);
      exit(1);
    }
  }
  int64_t mine = recovery->has_joined ? INT64_MAX : *steps;
  if (status == DM_STATUS_OK) status = dm_all_reduce(flat, NULL, &mine, steps, 1, DM_INT64, DM_MIN, NULL);
  dm_free(flat);
  if (status != DM_STATUS_OK || recovery->num_joined == 0) return status;
  return dm_broadcast(mesh, "dp", steps, steps, 1, DM_INT64, recovery->state_root, NULL);
}

int main(int argc, char **argv)
{
  const char *const words = argc > 3 ? argv[3] : "", *const names[] = {"dp", "tp"};
  const int32_t max_size = argc > 2 ? atoi(argv[2]) : 0;
  char stop[512];
  snprintf(stop, sizeof stop, "%s/stop", argc > 1 ? argv[1] : ".");
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_recovery recovery = DM_RECOVERY_INIT;
  dm_mesh *mesh = NULL, *next = NULL;
  int32_t size = 0, told = 0;
  int64_t steps = 0;
  setvbuf(stdout, NULL, _IOFBF, 4096);
  const char *named = getenv("RANK");
  rank = named == NULL ? -1 : atoi(named);
  need("dm_world_init", dm_world_init("cpu", NULL, &options.world));
  need("dm_world_size", dm_world_size(options.world, &size));
  const int32_t shape[] = {strstr(words, "old") ? 2 : size / 2, 2};
  if (strstr(words, "short")) options.timeout_ms = 1500;
  say("knocks");
  dm_status status = dm_init("cpu", shape, 2, names, &options, &mesh);
  for (; status == DM_STATUS_TIMEOUT; status = dm_init("cpu", shape, 2, names, &options, &mesh)) say("waits on: %s", dm_last_error());
  need("dm_init", status);
  need("dm_get_recovery", dm_get_recovery(mesh, &recovery));
  bool is_in = recovery.new_coordinate != NULL, has_state = is_in && !recovery.has_joined;
  tell(mesh, options.world, &recovery);
  if (is_in) {
    status = share(mesh, &recovery, &steps);
    has_state = status == DM_STATUS_OK;
    if (has_state) say("is ready in epoch %lld", (long long)recovery.epoch);
  }

  for (;;) {
    int32_t wanted[2] = {0, 0}, sums[2] = {0, 0};
    while (is_in && status == DM_STATUS_OK && sums[0] == 0 && sums[1] == 0) {
      dm_mesh *flat = NULL;
      int32_t here = told;
      usleep(2000);
      wanted[1] = access(stop, F_OK) == 0;
      status = dm_waiting(options.world, &here);
      if (here != told) say("sees %d at the door", told = here);
      if (!strstr(words, "deaf")) wanted[0] = here;
      if (status == DM_STATUS_OK) status = dm_flatten(mesh, "all", NULL, &flat);
      if (status == DM_STATUS_OK) status = dm_all_reduce(flat, NULL, wanted, sums, 2, DM_INT32, DM_SUM, NULL);
      dm_free(flat);
      steps += status == DM_STATUS_OK;
    }
    if (is_in && status == DM_STATUS_OK && sums[0] == 0) {
      need("dm_world_finalize", dm_world_finalize(options.world, 0));
      break;
    }
    dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
    wishes.flags = (has_state ? DM_RECOVER_HAS_STATE : 0) | (strstr(words, "fixed") ? 0 : DM_RECOVER_GROW);
    wishes.max_size = max_size;
    if (strstr(words, "brief")) wishes.timeout_ms = 3000;
    while ((status = dm_recover(mesh, &wishes, &next, &recovery)) == DM_STATUS_TIMEOUT) say("tries again: %s", dm_last_error());
    if (status == DM_STATUS_ABORTED && !is_in) {
      say("waited until the job had ended");
      break;
    }
    need("dm_recover", status);
    dm_free(mesh);
    mesh = next;
    is_in = recovery.new_coordinate != NULL;
    tell(mesh, options.world, &recovery);
    if (is_in) status = share(mesh, &recovery, &steps);
    has_state = is_in && status == DM_STATUS_OK;
    if (has_state) say("is ready in epoch %lld", (long long)recovery.epoch);
  }
  say("is done in epoch %lld after %s steps", (long long)recovery.epoch, steps > 0 ? "some" : "no");
  dm_free(mesh);
  dm_world_free(options.world);
  return 0;
}
