/* Ranks whose handler prints each event, for tests/test_events.py.
 *
 *     watch WAY MESH_RANKS [STORE]
 *
 * The mesh is (dp=MESH_RANKS / 2, tp=2) over the first ranks of the world, which meet in STORE
 * (file:///path) where it is given; further ranks are spares. Rank 1 does what its WAY says, and
 * each rank ends when it has seen its events. */
#include "../check.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
/* How many events of each kind have come. */
static int seen[DM_EVENT_RECOVERED + 1];

static const char *const kKinds[] = {"none", "joined", "slow", "lost", "aborted", "recovered"};

static const char *text(const char *words)
{
  return words == NULL ? "-" : words;
}

static void on_event(void *user_data, const dm_event *event)
{
  char name[16] = "";
  CHECK(user_data == (void *)seen && event->struct_size == sizeof *event && event->time_ns > 0);
  CHECK(pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strcmp(name, "dm-events") == 0);
  pthread_mutex_lock(&lock);
  printf("rank %d of %d: %s", event->rank, event->world_size, kKinds[event->kind]);
  for (size_t i = 0; i < event->num_ranks; ++i) printf("%s%d", i == 0 ? " ranks=" : ",", event->ranks[i]);
  printf(" group=%s dim=%s operation=%s call=%lld waited=%.3f epoch=%lld dropped=%llu message=%s\n", text(event->group),
         text(event->dim), text(event->operation), (long long)event->call, event->waited_seconds, (long long)event->epoch,
         (unsigned long long)event->dropped, event->message);
  fflush(stdout);
  ++seen[event->kind];
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

/* Waits until the handler has seen so many events of that kind. */
static void await_many(dm_event_kind kind, int many)
{
  pthread_mutex_lock(&lock);
  while (seen[kind] < many) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

static void await(dm_event_kind kind)
{
  await_many(kind, 1);
}

static void say(const char *words)
{
  pthread_mutex_lock(&lock);
  printf("%s\n", words);
  fflush(stdout);
  pthread_mutex_unlock(&lock);
}

int main(int argc, char **argv)
{
  const char *way = argc > 1 ? argv[1] : "";
  const int32_t ranks = argc > 2 ? atoi(argv[2]) : 4, me = atoi(getenv("RANK"));
  const int32_t shape[2] = {ranks / 2, 2};
  const char *names[2] = {"dp", "tp"};
  float in[4] = {1, 2, 3, 4}, out[4];
  dm_event_options options = DM_EVENT_OPTIONS_INIT;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options init = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL, *next = NULL, *flat = NULL;

  options.slow_ms = 100;
  REQUIRE(dm_set_event_handler(on_event, seen, &options));
  if (strcmp(way, "join") == 0 && me == 1) raise(SIGSTOP);
  if (argc > 3) {
    join.init_method = argv[3];
    REQUIRE(dm_world_init("cpu", &join, &world));
    init.world = world;
  }
  REQUIRE(dm_init("cpu", shape, 2, names, &init, &mesh));
  await(DM_EVENT_JOINED);
  if (strcmp(way, "slow") == 0) {
    OK(dm_all_reduce(mesh, "tp", in, out, 4, DM_FLOAT32, DM_SUM, NULL));
    if (me == 1) raise(SIGSTOP);
    OK(dm_all_reduce(mesh, "tp", in, out, 4, DM_FLOAT32, DM_SUM, NULL));
  }
  if (strcmp(way, "message") == 0) {
    if (me == 0) OK(dm_recv(mesh, "tp", in, 4, DM_FLOAT32, 1, NULL));
    if (me == 1) {
      raise(SIGSTOP);
      OK(dm_send(mesh, "tp", in, 4, DM_FLOAT32, 0, NULL));
    }
  }
  if (strcmp(way, "far") == 0) {
    OK(dm_all_reduce(mesh, "dp", in, out, 4, DM_FLOAT32, DM_SUM, NULL));
    if (me == 1) raise(SIGSTOP);
    OK(dm_all_reduce(mesh, "dp", in, out, 4, DM_FLOAT32, DM_SUM, NULL));
  }
  if (strcmp(way, "agree") == 0) {
    if (me == 1) raise(SIGSTOP);
    OK(dm_flatten(mesh, "all", NULL, &flat));
  }
  if (strcmp(way, "lost") == 0) {
    if (me == 1) raise(SIGKILL);
    await(DM_EVENT_LOST);
    /* The others may still wait for theirs. */
    say("told");
    pause();
  }
  if (strcmp(way, "abort") == 0) {
    if (me == 1) OK(dm_abort(mesh));
    await(DM_EVENT_ABORTED);
    say("told");
    pause();
  }
  if (strcmp(way, "recover") == 0 || strcmp(way, "late") == 0) {
    dm_recover_options how = DM_RECOVER_OPTIONS_INIT;
    if (atoi(getenv("WORLD_SIZE")) > ranks) how.replace_ms = 30000;
    if (me == 1) raise(SIGKILL);
    if (me < ranks) await(DM_EVENT_LOST);
    if (strcmp(way, "late") == 0 && me == 3) raise(SIGSTOP);
    REQUIRE(dm_recover(mesh, &how, &next, NULL));
    await(DM_EVENT_RECOVERED);
    /* The spare has joined the mesh. */
    if (how.replace_ms > 0) await_many(DM_EVENT_JOINED, 2);
    bool is_member = false;
    OK(dm_is_member(next, &is_member));
    if (!is_member) pause();
    OK(dm_default_world_finalize(0));
    say("done");
    return finish();
  }
  OK(dm_finalize(mesh, NULL));
  say("done");
  return finish();
}
