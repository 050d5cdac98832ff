/* Tells a profiler plugin of communicators and of operations, as NCCL 2.28 does: NCCL_PROFILER_PLUGIN
 * names the library, and ncclProfiler_v5 in it is the plugin. An operation is one collective or
 * message, and its kernel has ended when the operation returns. */
#include "recorder.h"

#include <dlfcn.h>
#include <stdint.h>

enum { COLLECTIVE = 1 << 1, MESSAGE = 1 << 2, KERNEL = 1 << 6 };

struct event {
  uint64_t kind;
  void *parent;
  int rank;
  union {
    struct {
      uint64_t sequence;
      const char *function;
      const void *send;
      void *receive;
      size_t count;
      int root;
      const char *datatype;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
    } collective;
    struct {
      const char *function;
      void *buffer;
      const char *datatype;
      size_t count;
      int peer;
      uint8_t channels;
    } message;
    uint8_t channel;
  };
};

struct plugin {
  const char *name;
  int (*init)(void **context, uint64_t hash, int *kinds, const char *name, int hosts, int ranks, int rank, void *log);
  int (*start)(void *context, void **handle, const struct event *event);
  int (*stop)(void *handle);
  int (*state)(void *handle, int state, const void *values);
  int (*finalize)(void *context);
};

static const struct plugin *plugin(void)
{
  static const struct plugin *found;
  const char *path = getenv("NCCL_PROFILER_PLUGIN");
  if (found != NULL || path == NULL) return found;
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  found = library == NULL ? NULL : dlsym(library, "ncclProfiler_v5");
  if (found == NULL) {
    fprintf(stderr, "recorder: no profiler plugin: %s\n", dlerror());
    abort();
  }
  return found;
}

void profile(struct ncclComm *comm, int ranks, int rank)
{
  int kinds = 0;
  if (plugin() == NULL) return;
  if (ranks == 0 && (REAL(ncclCommCount)(comm->real, &ranks) != ncclSuccess || REAL(ncclCommUserRank)(comm->real, &rank) != ncclSuccess)) return;
  if (plugin()->init(&comm->context, (uint64_t)comm->number, &kinds, comm->name, 1, ranks, rank, NULL) != 0) comm->context = NULL;
}

void profile_operation(struct ncclComm *comm, const char *function, size_t count)
{
  if (comm->context == NULL) return;
  struct event event = {0}, kernel = {0};
  void *handle = NULL, *channel = NULL;
  const int is_message = strcmp(function, "Send") == 0 || strcmp(function, "Recv") == 0;
  event.kind = is_message ? MESSAGE : COLLECTIVE;
  if (is_message) {
    event.message.function = function;
    event.message.datatype = "ncclFloat32";
    event.message.count = count;
    event.message.channels = 1;
  } else {
    event.collective.function = function;
    event.collective.datatype = "ncclFloat32";
    event.collective.count = count;
    event.collective.channels = 1;
  }
  plugin()->start(comm->context, &handle, &event);
  kernel.kind = KERNEL;
  kernel.parent = handle;
  plugin()->start(comm->context, &channel, &kernel);
  plugin()->stop(handle);
  plugin()->stop(channel);
}

void profile_end(struct ncclComm *comm)
{
  if (comm->context != NULL) plugin()->finalize(comm->context);
  comm->context = NULL;
}
