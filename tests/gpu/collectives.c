/* Every collective on device memory, along every dimension of a mesh (n/2, 2) and along both
 * together: all-reduce in the ten data types and five operations, the others in place and not,
 * groups of sends and receives; through dm_* and through the library's own functions. All values
 * are compared, byte for byte, with those that the host computes. */
#include "gpu.h"

#include <math.h>

enum { kTypes = 10, kOps = 5, kCounts = 3, kGap = 5 };

static const size_t kTypeSize[kTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static const char *const kTypeName[kTypes] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                              "uint64", "float16", "float32", "float64", "bfloat16"};
static const char *const kOpName[kOps] = {"sum", "prod", "max", "min", "avg"};
/* One element, a small odd number, and a number that several blocks and chunks share. Bytes that
 * must stay as they are follow each segment. */
static const size_t kCount[kCounts] = {1, 3, 1023};

/* The element of that value; all values here are exact in all types. */
static void encode(dm_dtype type, double value, unsigned char *out)
{
  const int64_t whole = (int64_t)value;
  const int32_t whole32 = (int32_t)whole;
  const float single = (float)value;
  uint32_t bits = 0;
  memcpy(&bits, &single, sizeof bits);
  uint16_t half = (uint16_t)(bits >> 16); /* bfloat16 */
  switch (type) {
    case DM_INT8:
    case DM_UINT8: *out = (unsigned char)whole; return;
    case DM_INT32:
    case DM_UINT32: memcpy(out, &whole32, 4); return;
    case DM_INT64:
    case DM_UINT64: memcpy(out, &whole, 8); return;
    case DM_FLOAT32: memcpy(out, &single, 4); return;
    case DM_FLOAT64: memcpy(out, &value, 8); return;
    case DM_FLOAT16:
      half = (uint16_t)(value == 0 ? 0 : ((bits >> 16 & 0x8000) | ((bits >> 23 & 0xff) - 127 + 15) << 10 | (bits >> 13 & 0x3ff)));
      memcpy(out, &half, 2);
      return;
    default: memcpy(out, &half, 2); return;
  }
}

static int is_signed(dm_dtype type)
{
  return type != DM_UINT8 && type != DM_UINT32 && type != DM_UINT64;
}

/* What rank `rank` of n contributes to element `at`. The values are small enough for eight ranks of
 * int8, some are negative where there is a sign, and their average is exact. */
static double contribution(dm_dtype type, dm_op op, int rank, int n, size_t at)
{
  const int i = (int)(at % 1000);
  switch (op) {
    case DM_PROD: return (rank + i) % 4 == 0 ? (is_signed(type) && i % 2 ? -2 : 2) : 1;
    case DM_AVG: return n * ((rank + i) % 2);
    default: return (rank * 3 + i * 5) % 7 - (is_signed(type) ? 3 : 0);
  }
}

static double reduced(dm_dtype type, dm_op op, int n, size_t at)
{
  double result = contribution(type, op, 0, n, at);
  for (int rank = 1; rank < n; ++rank) {
    const double value = contribution(type, op, rank, n, at);
    result = op == DM_PROD ? result * value : op == DM_MAX ? fmax(result, value) : op == DM_MIN ? fmin(result, value) : result + value;
  }
  return op == DM_AVG ? result / n : result;
}

static void differ(const char *what, const char *dim, size_t at)
{
  ++failures;
  fprintf(stderr, "%s along %s: element %zu is wrong\n", what, dim == NULL ? "all" : dim, at);
}

/* All operations of one type at once, three segments each: first out of place, then in place. */
static void all_reduces(const dm_mesh *mesh, const char *dim, dm_dtype type, int rank, int n)
{
  const size_t element = kTypeSize[type];
  size_t row = 0;
  for (int segment = 0; segment < kCounts; ++segment) row += kCount[segment] + kGap;
  const size_t total = row * kOps, bytes = total * element;
  unsigned char *send = (unsigned char *)host_alloc(bytes), *got = (unsigned char *)host_alloc(bytes),
                *wanted = (unsigned char *)host_alloc(bytes);
  for (int in_place = 0; in_place < 2; ++in_place) {
    memset(send, 0xa5, bytes);
    memset(wanted, 0xa5, bytes);
    size_t first = 0;
    for (dm_op op = 0; op < kOps; ++op)
      for (int segment = 0; segment < kCounts; first += kCount[segment++] + kGap)
        for (size_t at = first; at < first + kCount[segment]; ++at) {
          encode(type, contribution(type, op, rank, n, at), send + at * element);
          encode(type, reduced(type, op, n, at), wanted + at * element);
        }
    unsigned char *from = (unsigned char *)device_alloc(bytes), *to = (unsigned char *)device_alloc(bytes);
    memset(got, 0xa5, bytes);
    device_put(from, send, bytes);
    device_put(to, in_place ? send : got, bytes);
    first = 0;
    for (dm_op op = 0; op < kOps; ++op)
      for (int segment = 0; segment < kCounts; first += kCount[segment++] + kGap)
        OK(dm_all_reduce(mesh, dim, (in_place ? to : from) + first * element, to + first * element, kCount[segment],
                         type, op, device_stream()));
    device_get(got, to, bytes);
    for (size_t at = 0; at < total; ++at)
      if (memcmp(got + at * element, wanted + at * element, element) != 0) {
        char what[80];
        snprintf(what, sizeof what, "all-reduce of %s, %s%s", kTypeName[type], kOpName[at / row], in_place ? ", in place" : "");
        differ(what, dim, at % row);
        break;
      }
    device_free(from);
    device_free(to);
  }
  free(send);
  free(got);
  free(wanted);
}

typedef struct buffers {
  int32_t *send, *recv; /* on the device */
  int32_t *host;
  size_t length;
} buffers;

/* Element `at` of rank r is 1000 r + at. */
static void fill(const buffers *with, int rank)
{
  for (size_t at = 0; at < with->length; ++at) with->host[at] = 1000 * rank + (int32_t)at;
  device_put(with->send, with->host, with->length * sizeof(int32_t));
  memset(with->host, 0xff, with->length * sizeof(int32_t));
  device_put(with->recv, with->host, with->length * sizeof(int32_t));
}

/* The first `count` elements of `from` are `expected`, an expression in `at`. */
#define EACH(what, from, count, expected) \
  do { \
    device_get(with.host, from, (size_t)(count) * sizeof(int32_t)); \
    for (int32_t at = 0; at < (int32_t)(count); ++at) \
      if (with.host[at] != (expected)) { \
        differ(what, dim, (size_t)at); \
        break; \
      } \
  } while (0)

static void others(const dm_mesh *mesh, const char *dim, int32_t rank, int32_t n)
{
  enum { kCount = 1001 };
  buffers with;
  with.length = (size_t)(kCount * n);
  const size_t bytes = with.length * sizeof(int32_t);
  with.send = (int32_t *)device_alloc(bytes);
  with.recv = (int32_t *)device_alloc(bytes);
  with.host = (int32_t *)host_alloc(bytes);
  void *stream = device_stream();
  cudaStream_t raw_stream = (cudaStream_t)stream;
  const int32_t ranks = n * (n - 1) / 2;

  OK(dm_all_reduce(mesh, dim, with.send, with.recv, 0, DM_INT32, DM_SUM, stream));
  for (int32_t root = 0; root < n; ++root) {
    fill(&with, rank);
    OK(dm_reduce(mesh, dim, with.send, rank == root ? with.recv : NULL, kCount, DM_INT32, DM_SUM, root, stream));
    if (rank == root) EACH("reduce", with.recv, kCount, 1000 * ranks + n * at);
    fill(&with, rank);
    OK(dm_broadcast(mesh, dim, rank == root ? with.send : NULL, with.recv, kCount, DM_INT32, root, stream));
    EACH("broadcast", with.recv, kCount, 1000 * root + at);
  }
  fill(&with, rank);
  OK(dm_all_gather(mesh, dim, with.send, with.recv, kCount, DM_INT32, stream));
  EACH("all-gather", with.recv, kCount * n, 1000 * (at / kCount) + at % kCount);
  fill(&with, rank);
  OK(dm_all_gather(mesh, dim, with.send + rank * kCount, with.send, kCount, DM_INT32, stream));
  EACH("all-gather in place", with.send, kCount * n, 1000 * (at / kCount) + at);
  fill(&with, rank);
  OK(dm_reduce_scatter(mesh, dim, with.send, with.recv, kCount, DM_INT32, DM_SUM, stream));
  EACH("reduce-scatter", with.recv, kCount, 1000 * ranks + n * (rank * kCount + at));
  OK(dm_reduce_scatter(mesh, dim, with.send, with.send + rank * kCount, kCount, DM_INT32, DM_SUM, stream));
  EACH("reduce-scatter in place", with.send + rank * kCount, kCount, 1000 * ranks + n * (rank * kCount + at));
  fill(&with, rank);
  OK(dm_all_to_all(mesh, dim, with.send, with.recv, kCount, DM_INT32, stream));
  EACH("all-to-all", with.recv, kCount * n, 1000 * (at / kCount) + rank * kCount + at % kCount);

  /* Everybody receives first from the left, then sends to the right: only a group can do that. */
  fill(&with, rank);
  OK(dm_group_start(mesh));
  OK(dm_recv(mesh, dim, with.recv, kCount, DM_INT32, (rank + n - 1) % n, stream));
  OK(dm_send(mesh, dim, with.send, kCount, DM_INT32, (rank + 1) % n, stream));
  OK(dm_group_end(mesh));
  EACH("ring of sends", with.recv, kCount, 1000 * ((rank + n - 1) % n) + at);

  /* The same communicator with the library's own functions, several in a group. */
  ncclResult_t (*rawGroupStart)(void) = NULL, (*rawGroupEnd)(void) = NULL;
  ncclResult_t (*rawAllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) = NULL;
  ncclResult_t (*rawBroadcast)(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) = NULL;
  ncclComm_t comm = NULL;
  PROC(mesh, GroupStart);
  PROC(mesh, GroupEnd);
  PROC(mesh, AllReduce);
  PROC(mesh, Broadcast);
  REQUIRE(dm_get_comm(mesh, dim, &comm));
  fill(&with, rank);
  const ncclResult_t reduced = rawAllReduce(with.send, with.recv, kCount, ncclInt32, ncclMax, comm, raw_stream);
  CHECK(reduced == ncclSuccess);
  EACH("ncclAllReduce", with.recv, kCount, 1000 * (n - 1) + at);
  fill(&with, rank);
  CHECK(rawGroupStart() == ncclSuccess);
  CHECK(rawAllReduce(with.send, with.recv, 100, ncclInt32, ncclSum, comm, raw_stream) == ncclSuccess);
  CHECK(rawBroadcast(with.send + 100, with.recv + 100, 100, ncclInt32, n - 1, comm, raw_stream) == ncclSuccess);
  const ncclResult_t ended = rawGroupEnd();
  CHECK(ended == ncclSuccess);
  EACH("ncclAllReduce and ncclBroadcast in a group", with.recv, 200, at < 100 ? 1000 * ranks + n * at : 1000 * (n - 1) + at);

  device_free(with.send);
  device_free(with.recv);
  free(with.host);
}

/* Four megabytes and one element more. */
static void large(const dm_mesh *mesh, const char *dim, int rank, int n)
{
  const size_t count = ((size_t)1 << 20) + 1;
  float *host = (float *)host_alloc(count * sizeof(float));
  for (size_t at = 0; at < count; ++at) host[at] = (float)((at + (size_t)rank) % 1024);
  float *data = (float *)device_alloc(count * sizeof(float));
  device_put(data, host, count * sizeof(float));
  OK(dm_all_reduce(mesh, dim, data, data, count, DM_FLOAT32, DM_SUM, device_stream()));
  device_get(host, data, count * sizeof(float));
  for (size_t at = 0; at < count; ++at) {
    double sum = 0;
    for (int peer = 0; peer < n; ++peer) sum += (double)((at + (size_t)peer) % 1024);
    if (host[at] != sum) {
      differ("large all-reduce", dim, at);
      break;
    }
  }
  device_free(data);
  free(host);
}

static void along(const dm_mesh *mesh, const char *dim)
{
  int32_t rank = -1;
  int32_t size = 0;
  REQUIRE(dm_get_local_rank(mesh, dim, &rank));
  REQUIRE(dm_size(mesh, dim, &size));
  const int32_t n = (int32_t)size;
  for (dm_dtype type = 0; type < kTypes; ++type) all_reduces(mesh, dim, type, rank, n);
  others(mesh, dim, rank, n);
  large(mesh, dim, rank, n);
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t inner = ranks % 2 == 0 ? 2 : 1, shape[] = {ranks / inner, inner};
  const char *names[] = {"outer", "inner"};
  dm_mesh *mesh = NULL, *flat = NULL;
  REQUIRE(dm_init(device_type(), shape, 2, names, &options, &mesh));
  REQUIRE(dm_flatten(mesh, "all", NULL, &flat));
  along(mesh, "outer");
  along(mesh, "inner");
  along(flat, NULL);
  OK(dm_check(mesh, "outer"));
  OK(dm_finalize(mesh, NULL));
  dm_free(flat);
  dm_free(mesh);
  dm_world_free(options.world);
  return finish();
}
