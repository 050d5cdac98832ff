/* ranks: 4 */
/* The log's callback: which records it gets at which level, what it may call, and that nothing
 * comes when the log is off or another callback is set. */
#include "check.h"

#include <pthread.h>

/* The records that a callback was given. Records may come from several threads. */
typedef struct {
  pthread_mutex_t lock;
  int count[5];
  int joins, made, shared, agreed, errors;
  dm_mesh *mesh; /* asked from inside, unless NULL */
} records;

static records info, debug;

static void on_record(void *user_data, dm_log_level level, const char *message)
{
  records *seen = (records *)user_data;
  char me[32];
  pthread_mutex_lock(&seen->lock);
  CHECK(level >= DM_LOG_ERROR && level <= DM_LOG_DEBUG);
  ++seen->count[level];
  for (const char *at = message; *at; ++at) CHECK((unsigned char)*at >= 0x20 && *at != 0x7f);
  snprintf(me, sizeof me, "rank %s: ", getenv("RANK"));
  CHECK(strncmp(message, me, strlen(me)) == 0);
  seen->joins += strstr(message, "joined a world of 4 ranks in ") != NULL && strstr(message, "libdevicemesh.so") != NULL;
  seen->made += strstr(message, "was made by id in ") != NULL || strstr(message, "was split off in ") != NULL;
  seen->shared += strstr(message, " shares the communicator of ") != NULL;
  seen->agreed += strstr(message, " is agreed after ") != NULL;
  seen->errors += strstr(message, "a call fails with DM_STATUS_NOT_FOUND: dimension pp does not exist") != NULL;
  pthread_mutex_unlock(&seen->lock);
  if (seen->mesh != NULL) {
    /* A local question works. A call that fails here logs nothing more, and the caller's own error
     * comes after it. */
    int32_t size = 0;
    ncclComm_t comm;
    OK(dm_size(seen->mesh, NULL, &size));
    CHECK(size == 4);
    FAILS(DM_STATUS_NOT_FOUND, "dimension qq", dm_get_comm(seen->mesh, "qq", &comm));
  }
}

static dm_mesh *make(void)
{
  const int32_t shape[] = {2, 2};
  const char *names[] = {"dp", "tp"};
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cpu", shape, 2, names, NULL, &mesh));
  return mesh;
}

int main(void)
{
  pthread_mutex_init(&info.lock, NULL);
  pthread_mutex_init(&debug.lock, NULL);
  ncclComm_t comm;
  dm_mesh *flat = NULL;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "level is 5, not DM_LOG_OFF (0) to DM_LOG_DEBUG (4)", dm_set_log(5, on_record, &info));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "level is -1", dm_set_log(-1, NULL, NULL));

  OK(dm_set_log(DM_LOG_INFO, on_record, &info));
  dm_mesh *mesh = make();
  FAILS(DM_STATUS_NOT_FOUND, "dimension pp", dm_get_comm(mesh, "pp", &comm));
  CHECK(info.joins == 1 && info.made == 3 && info.shared == 0 && info.agreed == 0 && info.errors == 0);
  CHECK(info.count[DM_LOG_INFO] == 4 && info.count[DM_LOG_DEBUG] == 0 && info.count[DM_LOG_WARN] == 0);

  debug.mesh = mesh;
  OK(dm_set_log(DM_LOG_DEBUG, on_record, &debug));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  CHECK(debug.shared == 1 && debug.agreed == 1 && debug.errors == 0);
  FAILS(DM_STATUS_NOT_FOUND, "dimension pp", dm_get_comm(mesh, "pp", &comm));
  CHECK(debug.errors == 1 && debug.joins == 0);
  CHECK(info.count[DM_LOG_INFO] == 4);

  OK(dm_set_log(DM_LOG_WARN, on_record, &debug));
  const int before = debug.count[DM_LOG_WARN];
  OK(dm_abort(mesh));
  CHECK(debug.count[DM_LOG_WARN] == before + 1);

  /* The next record would come from here if the log were on. */
  OK(dm_set_log(DM_LOG_OFF, on_record, &info));
  GIVES(DM_STATUS_ABORTED, dm_get_comm(mesh, "dp", &comm));
  OK(dm_set_log(DM_LOG_OFF, NULL, NULL));
  GIVES(DM_STATUS_ABORTED, dm_get_comm(mesh, "dp", &comm));
  CHECK(info.count[DM_LOG_INFO] == 4 && debug.count[DM_LOG_WARN] == before + 1);
  dm_free(flat);
  dm_free(mesh);
  return finish();
}
