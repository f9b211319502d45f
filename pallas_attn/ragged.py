"""Attention and append over pages with K and V interleaved by head, as JAX's TPU kernel has them:
`jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

Pages are `[pages, page_size, 2 * K, H]`: head 2k is K of kv head k, head 2k + 1 its V. The rest of
the package views the same memory as a cache of kind "interleaved", `[pages, page_size, K, 2 * H]`:
a row of a head is its row of K followed by its row of V.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._cache.attend import attend
from pallas_attn._cache.bind import LEAST_BOUND
from pallas_attn._cache.write import rows_into
from pallas_attn._call import checks, device
from pallas_attn._call.bind import precision, query_heads
from pallas_attn._call.problem import (
    QUANTIZED,
    AppendInputs,
    DecodeInputs,
    DecodeProblem,
    owner_of_rows,
)
from pallas_attn._mesh import sharding
from pallas_attn.errors import described
from pallas_attn.masks import CAUSAL, Mask
from pallas_attn.masks import sliding_window as window_of

Array = jax.Array

LEAST_MASK_VALUE = -1e4  # largest mask_value that hides keys


def ragged_paged_attention(  # noqa: PLR0913
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Causal attention of packed query rows to pages with K and V interleaved: prompts, chunks of
    prompts and single tokens in one call. The arguments are those of JAX's TPU kernel of this name,
    and `sinks` and `implementation`. The pages are read in place.

    Args:
      q: `[tokens, N, H]`, the newest rows of all sequences, one sequence behind the other.
      kv_pages: `[pages, page_size, 2 * K, H]`, K and V interleaved by head, the rows of q included,
        in q's dtype or in float8_e4m3fn, float8_e5m2 or int8.
      kv_lens: int32[M], rows that each sequence has. The last query row of a sequence stands at
        position kv_len - 1. A length beyond the page table gives NaN.
      page_indices: int32[M, pages of a sequence], the pages of each sequence in order. Entries past
        the length are not read. A page within the length that the pool does not have gives NaN.
      cu_q_lens: int32[M + 1], sequence i owns rows cu_q_lens[i] to cu_q_lens[i + 1] of q, none
        where they are equal.
      num_seqs: int32[1], the number of sequences; entries of the other arrays for further sequences
        are not used.
      sm_scale: the factor of q @ K^T. It is 1 by default, as in JAX's kernel, not H**-0.5.
      sliding_window: the number of keys that a query sees, its own included; None: all up to it.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
      mask_value: None or at most -10000; accepted for compatibility. Hidden keys have a weight of
        0 whatever it is.
      k_scale, v_scale: Python floats that multiply all of K and all of V, for pages of narrow
        dtypes.
      num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: tuning of the TPU kernel;
        accepted, not used.
      sinks: float[N], one logit a head that takes part in the denominator of the softmax only.
      implementation: as in `flash_attention`.

    Returns:
      `[tokens, N, H]` in q's dtype. Rows that no sequence owns, and those that see no key, give 0.

    Example::

        >>> pages = jnp.ones((4, 16, 2 * 2, 64), jnp.bfloat16)
        >>> q = jnp.ones((3, 8, 64), jnp.bfloat16)
        >>> lengths, table = jnp.array([20, 1]), jnp.array([[2, 0], [1, 3]])
        >>> starts, sequences = jnp.array([0, 2, 3]), jnp.array([2])
        >>> pa.ragged_paged_attention(q, pages, lengths, table, starts, sequences).shape
        (3, 8, 64)
    """
    del num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    pages = _pages(kv_pages)
    rows = _rows("q", q, pages)
    table = _table(kv_lens, page_indices, cu_q_lens, num_seqs, rows.shape[0])
    _check_mask_value(mask_value)
    scales = (("k_scale", k_scale), ("v_scale", v_scale))
    factors = [1.0 if x is None else checks.scale_of_numbers(name, x) for name, x in scales]
    scale = checks.static_float("sm_scale", sm_scale, "multiply q by it instead")
    narrow = pages.array.dtype.name in QUANTIZED and pages.array.dtype != rows.dtype
    problem = DecodeProblem(
        gpu=device.gpu_generation(),
        dtype=str(rows.dtype),
        q_len=max(rows.shape[0], LEAST_BOUND),
        q_heads=rows.shape[1],
        mask=CAUSAL if sliding_window is None else _window(sliding_window),
        scale=scale * factors[0],
        softcap=None if soft_cap is None else _soft_cap(soft_cap),
        sinks=sinks is not None,
        precision=precision(None, rows),
        quantized=narrow,
        unscaled=narrow,
        tokens=rows.shape[0],
        cache_dtype=str(pages.array.dtype),
        head_dim=pages.head_dim,
        v_head_dim=pages.head_dim,
        kv_heads=pages.array.shape[-2],
        **table.facts(pages),
    )
    inputs = DecodeInputs(
        rows,
        pages.array,
        None,
        table.lengths,
        table.pages,
        layer=None,
        sinks=checks.sink_logits(sinks, rows),
        starts=table.starts,
    )
    if not problem.sequences:
        return jnp.zeros_like(rows)
    out, _ = attend(problem, inputs, implementation)
    if factors[1] != 1.0:
        out = (out.astype(problem.lse_dtype) * factors[1]).astype(out.dtype)
    return out


def update_kv_pages(  # noqa: PLR0913
    kv_pages: Array,
    k: Array,
    v: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: str | None = None,
) -> Array:
    """Writes the newest rows of all sequences into pages with K and V interleaved, before
    `ragged_paged_attention` with the same arguments: one launch, in place where the pages are
    donated or are the carry of a loop.

    Args:
      kv_pages: as in `ragged_paged_attention`.
      k, v: `[tokens, K, H]`, the new rows, packed as the rows of q will be.
      kv_lens, page_indices, cu_q_lens, num_seqs: as in `ragged_paged_attention`; lengths count the
        new rows.
      k_scale, v_scale: divisors of the rows before they are stored. In pages of narrow dtypes,
        larger numbers than the dtype has become its largest.
      implementation: "sm80", "reference" or None.

    Returns:
      The pages with the new rows. Rows without a place are dropped: those that no sequence owns,
      before position 0, past the page table, and of pages that the pool does not have.

    Example::

        >>> pages, rows = jnp.zeros((4, 16, 2 * 2, 64)), jnp.ones((3, 2, 64))
        >>> lengths, table = jnp.array([17, 1]), jnp.array([[2, 0], [1, 3]])
        >>> starts, sequences = jnp.array([0, 2, 3]), jnp.array([2])
        >>> pages = pa.update_kv_pages(pages, rows, rows, lengths, table, starts, sequences)
        >>> pages[:, 0, 0, 0], pages[2, 15, 0, 0]
        (Array([1., 1., 0., 0.], dtype=float32), Array(1., dtype=float32))
    """
    pages = _pages(kv_pages)
    shape = kv_pages.shape
    new = [_new_rows(name, x, pages) for name, x in (("k", k), ("v", v))]
    if new[0].shape[0] != new[1].shape[0]:
        raise ValueError(f"v: expected {new[0].shape[0]} rows as in k, got {new[1].shape[0]}")
    table = _table(kv_lens, page_indices, cu_q_lens, num_seqs, new[0].shape[0])
    for n, (name, factor) in enumerate((("k_scale", k_scale), ("v_scale", v_scale))):
        factor = 1.0 if factor is None else checks.scale_of_numbers(name, factor)
        new[n] = _stored(new[n], factor, pages.array.dtype)
    if 0 in (new[0].shape[0], table.pages.shape[0]):
        return sharding.placed_like(sharding.reshaped(pages.array, shape), kv_pages)
    owners = owner_of_rows(table.starts, new[0].shape[0])
    last = table.pages.shape[0] - 1
    owned, owners = (owners >= 0) & (owners <= last), jnp.clip(owners, 0, last)
    number = jnp.arange(owners.size, dtype=jnp.int32) - table.starts[owners + 1]
    position = jnp.where(owned, table.lengths[owners] + number, -1)
    inputs = AppendInputs(
        pages.array,
        None,
        new[0],
        new[1],
        None,
        None,
        table.pages,
        None,
        owners=owners,
        positions=position,
    )
    written = rows_into(inputs, "interleaved", implementation).k_cache
    return sharding.placed_like(sharding.reshaped(written, shape), kv_pages)


class _Pages(NamedTuple):
    """Pages as a cache of kind "interleaved"."""

    array: Array  # [pages, page_size, K, 2 * H]
    head_dim: int


class _Table(NamedTuple):
    """The sequences of a call."""

    lengths: Array  # int32[M]
    pages: Array  # int32[M, pages of a sequence]
    starts: Array  # int32[M + 1]: first rows in q; sequences from num_seqs on have none

    def facts(self, pages: _Pages) -> dict[str, Any]:
        """The fields of a problem that describe these sequences and pages."""
        sequences, entries = self.pages.shape
        count, size = pages.array.shape[:2]
        capacities = (entries * size,) * sequences
        sizes = {"page_size": size, "pages": count, "capacities": capacities}
        return {"kind": "interleaved", "sequences": sequences, **sizes}


def _pages(kv_pages: Array) -> _Pages:
    x = checks.array("kv_pages", kv_pages)
    if x.ndim != 4 or x.shape[2] % 2 or not x.shape[2]:
        raise ValueError(
            "kv_pages: expected [pages, page_size, 2 * K, H], K and V interleaved by head, got "
            f"{list(x.shape)}"
        )
    checks.cache_dtype("kv_pages", x.dtype)
    pages, size, heads, dim = x.shape
    return _Pages(sharding.reshaped(x, (pages, size, heads // 2, 2 * dim)), dim)


def _rows(name: str, value: Array, pages: _Pages) -> Array:
    """Rows [tokens, N, H], checked against the pages."""
    x, dim, heads = checks.array(name, value), pages.head_dim, pages.array.shape[-2]
    if x.ndim != 3 or x.shape[-1] != dim or x.shape[1] % heads or not x.shape[1]:
        raise ValueError(
            f"{name}: expected packed rows [tokens, N, H] = [tokens, a multiple of {heads}, {dim}] "
            f"for these pages, got {list(x.shape)}"
        )
    query_heads(x, heads)
    return x


def _new_rows(name: str, value: Array, pages: _Pages) -> Array:
    """New rows [tokens, K, H] of a float dtype, checked against the pages."""
    x, wanted = checks.array(name, value), (pages.array.shape[-2], pages.head_dim)
    if x.ndim != 3 or x.shape[1:] != wanted or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected packed rows of a float dtype, [tokens, K, H] = [tokens, "
            f"{wanted[0]}, {wanted[1]}], for these pages, got {x.dtype}{list(x.shape)}"
        )
    return x


def _stored(rows: Array, factor: float, dtype: np.dtype) -> Array:
    """rows / factor, clipped and rounded to the dtype of pages. Multiplies by the reciprocal: XLA
    makes that of a division by a constant, but only in jitted functions.
    """
    if factor == 1.0 and rows.dtype == dtype:
        return rows
    wide = rows.astype(jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype) * (1.0 / factor)
    if dtype.name in QUANTIZED:
        most = float((jnp.iinfo if dtype == jnp.int8 else jnp.finfo)(dtype).max)
        wide = jnp.clip(wide, -most, most)
        wide = jnp.round(wide) if dtype == jnp.int8 else wide
    return wide.astype(dtype)


def _table(
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    tokens: int,
) -> _Table:
    wanted = "int32[M, pages of a sequence] (the pages of each sequence in order)"
    pages = checks.integers("page_indices", page_indices, wanted, (None, None))
    sequences = pages.shape[0]
    wanted = f"int32[{sequences}] (rows of each sequence)"
    lengths = checks.integers("kv_lens", kv_lens, wanted, (sequences,))
    wanted = f"int32[{sequences + 1}] (where each sequence's rows of q start, and the last end)"
    starts = checks.integers("cu_q_lens", cu_q_lens, wanted, (sequences + 1,))
    count = checks.integers("num_seqs", num_seqs, "int32[1] (how many sequences there are)", (1,))
    lengths, pages, starts, count = sharding.whole((lengths, pages, starts, count))
    count = jnp.clip(count, 0, sequences)
    behind = jnp.arange(sequences + 1, dtype=jnp.int32) > count
    starts = jnp.where(behind, starts[count], starts)
    return _Table(lengths, pages, checks.row_starts("cu_q_lens", starts, tokens, sequences))


def _window(size: int) -> Mask:
    static = checks.static_int(size)
    if static is None or static < 1:
        raise ValueError(
            f"sliding_window: expected an int of at least 1 or None, got {described(size)}"
        )
    return window_of(static)


def _soft_cap(value: float) -> float:
    cap = checks.static_float("soft_cap", value, "soft_cap is part of the compiled kernel")
    if not abs(cap) >= checks.SMALLEST:
        raise ValueError(f"soft_cap: expected a float other than 0 or None, got {cap:g}")
    return abs(cap)  # tanh is odd


def _check_mask_value(value: float | None) -> None:
    if value is None or (isinstance(value, float) and value == -np.inf):
        return
    if checks.static_float("mask_value", value, "pass None") <= LEAST_MASK_VALUE:
        return
    raise ValueError(
        f"mask_value: expected None or a float of at most {LEAST_MASK_VALUE:g}, since hidden keys "
        f"have a weight of 0, got {described(value)}"
    )
