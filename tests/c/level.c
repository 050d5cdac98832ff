/* ranks: 4 */
/* A rank that comes late to a collective call, or refuses its own, meets the others again in the
 * next call, whether or not the ranks pause between their tries. The meshes have ranks 0, 1 and 2.
 * The barriers of the world, in which rank 3 takes part too, keep the ranks in step. It takes about
 * 4 s, because calls run into their deadlines of 0.3 s. */
#include "facts.h"

static int32_t rank;
static dm_world *world;

static void in_step(void)
{
  REQUIRE(dm_world_barrier(world, 0));
}

static dm_mesh *make(int64_t timeout_ms, uint32_t flags)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t shape[] = {3, 1};
  const char *names[] = {"tp", "one"};
  options.world = world;
  options.timeout_ms = timeout_ms;
  options.flags = flags;
  return made_in_time("cpu", shape, 2, names, &options);
}

/* Rank `late` does not come to two calls, and is told so when it comes. The others give up a third
 * call before it comes again. */
static void late(int32_t rank_that_is_late)
{
  char told[128];
  dm_mesh *mesh = make(300, 0), *flat = NULL;
  dm_status status = DM_STATUS_TIMEOUT;
  snprintf(told, sizeof told, "rank %d, which is this process, came too late with dm_flatten(dims=(tp, one), name=f): rank ",
           (int)rank_that_is_late);
  for (int call = 0; call < 4; ++call) {
    in_step();
    if (rank == 3 || (call == 2) != (rank == rank_that_is_late)) continue;
    GIVES(DM_STATUS_TIMEOUT, dm_flatten(mesh, "f", NULL, &flat));
    if (call == 2) CHECK(strncmp(dm_last_error(), told, strlen(told)) == 0);
  }
  /* Now all come, and they meet. On a busy machine a rank may need more than 0.3 s to come. */
  for (int attempt = 0; attempt < 6; ++attempt) {
    in_step();
    if (rank < 3 && status != DM_STATUS_OK) status = dm_flatten(mesh, "f", NULL, &flat);
  }
  if (rank < 3) {
    CHECK(status == DM_STATUS_OK);
    dm_free(flat);
  }
  dm_abort(mesh);
  dm_free(mesh);
}

/* Rank 1 refuses its own call. The others are told at once, and the next call meets. */
static void refused(void)
{
  dm_mesh *mesh = make(600000, 0), *view = NULL;
  const int32_t right[] = {3}, apart[] = {3, 1};
  const int32_t wrong[] = {5}, four[] = {4}, five[] = {5};
  const char *names[] = {"x"}, *parts[] = {"a", "b"};
  float in = 1, sum = 0;
  double began;
  in_step();
  began = seconds_now();
  if (rank < 3) {
    FAILS(DM_STATUS_INVALID_ARGUMENT,
          rank == 1 ? "tp is already a dimension of"
                    : "rank 1 refused its own dm_flatten as call 1: tp is already a dimension of",
          dm_flatten(mesh, rank == 1 ? "tp" : "f", NULL, &view));
    OK(dm_flatten(mesh, "f", NULL, &view));
    dm_free(view);
    FAILS(DM_STATUS_INVALID_ARGUMENT, rank == 1 ? "" : "rank 1 refused its own dm_reshape as call 3: ",
          dm_reshape(mesh, rank == 1 ? wrong : right, 1, names, NULL, &view));
    OK(dm_reshape(mesh, right, 1, names, NULL, &view));
    dm_free(view);
    FAILS(DM_STATUS_NOT_FOUND, rank == 1 ? "nowhere" : "rank 1 refused its own dm_slice_range as call 5: ",
          dm_slice_range(mesh, rank == 1 ? "nowhere" : "tp", 0, 2, 1, NULL, &view));
    OK(dm_slice_range(mesh, "tp", 0, 2, 1, NULL, &view));
    dm_free(view);
    FAILS(DM_STATUS_INVALID_ARGUMENT, rank == 1 ? "shape is NULL" : "rank 1 refused its own dm_unflatten as call 7: shape is NULL",
          dm_unflatten(mesh, "tp", rank == 1 ? NULL : apart, 2, parts, NULL, &view));
    OK(dm_unflatten(mesh, "tp", apart, 2, parts, NULL, &view));
    dm_free(view);
    /* All refuse, and a refusal that only one rank makes harms no call of another function. */
    GIVES(DM_STATUS_INVALID_ARGUMENT, dm_flatten(mesh, "tp", NULL, &view));
    if (rank == 2) GIVES(DM_STATUS_INVALID_ARGUMENT, dm_flatten(mesh, "tp", NULL, &view));
  }
  in_step();
  if (rank < 3) {
    /* An open group refuses dm_finalize. */
    if (rank == 0) {
      REQUIRE(dm_group_start(mesh));
      REQUIRE(dm_all_reduce(mesh, "tp", &in, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
      GIVES(DM_STATUS_INVALID_STATE, dm_finalize(mesh, NULL));
      REQUIRE(dm_group_end(mesh));
    } else {
      FAILS(DM_STATUS_INVALID_STATE, "rank 0 refused its own dm_finalize as call ", dm_finalize(mesh, NULL));
      REQUIRE(dm_all_reduce(mesh, "tp", &in, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    }
    OK(dm_finalize(mesh, NULL));
  }
  CHECK(seconds_now() - began < 60);
  in_step();
  dm_free(mesh);
  /* dm_init and dm_world_barrier. */
  {
    dm_init_options options = DM_INIT_OPTIONS_INIT;
    options.world = world;
    FAILS(DM_STATUS_INVALID_ARGUMENT, rank == 2 ? "has 5 ranks, but the world has 4" : "rank 2 refused its own dm_init as call ",
          dm_init("cpu", rank == 2 ? five : four, 1, NULL, &options, &mesh));
    FAILS(DM_STATUS_INVALID_ARGUMENT, rank == 2 ? "shape is NULL" : "rank 2 refused its own dm_init as call ",
          dm_init("cpu", rank == 2 ? NULL : four, 1, NULL, &options, &mesh));
    FAILS(DM_STATUS_INVALID_ARGUMENT, rank == 2 ? "timeout_ms" : "rank 2 refused its own dm_world_barrier as call ",
          dm_world_barrier(world, rank == 2 ? -1 : 0));
    in_step();
  }
}

/* A rank that names an unknown dimension of a lazy mesh may be waited for by the others. */
static void lazy(void)
{
  dm_mesh *mesh = make(300, DM_INIT_LAZY);
  ncclComm_t comm = NULL;
  dm_status status = DM_STATUS_TIMEOUT;
  in_step();
  if (rank == 1) GIVES(DM_STATUS_NOT_FOUND, dm_get_comm(mesh, "typo", &comm));
  if (rank == 0 || rank == 2) {
    /* On a busy machine one of the two may be late as well. It is told so. */
    FAILS(DM_STATUS_TIMEOUT, "dm_get_comm(dim=tp)", dm_get_comm(mesh, "tp", &comm));
    const int32_t missing[] = {1};
    const dm_error_info info = facts();
    CHECK(within(missing, 1, info.ranks, info.num_ranks) || strstr(dm_last_error(), "came too late") != NULL);
  }
  for (int attempt = 0; attempt < 6; ++attempt) {
    in_step();
    if (rank < 3 && status != DM_STATUS_OK) status = dm_get_comm(mesh, "tp", &comm);
  }
  if (rank < 3) CHECK(status == DM_STATUS_OK);
  dm_abort(mesh);
  dm_free(mesh);
}

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_rank(world, &rank));
  late(0);
  late(2);
  refused();
  lazy();
  dm_world_free(world);
  return finish();
}
