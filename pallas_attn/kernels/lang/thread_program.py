"""Programs of one thread, written with Python's operators: for kernels that move bytes.

The GPU runs a program as it stands; the tests run the same one in NumPy, 128 threads at a time,
with every address checked. `threads.py` has programs that also use shared memory, barriers and
floats.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.asm import (
    Int,
    address_of,
    do,
    do_where,
    give,
    i32,
    number_of,
    pointer_of,
    word_type,
)
from pallas_attn.kernels.lang.mosaic import THREADS
from pallas_attn.kernels.lang.types import DType, Ref


class Thread:
    """One thread of a block, seen from a program that `each_thread` runs.

    Memory is counted in words of 1, 2, 4, 8 or 16 bytes; an index may be 32 or 64 bits wide and a
    ref of any dtype.
    """

    launch: Any = None  # Mosaic's context, which makes tensor maps

    @property
    def index(self) -> Int:
        """The number of the thread in its warpgroup."""
        return mosaic.thread_index()

    def to_int64(self, x: Int) -> Int:
        """`x` in 64 bits, for offsets that 32 cannot hold."""
        return Int(arith.extsi(ir.IntegerType.get_signless(64), x.value))

    def minimum(self, a: Int, b: Int | int) -> Int:
        return a._with(arith.minsi, b)

    def maximum(self, a: Int, b: Int | int) -> Int:
        return a._with(arith.maxsi, b)

    def select(self, where: Int, a: Int, b: Int | int) -> Int:
        return a._with(lambda a, b: arith.select(where.value, a, b), b)

    def pick(self, which: Int, table: Sequence[tuple[Ref, ...]]) -> tuple[Ref, ...]:
        """Row `which` of a table of refs: one jump, however long the table is.

        Only pointers come out of the jump, so what is done with them is compiled once. `lax.switch`
        would compile it once a row, with all refs handed to every row: a time that grows with the
        square of their number.
        """
        # mypy knows the generated class only, which takes other arguments.
        switch: Any = scf.IndexSwitchOp
        chosen = switch(
            [llvm.PointerType.get()] * len(table[0]),
            arith.index_cast(ir.IndexType.get(), which.value),
            range(len(table) - 1),
        )
        default, *cases = chosen.regions
        for region, refs in zip([*cases, default], table, strict=True):
            with ir.InsertionPoint(region.blocks[0]):
                scf.yield_([pointer_of(ref) for ref in refs])
        return tuple(chosen.results)

    def prefetch(self, ref: Ref, index: Int, nbytes: int) -> None:
        """Has the word's cache line brought near, for a `load` that has to wait for its index."""
        address, nothing = address_of(ref, index, nbytes), ir.Type.parse("!llvm.void")
        give(nothing, "prefetch.L1 [$0];", [address], "l")

    def order_loads(self) -> None:
        """Loads before this are issued before loads after it, which ptxas does not promise.

        A warp that waits for an index would otherwise hold back loads that need none.
        """
        do("bar.warp.sync 0xffffffff;", [], "")

    def load(self, ref: Ref, index: Int, nbytes: int) -> Int:
        """The word at `index`. One of 16 bytes is good for `store` and numbers only."""
        address = address_of(ref, index, nbytes)
        return Int(llvm.load(word_type(nbytes), address, alignment=nbytes))

    def load_where(self, ref: Ref, index: Int, nbytes: int, where: Int) -> Int:
        """The word at `index` where the condition holds; elsewhere 0, and the index may be
        anything. It is not moved past other loads of the kind, nor past stores.
        """
        count, kind = (4, "v4.b32") if nbytes == 16 else (1, f"b{8 * nbytes}")
        bits = max(8 * nbytes // count, 32)
        register = "l" if nbytes == 8 else "r"
        names = [f"${n}" for n in range(count)]
        zeros = "".join(f"mov.b{bits} {name}, 0; " for name in names)
        into = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        several = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
        loaded = give(
            several if count > 1 else ir.IntegerType.get_signless(bits),
            f"{{ .reg .pred p; setp.ne.b32 p, ${count}, 0; {zeros}"
            f"@p ld.global.{kind} {into}, [${count + 1}]; }}",
            [arith.extui(i32(), where.value), address_of(ref, index, nbytes)],
            ",".join([f"=&{register}"] * count) + ",r,l,~{memory}",
        )
        if nbytes < 4:
            return Int(arith.trunci(word_type(nbytes), loaded))
        if nbytes < 16:
            return Int(loaded)
        word = llvm.mlir_undef(word_type(16))
        for n in range(count):
            word = vector.insert(llvm.extractvalue(i32(), loaded, [n]), word, [], [n])
        return Int(word)

    def store(self, ref: Ref, index: Int, value: Int, nbytes: int, where: Int) -> None:
        """Writes the word at `index` where the condition holds; elsewhere the index may be
        anything.
        """
        word = value.value
        words = [word] if nbytes < 16 else [vector.extract(word, [], [i]) for i in range(4)]
        if nbytes < 4:
            words = [arith.extui(i32(), word)]
        kind = {16: "v4.b32"}.get(nbytes, f"b{8 * nbytes}")
        names = ", ".join(f"${n}" for n in range(2, 2 + len(words)))
        names = f"{{{names}}}" if nbytes == 16 else names
        constraints = ",".join(["l", *("l" if nbytes == 8 else "r" for _ in words)])
        operands = [address_of(ref, index, nbytes), *words]
        do_where(where.value, f"st.global.{kind} [$1], {names}", operands, constraints)


EACH = plgpu.Layout.WG_STRIDED((THREADS,), 1)  # a number a thread
RESULTS = {
    None: None,
    "one": mosaic.NUMBER,
    "each": mosaic.tile_type((THREADS,), jnp.int32, layout=EACH),
}


class ThreadContext(NamedTuple):
    """The argument of every function of such a program, as `ctx`."""

    thread: Any  # a `Thread`, or the interpreter's for 128 of them
    refs: Any
    at: Any  # scalars: the place in the grid, and what is known there
    plan: Any  # static facts


def each_thread(
    program: Callable[..., Any],
    refs: Any,
    scalars: Any,
    thread: Any = None,
    returns: Literal["each", "one"] | None = None,
    swizzles: Any = None,
) -> Any:
    """Runs `program(thread, refs, scalars)` in every thread of the block: `Thread` says what a
    program can do.

    `refs` is a tree of whole refs in global or shared memory, `scalars` a tree of int32 scalars,
    which arrive as `Int`s; or of int32[128], a number a thread. `thread`: a `Thread` that can do
    more. `returns`: the program gives an Int, and the call those of "each" thread as int32[128], or
    "one", its own, with which a thread goes on as with any int32; None: nothing. `swizzles`: a tree
    like `refs`, (dtype, bytes) where a ref is `swizzled`, () elsewhere; None: none is.
    """

    def kind(_: Any, swizzle: tuple[DType, int] | tuple[()] = ()) -> plgpu.RefType:
        return plgpu.RefType(mosaic.swizzle_transforms(*swizzle) if swizzle else ())

    types = (
        jax.tree.map(kind, refs, *([] if swizzles is None else [swizzles])),
        jax.tree.map(lambda x: EACH if jnp.ndim(x) else plgpu.Layout.WG_SPLAT, scalars),
    )

    def code(launch, refs, scalars):
        leaves = jax.tree.leaves(scalars, is_leaf=lambda x: hasattr(x, "registers"))
        values = [Int(number_of(x.registers.item())) for x in leaves]
        scalars = jax.tree.unflatten(jax.tree.structure(types[1]), values)
        mine = thread or Thread()
        mine.launch = launch
        result = program(mine, refs, scalars)
        if returns is None:
            return None
        if returns == "one":
            register: Any = result.value
            layout: Any = mgpu.WGSplatFragLayout(())
        else:
            register = vector.broadcast(ir.VectorType.get((1,), i32()), result.value)
            register, layout = [register], EACH.to_mgpu()
        registers = np.array(register, object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    inline: Any = code
    inline.program = program  # the interpreter in tests/ runs this
    call = plgpu.inline_mgpu(arg_types=types, return_type=RESULTS[returns])
    return call(inline)(refs, scalars)


def in_context(program: Callable[..., Any], plan: Any, **options: Any) -> Callable[..., Any]:
    """`program(ctx, **options)` as `each_thread` takes it."""
    return lambda thread, refs, at: program(ThreadContext(thread, refs, at, plan), **options)


def lane_kernel(
    body: Callable[..., None],
    *,
    grid: int,
    name: str,
    early: bool = False,
    out_type: Sequence[Any] = (),
    scratch: Sequence[Any] = (),
) -> Callable[..., Any]:
    """A kernel of `grid` blocks of `THREADS` threads with no tiles in it. It may write to the refs
    that it is given; after those its body has results, of `out_type`, and shared memory, of
    `scratch`. `early`: see `mosaic.overlap_launches`.

    Lane semantics: there is no layout to infer, which is a third of the time that lowering takes.
    """

    def kernel(*refs: Ref) -> None:
        if early:
            mosaic.overlap_launches()
        body(*refs)

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        scratch_types=tuple(scratch),
        grid=(grid,),
        grid_names=("block",),
        compiler_params=params,
        kernel_name=name,
    )
