/* This file reads the environment, writes the log, and keeps the device of a thread. */
#include "recorder.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <time.h>

int insiders;

void *real(const char *name)
{
  static void *host;
  if (host == NULL) host = dlopen(getenv("RECORDER_HOST"), RTLD_NOW | RTLD_LOCAL);
  void *function = host == NULL ? NULL : dlsym(host, name);
  if (function == NULL) {
    fprintf(stderr, "recorder: %s\n", dlerror());
    abort();
  }
  return function;
}

int number_from(const char *name, int otherwise)
{
  const char *text = getenv(name);
  return text == NULL || *text == '\0' ? otherwise : atoi(text);
}

double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double later(void)
{
  return now() + 1e-3 * number_from("RECORDER_SLOW", 0);
}

void note(const char *format, ...)
{
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static FILE *file;
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  if (file == NULL && getenv("RECORDER_LOG") != NULL) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", getenv("RECORDER_LOG"), number_from("RANK", 0));
    file = fopen(path, "a");
    if (file != NULL) setvbuf(file, NULL, _IOLBF, 0);
  }
  if (file != NULL) {
    vfprintf(file, format, arguments);
    fputc('\n', file);
  }
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}

/* Writes a line of the test into the log. */
void recorder_note(const char *text);
void recorder_note(const char *text)
{
  note("# %s", text);
}

int recorder_inside(void);
int recorder_inside(void)
{
  return __atomic_load_n(&insiders, __ATOMIC_SEQ_CST);
}

/* How many calls are inside hang(). */
static int hanging;

int recorder_hanging(void);
int recorder_hanging(void)
{
  return __atomic_load_n(&hanging, __ATOMIC_SEQ_CST);
}

ncclResult_t told_to(const char *call)
{
  static int calls;
  int rank = -2, which = 0, code = 0;
  const int number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  const char *wish = getenv("RECORDER_FAIL");
  if (wish == NULL || sscanf(wish, "%d %d %d", &rank, &which, &code) != 3) return ncclSuccess;
  if (which != number || (rank != -1 && rank != number_from("RANK", 0))) return ncclSuccess;
  note("failing %s with %d", call, code);
  return (ncclResult_t)code;
}

void hang(const char *function)
{
  char named[64] = "";
  int rank = -1, millis = 0;
  const char *wish = getenv("RECORDER_HANG");
  if (wish == NULL || sscanf(wish, "%d %63s %d", &rank, named, &millis) < 2) return;
  if (rank != number_from("RANK", 0) || strcmp(named, function) != 0) return;
  note("hang in %s", function);
  __atomic_add_fetch(&hanging, 1, __ATOMIC_SEQ_CST);
  for (const double until = now() + 1e-3 * millis; millis == 0 || now() < until; usleep(10000)) continue;
  __atomic_sub_fetch(&hanging, 1, __ATOMIC_SEQ_CST);
}

#ifdef HIP
/* Built as RCCL, it has AMD's runtime, in which every thread begins with device 0. */
static __thread int hip_device;

int hipGetDevice(int *number);
int hipGetDevice(int *number)
{
  *number = hip_device;
  return 0;
}

int hipSetDevice(int number);
int hipSetDevice(int number)
{
  hip_device = number;
  return 0;
}

int hipGetDeviceCount(int *count);
int hipGetDeviceCount(int *count)
{
  *count = number_from("HIP_COUNT", 8);
  return 0;
}

/* A stream that is always being captured into a graph. A question about its work spoils the
   graph. */
#define CAPTURED ((void *)(size_t)0xca)

int hipStreamIsCapturing(void *stream, int *status);
int hipStreamIsCapturing(void *stream, int *status)
{
  *status = stream == CAPTURED;
  return 0;
}

int hipStreamQuery(void *stream);
int hipStreamQuery(void *stream)
{
  if (stream == CAPTURED) return 900;
  return (int)(size_t)stream;
}

const char *hipGetErrorString(int code);
const char *hipGetErrorString(int code)
{
  return code == 700 ? "an illegal memory access was encountered" : "an error";
}
#endif

void note_device(const char *call)
{
#ifdef HIP
  note("device %d: %s", hip_device, call);
#else
  (void)call;
#endif
}

int device(void)
{
#ifdef HIP
  return hip_device;
#endif
  int (*current)(int *) = NULL, number = -1;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver != NULL) *(void **)&current = dlsym(driver, "cuCtxGetDevice");
  if (current == NULL || current(&number) != 0) number = -1;
  if (driver != NULL) dlclose(driver);
  return number;
}
