"""One small case of each operation through an implementation, beside the oracle: the first look.

It answers "does this work on my machine" in seconds. The proof is the test suite.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn
from pallas_attn.cache import KVCache
from pallas_attn.masks import CAUSAL

M, CAPACITY, HEADS, KV_HEADS, DIM = 4, 256, 8, 2, 64
LENGTHS = (0, 1, 130, 255)
PAGE = 16


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. An error of None: the operation could not run, for `note`'s reason."""

    operation: str
    case: str
    implementation: str
    error: float | None
    budget: float
    note: str = ""

    @property
    def held(self) -> bool:
        return self.error is not None and self.error <= self.budget


class How(NamedTuple):
    """The way to run all checks."""

    implementation: str | None
    dtype: str
    seed: int

    def normal(self, name: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(self.seed + 1000 * name), shape, self.dtype)


Figures = tuple[float, float]  # error and budget


def rows(implementation: str | None, dtype: str, seed: int) -> Iterator[Row]:
    """The table, a row as soon as it is known.

    Where the choice is free and no kernel takes a problem, the reference runs it, by name: the row
    says so in its note.
    """
    for operation, case, check in _CHECKS:
        row = _row(operation, case, check, How(implementation, dtype, seed))
        if row.error is None and implementation is None:
            by_name = _row(operation, case, check, How("reference", dtype, seed))
            row = dataclasses.replace(by_name, note=row.note)
        yield row


def _row(operation: str, case: str, check: Callable[[How], Figures], how: How) -> Row:
    try:
        with pallas_attn.chosen() as chosen:
            error, budget = check(how)
    except pallas_attn.UnsupportedError as refused:
        return Row(operation, case, "", None, 0.0, str(refused))
    return Row(operation, case, chosen[-1], error, budget)


def _compare(
    got: Sequence[jax.Array],
    arrays: dict[str, jax.Array],
    cotangent: jax.Array | None = None,
) -> Figures:
    """Error and budget of the result whose ratio of both is the worst. The budget: a rounding, and
    twice the error of the same mathematics with operands rounded to the inputs' dtype.
    """
    worst = (0.0, 1.0)
    dtype = arrays["q"].dtype
    exact = [np.asarray(x, np.float64) for x in arrays.values()]
    do = None if cotangent is None else np.asarray(cotangent, np.float64)
    oracle = _definition(*exact, do=do)
    naive = _definition(*exact, do=do, rounded=functools.partial(_rounded, dtype=dtype))
    for result, truth, plain in zip(got, oracle, naive, strict=True):
        eps = float(jnp.finfo(dtype).eps)
        budget = 2 * np.abs(plain - truth).max() + eps * np.abs(truth).max()
        error = np.abs(np.asarray(result, np.float64) - truth).max()
        if not error / budget <= worst[0] / worst[1]:  # a NaN is the worst of all
            worst = (float(error), float(budget))
    return worst


def _definition(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: np.ndarray | None = None,
    offset: np.ndarray | None = None,
    *,
    do: np.ndarray | None = None,
    rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> tuple[np.ndarray, ...]:
    """Causal attention of [B, rows, heads, H] in float64: (out,), and with `do` also dq, dk, dv.
    `rounded`: what an operand of a matmul is rounded to.
    """
    batch, rows, heads, dim = q.shape
    group = heads // k.shape[2]
    q, k, v = rounded(q * dim**-0.5), np.repeat(k, group, 2), np.repeat(v, group, 2)
    at = np.arange(rows)[None, :, None] + (0 if offset is None else offset[:, None, None])
    keys = np.arange(k.shape[1])[None, None]
    hidden = keys > at if lengths is None else (keys > at) | (keys >= lengths[:, None, None])
    scores = np.einsum("bthd,bshd->bhts", q, rounded(k))
    scores = np.where(hidden[:, None], -np.inf, scores)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    out = np.einsum("bhts,bshd->bthd", rounded(probs), rounded(v))
    if do is None:
        return (out,)
    delta = np.einsum("bthd,bthd->bht", do, rounded(out))[..., None]
    ds = rounded(probs * (np.einsum("bthd,bshd->bhts", rounded(do), rounded(v)) - delta))
    dq = np.einsum("bhts,bshd->bthd", ds, rounded(k)) * dim**-0.5
    dk = np.einsum("bhts,bthd->bshd", ds, q)
    dv = np.einsum("bhts,bthd->bshd", rounded(probs), rounded(do))
    of_groups = (batch, k.shape[1], heads // group, group, -1)
    dk, dv = (x.reshape(of_groups).sum(axis=3) for x in (dk, dv))
    return out, dq, dk, dv


def _rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x as a matmul of this dtype reads it: float32 as TF32, which has 11 bits."""
    if dtype != jnp.float32:
        return x.astype(dtype).astype(np.float64)
    numbers, exponents = np.frexp(x)
    return np.ldexp(np.rint(numbers * 2**11) / 2**11, exponents)


def _attention(how: How, gradients: bool) -> Figures:
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    arrays = {x: how.normal(n, 2, 200, heads[x], DIM) for n, x in enumerate(heads, 1)}

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        implementation = how.implementation
        return pallas_attn.flash_attention(q, k, v, mask=CAUSAL, implementation=implementation)

    if not gradients:
        return _compare((run(**arrays),), arrays)
    cotangent = how.normal(4, 2, 200, HEADS, DIM)
    out, pullback = jax.vjp(run, *arrays.values())
    return _compare((out, *pullback(cotangent)), arrays, cotangent)


def _empty_cache(kind: str, dtype: str) -> KVCache:
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
    if kind == "PerSequenceCache":
        return pallas_attn.PerSequenceCache.create([CAPACITY] * M, **sizes)
    if kind == "StackedCache":
        return pallas_attn.StackedCache.create(M, CAPACITY, **sizes)
    pages = M * CAPACITY // PAGE
    return pallas_attn.PagedCache.create(M, pages, PAGE, capacity=CAPACITY, **sizes)


def _filled(
    how: How, kind: str, implementation: str | None
) -> tuple[KVCache, jax.Array, jax.Array]:
    """A cache that took LENGTHS rows and one more each, and those rows as [M, S, K, H]."""
    k, v = (how.normal(n, M, CAPACITY, KV_HEADS, DIM) for n in (5, 6))
    lengths, at = jnp.asarray(LENGTHS, jnp.int32), jnp.arange(M, dtype=jnp.int32)

    @jax.jit
    def fill(cache: KVCache) -> KVCache:
        cache = pallas_attn.append_kv(cache, k, v, new_lengths=lengths, implementation="reference")
        new = k[at, lengths], v[at, lengths]
        return pallas_attn.append_kv(cache, *new, implementation=implementation)

    return fill(_empty_cache(kind, how.dtype)), k, v


def _append(how: How, kind: str) -> Figures:
    cache, k, v = _filled(how, kind, how.implementation)
    table = None if cache.page_table is None else np.asarray(cache.page_table)
    pairs = [(np.asarray(cache.lengths), np.array(LENGTHS) + 1)]
    for buffers, new in ((cache.k, k), (cache.v, v)):
        held = [np.asarray(x) for x in jax.tree.leaves(buffers)]
        pairs += zip(held, _placed(held, np.asarray(new), table), strict=True)
    return float(sum((a != b).sum() for a, b in pairs)), 0.0


def _placed(
    buffers: list[np.ndarray], rows: np.ndarray, table: np.ndarray | None
) -> list[np.ndarray]:
    """The buffers [.., K, rows, H] as they should be, row by row in NumPy: the reference appends by
    the scatters that it is to be compared with.
    """
    placed = [np.zeros_like(x) for x in buffers]
    for m, held in enumerate(LENGTHS):
        for i in range(held + 1):
            if table is not None:
                placed[0][table[m, i // PAGE], :, i % PAGE] = rows[m, i]
            else:
                own = placed[m] if len(placed) > 1 else placed[0][m]
                own[:, i] = rows[m, i]
    return placed


def _quantized_append(how: How) -> Figures:
    """Numbers and scales of a quantised cache, beside NumPy's."""
    rows = how.normal(8, M, 3, KV_HEADS, DIM)
    cache = pallas_attn.StackedCache.create(M, 3, KV_HEADS, DIM, dtype=jnp.float8_e4m3fn)
    write = jax.jit(pallas_attn.append_kv, static_argnames="implementation")
    got = write(cache, rows, rows, implementation=how.implementation)
    exact = np.asarray(rows).astype(np.float32)
    largest = np.float32(1) / np.float32(jnp.finfo(jnp.float8_e4m3fn).max)
    scales = np.abs(exact).max(axis=-1) * largest
    numbers = (exact * (np.float32(1) / scales)[..., None]).astype(jnp.float8_e4m3fn)
    wanted = [x.swapaxes(1, 2) for x in (numbers, scales)]
    pairs = zip((got.k, got.k_scale, got.v, got.v_scale), wanted * 2, strict=True)
    return float(sum((np.asarray(a) != b).sum() for a, b in pairs)), 0.0


def _decode(how: How, kind: str) -> Figures:
    cache, k, v = _filled(how, kind, "reference")
    q, lengths = how.normal(7, M, 1, HEADS, DIM), cache.lengths
    run = jax.jit(pallas_attn.decode_attention, static_argnames="implementation")
    arrays = {"q": q, "k": k, "v": v, "lengths": lengths, "offset": lengths - 1}
    return _compare((run(q, cache, implementation=how.implementation),), arrays)


_KINDS = ("PerSequenceCache", "StackedCache", "PagedCache")
_partial = functools.partial
_CHECKS: tuple[tuple[str, str, Callable[[How], Figures]], ...] = (
    ("flash_attention", "causal, T 200, N 8 K 2, H 64", _partial(_attention, gradients=False)),
    ("its gradients", "dq, dk, dv, random dO", _partial(_attention, gradients=True)),
    *(("append_kv", f"{x}, elements that differ", _partial(_append, kind=x)) for x in _KINDS),
    ("append_kv", "float8_e4m3fn, elements that differ", _quantized_append),
    *(("decode_attention", f"{x}, lengths 1 to 256", _partial(_decode, kind=x)) for x in _KINDS),
)
