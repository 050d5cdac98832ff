/* Functions of the driver that the Python package calls itself, beside those of device.c: events
 * that can be asked, and contexts that are pushed. They are weak, so that device.c may have some of
 * them too. */
#include <stdlib.h>

#define WEAK __attribute__((weak))

WEAK int cuCtxPushCurrent_v2(void *context)
{
  return context == NULL ? 201 : 0;
}

WEAK int cuCtxPopCurrent_v2(void **context)
{
  *context = NULL;
  return 0;
}

WEAK int cuThreadExchangeStreamCaptureMode(int *mode)
{
  *mode = 0;
  return 0;
}

WEAK int cuStreamIsCapturing(void *stream, int *status)
{
  (void)stream;
  *status = 0;
  return 0;
}

/* With CUDA_BUSY work never ends. */
WEAK int cuEventQuery(void *event)
{
  (void)event;
  return getenv("CUDA_BUSY") != NULL ? 600 : 0;
}
