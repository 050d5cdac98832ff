/* dm_world_init waits for ranks that do not come, and another thread ends it with the token of
 * dm_world_options.joining_out. The token serves no other purpose and is invalid afterwards. The
 * library does not use the caller's store once dm_world_init has returned. */
#include "check.h"

#include <pthread.h>
#include <sched.h>

static dm_world *joining;
static dm_world *joined;
static dm_status status;
static char message[512];

typedef struct {
  dm_store_callbacks callbacks;
  const char *init_method;
} Meeting;

/* A store in which no key ever appears. */
static int32_t set(void *used, const char *key, const void *value, size_t length)
{
  (void)key, (void)value, (void)length;
  __atomic_add_fetch((int *)used, 1, __ATOMIC_SEQ_CST);
  return 0;
}

static int32_t get(void *used, const char *key, void *value, size_t capacity, size_t *length, int64_t timeout_ms)
{
  (void)key, (void)value, (void)capacity, (void)length, (void)timeout_ms;
  __atomic_add_fetch((int *)used, 1, __ATOMIC_SEQ_CST);
  return DM_STORE_NOT_YET;
}

static int32_t add(void *used, const char *key, int64_t amount, int64_t *sum)
{
  (void)key;
  __atomic_add_fetch((int *)used, 1, __ATOMIC_SEQ_CST);
  *sum = amount;
  return 0;
}

static void *join(void *given)
{
  const Meeting *meeting = (const Meeting *)given;
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  options.world_size = 2;
  options.init_method = meeting->init_method;
  options.store = meeting->init_method == NULL ? &meeting->callbacks : NULL;
  options.joining_out = &joining;
  status = dm_world_init("cpu", &options, &joined);
  snprintf(message, sizeof message, "%s", dm_last_error());
  return NULL;
}

static dm_world *token(void)
{
  return __atomic_load_n(&joining, __ATOMIC_ACQUIRE);
}

static void ended(const char *init_method)
{
  int used = 0;
  Meeting meeting = {DM_STORE_CALLBACKS_INIT, init_method};
  meeting.callbacks.user_data = &used;
  meeting.callbacks.set = set;
  meeting.callbacks.get = get;
  meeting.callbacks.add = add;
  __atomic_store_n(&joining, NULL, __ATOMIC_RELEASE);
  joined = NULL;
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, join, &meeting) == 0);
  while (token() == NULL) sched_yield();
  int32_t rank = -1;
  FAILS(DM_STATUS_INVALID_HANDLE, "not a live dm_world", dm_world_rank(token(), &rank));
  dm_world_free(token());
  OK(dm_world_abort(token()));
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(status == DM_STATUS_ABORTED && joined == NULL);
  CHECK(strstr(message, "dm_world_abort") != NULL);
  FAILS(DM_STATUS_INVALID_HANDLE, "not a live dm_world", dm_world_abort(token()));
}

int main(void)
{
  char folder[] = "/tmp/dm-joining-XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  char method[64];
  snprintf(method, sizeof method, "file://%s/store", folder);
  for (int round = 0; round < 5; ++round) {
    ended(method);
    ended(NULL);
  }
  char command[64];
  snprintf(command, sizeof command, "rm -r %s", folder);
  CHECK(system(command) == 0);

  /* A dm_world_init that is not ended gives a world. */
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  options.world_size = 1;
  options.joining_out = &joining;
  REQUIRE(dm_world_init("cpu", &options, &joined));
  CHECK(joining != NULL && joining != joined);
  FAILS(DM_STATUS_INVALID_HANDLE, "not a live dm_world", dm_world_abort(joining));
  OK(dm_world_barrier(joined, 0));
  dm_world_free(joined);
  return finish();
}
