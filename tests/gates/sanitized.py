"""Runs the library, the tool and the C and C++ tests under AddressSanitizer and under
ThreadSanitizer.

AddressSanitizer comes with LeakSanitizer, and for C and C++ with UndefinedBehaviorSanitizer.

The C compiler instruments the programs, and they are linked to the runtime that rustc brings,
because a process can have only one runtime. -Zsanitizer is for nightly compilers;
RUSTC_BOOTSTRAP=1 lets the stable compiler take it, for these builds alone. ThreadSanitizer must
see how the locks and channels of Rust's standard library work. So std is built too, from rustup's
rust-src, and no report needs to be suppressed."""

from harness import CXX, HOST, PLANTED, ROOT, STRICT, SYSROOT, TARGET, Failure, Skip, component, fails_with, launcher, programs, run
from harness import COMPILERS as PLAIN
from parts.rust import passed

SANITIZERS = {"asan": "address", "tsan": "thread"}
FOLDER = {kind: TARGET / kind for kind in SANITIZERS}
OPTIONS = {
    "asan": {"ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:abort_on_error=0",
             "UBSAN_OPTIONS": "print_stacktrace=1"},
    "tsan": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:history_size=7"},
}
FLAGS = {"asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "tsan": ["-fsanitize=thread"]}


# The C programs of the quick gate, with their numbers of ranks. They reach most of the code with
# `unsafe`: they cover shared memory, communicators and their ends, groups, aborts, recovery, forked
# children, the caller's callbacks, handles, and pointers that are NULL.
QUICK = {
    ("abort_threads", 2), ("collectives", 4), ("comms", 2), ("control_stores", 0), ("fork", 4), ("group_abort", 2), ("handles", 0),
    ("lazy", 4), ("log", 4), ("nulls", 0), ("ragged", 4), ("recover", 8), ("recover_threads", 4), ("reductions", 2), ("serialize", 4),
    ("shrink", 8), ("threads", 2), ("world_abort", 3),
}
# In these, each rank is a host of its own, so that their calls go over the wire.
QUICK_APART = {"lazy", "ragged", "recover_threads"}
# Without optimisations and line numbers, cargo builds in half the time.
QUICK_PROFILE = {"CARGO_PROFILE_RELEASE_OPT_LEVEL": "0", "CARGO_PROFILE_RELEASE_DEBUG": "0", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "4",
                 "CARGO_INCREMENTAL": "0"}


def cargo(kind, command, *arguments, profile=None, timeout=1800):
    """Runs cargo with everything instrumented. Little is optimised, which is quicker to build and
    leaves stacks that can be read. `profile` holds other settings of cargo's profile."""
    flags = [f"-Zsanitizer={SANITIZERS[kind]}", "-Cforce-frame-pointers=yes"]
    if kind == "asan":
        # Debug assertions check what unsafe code promises to the standard library, and overflows.
        flags.append("-Cdebug-assertions=yes")
    else:
        # ThreadSanitizer puts signals off that come outside a blocking function of libc. rustix
        # must call these functions: during a system call of its own, a SIGCHLD is never handled.
        flags.append("--cfg=rustix_use_libc")
    environment = {"RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": " ".join(flags), "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1", **OPTIONS[kind],
                   **(profile or {})}
    std = ["-Zbuild-std"] if kind == "tsan" else []
    places = ["--target", HOST, "--target-dir", FOLDER[kind]]
    return run(["cargo", command, "--release", *std, *places, *arguments], env=environment, timeout=timeout)


def build(kind):
    cargo(kind, "build", "--quiet")
    return FOLDER[kind] / HOST / "release"


def runtime_of(kind):
    """The sanitizer's runtime that comes with rustc."""
    folder = SYSROOT / "lib/rustlib" / HOST / "lib"
    found = list(folder.glob(f"librustc*_rt.{kind}.a"))
    if not found:
        raise Skip(f"this rustc has no runtime of the sanitizer ({folder}/librustc*_rt.{kind}.a); rustup's toolchains have it")
    return found[0]


def linker(kind, library):
    """Returns a function that compiles a program and returns the command that links it, with
    rustc's runtime in place of the compiler's."""
    runtime = runtime_of(kind)

    def command(compiler, source, program):
        objects = f"{program}.o"
        flags = [*FLAGS[kind], *compiler[1:], "-O1", "-g", "-fno-omit-frame-pointer", *STRICT]
        run([compiler[0], *flags, "-Iinclude", "-Itests/c", "-c", source, "-o", objects])
        whole = ["-rdynamic", "-Wl,--whole-archive", runtime, "-Wl,--no-whole-archive"]
        return [CXX, objects, f"-L{library}", "-ldevicemesh", f"-Wl,-rpath,{library}", *whole,
                "-lpthread", "-ldl", "-lm", "-lrt", "-o", program]
    return command


# rustc's runtime lacks the part of UndefinedBehaviorSanitizer that knows C++'s classes. The
# sanitized cases of tests/parts/programs.py have that part, because they use the compiler's own
# runtime.
COMPILERS = {**PLAIN, ".cpp": [*PLAIN[".cpp"], "-fno-sanitize=vptr"]}


def proved(kind, library, expected):
    """Checks that each planted defect is reported. Where the library makes the bad access, the
    report must name the library's function."""
    folder = FOLDER[kind] / "planted"
    folder.mkdir(parents=True, exist_ok=True)
    link = linker(kind, library)
    for name, words in expected.items():
        program = folder / name
        run(link(COMPILERS[".c"], PLANTED / f"{name}.c", program))
        fails_with([program], words, OPTIONS[kind])


def on_everything(kind, library, slow):
    def start(program, count):
        return [*launcher(library, count), program], {**OPTIONS[kind], "DM_TMP": str(FOLDER[kind] / "programs")}
    return programs(FOLDER[kind] / "programs", COMPILERS, linker(kind, library), start, slow)


ADDRESS = {
    "overflow": ["heap-buffer-overflow", "in dm_describe"],
    "use_after_free": ["heap-use-after-free", "in dm_rank"],
    "undefined": ["signed integer overflow"],
    "leak": ["detected memory leaks"],
}


def address():
    runtime_of("asan")
    library = build("asan")
    proved("asan", library, ADDRESS)
    return on_everything("asan", library, 10)


def quick():
    """AddressSanitizer on the library and the programs of QUICK alone, and on NCCL's profiler
    interface. The tool that starts the ranks is that of target/release."""
    runtime_of("asan")
    run(["cargo", "build", "--release", "--quiet"], timeout=1800)
    cargo("asan", "rustc", "--package", "devicemesh", "--lib", "--crate-type", "cdylib", "--quiet", profile=QUICK_PROFILE)
    library, folder = FOLDER["asan"] / HOST / "release", FOLDER["asan"] / "quick"
    proved("asan", library, ADDRESS)

    def start(program, count):
        hosts = {"DM_HOSTCCL_SHM": "0"} if program.name in QUICK_APART else {}
        return [*launcher(TARGET / "release", count), program], {**OPTIONS["asan"], **hosts, "DM_TMP": str(folder)}
    link = linker("asan", library)
    count = programs(folder, COMPILERS, link, start, 10, lambda source, ranks: source.suffix == ".c" and (source.stem, ranks) in QUICK)
    profiler = folder / "profiler"
    run(link(COMPILERS[".c"], ROOT / "tests/c/programs/profiler.c", profiler))
    for version in ("3", "6"):
        run([profiler, library / "libdevicemesh.so", version], env={**OPTIONS["asan"], "DM_TRACE_DIR": str(folder)})
    if count != len(QUICK):
        raise Failure(f"{count} programs ran, and {len(QUICK)} are in QUICK of tests/gates/sanitized.py")
    return f"{count + 2} runs"


def thread():
    component("rust-src", "lib/rustlib/src/rust/library/Cargo.lock")
    library = build("tsan")
    proved("tsan", library, {"race": ["data race", " dm_rank /"]})
    count = on_everything("tsan", library, 40)
    # In these Rust tests the ranks are threads of one process. store_bounds is not among them,
    # because it asks for much within some seconds.
    tests = ["--lib", *(part for name in THREADED for part in ("--test", name))]
    output = cargo("tsan", "test", "--package", "devicemesh", "--package", "hostccl", *tests, "--", f"--skip={MEASURED}", f"--skip={FORKED}")
    return count + passed(output)


# This test measures the memory of the process, and ThreadSanitizer takes several times as much.
MEASURED = "a_client_that_never_reads_is_not_listened_to"
# The child of this test drops a handle of a thread that only its parent has. ThreadSanitizer's
# runtime stops where it finds no such thread.
FORKED = "a_forked_child_leaves_the_worker_alone"
THREADED = ["world", "store_contract", "store_hostile", "store_wire", "communicators", "groups"]
