"""The references of C and C++ as pages of the site, from what doxygen has read in the headers (XML).

Each heading of a header (`/* ---- views of a mesh ---- */`) is a group of doxygen's, and a page here.
hostccl.h is one page. Each declaration becomes an entry of Sphinx's domain of C or C++, and names.py
links names in the text to these entries. Sphinx refuses a declaration that it cannot parse."""

import re
from pathlib import Path
from xml.etree import ElementTree

from . import ROOT
from .markup import code, description, paragraphs, plain

HEADERS = {  # the file's name -> (page, prefix of its groups, language, title)
    "devicemesh.h": ("c", "c_", "c", "C: devicemesh.h"),
    "devicemesh.hpp": ("cpp", "cpp_", "cpp", "C++: devicemesh.hpp"),
    "hostccl.h": ("hostccl", "hostccl_", "c", "C: hostccl.h"),
}
# Comments in a header say so. On the pages these words are a link to the head's page.
HEAD_OF_FILE = "the head of this file"
HEAD_OF_PAGE = "../{}.md#what-holds-for-all-of-it"


class Doxygen:
    """The compounds (groups, structs, classes, files) that doxygen has written, by identifier."""

    def __init__(self, folder):
        self.compounds = {}
        index = ElementTree.parse(folder / "index.xml").getroot()
        for entry in index.findall("compound"):
            path = folder / f"{entry.get('refid')}.xml"
            self.compounds[entry.get("refid")] = ElementTree.parse(path).getroot().find("compounddef")
        # The names of the groups are made by docs/reference/filter.py.
        self.begins = {}
        for name, (_, prefix, _, _) in HEADERS.items():
            for number, text in enumerate((ROOT / "include" / name).read_text().splitlines(), 1):
                if heading := re.match(r"^(?:/\*|//) -{4,} (.+?) -{4,}(?: \*/)?$", text):
                    identifier = prefix + re.sub(r"\W+", "_", heading[1].lower()).strip("_")
                    self.begins.setdefault(identifier, number)

    def groups(self, prefix):
        """The groups of a header, in the order of the header."""
        groups = [node for node in self.compounds.values() if node.get("kind") == "group"]
        return sorted((node for node in groups if node.findtext("compoundname").startswith(prefix)), key=self.begin)

    def home(self, compound):
        """The group in which a struct or class is defined."""
        # An earlier group may have a forward declaration of the struct.
        own = [node for node in self.compounds.values() if node.get("kind") == "group"
               and any(inner.get("refid") == compound.get("id") for inner in node.findall("innerclass"))]
        return max((node for node in own if self.begin(node) <= line(compound)), key=self.begin)

    def begin(self, group):
        """The line of the header where a group begins."""
        return self.begins[group.findtext("compoundname")]

    def file(self, name):
        return next(node for node in self.compounds.values() if node.get("kind") == "file" and node.findtext("compoundname") == name)


def line(node):
    """The line where something is declared."""
    return int(node.find("location").get("line"))


class Writer:
    """Writes directives of one language's domain."""

    def __init__(self, language, taken):
        self.language = language
        # Names that have an entry. devicemesh.h and hostccl.h both declare NCCL's types, which get
        # one entry.
        self.taken = taken

    def directive(self, depth, kind, head, body):
        """Returns a directive's lines. A directive that contains others needs a longer fence than
        they have."""
        fence = ":" * (6 - depth)
        return [f"{fence}{{{self.language}:{kind}}} {head}", "", *body, "", fence, ""]

    def listing(self, head, body):
        """Returns the lines of a declaration that gets no entry of its own."""
        return [f"```{self.language}", head, "```", "", *body, ""]

    def is_taken(self, name):
        """Whether a name has an entry already. It counts as taken from now on."""
        found = name in self.taken
        self.taken.add(name)
        return found

    def member(self, node, depth=0, scope=""):
        """The lines of a function, a constant, a type or a field."""
        kind, name = node.get("kind"), node.findtext("name")
        body = description(node, self.language)
        if kind == "define":
            return self.macro(node, name, body, depth)
        if kind == "enum":
            return self.enum(node, scope + name, body, depth)
        kinds = {"function": "function", "variable": "member", "typedef": "type"}
        head = head_of(node, scope)
        if kind not in kinds:
            raise ValueError(f"doxygen lists {name} as {kind}, and docs/site/sitemaker/c_reference.py does not know how to write that")
        if self.language == "c" and depth == 0 and self.is_taken(name):
            return self.listing(head, body)
        return self.directive(depth, kinds[kind], head, body)

    def macro(self, node, name, body, depth):
        parameters = [param.findtext("defname") or "" for param in node.findall("param")]
        head = name + (f"({', '.join(parameters)})" if node.find("param") is not None else "")
        value = plain(node.find("initializer")).strip() if node.find("initializer") is not None else ""
        body += ["", f"Value: {code(value)}"] if value else []
        return self.listing(head, body) if self.is_taken(name) else self.directive(depth, "macro", head, body)

    def enum(self, node, name, body, depth):
        for value in node.findall("enumvalue"):
            head = value.findtext("name") + (f" {value.findtext('initializer')}" if value.findtext("initializer") else "")
            body += ["", *self.directive(depth + 1, "enumerator", head, description(value, self.language))]
        base = node.findtext("type")
        kind = "enum-class" if node.get("strong") == "yes" else "enum"
        return self.directive(depth, kind, name + (f" : {base}" if base else ""), body)

    def compound(self, node):
        """The lines of a struct or a class with its members."""
        name, body = node.findtext("compoundname"), description(node, self.language)
        for section in node.findall("sectiondef"):
            if section.get("kind").startswith(("private", "protected")):
                continue
            if section.findtext("header"):
                body += ["", f":::{{rubric}} {section.findtext('header')}", ":::", ""]
                body += paragraphs(section.find("description"), self.language)
            for member in section.findall("memberdef"):
                if member.get("prot", "public") == "public" and member.get("kind") != "friend":
                    body += ["", *self.member(member, 1)]
        self.taken.add(name)
        return self.directive(0, "class" if node.get("kind") == "class" else "struct", template(node) + name, body)


def template(node):
    """The `template<...> ` of a declaration, or ""."""
    parameters = node.find("templateparamlist")
    if parameters is None:
        return ""
    if any(plain(param.find("type")).count("<") != plain(param.find("type")).count(">") for param in parameters.findall("param")):
        return template_of_source(node)
    written = []
    for param in parameters.findall("param"):
        words = plain(param.find("type"))
        name, default = param.findtext("declname"), param.find("defval")
        words += f" {name}" if name else ""
        written.append(words + (f" = {plain(default)}" if default is not None else ""))
    return f"template<{', '.join(written)}> "


def template_of_source(node):
    """The `template<...> ` as the header has it. doxygen takes the comma in a parameter such as
    `std::enable_if_t<..., int> = 0` for its end, and loses the rest."""
    lines = (ROOT / node.find("location").get("file")).read_text().splitlines()[:line(node) - 1]
    begin = max(number for number, text in enumerate(lines) if text.lstrip().startswith("template <"))
    return " ".join(text.strip() for text in lines[begin:]).replace("template <", "template<") + " "


def head_of(node, scope):
    """The declaration of a function, a field or a type, in one line."""
    kind, name, arguments = node.get("kind"), node.findtext("name"), node.findtext("argsstring") or ""
    words = plain(node.find("type")) if node.find("type") is not None else ""
    words = re.sub(r"\s+", " ", words).replace("< ", "<").replace(" >", ">").strip()
    if kind == "typedef":
        if "(*)" in words:
            return f"{words.replace('(*)', f'(*{name})')}{arguments}"
        if "[" in arguments:
            return f"{words}{name}{arguments}".removeprefix("typedef ")
        declaration = f"{words} {scope}{name}{arguments}"
        return declaration if scope == "" and node.find("templateparamlist") is None else f"{template(node)}{scope}{name} = {words}"
    if "(*)" in words:  # a pointer to a function
        return f"{words.replace('(*)', f'(*{name})')}{arguments}"
    before = "static " if node.get("static") == "yes" and kind == "function" else ""
    before += "explicit " if node.get("explicit") == "yes" and "explicit" not in words else ""
    return f"{template(node)}{before}{words}{' ' if words else ''}{scope}{name}{arguments}"


def declarations(doxygen, node):
    """Returns the declarations of a group, in the order of the header."""
    structs = {compound.findtext("compoundname"): compound for inner in node.findall("innerclass")
               if (compound := doxygen.compounds[inner.get("refid")]) is not None and doxygen.home(compound) is node}
    # A namespace within the group is no group of its own.
    nodes = [node, *(doxygen.compounds[inner.get("refid")] for inner in node.findall("innernamespace"))]
    # The typedef of a C struct is left out, because the struct's entry has the same name.
    members = [member for one in nodes for section in one.findall("sectiondef") for member in section.findall("memberdef")
               if not (member.get("kind") == "typedef" and member.findtext("name") in structs)]
    return sorted([*members, *structs.values()], key=line)


def names(doxygen, node):
    """The names of what a group declares, as code: eight of them, and the number of the others."""
    listed = list(dict.fromkeys(one.findtext("name") or one.findtext("compoundname") for one in declarations(doxygen, node)))
    return ", ".join(map(code, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def group_lines(doxygen, node, writer):
    """Returns the description and the declarations of a group."""
    out = [*paragraphs(node.find("detaileddescription"), writer.language), ""]
    for one in declarations(doxygen, node):
        if one.tag == "compounddef":
            out += writer.compound(one)
        else:
            out += writer.member(one, scope=scope_of(one, writer.language))
    return out


def scope_of(member, language):
    """The namespace of a member of a group, as doxygen's full name has it."""
    full = member.findtext("qualifiedname") or ""
    return full.rpartition("::")[0] + "::" if language == "cpp" and "::" in full else ""


def title_of(node):
    return node.findtext("title").partition(": ")[2]


def group_pages(doxygen, groups, page, writer):
    """(pages, rows of the table of contents, entries of the navigation) of the groups of a header."""
    out, rows, entries = {}, [], []
    language = {"c": "C", "cpp": "C++"}[writer.language]
    head = f"[the head of the header]({HEAD_OF_PAGE.format(page)})"
    for node in groups:
        title = title_of(node)
        name = f"{page}/{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"
        lines = [one.replace(HEAD_OF_FILE, head) for one in group_lines(doxygen, node, writer)]
        rows.append(f"| [{title}]({name}.md) | {names(doxygen, node)} |")
        entries.append(f"{title} <{name}>")
        out[f"reference/{name}.md"] = "\n".join([f"# {title} ({language})", "", *lines]) + "\n"
    return out, rows, entries


def pages(folder):
    """path -> text of the pages of all headers."""
    doxygen, out, taken = Doxygen(Path(folder)), {}, set()
    for header, (page, prefix, language, title) in HEADERS.items():
        writer, groups = Writer(language, taken), doxygen.groups(prefix)
        if not groups:
            raise LookupError(f"doxygen found no groups in {header}")
        mentions = re.sub(r"[\s*/]+", " ", (ROOT / "include" / header).read_text()).count(HEAD_OF_FILE)
        about = description(doxygen.file(header), language)
        if page == "hostccl":
            body = [about, *([f"## {title_of(node)}", "", *group_lines(doxygen, node, writer)] for node in groups)]
        else:
            made, rows, entries = group_pages(doxygen, groups, page, writer)
            out.update(made)
            mentions -= sum(text.count(f"]({HEAD_OF_PAGE.format(page)})") for text in made.values())
            # The contents stand before the long comment of the file.
            body = [["## Contents", "", "| part | what is in it |", "|---|---|", *rows], ["## What holds for all of it"], about,
                    ["```{toctree}", ":hidden:", "", *entries, "```"]]
        if mentions:
            raise LookupError(f"{header} says {HEAD_OF_FILE!r} in {mentions} places that have no link to the head's page")
        out[f"reference/{page}.md"] = "\n".join([f"# {title}", *(text for part in body for text in ("", *part))]) + "\n"
    return out
