/* libdevicemesh's part of benches/peers: a mesh of one dimension, and the functions of the library
 * that made its communicator. */
#define _GNU_SOURCE
#include <devicemesh.h>

#include "measure.h"

typedef int result;
static struct {
  result (*all_reduce)(const void *, void *, size_t, int, int, ncclComm_t, void *);
  result (*all_gather)(const void *, void *, size_t, int, ncclComm_t, void *);
  result (*reduce_scatter)(const void *, void *, size_t, int, int, ncclComm_t, void *);
  result (*broadcast)(const void *, void *, size_t, int, int, ncclComm_t, void *);
  result (*all_to_all)(const void *, void *, size_t, int, ncclComm_t, void *);
  result (*send)(const void *, size_t, int, int, ncclComm_t, void *);
  result (*recv)(void *, size_t, int, int, ncclComm_t, void *);
  const char *(*last_error)(ncclComm_t);
} nccl;
static ncclComm_t comm;

static void check(dm_status status, const char *call)
{
  if (status != DM_STATUS_OK) {
    fprintf(stderr, "%s: %s: %s\n", call, dm_status_name(status), dm_last_error());
    exit(1);
  }
}
#define CHECK(call) check(call, #call)

static void worked(result code)
{
  if (code != 0) {
    fprintf(stderr, "%s\n", nccl.last_error(comm));
    exit(1);
  }
}

static const int TYPES[DTYPES] = {DM_FLOAT32, DM_BFLOAT16};

static void run(struct work *work, const char *variant)
{
  (void)variant;
  const int type = TYPES[work->dtype];
  switch (work->operation) {
  case ALL_REDUCE: worked(nccl.all_reduce(work->send, work->recv, work->count, type, DM_SUM, comm, NULL)); break;
  case ALL_GATHER: worked(nccl.all_gather(work->send, work->recv, work->part, type, comm, NULL)); break;
  case REDUCE_SCATTER: worked(nccl.reduce_scatter(work->send, work->recv, work->part, type, DM_SUM, comm, NULL)); break;
  case BROADCAST:
    for (int root = 0; root < work->ranks; root++)
      worked(nccl.broadcast(work->send, work->recv, work->count, type, root, comm, NULL));
    break;
  case ALL_TO_ALL: worked(nccl.all_to_all(work->send, work->recv, work->part, type, comm, NULL)); break;
  default:
    if (work->rank == 0)
      worked(nccl.send(work->send, work->count, type, work->right, comm, NULL));
    worked(nccl.recv(work->recv, work->count, type, work->left, comm, NULL));
    if (work->rank != 0)
      worked(nccl.send(work->send, work->count, type, work->right, comm, NULL));
  }
}

static void maximum(int64_t *values, size_t count)
{
  worked(nccl.all_reduce(values, values, count, DM_INT64, DM_MAX, comm, NULL));
}

static const char *const *variants(enum operation operation, enum dtype dtype)
{
  static const char *const one[] = {"", NULL};
  (void)operation, (void)dtype;
  return one;
}

static void find_functions(const dm_mesh *mesh)
{
  CHECK(dm_get_proc(mesh, "ncclAllReduce", (void **)&nccl.all_reduce));
  CHECK(dm_get_proc(mesh, "ncclAllGather", (void **)&nccl.all_gather));
  CHECK(dm_get_proc(mesh, "ncclReduceScatter", (void **)&nccl.reduce_scatter));
  CHECK(dm_get_proc(mesh, "ncclBroadcast", (void **)&nccl.broadcast));
  CHECK(dm_get_proc(mesh, "ncclAlltoAll", (void **)&nccl.all_to_all));
  CHECK(dm_get_proc(mesh, "ncclSend", (void **)&nccl.send));
  CHECK(dm_get_proc(mesh, "ncclRecv", (void **)&nccl.recv));
  CHECK(dm_get_proc(mesh, "ncclGetLastError", (void **)&nccl.last_error));
}

/* Makes a mesh of three dimensions, for the case start. With `apart` it is made in two calls, of
 * which the first makes only the root's communicator. That takes longer in total, but each part
 * has a figure. */
static dm_mesh *start(const dm_init_options *options, int ranks, bool apart)
{
  int sizes[3];
  dm_mesh *line = NULL, *mesh = NULL, *pair = NULL, *flat = NULL;
  const char *const names[] = {"dp", "cp", "tp"};
  start_shape(ranks, sizes);
  const int32_t shape[] = {sizes[0], sizes[1], sizes[2]};
  if (apart) {
    CHECK(dm_world_barrier(options->world, 0));
    mark("agreement");
    CHECK(dm_init("cpu", &ranks, 1, NULL, options, &line));
    mark("agreement and root");
  }
  CHECK(dm_init("cpu", shape, 3, names, options, &mesh));
  for (int dim = 0; dim < 3; dim++)
    CHECK(dm_get_comm(mesh, names[dim], &comm));
  mark(apart ? "agreement and splits" : "dm_init");
  CHECK(dm_slice(mesh, names, 2, &pair));
  CHECK(dm_flatten(pair, NULL, NULL, &flat));
  CHECK(dm_get_comm(flat, NULL, &comm));
  mark("flatten");
  dm_free(flat);
  dm_free(pair);
  dm_free(line);
  return mesh;
}

int main(int argc, char **argv)
{
  dm_world *world = NULL;
  dm_mesh *mesh = NULL, *line = NULL;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  struct library library = {.variants = variants, .run = run, .maximum = maximum};
  int32_t size;
  note_execution(argc, argv);
  mark("load");
  CHECK(dm_world_init("cpu", &join, &world));
  mark("rendezvous");
  CHECK(dm_world_size(world, &size));
  CHECK(dm_world_rank(world, &library.rank));
  library.ranks = size;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = world;
  if (marks.executed)
    mesh = start(&options, size, strcmp(argv[1], "phases") == 0);
  CHECK(dm_init("cpu", &size, 1, NULL, &options, &line));
  CHECK(dm_get_comm(line, NULL, &comm));
  find_functions(line);
  int code = 0;
  if (marks.executed)
    print_marks(&library);
  else
    code = measure(&library, argc, argv);
  /* All figures are measured, so the result does not matter: another rank may have gone already. */
  dm_finalize(line, NULL);
  if (mesh)
    dm_finalize(mesh, NULL);
  dm_free(line);
  dm_free(mesh);
  dm_world_free(world);
  return code;
}
