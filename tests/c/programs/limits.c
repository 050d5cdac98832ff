/* A rank of tests/test_limits.py. It sets a limit on itself, then joins, makes a mesh and sums. It
 * prints the status and message of the first failure, or DM_STATUS_OK.
 *
 * limits STAGE KIND VALUE: STAGE is when: join (before dm_world_init) or mesh (before dm_init).
 * KIND is the limit: files (VALUE more descriptors can be opened), threads (RLIMIT_NPROC is VALUE),
 * memory (VALUE MiB more of address space), dumpable (others of its user may not look into it), or
 * nothing. */
#define _GNU_SOURCE
#include "../check.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

static void limit(int resource, rlim_t value)
{
  const struct rlimit both = {value, value};
  if (setrlimit(resource, &both) != 0) {
    perror("setrlimit");
    exit(2);
  }
}

static void take(const char *kind, long value)
{
  if (strcmp(kind, "files") == 0) {
    const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
    close(next);
    limit(RLIMIT_NOFILE, (rlim_t)(next + value));
  } else if (strcmp(kind, "threads") == 0) {
    limit(RLIMIT_NPROC, (rlim_t)value);
  } else if (strcmp(kind, "memory") == 0) {
    unsigned long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (statm == NULL || fscanf(statm, "%lu", &pages) != 1) exit(2);
    fclose(statm);
    limit(RLIMIT_AS, (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + ((rlim_t)value << 20));
  } else if (strcmp(kind, "dumpable") == 0) {
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  }
}

static void call(dm_status status)
{
  if (status == DM_STATUS_OK) return;
  printf("%s %s\n", dm_status_name(status), dm_last_error());
  exit(0);
}

int main(int argc, char **argv)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  int32_t size = 0;
  float one = 1, sum = 0;
  if (argc != 4) return 2;
  join.timeout_ms = 5000;
  if (strcmp(argv[1], "join") == 0) take(argv[2], atol(argv[3]));
  call(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_world_size(options.world, &size));
  const int32_t shape[] = {(size_t)size};
  if (strcmp(argv[1], "mesh") == 0) take(argv[2], atol(argv[3]));
  call(dm_init("cpu", shape, 1, NULL, &options, &mesh));
  call(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == (float)size);
  puts("DM_STATUS_OK");
  return finish();
}
