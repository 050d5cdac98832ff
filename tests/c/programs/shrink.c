/* Some ranks end at random moments, and the others go on without them. They make a mesh, a range
 * of it and collectives until a rank is lost. Then they call dm_shrink until it succeeds, while
 * further ranks are lost. In some jobs they name the lost ranks, and in others they agree on them.
 * tests/test_lost_ranks.py reads what they print:
 *
 *   out <rank>             went with a replica of a lost rank
 *   done <rank> <ranks>    all deaths are over, and the mesh of the survivors joins the ranks that
 *                          it says
 *   wrong <rank> <what>    anything else
 *
 * All ranks derive one plan from DM_SEED. DM_LOST names the file in which a rank notes that it is
 * about to end. */
#include "../check.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

enum { kMost = 8, kPatienceMs = 20000 };

static int32_t me, size;
static int deaths;
static int is_listing; /* whether dm_shrink gets a list of the lost ranks */
static struct { int32_t rank; long after_us; } plan[kMost];
static dm_mesh *aborted;

static unsigned long chance(unsigned long *state)
{
  *state = *state * 6364136223846793005UL + 1442695040888963407UL;
  return *state >> 33;
}

static void wrong(const char *what)
{
  printf("wrong %d %s: %s\n", me, what, dm_last_error());
  fflush(stdout);
  _exit(1);
}

/* The ranks that have noted that they end, in the order of the notes. */
static int lost(int32_t *ranks)
{
  int32_t all[kMost];
  int count = 0;
  FILE *file = fopen(getenv("DM_LOST"), "r");
  while (file != NULL && count < kMost && fscanf(file, "%d\n", &all[count]) == 1) ++count;
  if (file != NULL) fclose(file);
  memcpy(ranks, all, (size_t)count * sizeof *all);
  return count;
}

static void *die_later(void *after)
{
  usleep((useconds_t)*(long *)after);
  char line[16];
  const int length = snprintf(line, sizeof line, "%d\n", me), file = open(getenv("DM_LOST"), O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (write(file, line, (size_t)length) == length) kill(getpid(), SIGKILL);
  return NULL;
}

static void *abort_later(void *after)
{
  usleep((useconds_t)*(long *)after);
  dm_abort(aborted);
  return NULL;
}

/* Whether all deaths are over. All ranks of the mesh get one answer. Also checks which ranks the
 * communicators join. */
static dm_status look(const dm_mesh *mesh, int *over)
{
  int32_t gone[kMost], value = lost(gone) == deaths;
  for (size_t index = 0; index < dm_ndim(mesh); ++index) {
    const char *name = dm_dim_name(mesh, index);
    int32_t group[kMost], gathered[kMost], sum = 0;
    size_t length = 0;
    dm_status status = dm_group_ranks(mesh, name, group, kMost, &length);
    if (status == DM_STATUS_OK) status = dm_all_gather(mesh, name, &me, gathered, 1, DM_INT32, NULL);
    if (status != DM_STATUS_OK) return status;
    if (memcmp(group, gathered, length * sizeof *group) != 0) wrong("other ranks than the mesh says");
    status = dm_all_reduce(mesh, name, &value, &sum, 1, DM_INT32, DM_MIN, NULL);
    if (status != DM_STATUS_OK) return status;
    value = sum;
  }
  *over = value;
  return DM_STATUS_OK;
}

/* Makes a range. Ranks may be lost in the middle of this too. */
static dm_status range(const dm_mesh *mesh, unsigned long turn)
{
  dm_mesh *some = NULL, *flat = NULL;
  int32_t length = 0;
  dm_status status = dm_size(mesh, "dp", &length);
  const int32_t start = length > 1 ? (int32_t)(turn % (unsigned long)(length - 1)) : 0;
  if (status == DM_STATUS_OK)
    status = dm_slice_range(mesh, "dp", start, length - start - (length - start > 2 && turn % 2 == 0), 1, NULL, &some);
  if (status == DM_STATUS_OK) {
    int over = 0;
    status = look(some, &over);
    if (status == DM_STATUS_NOT_MEMBER) status = DM_STATUS_OK;
    else if (status == DM_STATUS_OK) status = dm_flatten(some, NULL, NULL, &flat);
  }
  dm_free(flat);
  dm_free(some);
  return status;
}

/* The mesh without the ranks that are lost by now. NULL where this rank's replica goes too. */
static dm_mesh *without_lost(dm_mesh *mesh)
{
  dm_mesh *left = NULL;
  for (const double until = seconds_now() + kPatienceMs / 1000; seconds_now() < until;) {
    int32_t all[kMost], ranks[kMost], gone[kMost];
    int32_t wanted = 0;
    size_t length = 0, count = 0, replicas = 0;
    REQUIRE(dm_ranks(mesh, ranks, kMost, &length));
    REQUIRE(dm_size(mesh, "tp", &wanted));
    const int known = lost(all);
    for (size_t at = 0; at < length; at += wanted) {
      int is_gone = 0;
      for (size_t rank = at; rank < at + wanted; ++rank)
        for (int other = 0; other < known; ++other)
          if (all[other] == ranks[rank]) gone[count++] = all[other], is_gone = 1;
      replicas += !is_gone;
    }
    if (replicas == 0) return NULL; /* no replica is left */
    if (count > 0 || !is_listing) {
      const dm_status status = is_listing ? dm_shrink(mesh, "dp", gone, count, NULL, &left) : dm_shrink(mesh, "dp", NULL, 0, NULL, &left);
      if (status == DM_STATUS_OK) {
        dm_free(mesh);
        return left;
      }
      /* After dm_abort on one rank all may come here before any rank is lost. And a rank of each
       * replica may be lost before DM_LOST says so here. */
      const int is_early = !is_listing && (status == DM_STATUS_INVALID_STATE || status == DM_STATUS_INVALID_ARGUMENT);
      if (status != DM_STATUS_PEER_LOST && status != DM_STATUS_MISMATCH && status != DM_STATUS_CCL && !is_early) wrong("dm_shrink");
    }
    usleep(1000);
  }
  wrong("dm_shrink never went through");
  return NULL;
}

int main(void)
{
  unsigned long state = strtoul(getenv("DM_SEED"), NULL, 10);
  dm_world *world = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const char *names[] = {"dp", "tp"};
  REQUIRE(dm_world_init("cpu", NULL, &world));
  REQUIRE(dm_world_rank(world, &me));
  REQUIRE(dm_world_size(world, &size));
  for (int at = 0; at < 5; ++at) chance(&state);
  const int32_t tp = size % 2 == 0 && chance(&state) % 2 == 0 ? 2 : 1, shape[] = {size / tp, tp};
  options.world = world;
  options.flags = chance(&state) % 3 == 0 ? DM_INIT_LAZY : 0;
  options.timeout_ms = kPatienceMs;
  deaths = 1 + (int)(chance(&state) % (unsigned long)(size - 1));
  long after_us = (long)(chance(&state) % 20000), abort_us = (long)(chance(&state) % 30000);
  const int32_t aborter = chance(&state) % 3 == 0 ? (int32_t)(chance(&state) % (unsigned long)size) : -1;
  for (int at = 0; at < deaths; ++at) {
    for (int again = 1; again;) {
      plan[at].rank = (int32_t)(chance(&state) % (unsigned long)size), again = 0;
      for (int other = 0; other < at; ++other) again |= plan[other].rank == plan[at].rank;
    }
    plan[at].after_us = after_us;
    after_us += (long)(chance(&state) % 20000);
  }
  is_listing = chance(&state) % 2 == 0;
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_world_barrier(world, 0));
  pthread_t thread;
  aborted = mesh;
  if (aborter == me && pthread_create(&thread, NULL, abort_later, &abort_us) != 0) exit(1);
  for (int at = 0; at < deaths; ++at)
    if (plan[at].rank == me && pthread_create(&thread, NULL, die_later, &plan[at].after_us) != 0) exit(1);
  int over = 0;
  for (unsigned long turn = 0; !over; ++turn) {
    dm_status status = look(mesh, &over);
    if (over) break;
    if (status == DM_STATUS_OK && turn % 2 == 1) status = range(mesh, chance(&state));
    if (status == DM_STATUS_OK) continue;
    /* A rank that makes a lazy mesh's communicator may wait for a rank that is in dm_shrink. Both
     * then get a mismatch. */
    const int is_end = status == DM_STATUS_PEER_LOST || status == DM_STATUS_ABORTED || (options.flags != 0 && status == DM_STATUS_MISMATCH);
    if (!is_end) wrong("a call on the mesh");
    mesh = without_lost(mesh);
    int32_t place = 0;
    if (mesh == NULL || dm_get_local_rank(mesh, "dp", &place) == DM_STATUS_NOT_MEMBER) {
      int32_t all[kMost];
      while (lost(all) < deaths) usleep(1000);
      for (int at = 0; at < deaths; ++at)
        while (all[at] == me) pause(); /* this rank is about to end */
      printf("out %d\n", me);
      fflush(stdout);
      _exit(0);
    }
  }
  int32_t length = 0;
  REQUIRE(dm_size(mesh, NULL, &length));
  REQUIRE(dm_finalize(mesh, NULL));
  printf("done %d %d\n", me, length);
  fflush(stdout);
  return finish();
}
