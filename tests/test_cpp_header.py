"""devicemesh.hpp keeps its promises as a header: all of the C header is in it, all of it is
documented, no macro leaks, misuse does not compile, files of several standards, with and without
exceptions, make one program, and the examples of bindings/README.md run."""

import re

import pytest

from support.paths import CXX, LINK, ROOT, STRICT
from support.processes import launch, run

HEADER = ROOT / "include/devicemesh.hpp"


def compile(*arguments, source=None, code=0):
    """The compiler's outcome; None as `code` takes any."""
    return run(CXX, *arguments, input=source, code=code, timeout=170)


def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def test_complete():
    """Every function is called, every constant used, every field of an options struct set or
    read."""
    c = without_comments((ROOT / "include/devicemesh.h").read_text())
    cpp = without_comments(HEADER.read_text())
    wanted = {rf"\b{name}\(": name for name in re.findall(r"\b(dm_\w+)\(", c)}
    wanted |= {rf"\b{name}\b": name for name in re.findall(r"#define (DM_\w+)", c)}
    # The macros that make a placement stand for its kinds.
    cpp = re.sub(r"\bDM_PLACEMENT_(\w+)\b", r"DM_PLACEMENT_\1 DM_\1", cpp)
    fields = 0
    for struct, body in re.findall(r"typedef struct (dm_\w+) \{(.*?)\}", c, re.S):
        for field in re.findall(r"\(\*(\w+)\)|(\w+);", body):
            field = field[0] or field[1]
            if struct not in ("dm_placement",) and field not in ("struct_size", "reserved", "status", "message"):
                wanted[rf"\.{field}\b"] = f"{struct}.{field}"
                fields += 1
    assert len(wanted) > 100 and fields > 20, f"only {len(wanted)} names were found in devicemesh.h"
    missing = sorted(name for pattern, name in wanted.items() if not re.search(pattern, cpp))
    assert not missing, f"devicemesh.hpp does not have {missing}"


# Declarations that need no words of their own: specialisations, aliases that a standard interface
# demands, and the class that is documented before.
SELF_EVIDENT = ("using value_type", "using error_type", "using Calls", "template <class Style> class Basic",
                "template <> struct", "virtual ~", "inline namespace", "static constexpr Dtype value")


def test_documented():
    """Above each public class, function, alias and enumeration stands a /// comment."""
    begins = re.compile(
        r"(template <|\[\[nodiscard\]\]|static |explicit |virtual |constexpr |inline |class |struct |enum |using |Returns<|[A-Z]\w*\()"
    )
    undocumented, found, public = [], 0, True
    # The namespace detail is not public, so it is left out; the lines keep their numbers.
    public_text = re.sub(r"^namespace detail \{.*?^\}  // namespace detail",
                         lambda inner: "\n" * inner.group().count("\n"), HEADER.read_text(), flags=re.S | re.M)
    lines = [line.rstrip() for line in public_text.split("\n")]
    for at, line in enumerate(lines):
        if re.match(r"private:|public:|};|(class|struct|template .*\b(class|struct)) ", line):
            public = not line.startswith("private:")
        text, above = line.strip(), lines[at - 1].strip()
        continued = above.startswith(("template <", "std::enable_if_t")) or above.endswith(",")
        data = text.endswith(";") and "(" not in text and not text.startswith("using")
        if not public or len(line) - len(line.lstrip()) not in (0, 2) or not begins.match(text) or continued or data or "= delete" in text:
            continue
        if text.startswith(SELF_EVIDENT) or (text == "template <class T>" and lines[at + 1].startswith("struct DtypeOf<T, ")):
            continue
        found += 1
        if not above.startswith("///"):
            undocumented.append(f"{at + 1}: {text}")
    assert found > 100, f"only {found} declarations were found"
    assert not undocumented, "without a comment:\n" + "\n".join(undocumented)


@pytest.mark.parametrize("flags, expected", [((), {"DEVICEMESH_HPP"}), (("-fno-exceptions",), {"DEVICEMESH_HPP", "DM_NO_EXCEPTIONS"})])
def test_macros(flags, expected):
    """The header defines no macros beyond these, the C header's and the standard headers'."""
    includes = "\n".join(re.findall(r"#include <\w+>", HEADER.read_text()))

    def defined(source):
        done = compile("-std=c++17", *flags, "-I", ROOT / "include", "-dM", "-E", "-x", "c++", "-", source=source)
        return {line.split()[1].split("(")[0] for line in done.stdout.splitlines()}

    assert defined("#include <devicemesh.hpp>") - defined(f"{includes}\n#include <devicemesh.h>") == expected


# A body, and what the compiler says of it; the first lines compile, so that an error is about what
# it should be.
MISUSES = [("dm::Mesh copy = mesh;", "deleted"),
           ("dm::nothrow::Mesh quiet; quiet.finalize();", "nodiscard|discard|ignoring"),
           ("mesh.describe();", "nodiscard|discard|ignoring"),
           ("struct Own {}; std::vector<Own> values; mesh.all_reduce(nullptr, values);", "specialise dm::DtypeOf"),
           ("const std::vector<float> in; mesh.all_reduce(nullptr, in, in);", "the receiving buffer is const"),
           ("std::vector<float> in; std::vector<double> out; mesh.all_gather(nullptr, in, out);",
            "different types of elements"),
           ("std::vector<float> values; mesh.all_reduce(nullptr, values, DM_MAX);", "no matching"),
           ("mesh.proc<int>(\"ncclAllReduce\");", "a pointer to a function"),
           ("static_cast<void>(dm::init(\"cpu\", {\"dp\", 2}));", "no matching|conversion"),
           ("std::vector<Whole> values(1); mesh.broadcast(nullptr, values, 0);",
            "a Dtype of another size, so only a part of each element would be sent"),
           ("Whole value; mesh.broadcast(nullptr, &value, &value, 1, 0);", "a Dtype of another size"),
           ("std::vector<Half> values(1); mesh.send(nullptr, values, 0);", "a Dtype of another size"),
           ("std::vector<Owner> values(1); mesh.all_reduce(nullptr, values);", "not trivially copyable"),
           ("mesh.recv(nullptr, std::vector<float>(4), 0);", "a temporary, so the result would be lost"),
           ("std::vector<float> in(4); mesh.all_reduce(nullptr, in, std::vector<float>(4));",
            "a temporary, so the result would be lost"),
           ("mesh.all_reduce(nullptr, std::array<float, 2>{});", "a temporary, so the result would be lost"),
           ("mesh.broadcast(nullptr, std::string(4, ' '), 0);", "a temporary, so the result would be lost"),
           ("const std::vector<float> in(4); mesh.recv(nullptr, in, 0);", "the receiving buffer is const"),
           ("const float in[2] = {}; mesh.all_reduce(nullptr, in);", "the receiving buffer is const"),
           ("const float in[2] = {}; mesh.recv(nullptr, &in[0], 2, 0);", "the receiving buffer is const"),
           ("mesh.broadcast(nullptr, \"text\", 0);", "the receiving buffer is const"),
           ("std::vector<bool> bits(4); mesh.all_reduce(nullptr, bits);", "holds bits|no matching"),
           ("const std::vector<bool> bits(4); mesh.send(nullptr, bits, 0);", "holds bits|no matching"),
           ("std::vector<std::complex<float>> values(1); mesh.all_reduce(nullptr, values);", "specialise dm::DtypeOf"),
           ("std::vector<std::int16_t> values(1); mesh.all_reduce(nullptr, values);", "specialise dm::DtypeOf"),
           ("static_cast<void>(mesh.shrink(nullptr, std::chrono::microseconds(400)));", "no matching"),
           ("static_cast<void>(mesh.neighbor(nullptr, 1.5));", "cannot convert|could not convert|no viable"),
           ("float table[2][2]; mesh.all_reduce(nullptr, table);", "specialise dm::DtypeOf"), ]
# These types have a wrong DtypeOf: 32 bytes that would go as one, 2 bytes that would go as 4, and
# one that owns memory.
BEFORE = """#include <devicemesh.hpp>
#include <array>
#include <complex>
#include <memory>
struct Whole { int a; double b; char c[16]; };
struct Half { std::uint16_t bits; };
struct Owner { std::unique_ptr<int> it; };
template <> struct dm::DtypeOf<Whole> { static constexpr dm::Dtype value = dm::Dtype::uint8; };
template <> struct dm::DtypeOf<Half> { static constexpr dm::Dtype value = dm::Dtype::float32; };
template <> struct dm::DtypeOf<Owner> { static constexpr dm::Dtype value = dm::Dtype::int64; };
"""


OPTIONS = ["-std=c++17", *STRICT, "-I", ROOT / "include"]


def compiled(body, before=("-x", "c++", "-"), text=BEFORE):
    source = f"{text}void use(dm::Mesh &mesh)\n{{\n  mesh.check();\n  {body}\n}}\n"
    return compile(*OPTIONS, "-fsyntax-only", *before, source=source, code=None)


@pytest.mark.parametrize("body", [
    "std::vector<float> values; mesh.all_reduce(nullptr, values, dm::Op::max);",
    # Views do not own what they show, so they may be temporaries; and so may what is only read.
    "float values[4]; mesh.all_reduce(nullptr, dm::Span<float>(values, 2)); mesh.send(nullptr, std::vector<float>(4), 0);",
    # A rank is an integer of any type. A literal 0 after a count is a rank and no stream.
    "float values[2] = {}; std::size_t two = 2; long one = 1; mesh.recv(nullptr, values, two, 0); mesh.recv(nullptr, values, one, 0);"
    " mesh.recv(nullptr, values, one); mesh.send(nullptr, values, two); mesh.reduce(nullptr, values, values, two, 0);",
    "float in[2] = {}, out[2]; const float fixed[2] = {}; mesh.send(nullptr, in, 2, 0); mesh.send(nullptr, fixed, 2, 0); mesh.broadcast(nullptr, in, out, 2, 0);"
    " mesh.broadcast(nullptr, fixed, out, 2, 0); mesh.broadcast(nullptr, nullptr, out, 2, 0);",
    "static_cast<void>(mesh.shrink(nullptr, std::chrono::minutes(1)));",
])
def test_right_use(body):
    done = compiled(body)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def before(programs):
    """Options that include BEFORE as a precompiled header, which halves the time of a misuse."""
    header = programs.once("misuse.hpp", lambda path: path.write_text(BEFORE))
    programs.once("misuse.hpp.gch", lambda path: compile(*OPTIONS, "-x", "c++-header", header, "-o", path))
    return "-include", header, "-x", "c++", "-"


@pytest.mark.long
@pytest.mark.parametrize("body, says", MISUSES, ids=[body for body, _ in MISUSES])
def test_misuse(before, body, says):
    done = compiled(body, before, text="")
    assert done.returncode != 0, "it compiles"
    assert re.search(says, done.stderr), f"no error with {says!r}:\n{done.stderr}"


@pytest.mark.long
def test_precompiled(tmp_path):
    """As a precompiled header it brings no warning either. GCC forgets the header's pragmas
    then."""
    header = tmp_path / HEADER.name
    header.write_text(HEADER.read_text())
    options = [*OPTIONS, "-Winvalid-pch"]
    compile(*options, "-x", "c++-header", header, "-o", f"{header}.gch")
    use = "std::size_t use(dm::Span<const int> values) { return values.size(); }\nstd::size_t three() { return use({1, 2, 3}); }\n"
    compile(*options, "-include", header, "-fsyntax-only", "-x", "c++", "-", source=use)


def under_the_tool(program, ranks, says):
    assert launch(ranks, program).stdout.split() == [says] * ranks


EXAMPLES = re.findall(r"```cpp\n(.*?)```", (ROOT / "bindings/README.md").read_text(), re.S)


@pytest.mark.parametrize("number, flags, says", [(0, [], "6"), (1, ["-fno-exceptions"], "1")], ids=["exceptions", "no exceptions"])
def test_example_of_the_bindings_page(tmp_path, number, flags, says):
    assert len(EXAMPLES) == 2, f"bindings/README.md has {len(EXAMPLES)} examples in C++"
    compile("-std=c++17", *flags, *STRICT, "-I", ROOT / "include", "-x", "c++", "-", "-x", "none", *LINK, "-o",
            tmp_path / "example", source=EXAMPLES[number])
    under_the_tool(tmp_path / "example", 4, says)


def test_program_of_several_standards(tmp_path):
    """Files of several standards, with and without exceptions, make one program."""
    objects = []
    for name, flags in (("main", ["-std=c++17"]), ("modern", ["-std=c++20"]), ("quiet", ["-std=c++17", "-fno-exceptions"])):
        objects.append(tmp_path / f"{name}.o")
        compile(*flags, "-O1", *STRICT, "-I", ROOT / "include", "-c", ROOT / f"tests/cpp/program/{name}.cpp", "-o", objects[-1])
    compile(*objects, *LINK, "-o", tmp_path / "program")
    under_the_tool(tmp_path / "program", 2, "fine")


def test_contents():
    """The table of contents at the head names the sections, in their order."""
    text = HEADER.read_text()
    sections = [name.split(":")[0] for name in re.findall(r"^// ---- (.*) ----$", text, re.M)]
    contents = text[text.index("Contents."):text.index("Names in dm::detail")]
    assert re.findall(r"^ \*   (\S+(?: \S+)*)  ", contents, re.M) == sections
