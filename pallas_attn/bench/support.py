"""The support matrix of docs/support.md, from the dispatch table itself: each cell is a
kernel's own `limit`, asked about a problem that has the property and nothing else.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from pallas_attn import trees
from pallas_attn._call import dispatch
from pallas_attn._call.problem import (
    AppendProblem,
    AttentionProblem,
    Change,
    DecodeProblem,
    KeepProblem,
)
from pallas_attn._functions import program
from pallas_attn.masks import AT_RUN_TIME, CAUSAL, FULL, Mask, mask_fn, sliding_window
from pallas_attn.scores import score_fn

BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
GENERATIONS = ("sm80", "sm86", "sm90", "sm100")
OPERATIONS = {
    "flash_forward": "attention, forward",
    "flash_backward": "attention, backward",
    "append": "append",
    "keep": "keep",
    "decode": "decode",
}

_ATTENTION = AttentionProblem(
    op="flash_forward",
    gpu="sm90",
    dtype="bfloat16",
    batch=2,
    q_len=1024,
    kv_len=1024,
    q_heads=8,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
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
    capacities=(1024,),
)
_KEEP = KeepProblem("sm90", "stacked", "bfloat16", 8, 8, 8, 128, 128, (1024,))
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
_BASE["flash_backward"] = dataclasses.replace(_ATTENTION, op="flash_backward")

_DTYPES: tuple[dict[str, Any], ...] = tuple(
    {"dtype": name} for name in ("bfloat16", "float16", "float32", "float64")
)
_SCORES = (2, 8, 1024, 1024)
_BOUNDS = ("mask_left", "mask_right")
_ALTERNATE = mask_fn(lambda b, h, q, kv: (q ^ kv) & 1 == 0)
_DISTANCE = score_fn(lambda s, b, h, q, kv: s - (q - kv))
_PLACED = program.placed(_ALTERNATE.program, 2, (2, 3), 2)
_ARRAYS = ("q_offset", "q_lengths", "kv_lengths", "sinks")
_ATTENTION_ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "dtype": _DTYPES,
    'float32, precision="highest"': ({"dtype": "float32", "precision": "highest"},),
    "head dim": tuple(
        {"head_dim": n, "v_head_dim": n} for n in (32, 64, 72, 80, 96, 128, 192, 256)
    ),
    "head dim of q, k and of v": (
        {"head_dim": 192, "v_head_dim": 128},
        {"head_dim": 64, "v_head_dim": 256},
    ),
    "query heads a kv head": tuple({"q_heads": 8 * n} for n in (1, 4, 7, 8)),
    "mask": tuple({"mask": m} for m in (FULL, CAUSAL, sliding_window(128), Mask(64, 32))),
    "window at run time": (
        {"mask": FULL.filled(left=AT_RUN_TIME, right=AT_RUN_TIME), "arrays": _BOUNDS},
    ),
    "softcap": ({"softcap": 30.0},),
    **{name: ({"arrays": (name,)},) for name in _ARRAYS},
    "segment_ids": ({"arrays": ("q_segment_ids", "kv_segment_ids")},),
    "packed rows, q_starts and kv_starts": (
        {"arrays": ("q_lengths", "kv_lengths", "q_segment_ids", "kv_segment_ids", "q_positions")},
    ),
    "bias": ({"arrays": ("bias",), "bias_shape": _SCORES},),
    "mask_array": ({"arrays": ("mask_array",), "mask_shape": _SCORES},),
    "rows split over devices": ({"arrays": ("q_offset",), "offsets": ((0, 1024),)},),
    "mask_fn": ({"mask_program": _ALTERNATE.program},),
    "score_fn": ({"score_program": _DISTANCE.program},),
    "mask_fn, rows split over devices": ({"mask_program": _PLACED, "arrays": ("q_offset",)},),
    "bias beside mask_fn or score_fn": (
        {"mask_program": _ALTERNATE.program, "arrays": ("bias",), "bias_shape": _SCORES},
    ),
}
_IN_TREE: dict[str, Any] = {"tree": True, "mask_program": trees.program((8, 64, 3))}
_IN_WINDOW: dict[str, Any] = {
    "mask": Mask(left=1086, right=0),
    "mask_program": trees.program_of_window((8, 64, 3)),
}
_SPLIT_TREE: dict[str, Any] = {
    "q_len": 64,
    "mask": FULL,
    "mask_program": trees.program_of_window((8, 64, 3), split=True),
}
_PACKED: dict[str, Any] = {"tokens": 2112, "q_len": 2112}
_PACKED_TREE: dict[str, Any] = _PACKED | {
    "tree": True,
    "mask_program": trees.program((2112, 3), 8),
}
_LATENT: dict[str, Any] = {"head_dim": 576, "v_head_dim": 512, "shared_kv": True}
_LATENT |= {"kv_heads": 1, "q_heads": 16}
_QUANTISED: tuple[dict[str, Any], ...] = tuple(
    {"cache_dtype": name, "quantized": True} for name in ("int8", "float8_e4m3fn", "float8_e5m2")
)
_CACHES: tuple[dict[str, Any], ...] = (
    {"kind": "per_sequence", "capacities": (1024,) * 8},
    {"kind": "stacked"},
    {"kind": "paged", "page_size": 16, "pages": 512},
)
_ROWS: dict[str, dict[str, tuple[dict[str, Any], ...]]] = {
    "flash_forward": _ATTENTION_ROWS,
    "flash_backward": _ATTENTION_ROWS,
    "append": {
        "cache": _CACHES,
        "cache dtype": tuple(
            {"cache_dtype": name, "dtype": name}
            for name in ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float64")
        ),
        "quantised to": _QUANTISED,
        "head dim": tuple({"head_dim": n, "v_head_dim": n} for n in (1, 64, 72, 128, 256)),
        "rows of several layers": ({"layers": 32},),
        "ragged chunks": ({"new_rows": 64, "ragged": True},),
        "packed rows": ({"new_rows": 64, "packed": True},),
        "rows split over devices": ({"new_rows": 8, "packed": True},),
        "rows split over devices, keep by a path; of 32 layers": (
            {"sequences": 8 * 32, "new_rows": 8 * 32 * 8, "packed": True},
        ),
        "one array alone": ({"v_head_dim": None},),
        "rotary, norm": ({"change": Change(128, eps=1e-6, pairs=64, positions=1024)},),
    },
    "keep": {
        "cache": _CACHES,
        "cache dtype": tuple(
            {"cache_dtype": name}
            for name in ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float64")
        ),
        "quantised": _QUANTISED,
        "head dim of K and of V": (
            {"head_dim": 192, "v_head_dim": 128},
            {"head_dim": 72, "v_head_dim": 80},
        ),
        "V within K": ({"head_dim": 576, "v_head_dim": None, "kv_heads": 1},),
        "rows of several layers": ({"layers": 32},),
        "rows of a path": tuple({"width": n} for n in (1, 16, 48, 64)),
    },
    "decode": {
        "cache": _CACHES,
        "dtype": tuple(
            {"dtype": name, "cache_dtype": name} for name in ("bfloat16", "float16", "float32")
        ),
        'float32, precision="highest"': (
            {"dtype": "float32", "cache_dtype": "float32", "precision": "highest"},
        ),
        "quantised cache": _QUANTISED,
        "V within K, head dim 576 and 512": (_LATENT,),
        "head dim": tuple({"head_dim": n, "v_head_dim": n} for n in (64, 72, 96, 128, 192, 256)),
        "query heads a kv head": tuple({"q_heads": 8 * n} for n in (1, 4, 7, 8)),
        "tokens at once": tuple({"q_len": n} for n in (1, 4, 64)),
        "packed rows": (_PACKED,),
        "shared_prefixes, prefix": (_CACHES[2] | {"mask": FULL} | _PACKED,),
        "packed rows over a quantised cache": tuple(one | _PACKED for one in _QUANTISED),
        "packed rows, V within K": (_LATENT | _PACKED,),
        "window": ({"mask": sliding_window(128)},),
        "window at run time": ({"mask": CAUSAL.filled(left=AT_RUN_TIME)},),
        "rows split over devices, window": (
            {"kind": "paged", "page_size": 1024, "pages": 8, "sequences": 1, "capacities": (1024,)}
            | {"mask": CAUSAL.filled(left=AT_RUN_TIME, right=AT_RUN_TIME)},
        ),
        "softcap": ({"softcap": 30.0},),
        "sinks": ({"sinks": True},),
        "batch_invariant": ({"batch_invariant": True},),
        "parents, a tree of drafts; tokens at once": tuple(
            {"q_len": n} | _IN_TREE for n in (4, 64)
        ),
        "a tree in a window; tokens at once": tuple({"q_len": n} | _IN_WINDOW for n in (4, 64)),
        "a tree, rows split over devices": (_SPLIT_TREE,),
        "a tree over a quantised cache": tuple(
            one | {"q_len": 64} | _IN_TREE for one in _QUANTISED
        ),
        "a tree of packed rows": (_PACKED_TREE,),
        "a tree of packed rows in a window": (
            _PACKED
            | {
                "mask": Mask(left=1086, right=0),
                "mask_program": trees.program_of_window((2112, 3), 8),
            },
        ),
        "a tree of packed rows over a quantised cache": tuple(
            one | _PACKED_TREE for one in _QUANTISED
        ),
        "a tree of packed rows, V within K": (_LATENT | _PACKED_TREE,),
        "mask_fn, packed rows, V within K": (
            _LATENT | {"mask_program": _ALTERNATE.program} | _PACKED,
        ),
        "a tree, V within K": (_LATENT | {"q_len": 4} | _IN_TREE,),
        "mask_fn": ({"mask_program": _ALTERNATE.program},),
        "mask_fn, packed rows": ({"mask_program": _ALTERNATE.program} | _PACKED,),
    },
}


def support_matrix() -> str:
    """A Markdown table an operation: who takes what on which generation of GPU."""
    return "\n\n".join(_table(operation) for operation in OPERATIONS)


def rewrite(page: str) -> None:
    """Put the matrix of today between the markers of a page."""
    path = pathlib.Path(page)
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{support_matrix()}\n{END}{after}")


def _table(operation: str) -> str:
    lines = [
        f"| {OPERATIONS[operation]} | " + " | ".join(GENERATIONS) + " |",
        "|---" * (1 + len(GENERATIONS)) + "|",
    ]
    for name, variants in _ROWS[operation].items():
        cells = [_cell(operation, generation, variants) for generation in GENERATIONS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _kernels(problem: Any) -> list[dispatch.Kernel]:
    return [x for x in dispatch.table_of(problem) if isinstance(x, dispatch.Kernel)]


def _cell(operation: str, generation: str, variants: tuple[dict[str, Any], ...]) -> str:
    taken = list(_taken(operation, generation, variants))
    if not any(taken):
        return "-"
    if len(variants) == 1:
        return "yes"
    return ", ".join(_label(v) for v, yes in zip(variants, taken, strict=True) if yes)


def _taken(operation: str, generation: str, variants: tuple[dict[str, Any], ...]) -> Iterator[bool]:
    for variant in variants:
        problem: Any = dataclasses.replace(_BASE[operation], gpu=generation, **variant)  # type: ignore[type-var]
        yield any(kernel.limit(problem) is None for kernel in _kernels(problem))


def _label(variant: dict[str, Any]) -> str:
    """The first field's value: it is what the variants of a row differ in."""
    first, *others = variant.items()
    name, value = first
    if name == "q_heads":
        return str(value // 8)
    if isinstance(value, Mask):
        return str(value).replace(", ", " ")
    pair = dict(others).get("v_head_dim", value)
    return str(value) if name != "head_dim" or pair == value else f"{value} and {pair}"
