"""Inline code as emitted for a GPU, run in NumPy: 128 threads at once, a value is an array with an
element a thread. The interpreter runs the twins of such code; this is how a test compares the two.

`captured` returns the inline function that a call makes, and its twin; `evaluate` runs its code. It
implements the MLIR and PTX that masks, addresses, loads, stores, votes, conversions of 8-bit
numbers, copies and tensor cores need, and raises an error that names anything else.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

THREADS = 128
SPACE = 44  # bits of an address within one array


class Far:
    """An array of any size, of zeros. What is written to it is kept in `stores`, and where it is
    read in `loads`, in bytes from its start.
    """

    def __init__(self, shape: Sequence[int], dtype: Any):
        self.shape, self.dtype = tuple(shape), jnp.dtype(dtype)
        self.stores: list[tuple[np.ndarray, np.ndarray]] = []  # offsets, [n, bytes]
        self.loads: list[np.ndarray] = []


class Memory:
    def __init__(self, refs: Sequence[Any]):
        self.refs = refs

    def pointer(self, number: int) -> np.ndarray:
        return np.full(THREADS, (number + 1) << SPACE, np.int64)

    def _place(self, address: np.ndarray, size: int) -> tuple[Any, np.ndarray]:
        (number,) = set((address >> SPACE).tolist())
        ref, offset = self.refs[number - 1], address & ((1 << SPACE) - 1)
        assert (offset % size == 0).all(), "not aligned"
        most = np.prod(ref.shape, dtype=object) * ref.dtype.itemsize
        if offset.max() + size > most:
            raise IndexError(f"bytes {offset.max()} to {offset.max() + size} of {most}")
        return ref, offset

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        """[threads, size] bytes."""
        ref, offset = self._place(address, size)
        if isinstance(ref, Far):
            ref.loads.append(offset)
            return np.zeros((len(offset), size), np.uint8)
        return ref.reshape(-1).view(np.uint8)[offset[:, None] + np.arange(size)]

    def store(self, address: np.ndarray, value: np.ndarray, where: np.ndarray) -> None:
        if not where.any():
            return
        ref, offset = self._place(address[where], value.shape[1])
        words = np.concatenate([offset[:, None], value[where]], axis=1)
        apart = len(np.unique(offset)) == len(np.unique(words, axis=0))
        assert apart, "two threads write different numbers to one word"
        if isinstance(ref, Far):
            ref.stores.append((offset, value[where]))
        else:
            places = offset[:, None] + np.arange(value.shape[1])
            ref.reshape(-1).view(np.uint8)[places] = value[where]

    def add(self, address: np.ndarray, value: np.ndarray, where: np.ndarray) -> None:
        """[threads, n] float32."""
        if where.any():
            ref, offset = self._place(address[where], 4 * value.shape[1])
            places = offset[:, None] // 4 + np.arange(value.shape[1])
            np.add.at(ref.reshape(-1), places, value[where])


# ---- MLIR ----------------------------------------------------------------------------------------


def _dtype(kind: ir.Type) -> Any:
    names = {"index": "int64", "i1": "bool", "!llvm.ptr": "int64", "f32": "float32"}
    names |= {"f16": "float16", "bf16": "bfloat16", "f8E4M3FN": "float8_e4m3fn"}
    name = str(kind)
    return jnp.dtype(names.get(name, name.replace("i", "int", 1)))


def _kinds(kind: ir.Type) -> tuple[Any, int | None]:
    """(dtype, how many of it in a vector)."""
    if isinstance(kind, ir.VectorType):
        return _dtype(kind.element_type), kind.shape[0]
    return _dtype(kind), None


def _bytes(values: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(x)[:, None].view(np.uint8) for x in values], 1)


def _from_bytes(raw: np.ndarray, kind: ir.Type) -> Any:
    dtype, count = _kinds(kind)
    columns = np.ascontiguousarray(raw).view(dtype).T
    return list(columns) if count is not None else columns[0]


def _unsigned(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint8) if x.dtype == bool else x.view(f"u{x.dtype.name}")


_COMPARE = {
    **dict(enumerate((np.equal, np.not_equal, np.less, np.less_equal, np.greater))),
    5: np.greater_equal,
}


def _compare(op: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    number = ir.IntegerAttr(op.attributes["predicate"]).value
    if number > 5:
        a, b, number = _unsigned(a), _unsigned(b), number - 4
    return _COMPARE[number](a, b)


_ORDERED = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal}


def _compare_floats(op: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _ORDERED[ir.IntegerAttr(op.attributes["predicate"]).value](a, b)


def _constant(op: Any) -> np.ndarray:
    value = op.attributes["value"]
    number = (ir.FloatAttr if isinstance(value, ir.FloatAttr) else ir.IntegerAttr)(value).value
    return np.full(THREADS, number, _dtype(op.result.type))


def _cast(op: Any, x: np.ndarray) -> np.ndarray:
    return x.astype(_dtype(op.result.type))


def _zero_extended(op: Any, x: np.ndarray) -> np.ndarray:
    return _unsigned(x).astype(_dtype(op.result.type))


def _bitcast(op: Any, x: Any) -> Any:
    return _from_bytes(_bytes(x if isinstance(x, list) else [x]), op.result.type)


def _divided(op: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    divide = np.floor_divide if op.name == "arith.divui" else np.remainder
    return divide(_unsigned(a), _unsigned(b)).view(a.dtype)


def _shuffled(op: Any, mask: Any, value: np.ndarray, by: np.ndarray, clamp: Any) -> np.ndarray:
    del mask, clamp
    assert "bfly" in str(op.attributes["kind"])
    return value[np.arange(THREADS) ^ by]


def _position(op: Any) -> int:
    (position,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
    return position


def _inserted(op: Any, value: np.ndarray, vector: list) -> list:
    return [value if n == _position(op) else x for n, x in enumerate(vector)]


def _element_bytes(kind: ir.Type) -> int:
    dtype, count = _kinds(kind)
    return dtype.itemsize * (count or 1)


def _element_address(op: Any, pointer: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    (constant,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
    index = indices[0].astype(np.int64) if indices else np.int64(constant)
    return pointer + index * _element_bytes(ir.TypeAttr(op.attributes["elem_type"]).value)


def _elementwise(operation: Callable[..., Any]) -> Callable[..., Any]:
    def compute(_: Any, *values: Any) -> Any:
        if any(isinstance(x, list) for x in values):  # vectors
            return [operation(*each) for each in zip(*values, strict=True)]
        return operation(*values)

    return compute


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "arith.constant": _constant,
    "arith.addi": _elementwise(np.add),
    "arith.subi": _elementwise(np.subtract),
    "arith.muli": _elementwise(np.multiply),
    "arith.andi": _elementwise(np.bitwise_and),
    "arith.ori": _elementwise(np.bitwise_or),
    "arith.shli": _elementwise(np.left_shift),
    "arith.shrui": lambda op, a, b: (_unsigned(a) >> _unsigned(b)).view(a.dtype),
    "arith.mulf": _elementwise(np.multiply),
    "arith.addf": _elementwise(np.add),
    "arith.subf": _elementwise(np.subtract),
    "arith.xori": _elementwise(np.bitwise_xor),
    "math.fma": _elementwise(lambda a, b, c: a * b + c),
    "arith.maximumf": _elementwise(np.maximum),
    "arith.minsi": _elementwise(np.minimum),
    "arith.maxsi": _elementwise(np.maximum),
    "arith.maxnumf": _elementwise(np.fmax),
    "arith.cmpi": _compare,
    "arith.cmpf": _compare_floats,
    "arith.select": _elementwise(np.where),
    "arith.divui": _divided,
    "arith.remui": _divided,
    "arith.extui": _zero_extended,
    **dict.fromkeys(
        ("arith.extsi", "arith.trunci", "arith.index_cast", "arith.extf", "arith.truncf"), _cast
    ),
    **dict.fromkeys(("arith.bitcast", "llvm.bitcast", "vector.bitcast"), _bitcast),
    "vector.extract": lambda op, vector: vector[_position(op)],
    "vector.insert": _inserted,
    "nvvm.shfl.sync": _shuffled,
    "vector.from_elements": lambda op, *values: list(values),
    "vector.broadcast": lambda op, x: [x] * _kinds(op.result.type)[1],
    "llvm.mlir.undef": lambda op: (
        [np.zeros(THREADS, _kinds(op.result.type)[0])] * (_kinds(op.result.type)[1] or 1)
    ),
    "llvm.getelementptr": _element_address,
    **dict.fromkeys(("llvm.ptrtoint", "llvm.inttoptr"), _elementwise(lambda x: x)),
    "llvm.add": _elementwise(np.add),
    "llvm.mul": _elementwise(np.multiply),
    # A memref: its pointer, and an offset of 0.
    "builtin.unrealized_conversion_cast": _elementwise(lambda x: x),
}


class _Machine:
    def __init__(self, memory: Memory, warpgroup: int):
        self.memory = memory
        self.thread = np.arange(THREADS, dtype=np.int64) + THREADS * warpgroup

    def run(self, operations: Any, values: dict[Any, Any]) -> None:
        for op in (operation.operation for operation in operations):
            operands = [values[x] for x in op.operands]
            if op.name == "func.return":
                return
            result = self._one(op, operands)
            if len(op.results) == 1:
                values[op.result] = result

    def _one(self, op: Any, operands: list[Any]) -> Any:
        if op.name == "gpu.thread_id":
            return self.thread
        if op.name == "llvm.extractvalue":
            (which,) = ir.DenseI64ArrayAttr(op.attributes["position"])
            if isinstance(operands[0], tuple):  # results of PTX
                return operands[0][which]
            return operands[0] if which == 1 else np.zeros(THREADS, np.int64)
        if op.name == "llvm.load":
            size = _element_bytes(op.result.type)
            return _from_bytes(self.memory.load(operands[0], size), op.result.type)
        if op.name == "llvm.store":
            value = operands[0] if isinstance(operands[0], list) else [operands[0]]
            return self.memory.store(operands[1], _bytes(value), np.ones(THREADS, bool))
        if op.name == "llvm.inline_asm":
            return _Ptx(self.memory, op, operands).run()
        return _OPERATIONS[op.name](op, *operands)


# ---- PTX -----------------------------------------------------------------------------------------


class _Ptx:
    """One piece of inline PTX. `$0` is the result, if there is one."""

    def __init__(self, memory: Memory, op: Any, operands: list[Any]):
        self.memory, self.op = memory, op
        self.code = ir.StringAttr(op.attributes["asm_string"]).value
        constraints = ir.StringAttr(op.attributes["constraints"]).value.split(",")
        self.results = [f"${n}" for n, x in enumerate(constraints) if x.startswith("=")]
        inputs = [x for x in constraints[len(self.results) :] if not x.startswith("~")]
        self.values = {f"${n}": x for n, x in enumerate(operands, len(self.results))}
        for place, operand in zip(inputs, operands, strict=True):
            if place.isdigit():  # begins as the result does
                self.values[f"${place}"] = operand
        self.here = np.ones(THREADS, bool)  # threads that have not branched to a label
        self.waiting: dict[str, np.ndarray] = {}

    def run(self) -> Any:
        braces = r"^\s*{|}\s*$|}\s*{(?= \.reg)"  # braces of PTX blocks
        text = re.sub(braces, " ", self.code.strip())
        for statement in filter(None, (part.strip() for part in text.split(";"))):
            self._statement(statement)
        results = tuple(self.values[name] for name in self.results)
        return results if len(results) > 1 else results[0] if results else None

    def _statement(self, statement: str) -> None:
        if label := re.match(r"(\w+):\s*", statement):
            self.here = self.here | self.waiting.get(label[1], False)
            statement = statement[label.end() :]
            if not statement:
                return
        where = self.here
        if guard := re.match(r"@(!?)(\w+) (.*)", statement):
            where = where & (self.values[guard[2]] != bool(guard[1]))
            statement = guard[3]
        name, _, rest = statement.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if name in (".reg", "bar.warp.sync", "bar.sync", "fence.proxy.async.global"):
            return
        kind, *more = name.split(".")
        getattr(self, f"_{kind}")(more, operands, where)

    def _value(self, operand: str) -> Any:
        if operand.startswith("{"):
            return [self._value(x.strip()) for x in operand[1:-1].split(",")]
        if operand in self.values:
            return self.values[operand]
        if operand.startswith("0f"):
            return np.full(THREADS, int(operand[2:], 16), np.uint32).view(np.float32)
        return np.full(THREADS, int(operand, 0) & 0xFFFFFFFF, np.uint32).view(np.int32)

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand[1:-1].partition("+")
        return self.values[base] + int(offset or 0)

    def _words(self, more: list[str], operand: str) -> np.ndarray:
        """[threads, bytes] of what a store stores."""
        value = self._value(operand)
        size = int(more[-1][1:]) // 8
        parts = [_bytes([x])[:, :size] for x in (value if isinstance(value, list) else [value])]
        return np.concatenate(parts, axis=1)

    def _setp(self, more, operands, where):
        compare = {"ne": np.not_equal, "eq": np.equal, "lt": np.less, "ge": np.greater_equal}[
            more[0]
        ]
        values = map(self._value, operands[1:])
        values = map(_unsigned, values) if more[1] == "u32" else values
        self.values[operands[0]] = compare(*values)

    def _selp(self, more, operands, where):
        a, b, predicate = map(self._value, operands[1:])
        self.values[operands[0]] = np.where(predicate, a, b)

    def _st(self, more, operands, where):
        self.memory.store(self._address(operands[0]), self._words(more, operands[1]), where)

    def _ld(self, more, operands, where):
        names, size = operands[0].strip("{}").split(","), int(more[-1][1:]) // 8
        word = np.dtype(np.int64 if size == 8 else np.int32)
        loaded = np.zeros((THREADS, max(size, word.itemsize) * len(names)), np.uint8)
        if where.any():
            first = self._address(operands[1])
            loaded[where, : size * len(names)] = self.memory.load(first[where], size * len(names))
        for n, name in enumerate(name.strip() for name in names):
            numbers = np.ascontiguousarray(loaded).view(word)[:, n]
            self.values[name] = np.where(where, numbers, self.values.get(name, numbers))

    def _red(self, more, operands, where):
        value = self._value(operands[1])
        value = np.stack(value if isinstance(value, list) else [value], axis=1)
        self.memory.add(self._address(operands[0]), value.view(np.float32), where)

    def _vote(self, more, operands, where):
        votes = self._value(operands[1]).reshape(-1, 32).any(axis=1)
        self.values[operands[0]] = np.repeat(votes, 32)

    def _bar(self, more, operands, where):
        """`bar.red.or`: whether one of the warpgroup's threads says so."""
        assert more == ["red", "or", "pred"]
        self.values[operands[0]] = np.full(THREADS, self._value(operands[3]).any())

    def _redux(self, more, operands, where):
        reduce = {"add": np.add, "max": np.maximum}[more[1]].reduce
        lanes = self._value(operands[1]).reshape(-1, 32)
        self.values[operands[0]] = np.repeat(reduce(lanes, axis=1), 32)

    def _shfl(self, more, operands, where):
        value, by = self._value(operands[1]), self._value(operands[2])
        lane = np.arange(THREADS) % 32
        source = {"bfly": lane ^ by, "up": lane - by, "idx": by}[more[1]]
        name, _, predicate = operands[0].partition("|")
        there = (source >= 0) & (source < 32)
        source = np.where(there, source, lane) + np.arange(THREADS) // 32 * 32
        self.values[name] = value[source]
        self.values[predicate] = there

    def _bra(self, more, operands, where):
        (label,) = operands
        self.waiting[label] = self.waiting.get(label, False) | where
        self.here = self.here & ~where

    def _atom(self, more, operands, where):
        """One thread after the other."""
        address, most = self._address(operands[1]), self._value(operands[2])
        old = np.zeros(THREADS, np.int32)
        for n in np.flatnonzero(where):
            thread = np.arange(THREADS) == n
            was = np.ascontiguousarray(self.memory.load(address[thread], 4)).view(np.uint32)[0, 0]
            limit = _unsigned(most)[n]
            new = {"add": was + limit, "inc": 0 if was >= limit else was + 1}[more[3]]
            words = np.full((THREADS, 1), new, np.uint32).view(np.uint8)
            self.memory.store(address, words, thread)
            old[n] = was
        name = operands[0]
        self.values[name] = np.where(where, old, self.values.get(name, old))

    def _cp(self, more, operands, where):
        """`cp.async`, done at once: zeros past the bytes that are read."""
        if more[1] not in ("cg", "ca"):
            return
        to, source = self._address(operands[0]), self._address(operands[1])
        size, reads = int(operands[2]), self._value(operands[3])
        words = np.zeros((THREADS, size), np.uint8)
        there = where & (reads == size)
        assert (there | (reads == 0) | ~where).all()
        if there.any():
            words[there] = self.memory.load(source[there], size)
        self.memory.store(to, words, where)

    def _ldmatrix(self, more, operands, where):
        names = [name.strip() for name in operands[0].strip("{}").split(",")]
        lanes = np.arange(32) < 8 * len(names)
        address = self._address(operands[1]).reshape(4, 32)
        address = np.where(lanes, address, address[:, :1]).ravel()
        rows = np.ascontiguousarray(self.memory.load(address, 16)).view(np.uint16)
        rows = rows.reshape(4, 4, 8, 8)  # warp, matrix, row, column
        rows = rows.swapaxes(2, 3) if "trans" in more else rows
        for n, name in enumerate(names):
            pairs = np.ascontiguousarray(rows[:, n]).view(np.int32)  # lane: row, pair of columns
            self.values[name] = pairs.reshape(THREADS)

    def _mma(self, more, operands, where):
        names = [name.strip() for name in operands[0].strip("{}").split(",")]
        a, b, c = map(self._value, operands[1:])
        made = multiplied(a, b, c, more[7], more[6])
        self.values.update(zip(names, made, strict=True))

    def _prmt(self, more, operands, where):
        low, high, order = map(self._value, operands[1:])
        raw = _bytes([low, high])
        places = (order[:, None] >> np.arange(0, 16, 4)) & 7
        self.values[operands[0]] = np.take_along_axis(raw, places, 1).copy().view(np.int32)[:, 0]

    def _cvt(self, more, operands, where):
        values = [self._value(x) for x in operands[1:]]
        if more[-2] == "f16x2" and more[-1] == "f32":
            halves = np.stack(values[::-1], 1).astype(np.float16)
            self.values[operands[0]] = halves.view(np.int32)[:, 0]
            return
        if more == ["rn", "satfinite", "e4m3x2", "f32"]:
            pairs = np.stack([np.clip(x, -448, 448) for x in values[::-1]], 1)
            narrow = pairs.astype(jnp.float8_e4m3fn)
            self.values[operands[0]] = narrow.view(np.int16)[:, 0]
            return
        assert more == ["rn", "f16x2", "e4m3x2"], more
        narrow = values[0].astype(np.uint16)[:, None].view(jnp.float8_e4m3fn)
        self.values[operands[0]] = narrow.astype(np.float16).view(np.int32)[:, 0]

    def _arithmetic(self, more, operands, operation):
        values = [self._value(x) for x in operands[1:]]
        if more[-1] == "f16x2":
            values = [np.ascontiguousarray(x)[:, None].view(np.float16) for x in values]
            with np.errstate(all="ignore"):
                made = operation(*(x.astype(np.float32) for x in values)).astype(np.float16)
            self.values[operands[0]] = made.view(np.int32)[:, 0]
            return
        with np.errstate(all="ignore"):
            self.values[operands[0]] = operation(*values)

    def _sub(self, more, operands, where):
        self._arithmetic(more, operands, np.subtract)

    def _mul(self, more, operands, where):
        self._arithmetic(more, operands, np.multiply)

    def _fma(self, more, operands, where):
        self._arithmetic(more, operands, lambda a, b, c: a * b + c)

    def _and(self, more, operands, where):
        self._arithmetic(more, operands, np.bitwise_and)

    def _or(self, more, operands, where):
        self._arithmetic(more, operands, np.bitwise_or)

    def _xor(self, more, operands, where):
        self._arithmetic(more, operands, np.bitwise_xor)

    def _shr(self, more, operands, where):
        shift = lambda a, b: (_unsigned(a) >> _unsigned(b)).view(np.int32)  # noqa: E731
        self._arithmetic(more, operands, shift)

    def _mov(self, more, operands, where):
        if operands[0].startswith("{"):
            word = _unsigned(self._value(operands[1]))
            for n, name in enumerate(operands[0].strip("{}").split(",")):
                self.values[name.strip()] = (word >> np.uint32(16 * n)) & np.uint32(0xFFFF)
            return
        name, value = operands[0], self._value(operands[1])
        self.values[name] = np.where(where, value, self.values.get(name, value))

    def _add(self, more, operands, where):
        self.values[operands[0]] = self._value(operands[1]) + self._value(operands[2])


_FLOAT8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def multiplied(
    a: Sequence, b: Sequence, c: Sequence, kind: str, left_kind: str | None = None
) -> list[np.ndarray]:
    """c + a @ b of each warp by a tensor core: the fragments of m16 n8 k16 in bf16 or f16, k32 in
    float8, or k8 in tf32, which takes the first 19 bits of a number. `left_kind`: of a; None: b's.
    """
    group, lane = np.arange(32) // 4, np.arange(32) % 4
    each = 4 if kind in _FLOAT8 else 2  # numbers of a word
    size = 8 if kind == "tf32" else 8 * each
    left, right = np.zeros((4, 16, size), np.float32), np.zeros((4, size, 8), np.float32)
    for n, word in enumerate(a):
        for i, x in enumerate(_numbers_of(word, left_kind or kind)):
            column = each * lane + i + n // 2 * 4 * each
            column = lane + n // 2 * 4 if kind == "tf32" else column
            left[:, group + n % 2 * 8, column] = x
    for n, word in enumerate(b):
        for i, x in enumerate(_numbers_of(word, kind)):
            row = lane + 4 * n if kind == "tf32" else each * lane + i + 4 * each * n
            right[:, row, group] = x
    with np.errstate(all="ignore"):
        product = left @ right
    rows, columns = [group, group, group + 8, group + 8], [2 * lane, 2 * lane + 1] * 2
    pairs = zip(c, rows, columns, strict=True)
    return [
        (x.reshape(4, 32) + product[:, row, column]).astype(np.float32).reshape(THREADS)
        for x, row, column in pairs
    ]


def _numbers_of(word: np.ndarray, kind: str) -> list[np.ndarray]:
    """[4 warps, 32 lanes] of each number of a word."""
    word = np.ascontiguousarray(word)
    if kind == "tf32":
        return [(word.view(np.int32) & np.int32(-(2**13))).view(np.float32).reshape(4, 32)]
    kinds = {"bf16": jnp.bfloat16, "f16": np.float16, **_FLOAT8}
    numbers = word[:, None].view(kinds[kind])
    return list(numbers.astype(np.float32).T.reshape(-1, 4, 32))


# ---- a function of tiles, refs and scalars -------------------------------------------------------


def places(shape: tuple[int, int], down: int) -> np.ndarray:
    """[threads, registers, 2]: which element of a tile (in C order) a thread holds in each half of
    each register; of four warps `down` stand one above the other. In a warp's piece the order is
    by 16 rows, 8 columns, then rows 0-7 and 8-15; a lane has two neighbouring columns.
    """
    thread = np.arange(THREADS)[:, None]
    warp, lane, across = thread // 32, thread % 32, 4 // down
    rows, columns = shape[0] // down, shape[1] // across
    n = np.arange(rows * columns // 64)[None]
    row = warp // across * rows + n // (columns // 4) * 16 + n % 2 * 8 + lane // 4
    column = warp % across * columns + n // 2 % (columns // 8) * 8 + lane % 4 * 2
    return (row * shape[1] + column)[..., None] + np.arange(2)


class Captured(NamedTuple):
    """A call of `plgpu.inline_mgpu`: the function has its twin as an attribute."""

    function: Any
    types: Any
    args: tuple[Any, ...]

    def code(self, *values: Any) -> Any:
        return self.function(None, *values)


def captured(call: Callable[..., Any], *args: Any, **options: Any) -> Captured:
    """The one inline function that `call(*args)` makes."""
    made: list[Captured] = []

    def inline_mgpu(*, arg_types, return_type=None):
        del return_type
        return lambda function: lambda *args: made.append(Captured(function, arg_types, args))

    with mock.patch.object(plgpu, "inline_mgpu", inline_mgpu):
        call(*args, **options)
    (code,) = made
    return code


def evaluate(code: Captured, held: dict[str, Any], warpgroup: int = 0) -> Any:
    """Runs the code. Refs are NumPy arrays, which it may change, or `Far`; tiles and scalars are
    arrays. `held`: by layout (as its repr is), which elements a thread's registers hold, or a
    function from a shape to these. Returns the registers of the result, if there is one:
    [threads, registers, ..].
    """
    leaves, tree = jax.tree.flatten(code.args)
    kinds = jax.tree.leaves(code.types)
    refs = [x for x, kind in zip(leaves, kinds, strict=True) if isinstance(kind, plgpu.RefType)]
    memory = Memory(refs)
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        made = [_argument(memory, *both, held) for both in zip(leaves, kinds, strict=True)]
        wanted = [kind for types, _, _ in made for kind in types]
        inputs = [value for _, values, _ in made for value in values]
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("code", ir.FunctionType.get(wanted, []))
            block = function.add_entry_block()
        with ir.InsertionPoint(block):
            arguments = iter(block.arguments)
            inside = [finish([next(arguments) for _ in types]) for types, _, finish in made]
            with mock.patch.object(utils, "warpgroup_barrier", lambda: None):
                out = code.code(*jax.tree.unflatten(tree, inside))
            func.ReturnOp([])
        values = dict(zip(block.arguments, inputs, strict=True))
        _Machine(memory, warpgroup).run(block.operations, values)
        if out is None:
            return None
        results = [
            [values[register] for register in array.registers.flat]
            for array in (out if isinstance(out, tuple) else (out,))
        ]
    made = [
        np.stack([np.stack(x, 1) if isinstance(x, list) else x for x in registers], 1)
        for registers in results
    ]
    return tuple(made) if isinstance(out, tuple) else made[0]


def _argument(memory: Memory, x: Any, kind: Any, held: dict[str, Any]) -> tuple[Any, ...]:
    """(types of the function's arguments, their values, what the code is handed of them)."""
    if isinstance(kind, plgpu.RefType):
        element = utils.dtype_to_ir_type(jnp.dtype(x.dtype))
        type_ = ir.MemRefType.get(tuple(x.shape), element)
        number = next(n for n, ref in enumerate(memory.refs) if ref is x)
        return [type_], [memory.pointer(number)], lambda values: values[0]
    x = np.asarray(x)
    element = utils.dtype_to_ir_type(x.dtype)
    if not x.ndim:
        signed = True if np.issubdtype(x.dtype, np.integer) else None
        splat = lambda values: mgpu.FragmentedArray.splat(values[0], (), is_signed=signed)  # noqa: E731
        return [element], [np.full(THREADS, x[()])], splat
    layout, where = kind.to_mgpu(), held[repr(kind)]
    where = where(x.shape) if callable(where) else where
    shape = layout.registers_shape(x.shape)
    numbers = x.reshape(-1)[where].reshape(THREADS, int(np.prod(shape)), -1)
    registers = [list(np.ascontiguousarray(numbers[:, n].T)) for n in range(numbers.shape[1])]
    type_ = ir.VectorType.get((numbers.shape[2],), element)

    def tile(values):
        filled = np.empty(len(values), object)
        filled[:] = values
        signed = True if np.issubdtype(x.dtype, np.integer) else None
        return mgpu.FragmentedArray(
            _registers=filled.reshape(shape), _layout=layout, _is_signed=signed
        )

    return [type_] * len(registers), registers, tile
