"""Pictures as SVG files: a line a case, with a bar for ours and a mark for each peer, beside the
limit of the machine. They are 480 pixels wide, so that labels can be read on a telephone.

A picture is made of the rows alone, by the same arithmetic everywhere, so that a test can compare
the committed pictures with results/ byte by byte.
"""

import dataclasses
import html
import math
import pathlib
from collections.abc import Sequence

from benchmarks.report import TITLES, geomean, ratios
from benchmarks.rows import Row, is_ours, rate

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
    axis = _Axis(left, high, logarithmic=op == "append")
    legend = _legend(_names(every), {row["impl"] for row in separate})
    bottom = _TOP + _LINE * len(every)
    height = bottom + 40 + _LINE * len(legend)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="Verdana, DejaVu Sans, sans-serif" '
        'font-size="11">',
        f"<title>{html.escape(TITLES[op])}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_head(groups, TITLES[op]),
        *axis.frame(bottom, ceiling),
    ]
    for n, (label, rows) in enumerate(zip(labels, every, strict=True)):
        middle = _TOP + _LINE * (n + 0.5)
        parts.append(_text(label, left - 6, middle + 4, "end"))
        parts += axis.line(middle, rows)
    for n, entries in enumerate(legend):
        parts += [part.format(y=bottom + 36 + _LINE * n) for part in entries]
    return "\n".join([*parts, "</svg>", ""])


@dataclasses.dataclass(frozen=True)
class _Axis:
    """The horizontal axis: where it begins, and its largest value."""

    left: int
    high: float
    logarithmic: bool

    def x(self, value: float) -> float:
        share = value / self.high
        if self.logarithmic:
            least = _LEAST_MICROSECONDS
            share = max(0.0, math.log(value / least) / math.log(self.high / least))
        return self.left + (_WIDTH - _RIGHT - self.left) * share

    def frame(self, bottom: float, ceiling: tuple[str, float] | None) -> list[str]:
        """The lines of the axis with their numbers, and the limit of the machine."""
        parts = []
        for value in _ticks(self.high, self.logarithmic):
            parts.append(_vertical(self.x(value), bottom, "#dddddd"))
            parts.append(_text(f"{value:g}", self.x(value), bottom + 14, "middle"))
        if ceiling is not None:
            name, value = ceiling
            parts.append(_vertical(self.x(value), bottom, "#444444", ' stroke-dasharray="5 4"'))
            parts.append(_text(f"{name} {value:.3g}", self.x(value), _TOP - 5, "middle"))
        return parts

    def line(self, middle: float, rows: Sequence[Row]) -> list[str]:
        """The bar of ours with its figure, and the marks of the peers, of a case."""
        parts = []
        order = _names([rows])[::-1]  # known peers last: they lie over the others
        for row in sorted(rows, key=lambda row: (not is_ours(row), order.index(_name(row)))):
            x, colour = self.x(_size(row)), _colour(_name(row))
            if is_ours(row):
                parts.append(
                    f'<rect x="{self.left}" y="{middle - 6:.1f}" width="{x - self.left:.1f}" '
                    f'height="12" fill="{colour}"/>'
                )
                parts.append(_text(_label(row), _WIDTH - 4, middle + 4, "end"))
            else:
                parts.append(_mark(x, f"{middle:.1f}", colour, separate="method" in row))
        return parts


def _head(groups: Sequence[Sequence[Row]], title: str) -> list[str]:
    """The title, and where it was measured, in the middle."""
    facts, means = groups[0][0], ratios(groups).get("best")
    where = f"{facts['gpu']}, JAX {facts['jax']}"
    if means:
        where += f"; {geomean(means.values()):.2f} times the best peer"
    unit = " (less is better)" if facts["op"] == "append" else ""
    title = title.partition(" (")[0].replace(" live", "")  # it has to fit the width
    lines = [(title + unit, 12), (where, 11)]
    return [
        _text(text, _WIDTH / 2, 18 + 17 * n, "middle", size) for n, (text, size) in enumerate(lines)
    ]


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


def _text(text: str, x: float, y: float, anchor: str, size: int | None = None) -> str:
    larger = f' font-size="{size}"' if size else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{larger}'
    return f"<text {place}>{html.escape(text)}</text>"


def _vertical(x: float, bottom: float, colour: str, more: str = "") -> str:
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom:.1f}"'
    return f'<line {ends} stroke="{colour}"{more}/>'


def _ticks(high: float, logarithmic: bool) -> list[float]:
    if logarithmic:
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
