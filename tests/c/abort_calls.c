/* ranks: 2 */
/* dm_abort from another thread wakes every kind of operation that waits for a peer who never
 * comes; the peer learns who left. */
#include "blocked.h"

enum { kCount = 1 << 20 }; /* more than a ring holds, so that a send waits too */

static dm_mesh *mesh, *other; /* other has the same ranks and shares the communicator, but has another name */
static float sent[2 * kCount], got[2 * kCount];

static dm_status all_reduce(void *none) { (void)none; return dm_all_reduce(mesh, NULL, sent, got, 4, DM_FLOAT32, DM_SUM, NULL); }
static dm_status large_all_reduce(void *none) { (void)none; return dm_all_reduce(mesh, NULL, sent, got, kCount, DM_FLOAT32, DM_SUM, NULL); }
static dm_status reduce(void *none) { (void)none; return dm_reduce(mesh, NULL, sent, got, kCount, DM_FLOAT32, DM_SUM, 1, NULL); }
static dm_status broadcast(void *none) { (void)none; return dm_broadcast(mesh, NULL, NULL, got, 4, DM_FLOAT32, 1, NULL); }
static dm_status all_gather(void *none) { (void)none; return dm_all_gather(mesh, NULL, sent, got, 4, DM_FLOAT32, NULL); }
static dm_status reduce_scatter(void *none) { (void)none; return dm_reduce_scatter(mesh, NULL, sent, got, 4, DM_FLOAT32, DM_SUM, NULL); }
static dm_status all_to_all(void *none) { (void)none; return dm_all_to_all(mesh, NULL, sent, got, 4, DM_FLOAT32, NULL); }
static dm_status send_one(void *none) { (void)none; return dm_send(mesh, NULL, sent, kCount, DM_FLOAT32, 1, NULL); }
static dm_status recv_one(void *none) { (void)none; return dm_recv(mesh, NULL, got, 4, DM_FLOAT32, 1, NULL); }

static dm_status group(void *none)
{
  (void)none;
  OK(dm_group_start(mesh));
  OK(dm_send(mesh, NULL, sent, kCount, DM_FLOAT32, 1, NULL));
  OK(dm_recv(mesh, NULL, got, kCount, DM_FLOAT32, 1, NULL));
  OK(dm_all_reduce(mesh, NULL, sent + kCount, got + kCount, 4, DM_FLOAT32, DM_SUM, NULL));
  return dm_group_end(mesh);
}

static const struct {
  const char *name;
  dm_status (*call)(void *);
} kinds[] = {{"all_reduce", all_reduce}, {"large all_reduce", large_all_reduce}, {"reduce", reduce}, {"broadcast", broadcast},
             {"all_gather", all_gather}, {"reduce_scatter", reduce_scatter}, {"all_to_all", all_to_all}, {"send", send_one},
             {"recv", recv_one}, {"group_end", group}};

static dm_status other_all_gather(void *none) { (void)none; return dm_all_gather(other, NULL, sent, got, 4, DM_FLOAT32, NULL); }

/* A call that waits for its turn while another thread is in the same communicator. */
static void second_in_line(double *took)
{
  blocked first, second;
  start_blocked(&first, all_reduce, NULL);
  start_blocked(&second, other_all_gather, NULL);
  const moment began = moment_now();
  OK(dm_abort(mesh));
  took[0] = end_blocked(&first, &began);
  took[1] = end_blocked(&second, &began);
  CHECK(first.status == DM_STATUS_ABORTED && second.status == DM_STATUS_ABORTED);
}

int main(void)
{
  const int32_t shape[] = {2};
  const char *names[] = {"other"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", NULL, &options.world));
  double times[kTries], line[2][kTries];
  for (size_t kind = 0; kind <= sizeof kinds / sizeof *kinds; ++kind) {
    for (int attempt = 0; attempt < kTries; ++attempt) {
      REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &mesh));
      REQUIRE(dm_reshape(mesh, shape, 1, names, NULL, &other));
      if (rank_of(mesh) == 0 && kind < sizeof kinds / sizeof *kinds) {
        blocked one;
        start_blocked(&one, kinds[kind].call, NULL);
        const moment began = moment_now();
        OK(dm_abort(mesh));
        times[attempt] = end_blocked(&one, &began);
        if (one.status != DM_STATUS_ABORTED) {
          ++failures;
          fprintf(stderr, "%s gives %s: %s\n", kinds[kind].name, dm_status_name(one.status), one.message);
        }
      } else if (rank_of(mesh) == 0) {
        double took[2];
        second_in_line(took);
        line[0][attempt] = took[0];
        line[1][attempt] = took[1];
      }
      OK(dm_world_barrier(options.world, 0));
      if (rank_of(mesh) == 1) {
        FAILS(DM_STATUS_PEER_LOST, "rank 0", dm_check(mesh, NULL));
        FAILS(DM_STATUS_PEER_LOST, "rank 0", all_reduce(NULL));
        OK(dm_abort(mesh));
      }
      GIVES(DM_STATUS_ABORTED, all_reduce(NULL));
      GIVES(DM_STATUS_ABORTED, recv_one(NULL));
      GIVES(DM_STATUS_ABORTED, dm_check(mesh, NULL));
      dm_free(other);
      dm_free(mesh);
      /* The ranks make a new mesh only when both have ended this one. */
      OK(dm_world_barrier(options.world, 0));
    }
    int32_t rank = -1;
    REQUIRE(dm_world_rank(options.world, &rank));
    if (rank != 0) continue;
    if (kind < sizeof kinds / sizeof *kinds) {
      check_times(kinds[kind].name, times);
    } else {
      check_times("first of two threads", line[0]);
      check_times("second of two threads", line[1]);
    }
  }
  dm_world_free(options.world);
  return finish();
}
