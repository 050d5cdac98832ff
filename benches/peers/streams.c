/* What the processors can move through the network of the bench, with nothing but TCP:
 *
 *     streams serve ADDRESS PORT            serves one connection
 *     streams measure ADDRESS PORT MILLIS   connects
 *
 * Both processes send all the time while they receive, and each prints a line of JSON. What both
 * receive in a second, added, is what the machine moves. Before that a few bytes go to and fro,
 * and the processes wait for them without sleeping: half the time of a round trip is the figure of
 * the latency. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ROUND_TRIPS = 4000, CHUNK = 1 << 20 };
static char chunk[CHUNK], sink[CHUNK];

static int64_t now_ns(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void must(int ok, const char *what)
{
  if (ok)
    return;
  perror(what);
  exit(1);
}

static void spin_recv(int fd, char *to, size_t bytes)
{
  for (size_t got = 0; got < bytes;) {
    const ssize_t part = recv(fd, to + got, bytes - got, MSG_DONTWAIT);
    must(part > 0 || (part < 0 && (errno == EAGAIN || errno == EINTR)), "recv");
    got += part > 0 ? (size_t)part : 0;
  }
}

/* Sends and receives for so long. Gives the bytes that were received. */
static int64_t both_ways(int fd, int64_t nanos)
{
  int64_t received = 0;
  const int64_t until = now_ns() + nanos;
  while (now_ns() < until) {
    struct pollfd waits = {.fd = fd, .events = POLLIN | POLLOUT};
    must(poll(&waits, 1, 100) >= 0, "poll");
    if (waits.revents & POLLIN) {
      const ssize_t part = recv(fd, sink, CHUNK, MSG_DONTWAIT);
      if (part == 0)
        break;
      received += part > 0 ? part : 0;
    }
    if (waits.revents & POLLOUT)
      (void)!send(fd, chunk, CHUNK, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  return received;
}

int main(int argc, char **argv)
{
  if (argc < 4)
    return 2;
  const int serves = strcmp(argv[1], "serve") == 0, one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[3]))};
  must(inet_pton(AF_INET, argv[2], &address.sin_addr) == 1, argv[2]);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  must(fd >= 0, "socket");
  if (serves) {
    must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0, "setsockopt");
    must(bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 1) == 0, "bind");
    const int listener = fd;
    fd = accept(listener, NULL, NULL);
    must(fd >= 0, "accept");
    close(listener);
  } else {
    const int64_t until = now_ns() + 5000000000;
    while (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
      must(now_ns() < until, "connect");
      usleep(10000);
      close(fd);
      fd = socket(AF_INET, SOCK_STREAM, 0);
    }
  }
  must(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "setsockopt");
  const int64_t began = now_ns();
  for (int index = 0; index < ROUND_TRIPS; index++) {
    if (!serves)
      must(send(fd, chunk, 4, MSG_NOSIGNAL) == 4, "send");
    spin_recv(fd, sink, 4);
    if (serves)
      must(send(fd, chunk, 4, MSG_NOSIGNAL) == 4, "send");
  }
  const double half = (double)(now_ns() - began) / ROUND_TRIPS / 2 * 1e-9;
  int64_t nanos = argc > 4 ? (int64_t)atoi(argv[4]) * 1000000 : 0;
  if (!serves) {
    must(send(fd, &nanos, sizeof nanos, MSG_NOSIGNAL) == sizeof nanos, "send");
    both_ways(fd, nanos / 4); /* the windows open */
  } else {
    spin_recv(fd, (char *)&nanos, sizeof nanos);
    both_ways(fd, nanos / 4);
  }
  const int64_t start = now_ns();
  const int64_t received = both_ways(fd, nanos);
  printf("{\"half_round_trip\": %.9f, \"received_per_second\": %.0f}\n", half, (double)received / ((double)(now_ns() - start) * 1e-9));
  if (serves)
    both_ways(fd, nanos); /* until the other side closes */
  return 0;
}
