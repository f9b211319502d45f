"""Small cases of attention, append and decode beside a definition in float64: the first look.

It answers "does this work on my machine" in seconds; `gpu_check` runs each of them in a process of
its own. The proof is the test suite.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn
from pallas_attn.cache import KVCache
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window

M, CAPACITY, HEADS, KV_HEADS, DIM = 4, 256, 8, 2, 64
LENGTHS = (0, 1, 130, 255)
PAGE = 16
LATENT, VALUES = 576, 512  # columns of a latent row, and of its values


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


class Check(NamedTuple):
    """One case of an operation."""

    operation: str
    case: str
    run: Callable[[How], Figures]


def row_of(check: Check, how: How) -> Row:
    """The row of one check."""
    try:
        with pallas_attn.chosen() as chosen:
            error, budget = check.run(how)
    except pallas_attn.UnsupportedError as refused:
        return Row(check.operation, check.case, "", None, 0.0, str(refused))
    return Row(check.operation, check.case, chosen[-1], error, budget)


def _compare(
    got: Sequence[jax.Array],
    arrays: dict[str, jax.Array],
    cotangent: jax.Array | None = None,
    **rules: Any,
) -> Figures:
    """Error and budget of the result whose ratio of both is the worst. The budget: a rounding, and
    twice the error of the same mathematics with operands rounded to the inputs' dtype.
    """
    worst = (0.0, 1.0)
    dtype = arrays["q"].dtype
    exact = [np.asarray(x, np.float64) for x in arrays.values()]
    do = None if cotangent is None else np.asarray(cotangent, np.float64)
    oracle = definition(*exact, do=do, **rules)
    in_dtype = functools.partial(rounded, dtype=dtype)
    naive = definition(*exact, do=do, rounded=in_dtype, **rules)
    for result, truth, plain in zip(got, oracle, naive, strict=True):
        eps = float(jnp.finfo(dtype).eps)
        budget = 2 * np.abs(plain - truth).max() + eps * np.abs(truth).max()
        error = np.abs(np.asarray(result, np.float64) - truth).max()
        if not error / budget <= worst[0] / worst[1]:  # a NaN is the worst of all
            worst = (float(error), float(budget))
    return worst


def definition(  # noqa: PLR0913
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: np.ndarray | None = None,
    offset: np.ndarray | None = None,
    *,
    do: np.ndarray | None = None,
    rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    mask: Mask = CAUSAL,
    bias: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, ...]:
    """Attention of [B, rows, heads, H] in float64: (out,), and with `do` also dq, dk, dv.
    `rounded`: what an operand of a matmul is rounded to.
    """
    batch, rows, heads, dim = q.shape
    group = heads // k.shape[2]
    q, k, v = rounded(q * dim**-0.5), np.repeat(k, group, 2), np.repeat(v, group, 2)
    at = np.arange(rows)[None, :, None] + (0 if offset is None else offset[:, None, None])
    keys = np.arange(k.shape[1])[None, None]
    hidden = np.zeros((batch, rows, k.shape[1]), bool)
    if mask.right is not None:
        hidden |= keys > at + mask.right
    if mask.left is not None:
        hidden |= keys < at - mask.left
    if lengths is not None:
        hidden |= keys >= lengths[:, None, None]
    scores = np.einsum("bthd,bshd->bhts", q, rounded(k)) + bias
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


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """x as a matmul of this dtype reads it: float32 as TF32, which has 11 bits."""
    if dtype != jnp.float32:
        return x.astype(dtype).astype(np.float64)
    numbers, exponents = np.frexp(x)
    return np.ldexp(np.rint(numbers * 2**11) / 2**11, exponents)


def _attention(
    how: How,
    gradients: bool,
    rows: int = 200,
    dim: int = DIM,
    mask: Mask = CAUSAL,
    bias: bool = False,
) -> Figures:
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    arrays = {
        x: how.normal(n, 2, rows, heads, dim) for n, (x, heads) in enumerate(shapes.items(), 1)
    }
    options: dict[str, Any] = {"mask": mask, "implementation": how.implementation}
    rules: dict[str, Any] = {"mask": mask}
    if bias:
        options["bias"] = how.normal(9, 1, HEADS, rows, rows)
        rules["bias"] = np.asarray(options["bias"], np.float64)
    run = jax.jit(functools.partial(pallas_attn.flash_attention, **options))
    if not gradients:
        return _compare((run(*arrays.values()),), arrays, **rules)
    cotangent = how.normal(4, 2, rows, HEADS, dim)
    out, pullback = jax.vjp(run, *arrays.values())
    return _compare((out, *pullback(cotangent)), arrays, cotangent, **rules)


def _padded(how: How) -> Figures:
    """Lengths at a tile of 128 keys, and one key below."""
    lengths = jnp.array([1, 127, 128, 300], jnp.int32)
    arrays = {"q": how.normal(1, 4, 300, HEADS, DIM)}
    arrays |= {x: how.normal(n, 4, 300, KV_HEADS, DIM) for n, x in enumerate("kv", 2)}
    options: dict[str, Any] = {"kv_lengths": lengths, "implementation": how.implementation}
    got = jax.jit(functools.partial(pallas_attn.flash_attention, **options))(*arrays.values())
    return _compare((got,), arrays | {"lengths": lengths}, mask=FULL)


def _tangents(how: How) -> Figures:
    """A tangent beside a central difference of the definition in float64."""
    arrays = {x: how.normal(n, 1, 150, HEADS, DIM) for n, x in enumerate("qkv", 1)}
    tangents = tuple(how.normal(n, 1, 150, HEADS, DIM) for n in (11, 12, 13))
    options: dict[str, Any] = {"mask": CAUSAL, "implementation": how.implementation}
    run = jax.jit(functools.partial(pallas_attn.flash_attention, **options))
    got = jax.jvp(run, tuple(arrays.values()), tangents)[1]
    step, eps = 1e-4, float(jnp.finfo(how.dtype).eps)
    pairs = [(np.asarray(x, np.float64), step * np.asarray(dx, np.float64))
             for x, dx in zip(arrays.values(), tangents, strict=True)]  # fmt: skip
    (above,), (below,) = (definition(*(x + sign * dx for x, dx in pairs)) for sign in (1, -1))
    truth = (above - below) / (2 * step)
    # The budget is one rounding of the largest tangent, as operands are rounded.
    return float(np.abs(np.asarray(got, np.float64) - truth).max()), eps * np.abs(truth).max()


def _empty_cache(kind: str, dtype: str) -> KVCache:
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
    if kind == "PerSequenceCache":
        return pallas_attn.PerSequenceCache.create([CAPACITY] * M, **sizes)
    if kind == "StackedCache":
        return pallas_attn.StackedCache.create(M, CAPACITY, **sizes)
    pages = M * CAPACITY // PAGE
    return pallas_attn.PagedCache.create(M, pages, PAGE, capacity=CAPACITY, **sizes)


def _filled(
    how: How,
    kind: str,
    implementation: str | None,
    held: Sequence[int] = LENGTHS,
    dtype: str | None = None,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """A cache that took `held` rows and one more each, and those rows as [M, S, K, H]."""
    k, v = (how.normal(n, M, CAPACITY, KV_HEADS, DIM) for n in (5, 6))
    lengths, at = jnp.asarray(held, jnp.int32), jnp.arange(M, dtype=jnp.int32)

    @jax.jit
    def fill(cache: KVCache) -> KVCache:
        cache = pallas_attn.append_kv(cache, k, v, new_lengths=lengths, implementation="reference")
        new = k[at, lengths], v[at, lengths]
        return pallas_attn.append_kv(cache, *new, implementation=implementation)

    return fill(_empty_cache(kind, dtype or how.dtype)), k, v


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
    """Numbers and scales of a quantised cache, beside NumPy's. On a GPU the buffers are longer than
    asked: what follows stays 0.
    """
    rows = how.normal(8, M, 3, KV_HEADS, DIM)
    cache = pallas_attn.StackedCache.create(M, 3, KV_HEADS, DIM, dtype=jnp.float8_e4m3fn)
    write = jax.jit(pallas_attn.append_kv, static_argnames="implementation")
    got = write(cache, rows, rows, implementation=how.implementation)
    exact = np.asarray(rows).astype(np.float32)
    largest = np.float32(1) / np.float32(jnp.finfo(jnp.float8_e4m3fn).max)
    scales = np.abs(exact).max(axis=-1) * largest
    numbers = (exact * (np.float32(1) / scales)[..., None]).astype(jnp.float8_e4m3fn)
    wanted = [x.swapaxes(1, 2) for x in (numbers, scales)]
    wrong = 0
    for held, new in zip((got.k, got.k_scale, got.v, got.v_scale), wanted * 2, strict=True):
        placed = np.zeros_like(held)
        placed[:, :, : rows.shape[1]] = new
        wrong += (np.asarray(held) != placed).sum()
    return float(wrong), 0.0


def _decode(how: How, kind: str, new: int = 1) -> Figures:
    held = tuple(max(length, new - 1) for length in LENGTHS)
    cache, k, v = _filled(how, kind, "reference", held)
    return _newest(how, how.normal(7, M, new, HEADS, DIM), cache, k, v)


def _newest(how: How, q: jax.Array, cache: KVCache, k: jax.Array, v: jax.Array) -> Figures:
    """Attention of the newest rows to a cache that holds k and v, beside the definition."""
    run = jax.jit(pallas_attn.decode_attention, static_argnames="implementation")
    arrays = {"q": q, "k": k, "v": v, "lengths": cache.lengths}
    arrays["offset"] = cache.lengths - q.shape[1]
    return _compare((run(q, cache, implementation=how.implementation),), arrays)


def _decode_of_bytes(how: How) -> Figures:
    cache, _, _ = _filled(how, "StackedCache", "reference", dtype="int8")
    held = ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    k, v = ((x.astype(jnp.float32) * scale[..., None]).swapaxes(1, 2) for x, scale in held)
    return _newest(how, how.normal(7, M, 1, HEADS, DIM), cache, k, v)


def _decode_of_latents(how: How) -> Figures:
    """MLA: one kv head, whose values are columns of its keys."""
    rows = how.normal(5, M, CAPACITY, 1, LATENT)
    sizes: dict[str, Any] = {"v_head_dim": VALUES, "shared_kv": True, "dtype": how.dtype}
    cache = pallas_attn.StackedCache.create(M, CAPACITY, 1, LATENT, **sizes)
    lengths = jnp.asarray(LENGTHS, jnp.int32) + 1
    cache = jax.jit(pallas_attn.append_kv)(cache, rows, new_lengths=lengths)
    q = how.normal(7, M, 1, 16, LATENT)
    return _newest(how, q, cache, rows, rows[..., :VALUES])


_KINDS = ("PerSequenceCache", "StackedCache", "PagedCache")
_FORWARD, _BACKWARD, _DECODE = "flash_attention", "gradients", "decode_attention"
_partial = functools.partial
_forward, _backward = (_partial(_attention, gradients=x) for x in (False, True))
CHECKS = (
    Check(_FORWARD, "causal, T 200, N 8 K 2, H 64", _forward),
    Check(_FORWARD, "full, T 129, H 128", _partial(_forward, rows=129, dim=128, mask=FULL)),
    Check(_FORWARD, "a window of 50, T 333, H 96",
          _partial(_forward, rows=333, dim=96, mask=sliding_window(50))),
    Check(_FORWARD, "causal, T 200, H 64, a bias", _partial(_forward, bias=True)),
    Check(_FORWARD, "lengths 1, 127, 128, 300", _padded),
    Check(_FORWARD, "causal, T 130, H 256", _partial(_forward, rows=130, dim=256)),
    Check(_BACKWARD, "dq, dk, dv, random dO", _backward),
    Check(_BACKWARD, "full, T 129, H 128", _partial(_backward, rows=129, dim=128, mask=FULL)),
    Check(_BACKWARD, "a window of 50, T 333, H 96",
          _partial(_backward, rows=333, dim=96, mask=sliding_window(50))),
    Check("tangents", "causal, T 150, H 64", _tangents),
    *(Check("append_kv", f"{x}, elements that differ", _partial(_append, kind=x)) for x in _KINDS),
    Check("append_kv", "float8_e4m3fn, elements that differ", _quantized_append),
    *(Check(_DECODE, f"{x}, lengths 1 to 256", _partial(_decode, kind=x)) for x in _KINDS),
    Check(_DECODE, "int8 rows, lengths 1 to 256", _decode_of_bytes),
    Check(_DECODE, "latent rows of 576, lengths 1 to 256", _decode_of_latents),
    *(Check(_DECODE, f"{x}, 70 new rows", _partial(_decode, kind=x, new=70)) for x in _KINDS[1:]),
)  # fmt: skip
