"""A report as a page: tables and charts in one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from msgspec import Struct, field

__all__ = ["Chart", "Line", "Report", "Table", "page", "text_table"]

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 8, 38
COLORS = ("#1f6fb4", "#d1691a", "#2c8a4b", "#8a4fb0", "#b03a48", "#6b6b6b")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 66em; padding: 0 1em; }
table { border-collapse: collapse; margin: 0.6em 0 1.4em; font-variant-numeric: tabular-nums; }
td, th { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
.charts { display: flex; flex-wrap: wrap; gap: 1em; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { font-size: 11px; }
.flag { color: #a01818; font-weight: 600; }
"""


class Line(Struct, frozen=True):
    """points: (x, mean, lowest, highest). color: lines of one color belong together over all charts."""

    label: str
    points: list[tuple[float, float, float, float]]
    color: int


class Chart(Struct, frozen=True):
    """level: a y to mark; None: no such."""

    title: str
    x: str
    y: str
    lines: list[Line]
    level: float | None = None


class Table(Struct, frozen=True):
    """rows: as many cells as columns; the first names the row."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Report(Struct, frozen=True):
    """values: for compare.json. flags: what makes the comparison doubtful. notes: how to read it."""

    values: dict[str, object]
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def text_table(table: Table) -> str:
    """For a terminal: a title, then columns side by side, the first to the left."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.columns))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([table.title, *(f"  {line}".rstrip() for line in lines)])


def page(title: str, report: Report) -> str:
    """The whole report as HTML."""
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f'<p class="flag">{escape(flag)}</p>' for flag in report.flags]
    parts += [_html_table(table) for table in report.tables]
    parts += ['<div class="charts">', *map(_figure, report.charts), "</div>"]
    parts += [f"<p>{escape(note)}</p>" for note in report.notes]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.columns)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>{escape(table.title)}</h2>\n<table><tr>{head}</tr>\n{body}\n</table>"


def _figure(chart: Chart) -> str:
    points = [point for line in chart.lines for point in line.points]
    if not points:
        return f"<figure><figcaption>{escape(chart.title)}</figcaption><p>nothing to draw</p></figure>"
    right = max(x for x, *_ in points) or 1.0
    levels = [] if chart.level is None else [chart.level]
    low = min([0.0, *levels, *(point[2] for point in points)])
    high = max([*levels, *(point[3] for point in points)])
    high = high if high > low else low + 1.0

    def at(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / right
        down = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)
        return f"{across:.1f},{down:.1f}"

    parts: list[str] = []
    for tick in _ticks(low, high):
        start, end = at(0, tick).split(","), at(right, tick).split(",")
        parts.append(f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{float(start[1]) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _ticks(0, right):
        place = at(tick, low).split(",")[0]
        parts.append(f'<text x="{place}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 5}" text-anchor="middle">{escape(chart.x)}</text>'
    )
    if chart.level is not None:
        start, end = at(0, chart.level).split(","), at(right, chart.level).split(",")
        where = f'x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"'
        parts.append(f'<line {where} stroke="#444" stroke-dasharray="4 3"/>')
    for line in chart.lines:
        parts += _drawn(line, at)
    names = " ".join(
        f'<span style="color:{COLORS[line.color % len(COLORS)]}">■ {escape(line.label)}</span>'
        for line in chart.lines
    )
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'
    caption = f"<figcaption>{escape(chart.title)}</figcaption>"
    return f"<figure>{caption}<div>{escape(chart.y)}: {names}</div>{svg}</figure>"


def _drawn(line: Line, at) -> Iterator[str]:
    color = COLORS[line.color % len(COLORS)]
    above = [at(x, high) for x, _, _, high in line.points]
    below = [at(x, low) for x, _, low, _ in reversed(line.points)]
    yield f'<polygon points="{" ".join(above + below)}" fill="{color}" opacity="0.18"/>'
    mean = " ".join(at(x, value) for x, value, _, _ in line.points)
    yield f'<polyline points="{mean}" fill="none" stroke="{color}" stroke-width="1.8"/>'


def _ticks(low: float, high: float) -> Sequence[float]:
    """Four to eight round numbers from `low` to `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(step * place, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]
