"""Programs of single threads that use shared memory, barriers, bulk copies from any pointer,
atomics and floating point: `Thread` is `mosaic.Thread` with all of these.

A program runs on the GPU as it stands; the interpreter of the tests runs the same program in NumPy.
"""

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_attn.kernels.lang import mosaic, thread_math
from pallas_attn.kernels.lang.mosaic import Int

Ref = Any

WARPS = 4  # of a block
LANES = 32  # of a warp
FOUR = 4  # floats in a word of 16 bytes
UNROLLED = 8  # up to so many iterations of a loop
SENTINEL = -1  # 4 bytes of memory where another GPU has still to store; a NaN that no GPU computes
_NAN = 0x7FFFFFFF  # the one that GPUs compute
IN_FLIGHT = 2  # items whose loads are issued before the first is waited for


class Word(NamedTuple):
    """Where a copy begins: at word `index` + `offset` of `ref`, in words of as many bytes as are
    copied at a time. `offset` is a Python int, which becomes part of the instruction.
    """

    ref: Ref
    index: Any
    offset: int = 0


class Float:
    """A float32 of one thread. Python numbers mix in."""

    def __init__(self, value: ir.Value):
        self.value = value

    def _with(self, op: Callable[..., Any], other: Any) -> "Float":
        return Float(op(self.value, _float(other)))

    def _compare(self, predicate: Any, other: Any) -> Int:
        return Int(arith.cmpf(predicate, self.value, _float(other)))

    def __add__(self, other):
        return self._with(arith.addf, other)

    def __sub__(self, other):
        return self._with(arith.subf, other)

    def __mul__(self, other):
        return self._with(arith.mulf, other)

    def __truediv__(self, other):
        return self._with(arith.divf, other)

    def __le__(self, other):
        return self._compare(arith.CmpFPredicate.OLE, other)


def _float(x: Any) -> ir.Value:
    return x.value if isinstance(x, Float) else utils.c(float(x), ir.F32Type.get())


class Thread(mosaic.Thread):
    """`mosaic.Thread` for a kernel that also computes.

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
            x = Int(llvm.inline_asm(i32(), [x.value], ptx, "=r,r", has_side_effects=True))
        return x

    def total_of_lanes(self, x: Int) -> Int:
        """The sum of x over the warp."""
        return Int(thread_math.over_warp(x.value, "add"))

    def of_lane(self, x: Any, lane: Int) -> Any:
        """The value of x, an Int or a Float, in lane `lane` of the warp."""
        word = x.value if isinstance(x, Int) else arith.bitcast(i32(), x.value)
        ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        operands = [word, lane.value]
        word = llvm.inline_asm(i32(), operands, ptx, "=r,r,r", has_side_effects=True)
        return Int(word) if isinstance(x, Int) else Float(arith.bitcast(ir.F32Type.get(), word))

    # ---- floating point --------------------------------------------------------------------------

    def exp2(self, x: Float) -> Float:
        return self._unary("ex2.approx.ftz.f32", x)

    def log2(self, x: Float) -> Float:
        return self._unary("lg2.approx.f32", x)

    def _unary(self, name: str, x: Float) -> Float:
        kind = ir.F32Type.get()
        return Float(llvm.inline_asm(kind, [x.value], f"{name} $0, $1;", "=f,f"))

    def highest(self, a: Float, b: Any) -> Float:
        """The larger of two; NaN where one of them is NaN."""
        return a._with(arith.maximumf, b)

    def warp_highest(self, x: Float) -> Float:
        """The largest over the lanes of the warp."""
        return self._over_warp(self.highest, x)

    def warp_sum(self, x: Float) -> Float:
        return self._over_warp(lambda a, b: a + b, x)

    def _over_warp(self, op: Callable[..., Any], x: Float) -> Float:
        for distance in (16, 8, 4, 2, 1):
            x = op(x, Float(utils.shfl_bfly(x.value, distance)))
        return x

    def is_zero(self, x: Float) -> Int:
        return x._compare(arith.CmpFPredicate.OEQ, 0.0)

    def nothing_yet(self, x: Float) -> Int:
        """Whether x is -inf."""
        return x._compare(arith.CmpFPredicate.OEQ, -np.inf)

    def number(self, x: float) -> Float:
        return Float(_float(x))

    def loop(self, count: Any, carry: list, body: Callable[[Int, list], list]) -> list:
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

    def load_floats(self, ref: Ref, index: Int, count: int) -> list[Float]:
        """`count` (1 or 4) floats of global memory: word `index`, in words of `count` floats."""
        return _floats(ref, index, count)

    def store_floats(self, ref: Ref, index: Int, values: list[Float], where: Int) -> None:
        words = [Int(arith.bitcast(i32(), x.value)) for x in values]
        if len(words) == 1:
            self.store(ref, index, words[0], 4, where)
            return
        packed = llvm.mlir_undef(ir.VectorType.get((4,), i32()))
        for i, word in enumerate(words):
            packed = vector.insert(word.value, packed, [], [i])
        self.store(ref, index, Int(packed), 16, where)

    def load_narrow(self, ref: Ref, index: Int, dtype: Any) -> list[Float]:
        """4 numbers of a 16-bit dtype, a word of 8 bytes, as floats."""
        kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
        word = llvm.bitcast(ir.VectorType.get((4,), kind), self.load(ref, index, 8).value)
        numbers = [vector.extract(word, [], [i]) for i in range(4)]
        return [Float(arith.extf(ir.F32Type.get(), x)) for x in numbers]

    def store_narrow(
        self, ref: Ref, index: Int, values: list[Float], dtype: Any, where: Int
    ) -> None:
        """Stores 4 floats as 4 numbers of a 16-bit dtype, a word of 8 bytes."""
        kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
        packed = llvm.mlir_undef(ir.VectorType.get((4,), kind))
        for i, x in enumerate(values):
            packed = vector.insert(arith.truncf(kind, x.value), packed, [], [i])
        word = llvm.bitcast(ir.IntegerType.get_signless(64), packed)
        self.store(ref, index, Int(word), 8, where)

    def shared_floats(self, ref: Ref, index: Int, count: int) -> list[Float]:
        return _floats(ref, index, count)

    def shared_load(self, ref: Ref, index: Int) -> Int:
        return self.load(ref, index, 4)

    def shared_store(self, ref: Ref, index: Int, value: Any, where: Int) -> None:
        """Stores an Int or a Float in a word of 4 bytes."""
        value = value.value
        if value.type != i32():
            value = arith.bitcast(i32(), value)
        ptx = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.b32 [$1], $2; }"
        operands = [arith.extui(i32(), where.value), shared_address(ref, index, 4), value]
        do(ptx, operands, "r,r,r")

    def sync(self, groups: int = 1) -> None:
        """A barrier of all threads of `groups` warpgroups: after it each sees what the others
        wrote to shared memory before it.
        """
        if groups == 1:
            utils.warpgroup_barrier()
        else:
            do(f"bar.sync 0, {groups * mosaic.THREADS};", [], "")

    # ---- bulk copies -----------------------------------------------------------------------------

    def make_barriers(self, ref: Ref, count: int) -> None:
        """Initialises barriers whose phase completes after one arrival (`announce`) and all bytes
        that it announced.
        """
        first = self.index < 1
        for i in range(count):
            address = shared_address(ref, i, 8)
            ptx = (
                "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.init.shared::cta.b64 [$1], 1; }"
            )
            do(ptx, [arith.extui(i32(), first.value), address], "r,r")
        do("fence.mbarrier_init.release.cluster;", [], "")
        self.sync()

    def announce(self, barriers: Ref, slot: Int, nbytes: Int, where: Int) -> None:
        """Arrives at a barrier and announces how many bytes will be copied."""
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; "
            "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; }"
        )
        operands = [
            arith.extui(i32(), where.value), shared_address(barriers, slot, 8), nbytes.value
        ]  # fmt: skip
        do(ptx, operands, "r,r,r")

    def copy(self, to: Word, source: Word, nbytes: Int, done: Word, where: Int) -> None:
        """Issues a bulk copy of `nbytes` from global to shared memory, in words of 16 bytes.
        `done` is the barrier at which the reader waits.
        """
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p cp.async.bulk.shared::cluster.global"
            ".mbarrier::complete_tx::bytes [$1], [$2], $3, [$4]; }"
        )
        operands = [
            arith.extui(i32(), where.value),
            shared_address(to.ref, to.index, 16),
            mosaic.address_of(source.ref, source.index, 16),
            nbytes.value,
            shared_address(done.ref, done.index, 8),
        ]
        do(ptx, operands, "r,r,l,r,r")

    def wait(self, barriers: Ref, slot: Int, parity: Int) -> None:
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
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; "
            "@p cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3; }"
        )
        operands = [
            arith.extui(i32(), where.value),
            mosaic.address_of(to.ref, to.index, 16),
            shared_address(source.ref, source.index, 16),
            nbytes.value,
        ]
        do(ptx, operands, "r,l,r,r")

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
        places = [f"[${n}+{size * word.offset}]" for n, word in enumerate((to, source))]
        nbytes = self.select(there, self.index * 0 + size, 0)
        operands = [
            shared_address(to.ref, to.index, size),
            mosaic.address_of(source.ref, source.index, size),
            nbytes.value,
        ]
        level = "cg" if size == 16 else "ca"
        copy = f"cp.async.{level}.shared.global {places[0]}, {places[1]}, {size}, $2;"
        if where is None:
            do(copy, operands, "r,l,r")
            return
        ptx = f"{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p {copy} }}"
        do(ptx, [*operands, arith.extui(i32(), where.value)], "r,l,r,r")

    def commit_copies(self) -> None:
        """Makes a group of the copies that this thread has issued since the last group."""
        do("cp.async.commit_group;", [], "")

    def wait_copies(self, left: int) -> None:
        """Waits until all groups of this thread but the last `left` are there. Those of other
        threads are there after the next `sync`.
        """
        do(f"cp.async.wait_group {left};", [], "")

    # ---- between blocks --------------------------------------------------------------------------

    def signal(self, counters: Ref, index: Int, where: Int, remote: bool = False) -> None:
        """Adds 1 to a counter where the condition holds. Who sees it by `wait_until` or `reached`
        sees what this thread had done before. `remote`: it is another GPU's.
        """
        scope = "sys" if remote else "gpu"
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; "
            f"@p red.release.{scope}.global.add.u32 [$1], 1; }}"
        )
        operands = [arith.extui(i32(), where.value), mosaic.address_of(counters, index, 4)]
        do(ptx, operands, "r,l")

    def wait_until(self, counters: Ref, index: Int, least: Int, remote: bool = False) -> None:
        """Waits until a counter has reached `least`; then what was done before those `signal`s is
        there, also for bulk copies and TMA that the thread issues. `remote`: from other GPUs.
        """
        scope = "sys" if remote else "gpu"
        ptx = (
            f"{{ .reg .pred p; .reg .b32 n; again: ld.acquire.{scope}.global.b32 n, [$0]; "
            "setp.lt.u32 p, n, $1; @p bra again; fence.proxy.async.global; }"
        )
        do(ptx, [mosaic.address_of(counters, index, 4), least.value], "l,r")

    def reached(self, counters: Ref, index: Int, least: Int) -> Int:
        """1 where a counter has reached `least`, as after `wait_until`, else 0."""
        ptx = (
            "{ .reg .pred p; .reg .b32 n; ld.acquire.gpu.global.b32 n, [$1]; "
            "setp.ge.u32 p, n, $2; selp.b32 $0, 1, 0, p; @p fence.proxy.async.global; }"
        )
        operands = [mosaic.address_of(counters, index, 4), least.value]
        return Int(llvm.inline_asm(i32(), operands, ptx, "=r,l,r,~{memory}", has_side_effects=True))

    # ---- what another GPU stores where a sentinel was --------------------------------------------

    def send_floats(self, ref: Ref, index: Int, values: list[Float], where: Int) -> None:
        """Stores 4 floats in a word of 16 bytes, of this GPU or another, which takes them by
        `receive_floats`.
        """
        nan, nothing = utils.c(_NAN, i32()), utils.c(SENTINEL, i32())
        words = [arith.bitcast(i32(), x.value) for x in values]
        same = [arith.cmpi(arith.CmpIPredicate.eq, x, nothing) for x in words]
        words = [
            arith.select(is_nothing, nan, x) for is_nothing, x in zip(same, words, strict=True)
        ]
        _send(ref, index, words, where)

    def send_narrow(
        self, ref: Ref, index: Int, values: list[Float], dtype: Any, where: Int
    ) -> None:
        """Rounds 4 floats to a 16-bit dtype and stores them in a word of 8 bytes, for
        `receive_narrow`. No two rounded floats are `SENTINEL`.
        """
        kind, words = utils.dtype_to_ir_type(jnp.dtype(dtype)), []
        for pair in itertools.batched(values, 2):
            packed = llvm.mlir_undef(ir.VectorType.get((2,), kind))
            for n, x in enumerate(pair):
                packed = vector.insert(arith.truncf(kind, x.value), packed, [], [n])
            words.append(llvm.bitcast(i32(), packed))
        _send(ref, index, words, where)

    def receive_floats(self, ref: Ref, indices: list[Int], wheres: list[Int]) -> list[list[Float]]:
        """Polls words of 16 bytes until none of their 4 floats is the sentinel; anything where the
        condition does not hold. It orders no other accesses.
        """
        kind = ir.F32Type.get()
        words = _receive(ref, indices, wheres, 16)
        return [[Float(arith.bitcast(kind, x)) for x in word] for word in words]

    def receive_narrow(
        self, ref: Ref, indices: list[Int], dtype: Any, wheres: list[Int]
    ) -> list[list[Float]]:
        """Likewise 4 numbers of a 16-bit dtype a word of 8 bytes, as floats."""
        kind, found = utils.dtype_to_ir_type(jnp.dtype(dtype)), []
        for word in _receive(ref, indices, wheres, 8):
            pairs = [llvm.bitcast(ir.VectorType.get((2,), kind), x) for x in word]
            numbers = [vector.extract(pair, [], [n]) for pair in pairs for n in range(2)]
            found.append([Float(arith.extf(ir.F32Type.get(), x)) for x in numbers])
        return found

    def clear(self, ref: Ref, index: Int, nbytes: int, where: Int) -> None:
        """Writes `SENTINEL` to a word of 8 or 16 bytes, which this thread has read."""
        _send(ref, index, [utils.c(SENTINEL, i32())] * (nbytes // 4), where)

    def take(self, counters: Ref, index: Int, where: Int) -> Int:
        """Adds 1 to a counter where the condition holds and gives what it was, elsewhere 0. Orders
        nothing.
        """
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; mov.b32 $0, 0; "
            "@p atom.relaxed.gpu.global.add.u32 $0, [$2], 1; }"
        )
        operands = [arith.extui(i32(), where.value), mosaic.address_of(counters, index, 4)]
        constraints = "=&r,r,l,~{memory}"
        return Int(llvm.inline_asm(i32(), operands, ptx, constraints, has_side_effects=True))

    def arrive(self, counters: Ref, index: Int, count: Int, last: Ref) -> None:
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
            mosaic.address_of(counters, index, 4),
            (count - 1).value,
            shared_address(last, 0, 4),
        ]
        do(ptx, operands, "r,l,r,r")
        self.sync()


def each_thread(
    program: Callable[..., Any],
    refs: Any,
    scalars: Any,
    returns: Literal["each", "one"] | None = None,
    swizzles: Any = None,
) -> Any:
    """`mosaic.each_thread` with this file's `Thread`."""
    return mosaic.each_thread(program, refs, scalars, Thread(), returns, swizzles)


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
        for one in started:
            finish(*one)
        return carry

    repeat(thread, -(-rounds // in_flight), [], body)


def repeat(thread: Any, count: int, carry: list, body: Any) -> list:
    if count > UNROLLED:
        return thread.loop(count, carry, body)
    for i in range(count):
        carry = body(i, carry)
    return carry


def in_order(thread: Any, memory: Any, wg: Any, sizes: Any) -> None:
    """At word `sizes.order` + r of shared memory the work tile of rank r, of `sizes.tiles` tiles
    whose costs are at `sizes.costs`: the dearest first, of equals the first. A warp for each.
    """
    count, lanes = sizes.tiles, 32

    def one(number, lane, there, _):
        cost = thread.shared_load(memory, number + sizes.costs)

        def some(i, carry):
            other = lane + i * lanes
            inside = thread.minimum(other, count - 1)
            more = thread.shared_load(memory, inside + sizes.costs)
            more = thread.select(other < number, more + 1, more)  # of equals the first
            before = (other < count) & (more > cost)
            return [carry[0] + thread.select(before, lane * 0 + 1, 0)]

        (rank,) = repeat(thread, -(-count // lanes), [lane * 0], some)
        rank = thread.total_of_lanes(rank)
        thread.shared_store(memory, rank + sizes.order, number, there & (lane < 1))

    each_item(thread, wg, count, lanes, sizes.warpgroups, one)
    thread.sync()


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def do(ptx: str, operands: list, constraints: str) -> None:
    clobbers = ",".join(filter(None, (constraints, "~{memory}")))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), operands, ptx, clobbers, has_side_effects=True
    )  # fmt: skip


def shared_address(ref: Ref, index: Any, nbytes: int) -> ir.Value:
    """The 32-bit address of a word of shared memory."""
    index = Int(utils.c(index, i32())) if isinstance(index, int) else index
    return llvm.ptrtoint(i32(), mosaic.address_of(ref, index, nbytes))


def _send(ref: Ref, index: Int, words: list[ir.Value], where: Int) -> None:
    """Stores words of 4 bytes side by side."""
    names = ", ".join(f"${n + 2}" for n in range(len(words)))
    ptx = (
        "{ .reg .pred p; setp.ne.b32 p, $0, 0; "
        f"@p st.relaxed.sys.global.v{len(words)}.b32 [$1], {{{names}}}; }}"
    )
    address = mosaic.address_of(ref, index, 4 * len(words))
    do(ptx, [arith.extui(i32(), where.value), address, *words], "r,l" + ",r" * len(words))


def _receive(ref: Ref, indices: list[Int], wheres: list[Int], nbytes: int) -> list[list[ir.Value]]:
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
    found = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * len(parts))})>"),
        [mosaic.address_of(ref, index, nbytes) for index in indices]
        + [arith.extui(i32(), where.value) for where in wheres],
        f"{{ .reg .pred p; {begin}again: setp.ne.b32 p, 0, 0; {again}{checks}@p bra again; }}",
        ",".join(["=&r"] * len(parts) + ["l"] * count + ["r"] * count) + ",~{memory}",
        has_side_effects=True,
    )
    values = [llvm.extractvalue(i32(), found, [n]) for n in range(len(parts))]
    return [list(some) for some in itertools.batched(values, each)]


def _floats(ref: Ref, index: Int, count: int) -> list[Float]:
    address = utils.getelementptr(
        mosaic.pointer_of(ref), [index.value], mosaic.word_type(4 * count)
    )
    kind = ir.F32Type.get()
    if count == 1:
        return [Float(llvm.load(kind, address, alignment=4))]
    loaded = llvm.load(ir.VectorType.get((count,), kind), address, alignment=4 * count)
    return [Float(vector.extract(loaded, [], [i])) for i in range(count)]
