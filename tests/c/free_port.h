/* A port of 127.0.0.1 where nobody listens. */
#ifndef FREE_PORT_H
#define FREE_PORT_H

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* A port that no other process gets before this process ends. It stays bound by a socket that does
 * not listen. A server that sets SO_REUSEADDR, as the store of the library does, can listen there.
 * tests/ports does so for Rust. */
static inline int free_port(void)
{
  struct sockaddr_in address;
  socklen_t length = sizeof address;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  memset(&address, 0, sizeof address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
      bind(fd, (struct sockaddr *)&address, sizeof address) != 0 ||
      getsockname(fd, (struct sockaddr *)&address, &length) != 0)
    exit(1);
  return ntohs(address.sin_port);
}

#endif
