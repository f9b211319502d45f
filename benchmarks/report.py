"""Results of measurements as text: a line for each case as it goes, ratios and a summary."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.rows import Row, is_ours, rate

OPS = (
    *("forward", "forward+backward", "backward", "shapes", "few_tiles"),
    *("float8", "jvp", "mask"),
    *("decode", "prefill", "shared_prefix", "decode_loop", "append", "quantize"),
)
PORTABLE = ", portable kernels"  # part of a title: results of the sm80 kernels
SEVERAL = ", over several GPUs"  # part of a title: results of a model that was split
TITLES = {
    "forward": "Forward, TFLOP/s",
    "forward+backward": "Forward and backward together, TFLOP/s",
    "backward": "Backward alone, TFLOP/s",
    "shapes": "Vision / diffusion / speech / proteins, TFLOP/s",
    "few_tiles": "Grouped heads and small batches, TFLOP/s",
    "float8": "Forward in float8, TFLOP/s",
    "jvp": "Forward and its tangents (jax.jvp), TFLOP/s",
    "mask": "Masks and scores as functions, TFLOP/s of what is visible",
    "decode": "Decode, TB/s of live K and V",
    "prefill": "Prefill over a cache, TFLOP/s",
    "shared_prefix": "Decode over shared pages, TB/s of live K and V, shared rows counted once",
    "decode_loop": "A decode step of a whole model, TB/s of weights and live K and V (wall time)",
    "append": "Append, microseconds",
    "quantize": "q, k and v rounded to float8, TB/s read and written",
}


def case_line(number: int, total: int, rows: Sequence[Row], ceilings: dict[str, float]) -> str:
    """`[3/24] name  ours 712 TFLOP/s  86% of matmul  1.07x best peer (cudnn 665)`."""
    ours = next(row for row in rows if is_ours(row))
    parts = [f"[{number}/{total}] {ours['case']:<34}", f"ours {figure(ours)}"]
    share = _share(ours, ceilings)
    if share:
        parts.append(share)
    best = best_peer(rows)
    if best is None:
        parts.append("no peer")
    else:
        ratio = best["ms"] / ours["ms"]
        parts.append(f"{ratio:.2f}x best peer ({best['impl']} {figure(best, short=True)})")
    if ours["op"] in ("decode", "prefill") and "first_call_s" in ours:
        work = f", {ours['first_call_cpu_s']:.1f} s of CPU" if "first_call_cpu_s" in ours else ""
        parts.append(f"first call {ours['first_call_s']:.1f} s{work}")
    return "  ".join(parts)


def figure(row: Row, *, short: bool = False) -> str:
    """The number that people compare: TFLOP/s, TB/s with time, or time with launches."""
    if row["op"] == "append":
        launches = f"{row['kernels']} kernel" + "s" * (row["kernels"] != 1)
        return f"{1e3 * row['ms']:.2f} us" + ("" if short else f", {launches}")
    if "tflops" in row:
        return f"{row['tflops']:.0f}" + ("" if short else " TFLOP/s")
    return f"{row['tbps']:.2f}" + ("" if short else f" TB/s ({1e3 * row['ms']:.1f} us)")


def best_peer(rows: Iterable[Row]) -> Row | None:
    return min((row for row in rows if not is_ours(row)), key=lambda row: row["ms"], default=None)


def _share(row: Row, ceilings: dict[str, float]) -> str:
    name = "matmul" if "tflops" in row else "copy" if row["op"] == "quantize" else "read"
    if name not in ceilings or row["op"] == "append":
        return ""
    return f"{100 * rate(row) / ceilings[name]:.0f}% of {name}"


def ratios(groups: Iterable[Sequence[Row]]) -> dict[str, dict[str, float]]:
    """{peer: {case: our speed over its}}, and "best" for the best peer of each case."""
    speeds: dict[str, dict[str, float]] = {}
    for rows in groups:
        ours = next((row for row in rows if is_ours(row)), None)
        best = best_peer(rows)
        if ours is None or best is None:
            continue
        for name, row in [(row["impl"], row) for row in rows if row is not ours] + [("best", best)]:
            speeds.setdefault(name, {})[ours["case"]] = row["ms"] / ours["ms"]
    return speeds


def summary(groups: Sequence[Sequence[Row]], failures: dict[str, str]) -> list[str]:
    """Geomean against every peer, the worst cell, peers that were wrong, and failures."""
    lines = []
    for name, cells in sorted(ratios(groups).items(), key=lambda item: item[0] != "best"):
        worst = min(cells, key=lambda case: cells[case])
        label = "the best peer" if name == "best" else name
        mean = f"{geomean(cells.values()):.3f}x {label} (geomean of {len(cells)})"
        lines.append(f"{mean}, worst {cells[worst]:.3f}x at {worst}")
    lost = [(row["case"], row) for rows in groups for row in rows if is_ours(row)]
    for word, label in (("wrong", "LEFT OUT"), ("failed", "FAILED")):
        for case, row in lost:
            lines += [f"{label} {peer} at {case}: {why}" for peer, why in row.get(word, {}).items()]
    lines += [f"FAILED {case}: {reason}" for case, reason in failures.items()]
    peers = sum(len(row.get("failed", {})) for _, row in lost)
    if failures or peers:
        total = len(groups) + len(failures)
        lines.append(f"{len(failures)} of {total} cases failed, and {peers} times a peer")
    return lines


def geomean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)


def latest(rows: Sequence[Row]) -> dict[str, list[list[Row]]]:
    """{op: one group of rows a case}: the newest run of each case that holds ours, whole. The
    portable kernels have ops of their own, since they are no newer version of the others; so has a
    model that is split over several GPUs.
    """
    newest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["op"] == "ceiling" or not is_ours(row):
            continue
        key = _table_of(row), row["case"]
        if key not in newest or row["date"] >= newest[key]["date"]:
            newest[key] = row
    groups: dict[str, list[list[Row]]] = {}
    for (table, case), ours in newest.items():
        same = (ours["run"], ours["op"], case)
        mates = [row for row in rows if (row["run"], row["op"], row["case"]) == same]
        groups.setdefault(table, []).append([ours, *(row for row in mates if not is_ours(row))])
    return groups


def newest_commit(groups: Iterable[Sequence[Row]]) -> str:
    """The commit of our newest row among groups of one row of ours each."""
    return str(max((rows[0] for rows in groups), key=lambda row: row["date"])["commit"])


def is_of(row: Row, commit: str) -> bool:
    """Whether a row is of a commit: rows have names of 7 to 12 digits."""
    length = min(len(commit), len(row["commit"]))
    return bool(row["commit"][:length] == commit[:length])


def _table_of(row: Row) -> str:
    several = row["op"] == "decode_loop" and row["problem"].get("devices", 1) > 1
    return row["op"] + PORTABLE * ("_sm80" in row["impl"]) + SEVERAL * several
