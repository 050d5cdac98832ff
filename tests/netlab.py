"""Hosts on one machine: each a network, UTS and mount namespace with its own name, /etc/hosts and
addresses, joined by a wire that can delay, lose and cut.

A host's interface is a TUN device. The packets that the host sends go to a process of ours (the
wire). The wire passes each packet to its destination, at once, later or never. So neither `ip` nor
`tc` nor netem is needed, and a host that is cut off is silent, as one without power is: no RST, no
ICMP.

Nothing has a name in the file system. A namespace and its interfaces exist while a process is in
the namespace or holds its TUN device, so the end of a lab kills all processes in its networks, and
closes the devices.
"""

import contextlib
import ctypes
import errno
import fcntl
import heapq
import ipaddress
import os
import random
import select
import signal
import socket
import struct
import subprocess
import time
import traceback
from pathlib import Path

from support.pinned import Unavailable
from support.processes import all_pids, gone, kill_all, wait_until

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCGIFINDEX = 0x8916, 0x891C, 0x8913, 0x8914, 0x8933
TUNSETIFF, IFF_TUN, IFF_NO_PI, IFF_UP = 0x400454CA, 1, 0x1000, 1
PR_SET_PDEATHSIG = 1
RTF_LOCAL = 0x80000000
DEVICE = "net0"
# The errors of a machine that does not allow namespaces or TUN devices, or has none. ENOSPC and
# EUSERS: the machine allows none of them to this user.
REFUSALS = {errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ENXIO, errno.ENOSPC, errno.EUSERS}
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source, target, flags, kind=None):
    kind = os.fsencode(kind) if kind else None
    check(LIBC.mount(os.fsencode(source), os.fsencode(target), kind, ctypes.c_ulong(flags), None), f"mount {target}")


def unshare():
    """Gives this process namespaces of its own. A process that may not do so makes a user namespace
    first, in which it may."""
    kinds = CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS
    if LIBC.unshare(kinds) == 0:
        return
    user, group = os.getuid(), os.getgid()
    check(LIBC.unshare(CLONE_NEWUSER | kinds), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def request(name, layout="", *values):
    return struct.pack("16s" + layout, name.encode(), *values).ljust(40, b"\0")


def set_up(link, name, up):
    flags = struct.unpack_from("h", fcntl.ioctl(link, SIOCGIFFLAGS, request(name)), 16)[0]
    fcntl.ioctl(link, SIOCSIFFLAGS, request(name, "h", flags | IFF_UP if up else flags & ~IFF_UP))



def ipv4_request(name, address):
    return request(name, "Hxx4s", socket.AF_INET, ipaddress.IPv4Address(address).packed)


class Host:
    """One host: a process that holds its namespaces and makes sockets in them for the test.

    Raises Unavailable where this machine does not allow it. Once this process has made a host of
    a kind, a host of that kind that cannot be made is a failure, and no skip."""

    # The kinds of hosts (own_sysfs, own_pids) that this process has made.
    made = set()

    def __init__(self, name, number, folder, own_sysfs, own_pids):
        self.own_sysfs, self.own_pids = own_sysfs, own_pids
        self.name, self.ipv4, self.ipv6, self.link_local = name, f"10.77.0.{number}", f"fd77::{number}", f"fe80::{number}"
        self.names = Path(folder) / f"hosts.{name}"
        self.names.write_text("127.0.0.1 localhost\n")
        self.files = Path(folder) / "nsswitch.conf"
        self.files.write_text("hosts: files\n")
        self.control, theirs = socket.socketpair()
        self.holder = os.fork()
        if self.holder == 0:
            self.control.close()
            self.hold(theirs)
        theirs.close()
        said, tun = socket.recv_fds(self.control, 4096, 1)[:2]
        if not tun:
            os.waitpid(self.holder, 0)
            self.control.close()
            refused, _, why = said.decode().partition(" ")
            if refused == "refused" and (own_sysfs, own_pids) not in self.made:
                raise Unavailable(f"no namespaces or TUN devices here: {why}")
            raise RuntimeError(f"the holder of {name} ended: {why or 'it said nothing'}")
        family, init = said.split()
        self.tun, self.has_ipv6, self.init, self.link = tun[0], family == b"6", int(init), None
        try:
            self.network = os.readlink(f"/proc/{self.holder}/ns/net")
            self.link = self.socket(socket.AF_INET, socket.SOCK_DGRAM)
            if self.has_ipv6:
                self.wait_for_ipv6()
        except BaseException:
            self.end()
            raise
        self.made.add((own_sysfs, own_pids))

    def end(self):
        """Ends the holder, and closes what the test has of the host. The namespaces end then,
        unless another process is in them."""
        os.kill(self.holder, signal.SIGKILL)
        os.waitpid(self.holder, 0)
        os.close(self.tun)
        self.control.close()
        if self.link:
            self.link.close()

    def inside(self):
        """The processes in this host's network, without the holder. Some have no parent here and
        none of the test's variables, for example the sessions of sshd."""
        found = []
        for pid in all_pids():
            with contextlib.suppress(OSError):
                if pid != self.holder and os.readlink(f"/proc/{pid}/ns/net") == self.network:
                    found.append(pid)
        return found

    def hold(self, control):
        try:
            unshare()
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after unshare, which takes it back
            socket.sethostname(self.name)
            mount("none", "/", MS_REC | MS_PRIVATE)
            if self.own_sysfs:
                mount("sysfs", "/sys", 0, kind="sysfs")
            mount(self.names, "/etc/hosts", MS_BIND)
            if Path("/etc/nsswitch.conf").exists():
                mount(self.files, "/etc/nsswitch.conf", MS_BIND)
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, TUNSETIFF, request(DEVICE, "H", IFF_TUN | IFF_NO_PI))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
                fcntl.ioctl(link, SIOCSIFADDR, ipv4_request(DEVICE, self.ipv4))
                fcntl.ioctl(link, SIOCSIFNETMASK, ipv4_request(DEVICE, "255.255.255.0"))
                set_up(link, "lo", True)
                set_up(link, DEVICE, True)
            said = b"6"
            try:
                with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as link:
                    self.add_ipv6(link)
            except OSError:
                said = b"4"
            init = self.hold_pids() if self.own_pids else 0
            socket.send_fds(control, [said + b" %d" % init], [tun])
            os.close(tun)
            while True:
                kind = control.recv(8)
                if not kind:
                    break
                with socket.socket(*struct.unpack("ii", kind)) as made:
                    socket.send_fds(control, [b"."], [made.fileno()])
        except BaseException as error:
            refused = isinstance(error, OSError) and error.errno in REFUSALS
            control.send(f"refused {error}".encode() if refused else f"broken {traceback.format_exc()[-3000:]}".encode())
        finally:
            os._exit(0)

    def hold_pids(self):
        """Starts the process 1 of a process-id namespace, whose /proc is this host's."""
        check(LIBC.unshare(CLONE_NEWPID), "unshare")
        ready, theirs = os.pipe()
        init = os.fork()
        if init:
            os.close(theirs)
            said = os.read(ready, 8)
            if said != b".":
                raise OSError(int(said or 0), "process 1 cannot mount /proc")
            return init
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel reaps orphans
            try:
                mount("proc", "/proc", 0, kind="proc")
            except OSError as error:
                os.write(theirs, b"%d" % error.errno)
                raise
            os.write(theirs, b".")
            while True:
                signal.pause()
        finally:
            os._exit(1)

    def socket(self, family, kind=socket.SOCK_STREAM):
        """A socket in this host's network."""
        self.control.send(struct.pack("ii", family, kind))
        return socket.socket(fileno=socket.recv_fds(self.control, 1, 1)[1][0])

    def add_ipv6(self, link):
        index = struct.unpack_from("i", fcntl.ioctl(link, SIOCGIFINDEX, request(DEVICE)), 16)[0]
        for address in (self.ipv6, self.link_local):
            fcntl.ioctl(link, SIOCSIFADDR, struct.pack("16sIi", ipaddress.IPv6Address(address).packed, 64, index))

    def wait_for_ipv6(self):
        """The kernel puts the addresses into use later, on a thread of its own that waits while
        other namespaces end. A connection made before takes the wrong address for its own, and
        hangs."""
        wanted = {ipaddress.IPv6Address(address).packed.hex() for address in (self.ipv6, self.link_local)}

        def in_use():
            routes = [line.split() for line in Path(f"/proc/{self.holder}/net/ipv6_route").read_text().splitlines()]
            return wanted <= {route[0] for route in routes if int(route[8], 16) & RTF_LOCAL}
        wait_until(in_use, f"{self.name} has {self.ipv6} and {self.link_local}")

    def interface(self, up):
        set_up(self.link, DEVICE, up)
        if up and self.has_ipv6:  # the kernel took these away with the interface
            with self.socket(socket.AF_INET6, socket.SOCK_DGRAM) as link:
                self.add_ipv6(link)
            self.wait_for_ipv6()

    def names_are(self, *lines):
        self.names.write_text("\n".join(("127.0.0.1 localhost", *lines, "")))

    def spawn(self, command, **options):
        """A process on this host; it is killed when the test ends in whatever way. Where the host
        has a process-id namespace, the process is a shell that waits for the command's."""
        if self.init:
            command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *command]
        spaces = [f"/proc/{self.init}/ns/pid"] * bool(self.init) + [space for kind in ("user", "net", "uts", "mnt") for space in [f"/proc/{self.holder}/ns/{kind}"]
                  if os.readlink(space) != os.readlink(f"/proc/self/ns/{kind}")]
        opened = [os.open(space, os.O_RDONLY) for space in spaces]

        def enter():
            for space in opened:
                check(LIBC.setns(space, 0), "setns")
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            return subprocess.Popen(command, preexec_fn=enter, **options)
        finally:
            for space in opened:
                os.close(space)

    def inner_pid(self, process):
        """The process number of the command that [`spawn`] has started; `None` where it has
        ended."""
        if not self.init:
            return process.pid
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: process.poll() is not None or path.read_text(), "the shell has started the command")
        return None if process.poll() is not None else int(path.read_text().split()[0])

    def connections(self):
        """Established TCP connections of this host: pairs (local port, remote port)."""
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.holder}/net/{table}").read_text().splitlines()[1:]:
                local, remote, state = line.split()[1:4]
                if state == "01":
                    found.append((int(local.rsplit(":", 1)[1], 16), int(remote.rsplit(":", 1)[1], 16)))
        return found


class Lab:
    """Hosts and the wire between them: `with Lab(["alpha", "beta"], folder) as lab`. With
    `own_sysfs` the interfaces in a host's /sys are the host's own, which UCX needs. With
    `own_pids` a host sees its own processes alone."""

    def __init__(self, names, folder, own_sysfs=False, own_pids=False):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.processes, self.hosts = [], {}
        self.wire = None
        self.names, self.folder, self.own_sysfs, self.own_pids = names, folder, own_sysfs, own_pids

    def __enter__(self):
        try:
            for number, name in enumerate(self.names, 1):
                self.hosts[name] = Host(name, number, self.folder, self.own_sysfs, self.own_pids)
            for host in self.hosts.values():
                host.names_are(*(f"{other.ipv4} {other.name}" for other in self.hosts.values()))
            self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.wire = os.fork()
            if self.wire == 0:
                try:
                    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    self.control.close()
                    carry(list(self.hosts.values()), theirs)
                finally:
                    os._exit(1)
            theirs.close()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # A command may outlive the process that started it, and keep its pipes open. Somebody may
        # be reading these pipes, so the commands end before the pipes are closed.
        try:
            wait_until(lambda: not self.kill_inside(), "the processes in the networks of the hosts end")
        finally:
            kill_all(self.processes)
            if self.wire:
                os.kill(self.wire, signal.SIGKILL)
                os.waitpid(self.wire, 0)
                self.control.close()
            for host in self.hosts.values():
                host.end()

    def kill_inside(self):
        """Kills the processes that are in the networks of the hosts. Gives those that had not
        ended."""
        living = [pid for host in self.hosts.values() for pid in host.inside() if not gone(pid)]
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return living

    def pids(self):
        """The processes on the hosts, and the wire."""
        inits = [host.init for host in self.hosts.values() if host.init]
        return [process.pid for process in self.processes] + ([self.wire] if self.wire else []) + inits

    def has_ipv6(self):
        return all(host.has_ipv6 for host in self.hosts.values())

    def spawn(self, host, command, **options):
        process = self.hosts[host].spawn(command, **options)
        self.processes.append(process)
        return process

    def ask(self, *words):
        """Sends an order to the wire, and gives its answer."""
        self.control.send(" ".join(map(str, words)).encode())
        return self.control.recv(64).decode()

    def tell(self, *words):
        answer = self.ask(*words)
        assert answer == "done", f"the wire has answered {answer!r} to {words} (an empty answer: the wire has ended)"

    def cut(self, host):
        """From now on nothing comes from or to this host."""
        self.tell("cut", self.hosts[host].ipv4)

    def heal(self, *hosts):
        for host in hosts:
            self.tell("heal", self.hosts[host].ipv4)

    def weather(self, delay, loss, seed):
        """Delays every packet by this many seconds, and loses this share of them."""
        self.tell("weather", delay, loss, seed)

    def link(self, one, other, delay):
        """Delays packets between these two hosts by this many seconds."""
        self.tell("link", self.hosts[one].ipv4, self.hosts[other].ipv4, delay)

    def part(self, *hosts):
        """From now on nothing passes between these hosts and the others. Without hosts, the
        partition ends."""
        self.tell("part", *(self.hosts[host].ipv4 for host in hosts))

    def watch(self, text):
        """From now on the wire counts the packets in which these bytes are."""
        self.tell("watch", text.hex())

    def seen(self):
        """How many packets have had the watched bytes, and how many bytes all packets have had
        since then."""
        return tuple(map(int, self.ask("seen").split()))


def addresses(packet):
    """Source and destination of an IP packet."""
    if packet[0] >> 4 == 4:
        return packet[12:16], packet[16:20]
    return packet[8:24], packet[24:40]


def carry(hosts, control):
    """The wire: hands packets over until the test closes its end."""
    where, number = {}, {}
    for host in hosts:
        for address in (host.ipv4, host.ipv6, host.link_local):
            where[ipaddress.ip_address(address).packed] = host.tun
        number[host.ipv4] = host.tun
    cut, side, links, delay, loss, chance = set(), set(), {}, 0.0, 0.0, random.Random(0)
    watched, seen, passed = None, 0, 0
    under_way, order = [], 0
    poll = select.poll()
    poll.register(control, select.POLLIN)
    for host in hosts:
        poll.register(host.tun, select.POLLIN)
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, tun, packet = heapq.heappop(under_way)
            if tun not in cut:
                passed += len(packet)
                seen += watched is not None and watched in packet
                try:
                    os.write(tun, packet)
                except OSError:
                    pass  # the interface is down
        wait = None if not under_way else max(1, int(1000 * (under_way[0][0] - now)) + 1)
        for ready, _ in poll.poll(wait):
            if ready == control.fileno():
                words, answer = control.recv(256).decode().split(), "done"
                if not words:
                    return
                if words[0] == "cut":
                    cut.add(number[words[1]])
                elif words[0] == "heal":
                    cut.discard(number[words[1]])
                elif words[0] == "part":
                    side = {number[word] for word in words[1:]}
                elif words[0] == "link":
                    links[frozenset(number[word] for word in words[1:3])] = float(words[3])
                elif words[0] == "watch":
                    watched, seen, passed = bytes.fromhex(words[1]), 0, 0
                elif words[0] == "seen":
                    answer = f"{seen} {passed}"
                else:
                    delay, loss, chance = float(words[1]), float(words[2]), random.Random(int(words[3]))
                control.send(answer.encode())
                continue
            for _ in range(64):
                try:
                    packet = os.read(ready, 1 << 16)
                except OSError:
                    break
                source, destination = addresses(packet)
                tun = where.get(destination)
                if tun is None or tun in cut or ready in cut or (tun in side) != (ready in side) or chance.random() < loss:
                    continue
                order += 1
                longer = links.get(frozenset((tun, ready)), 0.0)
                heapq.heappush(under_way, (time.monotonic() + delay + longer, order, tun, packet))
