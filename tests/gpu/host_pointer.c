/* Memory that a communicator's device cannot use. Host memory that the driver does not know must be
 * refused, and the device must work afterwards; host memory that the driver knows and managed
 * memory must work. The driver is asked about memory also while a stream is captured: that must not
 * spoil the capture. DM_CHECK_POINTERS=0 and =1 give the figures to compare with. */
#include "gpu.h"

enum { kCount = 1024, kCalls = 2000 };

static dm_mesh *mesh;

static dm_status sum(float *send, float *recv)
{
  return dm_all_reduce(mesh, NULL, send, recv, kCount, DM_FLOAT32, DM_SUM, device_stream());
}

/* A function of the driver that gpu.h does not need. */
static void *of_driver(const char *name)
{
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  return library == NULL ? NULL : dlsym(library, name);
}

static void captured(float *data)
{
  int (*begin)(void *, int) = NULL, (*end)(void *, void **) = NULL, (*destroy)(void *) = NULL;
  void *graph = NULL;
  *(void **)&begin = of_driver("cuStreamBeginCapture_v2");
  *(void **)&end = of_driver("cuStreamEndCapture");
  *(void **)&destroy = of_driver("cuGraphDestroy");
  if (begin == NULL || end == NULL || destroy == NULL) return;
  OK(sum(data, data)); /* whatever connects does so before the capture */
  device_sync();
  float *fresh = (float *)device_alloc(4 << 20);
  driver_says(begin(device_stream(), 0 /* CU_STREAM_CAPTURE_MODE_GLOBAL */), "cuStreamBeginCapture");
  OK(sum(fresh, fresh));
  GIVES(DM_STATUS_INVALID_STATE, dm_stream_wait(mesh, NULL, device_stream(), 1000));
  driver_says(end(device_stream(), &graph), "cuStreamEndCapture");
  CHECK(graph != NULL);
  if (graph != NULL) driver_says(destroy(graph), "cuGraphDestroy");
  device_free(fresh);
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  void *host_engine = NULL;
  options.world = join_world(&rank, &ranks);
  const int32_t shape[] = {ranks};
  REQUIRE(dm_init(device_type(), shape, 1, NULL, &options, &mesh));
  const int is_checked = dm_get_proc(mesh, "hostcclCommLostRank", &host_engine) != DM_STATUS_OK;
  const char *mode = getenv("DM_CHECK_POINTERS");
  const int is_off = mode != NULL && strcmp(mode, "0") == 0;
  float ones[kCount], got[kCount], *host = (float *)host_alloc(sizeof ones);
  float *data = (float *)device_alloc(sizeof ones), *result = (float *)device_alloc(sizeof ones);
  for (int at = 0; at < kCount; ++at) ones[at] = host[at] = 1;
  device_put(data, ones, sizeof ones);

  if (is_checked && !is_off) {
    const dm_status said = sum(host, result);
    printf("rank %d: host memory as send: %s: %s\n", rank, dm_status_name(said),
           said == DM_STATUS_OK ? "taken (pageable memory access?)" : dm_last_error());
    if (said != DM_STATUS_OK) {
      GIVES(DM_STATUS_INVALID_ARGUMENT, said);
      FAILS(DM_STATUS_INVALID_ARGUMENT, "host memory", sum(data, host));
    }
  }
  device_sync();
  OK(sum(data, result));
  device_get(got, result, sizeof got);
  CHECK(got[0] == (float)ranks && got[kCount - 1] == (float)ranks);

  int (*allocate_host)(void **, size_t) = NULL, (*allocate_managed)(device_address *, size_t, unsigned) = NULL;
  *(void **)&allocate_host = is_checked ? of_driver("cuMemAllocHost_v2") : NULL;
  *(void **)&allocate_managed = is_checked ? of_driver("cuMemAllocManaged") : NULL;
  if (allocate_host != NULL && allocate_managed != NULL) {
    void *pinned = NULL;
    device_address managed = 0;
    driver_says(allocate_host(&pinned, sizeof ones), "cuMemAllocHost");
    memcpy(pinned, ones, sizeof ones);
    OK(sum((float *)pinned, result));
    device_get(got, result, sizeof got);
    CHECK(got[0] == (float)ranks);
    driver_says(allocate_managed(&managed, sizeof ones, 1 /* CU_MEM_ATTACH_GLOBAL */), "cuMemAllocManaged");
    OK(sum(data, (float *)(uintptr_t)managed));
    device_sync();
    CHECK(*(float *)(uintptr_t)managed == (float)ranks);
    captured(data);
  }

  double began = seconds_now();
  for (int call = 0; call < kCalls; ++call) {
    OK(sum(data, result));
    if (call % 100 == 99) device_sync();
  }
  if (rank == 0) {
    char text[128];
    snprintf(text, sizeof text, "dm_all_reduce of 4 KiB, DM_CHECK_POINTERS=%s", mode == NULL ? "(not set)" : mode);
    figure(text, 1e6 * (seconds_now() - began) / kCalls, "us");
  }
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(options.world);
  device_free(data);
  device_free(result);
  free(host);
  return finish();
}
