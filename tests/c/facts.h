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

#endif /* FACTS_H */
