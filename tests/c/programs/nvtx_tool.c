/* Plays the part of a tool that listens to NVTX: a library that NVTX_INJECTION64_PATH names. It writes
 * each range to standard output. The structures are written from NVTX's documentation of the
 * interface between libraries and tools (nvtxDetail/nvtxTypes.h, version 3). With NVTX_TOOL_REFUSES
 * it does not attach. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLBACKS = 1, VERSION_INFO = 3, CORE = 1, CORE2 = 5, MODULES = 6, PUSH = 4, POP = 5, DOMAIN_CREATE = 12 };

typedef void (*function)(void);
struct callbacks {
  size_t size;
  int (*module)(unsigned module, function ***table, unsigned *count);
};
struct version_info {
  size_t size;
  uint32_t version, reserved;
  void (*set_tool_version)(uint32_t version);
};
struct event {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  uint64_t payload;
  int32_t message_type;
  const char *message;
};

static void *create(const char *name)
{
  printf("domain %s\n", name);
  return strdup(name);
}

static int push(void *domain, const struct event *event)
{
  if (event->version != 3 || event->size != 48 || event->message_type != 1 || event->payload_type != 1) abort();
  printf("push %s [%s] %llu\n", (const char *)domain, event->message, (unsigned long long)event->payload);
  return 0;
}

static int pop(void *domain)
{
  printf("pop %s\n", (const char *)domain);
  return 0;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t))
{
  const struct callbacks *callbacks = export_table(CALLBACKS);
  const struct version_info *version = export_table(VERSION_INFO);
  unsigned count = 0;
  function **table = NULL;
  if (export_table(2) != NULL || callbacks->size < sizeof *callbacks || version->size < sizeof *version || version->version != 3)
    abort();
  version->set_tool_version(3);
  for (unsigned module = 1; module <= MODULES; ++module)
    if (callbacks->module(module, &table, &count) != 1 || count < 7 || table[0] != NULL || table[1] == NULL) abort();
  if (callbacks->module(0, &table, &count) || callbacks->module(MODULES + 1, &table, &count)) abort();
  if (callbacks->module(CORE2, &table, &count) != 1 || count != 16 || table[15] == NULL || table[16] != NULL) abort();
  *table[DOMAIN_CREATE] = (function)create;
  *table[PUSH] = (function)push;
  *table[POP] = (function)pop;
  return getenv("NVTX_TOOL_REFUSES") == NULL;
}
