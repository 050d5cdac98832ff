/* ranks: 2 4 */
/* dm_finalize after a collective that failed, or that only some ranks have begun. It ends soon,
 * with the reason on all ranks, and a new mesh works. The bounds on time include the second for
 * which dm_finalize waits for late ranks. */
#include "facts.h"

static dm_init_options options = DM_INIT_OPTIONS_INIT;
static dm_world *sync_world; /* orders the steps of the test */
static int32_t rank, ranks;
static const char *NAMES[] = {"dp"};
/* A timeout that passes here. */
enum { kHasty = 2000 };

static dm_mesh *line(int64_t timeout_ms)
{
  const int32_t size = (size_t)ranks;
  options.timeout_ms = timeout_ms;
  return made_in_time("cpu", &size, 1, NAMES, &options);
}

static void works(void)
{
  float one = 1, sum = 0;
  dm_mesh *mesh = line(0);
  OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == (float)ranks);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
}

/* Whether the last error says in what rank 0 is. Ranks of other hosts know that it is in a
 * collective, and not in which. */
static bool names_the_collective(void)
{
  const char *text = dm_last_error();
  return strstr(text, "in ncclAllReduce(1 x float32, sum)") != NULL || strstr(text, "is in a collective, which rank ") != NULL;
}

/* Rank 0 waits in a collective for ranks that are already in dm_finalize. */
static void only_one_calls(void)
{
  dm_mesh *mesh = line(0);
  float one = 1, sum = 0;
  const double began = seconds_now();
  if (rank == 0) {
    FAILS(DM_STATUS_MISMATCH, "rank 0", dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(names_the_collective() && strstr(dm_last_error(), ", which rank ") != NULL);
    CHECK(strstr(dm_last_error(), "is in dm_finalize(dp)") != NULL);
  }
  FAILS(DM_STATUS_MISMATCH, "rank 0", dm_finalize(mesh, NULL));
  CHECK(names_the_collective());
  CHECK(strstr(dm_last_error(), "dm_finalize(dp)") != NULL);
  CHECK(seconds_now() - began < 20); /* the deadline would be ten minutes */
  dm_free(mesh);
  works();
}

/* The others have given up waiting for a rank in a collective. They do not wait for it again in
 * dm_finalize. */
static void one_is_late(void)
{
  bool again = true;
  for (int64_t hasty = kHasty; again; hasty *= 3) {
    dm_mesh *mesh = line(hasty);
    float one = 1, sum = 0;
    bool is_named = true;
    const double began = seconds_now();
    if (rank > 0) {
      GIVES(DM_STATUS_TIMEOUT, dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      is_named = strstr(dm_last_error(), "rank 0") != NULL;
      GIVES(DM_STATUS_TIMEOUT, dm_finalize(mesh, NULL));
    }
    again = on_any_rank(sync_world, !is_named) && hasty < kLongestScene;
    CHECK(is_named || again);
    if (rank == 0) GIVES(DM_STATUS_TIMEOUT, dm_finalize(mesh, NULL)); /* the error says how the others' call ended */
    CHECK(seconds_now() - began < 1e-3 * (double)hasty + 60); /* the deadline of the call would be ten minutes */
    OK(dm_abort(mesh));
    dm_free(mesh);
  }
  works();
}

/* One rank is late for the end of a mesh that has a long timeout. */
static void one_is_late_for_the_end(void)
{
  bool again = true;
  for (int64_t timeout_ms = kHasty; again; timeout_ms *= 3) {
    dm_mesh *hasty = line(timeout_ms), *patient = line(0);
    float one = 1, sum = 0;
    char told[64];
    bool is_alone = true;
    snprintf(told, sizeof told, "rank 0 did not come within %d ms", (int)timeout_ms);
    if (rank > 0) {
      GIVES(DM_STATUS_TIMEOUT, dm_all_reduce(hasty, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      is_alone = strstr(dm_last_error(), "rank 0") != NULL;
      const double began = seconds_now();
      FAILS(DM_STATUS_TIMEOUT, "failed earlier", dm_finalize(patient, NULL));
      is_alone = is_alone && strstr(dm_last_error(), told) != NULL;
      CHECK(seconds_now() - began < 60); /* the deadline would be ten minutes */
    }
    OK(dm_world_barrier(sync_world, 0));
    if (rank == 0) {
      GIVES(DM_STATUS_TIMEOUT, dm_finalize(patient, NULL));
      is_alone = strstr(dm_last_error(), told) != NULL;
    }
    again = on_any_rank(sync_world, !is_alone) && timeout_ms < kLongestScene;
    CHECK(is_alone || again);
    OK(dm_abort(hasty));
    OK(dm_abort(patient));
    dm_free(hasty);
    dm_free(patient);
  }
  works();
}

int main(void)
{
  REQUIRE(dm_world_init("cpu", NULL, &options.world));
  REQUIRE(dm_world_init("cpu", NULL, &sync_world));
  REQUIRE(dm_world_rank(options.world, &rank));
  REQUIRE(dm_world_size(options.world, &ranks));
  works();
  only_one_calls();
  one_is_late();
  one_is_late_for_the_end();
  OK(dm_world_barrier(sync_world, 0));
  dm_world_free(sync_world);
  dm_world_free(options.world);
  return finish();
}
