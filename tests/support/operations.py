"""The support matrix of docs/support.md, from the dispatch table: a cell is the answer of the
kernels' own `limit` to a problem with that property and no other.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pallas_attn import trees
from pallas_attn._call import dispatch
from pallas_attn._call.problem import (
    AppendProblem,
    AttentionProblem,
    Change,
    DecodeProblem,
    KeepProblem,
    QuantizeProblem,
)
from pallas_attn._functions import program
from pallas_attn.masks import AT_RUN_TIME, CAUSAL, FULL, Mask, mask_fn, sliding_window
from pallas_attn.scores import score_fn

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
GENERATIONS = ("sm80", "sm86", "sm90", "sm100")
# {title: {label: operation}}; labels tell apart what one table shows of several operations.
_TABLES = {
    "attention": {
        "forward": "flash_forward",
        "backward": "flash_backward",
        "tangents": "flash_jvp",
    },
    "quantize": {"": "quantize"},
    "append": {"": "append"},
    "keep": {"": "keep"},
    "decode": {"": "decode"},
}
OPERATIONS = tuple(operation for table in _TABLES.values() for operation in table.values())

_SIZES: dict[str, Any] = {
    "batch": 2,
    "q_len": 1024,
    "kv_len": 1024,
    "q_heads": 8,
    "kv_heads": 8,
    "head_dim": 128,
    "v_head_dim": 128,
}
_ATTENTION = AttentionProblem(
    op="flash_forward",
    gpu="sm90",
    dtype="bfloat16",
    **_SIZES,
    mask=FULL,
    scale=128**-0.5,
)
_APPEND = AppendProblem(
    gpu="sm90",
    kind="stacked",
    dtype="bfloat16",
    cache_dtype="bfloat16",
    sequences=8,
    new_rows=1,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    capacities=(1024,) * 8,
)
_KEEP = KeepProblem("sm90", "stacked", "bfloat16", 8, 8, 8, 128, 128, (1024,) * 8)
_DECODE = DecodeProblem(
    gpu="sm90",
    kind="stacked",
    dtype="bfloat16",
    cache_dtype="bfloat16",
    sequences=8,
    q_len=1,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    capacities=(1024,) * 8,
    mask=CAUSAL,
    scale=128**-0.5,
)
_BASE = {"flash_forward": _ATTENTION, "append": _APPEND, "keep": _KEEP, "decode": _DECODE}
_BASE["quantize"] = QuantizeProblem(
    gpu="sm90",
    dtype="bfloat16",
    to="float8_e4m3fn",
    **_SIZES,
    blocks=(8, 8, 8),
)
_BASE["flash_backward"] = dataclasses.replace(_ATTENTION, op="flash_backward")
_BASE["flash_jvp"] = dataclasses.replace(_ATTENTION, op="flash_jvp", tangents=("k", "q", "v"))

Variants = tuple[dict[str, Any], ...]  # problems of one row: fields that differ from the base
_CACHE_DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float64")
_SCORES = (2, 8, 1024, 1024)
_ALTERNATE = mask_fn(lambda b, h, q, kv: (q ^ kv) & 1 == 0).program
_DISTANCE = score_fn(lambda s, b, h, q, kv: s - (q - kv)).program
_SLOPES = score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), np.ones(8, np.float32)).program
_PLACED = program.placed(_ALTERNATE, 2, (2, 3), 2)


def _each(values: Iterable[Any], *fields: str, **more: Any) -> Variants:
    """A variant for each value, which all the fields have."""
    return tuple(dict.fromkeys(fields, value) | more for value in values)


def _head_dims(*dims: int) -> Variants:
    return _each(dims, "head_dim", "v_head_dim")


_BOTH_DIMS = tuple({"head_dim": h, "v_head_dim": hv} for h, hv in ((192, 128), (72, 80)))
_GROUPS = _each((8, 32, 56, 64), "q_heads")
_CACHES: Variants = (
    {"kind": "per_sequence"},
    {"kind": "stacked"},
    {"kind": "paged", "page_size": 16, "pages": 512},
)
_QUANTISED = _each(("int8", "float8_e4m3fn", "float8_e5m2"), "cache_dtype", quantized=True)
_PACKED: dict[str, Any] = {"tokens": 2112, "q_len": 2112}
_INTERLEAVED: dict[str, Any] = {"kind": "interleaved", "page_size": 16, "pages": 512}
_LATENT: dict[str, Any] = {"head_dim": 576, "v_head_dim": 512, "shared_kv": True}
_LATENT |= {"kv_heads": 1, "q_heads": 16}
_LISTED: dict[str, Any] = {"listed": 512}
_SCORED: dict[str, Any] = {"score_program": _SLOPES}
_OF_BYTES = _LATENT | {"cache_dtype": "float8_e4m3fn", "quantized": True, "byte_rows": True}
_IN_TREE: dict[str, Any] = {"tree": True, "mask_program": trees.program((8, 64, 3))}
_PACKED_TREE = _PACKED | {"tree": True, "mask_program": trees.program((2112, 3), 8)}
_WINDOW = Mask(left=1086, right=0)
_IN_WINDOW = {"mask": _WINDOW, "mask_program": trees.program_of_window((8, 64, 3))}
_PACKED_IN_WINDOW = _PACKED | {"mask": _WINDOW}
_PACKED_IN_WINDOW["mask_program"] = trees.program_of_window((2112, 3), 8)
_SPLIT_TREE = trees.program_of_window((8, 64, 3), split=True)
_AT_RUN_TIME = CAUSAL.filled(left=AT_RUN_TIME, right=AT_RUN_TIME)
_LENGTHS_AND_IDS = ("q_lengths", "kv_lengths", "q_segment_ids", "kv_segment_ids")

_ATTENTION_ROWS: dict[str, Variants] = {
    "dtype": _each(("bfloat16", "float16", "float32", "float64"), "dtype"),
    'precision="highest"': ({"dtype": "float32", "precision": "highest"},),
    "float8 with scales": _each(
        ("float8_e4m3fn", "float8_e5m2"), "dtype", out_dtype="bfloat16", arrays=("q_scale",)
    ),
    "head dim": _head_dims(32, 64, 72, 80, 96, 128, 192, 256, 320, 512),
    "head dim of q and of v": (
        {"head_dim": 192, "v_head_dim": 128},
        {"head_dim": 64, "v_head_dim": 256},
        {"head_dim": 512, "v_head_dim": 128},
    ),
    "query heads a kv head": _GROUPS,
    "mask": _each((FULL, CAUSAL, sliding_window(128), Mask(64, 32)), "mask"),
    "window at run time": (
        {"mask": FULL.filled(left=AT_RUN_TIME, right=AT_RUN_TIME)}
        | {"arrays": ("mask_left", "mask_right")},
    ),
    "softcap": ({"softcap": 30.0},),
    **{x: ({"arrays": (x,)},) for x in ("q_offset", "q_lengths", "kv_lengths", "sinks")},
    "segment_ids": ({"arrays": _LENGTHS_AND_IDS[2:]},),
    "packed rows": ({"arrays": (*_LENGTHS_AND_IDS, "q_positions")},),
    "bias": ({"arrays": ("bias",), "bias_shape": _SCORES},),
    "mask_array": ({"arrays": ("mask_array",), "mask_shape": _SCORES},),
    "rows split over devices": ({"arrays": ("q_offset",), "offsets": ((0, 1024),)},),
    "rotary": ({},),
    "mask_fn": ({"mask_program": _ALTERNATE},),
    "score_fn": ({"score_program": _DISTANCE},),
    "score_fn, gradients of its arrays": ({"score_program": _SLOPES, "learned": (0,)},),
    "mask_fn, rows split over devices": ({"mask_program": _PLACED, "arrays": ("q_offset",)},),
    "bias, beside mask_fn or score_fn": (
        {"mask_program": _ALTERNATE, "arrays": ("bias",), "bias_shape": _SCORES},
    ),
}
_ROWS: dict[str, dict[str, Variants]] = {
    "flash_forward": _ATTENTION_ROWS,
    "flash_backward": _ATTENTION_ROWS,
    "flash_jvp": _ATTENTION_ROWS,
    "quantize": {
        "from": _each(("bfloat16", "float16", "float32"), "dtype"),
        "to": _each(("float8_e4m3fn", "float8_e5m2"), "to"),
        "a scale a row": ({"blocks": (1024, 1024, 1024)},),
        "a scale a head": ({"blocks": (1, 1, 1)},),
        "head dim": _head_dims(1, 64, 72, 128, 256, 512),
    },
    "append": {
        "cache": _CACHES,
        "cache dtype": _each(_CACHE_DTYPES, "cache_dtype", "dtype"),
        "quantised to": _QUANTISED,
        "head dim": _head_dims(1, 64, 72, 128, 256, 512),
        "rows of several layers": ({"layers": 32},),
        "ragged chunks": ({"new_rows": 64},),
        "packed rows": ({"new_rows": 64, "packed": True},),
        "rows split over devices": ({"new_rows": 8, "packed": True},),
        "rows split over devices, keep of 32 layers": (
            {"new_rows": 8 * 32 * 8, "packed": True}
            | {"sequences": 8 * 32, "capacities": (1024,) * 8 * 32},
        ),
        "one array alone": ({"v_head_dim": None},),
        "latent rows of 656 bytes": (
            {"kv_heads": 1, "head_dim": 576, "v_head_dim": None}
            | {"cache_dtype": "float8_e4m3fn", "quantized": True, "byte_rows": True},
        ),
        "packed rows, K and V interleaved": (_INTERLEAVED | {"new_rows": 64, "packed": True},),
        "rotary and norm": ({"change": Change(128, eps=1e-6, pairs=64, positions=1024)},),
    },
    "keep": {
        "cache": _CACHES,
        "cache dtype": _each(_CACHE_DTYPES, "cache_dtype"),
        "quantised": _QUANTISED,
        "head dim of K and of V": _BOTH_DIMS,
        "V within K": ({"head_dim": 576, "v_head_dim": None, "kv_heads": 1},),
        "rows of several layers": ({"layers": 32},),
        "rows of a path": _each((1, 16, 48, 64), "width"),
    },
    "decode": {
        "cache": _CACHES,
        "dtype": _each(("bfloat16", "float16", "float32"), "dtype", "cache_dtype"),
        'precision="highest"': _each(("float32",), "dtype", "cache_dtype", precision="highest"),
        "quantised cache": _QUANTISED,
        "precision=ANY_F8_ANY_F8_F32": (_QUANTISED[1] | {"precision": "float8", "q_len": 64},),
        "V within K": (_LATENT,),
        "rows of 656 bytes": tuple(_OF_BYTES | {"q_heads": n} for n in (16, 128)),
        "head dim": _head_dims(64, 72, 96, 128, 192, 256, 320, 512),
        "query heads a kv head": _GROUPS,
        "tokens at once": _each((1, 4, 64), "q_len"),
        "packed rows": (_PACKED,),
        "shared_prefixes and prefix": (_CACHES[2] | {"mask": FULL} | _PACKED,),
        "quantised cache, packed rows": tuple(dtype | _PACKED for dtype in _QUANTISED),
        "packed rows, V within K": (_LATENT | _PACKED,),
        "rows of 656 bytes, packed rows": (_OF_BYTES | _PACKED,),
        "window": ({"mask": sliding_window(128)},),
        "window at run time": ({"mask": CAUSAL.filled(left=AT_RUN_TIME)},),
        "window, rows split over devices": (
            {"kind": "paged", "page_size": 1024, "pages": 8, "sequences": 1, "capacities": (1024,)}
            | {"mask": _AT_RUN_TIME},
        ),
        "softcap": ({"softcap": 30.0},),
        "sinks": ({"sinks": True},),
        "batch_invariant": ({"batch_invariant": True},),
        "tokens at once, parents": tuple({"q_len": n} | _IN_TREE for n in (4, 64)),
        "tokens at once, parents in a window": tuple({"q_len": n} | _IN_WINDOW for n in (4, 64)),
        "parents, rows split over devices": (
            {"q_len": 64, "mask": FULL, "mask_program": _SPLIT_TREE},
        ),
        "quantised cache, parents": tuple(dtype | {"q_len": 64} | _IN_TREE for dtype in _QUANTISED),
        "parents, packed rows": (_PACKED_TREE,),
        "parents, packed rows in a window": (_PACKED_IN_WINDOW,),
        "quantised cache, parents of packed rows": tuple(
            dtype | _PACKED_TREE for dtype in _QUANTISED
        ),
        "parents, packed rows and V within K": (_LATENT | _PACKED_TREE,),
        "mask_fn, packed rows and V within K": (_LATENT | {"mask_program": _ALTERNATE} | _PACKED,),
        "parents, V within K": (_LATENT | {"q_len": 4} | _IN_TREE,),
        "mask_fn": ({"mask_program": _ALTERNATE},),
        "mask_fn, packed rows": ({"mask_program": _ALTERNATE} | _PACKED,),
        "cache, score_fn": tuple(x | _SCORED for x in _CACHES),
        "tokens at once, score_fn": tuple({"q_len": n} | _SCORED for n in (1, 4, 64)),
        "score_fn, packed rows": (_SCORED | _PACKED,),
        "quantised cache, score_fn": tuple(dtype | _SCORED for dtype in _QUANTISED),
        "score_fn, V within K": (_LATENT | _SCORED,),
        "score_fn, packed rows and V within K": (_LATENT | _SCORED | _PACKED,),
        "rows of 656 bytes, score_fn": (_OF_BYTES | _SCORED,),
        "cache, kv_indices": tuple(x | _LISTED for x in _CACHES),
        "tokens at once, kv_indices": tuple({"q_len": n} | _LISTED for n in (1, 64)),
        "kv_indices, packed rows": (_PACKED | _LISTED,),
        "quantised cache, kv_indices": tuple(dtype | _LISTED for dtype in _QUANTISED),
        "kv_indices, V within K": (_LATENT | _LISTED,),
        "kv_indices, sinks": (_LISTED | {"sinks": True},),
        "kv_indices, score_fn": (_LISTED | _SCORED,),
        "packed rows, K and V interleaved": (_INTERLEAVED | _PACKED,),
        "K and V interleaved, numbers without scales": tuple(
            dtype | _INTERLEAVED | _PACKED | {"unscaled": True} for dtype in _QUANTISED
        ),
    },
}


def support_matrix() -> str:
    """Markdown tables: the values of each property that some kernel takes."""
    by_name = {label: _TABLES["attention"][label] for label in ("forward", "backward")}
    tables = [_table(title, operations) for title, operations in _TABLES.items()]
    # The kernels for Blackwell: what differs from the first table.
    of_name, of_all = _cells(by_name, "sm100"), _cells(_TABLES["attention"])
    differ = {name: cell for name, cell in of_name.items() if cell != of_all[name]}
    head = '| attention, forward and backward, implementation="sm100" | on its GPUs |'
    lines = [head, "|---|---|", *_merged(differ), "| all else | as above |"]
    return "\n\n".join([*tables, "\n".join(lines)])


def rewrite(page: str) -> None:
    """Replace the matrix between the markers of a page."""
    path = pathlib.Path(page)
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{support_matrix()}\n{END}{after}")


def _table(title: str, operations: dict[str, str]) -> str:
    """The table of operations."""
    *labels, last = operations
    label = f"{title}, {' and '.join(filter(None, (', '.join(labels), last)))}".removesuffix(", ")
    return "\n".join([f"| {label} | every GPU |", "|---|---|", *_merged(_cells(operations))])


def _cells(operations: dict[str, str], implementation: str | None = None) -> dict[str, str]:
    """{property: its cell}, of operations or of their kernels that only a name chooses, on the GPU
    of that name.
    """
    rows = _ROWS[next(iter(operations.values()))]
    return {name: _cell(operations, x, implementation) for name, x in rows.items()}


def _merged(cells: dict[str, str]) -> list[str]:
    """Rows of a table, of which those with the same cell are one. Of a property "mask_fn, packed
    rows" the first part is named once, with the others behind it.
    """
    names: dict[str, dict[str, list[str]]] = {}
    for name, cell in cells.items():
        first, _, more = name.partition(", ")
        names.setdefault(cell, {}).setdefault(first, []).append(more)

    def said(first: str, others: list[str]) -> str:
        beside = ", ".join(filter(None, others))
        return f"{first} ({'also ' * ('' in others)}{beside})" if beside else first

    return [
        f"| {'; '.join(said(*item) for item in first.items())} | {cell} |"
        for cell, first in names.items()
    ]


def _kernels(problem: Any) -> list[dispatch.Candidate]:
    return [x for x in dispatch.table_of(problem) if isinstance(x, dispatch.Candidate)]


def _cell(operations: dict[str, str], variants: Variants, implementation: str | None) -> str:
    """The variants that are taken, with operations and generations only where these differ."""
    cells: dict[str, list[str]] = {}
    generations = GENERATIONS if implementation is None else (implementation,)
    for label, operation in operations.items():
        for generation in generations:
            taken = list(_taken(operation, generation, variants, implementation))
            said = _said(variants, taken)
            where = f"{label} {generation}".strip()
            cells.setdefault(said if any(taken) else "-", []).append(where)
    if len(cells) == 1:
        return next(iter(cells))
    most = max(cells, key=lambda said: len(cells[said]))
    others = [
        f"{_where(places, operations, generations)}: {x}"
        for x, places in cells.items()
        if x != most
    ]
    return "; ".join([*others, f"else {most}"])


def _said(variants: tuple[dict[str, Any], ...], taken: list[bool]) -> str:
    """The labels of the variants that are taken; "yes" where all are and have one label."""
    if len(variants) == 1:
        return "yes"
    labels = list(map(_label, variants))
    if all(taken) and len(set(labels)) == 1:
        return "yes"
    return ", ".join(dict.fromkeys(itertools.compress(labels, taken)))


def _where(places: list[str], operations: dict[str, str], generations: tuple[str, ...]) -> str:
    """Labels alone for those whose generations are all among the places."""
    for label in filter(None, operations):
        every = [f"{label} {generation}" for generation in generations]
        if set(every) <= set(places):
            places = [label, *(place for place in places if place not in every)]
    return ", ".join(places)


def _taken(
    operation: str,
    generation: str,
    variants: tuple[dict[str, Any], ...],
    implementation: str | None,
) -> Iterator[bool]:
    """Whether a kernel takes each variant: of those that are named, or of all."""
    for variant in variants:
        problem: Any = dataclasses.replace(_BASE[operation], gpu=generation, **variant)  # type: ignore[type-var]
        kernels = _kernels(problem)
        if implementation is not None:
            # Not a portable kernel, which takes for that name what the others refuse.
            kernels = [x for x in kernels if x.module.endswith(f".{implementation}")]
        yield any(kernel.takes(problem) for kernel in kernels)


def _label(variant: dict[str, Any]) -> str:
    """The first field's value, in which the variants of a row differ."""
    first, *others = variant.items()
    name, value = first
    if name == "q_heads":
        return str(value // 8)
    if isinstance(value, Mask):
        return str(value).replace(", ", " ")
    pair = dict(others).get("v_head_dim", value)
    return str(value) if name != "head_dim" or pair == value else f"{value} and {pair}"
