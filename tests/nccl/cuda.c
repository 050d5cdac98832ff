/* A stand-in for libcuda.so.1 that has the functions for choosing a device. Environment:
 * CUDA_COUNT is the number of devices (8), CUDA_VERSION the version (12020), and CUDA_INIT the
 * result of cuInit (only on rank CUDA_INIT_RANK, if that is set). CUDA_CAPTURED is the stream that
 * is being captured: "legacy" is any stream that waits for the legacy stream, "thread" the
 * per-thread default stream, and a number is a stream's handle. Built with -DLACKS_UUID it lacks
 * the function for a device's UUID. With CUDA_REFUSE a thread without a device gets none.
 *
 * Streams are numbers. With CUDA_BUSY their work never ends; else cuda_set_query sets what
 * cuStreamQuery gives. Built with -DPOINTERS it knows to which device memory belongs: cuda_own says
 * it. CUDA_PAGEABLE=1 makes devices that read all memory of the process. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread void *current;

static int number_from(const char *name, int otherwise)
{
  const char *text = getenv(name);
  return text == NULL || *text == '\0' ? otherwise : atoi(text);
}

int cuInit(unsigned flags)
{
  const int rank = number_from("RANK", 0);
  if (flags != 0) return 1;
  return number_from("CUDA_INIT_RANK", rank) == rank ? number_from("CUDA_INIT", 0) : 0;
}

int cuDriverGetVersion(int *version)
{
  *version = number_from("CUDA_VERSION", 12020);
  return 0;
}

int cuDeviceGetCount(int *count)
{
  *count = number_from("CUDA_COUNT", 8);
  return 0;
}

int cuDeviceGet(int *device, int number)
{
  if (number < 0 || number >= number_from("CUDA_COUNT", 8)) return 101;
  *device = number;
  return 0;
}

#ifndef LACKS_UUID
int cuDeviceGetUuid(char uuid[16], int device)
{
  memset(uuid, 0, 16);
  snprintf(uuid, 16, "device %d", device);
  return 0;
}
#endif

int cuDeviceGetPCIBusId(char *address, int length, int device)
{
  snprintf(address, (size_t)length, "0000:%02X:00.0", 0xA0 + device);
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
  *context = (void *)(size_t)(0x1000 + device);
  return 0;
}

int cuCtxGetCurrent(void **context)
{
  *context = current;
  return 0;
}

int cuCtxSetCurrent(void *context)
{
  if (current == NULL && getenv("CUDA_REFUSE") != NULL) return 999;
  current = context;
  return 0;
}

int cuCtxGetDevice(int *device)
{
  if (current == NULL) return 201;
  *device = (int)(size_t)current - 0x1000;
  return 0;
}

/* A stream that is always being captured into a graph. */
#define CAPTURED ((void *)(size_t)0xca)

/* cuda.h's legacy stream is handle 1, and the per-thread stream handle 2. */
int cuStreamIsCapturing(void *stream, int *status)
{
  const char *captured = getenv("CUDA_CAPTURED");
  const size_t handle = (size_t)stream;
  *status = stream == CAPTURED;
  if (captured == NULL || stream == CAPTURED) return 0;
  if (handle == 1 && strcmp(captured, "legacy") == 0) return 906;
  *status = handle == 2 ? strcmp(captured, "thread") == 0 : handle > 2 && handle == strtoull(captured, NULL, 0);
  return 0;
}

int cuGetErrorName(int code, const char **name)
{
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 999 ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR";
  return 0;
}

int cuGetErrorString(int code, const char **text)
{
  *text = code == 100 ? "no CUDA-capable device is detected" : "an error";
  return 0;
}

static int queried, queries, relaxed;
static __thread unsigned capture_mode;

void cuda_set_query(int code);
void cuda_set_query(int code)
{
  __atomic_store_n(&queried, code, __ATOMIC_SEQ_CST);
}

/* How often streams were asked, and how often by a thread that captures of others do not
   restrict. */
void cuda_count_queries(int *all, int *by_relaxed);
void cuda_count_queries(int *all, int *by_relaxed)
{
  *all = __atomic_load_n(&queries, __ATOMIC_SEQ_CST);
  *by_relaxed = __atomic_load_n(&relaxed, __ATOMIC_SEQ_CST);
}

int cuStreamQuery(void *stream)
{
  if (stream == CAPTURED) return 900;
  __atomic_add_fetch(&queries, 1, __ATOMIC_SEQ_CST);
  if (capture_mode == 2) __atomic_add_fetch(&relaxed, 1, __ATOMIC_SEQ_CST);
  return getenv("CUDA_BUSY") != NULL ? 600 : __atomic_load_n(&queried, __ATOMIC_SEQ_CST);
}

int cuThreadExchangeStreamCaptureMode(unsigned *mode)
{
  const unsigned before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}

#ifdef POINTERS
enum { kMostRanges = 64 };
static struct {
  uintptr_t start;
  size_t bytes;
  int device; /* -1: memory of the host that the driver knows; -2: managed memory */
} ranges[kMostRanges];
static int range_count, asked;

/* From now on these bytes belong to that device. With bytes 0 they are forgotten. */
void cuda_own(void *start, size_t bytes, int device);
void cuda_own(void *start, size_t bytes, int device)
{
  int at = 0;
  while (at < range_count && ranges[at].start != (uintptr_t)start) ++at;
  if (at == range_count) ++range_count;
  ranges[at].start = (uintptr_t)start;
  ranges[at].bytes = bytes;
  ranges[at].device = device;
}

/* How often the driver was asked about memory. */
int cuda_asked(void);
int cuda_asked(void)
{
  return asked;
}

static int range_of(uintptr_t address)
{
  for (int at = 0; at < range_count; ++at)
    if (address - ranges[at].start < ranges[at].bytes) return at;
  return -1;
}

int cuPointerGetAttribute(void *value, unsigned attribute, uintptr_t address)
{
  const int at = range_of(address);
  if (attribute != 2 || at < 0) return 1;
  *(unsigned *)value = ranges[at].device == -1 ? 1 : 2;
  return 0;
}

/* With CUDA_UNKNOWN=1 an address that the driver does not know is an error. */
int cuPointerGetAttributes(unsigned count, const unsigned *attributes, void **values, uintptr_t address)
{
  const int at = range_of(address);
  ++asked;
  if (at < 0 && number_from("CUDA_UNKNOWN", 0) == 1) return 1;
  for (unsigned one = 0; one < count; ++one) {
    switch (attributes[one]) {
      case 2: *(unsigned *)values[one] = at < 0 ? 0 : ranges[at].device == -1 ? 1 : 2; break;
      case 8: *(unsigned *)values[one] = at >= 0 && ranges[at].device == -2; break;
      case 9: *(int *)values[one] = at < 0 ? -2 : ranges[at].device < 0 ? 0 : ranges[at].device; break;
      case 11: *(uintptr_t *)values[one] = at < 0 ? 0 : ranges[at].start; break;
      case 12: *(size_t *)values[one] = at < 0 ? 0 : ranges[at].bytes; break;
      default: return 1;
    }
  }
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
  (void)device;
  *value = attribute == 88 && number_from("CUDA_PAGEABLE", 0) == 1;
  return 0;
}
#endif
