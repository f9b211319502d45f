"""Packed rows over latent caches: each row as a sequence of its own, which has the pages of the one
that it belongs to and ends where the row stands. All heads of a row share a pass over its keys,
which is most of what there is to share; rows of one sequence read them again, mostly from L2.

A stacked cache is taken for one of pages that hold a whole sequence each. A function of positions,
that of a tree of drafts for one, reads the sequence of a row, and where it stands.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs, DecodeProblem, owned_rows
from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Program
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.decode import lost as lost_rows
from pallas_attn.kernels.decode.limits import ROWS_AT_ONCE
from pallas_attn.kernels.lang.types import KernelConfig

Array = jax.Array


def limit(problem: DecodeProblem) -> Limit | None:
    """Why rows cannot be sequences of their own, or None."""
    if not problem.packed:
        return None
    if cache_layout.layout_of(problem).separate:
        return Limit(
            "packed rows over separate arrays of latent rows", "use a StackedCache or a PagedCache"
        )
    mask = problem.mask.filled(**dict.fromkeys(problem.mask.arrives, 2))
    _, end = mask.kv_range(0, 1, 2)  # a query at 0, of two keys
    if end > 1:
        return Limit(
            "packed latent rows and a mask that shows them later keys", "use a causal mask"
        )
    return None


def of_rows(problem: DecodeProblem) -> DecodeProblem:
    """The problem of one launch; itself where rows are not packed."""
    if problem.tokens is None:
        return problem
    return _of_some(problem, min(problem.tokens, ROWS_AT_ONCE))


def _of_some(problem: DecodeProblem, rows: int) -> DecodeProblem:
    """The problem of a launch of so many packed rows."""
    paged = problem.kind == "paged"

    def by_row(function: Program | None) -> Program | None:
        return None if function is None else _program.of_rows(function, rows, problem.tree)

    return dataclasses.replace(
        problem,
        kind="paged",
        page_size=problem.page_size if paged else problem.capacities[0],
        pages=problem.pages if paged else problem.sequences,
        sequences=rows,
        q_len=1,
        tokens=None,
        capacities=(max(problem.capacities),) * rows,
        mask_program=by_row(problem.mask_program),
        tree=False,
        score_program=by_row(problem.score_program),
    )


def run(
    launch: Callable[[DecodeInputs, DecodeProblem, Any], tuple[Array, Array]],
    inputs: DecodeInputs,
    problem: DecodeProblem,
    config: KernelConfig,
) -> tuple[Array, Array]:
    """out and lse of a call by `launch`, which takes sequences: [M, t, N, Hv] and [M, N, t]; packed
    rows by as many launches as it takes, [tokens, N, Hv] and [N, tokens].
    """
    if problem.tokens is None:
        return launch(inputs, problem, config)
    outs, lses = [], []
    own, numbers = _sequences_of_rows(inputs, problem)
    assert own.page_table is not None and own.new_lengths is not None
    for first in range(0, problem.tokens, ROWS_AT_ONCE):
        here = slice(first, first + ROWS_AT_ONCE)
        some = tuple(x[here] for x in numbers)
        part = own._replace(
            q=own.q[here],
            lengths=own.lengths[here],
            page_table=own.page_table[here],
            new_lengths=own.new_lengths[here],
            mask_aux=(*own.mask_aux, *some) if problem.mask_program is not None else (),
            score_aux=(*own.score_aux, *some) if problem.score_program is not None else (),
        )
        out, lse = launch(part, _of_some(problem, part.q.shape[0]), config)
        outs.append(out[:, 0])
        lses.append(lse[:, :, 0].T)
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)


def _sequences_of_rows(
    inputs: DecodeInputs, problem: DecodeProblem
) -> tuple[DecodeInputs, tuple[Array, ...]]:
    """The inputs of a call where each packed row is a sequence, and the numbers of rows that a
    function of positions reads: `program.of_rows`.
    """
    starts, table = inputs.starts, inputs.page_table
    assert starts is not None
    at = jnp.arange(problem.tokens, dtype=jnp.int32)
    owner, owned = owned_rows(starts, at.size)
    length, lost = inputs.lengths, lost_rows.sequences(inputs, problem)
    if table is None:
        table = jnp.arange(problem.sequences, dtype=jnp.int32)[:, None]
    # Any int32 is a length; less than 0 counts as 0, and must not wrap around.
    end = jnp.maximum(jnp.maximum(length, 0)[owner] - (starts[owner + 1] - 1 - at), 0)
    numbers: tuple[Array, ...] = ()
    if problem.tree:
        numbers = owner, at - starts[owner], length[owner] - jnp.diff(starts)[owner]
    elif problem.functions:
        numbers = owner, end - 1
    end = jnp.where(lost[owner], max(problem.capacities) + 1, end)
    own = inputs._replace(
        q=inputs.q[:, None],
        lengths=jnp.where(owned, end, 0),
        page_table=table[owner],
        new_lengths=jnp.zeros_like(at),
        starts=None,
    )
    return own, numbers
