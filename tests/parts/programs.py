"""Builds the programs of tests/c and tests/cpp and the examples, and runs each on as many ranks as
it asks for."""

import re
import threading

from .base import CC, CXX, LIBRARY, LINK, ROOT, SCRATCH, STRICT, TOOL, Failure, comments, run

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# More warnings than users of devicemesh.hpp are likely to ask for.
PEDANTIC = ["-Wshadow", "-Wconversion", "-Wsign-conversion"]
# Two ways to let the ranks of a test be on several hosts, where each host is a name: every rank is
# alone on its host, and the ranks are on two hosts in turn.
ON_HOSTS = {
    "apart": {"DM_HOSTCCL_SHM": "0"},
    "two hosts": {"before": ["/bin/sh", "-c", 'DM_HOSTCCL_HOST=host$((RANK % 2)) exec "$0" "$@"']},
}
# `make test` runs each C test of several ranks on two hosts, with one number of ranks, and these
# apart. `make test-all` runs all of them in both ways, with all their numbers of ranks.
APART_QUICK = {("collectives", 4), ("ragged", 4), ("reductions", 4), ("lazy", 4), ("group_abort", 2), ("mismatch", 4),
               ("finalize_failed", 4)}
# The C tests that `make test-all` runs as C++17, too: the one of the INIT macros, and those that
# are linked to the static library. It compiles the others as C++17 and does not run them.
AS_CXX = {"header", "errors", "fork"}
STATIC = [str(LIBRARY / "libdevicemesh.a"), *(ROOT / "packaging/native-static-libs.txt").read_text().split()]


class Program:
    """A program that several cases run. The first of them builds it."""

    def __init__(self, name, *command):
        self.path = SCRATCH / name
        self.command = [*command, "-o", self.path]
        self.lock, self.is_built = threading.Lock(), False

    def run(self, ranks, *arguments, options=(), before=(), **variables):
        """Builds it if it is not built yet, and runs it on that many ranks, or without the launcher
        for 0. The words `before` stand before the program."""
        with self.lock:
            if not self.is_built:
                run(self.command)
                self.is_built = True
        launcher = [TOOL, "run", "-n", ranks, *options, "--"] if ranks else []
        return run([*launcher, *before, self.path, *arguments], env={"DM_TMP": str(SCRATCH), **variables})


def add_tests(runner):
    """Each C file as C11, each C++ file as C++17; `make test-all` also runs some C files that were
    built as C++17, and C++ with sanitizers."""
    # A backtrace needs only line numbers (-g1). Information on variables would double the
    # compiler's time. -Og has the warnings that -O0 lacks, and is as quick.
    c, cxx, optimised = [CC, "-std=c11", "-D_GNU_SOURCE"], [CXX, "-std=c++17"], ["-Og", "-g1"]
    there = {path.stem: comments(path)[0] for path in (ROOT / "tests/c").glob("*.c")}
    missing = [stem for stem in AS_CXX if stem not in there]
    missing += [(stem, count) for stem, count in APART_QUICK if count not in there.get(stem, ())]
    assert not missing, f"tests/parts/programs.py names tests that tests/c does not have: {missing}"
    for path in sorted((ROOT / "tests/c").glob("*.c")):
        program = add_variant(runner, path, "c11", [*c, *optimised], LINK)
        add_on_hosts(runner, path, program)
        if comments(path)[1]:
            add_variant(runner, path, "c11 static", [*c, *optimised], STATIC)
        if path.stem in AS_CXX:
            add_variant(runner, path, "c++17", [*cxx, *optimised, "-x", "c++"], LINK, "long")
            if comments(path)[1]:
                add_variant(runner, path, "c++17 static", [*cxx, *optimised, "-x", "c++"], STATIC, "long")
    for path in sorted((ROOT / "tests/cpp").glob("*.cpp")):
        add_variant(runner, path, "c++17", [*cxx, *optimised, *PEDANTIC], LINK)
        # To optimise the sanitizers' code takes the compiler three times as long.
        add_variant(runner, path, "c++17 sanitized", [*cxx, "-O0", "-g1"], [*LINK, *SANITIZE], "long")


def add_variant(runner, path, variant, compiler, link, mark="quick"):
    """A test that is compiled in this way, as a case for each number of ranks. Returns the
    program."""
    ranks, _, flags = comments(path)
    build = [*compiler, *STRICT, *flags, "-Iinclude", "-Itests/c", path, "-x", "none", *link]
    program = Program(f"{path.stem}-{path.parent.name}-{variant.replace(' ', '-')}", *build)

    def case(count):
        def body():
            program.run(count, options=("--prefix", "--failure-grace", "10"))
        return body

    for count in ranks:
        label = f"{path.relative_to(ROOT)} {variant}" + (f" x{count}" if count else "")
        runner.add(label, case(count), mark)
    return program


def add_on_hosts(runner, path, program):
    """The program of a C test of several ranks, on several hosts."""
    several = [count for count in comments(path)[0] if count > 1]
    if "/* one host */" in path.read_text()[:2000] or not several:
        return
    quick = {("two hosts", 4 if 4 in several else several[0])} | {("apart", count) for stem, count in APART_QUICK if stem == path.stem}

    def case(count, how):
        def body():
            program.run(count, options=("--prefix", "--failure-grace", "10"), **how)
        return body

    for count in several:
        for way, how in ON_HOSTS.items():
            runner.add(f"{path.relative_to(ROOT)} {way} x{count}", case(count, how), "quick" if (way, count) in quick else "long")


def add_examples(runner):
    built = {}

    def example(name, ranks, compiler, *arguments, expect=(), way=None, mark="quick"):
        if name not in built:
            source = next((ROOT / "examples").glob(f"{name}.c*"))
            define = f'-DDM_EXAMPLE_DATA="{ROOT}/examples/data/digits.csv"'
            built[name] = Program(f"example-{name}", *compiler, "-O2", *STRICT, define, "-Iinclude", source, *LINK)

        def body():
            output = built[name].run(ranks, *arguments, **(ON_HOSTS[way] if way else {}))
            for text in expect:
                if not re.search(text, output, re.M):
                    raise Failure(f"no line like {text!r} in\n{output}")
        runner.add(" ".join([f"examples/{name} x{ranks}", *arguments, *([way] if way else [])]), body, mark)

    cxx, c = [CXX, "-std=c++17"], [CC, "-std=c11"]
    accuracy = r"^test accuracy (9[5-9]|100)\.\d+ %$"
    same = r"^check: one process gets the same losses up to \S+ relative"
    example("hsdp_tp", 8, cxx, "--check", expect=[
        r"^DeviceMesh\(\(replicate=2, shard=2, tp=2\), 'cpu', stride=\(4, 2, 1\)\)$",
        r"^rank 6:  replicate \{2, 6\}  shard \{4, 6\}  tp \{6, 7\}$", r"^epoch 20  loss 0\.\d+$", accuracy, same])
    example("hsdp_tp", 4, cxx, "--shape", "1", "2", "2", "--check", expect=[accuracy, same])
    example("hsdp_tp", 6, cxx, "--shape", "3", "2", "1", "--check", expect=[accuracy, same], mark="long")
    example("shards", 8, cxx, "--check", expect=[
        r"^rank 6  dp 1  fsdp 2  holds 151\.\.175$", r"^rows over fsdp, then tp:    0 1 2 3 4 5 6 7 8 9 10 11$"])
    example("hello_mesh", 4, c, expect=[r"^rank 3 at \(dp=1, tp=1\): sum over tp 5, over dp 4$"])
    example("pipeline", 8, c, expect=[r"^rank 5 is stage 2; it sends to rank 3 along pp, which is world rank 7; gradients: right$"])
    example("pipeline", 2, c, expect=[r"^rank 1 is stage 0, the last one; gradients: right$"])
    # hsdp_tp computes the losses of one process itself, so the ranks' losses are those of one host.
    for way in ON_HOSTS:
        example("hsdp_tp", 8, cxx, "--check", expect=[accuracy, same], way=way)
        example("pipeline", 8, c, expect=[r"gradients: right$"], way=way)
