"""Pictures of many meshes: well-formed, the same each time, every rank once, no cell on another,
everything inside the picture, no script and nothing from elsewhere, and hosts boxed so that
exactly their ranks are inside."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from support.paths import TOOL
from support.processes import run

SVG = "{http://www.w3.org/2000/svg}"

# (the options of `devicemesh show`, how many panels the picture has)
CASES = [("1", 1), ("1,1 a,b", 1), ("2", 1), ("17", 1), ("256", 1), ("251", 1), ("2,4 replicate,shard", 2),
         ("2,128 a,b", 1), ("128,2 a,b", 1), ("3,40 a,b", 1), ("40,3 a,b", 1),
         ("2,2,2 dp,cp,tp --rank 3 --hosts 2x4", 3), ("2,2,2 dp,cp,tp --rank 3 --hosts 1x8", 3),
         ("2,2,2 dp,cp,tp --rank 3 --hosts 8x1", 3), ("3,4 dp,tp --hosts 3x5 --rank 6", 2), ("5,5 a,b --hosts 4x7", 2),
         ("5,5 a,b --hosts 5x7 --cyclic", 2), ("7,9 a,b --hosts 3x21 --cyclic --plan", 2),
         ("4,8,8 dp,cp,tp --hosts 32x8", 1), ("2,2,2,2 pp,dp,cp,tp --hosts 4x4", 4), ("2,2,2,2,2,2,2,2", 1),
         ("2,1,3,1,2 a,b,c,d,e", 3), ("2,20,6 a,b,c --hosts 40x6 --color-by a,b,c", 3),
         ("2,2,2 dp,cp,tp --slice cp,dp --rank 3", 3), ("4,2 pp,tp --range pp=2:2 --rank 0", 3),
         ("2,2 a,b --ranks 7,5,3,1000000", 2), ("2,2,2 dp,cp,tp --flatten dp,tp=x --color-by x", 1),
         ("4,2,2 a,b,c --reshape 2x4x2:d,e,f --hosts 4x4", 3), ]


def box(rect):
    x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def corners(path):
    """The corners of a host's line, whose points lie on straight lines between rounded corners."""
    return [(int(x), int(y)) for x, y in re.findall(r"Q(-?\d+) (-?\d+)", path)]


def inside(point, polygon):
    x, y = point
    crossings = 0
    for (ax, ay), (bx, by) in zip(polygon, polygon[1:] + polygon[:1]):
        if (ay > y) != (by > y) and x < ax + (bx - ax) * (y - ay) / (by - ay):
            crossings += 1
    return crossings % 2 == 1


def panels(picture):
    """The bodies of the panels. A panel's heading and body are one group each."""
    groups = picture.findall(f"{SVG}g")
    assert len(groups) % 2 == 0
    return groups[1::2]


def check_panel(group, width, height):
    dx, dy = (float(n) for n in re.findall(r"-?[\d.]+", group.get("transform")))
    cells, hosts = {}, {}
    for cell in group.findall(f"{SVG}g"):
        about = cell.find(f"{SVG}title").text
        rank = int(re.match(r"rank (\d+) at \(", about).group(1))
        assert rank not in cells, f"rank {rank} is drawn twice"
        assert cell.find(f"{SVG}text").text == str(rank)
        cells[rank] = box(cell.find(f"{SVG}rect"))
        host = re.search(r", host (\d+)", about)
        if host:
            hosts[rank] = host.group(1)
    boxes = sorted(cells.values())
    for index, (left, top, right, bottom) in enumerate(boxes):
        assert left + dx >= 0 and top + dy >= 0 and right + dx <= width and bottom + dy <= height, "a cell is outside the picture"
        for other in boxes[index + 1:]:
            assert other[0] >= right or other[1] >= bottom or other[3] <= top, f"{(left, top)} and {other[:2]} overlap"
    for text in group.iter(f"{SVG}text"):
        x, y = float(text.get("x")) + dx, float(text.get("y")) + dy
        assert 0 <= x <= width and 0 <= y <= height, f"{text.text} is outside the picture"
    # The lines and, after each, the host's name.
    names = [text.text for text in group.findall(f"{SVG}text") if text.get("class") == "host-name"]
    lines = [corners(path.get("d")) for path in group.findall(f"{SVG}path") if path.get("class") == "host"]
    assert len(names) == len(lines) and bool(lines) == bool(hosts)
    holes = sum(path.get("d").count("M") - 1 for path in group.findall(f"{SVG}path"))
    for rank, (left, top, right, bottom) in cells.items() if hosts and not holes else ():
        around = {name for name, line in zip(names, lines) if inside(((left + right) / 2, (top + bottom) / 2), line)}
        assert around == {f"host {hosts[rank]}"}, f"rank {rank} is in {around}, should be in host {hosts[rank]}"
    return len(cells)


@pytest.mark.parametrize("options, count", CASES, ids=[options for options, _ in CASES])
def test_picture(options, count):
    def draw(form):
        return run(TOOL, "show", *options.split(), form, timeout=60).stdout

    text = draw("--svg")
    assert text == draw("--svg"), "not the same each time"
    picture = ElementTree.fromstring(text)
    width, height = (float(n) for n in picture.get("viewBox").split()[2:])
    assert not re.search(r"<script|href|@import|url\((?!#)", text)
    drawn = panels(picture)
    assert len(drawn) == count
    for panel in drawn:
        assert check_panel(panel, width, height) > 0
    page = draw("--html")
    assert text in page and not re.search(r"<script|href|@import|src=", page)
