/* ranks: 2 */
/* one host */
/* Several threads, several meshes and groups use communicators. Each call behaves as it would
 * alone. */
#include "blocked.h"
#include "facts.h"

static dm_world *world, *sync_world;
static dm_mesh *mesh;
static int32_t rank;

static int mappings(void)
{
  char line[1024];
  int found = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  while (maps != NULL && fgets(line, sizeof line, maps) != NULL) found += strstr(line, "/memfd:hostccl") != NULL;
  if (maps != NULL) fclose(maps);
  return found;
}

/* Whether that many segments come to be mapped. The thread that waits for ranks of other hosts at
 * an id of ncclGetUniqueId unmaps its own copy a moment after the communicator has started. */
static int comes_to_map(int count)
{
  for (int tries = 0; tries < 10000 && mappings() != count; ++tries) usleep(1000);
  return mappings() == count;
}

static float sum_along(const dm_mesh *view, const char *dim)
{
  float one = 1, sum = 0;
  OK(dm_all_reduce(view, dim, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  return sum;
}

static dm_status flatten(void *name)
{
  dm_mesh *view = NULL;
  const dm_status status = dm_flatten(mesh, (const char *)name, NULL, &view);
  dm_free(view);
  return status;
}

static dm_status finalize(void *none)
{
  (void)none;
  return dm_finalize(mesh, NULL);
}

/* Inside a group a library queues everything, also the making of a communicator. The first use of
 * a lazy dimension inside a group works nevertheless. */
static void first_use_in_a_group(dm_init_options options)
{
  const int32_t shape[] = {2, 1};
  const char *names[] = {"pp", "tp"};
  float mine = (float)(rank + 1), theirs = 0, alone = 0;
  options.timeout_ms = 60000;
  for (int lazy = 0; lazy < 2; ++lazy) {
    dm_mesh *grouped = NULL;
    options.flags = lazy ? DM_INIT_LAZY : 0;
    dm_dim_options own[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
    own[0].flags = own[1].flags = DM_DIM_OWN_COMM;
    options.dim_options = own;
    options.num_dim_options = 2;
    REQUIRE(dm_init("cpu", shape, 2, names, &options, &grouped));
    OK(dm_group_start(grouped));
    OK(dm_send(grouped, "pp", &mine, 1, DM_FLOAT32, 1 - rank, NULL));
    OK(dm_recv(grouped, "pp", &theirs, 1, DM_FLOAT32, 1 - rank, NULL));
    OK(dm_all_reduce(grouped, "tp", &mine, &alone, 1, DM_FLOAT32, DM_SUM, NULL));
    OK(dm_group_end(grouped));
    CHECK(theirs == (float)(2 - rank) && alone == mine);
    OK(dm_finalize(grouped, NULL));
    dm_free(grouped);
  }
}

/* Calls that do not fit together give the same error inside a group as outside. */
static void mismatch_in_a_group(const dm_init_options *options)
{
  const int32_t line[] = {2};
  const float some[2] = {1, 1};
  float sums[2];
  dm_mesh *grouped = NULL;
  REQUIRE(dm_init("cpu", line, 1, NULL, options, &grouped));
  OK(dm_group_start(grouped));
  OK(dm_all_reduce(grouped, NULL, some, sums, rank == 0 ? 1 : 2, DM_FLOAT32, DM_SUM, NULL));
  FAILS(DM_STATUS_MISMATCH, "different calls", dm_group_end(grouped));
  OK(dm_world_barrier(world, 0));
  OK(dm_abort(grouped));
  dm_free(grouped);
}

/* Each mesh's calls end at its own timeout, also where it shares the communicator with a mesh that
 * is more patient. */
static void own_timeouts(dm_init_options options)
{
  const int32_t line[] = {2};
  dm_mesh *patient = NULL, *hasty = NULL;
  ncclComm_t one = NULL, other = NULL;
  /* On a busy machine the sum may need more time than the hasty mesh has. The ranks then make both
   * meshes again. */
  bool again = true;
  for (int attempt = 1; again; ++attempt) {
    float mine = 1, sum = 0;
    options.timeout_ms = 60000;
    patient = made_in_time("cpu", line, 1, NULL, &options);
    options.timeout_ms = 2000;
    hasty = made_in_time("cpu", line, 1, NULL, &options);
    OK(dm_get_comm(patient, NULL, &one));
    OK(dm_get_comm(hasty, NULL, &other));
    CHECK(one == other);
    const dm_status status = dm_all_reduce(hasty, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
    again = on_any_rank(sync_world, status == DM_STATUS_TIMEOUT) && attempt < 6;
    if (again) {
      OK(dm_abort(hasty));
      OK(dm_abort(patient));
      dm_free(hasty);
      dm_free(patient);
    } else {
      OK(status);
      CHECK(sum == 2);
    }
  }
  CHECK(sum_along(patient, NULL) == 2);
  if (rank == 0) {
    float mine = 1, sum = 0;
    const moment began = moment_now();
    FAILS(DM_STATUS_TIMEOUT, "rank 1 did not come within 2000 ms", dm_all_reduce(hasty, NULL, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
    CHECK(own_seconds_since(&began) < 2 * 1.1 + 0.25);
  }
  OK(dm_world_barrier(sync_world, 0));
  OK(dm_abort(hasty));
  GIVES(DM_STATUS_ABORTED, dm_check(patient, NULL)); /* it shared the communicator that has ended */
  OK(dm_abort(patient));
  dm_free(hasty);
  dm_free(patient);
  OK(dm_world_barrier(sync_world, 0));
}

/* A rank comes late, so the communicator of a lazy dimension is not made. It is made when all
 * ranks ask again. */
static void lazy_again(dm_init_options options)
{
  const int32_t line[] = {2};
  dm_mesh *lazy = NULL, *patient = NULL;
  ncclComm_t comm = NULL, shared = NULL;
  dm_status status = DM_STATUS_TIMEOUT;
  options.flags = DM_INIT_LAZY;
  options.timeout_ms = 2000;
  lazy = made_in_time("cpu", line, 1, NULL, &options);
  if (rank == 0) FAILS(DM_STATUS_TIMEOUT, "rank 1 never called dm_get_comm", dm_get_comm(lazy, NULL, &comm));
  OK(dm_world_barrier(sync_world, 0));
  /* Rank 1 is told of the call that it missed. */
  if (rank == 1) FAILS(DM_STATUS_TIMEOUT, "rank 1 never called dm_get_comm", dm_get_comm(lazy, NULL, &comm));
  /* On a busy machine a rank may need more than 2 s to come. */
  for (int attempt = 0; attempt < 6 && status == DM_STATUS_TIMEOUT; ++attempt) {
    OK(dm_world_barrier(sync_world, 0));
    status = dm_get_comm(lazy, NULL, &comm);
  }
  OK(status);
  /* A mesh with a long timeout shares the communicator. */
  options.flags = 0;
  options.timeout_ms = 60000;
  REQUIRE(dm_init("cpu", line, 1, NULL, &options, &patient));
  OK(dm_get_comm(patient, NULL, &shared));
  CHECK(comm == shared && sum_along(patient, NULL) == 2);
  dm_call_options call = DM_CALL_OPTIONS_INIT;
  call.timeout_ms = 60000;
  OK(dm_finalize(lazy, &call));
  OK(dm_finalize(patient, NULL));
  dm_free(lazy);
  dm_free(patient);
}

/* A call that waits for no rank does not wait behind a thread that does. A second dm_finalize of
 * one rank does not count as the call of another rank. */
static void beside_a_blocked_call(const dm_init_options *options)
{
  const int32_t shape[] = {2, 1};
  const char *names[] = {"dp", "tp"};
  blocked one, other;
  dm_mesh *view = NULL;
  ncclComm_t comm = NULL;
  REQUIRE(dm_init("cpu", shape, 2, names, options, &mesh));
  if (rank == 0) {
    start_blocked(&one, flatten, (void *)"flat");
    const double began = seconds_now();
    OK(dm_get_comm(mesh, "tp", &comm)); /* made now, for this rank alone */
    OK(dm_slice(mesh, names, 1, &view));
    CHECK(sum_along(mesh, "tp") == 1 && seconds_now() - began < 2);
    dm_free(view);
  }
  OK(dm_world_barrier(sync_world, 0));
  if (rank == 1) OK(flatten((void *)"flat"));
  if (rank == 0) {
    join_blocked(&one);
    CHECK(one.status == DM_STATUS_OK);
    start_blocked(&one, finalize, NULL);
    start_blocked(&other, finalize, NULL);
  }
  OK(dm_world_barrier(sync_world, 0));
  if (rank == 1) OK(dm_finalize(mesh, NULL));
  if (rank == 0) {
    const moment began = moment_now();
    join_blocked(&one);
    CHECK(end_blocked(&other, &began) < 2);
    const dm_status statuses[] = {one.status, other.status};
    CHECK((statuses[0] == DM_STATUS_OK && statuses[1] == DM_STATUS_ABORTED) ||
          (statuses[1] == DM_STATUS_OK && statuses[0] == DM_STATUS_ABORTED));
  }
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  OK(dm_abort(mesh));
  dm_free(mesh);
  OK(dm_world_barrier(sync_world, 0));
}

/* The library destroys the communicators that it took over. It destroys each one once, also one
 * with a single rank and one that was given for two dimensions. */
static void adopted(dm_world *alone)
{
  const int32_t ones[] = {1, 1};
  const char *names[] = {"a", "b"};
  const int before = mappings();
  for (int way = 0; way < 4; ++way) {
    ncclUniqueId id;
    ncclComm_t comms[2] = {NULL, NULL};
    dm_init_options options = DM_INIT_OPTIONS_INIT;
    dm_mesh *made = NULL, *library = NULL;
    /* The program does not link hostccl, so the mesh gives its functions. */
    ncclResult_t (*get_id)(ncclUniqueId *) = NULL;
    ncclResult_t (*init_rank)(ncclComm_t *, int, ncclUniqueId, int) = NULL;
    options.world = alone;
    REQUIRE(dm_init("cpu", ones, 2, names, &options, &library));
    options.world = NULL;
    REQUIRE(dm_get_proc(library, "ncclGetUniqueId", (void **)&get_id));
    REQUIRE(dm_get_proc(library, "ncclCommInitRank", (void **)&init_rank));
    for (int index = 0; index < 2; ++index) {
      comms[index] = comms[0];
      if (index == 1 && way % 2 == 0) continue; /* one communicator for two dimensions */
      CHECK(get_id(&id) == ncclSuccess && init_rank(&comms[index], 1, id, 0) == ncclSuccess);
    }
    options.flags = DM_INIT_OWN_COMMS;
    REQUIRE(dm_from_comms("cpu", ones, 2, names, comms, &options, &made));
    CHECK(comes_to_map(before + 1 + way % 2));
    CHECK(sum_along(made, "a") == 1 && sum_along(made, "b") == 1);
    OK(way < 2 ? dm_abort(made) : dm_finalize(made, NULL));
    GIVES(DM_STATUS_ABORTED, dm_check(made, "a"));
    CHECK(comes_to_map(before));
    dm_free(made);
    OK(dm_finalize(library, NULL));
    dm_free(library);
  }
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", NULL, &world));
  REQUIRE(dm_world_init("cpu", NULL, &sync_world));
  REQUIRE(dm_world_rank(world, &rank));
  options.world = world;
  first_use_in_a_group(options);
  mismatch_in_a_group(&options);
  own_timeouts(options);
  lazy_again(options);
  beside_a_blocked_call(&options);
  dm_world *alone = NULL;
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  join.world_size = 1;
  REQUIRE(dm_world_init("cpu", &join, &alone));
  adopted(alone);
  dm_world_free(alone);
  dm_world_free(world);
  dm_world_free(sync_world);
  return finish();
}
