/* dm_abort from another thread, while a thread waits for an all-reduce that cannot end, because the
 * last rank never joins it. The waiting thread goes on at once. So does every other rank once it
 * aborts. Then a new mesh of the same ranks works.
 *
 * On the host the all-reduce itself blocks. On a GPU it is put on a stream, and the wait for that
 * stream blocks: NCCL's kernel turns until its peers come, or until ncclCommAbort raises the flag
 * that the kernel looks at. The program prints what dm_check tells the ranks that do not abort, and
 * requires nothing of it: NCCL says something only where its proxy meets the closed connection
 * (tests/gpu/README.md). */
#include "gpu.h"

#include <pthread.h>

/* The library promises 100 ms on the host. On a GPU an abort must end within seconds. */
static const double kHost = 0.25, kGpu = 10, kNoticed = 15;

static dm_mesh *mesh;
static int32_t *buffer;
static int issued, returned;
static dm_status issued_status;

static void pause_ms(long millis)
{
  struct timespec pause = {millis / 1000, millis % 1000 * 1000000};
  nanosleep(&pause, NULL);
}

static void *blocked(void *unused)
{
  (void)unused;
  device_attach();
  __atomic_store_n(&issued, 1, __ATOMIC_SEQ_CST);
  issued_status = dm_all_reduce(mesh, NULL, buffer, buffer, 1, DM_INT32, DM_SUM, device_stream());
  device_sync();
  __atomic_store_n(&returned, 1, __ATOMIC_SEQ_CST);
  return NULL;
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks};
  const double longest = on_gpu() ? kGpu : kHost;
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  check_group(mesh, NULL);
  buffer = (int32_t *)device_alloc(sizeof(int32_t));
  const int32_t one = 1;
  device_put(buffer, &one, sizeof one);
  /* The operation runs once before, because NCCL may connect at the first use of an algorithm, and
   * then waits for the peers inside the call. */
  OK(dm_all_reduce(mesh, NULL, buffer, buffer, 1, DM_INT32, DM_SUM, device_stream()));
  device_sync();
  OK(dm_world_barrier(options.world, 0));

  pthread_t thread;
  const int waits = rank != ranks - 1;
  if (waits) {
    if (pthread_create(&thread, NULL, blocked, NULL) != 0) exit(1);
    while (!__atomic_load_n(&issued, __ATOMIC_SEQ_CST)) pause_ms(1);
    pause_ms(500);
    CHECK(!__atomic_load_n(&returned, __ATOMIC_SEQ_CST));
  }
  /* All ranks that will wait do so by now. Rank 0 aborts, and the others ask dm_check. */
  OK(dm_world_barrier(options.world, 0));
  if (rank != 0) {
    const double began = seconds_now();
    dm_status said = DM_STATUS_OK;
    while (said == DM_STATUS_OK && seconds_now() - began < (waits ? kNoticed : 2)) {
      pause_ms(10);
      said = dm_check(mesh, NULL);
    }
    printf("rank %d: dm_check said %s after %.2f s: %s\n", rank, dm_status_name(said), seconds_now() - began,
           said == DM_STATUS_OK ? "" : dm_last_error());
  }
  const double began = seconds_now();
  OK(dm_abort(mesh));
  const double aborted = seconds_now() - began;
  if (waits) pthread_join(thread, NULL);
  const double woken = seconds_now() - began;
  CHECK(aborted < longest && woken < longest);
  if (!on_gpu() && rank == 0) CHECK(issued_status == DM_STATUS_ABORTED);
  if (rank == 0) {
    figure("dm_abort of a blocked all-reduce: the call", 1e3 * aborted, "ms");
    figure("dm_abort of a blocked all-reduce: until the waiting thread goes on", 1e3 * woken, "ms");
  }
  GIVES(DM_STATUS_ABORTED, dm_all_reduce(mesh, NULL, buffer, buffer, 1, DM_INT32, DM_SUM, device_stream()));
  GIVES(DM_STATUS_ABORTED, dm_finalize(mesh, NULL));
  dm_free(mesh);

  /* All have aborted: the same ranks again. */
  OK(dm_world_barrier(options.world, 0));
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  check_group(mesh, NULL);
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  device_free(buffer);
  dm_world_free(options.world);
  return finish();
}
