/* ranks: 2 */
/* A group has operations on two meshes, and another thread aborts one of them before the group
 * ends. dm_group_end gives DM_STATUS_ABORTED and runs none of the operations, and the other mesh
 * goes on. A group that has nothing of the aborted mesh runs, also where dm_group_end names it. */
#include <pthread.h>

#include "check.h"

static dm_mesh *fresh(const char *name)
{
  const int32_t shape[] = {2};
  dm_dim_options own = DM_DIM_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  own.flags = DM_DIM_OWN_COMM;
  options.dim_options = &own;
  options.num_dim_options = 1;
  REQUIRE(dm_init("cpu", shape, 1, &name, &options, &mesh));
  return mesh;
}

static dm_mesh *both;

/* Aborts a mesh when both ranks are about to. */
static void *abort_it(void *mesh)
{
  float one = 1, sum = 0;
  OK(dm_all_reduce(both, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_abort((const dm_mesh *)mesh));
  return NULL;
}

static void group(dm_mesh *aborted, dm_mesh *live, bool end_on_live)
{
  float one = 1, first = 0, second = 0;
  pthread_t thread;
  OK(dm_group_start(live));
  OK(dm_all_reduce(live, NULL, &one, &first, 1, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_all_reduce(aborted, NULL, &one, &second, 1, DM_FLOAT32, DM_SUM, NULL));
  if (pthread_create(&thread, NULL, abort_it, aborted) != 0 || pthread_join(thread, NULL) != 0) exit(1);
  dm_mesh *const ending = end_on_live ? live : aborted;
  GIVES(DM_STATUS_ABORTED, dm_group_end(ending));
  if (end_on_live) {
    CHECK(strstr(dm_last_error(), "the communicator that dm_all_reduce along aborted uses was aborted") != NULL);
    CHECK(strstr(dm_last_error(), "none of the group's operations ran, not even dm_all_reduce along live") != NULL);
  }
  CHECK(first == 0 && second == 0);
  /* The group has ended. */
  OK(dm_all_reduce(live, NULL, &one, &first, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(first == 2);
}

/* The mesh of dm_group_end only says in which library the group is. */
static void group_of_another(dm_mesh *aborted, dm_mesh *live)
{
  float one = 1, sum = 0;
  pthread_t thread;
  OK(dm_group_start(aborted));
  OK(dm_all_reduce(live, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  if (pthread_create(&thread, NULL, abort_it, aborted) != 0 || pthread_join(thread, NULL) != 0) exit(1);
  OK(dm_group_end(aborted));
  CHECK(sum == 2);
  GIVES(DM_STATUS_ABORTED, dm_group_start(aborted));
  GIVES(DM_STATUS_ABORTED, dm_group_end(aborted));
}

int main(void)
{
  dm_mesh *live = fresh("live");
  both = fresh("both");
  for (int round = 0; round < 4; ++round) {
    dm_mesh *aborted = fresh("aborted");
    group(aborted, live, round % 2 == 0);
    dm_free(aborted);
  }
  dm_mesh *other = fresh("other");
  group_of_another(other, live);
  dm_free(other);
  OK(dm_finalize(live, NULL));
  OK(dm_finalize(both, NULL));
  dm_free(live);
  dm_free(both);
  return finish();
}
