/* Ranks over the recorder that join a world, with this or that device. The argument names the case.
 * tests/test_nccl_joining.py runs them and reads what the recorder wrote. */
#include "rank.h"

static void *one_mesh_on_this_thread(void *nothing)
{
  one_mesh();
  return nothing;
}

static void on_a_thread(void)
{
  CHECK(pthread_join(begun(one_mesh_on_this_thread, NULL), NULL) == 0);
}

/* The ranks only join. */
static void no_mesh(void)
{
}

static const rank_case kCases[] = {
    {"chosen", one_mesh}, {"current", one_mesh}, {"named", one_mesh}, {"named alone", one_mesh}, {"options", one_mesh},
    {"options reversed", one_mesh}, {"thread", on_a_thread}, {"beyond", no_mesh}, {"join", no_mesh},
};

/* Chooses the device as the case wants it, before the world is joined. */
static dm_world_options join_for(const char *name)
{
  dm_world_options join = how_to_join();
  if (strcmp(name, "current") == 0 || strcmp(name, "named") == 0) choose_device(7 - atoi(getenv("RANK")));
  if (strcmp(name, "named") == 0 || strcmp(name, "named alone") == 0) {
    join.flags = DM_WORLD_DEVICE;
    join.device = (atoi(getenv("RANK")) + 3) % 8;
  }
  if (strcmp(name, "beyond") == 0) {
    join.flags = DM_WORLD_DEVICE;
    join.device = atoi(getenv("RANK")) == 1 ? 8 : 0;
  }
  if (strncmp(name, "options", 7) == 0) {
    join.world_size = atoi(getenv("WORLD_SIZE"));
    join.rank = atoi(getenv("RANK"));
    /* One rank of "options reversed" says 0, which is what the other case says on all ranks. */
    join.local_rank = strcmp(name, "options reversed") == 0 ? 7 - join.rank : 0;
  }
  return join;
}

int main(int count, char **arguments)
{
  const char *name = case_name(count, arguments);
  const dm_world_options join = join_for(name);
  const double began = seconds_now();
  const dm_status joined = join_world(&join);
  if (joined != DM_STATUS_OK) {
    dm_error_info info = DM_ERROR_INFO_INIT;
    OK(dm_last_error_info(&info));
    printf("joined %s device_error=%d: %s\n", dm_status_name(joined), info.device_error, info.message);
    CHECK(seconds_now() - began < 15);
    return finish();
  }
  learn_world();
  RUN_CASE(name, kCases);
  dm_world_free(world);
  check_library_threads(0);
  return finish();
}
