"""One job of tests/c/programs/phases.c under plain environment variables: starting it, reading
what its ranks say, ending it."""

import os
import selectors
import signal
import subprocess
import time

from support.processes import environment, starvation, waits

# The variable by which the processes of one job are found.
MARK = "LIBDEVICEMESH_JOB"
# Ranks with different values of this variable share no memory.
HOST = "DM_HOSTCCL_HOST"


class Rank:
    """A rank's process and what it has said."""

    def __init__(self, number, process):
        self.number, self.process = number, process
        self.text, self.open = b"", True
        self.phases = []          # the phases that it announced: (name, moment in seconds)
        self.dying = None         # the moment when it said that it dies
        self.error = None         # (status, moment in seconds, message)
        self.done = False         # whether it said that it came to the end
        self.other = []           # whatever else it wrote: each line is a failure

    def take(self, data):
        self.text += data
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            self.read(line.decode(errors="replace"))

    def read(self, line):
        words = line.split(" ", 3)
        if words[0] == "phase" and len(words) == 3:
            self.phases.append((words[1], float(words[2])))
        elif words[0] == "error" and len(words) == 4 and self.error is None:
            self.error = (words[1], float(words[2]), words[3])
        elif words[0] == "dying" and len(words) == 3:
            self.dying = float(words[2])
        elif words[0] == "done":
            self.done = True
        else:
            self.other.append(line)

    def phase(self, at=None):
        """The last phase that the rank announced (until the moment `at`), and when."""
        known = [entry for entry in self.phases if at is None or entry[1] <= at]
        return known[-1] if known else ("start", 0.0)

    def running(self):
        return self.process.poll() is None


class Job:
    """Ranks of one job. As a context manager it leaves none behind.

    `held` are ranks that are not started yet; `die` is the value of DM_DIE, which phases.c
    explains. `lab` are the hosts of a job on several (tests/hostranks.py), and `places` the host of
    each rank."""

    def __init__(self, program, size, port, timeout_ms, rounds=0, die=None, held=(), file=None, lab=None, places=None, variables=None):
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}-{port}"
        self.lab, self.places = lab, places
        self.program, self.size, self.port = program, size, port
        self.variables = {
            MARK: self.mark, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DM_ROUNDS": rounds,
            "DM_TIMEOUT_MS": timeout_ms
        }
        if die:
            self.variables["DM_DIE"] = die
        if lab:
            self.variables["MASTER_ADDR"] = lab.address()[0]
        self.variables.update(variables or {})
        if file:
            self.variables["DM_INIT"] = f"file://{file}"
        self.selector = selectors.DefaultSelector()
        self.ranks = {}
        self.waits = {}
        self.started = time.monotonic()
        for number in range(size):
            if number not in held:
                self.start(number)

    def start(self, number):
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
               "env": environment(**self.variables, RANK=number, LOCAL_RANK=number, **({HOST: self.places[number]} if self.lab else {}))}
        process = self.lab.spawn(self.places[number], [self.program], **how) if self.lab else subprocess.Popen([self.program], **how)
        self.ranks[number] = Rank(number, process)
        self.selector.register(process.stdout, selectors.EVENT_READ, self.ranks[number])

    def pump(self, condition, until):
        """Reads what the ranks say until the condition holds. False when the moment `until`
        comes first."""
        while not condition():
            left = until - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self.selector.select(min(left, 0.05)):
                data = os.read(key.fd, 1 << 16)
                if data:
                    key.data.take(data)
                else:
                    key.data.open = False
                    self.selector.unregister(key.fileobj)
        return True

    def pids(self):
        """The processes whose waits for a processor make the ranks late: the ranks, and this
        one."""
        return [os.getpid(), *(rank.process.pid for rank in self.ranks.values())]

    def begin_watch(self):
        """Has `starved` count from now on."""
        self.waits = waits(self.pids())

    def starved(self):
        """Seconds for which the ranks have waited for a processor. Nobody may have waited for the
        end of a rank since, because the time of a process is lost then."""
        return starvation(self.waits, self.pids())

    def stacks(self, number):
        """The stacks of a rank's threads, which show where it hangs."""
        pid = self.ranks[number].process.pid
        try:
            shown = subprocess.run(
                ["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "thread apply all bt 12"], capture_output=True,
                text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no stacks of rank {number}: {error}"
        lines = [line[:160] for line in shown.splitlines() if line.startswith(("#", "Thread")) and "/library/" not in line]
        return f"stacks of rank {number} (pid {pid}):\n" + "\n".join(lines)

    def end(self):
        for rank in self.ranks.values():
            if rank.running():
                rank.process.send_signal(signal.SIGKILL)
        for rank in self.ranks.values():
            rank.process.wait(timeout=60)
        self.pump(lambda: not any(rank.open for rank in self.ranks.values()), time.monotonic() + 5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        for rank in self.ranks.values():
            rank.process.stdout.close()
        self.selector.close()
