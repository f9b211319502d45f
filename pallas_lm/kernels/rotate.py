"""Work between the matmul that makes q, k and v and the append in a decoding step on Hopper: the
partials of a row are added up, q and k are rotated by the row's position (RoPE), and q, k and v are
written to arrays of their own.

A program for one thread, which has 4 neighbouring columns of the first half of a head and the 4 of
its second half that are rotated with them. It is a kernel for the same reason as norm.py.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, Scalar


@dataclasses.dataclass(frozen=True)
class Problem:
    rows: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    partials: int
    dtype: str

    @property
    def quads(self) -> int:
        """Groups of 4 columns in half a head."""
        return self.head_dim // 8

    @property
    def all_heads(self) -> int:
        """Heads of q, k and v."""
        return self.heads + 2 * self.kv_heads


class RotateRefs(NamedTuple):
    partials: GmemRef  # float32[partials, rows, all_heads * head_dim]
    cos: GmemRef  # float32[rows, head_dim / 2]
    sin: GmemRef


def _program(
    thread: threads.Thread, all_refs: Sequence[Any], block: Index, *, problem: Problem
) -> None:
    refs, q, k, v = all_refs
    quads, all_heads = problem.quads, problem.all_heads
    total = problem.rows * all_heads * quads
    own = block * mosaic.THREADS + thread.index
    there, own = own < total, thread.minimum(own, total - 1)
    quad, head, row = own % quads, own // quads % all_heads, own // (quads * all_heads)

    def summed(place: Index) -> list[Scalar]:
        place = (row * all_heads + head) * (2 * quads) + place
        parts = [
            thread.load_floats(refs.partials, place + n * (problem.rows * all_heads * 2 * quads), 4)
            for n in range(problem.partials)
        ]
        return [functools.reduce(operator.add, column) for column in zip(*parts, strict=True)]

    first, second = summed(quad), summed(quad + quads)
    zero, unit = thread.number(0.0), thread.number(1.0)
    turns = head < problem.heads + problem.kv_heads
    cos, sin = (thread.load_floats(ref, row * quads + quad, 4) for ref in (refs.cos, refs.sin))
    cos = [thread.choose(turns, x, unit) for x in cos]
    sin = [thread.choose(turns, x, zero) for x in sin]
    columns = list(zip(first, second, cos, sin, strict=True))
    rotated = (
        [a * c - b * s for a, b, c, s in columns],
        [b * c + a * s for a, b, c, s in columns],
    )
    start = 0
    for ref, heads in ((q, problem.heads), (k, problem.kv_heads), (v, problem.kv_heads)):
        own_head = there & (head < start + heads) & (head + (1 - start) > 0)
        place = (row * heads + head - start) * (2 * quads) + quad
        for n, values in enumerate(rotated):
            thread.store_narrow(ref, place + n * quads, values, problem.dtype, own_head)
        start += heads


def _kernel(refs: RotateRefs, q: GmemRef, k: GmemRef, v: GmemRef, *, problem: Problem) -> None:
    mosaic.overlap_launches()
    program = functools.partial(_program, problem=problem)
    threads.each_thread(program, (refs, q, k, v), lax.axis_index("block"))


@functools.partial(jax.jit, static_argnames="problem")
def run(partials: Operand, cos: Operand, sin: Operand, problem: Problem) -> tuple[Operand, ...]:
    """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]."""
    heads = (problem.heads, problem.kv_heads, problem.kv_heads)
    shapes = [(problem.rows, n, problem.head_dim) for n in heads]
    items = problem.rows * problem.all_heads * problem.quads
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=tuple(jax.ShapeDtypeStruct(shape, problem.dtype) for shape in shapes),
        grid=(-(-items // mosaic.THREADS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="rotate_sm90",
    )
    flat = (x.reshape(problem.rows, -1) for x in (cos, sin))
    return kernel(RotateRefs(partials, *flat))
