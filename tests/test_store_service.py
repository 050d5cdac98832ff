"""`devicemesh store`: one store for the ranks of a job that no `devicemesh run` has started."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from support.paths import LIBRARY, ROOT, TOOL
from support.processes import run, wait_until
from support.tool import HERE, ends

RANK = """
import os
from ours import Mesh, say
mesh = Mesh(1, 2)
say(f"sum {mesh.sum('tp', 20)}")
if not os.environ.get("CRASH"):
    mesh.finalize()
"""


@pytest.fixture
def serve(spawn, free_port):
    """Starts a store, waits until it is there, and gives it with its port."""
    def begin(said="for all clients that reach it (DM_STORE_SECRET is not set)", **variables):
        port = free_port()
        store = spawn(TOOL, "store", "--listen", f"127.0.0.1:{port}", **variables)
        assert store.stdout.readline() == f"serving tcp://127.0.0.1:{port}, which this host alone reaches, {said}\n", store.stderr.read()
        return store, port

    return begin


@pytest.fixture
def rank(spawn):
    """Starts a rank of two that meets the other one in the store at a port."""
    def begin(number, port, **more):
        return spawn(sys.executable, "-c", RANK, RANK=number, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, DM_LIBRARY=LIBRARY / "libdevicemesh.so",
                     TORCHELASTIC_USE_AGENT_STORE="True", PYTHONPATH=ROOT / "tests/interop", **more)

    return begin


def connections_of(pid, port):
    """The connections to a port that a process on this host has not closed."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    established, closed_by_the_client = "01", "08"
    return [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] in (established, closed_by_the_client)]


def test_one_job_after_the_other_meets_in_one_store(serve, rank):
    """The second job ends without leaving its world, as a job that crashes does."""
    store, port = serve()
    for crash in ("", "1", ""):
        for process in [rank(number, port, CRASH=crash) for number in (0, 1)]:
            assert ends(process, 0)[0] == "sum 40.0\n"
    wait_until(lambda: not connections_of(store.pid, port), "the store has closed its ends of the connections")
    store.terminate()
    out, err = ends(store, 0)
    assert (out, err) == ("", "devicemesh store: got signal 15 (SIGTERM), with 0 connections open\n")


def test_the_ranks_learn_that_the_store_was_killed(serve, rank):
    store, port = serve()
    alone = rank(0, port, DM_LOG="debug")
    for said in alone.stderr:
        if "has met rank 0" in said:
            break
    store.kill()
    _, err = ends(alone, 1)
    assert f"tcp://127.0.0.1:{port}" in err.splitlines()[-1], err


def test_only_clients_with_the_secret_get_in(serve, rank):
    _, port = serve("for clients that have the secret of DM_STORE_SECRET", DM_STORE_SECRET="hush")
    _, err = ends(rank(0, port), 1)
    assert "DM_STORE_SECRET" in err.splitlines()[-1], err
    for process in [rank(number, port, DM_STORE_SECRET="hush") for number in (0, 1)]:
        assert ends(process, 0)[0] == "sum 40.0\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_end_it_well(serve, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and the service ignores it too")
    store, _ = serve()
    store.send_signal(number)
    assert f"got signal {int(number)} ({number.name})" in ends(store, 0)[1]


def test_a_store_that_cannot_listen_says_why(serve):
    _, port = serve()
    second = run(TOOL, "store", "--listen", f"127.0.0.1:{port}", code=1)
    assert second.stderr.startswith(f"devicemesh store: port {port} of {HERE} is in use by `") and second.stderr.endswith("choose another port with --listen\n"), second.stderr
    elsewhere = run(TOOL, "store", "--listen", "192.0.2.1", code=1).stderr
    assert elsewhere == (f"devicemesh store: 192.0.2.1 is no address of {HERE}: --listen needs a name or an address of this host, or 0.0.0.0 for all of its addresses\n")
    assert "--listen <HOST[:PORT]>" in run(TOOL, "store", code=2).stderr
    assert "DM_STORE_SECRET is set but empty" in run(TOOL, "store", "--listen", "127.0.0.1:1", code=1, env={**os.environ, "DM_STORE_SECRET": ""}).stderr


def test_a_rank_of_kubernetes_meets_in_the_store_of_the_manifest(spawn, free_port):
    """The command and the variables of examples/kubernetes/store.yaml, with another address."""
    manifest = (ROOT / "examples/kubernetes/store.yaml").read_text()
    command = re.search(r"command: \[(devicemesh, store.*)\]", manifest).group(1).replace('"', "").split(", ")
    variables = dict(re.findall(r'- \{name: (\w+), value: "?(.*?)"?\}', manifest))
    assert command[-1] == f"0.0.0.0:{variables['MASTER_PORT']}" and variables["MASTER_ADDR"] in re.findall(r"^  name: (\w+)$", manifest, re.M), manifest
    port = free_port()
    store = spawn(TOOL, *command[1:-1], f"127.0.0.1:{port}", DM_STORE_SECRET="hush")
    assert store.stdout.readline()
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "DM_STORE_SECRET": "hush", "DM_LIBRARY": LIBRARY / "libdevicemesh.so",
                  "PYTHONPATH": ROOT / "tests/interop"}
    for pod in [spawn(sys.executable, "-c", RANK, JOB_COMPLETION_INDEX=index, **variables) for index in (0, 1)]:
        assert ends(pod, 0)[0] == "sum 40.0\n"


SRUN = """#!/bin/sh
# Starts two tasks of a step on this host.
shift
for task in 0 1; do RANK=$task WORLD_SIZE=2 "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait $task || code=$?; done
exit ${code:-0}
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_batch_script_with_a_store(spawn, free_port, tmp_path, code):
    """examples/launch/store.sbatch, with programs in the places of srun and hostname."""
    for name, text in (("srun", SRUN), ("hostname", "#!/bin/sh\necho 127.0.0.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = free_port()
    script = spawn("bash", ROOT / "examples/launch/store.sbatch", sys.executable, "-c", f"{RANK}\nraise SystemExit({code})", STORE_PORT=port,
                   PATH=f"{tmp_path}:{LIBRARY}:{os.environ['PATH']}", DM_LIBRARY=LIBRARY / "libdevicemesh.so", PYTHONPATH=ROOT / "tests/interop")
    out, err = ends(script, code)
    assert out == f"serving tcp://0.0.0.0:{port}, for clients that have the secret of DM_STORE_SECRET\n" + "sum 40.0\n" * 2, out + err


def test_help_and_page_name_the_variables():
    assert "TORCHELASTIC_USE_AGENT_STORE=True" in run(TOOL, "store", "--help").stdout
    assert "DM_STORE_SECRET" in run(TOOL, "man", "store").stdout
