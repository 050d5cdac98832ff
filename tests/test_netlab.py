"""The hosts of the tests (tests/netlab.py)."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

import netlab
from netlab import Lab
from support.pinned import Unavailable
from support.processes import gone, wait_until


@pytest.mark.parametrize("own_pids", [False, True])
def test_a_lab_ends_while_a_thread_reads_what_its_processes_write(tmp_path, own_pids):
    try:
        lab = Lab(["alpha", "beta"], tmp_path / "lab", own_pids=own_pids).__enter__()
    except Unavailable as error:
        pytest.skip(str(error))
    written = []
    try:
        command = ["/bin/sh", "-c", "echo begun; exec sleep 1000"]
        process = lab.spawn("alpha", command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        reader = threading.Thread(target=lambda: written.extend(process.stdout), daemon=True)
        reader.start()
        until = time.monotonic() + 30
        while not (lab.hosts["alpha"].inner_pid(process) and reader.is_alive()):
            assert time.monotonic() < until, "the command on alpha does not begin, or nobody reads its output"
            time.sleep(0.01)
    finally:
        ending = threading.Thread(target=lab.__exit__, daemon=True)
        ending.start()
        ending.join(30)
    assert not ending.is_alive(), "the lab waits for a process that it has to end"
    reader.join(30)
    assert not reader.is_alive() and set(written) <= {"begun\n"}


def test_a_process_that_leaves_its_parent_and_its_variables_ends_with_the_lab(tmp_path):
    """The sessions of sshd do so."""
    with Lab(["alpha"], tmp_path / "lab") as lab:
        alpha = lab.hosts["alpha"]
        assert lab.spawn("alpha", ["/bin/sh", "-c", "setsid -f env -i sleep 1000"], stdin=subprocess.DEVNULL).wait(30) == 0
        command = lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes()
        wait_until(lambda: [command(pid) for pid in alpha.inside()] == [b"sleep\x001000\x00"], "the process has begun")
        (left,) = alpha.inside()
    assert gone(left) and alpha.inside() == []


@pytest.mark.parametrize("own_pids", [False, True])
def test_nothing_of_a_lab_stays_open(tmp_path, own_pids):
    opened = lambda: sorted(os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    kinds = lambda: [link for link in opened() if link == "/dev/net/tun" or link.startswith("socket:")]
    before = kinds()
    with Lab(["alpha", "beta"], tmp_path / "lab", own_pids=own_pids):
        assert kinds().count("/dev/net/tun") == before.count("/dev/net/tun") + 2
    assert kinds() == before


def test_a_host_that_breaks_is_a_failure_and_no_skip(tmp_path, monkeypatch):
    with Lab(["alpha"], tmp_path / "lab"):
        pass
    monkeypatch.setattr(netlab, "ipv4_request", lambda name, address: 1 / 0)
    with pytest.raises(RuntimeError, match=r"(?s)the holder of alpha ended: Traceback.*ZeroDivisionError"):
        Lab(["alpha"], tmp_path / "lab").__enter__()


def test_a_host_that_was_possible_before_is_a_failure_and_no_skip(tmp_path, monkeypatch):
    def refused():
        raise PermissionError(1, "unshare: not allowed")
    monkeypatch.setattr(netlab, "unshare", refused)
    monkeypatch.setattr(netlab.Host, "made", set())
    with pytest.raises(Unavailable, match="no namespaces or TUN devices here: .*unshare: not allowed"):
        Lab(["alpha"], tmp_path / "lab").__enter__()
    monkeypatch.setattr(netlab.Host, "made", {(False, False)})
    with pytest.raises(RuntimeError, match="the holder of alpha ended: .*unshare: not allowed"):
        Lab(["alpha"], tmp_path / "lab").__enter__()
