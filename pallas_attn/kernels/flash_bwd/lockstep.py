"""Blocks in lockstep: those at work are at the same query tile at one time, so that one of them
reads from memory what all of them need.

They go down from the last query tile to their own keys, so that those of the last keys are done
first. The work tiles that follow begin at their own keys, when the others arrive there, and go up
to the last query tile, where all are done together. At a query tile all heads of the group come one
after the other (`key_tiles.step_of`).

In a table alone blocks drift apart, since some are a little slower, and where rows are more than L2
holds each reads them from memory again. With claims too (`flash_fwd/claims.py`) they do not.
Forward and backward of two batch rows of 8192, 32:8 heads of 128 (Llama 3), causal, on an H200: 670
TFLOP/s, 600 without.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import Span
from pallas_attn.kernels.lang.types import Index, Predicate

KeyTiling = Any  # `key_tiles.KeyTiling`, which uses this file
WorkOrder = Any  # `work_order.WorkOrder`, too


class DownOrUp(NamedTuple):
    """The query tiles of a span, from the last to the first or from the first to the last."""

    span: Span
    down: Predicate

    def tile(self, i: Index) -> Index:
        return jnp.where(self.down, self.span.hi - 1 - i, self.span.lo + i)


def applies(tiling: "KeyTiling") -> bool:
    """Whether blocks can stay in lockstep: work tiles end at the last query."""
    mask = tiling.problem.mask
    one_sided = mask.bounds_right and not mask.bounds_left
    return tiling.chunks == 1 and tiling.follows_mask and one_sided


def l2_heads(heads: int, kv_tiles: int, blocks: int) -> int:
    """Heads whose work tiles are taken together: as many as make two waves of blocks, down and up
    again.
    """
    fit = max(1, 2 * blocks // kv_tiles)
    return pl.cdiv(heads, max(1, heads // fit))


def q_tiles(order: "WorkOrder", span: Span, tile: Index) -> DownOrUp:
    """The query tiles of kv tile `tile`, whose blocks go down in every other wave."""
    wave = lax.div(tile * order.l2_heads, jnp.int32(order.grid))
    return DownOrUp(span, lax.rem(wave, jnp.int32(2)) == 0)
