"""Attention of many new rows to a cache by a forward kernel, over rows that XLA makes contiguous.

Decode's kernels take any number of rows, but read all keys again for every 64 of them. Here XLA
first copies the rows of one layer to contiguous arrays in q's dtype, temporaries of the call, and
widens quantised rows on the way. The forward then reads them as any K and V: query rows stand at
the end of their sequence, and lengths are those of keys.

All rows are copied, past lengths too, which pays where there are enough queries
(`selection.gathered`). Dispatch makes the kernels, one of each forward, by `over`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem, DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.decode import limits
from pallas_attn.kernels.decode import lost as lost_rows
from pallas_attn.kernels.lang.types import KernelConfig
from pallas_attn.kernels.prefill.plan import over_contiguous_keys

Array = jax.Array
Cache = Array | tuple[Array, ...]


def over(base: Kernel) -> Kernel:
    """The kernel whose copies `base` reads, a forward."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        """The tuning of the forward."""

        forward: KernelConfig = base.config()

        @classmethod
        def default(cls, problem: DecodeProblem) -> "Config":
            return cls(base.config.default(contiguous(problem)))

    def smem_bytes(problem: DecodeProblem, config: Config) -> int:
        return base.smem_bytes(contiguous(problem), config.forward)

    @functools.partial(jax.jit, static_argnames=("problem", "config"))
    def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
        return attend(inputs, problem, base, config.forward)

    return Kernel(Config, functools.partial(limit, forward=base), smem_bytes, run)


def most_bytes(problem: DecodeProblem) -> int:
    """The largest size of the copies: other GPUs than Hopper's may have little memory."""
    return 2**32 if gpu_specs.number(problem.gpu or "sm80") == 90 else 2**30


def limit(problem: DecodeProblem, forward: Kernel) -> Limit | None:
    """Why the forward cannot take the problem by copies, or None."""
    other = "leave implementation=None"
    if problem.packed or problem.functions or problem.kind == "interleaved":
        return Limit("it takes no packed rows, trees, functions or K and V in one array", other)
    if problem.batch_invariant:
        return Limit("batch_invariant is kept by the kernel for few rows", other)
    if (refused := limits.dtype_limit(problem)) is not None:
        return refused
    if (refused := forward.limit(contiguous(problem))) is not None:
        return refused
    copied = problem.sequences * max(problem.capacities) * problem.kv_heads
    size = copied * (problem.head_dim + problem.v_head_dim) * jnp.dtype(problem.dtype).itemsize
    if size > most_bytes(problem):
        return Limit(f"contiguous rows would take {size / 2**30:.1f} GiB", other)
    return None


def attend(
    inputs: DecodeInputs,
    problem: DecodeProblem,
    forward: Kernel,
    config: KernelConfig,
    rows: Array | None = None,
) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]. `rows` int32[M]: query rows of
    each sequence, the first ones of q; None: all.
    """
    assert inputs.v_cache is not None  # latent caches have kernels of their own
    lost = lost_rows.with_layer(inputs, problem)
    lengths = jnp.where(lost, 0, jnp.maximum(inputs.lengths, 0))
    dense = AttentionInputs(
        inputs.q,
        _rows(inputs, problem, inputs.k_cache, inputs.k_scale),
        _rows(inputs, problem, inputs.v_cache, inputs.v_scale),
        q_offset=lengths - (problem.q_len if rows is None else rows),
        q_lengths=rows,
        kv_lengths=lengths,
        sinks=inputs.sinks,
        mask_left=_for_each_sequence(inputs.mask_left, problem),
        mask_right=_for_each_sequence(inputs.mask_right, problem),
    )
    arrays = tuple(name for name in dense.named() if name not in ("q", "k", "v"))
    some = dataclasses.replace(contiguous(problem), arrays=arrays)
    out, lse = forward.run(dense, some, config)
    out = jnp.where(lost[:, None, None, None], jnp.asarray(jnp.nan, out.dtype), out)
    return out, jnp.where(lost[:, None, None], jnp.nan, lse)


def _for_each_sequence(bound: Array | None, problem: DecodeProblem) -> Array | None:
    return None if bound is None else jnp.broadcast_to(bound, (problem.sequences,))


def contiguous(problem: DecodeProblem) -> AttentionProblem:
    """The problem of the forward over the copies."""
    return dataclasses.replace(over_contiguous_keys(problem), precision=problem.precision)


def _rows(
    inputs: DecodeInputs, problem: DecodeProblem, cache: Cache | None, scale: Cache | None
) -> Array:
    """The rows of the layer, [M, S, K, H] in q's dtype, in the order of each sequence. Entries of
    the page table without a page give rows of some other page.
    """
    index = None
    if problem.layers is not None:
        index = jnp.clip(jnp.asarray(inputs.layer), 0, problem.layers - 1)

    def widened(rows: Array, scale: Array | None = None) -> Array:
        if index is not None:
            rows = lax.dynamic_index_in_dim(rows, index, keepdims=False)
            if scale is not None:
                scale = lax.dynamic_index_in_dim(scale, index, keepdims=False)
        if inputs.page_table is not None:
            pages = jnp.clip(inputs.page_table, 0, rows.shape[0] - 1)
            rows, scale = rows[pages], None if scale is None else scale[pages]
        if scale is not None:
            rows = rows.astype(jnp.float32) * scale[..., None]
        return rows.astype(problem.dtype)

    rows = jax.tree.map(widened, *((cache,) if scale is None else (cache, scale)))
    if isinstance(rows, tuple):
        most = max(problem.capacities)
        rows = [jnp.pad(x, ((0, 0), (0, most - x.shape[1]), (0, 0))) for x in rows]
        rows = jnp.stack(rows)
    elif inputs.page_table is not None:  # [M, pages, K, rows of a page, H]
        m, pages, heads, size, dim = rows.shape
        return jnp.swapaxes(rows, 2, 3).reshape(m, pages * size, heads, dim)
    return jnp.swapaxes(rows, 1, 2)
