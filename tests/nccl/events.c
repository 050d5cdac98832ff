/* The stand-in of device.c with the functions that the Python package calls itself: events that
 * can be asked, contexts that are pushed, and where a pointer lies. All memory is on the device of
 * this rank. */
#include "device.c"

int cuCtxPushCurrent_v2(void *context)
{
  note("push %d", (int)(size_t)context - 0x1000);
  return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
  *context = NULL;
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
  *mode = 0;
  return 0;
}

int cuStreamIsCapturing(struct object *stream, int *status)
{
  (void)stream;
  *status = 0;
  return 0;
}

/* With CUDA_BUSY work never ends. */
int cuEventQuery(struct object *event)
{
  note("query %d", number_of(event));
  return getenv("CUDA_BUSY") != NULL ? 600 : 0;
}

int cuPointerGetAttribute(void *value, int attribute, uintptr_t address)
{
  (void)address;
  *(int *)value = attribute == 2 ? 2 : number_from("RANK", 0); /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
  return 0;
}
