/* ranks: 4 */
/* When ranks disagree, all get an error that quotes both calls. Ranks that never come are named.
 * The world works on after both. */
#include "facts.h"

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL, *view = NULL;
  int32_t rank = -1;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_rank(world, &rank));
  options.world = world;
  const int32_t square[] = {2, 2};
  const int32_t wide[] = {1, 4};
  const char *names[] = {"dp", "tp"}, *other_names[] = {"dp", "pp"};

  /* Shape. */
  double began = seconds_now();
  FAILS(
      DM_STATUS_MISMATCH,
      "rank 3 called dm_init(shape=(1, 4), names=(dp, tp)) as call 1, rank 0 called dm_init(shape=(2, 2), names=(dp, tp))",
      dm_init("cpu", rank == 3 ? wide : square, 2, names, &options, &mesh));
  /* Names. */
  FAILS(
      DM_STATUS_MISMATCH,
      "rank 1 called dm_init(shape=(2, 2), names=(dp, pp)) as call 2, rank 0 called dm_init(shape=(2, 2), names=(dp, tp))",
      dm_init("cpu", square, 2, rank == 1 ? other_names : names, &options, &mesh));
  /* Ranks. */
  const int32_t order[] = {3, 2, 1, 0};
  options.ranks = rank == 2 ? order : NULL;
  options.num_ranks = rank == 2 ? 4 : 0;
  FAILS(DM_STATUS_MISMATCH, "ranks=(3, 2, 1, 0)", dm_init("cpu", square, 2, names, &options, &mesh));
  options.ranks = NULL;
  options.num_ranks = 0;
  /* Names with the characters that separate names: no two lists have one text. A line break in a
   * name cuts no message. */
  const char *comma[] = {"a, b", "c"}, *other_comma[] = {"a", "b, c"};
  FAILS(DM_STATUS_MISMATCH, "rank 3 called dm_init(shape=(2, 2), names=(a, b\\, c)) as call 4, rank 0 called dm_init(shape=(2, 2), names=(a\\, b, c))",
        dm_init("cpu", square, 2, rank == 3 ? other_comma : comma, &options, &mesh));
  const char *line[] = {"a\nb", "c"}, *other_line[] = {"a\nd", "c"};
  FAILS(DM_STATUS_MISMATCH, "rank 3 called dm_init(shape=(2, 2), names=(a\\nd, c)) as call 5, rank 0 called dm_init(shape=(2, 2), names=(a\\nb, c))",
        dm_init("cpu", square, 2, rank == 3 ? other_line : line, &options, &mesh));
  /* A text that the store would not take is refused by the rank that has it, and the others are
   * told. */
  enum { kLong = 9 << 20 };
  char *long_name = (char *)malloc(kLong);
  REQUIRE(long_name == NULL ? DM_STATUS_INTERNAL : DM_STATUS_OK);
  memset(long_name, 'x', kLong - 1);
  long_name[kLong - 1] = 0;
  const char *long_names[] = {long_name, "c"};
  FAILS(DM_STATUS_INVALID_ARGUMENT, "texts of at most 1048576 bytes", dm_init("cpu", square, 2, rank == 3 ? long_names : names, &options, &mesh));
  if (rank != 3) CHECK(strstr(dm_last_error(), "rank 3 refused its own dm_init as call 6") != NULL);
  free(long_name);
  /* Flags. */
  options.flags = rank == 2 ? DM_INIT_LAZY : 0;
  FAILS(DM_STATUS_MISMATCH, "lazy", dm_init("cpu", square, 2, names, &options, &mesh));
  options.flags = 0;
  CHECK(seconds_now() - began < 60); /* the deadline would be ten minutes */

  /* After these errors the world works. */
  REQUIRE(dm_init("cpu", square, 2, names, &options, &mesh));
  float one = 1, sum = 0;
  OK(dm_all_reduce(mesh, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 2);

  /* Another call altogether. */
  if (rank == 0)
    FAILS(DM_STATUS_MISMATCH, "dm_world_barrier()", dm_flatten(mesh, NULL, NULL, &view));
  else
    FAILS(DM_STATUS_MISMATCH, "dm_flatten(dims=(dp, tp), name=dp_tp)", dm_world_barrier(world, 0));
  /* Names of a flattened dimension. */
  FAILS(DM_STATUS_MISMATCH, "name=ours", dm_flatten(mesh, rank == 2 ? "theirs" : "ours", NULL, &view));
  FAILS(DM_STATUS_MISMATCH, "rank 2 called dm_flatten(dims=(dp, tp), name=a\\nc) as call", dm_flatten(mesh, rank == 2 ? "a\nc" : "a\nb", NULL, &view));
  CHECK(strstr(dm_last_error(), "rank 0 called dm_flatten(dims=(dp, tp), name=a\\nb)") != NULL);
  REQUIRE(dm_flatten(mesh, "theirs", NULL, &view)); /* the call that failed has left no dimension behind */
  dm_free(view);

  /* Rank 1 does not come. The others get an error at the deadline, and rank 1 gets one when it
   * comes. */
  bool again = true;
  for (int64_t time = 2000; again; time *= 3) {
    dm_mesh *never = NULL;
    if (rank == 1) {
      /* This waits for rank 3, which comes when its own call has timed out. */
      OK(dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      options.timeout_ms = 600000; /* Rank 1 does not wait for its own deadline. */
      began = seconds_now();
      GIVES(DM_STATUS_TIMEOUT, dm_init("cpu", square, 2, names, &options, &never));
      CHECK(seconds_now() - began < 60);
    } else {
      options.timeout_ms = time;
      const moment called = moment_now();
      GIVES(DM_STATUS_TIMEOUT, dm_init("cpu", square, 2, names, &options, &never));
      const double waited = own_seconds_since(&called);
      /* The rank that called first has the first deadline, which ends the call of all ranks. So a
       * rank that a busy machine has delayed waits for less time. */
      CHECK(waited < 1e-3 * (double)time * 1.1 + 0.25);
      if (rank == 3) OK(dm_all_reduce(mesh, "dp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    }
    const bool is_alone = strstr(dm_last_error(), "rank 1 never called dm_init(shape=(2, 2), names=(dp, tp))") != NULL;
    again = on_any_rank(world, !is_alone) && time < kLongestScene;
    CHECK(is_alone || again);
  }

  /* In a collective the host engine finds the mismatch. */
  if (rank < 2)
    FAILS(DM_STATUS_MISMATCH, "rank 1", dm_all_reduce(mesh, "tp", &one, &sum, 1, rank == 1 ? DM_INT32 : DM_FLOAT32, DM_SUM, NULL));
  OK(dm_abort(mesh));
  FAILS(DM_STATUS_ABORTED, "aborted", dm_all_reduce(mesh, "tp", &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  OK(dm_world_barrier(world, 0));
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
