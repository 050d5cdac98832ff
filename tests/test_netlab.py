"""The hosts of the tests (tests/netlab.py)."""

import subprocess
import threading
import time

import pytest

from netlab import Lab
from support.pinned import Unavailable


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
