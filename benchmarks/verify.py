"""Checks results before they are timed.

The oracle is `definition`, for some query rows of a few kv heads at a time so that full sizes fit:
in float32 for 16-bit inputs, in float64 for float32. The rule is the project's one tolerance
(`tolerance`), for every array in bands of positions. The worst error and the root mean square of
the error are both held to it: the first finds one bad element, the second a small fault everywhere.

A float32 oracle has rounding errors of its own, and they are all that is left of dq where a row
sees one key: dP and delta cancel. The naive result adds up the columns of every head in another
order, so that its distance from the oracle contains these errors.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.masks import Mask
from tests.support import definition, tolerance

FLOAT8_GRIDS = (1.0, 1.19, 1.41, 1.68)  # a naive result each; the farthest counts
VACUOUS = 0.05  # share of the values' rms; twice the naive error passes
Operand = Any  # an array, or the pair of segment ids
MOST_SCORES = 2**26  # largest number of scores in a slab
SMALL_HEADS = 2**24  # scores up to which several heads are computed at once


class Rules(NamedTuple):
    """The static half of a call, and the arithmetic to do it in."""

    mask: Mask
    scale: float
    softcap: float | None
    dtype: str  # dtype of the sums
    operands: str | None  # argument of `definition.naive`; None: the oracle
    grid: float = 1.0  # likewise
    another_order: bool = False  # sums over the columns of a head are made in another order

    @property
    def arithmetic(self) -> definition.Arithmetic:
        """Arithmetic of the definition, with matmuls as exact as `dtype` is."""
        plain = definition.Arithmetic(self.dtype)
        if self.operands is not None:
            operands = None if self.operands == "float32" else self.operands
            plain = definition.naive(operands, self.grid)
        return plain._replace(scores=jnp.matmul)


def attention(arrays: dict[str, Any], do: jax.Array | None, rules: Rules) -> tuple[jax.Array, ...]:
    """(out,), or (out, dq, dk, dv) where `do` is given, of `flash_attention(**arrays, ...)`."""
    arrays = _finite(arrays)
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    batch, q_len, q_heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = q_heads // max(kv_heads, 1)
    shapes = [(*q.shape[:3], v.shape[-1])] + ([] if do is None else [q.shape, k.shape, v.shape])
    if not min(batch, q_len, kv_len, kv_heads):
        return tuple(jnp.zeros(shape, rules.dtype) for shape in shapes)
    slab = max(1, min(q_len, MOST_SCORES // (group * kv_len)))
    starts = jnp.arange(-(-q_len // slab), dtype=jnp.int32) * slab

    def of_kv_head(index):
        head = _Head(index // kv_heads, index % kv_heads, group)
        own = {name: head.part(name, x) for name, x in arrays.items()}

        def of_slab(sums, start):
            rows = start + jnp.arange(slab, dtype=jnp.int32)
            part = {name: _rows_of(name, x, rows) for name, x in own.items()}
            part["q_offset"] = part.get("q_offset", jnp.zeros(1, jnp.int32)) + start
            lengths = part.get("q_lengths", jnp.full(1, q_len, jnp.int32)) - start
            part["q_lengths"] = jnp.minimum(lengths, q_len - start)
            some = None if do is None else _rows_of("q", head.part("q", do), rows)
            static: dict[str, Any] = {
                "mask": rules.mask,
                "scale": rules.scale,
                "softcap": rules.softcap,
            }
            results = definition.attention(
                part, some, **static, arithmetic=rules.arithmetic, xp=jnp
            )
            sums = tuple(x + results[name] for x, name in zip(sums, ("dk", "dv"), strict=False))
            return sums, tuple(results[name][0] for name in ("out", "dq") if name in results)

        zeros = tuple(jnp.zeros((1, kv_len, 1, x.shape[-1]), rules.dtype) for x in (k, v))
        sums, by_row = lax.scan(of_slab, () if do is None else zeros, starts)
        by_row = [x.reshape(-1, *x.shape[2:])[:q_len] for x in by_row]
        return *by_row, *(x[0] for x in sums)

    # A head of 49 rows alone takes as long as its launches: 8192 heads would be 8192 times that.
    heads, most = batch * kv_heads, SMALL_HEADS // (group * slab * kv_len)
    at_once = max(n for n in range(1, max(1, min(heads, most)) + 1) if heads % n == 0)
    indices = jnp.arange(heads, dtype=jnp.int32)
    results = lax.map(of_kv_head, indices, batch_size=None if at_once == 1 else at_once)
    results = [jnp.moveaxis(x.reshape(batch, kv_heads, *x.shape[1:]), 1, 2) for x in results]
    return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))


def _finite(arrays: dict[str, Any]) -> dict[str, Any]:
    """Zeros past the lengths, where inputs may hold NaN."""
    arrays = dict(arrays)
    for names, lengths in (("q", "q_lengths"), ("kv", "kv_lengths")):
        if arrays.get(lengths) is not None:
            for name in names:
                x = arrays[name]
                live = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < arrays[lengths][:, None]
                arrays[name] = jnp.where(live[..., None, None], x, jnp.zeros_like(x))
    return arrays


class _Head(NamedTuple):
    """One kv head of one batch row, with its group of query heads."""

    row: jax.Array
    kv_head: jax.Array
    group: int

    def part(self, name: str, x: Operand) -> Any:
        """The part of an argument of `flash_attention` that the head reads."""
        first = self.kv_head * self.group
        if name == "sinks":
            return lax.dynamic_slice_in_dim(x, first, self.group)
        x = jax.tree.map(lambda x: x if len(x) == 1 else x[self.row][None], x)
        if name in ("bias", "mask_array"):
            return x if x.shape[1] == 1 else lax.dynamic_slice_in_dim(x, first, self.group, 1)
        if name == "q":
            return lax.dynamic_slice_in_dim(x, first, self.group, 2)
        return x[:, :, self.kv_head][:, :, None] if name in ("k", "v") else x


def _rows_of(name: str, x: Operand, rows: jax.Array) -> Any:
    """Query rows of an argument; rows past its end are the last one."""
    take = functools.partial(jnp.take, indices=rows, mode="clip")
    if name == "q":
        return take(x, axis=1)
    if name in ("bias", "mask_array"):
        return x if x.shape[2] == 1 else take(x, axis=2)
    return (take(x[0], axis=1), x[1]) if name == "segment_ids" else x


def expected(
    arrays: dict[str, Any],
    options: dict[str, Any],
    cotangent: jax.Array | None = None,
    tangents: tuple[jax.Array, ...] | None = None,
    narrow: str | None = None,
) -> Any:
    """(oracle, naive) results, each (out,); (out, dq, dk, dv) with a cotangent; (out, its tangent)
    with tangents of q, k and v. `narrow`: the operands of the naive ones; None: those of the dtype.
    """
    dtype = str(arrays["q"].dtype)
    wide = "float64" if dtype in ("float32", "float64") else "float32"
    scale = arrays["q"].shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    mask: Any = arrays.get("mask", options.get("mask"))
    mask = mask.filled(**{side: int(bound) for side, bound in mask.arrays.items()})
    arrays = {name: x for name, x in arrays.items() if name != "mask" and x is not None}
    if "q_offset" in arrays:
        arrays["q_offset"] = jnp.asarray(arrays["q_offset"], jnp.int32).reshape(-1)
    static = mask, scale, options.get("softcap")
    with jax.enable_x64(wide == "float64"):
        oracle = _results(Rules(*static, wide, None), arrays, cotangent, tangents)
    operands = "tf32" if dtype == "float32" and options.get("precision") is None else dtype
    operands = narrow or operands
    # A row's largest probability is a float8 on the first grid alone.
    grids = FLOAT8_GRIDS if operands == "float8" else (1.0,)
    draws = [
        _results(
            Rules(*static, "float32", operands, grid, another_order=wide == "float32"),
            arrays,
            cotangent,
            tangents,
        )
        for grid in grids
    ]
    return oracle, functools.reduce(functools.partial(_farther, oracle), draws)


def _farther(oracle: tuple[Any, ...], naive: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
    """Each number from the results in which it is farther off."""
    off = lambda x, exact: jnp.abs(x.astype(exact.dtype) - exact)  # noqa: E731
    return tuple(
        jnp.where(off(a, exact) >= off(b, exact), a, b)
        for exact, a, b in zip(oracle, naive, other, strict=True)
    )


# An oracle runs once: choosing the best matmuls for it costs more than it could save.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_gpu_autotune_level": 0})
def _results(
    rules: Rules,
    arrays: dict[str, Any],
    cotangent: jax.Array | None,
    tangents: tuple[jax.Array, ...] | None,
) -> tuple[Any, ...]:
    if not rules.another_order:
        return _computed(rules, arrays, cotangent, tangents)
    mixed, back = _in_another_order(arrays, cotangent, tangents)
    results = _computed(rules, *mixed)
    return tuple(x[..., place] for x, place in zip(results, back, strict=False))


def _computed(
    rules: Rules,
    arrays: dict[str, Any],
    cotangent: jax.Array | None,
    tangents: tuple[jax.Array, ...] | None,
) -> tuple[Any, ...]:
    with jax.default_matmul_precision("highest"):
        if tangents is None:
            return attention(arrays, cotangent, rules)
        wide = lambda x: x.astype(rules.dtype)  # noqa: E731
        names, along = ("q", "k", "v"), jax.tree.map(wide, tangents)

        def of(*some: jax.Array) -> tuple[jax.Array, ...]:
            return attention(arrays | dict(zip(names, some, strict=True)), None, rules)

        primals = tuple(wide(arrays[name]) for name in names)
        (out,), (out_dot,) = jax.jvp(of, primals, along)
        return out, out_dot


def _in_another_order(
    arrays: dict[str, Any],
    cotangent: jax.Array | None,
    tangents: tuple[jax.Array, ...] | None,
) -> tuple[tuple[Any, Any, Any], tuple[np.ndarray, ...]]:
    """The inputs with the columns of every head in another order, and the places of the results'
    columns in that order.
    """
    rng = np.random.default_rng(0)
    of_q, of_v = (rng.permutation(arrays[name].shape[-1]) for name in ("q", "v"))
    orders = {"q": of_q, "k": of_q, "v": of_v}
    mixed = {name: x[..., orders[name]] if name in orders else x for name, x in arrays.items()}
    to_q, to_v = np.argsort(of_q), np.argsort(of_v)
    if tangents is not None:
        q, k, v = tangents
        return (mixed, None, (q[..., of_q], k[..., of_q], v[..., of_v])), (to_v, to_v)
    cotangent = None if cotangent is None else cotangent[..., of_v]
    return (mixed, cotangent, None), (to_v, to_q, to_q, to_v)


def judge(
    got: Sequence[Any],
    oracle: Sequence[Any],
    naive: Sequence[Any],
    *,
    axis: int = 1,
    names: Sequence[str] = ("out", "dq", "dk", "dv"),
) -> str | None:
    """None where every array is within budget, else a line that says which is not, the positions
    and the error.

    `axis`: the positions that bands are made of; 0 makes every index a band of its own (sequences
    of a batch).
    """
    for name, mine, truth, plain in zip(names, got, oracle, naive, strict=False):
        if mine.shape != truth.shape:
            return f"{name}: expected shape {truth.shape}, got {mine.shape}"
        if not truth.size:
            continue
        with jax.enable_x64(truth.dtype == "float64"):
            figures = [np.asarray(x) for x in _figures(mine, truth, plain, axis)]
        size = len(figures[0])
        rows = truth.size // (size * truth.shape[-1])
        band = np.arange(size) if axis == 0 else tolerance.bands(np.full(size, rows))
        complaint = _complaint(figures, float(jnp.finfo(mine.dtype).eps), band)
        if complaint:
            return f"{name}: {complaint}"
    return None


@functools.partial(jax.jit, static_argnums=3)
def _figures(got, oracle, naive, axis):
    """For each position: worst error and mean square error of both, largest value, mean square."""
    others = tuple(n for n in range(oracle.ndim) if n != axis)

    def error(x):
        off = jnp.abs(x.astype(oracle.dtype) - oracle)
        return jnp.max(off, axis=others, initial=0), jnp.mean(off * off, axis=others)

    largest = jnp.max(jnp.abs(oracle), axis=others, initial=0)
    return (*error(got), *error(naive), largest, jnp.mean(oracle * oracle, axis=others))


def _complaint(figures: list[np.ndarray], eps: float, band: np.ndarray) -> str | None:
    worst, square, naive_worst, naive_square, largest, value_square = figures
    naive_rms, rms = (math.sqrt(x.mean()) for x in (naive_square, value_square))
    if naive_rms > VACUOUS * rms + tolerance.NOISE:
        return f"the naive witness is off by {naive_rms:.2e} where values are {rms:.2e}: no test"
    for number in range(band.max() + 1):
        here = np.flatnonzero(band == number)
        rounding = eps * float(largest[here].max()) + tolerance.NOISE
        rules = {
            "error": (worst[here].max(), naive_worst[here].max(), rounding),
            "rms error": (_rms(square[here]), _rms(naive_square[here]), rounding / 8),
        }
        for rule, (mine, naive, rounding) in rules.items():
            budget = tolerance.allowed(naive, rounding)
            if not mine <= budget:  # a NaN is wrong too
                what = f"{rule} {mine:.2e}, budget {budget:.2e}"
                return f"positions {here[0]} to {here[-1]}: {what}, rms of the values {rms:.2e}"
    return None


def _rms(squares: np.ndarray) -> float:
    return math.sqrt(float(squares.mean()))


_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def latent_rows(rows: jax.Array) -> jax.Array:
    """float32[.., 576] of rows of 656 bytes: 512 numbers in float8, the 4 scales of 128 of them
    each, 64 numbers in bfloat16.
    """
    lead, cast = rows.shape[:-1], jax.lax.bitcast_convert_type
    numbers = cast(rows[..., :512], jnp.float8_e4m3fn).astype(jnp.float32)
    scales = cast(rows[..., 512:528].reshape(*lead, 4, 4), jnp.float32)
    rest = cast(rows[..., 528:].reshape(*lead, 64, 2), jnp.bfloat16).astype(jnp.float32)
    v = numbers.reshape(*lead, 4, 128) * scales[..., None]
    return jnp.concatenate([v.reshape(*lead, 512), rest], axis=-1)


def quantized(rows: jax.Array | np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite rows [..., H] as a quantised cache must hold them, in NumPy: numbers and scales.

    XLA would not do: its float32 division is not correctly rounded on a GPU.
    """
    rows = np.asarray(rows).astype(np.float32)
    largest = np.float32(1) / np.float32(_LARGEST[dtype])
    scales = np.maximum(np.abs(rows).max(axis=-1) * largest, np.float32(2.0**-100))
    numbers = rows * (np.float32(1) / scales)[..., None]
    numbers = np.rint(numbers) if dtype == "int8" else numbers
    return numbers.astype(jnp.dtype(dtype)), scales
