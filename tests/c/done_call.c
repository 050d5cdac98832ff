/* ranks: 2 */
/* one host */
/* An error of a mesh that another rank has aborted does not say that this rank is in a collective
 * that is done. */
#include "check.h"

#include <unistd.h>

int main(void)
{
  const int32_t shape[] = {2}, me = atoi(getenv("RANK"));
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  float one = 1, sum = 0;
  REQUIRE(dm_init("cpu", shape, 1, NULL, NULL, &mesh));
  REQUIRE(dm_get_world(mesh, &world));
  for (int step = 0; step < 3; ++step) OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_world_barrier(world, 0));
  if (me == 0) {
    OK(dm_abort(mesh));
  } else {
    const double until = seconds_now() + 60;
    while (dm_check(mesh, NULL) == DM_STATUS_OK && seconds_now() < until) usleep(1000);
    FAILS(DM_STATUS_PEER_LOST, "aborted", dm_stream_wait(mesh, NULL, NULL, 1000));
    CHECK(strstr(dm_last_error(), "this rank is in") == NULL);
  }
  OK(dm_world_barrier(world, 0));
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
