/* Plays NCCL's part towards a profiler plugin: it looks for the plugin's structure of one version
 * as NCCL does, and tells it of a communicator, of collectives, of a message, and of the channels
 * of their kernels. The structures are written from NCCL's documentation of the interface
 * (plugins/profiler/README.md).
 *
 *     profiler LIBRARY VERSION [many | slow] */
#include <devicemesh.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COLLECTIVE = 1 << 1, MESSAGE = 1 << 2, PROXY = 1 << 3, KERNEL = 1 << 6, COPIES = 1 << 12 };

struct named { const char *name; uint64_t hash; };
struct collective {
  uint64_t sequence;
  const char *function;
  const void *send;
  void *receive;
  size_t count;
  int root;
  const char *datatype;
  uint8_t channels, warps;
  const char *algorithm, *protocol;
};
struct message {
  const char *function;
  void *buffer;
  const char *datatype;
  size_t count;
  int peer;
  uint8_t channels;
};
/* Up to version 4 the kind has one byte, from version 5 on it has eight. */
struct event {
  union { uint8_t byte; uint64_t word; } kind;
  void *parent;
  int rank;
  union {
    struct collective collective;
    struct message message;
    struct { struct named named; struct collective collective; } named_collective;
    struct { struct named named; struct message message; } named_message;
    struct { uint8_t channel; uint64_t time; } kernel;
  };
};
struct profiler {
  const char *name;
  union {
    int (*v3)(void **context, int *kinds);
    int (*v4)(void **context, int *kinds, const char *name, uint64_t hash, int hosts, int ranks, int rank, void *log);
    int (*v5)(void **context, uint64_t hash, int *kinds, const char *name, int hosts, int ranks, int rank, void *log);
  } init;
  int (*start)(void *context, void **handle, const struct event *event);
  int (*stop)(void *handle);
  int (*state)(void *handle, int state, const void *values);
  int (*finalize)(void *context);
};

static int version;
static const struct profiler *plugin;
static void *context;

#define CHECK(what)                                                                     \
  do {                                                                                  \
    if (!(what)) { fprintf(stderr, "line %d: not %s\n", __LINE__, #what); exit(1); }    \
  } while (0)

static void *start(struct event *event, uint64_t kind)
{
  /* The rest of the word is not set by releases whose kind has one byte. */
  memset(&event->kind, 0xee, sizeof event->kind);
  if (version < 5) event->kind.byte = (uint8_t)kind;
  else event->kind.word = kind;
  event->rank = 1;
  void *handle = &handle;
  CHECK(plugin->start(context, &handle, event) == 0);
  return handle;
}

static void *collective(const char *function, const char *datatype, size_t count, int root, int channels, uint64_t kind)
{
  struct event event = {.parent = NULL};
  struct collective of = {.function = function, .count = count, .root = root, .datatype = datatype, .channels = (uint8_t)channels};
  if (version == 3) {
    event.named_collective.named.name = "tp";
    event.named_collective.named.hash = 99;
    event.named_collective.collective = of;
  } else {
    event.collective = of;
  }
  void *handle = start(&event, kind);
  CHECK(handle != NULL);
  return handle;
}

static void *begin_kernel(void *parent, uint8_t channel)
{
  struct event event = {.parent = parent};
  event.kernel.channel = channel;
  return start(&event, KERNEL);
}

static void end_kernel(void *handle)
{
  plugin->state(handle, 22, NULL);
  plugin->stop(handle);
}

static void kernel(void *parent, uint8_t channel)
{
  end_kernel(begin_kernel(parent, channel));
}

/* A message in `channels` channels, as NCCL announces it. */
static void *message(const char *function, size_t count, int channels)
{
  struct event event = {.parent = NULL};
  struct message of = {.function = function, .datatype = "ncclInt64", .count = count, .peer = 0, .channels = (uint8_t)channels};
  if (version == 3) event.named_message.message = of, event.named_message.named = (struct named){"tp", 99};
  else event.message = of;
  return start(&event, MESSAGE);
}

/* Prints the event of a call of whose two channels one has not ended. */
static void slow(void *library)
{
  __typeof__(dm_events_open) *open_events;
  __typeof__(dm_events_next) *next;
  __typeof__(dm_events_free) *free_events;
  /* POSIX's way: ISO C has no conversion of a pointer to an object into one to a function. */
  *(void **)&open_events = dlsym(library, "dm_events_open");
  *(void **)&next = dlsym(library, "dm_events_next");
  *(void **)&free_events = dlsym(library, "dm_events_free");
  dm_event_options options = DM_EVENT_OPTIONS_INIT;
  dm_event event = DM_EVENT_INIT;
  dm_events *events = NULL;
  options.slow_ms = 50;
  CHECK(open_events(&options, &events) == DM_STATUS_OK);
  void *done = collective("AllReduce", "ncclFloat32", 1024, 0, 2, COLLECTIVE);
  plugin->stop(done);
  kernel(done, 0), kernel(done, 1);
  void *half = collective("ReduceScatter", "ncclFloat32", 7, 0, 2, COLLECTIVE);
  plugin->stop(half);
  kernel(half, 0);
  /* NCCL does not tell when a call ends that has no channels. */
  plugin->stop(collective("AllGather", "ncclInt8", 7, 0, 0, COLLECTIVE));
  /* Calls that the stream has behind the one that does not end give no events. */
  void *behind[8];
  for (int i = 0; i < 8; ++i) plugin->stop(behind[i] = collective("AllReduce", "ncclInt8", 7, 0, 1, COLLECTIVE));
  CHECK(next(events, 60000, &event) == DM_STATUS_OK && event.kind == DM_EVENT_SLOW);
  printf("slow %s %lld of %s, rank %d of %d: %s\n", event.operation, (long long)event.call, event.group, event.rank, event.world_size,
         event.message);
  for (int again = 0; again < 2; ++again) CHECK(next(events, 60000, &event) == DM_STATUS_OK && event.call == 2);
  for (int i = 0; i < 8; ++i) kernel(behind[i], 0);
  kernel(half, 1);
  while (next(events, 0, &event) == DM_STATUS_OK && event.kind != DM_EVENT_NONE) CHECK(event.call == 2);
  CHECK(next(events, 300, &event) == DM_STATUS_OK && event.kind == DM_EVENT_NONE);
  free_events(events);
}

int main(int count, char **words)
{
  CHECK(count >= 3);
  version = atoi(words[2]);
  void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  char name[32];
  snprintf(name, sizeof name, "ncclProfiler_v%d", version);
  plugin = dlsym(library, name);
  CHECK(plugin && strcmp(plugin->name, "libdevicemesh") == 0);

  int kinds = 0, code;
  if (version == 3) code = plugin->init.v3(&context, &kinds);
  else if (version == 4) code = plugin->init.v4(&context, &kinds, "tp", 99, 1, 2, 1, NULL);
  else code = plugin->init.v5(&context, 99, &kinds, "tp", 1, 2, 1, NULL);
  printf("init %d kinds %d\n", code, kinds);
  if (code != 0) return 0;
  if (count > 3 && strcmp(words[3], "slow") == 0) return slow(library), 0;

  /* A collective whose kernel has two channels, and ends. */
  void *first = collective("AllReduce", "ncclFloat32", 1024, 0, 2, COLLECTIVE);
  plugin->stop(first);
  if (kinds & KERNEL) kernel(first, 0), kernel(first, 1);
  /* One whose kernel ends before the launch is over. */
  void *quick = collective("Broadcast", "ncclBfloat16", 10, 1, 1, COLLECTIVE);
  if (kinds & KERNEL) kernel(quick, 0);
  plugin->stop(quick);
  /* One of whose two channels one alone has ended. */
  void *half = collective("ReduceScatter", "ncclFloat8e4m3", 7, 0, 2, COLLECTIVE);
  plugin->stop(half);
  if (kinds & KERNEL) kernel(half, 0);
  if (kinds & COPIES) plugin->stop(collective("AlltoAll", "ncclInt8", 64, 0, 0, COPIES));

  /* NCCL announces four channels for a small message, and uses two of them. */
  void *small = message("Send", 3, 4);
  plugin->stop(small);
  if (kinds & KERNEL) {
    void *one = begin_kernel(small, 0), *other = begin_kernel(small, 1);
    end_kernel(one), end_kernel(other);
    /* A third channel begins when the others have ended. */
    end_kernel(begin_kernel(small, 2));
  }
  /* A message with two channels. The second one begins when the first one has ended, and does not
   * end. */
  void *waiting = message("Recv", 5, 2);
  plugin->stop(waiting);
  if (kinds & KERNEL) {
    kernel(waiting, 0);
    begin_kernel(waiting, 1);
  }
  /* One that is never launched to its end: the process hangs here in a real job. */
  collective("AllReduce", "ncclFloat64", 5, 0, 1, COLLECTIVE);

  /* What the plugin did not ask for, and handles of nothing. */
  struct event proxy = {.parent = first};
  void *nothing = start(&proxy, PROXY);
  plugin->state(nothing, 4, NULL);
  plugin->stop(nothing);
  if (version > 3) kernel(NULL, 0);
  /* More calls than the plugin keeps: a handle that came too late is ignored. */
  void *late = count > 3 ? collective("AllGather", "ncclUint8", 1, 0, 1, COLLECTIVE) : NULL;
  for (int call = 0; late && call < 5000; ++call) plugin->stop(collective("AllGather", "ncclUint8", 1, 0, 1, COLLECTIVE));
  kernel(late, 0);
  CHECK(plugin->finalize(context) == 0);
  /* NCCL closes its plugin when its last communicator has ended. A fork must still work then. */
  dlclose(library);
  pid_t child = fork();
  if (child == 0) _exit(0);
  CHECK(waitpid(child, &code, 0) == child && code == 0);
  puts("fine");
  return 0;
}
