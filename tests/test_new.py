"""`devicemesh new`: its projects build and run on eight processes with the commands that it prints.
The one in Rust compiles the library again, so only `make test-release` builds it.
tests/test_python.py has the one in Python."""

import os
import re
import shutil
import sys

import pytest

from support import pinned
from support.paths import ROOT, TOOL
from support.processes import environment, run

TRAINED = re.compile(r"step +1: loss (\d+\.\d+)\n(?:.*\n)*step 200: loss (\d+\.\d+)\n")


def made(tmp_path, *arguments):
    """Makes the project my_trainer, and returns its folder and the commands that were printed."""
    output = run(TOOL, "new", tmp_path / "my_trainer", *arguments).stdout
    commands = [line.strip() for line in output.splitlines() if line.startswith("  ")]
    assert commands[0] == f"cd {tmp_path / 'my_trainer'}", output
    folder = tmp_path / "my_trainer"
    assert "\n".join(commands[1:]) in (folder / "README.md").read_text()
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 4
    assert not re.search("@[A-Z]+@", "".join(path.read_text() for path in folder.rglob("*") if path.is_file()))
    return folder, commands[1:]


def trains(folder, command, **variables):
    """Runs a command in the folder, and checks that the loss falls."""
    path = f"{TOOL.parent}:{os.path.dirname(sys.executable)}:{os.path.dirname(pinned.cmake())}:{os.environ['PATH']}"
    output = run("sh", "-c", command, cwd=folder, timeout=170, env=environment(PATH=path, **variables)).stdout
    losses = TRAINED.search(output)
    assert losses, output
    assert float(losses[1]) > 10 * float(losses[2]), output


def test_cmake(tmp_path):
    """The page says how to build with a source tree."""
    folder, commands = made(tmp_path, "--cmake")
    option = re.search(r"give the first command (-D\S+)\.", (folder / "README.md").read_text())[1]
    commands[0] = commands[0].replace("-B build", f"-B build {option.replace('SOURCES', str(ROOT))}")
    trains(folder, " && ".join(commands))


@pytest.mark.release
@pytest.mark.timeout(900)
def test_cargo(tmp_path):
    folder, (build, start) = made(tmp_path, "--cargo", "--source", ROOT)
    # The crates of this tree's lock file are there already. The project lies inside this tree, so
    # it has to say that it is no part of its workspace.
    shutil.copy(ROOT / "Cargo.lock", folder)
    with open(folder / "Cargo.toml", "a") as manifest:
        manifest.write("[workspace]\n")
    # The compiler is quicker where it optimises nothing, and few steps are trained.
    quick = environment(CARGO_PROFILE_RELEASE_OPT_LEVEL=0)
    run("sh", "-c", build.replace("--release", "--release --offline --quiet"), cwd=folder, timeout=800, env=quick)
    trains(folder, start)


@pytest.mark.parametrize("arguments, words", [
    (["my trainer", "--cmake"], 'so "my trainer" cannot be one'),
    (["..", "--cmake"], 'so ".." cannot be one'),
    (["install", "--cmake"], 'is no word of cmake or cargo, so "install" cannot be one'),
    (["full", "--python"], "full has files already; choose a folder that is empty or not there"),
    (["new", "--cargo"], "--source"),
    (["new", "--cargo", "--source", "nowhere"], "cannot read nowhere/Cargo.toml"),
    (["new"], "<--cmake|--python|--cargo>"),
])
def test_a_refused_project_writes_nothing(tmp_path, arguments, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    done = run(TOOL, "new", *arguments, cwd=tmp_path, code=2, merged=True)
    assert words in done.stdout
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "notes.txt"]
