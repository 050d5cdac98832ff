/* A stand-in for libcuda.so.1 whose device memory is host memory, for programs that use memory,
 * streams and events. It adds to cuda.c the functions that cudarc calls. All work is done at once,
 * so a result shows nothing about the order of streams. The log shows it: CUDA_LOG names a file
 * that gets a line for each event that is recorded or waited for, and for each use of memory, with
 * the stream's number. tests/on_stream.rs follows the order through these lines.
 *
 * cudarc wants all functions of the driver: those that are not here are in a file that
 * tests/stand_in makes, and give an error. */
#include "cuda.c"

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>

struct object {
  int number;
  size_t device;
};

static int streams, events;

static void note(const char *format, ...)
{
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static FILE *file;
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  if (file == NULL && getenv("CUDA_LOG") != NULL) file = fopen(getenv("CUDA_LOG"), "a");
  if (file != NULL) {
    vfprintf(file, format, arguments);
    fputc('\n', file);
    fflush(file);
  }
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}

/* The default stream is number 0. */
static int number_of(const struct object *object)
{
  return object == NULL ? 0 : object->number;
}

static int make(struct object **object, int *count)
{
  *object = calloc(1, sizeof **object);
  (*object)->number = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  (*object)->device = (size_t)current;
  return 0;
}

/* The recorder calls this when an operation was put on a stream. */
void device_runs(struct object *stream, const char *operation)
{
  note("stream %d runs %s", number_of(stream), operation);
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
  (void)device;
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
  (void)attribute;
  (void)device;
  *value = 1; /* memory pools: asynchronous allocation */
  return 0;
}

int cuCtxSynchronize(void)
{
  note("host waits for all");
  return 0;
}

int cuStreamCreate(struct object **stream, unsigned flags)
{
  (void)flags;
  return make(stream, &streams);
}

int cuStreamDestroy_v2(struct object *stream)
{
  note("stream %d ends", number_of(stream));
  free(stream);
  return 0;
}

int cuStreamSynchronize(struct object *stream)
{
  note("host waits for stream %d", number_of(stream));
  return 0;
}

/* CUDA_WAIT is the result of a wait. */
int cuStreamWaitEvent(struct object *stream, struct object *event, unsigned flags)
{
  (void)flags;
  note("stream %d waits %d", number_of(stream), number_of(event));
  return number_from("CUDA_WAIT", 0);
}

int cuEventCreate(struct object **event, unsigned flags)
{
  (void)flags;
  return make(event, &events);
}

/* CUDA_UNRECORDED is the number of a stream on which no event can be recorded. */
int cuEventRecord(struct object *event, struct object *stream)
{
  note("stream %d records %d", number_of(stream), number_of(event));
  return number_of(stream) == number_from("CUDA_UNRECORDED", -1) ? 700 : 0;
}

int cuEventDestroy_v2(struct object *event)
{
  free(event);
  return 0;
}

int cuMemAlloc_v2(uintptr_t *memory, size_t bytes)
{
  note("context %zx allocates", (size_t)current);
  *memory = (uintptr_t)malloc(bytes);
  return *memory == 0 ? 2 : 0;
}

int cuMemFree_v2(uintptr_t memory)
{
  note("context %zx gives memory back", (size_t)current);
  free((void *)memory);
  return 0;
}

int cuMemAllocAsync(uintptr_t *memory, size_t bytes, struct object *stream)
{
  (void)stream;
  *memory = (uintptr_t)malloc(bytes);
  return *memory == 0 ? 2 : 0;
}

int cuMemFreeAsync(uintptr_t memory, struct object *stream)
{
  note("stream %d frees", number_of(stream));
  free((void *)memory);
  return 0;
}

int cuMemsetD8Async(uintptr_t memory, unsigned char value, size_t bytes, struct object *stream)
{
  note("stream %d writes", number_of(stream));
  memset((void *)memory, value, bytes);
  return 0;
}

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, struct object *stream)
{
  note("stream %d writes", number_of(stream));
  memcpy((void *)to, from, bytes);
  return 0;
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, struct object *stream)
{
  note("stream %d reads", number_of(stream));
  memcpy(to, (const void *)from, bytes);
  return 0;
}
