"""The page of the site that leads into rustdoc's pages. It names every item and method with the first
sentence of its documentation, so the search of the site finds them. rustdoc's pages have a search of
their own."""

import html
import re

# What stands in front of an item in rustdoc's file names.
KINDS = {"struct": "struct", "enum": "enum", "trait": "trait", "fn": "function", "type": "type", "macro": "macro", "constant": "constant"}
HEAD = """# Rust

The documentation of the crates, as rustdoc makes it, is part of this site: {crates}.
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
    for page, path in listed:
        kind = page.rpartition("/")[2].partition(".")[0]
        if kind in KINDS:
            module, _, name = path.rpartition("::")
            yield module, KINDS[kind], name, page


def item(folder, crate, kind, name, page):
    """The lines of one item."""
    text = (folder / crate / page).read_text()
    own = re.split(r'id="(?:trait-implementations|synthetic-implementations|foreign-impls)"', text)[0]
    top = re.search(r'<details class="toggle top-doc" open>.*?<div class="docblock">(.*?)</div></details>', own, re.S)
    lines = [f"- {kind} {link(f'{crate}/{page}', name)}{sentence(top and top[1])}"]
    methods = re.findall(r'<section id="((?:ty)?method\.[\w-]+)" class="method">.*?<h4 class="code-header">.*?</h4></section>'
                         r'(?:</summary><div class="docblock">(.*?)</div>)?', own, re.S)
    for anchor, doc in methods:
        lines.append(f"  - {link(f'{crate}/{page}#{anchor}', anchor.partition('.')[2])}{sentence(doc)}")
    return lines


def pages(folder):
    """The page, from rustdoc's folder, or one that says that the crates' documentation was left out."""
    if folder is None:
        return {"reference/rust.md": "# Rust\n\nThis copy of the site was made without rustdoc. `make docs` makes its pages.\n"}
    crates = sorted(path.parent.name for path in folder.glob("*/all.html") if path.parent.name in ("devicemesh", "hostccl", "recording"))
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
