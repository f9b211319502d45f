"""What kernels say to a thread and to a warp where tiles are too coarse: bulk copies from any
pointer, tensor cores fed from rows as they lie in memory, and arithmetic thread by thread.

`Thread` is `tiles.Thread` with shared memory, barriers, atomics and floating point: its programs
run on the GPU as they stand and in NumPy under the tests. The functions below it (`queries`,
`scores`, `weigh`, `spill`) work on register tiles; each carries a twin that says in NumPy what it
means, which is what the interpreter runs.

Rows of K and V reach shared memory as they lie in the cache, without a swizzle, since no tensor map
takes part. Read so, the 8 rows of a matrix would meet in the same banks. Hence a tile of keys is 8
blocks of rows, each with `PAD` bytes behind it, and a matrix takes a row of each block: 8 rows, 8
groups of banks, whatever the head dim.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

from pallas_attn.kernels import tiles
from pallas_attn.kernels.tiles import Int

Ref = Any
Array = Any

BLOCKS = 8  # of rows in a tile of keys: a tensor core's matrix takes a row of each
PAD = 16  # bytes behind a block
WARPS = 4
ROWS = 16  # query rows of a warp


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


class Thread(tiles.Thread):
    """`tiles.Thread`, and what a kernel that computes needs besides.

    Words of shared memory are counted as those of global memory are; `sync` orders them within the
    block.
    """

    # ---- integers --------------------------------------------------------------------------------

    def choose(self, where: Int, a: Any, b: Any) -> Any:
        """a where the condition holds, else b: two Ints or two Floats."""
        return type(a)(arith.select(where.value, a.value, b.value))

    def running_sum(self, x: Int) -> Int:
        """The sum of x over this lane and those below it in its warp."""
        for distance in (1, 2, 4, 8, 16):
            ptx = (
                "{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, "
                f"{distance}, 0, 0xffffffff; @!p mov.b32 t, 0; add.s32 $0, $1, t; }}"
            )
            x = Int(llvm.inline_asm(_i32(), [x.value], ptx, "=r,r", has_side_effects=True))
        return x

    def of_lane(self, x: Any, lane: Int) -> Any:
        """x, an Int or a Float, as `lane` of the warp has it."""
        word = x.value if isinstance(x, Int) else arith.bitcast(_i32(), x.value)
        ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        operands = [word, lane.value]
        word = llvm.inline_asm(_i32(), operands, ptx, "=r,r,r", has_side_effects=True)
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
        """The larger of two; NaN where one of them is."""
        return a._with(arith.maximumf, b)

    def warp_highest(self, x: Float) -> Float:
        """Over the lanes of the warp."""
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
        """`for i in range(count): carry = body(i, carry)`; count is the block's or a Python int."""
        kinds = [type(x) for x in carry]
        stop = utils.c(count, _i32()) if isinstance(count, int) else count.value
        loop = scf.ForOp(utils.c(0, _i32()), stop, utils.c(1, _i32()), [x.value for x in carry])
        with ir.InsertionPoint(loop.body):
            inside = [kind(x) for kind, x in zip(kinds, loop.inner_iter_args, strict=True)]
            scf.yield_([x.value for x in body(Int(loop.induction_variable), inside)])
        return [kind(x) for kind, x in zip(kinds, loop.results, strict=True)]

    # ---- memory ----------------------------------------------------------------------------------

    def load_floats(self, ref: Ref, index: Int, count: int) -> list[Float]:
        """`count` (1 or 4) floats of global memory, from word `index` of so many."""
        return _floats(ref, index, count)

    def store_floats(self, ref: Ref, index: Int, values: list[Float], where: Int) -> None:
        words = [Int(arith.bitcast(_i32(), x.value)) for x in values]
        if len(words) == 1:
            self.store(ref, index, words[0], 4, where)
            return
        packed = llvm.mlir_undef(ir.VectorType.get((4,), _i32()))
        for i, word in enumerate(words):
            packed = vector.insert(word.value, packed, [], [i])
        self.store(ref, index, Int(packed), 16, where)

    def store_narrow(
        self, ref: Ref, index: Int, values: list[Float], dtype: Any, where: Int
    ) -> None:
        """4 floats as 4 numbers of a 16-bit dtype: a word of 8 bytes."""
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
        """An Int or a Float into a word of 4 bytes."""
        value = value.value
        if value.type != _i32():
            value = arith.bitcast(_i32(), value)
        ptx = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.b32 [$1], $2; }"
        operands = [arith.extui(_i32(), where.value), _shared_address(ref, index, 4), value]
        _do(ptx, operands, "r,r,r")

    def shared_clear(self, ref: Ref, index: Int, where: Int) -> None:
        """Zeros into a word of 16 bytes, which a bulk copy may overwrite after the next `sync`."""
        ptx = (
            "{ .reg .pred p; .reg .b32 z; mov.b32 z, 0; setp.ne.b32 p, $0, 0; "
            "@p st.shared.v4.b32 [$1], {z, z, z, z}; fence.proxy.async.shared::cta; }"
        )
        operands = [arith.extui(_i32(), where.value), _shared_address(ref, index, 16)]
        _do(ptx, operands, "r,r")

    def sync(self) -> None:
        """The block's threads meet, and see what the others wrote to shared memory."""
        utils.warpgroup_barrier()

    # ---- bulk copies -----------------------------------------------------------------------------

    def make_barriers(self, ref: Ref, count: int) -> None:
        """Barriers that one arrival a phase completes, and the bytes that it announced."""
        first = self.index < 1
        for i in range(count):
            address = _shared_address(ref, i, 8)
            ptx = (
                "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.init.shared::cta.b64 [$1], 1; }"
            )
            _do(ptx, [arith.extui(_i32(), first.value), address], "r,r")
        _do("fence.mbarrier_init.release.cluster;", [], "")
        self.sync()

    def announce(self, barriers: Ref, slot: Int, nbytes: Int, where: Int) -> None:
        """Arrives at a barrier and says how many bytes are to come."""
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; "
            "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; }"
        )
        operands = [
            arith.extui(_i32(), where.value), _shared_address(barriers, slot, 8), nbytes.value
        ]  # fmt: skip
        _do(ptx, operands, "r,r,r")

    def copy(self, to: tuple, source: tuple, nbytes: Int, done: tuple, where: Int) -> None:
        """Has `nbytes` copied to shared memory. `to` and `source`: (ref, word of 16 bytes); `done`:
        (barriers, slot). The reader waits at the barrier.
        """
        ptx = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p cp.async.bulk.shared::cluster.global"
            ".mbarrier::complete_tx::bytes [$1], [$2], $3, [$4]; }"
        )
        operands = [
            arith.extui(_i32(), where.value),
            _shared_address(*to, 16),
            tiles._address(*source, 16),
            nbytes.value,
            _shared_address(*done, 8),
        ]
        _do(ptx, operands, "r,r,l,r,r")

    def wait(self, barriers: Ref, slot: Int, parity: Int) -> None:
        """Until what was announced for this phase is there."""
        ptx = (
            "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
            "@!p bra again; }"
        )
        _do(ptx, [_shared_address(barriers, slot, 8), parity.value], "r,r")

    # ---- between blocks --------------------------------------------------------------------------

    def arrive(self, counters: Ref, index: Int, count: Int, last: Ref) -> None:
        """Counts the block in: `last[0]` becomes 1 in the block that is the last of `count`, else
        0. What the others wrote before they arrived, the last one sees.

        The counter goes back to 0 with the last arrival: atom.inc wraps. One thread fences for all,
        whom it met before and meets after.
        """
        self.sync()
        ptx = (
            "{ .reg .pred p, q; .reg .b32 old; setp.ne.b32 p, $0, 0; @!p bra done; "
            "fence.acq_rel.gpu; atom.global.inc.u32 old, [$1], $2; fence.acq_rel.gpu; "
            "setp.eq.u32 q, old, $2; selp.b32 old, 1, 0, q; st.shared.b32 [$3], old; done: }"
        )
        operands = [
            arith.extui(_i32(), (self.index < 1).value),
            tiles._address(counters, index, 4),
            (count - 1).value,
            _shared_address(last, 0, 4),
        ]
        _do(ptx, operands, "r,l,r,r")
        self.sync()


def each_thread(program: Callable[..., None], refs: Any, scalars: Any) -> None:
    """`tiles.each_thread` with this file's `Thread`."""
    tiles.each_thread(program, refs, scalars, Thread())


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _do(ptx: str, operands: list, constraints: str) -> None:
    clobbers = ",".join(filter(None, (constraints, "~{memory}")))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), operands, ptx, clobbers, has_side_effects=True
    )  # fmt: skip


def _shared_address(ref: Ref, index: Any, nbytes: int) -> ir.Value:
    """The 32-bit address of a word of shared memory."""
    index = Int(utils.c(index, _i32())) if isinstance(index, int) else index
    return llvm.ptrtoint(_i32(), tiles._address(ref, index, nbytes))


def _floats(ref: Ref, index: Int, count: int) -> list[Float]:
    address = utils.getelementptr(tiles._pointer(ref), [index.value], tiles._word(4 * count))
    kind = ir.F32Type.get()
    if count == 1:
        return [Float(llvm.load(kind, address, alignment=4))]
    loaded = llvm.load(ir.VectorType.get((count,), kind), address, alignment=4 * count)
    return [Float(vector.extract(loaded, [], [i])) for i in range(count)]


# ---- register tiles ------------------------------------------------------------------------------


def _inline(code: Callable, twin: Callable, args: tuple, types: tuple, result: Any) -> Any:
    """`code(context, *args)` on the GPU, `twin(*args)` in NumPy under the interpreter."""

    def run(context, *values):
        del context
        return code(*values)

    inline: Any = run
    inline.twin = twin
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(inline)(*args)


SCALAR = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()


def _tile_of(shape: tuple[int, int], dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=tiles.TILE)


def _lane() -> tuple[ir.Value, ir.Value]:
    """(warp of the block, lane of the warp)."""
    thread = arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))
    return arith.divui(thread, utils.c(32, _i32())), arith.remui(thread, utils.c(32, _i32()))


class Split:
    """Who takes what of a tile of keys, `height` rows a block.

    `row_blocks` (1, 2 or 4) groups of 16 query rows go to as many warps; what warps are left over
    share out the keys. A warp's column c is row `first + c // 8` of block c % 8.
    """

    def __init__(self, row_blocks: int, height: int):
        self.row_blocks, self.height = row_blocks, height
        self.groups = WARPS // row_blocks  # of keys
        self.depth = height // self.groups  # rows of each block that a warp takes
        self.columns = BLOCKS * self.depth
        self.keys = BLOCKS * height

    def row_block(self, warp: Any) -> Any:
        return warp % self.row_blocks

    def first(self, warp: Any) -> Any:
        return warp // self.row_blocks * self.depth


def queries(ref: Ref, first: tuple, rows: int, split: Split, stride: tuple) -> Array:
    """The query rows of every warp, [64, H]: row r of warp w is query row_block(w) * 16 + r, from
    the first on.

    `first` is (where query 0 lies, in rows of H; the query of row 0). Query n of `rows` lies at
    n // group * step + n % group from there; `stride` is (step, group, H). Rows past the last
    repeat it.
    """
    step, group, dim = stride
    dtype = ref.dtype

    def where(n):
        return n // group * step + n % group

    def code(ref, first):
        warp, lane = (Int(x) for x in _lane())
        start, skipped = (Int(x.registers.item()) for x in first)
        pointer, kind = tiles._pointer(ref), utils.dtype_to_ir_type(jnp.dtype(dtype))
        pair = ir.VectorType.get((2,), kind)
        registers: list[Any] = []
        halves = []
        for half in (0, 8):
            n = skipped + split.row_block(warp) * ROWS + lane // 4 + half
            n = n._with(arith.minsi, rows - 1)
            row = Int(arith.extsi(ir.IntegerType.get_signless(64), (start + where(n)).value))
            column = Int(arith.extsi(ir.IntegerType.get_signless(64), (lane % 4).value))
            halves.append(row * (dim // 2) + column)
        for j in range(dim // 8):
            for half in halves:
                address = utils.getelementptr(pointer, [(half + 4 * j).value], _i32())
                registers.append(llvm.load(pair, address, alignment=4))
        return _tile(registers, (WARPS * ROWS, dim))

    def twin(ref, first):
        n = np.arange(WARPS * ROWS)
        n = np.minimum(first[1] + split.row_block(n // ROWS) * ROWS + n % ROWS, rows - 1)
        return ref.reshape(-1, dim)[first[0] + where(n)]

    shape = (WARPS * ROWS, dim)
    return _inline(code, twin, (ref, first), (REF, (SCALAR, SCALAR)), _tile_of(shape, dtype))


def _tile(registers: list, shape: tuple[int, int]) -> Any:
    layout = tiles.TILE.to_mgpu()
    filled = np.empty(len(registers), object)
    filled[:] = registers
    return mgpu.FragmentedArray(
        _registers=filled.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )


def _words(array: Any) -> list[ir.Value]:
    """A 16-bit tile's registers as words: [column of 8][upper or lower 8 rows], flat."""
    return [llvm.bitcast(_i32(), r) for r in array.registers.flat]


def _matrices(base: ir.Value, offset: int, transposed: bool) -> list[ir.Value]:
    """Four 8x8 matrices from the rows that this warp's lanes point to."""
    kind = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    trans = ".trans" if transposed else ""
    ptx = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    four = llvm.inline_asm(kind, [base], ptx, "=r,=r,=r,=r,r,~{memory}", has_side_effects=True)
    return [llvm.extractvalue(_i32(), four, [i]) for i in range(4)]


def _mma(c: list, a: list, b: list, dtype: Any) -> list[ir.Value]:
    """c + a @ b: m16 n8, and k16 (4 words of a, 2 of b) or k8 (2 and 1)."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[str(jnp.dtype(dtype))]
    names = [f"${i}" for i in range(4 + len(a) + len(b))]
    joined = lambda some: "{" + ", ".join(some) + "}"  # noqa: E731
    split = 4 + len(a)
    ptx = (
        f"mma.sync.aligned.m16n8k{4 * len(a)}.row.col.f32.{kind}.{kind}.f32 "
        f"{joined(names[:4])}, {joined(names[4:split])}, {joined(names[split:])}, "
        f"{joined(names[:4])};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * (len(a) + len(b)) + ["0", "1", "2", "3"])
    struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    four = llvm.inline_asm(struct, [*a, *b, *c], ptx, constraints)
    return [llvm.extractvalue(ir.F32Type.get(), four, [i]) for i in range(4)]


def _pair(a: ir.Value, b: ir.Value) -> ir.Value:
    packed = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    return vector.insert(b, vector.insert(a, packed, [], [0]), [], [1])


def _base(ref: Ref, slot: Any, split: Split, dim: int, lanes: tuple) -> ir.Value:
    """Where this lane's row starts in a slot of the ring: row `depth` and column chunk `chunk` of
    its block, of the warp's own.
    """
    warp, block, depth, chunk = lanes
    height = split.height * dim * 2 + PAD
    offset = block * height + (split.first(warp) + depth) * (dim * 2) + chunk * 16
    start = llvm.ptrtoint(_i32(), tiles._pointer(ref))
    slot = Int(slot.registers.item())
    return (Int(start) + slot * (BLOCKS * height) + offset).value


def scores(q: Array, ref: Ref, slot: Array, split: Split) -> Array:
    """q @ K^T of each warp's own rows and keys, [64, columns], from slot `slot` of the ring `ref`
    [slots, BLOCKS, height * H + padding].

    Two sums a column, even and odd steps of 16, halve the chain of dependent matmuls.
    """
    dim, dtype = q.shape[1], q.dtype
    shape = (WARPS * ROWS, split.columns)

    def code(q, ref, slot):
        warp, lane = (Int(x) for x in _lane())
        a = _words(q)
        # Matrices in the order: rows `depth` of 8 columns, 8 more columns, the next rows of both.
        base = _base(ref, slot, split, dim, (warp, lane % 8, lane // 16, lane // 8 % 2))
        zero = utils.c(0.0, ir.F32Type.get())
        registers: list[Any] = []
        for depth in range(0, split.depth, 2):
            sums = [[[zero] * 4 for _ in range(2)] for _ in range(2)]
            for step in range(0, dim // 8, 2):
                b = _matrices(base, depth * dim * 2 + step * 16, False)
                for n in range(2):
                    whole = step + 1 < dim // 8
                    of_a = a[2 * step : 2 * step + (4 if whole else 2)]
                    of_b = b[2 * n : 2 * n + (2 if whole else 1)]
                    chain = step // 2 % 2
                    sums[n][chain] = _mma(sums[n][chain], of_a, of_b, dtype)
            for one, other in sums:
                s = [arith.addf(x, y) for x, y in zip(one, other, strict=True)]
                registers += [_pair(s[0], s[1]), _pair(s[2], s[3])]
        return _tile(registers, shape)

    def twin(q, ref, slot):
        rows = _rows_of(ref, slot, split, dim)
        out = np.zeros(shape, np.float32)
        for warp in range(WARPS):
            first = split.first(warp)
            mine = rows[:, first : first + split.depth].swapaxes(0, 1).reshape(-1, dim)
            here = slice(ROWS * warp, ROWS * (warp + 1))
            out[here] = q[here].astype(np.float32) @ mine.astype(np.float32).T
        return out

    types = (tiles.TILE, REF, SCALAR)
    return _inline(code, twin, (q, ref, slot), types, _tile_of(shape, jnp.float32))


def _rows_of(ref: np.ndarray, slot: int, split: Split, dim: int) -> np.ndarray:
    """[BLOCKS, height, dim]: a slot without its padding."""
    return ref[slot][:, : split.height * dim].reshape(BLOCKS, split.height, dim)


def weigh(acc: Array, p: Array, ref: Ref, slot: Array, split: Split) -> Array:
    """acc + p @ V of each warp's own keys, [64, Hv]: V from slot `slot` of a ring like that of
    `scores`.
    """
    dim, dtype = acc.shape[1], p.dtype
    shape = (WARPS * ROWS, dim)

    def code(acc, p, ref, slot):
        warp, lane = (Int(x) for x in _lane())
        a = _words(p)
        base = _base(ref, slot, split, dim, (warp, lane % 8, lane // 8 % 2, lane // 16))
        sums = []
        for j in range(dim // 8):
            pairs = [acc.registers.flat[2 * j + half] for half in range(2)]
            sums.append([vector.extract(pair, [], [i]) for pair in pairs for i in range(2)])
        for depth in range(0, split.depth, 2):
            of_a = a[2 * depth : 2 * depth + 4]
            for step in range(0, dim // 8, 2):
                b = _matrices(base, depth * dim * 2 + step * 16, True)
                for n in range(min(2, dim // 8 - step)):
                    sums[step + n] = _mma(sums[step + n], of_a, b[2 * n : 2 * n + 2], dtype)
        registers = []
        for s in sums:
            registers += [_pair(s[0], s[1]), _pair(s[2], s[3])]
        return _tile(registers, shape)

    def twin(acc, p, ref, slot):
        rows = _rows_of(ref, slot, split, dim)
        out = np.array(acc)
        for warp in range(WARPS):
            first = split.first(warp)
            mine = rows[:, first : first + split.depth].swapaxes(0, 1).reshape(-1, dim)
            here = slice(ROWS * warp, ROWS * (warp + 1))
            out[here] += p[here].astype(np.float32) @ mine.astype(np.float32)
        return out

    types = (tiles.TILE, tiles.TILE, REF, SCALAR)
    return _inline(code, twin, (acc, p, ref, slot), types, _tile_of(shape, jnp.float32))


def spill(acc: Array, top: Array, total: Array, to: tuple[Ref, Ref, Ref], rows: int) -> None:
    """The first `rows` rows of each warp's tile, and what belongs to them, to shared memory:
    [WARPS * rows, at least Hv], and twice [WARPS * rows].
    """
    dim, pitch = acc.shape[1], to[0].shape[1]

    def code(acc, top, total, refs):
        warp, lane = (Int(x) for x in _lane())
        for half in range(0, -(-rows // 8)):
            row = lane // 4 + 8 * half
            line = warp * rows + row
            branch = scf.IfOp((row < rows).value)
            with ir.InsertionPoint(branch.then_block):
                for j in range(dim // 8):
                    address = tiles._address(refs[0], line * (pitch // 2) + lane % 4 + 4 * j, 8)
                    llvm.store(acc.registers.flat[2 * j + half], address, alignment=8)
                for ref, numbers in zip(refs[1:], (top, total), strict=True):
                    register = numbers.registers.flat[half]
                    if isinstance(register.type, ir.VectorType):
                        register = vector.extract(register, [], [0])
                    llvm.store(register, tiles._address(ref, line, 4), alignment=4)
                scf.yield_([])

    def twin(acc, top, total, refs):
        for ref, tile in zip(refs, (acc, top, total), strict=True):
            mine = tile.reshape(WARPS, ROWS, *tile.shape[1:])[:, :rows]
            ref.reshape(WARPS, rows, *ref.shape[1:])[..., : mine.shape[-1]] = mine

    types = (tiles.TILE, tiles.ROW, tiles.ROW, (REF, REF, REF))
    _inline(code, twin, (acc, top, total, tuple(to)), types, None)
