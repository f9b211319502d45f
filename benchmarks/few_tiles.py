"""An SVG picture of speed over cuDNN's where key tiles are few: a square for each problem."""

import html
from collections.abc import Sequence

from benchmarks.rows import Row

_SQUARE, _GAP, _LEFT, _TOP = 13, 26, 76, 78  # pixels
# From the slowest on: the least ratio, and a colour.
_CLASSES = (
    *((0.0, "#D55E00"), (0.99, "#f0e442"), (1.1, "#b6dcee"), (1.25, "#56B4E9"), (1.5, "#0b5a86")),
)
_NAMES = ("below 0.99", "0.99 to 1.10", "1.10 to 1.25", "1.25 to 1.50", "1.50 and above")
_PASSES = {"forward": "Forward", "both": "Both passes"}


def ratio(row: Row, passes: str) -> float:
    """cuDNN's time over ours."""
    return float(row["cudnn_ms"][passes] / row["ms"][passes])


def drawing(rows: Sequence[Row]) -> str:
    """The SVG text. Panels: head dims across, passes down. In a panel, rows are kv heads and their
    groups, columns the query rows of each batch size. `rows`: result rows of op "sweep_few".
    """
    sizes = [row["problem"] for row in rows]
    dims = sorted({x["head_dim"] for x in sizes})
    columns = sorted({(x["batch"], x["q_len"]) for x in sizes})
    lines = sorted({(x["kv_heads"], x["q_heads"] // x["kv_heads"]) for x in sizes})
    panel = len(columns) * _SQUARE + _GAP, len(lines) * _SQUARE + 2 * _GAP - 8
    width, height = _LEFT + len(dims) * panel[0], _TOP + len(_PASSES) * panel[1] - _GAP
    facts = rows[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Verdana, DejaVu Sans, sans-serif" '
        'font-size="10">',
        "<title>Speed over cuDNN's where key tiles are few</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text("Speed over cuDNN's: causal, bfloat16", width / 2, 16, "middle"),
        _text(f"{facts['gpu']}, JAX {facts['jax']}", width / 2, 31, "middle"),
    ]
    for n, ((_, colour), name) in enumerate(zip(_CLASSES, _NAMES, strict=True)):
        x = _LEFT + n * (width - _LEFT) / len(_CLASSES)
        parts.append(_squares([(x, 40)], colour))
        parts.append(_text(name, x + _SQUARE + 4, 50, "start"))
    for down, (passes, title) in enumerate(_PASSES.items()):
        top = _TOP + down * panel[1]
        for line, (heads, group) in enumerate(lines):
            y = top + line * _SQUARE + 10
            parts.append(_text(f"{heads * group}:{heads} heads", _LEFT - 5, y, "end"))
        for across, dim in enumerate(dims):
            left = _LEFT + across * panel[0]
            parts.append(_text(f"{title}, head dim {dim}", left, top - 6, "start"))
            own = [row for row in rows if row["problem"]["head_dim"] == dim]
            parts += _panel(own, passes, (left, top), (columns, lines))
    return "\n".join([*parts, "</svg>", ""])


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


def summary(rows: Sequence[Row]) -> str:
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


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
