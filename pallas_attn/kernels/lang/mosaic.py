"""The thin layer over Mosaic GPU: whatever depends on the JAX version, or on the CPU interpreter,
is said here and once.

Kernels say what they move; this file says how the installed JAX wants to hear it. The first half
serves kernels that work on tiles. The second, from `each_thread` on, is for kernels that only move
bytes: a program for one thread, written with Python's operators. The GPU runs it as it stands; the
tests run the same program in NumPy, 128 threads at a time, with every address checked.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

from pallas_attn.kernels.lang import thread_math

Ref = Any

THREADS = 128  # of a block with one warpgroup
REDUCTION_BYTES = 2048  # of shared memory that Mosaic takes where rows are reduced
TILE = plgpu.Layout.WGMMA  # a matmul's result, [rows, columns]
ROW = TILE.reduce(1)  # one number a row of it
COLUMN = TILE.reduce(0)  # one number a column
PARAMETER_BYTES = 32764  # of one launch, since CUDA 12.1; an operand in global memory takes 8

_store = getattr(
    plgpu, "store", None
)  # new in JAX 0.12, which then refuses a plain `ref[...] = value` for some layouts


def load(ref: Ref, layout: Any = None) -> jax.Array:
    """The tile under `ref` in registers, in `layout`; from global memory too, where no layout has a
    vectorised load.
    """
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Ref, value: jax.Array) -> None:
    """Writes a register tile of any layout to global memory."""
    if _store is None:
        ref[...] = value
    else:
        _store(ref, value, optimized=False)


def swizzled(shape: Sequence[int], dtype: Any, swizzle: int) -> Any:
    """Shared memory for tiles that matmuls and TMA share; rows are whole swizzles (bytes)."""
    return plgpu.SMEM(tuple(shape), dtype, transforms=_swizzling(dtype, swizzle))


def _swizzling(dtype: Any, swizzle: int) -> tuple[Any, Any]:
    tile: Any = plgpu.TilingTransform  # mypy takes both for abstract
    swizzle_by: Any = plgpu.SwizzleTransform
    return tile((8, swizzle // jnp.dtype(dtype).itemsize)), swizzle_by(swizzle)


def on_peer(ref: Ref, device: jax.Array) -> Ref:
    """What `ref`, an operand of the kernel, is on another GPU of the mesh, whose number there is
    given: for programs of `each_thread`. Kernels that read or write it need a mesh of one axis (or
    others of length 1), which is all GPUs that the process sees, in their order; XLA has all of
    them arrive before it launches any, but for `without_device_barrier`.
    """
    axes = max(len(jax.sharding.get_abstract_mesh().axis_names), 1)
    place: Any = (*[jnp.int32(0)] * (axes - 1), device)
    return plgpu.remote_ref(ref, place)


def this_device(axis: str) -> jax.Array:
    """In a kernel that reaches others (`on_peer`), the number of this GPU along an axis of the
    mesh. As an operand it would be made by a launch of XLA's.
    """
    return lax.axis_index(axis)


MOST_DEVICES = 8  # of a mesh whose memory one kernel reaches


def on_peers(refs: Sequence[Ref], device: jax.Array, devices: int) -> tuple[tuple[Ref, ...], ...]:
    """What refs are on each other GPU of the mesh: on the one after `device`, the next, .."""
    others = (lax.rem(device + away, jnp.int32(devices)) for away in range(1, devices))
    return tuple(tuple(on_peer(ref, other) for ref in refs) for other in others)


def without_device_barrier() -> Any:
    """Parameters of a kernel that reaches other GPUs (`on_peer`) and is launched at once: XLA does
    not have all of them arrive before.
    """
    return plgpu.CompilerParams(skip_device_barrier=True)


REDUCED = 2048  # bytes in which Mosaic reduces over an axis, in a kernel that does anywhere


def bytes_of(scratch: Any) -> int:
    """Of all buffers of a tree of shared memory, as Mosaic lays them out: each begins on a line of
    1024 bytes. Its barriers are not counted, nor what is `REDUCED` in.
    """
    leaves = jax.tree.leaves(scratch, is_leaf=lambda x: isinstance(x, plgpu.Barrier))
    buffers = [x for x in leaves if not isinstance(x, plgpu.Barrier)]
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers]
    return sum(-(-size // 1024) * 1024 for size in sizes)


def columns(ref: Ref, start: int, width: int, traced: Any) -> Any:
    """Columns of a ref in global memory, for TMA, which fills what lies past its end with zeros.

    JAX 0.12 refuses to slice past an end where it can see it: any `traced` integer hides it.
    """
    return pl.ds(start if start + width <= ref.shape[-1] else start + 0 * traced, width)


def share_registers(  # noqa: PLR0913
    wg: jax.Array,
    workers: int,
    load: Callable[[], None] | Sequence[Callable[[], None]],
    compute: Callable[[], None],
    ours: int,
    loader: int = 24,
) -> None:
    """Warpgroup `workers` loads with `loader` registers a thread, or as many from it on as there
    are loads; those below compute with `ours`. A block begins with an equal number for each, a
    multiple of 8: whoever asks for more than all of them have together waits for ever.
    """
    loads = load if isinstance(load, Sequence) else (load,)
    groups = workers + len(loads)
    equal = min(65536 // (THREADS * groups) // 8 * 8, 240)
    assert workers * ours + len(loads) * loader <= groups * equal and ours % 8 == 0 == loader % 8

    for number, one in enumerate(loads):

        @pl.when(wg == workers + number)
        def _(one=one):
            plgpu.set_max_registers(loader, action="decrease")
            one()

    @pl.when(wg < workers)
    def _():
        plgpu.set_max_registers(ours, action="increase")
        compute()


def without_barriers(by_lane: bool = False) -> Any:
    """Parameters of a kernel whose warpgroups read what they write to shared memory by TMA or
    matmuls only, after `commit_smem`, or after a barrier. Else Mosaic puts each store between two
    barriers of its warpgroup.
    """
    lane, warpgroup = plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        lowering_semantics=lane if by_lane else warpgroup,
    )


def filled(shape: Sequence[int], value: Any, dtype: Any = jnp.float32) -> jax.Array:
    """A tile (2-D), or one number a row of it (1-D), of equal values in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), TILE if len(shape) == 2 else ROW)


def positions(shape: Sequence[int], axis: int, start: Any, layout: Any = TILE) -> jax.Array:
    """start, start + 1, ... along one axis of a tile in `layout`, or down its rows alone."""
    layout = layout if len(shape) == 2 else layout.reduce(1)
    return plgpu.broadcasted_iota(jnp.int32, tuple(shape), axis, layout=layout) + start


def warp_layout(shape: tuple[int, int], down: int) -> Any:
    """The layout of a warpgroup's tile of which each warp has one piece in whole: `down` of them
    lie one above the other, 4 // down beside each other.
    """
    rows, columns = shape
    steps = (shape, (rows // down, columns * down // 4), (16, 8), (8, 8), (1, 2))
    whole = mgpu.TiledLayout(Tiling(steps), (-10, -9), (-4, -3), -1, _check_canonical=False)
    found = whole.canonicalize()
    return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)


def array_of(registers: Sequence[ir.Value], shape: Sequence[int], layout: Any) -> Any:
    """In inlined code: an array of this shape and layout of a thread's registers."""
    kind, filled = layout.to_mgpu(), np.empty(len(registers), object)
    filled[:] = registers
    filled = filled.reshape(kind.registers_shape(tuple(shape)))
    return mgpu.FragmentedArray(_registers=filled, _layout=kind, _is_signed=None)


def broadcast_rows(rows: jax.Array, shape: Sequence[int]) -> jax.Array:
    """One number a row, spread over the columns."""
    return lax.broadcast_in_dim(rows, tuple(shape), [0])


def broadcast_scalar(scalar: jax.Array, shape: Sequence[int]) -> jax.Array:
    """One number, everywhere: Mosaic does not broadcast the operands of a select by itself."""
    return lax.broadcast_in_dim(scalar, tuple(shape), ())


def opaque_zero(number: jax.Array, bits: int = 31) -> jax.Array:
    """0, which the compiler does not know: of an int32 from 0 to below 2**bits. What is computed
    with it is computed here, not ahead of a loop and kept in registers, of which there are too few.
    """
    return lax.shift_right_logical(number, jnp.int32(bits))


def results_are_used(used: jax.Array, matmuls: int) -> None:
    """Says whether anybody uses what this warpgroup's next `matmuls` give. It is no code: where not
    (0), the interpreter does not ask who writes what they read.
    """

    def code(_, used):
        del used

    inline: Any = code
    inline.matmuls = matmuls
    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(inline)(used)


MOST_BLOCKS = 65535  # along an axis of a grid that is not CUDA's x


def grid_of(**axes: int) -> dict[str, Any]:
    """A grid of so many blocks along each axis, as `plgpu.kernel` takes it. The last axis becomes
    CUDA's x: the longest, where another has more blocks than CUDA launches along it.
    """
    if max(list(axes.values())[:-1], default=0) > MOST_BLOCKS:
        axes = dict(sorted(axes.items(), key=lambda axis: axis[1]))
    return {"grid": tuple(axes.values()), "grid_names": tuple(axes)}


def overlap_launches() -> None:
    """From sm90 on: what follows sees all that earlier kernels wrote, but the launch itself began
    while the one before was ending, if that was told so too (programmatic dependent launch); and
    the kernel after this one may begin.
    """
    plgpu.griddepcontrol_launch_dependents()
    plgpu.griddepcontrol_wait()


def lane_kernel(  # noqa: PLR0913
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
    `scratch`. `early`: see `overlap_launches`.

    Lane semantics: there is no layout to infer, which is a third of the time that lowering takes.
    """

    def kernel(*refs: Any) -> None:
        if early:
            overlap_launches()
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
    number = plgpu.Layout.WG_STRIDED((THREADS,), 1)

    def kind(_: Any, swizzle: Any = ()) -> Any:
        return plgpu.RefType(_swizzling(*swizzle) if swizzle else ())

    types = (
        jax.tree.map(kind, refs, *([] if swizzles is None else [swizzles])),
        jax.tree.map(lambda x: number if jnp.ndim(x) else plgpu.Layout.WG_SPLAT, scalars),
    )

    def code(_, refs, scalars):
        values = [_one(x.registers.item()) for x in jax.tree.leaves(scalars, is_leaf=_is_array)]
        scalars = jax.tree.unflatten(jax.tree.structure(types[1]), values)
        result = program(thread or Thread(), refs, scalars)
        if returns is None:
            return None
        if returns == "one":
            return mgpu.FragmentedArray(
                _registers=np.array(result.value, object),
                _layout=mgpu.WGSplatFragLayout(()),
                _is_signed=True,
            )
        register = vector.broadcast(ir.VectorType.get((1,), _int(32)), result.value)
        return mgpu.FragmentedArray(
            _registers=np.array([register], object), _layout=number.to_mgpu(), _is_signed=True
        )

    inline: Any = code
    inline.program = program  # the interpreter in tests/ runs this
    results = {
        None: None,
        "one": plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
        "each": plgpu.ShapeDtypeStruct((THREADS,), jnp.int32, layout=number),
    }
    call = plgpu.inline_mgpu(arg_types=types, return_type=results[returns])
    return call(inline)(refs, scalars)


class ThreadContext(NamedTuple):
    """What every function of such a program is given, as `ctx`."""

    thread: Any
    refs: Any
    at: Any  # the scalars: where in the grid, and what is known there
    plan: Any  # what is static


def in_context(program: Callable[..., Any], plan: Any, **options: Any) -> Callable[..., Any]:
    """`program(ctx, **options)` as `each_thread` takes it."""
    return lambda thread, refs, at: program(ThreadContext(thread, refs, at, plan), **options)


def _one(register: ir.Value) -> Any:
    if isinstance(register.type, ir.VectorType):
        register = vector.extract(register, [], [0])
    return Int(register)


def _is_array(x: Any) -> bool:
    return hasattr(x, "registers")  # Mosaic's own arrays are trees too


class Int:
    """An integer, or a condition, of one thread. Python ints mix in; `//` and `%` want operands
    that are not negative.
    """

    def __init__(self, value: ir.Value):
        self.value = value

    def _with(self, op: Callable[..., Any], other: Any) -> "Int":
        if not isinstance(other, Int):
            other = Int(utils.c(other, self.value.type))
        return Int(op(self.value, other.value))

    def _compare(self, predicate: Any, other: Any) -> "Int":
        return self._with(lambda a, b: arith.cmpi(predicate, a, b), other)

    def __add__(self, other):
        return self._with(arith.addi, other)

    def __sub__(self, other):
        return self._with(arith.subi, other)

    def __mul__(self, other):
        return self._with(arith.muli, other)

    def __floordiv__(self, other):
        return self._with(arith.divui, other)

    def __mod__(self, other):
        return self._with(arith.remui, other)

    def __and__(self, other):
        return self._with(arith.andi, other)

    def __or__(self, other):
        return self._with(arith.ori, other)

    def __rshift__(self, other):
        return self._with(arith.shrui, other)

    def __lshift__(self, other):
        return self._with(arith.shli, other)

    def __lt__(self, other):
        return self._compare(arith.CmpIPredicate.slt, other)

    def __le__(self, other):
        return self._compare(arith.CmpIPredicate.sle, other)

    def __gt__(self, other):
        return self._compare(arith.CmpIPredicate.sgt, other)

    def __ge__(self, other):
        return self._compare(arith.CmpIPredicate.sge, other)

    def __array_ufunc__(self, ufunc: Any, method: str, a: Any, b: Any) -> "Int":
        """What NumPy's minimum and maximum make of it: the bounds of a Mask are said with them."""
        del method
        op = {"minimum": arith.minsi, "maximum": arith.maxsi}[ufunc.__name__]
        return a._with(op, b) if isinstance(a, Int) else b._with(op, a)


class Thread:
    """One thread of a block, seen from a program that `each_thread` runs.

    Memory is counted in words of 1, 2, 4, 8 or 16 bytes; an index may be 32 or 64 bits wide and a
    ref of any dtype.
    """

    @property
    def index(self) -> Int:
        """Which of its warpgroup's threads this is."""
        return Int(arith.index_cast(_int(32), gpu.thread_id(gpu.Dimension.x))) % THREADS

    def wide(self, x: Int) -> Int:
        """`x` in 64 bits, for offsets that 32 cannot hold."""
        return Int(arith.extsi(_int(64), x.value))

    def minimum(self, a: Int, b: int) -> Int:
        return a._with(arith.minsi, b)

    def select(self, where: Int, a: Int, b: Any) -> Int:
        return a._with(lambda a, b: arith.select(where.value, a, b), b)

    def maximum(self, a: Int, b: Any) -> Int:
        return a._with(arith.maxsi, b)

    def most_of_lanes(self, a: Int, lanes: int) -> Int:
        """The largest over each group of so many neighbouring threads, a power of two up to 32."""
        return Int(thread_math.most_of_lanes(a.value, lanes))

    def numbers(self, word: Int, nbytes: int, dtype: str) -> list[Any]:
        """The numbers in a word, each as a float32 of the thread: of bfloat16, float16 and float32
        and, from sm89 on and in words of 4 bytes or more, of int8 and float8.
        """
        return thread_math.from_word(word.value, nbytes, dtype)

    def narrow(self, values: Sequence[Any], dtype: str) -> Int:
        """1 to 8 float32 as int8 or, from sm89 on, float8, rounded to nearest even: a word of as
        many bytes.
        """
        return Int(thread_math.to_word(list(values), dtype))

    def packed(self, values: Sequence[Int]) -> Int:
        """The low bytes of 1 to 8 integers: a word of as many bytes."""
        return Int(thread_math.packed([x.value for x in values], 8))

    def bits(self, number: Any) -> Int:
        return Int(thread_math.as_bits(number))

    def as_float(self, bits: Int) -> Any:
        return thread_math.as_float(bits.value)

    def times(self, a: Any, b: Any) -> Any:
        return thread_math.product(a, b)

    def plus(self, a: Any, b: Any) -> Any:
        return thread_math.total(a, b)

    def reciprocal(self, a: Any) -> Any:
        """1 / a, correctly rounded, for a from 2**-126 to 2**125."""
        return thread_math.reciprocal(a)

    def sum_of_lanes(self, a: Any, lanes: int) -> Any:
        """The sum of a float32 over each group of so many neighbouring threads, a power of two up
        to 32.
        """
        return thread_math.sum_of_lanes(a, lanes)

    def rsqrt(self, a: Any) -> Any:
        """1 / sqrt(a), good to 2**-22."""
        return thread_math.rsqrt(a)

    def rounded(self, values: Sequence[Any], dtype: str) -> Int:
        """float32 as bfloat16, float16 or float32, rounded to nearest even: a word of 2 to 16
        bytes.
        """
        return Int(thread_math.rounded(list(values), dtype))

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
            with ir.InsertionPoint(
                region.blocks.append() if not region.blocks else region.blocks[0]
            ):
                scf.yield_([pointer_of(ref) for ref in refs])
        return tuple(chosen.results)

    def prefetch(self, ref: Ref, index: Int, nbytes: int) -> None:
        """Has the word's cache line brought near, for a `load` that has to wait for its index."""
        line = [address_of(ref, index, nbytes)]
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, line, "prefetch.L1 [$0];", "l", has_side_effects=True)

    def in_order(self) -> None:
        """Loads before this are issued before loads after it, which ptxas does not promise.

        A warp that waits for an index would otherwise hold back loads that need none.
        """
        nothing = ir.Type.parse("!llvm.void")
        code = "bar.warp.sync 0xffffffff;"
        llvm.inline_asm(nothing, [], code, "~{memory}", has_side_effects=True)

    def load(self, ref: Ref, index: Int, nbytes: int) -> Int:
        """The word at `index`. One of 16 bytes is good for `store` and `numbers` only."""
        address = address_of(ref, index, nbytes)
        return Int(llvm.load(word_type(nbytes), address, alignment=nbytes))

    def load_where(self, ref: Ref, index: Int, nbytes: int, where: Int) -> Int:
        """The word at `index` where the condition holds; elsewhere 0, and the index may be
        anything. It is not moved past other loads of the kind, nor past stores.
        """
        count, kind = (4, "v4.b32") if nbytes == 16 else (1, f"b{8 * nbytes}")
        bits = max(8 * nbytes // count, 32)
        one = _int(bits)
        register = "l" if nbytes == 8 else "r"
        names = [f"${n}" for n in range(count)]
        zeros = "".join(f"mov.b{bits} {name}, 0; " for name in names)
        into = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        several = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
        found = llvm.inline_asm(
            several if count > 1 else one,
            [arith.extui(_int(32), where.value), address_of(ref, index, nbytes)],
            f"{{ .reg .pred p; setp.ne.b32 p, ${count}, 0; {zeros}"
            f"@p ld.global.{kind} {into}, [${count + 1}]; }}",
            ",".join([f"=&{register}"] * count) + ",r,l,~{memory}",
            has_side_effects=True,
        )
        if nbytes < 4:
            return Int(arith.trunci(word_type(nbytes), found))
        if nbytes < 16:
            return Int(found)
        word = llvm.mlir_undef(word_type(16))
        for n in range(count):
            word = vector.insert(llvm.extractvalue(_int(32), found, [n]), word, [], [n])
        return Int(word)

    def store(self, ref: Ref, index: Int, value: Int, nbytes: int, where: Int) -> None:
        """Writes the word at `index` where the condition holds; elsewhere the index may be
        anything.

        One instruction with a predicate. Behind a branch, LLVM and ptxas would both move the load
        of `value` there too, to wait for whatever the branch waits for.
        """
        word = value.value
        words = [word] if nbytes < 16 else [vector.extract(word, [], [i]) for i in range(4)]
        if nbytes < 4:
            words = [arith.extui(_int(32), word)]
        kind = {16: "v4.b32"}.get(nbytes, f"b{8 * nbytes}")
        names = ", ".join(f"${n}" for n in range(2, 2 + len(words)))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [arith.extui(_int(32), where.value), address_of(ref, index, nbytes), *words],
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; "
            f"@p st.global.{kind} [$1], " + (f"{{{names}}}" if nbytes == 16 else names) + "; }",
            "r,l," + ",".join("l" if nbytes == 8 else "r" for _ in words) + ",~{memory}",
            has_side_effects=True,
        )


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def word_type(nbytes: int) -> ir.Type:
    """Of a word that is read at once."""
    return ir.VectorType.get((4,), _int(32)) if nbytes == 16 else _int(8 * nbytes)


def pointer_of(ref: Any) -> ir.Value:
    """To the first element of an array in memory."""
    return utils.memref_ptr(ref) if isinstance(ref.type, ir.MemRefType) else ref


def address_of(ref: Any, index: Int, nbytes: int) -> ir.Value:
    """Of word `index`, of `nbytes` each."""
    return utils.getelementptr(pointer_of(ref), [index.value], word_type(nbytes))
