"""The page of the site that leads into rustdoc's pages. It names every item and method with the first
sentence of its documentation, so the search of the site finds them. rustdoc's pages have a search of
their own.

rustdoc promises nothing about its HTML. Where another version of rustdoc writes something else, this
raises LookupError, because the lists of items and methods are compared with what another part of the
same pages says."""

import html
import re

# The kinds of items. rustdoc puts the kind in front of the item's name in the name of its file.
KINDS = {"struct": "struct", "enum": "enum", "trait": "trait", "fn": "function", "type": "type", "macro": "macro", "constant": "constant"}
HEAD = """# Rust

rustdoc's pages of these crates are part of this site: {crates}.
[From Rust](../docs/rust.md) shows how a Rust program meets other crates. This page lists every item,
so that the search of the site finds it.
"""


def words(markup):
    """The text of a piece of HTML, as one line of Markdown."""
    text = html.unescape(re.sub(r"<[^>]+>", "", markup))
    return re.sub(r"([\\*_`<\[\]|])", r"\\\1", re.sub(r"\s+", " ", text)).strip()


def sentence(docblock):
    """A colon and the first sentence of a piece of rustdoc's documentation."""
    paragraph = re.search(r"<p>(.*?)</p>", docblock or "", re.S)
    text = words(paragraph[1]) if paragraph else ""
    first = re.match(r"(.+?\.)(?: [A-Z]|$)", text)
    return f": {first[1] if first else text}" if text else ""


def link(target, text):
    return f'<a href="../rust/{target}">{html.escape(text)}</a>'


def items(folder, crate):
    """(module, kind, name, page) of all items of a crate."""
    listed = re.findall(r'<li><a href="([^"]+)">([^<]+)</a></li>', (folder / crate / "all.html").read_text())
    # Each item has a file KIND.NAME.html. The files at an item's other paths only lead to this one.
    files = {path.relative_to(folder / crate).as_posix() for path in (folder / crate).rglob("*.*.html")
             if 'http-equiv="refresh"' not in path.read_text()[:400]}
    if not files or files != {page for page, _ in listed}:
        raise LookupError(f"rustdoc's all.html of {crate} does not list these items, or lists others: "
                          f"{sorted(files ^ {page for page, _ in listed})[:9]}")
    for page, path in listed:
        module, _, name = path.rpartition("::")
        yield module, KINDS[page.rpartition("/")[2].partition(".")[0]], name, page


def item(folder, crate, kind, name, page):
    """The lines of one item."""
    text = (folder / crate / page).read_text()
    own = re.split(r'id="(?:trait-implementations|synthetic-implementations|foreign-impls)"', text)[0]
    top = re.search(r'<details class="toggle top-doc" open>.*?<div class="docblock">(.*?)</div></details>', own, re.S)
    lines = [f"- {kind} {link(f'{crate}/{page}', name)}{sentence(top and top[1])}"]
    methods = re.findall(r'<section id="((?:ty)?method\.[\w-]+)" class="method">.*?<h4 class="code-header">.*?</h4></section>'
                         r'(?:</summary><div class="docblock">(.*?)</div>)?', own, re.S)
    sidebar = re.search(r'<nav class="sidebar">.*?</nav>', text, re.S)
    beside = set(re.findall(r'href="#((?:ty)?method\.[\w-]+)"', sidebar[0] if sidebar else ""))
    anchors = {anchor for anchor, _ in methods}
    if not sidebar or anchors != beside:
        raise LookupError(f"rustdoc's {crate}/{page} has methods that were not found, or no sidebar: {sorted(anchors ^ beside)[:9]}")
    for anchor, doc in methods:
        lines.append(f"  - {link(f'{crate}/{page}#{anchor}', anchor.partition('.')[2])}{sentence(doc)}")
    return lines


def pages(folder):
    """The page, from rustdoc's folder."""
    crates = sorted(path.parent.name for path in folder.glob("*/all.html"))
    out = [HEAD.format(crates=", ".join(link(f"{crate}/index.html", crate) for crate in crates))]
    for crate in crates:
        modules = {}
        for module, *rest in items(folder, crate):
            modules.setdefault(module, []).append(rest)
        for module in sorted(modules):
            out += [f"## {crate}{'::' if module else ''}{module}", ""]
            for rest in modules[module]:
                out += item(folder, crate, *rest)
            out.append("")
    return {"reference/rust.md": "\n".join(out) + "\n"}
