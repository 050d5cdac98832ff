/* Passes the library's callbacks to Go. The user_data of a store is an integer, because Go refuses
 * a pointer that points to nothing. */

#include "_cgo_export.h"

static int32_t set(void *user_data, const char *key, const void *value, size_t len)
{
  return goStoreSet((uintptr_t)user_data, (char *)key, (void *)value, len);
}

static int32_t get(void *user_data, const char *key, void *value, size_t capacity, size_t *len_out, int64_t timeout_ms)
{
  return goStoreGet((uintptr_t)user_data, (char *)key, value, capacity, len_out, timeout_ms);
}

static int32_t add(void *user_data, const char *key, int64_t amount, int64_t *value_out)
{
  return goStoreAdd((uintptr_t)user_data, (char *)key, amount, value_out);
}

static int32_t compare_set(void *user_data, const char *key, const void *expected, size_t expected_len, const void *value, size_t len,
                           void *stands, size_t capacity, size_t *len_out)
{
  return goStoreCompareSet((uintptr_t)user_data, (char *)key, (void *)expected, expected_len, (void *)value, len, stands, capacity,
                           len_out);
}

static int32_t remove_key(void *user_data, const char *key) { return goStoreRemove((uintptr_t)user_data, (char *)key); }

static void drop(void *user_data) { goStoreDrop((uintptr_t)user_data); }

void go_store_callbacks(dm_store_callbacks *callbacks, uintptr_t store, bool decides)
{
  const dm_store_callbacks made = {sizeof made, (void *)store, set, get, add, drop, remove_key, decides ? compare_set : NULL};
  *callbacks = made;
}

void *go_resolver(void *user_data, const char *name)
{
  (void)user_data;
  return goResolve((char *)name);
}

void go_log(void *user_data, dm_log_level level, const char *message)
{
  (void)user_data;
  goLog(level, (char *)message);
}

void go_event(void *user_data, const dm_event *event)
{
  (void)user_data;
  goEvent((dm_event *)event);
}
