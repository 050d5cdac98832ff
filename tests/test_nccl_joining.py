"""Ranks join a world of device type cuda: which library is loaded, which device each rank takes,
and the errors for bad libraries and bad drivers (tests/nccl/joining.c, tests/support/nccl.py)."""

import re
import shutil

import pytest

from support import processes
from support.nccl import HERE, RECORDER, Job, check, job_of
from support.pinned import Unavailable

run = job_of("joining")


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
    (HERE / "cuda.c", f"tried {HERE}/cuda.c .*(invalid ELF header|file too short)"),
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
    refused(
        "DM_STATUS_MISMATCH",
        rf"rank 1 has NCCL 2\.{'27' if odd == 0 else '22'}\.\d, rank 0 has NCCL 2\.{'22' if odd == 0 else '27'}\.\d",
        **{f"RECORDER_VERSION_{odd}": 22203})


def test_versions_that_differ_between_ranks(run):
    output, _ = run("chosen", RECORDER_VERSION_5=22203)
    check(output.count("rank 5 has NCCL 2.22.3, rank 0 has NCCL 2.27.7") == 8, output)


def test_a_program_that_links_nccl_statically(run, programs, tmp_path):
    """Rank 0 passes the functions that it links. The others load the recorder, which
    DM_CCL_LIBRARY names for all of them."""
    linked = Job(programs, tmp_path, "linked", *RECORDER)
    for rank, lines in linked("", ranks=2, library=False, DM_CCL_LIBRARY=run.recorder())[1].items():
        check(any(line.startswith("ncclAllReduce") for line in lines), f"rank {rank}: {lines}")


@pytest.mark.parametrize("how, text", [
    ({"cuda": False}, "no CUDA driver that works: libcuda.so.1: cannot open shared object file.*use device type cpu"),
    ({"CUDA_VERSION": 9020}, r"supports CUDA 9\.2, and NCCL needs 10\.2"),
    ({"CUDA_COUNT": 0}, "sees 0 devices"),
], ids=["none", "too old", "no devices"])
def test_no_driver_that_works(refused, how, text):
    refused("DM_STATUS_DEVICE", text, **how)


@pytest.mark.parametrize("code, text",
                         [(100, "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected.*CUDA_VISIBLE_DEVICES"),
                          (803, "restart"), (999, "nvidia-smi"), (34, "stub"), (4321, "an error")])
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
    probe = processes.run("unshare", "--map-root-user", "--mount", "mount", "--bind", "/dev/null",
                          "/proc/sys/kernel/random/boot_id", code=None)
    if probe.returncode != 0:
        raise Unavailable("this machine makes no mount namespaces")
    wrapper = ("env", "--unset=LOCAL_RANK", "--unset=LOCAL_WORLD_SIZE", "sh", "-c", HOST, "sh")
    # The ranks make no mesh, because the recorder's engine works within one host.
    output, _ = run("join", wrapper=wrapper, cuda=run.driver("-DLACKS_UUID"), CUDA_COUNT=4, HOSTS=3, BOOT=tmp_path / "boot")
    sizes = (3, 3, 2)
    assert told(output, r"(local=.*)", 8) == [
        f"local={rank // 3}/{sizes[rank % 3]} host={rank % 3}/3 device={rank // 3}" for rank in range(8)
    ]
    # NCCL 2.31.2 hangs there (nccl#2385). The ranks of hosts with different sizes are told before.
    output, _ = run("join", wrapper=wrapper, cuda=run.driver("-DLACKS_UUID"), CUDA_COUNT=4, HOSTS=3,
                    BOOT=tmp_path / "boot", RECORDER_VERSION=23102)
    assert len(re.findall(r"joined DM_STATUS_LIBRARY .*nccl#2385", output)) == 8, output


def test_a_device_that_does_not_exist(refused):
    """One rank names it; all ranks are told."""
    refused("DM_STATUS_DEVICE", "device 8 does not exist: the CUDA driver sees 8 devices", ranks=3, what="beyond")


def test_two_ranks_on_one_device(refused):
    refused("DM_STATUS_DEVICE",
            r"ranks \d and \d are both on device \d of 4 on this host: .*NCCL_MULTI_RANK_GPU_ENABLE=1.*NCCL_HOSTID",
            ranks=8, CUDA_COUNT=4)


@pytest.mark.parametrize("switch", [{"NCCL_MULTI_RANK_GPU_ENABLE": 1}, {"NCCL_HOSTID": "mine"}], ids=["multi-rank", "host id"])
def test_two_ranks_on_one_device_are_wanted(run, switch):
    """The device is the local rank modulo the number of devices."""
    assert devices(run("chosen", CUDA_COUNT=4, **switch)[1]) == [0, 1, 2, 3] * 2


def test_a_driver_without_identities(run):
    """Ranks join although the driver does not give the identities of devices."""
    assert devices(run("chosen", cuda=run.driver("-DLACKS_UUID"), CUDA_COUNT=4)[1]) == [0, 1, 2, 3] * 2


def test_uneven_hardware(refused):
    refused("DM_STATUS_DEVICE", "uneven hardware: 8 ranks .* 3 devices", ranks=8, CUDA_COUNT=3)
