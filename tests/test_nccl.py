#!/usr/bin/env python3
"""Device type cuda without a device: a recorder stands where NCCL would (tests/nccl/recorder.c, over libhostccl) and a libcuda that only counts
(tests/nccl/cuda.c). Asserts which calls reach NCCL on every rank and in which order, and what comes of bad drivers, bad libraries and calls that fail.

    tests/test_nccl.py [NAME...]   only cases whose name contains one of these
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests")) / "nccl"
HERE = ROOT / "tests/nccl"
CASES = []


def case(body):
    CASES.append((body.__name__.replace("_", " "), body))
    return body


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


def compile_c(source, output, *flags):
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include",
                    f"-I{ROOT}/tests/c", HERE / source, *flags, "-o", output], check=True)
    return output


def recorder(*lacks):
    name = "-".join(["libnccl", *lacks]).lower()
    return compile_c("recorder.c", SCRATCH / name / "libnccl.so.2", *[f"-DLACKS_{part}" for part in lacks],
                     "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-ldl", "-pthread")


def driver(*flags):
    name = "-".join(["cuda", *flags]).lower()
    return compile_c("cuda.c", SCRATCH / name / "libcuda.so.1", *flags, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")


def run(what, ranks=8, library=None, cuda=None, code=0, timeout=90, **variables):
    """Runs ranks.c and gives its output and each rank's record."""
    logs = SCRATCH / "log"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_", "DM_CCL"))}
    environment.update(RECORDER_HOST=str(LIBRARY / "libhostccl.so"), RECORDER_LOG=str(logs), **{name: str(value) for name, value in variables.items()})
    environment["LD_LIBRARY_PATH"] = str((cuda or CUDA).parent) if cuda is not False else ""
    if library is not False:
        environment["RECORDER"] = str(library or RECORDER)
    command = [LIBRARY / "devicemesh", "run", "-n", str(ranks), "--prefix", "--grace-period", "10", "--", RANKS, what]
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        raise Failure(f"{what} {variables}: not done after {timeout} s\n{(late.stdout or b'').decode(errors='replace')}") from None
    records = {int(path.name): path.read_text().splitlines() for path in logs.iterdir()}
    check(done.returncode == code, f"{what} {variables}: exit code {done.returncode}, expected {code}\n{done.stdout}")
    for rank, lines in records.items():
        wrong = [line for line in lines if re.search("STALE|BUSY|NULL in|bad config|NONBLOCKING|is id", line)]
        check(not wrong or what == "adopt", f"{what} {variables}: rank {rank} broke NCCL's rules: {wrong}\n" + "\n".join(lines))
    check(time.monotonic() - began < timeout, "late")
    return done.stdout, records


class Expected:
    """The record of one rank as it should be, with communicators numbered as they are made."""

    def __init__(self, rank, splits=True, finalizes=True):
        self.rank, self.splits, self.finalizes, self.lines, self.made = rank, splits, finalizes, [], 0

    def note(self, text):
        self.lines.append(f"# {text}")

    def init(self, size, rank, blocking, name, first=None):
        if rank == 0 if first is None else first:
            self.lines.append("id")
        self.made += 1
        self.lines.append(f"init c{self.made} size={size} rank={rank} blocking={blocking} ids=1 name={name} device={self.rank}")
        return self.made

    def split(self, parent, color, key, name):
        self.made += 1
        self.lines.append(f"split c{parent} color={color} key={key} blocking=1 name={name} -> c{self.made}")
        return self.made

    def group(self, parent, size, color, key, name):
        """A dimension's communicator: split off, or made by an id where there is no split."""
        return self.split(parent, color, key, name) if self.splits else self.init(size, key, 1, name)

    def sum(self, comm):
        self.lines.append(f"ncclAllReduce c{comm}")

    def end(self, *comms):
        for comm in comms:
            self.lines += [f"finalize c{comm}"] if self.finalizes else []
            self.lines.append(f"destroy c{comm}")

    def cube(self):
        """(2, 2, 2): what all splits are from, and one each for pp, dp, tp."""
        rank = self.rank
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        root = self.init(8, rank, 0, "mesh_pp_dp_tp") if self.splits else None
        return [root, self.group(root, 2, rank - 4 * pp, pp, "mesh_pp"), self.group(root, 2, rank - 2 * dp, dp, "mesh_dp"),
                self.group(root, 2, rank - tp, tp, "mesh_tp")]

    def path(self):
        rank = self.rank
        dp, tp = rank // 2 % 2, rank % 2
        root, pp_comm, dp_comm, tp_comm = self.cube()
        self.note("cube")
        self.sum(pp_comm)
        self.sum(tp_comm)
        self.note("flatten")
        flat = self.group(root, 4, rank // 4 * 4, 2 * dp + tp, "mesh_dt")
        self.sum(flat)
        for nothing_new in ("flatten again", "unflatten", "second"):
            self.note(nothing_new)
        self.note("own")
        own = self.group(root, 2, rank - 2 * dp, dp, "mesh_dp")
        self.note("line")
        line = self.group(root, 8, 0, rank, "mesh_all")
        self.sum(line)
        self.note("one")
        self.sum(self.init(1, 0, 1, "mesh_single", first=True))
        self.note("lazy")
        self.note("lazy first use")
        x = rank // 2
        if self.splits:
            seed = self.init(4, x, 0, "-")
            lazy = self.split(seed, 0, x, "mesh_x")
            self.end(seed)
        else:
            lazy = self.init(4, x, 1, "mesh_x")
        self.sum(lazy)
        self.note("adopt")
        self.sum(flat)
        for text, comms in (("leave adopted", []), ("finalize second", []), ("finalize third", [own]), ("finalize lazy", [lazy]),
                            ("finalize line", [line]), ("finalize cube", [flat, tp_comm, dp_comm, pp_comm] + [root] * self.splits)):
            self.note(text)
            self.end(*comms)
        self.note("abort")
        doomed = self.cube()
        self.note("abort now")
        self.lines += [f"abort c{comm}" for comm in doomed if comm]
        self.note("after")
        return self.lines


def same_path(records, **how):
    check(sorted(records) == list(range(8)), f"records of ranks {sorted(records)}")
    for rank, lines in sorted(records.items()):
        wanted = in_any_order(Expected(rank, **how).path())
        lines = in_any_order(lines)
        for number, (line, want) in enumerate(zip(lines + [""] * len(wanted), wanted + [""] * len(lines))):
            if line != want:
                raise Failure(f"rank {rank}, line {number + 1}: {line!r}, expected {want!r}\n" + "\n".join(lines))


def in_any_order(lines):
    """Aborts that follow each other are made at the same time."""
    runs = itertools.groupby(lines, lambda line: line.startswith("abort c"))
    return [line for aborts, run in runs for line in (sorted(run) if aborts else run)]


@case
def every_call_in_order():
    same_path(run("path")[1])


@case
def a_library_that_takes_its_time():
    same_path(run("path", RECORDER_SLOW=30)[1])


@case
def without_split():
    same_path(run("path", library=recorder("SPLIT"))[1], splits=False)


@case
def without_finalize():
    same_path(run("path", library=recorder("FINALIZE"))[1], finalizes=False)


@case
def without_scalable_init():
    library = recorder("SCALABLE")
    same_path(run("path", library=library)[1])
    for rank, lines in run("chosen", ranks=132, library=library, CUDA_COUNT=132)[1].items():
        check(any(" ids=1 " in line for line in lines), f"rank {rank}: {lines}")


@case
def many_ranks_meet_by_several_ids():
    records = run("chosen", ranks=132, CUDA_COUNT=132)[1]
    makers = [rank for rank, lines in sorted(records.items()) if "id" in lines]
    check(makers == [0, 66], f"ids are made by ranks {makers}, expected the first of each half")
    for rank, lines in records.items():
        check(f"init c1 size=132 rank={rank} blocking=0 ids=2 name=- device={rank}" in lines, f"rank {rank}: {lines}")


def refused(status, text, ranks=2, **how):
    output, _ = run("chosen", ranks=ranks, **how)
    said = re.findall(r"joined (\S+) device_error=(\d+): (.*)", output)
    check(len(said) == ranks, f"{len(said)} of {ranks} ranks say that they did not join:\n{output}")
    for got, device_error, message in said:
        check(got == status and re.search(text, message), f"expected {status} with {text!r}:\n{output}")
    return said


@case
def what_is_no_usable_library():
    for lacks in ("INIT_CONFIG", "ABORT"):
        symbol = {"INIT_CONFIG": "ncclCommInitRankConfig", "ABORT": "ncclCommAbort"}[lacks]
        refused("DM_STATUS_LIBRARY", f"has no symbol {symbol}: it says NCCL 2.27.7", library=recorder(lacks))
    refused("DM_STATUS_LIBRARY", r"is NCCL 2\.10\.3, older than 2\.14\.0", RECORDER_VERSION=21003)
    refused("DM_STATUS_LIBRARY", r"is NCCL 2\.8\.3, older than 2\.14\.0", RECORDER_VERSION=2803)
    refused("DM_STATUS_LIBRARY", "tried libc.so.6 .*has no symbol ncclGetVersion: it is not NCCL", library="libc.so.6")
    refused("DM_STATUS_LIBRARY", "tried /nonexistent/libnccl.so.2 .*No such file", library="/nonexistent/libnccl.so.2")
    refused("DM_STATUS_LIBRARY", f"tried {HERE}/recorder.c .*(invalid ELF header|file too short)", library=HERE / "recorder.c")
    every = r"tried libnccl\.so\.2 \(.*\), librccl\.so\.1 \(.*\), libnccl\.so \(.*\), librccl\.so \(.*\); set DM_CCL_LIBRARY"
    refused("DM_STATUS_LIBRARY", every, library=False)
    refused("DM_STATUS_LIBRARY", r"tried python \(no nvidia/nccl/lib/libnccl.so.2 below .*/empty", library="python",
            VIRTUAL_ENV=SCRATCH / "empty", PATH="/nonexistent", HOME="/nonexistent")


@case
def where_the_library_is_found():
    # A copy that is in the process; the variable; a Python environment's wheel.
    for how in ({"LD_PRELOAD": RECORDER}, {"DM_CCL_LIBRARY": RECORDER}):
        records = run("chosen", ranks=2, library=False, **how)[1]
        check(len(records) == 2, f"{how}: the recorder was not used")
    packages = SCRATCH / "venv/lib/python3.12/site-packages/nvidia/nccl/lib"
    packages.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDER, packages / "libnccl.so.2")
    for how in ({"library": "python"}, {"library": False, "DM_CCL_LIBRARY": "python"}):
        check(len(run("chosen", ranks=2, VIRTUAL_ENV=SCRATCH / "venv", **how)[1]) == 2, f"{how}: the recorder was not used")


@case
def versions_that_differ_between_ranks():
    for odd, other in ((0, 1), (1, 0)):
        said = refused("DM_STATUS_MISMATCH", rf"rank 1 has NCCL 2\.{'27' if odd == 0 else '22'}\.\d, rank 0 has NCCL 2\.{'22' if odd == 0 else '27'}\.\d",
                       **{f"RECORDER_VERSION_{odd}": 22203})
        check(len(said) == 2, f"{said} of {other}")
    output, _ = run("chosen", RECORDER_VERSION_5=22203)
    check(output.count("rank 5 has NCCL 2.22.3, rank 0 has NCCL 2.27.7") == 8, output)


@case
def no_driver_that_works():
    refused("DM_STATUS_DEVICE", "no CUDA driver that works: libcuda.so.1: cannot open shared object file.*use device type cpu", cuda=False)
    refused("DM_STATUS_DEVICE", r"supports CUDA 9\.2, and NCCL needs 10\.2", CUDA_VERSION=9020)
    refused("DM_STATUS_DEVICE", "sees 0 devices", CUDA_COUNT=0)
    for code, text in ((100, "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected.*CUDA_VISIBLE_DEVICES"), (803, "restart"), (999, "nvidia-smi"), (34, "stub"), (4321, "an error")):
        for said in refused("DM_STATUS_DEVICE", f"cuInit of the CUDA driver gives {code}.*{text}", CUDA_INIT=code):
            check(said[1] == str(code), f"device_error is {said[1]}, expected {code}")
    # On one rank: all learn of it.
    said = refused("DM_STATUS_DEVICE", "cuInit of the CUDA driver gives 999", ranks=4, CUDA_INIT=999, CUDA_INIT_RANK=2)
    check({device_error for _, device_error, _ in said} == {"999"}, str(said))


@case
def which_device():
    def devices(records):
        return [int(re.search(r"device=(-?\d+)", "\n".join(records[rank])).group(1)) for rank in sorted(records)]
    check(devices(run("chosen")[1]) == list(range(8)), "each rank takes the device of its local rank")
    check(devices(run("current")[1]) == list(range(7, -1, -1)), "a context that is current is kept")
    check(devices(run("thread")[1]) == list(range(8)), "so does a thread of the program that has none")
    twice = {"CUDA_COUNT": 4}
    refused("DM_STATUS_DEVICE", r"ranks \d and \d are both on device \d of 4 on this host: .*NCCL_MULTI_RANK_GPU_ENABLE=1.*NCCL_HOSTID", ranks=8, **twice)
    for switch in ({"NCCL_MULTI_RANK_GPU_ENABLE": 1}, {"NCCL_HOSTID": "mine"}):
        check(devices(run("chosen", **twice, **switch)[1]) == [0, 1, 2, 3] * 2, "local rank modulo the number of devices")
    check(devices(run("chosen", cuda=driver("-DLACKS_UUID"), **twice)[1]) == [0, 1, 2, 3] * 2, "a driver without identities is no reason to refuse")
    refused("DM_STATUS_DEVICE", "uneven hardware: 8 ranks .* 3 devices", ranks=8, CUDA_COUNT=3)


@case
def communicators_that_are_none():
    for rank, lines in run("adopt", ranks=2)[1].items():
        stale = [line for line in lines[:lines.index("# destroyed")] if "STALE" in line]
        check(not stale, f"rank {rank}: {stale}")


@case
def every_call_that_can_fail():
    """Each call of a rank fails once, with one code after the other: all ranks get an error from that same call, and nothing is left."""
    codes = [1, 2, 3, 4, 5, 6, 8, 77]
    failures = 0
    for library in (RECORDER, recorder("SPLIT")):
        for rank in (0, 5, -1):
            for number in range(1, 40):
                code = codes[failures % len(codes)]
                output, records = run("attempt", library=library, RECORDER_FAIL=f"{rank} {number} {code}")
                left = re.findall(r"left (\d+) of", output)
                check(left == ["0"] * 8, f"call {number} of rank {rank} fails with {code}: left {left}\n{output}")
                victim = [line for line in records[max(rank, 0)] if line.startswith("failing")]
                if not victim:
                    break
                failures += 1
                failed = victim[0].split()[1]
                outcome = {call: re.findall(rf"{call} (DM_\w+) (.*)", output) for call in ("init", "flatten", "finalize", "sum")}
                for call, said in outcome.items():
                    bad = [status for status, _ in said if status != "DM_STATUS_OK"]
                    # An operation fails on the rank that makes it; everything else is agreed on.
                    check(call == "sum" or failed == "ncclAllReduce" or len(bad) in (0, 8), f"{failed} of rank {rank} fails with {code}: {call} gives {said}\n{output}")
                told = " ".join(message for said in outcome.values() for _, message in said)
                check(f"gives {code} (" in told, f"{failed} of rank {rank} fails with {code}, but nobody says so\n{output}")
    check(failures > 40, f"only {failures} failures were tried")
    print(f"{failures} failures", flush=True)


@case
def a_finalize_that_does_not_return():
    output, records = run("stuck", RECORDER_STUCK=6)
    said = re.findall(r"finalize (DM_\w+) (.*)", output)
    check(len(said) == 8 and {status for status, _ in said} == {"DM_STATUS_TIMEOUT"}, output)
    check("finalizing the communicator of" in output and "was not done after 1500 ms" in output, output)
    # All but the one they were split from, whose finalize returns.
    stuck = [line.split()[-1] for line in records[6] if line.startswith("split")]
    touched = [line for line in records[6] if line.split()[0] in ("destroy", "abort") and line.split()[1] in stuck]
    check(stuck and not touched, f"a communicator in which a thread is blocked is left alone: {records[6]}")


@case
def aborts_end_together():
    """The work of one communicator may lie on a stream behind another's, so that an abort of one alone would wait for ever."""
    for rank, lines in run("together")[1].items():
        check(sum(line.startswith("abort c") for line in lines) == 9, f"rank {rank}: {lines}")
        check(not any("ALONE" in line for line in lines), f"rank {rank}: an abort waited for one that did not come\n" + "\n".join(lines))


@case
def a_group_is_left_open_by_dm_abort():
    """NCCL ends a group without operations. A group that holds an operation of an aborted communicator is never handed to ncclGroupEnd."""
    _, records = run("left group")
    for rank, lines in records.items():
        ends = [at for at, line in enumerate(lines) if line == "group end"]
        empty, second, full = (lines.index(f"# {mark}") for mark in ("empty group", "second", "full group"))
        check(len(ends) == 1 and empty < ends[0] < second < full, f"rank {rank}: group ends at {ends}\n" + "\n".join(lines))


@case
def two_threads_take_turns_on_a_shared_communicator():
    _, records = run("gate")
    for rank, lines in records.items():
        sums = [line for line in lines if line.startswith("ncclAllReduce")]
        check(len(sums) == 200 and len(set(sums)) == 1, f"rank {rank}: {len(sums)} sums on {set(sums)}")


@case
def meshes_after_a_failure_that_one_rank_knows():
    """Only what has failed is made anew, by all ranks: a dimension by a split, and what is split from by a fresh id."""
    for rank, lines in run("anew")[1].items():
        first, second, third = (lines.index(f"# {name}") for name in ("dimension", "root", "ends"))
        made = [[line.split()[0] for line in part if line.split()[0] in ("init", "split")] for part in (lines[first:second], lines[second:third])]
        check(made == [["split"], ["init", "split"]], f"rank {rank}: {made}\n" + "\n".join(lines))
        check(not any("STALE" in line for line in lines), f"rank {rank}: {lines}")


@case
def going_on_without_a_lost_rank():
    """The communicator that dimensions are split from is shrunk, with NCCL_SHRINK_ABORT, after all others have ended; then it is a mesh like any other."""
    for rank, lines in run("lose")[1].items():
        if rank == 7:
            continue
        lines = lines[lines.index("# lose") + 1:]
        if rank == 6:
            check(not [line for line in lines if not line.startswith("abort")], f"rank 6, whose replica goes, only ends: {lines}")
            continue
        at = [number for number, line in enumerate(lines) if line.startswith("shrink")]
        check(len(at) == 1 and "without 2 from 6 flags=1 blocking=0" in lines[at[0]], f"rank {rank}: {lines}")
        parent, child = re.search(r"shrink (c\d+) .* -> (c\d+)", lines[at[0]]).groups()
        check(all(line.startswith("abort") and line != f"abort {parent}" for line in lines[:at[0]]), f"rank {rank}: {lines}")
        splits = [line for line in lines if line.startswith("split")]
        check(len(splits) == 2 and all(line.startswith(f"split {child} ") and "blocking=1" in line for line in splits), f"rank {rank}: {lines}")
        check(f"abort {parent}" in lines[at[0]:], f"rank {rank}: {lines}")
    run("lose without", library=recorder("SHRINK"))


def main():
    global RECORDER, CUDA, RANKS
    RECORDER, CUDA = recorder(), driver()
    RANKS = compile_c("ranks.c", SCRATCH / "ranks", f"-L{LIBRARY}", "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-ldl", "-pthread")
    failed = []
    for name, body in CASES:
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        began = time.monotonic()
        try:
            body()
            print(f"ok   {name} ({time.monotonic() - began:.1f} s)", flush=True)
        except Failure as failure:
            failed.append(name)
            print(f"FAIL {name}\n{failure}", flush=True)
    print(f"failed: {failed}" if failed else "all well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
