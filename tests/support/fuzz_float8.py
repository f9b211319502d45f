"""Random problems of attention on float8 with scales, and of rounding to float8, as `fuzz` runs
them.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from pallas_attn._call.float8 import cuts
from pallas_attn.masks import CAUSAL, FULL
from tests.support import budget, fuzz
from tests.support.append_cases import assert_same_bytes
from tests.support.fuzz_positions import Round
from tests.support.problems import by_name
from tests.support.problems import case as _case
from tests.support.quantized import awkward_rows, quantized

SCALES = ("none", "number", "head", "row", "blocks", "some_blocks")
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


@dataclasses.dataclass(frozen=True)
class Case(_case.AttentionCase):
    """`kinds`: one of SCALES for each of q, k and v, or a number of blocks of rows."""

    kinds: tuple[str | int, ...] = ("none",) * 3
    out_dtype: str = "bfloat16"


def draw(seed: int, tiny: bool) -> Case:
    drawn, pick = fuzz.draw_attention(seed, tiny), random.Random(f"fuzz float8 {seed}")
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn) if f.init}
    fields |= {"rotary": None, "rotary_positions": False, "deterministic": False}
    fields |= {"dtype": pick.choice(("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"))}
    fields |= {"precision": FAST if pick.random() < 0.1 else None}
    fields |= {name: min(fields[name], 256) for name in ("head_dim", "v_head_dim")}
    case = Case(
        **fields,
        kinds=tuple(pick.choices(SCALES, k=3)),
        out_dtype=pick.choice(("bfloat16", "bfloat16", "float16", "float32")),
    )
    return _packed(case, pick) if pick.random() < 0.2 else case


def _packed(case: Case, pick: random.Random) -> Case:
    """Sequences packed into one row, whose positions begin anew."""
    lengths, left = [], case.q_len
    while left:
        lengths.append(pick.randint(1, left))
        left -= lengths[-1]
    plain = dict.fromkeys(("q_lengths", "kv_lengths", "bias_shape", "mask_shape", "kv_segments"))
    case = fuzz.resized(case, batch=1)
    mask = pick.choice((FULL, CAUSAL))
    return dataclasses.replace(
        case,
        kv_len=case.q_len,
        q_offset=0,
        segments=tuple(lengths),
        packed=True,
        mask=mask,
        **plain,
    )


def _scales(case: Case, turn: int) -> dict[str, np.ndarray]:
    rng, arrays = np.random.default_rng((turn, 8)), {}
    sizes = {"q": (case.q_len, case.q_heads), "k": (case.kv_len, case.kv_heads)}
    sizes["v"] = sizes["k"]
    for (name, (rows, heads)), kind in zip(sizes.items(), case.kinds, strict=True):
        fit = [n for n in range(1, rows + 1) if cuts(rows, n)]
        shapes: dict[str | int, tuple[int, ...]] = {
            "head": (heads,),
            "row": (case.batch, rows, heads),
            "blocks": (case.batch, -(-rows // 128), heads),
            "some_blocks": (1, fit[turn % len(fit)], 1),
        }
        shape = (1, kind, 1) if isinstance(kind, int) else shapes.get(kind, ())
        if kind != "none":
            arrays[f"{name}_scale"] = rng.uniform(0.5, 2, shape).astype(np.float32)
    return arrays


def attend(*, implementation: str | None, **arguments: Any) -> tuple[Any, Any]:
    """(out, lse), of packed rows as of a batch of one."""
    if "q_starts" not in arguments:
        return by_name.flash_attention_with_lse(**arguments, implementation=implementation)
    rows = {x: arguments.pop(x)[0] for x in "qkv"}
    out, lse = by_name.flash_attention_with_lse(**rows, **arguments, implementation=implementation)
    return out[None], lse[None]


def _inputs(case: Case, turn: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the call and of the oracle."""
    handed, plain = fuzz.attention_inputs(case, turn)
    options = {name: x for name, x in case.options().items() if x is not None}
    options["out_dtype"] = case.out_dtype
    scales = _scales(case, turn)
    for arguments in (handed, plain):
        del arguments["do"], arguments["dlse"]
        arguments |= {name: jnp.asarray(x) for name, x in scales.items()}
    for name, lengths in (("q", "q_lengths"), ("k", "kv_lengths"), ("v", "kv_lengths")):
        scale = scales.get(f"{name}_scale")
        each_row = scale is not None and scale.shape[1:2] == plain[name].shape[1:2] != (1,)
        if lengths in handed and scale is not None and each_row:
            ends = np.asarray(handed[lengths]).clip(0, scale.shape[1])
            past = np.arange(scale.shape[1])[None] >= ends[:, None]
            scale = np.where(past[..., None], np.float32(np.nan), scale)
            handed[f"{name}_scale"] = jnp.asarray(scale)
    if case.packed:
        del handed["segment_ids"]
        handed["q_starts"] = case.q_starts()
    return handed | options, plain | options


def run(case: Case, place: fuzz.Place, tally: fuzz.Tally) -> None:
    if place.lowered:
        with fuzz.pretended(case, place) as generation:
            fuzz.lower("flash_forward", attend, _inputs(case, 0)[0], generation, tally)
        return
    for turn in fuzz.turns(place, tally):
        handed, plain = _inputs(case, turn)
        expected = functools.cache(functools.partial(_expected, plain))
        named = lambda got: dict(zip(("out", "lse"), got, strict=True))  # noqa: E731
        Round(attend, handed, expected, turn, named, "flash_forward").try_each(place, tally)


def _expected(plain: dict[str, Any], tensor_cores: bool, grids: tuple[float, ...]) -> Any:
    with np.errstate(all="ignore"):
        return budget.attention(plain, tensor_cores=tensor_cores, random=True, grids=grids)


def simpler(case: Case) -> Iterator[dict[str, Any]]:
    if case.packed:
        yield {"packed": False, "segments": None}
    for side in range(3):
        kinds = list(case.kinds)
        kinds[side] = "none"
        yield {"kinds": tuple(kinds)}
    yield {"out_dtype": "bfloat16"}
    for fields in fuzz.simpler_attention(case):
        if "dtype" not in fields and not case.packed:
            yield fields


# ---- rounding ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A call of `quantize_qkv`."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    to: str
    rows: int | None
    lengths: bool


def draw_rounding(seed: int, tiny: bool) -> Rounding:
    pick = random.Random(f"fuzz rounding {seed}")
    kv_heads, most = pick.choice((1, 2, 3)), 70 if tiny else 700
    rows = (None, 1, 2, 8, 17, 64, 100, 128, 128, 128, 256, 300)
    return Rounding(
        batch=pick.choice((1, 2, 3)),
        q_len=pick.randint(1, most),
        kv_len=pick.choice((pick.randint(1, most), 1, 128, 256)),
        q_heads=kv_heads * pick.choice((1, 2, 4)),
        kv_heads=kv_heads,
        head_dim=pick.choice((1, 3, 20, 64, 72, 80, 128, 192, 256, 300)),
        v_head_dim=pick.choice((1, 24, 64, 128, 256)),
        dtype=pick.choice(("bfloat16", "bfloat16", "float16", "float32")),
        to=pick.choice(("float8_e4m3fn", "float8_e5m2")),
        rows=pick.choice(rows),
        lengths=pick.random() < 0.4,
    )


def _block(rows: int, most: int | None) -> int:
    """Rows of a scale, as `quantize_qkv` documents them."""
    if most is None or rows <= most:
        return rows
    if most >= 128:
        blocks = -(-rows // (most // 128 * 128))
        return -(-rows // (128 * blocks)) * 128
    # No more blocks than of 128 rows would be read as those.
    return max(n for n in range(1, most + 1) if rows % n == 0 and rows // n > -(-rows // 128))


def rounding_inputs(case: Rounding, turn: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Arguments, and numbers and scales by NumPy."""
    rng = np.random.default_rng((turn, case.q_len, case.kv_len))
    arguments: dict[str, Any] = {}
    if case.lengths:
        for name, end in (("q_lengths", case.q_len), ("kv_lengths", case.kv_len)):
            arguments[name] = fuzz._edges(rng, case.batch, end)
    sides = {
        "q": (case.q_len, case.q_heads, case.head_dim),
        "k": (case.kv_len, case.kv_heads, case.head_dim),
        "v": (case.kv_len, case.kv_heads, case.v_head_dim),
    }
    ties, numbers, scales = awkward_rows(rng)[-80:].reshape(-1) / 64, [], []
    for name, (rows, heads, dim) in sides.items():
        shape = (case.batch, rows, heads, dim)
        x = np.where(rng.random(shape) < 0.5, rng.choice(ties, shape), rng.standard_normal(shape))
        x = x * 2.0 ** rng.integers(-9, 9, (*shape[:3], 1))
        x = x.astype(np.float32).astype(jnp.dtype(case.dtype))
        if turn % 2:
            x[rng.random(shape) < 1 / 997] = rng.choice([np.nan, np.inf, -np.inf])
        ends = arguments.get("q_lengths" if name == "q" else "kv_lengths")
        live = np.full(case.batch, rows) if ends is None else ends.clip(0, rows)
        past = (np.arange(rows)[None] >= live[:, None])[..., None, None]
        arguments[name] = jnp.asarray(np.where(past, np.asarray(np.nan, x.dtype), x))
        size = _block(rows, case.rows)
        wide = np.zeros((case.batch, -(-rows // size) * size, heads, dim), np.float32)
        wide[:, :rows] = np.where(past, 0, x.astype(np.float32))
        wide = np.moveaxis(wide.reshape(case.batch, -1, size, heads, dim), 2, 3)
        made, scale = quantized(wide.reshape(*wide.shape[:3], -1), case.to)
        made = np.moveaxis(made.reshape(wide.shape), 3, 2).reshape(case.batch, -1, heads, dim)
        numbers.append(made[:, :rows])
        scales.append(scale)
    arguments = {name: jnp.asarray(x) for name, x in arguments.items()}
    return arguments | {"dtype": case.to, "rows": case.rows}, [*numbers, *scales]


def run_rounding(case: Rounding, place: fuzz.Place, tally: fuzz.Tally) -> None:
    if place.lowered:
        with fuzz.pretended(case, place) as generation:
            arguments = rounding_inputs(case, 0)[0]
            fuzz.lower("quantize", pa.quantize_qkv, arguments, generation, tally)
        return
    for turn in fuzz.turns(place, tally):
        arguments, expected = rounding_inputs(case, turn)
        for subject in place.subjects:
            if not fuzz.takes(subject, "quantize", pa.quantize_qkv, arguments):
                continue
            tally.calls[subject.name] += 1
            with fuzz.by(subject, turn):
                got = jax.tree.map(np.array, subject.call(pa.quantize_qkv, **arguments))
                assert_same_bytes(tuple(got), expected)


def simpler_rounding(case: Rounding) -> Iterator[dict[str, Any]]:
    yield from ({"lengths": False}, {"batch": 1}, {"kv_heads": 1, "q_heads": 1}, {"rows": 128})
    yield from ({"dtype": "bfloat16"}, {"head_dim": 64}, {"v_head_dim": 64})
    yield from ({"q_len": max(case.q_len // 2, 1)}, {"kv_len": max(case.kv_len // 2, 1)})
