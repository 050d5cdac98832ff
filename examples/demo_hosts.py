#!/usr/bin/env python3
"""Trains examples/hsdp_tp on one host with 8 ranks and on 4 hosts with 2 ranks each, and prints the
losses of both side by side: `make demo-hosts`.

The hosts are network namespaces of this machine, each with a name and an address of its own
(tests/netlab.py; root, or user namespaces with /dev/net/tun). Where the machine allows no
namespaces, the hosts are only names (DM_HOSTCCL_HOST), and their ranks talk over the loopback
device. Ranks on hosts with different names share no memory either."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from netlab import Lab  # noqa: E402
from support.pinned import Unavailable  # noqa: E402
from support.ports import Ports  # noqa: E402
from support.processes import environment  # noqa: E402

NAMES = ("alpha", "beta", "gamma", "delta")
RANKS_PER_HOST = 2
# How much the losses may differ, because sums over several hosts are added in another order.
TOLERANCE = 1e-4
# How long a training may take, in seconds.
PATIENCE = 300
# Each rank says where it is and becomes the program.
RANK = 'echo "rank $RANK runs on $DM_HOSTCCL_HOST ($(hostname))" && exec "$0" "$@"'


class Loopback:
    """Hosts that are only names. It has the functions of Lab that this program needs."""

    def __init__(self):
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def spawn(self, _host, command, **options):
        self.processes.append(subprocess.Popen(command, **options))
        return self.processes[-1]


def launch(lab, host, endpoint, hosts, node, tool, program):
    """Starts `devicemesh run` for the ranks of one host."""
    ranks = RANKS_PER_HOST * len(NAMES) // hosts
    nodes = ["--nnodes", hosts, "--node-rank", node, "--rdzv-endpoint", endpoint] if hosts > 1 else []
    command = [tool, "run", *nodes, "-n", ranks, "--", "sh", "-c", RANK, program, "--data", ROOT / "examples/data/digits.csv"]
    return lab.spawn(host, list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                     env=environment(DM_HOSTCCL_HOST=host))


def train(lab, names, endpoint, tool, program):
    """Trains on these hosts. Gives the loss of each epoch, where each rank ran, and the seconds."""
    began = time.monotonic()
    nodes = [launch(lab, name, endpoint, len(names), number, tool, program) for number, name in enumerate(names)]
    said = [node.communicate(timeout=PATIENCE)[0] for node in nodes]
    for name, node, text in zip(names, nodes, said):
        if node.returncode != 0:
            sys.exit(f"devicemesh run on {name} exited with {node.returncode}:\n{text}")
    text = "".join(said)
    losses = [float(loss) for loss in re.findall(r"^epoch +\d+  loss (\S+)$", text, re.M)]
    places = {int(rank): (host, name) for rank, host, name in re.findall(r"^rank (\d+) runs on (\S+) \((\S+)\)$", text, re.M)}
    return losses, places, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tool", default=ROOT / "target/release/devicemesh")
    parser.add_argument("--program", default=ROOT / "target/examples/hsdp_tp")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, also where there could be some")
    options = parser.parse_args()
    with Loopback() as lab:
        one, _, alone = train(lab, ["here"], None, options.tool, options.program)
    with tempfile.TemporaryDirectory() as folder:
        try:
            lab = Loopback().__enter__() if options.loopback else Lab(NAMES, folder).__enter__()
        except (Unavailable, OSError) as why:
            print(f"the hosts are names on the loopback device, because {why}")
            lab = Loopback().__enter__()
        ports = Ports()
        is_network = isinstance(lab, Lab)
        endpoint = f"{lab.hosts['alpha'].ipv4}:29500" if is_network else f"127.0.0.1:{ports.free()}"
        try:
            if is_network:
                lab.watch(b"no packet has these words")  # from here on the bytes on the wire are counted
            four, places, together = train(lab, NAMES, endpoint, options.tool, options.program)
            passed = lab.seen()[1] if is_network else None
        finally:
            lab.__exit__()
            ports.close()
    for name in NAMES:
        ranks = " and ".join(str(rank) for rank, (host, _) in sorted(places.items()) if host == name)
        system = {system for host, system in places.values() if host == name}
        print(f"{name:<6} ranks {ranks}, on a machine that calls itself {', '.join(sorted(system))}")
    print("\nepoch   one host   4 hosts")
    for epoch, (left, right) in enumerate(zip(one, four), 1):
        print(f"{epoch:>5}   {left:.6f}   {right:.6f}")
    worst = max((abs(left - right) / left for left, right in zip(one, four)), default=1.0)
    wire = "" if passed is None else f"; {passed / 1e6:.1f} MB passed between the hosts"
    print(f"\nthe losses differ by at most {worst:.1e}; one host took {alone:.1f} s, 4 hosts {together:.1f} s{wire}")
    return 0 if len(one) == len(four) > 0 and len(places) == RANKS_PER_HOST * len(NAMES) and worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
