"""Compares the C ABI with its records (tests/compatibility/records, which `make abi-record`
writes): layouts, exported names, and abidiff. Each comparison refuses headers that break programs,
and accepts headers that only add to the ABI. Programs compiled against an earlier header, and
against one of the future, run on this library."""

import re
import shutil
import sys

import pytest

from support.paths import LIBRARY, ROOT

sys.path.insert(0, str(ROOT / "tests/compatibility"))
import c_abi  # noqa: E402
import record  # noqa: E402

SONAME = f"libdevicemesh.so.{record.series()}"
HEADER = (ROOT / "include/devicemesh.h").read_text()
RECORD = record.RECORDS / record.series()
needs_abidiff = pytest.mark.skipif(not shutil.which("abidiff"), reason="no abidiff here (Debian: apt-get install abigail-tools), so functions' types are not compared")
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
            if how == "layout":
                c_abi.compare_layouts(self.layout, c_abi.layout(header, self.folder), c_abi.sized(header))
            else:
                c_abi.abidiff(self.abi, c_abi.stub(header, self.folder, SONAME), c_abi.sized(header))
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
    assert refused is None, f"include/devicemesh.h breaks programs compiled against {RECORD.name}: {refused}\nbelow 1.0 that needs a new minor version"


@released
def test_library_exports_what_was_released(recorded):
    exported = {line.split()[-1] for line in c_abi.run("nm", "-D", "--defined-only", LIBRARY / "libdevicemesh.so").splitlines()}
    assert set(c_abi.functions(recorded.header)) <= exported


# Changes of today's header, and the comparisons that refuse each.
MUTATIONS = [
    ("nothing", "", "", ()),
    ("a new function", "dm_status dm_lookup(", "dm_status dm_later(int32_t more);\ndm_status dm_lookup(", ()),
    ("a new constant", "#define DM_STATUS_OK 0", "#define DM_STATUS_LATER 1000\n#define DM_STATUS_OK 0", ()),
    ("a struct that grows at its end", "} dm_init_options;", "  int64_t later;\n} dm_init_options;", ()),
    ("a function that is gone", "dm_status dm_lookup(", "dm_status dm_looked_up(", ("abidiff",)),
    ("one more parameter", "dm_status dm_group_ranks(const struct dm_mesh *mesh,", "dm_status dm_group_ranks(const struct dm_mesh *mesh, int32_t more,", ("abidiff",)),
    ("a parameter of another size", "dm_reduce_scatter(const struct dm_mesh *mesh,", "dm_reduce_scatter(int32_t mesh,", ("abidiff",)),
    ("a field in the middle", "  const char *comm_name;", "  int64_t early;\n  const char *comm_name;", ("layout", "abidiff")),
    ("a field in what was padding", "  const void *nccl_config;", "  uint32_t early;\n  const void *nccl_config;", ("layout", "abidiff")),
    ("a field of another type", "  int64_t timeout_ms;\n} dm_init_options;", "  uint64_t timeout_ms;\n} dm_init_options;", ("layout",)),
    ("a struct without a size that grows", "} dm_placement;", "  int32_t more;\n} dm_placement;", ("layout", "abidiff")),
    ("another number", "#define DM_STATUS_TIMEOUT 7", "#define DM_STATUS_TIMEOUT 17", ("layout",)),
]


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("name, old, new, refusing", MUTATIONS, ids=[name for name, *_ in MUTATIONS])
def test_changed_header(today, name, old, new, refusing, how):
    """Each comparison refuses what it is there for, and lets additions pass."""
    # Comments stand between the last field and the end of a struct in the header as it is.
    text = re.sub(r"\n\s*\n", "\n", c_abi.bare(HEADER))
    assert old in text, f"no {old!r} in the header"
    refused = today.hold(text.replace(old, new, 1), how)
    assert (refused is not None) == (how in refusing), f"{how} {f'refuses it: {refused}' if refused else 'lets it pass'}"


def compile_and_run(folder, source, header, *flags, ranks=0):
    """Compiles a program of tests/compatibility against a header, runs it, and gives its output."""
    (folder / "devicemesh.h").write_text(header)
    c_abi.run(c_abi.CC, "-std=c11", "-Wall", *flags, "-I", folder, ROOT / "tests/compatibility" / source, "-L", LIBRARY, "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}",
              "-o", folder / "program")
    return c_abi.run(*([LIBRARY / "devicemesh", "run", "-n", ranks, "--"] if ranks else []), folder / "program")


@pytest.mark.skipif(not (RECORD / "least_sizes.txt").exists(), reason=f"{SONAME} has not been released")
def test_least_sizes_of_structs(tmp_path):
    """The least struct sizes that were recorded are the library's."""
    sizes = {what.split()[1]: size[0] for what, size in c_abi.parse((RECORD / "least_sizes.txt").read_text()).items()}
    text = (ROOT / "tests/compatibility/least_sizes.c").read_text()
    missing = [name for name in sizes if f"LEAST_{name}" not in text]
    assert not missing, f"tests/compatibility/least_sizes.c does not try {missing}"
    compile_and_run(tmp_path, "least_sizes.c", HEADER, *(f"-DLEAST_{name}=((size_t){size})" for name, size in sizes.items()))


def future():
    """A header whose structs have grown."""
    grown = re.sub(r"\} (\w+);", lambda end: f"  int64_t later;\n{end.group(0)}" if end.group(1) in c_abi.sized(HEADER) else end.group(0), HEADER)
    assert grown.count("int64_t later;") == len(c_abi.sized(HEADER)), "the header of the future is not one"
    return grown


EARLIER = sorted((ROOT / "tests/compatibility/headers").glob("*/devicemesh.h")) + sorted(record.RECORDS.glob("*/devicemesh.h"))
HEADERS = {**{f"{path.parent.parent.name}-{path.parent.name}": path.read_text for path in EARLIER}, "today": lambda: HEADER, "future": future}


@pytest.mark.parametrize("name", HEADERS)
def test_program_of_another_header(tmp_path, name):
    """A program of two ranks, compiled against an earlier header, today's, and one of the
    future, on this library."""
    assert EARLIER, "there is no earlier header"
    output = compile_and_run(tmp_path, "earlier.c", HEADERS[name](), *(["-DFUTURE"] if name == "future" else []), ranks=2)
    assert output.count("sum 1") == 2, output
