#!/usr/bin/env python3
"""A simulated start of thousands of ranks on our store and on PyTorch's TCPStore (libuv), in turn.
The ranks make the same agreements, on the join of the world and on a mesh of four dimensions.
"devicemesh" is what the library sends to its own server. "devicemesh, relays" is the same, with
one connection for each 8 ranks, as `devicemesh run` has it. "devicemesh, PyTorch's operations" is
what the library sends to PyTorch's server, here sent to ours.

A process may have a limited number of descriptors, so the largest sizes run with relays only.

`make bench-store` (with the PyTorch of `make interop`, fetched when it is missing). Prints medians
with the spread and their ratio, memory of the server for each idle client, and the machine. In a
network of its own where that is allowed: PyTorch's server looks up the name of every client that
it accepts, and the DNS, which takes seconds where it is out of reach, is not what we want to
measure.
"""

import argparse
import ctypes
import fcntl
import json
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

from common import built, in_turn, interpreter, machine, today

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
# How many ranks share a connection where there are relays (RANKS_OF_A_NODE in store_start.rs).
NODE = 8
PHASES = ("connect", "agree", "end", "mesh")

TORCH_SERVER = """
import resource, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
from datetime import timedelta
import torch
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=True, timeout=timedelta(seconds=300))
print(store.port, torch.__version__, flush=True)
sys.stdin.read(1)
"""


def resident(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


def processor_time(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(command):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def one_run(server_command, form, bench, ranks, processes, run):
    """Seconds until every rank is through, the server's processor time, bytes per idle client, and
    the server's version."""
    server = start([word.replace("RANKS", str(ranks)) for word in server_command])
    drivers = []
    try:
        port, *version = server.stdout.readline().split()
        before, used = resident(server.pid), processor_time(server.pid)
        edges = [ranks * index // processes for index in range(processes + 1)]
        began = time.monotonic()
        drivers = [start([bench, "drive", port, str(first), str(end), str(ranks), str(run), form]) for first, end in zip(edges, edges[1:])]
        phases = {}
        for driver in drivers:
            for line in driver.stdout:
                if line.strip() == "idle":
                    break
                phase, seconds = line.split()
                phases[phase] = max(phases.get(phase, 0.0), float(seconds))
            else:
                raise RuntimeError("a driver ended early")
        took = time.monotonic() - began
        return {"seconds": took, "phases": phases, "cpu": processor_time(server.pid) - used,
                "bytes_per_client": (resident(server.pid) - before) / ranks, "version": " ".join(version)}
    finally:
        for process in [*drivers, server]:
            process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def has_room(connections):
    """Whether a process may have so many connections. Lets this process and its children have them,
    where that is allowed."""
    needed = connections + 2048
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, needed))
        except (OSError, ValueError):
            return False
    return True


def own_network():
    """Leaves this process and its children alone with a loopback interface; whether that was
    allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0 and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--ours-only", action="store_true", help="without PyTorch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench, python = built("bin", "store_start"), interpreter(not options.ours_only)
    alone = own_network()
    serve = [bench, "serve", "RANKS"]
    servers = {"ours": (serve, "ours"), "relays": (serve, "relays"), "steps": (serve, "torch")}
    if python:
        servers["torch"] = ([str(python), "-c", TORCH_SERVER], "torch")
    report = {"machine": machine(), "date": today(), "sizes": {}}
    for ranks in options.ranks:
        fitting = {name: server for name, server in servers.items() if has_room(ranks // (NODE if name == "relays" else 1))}
        for name in servers.keys() - fitting.keys():
            print(f"{name} with {ranks} ranks needs more descriptors than a process may have here", file=sys.stderr)
        results = {name: [] for name in fitting}
        for round_number in range(options.rounds):
            for name, (command, form) in in_turn(fitting.items(), round_number):
                results[name].append(one_run(command, form, bench, ranks, options.processes, round_number))
        report["sizes"][ranks] = results
    if options.json:
        print(json.dumps(report, indent=1))
        return 0
    print(f"{report['machine']}, {report['date']}; {options.rounds} rounds in turn, {options.processes} driving processes"
          + ("" if alone else "; NOT in a network of its own: the DNS is in PyTorch's figures"))
    print(f"{'ranks':>6} {'server':33} {'start s: median (min-max)':28} {'connect':>8} {'agree':>8} {'end':>8} {'mesh':>8} {'server cpu s':>13} {'bytes/idle client':>18}")
    for ranks, results in report["sizes"].items():
        for name, runs in results.items():
            seconds = [run["seconds"] for run in runs]
            middle = lambda pick: statistics.median(pick(run) for run in runs)
            label = {"ours": "devicemesh", "relays": "devicemesh, relays", "steps": "devicemesh, PyTorch's operations", "torch": f"PyTorch {runs[0]['version']} libuv"}[name]
            spread = f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
            phases = [middle(lambda run, phase=phase: run["phases"][phase]) for phase in PHASES]
            print(f"{ranks:>6} {label:33} {spread:28} {' '.join(f'{phase:8.3f}' for phase in phases)} {middle(lambda run: run['cpu']):13.2f} {middle(lambda run: run['bytes_per_client']):18.0f}")
        for name in ("ours", "relays") if "torch" in results else ():
            ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in zip(results[name], results["torch"])]
            print(f"{'':>6} PyTorch / {'devicemesh' if name == 'ours' else 'relays'}, median of the rounds' ratios: {statistics.median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
