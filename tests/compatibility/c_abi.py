"""The C ABI as the header has it, for the record of a release (record.py) and for the test that
later headers are held to it (test_compatibility.py).

Two pictures of it, both from the header alone, as include/devicemesh.h is generated from the Rust
source and exported names are compared with it elsewhere:

- layout: a C program made from the header prints structs, fields, offsets, sizes and constants.
- stub: a shared library in C with every function of the header and nothing in it, whose debug
  information abidw and abidiff read. The library's own speaks of Rust's types.
"""

import os
import re
import subprocess
from pathlib import Path

CC = os.environ.get("CC", "cc")
# abidiff lets one change pass beside new functions: a struct that has grown at its end.
GROWTH = """[suppress_type]
name = {name}
type_kind = struct
has_data_member_inserted_at = end
has_size_change = yes
"""
# abidiff also lets a struct pass in which only reserved bytes have become fields.
USE = """[suppress_type]
name = {name}
type_kind = struct
"""


class Refused(Exception):
    """A header that breaks programs compiled with an earlier one."""


def bare(header):
    return re.sub(r"/\*.*?\*/", "", header, flags=re.S)


def structs(header):
    """{struct: {field: its declaration}} in the header's order."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", bare(header), re.S):
        fields = [" ".join(field.split()) for field in body.split(";") if field.strip()]
        found[name] = {(re.search(r"\(\*(\w+)\)", field) or re.search(r"(\w+)(?:\[\w+\])?$", field)).group(1): field for field in fields}
    return found


def sized(header):
    """The structs that begin with their size."""
    return [name for name, fields in structs(header).items() if next(iter(fields)) == "struct_size"]


def functions(header):
    """{function: its declaration without the semicolon}."""
    return {name: " ".join(text.split()) for text, name in re.findall(r"^((?:const )?\w[\w ]* \*?(dm_\w+)\([^;]*\));", bare(header), re.M)}


def constants(header):
    return re.findall(r"^#define (DM_\w+) (?!\{)", header, re.M)


def run(*command, cwd=None):
    done = subprocess.run([str(part) for part in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"$ {' '.join(str(part) for part in command)}\n{done.stdout}\nexit code {done.returncode}")
    return done.stdout


def layout(header, folder):
    """The layout of a header's text, as lines: struct <name> <size>, field <struct.name>
    <offset> <size> <declaration>, constant <name> <value>."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "devicemesh.h").write_text(header)
    lines = ["#include <devicemesh.h>", "#include <stdio.h>", "int main(void) {"]
    for name, fields in structs(header).items():
        lines.append(f'  printf("struct {name} %zu\\n", sizeof({name}));')
        lines += [f'  printf("field {name}.{field} %zu %zu {declaration}\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
                  for field, declaration in fields.items()]
    lines += [f'  printf("constant {name} %lld\\n", (long long){name});' for name in constants(header)]
    (folder / "layout.c").write_text("\n".join([*lines, "}", ""]))
    run(CC, "-std=c11", "-I", folder, folder / "layout.c", "-o", folder / "layout")
    return run(folder / "layout")


def parse(text):
    """{"struct dm_x": ["48"], "field dm_x.y": ["8", "4", "int32_t y"], ...}"""
    lines = [line.split(" ", 2) for line in text.splitlines()]
    return {f"{kind} {name}": rest.split(" ", 2 if kind == "field" else 0) for kind, name, rest in lines}


def is_reserved(what):
    return what.startswith("field ") and what.endswith(".reserved")


def hidden_padding(text):
    """Returns in words where a layout has bytes that no field covers, or None. Callers leave
    anything there, so a later release could not use them."""
    layout = parse(text)
    for what, size in layout.items():
        if not what.startswith("struct "):
            continue
        name, at = what.split()[1], 0
        for field, (offset, width, _) in ((field, value) for field, value in layout.items() if field.startswith(f"field {name}.")):
            if int(offset) != at:
                return f"bytes {at} to {offset} of {name}, before {field.split('.')[1]}"
            at += int(width)
        if at != int(size[0]):
            return f"bytes {at} to {size[0]} at the end of {name}"
    return None


def compare_layouts(old, new, may_grow):
    """Refuses a layout in which programs of the old one would read or write elsewhere. The bytes
    of a field `reserved` may become other fields, because old programs have zeros there."""
    old, new = parse(old), parse(new)
    for what, was in old.items():
        if is_reserved(what):
            continue
        if what not in new:
            raise Refused(f"{what} is gone")
        kind, name = what.split()
        if kind == "struct":
            before, now = int(was[0]), int(new[what][0])
            if now < before or (now > before and name not in may_grow):
                raise Refused(f"{what} has {now} bytes, it had {before}")
        elif new[what] != was:
            raise Refused(f"{what} is {' '.join(new[what])}, it was {' '.join(was)}")
    for what, now in new.items():
        kind, name = what.split()
        owner = "struct " + name.split(".")[0]
        if kind != "field" or owner not in old or (what in old and not is_reserved(what)):
            continue
        begin, end = int(now[0]), int(now[0]) + int(now[1])
        free = [int(value) for value in old.get(f"field {name.split('.')[0]}.reserved", ("0", "0"))[:2]]
        if begin < int(old[owner][0]) and not free[0] <= begin < end <= free[0] + free[1]:
            raise Refused(f"{what} begins at byte {now[0]} of the {old[owner][0]} that {owner} had: a struct grows only at its end")


def stub(header, folder, soname):
    """A library with the header's functions, empty."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "devicemesh.h").write_text(header)
    bodies = [f"{declaration} {{ __builtin_trap(); }}" for declaration in functions(header).values()]
    (folder / "stub.c").write_text("\n".join(['#include "devicemesh.h"', *bodies, ""]))
    # Named alike everywhere, so that a record does not say where it was made.
    run(CC, "-std=c11", "-g", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", "stub.c", "-o", "libdevicemesh.so", cwd=folder)
    return folder / "libdevicemesh.so"


def abidw(library):
    return run("abidw", "--no-corpus-path", "--no-comp-dir-path", "--no-architecture", library.name, cwd=library.parent)


def additions(old, new, may_grow):
    """Returns the changes that abidiff lets pass. A rule stands only for a struct that has grown,
    or whose reserved bytes are used, because a rule also hides changes of the structs that its
    struct points to."""
    old, new = parse(old), parse(new)
    rules = []
    for what, size in old.items():
        if not what.startswith("struct ") or what not in new:
            continue
        name = what.split()[1]
        fields = [field for field in old if field.startswith(f"field {name}.")]
        changed = [field for field in fields if new.get(field) != old[field]]
        if new[what] != size and name in may_grow:
            rules.append(GROWTH.format(name=name))
        elif new[what] == size and changed and all(map(is_reserved, changed)):
            rules.append(USE.format(name=name))
    return "\n".join(rules)


def abidiff(recorded, library, rules):
    """Refuses what abidiff calls a change, but for new functions and what the rules let pass."""
    suppressions = library.parent / "additions.suppr"
    suppressions.write_text(rules)
    done = subprocess.run(["abidiff", "--no-architecture", "--no-added-syms", "--suppressions", suppressions, recorded, library],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    # Bits: 1 and 2 are errors of the tool or its use, 4 a change, 8 one that breaks programs.
    if done.returncode & 3:
        raise RuntimeError(f"abidiff: {done.stdout}")
    if done.returncode:
        raise Refused(f"abidiff:\n{done.stdout}")
