"""Every command in the sh and console blocks of the pages is executed. WAYS says for each command how, or which
other test runs it, or why no test can: it needs hosts or launchers that a machine with the tests may
lack. A command that WAYS does not know is a failure, so a command that is added to a page needs a
line here. (README.md has tests/test_readme.py, and docs/tutorial.md tests/test_tutorial.py. The
pages in WITH_OUTPUTS have tests that run the commands of console blocks and compare the outputs.)

The commands of docs/check.md take 18 s, because they measure a mesh of eight ranks. `make test` leaves
them out: tests/test_check.py runs them with fewer sizes."""

import os
import re
import shutil

import pytest

from support.paths import LIBRARY, ROOT
from support.processes import environment, run

RUN = "run"
# (page, a pattern of the command, RUN or what runs it instead). The first line that fits counts.
WAYS = [
    ("docs/check.md", r"devicemesh run -n 8 -- .*--compare", "tests/test_check_records.py, because two measurements may differ"),
    ("docs/check.md", r"devicemesh run -n 8 ", RUN),
    ("docs/check.md", r"devicemesh run --nnodes 2 ", "tests/test_check_hosts.py, on hosts of its own"),
    ("docs/check.md", r"(torchrun|mpirun) ", "tests/interop, with the launcher where it is installed"),
    ("docs/check.md", r"srun .* --device cuda", "needs Slurm and GPUs"),
    ("docs/hosts.md", r"devicemesh run --nnodes 2 ", "tests/test_several_hosts.py, on hosts of its own"),
    ("docs/hosts.md", r"devicemesh info \| grep wire", "shows an address that the host of the page has"),
    ("docs/install.md", r"make build && sudo make install PREFIX=/usr/local", "tests/test_install.py, into a folder of its own"),
    ("docs/install.md", r"cmake -B build ", "tests/test_install.py, into a folder of its own"),
    ("docs/install.md", r"cc train.c \$\(pkg-config .* devicemesh\) -o train$", "tests/test_readme.py, because README.md has it"),
    ("docs/install.md", r"cc train.c .* devicemesh-static\) -o train$", "tests/test_install.py"),
    ("docs/install.md", r"(cc|c\+\+) +(hello.c|train.cpp) ", "tests/test_readme.py, because README.md has it"),
    ("docs/log.md", r"DM_LOG=info devicemesh run -n 2 ./train", "tests/test_log.py, over a program that logs the same"),
    ("docs/reliability.md", r"devicemesh run -n [67] .* recover ", "tests/test_recover.py and tests/test_join.py"),
    ("docs/reliability.md", r"devicemesh run -n 8 .* elastic ", "tests/test_elastic.py"),
    ("docs/reliability.md", r"devicemesh run -n 3 .* examples/jax_elastic.py", "tests/test_jax.py"),
    ("docs/tool.md", r"devicemesh run --hosts alpha,beta ", "tests/test_starting_hosts.py"),
    ("docs/tool.md", r"srun -N 2 .* devicemesh run ", "tests/test_nodes_by_launcher.py"),
    ("docs/tool.md", r"devicemesh run --nnodes 2 ", "tests/test_nodes.py"),
    ("docs/tool.md", r"devicemesh store --listen ", "tests/test_store_service.py"),
    ("docs/tool.md", r"devicemesh run --store keeper ", "tests/test_run_store.py"),
    ("docs/tool.md", r"source <\(devicemesh completions bash\)", RUN),
    ("docs/tool.md", r"devicemesh man \| man -l -", RUN),
    ("docs/tool.md", r"devicemesh man --dir ", RUN),
    ("docs/why.md", r"devicemesh why", "tests/test_why.py and tests/test_why_hosts.py, over jobs that hang in this way"),
    ("docs/guide/README.md", r"make guide", "tests/test_guide.py compiles the same programs"),
    ("docs/guide/README.md", r"target/release/devicemesh run -n 8 -- target/examples/guide/hsdp", "tests/test_guide.py"),
    ("docs/guide/multi_host.md", r"(torchrun|srun|mpirun|mpiexec) ", "tests/interop, with the launcher where it is installed"),
    ("bindings/go/README.md", r"cargo build --release", "tests/run.py"),
    ("bindings/go/README.md", r"cd bindings/go && go build -o train ./examples/dataparallel", "tests/test_go.py, with its own toolchain"),
    ("bindings/go/README.md", r"../../target/release/devicemesh run -n 4 -- ./train", "tests/test_go.py"),
    ("bindings/python/README.md", r"pip install -v ./bindings/python", "tests/test_readme.py, because README.md has it"),
    ("bindings/python/README.md", r"python -m devicemesh run -n 8 -- python train.py", "tests/test_python.py"),
    ("tool/README.md", r"devicemesh ", RUN),
    ("CONTRIBUTING.md", r"make (demo|test|test ARGS=.*|check)$", "tests/test_readme.py and .ci/run"),
    ("CONTRIBUTING.md", r".ci/run$", "CI itself"),
]
# Pages whose commands other tests execute, and a template.
ELSEWHERE = {"README.md", "docs/tutorial.md", "tool/templates/README.md"}
# The tests of the pages whose console blocks have outputs.
WITH_OUTPUTS = {"docs/tool.md": "test_tool_page.py", "docs/mesh.md": "test_mesh_page.py", "docs/threads.md": "test_guide.py"}


def commands():
    """(page, command) of every line in a sh block, without comments, and of every command in a console
    block of a page that has no test for its outputs."""
    found = []
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bindings").rglob("*.md"), *(ROOT / "tool").rglob("*.md")]
    for path in sorted(pages):
        page = path.relative_to(ROOT).as_posix()
        blocks = re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.M | re.S)
        lines = [re.split(r"\s+#", line)[0].strip() for block in blocks for line in block.splitlines() if page not in ELSEWHERE]
        found += [(page, line) for line in lines if line]
        if page not in ELSEWHERE and page not in WITH_OUTPUTS and path.parent != ROOT / "docs/guide":  # tests/test_guide.py
            found += [(page, line) for line in re.findall(r"^\$ (.+)$", path.read_text(), re.M)]
    return found


def way(page, command):
    """The number of the line of WAYS that says how the command is executed, or None."""
    return next((at for at, (where, pattern, _) in enumerate(WAYS) if where == page and re.match(pattern, command)), None)


def test_every_command_has_a_way():
    known = {(page, command): way(page, command) for page, command in commands()}
    unknown = [f"{page}: {command}" for (page, command), at in known.items() if at is None]
    assert not unknown, "tests/test_page_commands.py has no way to run\n" + "\n".join(unknown)
    idle = [WAYS[at][:2] for at in range(len(WAYS)) if at not in known.values()]
    assert not idle, f"no page has these commands any more: {idle}"


def test_other_tests_are_there():
    for how in [*(how for _, _, how in WAYS), *(f"tests/{name}" for name in WITH_OUTPUTS.values())]:
        for name in re.findall(r"tests/[\w.]+|\.ci/run", how):
            assert (ROOT / name).exists(), how


def executed():
    """The pages whose commands run here."""
    for page in sorted({page for page, _, how in WAYS if how == RUN}):
        yield pytest.param(page, marks=[pytest.mark.long, pytest.mark.lengthy] if page == "docs/check.md" else [])


@pytest.mark.parametrize("page", executed())
def test_commands(page, tmp_path):
    """The page's commands one after another in a folder with a program `train`."""
    (tmp_path / "train").write_text("#!/bin/sh\ntest -n \"$RANK\"\n")
    (tmp_path / "train").chmod(0o755)
    env = environment(without=["DM_"], PATH=f"{LIBRARY}:{os.environ['PATH']}", HOME=tmp_path)
    for where, command in commands():
        if where != page or WAYS[way(page, command)][2] != RUN:
            continue
        if "man -l" in command and not shutil.which("man"):
            continue
        # `devicemesh why` finds no job here, and says so by its exit code.
        run("bash", "-c", command, cwd=tmp_path, env=env, code=None if command == "devicemesh why" else 0, timeout=150)
