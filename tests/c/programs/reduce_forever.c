/* All-reduces of 32 MiB one after another until one fails; then prints the status, the time
 * (CLOCK_MONOTONIC) and the message. tests/test_lost_ranks.py kills ranks of it. */
#include "../check.h"

int main(void)
{
  enum { kCount = 8 << 20 };
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *flat = NULL;
  int32_t ranks = 0;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_world_size(options.world, &ranks));
  const int32_t shape[] = {2, (size_t)ranks / 2};
  const char *names[] = {"dp", "tp"};
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, NULL, NULL, &flat));
  float *data = (float *)calloc(kCount, sizeof(float));
  if (data == NULL) return 1;
  for (long round = 0;; ++round) {
    const dm_status status = dm_all_reduce(flat, NULL, data, data, kCount, DM_FLOAT32, DM_SUM, NULL);
    if (status != DM_STATUS_OK) {
      printf("%s %.6f %s\n", dm_status_name(status), seconds_now(), dm_last_error());
      return 0;
    }
    if (round == 2) {
      printf("running\n");
      fflush(stdout);
    }
  }
}
