"""The reference of the Go package as a page of the site, as `go doc` arranges it: the functions, then
each type with the functions that make it and its methods. The page is made from the source, so no Go
toolchain has to be there."""

import re

DECLARATION = re.compile(r"^(func|type|const|var) ")
NAME = re.compile(r"^func (?:\((?:\w+ )?\*?(?P<receiver>\w+)(?:\[[^\]]*\])?\) )?(?P<function>\w+)|^type (?P<type>\w+)")


class Item:
    """An exported declaration with its comment."""

    def __init__(self, comment, code):
        self.comment, self.code = comment, code
        found = NAME.match(code[0])
        self.receiver = found and found["receiver"]
        self.name = found and (found["function"] or found["type"])

    def makes(self):
        """The names of the types that the results of a function name."""
        results = re.sub(r"^func \w+(?:\[[^\]]*\])?", "", " ".join(self.code))
        depth = 0
        for at, letter in enumerate(results):
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                return re.findall(r"\*?\b([A-Z]\w*)", results[at:].split(" error")[0])
        return []


def is_exported(name):
    return name is not None and name[0].isupper()


def exported_part(code):
    """Removes the unexported fields or constants of a declaration."""
    if not re.search(r"(struct|interface) \{$|^(const|var) \($", code[0]):
        return code
    kept, comment, is_kept = [], [], True
    for line in code[1:-1]:
        if re.match(r"^\t//", line):
            comment.append(line)
            continue
        if re.match(r"^\t\S", line):
            is_kept = bool(re.match(r"^\t\*?[A-Z]", line))
        if is_kept and (line.strip() or kept):
            kept += [*comment, line]
        comment = []
    while kept and not kept[-1].strip():
        kept.pop()
    return [code[0], *(kept or ["\t// has no exported fields"]), code[-1]]


def items(path):
    """The exported declarations of a file, and the comment of the package if it stands there."""
    lines, comment, found, package, at = path.read_text().splitlines(), [], [], [], 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("//") and not line.startswith("//go:"):
            comment.append(line[2:].removeprefix(" "))
        elif line.startswith("package "):
            package, comment = comment, []
        elif DECLARATION.match(line):
            end = at
            if re.search(r"[({]$", line):
                end = next(number for number in range(at + 1, len(lines)) if re.match(r"^[)}]", lines[number]))
                # The parameters of a function may take several lines.
                if re.match(r"^\).*\{$", lines[end]):
                    end = next(number for number in range(end + 1, len(lines)) if lines[number] == "}")
            code = lines[at:end + 1]
            if line.startswith("func"):
                head = next(number for number, part in enumerate(code) if re.search(r"\{$|\}$", part) or number == len(code) - 1)
                code = [*code[:head], re.sub(r" \{(?: .* \})?$", "", code[head])]
            found.append(Item(comment, exported_part(code)))
            comment, at = [], end
        else:
            comment = []
        at += 1
    return package, [item for item in found if shown(item)]


def shown(item):
    if item.name is None:  # constants or variables
        return bool(re.search(r"^\t[A-Z]|^(const|var) [A-Z]", "\n".join(item.code), re.M))
    return is_exported(item.name) and (item.receiver is None or is_exported(item.receiver))


def prose(comment, level):
    """A doc comment as Markdown: what begins with a tab is code, and `# Heading` is a heading."""
    out, code = [], []
    for line in [*comment, ""]:
        if line.startswith("\t") or (code and not line.strip()):
            code.append(line.removeprefix("\t"))
            continue
        if code:
            out += ["```go", *"\n".join(code).strip("\n").splitlines(), "```", ""]
            code = []
        if line.startswith("# "):
            line = "#" * level + line[1:]
        elif not re.match(r"^ +[-*] ", line):
            line = re.sub(r"([*_`<\[\]])", r"\\\1", line)
        out.append(line)
    if code:
        out += ["```go", *"\n".join(code).strip("\n").splitlines(), "```", ""]
    return out


def section(item, level):
    receiver = f"({item.receiver}) " if item.receiver else ""
    kind = "type" if item.code[0].startswith("type ") else "func"
    return [f"{'#' * level} {kind} {receiver}{item.name}", "", "```go", *item.code, "```", "", *prose(item.comment, level + 1), ""]


def page(folder):
    """The page of the package in a folder."""
    package, everything = [], []
    for path in sorted(folder.glob("*.go")):
        if not path.name.endswith("_test.go"):
            comment, found = items(path)
            package = comment or package
            everything += found
    types = [item for item in everything if item.code[0].startswith("type ")]
    names = {item.name for item in types}
    methods = [item for item in everything if item.receiver]
    functions = [item for item in everything if item.code[0].startswith("func ") and not item.receiver]
    makers = {id(item): made[0] for item in functions if (made := [name for name in item.makes() if name in names])}
    out = ["# Go", "", "```go", f'import "{module(folder)}"', "```", "", *prose(package, 2), ""]
    out += ["## Constants and variables", ""]
    for item in everything:
        if item.name is None:
            out += [*prose(item.comment, 3), "", "```go", *item.code, "```", ""]
    out += ["## Functions", ""]
    for item in functions:
        if id(item) not in makers:
            out += section(item, 3)
    for item in sorted(types, key=lambda one: one.name):
        out += section(item, 2)
        for other in functions:
            if makers.get(id(other)) == item.name:
                out += section(other, 3)
        for other in sorted(methods, key=lambda one: one.name):
            if other.receiver == item.name:
                out += section(other, 3)
    return "\n".join(out) + "\n"


def module(folder):
    return re.search(r"^module (\S+)", (folder / "go.mod").read_text(), re.M)[1]
