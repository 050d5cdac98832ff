"""For each command in the sh and console blocks of the pages, WAYS says which test executes it, or
why none can. A command that WAYS does not know is a failure, so a command that is added to a page
needs a line here. (README.md has tests/test_readme.py, and docs/tutorial.md
tests/test_tutorial.py. The pages in WITH_OUTPUTS have tests that run the commands of console
blocks and compare the outputs.)

The commands that are RUN are executed here. For the others this test only sees that the named test
is there and has the words that By.words asks for. Whether that test does what the command does is
for whoever adds the line to say: many run on hosts, programs and ports of their own.

The commands of docs/check.md take 18 s, because they measure a mesh of eight ranks. `make test`
leaves them out: tests/test_check.py runs them with fewer sizes."""

import os
import re
import shutil
from typing import NamedTuple

import pytest

from support.paths import LIBRARY, ROOT
from support.processes import environment, run
from test_links import pages

RUN = "run"


class By(NamedTuple):
    """Another test that executes the command, or one that differs as `note` says."""

    file: str
    # A pattern of the command's words, as the file has them.
    words: str
    note: str = ""


MPI = By("tests/interop/test_mpi_hosts.py", r"mpirun\.openmpi -n 8 --host|mpiexec\.mpich -n 8 -ppn", "where the launcher is installed")
README = "because README.md has the command"
# (page, a pattern of the command, RUN or By or why no test executes it). The first line that fits
# counts.
WAYS = [
    ("docs/check.md", r"devicemesh run -n 8 -- .*--compare", By("tests/test_check_records.py", "--compare", "two measurements may differ")),
    ("docs/check.md", r"devicemesh run -n 8 ", RUN),
    ("docs/check.md", r"devicemesh run --nnodes 2 ", By("tests/test_check_hosts.py", r'TOOL\), "check"', "without `devicemesh run`")),
    ("docs/check.md", r"(torchrun|mpirun) ", "needs the launcher. tests/interop starts other programs with these launchers."),
    ("docs/check.md", r"srun .* --device cuda", "needs Slurm and GPUs"),
    ("docs/hosts.md", r"devicemesh run --nnodes 2 ", By("tests/test_nodes.py", "--nnodes 2", "on addresses of one host")),
    ("docs/hosts.md", r"devicemesh info \| grep wire", "shows an address that the host of the page has"),
    ("docs/install.md", r"make build && sudo make install PREFIX=/usr/local",
     By("tests/test_install.py", '"make", "install"', "into a folder of its own")),
    ("docs/install.md", r"cmake -B build ", By("tests/test_install.py", r'cmake\("--install"', "into a folder of its own")),
    ("docs/install.md", r"cc train.c \$\(pkg-config .* devicemesh\) -o train$", By("tests/test_readme.py", "pkg-config", README)),
    ("docs/install.md", r"cc train.c .* devicemesh-static\) -o train$", By("tests/test_install.py", "devicemesh-static")),
    ("docs/install.md", r"cc +hello.c ", By("tests/test_readme.py", r"hello\.c", README)),
    ("docs/install.md", r"c\+\+ +train.cpp ", By("tests/test_readme.py", r"train\.cpp", README)),
    ("docs/log.md", r"DM_LOG=info devicemesh run -n 2 ./train", By("tests/test_log.py", "DM_LOG", "over a program that logs the same")),
    ("docs/reliability.md", r"devicemesh run -n 6 --restart rank .* recover ", By("tests/test_join.py", '"--restart", "rank"')),
    ("docs/reliability.md", r"devicemesh run -n 7 .* recover ", By("tests/test_recover.py", "examples/recover.c")),
    ("docs/reliability.md", r"devicemesh run -n 8 .* elastic ", By("tests/test_elastic.py", '"--check", "--pause", 5, "--replace", 30000')),
    ("docs/reliability.md", r"devicemesh run -n 3 .* examples/jax_elastic.py", By("tests/test_jax.py", "examples/jax_elastic.py")),
    ("docs/tool.md", r"devicemesh run --hosts alpha,beta ", By("tests/test_starting_hosts.py", "--hosts")),
    ("docs/tool.md", r"srun -N 2 .* devicemesh run ",
     By("tests/interop/test_slurm.py", '"srun", "-N", 2, "--ntasks-per-node", 1, .*TOOL, "run"', "where Slurm is installed")),
    ("docs/tool.md", r"devicemesh run --nnodes 2 ", By("tests/test_nodes.py", "--nnodes 2", "on addresses of one host")),
    ("docs/tool.md", r"devicemesh store --listen ", By("tests/test_store_service.py", '"store", "--listen"')),
    ("docs/tool.md", r"devicemesh run --store keeper --nnodes ", By("tests/test_run_store.py", '"--store", store.address, "--nnodes"')),
    ("docs/tool.md", r"devicemesh run --store keeper --hosts ", By("tests/test_run_store.py", '"--hosts", .*"--store"')),
    ("docs/tool.md", r"source <\(devicemesh completions bash\)", RUN),
    ("docs/tool.md", r"devicemesh man \| man -l -", RUN),
    ("docs/tool.md", r"devicemesh man --dir ", RUN),
    ("docs/why.md", r"devicemesh why",
     By("tests/test_why.py", 'TOOL, "why"', "over jobs that hang in this way, also in tests/test_why_hosts.py")),
    ("docs/guide/README.md", r"make guide", By("tests/test_guide.py", "examples/guide", "compiles the same programs")),
    ("docs/guide/README.md", r"target/release/devicemesh run -n 8 -- target/examples/guide/hsdp",
     By("tests/test_guide.py", "target/examples/guide")),
    ("docs/guide/multi_host.md", r"torchrun ",
     By("tests/interop/test_torch.py", '"--nnodes", 2, "--nproc-per-node"', "where PyTorch is there")),
    ("docs/guide/multi_host.md", r"srun ", By("tests/interop/test_slurm.py", r'"srun", "-N", 2, .*mesh', "where Slurm is installed")),
    ("docs/guide/multi_host.md", r"(mpirun|mpiexec) ", MPI),
    ("bindings/go/README.md", r"cargo build --release", By("tests/test_readme.py", "cargo build --release", README)),
    ("bindings/go/README.md", r"cd bindings/go && go build -o train ./examples/dataparallel",
     By("tests/test_go.py", '"build", "-o", .* "./examples/dataparallel"', "with its own toolchain")),
    ("bindings/go/README.md", r"../../target/release/devicemesh run -n 4 -- ./train", By("tests/test_go.py", 'TOOL, "run", "-n", 4')),
    ("bindings/python/README.md", r"python3 -m venv ",
     By("tests/test_python.py", '"-m", "venv"', "and the environment's own programs, by their paths")),
    ("bindings/python/README.md", r"pip install -v ./bindings/python",
     By("tests/test_readme.py", r"pip install \\./bindings/python", README)),
    ("bindings/python/README.md", r"python -m devicemesh run -n 8 -- python train.py", By("tests/test_python.py", '"-m", "devicemesh"')),
    # The command looks at all jobs of the user, also those of the tests beside this one.
    ("tool/README.md", r"devicemesh why", By("tests/test_why.py", 'TOOL, "why"', "with the number of a process of its own job")),
    ("tool/README.md", r"devicemesh ", RUN),
    ("CONTRIBUTING.md", r"make demo$", By("tests/test_readme.py", "make demo", README)),
    ("CONTRIBUTING.md", r"make (test|check)$", By(".ci/run", r"^part make check$(?:.*\n)*make test$")),
    ("CONTRIBUTING.md", r"make test ARGS=", "runs a test of `make test`"),
    ("CONTRIBUTING.md", r".ci/run$", "CI executes it"),
]
# Pages whose commands other tests execute, and a template.
ELSEWHERE = {"README.md", "docs/tutorial.md", "tool/templates/README.md"}
# The tests of the pages whose console blocks have outputs.
WITH_OUTPUTS = {"docs/tool.md": "test_tool_page.py", "docs/mesh.md": "test_mesh_page.py", "docs/threads.md": "test_guide.py"}
# Commands that print nothing, and a command that shows what they have done.
SHOWN_BY = {
    "source <(devicemesh completions bash)": "complete -p devicemesh",
    "devicemesh man --dir ~/.local/share/man/man1": "ls ~/.local/share/man/man1",
}


def commands():
    """(page, command) of every line in a sh block, without comments, and of every command in a
    console block of a page that has no test for its outputs."""
    found = []
    for path in pages():
        page, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if page in ELSEWHERE:
            continue
        blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
        lines = [re.split(r"\s+#", line)[0].strip() for block in blocks for line in block.splitlines()]
        found += [(page, line) for line in lines if line]
        # tests/test_guide.py runs the console blocks of docs/guide.
        if page not in WITH_OUTPUTS and path.parent != ROOT / "docs/guide":
            found += [(page, line) for line in re.findall(r"^\$ (.+)$", text, re.M)]
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


@pytest.mark.parametrize("test", sorted({how for _, _, how in WAYS if isinstance(how, By)}), ids=lambda test: test.file)
def test_other_tests_have_the_words(test):
    assert (ROOT / test.file).is_file(), test
    assert re.search(test.words, (ROOT / test.file).read_text(), re.M), f"{test.file} has no text like {test.words}"


def test_tests_of_outputs_are_there():
    for page, name in WITH_OUTPUTS.items():
        assert (ROOT / page).is_file() and (ROOT / "tests" / name).is_file(), name


def executed():
    """The pages whose commands run here."""
    for page in sorted({page for page, _, how in WAYS if how == RUN}):
        yield pytest.param(page, marks=[pytest.mark.release, pytest.mark.lengthy] if page == "docs/check.md" else [])


@pytest.mark.parametrize("page", executed())
def test_commands(page, tmp_path):
    """The page's commands one after another in a folder with a program `train`. Each of them
    succeeds, also where it stands before a pipe, and shows something."""
    (tmp_path / "train").write_text('#!/bin/sh\ntest -n "$RANK" && echo "rank $RANK trains"\n')
    (tmp_path / "train").chmod(0o755)
    env = environment(without=["DM_"], PATH=f"{LIBRARY}:{os.environ['PATH']}", HOME=tmp_path)
    left_out = []
    for where, command in commands():
        if where != page or WAYS[way(page, command)][2] != RUN:
            continue
        if "| man " in command and not shutil.which("man"):
            left_out.append(command)
            continue
        script = f"{command}\n{SHOWN_BY.get(command, '')}"
        shown = run("bash", "-o", "pipefail", "-ec", script, cwd=tmp_path, env=env, timeout=150).stdout
        assert shown.strip(), f"{command} shows nothing"
    if left_out:
        pytest.skip(f"no man here (Debian: apt-get install man-db), so this was left out: {', '.join(left_out)}")
