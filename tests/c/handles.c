/* Many threads use the same handles. They make views, ask them, free them and free them again,
 * while other threads use them. Every call gives an answer or DM_STATUS_INVALID_HANDLE. */
#include "check.h"

#include <pthread.h>

enum { kThreads = 4, kRounds = 3000 };

static dm_mesh *root;
static dm_mesh *passing[kThreads]; /* handles that their thread frees while the others use them */

static void *work(void *data)
{
  const int me = (int)(intptr_t)data;
  const char *names[] = {"dp", "tp"}, *reversed[] = {"tp", "dp"};
  ncclComm_t expected = NULL, comm = NULL;
  int wrong = 0;
  wrong += dm_get_comm(root, "tp", &expected) != DM_STATUS_OK;
  for (int round = 0; round < kRounds; ++round) {
    dm_mesh *view = NULL, *copy = NULL, *found = NULL;
    int32_t rank = -1;
    size_t length = 0;
    char text[128];
    wrong += dm_slice(root, round % 2 ? names : reversed, 2, &view) != DM_STATUS_OK;
    wrong += dm_clone(view, &copy) != DM_STATUS_OK;
    __atomic_store_n(&passing[me], view, __ATOMIC_RELAXED);
    wrong += dm_get_comm(copy, "tp", &comm) != DM_STATUS_OK || comm != expected;
    wrong += dm_get_local_rank(copy, "dp", &rank) != DM_STATUS_OK || rank != 0;
    for (int other = 0; other < kThreads; ++other) {
      dm_mesh *theirs = __atomic_load_n(&passing[other], __ATOMIC_RELAXED);
      const dm_status status = dm_describe(theirs, text, sizeof text, &length);
      wrong += status != DM_STATUS_OK && status != DM_STATUS_INVALID_HANDLE;
      const dm_status got = dm_get_comm(theirs, "tp", &comm);
      wrong += got == DM_STATUS_OK ? comm != expected : got != DM_STATUS_INVALID_HANDLE;
    }
    wrong += dm_register(copy, "shared") != DM_STATUS_OK;
    wrong += dm_lookup("shared", &found) != DM_STATUS_OK;
    dm_free(view);
    dm_free(view);
    wrong += dm_rank(view, &rank) != DM_STATUS_INVALID_HANDLE;
    dm_free(copy);
    dm_free(found);
  }
  return (void *)(intptr_t)wrong;
}

/* A handle of another type is unknown, also where both are the first ones of their types. */
static void other_types(dm_mesh *mesh)
{
  dm_events *events = NULL;
  int32_t fd = -7, rank = -7;
  REQUIRE(dm_events_open(NULL, &events));
  FAILS(DM_STATUS_INVALID_HANDLE, "dm_events", dm_events_fd((dm_events *)mesh, &fd));
  FAILS(DM_STATUS_INVALID_HANDLE, "dm_mesh", dm_rank((dm_mesh *)events, &rank));
  CHECK(fd == -7 && rank == -7);
  dm_events_free((dm_events *)mesh);
  dm_free((dm_mesh *)events);
  OK(dm_events_fd(events, &fd));
  OK(dm_rank(mesh, &rank));
  dm_events_free(events);
}

int main(void)
{
  const int32_t shape[] = {1, 1};
  const char *names[] = {"dp", "tp"};
  REQUIRE(dm_init("cpu", shape, 2, names, NULL, &root));
  other_types(root);
  pthread_t threads[kThreads];
  for (int index = 0; index < kThreads; ++index) {
    if (pthread_create(&threads[index], NULL, work, (void *)(intptr_t)index) != 0) return 1;
  }
  for (int index = 0; index < kThreads; ++index) {
    void *wrong = NULL;
    pthread_join(threads[index], &wrong);
    CHECK((intptr_t)wrong == 0);
  }
  OK(dm_unregister("shared"));
  OK(dm_finalize(root, NULL));
  dm_free(root);
  return finish();
}
