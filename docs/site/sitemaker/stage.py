"""Stages the sources of the site: each page of the repository under its own path, so that links between
pages stay as GitHub has them. The copies differ from the pages in these things:

- A link to a file of the source leads to a page that shows this file, and a link to a header or to a
  package leads to its reference.
- Pictures have two copies, one for the light and one for the dark site. On GitHub the picture itself
  follows the reader's setting.
- Diagrams of mermaid are pictures (sequence.py).
- Each section of docs/README.md becomes a page, and its tables are the site's contents. A page that
  no table lists is reached only by links and the search."""

import os
import re
import shutil
from urllib.parse import unquote

from . import ROOT, go_reference, python_reference, sequence

INDEX = ROOT / "docs/README.md"
LANDING = "index.md"
CODE = r"^(?P<fence>```|~~~)(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)$|`(?:[^`\n]|\n(?!\n))*`"
LINK = r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\(<?(?P<target>[^)<>\s]+)>?(?:\s+\"[^\"]*\")?\)"
PARTS = re.compile(f"{CODE}|{LINK}", re.M | re.S)
# Matches a link text that is only a file's or folder's name.
PATH = re.compile(r"(?:\.\./)*(?:[\w-]+/)*(?:[\w-]+\.md|[\w-]+/|[\w-]+/[\w-]+)")
# The pages of the site that take the place of a file or a folder: the landing page, the list of the
# examples, and the references, which other files of this folder generate.
INSTEAD = {
    "README.md": LANDING,
    "docs/README.md": LANDING,
    "examples": "examples/index.md",
    "include/devicemesh.h": "reference/c.md",
    "include/devicemesh.hpp": "reference/cpp.md",
    "include/hostccl.h": "reference/hostccl.md",
    "src/lib.rs": "reference/rust.md",
    "bindings/python/devicemesh/__init__.py": "reference/python.md",
    "bindings/jax/devicemesh_jax/__init__.py": "reference/jax.md",
    "bindings/go/doc.go": "reference/go.md",
}
LANGUAGES = {
    ".c": "c", ".h": "c", ".cpp": "cpp", ".hpp": "cpp", ".cu": "cpp", ".rs": "rust", ".py": "python", ".go": "go", ".yaml": "yaml",
    ".sbatch": "bash", ".service": "ini", ".cmake": "cmake", ".toml": "toml",
}
# Sections without a page of their own. Their pages are top-level entries of the navigation.
WITHOUT_PAGE = {"Tutorial"}


def slug(title):
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def sections(text):
    """(title, body) of the sections of docs/README.md."""
    return re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)


def first_cells(body):
    """(text, target) of the links in the first column of a page's tables, in their order."""
    cells = re.findall(r"^\|([^|]*)\|", re.sub(CODE, "", body, flags=re.M | re.S), re.M)
    return [(found["text"], found["target"].partition("#")[0]) for cell in cells for found in re.finditer(LINK, cell)]


def contents(listed):
    """A table of contents, which only the site's navigation shows: page -> its name there, or "" for
    its title."""
    entries = [f"{name} </{page}>" if name else f"/{page}" for page, name in listed.items()]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *entries, "```", ""])


class Site:
    """The staged pages. `stage` writes all of them."""

    def __init__(self, folder, generated):
        self.folder = folder
        # The pages of the generators: path -> text.
        self.generated = generated
        # The names of the repository's pages that are part of the site.
        self.pages = set()
        # The paths of those pages that are not written yet.
        self.waiting = []
        # The names of the files of the source that get a page.
        self.files = set()
        # The anchor of a section of docs/README.md -> the page that it has become.
        self.sections = {slug(title): f"docs/{slug(title)}.md" for title, _ in sections(INDEX.read_text()) if title not in WITHOUT_PAGE}

    def want(self, path):
        """The staged path of a page, a file or a folder of the repository; None where it has none."""
        name = path.relative_to(ROOT).as_posix()
        if name in INSTEAD:
            return INSTEAD[name]
        if path.is_dir():
            return self.want(path / "README.md") if (path / "README.md").exists() else None
        if path.suffix == ".md":
            if name not in self.pages:
                self.pages.add(name)
                self.waiting.append(path)
            return name
        self.files.add(name)
        return f"{name}.md"

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def picture(self, name, text):
        """Writes a picture for the light and for the dark site; gives both names and their classes, or
        None where the picture is the same for both."""
        found = re.search(r"@media \(prefers-color-scheme: ?dark\) ?\{((?:[^{}]*\{[^{}]*\})*[^{}]*)\}", text)
        if not found:
            return None
        stem = name.removesuffix(".svg")
        self.write(f"{stem}-light.svg", text.replace(found[0], ""))
        self.write(f"{stem}-dark.svg", text.replace(found[0], found[1]))
        return (f"{stem}-light.svg", "only-light"), (f"{stem}-dark.svg", "only-dark")

    def image(self, page, place, words):
        """The Markdown of a picture on a page."""
        name = place.relative_to(ROOT).as_posix()
        both = self.picture(name, place.read_text()) if place.suffix == ".svg" else None
        if not both:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place, self.folder / name)
            both = ((name, "same"),)
        return "".join(f"![{words}]({self.relative(page, one)}){{.{kind}}}" for one, kind in both)

    @staticmethod
    def relative(page, target):
        return os.path.relpath(target, os.path.dirname(page) or ".")

    def linked(self, page, text, base):
        """The text of a page whose links were relative to the folder `base`, for its place in the site."""
        count = 0

        def part(found):
            nonlocal count
            if found["target"] is None:
                if found["language"] != "mermaid":
                    return found[0]
                count += 1
                name = f"{page.removesuffix('.md')}-diagram-{count}.svg"
                both = self.picture(name, sequence.svg(found["code"], f"The messages of diagram {count}"))
                return "".join(f"![A sequence diagram]({self.relative(page, one)}){{.{kind}}}" for one, kind in both)
            target, _, anchor = unquote(found["target"]).partition("#")
            if re.match(r"[a-z][a-z0-9+.-]*:", found["target"]) or not target:
                return found[0]
            place = (base / target).resolve()
            if found["image"]:
                return self.image(page, place, found["text"])
            # A section of docs/README.md is a page of its own here.
            staged = self.sections.get(anchor) if place == INDEX else self.want(place)
            if staged is None and place != INDEX:
                raise LookupError(f"{page} leads to {target}, which has no page on the site")
            staged = staged or LANDING
            anchor = f"#{anchor}" if anchor and place.suffix == ".md" and place != INDEX and staged != LANDING else ""
            # On GitHub the text of many links is the file's name. Here it is the title of the page
            # or section.
            words = "" if PATH.fullmatch(found["text"]) and place.suffix in ("", ".md") and staged != LANDING else found["text"]
            return f"[{words}]({self.relative(page, staged)}{anchor})"

        return PARTS.sub(part, text)

    def listed(self, index, body, placed):
        """page -> name of the pages in the tables of an index, without those that stand elsewhere."""
        found = {}
        for words, target in first_cells(body):
            page = self.want((index.parent / target).resolve())
            if page and page not in placed and page != LANDING:
                found.setdefault(page, "" if PATH.fullmatch(words) else words)
        return found

    def stage(self):
        """Writes everything, and gives the pages of the contents."""
        # The pages of the guide stand under its index, and nowhere else in the contents.
        guide, tops = ROOT / "docs/guide/README.md", {}
        below = self.listed(guide, guide.read_text(), set())
        placed = set(below)
        for title, body in sections(INDEX.read_text()):
            pages = self.listed(INDEX, body, placed)
            placed |= set(pages)
            if title in WITHOUT_PAGE:
                tops.update(pages)
                continue
            name = self.sections[slug(title)]
            tops[name] = ""
            self.write(name, f"# {title}\n{self.linked(name, body, INDEX.parent)}" + contents(pages))
        self.write(LANDING, self.landing() + contents(tops))
        while self.waiting:
            path = self.waiting.pop()
            name = path.relative_to(ROOT).as_posix()
            orphan = "" if name in placed else "---\norphan: true\n---\n"
            text = self.linked(name, path.read_text(), path.parent)
            self.write(name, orphan + text + (contents(below) if path == guide else ""))
        self.examples()
        for name in self.files:
            self.source(name)
        for name, text in self.generated.items():
            self.write(name, text)
        return placed

    def landing(self):
        """The first page, with the pieces of README.md that it names."""
        readme = (ROOT / "README.md").read_text()

        def piece(found):
            if found["kind"] == "section":
                return self.linked(LANDING, dict(sections(readme))[found["name"]].strip(), ROOT)
            code = re.findall(rf"^```{found['name']}\n.*?^```", readme, re.M | re.S)
            return code[int(found["number"] or 1) - 1]

        text = self.linked(LANDING, (ROOT / "docs/site/index.md").read_text(), ROOT / "docs/site")
        return re.sub(r"<!-- README (?P<kind>section|code) (?P<name>\D+?)(?: (?P<number>\d))? -->", piece, text)

    def examples(self):
        """The list of the example programs, each with the first sentence of its first comment."""
        rows = []
        for path in sorted((ROOT / "examples").iterdir()) + sorted((ROOT / "examples/guide").iterdir()):
            if path.suffix not in (".c", ".cpp", ".rs", ".py"):
                continue
            head = re.match(r"(?:#!.*\n)?(?:/\*|//!?|\"\"\"|#)\s*((?:.+\n)+)", path.read_text())
            words = re.sub(r"\s*\n\s*(?:\*|//!?|#)?\s*", " ", head[1]).replace("*/", "").replace('"""', "")
            sentence = re.match(r"(.+?[.:])(?: |$)", words.strip() + " ")
            page = self.want(path)
            name = path.relative_to(ROOT / "examples")
            rows.append(f"| [{name}]({self.relative('examples/index.md', page)}) | {sentence[1].rstrip(':') if sentence else ''} |")
        table = "\n".join(["| program | what it does |", "|---|---|", *rows])
        self.write("examples/index.md", f"---\norphan: true\n---\n# Examples\n\n{table}\n")

    def source(self, name):
        """Writes the page of a file of the source."""
        path = ROOT / name
        language = LANGUAGES.get(path.suffix, "text")
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, self.folder / name)
        self.write(f"{name}.md", f"---\norphan: true\n---\n# {name}\n\n```{{literalinclude}} {path.name}\n:language: {language}\n```\n")


def packages():
    """The pages of the Python, JAX and Go packages."""
    return {
        "reference/python.md": python_reference.page(ROOT / "bindings/python/devicemesh", "Python"),
        "reference/jax.md": python_reference.page(ROOT / "bindings/jax/devicemesh_jax", "JAX"),
        "reference/go.md": go_reference.page(ROOT / "bindings/go"),
    }
