"""The case hosts of bench.py: the same collectives over several hosts, which are namespaces of this
machine (network.py), and the start of eight ranks on four hosts.

The limit beside the figures is the time that plain TCP between two processes (streams.c, measured
in the same run) needs for the bytes that must pass between hosts. All hosts share this machine's
processors, so it counts the bytes of all of them together."""

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile

from contestants import NAMES as TITLES, TOOL, built, end, lines_of, permitted, prefer
from network import INTERFACE, Network, Unavailable
from table import figure, grouped, rows, table_by_size
from common import spread, time_text

LAYOUTS = ["2x1", "2x2", "2x4", "4x1", "4x2"]
SIZES = [4, 64 << 10, 1 << 20]
WHOLE = [*SIZES, 64 << 20]
STARTS = (4, 2)
PORTS = itertools.count(29400)
# Seconds that one contestant may take on one layout. One that takes longer is reported.
DEADLINE = 120
# The bytes that must pass between `hosts` hosts of `each` ranks, all hosts together, in one call
# on a buffer of one byte.
PASSED = {
    "all_reduce": lambda hosts, each: 2 * (hosts - 1),
    "all_gather": lambda hosts, each: hosts - 1,
    "reduce_scatter": lambda hosts, each: hosts - 1,
    "broadcast": lambda hosts, each: hosts - 1,
    "all_to_all": lambda hosts, each: (hosts - 1) * each,
    "send_recv": lambda hosts, each: 1 / each,
}


class Failed(Exception):
    """A contestant's run failed; the text has what it wrote."""


def commands(network, contestant, hosts, each, arguments):
    """The commands that start `each` ranks on each of the first `hosts` hosts. What the ranks print
    comes from the first one."""
    program = [*contestant.program, *arguments]
    addresses = [network.address(host) for host in range(hosts)]
    if contestant.name == "openmpi":
        inside = "10.78.0.0/24"
        options = {
            "plm_rsh_agent": network.agent, "oob_tcp_if_include": inside, "btl_tcp_if_include": inside,
            "btl": "self,vader,tcp", "pml": "ob1", "mpi_yield_when_idle": 1
        }
        return [[*network.on(0), "mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                 *(word for name, value in options.items() for word in ("--mca", name, value)),
                 "-H", ",".join(f"{address}:{each}" for address in addresses), "-n", hosts * each, *program]]
    if contestant.name == "mpich":
        return [[
            *network.on(0), "mpiexec.hydra", "-launcher", "rsh", "-launcher-exec", network.agent, "-localhost",
            addresses[0], "-iface", INTERFACE, "-hosts", ",".join(addresses), "-ppn", each, "-n", hosts * each, *program
        ]]
    endpoint = f"{addresses[0]}:{next(PORTS)}"
    return [[
        *network.on(host), TOOL, "run", "--nnodes", hosts, "--node-rank", host, "-n", each, "--rdzv-endpoint", endpoint,
        "--", *program
    ] for host in range(hosts)]


def output(network, contestant, hosts, each, kind, *arguments):
    """What the ranks print."""
    if kind == "realtime" and not contestant.gives_way and hosts * each > os.cpu_count():
        kind = "autogroup" if permitted("autogroup") else "none"
    with tempfile.TemporaryDirectory(prefix="dm-bench-") as scratch:
        started = []
        try:
            for host, command in enumerate(commands(network, contestant, hosts, each, arguments)):
                variables = {
                    **os.environ, "DM_BENCH_SCRATCH": scratch, "OMP_NUM_THREADS": "1", "DM_BENCH_IFACE": INTERFACE,
                    "GLOO_SOCKET_IFNAME": INTERFACE, "DM_HOSTCCL_HOST": network.name(host)
                }
                wrote = tempfile.TemporaryFile("w+")
                started.append(
                    (subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=wrote,
                                      stderr=subprocess.STDOUT, env=variables, preexec_fn=lambda: prefer(kind)), wrote))
            codes = [process.wait(DEADLINE) for process, _ in started]
        except subprocess.TimeoutExpired:
            codes = [None]
        finally:
            for process, _ in started:
                end(process)
        texts = []
        for _, wrote in started:
            wrote.seek(0)
            texts.append(wrote.read())
            wrote.close()
    if any(code != 0 for code in codes):
        raise Failed(f"{TITLES[contestant.name]} on {hosts} x {each}: exit codes {codes}\n" + "".join(texts)[-4000:])
    return "".join(texts)


def streams(network, kind):
    """The bytes that plain TCP moves between two hosts in a second, and half a round trip."""
    port, program = next(PORTS), str(built("streams"))
    both = []
    try:
        for host, word in enumerate(("serve", "measure")):
            command = [*network.on(host), program, word, network.address(0), str(port), "400"]
            both.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: prefer(kind)))
        found = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
            process.stdout.close()
    return {"bytes_per_second": sum(one["received_per_second"] for one in found), "half_round_trip": found[1]["half_round_trip"]}


def one_round(network, contestants, options, report, number, keep):
    """Measures every contestant once on every layout."""
    where = report["hosts"]
    where["streams"].append(streams(network, options.scheduling))
    sizes = options.sizes or (WHOLE if options.whole else SIZES)
    for layout in options.layouts:
        hosts, each = map(int, layout.split("x"))
        for contestant in contestants:
            about = {"library": contestant.name, "layout": layout, "round": number}
            try:
                found = output(network, contestant, hosts, each, options.scheduling, "collectives", options.budget,
                               ",".join(options.operations), "float32", ",".join(map(str, sizes)))
            except Failed as failed:
                print(failed, file=sys.stderr)
                where["failed"].append({**about, "said": str(failed)})
                continue
            where["runs"] += [{**about, **line} for line in lines_of(found)]
            keep()
    for contestant in contestants:
        if contestant.name == "gloo":
            continue
        try:
            found = output(network, contestant, *STARTS, options.scheduling, "start")
        except Failed as failed:
            print(failed, file=sys.stderr)
            continue
        where["start"] += [{"library": contestant.name, "round": number, **line} for line in lines_of(found)]
        keep()


def measure(contestants, options, report, in_turn, keep):
    """Fills report["hosts"], or says why there are no hosts here."""
    report["hosts"] = {"runs": [], "start": [], "streams": [], "failed": []}
    try:
        with Network(max(int(layout.split("x")[0]) for layout in [*options.layouts, "4x2"])) as network:
            for number in range(options.rounds):
                one_round(network, in_turn(contestants, number), options, report, number, keep)
    except Unavailable as why:
        print(f"no hosts here: {why}", file=sys.stderr)


def limit(found, operation, layout, size):
    hosts, each = map(int, layout.split("x"))
    rate = statistics.median(one["bytes_per_second"] for one in found["streams"])
    latency = statistics.median(one["half_round_trip"] for one in found["streams"])
    return time_text(max(latency, PASSED[operation](hosts, each) * size / rate))


def tables(report):
    """The lines of the case for bench.py's text."""
    found, libraries = report.get("hosts", {}), list(report["versions"])
    if not found.get("streams"):
        return []
    rate = statistics.median(one["bytes_per_second"] for one in found["streams"]) / 1e9
    latency = statistics.median(one["half_round_trip"] for one in found["streams"])
    lines = ["", f"several hosts (namespaces on a bridge). Limit: the bytes that must pass between hosts at {rate:.3g} GB/s, which plain TCP between two processes moves in both "
                 f"directions together, and at least {time_text(latency)}, half of its round trip"]
    for (operation, layout), runs in grouped(found["runs"], "operation", "layout").items():
        hosts, each = layout.split("x")
        lines += ["", f"{operation}, float32, {hosts} hosts x {each} ranks: time of one, median of the rounds' {figure(report)}s (least - most)"]
        lines += table_by_size(runs, libraries, figure(report), "limit", functools.partial(limit, found, operation, layout))
    if found["start"]:
        totals = {library: [run["total"] for run in found["start"] if run["library"] == library] for library in libraries}
        head = [library for library in libraries if totals[library]]
        lines += [
            "",
            f"start of {STARTS[0] * STARTS[1]} ranks on {STARTS[0]} hosts, as in the table of starts (PyTorch: from the end of its imports)"
        ]
        lines += rows([TITLES[library] for library in head], [[spread(totals[library]) for library in head]])
    for one in found["failed"]:
        lines += ["", one["said"].splitlines()[0]]
    return lines
