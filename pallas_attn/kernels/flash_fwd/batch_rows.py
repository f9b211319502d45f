"""Several batch rows in one work tile of the Hopper forward, where each has few query rows and
keys: temporal attention of video models, over the 16 to 32 frames of each of thousands of pixels.

A wgmma takes 64 query rows, so a batch row of 16 in a tile of its own leaves three quarters of the
tensor cores and exponents idle. Batch rows that follow each other lie side by side in memory:
[B, T, N, H] is also [B/n, n T, N, H], without a copy. The scores of a query with keys of another
batch row are hidden by the mask. `one_tile` is the kernel.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import FLOAT8, AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang.types import RegisterTile
from pallas_attn.masks import FULL, Mask

_SHIFT = 16  # fraction bits of 1 / rows: the product replaces a division, exact below 64


def most_joined(problem: AttentionProblem) -> int:
    """The largest number of batch rows that can share a work tile; 1 where none may be joined."""
    rows = problem.q_len
    joins = rows == problem.kv_len <= ROWS // 2 and set(problem.arrays) <= {"sinks"}
    others = problem.fetches > 1 or problem.zigzag > 1 or problem.share > 1
    functions = problem.mask_program is not None or problem.score_program is not None
    if others or functions or not joins or problem.dtype in ("float32", *FLOAT8):
        return 1
    return next(n for n in range(ROWS // max(rows, 1), 0, -1) if problem.batch % n == 0)


def joined(problem: AttentionProblem, n: int) -> tuple[AttentionProblem, "RowsApart"]:
    """The problem whose batch rows are `n` batch rows of this one each, with a FULL mask, and the
    mask to use in its place, which hides the keys of other batch rows.
    """
    if (most := most_joined(problem)) % n:
        raise ValueError(f"Config.batch_rows must divide {most} for {problem}, got {n}")
    rows = n * problem.q_len
    sizes: dict[str, Any] = {"batch": problem.batch // n, "q_len": rows, "kv_len": rows}
    mask = RowsApart(problem.q_len, problem.mask, problem.q_offset)
    return dataclasses.replace(problem, **sizes, mask=FULL, q_offset=0), mask


def joined_inputs(inputs: AttentionInputs, n: int) -> AttentionInputs:
    """The inputs of the `joined` problem: q, k and v reshaped."""
    q, k, v = (x.reshape(-1, n * x.shape[1], *x.shape[2:]) for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


def split(out: jax.Array, lse: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """out [B/n, n T, N, H] and log-sum-exp [B/n, N, n T] of joined batch rows -> [B, T, N, H] and
    [B, N, T].
    """
    batch, heads, rows = lse.shape
    lse = jnp.swapaxes(lse.reshape(batch, heads, n, rows // n), 1, 2)
    out = out.reshape(batch * n, rows // n, *out.shape[2:])
    return out, lse.reshape(batch * n, heads, rows // n)


class RowsApart(NamedTuple):
    """The mask of joined batch rows of `rows` rows each: a query sees keys of its own batch row
    only, by `mask`.
    """

    rows: int
    mask: Mask
    q_offset: int
    is_full: bool = False

    def row_bounds(self, position: RegisterTile) -> tuple[RegisterTile, RegisterTile]:
        """Keys [low, high) that a query sees. `position`: its row in the work tile."""
        factor = -(-(1 << _SHIFT) // self.rows)
        first = ((position * factor) >> _SHIFT) * self.rows
        low, high = self.mask.row_bounds(position + self.q_offset)
        end = first + self.rows
        low = first if low is None else jnp.maximum(low, first)
        high = end if high is None else jnp.minimum(high, end)
        return low, high

    def allows(self, query: RegisterTile, key: RegisterTile, *_: object) -> RegisterTile:
        """Whether queries see keys, both by their rows in the work tile."""
        low, high = self.row_bounds(query)
        return (low <= key) & (key < high)
