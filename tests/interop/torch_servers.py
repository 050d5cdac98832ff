"""Starts a TCPStore server of PyTorch's for each argument (libuv or legacy), on ports that the
kernel chose. It prints the ports, and serves until its input ends."""

import sys

import torch.distributed as dist

servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=kind == "libuv") for kind in sys.argv[1:]]
assert [server.libuvBackend for server in servers] == [kind == "libuv" for kind in sys.argv[1:]]
print(*(server.port for server in servers), flush=True)
sys.stdin.read()
