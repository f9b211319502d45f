"""Row statistics of a query tile, computed by the threads of a kernel that reads each query tile
once: no launch comes before it, and only the forward's lse is read from global memory for them.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import numpy as np

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, SmemRef

LANES = 8  # threads that share a row; each reads 16 bytes at a time
NUMBERS = 8  # in 16 bytes


class StatisticsRefs(NamedTuple):
    out: GmemRef  # [B, T, N, Hv]
    do: GmemRef
    lse: GmemRef  # float32[B, N, T]
    d_lse: GmemRef
    to_lse: SmemRef  # float32[tiles, ROWS]
    to_delta: SmemRef


class QueryTileAt(NamedTuple):
    batch: Index
    head: Index
    t: Index  # query tile
    slot: Index  # the row of `to_lse` and `to_delta`


def write(problem: AttentionProblem, refs: StatisticsRefs, at: QueryTileAt) -> None:
    """lse in log2 units and delta = rowsum(dO * O) - dLSE of query tile `at.t` in shared memory;
    inf and 0 in rows that see no key and past T, so that their P and dS are 0.
    """
    threads.run(_write, problem, refs, at)


def _write(ctx: ThreadContext) -> None:
    thread, refs, at, problem = ctx
    chunks, heads, length = problem.v_head_dim // NUMBERS, problem.q_heads, problem.q_len
    lane, down = thread.index % LANES, thread.index // LANES
    rows = [down + n for n in range(0, ROWS, mosaic.THREADS // LANES)]
    lines = [(at.batch * length + at.t * ROWS + row) * heads + at.head for row in rows]
    live = [at.t * ROWS + row < length for row in rows]
    own = [(at.batch * heads + at.head) * length + at.t * ROWS + row for row in rows]
    lse, d_lse = (
        [thread.load_where(ref, index, 4, there) for index, there in zip(own, live, strict=True)]
        for ref in (refs.lse, refs.d_lse)
    )
    pairs = []
    for line, there in zip(lines, live, strict=True):
        for n in range(pl.cdiv(chunks, LANES)):
            chunk = lane + n * LANES
            inside = there if (n + 1) * LANES <= chunks else there & (chunk < chunks)
            index = thread.to_int64(line) * chunks + thread.to_int64(chunk)
            pairs.append([thread.load_where(ref, index, 16, inside) for ref in (refs.out, refs.do)])
    each = len(pairs) // len(rows)
    for n, row in enumerate(rows):
        total = thread.number(0.0)
        for words in pairs[n * each : (n + 1) * each]:
            out, do = (thread.numbers(word, 16, problem.dtype) for word in words)
            for x, y in zip(out, do, strict=True):
                total = total + x * y
        delta = thread.sum_of_lanes(total, LANES) - thread.as_float(d_lse[n])
        value = thread.as_float(lse[n])
        scaled, never = value * softmax.to_log2(1.0), thread.number(np.inf)
        scaled = thread.choose(thread.nothing_yet(value), never, scaled)
        scaled = thread.choose(live[n], scaled, never)
        nothing = thread.number(0.0)
        delta = thread.choose(thread.nothing_yet(value), nothing, delta)
        delta = thread.choose(live[n], delta, nothing)
        for ref, number in ((refs.to_lse, scaled), (refs.to_delta, delta)):
            thread.shared_store(ref, at.slot * ROWS + row, number, lane < 1)
