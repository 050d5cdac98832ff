/* A job of eight ranks that hangs in the way that its argument names, for tests/test_why.py.
 *
 *     hang WAY
 *
 * The mesh is (dp=2, tp=4). Each rank makes 5 all-reduces along tp and 3 along dp. Then rank 3 does
 * what its WAY says, and the others go on until they wait for it. */
#include "../check.h"

#include <signal.h>
#include <unistd.h>

static dm_mesh *mesh;

/* A call that fails is where the rank stays: it does not end, and it calls nothing more. */
static void all_reduce(const char *dim, size_t count)
{
  static float in[16], out[16];
  if (dm_all_reduce(mesh, dim, in, out, count, DM_FLOAT32, DM_SUM, NULL) != DM_STATUS_OK) sleep(1000);
}

static int is(const char *way, const char *name)
{
  return strcmp(way, name) == 0;
}

static volatile int never;

int main(int argc, char **argv)
{
  const char *way = argc > 1 ? argv[1] : "none";
  const int32_t shape[2] = {2, 4};
  const char *names[2] = {"dp", "tp"};
  if (is(way, "join") && strcmp(getenv("RANK"), "3") == 0) sleep(1000);
  REQUIRE(dm_init("cpu", shape, 2, names, NULL, &mesh));
  const int32_t me = rank_of(mesh);
  for (int step = 0; step < 5; ++step) all_reduce("tp", 4);
  for (int step = 0; step < 3; ++step) all_reduce("dp", 4);
  if (is(way, "none")) {
    for (;;) {
      all_reduce("tp", 4);
      usleep(1000);
    }
  }
  if (me == 3) {
    if (is(way, "sleep")) sleep(1000);
    if (is(way, "spin"))
      while (!never) {}
    if (is(way, "stop")) raise(SIGSTOP);
    if (is(way, "die")) raise(SIGKILL);
    if (is(way, "store")) sleep(1000);
    if (is(way, "group")) {
      OK(dm_group_start(mesh));
      all_reduce("tp", 4);
      sleep(1000);
    }
    if (is(way, "count")) {
      all_reduce("tp", 8);
      sleep(1000);
    }
    if (is(way, "dimension")) {
      /* The others call tp. */
      all_reduce("dp", 4);
      sleep(1000);
    }
  }
  if (is(way, "store")) {
    dm_mesh *flat = NULL;
    dm_flatten(mesh, "all", NULL, &flat);
    sleep(1000);
  }
  if (is(way, "crossed")) {
    /* Ranks 0, 2, 5 and 7 begin with dp, and the others with tp. */
    const int first = (me % 4 + me / 4) % 2 == 0;
    all_reduce(first ? "dp" : "tp", 4);
    all_reduce(first ? "tp" : "dp", 4);
    sleep(1000);
  }
  if (!(is(way, "skip") && me == 3)) all_reduce("tp", 4);
  all_reduce("dp", 4);
  if (is(way, "skip")) all_reduce("tp", 4);
  sleep(1000);
  return 0;
}
