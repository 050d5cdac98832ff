"""Jobs of examples/recover.c under `devicemesh run`. A test kills some of their ranks."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import time

from support.paths import LINK, TOOL
from support.processes import end_group, environment, rest_of, state_and_parent, words

# The job must not be done before the ranks are killed. It stands still while the test does not read
# what it says: at most 8 KiB of lines are on their way, which are about 600 steps of 6 ranks.
STEPS = 2000
ROOM = 4096


class Job:
    """A job of `devicemesh run`, whose tool serves the store."""

    def __init__(self, program, size, spares=0, steps=STEPS, patience=0, options=("--failure-grace", "100"), room=ROOM, **variables):
        command = words([TOOL, "run", "-n", size, *options, "--", *program, steps, spares, patience])
        self.process = subprocess.Popen(command, env=environment(**variables), text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, start_new_session=True)
        if room is not None:
            fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, room)
        self.lines, self.pids, self.size, self.spares = [], {}, size, spares
        while len(self.pids) < size:
            self.read()
        # A spare waits when it has slept for a while. After 30 s the test goes on without waiting.
        for rank in range(size - spares, size):
            asleep, until = 0, time.monotonic() + 30
            while asleep < 10 and time.monotonic() < until:
                try:
                    asleep = asleep + 1 if state_and_parent(self.pids[rank])[0] == "S" else 0
                except FileNotFoundError:
                    output, _ = rest_of(self.process, 30)
                    raise AssertionError(f"spare rank {rank} has ended:\n{''.join(self.lines)}{output}") from None
                time.sleep(0.002)

    def read(self):
        line = self.process.stdout.readline()
        assert line, "the job ended:\n" + "".join(self.lines)
        self.lines.append(line)
        found = re.match(r"rank (\d+) is process (\d+)", line)
        if found:
            self.pids[int(found.group(1))] = int(found.group(2))
        return line

    def wait_for(self, pattern):
        while not re.search(pattern, self.read()):
            pass

    def kill(self, rank):
        """Returns whether the rank was still there."""
        try:
            os.kill(self.pids[rank], signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def end(self, killed):
        """Waits for the end. Returns what each rank that was not killed has said last."""
        try:
            output, _ = rest_of(self.process, 150)
        except subprocess.TimeoutExpired as late:
            self.process.terminate()
            raise AssertionError("".join(self.lines) + (late.output or "") + "\nnot done after 150 s") from None
        self.lines.append(output)
        said = "".join(self.lines)
        last = {rank: re.findall(rf"^rank {rank}:? (.*)$", said, re.M)[-1] for rank in range(self.size) if rank not in killed}
        return last, said


def jobs(programs, **same):
    """The body of a fixture: a function that starts jobs of examples/recover.c, all with the
    options `same`. The words `before` stand before the program. The jobs end with the test."""
    program = programs.c("examples/recover.c", name="recover-example", link=LINK)
    started = []

    def start(*arguments, before=(), **options):
        started.append(Job([*before, program], *arguments, **same, **options))
        return started[-1]

    yield start
    for job in started:
        if job.process.poll() is None:
            end_group(job.process)


def killed_once(program, moment, **variables):
    """Runs a program on three ranks, and kills rank 1 after the first line that begins with
    `moment`. Rank 1 is started again, and the job must end well. Gives what the ranks have
    said. On a busy machine rank 1 may be done before it is killed. Then another job is tried."""
    for _ in range(5):
        said = kill_once(program, moment, **variables)
        if said.count("rank 1 is process") == 2 or "rank 1 is done" not in said:
            break
    assert said.count("rank 1 is process") == 2, said
    return said


def kill_once(program, moment, **variables):
    command = words([TOOL, "run", "-n", 3, "--restart", "rank", "--max-restarts", 2, "--", *program])
    job = subprocess.Popen(command, env=environment(**variables), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    said, is_killed = "", False
    try:
        for line in job.stdout:
            said += line
            if line.startswith(moment) and not is_killed:
                is_killed = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(re.search(r"rank 1 is process (\d+)", said).group(1)), signal.SIGKILL)
        assert job.wait(60) == 0 and is_killed, said
    finally:
        if job.poll() is None:
            end_group(job)
    return said


def check_comes_back(program, **variables):
    """Runs one of the small examples (examples/recover.py, recover.rs and that in Go), whose rank
    1 is killed. It comes back as a new process, and the line is that of a job that nobody
    disturbs."""
    # A step takes over 1 ms. The job must not be done before the rank is killed.
    said = killed_once([*program, 3000], "rank 0 is at step 100\n", **variables)
    done = re.findall(r"^rank (\d) is done: y = 3\.000 x -1\.000 after step 3000$", said, re.M)
    assert sorted(done) == ["0", "1", "2"], said
    assert len(re.findall(r"^rank [02] is in epoch 1", said, re.M)) == 2, said
