/* ranks: 1 2 4 8 */
/* What the reductions of the host engine give for NaN, for averages at the ends of the integer
 * types and of the floats, for 8-bit floats, and for operators that ncclRedOpCreatePreMulSum
 * makes. */
#include "check.h"

static dm_mesh *mesh;
static int32_t rank, size;

/* All three reducing calls, apart and in place; every rank gets its first element. */
static void gives(const void *value, const void *expected, size_t bytes, dm_dtype dtype, dm_op op, int line)
{
  enum { kCount = 70 };
  char send[8 * kCount * 8], recv[8 * kCount * 8];
  for (int32_t at = 0; at < kCount * size; ++at) memcpy(send + (size_t)at * bytes, value, bytes);
  for (int which = 0; which < 4; ++which) {
    memset(recv, 0, sizeof recv);
    switch (which) {
    case 0: OK(dm_all_reduce(mesh, NULL, send, recv, kCount, dtype, op, NULL)); break;
    case 1: OK(dm_reduce(mesh, NULL, send, recv, kCount, dtype, op, 0, NULL)); break;
    case 2: OK(dm_reduce_scatter(mesh, NULL, send, recv, kCount, dtype, op, NULL)); break;
    default:
      memcpy(recv, send, sizeof recv);
      OK(dm_all_reduce(mesh, NULL, recv, recv, kCount, dtype, op, NULL));
    }
    int wrong = 0;
    for (size_t at = 0; at < kCount; ++at) wrong += memcmp(recv + at * bytes, expected, bytes) != 0;
    if (wrong > 0 && !(which == 1 && rank != 0)) {
      ++failures;
      fprintf(stderr, "line %d: call %d of dtype %d op %d on rank %d of %d: %d wrong elements\n", line, which,
              (int)dtype, (int)op, (int)rank, (int)size, wrong);
    }
  }
}
#define GIVEN(type, dtype, op, mine, result) \
  do { \
    const type mine_ = (type)(mine), result_ = (type)(result); \
    gives(&mine_, &result_, sizeof(type), dtype, op, __LINE__); \
  } while (0)

int main(void)
{
  const char *names[] = {"all"};
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  REQUIRE(dm_world_init("cpu", &join, &world));
  REQUIRE(dm_world_size(world, &size));
  options.world = world;
  const int32_t shape[] = {size};
  REQUIRE(dm_init("cpu", shape, 1, names, &options, &mesh));
  rank = rank_of(mesh);

  /* One rank after the other has a NaN, and the result is one NaN whoever it is. */
  for (int32_t who = 0; who < size && size > 1; ++who) {
    for (dm_op op = DM_MAX; op <= DM_MIN; ++op) {
      const int has = rank == who;
      GIVEN(uint32_t, DM_FLOAT32, op, has ? 0xffc00001u : 0x3f800000u, 0x7fc00000u);
      GIVEN(uint64_t, DM_FLOAT64, op, has ? UINT64_C(0xfff8000000000001) : UINT64_C(0x3ff0000000000000), UINT64_C(0x7ff8000000000000));
      GIVEN(uint16_t, DM_FLOAT16, op, has ? 0xfe01u : 0x3c00u, 0x7e00u);
      GIVEN(uint16_t, DM_BFLOAT16, op, has ? 0xffc1u : 0x3f80u, 0x7fc0u);
      GIVEN(uint8_t, DM_FLOAT8E4M3, op, has ? 0xffu : 0x38u, 0x7fu);
      GIVEN(uint8_t, DM_FLOAT8E5M2, op, has ? 0xfdu : 0x3cu, 0x7eu);
    }
  }

  /* Averages of equal numbers are these numbers. */
  GIVEN(uint8_t, DM_UINT8, DM_AVG, 200, 200);
  GIVEN(uint8_t, DM_UINT8, DM_AVG, UINT8_MAX, UINT8_MAX);
  GIVEN(int8_t, DM_INT8, DM_AVG, INT8_MIN, INT8_MIN);
  GIVEN(int32_t, DM_INT32, DM_AVG, INT32_MIN, INT32_MIN);
  GIVEN(uint32_t, DM_UINT32, DM_AVG, UINT32_MAX, UINT32_MAX);
  GIVEN(int64_t, DM_INT64, DM_AVG, INT64_MAX, INT64_MAX);
  GIVEN(uint64_t, DM_UINT64, DM_AVG, UINT64_MAX, UINT64_MAX);
  GIVEN(uint16_t, DM_FLOAT16, DM_AVG, 0x7b53 /* 60000 */, 0x7b53);
  GIVEN(uint16_t, DM_BFLOAT16, DM_AVG, 0x7f7f, 0x7f7f);
  GIVEN(uint32_t, DM_FLOAT32, DM_AVG, 0x7f7fffff, 0x7f7fffff);
  GIVEN(uint8_t, DM_FLOAT8E4M3, DM_AVG, 0x7e, 0x7e);
  /* Truncated towards zero: the sum of -1 and zeros. */
  if (size > 1) GIVEN(int32_t, DM_INT32, DM_AVG, rank == 0 ? -1 : 0, 0);
  if (size > 1) GIVEN(int64_t, DM_INT64, DM_AVG, rank == 0 ? INT64_MIN : 0, INT64_MIN / size);

  /* 8-bit floats: 1 of every rank, and 448 and 57344, which are the largest numbers. */
  const uint8_t e4m3[] = {0, 0x38, 0x40, 0, 0x48, 0, 0, 0, 0x50}, e5m2[] = {0, 0x3c, 0x40, 0, 0x44, 0, 0, 0, 0x48};
  GIVEN(uint8_t, DM_FLOAT8E4M3, DM_SUM, 0x38, e4m3[size]);
  GIVEN(uint8_t, DM_FLOAT8E5M2, DM_SUM, 0x3c, e5m2[size]);
  GIVEN(uint8_t, DM_FLOAT8E4M3, DM_SUM, 0x7e, 0x7e);
  GIVEN(uint8_t, DM_FLOAT8E5M2, DM_PROD, 0xfb, size % 2 == 0 ? 0x7b : 0xfb);
  GIVEN(uint8_t, DM_FLOAT8E5M2, DM_MAX, rank == 0 ? 0x7c : 0x3c, 0x7c);
  uint8_t bytes[8] = {0}, mine = (uint8_t)rank;
  OK(dm_all_gather(mesh, NULL, &mine, bytes, 1, DM_FLOAT8E5M2, NULL));
  for (int32_t at = 0; at < size; ++at) CHECK(bytes[at] == at);

  /* An operator of the library: every rank multiplies by its own scalar. */
  ncclComm_t comm = NULL;
  ncclResult_t (*create)(ncclRedOp_t *, void *, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) = NULL;
  ncclResult_t (*destroy)(ncclRedOp_t, ncclComm_t) = NULL;
  void *symbol = NULL;
  REQUIRE(dm_get_comm(mesh, NULL, &comm));
  REQUIRE(dm_get_proc(mesh, "ncclRedOpCreatePreMulSum", &symbol));
  memcpy(&create, &symbol, sizeof symbol);
  REQUIRE(dm_get_proc(mesh, "ncclRedOpDestroy", &symbol));
  memcpy(&destroy, &symbol, sizeof symbol);
  int32_t scalar = rank + 1, two[2] = {10, -1};
  ncclRedOp_t op = ncclSum;
  CHECK(create(&op, &scalar, ncclInt32, ncclScalarHostImmediate, comm) == ncclSuccess);
  CHECK((int)op > DM_AVG);
  OK(dm_all_reduce(mesh, NULL, two, two, 2, DM_INT32, (dm_op)op, NULL));
  CHECK(two[0] == 5 * size * (size + 1) && two[1] == -size * (size + 1) / 2);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "made for int32", dm_all_reduce(mesh, NULL, two, two, 1, DM_FLOAT32, (dm_op)op, NULL));
  CHECK(destroy(op, comm) == ncclSuccess);
  FAILS(DM_STATUS_INVALID_ARGUMENT, "not one of 0 to 4", dm_all_reduce(mesh, NULL, two, two, 2, DM_INT32, (dm_op)op, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "op is -1", dm_all_reduce(mesh, NULL, two, two, 2, DM_INT32, -1, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "dtype is 12, not one of 0 to 11", dm_all_reduce(mesh, NULL, two, two, 1, 12, DM_SUM, NULL));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(world);
  return finish();
}
