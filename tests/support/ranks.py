"""Ranks that are started by plain environment variables, with no launcher to end them."""

import subprocess

from .processes import environment, kill_all, words


class Ranks:
    """The ranks of one job, in their order. `end` kills those that still run."""

    def __init__(self, command, size, port, variables=None, each=None, **popen):
        """`each(rank)` gives further variables of one rank; `popen` goes to subprocess.Popen."""
        self.port = port
        self.processes = []
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **popen}
        for rank in range(size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = environment(**{**place, **(variables or {}), **(each(rank) if each else {})})
            self.processes.append(subprocess.Popen(words(command), env=env, **how))

    def __iter__(self):
        return iter(self.processes)

    def __getitem__(self, rank):
        return self.processes[rank]

    def outputs(self, timeout=120, code=0):
        """Waits until all have ended with this exit code, and gives the output of each."""
        outputs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        codes = [process.returncode for process in self.processes]
        assert codes == [code] * len(codes), f"exit codes {codes}, expected {code}:\n" + "".join(outputs)
        return outputs

    def end(self):
        kill_all(self.processes)
