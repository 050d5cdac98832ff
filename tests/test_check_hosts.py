"""`devicemesh check` on several hosts: the slowest pair of ranks and the slowest host. The hosts
are names on the loopback device (every machine can run these), or those of tests/netlab.py.

Every case takes some seconds, in which it verifies and measures."""

import re
import signal
import subprocess
import threading
import time

import pytest

from hostranks import HOST, Network
from support.checks import clean, jobs, report
from support.paths import TOOL

# Measuring takes as long as the processors are busy with other work; each wait has a deadline of
# its own.
pytestmark = pytest.mark.timeout(400)
HOSTS = ("alpha", "beta", "gamma", "delta")
SMALL = ("--op", "all_reduce", "--repeats", "3", "--timeout", "240", "--device", "cpu")


@pytest.fixture
def job(free_port):
    yield from jobs(free_port)


def test_pairs_within_and_between_hosts(job):
    ranks = job(4, *SMALL, "--sizes", "4B,64KiB", more=lambda rank: {HOST: HOSTS[rank // 2]})
    assert ranks.codes() == [0] * 4, ranks
    said = ranks.outputs[0]
    assert "\n4 ranks on 2 hosts of one machine, started by " in said and "\n  alpha: ranks 0-1\n  beta: ranks 2-3\n" in said, said
    for pattern in (r"^pairs within hosts, 4 B: [\d.]+ \w+, median of 2 pairs$",
                    r"^pairs within hosts, 64 KiB: [\d.]+ GB/s, median of 2 pairs$",
                    r"^  slowest pair: rank (0 on alpha - rank 1 on alpha|2 on beta - rank 3 on beta), [\d.]+ GB/s$",
                    r"^pairs between hosts of one machine, 4 B: [\d.]+ \w+, median of 2 pairs$",
                    r"^  slowest pair: rank (0 on alpha - rank 2 on beta|1 on alpha - rank 3 on beta), [\d.]+ GB/s$"):
        assert re.search(pattern, said, re.M), f"{pattern}\n{said}"


class Hobbled:
    """Stops a process for most of the time, as a host that is busy with other work does."""

    def __init__(self, process):
        self.process, self.over = process, threading.Event()
        self.thread = threading.Thread(target=self.work)

    def work(self):
        while not self.over.is_set():
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(0.02)
            self.process.send_signal(signal.SIGCONT)
            time.sleep(0.001)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


@pytest.mark.long
@pytest.mark.alone
def test_a_slow_host_is_named(job):
    ranks = job(4, *SMALL, "--sizes", "1MiB", "--json", "--fail-slow", more=lambda rank: {HOST: HOSTS[rank]})
    ranks.until(0, "] measuring pairs")
    with Hobbled(ranks.ranks[2]):
        ranks.until(0, "] measuring each rank alone")
    codes = ranks.codes()
    told = report(ranks.outputs[0])
    slow = {slow["host"]: slow for slow in told["slow_hosts"]}
    assert codes == [4] * 4 and told["verdict"] == "slow" and "gamma" in slow, told
    assert slow["gamma"]["pairs"] == 3 and slow["gamma"]["times"] == max(host["times"] for host in slow.values()), slow
    assert "gamma" in told["pairs"][-1]["slowest"]["hosts"], told["pairs"]
    assert min(told["hosts"], key=lambda host: host["pair_gbps"])["name"] == "gamma", told["hosts"]


@pytest.mark.long
@pytest.mark.alone
def test_a_slow_link_is_named(tmp_path):
    """Packets between two of four hosts take 20 ms. The report names both ends of the link."""
    with Network(dict.fromkeys(HOSTS), tmp_path) as lab:
        lab.link("alpha", "gamma", 0.02)
        address, port = lab.address()
        place = {"WORLD_SIZE": 4, "LOCAL_RANK": 0, "MASTER_ADDR": address, "MASTER_PORT": port}
        ranks = [lab.spawn(host, [str(TOOL), "check", *SMALL, "--sizes", "4B"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           env=clean(RANK=rank, **{HOST: host}, **place)) for rank, host in enumerate(HOSTS)]
        told = [rank.communicate(timeout=240) for rank in ranks]
    said = told[0][0]
    assert [rank.returncode for rank in ranks] == [0] * 4, told
    found = re.findall(r"^slow: (rank 0 on alpha - rank 2 on gamma) take up to ([\d.]+) times as long: ([\d.]+) ms with 4 B, "
                       r"median of the other pairs between hosts of one machine [\d.]+ \w+$", said, re.M)
    assert len(found) == 1 and float(found[0][1]) > 3 and float(found[0][2]) > 20, said
    assert "  slowest pair: rank 0 on alpha - rank 2 on gamma," in said, said
