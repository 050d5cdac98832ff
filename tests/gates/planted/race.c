/* Planted: two threads have the library write their rank to one place, and only the start of each
 * round orders them. */
#include <devicemesh.h>
#include <pthread.h>
#include <stdio.h>

enum { kRounds = 200 };

static dm_mesh *mesh;
static int32_t rank;
static pthread_barrier_t both;

static void *ask(void *unused)
{
  (void)unused;
  for (int round = 0; round < kRounds; ++round) {
    pthread_barrier_wait(&both);
    dm_rank(mesh, &rank);
  }
  return NULL;
}

int main(void)
{
  pthread_t threads[2];
  if (dm_init("cpu", (int[]){1}, 1, (const char *[]){"dp"}, NULL, &mesh) != DM_STATUS_OK) return 2;
  pthread_barrier_init(&both, NULL, 2);
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, ask, NULL);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  printf("not caught: %d\n", rank);
  return 0;
}
