/* How long it takes from the death of a rank to the next step of all ranks, with a new process in
 * its place (devicemesh run --restart rank). The last ranks kill themselves, one after the other;
 * the argument is the number of deaths. Rank 0 prints the milliseconds from each SIGKILL to the
 * end of the first all-reduce of the next mesh, on the rank that was last, and of these the
 * milliseconds until the new process was in main, and until it asked for its place (dm_init). */
#include "../recover.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

typedef struct {
  volatile double killed, began, asked;
} moments;

static double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

int main(int argc, char **argv)
{
  const double began = now();
  const int32_t deaths = argc > 1 ? atoi(argv[1]) : 1;
  const char *const names[] = {"dp", "tp"};
  char path[512];
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
  dm_recovery recovery = DM_RECOVERY_INIT;
  dm_mesh *mesh = NULL;
  float sum = 0, one = 1;
  begin();
  /* The moments, in memory that all ranks of this host share. */
  snprintf(path, sizeof path, "%s/rejoin-time-%s", getenv("DM_TMP"), getenv("MASTER_PORT"));
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  CHECK(file >= 0 && ftruncate(file, 4096) == 0 && deaths < world_size);
  moments *of = (moments *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  options.world = world;
  wishes.replace_ms = 60000;
  const double asked = now();
  const int32_t shape[] = {world_size / 2, 2};
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_get_recovery(mesh, &recovery));
  for (int32_t death = recovery.has_joined ? (int32_t)recovery.epoch - 1 : 0; death < deaths; ++death) {
    if (recovery.has_joined && recovery.epoch == death + 1) {
      of[death].began = began;
      of[death].asked = asked;
      wishes.flags = DM_RECOVER_HAS_STATE; /* there is nothing to get */
    } else {
      for (int step = 0; step < 200; ++step) {
        OK(dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
        OK(dm_all_reduce(mesh, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      }
      if (me == world_size - 1 - death) {
        of[death].killed = now();
        raise(SIGKILL);
      }
      while (dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL) == DM_STATUS_OK &&
             dm_all_reduce(mesh, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL) == DM_STATUS_OK) continue;
      dm_mesh *next = NULL;
      REQUIRE(dm_recover(mesh, &wishes, &next, &recovery));
      dm_free(mesh);
      mesh = next;
    }
    double took = 0, longest = 0;
    int32_t ranks = 0;
    OK(dm_size(mesh, NULL, &ranks));
    OK(dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    took = now() - of[death].killed;
    OK(dm_all_reduce(mesh, "dp", &took, &longest, 1, DM_FLOAT64, DM_MAX, NULL));
    OK(dm_all_reduce(mesh, "tp", &longest, &took, 1, DM_FLOAT64, DM_MAX, NULL));
    if (me == 0)
      printf("%.1f ms after death %d with %d of %d ranks: the process began after %.1f ms, and asked after %.1f ms\n", took, death + 1,
             (int)ranks, world_size, of[death].began - of[death].killed, of[death].asked - of[death].killed);
  }
  REQUIRE(dm_world_finalize(world, 0));
  unlink(path);
  return end(mesh, NULL);
}
