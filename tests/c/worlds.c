/* Every way to join a world: tcp:// with explicit ranks as threads of one process and as forked
 * processes, file://, and the caller's own store. Several worlds follow each other and exist at
 * one time. */
#include "check.h"
#include "free_port.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kRanks = 4 };

/* ---- a store of the caller's: a table in this process ---- */

struct entry { char key[200]; char value[512]; size_t length; };
struct table { pthread_mutex_t lock; pthread_cond_t changed; struct entry entries[2000]; size_t count; int dropped; bool removes; };

static struct entry *find(struct table *table, const char *key)
{
  for (size_t at = 0; at < table->count; ++at)
    if (strcmp(table->entries[at].key, key) == 0) return &table->entries[at];
  return NULL;
}

static int put(struct table *table, const char *key, const void *value, size_t length)
{
  struct entry *entry = find(table, key);
  if (length > sizeof entry->value || strlen(key) >= sizeof entry->key || table->count == 2000) return 7;
  if (entry == NULL) entry = &table->entries[table->count++];
  strcpy(entry->key, key);
  memcpy(entry->value, value, length);
  entry->length = length;
  pthread_cond_broadcast(&table->changed);
  return 0;
}

static int32_t store_set(void *data, const char *key, const void *value, size_t length)
{
  struct table *table = (struct table *)data;
  pthread_mutex_lock(&table->lock);
  const int result = put(table, key, value, length);
  pthread_mutex_unlock(&table->lock);
  return result;
}

static int32_t store_get(void *data, const char *key, void *value, size_t capacity, size_t *length_out, int64_t timeout_ms)
{
  struct table *table = (struct table *)data;
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += timeout_ms / 1000;
  until.tv_nsec += timeout_ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, ++until.tv_sec;
  pthread_mutex_lock(&table->lock);
  struct entry *entry = find(table, key);
  int waited = 0;
  while (entry == NULL && waited == 0) {
    waited = pthread_cond_timedwait(&table->changed, &table->lock, &until);
    entry = find(table, key);
  }
  if (entry != NULL) {
    *length_out = entry->length;
    memcpy(value, entry->value, entry->length < capacity ? entry->length : capacity);
  }
  pthread_mutex_unlock(&table->lock);
  return entry == NULL ? DM_STORE_NOT_YET : 0;
}

static int32_t store_add(void *data, const char *key, int64_t amount, int64_t *value_out)
{
  struct table *table = (struct table *)data;
  char text[32] = "0";
  pthread_mutex_lock(&table->lock);
  struct entry *entry = find(table, key);
  if (entry != NULL) memcpy(text, entry->value, entry->length), text[entry->length] = '\0';
  *value_out = strtoll(text, NULL, 10) + amount;
  const int length = snprintf(text, sizeof text, "%lld", (long long)*value_out);
  const int result = put(table, key, text, (size_t)length);
  pthread_mutex_unlock(&table->lock);
  return result;
}

static int32_t store_remove(void *data, const char *key)
{
  struct table *table = (struct table *)data;
  pthread_mutex_lock(&table->lock);
  struct entry *entry = find(table, key);
  if (entry != NULL) *entry = table->entries[--table->count];
  pthread_mutex_unlock(&table->lock);
  return 0;
}

static void store_drop(void *data)
{
  struct table *table = (struct table *)data;
  pthread_mutex_lock(&table->lock);
  ++table->dropped;
  pthread_cond_broadcast(&table->changed);
  pthread_mutex_unlock(&table->lock);
}

/* Waits until so many worlds have let the store go. dm_free of the last handle of a world leaves
 * that to a thread of the library. */
static void wait_for_drops(struct table *table, int count)
{
  struct timespec patience;
  clock_gettime(CLOCK_REALTIME, &patience);
  patience.tv_sec += 30;
  pthread_mutex_lock(&table->lock);
  while (table->dropped < count && pthread_cond_timedwait(&table->changed, &table->lock, &patience) == 0) continue;
  CHECK(table->dropped == count); /* once for each world */
  pthread_mutex_unlock(&table->lock);
}

/* ---- what each rank does, for every way to join ---- */

struct part { dm_world_options options; int rounds; };

static void *take_part(void *data)
{
  const struct part *part = (const struct part *)data;
  for (int round = 0; round < part->rounds; ++round) {
    dm_world *world = NULL;
    dm_mesh *mesh = NULL, *flat = NULL;
    const int32_t shape[] = {2, kRanks / 2};
    const char *names[] = {"a", "b"};
    dm_init_options options = DM_INIT_OPTIONS_INIT;
    REQUIRE(dm_world_init("cpu", &part->options, &world));
    int32_t rank = -1, size = -1;
    OK(dm_world_rank(world, &rank));
    OK(dm_world_size(world, &size));
    CHECK(rank == part->options.rank && size == kRanks);
    options.world = world;
    REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
    dm_world_free(world); /* the mesh keeps what it needs */
    REQUIRE(dm_flatten(mesh, NULL, NULL, &flat));
    int64_t mine = rank + 1, sum = 0;
    OK(dm_all_reduce(mesh, "b", &mine, &sum, 1, DM_INT64, DM_SUM, NULL));
    CHECK(sum == (rank < 2 ? 3 : 7));
    OK(dm_all_reduce(flat, NULL, &mine, &sum, 1, DM_INT64, DM_SUM, NULL));
    CHECK(sum == 10);
    OK(dm_finalize(mesh, NULL));
    dm_free(flat);
    dm_free(mesh);
  }
  return NULL;
}

static void as_threads(const char *method, struct table *table, int rounds)
{
  pthread_t threads[kRanks];
  struct part parts[kRanks];
  dm_store_callbacks callbacks = DM_STORE_CALLBACKS_INIT;
  callbacks.user_data = table;
  callbacks.set = store_set;
  callbacks.get = store_get;
  callbacks.add = store_add;
  callbacks.drop = store_drop;
  if (table == NULL || !table->removes) callbacks.remove = NULL; /* then the keys stay */
  else callbacks.remove = store_remove;
  for (int rank = 0; rank < kRanks; ++rank) {
    dm_world_options options = DM_WORLD_OPTIONS_INIT;
    options.world_size = kRanks;
    options.rank = rank;
    options.local_rank = rank;
    options.timeout_ms = 60000;
    options.init_method = method;
    options.store = table != NULL ? &callbacks : NULL;
    parts[rank].options = options;
    parts[rank].rounds = rounds;
    if (pthread_create(&threads[rank], NULL, take_part, &parts[rank]) != 0) exit(1);
  }
  for (int rank = 0; rank < kRanks; ++rank) pthread_join(threads[rank], NULL);
}

static void as_processes(const char *method)
{
  pid_t children[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    children[rank] = fork();
    if (children[rank] == 0) {
      struct part part = {DM_WORLD_OPTIONS_INIT, 1};
      failures = 0;
      part.options.world_size = kRanks;
      part.options.rank = rank;
      part.options.timeout_ms = 60000;
      part.options.init_method = method;
      take_part(&part);
      _exit(failures > 0);
    }
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = -1;
    CHECK(waitpid(children[rank], &status, 0) == children[rank] && status == 0);
  }
}

int main(void)
{
  char method[256];
  /* The processes come first, because only a process without threads should fork. */
  snprintf(method, sizeof method, "tcp://localhost:%d", free_port());
  as_processes(method);
  const char *folder = getenv("DM_TMP") != NULL ? getenv("DM_TMP") : "/tmp";
  snprintf(method, sizeof method, "file://%s/worlds-%d", folder, (int)getpid());
  as_processes(method);

  snprintf(method, sizeof method, "tcp://127.0.0.1:%d", free_port());
  as_threads(method, NULL, 1);
  snprintf(method, sizeof method, "file://%s/worlds-%d", folder, (int)getpid());
  as_threads(method, NULL, 2); /* keys that the processes and the first round left there are ignored */

  static struct table table = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, {{{0}, {0}, 0}}, 0, 0, false};
  as_threads(NULL, &table, 2);
  wait_for_drops(&table, 2 * kRanks);
  const size_t after_two = table.count;
  static struct table tidy = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, {{{0}, {0}, 0}}, 0, 0, true};
  as_threads(NULL, &tidy, 2);
  wait_for_drops(&tidy, 2 * kRanks);
  const size_t tidy_after_two = tidy.count;
  CHECK(tidy_after_two < after_two);
  as_threads(NULL, &tidy, 10);
  wait_for_drops(&tidy, 12 * kRanks);
  if (tidy.count > tidy_after_two) fprintf(stderr, "%zu keys after 12 worlds, %zu after two\n", tidy.count, tidy_after_two);
  CHECK(tidy.count <= tidy_after_two); /* where keys can be removed, no world leaves more than the one before */

  char command[300];
  snprintf(command, sizeof command, "rm -rf '%s'.devicemesh", method + strlen("file://"));
  CHECK(system(command) == 0);
  return finish();
}
