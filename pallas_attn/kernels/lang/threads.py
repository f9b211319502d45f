"""Programs of single threads that use shared memory, barriers, bulk copies from any pointer,
atomics and floating point: `Thread` is `thread_program.Thread` with all of these.

A program runs on the GPU as it stands; the interpreter of the tests runs the same program in NumPy.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_attn.kernels.lang import mosaic, thread_math, thread_program
from pallas_attn.kernels.lang.asm import (
    Int,
    address_of,
    do,
    do_where,
    give,
    i32,
    pointer_of,
    shared_address,
    word_type,
)
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import DType, GmemRef, Index, Ref, SmemRef

WARPS = 4  # warps of a warpgroup
LANES = 32  # threads of a warp
FOUR = 4  # floats in a word of 16 bytes
UNROLLED = 8  # iterations up to which a loop is unrolled
SENTINEL = -1  # 4 bytes of memory to which another GPU has still to store; a NaN no GPU computes
_NAN = 0x7FFFFFFF  # the one that GPUs compute
IN_FLIGHT = 2  # items whose loads are issued before the first is waited for


class Word(NamedTuple):
    """The place at which a copy begins: word `index` + `offset` of `ref`, in words of as many bytes
    as are copied at a time. `offset` is a Python int, which becomes part of the instruction.
    """

    ref: Ref
    index: Index
    offset: int = 0


class Box(NamedTuple):
    """A box of an array in global memory, which one TMA copies. `begin`: the index of its first
    element in each axis but the last, which the box spans whole; `shape`: its size in each axis.
    """

    ref: GmemRef
    begin: tuple[Index, ...]
    shape: tuple[int, ...]


def _operator(op: Callable[..., ir.Value]) -> Callable[["Float", Any], "Float"]:
    return lambda self, other: Float(op(self.value, _float(other)))


class Float:
    """A float32 of one thread. Python numbers mix in. Operations are rounded to nearest even, and
    none is fused with another: a program gives the same bits as IEEE arithmetic anywhere.
    """

    def __init__(self, value: ir.Value):
        self.value = value

    __add__ = _operator(arith.addf)
    __sub__ = _operator(arith.subf)
    __mul__ = _operator(arith.mulf)
    __truediv__ = _operator(arith.divf)

    def compare(self, predicate: arith.CmpFPredicate, other: "Float | float") -> Int:
        return Int(arith.cmpf(predicate, self.value, _float(other)))

    def __le__(self, other: "Float | float") -> Int:
        return self.compare(arith.CmpFPredicate.OLE, other)


def _float(x: Float | float) -> ir.Value:
    return x.value if isinstance(x, Float) else utils.c(float(x), ir.F32Type.get())


class Thread(thread_program.Thread):
    """`thread_program.Thread` for a kernel that also computes.

    Shared memory is addressed in words, as global memory is; `sync` orders accesses to it within
    the block.
    """

    # ---- integers --------------------------------------------------------------------------------

    def choose(self, where: Int, a: Any, b: Any) -> Any:
        """`a` where the condition holds, else `b`; both Ints or both Floats."""
        return type(a)(arith.select(where.value, a.value, b.value))

    def running_sum(self, x: Int) -> Int:
        """The sum of x over this lane and those below it in its warp."""
        for distance in (1, 2, 4, 8, 16):
            ptx = (
                "{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, "
                f"{distance}, 0, 0xffffffff; @!p mov.b32 t, 0; add.s32 $0, $1, t; }}"
            )
            x = Int(give(i32(), ptx, [x.value], "=r,r"))
        return x

    def total_of_lanes(self, x: Int) -> Int:
        """The sum of x over the warp."""
        return Int(thread_math.over_warp(x.value, "add"))

    def most_of_lanes(self, x: Int, lanes: int) -> Int:
        """The largest over each group of so many neighbouring threads, a power of two up to 32."""
        return Int(thread_math.most_of_lanes(x.value, lanes))

    def of_lane(self, x: Any, lane: Int) -> Any:
        """The value of x, an Int or a Float, in lane `lane` of the warp."""
        word = x.value if isinstance(x, Int) else arith.bitcast(i32(), x.value)
        ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        word = give(i32(), ptx, [word, lane.value], "=r,r,r")
        return Int(word) if isinstance(x, Int) else self.as_float(Int(word))

    # ---- floating point --------------------------------------------------------------------------

    def number(self, x: float) -> Float:
        return Float(_float(x))

    def bits(self, x: Float) -> Int:
        return Int(arith.bitcast(i32(), x.value))

    def as_float(self, bits: Int) -> Float:
        return Float(arith.bitcast(ir.F32Type.get(), bits.value))

    def exp2(self, x: Float) -> Float:
        return self._unary("ex2.approx.ftz.f32", x)

    def log2(self, x: Float) -> Float:
        return self._unary("lg2.approx.f32", x)

    def rsqrt(self, x: Float) -> Float:
        """1 / sqrt(x), good to 2**-22."""
        return self._unary("rsqrt.approx.f32", x)

    def _unary(self, name: str, x: Float) -> Float:
        kind = ir.F32Type.get()
        return Float(llvm.inline_asm(kind, [x.value], f"{name} $0, $1;", "=f,f"))

    def reciprocal(self, x: Float) -> Float:
        """1 / x, correctly rounded, for x from 2**-126 to 2**125."""
        return Float(thread_math.reciprocal(x.value))

    def highest(self, a: Float, b: Float | float) -> Float:
        """The larger of two; NaN where one of them is NaN."""
        return Float(arith.maximumf(a.value, _float(b)))

    def lowest(self, a: Float, b: Float | float) -> Float:
        """The smaller of two; NaN where one of them is NaN."""
        return Float(arith.minimumf(a.value, _float(b)))

    def warp_highest(self, x: Float) -> Float:
        """The largest over the lanes of the warp."""
        return _over_lanes(self.highest, x, LANES)

    def warp_sum(self, x: Float) -> Float:
        return self.sum_of_lanes(x, LANES)

    def sum_of_lanes(self, x: Float, lanes: int) -> Float:
        """The sum over each group of so many neighbouring threads, a power of two up to 32."""
        return _over_lanes(operator.add, x, lanes)

    def is_zero(self, x: Float) -> Int:
        return x.compare(arith.CmpFPredicate.OEQ, 0.0)

    def nothing_yet(self, x: Float) -> Int:
        """Whether x is -inf."""
        return x.compare(arith.CmpFPredicate.OEQ, -np.inf)

    # ---- numbers of other dtypes -----------------------------------------------------------------

    def numbers(self, word: Int, nbytes: int, dtype: str) -> list[Float]:
        """The numbers in a word: of bfloat16, float16 and float32 and, from sm89 on and in words of
        4 bytes or more, of int8 and float8.
        """
        return [Float(x) for x in thread_math.from_word(word.value, nbytes, dtype)]

    def rounded(self, values: Sequence[Float], dtype: DType) -> Int:
        """Floats as bfloat16, float16 or float32, rounded to nearest even: a word of 2 to 16
        bytes.
        """
        return Int(thread_math.rounded([x.value for x in values], str(jnp.dtype(dtype))))

    def narrow(self, values: Sequence[Float], dtype: str) -> Int:
        """1 to 8 floats as int8 or, from sm89 on, float8, rounded to nearest even: a word of as
        many bytes.
        """
        return Int(thread_math.to_word([x.value for x in values], dtype))

    def packed(self, values: Sequence[Int]) -> Int:
        """The low bytes of 1, 2, 4, 8 or 16 integers: a word of as many bytes."""
        return Int(thread_math.packed([x.value for x in values], 8))

    # ---- loops -----------------------------------------------------------------------------------

    def loop(self, count: Int | int, carry: list, body: Callable[[Int, list], list]) -> list:
        """`for i in range(count): carry = body(i, carry)`; `count` is a Python int, or the same Int
        in all threads.
        """
        kinds = [type(x) for x in carry]
        stop = utils.c(count, i32()) if isinstance(count, int) else count.value
        for_op: Any = scf.ForOp  # mypy knows the generated class only
        loop = for_op(utils.c(0, i32()), stop, utils.c(1, i32()), [x.value for x in carry])
        with ir.InsertionPoint(loop.body):
            inside = [kind(x) for kind, x in zip(kinds, loop.inner_iter_args, strict=True)]
            scf.yield_([x.value for x in body(Int(loop.induction_variable), inside)])
        return [kind(x) for kind, x in zip(kinds, loop.results, strict=True)]

    # ---- memory ----------------------------------------------------------------------------------

    def load_floats(self, ref: GmemRef, index: Int, count: int) -> list[Float]:
        """`count` (1 or 4) floats of global memory: word `index`, in words of `count` floats."""
        return _floats(ref, index, count)

    def store_floats(self, ref: GmemRef, index: Int, values: list[Float], where: Int) -> None:
        """Stores 1 or 4 floats side by side."""
        self.store(ref, index, self.rounded(values, "float32"), 4 * len(values), where)

    def load_narrow(self, ref: GmemRef, index: Int, dtype: DType) -> list[Float]:
        """4 numbers of a 16-bit dtype, a word of 8 bytes, as floats."""
        kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
        word = llvm.bitcast(ir.VectorType.get((4,), kind), self.load(ref, index, 8).value)
        numbers = [vector.extract(word, [], [i]) for i in range(4)]
        return [Float(arith.extf(ir.F32Type.get(), x)) for x in numbers]

    def store_narrow(
        self, ref: GmemRef, index: Int, values: list[Float], dtype: DType, where: Int
    ) -> None:
        """Stores 4 floats as 4 numbers of a 16-bit dtype, a word of 8 bytes."""
        self.store(ref, index, self.rounded(values, dtype), 8, where)

    def shared_floats(self, ref: SmemRef, index: Int, count: int) -> list[Float]:
        return _floats(ref, index, count)

    def shared_load(self, ref: SmemRef, index: Int) -> Int:
        return self.load(ref, index, 4)

    def shared_store(self, ref: SmemRef, index: Int, value: Int | Float, where: Int) -> None:
        """Stores an Int or a Float in a word of 4 bytes."""
        word = value.value if value.value.type == i32() else arith.bitcast(i32(), value.value)
        do_where(
            where.value, "st.shared.b32 [$1], $2", [shared_address(ref, index, 4), word], "r,r"
        )

    def sync(self, groups: int = 1) -> None:
        """A barrier of all threads of `groups` warpgroups: after it each sees what the others
        wrote to shared memory before it.
        """
        if groups == 1:
            utils.warpgroup_barrier()
        else:
            do(f"bar.sync 0, {groups * mosaic.THREADS};", [], "")

    # ---- bulk copies -----------------------------------------------------------------------------

    def make_barriers(self, ref: SmemRef, count: int) -> None:
        """Initialises barriers whose phase completes after one arrival (`announce`) and all bytes
        that it announced.
        """
        first = self.index < 1
        for i in range(count):
            address = shared_address(ref, i, 8)
            do_where(first.value, "mbarrier.init.shared::cta.b64 [$1], 1", [address], "r")
        do("fence.mbarrier_init.release.cluster;", [], "")
        self.sync()

    def announce(self, barriers: SmemRef, slot: Int, nbytes: Int, where: Int) -> None:
        """Arrives at a barrier and announces how many bytes will be copied."""
        ptx = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2"
        do_where(where.value, ptx, [shared_address(barriers, slot, 8), nbytes.value], "r,r")

    def copy(self, to: Word, source: Word, nbytes: Int, done: Word, where: Int) -> None:
        """Issues a bulk copy of `nbytes` from global to shared memory, in words of 16 bytes.
        `done` is the barrier at which the reader waits.
        """
        ptx = (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$4]"
        )
        operands = [
            shared_address(to.ref, to.index, 16),
            address_of(source.ref, source.index, 16),
            nbytes.value,
            shared_address(done.ref, done.index, 8),
        ]
        do_where(where.value, ptx, operands, "r,l,r,r")

    def copy_box(self, to: Word, source: Box, done: Word, where: Int) -> None:
        """Issues a TMA copy of a box of global memory to contiguous shared memory, at a multiple of
        128 bytes. `to`, `done` and `where` are as in `copy`.
        """
        descriptor = _tensor_map(self.launch, source)
        begin = [*source.begin, self.index * 0]  # outermost axis first
        names = ", ".join(f"${n + 3}" for n in range(len(begin)))
        ptx = (
            f"cp.async.bulk.tensor.{len(begin)}d.shared::cluster.global.mbarrier::complete_tx::"
            f"bytes [$1], [$2, {{{names}}}], [${3 + len(begin)}]"
        )
        operands = [
            shared_address(to.ref, to.index, 16),
            descriptor,
            *(x.value for x in reversed(begin)),
            shared_address(done.ref, done.index, 8),
        ]
        do_where(where.value, ptx, operands, ",".join(["r", "l", *["r"] * (len(begin) + 1)]))

    def wait(self, barriers: SmemRef, slot: Int, parity: Int) -> None:
        """Waits until all bytes that were announced for the phase are there."""
        ptx = (
            "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
            "@!p bra again; }"
        )
        do(ptx, [shared_address(barriers, slot, 8), parity.value], "r,r")

    def copy_back(self, to: Word, source: Word, nbytes: Int, where: Int) -> None:
        """Issues a bulk copy of `nbytes` from shared to global memory, in words of 16 bytes, which
        belongs to the thread's next group (`commit_copies_back`).
        """
        operands = [
            address_of(to.ref, to.index, 16),
            shared_address(source.ref, source.index, 16),
            nbytes.value,
        ]
        ptx = "cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3"
        do_where(where.value, ptx, operands, "l,r,r")

    def commit_copies_back(self) -> None:
        """Makes a group of the copies back that this thread has issued since the last group."""
        do("cp.async.bulk.commit_group;", [], "")

    def wait_copies_back(self, left: int, read: bool = False) -> None:
        """Waits until all groups of this thread but the last `left` are in global memory, where
        other blocks see them after a `signal`. `read`: until they have left shared memory.
        """
        do(f"cp.async.bulk.wait_group{'.read' if read else ''} {left};", [], "")

    # ---- copies by threads -----------------------------------------------------------------------

    def copy_async(
        self, to: Word, source: Word, there: Int, where: Int | None = None, size: int = 16
    ) -> None:
        """Issues a copy of a word of 16 (or 4) bytes from global to shared memory where `there`
        holds; elsewhere zeros are written and the source, which may be any address, is not read.
        `where`: nothing is done where it does not hold.
        """
        first = 0 if where is None else 1  # operand
        nbytes = self.select(there, self.index * 0 + size, 0)
        operands = [
            shared_address(to.ref, to.index, size),
            address_of(source.ref, source.index, size),
            nbytes.value,
        ]
        places = [f"[${first + n}+{size * x.offset}]" for n, x in enumerate((to, source))]
        level = "cg" if size == 16 else "ca"
        copy = f"cp.async.{level}.shared.global {places[0]}, {places[1]}, {size}, ${first + 2}"
        if where is None:
            do(copy + ";", operands, "r,l,r")
        else:
            do_where(where.value, copy, operands, "r,l,r")

    def commit_copies(self) -> None:
        """Makes a group of the copies that this thread has issued since the last group."""
        do("cp.async.commit_group;", [], "")

    def wait_copies(self, left: int) -> None:
        """Waits until all groups of this thread but the last `left` are there. Those of other
        threads are there after the next `sync`.
        """
        do(f"cp.async.wait_group {left};", [], "")

    # ---- between blocks --------------------------------------------------------------------------

    def signal(self, counters: GmemRef, index: Int, where: Int, remote: bool = False) -> None:
        """Adds 1 to a counter where the condition holds. A thread that sees it by `wait_until` or
        `reached` sees what this thread had done before. `remote`: it is another GPU's.
        """
        ptx = f"red.release.{'sys' if remote else 'gpu'}.global.add.u32 [$1], 1"
        do_where(where.value, ptx, [address_of(counters, index, 4)], "l")

    def wait_until(self, counters: GmemRef, index: Int, least: Int, remote: bool = False) -> None:
        """Waits until a counter has reached `least`; then what was done before those `signal`s is
        there, also for bulk copies and TMA that the thread issues. `remote`: from other GPUs.
        """
        scope = "sys" if remote else "gpu"
        ptx = (
            f"{{ .reg .pred p; .reg .b32 n; again: ld.acquire.{scope}.global.b32 n, [$0]; "
            "setp.lt.u32 p, n, $1; @p bra again; fence.proxy.async.global; }"
        )
        do(ptx, [address_of(counters, index, 4), least.value], "l,r")

    def reached(self, counters: GmemRef, index: Int, least: Int) -> Int:
        """1 where a counter has reached `least`, as after `wait_until`, else 0."""
        ptx = (
            "{ .reg .pred p; .reg .b32 n; ld.acquire.gpu.global.b32 n, [$1]; "
            "setp.ge.u32 p, n, $2; selp.b32 $0, 1, 0, p; @p fence.proxy.async.global; }"
        )
        operands = [address_of(counters, index, 4), least.value]
        return Int(give(i32(), ptx, operands, "=r,l,r,~{memory}"))

    def count(self, counters: GmemRef, index: Int, where: Int) -> None:
        """Adds 1 to a counter where the condition holds. Orders nothing: `signal` takes longer."""
        ptx = "red.relaxed.gpu.global.add.u32 [$1], 1"
        do_where(where.value, ptx, [address_of(counters, index, 4)], "l")

    def peek(self, counters: GmemRef, index: Int) -> Int:
        """A counter as it is at some time after this is issued. Orders nothing, and is waited for
        where the value is used.
        """
        address = address_of(counters, index, 4)
        return Int(give(i32(), "ld.relaxed.gpu.global.b32 $0, [$1];", [address], "=r,l,~{memory}"))

    def take(self, counters: GmemRef, index: Int, where: Int) -> Int:
        """Adds 1 to a counter where the condition holds and gives what it was, elsewhere 0. Orders
        nothing.
        """
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; mov.b32 $0, 0; "
            "@p atom.relaxed.gpu.global.add.u32 $0, [$2], 1; }"
        )
        operands = [arith.extui(i32(), where.value), address_of(counters, index, 4)]
        return Int(give(i32(), ptx, operands, "=&r,r,l,~{memory}"))

    def arrive(self, counters: GmemRef, index: Int, count: Int, last: SmemRef) -> None:
        """Counts the block's arrival: `last[0]` becomes 1 in the block that arrives last of
        `count`, else 0. The last block sees what the others wrote before they arrived.

        The last arrival resets the counter to 0, since atom.inc wraps. One thread arrives, between
        two barriers of all.
        """
        self.sync()
        ptx = (
            "{ .reg .pred p, q; .reg .b32 old; setp.ne.b32 p, $0, 0; @!p bra done; "
            "atom.acq_rel.gpu.global.inc.u32 old, [$1], $2; "
            "setp.eq.u32 q, old, $2; selp.b32 old, 1, 0, q; st.shared.b32 [$3], old; done: }"
        )
        operands = [
            arith.extui(i32(), (self.index < 1).value),
            address_of(counters, index, 4),
            (count - 1).value,
            shared_address(last, 0, 4),
        ]
        do(ptx, operands, "r,l,r,r")
        self.sync()

    # ---- words that another GPU stores in place of a sentinel ------------------------------------

    def send_floats(self, ref: GmemRef, index: Int, values: list[Float], where: Int) -> None:
        """Stores 4 floats in a word of 16 bytes, of this GPU or another, which takes them by
        `receive_floats`.
        """
        nan, nothing = utils.c(_NAN, i32()), utils.c(SENTINEL, i32())
        words = [arith.bitcast(i32(), x.value) for x in values]
        same = [arith.cmpi(arith.CmpIPredicate.eq, x, nothing) for x in words]
        words = [arith.select(both, nan, x) for both, x in zip(same, words, strict=True)]
        _send(ref, index, words, where)

    def receive_floats(
        self, ref: GmemRef, indices: list[Int], wheres: list[Int]
    ) -> list[list[Float]]:
        """Polls words of 16 bytes until none of their 4 floats is the sentinel; anything where the
        condition does not hold. It orders no other accesses.
        """
        return [[self.as_float(x) for x in word] for word in _receive(ref, indices, wheres, 16)]


def each_thread(
    program: Callable[..., Any],
    refs: Any,
    scalars: Any,
    returns: Literal["each", "one"] | None = None,
    swizzles: Any = None,
) -> Any:
    """`thread_program.each_thread` with this file's `Thread`."""
    return thread_program.each_thread(program, refs, scalars, Thread(), returns, swizzles)


def run(
    program: Callable[..., Any],
    plan: Any,
    refs: Any,
    at: Any,
    returns: Literal["each", "one"] | None = None,
) -> Any:
    """`each_thread` of a program that takes a `ThreadContext`; `plan` is static."""

    def in_context(thread, refs, at):
        return program(ThreadContext(thread, refs, at, plan))

    return thread_program.each_thread(in_context, refs, at, Thread(), returns)


def each_item(
    thread: Any, wg: Any, count: int, lanes: int, warpgroups: int, finish: Any, load: Any = None
) -> None:
    """finish(number, lane, there, load(number, lane)) for each of `count` items, by `lanes` threads
    each; `there`: whether there is such an item.
    """
    mine = thread.index + wg * mosaic.THREADS
    at_once = warpgroups * mosaic.THREADS // lanes
    group, lane = mine // lanes, mine % lanes
    rounds = -(-count // at_once)
    in_flight = min(rounds, IN_FLIGHT)

    def body(i, carry):
        started = []
        for n in range(in_flight):
            number = group + (i * in_flight + n) * at_once
            inside = thread.minimum(number, count - 1)
            loaded = load(inside, lane) if load is not None else None
            started.append((inside, lane, number < count, loaded))
        for item in started:
            finish(*item)
        return carry

    repeat(thread, -(-rounds // in_flight), [], body)


def repeat(thread: Any, count: int, carry: list, body: Callable[[Any, list], list]) -> list:
    """`Thread.loop`, unrolled where it is short."""
    if count > UNROLLED:
        return thread.loop(count, carry, body)
    for i in range(count):
        carry = body(i, carry)
    return carry


def order_by_cost(thread: Any, memory: SmemRef, wg: Index, sizes: Any) -> None:
    """Writes to word `sizes.order` + r of shared memory the work tile of rank r, of `sizes.tiles`
    tiles whose costs are at `sizes.costs`: the dearest first, of equals the first. A warp for each.
    """
    count = sizes.tiles

    def rank_of(number, lane, there, _):
        cost = thread.shared_load(memory, number + sizes.costs)

        def compare(i, carry):
            other = lane + i * LANES
            inside = thread.minimum(other, count - 1)
            more = thread.shared_load(memory, inside + sizes.costs)
            more = thread.select(other < number, more + 1, more)  # the first of equals
            before = (other < count) & (more > cost)
            return [carry[0] + thread.select(before, lane * 0 + 1, 0)]

        (rank,) = repeat(thread, -(-count // LANES), [lane * 0], compare)
        rank = thread.total_of_lanes(rank)
        thread.shared_store(memory, rank + sizes.order, number, there & (lane < 1))

    each_item(thread, wg, count, LANES, sizes.warpgroups, rank_of)
    thread.sync()


def _over_lanes(op: Callable[[Float, Float], Float], x: Float, lanes: int) -> Float:
    while lanes > 1:
        lanes //= 2
        x = op(x, Float(utils.shfl_bfly(x.value, lanes)))
    return x


def _send(ref: GmemRef, index: Int, words: list[ir.Value], where: Int) -> None:
    """Stores words of 4 bytes side by side."""
    count = len(words)
    names = ", ".join(f"${n + 2}" for n in range(count))
    ptx = f"st.relaxed.sys.global.v{count}.b32 [$1], {{{names}}}"
    address = address_of(ref, index, 4 * count)
    do_where(where.value, ptx, [address, *words], "l" + ",r" * count)


def _receive(ref: GmemRef, indices: list[Int], wheres: list[Int], nbytes: int) -> list[list[Int]]:
    """Words of so many bytes, in parts of 4, when none of these is `SENTINEL`."""
    count, each = len(indices), nbytes // 4
    parts = [f"${n}" for n in range(count * each)]
    begin, again = "", ""
    for n, word in enumerate(itertools.batched(parts, each)):
        address, where = f"${len(parts) + n}", f"${len(parts) + count + n}"
        begin += f".reg .pred q{n}; setp.ne.b32 q{n}, {where}, 0; "
        begin += "".join(f"mov.b32 {part}, 0; " for part in word)
        again += f"@q{n} ld.relaxed.sys.global.v{each}.b32 {{{', '.join(word)}}}, [{address}]; "
    checks = "".join(f"setp.eq.or.b32 p, {part}, {SENTINEL}, p; " for part in parts)
    received = give(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * len(parts))})>"),
        f"{{ .reg .pred p; {begin}again: setp.ne.b32 p, 0, 0; {again}{checks}@p bra again; }}",
        [address_of(ref, index, nbytes) for index in indices]
        + [arith.extui(i32(), where.value) for where in wheres],
        ",".join(["=&r"] * len(parts) + ["l"] * count + ["r"] * count) + ",~{memory}",
    )
    values = [Int(llvm.extractvalue(i32(), received, [n])) for n in range(len(parts))]
    return [list(word) for word in itertools.batched(values, each)]


def _tensor_map(launch: mgpu.LaunchContext, box: Box) -> ir.Value:
    """A pointer to the tensor map of an operand of the launch, for boxes without a swizzle."""
    return launch._get_tma_desc(box.ref, (), None, box.shape, None, None)


def _floats(ref: Ref, index: Int, count: int) -> list[Float]:
    address = utils.getelementptr(pointer_of(ref), [index.value], word_type(4 * count))
    kind = ir.F32Type.get()
    if count == 1:
        return [Float(llvm.load(kind, address, alignment=4))]
    loaded = llvm.load(ir.VectorType.get((count,), kind), address, alignment=4 * count)
    return [Float(vector.extract(loaded, [], [i])) for i in range(count)]
