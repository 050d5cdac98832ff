/* Planted: two threads have the library write their rank into one place, and nothing orders them. */
#include <devicemesh.h>
#include <pthread.h>
#include <stdio.h>

static dm_mesh *mesh;
static int32_t rank;

static void *ask(void *unused)
{
  (void)unused;
  dm_rank(mesh, &rank);
  return NULL;
}

int main(void)
{
  pthread_t threads[2];
  if (dm_init("cpu", (size_t[]){1}, 1, (const char *[]){"dp"}, NULL, &mesh) != DM_STATUS_OK) return 2;
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, ask, NULL);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  printf("not caught: %d\n", rank);
  return 0;
}
