#!/usr/bin/env python3
"""What devicemesh.hpp promises as a header: all of the C header is in it, all of it is documented, no macro leaks, misuse does not compile,
files of several standards, with and without exceptions, make one program, and the examples of bindings/README.md run."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(os.environ.get("DM_ROOT", Path(__file__).resolve().parent.parent))
LIBRARY = Path(os.environ.get("DM_LIB_DIR", ROOT / "target/release"))
SCRATCH = Path(os.environ.get("DM_TMP", ROOT / "target/tests"))
CXX = os.environ.get("CXX", "c++")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
HEADER = ROOT / "include/devicemesh.hpp"


def compile(*arguments, source=None):
    return subprocess.run([CXX, *map(str, arguments)], input=source, capture_output=True, text=True, timeout=300)


def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def complete():
    """Every function is called, every constant used, every field of an options struct set or read."""
    c = without_comments((ROOT / "include/devicemesh.h").read_text())
    cpp = without_comments(HEADER.read_text())
    wanted = {rf"\b{name}\(": name for name in re.findall(r"\b(dm_\w+)\(", c)}
    wanted |= {rf"\b{name}\b": name for name in re.findall(r"#define (DM_\w+)", c)}
    fields = 0
    for struct, body in re.findall(r"typedef struct (dm_\w+) \{(.*?)\}", c, re.S):
        for field in re.findall(r"\(\*(\w+)\)|(\w+);", body):
            field = field[0] or field[1]
            if struct not in ("dm_placement",) and field not in ("struct_size", "status", "message"):
                wanted[rf"\.{field}\b"] = f"{struct}.{field}"
                fields += 1
    assert len(wanted) > 100 and fields > 20, f"only {len(wanted)} names were found in devicemesh.h"
    missing = sorted(name for pattern, name in wanted.items() if not re.search(pattern, cpp))
    assert not missing, f"devicemesh.hpp does not have {missing}"
    return len(wanted)


# Declarations that need no words of their own: specialisations, aliases that a standard interface demands, and the class that is documented before.
SELF_EVIDENT = ("using value_type", "using error_type", "using Calls", "template <class Style> class Basic", "template <> struct", "virtual ~",
                "inline namespace", "static constexpr Dtype value")


def documented():
    """Above each public class, function, alias and enumeration stands a /// comment."""
    begins = re.compile(r"(template <|\[\[nodiscard\]\]|static |explicit |virtual |constexpr |inline |class |struct |enum |using |Returns<|[A-Z]\w*\()")
    undocumented, found, public = [], 0, True
    # What is in detail belongs to nobody; the lines keep their numbers.
    public_text = re.sub(r"^namespace detail \{.*?^\}  // namespace detail", lambda inner: "\n" * inner.group().count("\n"), HEADER.read_text(),
                         flags=re.S | re.M)
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
    return found


def macros():
    """What the header defines beyond the C header and the standard ones."""
    includes = "\n".join(re.findall(r"#include <\w+>", HEADER.read_text()))

    def defined(source, *flags):
        done = compile("-std=c++17", *flags, "-I", ROOT / "include", "-dM", "-E", "-x", "c++", "-", source=source)
        assert done.returncode == 0, done.stderr
        return {line.split()[1].split("(")[0] for line in done.stdout.splitlines()}

    for flags, expected in (((), {"DEVICEMESH_HPP"}), (("-fno-exceptions",), {"DEVICEMESH_HPP", "DM_NO_EXCEPTIONS"})):
        ours = defined("#include <devicemesh.hpp>", *flags) - defined(f"{includes}\n#include <devicemesh.h>", *flags)
        assert ours == expected, f"{flags}: the header defines {sorted(ours)}"


# A body, and what the compiler says of it; the first lines compile, so that an error is about what it should be.
MISUSES = [
    ("dm::Mesh copy = mesh;", "deleted"),
    ("dm::nothrow::Mesh quiet; quiet.finalize();", "nodiscard|discard|ignoring"),
    ("mesh.describe();", "nodiscard|discard|ignoring"),
    ("struct Own {}; std::vector<Own> values; mesh.all_reduce(nullptr, values);", "specialise dm::DtypeOf"),
    ("const std::vector<float> in; mesh.all_reduce(nullptr, in, in);", "the receiving buffer is const"),
    ("std::vector<float> in; std::vector<double> out; mesh.all_gather(nullptr, in, out);", "different types of elements"),
    ("std::vector<float> values; mesh.all_reduce(nullptr, values, DM_MAX);", "no matching"),
    ("mesh.proc<int>(\"ncclAllReduce\");", "a pointer to a function"),
    ("static_cast<void>(dm::init(\"cpu\", {\"dp\", 2}));", "no matching|conversion"),
    ("std::vector<Whole> values(1); mesh.broadcast(nullptr, values, 0);", "a Dtype of another size, so only a part of each element would be sent"),
    ("Whole value; mesh.broadcast(nullptr, &value, &value, 1, 0);", "a Dtype of another size"),
    ("std::vector<Half> values(1); mesh.send(nullptr, values, 0);", "a Dtype of another size"),
    ("std::vector<Owner> values(1); mesh.all_reduce(nullptr, values);", "not trivially copyable"),
    ("mesh.recv(nullptr, std::vector<float>(4), 0);", "a temporary, so the result would be lost"),
    ("std::vector<float> in(4); mesh.all_reduce(nullptr, in, std::vector<float>(4));", "a temporary, so the result would be lost"),
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
    ("float table[2][2]; mesh.all_reduce(nullptr, table);", "specialise dm::DtypeOf"),
]
# Types whose DtypeOf is wrong: 32 bytes that would go as one, 2 bytes that would go as 4, and one that owns memory.
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


def misuse():
    def built(body):
        source = f"{BEFORE}void use(dm::Mesh &mesh)\n{{\n  mesh.check();\n  {body}\n}}\n"
        return compile("-std=c++17", *STRICT, "-I", ROOT / "include", "-fsyntax-only", "-x", "c++", "-", source=source)

    for right in ("std::vector<float> values; mesh.all_reduce(nullptr, values, dm::Op::max);",
                  # Views do not own what they show, so they may be temporaries; and so may what is only read.
                  "float values[4]; mesh.all_reduce(nullptr, dm::Span<float>(values, 2)); mesh.send(nullptr, std::vector<float>(4), 0);"):
        done = built(right)
        assert done.returncode == 0, done.stderr
    for body, says in MISUSES:
        done = built(body)
        assert done.returncode != 0, f"compiles: {body}"
        assert re.search(says, done.stderr), f"{body}\ngives no error with {says!r}:\n{done.stderr}"


def examples():
    """The examples of bindings/README.md on four ranks: the first with exceptions, the second without."""
    found = re.findall(r"```cpp\n(.*?)```", (ROOT / "bindings/README.md").read_text(), re.S)
    assert len(found) == 2, f"bindings/README.md has {len(found)} examples in C++"
    for source, flags, says in zip(found, ([], ["-fno-exceptions"]), ("6", "1")):
        program = SCRATCH / f"cpp_readme_{says}"
        done = compile("-std=c++17", *flags, *STRICT, "-I", ROOT / "include", "-x", "c++", "-", "-x", "none", "-L", LIBRARY, "-ldevicemesh",
                       f"-Wl,-rpath,{LIBRARY}", "-o", program, source=source)
        assert done.returncode == 0, done.stderr
        run(program, 4, says)


def run(program, ranks, says):
    done = subprocess.run([LIBRARY / "devicemesh", "run", "-n", str(ranks), "--", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == [says] * ranks, done.stdout + done.stderr


def program():
    folder = SCRATCH / "cpp_program"
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    for name, flags in (("main", ["-std=c++17"]), ("modern", ["-std=c++20"]), ("quiet", ["-std=c++17", "-fno-exceptions"])):
        objects.append(folder / f"{name}.o")
        done = compile(*flags, "-O1", *STRICT, "-I", ROOT / "include", "-c", ROOT / f"tests/cpp/program/{name}.cpp", "-o", objects[-1])
        assert done.returncode == 0, done.stderr
    done = compile(*objects, "-L", LIBRARY, "-ldevicemesh", f"-Wl,-rpath,{LIBRARY}", "-o", folder / "program")
    assert done.returncode == 0, done.stderr
    run(folder / "program", 2, "fine")


def main():
    names, declarations = complete(), documented()
    macros()
    misuse()
    program()
    examples()
    print(f"{names} names of the C header, {declarations} documented declarations")


if __name__ == "__main__":
    main()
