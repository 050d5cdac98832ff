/* A port of 127.0.0.1 where nobody listens. */
#ifndef FREE_PORT_H
#define FREE_PORT_H

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* A port that was free a moment ago. Another process may take it before the caller does. */
static inline int free_port(void)
{
  struct sockaddr_in address;
  socklen_t length = sizeof address;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  memset(&address, 0, sizeof address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 ||
      getsockname(fd, (struct sockaddr *)&address, &length) != 0)
    exit(1);
  close(fd);
  return ntohs(address.sin_port);
}

#endif
