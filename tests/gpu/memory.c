/* The GPU memory that a communicator takes, and which part of that the parent of a mesh's
 * dimensions may save: plain NCCL with several configurations, then dm_init. Figures are what
 * disappears from the device's free memory over all ranks, by rank, so nothing else may use the
 * GPU. The dry run has no device memory; there the program only makes the same communicators. */
#include "experiment.h"
#include "plain.h"

/* The fields of NCCL 2.32's ncclConfig_t behind those of 2.27. A library takes no more than it
 * knows, and the version says which fields are valid. */
typedef struct newest_config {
  ncclConfig_t head;
  int later[10];
  int nvls_host_mode;
  int padding;
} newest_config;

static dm_world *world;
static dm_mesh *carrier;
static plain nccl;
static int32_t rank, ranks;

static double free_mib(void)
{
  REQUIRE(dm_world_barrier(world, 0));
  const double mib = (double)device_free_bytes() / (1 << 20);
  REQUIRE(dm_world_barrier(world, 0));
  return mib;
}

static void tell(const char *what, const char *when, double mib)
{
  char text[160];
  snprintf(text, sizeof text, "%s: memory %s", what, when);
  if (rank == 0) figure(text, mib, "MiB per rank");
}

/* One communicator over all ranks: made, then used once. */
static void plainly(const char *what, ncclConfig_t *config)
{
  const ncclUniqueId id = plain_id(&nccl, carrier, rank);
  ncclComm_t comm = NULL;
  const double before = free_mib();
  plain_says(&nccl, nccl.CommInitRankConfig(&comm, ranks, id, rank, config), "ncclCommInitRankConfig");
  tell(what, "when made", (before - free_mib()) / ranks);
  float *data = (float *)device_alloc(sizeof(float));
  plain_says(&nccl, nccl.AllReduce(data, data, 1, ncclFloat, ncclSum, comm, (cudaStream_t)device_stream()), "ncclAllReduce");
  device_sync();
  device_free(data);
  tell(what, "when used", (before - free_mib()) / ranks);
  plain_end(&nccl, comm);
}

/* A mesh, before and after an all-reduce on each dimension; `lazy` makes nothing but the world. */
static void ours(const char *what, const int32_t *shape, size_t ndim)
{
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  options.world = world;
  const double before = free_mib();
  REQUIRE(dm_init(device_type(), shape, ndim, names, &options, &mesh));
  tell(what, "when made", (before - free_mib()) / ranks);
  float *data = (float *)device_alloc(sizeof(float));
  for (size_t dim = 0; dim < ndim; ++dim) {
    OK(dm_all_reduce(mesh, names[dim], data, data, 1, DM_FLOAT32, DM_SUM, device_stream()));
    device_sync();
  }
  device_free(data);
  tell(what, "when used", (before - free_mib()) / ranks);
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

int main(void)
{
  world = join_world(&rank, &ranks);
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_dim_options apart = DM_DIM_OPTIONS_INIT;
  const int32_t line[] = {ranks}, plane[] = {ranks / 2, 2};
  options.world = world;
  apart.flags = DM_DIM_OWN_COMM;
  options.dim_options = &apart;
  options.num_dim_options = 1;
  REQUIRE(dm_init(device_type(), line, 1, NULL, &options, &carrier));
  nccl = plain_open(carrier);
  ncclResult_t (*rawGetVersion)(int *) = NULL;
  int version = 0;
  PROC(carrier, GetVersion);
  plain_says(&nccl, rawGetVersion(&version), "ncclGetVersion");
  const ncclUniqueId warm = plain_id(&nccl, carrier, rank); /* the carrier has run a collective */
  (void)warm;

  ncclConfig_t usual = NCCL_CONFIG_INITIALIZER, narrow = NCCL_CONFIG_INITIALIZER;
  plainly("plain communicator", &usual);
  narrow.minCTAs = narrow.maxCTAs = 1;
  plainly("plain communicator, maxCTAs=1", &narrow);
  narrow.collnetEnable = 0;
  plainly("plain communicator, maxCTAs=1 and collnetEnable=0", &narrow);
  if (version >= 23200) {
    newest_config newest;
    memset(&newest, 0, sizeof newest);
    newest.head = narrow;
    newest.head.size = 120; /* sizeof(ncclConfig_t) of 2.32 */
    newest.head.version = (unsigned)version;
    for (size_t at = 0; at < sizeof newest.later / sizeof *newest.later; ++at) newest.later[at] = NCCL_CONFIG_UNDEF_INT;
    newest.nvls_host_mode = 0x7fffffff; /* ncclNvlsHostModeDisable */
    plainly("plain communicator, also nvlsHostMode=disable", &newest.head);
  }
  ours("mesh of one dimension", line, 1);
  if (ranks % 2 == 0) ours("mesh of two dimensions", plane, 2);
  OK(dm_finalize(carrier, NULL));
  dm_free(carrier);
  dm_world_free(world);
  return finish();
}
