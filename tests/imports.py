#!/usr/bin/env python3
"""Reads which file imports which. Fails and names the files where imports make a circle or point
up a layer.

    python3 tests/imports.py [ROOT]

The files of each Rust crate in the workspace and of the Python packages are looked at one crate or
package at a time.

- A circle is a set of two or more files in which each file imports each other one, directly or
  through others.
- The layers of the library's crate are the folders and files under src/, from the bottom up in
  LAYERS. A file may import from its own layer and from the layers below it. A file in src/ that
  stands in no layer is a failure too: whoever adds a file names its layer.

In Rust, an import is a path in a `use` or in the code that names an item of another file. A path
through a module that only re-exports the item leads to the file that defines the item. `mod` and
`pub use` lines are not imports. Where the methods of a type stand in several files, the file of
the type imports another of these files when it calls a method from there. In Python: every
`import` of a module of the same package, also one inside a function.
"""

import ast
import re
import sys
from pathlib import Path

# The layers of src/, from the bottom up. Files in one entry may import each other, but not in a
# circle.
LAYERS = [
    ["wait", "digest", "printable", "rank_list", "starved", "sync", "error"],
    ["logging", "recorder"],
    ["events", "metrics"],
    ["ccl"],
    ["rendezvous"],
    ["layout"],
    ["mesh"],
    ["topology"],
    ["sharding"],
    ["comm"],
    ["ffi"],
    ["lib"],
]
DEFINITION = re.compile(
    r"(?:pub(?:\([^)]*\))?\s+)?(?:const\s+|async\s+|unsafe\s+|extern\s+\"[^\"]*\"\s+)*"
    r"(?:fn|struct|enum|union|trait|type|const|static(?:\s+mut)?|macro_rules!)\s+(?:r#)?(\w+)"
)


def blank(text):
    """The text with comments, strings and characters replaced by spaces; lines stay where they
    are."""
    pattern = re.compile(
        r"//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/|b?r(?P<hash>#*)\".*?\"(?P=hash)|"
        r"b?\"(?:\\.|[^\"\\])*\"|b?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F]+\}|.)|[^'\\])'",
        re.S,
    )
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def without_tests(text):
    """The text with inline test modules replaced by spaces: a test may import what it likes."""
    for found in re.finditer(r"#\[cfg\(test\)\]\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+\w+\s*\{", text):
        depth, at = 1, found.end()
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        text = text[: found.start()] + re.sub(r"[^\n]", " ", text[found.start() : at]) + text[at:]
    return text


def use_paths(tree):
    """(path, name here) of each leaf of a use tree."""
    tree = tree.strip()
    if "{" not in tree:
        path, _, alias = (part.strip() for part in tree.partition(" as "))
        segments = [segment.strip() for segment in path.split("::") if segment.strip()]
        if segments and segments[-1] == "self":
            segments.pop()
        return [(segments, alias or (segments[-1] if segments else ""))]
    head, inside = tree.split("{", 1)
    inside = inside[: inside.rindex("}")]
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(inside + ","):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(inside[start:at])
            start = at + 1
    prefix = [segment.strip() for segment in head.split("::") if segment.strip()]
    found = []
    for part in parts:
        if part.strip() == "self":
            found.append((prefix, prefix[-1]))
        elif part.strip():
            found += [(prefix + segments, name) for segments, name in use_paths(part)]
    return found


class Module:
    """One file of a crate: what it defines, re-exports and names."""

    def __init__(self, path, name):
        self.path, self.name = path, name
        self.children = {}
        text = without_tests(blank(path.read_text()))
        self.text = text
        self.inline = set(re.findall(r"\bmod\s+(\w+)\s*\{", text))
        self.defined = set(DEFINITION.findall(text))
        self.reexports, self.globs, self.names, self.uses = {}, [], {}, []
        for found in re.finditer(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);", text):
            line = text.count("\n", 0, found.start(2)) + 1
            for segments, name in use_paths(found.group(2)):
                if not segments:
                    continue
                if segments[-1] == "*":
                    self.globs.append(segments[:-1])
                    if not found.group(1):
                        self.uses.append((segments[:-1], line))
                    continue
                self.names[name] = segments
                if found.group(1):
                    self.reexports[name] = segments
                else:
                    self.uses.append((segments, line))
        self.types = set(re.findall(r"\b(?:struct|enum|union)\s+(\w+)", text))
        self.methods = self.inherent_methods()
        code = re.sub(r"\buse\s+[^;]+;", lambda found: re.sub(r"[^\n]", " ", found.group()), text)
        for found in re.finditer(r"(?<![\w:])((?:r#)?[a-z_]\w*(?:::\w+)+)", code):
            self.uses.append((found.group(1).split("::"), code.count("\n", 0, found.start()) + 1))


    def inherent_methods(self):
        """Gives {type: names of the methods that this file's `impl Type` blocks define}, without
        those of `impl Trait for Type`."""
        found = {}
        for block in re.finditer(r"^impl(?:<[^{]*?>)?\s+(\w+)[^{]*?\{(.*?)^\}", self.text, re.S | re.M):
            if not re.search(r"\sfor\s", block.group().partition("{")[0]):
                found.setdefault(block.group(1), set()).update(
                    re.findall(r"^    (?:pub(?:\([^)]*\))?\s+)?(?:const\s+|unsafe\s+)*fn\s+(\w+)", block.group(2),
                               re.M))
        return found


class Crate:
    def __init__(self, root_file):
        self.modules = []
        self.root = self.load(root_file, root_file.parent, "crate", None)

    def load(self, path, folder, name, parent):
        module = Module(path, name)
        module.parent = parent
        module.folder = folder
        self.modules.append(module)
        for found in re.finditer(r"((?:#\[[^\]]*\]\s*)*)(?:pub(?:\([^)]*\))?\s+)?\bmod\s+(\w+)\s*;", module.text):
            child = found.group(2)
            if "cfg(test)" in found.group(1):
                continue
            for place in (folder / f"{child}.rs", folder / child / "mod.rs"):
                if place.exists():
                    module.children[child] = self.load(place, folder / child, f"{name}::{child}", module)
        return module

    def find(self, module, segments, seen=()):
        """Gives (the file that defines the item, whether the path names a module), or None for an
        item of another crate."""
        first, rest = segments[0], list(segments[1:])
        at = module
        if first == "crate":
            at = self.root
        elif first == "self":
            at = module
        elif first == "super":
            at = module.parent
            while at and rest and rest[0] == "super":
                at, rest = at.parent, rest[1:]
        elif first in module.children:
            at = module.children[first]
        elif first in module.names and (id(module), first) not in seen:
            return self.find(module, module.names[first] + rest, (*seen, (id(module), first)))
        else:
            return None
        while at and rest:
            name = rest[0]
            if name in at.children:
                at, rest = at.children[name], rest[1:]
                continue
            if name in at.defined or name in at.inline:
                return at, False
            key = (id(at), name)
            if key in seen:
                return at, False
            if name in at.reexports:
                # An item of another crate that is re-exported here belongs here.
                return self.find(at, at.names[name] + rest[1:], (*seen, key)) or (at, False)
            if name in at.names:
                return self.find(at, at.names[name] + rest[1:], (*seen, key)) or (at, False)
            for glob in at.globs:
                target = self.find(at, [*glob, name], (*seen, key))
                if target and not target[1] and name in target[0].defined:
                    return target
            return at, False
        return (at, True) if at else None

    def edges(self):
        """file -> {imported file: (line, path)}"""
        found = {}
        for module in self.modules:
            for segments, line in module.uses:
                if segments == ["super"] or segments == ["crate"]:
                    targets = [(module.parent if segments == ["super"] else self.root, False)]
                else:
                    targets = [self.find(module, segments)]
                for target in targets:
                    # A `use` of a module is no import yet. An import is counted where the file
                    # names an item of the module.
                    if target and not target[1] and target[0] is not module:
                        found.setdefault(module.path, {}).setdefault(target[0].path, (line, "::".join(segments)))
        # A type whose methods stand in several files: the file of the type needs the other one
        # where it calls a method from there.
        for module in self.modules:
            for other in self.modules:
                for name in module.types & set(other.methods) if other is not module else ():
                    if not self.is_of(other, name, module):
                        continue
                    for method in other.methods[name] - module.methods.get(name, set()):
                        call = re.search(rf"(?:\bself\s*\.\s*|\bSelf::|\b{name}::){method}\(", module.text)
                        if call:
                            line = module.text.count("\n", 0, call.start()) + 1
                            found.setdefault(module.path, {}).setdefault(other.path, (line, f"{name}::{method}"))
        return found

    def is_of(self, module, name, home):
        """Whether the type that this file calls `name` is the one that `home` defines."""
        path = module.names.get(name)
        if path:
            target = self.find(module, path)
            return bool(target) and target[0] is home
        return any((target := self.find(module, [*glob, name])) and target[0] is home for glob in module.globs)


def python_edges(folder, package):
    files = {path.relative_to(folder).with_suffix("").as_posix().replace("/", "."): path for path in sorted(folder.rglob("*.py"))}
    found = {}
    for name, path in files.items():
        own = name.removesuffix("__init__").rstrip(".")
        here = own if path.name == "__init__.py" else own.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            wanted = []
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == package):
                base = here.split(".") if here else []
                base = base[: len(base) - (node.level - 1)] if node.level else []
                inner = (node.module or "").split(".") if node.module else []
                inner = inner[1:] if not node.level else inner
                for alias in node.names:
                    wanted.append([*base, *inner, alias.name])
            elif isinstance(node, ast.Import):
                wanted += [alias.name.split(".")[1:] for alias in node.names if alias.name.split(".")[0] == package]
            for segments in wanted:
                for cut in (len(segments), len(segments) - 1):
                    key = ".".join(segments[:cut])
                    target = files.get(key) or files.get(f"{key}.__init__".lstrip("."))
                    if target:
                        if target != path:
                            found.setdefault(path, {}).setdefault(target, (node.lineno, ast.unparse(node)))
                        break
    return found


def circles(edges):
    """The strongly connected parts with more than one file (Tarjan)."""
    index, low, stack, on, parts = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on.add(node)
        for target in edges.get(node, {}):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in on:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            part = set()
            while True:
                part.add(stack.pop())
                on.discard(next(iter(part)) if len(part) == 1 else None)
                if node in part:
                    break
            on.difference_update(part)
            if len(part) > 1:
                parts.append(part)

    sys.setrecursionlimit(10000)
    for node in list(edges):
        if node not in index:
            visit(node)
    return parts


def layer(path, source):
    part = path.relative_to(source).parts[0].removesuffix(".rs")
    return next((number for number, names in enumerate(LAYERS) if part in names), None)


def crates(root):
    """The first file of each crate of the workspace: its src/lib.rs and src/main.rs, and the files
    that its Cargo.toml names."""
    manifest = root / "Cargo.toml"
    members = re.search(r"^members = \[(.*?)\]", manifest.read_text(), re.M | re.S)[1] if manifest.exists() else '"."'
    found = []
    for folder in (root / member for member in re.findall(r'"([^"]+)"', members)):
        named = re.findall(r'^path = "(.+\.rs)"', (folder / "Cargo.toml").read_text(), re.M) if manifest.exists() else []
        own = [folder / name for name in dict.fromkeys(["src/lib.rs", "src/main.rs", *named]) if (folder / name).exists()]
        assert own, f"{folder} has no crate"
        found += own
    return found


def problems(root):
    found = []

    def tell(kind, importer, imported, line, path):
        return f"{kind}: {importer.relative_to(root)}:{line} imports {imported.relative_to(root)} ({path})"

    def look(edges):
        for part in circles(edges):
            names = " ".join(sorted(str(path.relative_to(root)) for path in part))
            found.append(f"circle of {len(part)} files: {names}")
            for path in sorted(part):
                for target, (line, name) in edges[path].items():
                    if target in part:
                        found.append(tell("  in it", path, target, line, name))

    for crate in crates(root):
        edges = Crate(crate).edges()
        look(edges)
        if crate != root / "src/lib.rs":
            continue
        source = crate.parent
        for path in sorted(source.rglob("*.rs")):
            if layer(path, source) is None:
                found.append(f"no layer: {path.relative_to(root)} (name it in LAYERS of tests/imports.py)")
        for path, targets in edges.items():
            for target, (line, name) in targets.items():
                here, there = layer(path, source), layer(target, source)
                if here is not None and there is not None and there > here:
                    found.append(tell("up a layer", path, target, line, name))
    for folder in (root / "bindings/python/devicemesh", root / "bindings/jax/devicemesh_jax"):
        look(python_edges(folder, folder.name))
    return found


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent).resolve()
    found = problems(root)
    print("\n".join(found) if found else "no circle of files, no import up a layer")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
