"""The problems that kernels refuse, word for word: tests/recorded/limits.txt has every reason of a
kernel of dispatch, its remedy, and fields of a problem that it refuses for it.

    python -m tests.kernels.test_limits    # writes the file anew; its diff says what changed
"""

import ast
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import block_lists, dispatch
from pallas_attn._call.bind import Call
from pallas_attn._call.problem import Change
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.flash_fwd import batch_rows
from pallas_attn.values import Blocks
from tests.support import operations as support

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "tests" / "recorded" / "limits.txt"

_LATENT, _BYTES = support._LATENT, support._OF_BYTES
_LISTED, _PACKED = support._LISTED, support._PACKED
_WIDE = {"head_dim": 512, "v_head_dim": 512}
_MANY = {"q_len": 1024}
_NARROW = _MANY | {"quantized": True, "cache_dtype": "float8_e4m3fn", "precision": "float8"}
_BY_HEAD = pa.mask_fn(lambda b, h, q, kv: kv > h).program
_LARGE = dataclasses.replace(support._SLOPES, arrays=(((2**31,), "float32"),))
_ROWS = np.zeros((2, 1024, 8, 128), np.float32)
_LISTS = np.zeros((1, 1, 16, 2), np.int32)
_SMALL_BLOCKS = block_lists.shown(_ROWS, _ROWS, Call(kv_blocks=Blocks(_LISTS, 64)))
# Problems beside those of the support matrix: changes of the operation's base.
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "flash_forward": (
        {"head_dim": 264},
        {"v_head_dim": 12},
        {"batch": 2**20, "q_len": 2**11},
        {"arrays": ("kv_lengths",), "v_head_dim": 72},
        {"dtype": "float8_e4m3fn", "head_dim": 264},
        _WIDE | {"dtype": "float32"},
        _WIDE | {"arrays": ("mask_array", "bias")},
        *(_WIDE | {name: 2} for name in ("fetches", "share", "zigzag")),
        {"mask": pa.sliding_window(100), "kv_heads": 1},
        {"q_len": 128, "kv_len": 128},
    ),
    "flash_backward": (
        {"batch": 64, "q_len": 512, "kv_len": 512},
        {"deterministic": True, "mask": pa.Mask(64, 32)},
        {"mask_program": _SMALL_BLOCKS.program},
    ),
    "flash_jvp": ({"share": 2}, {"tangents": ("sinks",)}),
    "quantize": ({"head_dim": 4104},),
    "append": (
        {"capacities": (2**31,)},
        {"layers": 2**31},
        {"new_rows": 2**22, "kv_heads": 8},
        {"quantized": True},
        {"quantized": True, "cache_dtype": "int8", "head_dim": 4097},
        {"kind": "per_sequence", "packed": True, "sequences": 3000, "capacities": (8,) * 3000},
        {"cache_dtype": "int8", "change": Change(128)},
        {"head_dim": 4104, "change": Change(128)},
        {"change": Change(128, first=3, interleaved=True, pairs=8, positions=8)},
        {"change": Change(128, pairs=64, positions=2**30)},
    ),
    "keep": ({"width": 49}, {"capacities": (2**31,)}, {"layers": 2**28}),
    "decode": (
        {"dtype": "float64"},
        {"dtype": "float32"},
        {"cache_dtype": "float16"},
        {"quantized": True},
        {"score_program": _LARGE},
        {"dtype": "float32", "quantized": True, "cache_dtype": "int8"},
        {"head_dim": 520},
        {"v_head_dim": 12},
        {"capacities": (2**30,) * 8},
        {"sequences": 2001, "capacities": (8,) * 2001},
        {"kind": "paged", "page_size": 8, "pages": 2**26, "layers": 32},
        {"layers": 2**28},
        *({"quantized": True, "cache_dtype": "int8"} | x for x in (
            {"head_dim": 96}, {"v_head_dim": 72}, {"capacities": (1022,) * 8},
            {"kind": "per_sequence", "sequences": 1001, "capacities": (1024,) * 1001},
        )),
        *(_MANY | x for x in (
            {"kind": "paged", "page_size": 4, "pages": 512},
            {"kind": "paged", "page_size": 24, "pages": 512},
            {"capacities": (206,) * 8},
            {"capacities": (0,) * 8},
            {"kind": "per_sequence", "sequences": 33, "capacities": (1024,) * 33},
            {"batch_invariant": True},
            {"head_dim": 72},
            {"kind": "interleaved", "page_size": 16, "pages": 512, "head_dim": 96},
            {"sequences": 2, "capacities": (2**24,) * 2},
        )),
        *(_NARROW | x for x in (
            {},
            {"unscaled": True},
            {"merged": (1, 4, 1)},
            {"head_dim": 96, "v_head_dim": 96},
            {"v_head_dim": 256},
            {"head_dim": 64, "v_head_dim": 64},
            support._SCORED,
            {"capacities": (2**24,) * 8},
        )),
        *(_LATENT | x for x in (
            {"dtype": "float32", "cache_dtype": "float32"},
            {"kind": "per_sequence"},
            {"kind": "per_sequence", "tokens": 8},
            {"mask": pa.FULL, "tokens": 8},
            {"quantized": True, "cache_dtype": "int8"},
            {"kv_heads": 2},
            {"head_dim": 160, "v_head_dim": 128},
            {"v_head_dim": 120},
            {"capacities": (204,) * 8},
        )),
        _BYTES | {"q_len": 33},
        _BYTES | {"capacities": (72,) * 8},
        _BYTES | {"q_len": 32, "q_heads": 16, "mask_program": _BY_HEAD},
        *(_LISTED | x for x in (
            {"kind": "per_sequence"},
            _BYTES,
            {"mask_program": _BY_HEAD},
            {"layers": 2**28},
            {"q_len": 2**21, "listed": 1024},
            {"dtype": "float32"},
            {"head_dim": 136},
            {"q_heads": 1024},
            {"score_program": _LARGE},
        )),
        _PACKED | {"tokens": 1, "q_len": 1},
        _PACKED | _WIDE,
        _PACKED | _WIDE | {"kind": "per_sequence"},
    ),
}  # fmt: skip


def asked(problem: Any) -> Iterator[tuple[str, pa.Limit]]:
    """The limits of all kernels of dispatch that refuse a problem."""
    more = {"flash_jvp": "flash_dual", "decode": "listed_backward"}
    table = dispatch.table_of(problem)
    if getattr(problem, "listed", None) or problem.op == "flash_jvp":
        table += dispatch.TABLES[more[problem.op]]
    for row in table:
        if isinstance(row, dispatch.Candidate):
            limit = row.kernel.limit(problem) or row.kernel.slower(problem)
            yield from ((row.module, x) for x in (limit, row.slower(problem)) if x is not None)


def refusals() -> Iterator[str]:
    """A line for each kernel and reason, with the first problem that it refuses for it."""
    for operation, base in support._BASE.items():
        said: dict[tuple[str, pa.Limit], dict[str, Any]] = {}
        rows = support._ROWS[operation].values()
        for changes in ({}, *itertools.chain(*rows), *MORE.get(operation, ())):
            for refused in asked(dataclasses.replace(base, gpu="sm90", **changes)):
                said.setdefault(refused, changes)
        for (module, limit), changes in sorted(said.items(), key=lambda x: x[0][0]):
            fields = ", ".join(f"{name}={_short(x)}" for name, x in changes.items())
            yield f"{module}: {limit.reason} -> {limit.remedy} | {operation}({fields})"


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 24 else type(value).__name__


def test_refusals_are_those_that_are_recorded():
    assert FILE.read_text().splitlines() == list(refusals()), "see the first lines of this file"


def _texts(node: ast.expr) -> list[str]:
    """The constant parts of a string; nothing of another expression."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [x.value for x in parts if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def test_every_limit_is_recorded():
    """Reasons and remedies that kernels spell out."""
    recorded = FILE.read_text()
    for path in (ROOT / "pallas_attn" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Limit":
                parts = [re.escape(x) for argument in node.args for x in _texts(argument)]
                assert re.search(".*".join(parts), recorded), f"{path}:{node.lineno}"


def test_batch_rows_divide_what_a_tile_holds():
    sizes = {"batch": 64, "q_len": 16, "kv_len": 16}
    problem = dataclasses.replace(support._ATTENTION, **sizes)
    with pytest.raises(ValueError) as caught:
        batch_rows.joined(problem, 3)
    assert str(caught.value) == f"Config.batch_rows must divide 4 for {problem}, got 3"


@pytest.mark.parametrize(
    "dtype, tile, want",
    [
        ("float32", 16, "32 for head dims up to 256"),
        ("bfloat16", 16, "32 for head dims up to 256"),
        ("bfloat16", 32, "64 of 16-bit numbers"),
    ],
)
def test_tiles_of_decode(dtype, tile, want):
    problem = dataclasses.replace(support._DECODE, dtype=dtype, cache_dtype=dtype)
    with pytest.raises(ValueError) as caught:
        decode_sm90.plan_of(problem, decode_sm90.Config(tile=tile))
    assert str(caught.value) == f"Config.tile must be at least {want}, got {tile}"


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in refusals()))
