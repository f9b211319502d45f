"""An SVG picture of the sweep: time over size, both axes logarithmic, curves of each head dim."""

import html
import itertools
import math
from collections.abc import Sequence

from benchmarks.rows import Row

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 500, 380, 46, 64, 48, 44  # pixels
_COLOURS = ("#56B4E9", "#003f5c", "#D55E00", "#009E73")  # narrowest head dim first
_FORWARD = "Forward, nanoseconds of a query row of a head"
_BOTH = "Forward, and with the backward (dashed), nanoseconds of a query row of a head"


def drawing(rows: Sequence[Row]) -> str:
    """The SVG text: nanoseconds per query row of a head over rows of a sequence, with a curve for
    each head dim. `rows`: result rows of op "sweep", and of "sweep_both", whose curves are dashed.
    """
    dims = sorted({row["problem"]["head_dim"] for row in rows})
    curves = _curves(rows)
    points = [point for curve in curves.values() for point in curve]
    across = _Axis(*_ends([x for x, _ in points]), _LEFT, _WIDTH - _RIGHT)
    up = _Axis(*_ends([y for _, y in points]), _HEIGHT - _BOTTOM, _TOP)
    facts = rows[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="Verdana, DejaVu Sans, sans-serif" '
        'font-size="11">',
        "<title>Time of a query row over the rows of a sequence</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_BOTH if any(both for _, both in curves) else _FORWARD, _WIDTH / 2, 18, "middle"),
        _text(f"{facts['gpu']}, JAX {facts['jax']}", _WIDTH / 2, 34, "middle"),
        _text("rows of a sequence (T = S)", (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "middle"),
    ]
    for x in _ticks(across, 2):
        parts.append(_line([(across.at(x), _TOP), (across.at(x), _HEIGHT - _BOTTOM)], "#dddddd", 1))
        parts.append(_text(f"{x:g}", across.at(x), _HEIGHT - _BOTTOM + 14, "middle"))
    for y in _ticks(up, 2):
        parts.append(_line([(_LEFT, up.at(y)), (_WIDTH - _RIGHT, up.at(y))], "#dddddd", 1))
        parts.append(_text(f"{y:g}", _LEFT - 5, up.at(y) + 4, "end"))
    colours = dict(zip(dims, _COLOURS, strict=False))
    for (dim, both), curve in curves.items():
        colour, places = colours[dim], [(across.at(x), up.at(y)) for x, y in sorted(curve)]
        parts.append(_line(places, colour, 2, "5 3" if both else None))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        name = f"H {dim}, both" if both else f"H {dim}"
        parts.append(_text(name, places[-1][0] + 5, places[-1][1] + 4, "start", colour))
    return "\n".join([*parts, "</svg>", ""])


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
        "A row of a shorter sequence has fewer keys, and may take longer all the same, by up to "
        f"{told[0]}; a whole shorter sequence by up to {told[1]}."
    )


def _curves(rows: Sequence[Row]) -> dict[tuple[int, bool], list[tuple[float, float]]]:
    """The points of each head dim, and whether they are with the backward."""
    curves: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for row in rows:
        key = row["problem"]["head_dim"], row["op"] == "sweep_both"
        curves.setdefault(key, []).append(_point(row))
    return dict(sorted(curves.items()))


def _point(row: Row) -> tuple[float, float]:
    sizes = row["problem"]
    rows = sizes["batch"] * sizes["q_len"] * sizes["q_heads"]
    return sizes["q_len"], 1e6 * row["ms"] / rows


class _Axis:
    """A logarithmic axis, from `low` at pixel `start` to `high` at pixel `end`."""

    def __init__(self, low: float, high: float, start: float, end: float):
        self.low, self.high, self.start, self.end = low, high, start, end

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + (self.end - self.start) * share


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The nearest powers of two below and above all values."""
    return 2.0 ** math.floor(math.log2(min(values))), 2.0 ** math.ceil(math.log2(max(values)))


def _ticks(axis: _Axis, base: int) -> list[float]:
    first, last = (round(math.log(end, base)) for end in (axis.low, axis.high))
    return [float(base) ** n for n in range(first, last + 1)]


def _line(
    places: Sequence[tuple[float, float]], colour: str, width: int, dashes: str | None = None
) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = "" if dashes is None else f' stroke-dasharray="{dashes}"'
    line = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"'
    return f"{line}{dashed}/>"


def _text(text: str, x: float, y: float, anchor: str, colour: str = "black") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{html.escape(text)}</text>"
