/* ranks: 1 2 4 8 */
/* Exchanges with a count for each rank: random counts, zeros among them, along every dimension of a
 * mesh (n/2, 2), with and without displacements, in groups, and counts that do not fit together. */
#include "check.h"

enum { kRanks = 8, kRoom = 4096 };

/* All ranks draw the same numbers. */
static uint64_t state = 12345;
static size_t below(size_t bound)
{
  state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
  return (size_t)(state >> 33) % bound;
}

/* Counts that all ranks know, and where the blocks begin. */
typedef struct {
  size_t counts[kRanks][kRanks], places[kRanks][kRanks], ends[kRanks];
} plan;

static plan draw(int32_t n, size_t gap)
{
  plan it;
  memset(&it, 0, sizeof it);
  const size_t most = below(3) == 0 ? 3 : 300;
  for (int32_t row = 0; row < n; ++row) {
    size_t next = 0;
    for (int32_t column = 0; column < n; ++column) {
      it.counts[row][column] = below(3) == 0 ? 0 : below(most);
      it.places[row][column] = next + gap;
      next = it.places[row][column] + it.counts[row][column];
    }
    it.ends[row] = next;
  }
  return it;
}

/* Element at of rank's send buffer. */
static int32_t element(int32_t rank, size_t at) { return rank * 100000 + (int32_t)at; }

static void exchange(const dm_mesh *mesh, const char *dim, int32_t me, int32_t n, int grouped)
{
  static int32_t send[kRoom], recv[kRoom], expected[kRoom], sum[1];
  const size_t gap = below(3);
  const plan it = draw(n, gap);
  for (size_t at = 0; at < kRoom; ++at) send[at] = element(me, at);
#define RUN(call) \
  do { \
    if (grouped) OK(dm_group_start(mesh)); \
    OK(call); \
    if (grouped) { \
      sum[0] = 1; \
      OK(dm_all_reduce(mesh, dim, sum, sum, 1, DM_INT32, DM_SUM, NULL)); \
      OK(dm_group_end(mesh)); \
      CHECK(sum[0] == n); \
    } \
    CHECK(memcmp(recv, expected, sizeof recv) == 0); \
  } while (0)
#define CLEAR() memset(recv, 0x55, sizeof recv), memset(expected, 0x55, sizeof expected)

  size_t from[kRanks], from_places[kRanks], next = 0;
  CLEAR();
  for (int32_t rank = 0; rank < n; ++rank) {
    from[rank] = it.counts[rank][me];
    from_places[rank] = next + gap;
    next = from_places[rank] + from[rank];
    for (size_t at = 0; at < from[rank]; ++at) expected[from_places[rank] + at] = element(rank, it.places[rank][me] + at);
  }
  const size_t *const out = gap == 0 ? NULL : it.places[me], *const into = gap == 0 ? NULL : from_places;
  RUN(dm_all_to_allv(mesh, dim, send, it.counts[me], out, recv, from, into, DM_INT32, NULL));

  const size_t *const counts = it.counts[0], *const places = gap == 0 ? NULL : it.places[0];
  const size_t mine = it.places[0][me];
  CLEAR();
  for (int32_t rank = 0; rank < n; ++rank)
    for (size_t at = 0; at < counts[rank]; ++at) expected[it.places[0][rank] + at] = element(rank, at);
  RUN(dm_all_gatherv(mesh, dim, send, recv, counts, places, DM_INT32, NULL));
  memset(recv, 0x55, sizeof recv);
  memcpy(recv + mine, send, sizeof(int32_t) * counts[me]);
  RUN(dm_all_gatherv(mesh, dim, recv + mine, recv, counts, places, DM_INT32, NULL));

  CLEAR();
  for (size_t at = 0; at < counts[me]; ++at) expected[at] = 100000 * (n * (n - 1) / 2) + n * (int32_t)(mine + at);
  RUN(dm_reduce_scatterv(mesh, dim, send, counts, places, recv, DM_INT32, DM_SUM, NULL));
  /* In place the result is in the block of this rank. */
  OK(dm_reduce_scatterv(mesh, dim, send, counts, places, send + mine, DM_INT32, DM_SUM, NULL));
  CHECK(memcmp(send + mine, expected, sizeof(int32_t) * counts[me]) == 0);
}

static void refusals(const dm_mesh *mesh, const char *dim, int32_t me, int32_t n)
{
  int32_t buffer[64] = {0};
  size_t twos[kRanks], huge[kRanks], same[kRanks] = {0};
  for (int32_t rank = 0; rank < kRanks; ++rank) twos[rank] = 2, huge[rank] = SIZE_MAX / 2;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "send_counts is NULL",
        dm_all_to_allv(mesh, dim, buffer, NULL, NULL, buffer + 32, twos, NULL, DM_INT32, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "recv_counts is NULL", dm_all_gatherv(mesh, dim, buffer, buffer + 32, NULL, NULL, DM_INT32, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "send is NULL", dm_all_to_allv(mesh, dim, NULL, twos, NULL, buffer, twos, NULL, DM_INT32, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "more than memory can hold", dm_all_gatherv(mesh, dim, buffer, buffer, huge, NULL, DM_INT32, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is 12", dm_all_gatherv(mesh, dim, buffer, buffer, twos, NULL, 12, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op is -1", dm_reduce_scatterv(mesh, dim, buffer, twos, NULL, buffer + 32, DM_INT32, -1, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op is 77", dm_reduce_scatterv(mesh, dim, buffer, twos, NULL, buffer + 32, DM_INT32, 77, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "stream", dm_all_gatherv(mesh, dim, buffer, buffer + 32, twos, NULL, DM_INT32, buffer));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "overlap", dm_all_gatherv(mesh, dim, buffer + 2 * me + 1, buffer, twos, NULL, DM_INT32, NULL));
  if (n > 1) {
    FAILS(DM_STATUS_INVALID_ARGUMENT, "overlap", dm_all_to_allv(mesh, dim, buffer, twos, NULL, buffer, twos, NULL, DM_INT32, NULL));
    FAILS(DM_STATUS_INVALID_ARGUMENT, "block 1 of recv", dm_all_gatherv(mesh, dim, buffer + 32, buffer, twos, same, DM_INT32, NULL));
  } else {
    const size_t three[] = {3};
    FAILS(DM_STATUS_INVALID_ARGUMENT, "to itself", dm_all_to_allv(mesh, dim, buffer, twos, NULL, buffer + 32, three, NULL, DM_INT32, NULL));
  }
  /* A refusal leaves the communicator as it was. */
  OK(dm_all_gatherv(mesh, dim, buffer + 32, buffer, twos, NULL, DM_INT32, NULL));
}

/* The last rank expects one element more from rank 0 than that one sends. */
static void mismatches(dm_world *world, const dm_mesh *mesh, int32_t me, int32_t n)
{
  static int32_t send[64], recv[64];
  size_t twos[kRanks], other[kRanks];
  for (int32_t rank = 0; rank < kRanks; ++rank) twos[rank] = other[rank] = 2;
  if (me == n - 1) other[0] = 3;
  const char *const words = n == 2   ? "rank 0 has 2 x int32 for rank 1, which expects 3 x int32 from it"
                            : n == 4 ? "rank 0 has 2 x int32 for rank 3, which expects 3 x int32 from it"
                                     : "rank 0 has 2 x int32 for rank 7, which expects 3 x int32 from it";
  for (int which = 0; which < 4; ++which) {
    dm_init_options options = DM_INIT_OPTIONS_INIT;
    dm_dim_options own = DM_DIM_OPTIONS_INIT;
    const int32_t shape[] = {n};
    const char *names[] = {"all"};
    dm_mesh *mine = NULL;
    own.flags = DM_DIM_OWN_COMM;
    options.world = world;
    options.dim_options = &own;
    options.num_dim_options = 1;
    REQUIRE(dm_init("cpu", shape, 1, names, &options, &mine));
    switch (which) {
    case 0: FAILS(DM_STATUS_MISMATCH, words, dm_all_to_allv(mine, NULL, send, twos, NULL, recv, other, NULL, DM_INT32, NULL)); break;
    case 1: FAILS(DM_STATUS_MISMATCH, words, dm_all_gatherv(mine, NULL, send, recv, other, NULL, DM_INT32, NULL)); break;
    case 2:
      /* Every rank has a block for rank 0; that of the last rank is another one. */
      FAILS(DM_STATUS_MISMATCH, "x int32 for rank 0", dm_reduce_scatterv(mine, NULL, send, other, NULL, recv, DM_INT32, DM_SUM, NULL));
      break;
    default:
      OK(dm_group_start(mine));
      OK(dm_all_to_allv(mine, NULL, send, twos, NULL, recv, other, NULL, DM_INT32, NULL));
      FAILS(DM_STATUS_MISMATCH, words, dm_group_end(mine));
    }
    for (int at = 0; at < 64; ++at) CHECK(recv[at] == 0);
    dm_abort(mine);
    dm_free(mine);
  }
  /* Another call, and another kind of exchange. */
  FAILS(DM_STATUS_MISMATCH, "different calls",
        me == 0 ? dm_all_gatherv(mesh, NULL, send, recv, twos, NULL, DM_INT32, NULL)
                : dm_all_reduce(mesh, NULL, send, recv, 2, DM_INT32, DM_SUM, NULL));
}

int main(void)
{
  int32_t ranks = 0;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_size(world, &ranks));
  const int32_t inner = ranks % 2 == 0 ? 2 : 1, shape[] = {ranks / inner, inner};
  const char *names[] = {"outer", "inner"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *flat = NULL;
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  const char *const dims[] = {"outer", "inner", "all"};
  for (int round = 0; round < 30; ++round) {
    const char *const dim = dims[round % 3];
    int32_t me = -1;
    int32_t size = 0;
    REQUIRE(dm_get_local_rank(round % 3 == 2 ? flat : mesh, dim, &me));
    REQUIRE(dm_size(round % 3 == 2 ? flat : mesh, dim, &size));
    exchange(round % 3 == 2 ? flat : mesh, dim, me, size, round % 2);
    if (round < 3) refusals(round % 3 == 2 ? flat : mesh, dim, me, size);
  }
  OK(dm_world_barrier(world, 0));
  if (ranks > 1) mismatches(world, flat, rank_of(flat), ranks);
  dm_abort(mesh);
  dm_free(flat);
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
