"""Results of a report: a table, a JSON file, a plot."""

import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.decode_loop.report import PARTS, Row
from pallas_lm.progress import Spread

NO_GPU = (
    "-: not measured without a GPU: the rate at which memory is read, and the host's part. Times "
    "are the wall's; a part, which is timed alone, takes a launch of its own"
)
SHRUNK = (
    "parts of a step are timed alone; those that took longer than the step are shrunk to it: "
    "parts_shrunk in report.json"
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAITS = {
    "from the start of the run to a first token": "time_to_first_token",
    "from one token of a sequence to the next": "time_between_tokens",
}


def steps_of(measured: Sequence[Row], cache: str) -> list[Row]:
    """The rows of our steps over one kind of cache."""
    return [row for row in measured if row["impl"] == f"pallas_attn/{cache}" and "parts" in row]


def table(measured: Sequence[Row], run: Row) -> list[str]:
    """The measured rows as a table; `run`: the summary of the run before."""
    head = f"{'impl':<26}{'batch':>6}{'ms a step':>11}{'tokens/s':>10}{'of memory':>11}"
    steps = [row for row in measured if row["op"] == "decode_loop"]
    others = [line(row) for row in measured if row["op"] == "first_token"]
    head += "".join(f"{part:>11}" for part in PARTS)
    waits = [
        f"{words}: median {Spread(**run[name])}" for words, name in WAITS.items() if run.get(name)
    ]
    notes = [NO_GPU] if any(row["roofline"] is None for row in steps) else []
    notes += [SHRUNK] if any("parts_shrunk" in row for row in steps) else []
    return [head, *map(line, steps), *others, *waits, *notes]


def line(row: Row) -> str:
    """One row as a line."""
    if row["op"] == "ceiling":
        return f"memory is read at {row['tbps']:.2f} TB/s"
    if row["op"] == "first_token":
        return f"{row['case']}: {row['ms']:.1f} ms to the first tokens"
    start = f"{row['impl']:<26}{row['problem']['batch']:>6}{row['ms']:>11.3f}"
    share = "-" if row["roofline"] is None else f"{row['roofline']:.1%}"
    rate = f"{row['tokens_per_second']:>10.0f}{share:>11}"
    parts = row.get("parts", {})
    ms = (f"{parts[name]:.3f}" if name in parts else "-" for name in PARTS if parts)
    return start + rate + "".join(f"{x:>11}" for x in ms)


def write(folder: str, measured: Sequence[Row], cache: str, run: Row) -> list[str]:
    """report.json, and report.png where matplotlib is there, into a folder that is; what to say."""
    path = pathlib.Path(folder)
    text = json.dumps({"run": run, "rows": list(measured)}, indent=2)
    (path / "report.json").write_text(text + "\n", "utf-8")
    try:
        import matplotlib.figure
    except ImportError:
        extra = "a plot takes matplotlib: pip install 'pallas_attn[plot]'"
        return [f"wrote {path / 'report.json'}; {extra}"]
    figure = matplotlib.figure.Figure((10, 4.2), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    ours = steps_of(measured, cache)
    _draw_parts(left, ours)
    _draw_rates(right, ours)
    facts, problem = ours[0], ours[0]["problem"]
    count = f"{problem['devices']} x " if "devices" in problem else ""
    figure.suptitle(
        f"{problem['model']}, {cache} cache, context {problem['context']}: "
        f"{count}{facts['gpu']}, JAX {facts['jax']}",
        fontsize=11,
    )
    figure.savefig(path / "report.png")
    return [f"wrote {path / name}" for name in ("report.json", "report.png")]


_COLOURS = ("#E69F00", "#003f5c", "#56B4E9", "#CC79A7", "#BBBBBB")  # Okabe and Ito's, as in bench


def _draw_parts(axis: "Axes", measured: Sequence[Row]) -> None:
    """Shares of a step, a bar a batch size, the step's time above it."""
    names = [str(row["problem"]["batch"]) for row in measured]
    base = [0.0] * len(measured)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        if part not in measured[0]["parts"]:
            continue
        shares = [row["parts"][part] / sum(row["parts"].values()) for row in measured]
        axis.bar(names, shares, 0.6, bottom=base, color=colour, label=part)
        base = [a + b for a, b in zip(base, shares, strict=True)]
    for n, row in enumerate(measured):
        axis.text(n, 1.01, f"{row['ms']:.2f} ms", ha="center", fontsize=8)
    axis.set_xlim(-0.6, len(measured) - 0.4)
    axis.set_ylim(0, 1.08)
    axis.set_xlabel("sequences at a time")
    axis.set_ylabel("share of a step")
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)


def _draw_rates(axis: "Axes", measured: Sequence[Row]) -> None:
    """Tokens a second, and what reading weights and live rows alone would allow, if it is known."""
    from matplotlib import ticker

    batches = [row["problem"]["batch"] for row in measured]
    rates = [row["tokens_per_second"] for row in measured]
    shares = [row["roofline"] for row in measured]
    known = None not in shares
    bounds = [rate / share for rate, share in zip(rates, shares, strict=True)] if known else []
    if known:
        axis.loglog(batches, bounds, "_--", color="#444444", markersize=12, label="memory's bound")
    axis.loglog(batches, rates, "o-", color="#003f5c", label="measured")
    for row in measured:
        words = f"{row['tokens_per_second']:,.0f}" + (f": {row['roofline']:.0%}" if known else "")
        axis.annotate(words, (row["problem"]["batch"], row["tokens_per_second"]), (4, -12),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    # 1, 2 and 5 of every power of 10: a single batch size, too, has a number at its side.
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axis.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axis.minorticks_off()
    room = 2 * (batches[-1] / batches[0]) ** 0.2  # for the words of the last
    axis.set_xlim(batches[0] / 1.6, batches[-1] * room)
    axis.set_ylim(min(rates + bounds) / 1.6, max(rates + bounds) * 1.6)
    axis.set_xlabel("sequences at a time")
    axis.set_ylabel("tokens/s" + (", and their share of memory's bound" if known else ""))
    axis.legend(frameon=False, fontsize=8)
