/* ranks: 2 4 */
/* Threads on one communicator. Names that share it pair separately, one name at a time. The test
 * also checks the refusal of mistakes that would give wrong numbers without an error: groups that
 * are not ended, buffers that overlap, and messages of different types. */
#include "check.h"
#include <pthread.h>

static dm_init_options options = DM_INIT_OPTIONS_INIT;
static dm_world *world;
static int32_t rank, ranks;

static dm_mesh *square(void)
{
  dm_mesh *mesh = NULL;
  const int32_t shape[] = {2, ranks / 2};
  const char *names[] = {"pp", "dp"};
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  return mesh;
}

struct job {
  dm_mesh *mesh;
  const char *dim;
  float mine, expected;
  int count, pause, wrong;
};

static void *sum(void *data)
{
  struct job *job = (struct job *)data;
  float *values = (float *)malloc((size_t)job->count * sizeof *values);
  for (int turn = 0; turn < 200; ++turn) {
    for (int i = 0; i < job->count; ++i) values[i] = job->mine + (float)turn;
    if ((turn * 7 + rank * 3 + job->pause) % 5 == 0) {
      struct timespec pause = {0, 1000L * (turn % 50)};
      nanosleep(&pause, NULL);
    }
    OK(dm_all_reduce(job->mesh, job->dim, values, values, (size_t)job->count, DM_FLOAT32, DM_SUM, NULL));
    for (int i = 0; i < job->count; ++i) job->wrong += values[i] != job->expected + 2 * (float)turn;
  }
  free(values);
  return NULL;
}

/* pp, and the dimension that dm_flatten makes of it under another name, share a communicator. */
static void names_that_share(void)
{
  dm_mesh *mesh = square(), *other = NULL;
  const int32_t shape[] = {2, ranks / 2};
  const char *names[] = {"epp", "edp"};
  REQUIRE(dm_reshape(mesh, shape, 2, names, NULL, &other));
  ncclComm_t one, two;
  REQUIRE(dm_get_comm(mesh, "pp", &one));
  REQUIRE(dm_get_comm(other, "epp", &two));
  CHECK(one == two);
  struct job jobs[] = {{mesh, "pp", 1, 2, 4, 0, 0}, {other, "epp", 1000, 2000, 9000, 1, 0}};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) CHECK(pthread_create(&threads[i], NULL, sum, &jobs[i]) == 0);
  for (int i = 0; i < 2; ++i) {
    pthread_join(threads[i], NULL);
    CHECK(jobs[i].wrong == 0);
  }
  dm_free(other);
  dm_free(mesh);
}

static void *all_reduce_once(void *data)
{
  float value = 1;
  char text[1024];
  dm_status status = dm_all_reduce((dm_mesh *)data, "pp", &value, &value, 1, DM_FLOAT32, DM_SUM, NULL);
  snprintf(text, sizeof text, "%s", dm_last_error());
  CHECK(status == DM_STATUS_MISMATCH);
  if (strstr(text, "call along pp at the same time") == NULL) {
    ++failures;
    fprintf(stderr, "rank %d: %s\n", (int)rank, text);
  }
  return NULL;
}

/* Two threads of rank 0 are in pp before its peer comes. */
static void one_name_at_a_time(void)
{
  dm_mesh *mesh = square();
  int32_t pp = -1;
  REQUIRE(dm_get_local_rank(mesh, "pp", &pp));
  if (pp == 0) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, all_reduce_once, mesh) == 0);
    all_reduce_once(mesh);
    pthread_join(thread, NULL);
  }
  REQUIRE(dm_world_barrier(world, 0));
  if (pp != 0) all_reduce_once(mesh);
  OK(dm_abort(mesh));
  dm_free(mesh);
}

static void groups_that_are_open(dm_mesh *mesh)
{
  float value = 1;
  REQUIRE(dm_group_start(mesh));
  OK(dm_world_barrier(world, 0)); /* Nothing is queued yet. */
  OK(dm_all_reduce(mesh, "pp", &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_all_reduce(mesh, "dp", &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
  const char *text = "2 operations are queued in it since dm_all_reduce along pp and not done: call dm_group_end first";
  FAILS(DM_STATUS_INVALID_STATE, text, dm_finalize(mesh, NULL));
  FAILS(DM_STATUS_INVALID_STATE, text, dm_world_barrier(world, 0));
  OK(dm_group_end(mesh));
  OK(dm_world_barrier(world, 0));
}

static void buffers_that_overlap(dm_mesh *mesh)
{
  enum { N = 20000 };
  static float at[4 * N];
  int32_t pp = -1;
  REQUIRE(dm_get_local_rank(mesh, "pp", &pp));
  const char *text = "overlap, but not as an in-place call needs";
  FAILS(DM_STATUS_INVALID_ARGUMENT, text, dm_all_reduce(mesh, "pp", at, at + 7, N, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, text, dm_reduce(mesh, "pp", at, at + 7, N, DM_FLOAT32, DM_SUM, pp, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, text, dm_broadcast(mesh, "pp", at, at + 7, N, DM_FLOAT32, pp, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, text, dm_all_gather(mesh, "pp", at + 7, at, N, DM_FLOAT32, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, text, dm_reduce_scatter(mesh, "pp", at, at + 7, N, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, text, dm_all_to_all(mesh, "pp", at, at + N, N, DM_FLOAT32, NULL));
  OK(dm_all_gather(mesh, "pp", at + pp * N, at, N, DM_FLOAT32, NULL));
  OK(dm_reduce_scatter(mesh, "pp", at, at + pp * N, N, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_all_to_all(mesh, "pp", at, at, N, DM_FLOAT32, NULL));
}

static void messages(void)
{
  dm_mesh *mesh = square();
  int32_t pp = -1;
  REQUIRE(dm_get_local_rank(mesh, "pp", &pp));
  double two[2] = {1, 2};
  float four[4] = {0};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "is this rank itself", dm_send(mesh, "pp", four, 4, DM_FLOAT32, pp, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "is this rank itself", dm_recv(mesh, "pp", four, 4, DM_FLOAT32, pp, NULL));
  const char *text = "sends 2 x float64 where rank ";
  if (pp == 0) {
    FAILS(DM_STATUS_MISMATCH, text, dm_send(mesh, "pp", two, 2, DM_FLOAT64, 1, NULL));
  } else {
    FAILS(DM_STATUS_MISMATCH, text, dm_recv(mesh, "pp", four, 4, DM_FLOAT32, 0, NULL));
  }
  CHECK(strstr(dm_last_error(), "receives 4 x float32") != NULL);
  OK(dm_abort(mesh));
  dm_free(mesh);
}

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_rank(world, &rank));
  REQUIRE(dm_world_size(world, &ranks));
  options.world = world;
  dm_mesh *mesh = square();
  names_that_share();
  groups_that_are_open(mesh);
  buffers_that_overlap(mesh);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  messages();
  one_name_at_a_time();
  dm_world_free(world);
  return finish();
}
