/* Executes the program that it is given, with the time of its own start in DM_BENCH_EXECUTED:
 * `executed PROGRAM ARGUMENT...`. It is linked statically, so it starts at once, and the loading
 * of the program comes after the noted time. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv)
{
  struct timespec time;
  char text[32];
  clock_gettime(CLOCK_MONOTONIC, &time);
  snprintf(text, sizeof text, "%lld", (long long)time.tv_sec * 1000000000 + time.tv_nsec);
  if (argc < 2 || setenv("DM_BENCH_EXECUTED", text, 1) != 0)
    return 127;
  execv(argv[1], argv + 1);
  perror(argv[1]);
  return 127;
}
