"""Containers of one machine, made by unshare: ranks in PID namespaces of their own, under users of
their own, and in both, which share the network. They cannot open each other's memory, so they are
hosts of their own. One case has the variables of an indexed job of Kubernetes."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from hostranks import HOST, HostJob, Loopback, Watch, kill
from support.paths import LIBRARY, TOOL
from support.pinned import Unavailable
from support.processes import environment, kill_all

# The words that put a command into a container of its own. unshare's own process stays outside a
# new PID namespace, and kills the rank when it is killed itself.
WAYS = {
    "pid": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "user": ["setpriv", "--reuid", "{user}", "--regid", "{user}", "--clear-groups"],
    "user namespace": ["unshare", "--user", "--map-root-user"],
    "pid and user": ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"],
}


class Containers(Loopback):
    """Names of containers instead of hosts. All ranks of one name are in one container."""

    def __init__(self, port, way):
        super().__init__(port)
        self.way, self.names, self.folder = way, [], None

    def __exit__(self, *what):
        super().__exit__(*what)
        if self.folder:
            shutil.rmtree(self.folder)

    def reachable(self, program):
        """A copy of the program, beside a copy of the library, which every user can reach. The
        checkout may lie below a folder of mode 0700, as that of mktemp -d, and so may TMPDIR."""
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="dm-containers-", dir="/tmp"))
            self.folder.chmod(0o755)
            for file in (program, next(LIBRARY.glob("libdevicemesh.so.*"))):
                shutil.copy(file, self.folder)
        return self.folder / Path(program).name

    def spawn(self, host, command, **options):
        if host not in self.names:
            self.names.append(host)
        words = [word.format(user=60000 + self.names.index(host)) for word in WAYS[self.way]]
        variables = {name: value for name, value in options.pop("env").items() if name != HOST}
        if self.way == "user":
            command = [self.reachable(command[0]), *command[1:]]
            variables["LD_LIBRARY_PATH"] = str(self.folder)
        return super().spawn(host, [*words, *command], env=variables, **options)


def possible(way):
    """Skips the test where this machine makes no such container."""
    words = [word.format(user=60000) for word in WAYS[way]]
    if not shutil.which(words[0]):
        raise Unavailable(f"no {words[0]} here (Debian: apt-get install util-linux)")
    tried = subprocess.run([*words, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        raise Unavailable(f"{' '.join(words)}: {tried.stderr.strip()}")


@pytest.fixture
def across(programs):
    return programs.c("tests/c/programs/across.c")


@pytest.fixture
def job(across, free_port):
    labs = []

    def start(way, places, **how):
        possible(way)
        labs.append(Containers(free_port(), way).__enter__())
        return HostJob(across, labs[-1], places, **how)

    yield start
    for lab in labs:
        lab.__exit__()


@pytest.mark.parametrize("way", WAYS)
def test_containers_are_hosts(job, way):
    """Each rank in a container of its own."""
    one = job(way, "one two three")
    one.do("join", "init", "all 1", "all 50001", "finalize")


@pytest.mark.parametrize("way", ["pid", "pid and user"])
def test_a_container_that_ends(job, way):
    """A killed container is noticed as a killed process is."""
    one = job(way, "one two three", timeout=60)
    one.do("join", "init", "all 1001")
    one.run("forever 1000")
    watch = Watch(one.lab)
    kill(one.ranks[2])
    for rank in one.ranks[:2]:
        watch.knows(rank, "PEER_LOST", 1.0, names=[2])


@pytest.mark.parametrize("secret", [None, "hush"], ids=["open", "secret"])
def test_indexed_job_of_kubernetes(across, free_port, secret):
    """The variables that examples/kubernetes.yaml gives its pods. Each pod is a container."""
    possible("pid")
    port = free_port()
    with Containers(port, "pid") as lab:
        places = "one two three four"

        def pod(rank, _):
            return {"JOB_COMPLETION_INDEX": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                    "HOSTNAME": f"job-{rank}", "KUBERNETES_SERVICE_HOST": "10.0.0.1", **({"DM_STORE_SECRET": secret} if secret else {})}
        one = HostJob(across, lab, places, each=pod, without=("RANK", "LOCAL_RANK"))
        one.do("join", "init", "all 1001", "finalize")


def test_the_tool_in_two_containers(programs, free_port):
    """Two pods with two ranks each, whose tools meet at the first one."""
    possible("pid")
    program = programs.c("examples/hello_mesh.c", name="hello-in-containers")
    options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-n", "2"]
    pods = [
        subprocess.Popen([*WAYS["pid"], TOOL, "run", *options, f"--node-rank={index}", "--", program], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(JOB_COMPLETION_INDEX=index))
        for index in range(2)
    ]
    try:
        said = "".join(pod.communicate(timeout=60)[0] for pod in pods)
    finally:
        kill_all(pods)
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert re.search(r"^rank 3 at \(dp=1, tp=1\): sum over tp 5, over dp 4$", said, re.M), said


def test_errors_say_where_ranks_of_another_container_are(programs, free_port):
    """A process of one container cannot read the recordings of the other one. The rank that is late
    prints nothing. Its neighbour prints the message."""
    possible("pid")
    program = programs.c("tests/c/programs/reports.c")
    both = 'LOCAL_RANK=0 RANK=$1 "$0" & first=$!; LOCAL_RANK=1 RANK=$2 "$0" & wait $! && wait $first'
    env = environment(WORLD_SIZE=4, LOCAL_WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    started = [subprocess.Popen([*WAYS["pid"], "sh", "-c", both, str(program), str(first), str(first + 1)], env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for first in (0, 2)]
    try:
        said = [container.communicate(timeout=60)[0] for container in started]
    finally:
        kill_all(started)
    assert [container.returncode for container in started] == [0, 0], said
    late = re.search("rank 1 late: (.*)", said[0]).group(1)
    assert "; rank 3 is at all-reduce 2 of mesh/dp" in late, late
    assert "; this rank is in all-reduce 3 of mesh/dp" in late, late
    first = ("; the first call of mesh4/dp in which these ranks differ is call 2: "
             "rank 0 all-reduce of 5 float32 (sum), rank 2 all-reduce of 6 float32 (sum)")
    for rank, text in ((0, said[0]), (2, said[1])):
        different = re.search(f"rank {rank} different: (.*)", text).group(1)
        assert first in different, different
