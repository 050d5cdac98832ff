"""The functions with which the tests run processes (tests/support/processes.py)."""

import os
import signal
import subprocess
import threading

import pytest

from support import processes
from support.processes import gone, kill_all, rest_of, starvation, waits


def test_an_output_that_another_process_holds_is_a_failure_and_no_hang(spawn, monkeypatch):
    monkeypatch.setattr(processes, "READERS_END", 0.2)
    process = spawn("/bin/sh", "-c", "sleep 1000 & echo $!")
    child = int(process.stdout.readline())
    try:
        with pytest.raises(AssertionError, match="an output is still open"):
            rest_of(process, 1)
        ending = threading.Thread(target=kill_all, args=([process],), daemon=True)
        ending.start()
        ending.join(30)
        assert not ending.is_alive() and not gone(child), "kill_all waits for a process that it does not know"
    finally:
        os.kill(child, signal.SIGKILL)
    for reader in process.readers:
        reader.join(30)
    assert process.stdout.closed and process.stderr.closed


def test_the_waits_of_a_process_that_has_ended_take_nothing_from_the_others():
    with subprocess.Popen(["sleep", "1000"]) as ended:
        pids = [os.getpid(), ended.pid]
        before = waits(pids)
        assert {task.parent.name for task in before} >= set(map(str, pids))
        # The process now looks as if it had waited for a minute.
        before = {task: seconds + 60 * (task.parent.name == str(ended.pid)) for task, seconds in before.items()}
        ended.kill()
    assert 0 <= starvation(before, pids) < 60
    assert starvation({task: seconds - 1 for task, seconds in waits(pids).items()}, pids) >= 1
