/* A stand-in for libcuda.so.1 that has the functions for choosing a device. Environment:
 * CUDA_COUNT is the number of devices (8), CUDA_VERSION the version (12020), and CUDA_INIT the
 * result of cuInit (only on rank CUDA_INIT_RANK, if that is set). CUDA_CAPTURED is the stream that is
 * being captured: "legacy" is any stream that waits for the legacy stream, "thread" the per-thread
 * default stream, and a number is a stream's handle. Built with -DLACKS_UUID it lacks the function
 * for a device's UUID. */
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
  current = context;
  return 0;
}

int cuCtxGetDevice(int *device)
{
  if (current == NULL) return 201;
  *device = (int)(size_t)current - 0x1000;
  return 0;
}

/* cuda.h's legacy stream is handle 1, and the per-thread stream handle 2. */
int cuStreamIsCapturing(void *stream, int *status)
{
  const char *captured = getenv("CUDA_CAPTURED");
  const size_t handle = (size_t)stream;
  *status = 0;
  if (captured == NULL) return 0;
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
