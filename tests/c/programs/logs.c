/* The program whose log tests/test_log.py reads. The first argument is the case:
 *   mesh       a mesh, a flattened dimension that shares its communicator, finalize
 *   lost       a barrier in which the last rank is killed, and an all-reduce on the ranks that are
 *              left
 *   late       rank 1 comes to no dm_flatten before its deadline of 6 s
 *   stuck      rank 1 comes to no dm_all_reduce before its deadline of 6 s
 *   fork       a child of a rank makes a call that fails
 *   stderr     a callback is set and taken back: records go to stderr again */
#include "../check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static dm_mesh *make(int32_t size, int64_t timeout_ms)
{
  const char *names[] = {"dp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  options.timeout_ms = timeout_ms;
  REQUIRE(dm_init("cpu", &size, 1, names, &options, &mesh));
  return mesh;
}

static void ignore(void *user_data, dm_log_level level, const char *message)
{
  (void)user_data;
  (void)level;
  (void)message;
}

int main(int argc, char **argv)
{
  const char *what = argc > 1 ? argv[1] : "mesh";
  const int32_t size = atoi(getenv("WORLD_SIZE")), rank = atoi(getenv("RANK"));
  const int is_near = strcmp(what, "late") == 0 || strcmp(what, "stuck") == 0;
  float value = 1;
  dm_mesh *mesh, *flat = NULL;
  setvbuf(stdout, NULL, _IOLBF, 0);

  if (strcmp(what, "stderr") == 0) {
    OK(dm_set_log(DM_LOG_INFO, ignore, NULL));
    mesh = make(size, 0);
    OK(dm_set_log(DM_LOG_INFO, NULL, NULL));
  } else {
    mesh = make(size, is_near ? 10000 : 0);
  }
  if (strcmp(what, "lost") == 0) {
    puts("ready");
    if (rank == size - 1) pause();
    GIVES(DM_STATUS_PEER_LOST, dm_all_reduce(mesh, NULL, &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
    GIVES(DM_STATUS_PEER_LOST, dm_flatten(mesh, "all", NULL, &flat));
    OK(dm_abort(mesh));
    dm_free(mesh);
    return finish();
  }
  if (is_near) {
    if (rank == 1) {
      /* It stays until the others have given up. */
      char line[8];
      CHECK(fgets(line, sizeof line, stdin) != NULL);
    } else if (strcmp(what, "late") == 0) {
      GIVES(DM_STATUS_TIMEOUT, dm_flatten(mesh, "all", NULL, &flat));
    } else {
      GIVES(DM_STATUS_TIMEOUT, dm_all_reduce(mesh, NULL, &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
    }
    puts("over");
    dm_free(mesh);
    return finish();
  }
  if (strcmp(what, "fork") == 0) {
    int status = 1;
    pid_t child = fork();
    if (child == 0) {
      GIVES(DM_STATUS_UNSUPPORTED, dm_all_reduce(mesh, NULL, &value, &value, 1, DM_FLOAT32, DM_SUM, NULL));
      _exit(failures != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
  ncclComm_t comm;
  /* A name from outside, with characters that act on a terminal. */
  GIVES(DM_STATUS_NOT_FOUND, dm_get_comm(mesh, "a\n2026 devicemesh error \033[31m", &comm));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  OK(dm_finalize(mesh, NULL));
  dm_free(flat);
  dm_free(mesh);
  return finish();
}
