/* dm_store_callbacks.get says DM_STORE_NOT_YET for a key that is late, and the library waits on.
 * Any other number, also 1, says that the service is broken: the call ends at once with
 * DM_STATUS_STORE. Here rank 0 of 2 joins alone, so every key that it waits for is late. */
#include "check.h"

static int32_t answer;
static int calls, looks, drops;

static int32_t set(void *data, const char *key, const void *value, size_t length)
{
  (void)data, (void)key, (void)value, (void)length;
  return 0;
}

static int32_t get(void *data, const char *key, void *value, size_t capacity, size_t *length_out, int64_t timeout_ms)
{
  (void)data, (void)key, (void)value, (void)capacity, (void)length_out;
  __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  if (timeout_ms == 0) __atomic_add_fetch(&looks, 1, __ATOMIC_SEQ_CST);
  CHECK(timeout_ms >= 0);
  return answer;
}

static int32_t add(void *data, const char *key, int64_t amount, int64_t *sum)
{
  (void)data, (void)key;
  *sum = amount;
  return 0;
}

static void drop(void *data)
{
  (void)data;
  ++drops;
}

static void joins(int32_t returned, dm_status status, const char *text, double at_most)
{
  dm_store_callbacks callbacks = DM_STORE_CALLBACKS_INIT;
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  callbacks.set = set;
  callbacks.get = get;
  callbacks.add = add;
  callbacks.drop = drop;
  options.world_size = 2;
  options.store = &callbacks;
  options.timeout_ms = status == DM_STATUS_TIMEOUT ? 400 : 120000;
  answer = returned;
  calls = looks = 0;
  const double began = seconds_now();
  FAILS(status, text, dm_world_init("cpu", &options, &world));
  CHECK(seconds_now() - began < at_most);
  /* A function that returns before its timeout does not make the library call it without pause. */
  CHECK(world == NULL && calls >= 1 && calls < 1000 && drops == 0);
}

int main(void)
{
  joins(DM_STORE_NOT_YET, DM_STATUS_TIMEOUT, "400 ms", 60);
  CHECK(looks >= 1); /* with timeout 0 it looks once */
  joins(1, DM_STATUS_STORE, "dm_store_callbacks.get of key ", 60);
  CHECK(strstr(dm_last_error(), "returned 1") != NULL);
  joins(-1, DM_STATUS_STORE, "returned -1", 60);
  return finish();
}
