"""Turns what doxygen has read from a comment (XML) into Markdown.

A name that doxygen knows becomes code. names.py links this code to the declaration."""

import re

BLOCKS = {"itemizedlist", "orderedlist", "parameterlist", "simplesect", "programlisting", "verbatim", "preformatted", "table", "heading"}
SIGNS = {"ndash": "-", "mdash": "-", "linebreak": "\n", "nonbreakablespace": " ", "sp": " ", "lsquo": "'",
          "rsquo": "'", "ldquo": '"', "rdquo": '"'}


def plain(node):
    """The text of a node without markup."""
    return "".join(node.itertext())


def escaped(words):
    return re.sub(r"([\\*_`<\[\]{}|])", r"\\\1", words or "")


def code(words):
    fence = "``" if "`" in words else "`"
    return f"{fence}{words}{fence}"


def inline(node):
    """The text of a node that is part of a line."""
    if node.tag in ("computeroutput", "ref"):
        words = plain(node)
        # doxygen writes `s::field` for a C struct. C writes `s.field`.
        return code(words.replace("::", ".") if words.startswith(("dm_", "nccl", "hostccl")) else words)
    if node.tag in SIGNS:
        return SIGNS[node.tag]
    mark = {"bold": "**", "emphasis": "*"}.get(node.tag, "")
    words = content(node)
    if node.tag == "ulink":
        return f"[{words}]({node.get('url')})"
    if node.tag not in ("bold", "emphasis", "para", "entry", "title", "parametername", "subscript", "superscript", "anchor"):
        raise ValueError(f"docs/site/sitemaker/markup.py does not know doxygen's <{node.tag}>: {plain(node)[:80]!r}")
    return f"{mark}{words}{mark}" if words.strip() else words


def content(node):
    """The text of a node whose parts are all inline."""
    return escaped(node.text) + "".join(inline(child) + escaped(child.tail) for child in node)


def listing(node):
    """The lines of a piece of code."""
    lines = []
    for line in node.iter("codeline"):
        lines.append("".join((part.text or "") if part.tag != "sp" else " " for part in flat(line)).rstrip())
    return lines


def flat(node):
    """The pieces of text of a line of code, in their order."""
    class Piece:
        def __init__(self, tag, text):
            self.tag, self.text = tag, text

    yield Piece("text", node.text)
    for child in node:
        if child.tag == "sp":
            yield Piece("sp", None)
        else:
            yield from flat(child)
        yield Piece("text", child.tail)


def indented(lines, by="  "):
    return [f"{by}{line}" if line else "" for line in lines]


def block(node, language):
    """Returns the lines of a block-level node."""
    if node.tag == "programlisting":
        lines = listing(node)
        # The headers also quote JSON and lists of values as code.
        return [f"```{'text' if lines and lines[0].startswith('{') else language}", *lines, "```"]
    if node.tag in ("verbatim", "preformatted"):
        return ["```text", *plain(node).strip("\n").splitlines(), "```"]
    if node.tag in ("itemizedlist", "orderedlist"):
        out = []
        for number, item in enumerate(node.findall("listitem"), 1):
            mark = "- " if node.tag == "itemizedlist" else f"{number}. "
            lines = paragraphs(item, language)
            out += [mark + (lines[0] if lines else ""), *indented(lines[1:], " " * len(mark))]
        return out
    if node.tag == "parameterlist":
        out = []
        for item in node.findall("parameteritem"):
            names = ", ".join(code(plain(name)) for name in item.iter("parametername"))
            lines = paragraphs(item.find("parameterdescription"), language)
            out += [f"- {names}: " + (lines[0] if lines else ""), *indented(lines[1:])]
        return out
    if node.tag == "table":
        rows = [[content(entry.find("para")).strip().replace("\n", " ") for entry in row.findall("entry")] for row in node.findall("row")]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
    if node.tag == "heading":
        return [f"**{content(node)}**"]
    return paragraphs(node, language)  # simplesect


def paragraphs(node, language="c"):
    """The Markdown of a description: lines, with an empty one between blocks."""
    out = []

    def add(lines):
        while lines and not lines[0].strip():
            lines = lines[1:]
        if lines:
            out.extend(([""] if out else []) + lines)

    if node is None:
        return out
    for para in node:
        if para.tag in BLOCKS:
            add(block(para, language))
            continue
        words = escaped(para.text)
        for child in para:
            if child.tag in BLOCKS:
                add(words.strip().splitlines())
                add(block(child, language))
                words = escaped(child.tail)
            else:
                words += inline(child) + escaped(child.tail)
        add(words.strip().splitlines())
    return out


def description(node, language="c"):
    """The whole comment of something that doxygen lists: the first sentence, and then the rest."""
    first, rest = paragraphs(node.find("briefdescription"), language), paragraphs(node.find("detaileddescription"), language)
    return first + ([""] if first and rest else []) + rest

