"""One small case of each operation through an implementation, beside the oracle: the first look.

It answers "does this work on my machine" in seconds. The proof is the test suite.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn
from pallas_attn._call import dispatch
from pallas_attn.bench import verify
from pallas_attn.masks import CAUSAL

M, CAPACITY, HEADS, KV_HEADS, DIM = 4, 256, 8, 2, 64
LENGTHS = (0, 1, 130, 255)
PAGE = 16


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. An error of None: the operation could not run, and `note` says why."""

    operation: str
    case: str
    implementation: str
    error: float | None
    budget: float
    note: str = ""

    @property
    def held(self) -> bool:
        return self.error is not None and self.error <= self.budget


def rows(implementation: str | None, dtype: str, seed: int) -> Iterator[Row]:
    """The table, a row as soon as it is known.

    Where the choice is free and no kernel takes a problem, the reference runs it, by name: the row
    says so in its note.
    """
    for operation, case, check in _CHECKS:
        row = _row((operation, case), check, implementation, (dtype, seed))
        if row.error is None and implementation is None:
            by_name = _row((operation, case), check, "reference", (dtype, seed))
            row = dataclasses.replace(by_name, note=row.note)
        yield row


def _row(names: tuple[str, str], check: Any, implementation: str | None, how: Any) -> Row:
    try:
        with dispatch.recorded() as chosen:
            error, budget = check(implementation, *how)
    except pallas_attn.UnsupportedError as refused:
        return Row(*names, "", None, 0.0, str(refused))
    return Row(*names, chosen[-1], error, budget)


def _normal(seed: int, name: int, dtype: str, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed + 1000 * name), shape, dtype)


def _compare(
    got: Sequence[Any], arrays: dict[str, Any], options: dict[str, Any], cotangent: Any = None
):
    """The worst ratio of error to budget over the results, as (error, budget) of that result."""
    worst = (0.0, 1.0)
    oracle, naive = verify.expected(arrays, options, cotangent)
    for mine, truth, plain in zip(got, oracle, naive, strict=True):
        truth, mine, plain = (np.asarray(x, np.float64) for x in (truth, mine, plain))
        eps = float(jnp.finfo(arrays["q"].dtype).eps)
        budget = 2 * np.abs(plain - truth).max() + eps * np.abs(truth).max()
        error = np.abs(mine - truth).max()
        if not error / budget <= worst[0] / worst[1]:  # a NaN is the worst of all
            worst = (float(error), float(budget))
    return worst


def _qkv(dtype: str, seed: int) -> dict[str, jax.Array]:
    return {
        "q": _normal(seed, 1, dtype, 2, 200, HEADS, DIM),
        "k": _normal(seed, 2, dtype, 2, 200, KV_HEADS, DIM),
        "v": _normal(seed, 3, dtype, 2, 200, KV_HEADS, DIM),
    }


def _forward(implementation: str | None, dtype: str, seed: int) -> tuple[float, float]:
    arrays = _qkv(dtype, seed)
    run = jax.jit(
        lambda a: pallas_attn.flash_attention(**a, mask=CAUSAL, implementation=implementation)
    )
    return _compare((run(arrays),), arrays, {"mask": CAUSAL})


def _backward(implementation: str | None, dtype: str, seed: int) -> tuple[float, float]:
    arrays = _qkv(dtype, seed)
    cotangent = _normal(seed, 4, dtype, 2, 200, HEADS, DIM)

    def run(q, k, v):
        return pallas_attn.flash_attention(q, k, v, mask=CAUSAL, implementation=implementation)

    out, pullback = jax.vjp(jax.jit(run), *arrays.values())
    return _compare((out, *pullback(cotangent)), arrays, {"mask": CAUSAL}, cotangent)


def _empty_caches(dtype: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
    return {
        "PerSequenceCache": pallas_attn.PerSequenceCache.create([CAPACITY] * M, **sizes),
        "StackedCache": pallas_attn.StackedCache.create(M, CAPACITY, **sizes),
        "PagedCache": pallas_attn.PagedCache.create(
            M, M * CAPACITY // PAGE, PAGE, capacity=CAPACITY, **sizes
        ),
    }


def _filled(kind: str, implementation: str | None, dtype: str, seed: int):
    """A cache that took LENGTHS rows and one more each, and those rows as [M, S, K, H]."""
    k, v = (_normal(seed, n, dtype, M, CAPACITY, KV_HEADS, DIM) for n in (5, 6))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    at = jnp.arange(M, dtype=jnp.int32)

    @jax.jit
    def fill(cache):
        cache = pallas_attn.append_kv(cache, k, v, new_lengths=lengths, implementation="reference")
        return pallas_attn.append_kv(
            cache, k[at, lengths], v[at, lengths], implementation=implementation
        )

    return fill(_empty_caches(dtype)[kind]), k, v


def _append(kind: str) -> Callable[..., tuple[float, float]]:
    def check(implementation: str | None, dtype: str, seed: int) -> tuple[float, float]:
        cache, k, v = _filled(kind, implementation, dtype, seed)
        table = None if cache.page_table is None else np.asarray(cache.page_table)
        pairs = [(np.asarray(cache.lengths), np.array(LENGTHS) + 1)]
        for buffers, rows in ((cache.k, k), (cache.v, v)):
            have = [np.asarray(x) for x in jax.tree.leaves(buffers)]
            pairs += zip(have, _placed(have, np.asarray(rows), table), strict=True)
        return float(sum((a != b).sum() for a, b in pairs)), 0.0

    return check


def _quantized_append(implementation: str | None, dtype: str, seed: int) -> tuple[float, float]:
    """Numbers and scales of a quantised cache, beside NumPy's."""
    rows = _normal(seed, 8, dtype, M, 3, KV_HEADS, DIM)
    cache = pallas_attn.StackedCache.create(M, 3, KV_HEADS, DIM, dtype=jnp.float8_e4m3fn)
    write = jax.jit(pallas_attn.append_kv, static_argnames="implementation")
    got = write(cache, rows, rows, implementation=implementation)
    wanted = [x.swapaxes(1, 2) for x in verify.quantized(rows, "float8_e4m3fn")]
    pairs = zip((got.k, got.k_scale, got.v, got.v_scale), wanted * 2, strict=True)
    return float(sum((np.asarray(a) != b).sum() for a, b in pairs)), 0.0


def _placed(
    buffers: list[np.ndarray], rows: np.ndarray, table: np.ndarray | None
) -> list[np.ndarray]:
    """What the buffers [.., K, rows, H] should hold, row by row in NumPy: the reference appends by
    the scatters that it is to be compared with.
    """
    placed = [np.zeros_like(x) for x in buffers]
    for m, held in enumerate(LENGTHS):
        for i in range(held + 1):
            if table is not None:
                placed[0][table[m, i // PAGE], :, i % PAGE] = rows[m, i]
            else:
                mine = placed[m] if len(placed) > 1 else placed[0][m]
                mine[:, i] = rows[m, i]
    return placed


def _decode(kind: str) -> Callable[..., tuple[float, float]]:
    def check(implementation: str | None, dtype: str, seed: int) -> tuple[float, float]:
        cache, k, v = _filled(kind, "reference", dtype, seed)
        q = _normal(seed, 7, dtype, M, 1, HEADS, DIM)
        run = jax.jit(
            lambda q, cache: pallas_attn.decode_attention(q, cache, implementation=implementation)
        )
        lengths = cache.lengths
        arrays = {"q": q, "k": k, "v": v, "kv_lengths": lengths, "q_offset": lengths - 1}
        return _compare((run(q, cache),), arrays, {"mask": CAUSAL})

    return check


_KINDS = ("PerSequenceCache", "StackedCache", "PagedCache")
_CHECKS: tuple[tuple[str, str, Callable[..., tuple[float, float]]], ...] = (
    ("flash_attention", "causal, T 200, N 8 K 2, H 64", _forward),
    ("its gradients", "dq, dk, dv, random dO", _backward),
    *(("append_kv", f"{kind}, elements that differ", _append(kind)) for kind in _KINDS),
    ("append_kv", "float8_e4m3fn, elements that differ", _quantized_append),
    *(("decode_attention", f"{kind}, lengths 1 to 256", _decode(kind)) for kind in _KINDS),
)
