/* ranks: 4 */
/* dm_serialize and dm_deserialize. A mesh made from its text has communicators that work. Ranks
 * with different texts are told which rank has which text. A wrong text is refused before any rank
 * waits. */
#include "check.h"

static dm_mesh *const kUntouched = (dm_mesh *)0x5a5a;

static dm_world *world;
static int32_t rank;

static const char *text_of(const dm_mesh *mesh)
{
  static char text[1024];
  size_t length = 0;
  REQUIRE(dm_serialize(mesh, text, sizeof text, &length));
  CHECK(length == strlen(text) + 1);
  return text;
}

/* Compares the sum of this rank's group, computed from dm_group_ranks, with the sum from a
 * collective. */
static void works_along(const dm_mesh *mesh, const char *dim)
{
  int32_t ranks[4], local = -1;
  size_t count = 0;
  REQUIRE(dm_group_ranks(mesh, dim, ranks, 4, &count));
  OK(dm_get_local_rank(mesh, dim, &local));
  CHECK(ranks[local] == rank);
  float listed = 0, mine = (float)(1 << rank), sum = 0;
  for (size_t i = 0; i < count; ++i) listed += (float)(1 << ranks[i]);
  OK(dm_all_reduce(mesh, dim, &mine, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == listed);
}

static void equal(const dm_mesh *a, const dm_mesh *b)
{
  bool same = false;
  uint64_t ours = 0, theirs = 1;
  OK(dm_equal(a, b, &same));
  OK(dm_hash(a, &ours));
  OK(dm_hash(b, &theirs));
  CHECK(same && ours == theirs);
}

/* All ranks serialize one view. Ranks outside it are not members of the new mesh either. */
static void comes_back(const dm_mesh *mesh, const char *expected)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *again = NULL, *root = NULL;
  int32_t coordinate[2];
  size_t length = 0;
  const char *text = text_of(mesh);
  if (strcmp(text, expected) != 0) {
    ++failures;
    fprintf(stderr, "the text is\n%s\nexpected\n%s\n", text, expected);
  }
  options.world = world;
  REQUIRE(dm_deserialize(text, &options, &again));
  equal(mesh, again);
  OK(dm_root(again, &root));
  equal(again, root);
  const dm_status status = dm_get_coordinate(mesh, coordinate, 2, &length);
  GIVES(status, dm_get_coordinate(again, coordinate, 2, &length));
  for (size_t i = 0; status == DM_STATUS_OK && i < dm_ndim(again); ++i) works_along(again, dm_dim_name(again, i));
  OK(dm_finalize(again, NULL));
  dm_free(again);
  dm_free(root);
}

static void round_trips(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL, *turned = NULL, *flat = NULL, *row = NULL, *dealt = NULL;
  const int32_t shape[] = {2, 2};
  const int32_t order[] = {3, 1, 2, 0};
  const char *names[] = {"dp", "tp"}, *swapped[] = {"tp", "dp"}, *tp[] = {"tp"};
  options.world = world;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &mesh));
  comes_back(mesh,
             "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2,2],\"names\":[\"dp\",\"tp\"],"
             "\"layout\":[[[2,2]],[[2,1]]],\"base\":0,\"ranks\":[[0,4]]}");
  REQUIRE(dm_slice(mesh, swapped, 2, &turned));
  comes_back(turned,
             "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2,2],\"names\":[\"tp\",\"dp\"],"
             "\"layout\":[[[2,1]],[[2,2]]],\"base\":0,\"ranks\":[[0,4]]}");
  REQUIRE(dm_flatten(turned, "all", NULL, &flat));
  comes_back(flat,
             "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[4],\"names\":[\"all\"],"
             "\"layout\":[[[2,1],[2,2]]],\"base\":0,\"ranks\":[[0,4]]}");
  REQUIRE(dm_submesh(mesh, tp, 1, 1, &row));
  comes_back(row,
             "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2],\"names\":[\"tp\"],"
             "\"layout\":[[[2,1]]],\"base\":2,\"ranks\":[[0,4]]}");
  dm_free(row);
  dm_mesh *range = NULL;
  REQUIRE(dm_slice_range(mesh, "dp", 1, 1, 1, NULL, &range));
  comes_back(range,
             "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[1,2],\"names\":[\"dp\",\"tp\"],"
             "\"layout\":[[],[[2,1]]],\"base\":0,\"ranks\":[[2,2]]}");
  dm_free(range);
  options.ranks = order;
  options.num_ranks = 4;
  REQUIRE(dm_init("cpu", shape, 2, names, &options, &dealt));
  comes_back(dealt,
             "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2,2],\"names\":[\"dp\",\"tp\"],"
             "\"layout\":[[[2,2]],[[2,1]]],\"base\":0,\"ranks\":[[3,1],[1,2],[0,1]]}");
  REQUIRE(dm_submesh(dealt, tp, 1, 0, &row));
  comes_back(row,
             "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2],\"names\":[\"tp\"],"
             "\"layout\":[[[2,1]]],\"base\":0,\"ranks\":[[3,1],[1,1]]}");

  /* dm_deserialize agrees with dm_init: some ranks use the text, the others make the call. */
  dm_mesh *both = NULL;
  if (rank % 2 == 0)
    REQUIRE(dm_init("cpu", shape, 2, names, &options, &both));
  else {
    options.ranks = NULL;
    options.num_ranks = 0;
    REQUIRE(dm_deserialize(text_of(dealt), &options, &both));
  }
  equal(both, dealt);
  works_along(both, "dp");
  dm_free(both);

  /* dm_deserialize takes dm_init's options, for the dimensions of the text. */
  ncclComm_t shared = NULL, own = NULL;
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dims[1].flags = DM_DIM_OWN_COMM;
  options.ranks = NULL;
  options.num_ranks = 0;
  options.flags = DM_INIT_LAZY;
  options.dim_options = dims;
  options.num_dim_options = 2;
  REQUIRE(dm_deserialize(text_of(mesh), &options, &both));
  works_along(both, "tp");
  OK(dm_get_comm(mesh, "tp", &shared));
  OK(dm_get_comm(both, "tp", &own));
  CHECK(own != NULL && own != shared);
  OK(dm_finalize(both, NULL));
  dm_free(both);

  /* The default world. */
  REQUIRE(dm_deserialize(text_of(mesh), NULL, &both));
  equal(mesh, both);
  works_along(both, "dp");
  dm_free(both);

  /* Rank 2 has the text of another mesh. */
  options.flags = 0;
  options.dim_options = NULL;
  options.num_dim_options = 0;
  dm_mesh *none = kUntouched;
  FAILS(DM_STATUS_MISMATCH, "rank 2 called dm_init(shape=(4), names=(all), ranks=(0, 2, 1, 3)) as call ",
        dm_deserialize(text_of(rank == 2 ? flat : dealt), &options, &none));
  CHECK(strstr(dm_last_error(), "rank 0 called dm_init(shape=(2, 2), names=(dp, tp), ranks=(3, 1, 2, 0))") != NULL);
  CHECK(none == kUntouched);
  OK(dm_world_barrier(world, 0));

  dm_free(mesh);
  dm_free(turned);
  dm_free(flat);
  dm_free(row);
  dm_free(dealt);
}

static void lengths(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  const int32_t shape[] = {4};
  const char *names[] = {"\"\xc3\xa9\n"}; /* what JSON has to escape */
  const char *expected =
      "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[4],\"names\":[\"\\\"\xc3\xa9\\n\"],"
      "\"layout\":[[[4,1]]],\"base\":0,\"ranks\":[[0,4]]}";
  char text[256] = "77";
  size_t length = 77, needed = strlen(expected) + 1;
  options.world = world;
  options.flags = DM_INIT_LAZY;
  REQUIRE(dm_init("cpu", shape, 1, names, &options, &mesh));
  GIVES(DM_STATUS_BUFFER_TOO_SMALL, dm_serialize(mesh, NULL, 0, &length));
  CHECK(length == needed);
  length = 77;
  GIVES(DM_STATUS_BUFFER_TOO_SMALL, dm_serialize(mesh, text, needed - 1, &length));
  CHECK(length == needed && strcmp(text, "77") == 0);
  OK(dm_serialize(mesh, text, needed, &length));
  CHECK(length == needed && strcmp(text, expected) == 0);
  dm_mesh *again = NULL;
  REQUIRE(dm_deserialize(text, &options, &again));
  CHECK(strcmp(dm_dim_name(again, 0), names[0]) == 0);
  equal(mesh, again);
  dm_free(again);
  dm_free(mesh);
}

#define HEAD "{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2,2],\"names\":[\"dp\",\"tp\"],"
#define ROWS "\"layout\":[[[2,2]],[[2,1]]],\"base\":0,"

/* These refusals happen on one rank alone, with the default world. No rank waits. */
static void refusals(const dm_init_options *in_world)
{
  static const struct {
    const char *text, *message;
  } bad[] = {
      {"", "not the text of a mesh: EOF while parsing a value at line 1 column 0"},
      {"DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))", "expected value at line 1 column 1"},
      {"[1]", "a JSON object is wanted"},
      {HEAD ROWS, "EOF while parsing a value at line 1 column 106"},
      {HEAD ROWS "\"ranks\":[[0,4]]}}", "trailing characters at line 1 column 123"},
      {HEAD ROWS "\"ranks\":[[0,4]],\"rank\":0}", "unknown field `rank`"},
      {HEAD ROWS "\"base\":0,\"ranks\":[[0,4]]}", "duplicate field `base`"},
      {HEAD "\"ranks\":[[0,4]]}", "missing field `layout`"},
      {"{\"devicemesh\":2,\"mesh\":[]}", "has version 2, but this library"},
      {"{\"devicemesh\":\"1\"}", "invalid type: string \"1\""},
      {"{\"devicemesh\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "invalid type: sequence"},
      {HEAD "\"layout\":[[[2,2]],[[3,1]]],\"base\":0,\"ranks\":[[0,6]]}", "layout[1] walks 3 ranks, but shape[1] is 2"},
      {HEAD "\"layout\":[[[2,2]]],\"base\":0,\"ranks\":[[0,4]]}", "shape has 2 elements, names 2, layout 1"},
      {HEAD "\"layout\":[[[2,3]],[[2,1]]],\"base\":0,\"ranks\":[[0,4]]}", "the layout reaches position 4, but ranks lists only 4 ranks"},
      {HEAD "\"layout\":[[[2,1]],[[2,1]]],\"base\":0,\"ranks\":[[0,4]]}", "the steps [2,1], [2,1], which overlap"},
      {HEAD "\"layout\":[[[2,0]],[[2,1]]],\"base\":0,\"ranks\":[[0,4]]}", "layout[0] has 2 steps of stride 0"},
      {HEAD "\"layout\":[[[2,2]],[[2,1]]],\"base\":-1,\"ranks\":[[0,4]]}", "invalid value: integer `-1`"},
      {HEAD ROWS "\"ranks\":[[-1,4]]}", "ranks[0] is [-1,4], from rank -1 to rank 2"},
      {HEAD ROWS "\"ranks\":[[4294967296,4]]}", "from rank 4294967296 to rank 4294967299; ranks are 0 to 2147483646"},
      {HEAD ROWS "\"ranks\":[[0,18446744073709551615]]}", "to rank 18446744073709551614"},
      {HEAD ROWS "\"ranks\":[[0,3],[3,0]]}", "ranks[1] is [3,0]"},
      {HEAD ROWS "\"ranks\":[0,1,2,3]}", "expected a run of ranks, [first, count] or [first, count, step]"},
      {"{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2],\"names\":[\"d\\u0000p\"],\"layout\":[[[2,1]]],\"base\":0,\"ranks\":[[0,2]]}", "names[0] contains a NUL"},
      {"{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2],\"names\":[\"\"],\"layout\":[[[2,1]]],\"base\":0,\"ranks\":[[0,2]]}", "the name of dimension 0 is empty"},
      {"{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2,1],\"names\":[\"dp\",\"dp\"],\"layout\":[[[2,1]],[]],\"base\":0,\"ranks\":[[0,2]]}", "dimension name dp is repeated"},
      {"{\"devicemesh\":1,\"device_type\":\"tpu\",\"shape\":[2],\"names\":[\"dp\"],\"layout\":[[[2,1]]],\"base\":0,\"ranks\":[[0,2]]}", "device_type is \"tpu\""},
      {"{\"devicemesh\":1,\"device_type\":\"cpu:0\",\"shape\":[2],\"names\":[\"dp\"],\"layout\":[[[2,1]]],\"base\":0,\"ranks\":[[0,2]]}", "cpu:0"},
      {"{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[2147483648],\"names\":[\"dp\"],\"layout\":[[[2147483648,1]]],\"base\":0,\"ranks\":[[0,2]]}", "shape has 2147483648 ranks"},
      {HEAD "\"layout\":[[[2,2]],[[2,1]]],\"base\":0,\"ranks\":[[0,4]\xff]}", "text is not UTF-8"},
  };
  dm_mesh *mesh = kUntouched;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i)
    FAILS(DM_STATUS_INVALID_ARGUMENT, bad[i].message, dm_deserialize(bad[i].text, NULL, &mesh));

  const char *good = HEAD ROWS "\"ranks\":[[0,4]]}";
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  const int32_t ranks[] = {0, 1, 2, 3};
  options.ranks = ranks;
  options.num_ranks = 4;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.ranks is not NULL", dm_deserialize(good, &options, &mesh));
  options.ranks = NULL;
  options.num_ranks = 0;
  options.flags = DM_INIT_OWN_COMMS;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dm_from_comms", dm_deserialize(good, &options, &mesh));
  options.flags = 1u << 30;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "0x40000000", dm_deserialize(good, &options, &mesh));
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dims[1].flags = 8;
  options.flags = 0;
  options.dim_options = dims;
  options.num_dim_options = 2;
  FAILS(DM_STATUS_INVALID_ARGUMENT, "options.dim_options[1]", dm_deserialize(good, &options, &mesh));

  /* These mistakes only show when the world is known. */
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 2 is listed twice, at index 1 and index 2",
        dm_deserialize(HEAD ROWS "\"ranks\":[[1,2],[2,2]]}", in_world, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "rank 4 at index 3 is out of range", dm_deserialize(HEAD ROWS "\"ranks\":[[1,4]]}", in_world, &mesh));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "has 2147450880 ranks, but the world has 4", /* the ranks are not listed first */
        dm_deserialize("{\"devicemesh\":1,\"device_type\":\"cpu\",\"shape\":[32768,65535],\"names\":[\"a\",\"b\"],"
                       "\"layout\":[[[32768,1]],[[65535,32768]]],\"base\":0,\"ranks\":[[0,2147450880]]}", in_world, &mesh));
  FAILS(
      DM_STATUS_INVALID_ARGUMENT, "device_type is cuda, but options.world was joined for device type cpu",
      dm_deserialize(
          "{\"devicemesh\":1,\"device_type\":\"cuda\",\"shape\":[2],\"names\":[\"dp\"],\"layout\":[[[2,1]]],\"base\":0,\"ranks\":[[0,2]]}",
          in_world, &mesh));
  CHECK(mesh == kUntouched);
}

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_rank(world, &rank));
  options.world = world;
  const double began = seconds_now();
  if (rank == 1) refusals(&options);
  CHECK(seconds_now() - began < 30); /* the deadline would be ten minutes */
  OK(dm_world_barrier(world, 0));
  round_trips();
  lengths();
  dm_world_free(world);
  return finish();
}
