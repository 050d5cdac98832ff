"""Draws the sequence diagrams of the pages as SVG. GitHub draws them by mermaid, a script of three
megabytes that the site would have to carry. The pages use this part of mermaid's language:

    participant R0 as rank 0
    R0->>S: a message          (-->> is dashed: an answer; R0->>R0 is a step of one participant)
    Note over R0,S: a note<br/>with two lines

Any other line is an error, so that no diagram loses a part in silence."""

import html
import re

LETTER = 6.7  # the width of a letter at the size of the messages, in pixels
ROW, TOP, SIDE = 40, 56, 70
STYLE = """text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.name{font-weight:600;font-size:13px;text-anchor:middle}.said{text-anchor:middle}
.box{fill:#f2f4f7;stroke:#8c959f}.note{fill:#fff8c5;stroke:#d4a72c}
.life{stroke:#afb8c1;stroke-dasharray:4 4}.arrow{stroke:#57606a;stroke-width:1.3;fill:none}.answer{stroke-dasharray:5 4}
.head{fill:#57606a}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.box{fill:#1b212b;stroke:#6e7781}.note{fill:#2e2a17;stroke:#9e6a03}
.life{stroke:#484f58}.arrow{stroke:#9da7b3}.head{fill:#9da7b3}}"""


def parse(text):
    """The participants, as identifier -> name, and the steps: (kind, first, last, lines)."""
    names, steps = {}, []
    first, *lines = [line.strip() for line in text.strip().splitlines()]
    if first != "sequenceDiagram":
        raise ValueError(f"{first!r} is no sequence diagram, and docs/site/sitemaker/sequence.py draws no other diagrams")
    for line in filter(None, lines):
        participant = re.fullmatch(r"participant (\w+) as (.+)", line)
        note = re.fullmatch(r"Note over (\w+)(?:,(\w+))?: (.+)", line)
        message = re.fullmatch(r"(\w+)(--?)>>(\w+): (.+)", line)
        if participant:
            names[participant[1]] = participant[2]
        elif note:
            steps.append(("note", note[1], note[2] or note[1], re.split(r"<br ?/?>", note[3])))
        elif message:
            steps.append(("answer" if message[2] == "--" else "message", message[1], message[3], [message[4]]))
        else:
            raise ValueError(f"docs/site/sequence.py does not know how to draw {line!r}")
    return names, steps


def columns(names, steps):
    """The x of each participant: neighbours stand so far apart that the messages fit between them."""
    order = list(names)
    gaps = [130.0] * (len(order) - 1)
    for kind, start, end, lines in steps:
        low, high = sorted((order.index(start), order.index(end)))
        width = LETTER * max(map(len, lines)) + 26
        if kind != "note" and low < high:
            missing = width - sum(gaps[low:high])
            for at in range(low, high):
                gaps[at] += max(missing, 0) / (high - low)
        elif kind != "note" and low < len(gaps):  # a participant's own step stands at its right
            gaps[low] = max(gaps[low], width + 20)
    places, x = {}, float(SIDE)
    for at, name in enumerate(order):
        places[name] = x
        x += gaps[at] if at < len(gaps) else 0
    return places


def text(x, y, kind, words):
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{html.escape(words)}</text>'


def arrow(x, y, towards):
    """The head of an arrow at (x, y), for a line that runs to the right (1) or to the left (-1)."""
    return f'<path class="head" d="M{x:.0f} {y:.0f}l{-9 * towards} -4.5v9z"/>'


def svg(source, title):
    """The diagram as the text of an SVG file."""
    names, steps = parse(source)
    places, out, y = columns(names, steps), [], float(TOP)
    right = max(places.values()) + SIDE
    for kind, start, end, lines in steps:
        a, b = places[start], places[end]
        if kind == "note":
            middle = (a + b) / 2
            half = max(abs(b - a) / 2 + 40, LETTER * max(map(len, lines)) / 2 + 12)
            middle = max(middle, half + 6)
            right = max(right, middle + half + 6)
            height = 18 * len(lines) + 10
            out.append(f'<rect class="note" x="{middle - half:.0f}" y="{y:.0f}" width="{2 * half:.0f}" height="{height}" rx="4"/>')
            out += [text(middle, y + 19 + 18 * number, "said", words) for number, words in enumerate(lines)]
            y += height + 14
            continue
        y += 22
        dashed = " answer" if kind == "answer" else ""
        if start == end:
            out.append(f'<path class="arrow{dashed}" d="M{a:.0f} {y - 8:.0f}h30v16h-24"/>{arrow(a, y + 8, -1)}')
            out.append(text(a + 38, y + 4, "own", lines[0]))
            right = max(right, a + 50 + LETTER * len(lines[0]))
        else:
            towards = 1 if b > a else -1
            out.append(f'<path class="arrow{dashed}" d="M{a:.0f} {y:.0f}H{b - 4 * towards:.0f}"/>{arrow(b, y, towards)}')
            out.append(text((a + b) / 2, y - 7, "said", lines[0]))
        y += ROW - 22
    heads = []
    for name, x in places.items():
        half = LETTER * len(names[name]) / 2 + 14
        heads.append(f'<path class="life" d="M{x:.0f} 34V{y + 6:.0f}"/><rect class="box" x="{x - half:.0f}" y="6" width="{2 * half:.0f}" '
                     f'height="28" rx="5"/>{text(x, 25, "name", names[name])}')
    width, height = round(right), round(y + 14)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
            f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(heads + out) + "\n</svg>\n")
