"""A Slurm of this machine alone: munged, slurmctld and a slurmd for each of two nodes, with
their own configuration, files and ports under target/."""

import os
import shutil
import socket
import subprocess
import time

from support.ports import Ports

PROGRAMS = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo"]
CONFIGURATION = """\
ClusterName=interop
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=node[001-002] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Its nodes are node001 and node002. A program finds those names through `resolving`."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        # The ports of slurmctld and of the two slurmd, which nobody else gets before `stop`.
        self.ports = Ports()
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.nodes = ["node001", "node002"]
        self.resolving = ["env", "LD_PRELOAD=libnss_wrapper.so", f"NSS_WRAPPER_HOSTS={folder}/hosts"]

    def start(self):
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        configuration = CONFIGURATION.format(ports=[self.ports.free() for _ in range(3)], folder=self.folder, host=socket.gethostname())
        (self.folder / "slurm.conf").write_text(configuration)
        (self.folder / "hosts").write_text("127.0.0.1 node001\n127.0.0.2 node002\n")
        # --force: the folder belongs to whoever has the checkout, which munge would not trust.
        kinds = ("socket", "key-file", "pid-file", "seed-file")
        files = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in kinds]
        self.daemon("munged", "--foreground", "--force", *files)
        self.wait_for("munge's socket", (self.folder / "munge.socket").exists)
        self.daemon("slurmctld", "-D", "-c")
        for node in self.nodes:
            for kind in ("spool", "tmp"):
                (self.folder / f"{kind}.{node}").mkdir()
            self.daemon("slurmd", "-D", "-N", node)
        self.wait_for("both nodes to be idle", self.idle)

    def daemon(self, name, *arguments):
        with open(self.folder / f"{name}.{len(self.processes)}.out", "wb") as output:
            self.processes.append(subprocess.Popen(
                [shutil.which(name), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **self.environment}))

    def wait_for(self, what, condition):
        until = time.monotonic() + 120
        while not condition():
            ended = [process.args[0] for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() > until:
                logs = "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(self.folder.glob("*.out")))
                raise RuntimeError(f"no Slurm: waited for {what}; ended: {ended}\n{logs}")
            time.sleep(0.1)

    def idle(self):
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %t"], capture_output=True, text=True, timeout=20,
                              env={**os.environ, **self.environment})
        return sorted(done.stdout.split("\n")[:-1]) == sorted(f"{node} idle" for node in self.nodes)

    def stop(self):
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []
        self.ports.close()
