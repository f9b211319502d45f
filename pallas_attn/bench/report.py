"""What measurements say: a line a case as it goes, a summary, and the README's tables."""

import pathlib
import statistics
from collections.abc import Iterable, Sequence

from pallas_attn import cases
from pallas_attn.bench.rows import Row, is_ours, rate, read

BEGIN, END = "<!-- performance:begin -->", "<!-- performance:end -->"
OPS = ("forward", "forward+backward", "backward", "decode", "decode_loop", "append")
PORTABLE = ", by the kernels for every GPU from Ampere on"  # of an op, where those of sm80 ran
TITLES = {
    "forward": "Forward, TFLOP/s",
    "forward+backward": "Forward and backward together, TFLOP/s",
    "backward": "Backward alone, TFLOP/s",
    "decode": "Decode, TB/s of live K and V",
    "decode_loop": "A decode step of a whole model, TB/s of weights and live K and V (wall time)",
    "append": "Append, microseconds",
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
    if ours["op"] == "decode" and "first_call_s" in ours:
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
    name = "matmul" if "tflops" in row else "read"
    if name not in ceilings or row["op"] == "append":
        return ""
    return f"{100 * rate(row) / ceilings[name]:.0f}% of {name}"


def ratios(groups: Iterable[Sequence[Row]]) -> dict[str, dict[str, float]]:
    """{peer: {case: our speed over its}}, and "best" for the best peer of each case."""
    found: dict[str, dict[str, float]] = {}
    for rows in groups:
        ours = next((row for row in rows if is_ours(row)), None)
        best = best_peer(rows)
        if ours is None or best is None:
            continue
        for name, row in [(row["impl"], row) for row in rows if row is not ours] + [("best", best)]:
            found.setdefault(name, {})[ours["case"]] = row["ms"] / ours["ms"]
    return found


def summary(groups: Sequence[Sequence[Row]], failures: dict[str, str]) -> list[str]:
    """Geomean against every peer, the worst cell, who was wrong, what failed and how many."""
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
    """{op: one group of rows a case}: of each case the newest run that holds ours, whole. What the
    portable kernels did has ops of its own: they are no newer version of the others.
    """
    newest: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = _table_of(row), row["case"]
        counts = row["op"] != "ceiling" and is_ours(row)
        if counts and (key not in newest or row["date"] >= newest[key]["date"]):
            newest[key] = row
    groups: dict[str, list[list[Row]]] = {}
    for (table, case), ours in newest.items():
        same = (ours["run"], ours["op"], case)
        mates = [row for row in rows if (row["run"], row["op"], row["case"]) == same]
        groups.setdefault(table, []).append([ours, *(row for row in mates if not is_ours(row))])
    return groups


def _table_of(row: Row) -> str:
    return row["op"] + PORTABLE * ("_sm80" in row["impl"])


def section(rows: Sequence[Row], plots: Sequence[str] = ()) -> str:
    """The README's performance section, from the rows alone."""
    groups = latest(rows)
    if not groups:
        return "Nothing is measured yet."
    ceilings = {(row["run"], row["case"]): rate(row) for row in rows if row["op"] == "ceiling"}
    parts = [
        "Device time by CUPTI, median, random normal inputs, every result checked before it was "
        "timed; peers took turns in the same process. TFLOP/s count the visible pairs: 4 "
        "operations a pair and head dim forward, 3.5 times that with the backward. MiB: what a "
        "step takes beside its arguments and results. Made by "
        "`python run.py --task=bench` (see `configs/`) from `results/`."
    ]
    for table in (op + family for family in ("", PORTABLE) for op in OPS):
        if table in groups:
            parts.append(_table(table, groups[table], ceilings))
    parts += [f"![{pathlib.Path(plot).stem}]({plot})" for plot in plots]
    return "\n\n".join(parts)


def _table(table: str, groups: list[list[Row]], ceilings: dict[tuple[str, str], float]) -> str:
    peers = sorted({row["impl"] for rows in groups for row in rows if not is_ours(row)})
    op, unit = groups[0][0]["op"], "read" if table.startswith("decode") else "matmul"
    shared = {} if op == "append" else {"share": f"of {unit}"}
    memory = {"memory": "MiB, ours / cudnn"} if any("memory_mib" in r[0] for r in groups) else {}
    head = ["case", "**ours**", *shared.values(), *peers, "over best peer", *memory.values()]
    title = TITLES[op] + table.removeprefix(op)
    lines = [f"### {title}", "", _cells(head), _cells(["---", *["---:"] * (len(head) - 1)])]
    for rows in groups:
        ours = rows[0]
        cells = [f"`{ours['case']}`", f"**{_number(ours)}**"]
        if shared:
            top = ceilings.get((ours["run"], unit))
            cells.append(f"{100 * rate(ours) / top:.0f} %" if top else "")
        by_name = {row["impl"]: row for row in rows}
        cells += [_number(by_name[name]) if name in by_name else "" for name in peers]
        best = best_peer(rows)
        cells.append(f"{best['ms'] / ours['ms']:.2f}" if best else "")
        if memory:
            held = (by_name.get(name, {}).get("memory_mib") for name in (ours["impl"], "cudnn"))
            cells.append(" / ".join("" if one is None else str(one) for one in held))
        lines.append(_cells(cells))
    means = ratios(groups)
    said = [f"{geomean(means[name].values()):.2f} of {name}" for name in peers if name in means]
    if said:
        best_of = means["best"]
        worst = min(best_of, key=lambda case: best_of[case])
        lines += ["", f"Geomean: {', '.join(said)}. Worst cell: {best_of[worst]:.2f} at `{worst}`."]
    return "\n".join([*lines, "", _where(groups)])


def _number(row: Row) -> str:
    if row["op"] == "append":
        return f"{1e3 * row['ms']:.2f}"
    value = rate(row)
    return f"{value:.0f}" if "tflops" in row and value >= 10 else f"{value:.2f}"


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _where(groups: list[list[Row]]) -> str:
    facts = {(r[0]["gpu"], r[0]["jax"], r[0]["commit"], r[0]["date"][:10]) for r in groups}
    said = [
        f"{gpu}, JAX {jax}, commit {commit}, {date}" for gpu, jax, commit, date in sorted(facts)
    ]
    return "Measured on: " + "; ".join(said) + "."


def readme(text: str, rows: Sequence[Row], plots: Sequence[str] = ()) -> str:
    """The README with its performance section made anew."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"README.md: expected the markers {BEGIN} and {END}, each once")
    return f"{before}{BEGIN}\n{section(rows, plots)}\n{END}{after}"


def current(rows: Iterable[Row]) -> list[Row]:
    """But for cases that `run.py --task=bench` had once and has no more."""
    lists: dict[str, Sequence[cases.Case]] = {"decode": cases.DECODE, "append": cases.APPEND}
    lists |= dict.fromkeys(("forward", "forward+backward", "backward"), cases.ATTENTION)
    names = {op: {case.name for case in listed} for op, listed in lists.items()}
    return [row for row in rows if row["op"] not in names or row["case"] in names[row["op"]]]


def from_results(root: pathlib.Path) -> str:
    """The README of a checkout as its results make it; plots are those beside them."""
    folder = root / "results"
    rows_found = current(read(folder)) if folder.is_dir() else []
    plots = [str(path.relative_to(root)) for path in sorted(folder.glob("*.png"))]
    return readme((root / "README.md").read_text("utf-8"), rows_found, plots)


if __name__ == "__main__":
    here = pathlib.Path.cwd()
    (here / "README.md").write_text(from_results(here), "utf-8")
