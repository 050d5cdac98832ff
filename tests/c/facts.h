/* Checks the facts of a failure that a program reads without its message. */
#ifndef FACTS_H
#define FACTS_H

#include "check.h"

/* The facts of the last failing call of this thread. */
static inline dm_error_info facts(void)
{
  dm_error_info info = DM_ERROR_INFO_INIT;
  OK(dm_last_error_info(&info));
  return info;
}

/* Whether every rank of one list is in the other. */
static inline bool within(const int32_t *ranks, size_t count, const int32_t *others, size_t num_others)
{
  for (size_t i = 0; i < count; ++i) {
    bool found = false;
    for (size_t j = 0; j < num_others; ++j) found = found || ranks[i] == others[j];
    if (!found) return false;
  }
  return true;
}

/* Whether two ascending lists are equal. */
static inline bool same(const int32_t *ranks, size_t count, const int32_t *others, size_t num_others)
{
  return count == num_others && within(ranks, count, others, num_others);
}

/* Whether this is so on any rank of the world. All ranks ask. */
static inline bool on_any_rank(const dm_world *world, bool mine)
{
  const unsigned char byte = mine;
  bool any = false;
  dm_buffers *buffers = NULL;
  REQUIRE(dm_world_all_gather_bytes(world, &byte, 1, 0, &buffers));
  for (size_t rank = 0; rank < dm_buffers_count(buffers); ++rank) {
    const void *data = NULL;
    size_t length = 0;
    REQUIRE(dm_buffers_get(buffers, rank, &data, &length));
    any = any || (length == 1 && *(const unsigned char *)data != 0);
  }
  dm_buffers_free(buffers);
  return any;
}

/* A scene in which one rank comes too late begins with a short timeout. On a busy machine another
 * rank may come too late as well. The ranks then play the scene again with three times the time,
 * until the timeout is this long. */
enum { kLongestScene = 18000 };

#endif /* FACTS_H */
