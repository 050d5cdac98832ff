/* One rank of a mesh over several hosts. It makes the calls that its standard input names, one
 * line a call, so that tests/hostranks.py decides what happens in the middle of which call:
 *
 *   join             dm_world_init
 *   init             a mesh over all ranks: one dimension, and two where an even number has joined
 *   all COUNT        every collective with so many elements, along every dimension, and a ring of
 *                    messages; every element of every result is looked at
 *   reduce COUNT     one all-reduce
 *   forever COUNT    all-reduces until one fails; "running" tells that three of them have ended
 *   digest COUNT     prints a hash of the bits of sums that depend on the order of their terms
 *   secret COUNT     broadcasts so many times the text SECRET_TEXT
 *   abort, finalize, shrink, barrier, free
 *
 * Before each call it prints "begin". Afterwards it prints the status, the milliseconds that the
 * call took, the moment (CLOCK_MONOTONIC) and the message. A wrong result gives the status WRONG.
 *
 *   across TIMEOUT_MS */
#include "../check.h"

#include <stdarg.h>

#define SECRET_TEXT "no wire may show these words. "

static dm_world *world;
static dm_mesh *line, *grid;
static int32_t ranks, rank;
static char wrong[256];

static void begin(void)
{
  printf("begin\n");
  fflush(stdout);
}

/* Keeps the first wrong result. */
static dm_status mistake(const char *format, ...)
{
  va_list values;
  va_start(values, format);
  if (wrong[0] == '\0') vsnprintf(wrong, sizeof wrong, format, values);
  va_end(values);
  return DM_STATUS_INTERNAL;
}

static void end(dm_status status, double began)
{
  const double now = seconds_now();
  if (wrong[0] != '\0') printf("WRONG %.0f %.6f %s\n", 1e3 * (now - began), now, wrong);
  else printf("%s %.0f %.6f %s\n", dm_status_name(status), 1e3 * (now - began), now, status == DM_STATUS_OK ? "" : dm_last_error());
  fflush(stdout);
}

#define TRY(call) \
  do { \
    dm_status tried_ = (call); \
    if (tried_ != DM_STATUS_OK) return tried_; \
  } while (0)

/* The element that rank `local` of a communicator has at this place. */
static int32_t element(int32_t local, size_t at) { return 1000 * (local + 1) + (int32_t)(at % 997); }

static int32_t sum_of(int32_t n, size_t at) { return 1000 * (n * (n + 1) / 2) + n * (int32_t)(at % 997); }

#define EXPECT(what, length, expected) \
  for (size_t at = 0; at < (length); ++at) \
    if (got[at] != (expected)) return mistake("%s of %zu along %s: element %zu is %d, expected %d", what, count, dim, at, got[at], expected)

/* The buffers have room for `count` elements of each rank. */
static dm_status exchange(const dm_mesh *mesh, const char *dim, size_t count, int32_t local, int32_t n, int32_t *give, int32_t *got)
{
  const size_t all = count * (size_t)n;
  for (size_t at = 0; at < all; ++at) give[at] = element(local, at), got[at] = -1;
  TRY(dm_all_reduce(mesh, dim, give, got, count, DM_INT32, DM_SUM, NULL));
  EXPECT("all-reduce", count, sum_of(n, at));
  memcpy(got, give, count * sizeof *got);
  TRY(dm_all_reduce(mesh, dim, got, got, count, DM_INT32, DM_MAX, NULL));
  EXPECT("maximum in place", count, element(n - 1, at));
  const int32_t root = (int32_t)(count % (size_t)n);
  TRY(dm_reduce(mesh, dim, give, got, count, DM_INT32, DM_SUM, root, NULL));
  if (local == root) EXPECT("reduce", count, sum_of(n, at));
  TRY(dm_broadcast(mesh, dim, give, got, count, DM_INT32, root, NULL));
  EXPECT("broadcast", count, element(root, at));
  TRY(dm_all_gather(mesh, dim, give, got, count, DM_INT32, NULL));
  EXPECT("all-gather", all, element((int32_t)(at / count), at % count));
  TRY(dm_reduce_scatter(mesh, dim, give, got, count, DM_INT32, DM_SUM, NULL));
  EXPECT("reduce-scatter", count, sum_of(n, (size_t)local * count + at));
  TRY(dm_all_to_all(mesh, dim, give, got, count, DM_INT32, NULL));
  EXPECT("all-to-all", all, element((int32_t)(at / count), (size_t)local * count + at % count));
  /* Rank r sends r + 1 elements fewer than `count`, so the parts differ. */
  size_t counts[64];
  for (int32_t of = 0; of < n; ++of) counts[of] = count > (size_t)of + 1 ? count - (size_t)of - 1 : 0;
  TRY(dm_all_gatherv(mesh, dim, give, got, counts, NULL, DM_INT32, NULL));
  size_t place = 0;
  for (int32_t of = 0; of < n; ++of)
    for (size_t at = 0; at < counts[of]; ++at, ++place)
      if (got[place] != element(of, at))
        return mistake("all-gather with counts of %zu along %s: element %zu of rank %d is %d", count, dim, at, of,
                       got[place]);
  /* Every rank receives from the left before it sends to the right. */
  TRY(dm_group_start(mesh));
  dm_status status = dm_recv(mesh, dim, got, count, DM_INT32, (local + n - 1) % n, NULL);
  if (status == DM_STATUS_OK) status = dm_send(mesh, dim, give, count, DM_INT32, (local + 1) % n, NULL);
  const dm_status ended = dm_group_end(mesh);
  TRY(status);
  TRY(ended);
  EXPECT("message", count, element((local + n - 1) % n, at));
  if (local > 0) TRY(dm_recv(mesh, dim, got, count, DM_INT32, local - 1, NULL));
  if (local > 0) EXPECT("passed message", count, element(local - 1, at));
  if (local < n - 1) TRY(dm_send(mesh, dim, give, count, DM_INT32, local + 1, NULL));
  return DM_STATUS_OK;
}

static dm_status along(const dm_mesh *mesh, const char *dim, size_t count)
{
  int32_t local = 0, n = 0;
  TRY(dm_get_local_rank(mesh, dim, &local));
  TRY(dm_size(mesh, dim, &n));
  int32_t *give = (int32_t *)malloc(sizeof(int32_t) * (count * (size_t)n + 1)),
          *got = (int32_t *)malloc(sizeof(int32_t) * (count * (size_t)n + 1));
  if (give == NULL || got == NULL) exit(1);
  const dm_status status = exchange(mesh, dim, count, local, n, give, got);
  free(give);
  free(got);
  return status;
}

static dm_status every(size_t count)
{
  TRY(along(line, "all", count));
  if (grid != NULL) TRY(along(grid, "dp", count));
  if (grid != NULL) TRY(along(grid, "tp", count));
  return DM_STATUS_OK;
}

static dm_status reduce(size_t count, int forever)
{
  int32_t *give = (int32_t *)malloc(sizeof(int32_t) * (count + 1)), *got = (int32_t *)malloc(sizeof(int32_t) * (count + 1));
  if (give == NULL || got == NULL) exit(1);
  dm_status status = DM_STATUS_OK;
  for (long round = 0; status == DM_STATUS_OK && (forever || round == 0); ++round) {
    for (size_t at = 0; at < count; ++at) give[at] = element(rank, at + (size_t)round), got[at] = -1;
    status = dm_all_reduce(line, "all", give, got, count, DM_INT32, DM_SUM, NULL);
    for (size_t at = 0; status == DM_STATUS_OK && at < count; ++at)
      if (got[at] != sum_of(ranks, at + (size_t)round))
        status = mistake("all-reduce %ld of %zu: element %zu is %d, expected %d", round, count, at, got[at],
                         sum_of(ranks, at + (size_t)round));
    if (forever && round == 2 && status == DM_STATUS_OK) {
      printf("running\n");
      fflush(stdout);
    }
  }
  free(give);
  free(got);
  return status;
}

static dm_status digest(size_t count, uint64_t *hash)
{
  float *values = (float *)malloc(sizeof(float) * (count + 1)), *sums = (float *)malloc(sizeof(float) * (count + 1));
  if (values == NULL || sums == NULL) exit(1);
  for (size_t at = 0; at < count; ++at) values[at] = 1.0f / (float)(1 + (size_t)rank * 7919 + at);
  const dm_status status = dm_all_reduce(line, "all", values, sums, count, DM_FLOAT32, DM_AVG, NULL);
  *hash = UINT64_C(0xcbf29ce484222325);
  for (size_t at = 0; at < count * sizeof(float); ++at) *hash = (*hash ^ ((const unsigned char *)sums)[at]) * UINT64_C(0x100000001b3);
  free(values);
  free(sums);
  return status;
}

static dm_status secret(size_t count)
{
  const size_t each = sizeof SECRET_TEXT - 1;
  char *text = (char *)malloc(count * each + 1);
  if (text == NULL) exit(1);
  for (size_t at = 0; at < count; ++at) memcpy(text + at * each, rank == 0 ? SECRET_TEXT : "", rank == 0 ? each : 0);
  dm_status status = dm_broadcast(line, "all", text, text, count * each, DM_UINT8, 0, NULL);
  for (size_t at = 0; status == DM_STATUS_OK && at < count; ++at)
    if (memcmp(text + at * each, SECRET_TEXT, each) != 0) status = mistake("broadcast of a text: copy %zu is wrong", at);
  free(text);
  return status;
}

static dm_status make(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = world;
  const char *one[] = {"all"}, *two[] = {"dp", "tp"};
  const int32_t whole[] = {ranks}, halves[] = {ranks / 2, 2};
  TRY(dm_init("cpu", whole, 1, one, &options, &line));
  return ranks % 2 == 0 ? dm_init("cpu", halves, 2, two, &options, &grid) : DM_STATUS_OK;
}

/* The survivors' mesh takes the place of the one that has lost ranks. */
static dm_status shrink(void)
{
  dm_mesh *left = NULL;
  TRY(dm_shrink(line, "all", NULL, 0, NULL, &left));
  dm_free(line);
  dm_free(grid);
  grid = NULL;
  line = left;
  TRY(dm_size(line, "all", &ranks));
  return dm_get_local_rank(line, "all", &rank);
}

static dm_status finalize(void)
{
  if (grid != NULL) TRY(dm_finalize(grid, NULL));
  return dm_finalize(line, NULL);
}

static dm_status join(int64_t timeout_ms)
{
  dm_world_options options = DM_WORLD_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  TRY(dm_world_init("cpu", &options, &world));
  TRY(dm_world_rank(world, &rank));
  return dm_world_size(world, &ranks);
}

int main(int argc, char **argv)
{
  char text[128], word[32];
  if (argc != 2) return 2;
  while (fgets(text, sizeof text, stdin) != NULL) {
    size_t count = 0;
    if (sscanf(text, "%31s %zu", word, &count) < 1) return 2;
    dm_status status = DM_STATUS_OK;
    begin();
    const double began = seconds_now();
    uint64_t hash = 0;
    if (strcmp(word, "join") == 0) status = join(atoll(argv[1]));
    else if (strcmp(word, "init") == 0) status = make();
    else if (strcmp(word, "all") == 0) status = every(count);
    else if (strcmp(word, "reduce") == 0) status = reduce(count, 0);
    else if (strcmp(word, "forever") == 0) status = reduce(count, 1);
    else if (strcmp(word, "digest") == 0) status = digest(count, &hash);
    else if (strcmp(word, "secret") == 0) status = secret(count);
    else if (strcmp(word, "abort") == 0) status = dm_abort(line);
    else if (strcmp(word, "finalize") == 0) status = finalize();
    else if (strcmp(word, "shrink") == 0) status = shrink();
    else if (strcmp(word, "barrier") == 0) status = dm_world_barrier(world, 0);
    else if (strcmp(word, "free") == 0) {
      dm_free(line);
      dm_free(grid);
      dm_world_free(world);
      line = grid = NULL;
      world = NULL;
    } else return 2;
    if (strcmp(word, "digest") == 0 && status == DM_STATUS_OK)
      printf("%s 0 %.6f %016llx\n", dm_status_name(status), seconds_now(), (unsigned long long)hash), fflush(stdout);
    else end(status, began);
  }
  dm_free(line);
  dm_free(grid);
  dm_world_free(world);
  return 0;
}
