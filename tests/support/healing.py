"""Jobs of examples/recover.c under `devicemesh run`, of which a test kills ranks."""

import os
import re
import signal
import subprocess

from support.paths import TOOL
from support.processes import end_group, environment, words

STEPS = 400


class Job:
    """A job of `devicemesh run`, whose tool serves the store."""

    def __init__(self, program, size, spares=0, steps=STEPS, patience=0, options=("--failure-grace", "100"), **variables):
        command = words([TOOL, "run", "-n", size, *options, "--", *program, steps, spares, patience])
        self.process = subprocess.Popen(command, env=environment(**variables), text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, start_new_session=True)
        self.lines, self.pids, self.size, self.spares = [], {}, size, spares
        while len(self.pids) < size:
            self.read()

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
            output, _ = self.process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            output, _ = end_group(self.process)
            raise AssertionError("".join(self.lines) + output + "\nnot done after 150 s") from None
        self.lines.append(output)
        said = "".join(self.lines)
        last = {rank: re.findall(rf"^rank {rank}:? (.*)$", said, re.M)[-1] for rank in range(self.size) if rank not in killed}
        return last, said
