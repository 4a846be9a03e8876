"""A graph as a drawing: one self-contained SVG that reads well on light and on dark.

    depth 0     1       2      3       4
    prompts ◀─prompts─ buffer ◀─sink─ rollout      an arrow leads from who asks to whom it asks

Boxes stand in columns by how far they ask, and between two columns of boxes is one of labels. A wire goes through
all columns between its ends, and has a place of its own in each, as a box has: so nothing lies on anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from xml.sax.saxutils import escape

from .graph import Graph
from .show import Wire, title, wires

__all__ = ["Box", "Layout", "draw", "layout"]

CHAR, LINE = 6.7, 15.0  # of a monospaced font of 11 px, and a little more
PORT, GAP = 18.0, 14.0  # between two wires at one box, and between two things in a column
SPACE, MARGIN, HEAD = 26.0, 20.0, 40.0
ARROW = 7.0
SWEEPS = 12

STYLE = """
  text { font: 11px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; text-anchor: middle; fill: #77818d }
  .role { fill: #dbe7ff; stroke: #4f79d6; stroke-width: 1.3 }
  .store { fill: #f9e6c4; stroke: #bf8a2d; stroke-width: 1.3 }
  .name { font-weight: bold; fill: #14213d }
  .kind { fill: #44516b }
  .wire { fill: none; stroke: #77818d; stroke-width: 1.4 }
  .dashed { stroke-dasharray: 5 4 }
  .head { fill: #77818d }
  .title { font-weight: bold; font-size: 13px; text-anchor: start }
  .legend { text-anchor: end }
"""


@dataclass(eq=False)
class Box:
    """A rectangle of the drawing, by its middle: of a role, of the store, of a label, or where only a wire passes.

    room: the width of its column, which no other's wire enters at its height.
    """

    name: str
    lines: list[str]
    width: float
    height: float
    room: float = 0.0
    x: float = 0.0
    y: float = 0.0
    left: list[Box] = field(default_factory=list)  # in the columns next to its own, what it is joined to
    right: list[Box] = field(default_factory=list)


@dataclass
class Layout:
    """boxes: of roles and stores, by name. wires: each with all boxes it goes through, the asker's first.
    columns: all boxes, from left to right and from top to bottom."""

    boxes: dict[str, Box]
    wires: list[tuple[Wire, list[Box]]]
    columns: list[list[Box]]

    @property
    def size(self) -> tuple[float, float]:
        everything = [box for column in self.columns for box in column]
        return (
            max(box.x + box.width / 2 for box in everything) + MARGIN,
            max(box.y + box.height / 2 for box in everything) + MARGIN,
        )


def layout(graph: Graph) -> Layout:
    """Where everything is."""
    found = wires(graph)
    depths = _depths(graph, found)
    boxes = {name: _box(name, [name], 26.0) for name in depths}
    for role in graph:
        boxes[role.name] = _box(role.name, [title(role), role.actor.__name__], 40.0)
    columns: list[list[Box]] = [[] for _ in range(2 * max(depths.values()) + 1)]
    for name, depth in depths.items():
        columns[2 * depth].append(boxes[name])
    through = [(wire, _route(wire, depths, boxes, columns)) for wire in found]
    for box in boxes.values():
        box.height = max(box.height, PORT * max(len(box.left), len(box.right)) + 8.0)
    _order(columns)
    _place(columns)
    return Layout(boxes, through, columns)


def _depths(graph: Graph, found: list[Wire]) -> dict[str, int]:
    """The column of each role and store. Who only looks at a store stands next to it, and stores come last."""
    depths: dict[str, int] = {}
    for role in graph:
        asked = [depths[wire.target] for wire in found if wire.role == role.name and not wire.dashed]
        depths[role.name] = 1 + max(asked, default=-1)
    last = max(depths.values())
    joined = {name for wire in found if not wire.dashed for name in (wire.role, wire.target)}
    dashed = {wire.role for wire in found if wire.dashed}
    depths |= dict.fromkeys(dashed - joined, last)
    return depths | {wire.target: last + 1 for wire in found if wire.dashed}


def _box(name: str, lines: list[str], height: float) -> Box:
    return Box(name, lines, CHAR * max(map(len, lines)) + 20.0, height)


def _route(wire: Wire, depths: dict[str, int], boxes: dict[str, Box], columns: list[list[Box]]) -> list[Box]:
    """A label in the first column between, and room for the wire in the others."""
    start, end = 2 * depths[wire.role], 2 * depths[wire.target]
    step = 1 if end > start else -1
    path = [boxes[wire.role]]
    for at in range(start + step, end, step):
        labelled = at == start + step
        name = f"{wire.role}.{wire.argument}"
        box = (
            Box(name, [wire.argument], CHAR * len(wire.argument) + 8.0, LINE)
            if labelled
            else Box(name, [], 0.0, LINE / 2)
        )
        columns[at].append(box)
        path.append(box)
    path.append(boxes[wire.target])
    for one, other in pairwise(path):
        (one.right if step > 0 else one.left).append(other)
        (other.left if step > 0 else other.right).append(one)
    return path


def _order(columns: list[list[Box]]) -> None:
    """Each column by the mean place of what its boxes are joined to, to and fro; of the orders seen the one with the
    fewest crossings, and then neighbours change places as long as there are fewer."""

    def sweep(forth: bool) -> None:
        for at in range(1, len(columns)) if forth else range(len(columns) - 2, -1, -1):
            places = {box: i for i, box in enumerate(columns[at - 1 if forth else at + 1])}
            means: dict[Box, float] = {}
            for i, box in enumerate(columns[at]):
                near = [places[other] for other in (box.left if forth else box.right)]
                means[box] = sum(near) / len(near) if near else float(i)
            columns[at].sort(key=means.__getitem__)

    best = [list(column) for column in columns]
    for turn in range(SWEEPS):
        sweep(turn % 2 == 0)
        if _crossings(columns) < _crossings(best):
            best = [list(column) for column in columns]
    columns[:] = best
    least = _crossings(columns)
    swaps = [(column, i) for column in columns for i in range(len(column) - 1)]
    while swaps:
        column, i = swaps.pop()
        column[i], column[i + 1] = column[i + 1], column[i]
        if (crossings := _crossings(columns)) < least:
            least = crossings
            swaps = [(column, i) for column in columns for i in range(len(column) - 1)]
        else:
            column[i], column[i + 1] = column[i + 1], column[i]


def _crossings(columns: list[list[Box]]) -> int:
    count = 0
    for column, following in pairwise(columns):
        places = {box: i for i, box in enumerate(following)}
        edges = [(i, places[other]) for i, box in enumerate(column) for other in box.right]
        count += sum((a - c) * (b - d) < 0 for i, (a, b) in enumerate(edges) for c, d in edges[:i])
    return count


def _place(columns: list[list[Box]]) -> None:
    x = MARGIN
    for at, column in enumerate(columns):
        width = max((box.width for box in column), default=0.0)
        for box in column:
            box.x, box.room = x + width / 2, width
            if at % 2 == 0:
                box.width = width  # or curves from a narrow one would run under a wide one
        x += width + SPACE
    for column in columns:
        _stack(column, [0.0] * len(column))
    for turn in range(2 * SWEEPS):
        for column in columns if turn % 2 == 0 else columns[::-1]:
            joined = [box.left + box.right for box in column]
            wanted = [
                sum(other.y for other in others) / len(others) if others else box.y
                for box, others in zip(column, joined, strict=True)
            ]
            _stack(column, wanted)
    top = min(box.y - box.height / 2 for column in columns for box in column)
    for column in columns:
        for box in column:
            box.y += MARGIN + HEAD - top


def _stack(column: list[Box], wanted: list[float]) -> None:
    """As near as can be to where they are wanted, in their order and without touching.

    Least squares under an order: those that would touch are joined to a block, which stands at its mean.
    """
    offsets = [0.0]
    for above, below in pairwise(column):
        offsets.append(offsets[-1] + (above.height + below.height) / 2 + GAP)
    blocks: list[tuple[float, int]] = []  # mean of wanted − offset, and of how many
    for want, offset in zip(wanted, offsets, strict=False):
        blocks.append((want - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, count), (other, more) = blocks.pop(), blocks.pop()
            blocks.append(((mean * count + other * more) / (count + more), count + more))
    starts = [mean for mean, count in blocks for _ in range(count)]
    for box, start, offset in zip(column, starts, offsets, strict=False):
        box.y = start + offset


def _ports(drawn: Layout) -> dict[tuple[Box, Box], float]:
    """Where a wire between two neighbours ends at the first: at a box one below the other, in the others' order."""
    ports: dict[tuple[Box, Box], float] = {}
    for box in [box for column in drawn.columns for box in column]:
        for side in (box.left, box.right):
            near = sorted(side, key=lambda other: other.y)
            for i, other in enumerate(near):
                ports[box, other] = box.y + PORT * (i - (len(near) - 1) / 2)
    return ports


def _path(path: list[Box], ports: dict[tuple[Box, Box], float]) -> list[str]:
    """The strokes of a wire: curves from column to column, straight within one, broken at its label."""
    strokes: list[str] = []
    for one, other in pairwise(path):
        way = 1.0 if other.x > one.x else -1.0
        x1, x2 = one.x + way * one.room / 2, other.x - way * other.room / 2
        y1, y2 = ports[one, other], ports[other, one]
        if one.lines:
            strokes.append(f"M{one.x + way * one.width / 2:.1f} {y1:.1f}")
        if other is path[-1]:
            x2 -= way * ARROW
        middle = (x1 + x2) / 2
        strokes[-1] += f" L{x1:.1f} {y1:.1f} C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
        if other.lines and other is not path[-1]:
            strokes[-1] += f" L{other.x - way * other.width / 2:.1f} {y2:.1f}"
    return strokes


def draw(graph: Graph) -> str:
    """The SVG's text."""
    drawn = layout(graph)
    ports = _ports(drawn)
    width, height = drawn.size
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(graph.name)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{MARGIN}" y="28">{escape(graph.name)}</text>',
        f'<text class="legend" x="{width - MARGIN:.0f}" y="28">→ asks  ⇢ weights, by way of a store</text>',
    ]
    for wire, path in drawn.wires:
        dashed = " dashed" if wire.dashed else ""
        parts.append(f'<g data-from="{wire.role}" data-to="{escape(wire.target)}">')
        parts += [f'<path class="wire{dashed}" d="{stroke}"/>' for stroke in _path(path, ports)]
        parts += [_text(box.x, box.y + 3.5, box.lines[0], "label") for box in path[1:-1] if box.lines]
        parts += [_arrowhead(path, ports), "</g>"]
    for name, box in drawn.boxes.items():
        kind = "role" if name in graph else "store"
        parts.append(
            f'<rect class="{kind}" x="{box.x - box.width / 2:.1f}" y="{box.y - box.height / 2:.1f}" '
            f'width="{box.width:.1f}" height="{box.height:.1f}" rx="{6 if kind == "role" else 13}"/>'
        )
        for i, (line, style) in enumerate(zip(box.lines, ("name", "kind"), strict=False)):
            parts.append(_text(box.x, box.y + 4 + LINE * (i - (len(box.lines) - 1) / 2), line, style))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _arrowhead(path: list[Box], ports: dict[tuple[Box, Box], float]) -> str:
    before, end = path[-2:]
    way = 1.0 if end.x > before.x else -1.0
    x, y = end.x - way * end.width / 2, ports[end, before]
    back = x - way * ARROW
    return f'<path class="head" d="M{x:.1f} {y:.1f} L{back:.1f} {y - 4:.1f} L{back:.1f} {y + 4:.1f} Z"/>'
