"""`devicemesh why` puts the names of the mesh to the communicators of NCCL's RAS.

The server here replays RAS's part of the protocol. The answers were not recorded on a GPU: they
are made by the formats of NCCL's sources (src/ras/client_support.cc, the functions jsonWrite... of
2.28.7 and later), with the processes of a job that hangs on device type cpu."""

import json
import socketserver
import threading

import pytest

from hangs import OneHost, until
from support.paths import TOOL
from support.processes import run

COLLECTIVES = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"]


def head(rank, pid):
    """The beginning of each rank's part, up to its status."""
    return f"""        {{
          "rank": {rank},
          "host": "10.0.0.1",
          "pid": {pid},
          "cuda_dev": {rank},
          "nvml_dev": {rank},
          "status": {{
"""


def rank_text(rank, pid, calls):
    counts = ",\n".join(f'            "{name}": {calls if name == "AllReduce" else 0}' for name in COLLECTIVES)
    return head(rank, pid) + f"""\
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false
          }},
          "collective_counts": {{
{counts}
          }}
        }}"""


def missing_text(rank, pid):
    return head(rank, pid) + """\
            "unresponsive": true,
            "considered_dead": false
          }
        }"""


def document(communicators):
    """What jsonWriteHeader to jsonWriteFooter write. A communicator is its hash, its ranks with
    their processes and counts, and its missing ranks with their processes."""
    parts = []
    for name, ranks, missing in communicators:
        listed = ",\n".join(rank_text(*rank) for rank in ranks)
        absent = ",\n".join(missing_text(*rank) for rank in missing)
        parts.append(f"""    {{
      "hash": "{name}",
      "secondary_hash": "0x1:0x2",
      "size": {len(ranks) + len(missing)},
      "ranks_count": {len(ranks)},
      "missing_ranks_count": {len(missing)},
      "ranks": [
{listed}
      ],
      "missing_ranks": [
{absent}
      ]
    }}""")
    communicators = ",\n".join(parts)
    return f"""{{
  "nccl_version": "2.28.7",
  "cuda_runtime_version": 12090,
  "cuda_driver_version": 12090,
  "timestamp": "2026-11-27 00:40:00",
  "communicators_count": {len(parts)},
  "communicators": [
{communicators}
  ],
  "ras": {{
    "collection_time_sec": 0.004,
    "timeouts_count": 0
  }}
}}
"""


class Ras(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Talk)
        self.document, self.knows_json = document([]), True
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def address(self):
        return f"127.0.0.1:{self.server_address[1]}"


class Talk(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            line = line.decode().strip()
            if line.startswith("CLIENT PROTOCOL "):
                answer = "SERVER PROTOCOL 2\n"
            elif line.startswith("TIMEOUT ") or line == "SET FORMAT json" and self.server.knows_json:
                answer = "OK\n"
            elif line == "STATUS":
                self.wfile.write(self.server.document.encode())
                return
            else:
                answer = f"ERROR: Unknown command {line}\n"
            self.wfile.write(answer.encode())


@pytest.fixture
def ras():
    with Ras() as server:
        yield server
        server.shutdown()


@pytest.fixture
def jobs(programs):
    jobs = OneHost(programs.c("tests/c/programs/hang.c", "-Wall", "-Wextra"))
    yield jobs
    jobs.end()


def test_communicators_have_the_names_of_the_mesh(jobs, ras):
    jobs.start("sleep", NCCL_RAS_ADDR=ras.address())
    job = until(jobs, "sleep")
    assert job["nccl"] == [], job
    pids = {rank["rank"]: rank["pid"] for rank in job["ranks"]}
    tp = [(at, pids[at], 5 if at == 3 else 6) for at in range(4)]
    others = [(at, pids[at + 4], 6) for at in range(3)]
    ras.document = document([
        ("0x7a91f0c35d2b8e14", tp, []),
        ("0x1111f0c35d2b8e14", others, [(3, pids[7])]),
        ("0xdeadf0c35d2b8e14", [(0, 1, 9)], []),  # another job's
    ])
    report, code = jobs.why("--after", "0.3s")
    found = report["jobs"][0]["nccl"]
    assert code == 1 and [(known["hash"], known["names"]) for known in found] == [
        ("0x7a91f0c35d2b8e14", ["mesh/tp"]), ("0x1111f0c35d2b8e14", ["mesh/tp"])], found
    assert found[0]["rows"] == [{"ranks": [3], "counts": "AllReduce 5", "state": "running"},
                                {"ranks": [0, 1, 2], "counts": "AllReduce 6", "state": "running"}], found
    assert {"ranks": [7], "counts": "", "state": "no answer"} in found[1]["rows"], found
    said = run(TOOL, "why", "--after", "0.3s", jobs.job.pid, code=1).stdout
    lines = [line.split() for line in said.partition("NCCL 2.28.7 says:")[2].splitlines()]
    assert ["mesh/tp", "3", "AllReduce", "5", "running", "0x7a91f0c35d2b8e14"] in lines, said

    # The report says which answer is none of RAS. The rest of the report is as always.
    ras.document = '{"nccl_version": "2.28.7"'
    said = run(TOOL, "why", "--after", "0.3s", jobs.job.pid, code=1).stdout
    assert said.startswith("hang: rank 3 has not called") and "the document cannot be read" in said, said
    ras.knows_json = False
    said = run(TOOL, "why", "--after", "0.3s", jobs.job.pid, code=1).stdout
    assert 'it answered "ERROR: Unknown command SET FORMAT json"' in said and "since NCCL 2.28.7" in said, said
    assert json.dumps(jobs.why("--after", "0.3s")[0]["jobs"][0]["nccl"]) == "[]"
