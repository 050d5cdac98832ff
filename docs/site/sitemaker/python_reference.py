"""The reference of a Python package as a page of the site. The page is made from the source. Nothing
is imported, so neither the library nor numpy nor JAX has to be there.

The page has the names in the package's __all__, in the order of the modules that define them. A
method inherited from a base class in the package is listed under the subclass, because the base
classes are not public."""

import ast
import inspect
import re

INDENT = "    "
SECTIONS = {"Args": "param {}", "Raises": "raises {}", "Returns": "returns", "Yields": "yields"}


class Package:
    """The modules of a package as syntax trees."""

    def __init__(self, folder):
        self.name = folder.name
        self.modules = {path.stem: ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))}
        self.lines = {path.stem: path.read_text().splitlines() for path in folder.glob("*.py")}

    def exported(self, module="__init__"):
        """The names in __all__, in their order."""
        names = []
        for node in self.modules[module].body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if getattr(target, "id", None) != "__all__":
                continue
            if isinstance(node.value, ast.List):
                names += ast.literal_eval(node.value)
            else:  # __all__ += errors.__all__
                names += self.exported(node.value.value.id)
        return names

    def home(self, name, module="__init__"):
        """Returns (module, node) of a name's definition, or None if the name comes from another
        package."""
        for node in self.modules[module].body:
            if name in (getattr(node, "name", None), assigned(node)) and not is_overload(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module in self.modules:
                for alias in node.names:
                    if alias.name == "*" and name in self.exported(node.module):
                        return self.home(name, node.module)
                    if (alias.asname or alias.name) == name:
                        return self.home(alias.name, node.module)
        return None

    def members(self, module, node):
        """name -> (module, node) of the public members of a class, its own ones first, then those
        of its bases in the package."""
        found = {}
        for child in node.body:
            name = getattr(child, "name", None) or assigned(child)
            if name and not name.startswith("_") and not is_overload(child) and not is_setter(child):
                found[name] = (module, child)
        for base in node.bases:
            home = self.home(base.id, module) if isinstance(base, ast.Name) else None
            if home:
                for name, member in self.members(*home).items():
                    found.setdefault(name, member)
        return found

    def comment_above(self, module, node):
        """The text of the comment lines right above a line of the source."""
        lines, at, words = self.lines[module], node.lineno - 2, []
        while at >= 0 and lines[at].strip().startswith("# "):
            words.insert(0, lines[at].strip()[2:])
            at -= 1
        return " ".join(words)


def decorators(node):
    return [ast.unparse(one) for one in getattr(node, "decorator_list", [])]


def assigned(node):
    """The name to which a statement gives a value or a type."""
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    return getattr(target, "id", None)


def is_overload(node):
    return "overload" in decorators(node)


def is_setter(node):
    return any(one.endswith(".setter") for one in decorators(node))


def signature(node, without_first):
    """The parameters and the result of a function."""
    arguments = node.args
    if without_first:
        (arguments.posonlyargs or arguments.args).pop(0)
    # `*args: NoReturn` only refuses positional arguments with a message, so it is not shown.
    if arguments.vararg and ast.unparse(arguments.vararg.annotation or ast.Constant(None)) == "NoReturn":
        arguments.vararg = None
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){result}"


def escaped(line):
    """A line of prose in which < begins no HTML, a name such as __init__ is code, and * is a star."""
    return re.sub(r"(`+[^`]*`+)|(__\w+__)|([<*])", lambda found: found[1] or (f"`{found[2]}`" if found[2] else f"\\{found[3]}"), line)


def fields(name, block):
    """The items of a section such as "Args:", as fields."""
    form, items = SECTIONS[name], []
    for line in inspect.cleandoc(block).splitlines():
        item = re.match(r"(\*{0,2}\w+): (.*)", line) if "{}" in form else None
        if item or not items:
            items.append([form.format(item[1].lstrip("*")), item[2]] if item else [form, line])
        else:
            items[-1][1] += " " + line.strip()
    return [f":{key}: {escaped(text)}" for key, text in items]


def prose(text):
    """A docstring as Markdown: an indented block after an empty line is code."""
    lines, out, at = inspect.cleandoc(text or "").splitlines(), [], 0
    while at < len(lines):
        name = lines[at].rstrip(":")
        if lines[at].endswith(":") and name in SECTIONS:
            end = at + 1
            while end < len(lines) and (not lines[end] or lines[end].startswith(INDENT)):
                end += 1
            out += ["", *fields(name, "\n".join(lines[at + 1:end])), ""]
            at = end
            continue
        if lines[at].startswith(INDENT) and not (out and out[-1]):
            end = at
            while end < len(lines) and (not lines[end] or lines[end].startswith(INDENT)):
                end += 1
            block = "\n".join(line[len(INDENT):] for line in lines[at:end]).rstrip()
            out += [f"```{'pycon' if block.startswith('>>>') else 'python'}", *block.splitlines(), "```", ""]
            at = end
            continue
        out.append(escaped(lines[at]))
        at += 1
    return out


def directive(depth, kind, head, body, options=()):
    """Returns a directive's lines. A directive that contains others needs a longer fence than they
    have."""
    fence = ":" * (5 - depth)
    return [f"{fence}{{py:{kind}}} {head}", *(f":{option}" for option in options), "", *body, "", fence, ""]


def of_function(node, depth=0, kind="function"):
    decorated = decorators(node)
    doc = prose(ast.get_docstring(node))
    if any(one.split(".")[-1] in ("property", "cached_property") for one in decorated):
        return directive(depth, "property", node.name, doc, [f"type: {ast.unparse(node.returns)}"] if node.returns else [])
    options = [f"{one}:" for one in decorated if one in ("staticmethod", "classmethod")]
    without_first = kind == "method" and "staticmethod" not in decorated
    return directive(depth, kind, node.name + signature(node, without_first), doc, options)


def of_class(package, module, node):
    """A class with its members."""
    init = next((child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"), None)
    is_enum = any(ast.unparse(base) in ("IntEnum", "Enum", "IntFlag") for base in node.bases)
    head = node.name
    members = package.members(module, node)
    if any("dataclass" in one for one in decorators(node)):
        shown = [f"{name}: {ast.unparse(member.annotation)}" + (f" = {ast.unparse(member.value)}" if member.value else "")
                 for name, (_, member) in members.items() if isinstance(member, ast.AnnAssign)]
        head += f"({', '.join(shown)})"
    elif init and not is_enum:
        head += signature(init, True).removesuffix(" -> None")
    bases = [ast.unparse(base) for base in node.bases if not package.home(getattr(base, "id", ""), module)]
    shown = [base for base in bases if base not in ("object",) and not base.startswith(("Protocol", "Generic"))]
    body = [*prose(docstring(package, module, node)), ""]
    if shown and not is_enum:
        body += [f"Base classes outside the package: {', '.join(f'`{base}`' for base in shown)}.", ""]
    for name, (home, member) in members.items():
        if isinstance(member, ast.FunctionDef):
            body += of_function(member, 1, "method")
        elif isinstance(member, (ast.AnnAssign, ast.Assign)):
            options = [f"type: {ast.unparse(member.annotation)}"] if isinstance(member, ast.AnnAssign) else []
            if member.value is not None:
                options.append(f"value: {ast.unparse(member.value)}")
            body += directive(1, "attribute", name, [escaped(package.comment_above(home, member))], options)
    return directive(0, "class", head, body)


def of_alias(package, module, node):
    """A name for a type."""
    return directive(0, "data", assigned(node), [escaped(package.comment_above(module, node))], [f"value: {ast.unparse(node.value)}"])


def docstring(package, module, node):
    """A class's docstring, or the docstring of the class that `__doc__ = Other.__doc__` names."""
    own = ast.get_docstring(node)
    if own:
        return own
    for child in node.body:
        if isinstance(child, ast.Assign) and getattr(child.targets[0], "id", "") == "__doc__":
            home = package.home(child.value.value.id, module)
            return ast.get_docstring(home[1]) if home else None
    return None


def page(folder, title):
    """The page of the package in a folder."""
    package = Package(folder)
    out = [f"# {title}", "", f":::{{py:module}} {package.name}", ":::", ""]
    out += [*prose(ast.get_docstring(package.modules["__init__"])), ""]
    homes = {}
    for name in package.exported():
        found = package.home(name)
        if not found:
            raise LookupError(f"{package.name}.__all__ has {name}, and no module of the package defines it")
        homes.setdefault(found[0], []).append(found[1])
    for module in sorted(homes, key=lambda name: (name == "errors", list(homes).index(name))):
        heading = module.strip("_").replace("_", " ").capitalize()
        out += [f"## {heading}", "", *prose(ast.get_docstring(package.modules[module])), ""]
        for node in homes[module]:
            if isinstance(node, ast.FunctionDef):
                out += of_function(node)
            else:
                out += (of_class if isinstance(node, ast.ClassDef) else of_alias)(package, module, node)
    return "\n".join(out) + "\n"
