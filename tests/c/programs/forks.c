/* A rank of tests/test_fork.py. One rank has a child that sleeps while the test kills the rank.
 * The others print which error they get, and when.
 *
 * forks HOW VICTIM: HOW is how the victim makes its child: fork, daemon (twice, in a session of
 * its own), blocked (fork while another thread is in a call), system (and so exec), or none: no
 * child, and all ranks end in good order. */
#define _GNU_SOURCE
#include "../check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static dm_mesh *mesh;

static void say(const char *what, long number)
{
  printf("%s %ld\n", what, number);
  fflush(stdout);
}

static void sleep_on(void)
{
  alarm(120); /* ends the process if the test does not */
  for (;;) pause();
}

static void *blocked(void *unused)
{
  float one = 1, sum = 0;
  (void)unused;
  dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL);
  return NULL;
}

static void make_child(const char *how)
{
  if (strcmp(how, "system") == 0) {
    /* The shell ends, so the process that it started has lost its parent. */
    if (system("sleep 120 >/dev/null 2>&1 </dev/null & echo child $!") != 0) exit(1);
    return;
  }
  if (strcmp(how, "blocked") == 0) {
    pthread_t thread;
    struct timespec moment = {0, 100000000};
    if (pthread_create(&thread, NULL, blocked, NULL) != 0) exit(1);
    nanosleep(&moment, NULL); /* most likely the thread is in its call by then */
  }
  int told[2];
  char byte = 0;
  if (pipe(told) != 0) exit(1);
  const pid_t child = fork();
  if (child != 0) {
    if (strcmp(how, "daemon") == 0) waitpid(child, NULL, 0);
    if (read(told[0], &byte, 1) != 1) exit(1);
    return;
  }
  if (strcmp(how, "daemon") == 0) {
    setsid();
    if (fork() != 0) _exit(0);
  }
  say("child", getpid());
  if (write(told[1], &byte, 1) != 1) _exit(1);
  /* The test reads to the end of what the rank prints. */
  close(1);
  close(2);
  sleep_on();
}

int main(int argc, char **argv)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = 0, size = 0;
  float one = 1, sum = 0;
  if (argc != 3) return 2;
  join.timeout_ms = 60000;
  REQUIRE(dm_world_init("cpu", &join, &options.world));
  REQUIRE(dm_world_rank(options.world, &rank));
  REQUIRE(dm_world_size(options.world, &size));
  const int32_t shape[] = {(size_t)size};
  REQUIRE(dm_init("cpu", shape, 1, NULL, &options, &mesh));
  REQUIRE(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == (float)size);
  if (strcmp(argv[1], "none") == 0) {
    OK(dm_finalize(mesh, NULL));
    return finish();
  }
  if (rank == atoi(argv[2])) {
    make_child(argv[1]);
    say("ready", getpid());
    sleep_on();
  }
  say("ready", getpid());
  const dm_status status = dm_world_barrier(options.world, 0);
  printf("%s %.6f %s\n", dm_status_name(status), seconds_now() * slowness(), dm_last_error());
  return finish();
}
