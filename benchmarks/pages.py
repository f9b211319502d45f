"""The pages that results/ makes: README's table, docs/benchmarks.md with its pictures, and
docs/cases.md with a line for each case.

`python -m benchmarks.pages` writes them anew; a test compares them with results/.
"""

import collections
import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence

from benchmarks import plots
from benchmarks.report import (
    OPS,
    PORTABLE,
    SEVERAL,
    TITLES,
    geomean,
    is_of,
    latest,
    newest_commit,
    ratios,
)
from benchmarks.rows import Row, is_ours, rate, read
from tests.support.problems import cases

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PICTURES = {
    "forward": "forward",
    "forward+backward": "backward",
    "shapes": "shapes",
    "decode": "decode",
    "decode_loop": "decode_loop",
}
# The lines of the first table: what a reader compares.
_FIRST = {
    "forward": ("h64_causal_b2_t8192_n32", "h128_full_b2_t8192_n16", "h128_causal_b2_t8192_n16",
                "h128_causal_b2_t8192_n32k8", "h256_causal_b2_t8192_n8"),
    "decode": ("decode_paged_b1_s8192_n32k8_h128", "decode_paged_b64_s8192_n32k8_h128"),
    "prefill": ("prefill_paged16_m8_t16", "prefill_paged16_m8_t1024"),
}  # fmt: skip
_FIRST["forward+backward"] = _FIRST["forward"]
_SHORT = {"forward": "forward", "forward+backward": "both", "decode": "decode"}
_SHORT["prefill"] = "prefill"
_PEERS = {"cudnn": "cuDNN", "flash_attention_4": "FlashAttention-4", "fa4_jax": "fa4-jax"}
_FIRST_READ = """\
On an H200: TFLOP/s of `forward`, `both` (forward and backward) and `prefill`, TB/s of live K and V
of `decode`, in bfloat16. A peer without a figure was not timed there, or does not take the case. In
italics: timed in a run of its own
([how](cases.md#peers-in-runs-of-their-own))."""
_METHOD = """\
`python run.py --task=bench` measures (see `configs/`): device time by CUPTI, median, random normal
inputs. Results were checked before they were timed, and peers took turns with ours in the same
process. TFLOP/s count visible pairs: 4 operations a pair and head dim forward, 3.5 times that with
the backward. Pictures show shapes that others publish too. results/ has the commit of each row."""
# Beginnings of the names of peers that are other libraries, not other calls of this package.
_LIBRARIES = ("attention_mgpu", "cudnn", "fa4", "flash", "flex", "tokamax", "torch", "xla")
_SAME = {"torch_cudnn": "cudnn"}  # one library, called by JAX and by PyTorch
_EVERY = """\
## Every operation

How many times as fast as each library, over all [cases](cases.md) that both take."""
_COLUMNS = """\
- `ours`, `f16` (in float16), or kinds of caches: our figures. With several of them a line has each
  peer's fastest figure, and the least ratio.
- `cudnn`: called by JAX or by PyTorch, whichever was faster.
- `over best`: our speed over that of the best peer. `others`: peers of a few cases.
- `MiB`: memory of a step beside arguments and results, ours/cuDNN.
- Prefill is many query rows a sequence over a full cache; `dense` is `flash_attention` over
  contiguous K and V.
- Shared pages: `plain` lacks `shared_prefixes`, `unshared` has pages of its own, `flashinfer` is
  its cascade. `_found` counts the time to find shared pages."""
_SPLIT = """\
The rows of one causal sequence on several GPUs: TFLOP/s a GPU (`both` with the backward); TB/s of
live K and V in `rows_decode`. `alone`: the slowest and the fastest GPU with all of it (in older
rows the first one); `share`: of the first one's rate. `ring` and `cudnn_ring` pass K and V between
launches of our kernels and of cuDNN's. Wall time of jitted steps, in turns that reach the power
limit."""
_OURS_SPLIT = ("pallas_attn/gather", "pallas_attn/rows")
_FIRST_CALL = """\
Seconds of wall time in a fresh process, after imports and CUDA's start: `fwd` is causal over
bfloat16 [2, 4096, 16, 128], `both` its gradients, `docs` those of documents of 1000 rows; `layers`
are unrolled with gradients; `step` appends and decodes a row of 32 sequences, `prefill` 512 rows of
each. `again`: a second process with jax's persistent cache. `import`: of jax, and of pallas_attn
after it."""
_SWEPT = "sweep", "sweep_both"  # the forward; and with the backward
_SWEEP = """\
Sequences of 16 to 2047 rows, bfloat16, 16 heads, about 32,768 rows in all. A size just above a
multiple of the tiles takes up to about 1.5 times its neighbour's time a row."""
_FEW = """\
Grouped heads and small batches, where there are fewer work tiles than multiprocessors: speed over
cuDNN's in the same process, causal, bfloat16. B is the batch, T the rows: 300, 1024, 2048, 4096.
The forward is that of the call with gradients."""
_SEPARATE = """\
These figures enter no ratio on this page. Pictures show the newest version, pale."""
# Rates of the machine that every run takes: how they are written.
_CEILINGS = {"matmul": (".0f", "TFLOP/s in a large matmul"), "read": (".2f", "TB/s reading memory")}
_OLD = " †"  # marks rows of an older commit
# Parts of a case's name that are columns of one line, beside "ours".
_COLUMN = re.compile(r"_(per_sequence|stacked|paged\d*|f16)(?=_|$)")


def from_results(root: pathlib.Path) -> dict[str, str]:
    """{path: text} of every file of a checkout that its results make."""
    rows, separate = current(read(root / "results")), read(root / "results" / "separate")
    swept = [row for row in read(root / "results" / "shapes") if row["op"] in _SWEPT]
    few = [row for row in read(root / "results" / "few_tiles") if row.get("op") == "sweep_few"]
    first_calls = section_of_first_calls(read(root / "results" / "first_call"))
    made = {
        "README.md": overview(rows),
        "docs/benchmarks.md": "\n\n".join(
            [
                benchmarks(rows, separate),
                *section_of_few(few),
                *section_of_sweep(swept),
                *first_calls,
            ]
        ),
        "docs/cases.md": every_case(rows, separate),
    }
    pages = {
        name: between_markers((root / name).read_text("utf-8"), part) for name, part in made.items()
    }
    drawn = pictures(rows, separate)
    drawn |= {"sweep": plots.curves(swept)} if swept else {}
    drawn |= {"few_tiles": plots.squares(few)} if few else {}
    return pages | {f"docs/pictures/{name}.svg": svg for name, svg in drawn.items()}


def between_markers(text: str, made: str) -> str:
    """A page with a new text between its markers."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"expected the markers {BEGIN} and {END}, each once")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def current(rows: Iterable[Row]) -> list[Row]:
    """The rows without cases that `run.py --task=bench` had once and has no more."""
    lists: dict[str, Sequence[cases.Case]] = dict(cases.LISTS)
    lists |= dict.fromkeys(("forward", "forward+backward", "backward"), cases.ATTENTION)
    names = {op: {case.name for case in listed} for op, listed in lists.items()}
    return [row for row in rows if row["op"] not in names or row["case"] in names[row["op"]]]


def overview(rows: Sequence[Row]) -> str:
    """README's table: each operation beside cuDNN. A line is marked where not all of its rows are
    of the newest commit.
    """
    groups = latest([row for row in rows if _gpu(row) == "H200"])
    lines = [_cells(["on an H200", "times cuDNN, geometric mean", "least", "cases"])]
    lines.append(_cells(["---", "---:", "---:", "---:"]))
    beside = {op: [g for g in groups.get(op, ()) if _met(g, "cudnn")] for op in OPS}
    shown = [rows_of for op in OPS for rows_of in beside[op]]
    if not shown:
        return "\n".join(lines)
    commit = newest_commit(shown)
    for op, cells in beside.items():
        if cells:
            over = ratios(cells)["cudnn"].values()
            facts = [f"{geomean(over):.2f}", f"{min(over):.2f}", str(len(over))]
            old = any(not is_of(rows_of[0], commit) for rows_of in cells)
            lines.append(_cells([TITLES[op].split(",")[0] + _OLD * old, *facts]))
    return "\n".join([*lines, "", _of_commits([rows_of[0] for rows_of in shown], commit)])


def _met(rows: Sequence[Row], peer: str) -> bool:
    return any(row["impl"] == peer for row in rows)


def _of_commits(ours: Sequence[Row], commit: str) -> str:
    """Says which commit the rows are of, and what a mark means where some are older."""
    newest = [row for row in ours if is_of(row, commit)]
    told = f"Commit `{commit}`, {max(row['date'] for row in newest)[:10]}"
    if len(newest) == len(ours):
        return f"{told}."
    old = [row for row in ours if not is_of(row, commit)]
    days = " to ".join(sorted({pick(row["date"] for row in old)[:10] for pick in (min, max)}))
    count = len({row["commit"][:7] for row in old})
    return f"{told}.{_OLD} With cases of {count} older commit{'s' * (count > 1)}, {days}."


def pictures(rows: Sequence[Row], separate: Sequence[Row] = ()) -> dict[str, str]:
    """{name: SVG} of the shapes that every flash attention publishes, and of a model's step."""
    groups, ceilings = latest(rows), _ceilings(rows)
    published = {case.name for case in cases.ATTENTION if "grid" in case.tags}
    decode = [case for case in cases.DECODE if "paged" in case.tags and "bfloat16" in case.tags]
    published |= {case.name for case in cases.SHAPES}
    published |= {c.name for c in decode if not c.tags.isdisjoint({"grid", "latency", "uneven"})}
    drawings = {}
    for op, name in PICTURES.items():
        shown = [g for g in groups.get(op, ()) if op == "decode_loop" or g[0]["case"] in published]
        if shown:
            runs = {rows_of[0]["run"] for rows_of in shown}
            tops = sorted((kind, top) for (run, kind), top in ceilings.items() if run in runs)
            newest = {(row["case"], row["impl"]): row for row in separate if row["op"] == op}
            drawings[name] = plots.drawing(shown, dict(tops), list(newest.values()))
    return drawings


def benchmarks(rows: Sequence[Row], separate: Sequence[Row] = ()) -> str:
    """The text of docs/benchmarks.md: a table of what a reader compares and a picture, then a
    line for each operation and library, and the other pictures.
    """
    groups = latest(rows)
    if not groups:
        return "Nothing is measured yet."
    shown = itertools.chain(*itertools.chain(*groups.values()))
    parts = _opening([row for row in rows if _gpu(row) == "H200"], separate)
    if "forward" in groups:
        parts.append(f"![forward](pictures/{PICTURES['forward']}.svg)")
    parts += [_METHOD, _where([*shown, *_rows_of_split(rows)])]
    parts += _summary(groups)
    parts += [
        f"![{op}](pictures/{name}.svg)"
        for op, name in PICTURES.items()
        if op in groups and op != "forward"
    ]
    return "\n\n".join(parts)


def _opening(rows: Sequence[Row], separate: Sequence[Row]) -> list[str]:
    """The first table, with the columns of peers that have a figure, and how to read it."""
    of_case = {(op, x[0]["case"]): x for op, groups in latest(rows).items() for x in groups}
    alone = {(row["op"], row["case"], row["impl"]): row for row in separate}
    lines: list[tuple[Row, dict[str, str]]] = []
    asked = [(op, name) for op in _SHORT for name in _FIRST[op]]
    for op, name in (case for case in asked if case in of_case):
        ours, *others = of_case[op, name]
        figures = {row["impl"]: _number(row) for row in others}
        for peer in _PEERS:
            if peer not in figures and (op, name, peer) in alone:
                figures[peer] = f"*{_number(alone[op, name, peer])}*"
        lines.append((ours, figures))
    if not lines:
        return []
    peers = [peer for peer in _PEERS if any(peer in figures for _, figures in lines)]
    commit = newest_commit([ours] for ours, _ in lines)
    table = [_cells(["operation", "case", "**ours**", *(_PEERS[peer] for peer in peers)])]
    table.append(_cells(["---", "---", *["---:"] * (1 + len(peers))]))
    for ours, figures in lines:
        name = f"`{ours['case']}`" + _OLD * (not is_of(ours, commit))
        cells = [_SHORT[ours["op"]], name, f"**{_number(ours)}**"]
        table.append(_cells([*cells, *(figures.get(peer, "") for peer in peers)]))
    told = _of_commits([ours for ours, _ in lines], commit)
    return ["\n".join(table), told, _FIRST_READ]


def every_case(rows: Sequence[Row], separate: Sequence[Row] = ()) -> str:
    """The text of docs/cases.md: a table for each operation."""
    groups, ceilings = latest(rows), _ceilings(rows)
    listed: list[cases.Case] = [*cases.ATTENTION, *itertools.chain(*cases.LISTS.values())]
    order = {case.name: number for number, case in enumerate(listed)}
    if not groups:
        return "Nothing is measured yet."
    commit = newest_commit(itertools.chain(*groups.values()))
    parts = [_COLUMNS]
    if reached := _reached(groups, ceilings):
        parts.append(f"In the same runs: {reached}.")
    parts.append(f"{_OLD.strip()}: of a commit older than `{commit}`; at `case`, all lines.")
    for table in _tables(groups):
        ordered = sorted(groups[table], key=lambda rows_of: order.get(rows_of[0]["case"], 0))
        made = _table(ordered, commit)
        parts += [f"## {_title(table, groups)}", made]
    if split := _newest_split(rows):
        parts += ["## A sequence over several GPUs", _SPLIT, _table_of_split(split)]
    if separate:
        parts += ["## Peers in runs of their own", _SEPARATE, _table_of(separate, groups)]
    return "\n\n".join(parts)


def _tables(groups: dict[str, list[list[Row]]]) -> list[str]:
    """The keys of `latest`, in the order of the page."""
    every = [op + family for family in ("", SEVERAL, PORTABLE) for op in OPS]
    return [table for table in every if table in groups]


def _title(table: str, groups: dict[str, list[list[Row]]]) -> str:
    op = groups[table][0][0]["op"]
    return TITLES[op] + table.removeprefix(op)


def _summary(groups: dict[str, list[list[Row]]]) -> list[str]:
    """A line for each operation and library beside it: how many times as fast ours is."""
    beside = {
        (table, peer): [rows_of for rows_of in groups[table] if _met(rows_of, peer)]
        for table in _tables(groups)
        for peer in sorted(ratios(groups[table]))
        if peer.startswith(_LIBRARIES)
    }
    shown = [rows_of[0] for met in beside.values() for rows_of in met]
    if not shown:
        return []
    commit = newest_commit([row] for row in shown)
    lines = [_cells(["operation", "library", "geometric mean", "least", "at", "cases"])]
    lines.append(_cells(["---", "---", "---:", "---:", "---", "---:"]))
    for (table, peer), met in beside.items():
        op, over = met[0][0]["op"], ratios(met)[peer]
        title = re.split(", (?=T|micro)", TITLES[op])[0] + table.removeprefix(op)
        old = any(not is_of(rows_of[0], commit) for rows_of in met)
        worst = min(over, key=lambda case: over[case])
        facts = [f"{geomean(over.values()):.2f}", f"{over[worst]:.2f}", f"`{worst}`"]
        lines.append(_cells([title + _OLD * old, peer, *facts, str(len(over))]))
    return [_EVERY, "\n".join(lines), _of_commits(shown, commit)]


def section_of_few(rows: Sequence[Row]) -> list[str]:
    """The sweep where key tiles are few; `rows`: result rows of op "sweep_few"."""
    if not rows:
        return []
    picture = "![few tiles](pictures/few_tiles.svg)"
    commits = ", ".join(f"`{commit}`" for commit in sorted({row["commit"] for row in rows}))
    return ["## Few work tiles", _FEW, picture, f"{plots.ratios_said(rows)} Commits {commits}."]


def section_of_sweep(rows: Sequence[Row]) -> list[str]:
    """The section on the time over the rows of a sequence: title, picture, method, falls."""
    if not rows:
        return []
    picture = "![sweep](pictures/sweep.svg)"
    alone = all(row["op"] == "sweep" for row in rows)
    title = f"## {'The forward' if alone else 'Time'} over the rows of a sequence"
    return [title, picture, _SWEEP, plots.falls(rows), _where(rows)]


def _rows_of_split(rows: Sequence[Row]) -> list[Row]:
    return [row for run in _newest_split(rows) for row in run.values()]


def section_of_first_calls(rows: Sequence[Row]) -> list[str]:
    """Title, method and table of op `first_call`: the newest rows."""
    newest = {(r["case"], r["impl"], r["persistent_cache"]): r for r in _by_date(rows)}
    if not newest:
        return []
    head = ["seconds", "**total**", "compile", "again"]
    peers = sorted({impl for _, impl, _ in newest} - {"pallas_attn"})
    lines = [_cells([*head, *peers]), _cells(["---", *["---:"] * (len(head) - 1 + len(peers))])]
    for case in dict.fromkeys(case for case, _, _ in newest):
        ours = newest.get((case, "pallas_attn", None), {})
        again = newest.get((case, "pallas_attn", "filled"), {})
        others = [newest.get((case, peer, None), {}) for peer in peers]
        times = [ours.get("total_s"), ours.get("compile_s"), again.get("total_s")]
        times += [row.get("total_s") for row in others]
        cells = ["" if x is None else f"{x:.2f}" for x in times]
        cells[0] = cells[0] and f"**{cells[0]}**"
        lines.append(_cells([f"`{case}`", *cells]))
    return ["## The first call", _FIRST_CALL, _where(newest.values()), "\n".join(lines)]


def _by_date(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["date"])


def _ceilings(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    return {(row["run"], row["case"]): rate(row) for row in rows if row["op"] == "ceiling"}


def _reached(groups: dict[str, list[list[Row]]], ceilings: dict[tuple[str, str], float]) -> str:
    """The least and the highest rate of what GPUs of each kind did in the same runs."""
    rates: dict[tuple[str, str], list[float]] = {}
    for rows_of in itertools.chain(*groups.values()):
        row = rows_of[0]
        devices = row.get("problem", {}).get("devices", 1)
        for name in _CEILINGS:
            if (row["run"], name) in ceilings:
                top = ceilings[row["run"], name] / devices
                rates.setdefault((_gpu(row), name), []).append(top)
    said = []
    for (gpu, name), of_runs in sorted(rates.items(), reverse=True):
        form, unit = _CEILINGS[name]
        ends = dict.fromkeys(format(end(of_runs), form) for end in (min, max))
        said.append(f"{gpu} {' to '.join(ends)} {unit}")
    return ", ".join(said)


def _table(groups: list[list[Row]], commit: str) -> str:
    cases = _by_case(groups)
    columns = list(dict.fromkeys(column for case in cases.values() for column in case))
    fastest = {name: _fastest_of_peers(case.values()) for name, case in cases.items()}
    met = collections.Counter(peer for figures in fastest.values() for peer in figures)
    peers = sorted(peer for peer in met if 4 * met[peer] >= len(cases))
    old = {
        name
        for name, case in cases.items()
        if any(not is_of(rows_of[0], commit) for rows_of in case.values())
    }
    all_old = len(old) == len(cases)
    head = ["case" + _OLD * all_old, *columns, *peers, "over best", "MiB", "others"]
    lines = []
    for name, case in cases.items():
        every, figures = list(case.values()), fastest[name]
        cells = [name + _OLD * (name in old and not all_old)]
        cells += [_number(case[x][0]) if x in case else "" for x in columns]
        cells += [figures.get(peer, "") for peer in peers]
        cells.append(_least(list(ratios(every).get("best", {}).values()), ".2f"))
        by_name = {row["impl"]: row.get("memory_mib", "") for row in every[0]}
        cells.append(f"{by_name[every[0][0]['impl']]}/{by_name.get('cudnn', '')}".strip("/"))
        cells.append(", ".join(f"{x} {figures[x]}" for x in sorted(figures) if x not in peers))
        lines.append(cells)
    return _aligned(head, lines)


def _fastest_of_peers(every: Iterable[Sequence[Row]]) -> dict[str, str]:
    """{peer: its fastest figure}, of one or several groups of rows."""
    rows = [row for rows in every for row in rows if not is_ours(row)]
    slowest_first = sorted(rows, key=lambda row: row["ms"], reverse=True)
    names: list[str] = [row["impl"] for row in slowest_first]
    figures = map(_number, slowest_first)
    return {_SAME.get(name, name): x for name, x in zip(names, figures, strict=True)}


def _aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as text, without the columns that are empty; "others" is a list, at the left."""
    shown = [n for n in range(len(head)) if any(line[n] for line in lines)]
    widths = {n: max(len(line[n]) for line in (head, *lines)) for n in shown}

    def text(line: Sequence[str]) -> str:
        left = {n for n in shown if n == 0 or head[n] == "others"}
        cells = [(str.ljust if n in left else str.rjust)(line[n], widths[n]) for n in shown]
        return "  ".join(cells).rstrip()

    return "\n".join(["```text", *map(text, (head, *lines)), "```"])


def _by_case(groups: list[list[Row]]) -> dict[str, dict[str, list[Row]]]:
    """{case: {column: rows}}: kinds of caches and float16 have columns, all else is "ours"."""
    cases: dict[str, dict[str, list[Row]]] = {}
    for rows in groups:
        name, column = rows[0]["case"], "ours"
        if variant := _COLUMN.search(name):
            name, column = _COLUMN.sub("", name, count=1), variant[1]
        cases.setdefault(name, {})[column] = rows
    return cases


def _least(numbers: Sequence[float], form: str) -> str:
    return format(min(numbers), form) if numbers else ""


def _newest_split(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """{implementation: row} of the newest run with a result of ours, for each case of op `context`,
    number and kind of GPUs.
    """
    runs: dict[tuple[tuple[str, int, str], str], dict[str, Row]] = {}
    for row in _by_date(rows):
        if row["op"] == "context":
            case = row["case"], row["problem"]["devices"], _gpu(row)
            runs.setdefault((case, row["run"]), {})[row["impl"]] = row
    ours = [(case, run) for (case, _), run in runs.items() if run.keys() & set(_OURS_SPLIT)]
    newest = dict(ours)
    return [newest[case] for case in sorted(newest)]


def _gpu(row: Row) -> str:
    """The model's name, such as "H200"."""
    words: str = row["gpu"].removeprefix("NVIDIA ")
    return words.split()[0]


def _table_of_split(cases: list[dict[str, Row]]) -> str:
    head = ["case", "GPUs", "alone", "ours", "share", "ring", "cudnn_ring"]
    lines, before = [], ""
    for rows in cases:
        alone = rows["pallas_attn/one"]
        ours = next(rows[name] for name in _OURS_SPLIT if name in rows)
        both = rows.get("pallas_attn/ring"), rows.get("cudnn_ring")
        name = ours["case"]
        cells = ["" if name == before else name, f"{ours['problem']['devices']}x{_gpu(ours)}"]
        cells.append(_alone(alone))
        before = name
        cells += [_number(ours), f"{ours['efficiency']:.0%}"]
        cells += [_number(row) if row else "" for row in both]
        lines.append(cells)
    return _aligned(head, lines)


def _alone(row: Row) -> str:
    """Rates of the slowest and the fastest GPU alone; older rows have the first GPU's only."""
    unit = "tflops" if "tflops" in row else "tbps"
    times = row.get("alone_ms", [row["ms"]])
    ends = sorted({max(times), min(times)}, reverse=True)
    return "-".join(_number(row | {unit: rate(row) * row["ms"] / ms}) for ms in ends)


def _number(row: Row) -> str:
    if row["op"] == "append":
        return f"{1e3 * row['ms']:.2f}"
    value = rate(row)
    return f"{value:.0f}" if "tflops" in row and value >= 10 else f"{value:.2f}"


def _cells(cells: Sequence[str]) -> str:
    """A line of a table; empty cells have no width."""
    return re.sub(r"(?<=\|)  (?=\|)", "", f"| {' | '.join(cells)} |")


def _where(rows: Iterable[Row]) -> str:
    """GPUs, versions of JAX and dates."""
    dates: dict[str, list[str]] = {}
    for row in rows:
        dates.setdefault(f"{row['gpu']}, JAX {row['jax']}", []).append(row["date"][:10])
    said = [
        f"{where}, {' to '.join(sorted({min(days), max(days)}))}"
        for where, days in sorted(dates.items())
    ]
    return f"Measured on: {'; '.join(said)}."


def _table_of(separate: Sequence[Row], groups: dict[str, list[list[Row]]]) -> str:
    """Figures of peers that no process of ours held, a column a version, and their method."""
    ours = {(op, rows[0]["case"]): rows[0] for op, cells in groups.items() for rows in cells}
    methods: dict[tuple[str, str], dict[str, None]] = {}
    for row in separate:
        methods.setdefault((row["date"], row["method"]), {})[_version(row)] = None
    parts = []
    for op in dict.fromkeys(row["op"] for row in separate):
        rows = [row for row in separate if row["op"] == op]
        columns = list(dict.fromkeys(_version(row) for row in rows))
        head = [TITLES[op].split(",")[0], "ours", *columns]
        lines = []
        for case in dict.fromkeys(row["case"] for row in rows):
            mine = ours.get((op, case))
            cells = [case, _number(mine) if mine else ""]
            figures = {_version(row): _figure(row) for row in rows if row["case"] == case}
            lines.append([*cells, *(figures.get(column, "") for column in columns)])
        parts.append(_aligned(head, lines))
    facts = [how.split("; ") for _, how in methods]
    shared = [fact for fact in facts[0] if all(fact in how for how in facts)]
    shared = shared if len(facts) > 1 else []
    said = [
        f"- {', '.join(names)}, {date}: {'; '.join(x for x in how if x not in shared)}."
        for ((date, _), names), how in zip(methods.items(), facts, strict=True)
    ]
    taken = (
        f"How they were taken. All: {'; '.join(shared)}. Each:"
        if shared
        else "How they were taken:"
    )
    return "\n\n".join([*parts, taken, "\n".join(said)])


def _version(row: Row) -> str:
    """A peer's name and version; a version may begin with the name."""
    name, version = row["impl"], row["version"]
    return f"{name} {version.rpartition(' ')[2]}"


def _figure(row: Row) -> str:
    """A peer's figure, and ours of the same day where a row has it."""
    beside = row.get("ours_tflops", row.get("ours_tbps"))
    return _number(row) + (f" (ours {beside})" if beside else "")


if __name__ == "__main__":
    for name, text in from_results(pathlib.Path.cwd()).items():
        path = pathlib.Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
