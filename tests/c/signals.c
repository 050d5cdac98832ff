/* ranks: 4 */
/* A runtime interrupts its threads all the time, as Go does with SIGURG and profilers with
 * SIGPROF. Every system call that a signal can interrupt is interrupted many times. No call of the
 * library may fail, end early or give a wrong result for that reason. The handler is installed
 * without SA_RESTART, which is the harder case. */
#include "check.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

enum { kRanks = 4, kElements = 300000 };

/* The signals that the program's only thread has handled. The library's threads block the
   signal. */
static int interruptions;

static void interrupted(int number)
{
  (void)number;
  __atomic_fetch_add(&interruptions, 1, __ATOMIC_RELAXED);
}

static void interrupt_every(suseconds_t microseconds)
{
  struct itimerval every;
  memset(&every, 0, sizeof every);
  every.it_value.tv_usec = every.it_interval.tv_usec = microseconds;
  setitimer(ITIMER_REAL, &every, NULL);
}

static float values[kElements];

/* The folder where the ranks meet in that round. */
static void folder_of(char *folder, size_t capacity, int round)
{
  snprintf(folder, capacity, "%s/signals-%d-%d", getenv("DM_TMP"), (int)getppid(), round);
}

/* A whole job in a world of its own: it joins, makes a mesh, reduces, waits and ends. */
static void one_job(const dm_world *world, int round)
{
  const int32_t shape[] = {2, 2};
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *all = NULL;
  options.world = (dm_world *)world;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &all));
  for (int again = 0; again < 10; ++again) {
    int wrong = 0;
    for (int at = 0; at < kElements; ++at) values[at] = (float)(again + 1);
    OK(dm_all_reduce(all, NULL, values, values, kElements, DM_FLOAT32, DM_SUM, NULL));
    for (int at = 0; at < kElements; ++at) wrong += values[at] != (float)(kRanks * (again + 1));
    CHECK(wrong == 0);
  }
  /* The ranks wait long enough in the store and in a futex to be interrupted there. */
  if (rank_of(mesh) == round % kRanks) usleep(50000);
  OK(dm_world_barrier(world, 0));
  if (rank_of(mesh) == (round + 1) % kRanks) usleep(50000);
  OK(dm_all_reduce(all, NULL, values, values, 1, DM_FLOAT32, DM_MAX, NULL));
  OK(dm_finalize(mesh, NULL));
  dm_free(all);
  dm_free(mesh);
}

int main(void)
{
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = interrupted;
  sigaction(SIGALRM, &action, NULL);
  interrupt_every(500);
  for (int round = 0; round < 7; ++round) {
    /* The ranks meet in the tool's store, and in every second round in a folder. */
    char folder[1000], method[1100], command[1200];
    dm_world_options options = DM_WORLD_OPTIONS_INIT;
    dm_world *world = NULL;
    if (round % 2 == 1) {
      folder_of(folder, sizeof folder, round);
      snprintf(method, sizeof method, "file://%s", folder);
      options.world_size = kRanks;
      options.rank = atoi(getenv("RANK"));
      options.init_method = method;
    }
    REQUIRE(dm_world_init("cpu", &options, &world));
    one_job(world, round);
    if (round > 0 && round % 2 == 0 && atoi(getenv("RANK")) == 0) {
      /* All ranks have left the folder of the last round. */
      folder_of(folder, sizeof folder, round - 1);
      snprintf(command, sizeof command, "rm -rf '%s'.devicemesh", folder);
      CHECK(system(command) == 0);
    }
    dm_world_free(world);
  }
  interrupt_every(0);
  CHECK(interruptions > 100);
  return finish();
}
