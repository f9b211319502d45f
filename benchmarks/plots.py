"""The pictures of the pages, as SVG files: bars of an operation, curves of the sweep over the rows
of a sequence, squares of the sweep where key tiles are few, and what is said below the last two.

A picture is made of the rows alone, by the same arithmetic everywhere, so that a test can compare
the committed pictures with results/ byte by byte. All can be read on a telephone.
"""

import html
import itertools
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.report import TITLES, geomean, ratios
from benchmarks.rows import Row, is_ours, rate

# ---- parts that all pictures have ----------------------------------------------------------------


def _svg(title: str, width: float, height: float, size: int, parts: Iterable[str]) -> str:
    """The file of a picture with letters of a size."""
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Verdana, DejaVu Sans, sans-serif" '
        f'font-size="{size}">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    title = f"<title>{html.escape(title)}</title>"
    return "\n".join([start, title, ground, *parts, "</svg>", ""])


def _text(text: str, x: float, y: float, anchor: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}'
    return f"<text {place}>{html.escape(text)}</text>"


def _where(row: Row) -> str:
    """The machine of a row."""
    return f"{row['gpu']}, JAX {row['jax']}"


class _Axis(NamedTuple):
    """An axis from `low` at pixel `start` to `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float) -> "_Axis":
        """A logarithmic one, to the nearest powers of two below and above all values."""
        ends = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
        return cls(2.0 ** ends[0], 2.0 ** ends[1], start, end, True)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.logarithmic:
            share = max(0.0, math.log(value / self.low) / math.log(self.high / self.low))
        return self.start + (self.end - self.start) * share

    def powers(self) -> list[float]:
        """The powers of two on it."""
        return [2.0**n for n in range(*(round(math.log2(x)) for x in (self.low, 2 * self.high)))]


# ---- bars: a line a case, ours beside a mark for each peer and the limit of the machine ---------

# Okabe and Ito's colours, which stay apart for every kind of colour vision; ours is the darkest, so
# that a grey print can be read too. A peer has the same colour in every picture.
_OURS = "#003f5c"
_COLOURS = {
    "cudnn": "#56B4E9",
    "flash_attention_4": "#CC79A7",
    "flashinfer_tensor_cores": "#E69F00",
    "flashinfer_cuda_cores": "#F0E442",
    "attention_mgpu": "#009E73",
    "tokamax_mosaic": "#D55E00",
    "torch_flash2": "#0072B2",
    "xla": "#BBBBBB",
}
_OTHERS = "#888888"
_WIDTH, _RIGHT, _LINE, _TOP = 480, 44, 19, 62  # pixels
_CHARACTER = 6.4  # pixels of a character of a label, at most
_LEAST_MICROSECONDS = 0.5  # start of the axis of append, which is logarithmic


def ready(path: str) -> None:
    """Says what is wrong with a name for a picture before anything is measured for it."""
    if not path.endswith(".svg"):
        raise ValueError(f"plot: expected a name that ends with .svg, got {path}")
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab"):
        pass


def bars(groups: Sequence[Sequence[Row]], ceilings: dict[str, float], path: str) -> None:
    """Draws the groups of one operation (one group a case, ours first) into a file."""
    pathlib.Path(path).write_text(drawing(groups, ceilings), "utf-8")


def drawing(
    groups: Sequence[Sequence[Row]], ceilings: dict[str, float], separate: Sequence[Row] = ()
) -> str:
    """The SVG of some groups. `separate`: rows of peers that were measured in processes of their
    own; they are drawn in outline and enter no ratio.
    """
    every = [[*rows, *(r for r in separate if r["case"] == rows[0]["case"])] for rows in groups]
    facts, op = groups[0][0], groups[0][0]["op"]
    ceiling = _ceiling(facts, ceilings)
    high = max(_size(row) for rows in every for row in rows)
    high = 1.05 * max(high, ceiling[1] if ceiling else 0)
    labels = [_short(rows[0]) for rows in every]
    left = round(12 + _CHARACTER * max(map(len, labels)))
    low = _LEAST_MICROSECONDS if op == "append" else 0.0
    axis = _Axis(low, high, left, _WIDTH - _RIGHT, op == "append")
    legend = _legend(_names(every), {row["impl"] for row in separate})
    bottom = _TOP + _LINE * len(every)
    parts = [*_head(groups, TITLES[op]), *_frame(axis, bottom, ceiling)]
    for n, (label, rows) in enumerate(zip(labels, every, strict=True)):
        middle = _TOP + _LINE * (n + 0.5)
        parts.append(_text(label, left - 6, middle + 4, "end"))
        parts += _bar(axis, middle, rows)
    for n, entries in enumerate(legend):
        parts += [part.format(y=bottom + 36 + _LINE * n) for part in entries]
    return _svg(TITLES[op], _WIDTH, bottom + 40 + _LINE * len(legend), 11, parts)


def _frame(axis: _Axis, bottom: float, ceiling: tuple[str, float] | None) -> list[str]:
    """The lines of the axis with their numbers, and the limit of the machine."""
    parts = []
    for value in _ticks(axis):
        parts.append(_vertical(axis.at(value), bottom, "#dddddd"))
        parts.append(_text(f"{value:g}", axis.at(value), bottom + 14, "middle"))
    if ceiling is not None:
        name, value = ceiling
        parts.append(_vertical(axis.at(value), bottom, "#444444", ' stroke-dasharray="5 4"'))
        parts.append(_text(f"{name} {value:.3g}", axis.at(value), _TOP - 5, "middle"))
    return parts


def _bar(axis: _Axis, middle: float, rows: Sequence[Row]) -> list[str]:
    """The bar of ours with its figure, and the marks of the peers, of a case."""
    parts, left = [], axis.start
    order = _names([rows])[::-1]  # known peers last: they lie over the others
    for row in sorted(rows, key=lambda row: (not is_ours(row), order.index(_name(row)))):
        x, colour = axis.at(_size(row)), _colour(_name(row))
        if is_ours(row):
            parts.append(
                f'<rect x="{left}" y="{middle - 6:.1f}" width="{x - left:.1f}" height="12" '
                f'fill="{colour}"/>'
            )
            parts.append(_text(_label(row), _WIDTH - 4, middle + 4, "end"))
        else:
            parts.append(_mark(x, f"{middle:.1f}", colour, separate="method" in row))
    return parts


def _head(groups: Sequence[Sequence[Row]], title: str) -> list[str]:
    """The title, and where it was measured, in the middle."""
    facts, means = groups[0][0], ratios(groups).get("best")
    where = _where(facts)
    if means:
        where += f"; {geomean(means.values()):.2f} times the best peer"
    unit = " (less is better)" if facts["op"] == "append" else ""
    title = title.partition(" (")[0].replace(" live", "")  # it has to fit the width
    lines = (title + unit, ' font-size="12"'), (where, ' font-size="11"')
    return [_text(x, _WIDTH / 2, 18 + 17 * n, "middle", size) for n, (x, size) in enumerate(lines)]


def _legend(names: Sequence[str], separate: set[str]) -> list[list[str]]:
    """Lines of marks with names; `{y}` stands for where a line lies."""
    lines: list[list[str]] = [[]]
    x = 12.0
    for name in names:
        label = f"{name}, its own process" * (name in separate) or name
        width = 24 + _CHARACTER * len(label)
        if x + width > _WIDTH and lines[-1]:
            lines.append([])
            x = 12.0
        if name == "ours":
            mark = f'<rect x="{x - 5:.1f}" y="{{y}}" width="10" height="10" fill="{_OURS}" '
            mark += 'transform="translate(0 -9)"/>'
        else:
            mark = _mark(x, "{y}", _colour(name), name in separate, ' transform="translate(0 -4)"')
        place = f'x="{x + 10:.1f}" y="{{y}}" text-anchor="start"'
        lines[-1] += [mark, f"<text {place}>{html.escape(label)}</text>"]
        x += width
    return lines


def _mark(x: float, y: str, colour: str, separate: bool, more: str = "") -> str:
    """The mark of a peer; hollow where it was measured in a process of its own."""
    fill = f'fill="white" stroke="{colour}" stroke-width="2"' if separate else f'fill="{colour}"'
    edge = "" if separate else ' stroke="white"'
    return f'<circle cx="{x:.1f}" cy="{y}" r="4.5" {fill}{edge}{more}/>'


def _vertical(x: float, bottom: float, colour: str, more: str = "") -> str:
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom:.1f}"'
    return f'<line {ends} stroke="{colour}"{more}/>'


def _ticks(axis: _Axis) -> list[float]:
    high = axis.high
    if axis.logarithmic:
        return [x for x in (1, 3, 10, 30, 100, 300, 1000) if x < high]
    power = 10 ** math.floor(math.log10(high / 4))
    step = next(n * power for n in (1, 2, 5, 10) if high / (n * power) <= 6)
    return [round(n * step, 6) for n in range(int(high / step) + 1)]


def _name(row: Row) -> str:
    return "ours" if is_ours(row) else row["impl"]


def _names(groups: Sequence[Sequence[Row]]) -> list[str]:
    """Ours, then the peers in the order of their colours."""
    names = {_name(row) for rows in groups for row in rows}
    known = ["ours", *_COLOURS]
    return sorted(
        names, key=lambda name: (known.index(name) if name in known else len(known), name)
    )


def _colour(name: str) -> str:
    return _OURS if name == "ours" else _COLOURS.get(name, _OTHERS)


def _size(row: Row) -> float:
    """The length of a row's bar."""
    return 1e3 * row["ms"] if row["op"] == "append" else rate(row)


def _label(row: Row) -> str:
    value = _size(row)
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}"


def _ceiling(row: Row, ceilings: dict[str, float]) -> tuple[str, float] | None:
    name = "matmul" if "tflops" in row else "read"
    return (name, ceilings[name]) if name in ceilings and row["op"] != "append" else None


def _short(row: Row) -> str:
    return row["case"].removeprefix(row["op"] + "_").replace("_", " ")


# ---- curves: time over size, both axes logarithmic, a curve for each head dim -------------------

_BOX = 500, 380  # pixels
_EDGES = 46, 436, 48, 336  # left, right, top and bottom of the curves
_OF_DIMS = ("#56B4E9", "#003f5c", "#D55E00", "#009E73")  # narrowest head dim first
_FORWARD = "Forward, nanoseconds of a query row of a head"
_BOTH = "Forward, and with the backward (dashed), nanoseconds of a query row of a head"


def curves(rows: Sequence[Row]) -> str:
    """The SVG text: nanoseconds per query row of a head over rows of a sequence, with a curve for
    each head dim. `rows`: result rows of op "sweep", and of "sweep_both", whose curves are dashed.
    """
    dims, drawn = sorted({row["problem"]["head_dim"] for row in rows}), _curves(rows)
    points = [point for curve in drawn.values() for point in curve]
    (width, height), (left, right, top, bottom) = _BOX, _EDGES
    across = _Axis.of([x for x, _ in points], left, right)
    up = _Axis.of([y for _, y in points], bottom, top)
    parts = [
        _text(_BOTH if any(both for _, both in drawn) else _FORWARD, width / 2, 18, "middle"),
        _text(_where(rows[0]), width / 2, 34, "middle"),
        _text("rows of a sequence (T = S)", (left + right) / 2, height - 8, "middle"),
    ]
    for x in across.powers():
        parts.append(_line([(across.at(x), top), (across.at(x), bottom)], "#dddddd", 1))
        parts.append(_text(f"{x:g}", across.at(x), bottom + 14, "middle"))
    for y in up.powers():
        parts.append(_line([(left, up.at(y)), (right, up.at(y))], "#dddddd", 1))
        parts.append(_text(f"{y:g}", left - 5, up.at(y) + 4, "end"))
    colours = dict(zip(dims, _OF_DIMS, strict=False))
    for (dim, both), curve in drawn.items():
        colour, places = colours[dim], [(across.at(x), up.at(y)) for x, y in sorted(curve)]
        parts.append(_line(places, colour, 2, ' stroke-dasharray="5 3"' * both))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        name, (x, y) = f"H {dim}" + ", both" * both, places[-1]
        parts.append(_text(name, x + 5, y + 4, "start", f' fill="{colour}"'))
    return _svg("Time of a query row over the rows of a sequence", width, height, 11, parts)


def falls(rows: Sequence[Row]) -> str:
    """A text on where the curves fall most: the row that takes most above a longer sequence's, and
    the sequence that takes most above a longer one.
    """
    shorter, whole = [(1.0, "none")], [(1.0, "none")]
    for (dim, both), curve in _curves(rows).items():
        name = f"head dim {dim}" + " with the backward" * both
        for (rows_a, a), (rows_b, b) in itertools.combinations(sorted(curve), 2):
            sizes = f"{rows_a:.0f} beside {rows_b:.0f} rows, {name}"
            shorter.append((a / b, sizes))
            whole.append((rows_a * a / (rows_b * b), sizes))
    told = [f"{most - 1:.0%} ({sizes})" for most, sizes in (max(shorter), max(whole))]
    return (
        f"A row of a shorter sequence may take longer, by up to {told[0]}; a whole shorter "
        f"sequence by up to {told[1]}."
    )


def _curves(rows: Sequence[Row]) -> dict[tuple[int, bool], list[tuple[float, float]]]:
    """The points of each head dim, and whether they are with the backward."""
    curves: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for row in rows:
        key = row["problem"]["head_dim"], row["op"] == "sweep_both"
        sizes = row["problem"]
        count = sizes["batch"] * sizes["q_len"] * sizes["q_heads"]
        curves.setdefault(key, []).append((sizes["q_len"], 1e6 * row["ms"] / count))
    return dict(sorted(curves.items()))


def _line(places: Sequence[tuple[float, float]], colour: str, width: int, more: str = "") -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"{more}/>'
    )


# ---- squares: speed over cuDNN's where key tiles are few, a square for each problem -------------

_SQUARE, _GAP, _OF_HEADS, _ABOVE = 13, 26, 76, 78  # pixels
# From the slowest on: the least ratio, and a colour.
_CLASSES = (
    *((0.0, "#D55E00"), (0.99, "#f0e442"), (1.1, "#b6dcee"), (1.25, "#56B4E9"), (1.5, "#0b5a86")),
)
_NAMES = ("below 0.99", "0.99 to 1.10", "1.10 to 1.25", "1.25 to 1.50", "1.50 and above")
_PASSES = {"forward": "Forward", "both": "Both passes"}


def ratio(row: Row, passes: str) -> float:
    """cuDNN's time over ours."""
    return float(row["cudnn_ms"][passes] / row["ms"][passes])


def squares(rows: Sequence[Row]) -> str:
    """The SVG text. Panels: head dims across, passes down. In a panel, rows are kv heads and their
    groups, columns the query rows of each batch size. `rows`: result rows of op "sweep_few".
    """
    sizes = [row["problem"] for row in rows]
    dims = sorted({x["head_dim"] for x in sizes})
    columns = sorted({(x["batch"], x["q_len"]) for x in sizes})
    lines = sorted({(x["kv_heads"], x["q_heads"] // x["kv_heads"]) for x in sizes})
    panel = len(columns) * _SQUARE + _GAP, len(lines) * _SQUARE + 2 * _GAP - 8
    width, height = _OF_HEADS + len(dims) * panel[0], _ABOVE + len(_PASSES) * panel[1] - _GAP
    parts = [
        _text("Speed over cuDNN's: causal, bfloat16", width / 2, 16, "middle"),
        _text(_where(rows[0]), width / 2, 31, "middle"),
    ]
    for n, ((_, colour), name) in enumerate(zip(_CLASSES, _NAMES, strict=True)):
        x = _OF_HEADS + n * (width - _OF_HEADS) / len(_CLASSES)
        parts.append(_squares([(x, 40)], colour))
        parts.append(_text(name, x + _SQUARE + 4, 50, "start"))
    for down, (passes, title) in enumerate(_PASSES.items()):
        top = _ABOVE + down * panel[1]
        for line, (heads, group) in enumerate(lines):
            y = top + line * _SQUARE + 10
            parts.append(_text(f"{heads * group}:{heads} heads", _OF_HEADS - 5, y, "end"))
        for across, dim in enumerate(dims):
            left = _OF_HEADS + across * panel[0]
            parts.append(_text(f"{title}, head dim {dim}", left, top - 6, "start"))
            own = [row for row in rows if row["problem"]["head_dim"] == dim]
            parts += _panel(own, passes, (left, top), (columns, lines))
    return _svg("Speed over cuDNN's where key tiles are few", width, height, 10, parts)


def _panel(
    rows: Sequence[Row],
    passes: str,
    corner: tuple[int, int],
    sizes: tuple[list[tuple[int, int]], list[tuple[int, int]]],
) -> list[str]:
    """The squares of a head dim, and the batch sizes below. `sizes`: of columns and of lines."""
    (left, top), (columns, lines) = corner, sizes
    places: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x = row["problem"]
        column = columns.index((x["batch"], x["q_len"]))
        line = lines.index((x["kv_heads"], x["q_heads"] // x["kv_heads"]))
        colour = [c for least, c in _CLASSES if ratio(row, passes) >= least][-1]
        place = left + column * _SQUARE, top + line * _SQUARE
        places.setdefault(colour, []).append(place)
    parts = [_squares(some, colour) for colour, some in sorted(places.items())]
    for batch in sorted({batch for batch, _ in columns}):
        same = [n for n, column in enumerate(columns) if column[0] == batch]
        middle = left + (same[0] + len(same) / 2) * _SQUARE
        parts.append(_text(f"B {batch}", middle, top + len(lines) * _SQUARE + 11, "middle"))
    return parts


def ratios_said(rows: Sequence[Row]) -> str:
    """The least, the middle and the largest ratio, by passes; and which rows are no faster."""
    said, slower = [], []
    for passes, title in _PASSES.items():
        every = sorted(ratio(row, passes) for row in rows)
        ends = f"{every[0]:.3f} at least, {every[len(every) // 2]:.2f} in the middle"
        said.append(f"{title}: {ends}, {every[-1]:.2f} at most.")
        slower += [f"`{row['case']}`" for row in rows if ratio(row, passes) < 1]
    below = f"Not faster than cuDNN: {', '.join(slower)}." if slower else "cuDNN is nowhere faster."
    return " ".join([*said, below])


def _squares(places: Sequence[tuple[float, float]], colour: str) -> str:
    side = _SQUARE - 1
    path = "".join(f"M{x:g} {y:g}h{side}v{side}h-{side}z" for x, y in places)
    return f'<path fill="{colour}" d="{path}"/>'
