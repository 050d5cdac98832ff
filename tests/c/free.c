/* ranks: 1 */
/* dm_free never blocks, also where it frees the last handle of a world: a thread of the library
 * then calls the store's drop, which here waits until the main thread lets it go on. The end of
 * the process waits for such a thread. */
#include "library_threads.h"

#include <pthread.h>

/* A store that needs no table, because its world has one rank: what was set last is what there
   is. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_gate_open, begun, dropped, is_last_drop_done;
static char value[4096];
static size_t length;

static int32_t set(void *data, const char *key, const void *bytes, size_t size)
{
  (void)data, (void)key;
  if (size > sizeof value) return 1;
  memcpy(value, bytes, size);
  length = size;
  return 0;
}

static int32_t get(void *data, const char *key, void *place, size_t capacity, size_t *length_out, int64_t timeout_ms)
{
  (void)data, (void)key, (void)timeout_ms;
  *length_out = length;
  memcpy(place, value, length < capacity ? length : capacity);
  return 0;
}

static int32_t add(void *data, const char *key, int64_t amount, int64_t *sum)
{
  (void)data, (void)key;
  *sum = amount;
  return 0;
}

static void wait_and_drop(void *data)
{
  (void)data;
  pthread_mutex_lock(&lock);
  ++begun;
  pthread_cond_broadcast(&changed);
  while (!is_gate_open) pthread_cond_wait(&changed, &lock);
  ++dropped;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static void drop_slowly(void *data)
{
  (void)data;
  usleep(200 * 1000);
  __atomic_store_n(&is_last_drop_done, 1, __ATOMIC_SEQ_CST);
}

/* A mesh that is the last thing of its world. */
static dm_mesh *last_of_a_world(void (*drop)(void *))
{
  dm_store_callbacks store = DM_STORE_CALLBACKS_INIT;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL;
  const int32_t shape[] = {1};
  float one = 1, sum = 0;
  store.set = set;
  store.get = get;
  store.add = add;
  store.drop = drop;
  join.world_size = 1;
  join.store = &store;
  REQUIRE(dm_world_init("cpu", &join, &world));
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &mesh));
  OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 1);
  dm_world_free(world);
  return mesh;
}

/* Runs after the library's own handler, because it was registered before. */
static void at_exit(void)
{
  if (!__atomic_load_n(&is_last_drop_done, __ATOMIC_SEQ_CST)) {
    fprintf(stderr, "the process did not wait for a world whose last handle was freed\n");
    _exit(1);
  }
}

int main(void)
{
  CHECK(atexit(at_exit) == 0);
  dm_mesh *mesh = last_of_a_world(wait_and_drop), *view = NULL;
  OK(dm_clone(mesh, &view));
  dm_free(mesh);
  CHECK(begun == 0);
  dm_free(view); /* returns, although the store waits for this thread */
  pthread_mutex_lock(&lock);
  while (begun == 0) pthread_cond_wait(&changed, &lock);
  CHECK(dropped == 0);
  is_gate_open = 1;
  pthread_cond_broadcast(&changed);
  while (dropped == 0) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  check_library_threads(1);
  CHECK(has_had_thread("dm-free"));
  dm_free(last_of_a_world(drop_slowly));
  CHECK(!__atomic_load_n(&is_last_drop_done, __ATOMIC_SEQ_CST));
  return finish();
}
