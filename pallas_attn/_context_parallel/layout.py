"""Static facts of attention over rows that several devices have, the orders in which these rows
lie, and how they move between devices.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._autodiff.derivative import Rows
from pallas_attn._call.problem import AttentionProblem, owner_of_chunk
from pallas_attn._functions import block_summary
from pallas_attn._functions.program import Program
from pallas_attn._mesh import sharding
from pallas_attn.context import (
    Context,
    chunk_numbers,
    chunk_rows,
    chunks_of,
    first_keys,
    window_of,
)

Array = jax.Array
Index = Any  # an int, or an int32 array
# Bytes of K and V of all devices from which on the keys that documents need are found at run time:
# the answer costs a wait of the host.
WORTH_ASKING = 2**28


@dataclasses.dataclass(frozen=True)
class Split:
    """The static facts of one call: the problem of this device's rows and keys, and its place."""

    problem: AttentionProblem
    implementation: str | None
    context: Context
    shards: int
    near: tuple[int, int] | None = None  # `window` where documents need no more
    fetched: bool = False  # whether k and v stay where they are: a kernel fetches what it needs

    def __post_init__(self):
        for name, rows in (("q", self.problem.q_len), ("k", self.problem.kv_len)):
            chunk_rows(self.context, name, rows)

    @property
    def chunks(self) -> int:
        return self.context.chunks

    @property
    def rows(self) -> int:
        """Rows of q in a chunk."""
        return self.problem.q_len // self.chunks

    @property
    def keys(self) -> int:
        """Rows of k in a chunk."""
        return self.problem.kv_len // self.chunks

    @property
    def all_keys(self) -> int:
        return self.problem.kv_len * self.shards

    @property
    def programs(self) -> tuple[Program | None, Program | None]:
        """The functions of masks and of scores."""
        return self.problem.mask_program, self.problem.score_program

    @property
    def has_functions(self) -> bool:
        return self.programs != (None, None)

    def placed(self, program: Program | None) -> Program | None:
        """A function as a launch has it: its batch rows are chunks, and its keys and the offsets of
        queries count from the first key that is there (`starts`); or its heads are those of a
        device.
        """
        if program is None:
            return None
        rows = self.problem.batch * self.chunks
        return block_summary.placed(program, self.context, rows, self.window() is not None)

    def window(self) -> tuple[int, int] | None:
        """Keys [lo, hi) that a chunk's rows may see, counted from the chunk's own first key; None
        where all keys move: they are not known, or too many, or a bias lies over all of them.
        """
        if self.near is not None or self.fetched or not self.may_move_some:
            return self.near
        problem = self.problem
        mask = problem.mask if problem.mask_program is None else problem.mask_within
        rows = problem.q_len, problem.kv_len
        return window_of(self.context, self.shards, mask, rows, problem.q_offset)

    @property
    def may_move_some(self) -> bool:
        """Whether positions are known and nothing lies over all keys."""
        shapes = self.problem.bias_shape, self.problem.mask_shape
        over_keys = any(shape is not None and shape[3] > 1 for shape in shapes)
        return not over_keys and "q_offset" not in self.problem.arrays

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """For documents, windows that may hold all keys that a chunk's rows see, narrowest first;
        the one that does is known at run time.
        """
        problem, size = self.problem, self.keys
        ids = {"q_segment_ids", "kv_segment_ids"} <= set(problem.arrays)
        columns = problem.batch * problem.kv_heads * (problem.head_dim + problem.v_head_dim)
        bytes_of_all = self.all_keys * columns * jnp.dtype(problem.dtype).itemsize
        if not ids or problem.q_len != problem.kv_len or bytes_of_all < WORTH_ASKING:
            return ()
        if self.has_functions or not self.may_move_some or self.window() is not None:
            return ()
        right = problem.mask.right
        ends = isinstance(right, int) and problem.q_offset + right <= 0  # with the chunk
        windows = [(-n, size if ends else size + n) for n in (0, *self.reaches)]
        return tuple((lo, hi) for lo, hi in windows if self.chunks * (hi - lo) < self.all_keys)

    @property
    def reaches(self) -> tuple[int, ...]:
        """Keys beside a chunk that may be enough."""
        return (self.keys,) if self.keys % 4 else (self.keys // 4, self.keys)

    def clamp_offset(self, offset: Index) -> Index:
        """An offset of a chunk's rows; in a ring, clamped to the range in which the offset changes
        the mask, so that few offsets differ.
        """
        mask = self.problem.mask
        bounds = (mask.left, mask.right)
        known = all(bound is None or isinstance(bound, int) for bound in bounds)
        if self.context.method != "ring" or not known or self.has_functions:
            return offset
        # Before `least` no row sees a key, or all see all; so it is after `most`.
        least = -self.rows - mask.right if mask.right is not None else mask.left - self.rows + 1
        most = self.keys + mask.left if mask.left is not None else self.keys - 1 - mask.right
        if least > most:
            return offset
        if isinstance(offset, int):
            return min(max(offset, least), most)
        return jnp.clip(offset, least, most)

    def starts(self, numbers: Index) -> Index:
        """The positions of the first keys of the launches for chunks of these numbers."""
        return first_keys(numbers, self.keys, self.window())


# ---- rows and chunks ----------------------------------------------------------------------------


def by_chunk(split: Split, x: Array) -> Array:
    """[B, rows, ...] of a device -> [B * chunks, rows of a chunk, ...]."""
    count = x.shape[0] * split.chunks
    return x.reshape(count, x.shape[1] // split.chunks, *x.shape[2:])


def by_device(split: Split, x: Array) -> Array:
    """`by_chunk` undone."""
    return x.reshape(-1, split.chunks * x.shape[1], *x.shape[2:])


def lse_by_chunk(split: Split, lse: Array) -> Array:
    """[B, N, rows] -> [B * chunks, N, rows of a chunk]."""
    return by_chunk(split, lse.swapaxes(1, 2)).swapaxes(1, 2)


def rows_by_chunk(split: Split, rows: Rows) -> Rows:
    """out, lse and their cotangents."""
    out, lse, d_out, d_lse = rows
    outs, lses = (by_chunk(split, x) for x in (out, d_out)), (lse, d_lse)
    (out, d_out), (lse, d_lse) = outs, (lse_by_chunk(split, x) for x in lses)
    return out, lse, d_out, d_lse


def lse_by_device(split: Split, lse: Array) -> Array:
    return by_device(split, lse.swapaxes(1, 2)).swapaxes(1, 2)


def scores_by_chunk(split: Split, x: Array) -> Array:
    """A bias or mask_array [B or 1, N or 1, rows or 1, S or 1]."""
    if split.chunks == 1:
        return x
    batch, heads, rows, keys = x.shape
    if rows == 1:
        return x if batch == 1 else jnp.repeat(x, split.chunks, axis=0)
    parts = x.reshape(batch, heads, split.chunks, rows // split.chunks, keys).swapaxes(1, 2)
    parts = jnp.broadcast_to(parts, (split.problem.batch, *parts.shape[1:]))
    return parts.reshape(-1, *parts.shape[2:])


def in_sequence_order(split: Split, x: Array, axis: int) -> Array:
    """Rows of all devices, one device after the other along an axis, in the order of positions."""
    if split.chunks == 1:
        return x
    shape = x.shape
    x = jnp.moveaxis(x.reshape(*shape[:axis], split.shards, 2, -1, *shape[axis + 1 :]), axis, 0)
    low, high = (lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in (0, 1))
    halves = jnp.concatenate([low, jnp.flip(high, 0)])
    return jnp.moveaxis(halves, 0, axis).reshape(shape)


def as_devices_have_it(split: Split, x: Array, axis: int) -> Array:
    """`in_sequence_order` undone."""
    if split.chunks == 1:
        return x
    shape = x.shape
    x = jnp.moveaxis(x.reshape(*shape[:axis], 2 * split.shards, -1, *shape[axis + 1 :]), axis, 0)
    pairs = jnp.stack([x[: split.shards], jnp.flip(x[split.shards :], 0)], axis=1)
    return jnp.moveaxis(pairs, (0, 1), (axis, axis + 1)).reshape(shape)


# ---- moving rows ---------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered(split: Split, x: Array) -> Array:
    """[B, rows, ...] of each device -> rows of all devices, in the order of positions."""
    return in_sequence_order(split, all_gathered(split, x), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_as_they_lie(split: Split, x: Array) -> Array:
    """`all_gathered`, whose gradient is `scattered`."""
    return all_gathered(split, x)


def scattered(split: Split, gradient: Array) -> Array:
    """A device's own rows of the gradients that all devices have computed, which lie as in
    `all_gathered`, added up in float32.
    """
    batch, rows, *rest = gradient.shape
    parts = gradient.reshape(batch, split.shards, rows // split.shards, *rest)
    parts = lax.all_to_all(parts, split.context.axis, 1, 1, tiled=True)
    return parts.astype(sharding.sum_dtype(gradient.dtype)).sum(axis=1).astype(gradient.dtype)


gathered.defvjp(
    lambda split, x: (gathered(split, x), None),
    lambda split, _, gradient: (scattered(split, as_devices_have_it(split, gradient, 1)),),
)
gathered_as_they_lie.defvjp(
    lambda split, x: (all_gathered(split, x), None),
    lambda split, _, gradient: (scattered(split, gradient),),
)


def all_gathered(split: Split, x: Array) -> Array:
    """[B, rows, ...] of each device -> rows of all, one device after the other."""
    return lax.all_gather(x, split.context.axis, axis=1, tiled=True)


def near(split: Split, x: Array, window: tuple[int, int]) -> Array:
    """[B, rows, ...] of each device -> [B * chunks, hi - lo, ...]: the rows of the window of each
    chunk, from the beginning of the sequence on where that lies within it; zeros past an end.
    """
    lo, hi = window
    size, batch = split.keys, x.shape[0]
    parts = x.reshape(batch, split.chunks, size, *x.shape[2:])
    numbers = chunk_numbers(split.context, lax.axis_index(split.context.axis), split.shards)
    windows = []
    for own in range(split.chunks):
        pieces = []
        for away in range(lo // size, (hi - 1) // size + 1):
            some = slice(max(lo - away * size, 0), min(hi - away * size, size))
            pieces.append(from_afar(split, parts[:, :, some], own, away))
        rows = jnp.concatenate(pieces, axis=1)
        before = jnp.clip(-(numbers[own] * size + lo), 0, hi - lo)  # the sequence has none there
        windows.append(jnp.roll(rows, -before, axis=1) if lo < 0 else rows)
    return jnp.stack(windows, axis=1).reshape(-1, *windows[0].shape[1:])


def from_afar(split: Split, parts: Array, own: int, away: int) -> Array:
    """The part of the chunk that lies so many chunks away from this device's chunk number `own`; 0
    where there is none.

    parts: [B, chunks, rows, ...] of this device.
    """
    context, shards = split.context, split.shards
    part = jnp.zeros_like(parts[:, 0])
    for slot in range(split.chunks):
        pairs = []
        for device in range(shards):
            there = chunks_of(context, device, shards)[own] + away
            source, its_slot = owner_of_chunk(there, shards)
            if 0 <= there < shards * split.chunks and its_slot == slot:
                pairs.append((source, device))
        if pairs == [(device, device) for device in range(shards)]:
            return parts[:, slot]
        if pairs:
            part = part + lax.ppermute(parts[:, slot], context.axis, pairs)
    return part


def moved(split: Split, x: Array) -> Array:
    """The rows of k, v or kv segment ids that this device's queries may see: [B, S, ...], or
    [B * chunks, hi - lo, ...] under a window.
    """
    window = split.window()
    return gathered(split, x) if window is None else near(split, x, window)
