/* One rank that makes the calls that its standard input names, one word a line. So
 * tests/test_hosts.py decides what happens in the middle of which call. The words are "hello" (no
 * call), "join", "meet" (a join within 40 s, after which the other calls have TIMEOUT_MS of their
 * own), "barrier", "hurry" (a barrier within 300 ms), "soon" (a barrier within 1100 ms) and "init" (a
 * lazy mesh over all ranks, which needs an agreement and no communicators). Before each call it
 * prints "begin". After the call it prints the status, the milliseconds that the call took, and the
 * message. It ends with its input.
 *
 *   meet DEVICE METHOD RANK SIZE TIMEOUT_MS LIBRARY
 *
 * With METHOD env:// the environment gives rank, size and address. cuda with the host engine as its
 * library needs no device until it makes communicators. */
#include "../check.h"

static double began;

static void begin(void)
{
  printf("begin\n");
  fflush(stdout);
  began = seconds_now();
}

static void end(dm_status status)
{
  const double took = seconds_now() - began;
  printf("%s %.0f %s\n", dm_status_name(status), 1e3 * took, status == DM_STATUS_OK ? "" : dm_last_error());
  fflush(stdout);
}

int main(int count, char **arguments)
{
  if (count != 7) return 2;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  char word[32];
  const char *device = arguments[1];
  join.init_method = arguments[2];
  if (strcmp(arguments[2], "env://") != 0) {
    join.rank = atoi(arguments[3]);
    join.world_size = atoi(arguments[4]);
  }
  join.timeout_ms = atoll(arguments[5]);
  int64_t own_timeout_ms = 0; /* the world's timeout */
  join.ccl_library = arguments[6];
  const int32_t shape[] = {(size_t)atoi(arguments[4])};
  options.flags = DM_INIT_LAZY;
  while (scanf("%31s", word) == 1) {
    begin();
    if (strcmp(word, "hello") == 0) {
      end(DM_STATUS_OK);
    } else if (strcmp(word, "meet") == 0) {
      options.timeout_ms = own_timeout_ms = join.timeout_ms;
      join.timeout_ms = 40000;
      end(dm_world_init(device, &join, &options.world));
    } else if (strcmp(word, "join") == 0) {
      end(dm_world_init(device, &join, &options.world));
    } else if (strcmp(word, "barrier") == 0) {
      end(dm_world_barrier(options.world, own_timeout_ms));
    } else if (strcmp(word, "hurry") == 0) {
      end(dm_world_barrier(options.world, 300));
    } else if (strcmp(word, "soon") == 0) {
      end(dm_world_barrier(options.world, 1100));
    } else if (strcmp(word, "init") == 0) {
      end(dm_init(device, shape, 1, NULL, &options, &mesh));
      dm_free(mesh);
      mesh = NULL;
    } else {
      return 2;
    }
  }
  dm_world_free(options.world);
  return 0;
}
