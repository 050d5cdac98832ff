"""Runs tests/c and tests/cpp as programs of another processor, under qemu-user.

The ranks and the library are those of 64-bit ARM. qemu translates their instructions, and the
kernel is this machine's own. The tool that starts the ranks is this machine's: it starts itself
again, which an emulated process can do only where the kernel knows qemu (binfmt_misc).

This shows what depends on the instruction set and on types of the C compiler (char is unsigned
there). It does not show the memory order of real ARM processors: qemu keeps the order of x86-64
where it runs there."""

import shutil

from harness import ROOT, TARGET, Failure, Skip, builder, launcher, programs, run
from parts.rust import passed

TRIPLE = "aarch64-unknown-linux-gnu"
CROSS = "aarch64-linux-gnu"
FOLDER = TARGET / "aarch64"
LIBRARY = FOLDER / TRIPLE / "release"
COMPILERS = {".c": [f"{CROSS}-gcc", "-std=c11", "-D_GNU_SOURCE"], ".cpp": [f"{CROSS}-g++", "-std=c++17"]}
# The C library of the other processor, from the packages of the cross compiler.
LIBC = f"/usr/{CROSS}"

# Programs that test what qemu does not do, and why.
LEFT_OUT = {
    "fork.c": "the memory of a child is not wiped, because qemu takes madvise(MADV_WIPEONFORK) and does nothing",
    "free.c": "the kernel's masks of blocked signals are not those of the program, because qemu renumbers signals",
    "library_threads.c": "as above",
}

# The programs of the quick gate, with their numbers of ranks. They cover the algebra, joining,
# collectives of every type, groups, events and shrinking. The whole gate has recover.c, too, which
# alone would take as long here as five others.
QUICK = {
    ("c", "collectives", 4), ("c", "comms", 2), ("c", "events", 4), ("c", "group_abort", 2), ("c", "mesh", 8), ("c", "ragged", 2),
    ("c", "reductions", 2), ("c", "shrink", 8), ("c", "threads", 2), ("cpp", "collectives", 8),
}

# In the quick gate cargo optimises the kernels of the reductions and their tests alone. qemu takes
# four times as long for kernels that are not optimised.
OPTIMISED = [word for package in ("hostccl-reduce", "hostccl-plain")
             for word in ("--config", f"profile.release.package.{package}.opt-level=2")]

# Many machines with 64-bit ARM have pages of 64 KiB. These programs run once more with such pages:
# they map every kind of memory that the library and the host engine share between processes.
LARGE_PAGES = ["-p", "65536"]
WITH_LARGE_PAGES = {
    "check_collectives.c", "collectives.c", "collectives.cpp", "events.c", "ragged.c", "recover.c", "reductions.c", "shrink.c", "threads.c",
    "world_joining.c",
}


def emulator():
    for name in ("qemu-aarch64-static", "qemu-aarch64"):
        if shutil.which(name):
            return [name, "-L", LIBC]
    raise Skip("no qemu-aarch64 here (Debian: apt-get install qemu-user-static)")


def cargo(command, *arguments, qemu, level=1, timeout=1800):
    """Calls cargo for the other processor, with the optimisations of that level."""
    name = TRIPLE.upper().replace("-", "_")
    environment = {
        f"CARGO_TARGET_{name}_LINKER": f"{CROSS}-gcc", f"CARGO_TARGET_{name}_RUNNER": " ".join(qemu),
        "CARGO_PROFILE_RELEASE_OPT_LEVEL": level, "CARGO_PROFILE_RELEASE_DEBUG": "0", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "4",
        "CARGO_INCREMENTAL": "0"
    }
    places = ["--target", TRIPLE, "--target-dir", FOLDER]
    return run(["cargo", command, "--release", "--quiet", *places, *arguments], env=environment, timeout=timeout)


def prepared():
    """The emulator's command, once everything that the gate needs is there."""
    qemu = emulator()
    for program in COMPILERS[".c"][0], COMPILERS[".cpp"][0]:
        if not shutil.which(program):
            raise Skip(f"no {program} here (Debian: apt-get install g++-{CROSS})")
    try:
        if TRIPLE not in run(["rustup", "target", "list", "--installed"]):
            run(["rustup", "target", "add", TRIPLE], timeout=600)
    except (Failure, FileNotFoundError) as why:
        raise Skip(f"no standard library of Rust for {TRIPLE} (rustup target add): {str(why).splitlines()[0]}") from None
    return qemu


def built(qemu, *arguments, **options):
    """Builds for the other processor with these arguments of cargo's, and this machine's tool."""
    cargo(*arguments, qemu=qemu, **options)
    # The tests build the same, so this is usually done already.
    run(["cargo", "build", "--release", "--quiet"], timeout=1800)
    # The gate would show nothing if it ran the library of this machine.
    header = (LIBRARY / "libdevicemesh.so").read_bytes()[:20]
    if header[18] != 183:
        raise Failure(f"{LIBRARY}/libdevicemesh.so is for machine {header[18]} of ELF, not for 64-bit ARM (183)")


def run_programs(qemu, only, pages=()):
    """Runs the programs for which `only(source, ranks)` holds, and returns how many there were."""
    def start(program, count):
        return [*launcher(TARGET / "release", count), *qemu, *pages, program], {"DM_TMP": str(FOLDER / "programs")}
    return programs(FOLDER / "programs", COMPILERS, builder(LIBRARY), start, 10, only)


def run_reductions(qemu, *arguments, **options):
    """Runs the tests of the reductions, whose kernels have instructions of their own for this
    processor, and returns how many there were."""
    return passed(cargo("test", "--package", "hostccl-reduce", "--tests", *arguments, qemu=qemu, **options))


def check_names():
    """Fails for a program that the lists above name and that is not there any more."""
    there = {path.name for folder in ("c", "cpp") for path in (ROOT / "tests" / folder).iterdir()}
    missing = sorted({*LEFT_OUT, *WITH_LARGE_PAGES} - there)
    if missing:
        raise Failure(f"tests/gates/emulated.py names {', '.join(missing)}, and neither tests/c nor tests/cpp has them")


def gate():
    check_names()
    qemu = prepared()
    built(qemu, "build")
    shown = run([*qemu, LIBRARY / "devicemesh", "show", "2,4", "replicate,shard", "--rank", 6])
    if "rank 6 is at (replicate=1, shard=2)" not in shown:
        raise Failure(f"the tool of 64-bit ARM shows another mesh:\n{shown}")
    count = run_programs(qemu, lambda source, _: source.name not in LEFT_OUT)
    print("     with pages of 64 KiB:", flush=True)
    count += run_programs(qemu, lambda source, _: source.name in WITH_LARGE_PAGES, LARGE_PAGES)
    return count + run_reductions(qemu)


def quick():
    """The library, the programs of QUICK and the tests of the reductions. Nearly without
    optimisations cargo builds in half the time."""
    qemu = prepared()
    built(qemu, "rustc", "--package", "devicemesh", "--lib", "--crate-type", "cdylib", *OPTIMISED, level=0)
    count = run_programs(qemu, lambda source, ranks: (source.suffix[1:], source.stem, ranks) in QUICK)
    if count != len(QUICK):
        raise Failure(f"{count} programs ran, and {len(QUICK)} are in QUICK of tests/gates/emulated.py")
    print("     with pages of 64 KiB:", flush=True)
    if run_programs(qemu, lambda source, ranks: (source.name, ranks) == ("collectives.c", 2), LARGE_PAGES) != 1:
        raise Failure("tests/gates/emulated.py names tests/c/collectives.c on 2 ranks, and there is no such case")
    return count + 1 + run_reductions(qemu, *OPTIMISED, level=0)
