/* A program of 0.1, compiled against 0.1's header. With another release's library it ends before
 * main, or, where that library has the file name of 0.1's, gets the error of each call that can be
 * its first. The calls are those that 0.2 would read wrongly: a shape of size_t, nine arguments. */
#include <devicemesh.h>

#include <stdio.h>

static void say(const char *call, dm_status status)
{
  printf("%s: %s: %s\n", call, dm_status_name(status), dm_last_error());
}

int main(void)
{
  const size_t shape[] = {1};
  const char *name = "dp", *location = "host0";
  const ncclComm_t comm = (ncclComm_t)&name;
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  int32_t rank = -1;
  size_t len = 0;

  printf("main: version %u\n", dm_version());
  say("dm_world_init", dm_world_init("cpu", &options, &world));
  say("dm_init", dm_init("cpu", shape, 1, &name, NULL, &mesh));
  say("dm_from_comms", dm_from_comms("cpu", shape, 1, &name, &comm, NULL, &mesh));
  say("dm_deserialize", dm_deserialize("{}", NULL, &mesh));
  say("dm_plan_ranks", dm_plan_ranks(&location, 1, shape, 1, NULL, &rank, NULL, 0, &len));
  return world || mesh || rank != -1;
}
