"""Whether a result is right, before anybody times it.

The oracle here is attention from its definition, a slab of query rows at a time so that full sizes
fit: in float32 for 16-bit inputs, in float64 for float32, differentiated by jax. It shares `masks`
with the kernels and nothing else. The rule is the project's one tolerance: the error may be twice
that of the same mathematics done naively in the inputs' own dtype (`_rounded`: what is stored
between two matmuls has that dtype), plus rounding. It is applied in bands of positions (0, 1, 2-3,
4-7, ...): under a causal mask the first rows are the largest by far, and their budget would hide
any error in the rest. The worst error and the root mean square of the error are both held to it:
the first finds one bad element, the second a small fault everywhere.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.masks import Mask

VACUOUS = 0.05  # of the values' rms; twice the naive error is what passes
SLAB = 2**26  # score elements that one slab may hold


@dataclasses.dataclass(frozen=True)
class Terms:
    """What one (batch row, kv head) adds to plain attention; None where there is no such term."""

    q_offset: Any
    q_length: Any
    kv_length: Any
    q_ids: Any
    kv_ids: Any
    bias: Any
    mask_array: Any
    sinks: Any


@dataclasses.dataclass(frozen=True)
class Rules:
    """The static half of a call, and the arithmetic to do it in."""

    mask: Mask
    scale: float
    softcap: float | None
    compute: str
    exact: bool  # matmuls at the highest precision
    rounded: bool  # the naive witness: stores what it computes in `compute`


def attention(arrays: dict[str, Any], rules: Rules) -> Any:
    """`flash_attention(**arrays, mask=..., ...)`, [B, T, N, Hv]."""
    q, k, v = (arrays[name].astype(rules.compute) for name in ("q", "k", "v"))
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]

    def one(index):
        row, head = index // kv_heads, index % kv_heads
        heads = lax.dynamic_slice_in_dim(q[row], head * group, group, axis=1)
        terms = _terms(arrays, row, head * group, group)
        return _one_kv_head(heads, k[row, :, head], v[row, :, head], terms, rules)

    if 0 in (q.shape[0], kv_heads):
        return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
    out = lax.map(one, jnp.arange(q.shape[0] * kv_heads, dtype=jnp.int32))
    out = out.reshape(q.shape[0], kv_heads, *out.shape[1:])
    return jnp.moveaxis(out, 1, 2).reshape(*q.shape[:3], v.shape[-1])


def _terms(arrays: dict[str, Any], row: Any, first: Any, group: int) -> Terms:
    def vector(name):
        return None if arrays.get(name) is None else arrays[name][row]

    def block(name):  # [heads of the group or 1, T or 1, S or 1]
        if arrays.get(name) is None:
            return None
        array = arrays[name]
        array = array[row if array.shape[0] > 1 else 0]
        return lax.dynamic_slice_in_dim(array, first, group, 0) if array.shape[0] > 1 else array

    offset = arrays.get("q_offset", 0)
    offset = offset if isinstance(offset, int) or not offset.ndim else offset[row]
    ids = arrays.get("segment_ids") or (None, None)
    q_ids, kv_ids = (None if one is None else one[row] for one in ids)
    sinks = arrays.get("sinks")
    sinks = None if sinks is None else lax.dynamic_slice_in_dim(sinks, first, group, 0)
    lengths = vector("q_lengths"), vector("kv_lengths")
    return Terms(offset, *lengths, q_ids, kv_ids, block("bias"), block("mask_array"), sinks)


def _one_kv_head(q: Any, k: Any, v: Any, terms: Terms, rules: Rules) -> Any:
    """q [T, G, H], k [S, H], v [S, Hv] -> [T, G, Hv]."""
    q_len, group, head_dim = q.shape
    if 0 in (q_len, k.shape[0]):
        return jnp.zeros((q_len, group, v.shape[-1]), v.dtype)
    slab = max(1, min(q_len, SLAB // (group * k.shape[0])))
    slabs = -(-q_len // slab)
    padded = jnp.pad(q, ((0, slabs * slab - q_len), (0, 0), (0, 0)))
    if terms.kv_length is not None:  # what lies past a length may be NaN: it must not meet a 0
        live = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None] < terms.kv_length
        k, v = (jnp.where(live, x, jnp.zeros_like(x)) for x in (k, v))

    @jax.checkpoint
    def rows(numbered):
        number, block = numbered
        here = number * slab + jnp.arange(slab, dtype=jnp.int32)
        return _slab(block, here, k, v, terms, rules)

    blocks = padded.reshape(slabs, slab, group, head_dim)
    out = lax.map(rows, (jnp.arange(slabs, dtype=jnp.int32), blocks))
    return out.reshape(slabs * slab, group, v.shape[-1])[:q_len]


def _slab(q: Any, here: Any, k: Any, v: Any, terms: Terms, rules: Rules) -> Any:
    """The rows `here` of one kv head's queries: the definition, line by line."""
    precision = "highest" if rules.exact else None
    inside = jnp.minimum(here, _rows_of(terms) - 1) if _rows_of(terms) else here
    if terms.q_length is not None:
        q = jnp.where((here < terms.q_length)[:, None, None], q, jnp.zeros_like(q))
    wide = q.dtype if q.dtype.itemsize >= 4 else jnp.float32
    logits = _dot("tgh,sh->gts", q, k, precision)
    if rules.rounded:
        logits = _round_gradient(logits, str(q.dtype))
    logits = logits * jnp.array(rules.scale, wide)
    if rules.softcap is not None:
        cap = jnp.array(rules.softcap, wide)
        logits = cap * jnp.tanh(logits / cap)
    if terms.bias is not None:
        logits = logits + _at_rows(terms.bias, inside).astype(wide)
    keys = jnp.arange(k.shape[0], dtype=jnp.int32)[None]
    q_ids = None if terms.q_ids is None else terms.q_ids[inside][:, None]
    kv_ids = None if terms.kv_ids is None else terms.kv_ids[None]
    seen = rules.mask.allows((here + terms.q_offset)[:, None], keys, terms.kv_length, q_ids, kv_ids)
    if terms.q_length is not None:
        seen = seen & (here < terms.q_length)[:, None]
    seen = jnp.broadcast_to(seen, (here.shape[0], k.shape[0]))[None]
    if terms.mask_array is not None:
        seen = seen & _at_rows(terms.mask_array, inside)
    logits = jnp.where(seen, logits, jnp.array(-jnp.inf, wide))
    if rules.rounded:
        return _rounded(precision, logits, terms.sinks, v)
    return _dot("gts,sh->tgh", _softmax(logits, terms.sinks), v, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_gradient(x: Any, dtype: str) -> Any:
    """x; what comes back through it is rounded to `dtype`, as dS is before it meets q and k."""
    del dtype
    return x


_round_gradient.defvjp(
    lambda x, dtype: (x, None), lambda dtype, _, g: (g.astype(dtype).astype(g.dtype),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(precision: Any, logits: Any, sinks: Any, v: Any) -> Any:
    """softmax(logits) v as anyone does it who stores the weights and the result in v's dtype.

    Its gradient too: delta = dO . out from the stored out, as every flash attention computes it.
    """
    weights = _softmax(logits, sinks).astype(v.dtype)
    return _dot("gts,sh->tgh", weights, v, precision).astype(v.dtype)


def _rounded_forward(precision: Any, logits: Any, sinks: Any, v: Any) -> Any:
    out = _rounded(precision, logits, sinks, v)
    return out, (logits, sinks, v, out)


def _rounded_backward(precision: Any, kept: Any, do: Any) -> Any:
    logits, sinks, v, out = kept
    weights = _softmax(logits, sinks)
    delta = (do.astype(logits.dtype) * out.astype(logits.dtype)).sum(axis=-1)
    dweights = _dot("tgh,sh->gts", do, v, precision)
    dv = _dot("gts,tgh->sh", weights.astype(v.dtype), do, precision).astype(v.dtype)
    return weights * (dweights - delta.T[:, :, None]), None, dv


_rounded.defvjp(_rounded_forward, _rounded_backward)


def _dot(equation: str, a: Any, b: Any, precision: Any) -> Any:
    """In float32 at least: 16-bit operands lose nothing there, and a CPU has no mixed matmul."""
    wide = a.dtype if a.dtype.itemsize >= 4 else jnp.float32
    return jnp.einsum(equation, a.astype(wide), b.astype(wide), precision=precision)


def _rows_of(terms: Terms) -> int:
    """T, where a term has rows of its own to index."""
    sizes = [0 if terms.q_ids is None else terms.q_ids.shape[0]]
    sizes += [x.shape[1] for x in (terms.bias, terms.mask_array) if x is not None]
    return max(sizes)


def _at_rows(block: Any, rows: Any) -> Any:
    return block if block.shape[1] == 1 else block[:, rows]


def _softmax(logits: Any, sinks: Any) -> Any:
    """Over the keys whose logit is not -inf; 0 in a row that has none."""
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    empty = top == -jnp.inf
    if sinks is not None:
        sinks = sinks.astype(logits.dtype)[:, None, None]
        top = jnp.maximum(top, lax.stop_gradient(sinks))
    top = jnp.where(empty, jnp.zeros_like(top), top)
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    return jnp.where(empty, jnp.zeros_like(weights), weights / jnp.where(empty, 1, total))


def expected(arrays: dict[str, Any], options: dict[str, Any], cotangent: Any = None) -> Any:
    """(oracle, naive): each (out,), or (out, dq, dk, dv) where a cotangent is given."""
    dtype = str(arrays["q"].dtype)
    wide = "float64" if dtype in ("float32", "float64") else "float32"
    scale = arrays["q"].shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    mask: Any = arrays.get("mask", options.get("mask"))
    arrays = {name: x for name, x in arrays.items() if name != "mask"}
    mask = mask.filled(**{side: int(bound) for side, bound in mask.arrays.items()})
    static = mask, scale, options.get("softcap")
    exact = options.get("precision") is not None
    with jax.enable_x64(wide == "float64"):
        oracle = _results(Rules(*static, wide, True, False), arrays, cotangent)
    return oracle, _results(Rules(*static, dtype, exact, True), arrays, cotangent)


# An oracle runs once: choosing the best matmuls for it costs more than it could save.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_gpu_autotune_level": 0})
def _results(rules: Rules, arrays: dict[str, Any], cotangent: Any) -> tuple[Any, ...]:
    if cotangent is None:
        return (attention(arrays, rules),)
    names = ("q", "k", "v")
    rest = {name: array for name, array in arrays.items() if name not in names}

    def run(q, k, v):
        return attention({"q": q, "k": k, "v": v, **rest}, rules)

    out, pullback = jax.vjp(run, *(arrays[name].astype(rules.compute) for name in names))
    return (out, *pullback(cotangent.astype(rules.compute)))


def judge(
    got: Sequence[Any], oracle: Sequence[Any], naive: Sequence[Any], *, axis: int = 1
) -> str | None:
    """None where every array is within budget, else a line: which is not, where and by how much.

    `axis`: the positions that bands are made of; 0 makes every index a band of its own (sequences
    of a batch).
    """
    names = ("out", "dq", "dk", "dv")
    for name, mine, truth, plain in zip(names, got, oracle, naive, strict=False):
        if mine.shape != truth.shape:
            return f"{name}: expected shape {truth.shape}, got {mine.shape}"
        if not truth.size:
            continue
        with jax.enable_x64(truth.dtype == "float64"):
            figures = [np.asarray(x) for x in _figures(mine, truth, plain, axis)]
        complaint = _complaint(figures, float(jnp.finfo(mine.dtype).eps), banded=axis != 0)
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


def _complaint(figures: list[np.ndarray], eps: float, *, banded: bool) -> str | None:
    worst, square, naive_worst, naive_square, largest, value_square = figures
    size = worst.shape[0]
    naive_rms, rms = (math.sqrt(x.mean()) for x in (naive_square, value_square))
    # Everybody accumulates in float32 what in the end may cancel to 0.
    noise = 4 * float(np.finfo(np.float32).eps) * max(float(largest.max()), 1.0)
    if naive_rms > VACUOUS * rms + noise:
        return f"the naive witness is off by {naive_rms:.2e} where values are {rms:.2e}: no test"
    edges = [0, *(2**n for n in range(size.bit_length()) if 2**n < size), size]
    for low, high in itertools.pairwise(edges if banded else range(size + 1)):
        here = slice(low, high)
        allowed = eps * float(largest[here].max()) + noise
        rules = {
            "error": (worst[here].max(), naive_worst[here].max(), allowed),
            "rms error": (_rms(square[here]), _rms(naive_square[here]), allowed / 8),
        }
        for rule, (mine, naive, rounding) in rules.items():
            if not mine <= 2 * naive + rounding:  # a NaN is wrong too
                what = f"{rule} {mine:.2e}, budget {2 * naive + rounding:.2e}"
                return f"positions {low} to {high - 1}: {what}, rms of the values {rms:.2e}"
    return None


def _rms(squares: np.ndarray) -> float:
    return math.sqrt(float(squares.mean()))


_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def quantized(rows: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite rows [..., H] as a quantised cache must hold them, in NumPy: numbers and scales.

    XLA would not do: its float32 division is not correctly rounded on a GPU.
    """
    rows = np.asarray(rows).astype(np.float32)
    largest = np.float32(1) / np.float32(_LARGEST[dtype])
    scales = np.maximum(np.abs(rows).max(axis=-1) * largest, np.float32(2.0**-100))
    numbers = rows * (np.float32(1) / scales)[..., None]
    numbers = np.rint(numbers) if dtype == "int8" else numbers
    return numbers.astype(jnp.dtype(dtype)), scales
