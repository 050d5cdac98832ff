/* ranks: 1 2 4 8 */
/* The control plane: barriers, and bytes that are gathered and broadcast along every dimension of a
 * mesh (n/2, 2) and over the world. The mesh is lazy, and no communicator is made. A rank that does
 * not come costs its deadline of 0.3 s a few times. */
#include "check.h"

#include <pthread.h>

enum { kRanks = 8, kLarge = 4 << 20, kMost = 8 << 20 };

/* The ranks keep in step by a world of its own: in one world, a rank that waits in a barrier and
 * one that waits in a call of a group would be told that they wait for each other. */
static dm_world *world, *in_step;
static int32_t me_in_world, ranks;
static unsigned char *large;

/* The bytes that a rank gives in that round. No other rank and no other round has them. */
static size_t given(int32_t rank, int round, unsigned char *bytes)
{
  const size_t length = (size_t)((rank * 7 + round * 5) % 23);
  for (size_t at = 0; at < length; ++at) bytes[at] = (unsigned char)(rank * 31 + round * 17 + (int)at);
  return length;
}

static void check_element(const dm_buffers *buffers, size_t index, const void *expected, size_t length)
{
  const void *data = NULL;
  size_t found = 999;
  OK(dm_buffers_get(buffers, index, &data, &found));
  CHECK(data != NULL && found == length && memcmp(data, expected, length) == 0 && ((const char *)data)[found] == '\0');
}

/* The calls along one dimension. mesh NULL: those of the world. */
static dm_status barrier(const dm_mesh *mesh, const char *dim, int64_t timeout)
{
  return mesh == NULL ? dm_world_barrier(world, timeout) : dm_barrier(mesh, dim, timeout);
}
static dm_status gather(const dm_mesh *mesh, const char *dim, const void *data, size_t length, int64_t timeout, dm_buffers **out)
{
  return mesh == NULL ? dm_world_all_gather_bytes(world, data, length, timeout, out)
                      : dm_all_gather_bytes(mesh, dim, data, length, timeout, out);
}
static dm_status broadcast(const dm_mesh *mesh, const char *dim, const void *data, size_t length, int32_t root, dm_buffers **out)
{
  return mesh == NULL ? dm_world_broadcast_bytes(world, data, length, root, 0, out)
                      : dm_broadcast_bytes(mesh, dim, data, length, root, 0, out);
}

static void values(const dm_mesh *mesh, const char *dim, int32_t me, int32_t n)
{
  unsigned char mine[32], theirs[32];
  dm_buffers *all = NULL;
  for (int round = 0; round < 4; ++round) {
    const size_t length = given(me, round, mine);
    REQUIRE(gather(mesh, dim, mine, length, 0, &all));
    CHECK(dm_buffers_count(all) == (size_t)n);
    for (int32_t rank = 0; rank < n; ++rank) check_element(all, (size_t)rank, theirs, given(rank, round, theirs));
    dm_buffers_free(all);
    REQUIRE(barrier(mesh, dim, 0));
    for (int32_t root = 0; root < n; ++root) {
      /* Only the root's data counts. */
      REQUIRE(broadcast(mesh, dim, me == root ? mine : NULL, me == root ? length : 12345, root, &all));
      CHECK(dm_buffers_count(all) == 1);
      check_element(all, 0, theirs, given(root, round, theirs));
      dm_buffers_free(all);
    }
  }
  /* Nothing at all. */
  REQUIRE(gather(mesh, dim, NULL, 0, 0, &all));
  for (int32_t rank = 0; rank < n; ++rank) check_element(all, (size_t)rank, "", 0);
  dm_buffers_free(all);
  /* Several pieces: the last rank gives 4 MiB, the others little. */
  REQUIRE(gather(mesh, dim, me == n - 1 ? large : mine, me == n - 1 ? kLarge : 3, 0, &all));
  check_element(all, (size_t)n - 1, large, kLarge);
  dm_buffers_free(all);
  REQUIRE(broadcast(mesh, dim, large, kMost, n - 1, &all));
  check_element(all, 0, large, kMost);
  dm_buffers_free(all);
  dm_buffers_free(all); /* a second time: nothing happens */
  CHECK(dm_buffers_count(all) == 0);
}

/* One rank refuses its own call. The others are told at once, and the next call meets. */
static void refusals(const dm_mesh *mesh, const char *dim, int32_t me, int32_t n, const char *prefix)
{
  dm_buffers *all = NULL;
  char told[128];
  const double began = seconds_now();
  const int wrong = me == n - 1;
#define REFUSED(status, function, words, call) \
  do { \
    snprintf(told, sizeof told, "refused its own %s_%s as call ", prefix, function); \
    FAILS(status, wrong ? words : told, call); \
  } while (0)
  REFUSED(DM_STATUS_INVALID_ARGUMENT, "all_gather_bytes", "len is 8388609, but the store carries at most 8388608 bytes",
          gather(mesh, dim, large, wrong ? kMost + 1 : 3, 0, &all));
  REFUSED(DM_STATUS_INVALID_ARGUMENT, "all_gather_bytes", "data is NULL", gather(mesh, dim, wrong ? NULL : large, 3, 0, &all));
  REFUSED(DM_STATUS_INVALID_ARGUMENT, "all_gather_bytes", "buffers_out is NULL", gather(mesh, dim, large, 3, 0, wrong ? NULL : &all));
  REFUSED(DM_STATUS_INVALID_ARGUMENT, "all_gather_bytes", "timeout_ms is -5", gather(mesh, dim, large, 3, wrong ? -5 : 0, &all));
  REFUSED(DM_STATUS_INVALID_ARGUMENT, "broadcast_bytes", "root is 8", broadcast(mesh, dim, large, 3, wrong ? 8 : 0, &all));
  REFUSED(DM_STATUS_INVALID_ARGUMENT, "broadcast_bytes", "root is -1", broadcast(mesh, dim, large, 3, wrong ? -1 : 0, &all));
  REFUSED(DM_STATUS_INVALID_ARGUMENT, "broadcast_bytes", "len is 8388609", broadcast(mesh, dim, large, kMost + 1, n - 1, &all));
  CHECK(all == NULL);
  REQUIRE(barrier(mesh, dim, 0));
  CHECK(seconds_now() - began < 30); /* nobody waited for the deadline of 60 s */
}

/* Ranks that make different calls, and a rank that does not come. */
static void disagreements(const dm_mesh *mesh, const char *dim, int32_t me, int32_t n, const char *prefix)
{
  dm_buffers *all = NULL;
  char words[128];
  dm_error_info info = DM_ERROR_INFO_INIT;
  FAILS(DM_STATUS_MISMATCH, "root=1", broadcast(mesh, dim, "x", 1, me == 0 ? 0 : 1, &all));
  snprintf(words, sizeof words, "%s_barrier(", prefix);
  FAILS(DM_STATUS_MISMATCH, words, me == n - 1 ? barrier(mesh, dim, 0) : gather(mesh, dim, "x", 1, 0, &all));
  CHECK(all == NULL);
  REQUIRE(barrier(mesh, dim, 0));

  if (me > 0) {
    snprintf(words, sizeof words, "%s_all_gather_bytes(", prefix);
    FAILS(DM_STATUS_TIMEOUT, words, gather(mesh, dim, "x", 1, 300, &all));
    OK(dm_last_error_info(&info));
    int32_t first = -1;
    OK(dm_translate_rank(mesh, dim, 0, &first));
    /* On a busy machine another rank may be late, too. */
    CHECK(info.num_ranks >= 1 && info.ranks[0] == first && info.dim != NULL && strcmp(info.dim, dim) == 0);
  }
  REQUIRE(dm_world_barrier(in_step, 0));
  /* The late rank is told, once, and then all meet. */
  if (me == 0) FAILS(DM_STATUS_TIMEOUT, "came too late", gather(mesh, dim, "x", 1, 0, &all));
  REQUIRE(barrier(mesh, dim, 0));
  CHECK(all == NULL);
}

/* A dimension that is none: nobody knows which group is meant. The others give up, and meet the
 * rank again in the next call. */
static void unknown(const dm_mesh *mesh, const char *dim, int32_t me)
{
  if (me == 0)
    FAILS(DM_STATUS_NOT_FOUND, "nowhere", dm_barrier(mesh, "nowhere", 300));
  else
    GIVES(DM_STATUS_TIMEOUT, dm_barrier(mesh, dim, 300));
  REQUIRE(dm_world_barrier(in_step, 0));
  REQUIRE(dm_barrier(mesh, dim, 0));
}

static void *blocked(void *mesh)
{
  GIVES(DM_STATUS_ABORTED, dm_barrier((const dm_mesh *)mesh, NULL, 0));
  return NULL;
}

int main(void)
{
  const char *names[] = {"outer", "inner"};
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *flat = NULL, *inner = NULL;
  dm_buffers *all = NULL;
  join.timeout_ms = 60000;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_init("cpu", &join, &in_step));
  REQUIRE(dm_world_size(world, &ranks));
  REQUIRE(dm_world_rank(world, &me_in_world));
  const int32_t shape[] = {ranks > 1 ? ranks / 2 : 1, ranks > 1 ? 2 : 1};
  large = (unsigned char *)malloc(kMost + 1);
  if (large == NULL) return 1;
  for (size_t at = 0; at < kMost + 1; ++at) large[at] = (unsigned char)(at * 2654435761u >> 13);
  options.world = world;
  options.flags = DM_INIT_LAZY;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));

  values(NULL, NULL, me_in_world, ranks);
  for (int which = 0; which < 3; ++which) {
    const char *const dim = which == 2 ? "all" : names[which];
    int32_t me = -1, n = -1;
    REQUIRE(dm_get_local_rank(mesh, dim, &me));
    REQUIRE(dm_size(mesh, dim, &n));
    values(mesh, dim, me, n);
    if (n > 1) refusals(mesh, dim, me, n, "dm");
    if (n > 1) disagreements(mesh, dim, me, n, "dm");
  }
  REQUIRE(dm_world_barrier(world, 0));
  if (ranks > 1) {
    refusals(NULL, NULL, me_in_world, ranks, "dm_world");
    unknown(mesh, "inner", me_in_world % 2);
  }

  /* dim NULL on a 1-D mesh alone. */
  inner = slice1(mesh, "inner");
  OK(dm_barrier(inner, NULL, 0));
  OK(dm_barrier(flat, NULL, 0));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "say which one", dm_barrier(mesh, NULL, 0));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dim is empty", dm_barrier(mesh, "", 0));
  OK(dm_barrier(mesh, "inner", 0));

  /* Operations that wait in a group of this thread are refused, and the group itself goes on. */
  float in = 1, sum = 0;
  REQUIRE(dm_group_start(mesh));
  OK(dm_barrier(mesh, "inner", 0));
  OK(dm_all_reduce(mesh, "inner", &in, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_INVALID_STATE, "dm_barrier: this thread has begun a group", dm_barrier(mesh, "inner", 0));
  FAILS(DM_STATUS_INVALID_STATE, "dm_all_gather_bytes: this thread has begun a group", dm_all_gather_bytes(mesh, "inner", "x", 1, 0, &all));
  OK(dm_group_end(mesh));
  CHECK(sum == (float)shape[1]);
  OK(dm_barrier(mesh, "inner", 0));

  /* A mesh over some of the ranks, and its end. */
  dm_mesh *part = NULL;
  const int32_t some[] = {shape[0]};
  options.flags = 0;
  REQUIRE(dm_init("cpu", some, 1, NULL, &options, &part));
  if (me_in_world < shape[0])
    OK(dm_barrier(part, NULL, 0));
  else
    GIVES(DM_STATUS_NOT_MEMBER, dm_barrier(part, NULL, 0));
  REQUIRE(dm_finalize(part, NULL));
  if (me_in_world < shape[0]) GIVES(DM_STATUS_ABORTED, dm_barrier(part, NULL, 0));
  GIVES(DM_STATUS_INVALID_HANDLE, dm_barrier((const dm_mesh *)all, NULL, 0));

  /* A mesh over existing communicators without a world has nobody to talk to. */
  dm_mesh *adopted = NULL;
  ncclComm_t comm = NULL;
  REQUIRE(dm_get_comm(mesh, "inner", &comm));
  const int32_t size[] = {shape[1]};
  if (me_in_world < shape[1]) {
    REQUIRE(dm_from_comms("cpu", size, 1, &names[1], &comm, NULL, &adopted));
    FAILS(DM_STATUS_UNSUPPORTED, "without a world", dm_barrier(adopted, NULL, 0));
    FAILS(DM_STATUS_UNSUPPORTED, "without a world", dm_all_gather_bytes(adopted, NULL, "x", 1, 0, &all));
    dm_free(adopted);
  }

  /* One element past the end, and no element at all. */
  const void *data = NULL;
  size_t length = 0;
  REQUIRE(dm_all_gather_bytes(inner, NULL, "text", 4, 0, &all));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "index is 2", dm_buffers_get(all, 2, &data, &length));
  OK(dm_buffers_get(all, 0, &data, &length));
  CHECK(strcmp((const char *)data, "text") == 0);
  dm_buffers_free(all);
  GIVES(DM_STATUS_INVALID_HANDLE, dm_buffers_get(all, 0, &data, &length));

  /* An abort on rank 0 wakes its own call, and the others learn of it. The other ranks call after
   * the abort, because the call could succeed otherwise. The world can still be used. */
  REQUIRE(dm_world_barrier(world, 0));
  if (ranks > 1 && me_in_world == 0) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, blocked, flat) != 0) return 1;
    OK(dm_abort(mesh));
    pthread_join(thread, NULL);
    REQUIRE(dm_world_barrier(in_step, 0));
    GIVES(DM_STATUS_ABORTED, dm_barrier(flat, NULL, 0));
  } else if (ranks > 1) {
    REQUIRE(dm_world_barrier(in_step, 0));
    FAILS(DM_STATUS_PEER_LOST, "rank 0", dm_barrier(flat, NULL, 0));
  }
  OK(dm_world_barrier(world, 0));

  dm_free(part);
  dm_free(inner);
  dm_free(flat);
  dm_free(mesh);
  dm_world_free(in_step);
  dm_world_free(world);
  free(large);
  return finish();
}
