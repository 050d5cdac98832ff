"""The JAX package against real JAX, on several ranks.

Most of the time goes to JAX and XLA, which trace and compile each program. One rank compiles, and
the other ranks find the program in the cache of the session (`compile_in_turn` in
bindings/jax/tests/ranks.py). `make test` runs one case of each collective over two ranks, and
the tests of values, errors, order and ragged calls. `make test-release` does so on four ranks, too,
and adds cases along dimensions of two ranks, and finite differences. If the machine has four
processors, it also runs all cases on eight ranks, which would take five minutes on two
processors."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.healing import killed_once
from support.jax import BYTECODE, FOLDER, HANDLERS, PACKAGE, prepared
from support.paths import LIBRARY, ROOT
from support.processes import environment, kill_all, launch, run

TESTS = PACKAGE / "tests"
MODULES = ["test_collectives", "test_errors", "test_order", "test_ragged", "test_finite_differences"]
# One case of each kind. The other cases vary axes, roots and operators. Eight ranks run them.
ONE_OF_EACH = [
    "all_reduce", "all_gather tiled", "reduce_scatter", "all_to_all tiled", "shift", "pipeline", "broadcast", "reduce",
    "gather", "scan"
]
# Dimensions with several groups, whose ranks are neighbours ("inner") or not ("outer").
OF_SEVERAL_GROUPS = ["all_reduce along inner", "pipeline along inner", "all_gather tiled along outer"]
SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# A busy machine compiles a hundred programs.
LIMIT = 900


@pytest.fixture(scope="session")
def python():
    return prepared()


def variables(**more):
    """The environment in which the packages of the source tree are found."""
    return environment(PYTHONPATH=f"{ROOT / 'bindings/python'}:{PACKAGE}", DM_LIBRARY=LIBRARY / "libdevicemesh.so",
                       DM_JAX_LIBRARY=HANDLERS, **BYTECODE, **more)


def compiled_in(folder):
    """Variables that make JAX keep every compiled program in `folder`, and compile without most
    optimisations, because there are many programs and each runs once."""
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"
    }


def on_ranks(count, *command, **more):
    return launch(count, *command, options=["--prefix"], env=variables(**more), cwd=TESTS, timeout=LIMIT - 60, merged=True).stdout


def unit_tests(python, ranks, names, folder):
    """Runs the tests of these names on every rank, all in one process, and returns how many there
    were."""
    output = on_ranks(ranks, python, "-m", "unittest", *(f"-k={name}" for name in names), *MODULES, **compiled_in(folder))
    counts = [int(count) for count in re.findall(r"^\[rank \d+\] Ran (\d+) tests", output, re.M)]
    assert len(counts) == ranks and len(set(counts)) == 1, output
    return counts[0]


def test_the_handlers_need_nothing_of_xla_and_export_what_is_ours(python):
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", HANDLERS).stdout))
    assert needed <= SYSTEM, f"{HANDLERS.name} needs {sorted(needed)}"
    exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only", HANDLERS).stdout.splitlines() if " T " in line}
    named = re.findall(r"^HANDLER\((\w+),", (PACKAGE / "src/handlers.cpp").read_text(), re.M)
    ours = {f"devicemesh_{name}" for name in named} | {"devicemesh_jax_connect", "devicemesh_jax_group", "devicemesh_jax_queued"}
    assert exported == ours and len(ours) == 16, exported ^ ours


@pytest.mark.lengthy
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.release)])
def test_one_of_each(python, tmp_path, ranks):
    cases = [f"test {name} along all" for name in ONE_OF_EACH]
    assert unit_tests(python, ranks, [*cases, "Values", "AcrossHosts", "Errors", "Order", "Ragged"], tmp_path) > 50


@pytest.mark.release
@pytest.mark.lengthy
@pytest.mark.timeout(LIMIT)
def test_four_ranks_in_several_groups(python, tmp_path):
    cases = [f"test {case}" for case in OF_SEVERAL_GROUPS]
    assert unit_tests(python, 4, [*cases, "FiniteDifferences"], tmp_path) == 4


def test_lost_ranks(python):
    """A rank aborts a mesh, and later its process ends; the others are inside jitted programs."""
    output = on_ranks(4, python, "lost.py")
    assert (output.count("goes on after aborted"), output.count("goes on after died")) == (4, 3), output
    assert "Traceback" not in output, f"the end of the processes is quiet\n{output}"


@pytest.mark.release
@pytest.mark.timeout(LIMIT)
@pytest.mark.skipif((os.cpu_count() or 1) < 4, reason="fewer than four processors take minutes for all cases on eight ranks")
def test_eight_ranks(python, tmp_path):
    assert unit_tests(python, 8, ["along", "Values", "Ragged", "FiniteDifferences"], tmp_path) > 40


@pytest.mark.long
@pytest.mark.timeout(LIMIT)
def test_beside_jax_distributed(python, free_port):
    output = on_ranks(4, python, "distributed.py", JAX_COORDINATOR=f"127.0.0.1:{free_port()}")
    assert output.count("fine") == 4, output


@pytest.mark.release
@pytest.mark.timeout(LIMIT)
def test_many_host_calls_beside_jitted_programs_under_load(python):
    """The sums are right, whatever runs when and on which thread."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        output = on_ranks(4, python, "-m", "unittest", "-k=beside_a_running_program", "test_order", DM_JAX_ROUNDS=120)
    finally:
        kill_all(busy)
    assert output.count("Ran 4 tests") == 4, output


@pytest.mark.release
def test_types():
    run(prepared(tools=True), "-m", "mypy", "--cache-dir", FOLDER / "mypy", cwd=PACKAGE,
        env=environment(MYPYPATH=ROOT / "bindings/python"), timeout=LIMIT)


@pytest.mark.release
@pytest.mark.timeout(LIMIT)
def test_the_wheel_trains_the_example(tmp_path):
    """The wheel, unpacked elsewhere, finds its handlers, for any Python of this platform;
    examples/jax_dp.py trains with it."""
    python = prepared()
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Without an environment of its own the build takes the headers that were fetched.
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, PACKAGE, cwd=tmp_path, timeout=LIMIT)
    (made,) = tmp_path.glob("*.whl")
    # The tag says on which systems the handlers run (PyPA's manylinux).
    machine = re.sub(r"[-.]", "_", sysconfig.get_platform()).replace("linux_", r"manylinux_2_\d+_")
    assert re.fullmatch(rf"devicemesh_jax-\d+\.\d+\.\d+-py3-none-{machine}\.whl", made.name), made.name
    run(*pip, "install", "--no-deps", "--target", tmp_path / "site", made, cwd=tmp_path, timeout=LIMIT)
    clean = environment(PYTHONPATH=f"{ROOT / 'bindings/python'}:{tmp_path}/site", DM_LIBRARY=LIBRARY / "libdevicemesh.so", **BYTECODE)
    where = run(python, "-c", "import devicemesh_jax._native as n; print(n.library._name)", cwd=tmp_path, env=clean).stdout.strip()
    assert Path(where) == tmp_path / "site/devicemesh_jax/_native/libdevicemesh_jax.so", where
    output = launch(4, python, ROOT / "examples/jax_dp.py", "--check", "--epochs", 20, cwd=tmp_path, env=clean,
                    timeout=LIMIT, merged=True).stdout
    assert re.search(r"check: one process gets the same losses up to \S+ relative", output), output
    assert re.search(r"test accuracy (9[0-9]|100)\.\d+ %", output), output


# tests/test_elastic.py has a training that heals in C++, and `test_lost_ranks` lost ranks in JAX.
@pytest.mark.release
@pytest.mark.timeout(LIMIT)
def test_a_training_heals(python):
    """examples/jax_elastic.py: rank 1 is killed in the middle, is started again, and gets the
    parameters. The losses are those of a job that nobody disturbs."""
    program = [python, ROOT / "examples/jax_elastic.py", "--epochs", 8]
    calm = launch(1, *program, env=variables(), timeout=LIMIT - 60, merged=True).stdout
    said = killed_once(program, "epoch 2 ", **variables())
    assert "rank 1 is done" in said and said.count("is in epoch 1 with 3 ranks") == 2, said
    losses = [dict(re.findall(r"^epoch (\d+)  loss of the last batch (\d+\.\d+)", text, re.M)) for text in (calm, said)]
    assert len(losses[0]) == 8 and losses[0].keys() == losses[1].keys(), said
    assert all(abs(float(losses[0][epoch]) - float(losses[1][epoch])) < 2e-3 for epoch in losses[0]), (calm, said)
