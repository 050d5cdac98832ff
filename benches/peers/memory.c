/* How fast the processors together copy memory: the limit of collectives whose data is larger than
 * the caches. `memory MIB` prints the median of some copies of that many MiB (less where there are
 * so many processors that it would take more than 1 GiB) by a thread for each processor at a time,
 * in bytes read and written per second. What is written bypasses the caches where the compiler
 * knows how. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { COPIES = 13, MAX_THREADS = 256 };

static size_t bytes;
static int threads;
static pthread_barrier_t together;
static double begins[MAX_THREADS], rates[COPIES];

static double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void copy(char *to, const char *from)
{
#ifdef __SSE2__
  for (size_t at = 0; at < bytes; at += 64) {
    const __m128i *source = (const __m128i *)(from + at);
    __m128i *target = (__m128i *)(to + at);
    const __m128i line[4] = {_mm_load_si128(source), _mm_load_si128(source + 1), _mm_load_si128(source + 2), _mm_load_si128(source + 3)};
    for (int part = 0; part < 4; part++)
      _mm_stream_si128(target + part, line[part]);
  }
  _mm_sfence();
#else
  memcpy(to, from, bytes);
#endif
}

static void *work(void *argument)
{
  const intptr_t number = (intptr_t)argument;
  char *from = aligned_alloc(4096, bytes), *to = aligned_alloc(4096, bytes);
  if (from == NULL || to == NULL) {
    fprintf(stderr, "no memory\n");
    exit(1);
  }
  memset(from, 1, bytes);
  memset(to, 2, bytes);
  for (int count = 0; count < COPIES; count++) {
    pthread_barrier_wait(&together);
    begins[number] = now();
    copy(to, from);
    pthread_barrier_wait(&together);
    if (number == 0) {
      const double ended = now();
      double began = ended;
      for (int thread = 0; thread < threads; thread++)
        began = begins[thread] < began ? begins[thread] : began;
      rates[count] = 2.0 * (double)bytes * threads / (ended - began);
    }
    pthread_barrier_wait(&together); /* the times have been read */
  }
  free(from);
  free(to);
  return NULL;
}

static int by_size(const void *a, const void *b)
{
  const double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

int main(int argc, char **argv)
{
  pthread_t others[MAX_THREADS];
  cpu_set_t allowed;
  threads = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  threads = threads < MAX_THREADS ? threads : MAX_THREADS;
  bytes = (size_t)(argc > 1 ? atol(argv[1]) : 64) << 20;
  const size_t most = ((size_t)1 << 30) / 2 / (size_t)threads / 4096 * 4096;
  bytes = bytes < most ? bytes : most;
  pthread_barrier_init(&together, NULL, (unsigned)threads);
  for (intptr_t number = 1; number < threads; number++)
    if (pthread_create(&others[number], NULL, work, (void *)number) != 0)
      return 1;
  work((void *)0);
  for (int number = 1; number < threads; number++)
    pthread_join(others[number], NULL);
  qsort(rates, COPIES, sizeof rates[0], by_size);
  printf("{\"bytes_per_second\": %.0f, \"threads\": %d}\n", rates[COPIES / 2], threads);
  return 0;
}
