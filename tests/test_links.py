"""Every link of every page of the repository leads to a file, and to a heading that is there;
docs/README.md leads to every page of docs; docs/launchers.md has every variable that the
launchers' detection reads, and docs/variables.md every other one; files of the source that pages
name are there. Addresses on the network are not looked up."""

import re
import subprocess
from urllib.parse import unquote

from support.paths import ROOT

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)<>\s]+)>?(?:\s+\"[^\"]*\")?\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def pages():
    """The pages that git knows or could add; without git, all pages outside target."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "*.md"], capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return sorted({ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()})
    return sorted(path for path in ROOT.rglob("*.md") if "target" not in path.relative_to(ROOT).parts)


def anchors(text):
    """The anchors that GitHub makes of a page's headings: lower case, without punctuation,
    spaces as hyphens; repeated ones are numbered."""
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", CODE.sub("", text), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number, name = 0, slug
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def links(path):
    text = re.sub(r"`[^`\n]*`", "``", CODE.sub("", path.read_text()))
    return [target for target in LINK.findall(text) if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def problem(path, target):
    file, _, anchor = unquote(target).partition("#")
    place = (path.parent / file).resolve() if file else path
    if not place.exists():
        return f"{path.relative_to(ROOT)}: {target}: no such file"
    if anchor and place.suffix == ".md" and anchor not in anchors(place.read_text()):
        return f"{path.relative_to(ROOT)}: {target}: no such heading"
    return None


def test_links_lead_somewhere():
    found = [(path, target) for path in pages() for target in links(path)]
    assert len(found) > 50, f"only {len(found)} links found"
    problems = [text for text in (problem(*link) for link in found) if text]
    assert not problems, "\n".join(problems)


def test_docs_readme_leads_to_every_page():
    """docs/README.md links to each page directly, or through the guide's index."""
    reached = {(index.parent / target.partition("#")[0]).resolve()
               for index in (ROOT / "docs/README.md", ROOT / "docs/guide/README.md") for target in links(index)}
    wanted = {path.resolve() for path in (ROOT / "docs").rglob("*.md")
              if path.relative_to(ROOT / "docs").parts[0] not in ("reference", "site")}
    missing = wanted - reached - {(ROOT / "docs/README.md").resolve()}
    assert not missing, f"docs/README.md does not lead to {sorted(map(str, missing))}"


def test_pages_of_the_source_name_files_that_are_there():
    """A file of the source that a page for maintainers names with its folder."""
    bases = [ROOT / folder for folder in (".", "src", "src/rendezvous", "tool/src")]
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/protocol.md", "docs/dependencies.md",
                 "docs/reliability.md", "docs/binding.md"):
        text = (ROOT / page).read_text()
        named = set(re.findall(r"(?<![\w/.-])((?:[\w-]+/)+[\w.-]+\.(?:rs|py|c|cpp|h|hpp|go|toml|txt))\b(?!/)", text))
        missing = sorted(name for name in named if not any((base / name).exists() for base in bases))
        assert not missing, f"{page} names {', '.join(missing)}"


def test_launchers_page_has_every_variable():
    """docs/launchers.md names every variable that src/rendezvous/launcher reads."""
    source = "".join((ROOT / f"src/rendezvous/launcher/{name}.rs").read_text() for name in ("mod", "family", "meeting", "variables"))
    read = set(
        re.findall(
            r"\"((?:RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|(?:MASTER|TORCHELASTIC|OMPI|PMIX?|PALS|MPI|SLURM|JOB)_\w+))\"",
            source))
    assert len(read) > 25, f"only {sorted(read)} found in src/rendezvous/launcher"
    page = (ROOT / "docs/launchers.md").read_text()
    missing = [name for name in sorted(read) if not re.search(rf"\b{name}\b", page)]
    assert not missing, f"docs/launchers.md does not name {', '.join(missing)}"


def test_variables_page_has_every_variable():
    """docs/variables.md names every variable of this project and of NCCL that the library, the host
    engine, the tool and the bindings read, and no other one."""
    sources = [path for folder in ("src", "hostccl/src", "tool/src", "bindings") for kind in ("rs", "py", "go")
               for path in (ROOT / folder).rglob(f"*.{kind}") if "tests" not in path.parts and "test" not in path.stem]
    literals = {name for path in sources for name in re.findall(r'"((?:DM|HOSTCCL|NCCL)_[A-Z_]+)"', path.read_text())}
    read = {name for name in literals if not name.startswith("DM_STATUS_")}
    assert {"DM_LOG", "DM_LIBRARY", "HOSTCCL_TIMEOUT_MS"} <= read
    rows = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs/variables.md").read_text(), re.M)
    assert set(re.findall(r"\b(?:DM|HOSTCCL|NCCL)_[A-Z_]+", " ".join(rows))) == read


def test_variables_page_says_what_info_prints():
    """docs/variables.md lists the variables that `devicemesh info` prints beside the launchers'."""
    paragraph = re.search(r"^`devicemesh info` prints .*?\n\n", (ROOT / "docs/variables.md").read_text(), re.M | re.S).group()
    source = re.search(r"^const OWN: .*?\];\n", (ROOT / "tool/src/info.rs").read_text(), re.M | re.S).group()
    read = {name.replace("STARTED_BY_RUN", "DM_STARTED_BY_RUN") for name in re.findall(r"\b[A-Z]+_[A-Z_]+\b", source)}
    assert set(re.findall(r"`([A-Z]+_[A-Z_]+)`", paragraph)) == read
