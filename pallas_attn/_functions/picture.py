"""Pictures of masks and scores: text, SVG, and a figure of Matplotlib where that is installed."""

import dataclasses
import html
from typing import Any

import numpy as np

_SEEN, _HIDDEN, _ODD = "■", "·", "?"  # a key that a query sees, or not; a score of inf or NaN
_LEVELS = "▁▂▃▄▅▆▇█"  # scores from the least to the greatest
_BLUE, _GREY, _RED = "#1f6fb4", "#e9e9e9", "#cc3311"
_RAMP = ((253, 228, 170), (74, 166, 143), (38, 69, 110))  # from the least score to the greatest
_SHADES = 24  # colours of scores in an SVG
_SIDE = 256  # pixels of the longer side of an SVG


def positions(q_len: int, kv_len: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, 1] and keys [1, m] that a picture shows: every one, or one of every few."""
    rows, keys = (np.arange(0, n, -(-n // most), dtype=np.int32) for n in (q_len, kv_len))
    return rows[:, None], keys[None]


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a mask or a score function, a row for each query and a column for each key.

    `print` and the prompt of Python show it as text, a notebook as an SVG; `figure()` is one of
    Matplotlib. `values` has what it shows: bool of a mask, float32 of a score.

    Example::

        >>> pa.CAUSAL.show(2, 3).values.tolist()
        [[True, False, False], [True, True, False]]
    """

    values: np.ndarray  # [rows, keys]
    title: str
    q_len: int
    kv_len: int

    @property
    def caption(self) -> str:
        """The sizes, what part of them is shown, and the range of scores."""
        queries = "1 query" if self.q_len == 1 else f"{self.q_len} queries"
        keys = "1 key" if self.kv_len == 1 else f"{self.kv_len} keys"
        text = f"{queries} (down), {keys} (across)"
        sizes = zip((self.q_len, self.kv_len), self.values.shape, strict=True)
        steps = [-(-n // shown) for n, shown in sizes]
        if max(steps) > 1:
            text += "; shown: " + ", ".join(
                f"1 of {step} {name}" if step > 1 else f"all {name}"
                for step, name in zip(steps, ("queries", "keys"), strict=True)
            )
        if self.values.dtype != bool:
            low, high = self._range
            text += f"; from {low:.3g} to {high:.3g}"
        return text

    @property
    def _range(self) -> tuple[float, float]:
        """The least and the greatest of the finite numbers; 0 where there are none."""
        finite = self.values[np.isfinite(self.values)]
        return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)

    def _level(self, levels: int) -> np.ndarray:
        """The level of each number, 0 to levels - 1; -1 where -inf or False hides the key, and
        `levels` for inf and NaN.
        """
        if self.values.dtype == bool:
            return np.where(self.values, levels - 1, -1)
        low, high = self._range
        finite = np.isfinite(self.values)
        above = np.where(finite, self.values, low).astype(np.float64) - low
        level = np.minimum((above / ((high - low) or 1) * levels).astype(int), levels - 1)
        level = np.where(finite, level, levels)
        return np.where(self.values == -np.inf, -1, level)

    def __str__(self) -> str:
        marks = _SEEN if self.values.dtype == bool else _LEVELS
        letters = np.array([*marks, _ODD, _HIDDEN])[self._level(len(marks))]
        between = " " if self.values.shape[1] <= 32 else ""
        return "\n".join([f"{self.title}: {self.caption}", *map(between.join, letters)])

    __repr__ = __str__

    def svg(self) -> str:
        """The picture as an SVG of up to 256 pixels a side, for a page of any colour."""
        rows, keys = self.values.shape
        cell = _SIDE / max(rows, keys)
        width, height = round(keys * cell, 2), round(rows * cell, 2)
        levels = 1 if self.values.dtype == bool else _SHADES
        every = self._level(levels)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-20 -20 {width + 24:g} '
            f'{height + 24:g}" width="{width + 24:g}" height="{height + 24:g}" '
            'font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#333333">',
            f"<title>{html.escape(f'{self.title}: {self.caption}')}</title>",
            f'<rect x="-20" y="-20" width="{width + 24:g}" height="{height + 24:g}" fill="white"/>',
            f'<text x="{width / 2:g}" y="-7" text-anchor="middle">keys</text>',
            f'<text transform="translate(-7 {height / 2:g}) rotate(-90)" '
            'text-anchor="middle">queries</text>',
            f'<rect width="{width:g}" height="{height:g}" fill="{_GREY}"/>',
            f'<g transform="scale({cell:g})" shape-rendering="crispEdges">',
        ]
        for level in range(levels + 1):
            runs = "".join(f"M{at} {row}h{n}v1h-{n}z" for row, at, n in _runs(every == level))
            if runs:
                parts.append(f'<path fill="{_colour(level, levels)}" d="{runs}"/>')
        return "\n".join([*parts, "</g>", "</svg>", ""])

    _repr_svg_ = svg

    def figure(self) -> Any:
        """The picture as a `matplotlib.figure.Figure` (extra `plot`), with one image in one axis.
        Hidden keys have no colour, nor have scores that are inf or NaN.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "figure: expected Matplotlib: pip install 'pallas_attn[plot]', or take svg()"
            ) from error
        figure = Figure(figsize=(4.8, 4.8), layout="constrained")
        axis = figure.subplots()
        if self.values.dtype == bool:
            axis.imshow(self.values, "Blues", vmin=0, vmax=1)
        else:
            image = axis.imshow(np.ma.masked_invalid(self.values), "viridis")
            figure.colorbar(image, shrink=0.8)
        axis.set(xlabel="keys", ylabel="queries")
        axis.set_title("\n".join([self.title, *self.caption.split("; ")]), fontsize="small")
        return figure


def _runs(marked: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, first column, length) of each run of True."""
    runs = []
    for row, line in enumerate(marked):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]]).astype(np.int8)))
        runs += [(row, int(at), int(end - at)) for at, end in edges.reshape(-1, 2)]
    return runs


def _colour(level: int, levels: int) -> str:
    if level == levels:
        return _RED
    if levels == 1:
        return _BLUE
    place = level / (levels - 1) * (len(_RAMP) - 1)
    first = min(int(place), len(_RAMP) - 2)
    pair = zip(_RAMP[first], _RAMP[first + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - first)):02x}" for a, b in pair)
