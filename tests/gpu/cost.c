/* What making a mesh costs, beside plain NCCL making the same communicators: one over all ranks,
 * and a split of it for each dimension. Time: both in turn, several rounds, the median of the
 * slowest rank. Memory of the device, which all ranks share: what disappears from its free memory,
 * divided by the ranks. It is taken again after the first all-reduce of every communicator,
 * because NCCL makes some of its buffers then. */
#include "plain.h"

enum { kMaxRounds = 15, kMaxDims = 3 };

static dm_world *world;
static const dm_mesh *carrier;
static int32_t rank, ranks;

/* Of a time of this rank, the largest of all ranks. */
static double slowest(double seconds)
{
  double *memory = (double *)device_alloc(sizeof seconds);
  device_put(memory, &seconds, sizeof seconds);
  REQUIRE(dm_all_reduce(carrier, NULL, memory, memory, 1, DM_FLOAT64, DM_MAX, device_stream()));
  device_get(&seconds, memory, sizeof seconds);
  device_free(memory);
  return seconds;
}

/* The device's free memory in MiB, when every rank has come here and none has gone on. */
static double free_mib(void)
{
  REQUIRE(dm_world_barrier(world, 0));
  const double mib = (double)device_free_bytes() / (1 << 20);
  REQUIRE(dm_world_barrier(world, 0));
  return mib;
}

typedef struct cost {
  double seconds, made, used; /* memory in MiB of one rank: after making, and after the first all-reduces too */
} cost;

static cost ours(const int32_t *shape, size_t ndim, const char *const *names, int uses)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  cost is;
  options.world = world;
  const double before = free_mib(), began = seconds_now();
  REQUIRE(dm_init(device_type(), shape, ndim, names, &options, &mesh));
  is.seconds = slowest(seconds_now() - began);
  is.made = (before - free_mib()) / ranks;
  double *memory = (double *)device_alloc(sizeof(double));
  for (size_t index = 0; uses && index < ndim; ++index) {
    REQUIRE(dm_all_reduce(mesh, names[index], memory, memory, 1, DM_FLOAT64, DM_MAX, device_stream()));
    device_sync();
  }
  device_free(memory);
  is.used = uses ? (before - free_mib()) / ranks : 0;
  REQUIRE(dm_finalize(mesh, NULL));
  dm_free(mesh);
  return is;
}

static cost plainly(const plain *nccl, const int32_t *shape, size_t ndim, int uses)
{
  const ncclUniqueId id = plain_id(nccl, carrier, rank);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t all = NULL, comms[kMaxDims] = {NULL};
  cost is;
  const double before = free_mib(), began = seconds_now();
  plain_says(nccl, nccl->CommInitRankConfig(&all, ranks, id, rank, &config), "ncclCommInitRankConfig");
  int stride = ranks;
  for (size_t index = 0; index < ndim; ++index) {
    stride /= (int)shape[index];
    const int key = rank / stride % (int)shape[index];
    plain_says(nccl, nccl->CommSplit(all, rank - key * stride, key, &comms[index], NULL), "ncclCommSplit");
  }
  is.seconds = slowest(seconds_now() - began);
  is.made = (before - free_mib()) / ranks;
  double *memory = (double *)device_alloc(sizeof(double));
  for (size_t index = 0; uses && index < ndim; ++index) {
    plain_says(nccl, nccl->AllReduce(memory, memory, 1, ncclDouble, ncclMax, comms[index], (cudaStream_t)device_stream()), "ncclAllReduce");
    device_sync();
  }
  device_free(memory);
  is.used = uses ? (before - free_mib()) / ranks : 0;
  for (size_t index = ndim; index-- > 0;) plain_end(nccl, comms[index]);
  plain_end(nccl, all);
  return is;
}

int main(int argc, char **argv)
{
  const size_t rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 5;
  if (rounds < 1 || rounds > kMaxRounds) return 2;
  world = join_world(&rank, &ranks);
  const int32_t n = ranks, line[] = {n}, plane[] = {2, n / 2}, cube[] = {2, 2, n / 4};
  const char *names[] = {"replicate", "shard", "tp"};
  if (n % 2 != 0) {
    fprintf(stderr, "an even number of ranks is needed\n");
    return 2;
  }
  const int32_t *shape = n % 4 == 0 && n > 4 ? cube : n > 2 ? plane : line;
  const size_t ndim = shape == cube ? 3 : shape == plane ? 2 : 1;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *first = NULL;
  options.world = world;
  /* This communicator lives to the end, and warms up the process: the library's modules, its
   * threads, its first memory. */
  dm_dim_options apart = DM_DIM_OPTIONS_INIT;
  apart.flags = DM_DIM_OWN_COMM;
  options.dim_options = &apart;
  options.num_dim_options = 1;
  const double before = free_mib();
  REQUIRE(dm_init(device_type(), line, 1, NULL, &options, &first));
  carrier = first;
  (void)slowest(0);
  const double warm = (before - free_mib()) / ranks;
  const plain nccl = plain_open(first);

  double mine[kMaxRounds], theirs[kMaxRounds], mine_made[kMaxRounds], theirs_made[kMaxRounds];
  cost mine_used = {0, 0, 0}, theirs_used = {0, 0, 0};
  for (size_t round = 0; round < rounds; ++round) {
    /* Who begins changes from round to round; the first round also uses what it has made. */
    for (int turn = 0; turn < 2; ++turn) {
      const int is_ours = (turn + (int)round) % 2 == 0;
      const cost is = is_ours ? ours(shape, ndim, names, round == 0) : plainly(&nccl, shape, ndim, round == 0);
      (is_ours ? mine : theirs)[round] = is.seconds;
      (is_ours ? mine_made : theirs_made)[round] = is.made;
      if (round == 0) *(is_ours ? &mine_used : &theirs_used) = is;
    }
  }
  if (rank == 0) {
    char what[160], dims[40];
    snprintf(dims, sizeof dims, ndim == 3 ? "(2, 2, %d)" : ndim == 2 ? "(2, %d)" : "(%d)", ndim == 3 ? n / 4 : ndim == 2 ? n / 2 : n);
#define TELL(format, value, unit) \
  do { \
    snprintf(what, sizeof what, format, dims); \
    figure(what, value, unit); \
  } while (0)
    TELL("mesh %s: dm_init", 1e3 * median(mine, rounds), "ms");
    TELL("mesh %s: plain NCCL, init and splits, the id not counted", 1e3 * median(theirs, rounds), "ms");
    if (on_gpu()) {
      figure("memory of a process's first communicator, used once", warm, "MiB per rank");
      TELL("mesh %s: memory after dm_init", median(mine_made, rounds), "MiB per rank");
      TELL("mesh %s: memory after plain init and splits", median(theirs_made, rounds), "MiB per rank");
      TELL("mesh %s: memory after dm_init and an all-reduce on each", mine_used.used, "MiB per rank");
      TELL("mesh %s: memory after plain init, splits and an all-reduce on each", theirs_used.used, "MiB per rank");
    }
  }
  OK(dm_finalize(first, NULL));
  dm_free(first);
  dm_world_free(world);
  return finish();
}
