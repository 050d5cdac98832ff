/* ranks: 8 */
/* With DM_CHECK_COLLECTIVES=1 the ranks compare each collective before they issue it. Two dimensions
 * that are crossed, collectives that differ and a rank that does not come are errors on all ranks
 * that wait, and the communicators work on. Programs that are right get no error. It takes 3 s: a
 * ring is searched after a quarter of a second, and a deadline passes. */
#include "check.h"

static int32_t rank;

/* The operations of a group have buffers of their own. */
static dm_status sum(const dm_mesh *mesh, const char *dim, size_t count)
{
  static float values[4][64];
  static int next;
  float *own = values[next++ % 4];
  return dm_all_reduce(mesh, dim, own, own, count, DM_FLOAT32, DM_SUM, NULL);
}

/* A mesh of shape (dp, tp) over the first ranks. */
static dm_mesh *make(int32_t dp, int32_t tp, int64_t timeout_ms)
{
  const int32_t shape[] = {dp, tp};
  const char *names[] = {"dp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  return made_in_time("cpu", shape, 2, names, &options);
}

/* Groups of one dimension may be at different places, and so may the calls of a group. */
static void right_programs(const dm_mesh *mesh)
{
  const int dp = rank / 4, tp = rank % 4;
  for (int round = 0; round < 20; ++round) {
    for (int extra = 0; extra < (dp == 0 ? 3 : 1); ++extra) OK(sum(mesh, "tp", 4));
    OK(sum(mesh, "dp", (size_t)(1 + tp)));
    /* Some ranks make the two calls in a group, some one after the other. */
    if (dp == 0) OK(dm_group_start(mesh));
    OK(sum(mesh, "tp", 8));
    OK(sum(mesh, "dp", 8));
    if (dp == 0) OK(dm_group_end(mesh));
    /* Two collectives along one dimension in a group of one rank. */
    if (tp == 1) OK(dm_group_start(mesh));
    OK(sum(mesh, "tp", 3));
    OK(sum(mesh, "tp", 5));
    if (tp == 1) OK(dm_group_end(mesh));
    /* A pipeline along tp: messages are not compared. */
    float value = 1;
    if (tp > 0) OK(dm_recv(mesh, "tp", &value, 1, DM_FLOAT32, tp - 1, NULL));
    if (tp < 3) OK(dm_send(mesh, "tp", &value, 1, DM_FLOAT32, tp + 1, NULL));
    /* Each rank has counts of its own. */
    size_t counts[4] = {1, 1, 1, 1};
    float gathered[4] = {0};
    OK(dm_all_gatherv(mesh, "tp", &value, gathered, counts, NULL, DM_FLOAT32, NULL));
  }
}

/* Ranks 0 and 5 begin along dp, and the others along tp: 0 waits for 4, 4 for 5, 5 for 1, 1 for 0. */
static void crossed_on_eight(const dm_mesh *mesh)
{
  const char *first = rank == 0 || rank == 5 ? "dp" : "tp";
  FAILS(DM_STATUS_MISMATCH, "each waits for the one before", sum(mesh, first, 8));
  const char *message = dm_last_error();
  CHECK(strstr(message, "rank 0 called all-reduce of 8 float32 (sum) along mesh/dp as call") != NULL);
  CHECK(strstr(message, "rank 4 called all-reduce of 8 float32 (sum) along mesh/tp as call") != NULL);
  CHECK(strstr(message, "rank 5 called") != NULL && strstr(message, "rank 1 called") != NULL);
  CHECK(strncmp(message, "dm_all_reduce: ", 15) == 0);
  /* The communicators have seen nothing of it. */
  OK(sum(mesh, "dp", 8));
  OK(sum(mesh, "tp", 8));
}

static void crossed_on_four(const dm_mesh *four)
{
  if (rank >= 4) return;
  FAILS(DM_STATUS_MISMATCH, "each waits for the one before", sum(four, rank == 0 || rank == 3 ? "dp" : "tp", 2));
  for (int other = 0; other < 4; ++other) {
    char says[48];
    snprintf(says, sizeof says, "rank %d called all-reduce", other);
    CHECK(strstr(dm_last_error(), says) != NULL);
  }
  OK(sum(four, "tp", 2));
  OK(sum(four, "dp", 2));
}

/* A collective that differs, alone and in a group. The message compares a rank's call with the call
   of the lowest rank that has come so far. This may be rank 4, 5 or 7. It is rank 6 where rank 6
   came before 7, and 4 and 5 are late. */
static void different(const dm_mesh *mesh)
{
  const int in_group = rank == 6;
  if (in_group) OK(dm_group_start(mesh));
  const dm_status status = sum(mesh, "tp", rank == 6 ? 9 : 8);
  const dm_status ended = in_group ? dm_group_end(mesh) : status;
  if (rank >= 4) {
    CHECK(ended == DM_STATUS_MISMATCH);
    CHECK(strstr(dm_last_error(), "rank 6 called all-reduce of 9 float32 (sum) along mesh/tp") != NULL);
    CHECK(strstr(dm_last_error(), " called all-reduce of 8 float32 (sum) along mesh/tp") != NULL);
  } else {
    CHECK(status == DM_STATUS_OK);
  }
  OK(sum(mesh, "tp", 8));
}

/* Rank 2 does not come to a call along dp before rank 6 has given it up. */
static void missing(const dm_mesh *mesh, const dm_mesh *late)
{
  float told = 1;
  if (rank == 6) {
    FAILS(DM_STATUS_TIMEOUT, "rank 2 never called all-reduce of 8 float32 (sum) along mesh2/dp", sum(late, "dp", 8));
    OK(dm_send(mesh, "dp", &told, 1, DM_FLOAT32, 0, NULL));
  }
  if (rank == 2) {
    OK(dm_recv(mesh, "dp", &told, 1, DM_FLOAT32, 1, NULL));
    FAILS(DM_STATUS_TIMEOUT, "came too late", sum(late, "dp", 8));
  }
  /* On a busy machine a rank may need more time than the mesh has, and both ranks try again. */
  dm_status status = DM_STATUS_TIMEOUT;
  for (int attempt = 0; attempt < 6 && status == DM_STATUS_TIMEOUT; ++attempt) status = sum(late, "dp", 8);
  OK(status);
}

int main(void)
{
  setenv("DM_CHECK_COLLECTIVES", "1", 1);
  dm_mesh *mesh = make(2, 4, 0);
  REQUIRE(dm_rank(mesh, &rank));
  right_programs(mesh);
  crossed_on_eight(mesh);
  different(mesh);
  dm_mesh *late = make(2, 4, 2000);
  missing(mesh, late);
  dm_call_options patient = DM_CALL_OPTIONS_INIT;
  patient.timeout_ms = 60000;
  OK(dm_finalize(late, &patient));
  dm_mesh *four = make(2, 2, 0);
  crossed_on_four(four);
  OK(dm_finalize(mesh, NULL));
  dm_free(four);
  dm_free(mesh);
  dm_free(late);
  return finish();
}
