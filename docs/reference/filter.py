"""Doxygen's input filter: our headers with what doxygen wants to see in them. Lines keep their numbers.

A heading, `/* ---- views of a mesh ---- */`, begins a group; within a class it begins a named part.
The first comment is that of the file. Names of the C header become links wherever comments mention
them. hostccl.h, whose comments are plain ones, gets doxygen's.
"""

import re
import sys
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[2] / "include"
PREFIX = {"devicemesh.h": "C", "devicemesh.hpp": "C++", "hostccl.h": "hostccl"}
HEADING = re.compile(r"^(\s*)(?:/\*|//) -{4,} (.+?) -{4,}(?: \*/)?$")
NAME = re.compile(r"(?<![\w#:/&\"\[{])(dm_\w+|DM_\w+)(?:\.(\w+))?(?![\w(])")


def declared():
    """Of the C header: functions and macros, structs, and those parameters and members that are no English words."""
    code = re.sub(r"/\*.*?\*/", "", (INCLUDE / "devicemesh.h").read_text(), flags=re.S)
    structs = set(re.findall(r"^} (dm_\w+);", code, re.M))
    words = {word for word in re.findall(r"\b([a-z]+_\w+)(?=[,;)])", code) if not word.startswith("dm_")}
    return set(re.findall(r"\b(dm_\w+)\(", code)) | set(re.findall(r"^#define (DM_\w+) ", code, re.M)), structs, words


def linked(comment, names, structs, words):
    """A line of a comment with its links, and parameters as code."""
    def link(match):
        name, member = match.groups()
        if member and name in structs:
            return f"#{name}::{member}"
        return f"#{match.group(0)}" if name in names else match.group(0)

    code = re.sub(r"(?<![\w`>.\-\"])(\*?[a-z]+_\w+)(?![\w`(\-])",
                  lambda word: f"`{word[0]}`" if word[0].lstrip("*") in words else word[0], comment)
    return NAME.sub(link, code)


def file_comment(line, at, name):
    """A line of the first comment: `   Local         returns ...` is an item of a list."""
    if at == 0:
        return re.sub(r"^/\* ", f"/** @file {name} @brief ", line)
    line = re.sub(r"^ \*   (\S.*?) {2,}(?=\S)", r" * - **\1**: ", line)
    return re.sub(r"^ \* {10,}(?=\S)", " *   ", line)


def doxygen_comment(line):
    """What begins as a plain comment, before a declaration or behind a value, as doxygen's."""
    if line.startswith(("  ", "#define")) and not line.endswith("\\"):
        return re.sub(r'(?<=[,;\w"]) +/\* (?=.*\*/$)', "  /**< ", line)
    return re.sub(r"^/\* ", "/** ", line)


class Groups:
    """Doxygen's groups and parts from our headings, each closed where the next begins."""

    def __init__(self, name):
        self.prefix, self.group, self.part = PREFIX[name], False, False

    def heading(self, indent, title):
        title = title[0].upper() + title[1:]
        if indent:
            close, self.part = "/**@}*/ " if self.part else "", True
            return f"{indent}{close}/** @name {title} */ /**@{{*/"
        close, self.group = "/** @} */ " if self.group else "", True
        identifier = re.sub(r"\W+", "_", f"{self.prefix.replace('+', 'p')} {title}".lower()).strip("_")
        return f"{close}/** @defgroup {identifier} {self.prefix}: {title} */ /** @{{ */"

    def closed(self, line):
        """A line that ends a class's public part, or the namespace, and with it what is open there."""
        if self.part and line in ("private:", "};"):
            self.part = False
            return f"/**@}}*/ {line}"
        if self.group and line == "}  // namespace dm":
            self.group = False
            return f"/** @}} */ {line}"
        return line


def main(path):
    name = Path(path).name
    known = declared()
    groups, out = Groups(name), []
    first, inside, fenced = True, False, False
    for at, line in enumerate(Path(path).read_text().splitlines()):
        match = HEADING.match(line)
        if first:
            line = file_comment(line, at, name)
        elif match:
            out.append(groups.heading(*match.groups()))
            continue
        elif name == "hostccl.h":
            line = doxygen_comment(line)
        else:
            line = groups.closed(line)
        begins = re.match(r"^\s*(/\*\*|///)|.*/\*\*<", line)
        if inside or begins:
            fenced ^= "```" in line
            if not fenced and "```" not in line:
                line = linked(line, *known)
            inside = not line.lstrip().startswith("///")
        if "*/" in line:
            inside = first = False
        out.append(line)
    if groups.group:
        out[-2] += "/** @} */"  # the empty line before the include guard's end
    print("\n".join(out))


main(sys.argv[1])
