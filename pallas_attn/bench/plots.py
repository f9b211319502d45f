"""Bars as an SVG file: ours beside its peers, under the ceiling of the machine.

The picture is made of the rows alone, by the same arithmetic everywhere, so that a test can compare
the committed pictures with results/ byte by byte.
"""

import dataclasses
import html
import math
import pathlib
from collections.abc import Sequence

from pallas_attn.bench.report import TITLES, geomean, ratios
from pallas_attn.bench.rows import Row, is_ours, rate

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
_WIDE = 16  # cases that one row of bars can hold
_LEFT, _RIGHT, _TOP, _PANEL, _BELOW, _LEGEND = 110, 16, 54, 260, 112, 28  # pixels


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
    names = _names(every)
    lines = -(-len(every) // _WIDE)
    each = -(-len(every) // lines)
    width = _LEFT + _RIGHT + max(660, min(62, 16 + 10 * len(names)) * each)
    height = _TOP + lines * (_PANEL + _BELOW) + _LEGEND
    facts, op = groups[0][0], groups[0][0]["op"]
    where = f"{facts['gpu']}, JAX {facts['jax']}{_claim(groups)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">',
        f"<title>{html.escape(TITLES[op])}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(TITLES[op], width / 2, 20, "middle", size=14),
        _text(where, width / 2, 37, "middle"),
    ]
    ceiling = _ceiling(facts, ceilings)
    high = max(_height(row) for rows in every for row in rows)
    high = 1.1 * max(high, ceiling[1] if ceiling else 0)
    for n in range(lines):
        top = _TOP + n * (_PANEL + _BELOW)
        slot = (width - _LEFT - _RIGHT) / each
        panel = _Panel(top, width - _RIGHT, slot, high, logarithmic=op == "append")
        parts += panel.frame(_unit(facts), ceiling)
        for position, rows in enumerate(every[n * each : (n + 1) * each]):
            parts += panel.group(position, sorted(rows, key=lambda r: names.index(_name(r))))
    parts += _legend(names, {row["impl"] for row in separate}, width, height - 12)
    return "\n".join([*parts, "</svg>", ""])


@dataclasses.dataclass(frozen=True)
class _Panel:
    """One row of bars: where it lies and how large `high` is."""

    top: int
    right: int
    slot: float
    high: float
    logarithmic: bool

    def y(self, value: float) -> float:
        share = value / self.high
        if self.logarithmic:
            share = max(0.0, math.log(value / 0.5) / math.log(self.high / 0.5))
        return self.top + _PANEL * (1 - share)

    def frame(self, unit: str, ceiling: tuple[str, float] | None) -> list[str]:
        """The axis with its lines, and the ceiling."""
        base, middle = self.top + _PANEL, self.top + _PANEL / 2
        turned = f'transform="rotate(-90 {_LEFT - 42} {middle})"'
        parts = [_text(unit, _LEFT - 42, middle, "middle", more=turned)]
        for value in _ticks(self.high, self.logarithmic):
            parts.append(_line(self.right, self.y(value), "#dddddd"))
            parts.append(_text(f"{value:g}", _LEFT - 6, self.y(value) + 4, "end"))
        if ceiling is not None:
            parts.append(
                _line(self.right, self.y(ceiling[1]), "#444444", ' stroke-dasharray="5 4"')
            )
            label = f"{ceiling[0]} {ceiling[1]:.3g}"
            parts.append(_text(label, self.right - 2, self.y(ceiling[1]) - 4, "end"))
        return [*parts, _line(self.right, base, "#444444")]

    def group(self, position: int, rows: Sequence[Row]) -> list[str]:
        """The bars of one case, our figure within ours, its name below."""
        left, base = _LEFT + self.slot * position, self.top + _PANEL
        thick = 0.84 * self.slot / max(3, len(rows))
        start = left + (self.slot - thick * len(rows)) / 2
        parts = []
        for n, row in enumerate(rows):
            x, y, colour = start + n * thick, self.y(_height(row)), _colour(_name(row))
            outline = f' fill-opacity="0.35" stroke="{colour}"' if "method" in row else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.9 * thick:.1f}" '
                f'height="{base - y:.1f}" fill="{colour}"{outline}/>'
            )
            if is_ours(row):
                size = min(10, round(thick))  # no larger than its bar is wide
                middle, inside = x + 0.45 * thick + 0.4 * size, min(y + 30, base - 4)
                turned = f'fill="white" transform="rotate(-90 {middle:.1f} {inside:.1f})"'
                parts.append(_text(_label(row), middle, inside, "start", size, turned))
        middle, below = left + self.slot / 2 + 4, base + 14
        turned = f'transform="rotate(-32 {middle:.1f} {below})"'
        return [*parts, _text(_short(rows[0]), middle, below, "end", 10, turned)]


def _legend(names: Sequence[str], separate: set[str], width: int, y: int) -> list[str]:
    labels = [f"{name}, its own process" * (name in separate) or name for name in names]
    x = (width - sum(30 + 6 * len(label) for label in labels)) / 2
    parts = []
    for name, label in zip(names, labels, strict=True):
        opacity = ' fill-opacity="0.35"' if name in separate else ""
        colour = f'fill="{_colour(name)}" stroke="{_colour(name)}"'
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" {colour}{opacity}/>')
        parts.append(_text(label, x + 14, y, "start"))
        x += 30 + 6 * len(label)
    return parts


def _text(
    text: str, x: float, y: float, anchor: str, size: int | None = None, more: str = ""
) -> str:
    larger = f' font-size="{size}"' if size else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{larger}'
    return f"<text {place} {more}>{html.escape(text)}</text>"


def _line(right: float, y: float, colour: str, more: str = "") -> str:
    ends = f'x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {ends} stroke="{colour}"{more}/>'


def _ticks(high: float, logarithmic: bool) -> list[float]:
    if logarithmic:
        return [x for x in (1, 3, 10, 30, 100, 300, 1000) if x < high]
    power = 10 ** math.floor(math.log10(high / 4))
    step = next(n * power for n in (1, 2, 5, 10) if high / (n * power) <= 8)
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


def _height(row: Row) -> float:
    return 1e3 * row["ms"] if row["op"] == "append" else rate(row)


def _label(row: Row) -> str:
    value = _height(row)
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}"


def _unit(row: Row) -> str:
    if row["op"] == "append":
        return "microseconds (less is better)"
    return "TFLOP/s" if "tflops" in row else "TB/s"


def _ceiling(row: Row, ceilings: dict[str, float]) -> tuple[str, float] | None:
    name = "matmul" if "tflops" in row else "read"
    return (name, ceilings[name]) if name in ceilings and row["op"] != "append" else None


def _short(row: Row) -> str:
    return row["case"].removeprefix(row["op"] + "_").replace("_", " ")


def _claim(groups: Sequence[Sequence[Row]]) -> str:
    means = ratios(groups).get("best")
    return (
        f"; {geomean(means.values()):.2f} times the best peer of the same process" if means else ""
    )
