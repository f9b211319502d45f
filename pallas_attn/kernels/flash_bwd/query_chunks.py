"""Query rows in chunks that are batch rows of one launch and share k and v: cross-attention of
diffusion models, with thousands of queries and fewer heads than multiprocessors. Each chunk makes
dk and dv of its own, which are added up in float32 afterwards.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.flash_bwd.operands import Residuals
from pallas_attn.kernels.flash_bwd.work_order import USUAL_BLOCKS

ROWS = 512  # fewest query rows of a chunk


def takes(problem: AttentionProblem, chunks: int) -> bool:
    """Whether the query rows may be divided: no array but q, k and v has to be."""
    return not problem.arrays and problem.share == 1 and problem.q_len % chunks == 0


def default(problem: AttentionProblem) -> int:
    """The number of chunks that gives most blocks one."""
    heads = problem.batch * problem.kv_heads
    fits = [n for n in (8, 4, 2) if takes(problem, n) and problem.q_len // n >= ROWS]
    return next((n for n in fits if heads * n <= USUAL_BLOCKS), 1)


def split(
    residuals: Residuals, problem: AttentionProblem, chunks: int
) -> tuple[Residuals, AttentionProblem]:
    """The residuals of the chunks, and the problem of their launch."""
    rows = problem.q_len // chunks
    batch = problem.batch * chunks

    def by_rows(x: jax.Array) -> jax.Array:
        return x.reshape(batch, rows, *x.shape[2:])

    def by_heads(x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:2], chunks, rows).swapaxes(1, 2)
        return parts.reshape(batch, x.shape[1], rows)

    inputs, out, lse, d_out, d_lse = residuals
    inputs = inputs._replace(q=by_rows(inputs.q))
    parts = by_rows(out), by_heads(lse), by_rows(d_out), by_heads(d_lse)
    return Residuals(inputs, *parts), dataclasses.replace(
        problem, batch=batch, q_len=rows, share=chunks
    )


def joined(grads: AttentionInputs, problem: AttentionProblem) -> AttentionInputs:
    """The gradients of `problem`, from those of its chunks."""

    def added(x: jax.Array) -> jax.Array:
        parts = x.reshape(problem.batch, -1, *x.shape[1:])
        return parts.astype(jnp.float32).sum(1).astype(x.dtype)

    shape = problem.batch, problem.q_len, problem.q_heads, problem.head_dim
    return AttentionInputs(q=grads.q.reshape(shape), k=added(grads.k), v=added(grads.v))
