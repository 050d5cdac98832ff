"""Compares the C ABI with its records (tests/compatibility/records, which `make abi-record`
writes): layouts, exported names, and abidiff. Each comparison refuses headers that break programs,
and accepts headers that only add to the ABI. Programs compiled against an earlier header of this
SONAME, and against one of the future, run on this library. Programs of another SONAME are refused,
and two releases in one process do not mix (tests/compatibility/two_releases.c)."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from support.paths import LIBRARY, ROOT

sys.path.insert(0, str(ROOT / "tests/compatibility"))
import c_abi  # noqa: E402
import record  # noqa: E402

SONAME = f"libdevicemesh.so.{record.SERIES}"
HEADER = (ROOT / "include/devicemesh.h").read_text()
RECORD = record.RECORDS / record.SERIES
# dm_version as text.
VERSION = str(sum(scale * part for scale, part in zip((10_000, 100, 1), record.versions.numbers(record.versions.present()))))
needs_abidiff = pytest.mark.skipif(
    not shutil.which("abidiff"),
    reason="no abidiff here (Debian: apt-get install abigail-tools), so functions' types are not compared")
METHODS = ["layout", pytest.param("abidiff", marks=needs_abidiff)]
released = pytest.mark.skipif(not RECORD.exists(), reason=f"{SONAME} has not been released: nothing to hold it to")


class Baseline:
    """The promise that a header is held to: a record, or today's header for the cases that show
    which changes are refused."""

    def __init__(self, header, layout, abi, folder):
        self.header, self.layout, self.abi, self.folder = header, layout, abi, folder

    def hold(self, header, how):
        """The reason why the header breaks programs that were compiled against this one, or
        None."""
        try:
            layout, may_grow = c_abi.layout(header, self.folder), c_abi.sized(header)
            if how == "layout":
                c_abi.compare_layouts(self.layout, layout, may_grow)
            else:
                c_abi.abidiff(self.abi, c_abi.stub(header, self.folder, SONAME), c_abi.additions(self.layout, layout, may_grow))
        except c_abi.Refused as refused:
            return str(refused)
        return None


@pytest.fixture
def recorded(tmp_path):
    """The last release of this SONAME."""
    return Baseline((RECORD / "devicemesh.h").read_text(), (RECORD / "layout.txt").read_text(), RECORD / "devicemesh.abi", tmp_path)


@pytest.fixture
def today(tmp_path):
    """Today's header, as if it had been released."""
    folder = tmp_path / "today"
    layout, abi = c_abi.layout(HEADER, folder), folder / "devicemesh.abi"
    if shutil.which("abidiff"):
        abi.write_text(c_abi.abidw(c_abi.stub(HEADER, folder, SONAME)))
    return Baseline(HEADER, layout, abi, tmp_path / "held")


@released
@pytest.mark.parametrize("how", METHODS)
def test_header_keeps_what_was_released(recorded, how):
    refused = recorded.hold(HEADER, how)
    assert refused is None, (
        f"include/devicemesh.h breaks programs compiled against {RECORD.name}: {refused}\nbelow 1.0 that needs a new minor version"
    )


@released
def test_library_exports_what_was_released(recorded):
    exported = {line.split()[-1] for line in c_abi.run("nm", "-D", "--defined-only", LIBRARY / "libdevicemesh.so").splitlines()}
    assert set(c_abi.functions(recorded.header)) <= exported


# Changes of today's header, and the comparisons that refuse each.
MUTATIONS = [("nothing", "", "", ()),
             ("a new function", "dm_status dm_lookup(", "dm_status dm_later(int32_t more);\ndm_status dm_lookup(", ()),
             ("a new constant", "#define DM_STATUS_OK 0", "#define DM_STATUS_LATER 1000\n#define DM_STATUS_OK 0", ()),
             ("a struct that grows at its end", "} dm_init_options;", "  int64_t later;\n} dm_init_options;", ()),
             ("a function that is gone", "dm_status dm_lookup(", "dm_status dm_looked_up(", ("abidiff", )),
             ("one more parameter", "dm_status dm_group_ranks(const struct dm_mesh *mesh,",
              "dm_status dm_group_ranks(const struct dm_mesh *mesh, int32_t more,", ("abidiff", )),
             ("a parameter of another size", "dm_reduce_scatter(const struct dm_mesh *mesh,",
              "dm_reduce_scatter(int32_t mesh,", ("abidiff", )),
             ("a field in the middle", "  const char *comm_name;", "  int64_t early;\n  const char *comm_name;",
              ("layout", "abidiff")),
             ("a reserved field that is used", "  uint32_t reserved;\n  const void *nccl_config;",
              "  uint32_t early;\n  const void *nccl_config;", ()),
             ("a reserved field that is used in part", "  uint32_t reserved[5];",
              "  uint32_t early;\n  uint32_t reserved[4];", ()),
             ("a reserved field that is too small", "  uint32_t reserved;\n  const void *nccl_config;",
              "  uint64_t early;\n  const void *nccl_config;", ("layout", "abidiff")),
             ("a field of another type", "  int64_t timeout_ms;\n} dm_init_options;",
              "  uint64_t timeout_ms;\n} dm_init_options;", ("layout", "abidiff")),
             ("a struct without a size that grows", "} dm_placement;", "  int32_t more;\n} dm_placement;", ("layout",
                                                                                                            "abidiff")),
             ("another number", "#define DM_STATUS_TIMEOUT 7", "#define DM_STATUS_TIMEOUT 17", ("layout", )), ]


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("name, old, new, refusing", MUTATIONS, ids=[name for name, *_ in MUTATIONS])
def test_changed_header(today, name, old, new, refusing, how):
    """Each comparison refuses what it is there for, and lets additions pass."""
    # Comments stand between the last field and the end of a struct in the header as it is.
    text = re.sub(r"\n\s*\n", "\n", c_abi.bare(HEADER))
    assert old in text, f"no {old!r} in the header"
    refused = today.hold(text.replace(old, new, 1), how)
    assert (refused is not None) == (how in refusing), f"{how} {f'refuses it: {refused}' if refused else 'lets it pass'}"


def test_structs_have_no_hidden_padding(today):
    assert c_abi.hidden_padding(today.layout) is None, "name the padding `reserved`, so that a later release can use it"
    text = c_abi.bare(HEADER).replace("  uint32_t reserved;\n", "", 1)
    assert "before" in c_abi.hidden_padding(c_abi.layout(text, today.folder)), "a struct with padding passes"


def compile_and_run(folder, source, header, *flags, ranks=0):
    """Compiles a program of tests/compatibility against a header, runs it, and gives its output."""
    (folder / "devicemesh.h").write_text(header)
    c_abi.run(c_abi.CC, "-std=c11", "-Wall", *flags, "-I", folder, ROOT / "tests/compatibility" / source, "-L", LIBRARY,
              "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-o", folder / "program")
    return c_abi.run(*([LIBRARY / "devicemesh", "run", "-n", ranks, "--"] if ranks else []), folder / "program")


def test_least_sizes_of_structs(tmp_path, today):
    """The least struct sizes that were recorded are the library's (FIRST_SIZE in
    src/ffi/arguments.rs). Before the first release of a SONAME they are today's sizes."""
    recorded = RECORD / "least_sizes.txt"
    layout = c_abi.parse(recorded.read_text() if recorded.exists() else today.layout)
    sizes = {name: layout[f"struct {name}"][0] for name in c_abi.sized(HEADER) if f"struct {name}" in layout}
    text = (ROOT / "tests/compatibility/least_sizes.c").read_text()
    missing = [name for name in sizes if f"LEAST_{name}" not in text]
    assert not missing, f"tests/compatibility/least_sizes.c does not try {missing}"
    compile_and_run(tmp_path, "least_sizes.c", HEADER, *(f"-DLEAST_{name}=((size_t){size})" for name, size in sizes.items()))


def future():
    """A header whose structs have grown."""
    grown = re.sub(
        r"\} (\w+);", lambda end: f"  int64_t later;\n{end.group(0)}"
        if end.group(1) in c_abi.sized(HEADER) else end.group(0), HEADER)
    assert grown.count("int64_t later;") == len(c_abi.sized(HEADER)), "the header of the future is not one"
    return grown


HEADERS = {"recorded": lambda: (RECORD / "devicemesh.h").read_text(), "today": lambda: HEADER, "future": future}


@pytest.mark.parametrize("name", [pytest.param("recorded", marks=released), "today", "future"])
def test_program_of_another_header(tmp_path, name):
    """A program of two ranks, compiled against the last release's header, today's, and one of the
    future, on this library."""
    output = compile_and_run(tmp_path, "earlier.c", HEADERS[name](), *(["-DFUTURE"] if name == "future" else []), ranks=2)
    assert output.count("sum 1") == 2, output


def program_of_0_1(folder):
    """A program that was compiled against 0.1's header and linked against 0.1. It looks for its
    library in folder/lib, where nothing lies yet."""
    c_abi.stub((record.RECORDS / "0.1/devicemesh.h").read_text(), folder / "0.1", "libdevicemesh.so.0.1")
    (folder / "lib").mkdir()
    c_abi.run(c_abi.CC, "-std=c11", "-Wall", "-I", folder / "0.1", ROOT / "tests/compatibility/of_0_1.c", "-L",
              folder / "0.1", "-ldevicemesh", f"-Wl,-rpath,{folder}/lib", "-o", folder / "program")
    return folder / "program"


def outcome(*command, **variables):
    """A program's exit code, output and errors."""
    done = subprocess.run([str(part) for part in command], env={**os.environ, **variables}, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_program_of_0_1_does_not_start(tmp_path):
    """The dynamic linker refuses it before main, beside a library of today."""
    program = program_of_0_1(tmp_path)
    (tmp_path / "lib" / SONAME).symlink_to(LIBRARY / "libdevicemesh.so")
    code, output, errors = outcome(program)
    assert code == 127 and not output, f"exit code {code}: {output}"
    assert "libdevicemesh.so.0.1: cannot open shared object file" in errors, errors


FIRST_CALLS = ["dm_world_init", "dm_init", "dm_from_comms", "dm_deserialize", "dm_plan_ranks"]


def test_library_under_the_name_of_0_1(tmp_path):
    """Somebody may give today's library the name of 0.1. Then each call that can be a program's
    first one says so, and does nothing."""
    program, place = program_of_0_1(tmp_path), tmp_path / "lib/libdevicemesh.so.0.1"
    place.symlink_to(LIBRARY / "libdevicemesh.so")
    code, output, errors = outcome(program)
    began, *lines = output.splitlines()
    assert code == 0 and began == f"main: version {VERSION}" and len(lines) == len(FIRST_CALLS), f"exit code {code}: {output}{errors}"
    for call, line in zip(FIRST_CALLS, lines):
        assert line.startswith(
            f"{call}: DM_STATUS_UNSUPPORTED: this program asks for libdevicemesh 0.1, but {place} is libdevicemesh "
        ), line


LOADS = """
import ctypes, sys
library, mesh = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
library.dm_last_error.restype = ctypes.c_char_p
status = library.dm_init(b"cpu", (ctypes.c_int32 * 1)(1), ctypes.c_size_t(1), None, None, ctypes.byref(mesh))
print(library.dm_version(), status, library.dm_last_error().decode())
"""


@pytest.mark.parametrize("file, said",
                         [("libdevicemesh.so.0.1.0", "12 this program asks for libdevicemesh 0.1.0, but "),
                          ("libdevicemesh.so", "0 "), (SONAME, "0 ")])
def test_library_that_is_opened_by_name(tmp_path, file, said):
    """dlopen and dlsym need no version of the symbols. The file's name counts as in the test
    above."""
    place = tmp_path / file
    place.symlink_to(LIBRARY / "libdevicemesh.so")
    code, output, errors = outcome(sys.executable, "-c", LOADS, place, WORLD_SIZE="1", RANK="0")
    assert code == 0 and output.startswith(f"{VERSION} {said}"), f"exit code {code}: {output}{errors}"


def releases_in_one_process(folder, version_script):
    """Two libraries of a program: one was linked against today's libdevicemesh, the other against
    a release that does not exist, 0.99. Gives what dm_version says to each, by the order in which
    the program names the two."""
    today, other = folder / "libtoday.so", folder / "libother.so"
    (folder / "other").mkdir()
    (folder / "other/stub.c").write_text("unsigned dm_version(void) { return 9900; }\n")
    (folder / "other/stub.map").write_text("libdevicemesh.so.0.99 { global: dm_*; local: *; };\n")
    script = [f"-Wl,--version-script={folder}/other/stub.map"] if version_script else []
    shared = [c_abi.CC, "-shared", "-fPIC"]
    c_abi.run(*shared, "-Wl,-soname,libdevicemesh.so.0.99", *script, folder / "other/stub.c", "-o", folder / "other/libdevicemesh.so.0.99")
    source = ROOT / "tests/compatibility/two_releases.c"
    c_abi.run(*shared, "-DNAME=today", source, LIBRARY / SONAME, f"-Wl,-rpath,{LIBRARY}", "-o", today)
    c_abi.run(*shared, "-DNAME=other", source, folder / "other/libdevicemesh.so.0.99", f"-Wl,-rpath,{folder}/other", "-o", other)
    found = []
    for libraries in ([today, other], [other, today]):
        c_abi.run(c_abi.CC, "-DMAIN", source, *libraries, f"-Wl,-rpath,{folder}", "-o", folder / "program")
        found.append(c_abi.run(folder / "program").split())
    return found


def test_two_releases_in_one_process(tmp_path):
    """Each library of a program calls the release that it was linked against."""
    assert releases_in_one_process(tmp_path, version_script=True) == [[VERSION, "9900"]] * 2


def test_release_without_versions_in_one_process(tmp_path):
    """Releases before 0.2 have no versions, so the first library serves both. docs/install.md
    says so."""
    assert releases_in_one_process(tmp_path, version_script=False) == [[VERSION, VERSION], ["9900", "9900"]]
