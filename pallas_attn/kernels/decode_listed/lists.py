"""Attention of each query row to the positions that it names (`kv_indices`), by kernels of decode.

XLA turns positions into rows of a layer (`cache_layout.Listed`), in one pass over them: -1 where
the sequence has no such row or the mask hides it. Each query row then is a sequence of its own,
with a list in place of pages: of no more entries than reach to its last row. All heads of a row
share its list.

A score function reads the sequence that a row is of, its position, and those of its entries.

The kernel over a latent cache takes lists as they are. Others read a row for each entry up to the
last: a row that is named stands in for none, and a function of positions hides it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem, bounds_of, owned_rows
from pallas_attn._functions.program import (
    ZERO,
    Broadcasting,
    Operation,
    Program,
    evaluate,
    of_rows,
)
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, tiles
from pallas_attn.kernels.decode import lost as lost_rows
from pallas_attn.kernels.decode.limits import ROWS_AT_ONCE
from pallas_attn.kernels.lang.types import KernelConfig
from pallas_attn.kernels.mma.gathered_rows import TILE
from pallas_attn.masks import FULL

Array = jax.Array

MOST_LAUNCHES = 8  # launches that a program has one by one; of more it has a loop


def over(base: Kernel) -> Kernel:
    """The kernel whose lists `base` reads, one of decode. Unless that reads them as they are,
    entries that name no row are filled with one, and hidden; a launch takes `ROWS_AT_ONCE` lists.
    """
    fills = not base.reads_lists

    @dataclasses.dataclass(frozen=True)
    class Config:
        """The tuning of the kernel that reads the lists."""

        of_lists: KernelConfig = base.config()

        @classmethod
        def default(cls, problem: DecodeProblem) -> "Config":
            return cls(base.config.default(_first_launch(problem, fills)))

        def shallower(self) -> "Config | None":
            less = self.of_lists.shallower()
            return None if less is None else Config(less)

    def limit(problem: DecodeProblem) -> Limit | None:
        return _limit(problem, fills) or base.limit(_of_rows(problem, 1, fills))

    def smem_bytes(problem: DecodeProblem, config: Config) -> int:
        return base.smem_bytes(_first_launch(problem, fills), config.of_lists)

    def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
        def launch(part: DecodeInputs, lists: DecodeProblem) -> tuple[Array, Array]:
            return base.run(part, lists, config.of_lists)

        return _run(launch, inputs, problem, fills)

    return Kernel(Config, limit, smem_bytes, run)


def _limit(problem: DecodeProblem, fills: bool) -> Limit | None:
    """Why rows cannot be listed, or None."""
    if cache_layout.layout_of(problem).separate:
        return Limit("kv_indices over separate arrays", "use a StackedCache or a PagedCache")
    if problem.byte_rows:
        return Limit("kv_indices over a latent cache of bytes", "keep it in q's dtype")
    if problem.mask_uses_head:
        return Limit(
            "kv_indices beside a mask function that asks for the head, as heads share a list",
            'say implementation="reference"',
        )
    slabs, slab_rows = _slabs(problem)
    if (problem.layers or 1) * slabs * slab_rows >= 2**31:
        return Limit("it counts the rows of a cache in 32 bits", "split the layers")
    if _count(problem) * problem.q_heads * (_entries(problem, fills) // 64 + 1) >= 2**31:
        return Limit("it counts tiles of lists in 32 bits", "split the rows over several calls")
    if (refused := tiles.arrays_limit(_first_launch(problem, fills).functions)) is not None:
        return refused
    return None


def _slabs(problem: DecodeProblem) -> tuple[int, int]:
    """Slabs of a layer, and rows of each."""
    if problem.page_size is None:
        return problem.sequences, max(problem.capacities, default=0)
    return problem.pages or 0, problem.page_size


def _count(problem: DecodeProblem) -> int:
    """Query rows of the call."""
    return problem.sequences * problem.q_len if problem.tokens is None else problem.tokens


def _entries(problem: DecodeProblem, fills: bool) -> int:
    """Entries of a list; of one that is taken as it is, whole tiles."""
    assert problem.listed is not None
    return problem.listed if fills else -(-problem.listed // TILE) * TILE


def _first_launch(problem: DecodeProblem, fills: bool) -> DecodeProblem:
    rows = _count(problem)
    return _of_rows(problem, min(rows, ROWS_AT_ONCE) if fills else rows, fills)


def _of_rows(problem: DecodeProblem, rows: int, fills: bool) -> DecodeProblem:
    """The problem of a launch of so many lists."""
    slabs, slab_rows = _slabs(problem)
    entries, score = _entries(problem, fills), problem.score_program
    return dataclasses.replace(
        problem,
        kind="listed",
        sequences=rows,
        q_len=1,
        tokens=None,
        capacities=(entries,) * rows,
        mask=FULL,
        page_size=slab_rows,
        pages=slabs,
        mask_program=_names_a_row(rows, entries) if fills else None,
        listed=None,
        score_program=None if score is None else of_rows(score, rows, entries=entries),
    )


@functools.lru_cache(maxsize=64)
def _names_a_row(rows: int, entries: int) -> Program:
    """Whether an entry of a list names a row."""
    read = Operation("read", (0, 3), "int32", 0)
    return Program(4, (read, Operation("ge", (4, ZERO), "bool")), 5, (((rows, entries), "int32"),))


class Lists(NamedTuple):
    """The lists of all query rows."""

    rows: Array  # int32[R, entries]: rows of the layer, -1 for none
    lengths: Array  # int32[R]: entries up to the last row; more than all where rows were lost
    numbers: tuple[Array, ...]  # read by `program.of_rows`; () without a score function


def _lists(inputs: DecodeInputs, problem: DecodeProblem, fills: bool) -> Lists:
    length, n = inputs.lengths, _entries(problem, fills)
    at = jnp.arange(_count(problem), dtype=jnp.int32)
    if inputs.starts is None:
        owner = at // problem.q_len
        owned = owner >= 0
        position = length[owner] - problem.q_len + at % problem.q_len
    else:
        owner, owned = owned_rows(inputs.starts, at.size)
        position = length[owner] - (inputs.starts[owner + 1] - at)
    assert inputs.kv_indices is not None
    key = inputs.kv_indices.reshape(at.size, -1)
    if n > key.shape[1]:
        key = jnp.pad(key, ((0, 0), (0, n - key.shape[1])), constant_values=-1)
    # No query sees beyond its sequence's capacity: those that are longer are lost.
    end = jnp.minimum(length, max(problem.capacities))[owner][:, None]
    seen = (key >= 0) & (key < end) & owned[:, None]
    key = jnp.where(seen, key, 0)
    mask = problem.mask.filled(**bounds_of(inputs))
    seen &= mask.allows(position[:, None], key)
    if problem.mask_program is not None:
        where = owner[:, None], jnp.int32(0), position[:, None], key
        seen &= evaluate(problem.mask_program, where, inputs.mask_aux, Broadcasting())
    numbers: tuple[Array, ...] = (owner, position, key) if problem.score_program is not None else ()
    slab_rows, slab = _slabs(problem)[1], owner[:, None]
    if inputs.page_table is not None:
        slab = inputs.page_table[slab, key // slab_rows]
        key = key % slab_rows
    rows = jnp.where(seen, slab * slab_rows + key, -1)
    entry = jnp.arange(1, n + 1, dtype=jnp.int32)
    lengths = jnp.where(rows >= 0, entry[None], 0).max(axis=1)
    lost = lost_rows.with_layer(inputs, problem)[owner] & owned
    return Lists(rows, jnp.where(lost, n + 1, lengths), numbers)


Launch = Callable[[DecodeInputs, DecodeProblem], tuple[Array, Array]]


def _run(
    launch: Launch, inputs: DecodeInputs, problem: DecodeProblem, fills: bool
) -> tuple[Array, Array]:
    """out and lse of the call, by as many launches as it takes."""
    rows, lengths, numbers = _lists(inputs, problem, fills)
    q, count = inputs.q.reshape(-1, 1, *inputs.q.shape[-2:]), _count(problem)
    each, step = [q, lengths, rows], count
    if fills:
        table = jnp.where(rows >= 0, rows, rows.max(axis=1, keepdims=True))
        each, step = [q, lengths, table, rows], ROWS_AT_ONCE
    plain = len(each)
    each += numbers

    def one_launch(some: Sequence[Array]) -> tuple[Array, Array]:
        q, lengths, table, *aux = some[:plain]
        part = DecodeInputs(
            q,
            inputs.k_cache,
            inputs.v_cache,
            lengths,
            table,
            inputs.layer,
            inputs.sinks,
            inputs.k_scale,
            inputs.v_scale,
            mask_aux=tuple(aux),
            score_aux=(*inputs.score_aux, *some[plain:]),
        )
        out, lse = launch(part, _of_rows(problem, len(q), fills))
        return out[:, 0], lse[:, :, 0]

    if count > MOST_LAUNCHES * step:
        pads = -count % step
        padded = [jnp.pad(x, ((0, pads), *((0, 0),) * (x.ndim - 1))) for x in each]
        parts = tuple(x.reshape(-1, step, *x.shape[1:]) for x in padded)
        out, lse = (x.reshape(-1, *x.shape[2:])[:count] for x in lax.map(one_launch, parts))
    else:
        firsts = range(0, count, step)
        results = [one_launch([x[first : first + step] for x in each]) for first in firsts]
        both = zip(*results, strict=True)
        out, lse = (x[0] if len(x) == 1 else jnp.concatenate(x) for x in both)
    out = out.reshape(*problem.out_shape, out.shape[-1])
    return out, jnp.swapaxes(lse.reshape(problem.out_shape), -1, -2)
