"""The Rust tests: each test program is a case, so that those that wait run beside those that
compute.

`cargo test` builds the programs, once for all of them, and runs the documentation's examples."""

import json
import re
import subprocess
import threading
from pathlib import Path

from support.cargo import WITHOUT, WORKSPACE, build_variables
from support.pinned import Unavailable, ucx_of_wheel

from .base import ROOT, TARGET, Failure, Skip, run

BUILD = ["cargo", "test", *WORKSPACE, "--no-run", "--quiet", "--message-format=json"]
BUILD_DEADLINE = 1800
# These test programs take over 10 s, in which they mostly wait. They begin first, so that none of
# them is the last one that runs.
LENGTHY = ["src/lib.rs", "hostccl/src/lib.rs", "tool/tests/run/main.rs", "tests/store_attack.rs"]
# The test programs whose ranks are processes: each process is a host of its own, too.
OF_PROCESSES = ["hostccl/tests/c_library.rs", "hostccl/tests/faults.rs", "hostccl/tests/processes.rs"]


def sources():
    """The first source file of each test program of the workspace, relative to ROOT."""
    told = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, check=True, capture_output=True, text=True)
    packages = [package for package in json.loads(told.stdout)["packages"] if package["name"] not in WITHOUT]
    targets = [target for package in packages for target in package["targets"]]
    return sorted(str(Path(target["src_path"]).relative_to(ROOT)) for target in targets if target["test"] and target["kind"][0] != "bench")


class Programs:
    """The test programs, by source file."""

    def __init__(self):
        # source file: (executable, the folder of its package)
        self.built = {}
        # Set once cargo has ended, well or not. The cases wait for it.
        self.is_done = threading.Event()

    def build(self):
        """Builds all of them; with warm artifacts that takes a second."""
        try:
            self.take(run(BUILD, timeout=BUILD_DEADLINE, env=build_variables()))
        finally:
            self.is_done.set()

    def take(self, said):
        """Takes the programs from what cargo has printed."""
        for line in said.splitlines():
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("reason") == "compiler-artifact" and message["executable"] and message["profile"]["test"]:
                source = str(Path(message["target"]["src_path"]).relative_to(ROOT))
                self.built[source] = message["executable"], Path(message["manifest_path"]).parent

    def case(self, source, *arguments, variables=dict, may_skip=True):
        """Runs a test program. `arguments` select tests, and must select one. `variables()` gives
        what is set in its environment. Without `may_skip` a test that says "skipped: " is a
        failure."""
        def body():
            self.is_done.wait()
            if source not in self.built:
                raise Failure(f"cargo built no test program of {source}")
            executable, folder = self.built[source]
            # Some tests call cargo for a library or an example.
            env = {**build_variables(), **variables()}
            # Without this option, a test that passes does not show that it has skipped itself.
            output = run([executable, *arguments, "--show-output"], timeout=600, cwd=folder, env=env)
            count = passed(output)
            if arguments and not count:
                raise Failure(f"{source}: {' '.join(arguments)} selects no test")
            skipped = sorted(set(re.findall(r"^skipped: .*", output, re.M)))
            if skipped and not may_skip:
                raise Failure(f"{source}: {'; '.join(skipped)}")
            for reason in skipped:
                print(f"     rust {source}: a test {reason}", flush=True)
            return count
        return body


def passed(output):
    """How many tests passed, by the last line of each of Rust's test programs."""
    counts = [int(count) for count in re.findall(r"^test result: ok\. (\d+) passed", output, re.M)]
    if not counts:
        raise Failure(f"no test ran:\n{output}")
    return sum(counts)


def wheels_ucx():
    """The variables that choose the UCX of the pinned wheel."""
    try:
        return {"DM_UCX_LIBRARY": str(ucx_of_wheel())}
    except Unavailable as why:
        raise Skip(str(why)) from None


def oldest_rust():
    """Type-checks what users build with the oldest Rust that Cargo.toml promises. A later compiler
    does not say which features of the language are younger than that Rust. It takes 80 s of
    processor time, because everything is compiled for that Rust alone. The tests are not checked,
    because they would take half as much again."""
    promised = re.search(r'^rust-version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M).group(1)
    try:
        if not re.search(rf"^{re.escape(promised)}-", run(["rustup", "toolchain", "list"]), re.M):
            run(["rustup", "toolchain", "install", promised, "--profile", "minimal"], timeout=300)
    except (Failure, FileNotFoundError) as why:
        raise Skip(f"no Rust {promised} here (rustup toolchain install): {str(why).splitlines()[0]}") from None
    check = ["cargo", "check", "--features", "cudarc", "--locked", "--quiet", "--target-dir", TARGET / "oldest-rust"]
    run(check, timeout=BUILD_DEADLINE, env={**build_variables(), "RUSTUP_TOOLCHAIN": promised})
    return 1


def add(runner):
    """Adds the cases, and returns what must be called before they run: it builds the programs."""
    programs = Programs()
    found = sources()
    missing = {*LENGTHY, *OF_PROCESSES} - set(found)
    assert not missing, f"tests/parts/rust.py names files that are no test program: {missing}"
    # This case does not wait for the programs, so it runs while they are built.
    runner.add("rust the oldest that is promised", oldest_rust, "long")
    for source in sorted(found, key=lambda source: source not in LENGTHY):
        runner.add(f"rust {source}", programs.case(source))
    for source in OF_PROCESSES:
        case = programs.case(source, variables=lambda: {"DM_HOSTCCL_SHM": "0"})
        runner.add(f"rust {source} apart", case, "quick" if source == OF_PROCESSES[-1] else "long")
    # The other tests take the machine's UCX, where there is one.
    over_wheel = programs.case("hostccl/src/lib.rs", "wire::ucx", variables=wheels_ucx, may_skip=False)
    runner.add("rust wire_ucx over the wheel's UCX", over_wheel, "long")
    runner.add("rust the model of recovery, four ranks", programs.case("tests/recovery_model/tests/four.rs", "--ignored"), "release")
    documentation = ["cargo", "test", *WORKSPACE, "--doc"]

    def documented():
        programs.is_done.wait()
        return passed(run(documentation, timeout=BUILD_DEADLINE, env=build_variables()))

    runner.add("rust documentation", documented)
    return programs.build
