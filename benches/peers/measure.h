/* The parts that the programs of benches/peers share: the cases, the clock, the check of results
 * and the lines that they print.
 *
 * A program fills a `struct library` with its calls and hands it to measure(). Its arguments are
 * those of bench.py's command:
 *
 *     PROGRAM collectives BUDGET_MS OPERATION,... DTYPE,... BYTES,...
 *     PROGRAM idle SECONDS
 *
 * A case ends after BUDGET_MS, or after MOST iterations. If DM_BENCH_WHOLE_BUDGET is set for all
 * ranks, it always lasts BUDGET_MS. Otherwise MOST short iterations would be over after some
 * milliseconds. On a busy machine (bench.py --load) their times would say only whether the ranks
 * had a processor in these milliseconds.
 *
 * Each rank writes its whole input before each iteration, as a program does that has computed
 * something. If nobody wrote to the inputs, their cache lines would stay in the caches of all
 * processors, and a library that reads the other ranks' buffers would copy from its own cache. If
 * DM_BENCH_SAME_INPUTS is set for all ranks, nobody writes.
 *
 * Rank 0 prints one line of JSON for each case. All ranks are on one machine, so CLOCK_MONOTONIC
 * is one clock for them: an iteration lasts from the time when the last rank has written its input
 * to the time when the last rank has ended the iteration. Where nobody writes, an iteration begins
 * when the last rank has ended the iteration before. */
#ifndef DM_BENCH_MEASURE_H
#define DM_BENCH_MEASURE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum operation { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL, SEND_RECV, OPERATIONS };
static const char *const OPERATION_NAMES[OPERATIONS] = {"all_reduce", "all_gather", "reduce_scatter",
                                                        "broadcast",  "all_to_all", "send_recv"};
enum dtype { FLOAT32, BFLOAT16, DTYPES };
static const char *const DTYPE_NAMES[DTYPES] = {"float32", "bfloat16"};
static const size_t DTYPE_SIZES[DTYPES] = {4, 2};

enum { FEWEST = 3, MOST = 4000, MAX_VARIANTS = 4, MAX_RANKS = 1024, LONG = 100000000 };

/* A case: `count` elements are the whole buffer of a rank; all-gather, reduce-scatter and
 * all-to-all divide it between the ranks. */
struct work {
  enum operation operation;
  enum dtype dtype;
  size_t count, part;
  void *send, *recv; /* the same buffer for all-reduce and broadcast */
  int rank, ranks, left, right;
  void *state; /* the library's own data, from prepare to release */
};

struct library {
  int rank, ranks;
  /* The variants of an operation: algorithms between which the caller chooses. Each is a
   * contestant; NULL ends the list, and an empty list says that the library has no such
   * operation. */
  const char *const *(*variants)(enum operation operation, enum dtype dtype);
  /* Once for each case and variant, before it is timed; both may be NULL. */
  void (*prepare)(struct work *work, const char *variant);
  void (*release)(struct work *work, const char *variant);
  /* Runs one iteration: one call, for broadcast one call with each rank as the root, and for
   * send_recv one message around the ring. */
  void (*run)(struct work *work, const char *variant);
  /* Replaces each value by the maximum over the ranks. */
  void (*maximum)(int64_t *values, size_t count);
};

static const struct library *measured;

static int64_t now_ns(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t processor_ns(void)
{
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return ((int64_t)used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000000 +
         ((int64_t)used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1000;
}

static void stop(const char *what, const char *variant, const struct work *work, size_t index, double got, double expected)
{
  fprintf(stderr, "rank %d: %s of %zu %s (%s): element %zu is %g, expected %g\n", work->rank, what, work->count, DTYPE_NAMES[work->dtype], variant, index, got,
          expected);
  exit(1);
}

static void store(const struct work *work, void *buffer, size_t index, float value)
{
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (work->dtype == FLOAT32)
    ((float *)buffer)[index] = value;
  else
    ((uint16_t *)buffer)[index] = (uint16_t)(bits >> 16);
}

static float load(const struct work *work, const void *buffer, size_t index)
{
  if (work->dtype == FLOAT32)
    return ((const float *)buffer)[index];
  uint32_t bits = (uint32_t)((const uint16_t *)buffer)[index] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* Small whole numbers, whose sums over up to 8 ranks have at most 8 bits: exact in bfloat16. They
 * repeat after PERIOD elements. */
enum { PERIOD = 1024 };

static float pattern(int rank, size_t index)
{
  return (float)((index * 7 + (size_t)rank * 3 + index / 64) % 16);
}

static float sum_of_patterns(int ranks, size_t index)
{
  float sum = 0;
  for (int rank = 0; rank < ranks; rank++)
    sum += pattern(rank, index);
  return sum;
}

static size_t elements(const struct work *work, int sent)
{
  if ((work->operation == ALL_GATHER && sent) || (work->operation == REDUCE_SCATTER && !sent))
    return work->part;
  return work->count;
}

/* One period of the pattern of `rank`, or of the sum of all (-1), from element `shift` on. */
static void period(const struct work *work, float *tile, int rank, size_t shift)
{
  for (size_t index = 0; index < PERIOD; index++)
    store(work, tile, index, rank < 0 ? sum_of_patterns(work->ranks, shift + index) : pattern(rank, shift + index));
}

/* Checks that the `count` elements of the result from `begin` on are those of `period`. */
static void expect(const struct work *work, const char *variant, size_t begin, size_t count, int rank, size_t shift)
{
  static float tile[PERIOD];
  const size_t size = DTYPE_SIZES[work->dtype];
  period(work, tile, rank, shift);
  for (size_t at = 0; at < count; at += PERIOD) {
    const size_t length = count - at < PERIOD ? count - at : PERIOD;
    const char *found = (const char *)work->recv + (begin + at) * size;
    if (memcmp(found, tile, length * size) == 0)
      continue;
    for (size_t index = 0; index < length; index++)
      if (load(work, found, index) != load(work, tile, index))
        stop(OPERATION_NAMES[work->operation], variant, work, begin + at + index, load(work, found, index), load(work, tile, index));
  }
}

/* Runs the case once with numbers and looks at every element of the result. */
static void check_result(struct work *work, const char *variant)
{
  static float tile[PERIOD];
  const size_t sent = elements(work, 1), size = DTYPE_SIZES[work->dtype], mine = (size_t)work->rank * work->part;
  memset(work->recv, 0xff, elements(work, 0) * size); /* no number of any type */
  period(work, tile, work->rank, 0);
  for (size_t at = 0; at < sent; at += PERIOD)
    memcpy((char *)work->send + at * size, tile, (sent - at < PERIOD ? sent - at : PERIOD) * size);
  measured->run(work, variant);
  switch (work->operation) {
  case ALL_REDUCE: expect(work, variant, 0, work->count, -1, 0); break;
  case REDUCE_SCATTER: expect(work, variant, 0, work->part, -1, mine); break;
  case BROADCAST:
    expect(work, variant, 0, work->count, 0, 0);
    break; /* rank 0 was the first root: what it sent is what the others then send */
  case ALL_GATHER:
  case ALL_TO_ALL:
    for (int rank = 0; rank < work->ranks; rank++)
      expect(work, variant, (size_t)rank * work->part, work->part, rank, work->operation == ALL_TO_ALL ? mine : 0);
    break;
  default: expect(work, variant, 0, work->count, work->left, 0);
  }
}

static int by_size(const void *a, const void *b)
{
  const int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
  return (left > right) - (left < right);
}

/* Runs `iterations` iterations. Writes their times into `times`, and returns the processor time of
 * all ranks together, which includes the writing of inputs. */
static int64_t iterate(struct work *work, const char *variant, int iterations, int64_t *times)
{
  static int64_t begins[MOST], ends[MOST];
  const int writes = getenv("DM_BENCH_SAME_INPUTS") == NULL;
  const size_t input = elements(work, 1) * DTYPE_SIZES[work->dtype];
  int64_t used[MAX_RANKS] = {0};
  measured->maximum(used, 1); /* all ranks have come */
  const int64_t before = processor_ns();
  begins[0] = now_ns();
  for (int index = 0; index < iterations; index++) {
    if (writes) {
      memset(work->send, 0, input);
      begins[index] = now_ns();
    } else if (index > 0)
      begins[index] = ends[index - 1];
    measured->run(work, variant);
    ends[index] = now_ns();
  }
  used[work->rank] = processor_ns() - before;
  measured->maximum(used, (size_t)work->ranks);
  measured->maximum(begins, (size_t)iterations);
  measured->maximum(ends, (size_t)iterations);
  for (int index = 0; index < iterations; index++)
    times[index] = ends[index] - begins[index];
  int64_t total = 0;
  for (int rank = 0; rank < work->ranks; rank++)
    total += used[rank];
  return total;
}

/* Measures one case. Returns its median in nanoseconds. */
static int64_t one_case(struct work *work, const char *variant, int64_t budget)
{
  static int64_t times[MOST];
  if (measured->prepare)
    measured->prepare(work, variant);
  check_result(work, variant);
  /* The sums are made in place many times. They are sums of zeros, so the values do not grow. */
  memset(work->send, 0, elements(work, 1) * DTYPE_SIZES[work->dtype]);
  memset(work->recv, 0, elements(work, 0) * DTYPE_SIZES[work->dtype]);
  iterate(work, variant, 2, times);
  int64_t spent = 0, processor = 0, each = times[1], iterations = 0;
  const int whole = getenv("DM_BENCH_WHOLE_BUDGET") != NULL;
  /* The iterations run in blocks. A block at most doubles their number, so one slow first block
   * does not decide how many there are. All ranks have the same times, so they agree on the
   * number. */
  while (iterations < FEWEST || (spent < budget && (whole || iterations < MOST))) {
    const int64_t wanted = (budget - spent) / (each > 0 ? each : 1) + 1;
    /* The times of the last iterations are kept, at most MOST. The median, the least and the most
     * are theirs. The mean is that of all iterations. */
    int64_t at = iterations % MOST, block = wanted < 2 * iterations + 1 ? wanted : 2 * iterations + 1;
    block = block < 1 ? 1 : block > MOST - at ? MOST - at : block;
    processor += iterate(work, variant, (int)block, times + at);
    for (int64_t index = 0; index < block; index++)
      spent += times[at + index];
    iterations += block;
    each = spent / iterations;
  }
  const int64_t kept = iterations < MOST ? iterations : MOST;
  /* One iteration of broadcast or send_recv is one call after another, one for each rank. */
  const double calls = work->operation == BROADCAST || work->operation == SEND_RECV ? work->ranks : 1;
  qsort(times, (size_t)kept, sizeof times[0], by_size);
  if (work->rank == 0)
    printf("{\"operation\": \"%s\", \"dtype\": \"%s\", \"bytes\": %zu, \"variant\": \"%s\", \"iterations\": %lld, "
           "\"median\": %.9f, \"mean\": %.9f, \"least\": %.9f, \"most\": %.9f, "
           "\"processor\": %.9f}\n",
           OPERATION_NAMES[work->operation], DTYPE_NAMES[work->dtype], work->count * DTYPE_SIZES[work->dtype], variant,
           (long long)iterations, times[kept / 2] / calls * 1e-9, (double)spent / iterations / calls * 1e-9,
           times[0] / calls * 1e-9, times[kept - 1] / calls * 1e-9,
           (double)processor / iterations / calls * 1e-9);
  fflush(stdout);
  if (measured->release)
    measured->release(work, variant);
  return times[kept / 2];
}

static int listed(const char *list, const char *name)
{
  const size_t length = strlen(name);
  for (const char *at = list; (at = strstr(at, name)); at += length)
    if ((at == list || at[-1] == ',') && (at[length] == ',' || at[length] == 0))
      return 1;
  return 0;
}

static void *buffer_of(size_t bytes)
{
  void *buffer = NULL;
  if (posix_memalign(&buffer, 4096, bytes + 4096) != 0) {
    fprintf(stderr, "no %zu bytes of memory\n", bytes);
    exit(1);
  }
  memset(buffer, 0, bytes + 4096);
  return buffer;
}

static void collectives(int64_t budget, const char *operations, const char *dtypes, const char *sizes)
{
  for (int operation = 0; operation < OPERATIONS; operation++)
    for (int dtype = 0; dtype < DTYPES; dtype++) {
      if (!listed(operations, OPERATION_NAMES[operation]) || !listed(dtypes, DTYPE_NAMES[dtype]))
        continue;
      const char *const *variants = measured->variants((enum operation)operation, (enum dtype)dtype);
      int64_t took[MAX_VARIANTS] = {0};
      for (const char *size = sizes; variants[0] && size; size = strchr(size, ',') ? strchr(size, ',') + 1 : NULL) {
        struct work work;
        memset(&work, 0, sizeof work);
        work.operation = (enum operation)operation;
        work.dtype = (enum dtype)dtype;
        work.rank = measured->rank;
        work.ranks = measured->ranks;
        work.left = (work.rank + work.ranks - 1) % work.ranks;
        work.right = (work.rank + 1) % work.ranks;
        work.count = (size_t)strtoull(size, NULL, 10) / DTYPE_SIZES[dtype];
        work.part = work.count / (size_t)work.ranks;
        if (work.part == 0)
          work.part = 1;
        if (operation == ALL_GATHER || operation == REDUCE_SCATTER || operation == ALL_TO_ALL)
          work.count = work.part * (size_t)work.ranks;
        work.send = buffer_of(work.count * DTYPE_SIZES[dtype]);
        work.recv = operation == ALL_REDUCE || operation == BROADCAST ? work.send : buffer_of(work.count * DTYPE_SIZES[dtype]);
        /* A variant is not tried if at the size before it took more than 100 ms and more than 8
         * times as long as the best. Some would take minutes. */
        int64_t best = INT64_MAX;
        for (int which = 0; variants[which]; which++)
          best = took[which] < best ? took[which] : best;
        for (int which = 0; variants[which]; which++)
          if (took[which] < LONG || took[which] / 8 <= best)
            took[which] = one_case(&work, variants[which], budget);
        if (work.recv != work.send)
          free(work.recv);
        free(work.send);
      }
    }
}

/* The processor time that each of ranks 1, 2 ... uses while it waits in an all-reduce for rank 0,
 * which sleeps. */
static void idle(double seconds)
{
  struct work work;
  memset(&work, 0, sizeof work);
  work.count = 1;
  work.rank = measured->rank;
  work.ranks = measured->ranks;
  work.send = work.recv = buffer_of(4);
  const char *variant = measured->variants(ALL_REDUCE, FLOAT32)[0];
  if (measured->prepare)
    measured->prepare(&work, variant);
  for (int index = 0; index < 20; index++)
    measured->run(&work, variant);
  const int64_t before = processor_ns();
  if (work.rank == 0)
    usleep((useconds_t)(seconds * 1e6));
  measured->run(&work, variant);
  int64_t used[MAX_RANKS] = {0}, total = 0;
  used[work.rank] = work.rank == 0 ? 0 : processor_ns() - before;
  measured->maximum(used, (size_t)work.ranks);
  for (int rank = 1; rank < work.ranks; rank++)
    total += used[rank];
  if (work.rank == 0)
    printf("{\"idle\": %.9f, \"seconds\": %g}\n", (double)total * 1e-9 / (work.ranks > 1 ? work.ranks - 1 : 1), seconds);
  fflush(stdout);
  if (measured->release)
    measured->release(&work, variant);
  free(work.send);
}

/* The times of a start. A phase lasts from the time when the last rank ended the phase before to
 * the time when the last rank ended this one. The total counts from the time when the first rank
 * was executed. */
enum { MAX_MARKS = 8 };
static struct {
  int64_t executed, at[MAX_MARKS];
  const char *names[MAX_MARKS];
  int count;
} marks;

/* Notes the time when this process was executed, which executed.c gives. So a start includes the
 * loading of the libraries. */
static void note_execution(int argc, char **argv)
{
  if (argc < 2 || (strcmp(argv[1], "start") != 0 && strcmp(argv[1], "phases") != 0))
    return;
  const char *executed = getenv("DM_BENCH_EXECUTED");
  if (executed == NULL) {
    fprintf(stderr, "DM_BENCH_EXECUTED is not set: a start is measured through `executed`\n");
    exit(1);
  }
  marks.executed = atoll(executed);
}

static void mark(const char *name)
{
  marks.names[marks.count] = name;
  marks.at[marks.count++] = now_ns();
}

static void print_marks(const struct library *library)
{
  int64_t values[MAX_MARKS + 1];
  values[0] = -marks.executed;
  memcpy(values + 1, marks.at, sizeof marks.at);
  library->maximum(values, (size_t)marks.count + 1);
  if (library->rank != 0)
    return;
  printf("{\"total\": %.9f, \"phases\": {", (double)(values[marks.count] + values[0]) * 1e-9);
  for (int index = 0; index < marks.count; index++)
    printf("%s\"%s\": %.9f", index ? ", " : "", marks.names[index],
           (double)(values[index + 1] + (index ? -values[index] : values[0])) * 1e-9);
  printf("}}\n");
  fflush(stdout);
}

/* (N / 4, 2, 2), as far as there are ranks. */
static void start_shape(int ranks, int shape[3])
{
  shape[0] = ranks >= 4 ? ranks / 4 : 1;
  shape[1] = ranks >= 2 ? 2 : 1;
  shape[2] = ranks >= 4 ? 2 : 1;
}

static int measure(const struct library *library, int argc, char **argv)
{
  measured = library;
  if (argc == 6 && strcmp(argv[1], "collectives") == 0)
    collectives((int64_t)(atof(argv[2]) * 1e6), argv[3], argv[4], argv[5]);
  else if (argc == 3 && strcmp(argv[1], "idle") == 0)
    idle(atof(argv[2]));
  else {
    fprintf(stderr, "usage: %s collectives BUDGET_MS OPERATIONS DTYPES SIZES | idle SECONDS | start\n", argv[0]);
    return 2;
  }
  return 0;
}

#endif
