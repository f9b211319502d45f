"""The pages that results/ makes: README's table, docs/benchmarks.md and its pictures.

`python -m pallas_attn.bench.pages` writes them anew; a test compares them with results/.
"""

import itertools
import pathlib
from collections.abc import Iterable, Sequence

from pallas_attn.bench import cases
from pallas_attn.bench.plots import drawing
from pallas_attn.bench.report import (
    OPS,
    PORTABLE,
    SEVERAL,
    TITLES,
    best_peer,
    geomean,
    latest,
    ratios,
)
from pallas_attn.bench.rows import Row, is_ours, rate, read

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PICTURES = {
    "forward": "forward",
    "forward+backward": "backward",
    "decode": "decode",
    "decode_loop": "decode_loop",
}
_METHOD = """\
Device time by CUPTI, median, random normal inputs, every result checked before it was timed; peers
took turns in the same process. TFLOP/s count the visible pairs: 4 operations a pair and head dim
forward, 3.5 times that with the backward. MiB: what a step takes beside its arguments and results.
Prefill is `decode_attention` of many query rows a sequence over a full cache. There, `dense` is our
`flash_attention` over contiguous K and V, and `xla` has a boolean mask; cuDNN is left out, because
`jax.nn` cannot give it a causal mask whose last query sees the last key of a longer K.
Over shared pages, `plain` is the same call over the same pages without `shared_prefixes`,
`unshared` that over pages of each sequence's own, and `flashinfer` its cascade; which pages are
shared is known before the call that is timed, as it is found once for all layers of a step, but for
cases that end with `_found`.
Measured by `python run.py --task=bench` (see `configs/`). The pictures show the shapes that other
implementations publish too; decode is drawn over pages of 16 rows."""
_SPLIT = """\
Rates of each GPU where several have the rows of one causal sequence, beside those of GPUs alone
that have all of it (of the first one only in older rows): TFLOP/s of attention, `both` with its
backward, and TB/s of live K and V where `rows_decode` decodes. Wall time of jitted steps that
follow each other for a tenth of a second, in turns: long enough for GPUs to reach their power
limit, of which links between them at work take a part. All turns begin with the GPUs at rest; until
2026-11-24 they followed each other at once, and the clock at which one began depended on the one
before. GPUs of a host differ, and all wait for the slowest. `share`: of the rate of the first one
alone. `ring` passes K and V from GPU to GPU between launches of our kernels, `cudnn_ring` between
those of cuDNN."""
_OURS_SPLIT = ("pallas_attn/gather", "pallas_attn/rows")
_SEPARATE = """\
These peers do not run inside a process of JAX. Their figures come from another process and another
timer, so they enter no ratio on this page; in the pictures they are pale. Several versions of a
peer are several rows, and the pictures show the newest."""


def from_results(root: pathlib.Path) -> dict[str, str]:
    """{path: text} of every file of a checkout that its results make."""
    found, separate = current(read(root / "results")), read(root / "results" / "separate")
    made = {"README.md": overview(found), "docs/benchmarks.md": section(found, separate)}
    pages = {
        name: between_markers((root / name).read_text("utf-8"), part) for name, part in made.items()
    }
    drawn = pictures(found, separate)
    return pages | {f"docs/pictures/{name}.svg": svg for name, svg in drawn.items()}


def between_markers(text: str, made: str) -> str:
    """A page with what is between its markers made anew."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"expected the markers {BEGIN} and {END}, each once")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def current(rows: Iterable[Row]) -> list[Row]:
    """But for cases that `run.py --task=bench` had once and has no more."""
    lists: dict[str, Sequence[cases.Case]] = dict(cases.LISTS)
    lists |= dict.fromkeys(("forward", "forward+backward", "backward"), cases.ATTENTION)
    names = {op: {case.name for case in listed} for op, listed in lists.items()}
    return [row for row in rows if row["op"] not in names or row["case"] in names[row["op"]]]


def overview(rows: Sequence[Row]) -> str:
    """README's table: each operation beside cuDNN."""
    groups = latest([row for row in rows if _gpu(row) == "H200"])
    lines = [_cells(["on an H200", "times cuDNN, geometric mean", "least", "cases"])]
    lines.append(_cells(["---", "---:", "---:", "---:"]))
    for op in OPS:
        over = list(ratios(groups.get(op, ())).get("cudnn", {}).values())
        if over:
            facts = [f"{geomean(over):.2f}", f"{min(over):.2f}", str(len(over))]
            lines.append(_cells([TITLES[op].split(",")[0], *facts]))
    return "\n".join(lines)


def pictures(rows: Sequence[Row], separate: Sequence[Row] = ()) -> dict[str, str]:
    """{name: SVG} of the shapes that every flash attention publishes, and of a model's step."""
    groups, ceilings = latest(rows), _ceilings(rows)
    published = {case.name for case in cases.ATTENTION if "grid" in case.tags}
    decode = [case for case in cases.DECODE if "paged" in case.tags and "bfloat16" in case.tags]
    published |= {c.name for c in decode if not c.tags.isdisjoint({"grid", "latency", "uneven"})}
    found = {}
    for op, name in PICTURES.items():
        shown = [g for g in groups.get(op, ()) if op == "decode_loop" or g[0]["case"] in published]
        if shown:
            runs = {rows_of[0]["run"] for rows_of in shown}
            tops = sorted((kind, top) for (run, kind), top in ceilings.items() if run in runs)
            newest = {(row["case"], row["impl"]): row for row in separate if row["op"] == op}
            found[name] = drawing(shown, dict(tops), list(newest.values()))
    return found


def section(rows: Sequence[Row], separate: Sequence[Row] = ()) -> str:
    """What docs/benchmarks.md says, from the rows alone."""
    groups, ceilings = latest(rows), _ceilings(rows)
    listed: list[cases.Case] = [*cases.ATTENTION, *itertools.chain(*cases.LISTS.values())]
    order = {case.name: number for number, case in enumerate(listed)}
    if not groups:
        return "Nothing is measured yet."
    parts = [_METHOD, overview(rows)]
    for table in (op + family for family in ("", SEVERAL, PORTABLE) for op in OPS):
        if table in groups:
            op = groups[table][0][0]["op"]
            parts.append(f"## {TITLES[op]}{table.removeprefix(op)}")
            if table in PICTURES:
                parts.append(f"![{TITLES[op]}](pictures/{PICTURES[table]}.svg)")
            ordered = sorted(groups[table], key=lambda rows_of: order.get(rows_of[0]["case"], 0))
            parts.append(_table(table, ordered, ceilings))
    if split := _newest_split(rows):
        parts += ["## A sequence over several GPUs", _SPLIT, _table_of_split(split)]
    if separate:
        parts += ["## Peers in processes of their own", _SEPARATE, _table_of(separate, groups)]
    return "\n\n".join(parts)


def _ceilings(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    return {(row["run"], row["case"]): rate(row) for row in rows if row["op"] == "ceiling"}


def _table(table: str, groups: list[list[Row]], ceilings: dict[tuple[str, str], float]) -> str:
    peers = sorted({row["impl"] for rows in groups for row in rows if not is_ours(row)})
    op, unit = groups[0][0]["op"], "read" if table.startswith(("decode", "shared")) else "matmul"
    shared = {} if op == "append" else {"share": f"of {unit}"}
    memory = {"memory": "MiB, ours / cudnn"} if any("memory_mib" in r[0] for r in groups) else {}
    head = ["case", "**ours**", *shared.values(), *peers, "over best peer", *memory.values()]
    lines = [_cells(head), _cells(["---", *["---:"] * (len(head) - 1)])]
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


def _newest_split(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Of each case of op `context`, on each number of each GPU, the newest run that holds ours:
    {implementation: row}.
    """
    runs: dict[tuple[tuple[str, int, str], str], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        if row["op"] == "context":
            case = row["case"], row["problem"]["devices"], _gpu(row)
            runs.setdefault((case, row["run"]), {})[row["impl"]] = row
    newest = {
        case: run for (case, _), run in runs.items() if not run.keys().isdisjoint(_OURS_SPLIT)
    }
    return [newest[case] for case in sorted(newest)]


def _gpu(row: Row) -> str:
    """In a word, such as "H200"."""
    words: str = row["gpu"].removeprefix("NVIDIA ")
    return words.split()[0]


def _table_of_split(cases: list[dict[str, Row]]) -> str:
    head = [
        "case",
        "GPUs",
        "each alone",
        "**ours**",
        "share",
        "ring",
        "cudnn_ring",
        "over best peer",
    ]
    lines = [_cells(head), _cells(["---", *["---:"] * (len(head) - 1)])]
    for rows in cases:
        one, ring = rows["pallas_attn/one"], rows.get("pallas_attn/ring")
        ours = next(rows[name] for name in _OURS_SPLIT if name in rows)
        both = ring, rows.get("cudnn_ring")
        peers = [row for row in both if row]
        cells = [
            f"`{ours['case']}`",
            f"{ours['problem']['devices']} {_gpu(ours)}",
            _each_alone(one),
        ]
        cells += [f"**{_number(ours)}**", f"{100 * ours['efficiency']:.0f} %"]
        cells += [_number(row) if row else "" for row in both]
        cells.append(f"{min(row['ms'] for row in peers) / ours['ms']:.2f}" if peers else "")
        lines.append(_cells(cells))
    return "\n".join([*lines, "", _where([list(rows.values()) for rows in cases])])


def _each_alone(one: Row) -> str:
    """The rate of the first GPU, and those of the others where a row has them."""
    unit = "tflops" if "tflops" in one else "tbps"
    every = one.get("alone_ms", [one["ms"]])
    return " / ".join(_number(one | {unit: rate(one) * one["ms"] / ms}) for ms in every)


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


def _table_of(separate: Sequence[Row], groups: dict[str, list[list[Row]]]) -> str:
    """Peers that no process of ours held: their figures, ours, and how theirs were taken."""
    ours = {(op, rows[0]["case"]): rows[0] for op, found in groups.items() for rows in found}
    head = [
        "operation",
        "case",
        "peer",
        "version, date",
        "its figure",
        "ours above",
        "ours that day",
    ]
    lines = [_cells(head), _cells([*["---"] * 4, *["---:"] * 3])]
    for row in separate:
        unit = "tflops" if "tflops" in row else "tbps"
        mine = ours.get((row["op"], row["case"]))
        cells = [row["op"], f"`{row['case']}`", row["impl"], f"{row['version']}, {row['date']}"]
        cells += [_number(row), _number(mine) if mine else ""]
        lines.append(_cells([*cells, str(row.get(f"ours_{unit}", ""))]))
    methods = dict.fromkeys((row["version"], row["date"], row["method"]) for row in separate)
    said = [f"- {version}, {date}: {method}." for version, date, method in methods]
    return "\n".join([*lines, "", "How the peers' figures were taken:", "", *said])


if __name__ == "__main__":
    for name, text in from_results(pathlib.Path.cwd()).items():
        path = pathlib.Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
