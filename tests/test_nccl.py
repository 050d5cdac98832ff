"""Device type cuda without a device: a recorder stands where NCCL would (tests/nccl/recorder.c,
over libhostccl) and a libcuda that only counts (tests/nccl/cuda.c). Compares which calls reach
NCCL on every rank and in which order, and checks the errors for bad drivers, bad libraries and
calls that fail. Takes a minute, because each call of a job fails once in a job of its own, and
because functions that do not return are waited for: with deadlines of one to five seconds, in jobs
that run at the same time (15 s)."""

import itertools
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import processes
from support.paths import CC, LIBRARY, LINK, ROOT, TOOL
from support.pinned import Unavailable

HERE = ROOT / "tests/nccl"


# What the configuration of a communicator sets from which others are split.
LEAST = "minCTAs=1 maxCTAs=1 collnetEnable=0 nvlsCTAs=1"


def check(condition, text):
    assert condition, text


class Job:
    """Runs a program of tests/nccl, by default over a recorder and a driver that lack nothing."""

    def __init__(self, programs, folder, program="ranks"):
        self.programs, self.folder = programs, folder
        self.ranks = programs.c(f"tests/nccl/{program}.c", "-Wall", "-Wextra", "-Werror", name=f"nccl-{program}", link=[*LINK, "-ldl"])

    def library(self, source, soname, *flags):
        """A library in a folder of its own, under the name by which the loader looks for it."""
        name = "-".join([soname.partition(".")[0], *flags]).replace("/", "-")

        def make(folder):
            folder.mkdir()
            processes.run(CC, "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", f"-I{ROOT}/tests/c", HERE / source,
                          *flags, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-ldl", "-pthread", "-o", folder / soname)
        return self.programs.once(name, make) / soname

    def recorder(self, *lacks):
        return self.library("recorder.c", "libnccl.so.2", *[f"-DLACKS_{part}" for part in lacks])

    def driver(self, *flags):
        return self.library("cuda.c", "libcuda.so.1", *flags)

    def __call__(self, what, ranks=8, library=None, cuda=None, code=0, timeout=90, wrapper=(), **variables):
        """The output of the ranks, and each rank's record. False as `library` or `cuda` leaves
        it out. `wrapper` is a command that runs each rank."""
        logs = self.folder / "log"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        variables = {"RECORDER_HOST": LIBRARY / "libhostccl.so", "RECORDER_LOG": logs, **variables}
        variables["LD_LIBRARY_PATH"] = (cuda or self.driver()).parent if cuda is not False else ""
        if library is not False:
            variables["RECORDER"] = library or self.recorder()
        env = processes.environment(without=["NCCL_", "CUDA_", "DM_CCL"], **variables)
        output = processes.run(TOOL, "run", "-n", ranks, "--prefix", "--grace-period", 10, "--", *wrapper, self.ranks, what, env=env, code=code, timeout=timeout, merged=True).stdout
        records = {int(path.name): path.read_text().splitlines() for path in logs.iterdir()}
        for rank, lines in records.items():
            wrong = [line for line in lines if re.search("STALE|BUSY|NULL in|bad config|NONBLOCKING|is id", line)]
            check(not wrong or what in ("adopt", "group of another"), f"{what} {variables}: rank {rank} broke NCCL's rules: {wrong}\n" + "\n".join(lines))
        return output, records


@pytest.fixture
def run(programs, tmp_path):
    return Job(programs, tmp_path)


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
        if not blocking:
            self.lines.append(f"limits c{self.made} {LEAST}")
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
        """The calls for a mesh (2, 2, 2): one communicator from which the others are split, and
        one each for pp, dp and tp."""
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
                raise AssertionError(f"rank {rank}, line {number + 1}: {line!r}, expected {want!r}\n" + "\n".join(lines))


def in_any_order(lines):
    """The lines, with ends that follow each other sorted by communicator, because communicators end
    at the same time. The one that the others are split from is finalized when they are gone."""
    ended = []
    for is_end, run in itertools.groupby(lines, lambda line: line.startswith(("abort c", "finalize c", "destroy c"))):
        run = list(run)
        parents = {line.split()[1] for line in lines if line.startswith("split")}
        ordered = [line.split()[1] for line in run if is_end and not line.startswith("abort")]
        for parent in parents.intersection(ordered):
            check(set(ordered[ordered.index(parent):]) == {parent}, f"{parent} ends before what was split from it: {run}")
        ended += sorted(run, key=lambda line: line.split()[1]) if is_end else run
    return ended


@pytest.mark.parametrize("lacks, how", [((), {}), (("SPLIT",), {"splits": False}), (("FINALIZE",), {"finalizes": False}), (("SCALABLE",), {})],
                         ids=["nothing", "split", "finalize", "scalable init"])
def test_every_call_in_order_without(run, lacks, how):
    same_path(run("path", library=run.recorder(*lacks))[1], **how)


def test_a_library_that_takes_its_time(run):
    same_path(run("path", RECORDER_SLOW=30)[1])


def test_many_ranks_without_scalable_init(run):
    for rank, lines in run("chosen", ranks=132, library=run.recorder("SCALABLE"), CUDA_COUNT=132)[1].items():
        check(any(" ids=1 " in line for line in lines), f"rank {rank}: {lines}")


def test_many_ranks_meet_by_several_ids(run):
    records = run("chosen", ranks=132, CUDA_COUNT=132)[1]
    makers = [rank for rank, lines in sorted(records.items()) if "id" in lines]
    check(makers == [0, 66], f"ids are made by ranks {makers}, expected the first of each half")
    for rank, lines in records.items():
        check(f"init c1 size=132 rank={rank} blocking=0 ids=2 name=- device={rank}" in lines, f"rank {rank}: {lines}")


@pytest.fixture
def refused(run):
    """Runs ranks of which none may join. Each must say this status and this text; gives what
    they said."""
    def job(status, text, ranks=2, what="chosen", **how):
        output, _ = run(what, ranks=ranks, **how)
        said = re.findall(r"joined (\S+) device_error=(\d+): (.*)", output)
        check(len(said) == ranks, f"{len(said)} of {ranks} ranks say that they did not join:\n{output}")
        for got, _, message in said:
            check(got == status and re.search(text, message), f"expected {status} with {text!r}:\n{output}")
        return said
    return job


@pytest.mark.parametrize("lacks, symbol", [("INIT_CONFIG", "ncclCommInitRankConfig"), ("ABORT", "ncclCommAbort")])
def test_a_library_that_lacks_a_symbol(run, refused, lacks, symbol):
    refused("DM_STATUS_LIBRARY", f"has no symbol {symbol}: it says NCCL 2.27.7", library=run.recorder(lacks))


@pytest.mark.parametrize("number, text", [(21003, r"2\.10\.3"), (2803, r"2\.8\.3")])
def test_a_library_that_is_too_old(refused, number, text):
    refused("DM_STATUS_LIBRARY", rf"is NCCL {text}, older than 2\.14\.0", RECORDER_VERSION=number)


@pytest.mark.parametrize("library, text", [
    ("libc.so.6", "tried libc.so.6 .*has no symbol ncclGetVersion: it is not NCCL"),
    ("/nonexistent/libnccl.so.2", "tried /nonexistent/libnccl.so.2 .*No such file"),
    (HERE / "recorder.c", f"tried {HERE}/recorder.c .*(invalid ELF header|file too short)"),
    (False, r"tried libnccl\.so\.2 \(.*\), librccl\.so\.1 \(.*\), libnccl\.so \(.*\), librccl\.so \(.*\); set DM_CCL_LIBRARY"),
], ids=["libc", "nonexistent", "source", "none"])
def test_no_usable_library(refused, library, text):
    refused("DM_STATUS_LIBRARY", text, library=library)


def test_no_wheel_of_python(refused, tmp_path):
    refused("DM_STATUS_LIBRARY", r"tried python \(no nvidia/nccl/lib/libnccl.so.2 below .*/empty", library="python",
            VIRTUAL_ENV=tmp_path / "empty", PATH="/nonexistent", HOME="/nonexistent")


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "DM_CCL_LIBRARY"])
def test_a_library_that_is_named(run, variable):
    """LD_PRELOAD brings a copy into the process; DM_CCL_LIBRARY names one."""
    check(len(run("chosen", ranks=2, library=False, **{variable: run.recorder()})[1]) == 2, "the recorder was not used")


@pytest.mark.parametrize("how", [{"library": "python"}, {"library": False, "DM_CCL_LIBRARY": "python"}], ids=["option", "variable"])
def test_the_wheel_of_a_python_environment(run, tmp_path, how):
    packages = tmp_path / "venv/lib/python3.12/site-packages/nvidia/nccl/lib"
    packages.mkdir(parents=True)
    shutil.copy(run.recorder(), packages / "libnccl.so.2")
    check(len(run("chosen", ranks=2, VIRTUAL_ENV=tmp_path / "venv", **how)[1]) == 2, "the recorder was not used")


@pytest.mark.parametrize("odd", [0, 1])
def test_versions_that_differ_between_two_ranks(refused, odd):
    refused("DM_STATUS_MISMATCH", rf"rank 1 has NCCL 2\.{'27' if odd == 0 else '22'}\.\d, rank 0 has NCCL 2\.{'22' if odd == 0 else '27'}\.\d",
            **{f"RECORDER_VERSION_{odd}": 22203})


def test_versions_that_differ_between_ranks(run):
    output, _ = run("chosen", RECORDER_VERSION_5=22203)
    check(output.count("rank 5 has NCCL 2.22.3, rank 0 has NCCL 2.27.7") == 8, output)


@pytest.mark.parametrize("how, text", [
    ({"cuda": False}, "no CUDA driver that works: libcuda.so.1: cannot open shared object file.*use device type cpu"),
    ({"CUDA_VERSION": 9020}, r"supports CUDA 9\.2, and NCCL needs 10\.2"),
    ({"CUDA_COUNT": 0}, "sees 0 devices"),
], ids=["none", "too old", "no devices"])
def test_no_driver_that_works(refused, how, text):
    refused("DM_STATUS_DEVICE", text, **how)


@pytest.mark.parametrize("code, text", [
    (100, "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected.*CUDA_VISIBLE_DEVICES"), (803, "restart"), (999, "nvidia-smi"), (34, "stub"), (4321, "an error")])
def test_a_driver_that_does_not_start(refused, code, text):
    for _, device_error, _ in refused("DM_STATUS_DEVICE", f"cuInit of the CUDA driver gives {code}.*{text}", CUDA_INIT=code):
        check(device_error == str(code), f"device_error is {device_error}, expected {code}")


def test_a_driver_that_does_not_start_on_one_rank(refused):
    said = refused("DM_STATUS_DEVICE", "cuInit of the CUDA driver gives 999", ranks=4, CUDA_INIT=999, CUDA_INIT_RANK=2)
    check({device_error for _, device_error, _ in said} == {"999"}, str(said))


def devices(records):
    return [int(re.search(r"device=(-?\d+)", "\n".join(records[rank])).group(1)) for rank in sorted(records)]


# Each rank takes the device of its local rank. A context that is current is kept; a thread of the
# program that has none takes the local rank's, too.
# A device that the options name counts before both. A local rank of 0 in the options is one that
# nobody set, unless the other ranks of the host have all other numbers.
@pytest.mark.parametrize("what, expected", [
    ("chosen", [*range(8)]), ("current", [*range(7, -1, -1)]), ("thread", [*range(8)]), ("named", [3, 4, 5, 6, 7, 0, 1, 2]),
    ("named alone", [3, 4, 5, 6, 7, 0, 1, 2]), ("options", [*range(8)]), ("options reversed", [*range(7, -1, -1)])])
def test_which_device(run, what, expected):
    output, records = run(what)
    assert devices(records) == expected
    assert [int(device) for device in told(output, r"host=0/1 device=(\d+)", 8)] == expected


def told(output, pattern, ranks):
    """What each rank said of its world (dm_world_get_info), in rank order."""
    found = [re.search(rf"info rank={rank} .*{pattern}", output) for rank in range(ranks)]
    assert all(found), output
    return [match.group(1) for match in found]


# srun sets no LOCAL_RANK, and a start by hand need not.
@pytest.mark.parametrize("unset", [("LOCAL_RANK",), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")], ids="-".join)
def test_each_rank_has_a_device_of_its_own_without_a_local_rank(run, unset):
    output, records = run("chosen", wrapper=("env", *[f"--unset={name}" for name in unset]))
    assert devices(records) == [*range(8)]
    assert told(output, r"(local=.*)", 8) == [f"local={rank}/8 host=0/1 device={rank}" for rank in range(8)]


# Runs a rank on a host of its own making: the boot id is what tells hosts apart.
HOST = """echo "boot-$((RANK % HOSTS))" > "$BOOT.$RANK"
exec unshare --map-root-user --mount sh -c 'mount --bind "$BOOT.$RANK" /proc/sys/kernel/random/boot_id && exec "$@"' sh "$@"
"""


def test_ranks_that_are_dealt_out_to_several_hosts(run, tmp_path):
    """Ranks 0, 3, 6 are on one host, 1, 4, 7 on the next, and 2, 5 on the last. Each host has four
    devices."""
    probe = processes.run("unshare", "--map-root-user", "--mount", "mount", "--bind", "/dev/null", "/proc/sys/kernel/random/boot_id", code=None)
    if probe.returncode != 0:
        raise Unavailable("this machine makes no mount namespaces")
    wrapper = ("env", "--unset=LOCAL_RANK", "--unset=LOCAL_WORLD_SIZE", "sh", "-c", HOST, "sh")
    # The ranks make no mesh, because the recorder's engine works within one host.
    output, _ = run("join", wrapper=wrapper, cuda=run.driver("-DLACKS_UUID"), CUDA_COUNT=4, HOSTS=3, BOOT=tmp_path / "boot")
    sizes = (3, 3, 2)
    assert told(output, r"(local=.*)", 8) == [f"local={rank // 3}/{sizes[rank % 3]} host={rank % 3}/3 device={rank // 3}" for rank in range(8)]
    # NCCL 2.31.2 hangs there (nccl#2385). The ranks of hosts with different sizes are told before.
    output, _ = run("join", wrapper=wrapper, cuda=run.driver("-DLACKS_UUID"), CUDA_COUNT=4, HOSTS=3, BOOT=tmp_path / "boot", RECORDER_VERSION=23102)
    assert len(re.findall(r"joined DM_STATUS_LIBRARY .*nccl#2385", output)) == 8, output


def test_a_device_that_does_not_exist(refused):
    """One rank names it; all ranks are told."""
    refused("DM_STATUS_DEVICE", "device 8 does not exist: the CUDA driver sees 8 devices", ranks=3, what="beyond")


def test_two_ranks_on_one_device(refused):
    refused("DM_STATUS_DEVICE", r"ranks \d and \d are both on device \d of 4 on this host: .*NCCL_MULTI_RANK_GPU_ENABLE=1.*NCCL_HOSTID", ranks=8, CUDA_COUNT=4)


@pytest.mark.parametrize("switch", [{"NCCL_MULTI_RANK_GPU_ENABLE": 1}, {"NCCL_HOSTID": "mine"}], ids=["multi-rank", "host id"])
def test_two_ranks_on_one_device_are_wanted(run, switch):
    """The device is the local rank modulo the number of devices."""
    assert devices(run("chosen", CUDA_COUNT=4, **switch)[1]) == [0, 1, 2, 3] * 2


def test_a_driver_without_identities(run):
    """Ranks join although the driver does not give the identities of devices."""
    assert devices(run("chosen", cuda=run.driver("-DLACKS_UUID"), CUDA_COUNT=4)[1]) == [0, 1, 2, 3] * 2


def test_uneven_hardware(refused):
    refused("DM_STATUS_DEVICE", "uneven hardware: 8 ranks .* 3 devices", ranks=8, CUDA_COUNT=3)


def test_communicators_that_are_none(run):
    for rank, lines in run("adopt", ranks=2)[1].items():
        stale = [line for line in lines[:lines.index("# destroyed")] if "STALE" in line]
        check(not stale, f"rank {rank}: {stale}")


CODES = [1, 2, 3, 4, 5, 6, 8, 77]


@pytest.mark.timeout(400)  # some forty jobs, one for each call
@pytest.mark.parametrize("rank", [0, 5, -1])
@pytest.mark.parametrize("lacks", [(), ("SPLIT",)], ids=["all", "without split"])
def test_every_call_that_can_fail(run, lacks, rank):
    """Each call of a rank (-1: of all ranks) fails once, with one code after the other. All
    ranks get an error from that same call, and nothing is left."""
    failures = 0
    for number in range(1, 40):
        code = CODES[failures % len(CODES)]
        output, records = run("attempt", library=run.recorder(*lacks), RECORDER_FAIL=f"{rank} {number} {code}")
        left = re.findall(r"left (\d+) of", output)
        check(left == ["0"] * 8, f"call {number} fails with {code}: left {left}\n{output}")
        # With -1 one rank may hear of another's failure before it makes its own call.
        lines = records[rank] if rank >= 0 else itertools.chain.from_iterable(records.values())
        victim = [line for line in lines if line.startswith("failing")]
        if not victim:
            break
        failures += 1
        failed = victim[0].split()[1]
        outcome = {call: re.findall(rf"{call} (DM_\w+) (.*)", output) for call in ("init", "flatten", "finalize", "sum")}
        for call, said in outcome.items():
            bad = [status for status, _ in said if status != "DM_STATUS_OK"]
            # An operation fails on the rank that makes it; everything else is agreed on.
            check(call == "sum" or failed == "ncclAllReduce" or len(bad) in (0, 8), f"{failed} fails with {code}: {call} gives {said}\n{output}")
        told = " ".join(message for said in outcome.values() for _, message in said)
        check(f"gives {code} (" in told, f"{failed} fails with {code}, but nobody says so\n{output}")
    check(failures > 6, f"only {failures} failures were tried")


def test_a_finalize_that_does_not_return(run):
    output, records = run("stuck", RECORDER_STUCK=6)
    said = re.findall(r"finalize (DM_\w+) (.*)", output)
    check(len(said) == 8 and {status for status, _ in said} == {"DM_STATUS_TIMEOUT"}, output)
    check("ncclCommFinalize of" in output and "was not done after 1500 ms" in output and "captured CUDA graph" in output, output)
    # All but the one they were split from, whose finalize returns.
    stuck = [line.split()[-1] for line in records[6] if line.startswith("split")]
    touched = [line for line in records[6] if line.split()[0] in ("destroy", "abort") and line.split()[1] in stuck]
    check(stuck and not touched, f"a communicator in which a thread is blocked is left alone: {records[6]}")


def test_a_destroy_that_does_not_return(run):
    """From NCCL 2.31.2 on ncclCommDestroy waits for the other ranks of the node without a
    deadline. No rank waits for it beyond its own."""
    output, records = run("stuck", RECORDER_STUCK_DESTROY=6)
    said = re.findall(r"finalize (DM_\w+) (.*)", output)
    check(len(said) == 8 and {status for status, _ in said} == {"DM_STATUS_TIMEOUT"}, output)
    check("ncclCommDestroy of" in output and "was not done after 1500 ms" in output, output)
    stuck = [line.split()[-1] for line in records[6] if line.startswith("stuck")]
    check(stuck and not any(f"abort {comm}" in records[6] for comm in stuck), f"a communicator in which a thread is blocked is left alone: {records[6]}")


# The calls of ours that must fail, by the function that does not return on one rank. All others
# must succeed there.
MAKING = {"dm_init", "dm_get_comm"}
HANGS = {
    "ncclGetUniqueId": MAKING, "ncclCommInitRankConfig": MAKING, "ncclCommSplit": MAKING,
    "ncclCommGetAsyncError": MAKING | {"dm_check", "dm_finalize", "dm_world_finalize"},
    "ncclCommFinalize": MAKING | {"dm_finalize", "dm_world_finalize"},
    "ncclCommDestroy": MAKING | {"dm_finalize", "dm_world_finalize"},
    "ncclCommAbort": {"dm_abort", "dm_world_abort"},
    "ncclCommCount": {"dm_from_comms"}, "ncclCommUserRank": {"dm_from_comms"},
    "ncclCommShrink": {"dm_shrink"},
    "ncclGroupEnd": {"dm_abort"}, "ncclAllReduce": {"dm_abort"},
}
# The functions that have no such case, and why.
NO_HANG = {
    "ncclCommInitRankScalable": "above 128 ranks it takes the place of ncclCommInitRankConfig in one match, on the same thread with the same wait",
    "ncclGetVersion": "it returns a constant, before there is anything to wait for",
    "ncclGetErrorString": "it looks a code up in a table", "ncclGetLastError": "it gives a text that is there already",
    "ncclGroupStart": "it counts in a variable of the calling thread, whose group it begins",
    "ncclReduce": "as ncclAllReduce", "ncclBroadcast": "as ncclAllReduce", "ncclAllGather": "as ncclAllReduce", "ncclReduceScatter": "as ncclAllReduce",
    "ncclAlltoAll": "as ncclAllReduce", "ncclSend": "as ncclAllReduce", "ncclRecv": "as ncclAllReduce",
}


def steps(output, rank):
    """What the calls of a rank gave: the status, the seconds and the message by the call."""
    found = re.findall(rf"\[rank {rank}\] step (\S+) (DM_\w+) (\S+) (.*)", output)
    return {name: (status, float(seconds), message) for name, status, seconds, message in found}


def test_functions_that_do_not_return(programs, tmp_path):
    """Each function of NCCL that the library calls does not return, on one rank of two. Every call
    of ours ends all the same, and its error names the function. An operation and the end of a group
    run on the program's own thread, as NCCL's rules for streams and groups need it, so that thread
    stays; but dm_abort on another thread ends, and says that a call is inside. The jobs run at the
    same time, because each of them mostly waits for deadlines of a second."""
    table = (ROOT / "src/ccl/functions.rs").read_text()
    called = set(re.findall(r'symbol!\("(nccl\w+)"', table)) | {"ncclGetVersion"}
    check(called == set(HANGS) | set(NO_HANG), f"not decided: {called ^ (set(HANGS) | set(NO_HANG))}")
    first = Job(programs, tmp_path)
    library, driver = first.recorder(), first.driver()

    def job(function):
        rank, shrinks = 0 if function == "ncclGetUniqueId" else 1, HANGS[function] == {"dm_shrink"}
        folder = tmp_path / function
        folder.mkdir()
        ranks, what = (4, "hang in shrink") if shrinks else (2, "hang")
        return rank, Job(programs, folder)(what, ranks=ranks, library=library, cuda=driver, HANG=f"{rank} {function} 0", HANG_FAILS=",".join(HANGS[function]))

    with ThreadPoolExecutor(len(HANGS)) as pool:
        jobs = dict(zip(HANGS, pool.map(job, HANGS)))
    for function, (rank, (output, records)) in jobs.items():
        here, there = steps(output, rank), steps(output, 1 - rank)
        failed = {name for name, (status, _, _) in here.items() if status != "DM_STATUS_OK"}
        check(failed == HANGS[function], f"{function}: {sorted(failed)} fail, expected {sorted(HANGS[function])}\n{output}")
        named = "inside a call of" if function in ("ncclGroupEnd", "ncclAllReduce") else function
        for name in failed:
            status, _, message = here[name]
            check(status == "DM_STATUS_TIMEOUT" and named in message, f"{function}: {name} gives {status} {message}\n{output}")
        slow = [(name, seconds) for name, (_, seconds, _) in [*here.items(), *there.items()] if seconds > 15]
        check(not slow, f"{function}: {slow} took long\n{output}")
        check(set(here) == set(there), f"{function}: the ranks made other calls\n{output}")
        check(any(line == f"hang in {function}" for line in records[rank]), f"{function} was not called\n{output}")


def test_a_call_that_returns_late_gives_back_what_it_held(run):
    """An abort that does not return in time ends the communicator later, and a second dm_abort
    waits for it. An initialisation that does not return in time is aborted when it returns."""
    output, _ = run("late", ranks=2)
    said = steps(output, 1)
    check(said["dm_abort"][0] == "DM_STATUS_TIMEOUT" and "a captured CUDA graph" in said["dm_abort"][2], output)
    check(said["dm_init"][0] == "DM_STATUS_TIMEOUT" and "ncclCommInitRankConfig" in said["dm_init"][2], output)


def test_the_other_ranks_are_told_before_an_abort(run, tmp_path):
    """NCCL's abort returns when all ranks of the host abort. They learn of the first one's from the
    store, so it must have told them before it aborts."""
    (tmp_path / "peers").mkdir()
    run("local peers", ranks=3, PEERS=tmp_path / "peers")


def test_making_that_the_environment_makes_block(run):
    """With NCCL_COMM_BLOCKING=1 every call that makes a communicator blocks. The calls of ours have
    their deadlines all the same."""
    run("chosen", ranks=4, NCCL_COMM_BLOCKING=1)
    output, _ = run("hang", ranks=2, NCCL_COMM_BLOCKING=1, HANG="1 ncclCommInitRankConfig 0", HANG_FAILS=",".join(MAKING))
    said = steps(output, 1)
    check({name for name, (status, _, _) in said.items() if status != "DM_STATUS_OK"} == MAKING, output)
    check("NCCL_COMM_BLOCKING" in said["dm_init"][2], output)


def test_making_and_ending_while_a_graph_is_captured(run):
    """They are refused before NCCL is called. Operations on communicators that exist are not."""
    for rank, lines in run("capture", ranks=8)[1].items():
        check(between(lines, "captures", "captured") == [], f"rank {rank}: {lines}")


def test_a_log_callback_that_ends_the_mesh(run):
    """An operation's failure is logged when the thread has left the communicator."""
    run("log callback", ranks=2)


@pytest.mark.parametrize("micros", [0, 300])
def test_an_abort_waits_for_calls_that_are_inside(run, micros):
    """The recorder marks an abort while a thread is inside a call on the communicator, and a call
    that begins after the abort."""
    run("beside", ranks=8, RECORDER_INSIDE=micros)


@pytest.mark.long
def test_an_abort_gives_up_a_call_that_stays_inside(run):
    """The call lasts longer than the five seconds that dm_abort waits. The thread that made the
    call ends the communicator when it returns."""
    for rank, lines in run("inside", RECORDER_INSIDE=9_000_000)[1].items():
        check(sum(line.startswith("abort c") for line in lines[lines.index("# gave up"):]) == 1, f"rank {rank}: {lines}")


def test_names_in_a_configuration_are_copied(run):
    for rank, lines in run("lazy names")[1].items():
        check(any(line.startswith("split") and "name=mine " in line for line in lines) and "net mynet" in lines, f"rank {rank}: {lines}")


def test_the_world_ends_with_all_its_meshes(run):
    for rank, lines in run("finalize world")[1].items():
        ends = lines[lines.index("# finalize"):]
        made = [re.search(r"-> (c\d+)|init (c\d+)", line) for line in lines if line.startswith(("init", "split"))]
        check(not any(line.startswith("abort") for line in ends), f"rank {rank}: {ends}")
        check(sum(line.startswith("destroy") for line in lines) == len(made), f"rank {rank}: {lines}")
        parent = lines.index(next(line for line in ends if re.fullmatch("destroy c1", line)))
        split = [f"destroy {line.split()[-1]}" for line in lines if line.startswith("split c1 ")]
        check(split and all(lines.index(line) < parent for line in split if line in lines), f"rank {rank}: {lines}")


@pytest.fixture
def linked(run, programs):
    """The program that has the recorder linked into itself, and its environment."""
    program = programs.c("tests/nccl/linked.c", "-Wall", "-Wextra", "-Werror", f"-I{HERE}", name="nccl-linked", link=[*LINK, "-ldl", "-pthread"])
    logs = run.folder / "log"

    def job(ranks, code=0, **variables):
        logs.mkdir()
        variables = {"RECORDER_HOST": LIBRARY / "libhostccl.so", "RECORDER_LOG": logs, "LD_LIBRARY_PATH": run.driver().parent, **variables}
        env = processes.environment(without=["NCCL_", "CUDA_", "DM_CCL"], **variables)
        output = processes.run(TOOL, "run", "-n", ranks, "--prefix", "--", program, env=env, code=code, timeout=60, merged=True).stdout
        return output, {int(path.name): path.read_text().splitlines() for path in logs.iterdir()}
    return job


def test_a_program_that_links_nccl_statically(run, linked):
    """Rank 0 passes the functions that it links. The others load the recorder, which
    DM_CCL_LIBRARY names for all of them."""
    _, records = linked(2, DM_CCL_LIBRARY=run.recorder())
    for rank, lines in records.items():
        wrong = [line for line in lines if re.search("STALE|BUSY|NULL in", line)]
        check(not wrong and any(line.startswith("ncclAllReduce") for line in lines), f"rank {rank}: {lines}")


def test_aborts_end_together(run):
    """The work of one communicator may lie on a stream behind another's, so that an abort of one
    alone would wait for ever."""
    for rank, lines in run("together")[1].items():
        check(sum(line.startswith("abort c") for line in lines) == 9, f"rank {rank}: {lines}")
        check(not any("ALONE" in line for line in lines), f"rank {rank}: an abort waited for one that did not come\n" + "\n".join(lines))


def test_a_group_waits_for_the_communicators_of_all_meshes(run):
    """dm_group_end returns when the operations are on their streams, also those on the non-blocking
    communicator of another mesh than its own."""
    run("group of another", ranks=2, NCCL_COMM_BLOCKING=0)


def test_a_group_is_left_open_by_dm_abort(run):
    """NCCL ends a group without operations. A group that holds an operation of an aborted
    communicator is never handed to ncclGroupEnd."""
    _, records = run("left group")
    for rank, lines in records.items():
        ends = [at for at, line in enumerate(lines) if line == "group end"]
        empty, second, full = (lines.index(f"# {mark}") for mark in ("empty group", "second", "full group"))
        check(len(ends) == 1 and empty < ends[0] < second < full, f"rank {rank}: group ends at {ends}\n" + "\n".join(lines))


def between(lines, first, last):
    """The lines of a record between two notes. c2 is the communicator along the dimension."""
    return lines[lines.index(f"# {first}") + 1:lines.index(f"# {last}")]


def test_exchanges_with_a_count_for_each_rank(run):
    _, records = run("ragged")
    for rank, lines in records.items():
        sends = ["ncclSend c2" for peer in range(8) if rank + peer > 0]
        exchanged = between(lines, "all-to-all-v", "all-gather-v")
        check(sorted(exchanged) == sorted(sends + ["ncclRecv c2"] * len(sends) + ["group end"]), f"rank {rank}: {exchanged}")
        # Every rank but the first has a block, and each block is a call in one group.
        gathered = between(lines, "all-gather-v", "reduce-scatter-v")
        check(gathered == ["ncclBroadcast c2"] * 7 + ["group end"], f"rank {rank}: {gathered}")
        reduced = between(lines, "reduce-scatter-v", "end")
        check(reduced == ["ncclReduce c2"] * 7 + ["group end"] * 2, f"rank {rank}: {reduced}")


def test_types_and_operators_that_only_nccl_knows(run):
    _, records = run("unknown")
    for rank, lines in records.items():
        passed = between(lines, "unknown", "refused here")
        check(passed == ["ncclAllReduce c2", "ncclAllGather c2", "ncclAllReduce c2"], f"rank {rank}: {passed}")
        check(between(lines, "refused here", "made") == [], f"rank {rank}: a number out of range reached NCCL")
        check(between(lines, "made", "end") == ["ncclAllReduce c2"], f"rank {rank}: the operator did not reach NCCL")


def test_two_threads_take_turns_on_a_shared_communicator(run):
    _, records = run("gate")
    for rank, lines in records.items():
        sums = [line for line in lines if line.startswith("ncclAllReduce")]
        check(len(sums) == 200 and len(set(sums)) == 1, f"rank {rank}: {len(sums)} sums on {set(sums)}")


def test_meshes_after_a_failure_that_one_rank_knows(run):
    """All ranks make anew only the communicators that have failed: a dimension's by a split, and
    the one from which others are split by a new id."""
    for rank, lines in run("anew")[1].items():
        first, second, third = (lines.index(f"# {name}") for name in ("dimension", "root", "ends"))
        made = [[line.split()[0] for line in part if line.split()[0] in ("init", "split")] for part in (lines[first:second], lines[second:third])]
        check(made == [["split"], ["init", "split"]], f"rank {rank}: {made}\n" + "\n".join(lines))
        check(not any("STALE" in line for line in lines), f"rank {rank}: {lines}")


def test_going_on_without_a_lost_rank(run):
    """The communicator that dimensions are split from is shrunk, with NCCL_SHRINK_ABORT, after
    all others have ended; then it is a mesh like any other."""
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
    run("lose without", library=run.recorder("SHRINK"))


def test_what_is_left_inherits_the_options(run):
    """A name and a configuration arrive at the communicators of the smaller mesh, which stays lazy.
    Options of the call replace them."""
    for rank, lines in run("inherit")[1].items():
        if rank > 5:
            continue
        names = [line for line in between(lines, "inherited", "replaced") if line.startswith(("split", "net"))]
        check(len(names) == 3 and "name=replicas" in names[0] and names[1] == "net mynet" and "name=shards" in names[2], f"rank {rank}: {names}")
        early = [line for line in between(lines, "replaced", "made") if line.startswith(("split", "init"))]
        check(not early, f"rank {rank}: a lazy mesh made {early}")
        later = [line for line in lines[lines.index("# made"):] if "name=" in line]
        check(later and all("name=shards" not in line and "name=replicas" not in line for line in later) and any("name=others" in line for line in later), f"rank {rank}: {later}")


@pytest.mark.parametrize("variables, expected", [
    ({}, [LEAST]),
    ({"RECORDER_VERSION": 22203}, ["minCTAs=1 maxCTAs=1 collnetEnable=-2147483648 nvlsCTAs=-2147483648"]),
    ({"RECORDER_VERSION": 23203}, [LEAST, "nvlsHostMode=2147483647"]),
    ({"NCCL_COMM_SPLIT_SHARE_RESOURCES": 1}, []),
], ids=["2.27", "2.22", "2.32", "shared resources"])
def test_only_communicators_without_operations_take_the_least(run, variables, expected):
    """Children inherit nothing of the configuration, unless they share their parent's channels."""
    for rank, lines in run("lose", **variables)[1].items():
        limited = [line.split(" ", 2) for line in lines if line.startswith("limits")]
        made = {match for line in lines for match in re.findall(r"^split .* -> (c\d+)", line)}
        check(not [comm for _, comm, _ in limited if comm in made], f"rank {rank}: a child has limits: {lines}")
        roots = [re.search(r"init (c\d+)|-> (c\d+)", line) for line in lines if line.startswith(("init", "shrink")) and "blocking=0" in line]
        roots = [match.group(1) or match.group(2) for match in roots]
        check(roots and all([what for _, one, what in limited if one == comm] == expected for comm in roots), f"rank {rank}: {roots} {limited}")
