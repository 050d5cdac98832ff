"""Ports of 127.0.0.1 that the kernel chose."""

import socket


class Ports:
    """Ports that no other test gets before `close`.

    Each port stays bound by a socket that does not listen. A server that sets SO_REUSEADDR, as the
    store of the library does, can listen there; the kernel gives the port to nobody else."""

    def __init__(self):
        self.sockets = []

    def free(self):
        """The number of a port where nobody listens."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self.sockets.append(held)
        return held.getsockname()[1]

    def close(self):
        for held in self.sockets:
            held.close()
        self.sockets.clear()
