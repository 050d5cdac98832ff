/* How long it takes from the death of a rank to the next step of the others. The last two ranks of
 * the mesh's replicas kill themselves, one after the other; the arguments are the number of spares
 * and of deaths. Rank 0 prints the milliseconds from each SIGKILL to the end of the first
 * all-reduce of the next mesh, on the rank that was last. */
#include "../recover.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

static double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

int main(int argc, char **argv)
{
  const int32_t spares = argc > 1 ? atoi(argv[1]) : 0, deaths = argc > 2 ? atoi(argv[2]) : 1;
  const char *const names[] = {"dp", "tp"};
  char path[512];
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_recovery recovery = DM_RECOVERY_INIT;
  dm_mesh *mesh = NULL;
  float sum = 0, one = 1;
  begin();
  /* The moment of the death, in memory that all ranks of this host share. */
  snprintf(path, sizeof path, "%s/recover-time-%s", getenv("DM_TMP"), getenv("MASTER_PORT"));
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  CHECK(file >= 0 && ftruncate(file, 4096) == 0);
  volatile double *killed = (volatile double *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  options.world = world;
  const int32_t shape[] = {(world_size - spares) / 2, 2};
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_get_recovery(mesh, &recovery));
  for (int32_t death = 0; death < deaths; ++death) {
    const int32_t victim = world_size - spares - 1 - 2 * death;
    for (int step = 0; recovery.new_coordinate != NULL && step < 200; ++step) {
      OK(dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      OK(dm_all_reduce(mesh, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    }
    if (me == victim) {
      killed[death] = now();
      raise(SIGKILL);
    }
    if (recovery.new_coordinate != NULL)
      while (dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL) == DM_STATUS_OK &&
             dm_all_reduce(mesh, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL) == DM_STATUS_OK) continue;
    dm_mesh *next = NULL;
    dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
    wishes.replace_ms = death < spares ? 30000 : 0; /* until the spare is there */
    const dm_status status = dm_recover(mesh, &wishes, &next, &recovery);
    if (status == DM_STATUS_ABORTED && recovery.new_coordinate == NULL) return end(mesh, NULL);
    if (status != DM_STATUS_OK) REQUIRE(status);
    dm_free(mesh);
    mesh = next;
    if (recovery.new_coordinate == NULL) { /* its replica went; it waits until the job ends */
      GIVES(DM_STATUS_ABORTED, dm_recover(mesh, NULL, &next, NULL));
      return end(mesh, NULL);
    }
    double took = 0, longest = 0;
    OK(dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    took = now() - killed[death];
    OK(dm_all_reduce(mesh, "dp", &took, &longest, 1, DM_FLOAT64, DM_MAX, NULL));
    OK(dm_all_reduce(mesh, "tp", &longest, &took, 1, DM_FLOAT64, DM_MAX, NULL));
    if (me == 0) printf("%.1f ms after death %d: %d lost, %d joined\n", took, death + 1, (int)recovery.num_lost, (int)recovery.num_joined);
  }
  REQUIRE(dm_world_finalize(world, 0));
  unlink(path);
  return end(mesh, NULL);
}
