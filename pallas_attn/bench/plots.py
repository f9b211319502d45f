"""Bars: ours beside its peers, under the ceiling. Needs matplotlib (the extra `plot`)."""

import importlib.util
import pathlib
from collections.abc import Sequence

from pallas_attn.bench.report import TITLES, geomean, ratios
from pallas_attn.bench.rows import Row, is_ours, rate

# Okabe and Ito's colours, which stay apart for every kind of colour vision; ours is the darkest, so
# that a grey print can be read too. A peer has the same colour in every plot.
_OURS = "#003f5c"
_COLOURS = {
    "cudnn": "#56B4E9",
    "attention_mgpu": "#E69F00",
    "tokamax_mosaic": "#009E73",
    "torch_cudnn": "#CC79A7",
    "torch_flash2": "#D55E00",
    "xla": "#BBBBBB",
    "wide_cache": "#0072B2",
}
_OTHERS = "#F0E442"
_WIDE = 16  # cases a row of bars can hold


def ready(path: str) -> None:
    """Says what a plot is missing before anything is measured for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: drawing takes matplotlib: pip install 'pallas_attn[plot]'")
    if not path.endswith(".png"):
        raise ValueError(f"plot: expected a name that ends with .png, got {path}")
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab"):
        pass


def bars(groups: Sequence[Sequence[Row]], ceilings: dict[str, float], path: str) -> None:
    """Draws the groups of one operation (one group a case, ours first) into a PNG."""
    import matplotlib.figure
    import matplotlib.patches

    groups = list(groups)
    op = groups[0][0]["op"]
    lines = -(-len(groups) // _WIDE)
    each = -(-len(groups) // lines)
    width = min(16.0, max(8.0, 3.0 + 0.8 * each))
    figure = matplotlib.figure.Figure((width, 0.9 + 4.0 * lines), layout="constrained", dpi=150)
    axes = figure.subplots(lines, 1, squeeze=False)[:, 0]
    top = 1.14 * max(_height(row) for rows in groups for row in rows)
    ceiling = _ceiling(op, ceilings)
    for n, axis in enumerate(axes):
        _panel(axis, groups[n * each : (n + 1) * each], each)
        if ceiling is not None:
            label = f"{ceiling[0]} {ceiling[1]:.4g}"
            axis.axhline(ceiling[1], color="#444444", linewidth=1, linestyle="--", zorder=1)
            axis.annotate(label, (1, ceiling[1]), (-3, 3), ("axes fraction", "data"), fontsize=8,
                          textcoords="offset points", ha="right", color="#444444")  # fmt: skip
        if op == "append":  # from one microsecond to a hundred
            axis.set_yscale("log")
            axis.set_ylim(0.5, 2 * top)
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.set_ylim(0, max(top, 1.1 * ceiling[1] if ceiling else 0))
        axis.set_ylabel(_unit(op))
    facts = groups[0][0]
    title = f"{TITLES[op].split(',')[0]}: {facts['gpu']}, JAX {facts['jax']}{_claim(groups)}"
    figure.suptitle(title, fontsize=11)
    handles = [matplotlib.patches.Patch(color=_colour(name), label=name) for name in _names(groups)]
    columns = min(len(handles), int(width / 1.7))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(path)


def _panel(axis, groups, each) -> None:
    slot = 0.84 / max(map(len, groups))
    order = _names(groups)
    for n, rows in enumerate(groups):
        rows = sorted(rows, key=lambda row: order.index(_name(row)))
        left = [n + (position - (len(rows) - 1) / 2) * slot for position in range(len(rows))]
        colours = [_colour(_name(row)) for row in rows]
        drawn = axis.bar(left, list(map(_height, rows)), slot * 0.92, color=colours, zorder=2)
        values = [_label(rows[0]), *[""] * (len(rows) - 1)]
        axis.bar_label(drawn, values, label_type="center", fontsize=7, rotation=90, color="white")
    names = [_short(rows[0]) for rows in groups]
    axis.set_xticks(range(len(groups)), names, rotation=25, ha="right", fontsize=8)
    axis.set_xlim(-0.6, each - 0.4)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


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


def _unit(op: str) -> str:
    units = {"append": "microseconds (less is better)", "decode": "TB/s of live K and V"}
    return units.get(op, "TFLOP/s")


def _ceiling(op: str, ceilings: dict[str, float]) -> tuple[str, float] | None:
    name = {"append": "", "decode": "read"}.get(op, "matmul")
    return (name, ceilings[name]) if name in ceilings else None


def _short(row: Row) -> str:
    return row["case"].removeprefix(row["op"] + "_").replace("_", " ")


def _claim(groups: Sequence[Sequence[Row]]) -> str:
    means = ratios(groups).get("best")
    return f"; {geomean(means.values()):.2f}x the best peer of each case" if means else ""
