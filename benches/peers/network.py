"""Hosts for the bench: network, UTS, IPC and mount namespaces on one machine, joined by a bridge.
It needs root and iproute2. Namespaces and interfaces end with the processes that hold them."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

INTERFACE = "net0"
# What a host does first: its interfaces are seen below /sys, and its shared memory is its own.
HOLD = """
hostname "$1" && mount --make-rprivate / && mount --bind "$2" /etc/hosts && mount -t sysfs none /sys && mount -t tmpfs none /dev/shm \
&& ip link set lo up && echo ready && exec sleep infinity
"""
SWITCH = "ip link add bridge0 type bridge && ip link set bridge0 up && echo ready && exec sleep infinity"
# ssh's part for the MPI launchers: AGENT [OPTION ...] HOST COMMAND ...
AGENT = """#!/bin/sh
while :; do case "$1" in -*) shift ;; *) break ;; esac; done
host="$1"
shift
case "$host" in
%s
*) echo "no host $host" >&2; exit 255 ;;
esac
exec nsenter -t "$pid" -m -u -i -n sh -c "$*"
"""


class Unavailable(Exception):
    """This machine cannot make the hosts; the text says why."""


def sh(*command):
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class Network:
    """`with Network(4) as network`: hosts 0 to 3 at 10.78.0.1 to 10.78.0.4."""

    def __init__(self, count):
        self.count, self.holders, self.folder = count, [], None

    def __enter__(self):
        missing = [program for program in ("ip", "nsenter", "unshare") if not shutil.which(program)]
        if missing or os.getuid() != 0:
            raise Unavailable(f"it needs {' and '.join(missing) or 'root'}")
        self.folder = Path(tempfile.mkdtemp(prefix="dm-bench-hosts-"))
        try:
            names = self.folder / "hosts"
            names.write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(host)} {self.name(host)}\n" for host in range(self.count)))
            switch = self.hold(["unshare", "-n", "sh", "-c", SWITCH])
            for host in range(self.count):
                pid = self.hold(["unshare", "-n", "-u", "-i", "-m", "sh", "-c", HOLD, "hold", self.name(host), str(names)])
                sh("ip", "link", "add", f"dmb{os.getpid()}", "netns", switch, "type", "veth", "peer", "name", INTERFACE, "netns", pid)
                port, enter = f"port{host}", ["nsenter", "-t", pid, "-n"]
                sh("nsenter", "-t", switch, "-n", "ip", "link", "set", f"dmb{os.getpid()}", "name", port, "master", "bridge0", "up")
                sh(*enter, "ip", "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
                sh(*enter, "ip", "link", "set", INTERFACE, "up")
            self.agent = self.folder / "agent"
            cases = (f"{self.address(host)}|{self.name(host)}) pid={self.pid(host)} ;;" for host in range(self.count))
            self.agent.write_text(AGENT % "\n".join(cases))
            self.agent.chmod(0o755)
        except BaseException:
            self.__exit__()
            raise
        return self

    def hold(self, command):
        """Starts a process that holds namespaces, and gives its number when they are ready."""
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.holders.append(holder)
        if holder.stdout.readline() != "ready\n":
            raise Unavailable(f"no namespaces here: {holder.stderr.read().strip()}")
        return holder.pid

    def __exit__(self, *_):
        for holder in self.holders:
            holder.kill()
            holder.communicate()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, host):
        return f"10.78.0.{host + 1}"

    def name(self, host):
        return f"bench{host}"

    def pid(self, host):
        return self.holders[1 + host].pid

    def on(self, host):
        """The words before a command that runs on this host."""
        return ["nsenter", "-t", str(self.pid(host)), "-m", "-u", "-i", "-n"]
