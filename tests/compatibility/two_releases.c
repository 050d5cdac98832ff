/* A library that calls libdevicemesh (NAME), and a program of two such libraries (MAIN), which
 * were linked against two releases. */
#ifdef MAIN
#include <stdio.h>

unsigned today(void);
unsigned other(void);

int main(void)
{
  printf("%u %u\n", today(), other());
  return 0;
}
#else
unsigned dm_version(void);
unsigned NAME(void);

unsigned NAME(void)
{
  return dm_version();
}
#endif
