/* ranks: 4 */
/* Queues of events and the handler: what is refused, that each of them gets every event, the
 * descriptor, calls from inside the handler, forks, and the counters. tests/test_events.py has
 * ranks that are late, killed and aborted. */
#include "check.h"

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static bool is_readable(int32_t fd)
{
  struct pollfd look = {fd, POLLIN, 0};
  return poll(&look, 1, 0) == 1;
}

static dm_event next(dm_events *events, int64_t timeout_ms)
{
  dm_event event = DM_EVENT_INIT;
  OK(dm_events_next(events, timeout_ms, &event));
  return event;
}

/* The next abort of this rank. Other ranks abort as well, and are lost when they abort their
 * world, so their events may come between. */
static dm_event own_abort(dm_events *events)
{
  dm_event event = next(events, 60000);
  while (event.kind == DM_EVENT_LOST || (event.kind == DM_EVENT_ABORTED && event.ranks[0] != atoi(getenv("RANK")))) {
    event = next(events, 60000);
  }
  return event;
}

static void refusals(void)
{
  dm_event_options options = DM_EVENT_OPTIONS_INIT;
  dm_event event = DM_EVENT_INIT;
  dm_events *events = NULL;
  int32_t fd = -7;
  options.slow_ms = -1;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.slow_ms is -1", dm_events_open(&options, &events));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.slow_ms is -1", dm_set_event_handler(NULL, NULL, &options));
  options.slow_ms = 0;
  options.flags = 4;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.flags has unknown bits 0x4", dm_events_open(&options, &events));
  options.flags = 0;
  options.struct_size = 8;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.struct_size is 8", dm_events_open(&options, &events));
  CHECK(events == NULL);
  REQUIRE(dm_events_open(NULL, &events));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "timeout_ms is -1; a timeout is in milliseconds, 0 to take an event without waiting", dm_events_next(events, -1, &event));
  event.struct_size = 16;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "event_out.struct_size is 16", dm_events_next(events, 0, &event));
  dm_events_free(events);
  dm_events_free(events);
  FAILS(DM_STATUS_INVALID_HANDLE, "dm_events", dm_events_fd(events, &fd));
  CHECK(fd == -7);
}

/* The events that the handler has seen. The handler runs on one thread, and main waits for the
 * counts. */
typedef struct {
  int joined, aborted, lost, others; /* read by wait_for while the handler counts */
  pthread_t thread;
  bool replaces_itself;
} watching;

static watching seen, once;

static void on_event(void *user_data, const dm_event *event)
{
  watching *of = (watching *)user_data;
  CHECK(event->struct_size == sizeof *event);
  if (event->kind == DM_EVENT_JOINED) __atomic_add_fetch(&of->joined, 1, __ATOMIC_SEQ_CST);
  else if (event->kind == DM_EVENT_ABORTED) __atomic_add_fetch(&of->aborted, 1, __ATOMIC_SEQ_CST);
  else if (event->kind == DM_EVENT_LOST) __atomic_add_fetch(&of->lost, 1, __ATOMIC_SEQ_CST);
  else __atomic_add_fetch(&of->others, 1, __ATOMIC_SEQ_CST);
  CHECK(of->joined + of->aborted + of->lost + of->others == 1 || pthread_equal(of->thread, pthread_self()));
  of->thread = pthread_self();
  /* Local calls work here, also this one. */
  CHECK(dm_version() > 0);
  if (of->replaces_itself) OK(dm_set_event_handler(NULL, NULL, NULL));
}

/* Waits until the handler has counted so many. */
static void wait_for(const int *count, int many)
{
  const double until = seconds_now() + 60;
  while (__atomic_load_n(count, __ATOMIC_SEQ_CST) < many && seconds_now() < until) usleep(1000);
  CHECK(__atomic_load_n(count, __ATOMIC_SEQ_CST) >= many);
}

/* Whether the thread is there that calls the handler and fills the queues. */
static bool has_thread(void)
{
  bool found = false;
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *task = readdir(tasks); task != NULL; task = readdir(tasks)) {
    char path[300], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
    FILE *comm = fopen(path, "r");
    found = found || (comm != NULL && fgets(name, sizeof name, comm) != NULL && strcmp(name, "dm-events\n") == 0);
    if (comm != NULL) fclose(comm);
  }
  closedir(tasks);
  return found;
}

static void forked(void)
{
  pid_t child = fork();
  if (child == 0) {
    dm_events *events = NULL;
    const bool is_refused = dm_events_open(NULL, &events) == DM_STATUS_UNSUPPORTED &&
                            dm_set_event_handler(NULL, NULL, NULL) == DM_STATUS_UNSUPPORTED;
    /* The stacks of the parent's threads are gone here, so a search for leaks at the end of the
     * child would find what only they point to. A child that is killed is not searched. */
    if (is_refused) raise(SIGKILL);
    _exit(1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static pthread_key_t ends;

/* A thread that ends has no place for an event any more. */
static void at_the_end(void *events)
{
  dm_event event = DM_EVENT_INIT;
  GIVES(DM_STATUS_INVALID_STATE, dm_events_next((dm_events *)events, 0, &event));
}

/* The thread fails once before it ends, so its last error exists by then and is freed with the
 * thread. A last error that is first set after the thread's other values were destroyed is never
 * freed. */
static void *ask_and_end(void *events)
{
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_events_next((dm_events *)events, -1, NULL));
  CHECK(next((dm_events *)events, 0).kind == DM_EVENT_JOINED && pthread_setspecific(ends, events) == 0);
  return NULL;
}

static void ending_thread(void)
{
  dm_events *events = NULL;
  pthread_t thread;
  REQUIRE(dm_events_open(NULL, &events));
  CHECK(pthread_key_create(&ends, at_the_end) == 0 && pthread_create(&thread, NULL, ask_and_end, events) == 0);
  CHECK(pthread_join(thread, NULL) == 0 && pthread_key_delete(ends) == 0);
  dm_events_free(events);
}

static void counters(void)
{
  static char text[1 << 16];
  size_t length = 0;
  char line[64];
  GIVES(DM_STATUS_BUFFER_TOO_SMALL, dm_metrics(text, 3, &length));
  CHECK(length > 3);
  REQUIRE(dm_metrics(text, sizeof text, &length));
  CHECK(length == strlen(text) + 1);
  snprintf(line, sizeof line, "devicemesh_process_info{pid=\"%d\",", (int)getpid());
  CHECK(strstr(text, line) != NULL);
  CHECK(strstr(text, "group=\"mesh/tp\",kind=\"dimension\"} 3\n") != NULL);
}

int main(void)
{
  const int32_t shape[] = {2, 2}, me = atoi(getenv("RANK"));
  const char *names[] = {"dp", "tp"};
  dm_events *first = NULL, *second = NULL, *late = NULL;
  dm_event_options options = DM_EVENT_OPTIONS_INIT;
  int32_t fd = -1, ones[1] = {1}, sum[1];

  refusals();
  options.slow_ms = 3600000;
  REQUIRE(dm_events_open(&options, &first));
  REQUIRE(dm_events_open(&options, &second));
  REQUIRE(dm_events_fd(first, &fd));
  OK(dm_set_event_handler(on_event, &seen, &options));
  CHECK(!is_readable(fd) && next(first, 0).kind == DM_EVENT_NONE && next(first, 1).kind == DM_EVENT_NONE);
  forked();

  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cpu", shape, 2, names, NULL, &mesh));
  for (int step = 0; step < 3; ++step) OK(dm_all_reduce(mesh, "tp", ones, sum, 1, DM_INT32, DM_SUM, NULL));
  counters();
  CHECK(is_readable(fd));
  dm_event event = next(first, 60000);
  CHECK(event.kind == DM_EVENT_JOINED && event.rank == me && event.world_size == 4 && event.epoch == 0 && event.dropped == 0);
  CHECK(event.num_ranks == 1 && event.ranks[0] == me && event.group == NULL && event.dim == NULL && event.operation == NULL);
  CHECK(event.call == -1 && event.waited_seconds < 0 && strstr(event.message, " has joined a world of 4 ranks: ") != NULL);
  CHECK(!is_readable(fd) && next(second, 60000).kind == DM_EVENT_JOINED);
  /* A queue that comes later begins with the worlds that are there. */
  REQUIRE(dm_events_open(&options, &late));
  CHECK(next(late, 0).kind == DM_EVENT_JOINED);
  ending_thread();

  meet(mesh);
  OK(dm_abort(mesh));
  OK(dm_abort(mesh));
  event = own_abort(first);
  CHECK(event.kind == DM_EVENT_ABORTED && event.num_ranks == 1 && event.ranks[0] == me);
  CHECK(event.group != NULL && strcmp(event.group, "mesh") == 0 && strstr(event.message, "dm_abort ends DeviceMesh((dp=2, tp=2)") != NULL);
  CHECK(own_abort(second).kind == DM_EVENT_ABORTED && own_abort(late).kind == DM_EVENT_ABORTED);
  dm_events_free(first);
  FAILS(DM_STATUS_INVALID_HANDLE, "dm_events", dm_events_fd(first, &fd));

  /* The abort of a world is its last event. */
  OK(dm_default_world_abort());
  event = own_abort(second);
  CHECK(event.kind == DM_EVENT_ABORTED && event.group == NULL);
  wait_for(&seen.aborted, 2);
  OK(dm_set_event_handler(NULL, NULL, NULL));
  CHECK(seen.joined == 1 && seen.others == 0);

  /* A handler that takes itself away gets one event. */
  once.replaces_itself = true;
  dm_world_options alone = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  OK(dm_set_event_handler(on_event, &once, NULL));
  alone.world_size = 1;
  REQUIRE(dm_world_init("cpu", &alone, &world));
  CHECK(own_abort(second).kind == DM_EVENT_JOINED);
  OK(dm_world_abort(world));
  event = next(second, 60000);
  CHECK(event.kind == DM_EVENT_ABORTED && event.world_size == 1);
  wait_for(&once.joined, 1);
  OK(dm_set_event_handler(NULL, NULL, NULL));
  CHECK(once.joined == 1 && once.aborted == 0);
  dm_world_free(world);
  /* After dm_world_finalize there is nothing left to abort. */
  REQUIRE(dm_world_init("cpu", &alone, &world));
  CHECK(next(second, 60000).kind == DM_EVENT_JOINED);
  OK(dm_world_finalize(world, 0));
  OK(dm_world_abort(world));
  CHECK(next(second, 0).kind == DM_EVENT_NONE);
  dm_world_free(world);
  dm_events_free(second);
  CHECK(has_thread());
  dm_events_free(late);
  const double until = seconds_now() + 60;
  while (has_thread() && seconds_now() < until) usleep(1000);
  CHECK(!has_thread());
  dm_free(mesh);
  return finish();
}
