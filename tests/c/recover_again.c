/* ranks: 4 */
/* A job recovers again and again: what a rank holds does not grow. */
#include "recover.h"

#include <dirent.h>

static int descriptors(void)
{
  int count = 0;
  DIR *folder = opendir("/proc/self/fd");
  if (folder == NULL) return -1;
  while (readdir(folder) != NULL) ++count;
  closedir(folder);
  return count;
}

int main(void)
{
  enum { kTimes = 60, kFirst = 20 };
  const int32_t shape[] = {2, 2};
  const char *const names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_recovery recovery;
  dm_mesh *mesh = NULL, *view = NULL;
  int before = 0;
  begin();
  options.world = world;
  options.timeout_ms = 45000;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &view));
  REQUIRE(dm_register(view, "job"));
  dm_free(view);
  for (int time = 0; time < kTimes; ++time) {
    if (me == time % 4) OK(dm_abort(mesh));
    else notice(mesh);
    dm_mesh *next = recovered(mesh, NULL, &recovery);
    CHECK(recovery.epoch == time + 1 && recovery.num_lost == 0);
    dm_free(mesh);
    mesh = next;
    sums(mesh);
    view = named_view("job");
    sum_along(view, "all");
    dm_free(view);
    together(mesh);
    if (time == kFirst) before = descriptors();
  }
  CHECK(descriptors() <= before + 3);
  OK(dm_unregister("job"));
  REQUIRE(dm_world_finalize(world, 0));
  return end(mesh, NULL);
}
