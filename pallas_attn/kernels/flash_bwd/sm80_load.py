"""The portable backward's tiles of work, and what it brings to shared memory in which order."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn import _gpus
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention.sm80_common import Widths
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.plan import Item, Refs
from pallas_attn.kernels.mma.mma_2x2 import Stand

FIXED = {"bias", "sinks"}  # arrays that move no tile of work


@dataclasses.dataclass(frozen=True)
class KeyPlan(Widths, shared.Plan):
    """Tiles of work are keys."""

    section_bytes = attention_plan.SECTION_BYTES

    @property
    def fused(self) -> bool:
        alone = self.split or self.config.columns or self.problem.deterministic
        return self.config.fused and not alone

    @property
    def split(self) -> bool:
        """Whether dK and dV are made by a launch each."""
        wide = max(self.problem.head_dim, self.problem.v_head_dim) > 128
        return wide and self.config.warpgroups == 1

    @property
    def stand(self) -> Stand:
        """How warps stand around gradients."""
        return Stand(self.config.down, self.config.warpgroups)

    @property
    def apart(self) -> bool:
        """Whether one warpgroup makes P and the other dS."""
        alike = self.k_width == self.v_width and self.problem.softcap is None
        return self.config.apart and alike and self.parts_of_numbers == 1 and self.fused

    @property
    def late(self) -> bool:
        """Whether warpgroups that work apart make a step's dQ in the next one: faster at head
        dim 256 under a causal mask, slower without one.
        """
        return self.apart and not self.problem.mask.is_full

    @property
    def chained(self) -> bool:
        """Whether a block has several tiles of work: all must have query tiles."""
        if not (self.config.ctas and self.fused) or not set(self.problem.arrays) <= FIXED:
            return False
        offset, rows = self.problem.q_offset, self.padded_rows
        keys = range(0, self.problem.kv_len, self.keys)
        spans_of = [self.q_span(key, offset, rows, self.problem.kv_len) for key in keys]
        return all(span.hi > span.lo for span in spans_of)

    @property
    def ctas(self) -> int:
        work = self.heads * self.kv_tiles
        return min(self.config.ctas, work) if self.chained else work

    @property
    def unit_of_width(self) -> int:
        return self.config.columns or 16 * self.config.warpgroups

    @property
    def rows(self) -> int:
        """Query rows of a tile of scores: a warpgroup's."""
        return self.config.block_q // self.config.warpgroups

    @property
    def dq_parts(self) -> int:
        """Parts of a tile of dq, some columns each. Where two warpgroups share them out, each makes
        its own in two goes, which leaves registers for loads ahead; not where they work apart and
        dQ is not late, which is slower so.
        """
        groups = self.config.warpgroups
        if groups == 1 or self.k_width % 64 or (self.apart and not self.late):
            return groups
        return 2 * groups

    @property
    def vectors(self) -> bool:
        """Whether memory adds 4 numbers by one instruction."""
        return _gpus.number(self.problem.gpu or "sm80") >= 90


class Step(NamedTuple):
    """One query tile of one head."""

    head: Any
    t: Any
    there: Any  # whether it is one


def step_of(plan: KeyPlan, item: Item, i: Any) -> Step:
    if plan.problem.group == 1:
        return Step(item.kv_head, item.tile(i), i < item.steps)
    g = lax.div(i, jnp.maximum(item.steps, 1))
    t = item.tile(i - g * item.steps)
    return Step(item.kv_head * plan.problem.group + g, t, i < plan.problem.group * item.steps)


class Copies(NamedTuple):
    """What a warpgroup asks for: its part of the rows of each tile."""

    plan: KeyPlan
    refs: Refs
    smem: Any
    item: Item
    group: Any

    def keys(self, which: str) -> Any:
        """A tile of work's keys."""
        item, plan = self.item, self.plan
        width = plan.k_width if which == "k" else plan.v_width
        at = (item.batch, item.kv_head, item.key, item.kv_len - item.key, jnp.int32(0))
        return self._copy(which, at, plan.keys, width)

    def keys_of(self, which: str) -> list[Any]:
        """K, and V where there is to be a dK."""
        return [self.keys(name) for name in ("k", "v") if "k" in which or name == "k"]

    def first_queries(self) -> list[Any]:
        first = step_of(self.plan, self.item, jnp.int32(0))
        return [self.queries(name, first, jnp.int32(0)) for name in ("q", "do")]

    def of_next(self, after: Item, following: Step, last: Any) -> tuple["Copies", Step]:
        """(these, the step that follows): where it is the `last`, those of the next tile of work
        and its first.
        """
        first = step_of(self.plan, after, jnp.int32(0))
        pairs = zip((first.head, first.t), (following.head, following.t), strict=True)
        head, t = (jnp.where(last, a, b) for a, b in pairs)
        batch = jnp.where(last, after.batch, self.item.batch)
        return self._replace(item=self.item._replace(batch=batch)), Step(head, t, True)

    def queries(self, which: str, step: Step, slot: Any) -> Any:
        """A query tile of q or dO."""
        plan, block = self.plan, self.plan.config.block_q
        length: Any = plan.problem.q_len if self.item.q_len is None else self.item.q_len
        live = jnp.where(step.there, length - step.t * block, 0)
        width = plan.k_width if which == "q" else plan.v_width
        at = (self.item.batch, step.head, step.t * block, live, slot * block)
        return self._copy(which, at, block, width)

    def _copy(self, which: str, at: Any, rows: int, width: int) -> Any:
        (batch, head, row, live, to), groups = at, self.plan.config.warpgroups
        rows = rows // groups
        begin = self.group * rows
        at = (batch, head, row + begin, live - begin, to + begin)
        ref = getattr(self.refs, which)
        width *= self.plan.parts_of_numbers
        # Whatever is said of addresses: with few registers to spare, constants from one are faster
        # (head dims 128, causal, and 256); at 64 they are slower.
        fixed = self.plan.stand.shares == 1
        return (getattr(self.smem, which), ref), at, (rows, ref.shape, width, fixed)
