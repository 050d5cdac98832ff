/* A store of the program's own, for ranks that are threads of one process. */
#ifndef STORE_H
#define STORE_H

#include "check.h"

#include <pthread.h>

struct entry { char key[200]; void *value; size_t length; };
static struct entry entries[1000];
static size_t count, most;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static inline struct entry *find(const char *key)
{
  for (size_t at = 0; at < count; ++at)
    if (strcmp(entries[at].key, key) == 0) return &entries[at];
  return NULL;
}

static inline int32_t put(const char *key, const void *value, size_t length)
{
  struct entry *entry = find(key);
  void *copy = malloc(length + 1);
  if (copy == NULL || strlen(key) >= sizeof entry->key || count == 1000) return 7;
  if (entry == NULL) {
    entry = &entries[count++];
    strcpy(entry->key, key);
  } else {
    free(entry->value);
  }
  if (length > 0) memcpy(copy, value, length);
  entry->value = copy;
  entry->length = length;
  if (count > most) most = count;
  pthread_cond_broadcast(&changed);
  return 0;
}

static inline int32_t store_set(void *data, const char *key, const void *value, size_t length)
{
  (void)data;
  pthread_mutex_lock(&lock);
  const int32_t result = put(key, value, length);
  pthread_mutex_unlock(&lock);
  return result;
}

static inline int32_t store_get(void *data, const char *key, void *value, size_t capacity, size_t *length_out, int64_t timeout_ms)
{
  (void)data;
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += timeout_ms / 1000;
  until.tv_nsec += timeout_ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, ++until.tv_sec;
  pthread_mutex_lock(&lock);
  struct entry *entry = find(key);
  int waited = 0;
  while (entry == NULL && waited == 0) {
    waited = pthread_cond_timedwait(&changed, &lock, &until);
    entry = find(key);
  }
  if (entry != NULL) {
    *length_out = entry->length;
    memcpy(value, entry->value, entry->length < capacity ? entry->length : capacity);
  }
  pthread_mutex_unlock(&lock);
  return entry == NULL ? DM_STORE_NOT_YET : 0;
}

static inline int32_t store_add(void *data, const char *key, int64_t amount, int64_t *value_out)
{
  (void)data;
  char text[32] = "0";
  pthread_mutex_lock(&lock);
  struct entry *entry = find(key);
  if (entry != NULL) memcpy(text, entry->value, entry->length), text[entry->length] = '\0';
  *value_out = strtoll(text, NULL, 10) + amount;
  const int length = snprintf(text, sizeof text, "%lld", (long long)*value_out);
  const int32_t result = put(key, text, (size_t)length);
  pthread_mutex_unlock(&lock);
  return result;
}

static inline int32_t store_remove(void *data, const char *key)
{
  (void)data;
  pthread_mutex_lock(&lock);
  struct entry *entry = find(key);
  if (entry != NULL) {
    free(entry->value);
    *entry = entries[--count];
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

static inline int32_t store_compare_set(void *data, const char *key, const void *expected, size_t expected_length, const void *value,
                                        size_t length, void *stands, size_t capacity, size_t *length_out)
{
  int32_t result = 0;
  (void)data;
  pthread_mutex_lock(&lock);
  struct entry *entry = find(key);
  const size_t before = entry == NULL ? 0 : entry->length;
  if (before == expected_length && (before == 0 || memcmp(entry->value, expected, before) == 0)) result = put(key, value, length);
  entry = find(key);
  *length_out = entry == NULL ? 0 : entry->length;
  if (entry != NULL) memcpy(stands, entry->value, entry->length < capacity ? entry->length : capacity);
  pthread_mutex_unlock(&lock);
  return result;
}

/* The callbacks of this store, without compare_set. */
static inline dm_store_callbacks store_callbacks(void)
{
  dm_store_callbacks callbacks = DM_STORE_CALLBACKS_INIT;
  callbacks.set = store_set;
  callbacks.get = store_get;
  callbacks.add = store_add;
  callbacks.remove = store_remove;
  return callbacks;
}

#endif /* STORE_H */
