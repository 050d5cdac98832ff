/* Makes every kind of call that ranks make together, in a loop: joins a world, then makes rounds
 * of meshes, communicators, collectives, messages, barriers and finalizing.
 * tests/test_lost_ranks.py ends one of the ranks and reads what the others print:
 *
 *   phase <name> <seconds>              before each phase, and before each of its calls that may
 *                                       last for the whole timeout (CLOCK_MONOTONIC)
 *   error <status> <seconds> <message>  the first error; the rank then aborts and frees what it
 *                                       has, and ends with code 3
 *   done <seconds>                      all rounds succeeded; the rank ends with code 0
 *   dying <how> <seconds>               the rank itself is about to end
 *
 * DM_ROUNDS is the number of rounds (0 or unset: without end), DM_TIMEOUT_MS the timeout of every
 * call, and DM_INIT the init_method. DM_DIE=<rank>:<phase>:<how>[:<delay in us>] ends a rank, where
 * how is exit, kill or stop. Without a delay the rank ends before the first call of that phase.
 * With a delay another thread ends it, in the middle of whatever runs then. */
#include "../check.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

enum { kSmall = 1001, kLarge = 96 << 10, kMeshes = 4, kViews = 2 };

static dm_world *world;
static dm_mesh *meshes[kMeshes], *views[kViews];
static int32_t rank, ranks;
static int64_t timeout_ms;
static float *send_buffer, *recv_buffer;
static struct { int32_t rank; char phase[32], how[8]; long delay_us; } death = {-1, "", "", -1};

static void die(void)
{
  dprintf(1, "dying %s %.6f\n", death.how, seconds_now());
  if (strcmp(death.how, "exit") == 0) exit(7);
  kill(getpid(), strcmp(death.how, "kill") == 0 ? SIGKILL : SIGSTOP);
}

static void *die_later(void *unused)
{
  const struct timespec pause = {death.delay_us / 1000000, death.delay_us % 1000000 * 1000};
  (void)unused;
  nanosleep(&pause, NULL);
  die();
  return NULL;
}

static void phase(const char *name)
{
  dprintf(1, "phase %s %.6f\n", name, seconds_now());
  if (death.rank != rank || strcmp(death.phase, name) != 0) return;
  death.rank = -1; /* the death happens once */
  pthread_t thread;
  if (death.delay_us < 0) die();
  else if (pthread_create(&thread, NULL, die_later, NULL) != 0) exit(1);
}

static void leave(void)
{
  for (int at = 0; at < kMeshes; ++at) {
    if (meshes[at] != NULL) dm_abort(meshes[at]);
    dm_free(meshes[at]);
  }
  for (int at = 0; at < kViews; ++at) dm_free(views[at]);
  dm_world_free(world);
}

/* Every call goes through this: the first error is the last call. */
static void must(dm_status status)
{
  if (status == DM_STATUS_OK) return;
  dprintf(1, "error %s %.6f %s\n", dm_status_name(status), seconds_now(), dm_last_error());
  leave();
  /* A rank that calls exit() is missed some milliseconds before its process has ended. The
   * survivors then stay for a while, where the test asks which process ended first. */
  if (getenv("DM_STAY_MS") != NULL) usleep(1000 * (unsigned)atoi(getenv("DM_STAY_MS")));
  exit(3);
}

/* A collective that returns DM_STATUS_OK has the right result, also when a rank died meanwhile. */
static void right(const char *what, size_t at, float got, float expected)
{
  if (got == expected) return;
  dprintf(1, "wrong %s: element %zu is %g, expected %g\n", what, at, (double)got, (double)expected);
  exit(4);
}

static float value(int32_t of, size_t at) { return (float)(of + 1 + (int32_t)(at % 7)); }

static void fill(int32_t local, size_t count)
{
  for (size_t at = 0; at < count; ++at) send_buffer[at] = value(local, at), recv_buffer[at] = -1;
}

/* This rank along dim; gives the number of ranks along it. */
static int32_t place(const dm_mesh *mesh, const char *dim, int32_t *local)
{
  int32_t size = 0;
  must(dm_size(mesh, dim, &size));
  must(dm_get_local_rank(mesh, dim, local));
  return (int32_t)size;
}

static void all_reduce(const dm_mesh *mesh, const char *dim, size_t count)
{
  int32_t local = 0, n = place(mesh, dim, &local);
  fill(local, count);
  must(dm_all_reduce(mesh, dim, send_buffer, recv_buffer, count, DM_FLOAT32, DM_SUM, NULL));
  for (size_t at = 0; at < count; ++at)
    right("dm_all_reduce", at, recv_buffer[at], (float)(n * (n + 1) / 2) + (float)n * (float)(at % 7));
}

static void collectives(const dm_mesh *mesh, const char *dim, size_t count)
{
  int32_t local = 0, n = place(mesh, dim, &local);
  const size_t last = count - 1;
  const float sum = (float)(n * (n + 1) / 2);
  fill(local, count * (size_t)n);
  phase("reduce");
  must(dm_reduce(mesh, dim, send_buffer, recv_buffer, count, DM_FLOAT32, DM_SUM, n - 1, NULL));
  if (local == n - 1) right("dm_reduce", last, recv_buffer[last], sum + (float)n * (float)(last % 7));
  phase("broadcast");
  must(dm_broadcast(mesh, dim, send_buffer, recv_buffer, count, DM_FLOAT32, 0, NULL));
  right("dm_broadcast", last, recv_buffer[last], value(0, last));
  phase("all_gather");
  must(dm_all_gather(mesh, dim, send_buffer, recv_buffer, count, DM_FLOAT32, NULL));
  for (int32_t of = 0; of < n; ++of) right("dm_all_gather", last, recv_buffer[(size_t)of * count + last], value(of, last));
  phase("reduce_scatter");
  must(dm_reduce_scatter(mesh, dim, send_buffer, recv_buffer, count, DM_FLOAT32, DM_SUM, NULL));
  right("dm_reduce_scatter", last, recv_buffer[last], sum + (float)n * (float)(((size_t)local * count + last) % 7));
  phase("all_to_all");
  must(dm_all_to_all(mesh, dim, send_buffer, recv_buffer, count, DM_FLOAT32, NULL));
  for (int32_t of = 0; of < n; ++of)
    right("dm_all_to_all", last, recv_buffer[(size_t)of * count + last], value(of, (size_t)local * count + last));
  phase("exchange");
  must(dm_group_start(mesh));
  must(dm_recv(mesh, dim, recv_buffer, count, DM_FLOAT32, (local + n - 1) % n, NULL));
  must(dm_send(mesh, dim, send_buffer, count, DM_FLOAT32, (local + 1) % n, NULL));
  must(dm_group_end(mesh));
  right("dm_recv", last, recv_buffer[last], value((local + n - 1) % n, last));
  /* Each rank receives before it sends, so the message passes from rank to rank. */
  if (local > 0) must(dm_recv(mesh, dim, recv_buffer, count, DM_FLOAT32, local - 1, NULL));
  if (local < n - 1) must(dm_send(mesh, dim, send_buffer, count, DM_FLOAT32, local + 1, NULL));
}

static void one_round(void)
{
  const int32_t flat_shape[] = {ranks};
  const int32_t inner = ranks % 2 == 0 ? 2 : 1;
  const int32_t cube[] = {2, 2, 2}, plane[] = {ranks / inner, inner};
  const int32_t *shape = ranks == 8 ? cube : plane;
  const size_t ndim = ranks == 8 ? 3 : 2;
  const char *names[] = {"a", "b", "c"}, *halves[] = {"x", "y"}, *line[] = {"line"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_dim_options apart[3] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  for (int at = 0; at < 3; ++at) apart[at].flags = DM_DIM_OWN_COMM;
  dm_call_options own = DM_CALL_OPTIONS_INIT;
  own.dim_options = apart;
  own.num_dim_options = 2;
  options.world = world;

  phase("init");
  must(dm_init("cpu", shape, ndim, names, &options, &meshes[0]));
  phase("flatten");
  must(dm_flatten(meshes[0], "all", NULL, &views[0]));
  phase("unflatten");
  const int32_t parts[] = {inner, ranks / inner};
  must(dm_unflatten(views[0], "all", parts, 2, halves, &own, &views[1]));
  phase("lazy");
  options.flags = DM_INIT_LAZY;
  options.dim_options = apart;
  options.num_dim_options = ndim;
  must(dm_init("cpu", shape, ndim, names, &options, &meshes[1]));
  for (size_t dim = 0; dim < ndim; ++dim) {
    ncclComm_t comm = NULL;
    phase("lazy");
    must(dm_get_comm(meshes[1], names[dim], &comm));
  }
  options.flags = 0;

  phase("all_reduce");
  for (size_t dim = 0; dim < ndim; ++dim) all_reduce(meshes[0], names[dim], kSmall);
  all_reduce(views[0], NULL, kLarge);
  for (int dim = 0; dim < 2; ++dim) all_reduce(views[1], halves[dim], kSmall);
  all_reduce(meshes[1], "a", kLarge);
  collectives(views[0], NULL, kLarge);
  collectives(meshes[0], "a", kSmall);
  phase("barrier");
  must(dm_world_barrier(world, timeout_ms));

  phase("second"); /* a mesh with the ranks in reverse, which has communicators of its own */
  int32_t backwards[8];
  for (int32_t at = 0; at < ranks; ++at) backwards[at] = ranks - 1 - at;
  options.ranks = backwards;
  options.num_ranks = (size_t)ranks;
  options.num_dim_options = 1;
  must(dm_init("cpu", flat_shape, 1, line, &options, &meshes[2]));
  phase("second");
  all_reduce(meshes[2], NULL, kSmall);
  phase("part"); /* a mesh without one of the ranks */
  const int32_t fewer[] = {ranks - 1};
  options.num_ranks = (size_t)ranks - 1;
  must(dm_init("cpu", fewer, 1, line, &options, &meshes[3]));
  phase("part");
  if (rank > 0) all_reduce(meshes[3], NULL, kSmall);

  for (int at = kMeshes - 1; at >= 0; --at) {
    phase("finalize");
    must(dm_finalize(meshes[at], NULL));
    dm_free(meshes[at]);
    meshes[at] = NULL;
  }
  for (int at = 0; at < kViews; ++at) {
    dm_free(views[at]);
    views[at] = NULL;
  }
}

int main(void)
{
  const char *rounds_text = getenv("DM_ROUNDS"), *timeout_text = getenv("DM_TIMEOUT_MS"), *die_text = getenv("DM_DIE");
  const long rounds = rounds_text == NULL ? 0 : strtol(rounds_text, NULL, 10);
  timeout_ms = timeout_text == NULL ? 0 : strtol(timeout_text, NULL, 10);
  if (die_text != NULL &&
      sscanf(die_text, "%d:%31[a-z_]:%7[a-z]:%ld", &death.rank, death.phase, death.how, &death.delay_us) < 3) {
    fprintf(stderr, "DM_DIE is \"%s\", not <rank>:<phase>:<how>[:<delay in us>]\n", die_text);
    return 1;
  }
  rank = (int32_t)strtol(getenv("RANK") == NULL ? "0" : getenv("RANK"), NULL, 10);
  send_buffer = (float *)malloc(sizeof(float) * 8 * kLarge);
  recv_buffer = (float *)malloc(sizeof(float) * 8 * kLarge);
  if (send_buffer == NULL || recv_buffer == NULL) return 1;

  phase("join");
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  join.timeout_ms = timeout_ms;
  join.init_method = getenv("DM_INIT");
  must(dm_world_init("cpu", &join, &world));
  must(dm_world_size(world, &ranks));
  if (ranks < 2 || ranks > 8) return 1;
  for (long round = 0; rounds == 0 || round < rounds; ++round) one_round();
  phase("free");
  dm_world_free(world);
  dprintf(1, "done %.6f\n", seconds_now());
  return 0;
}
