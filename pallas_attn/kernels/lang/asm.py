"""Inline PTX, integers of one thread, and the addresses of words in memory."""

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang.types import Index, Ref


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _operator(op: Callable[..., ir.Value]) -> Callable[["Int", Any], "Int"]:
    return lambda self, other: self._with(op, other)


def _comparison(predicate: arith.CmpIPredicate) -> Callable[["Int", Any], "Int"]:
    return lambda self, other: self._with(lambda a, b: arith.cmpi(predicate, a, b), other)


class Int:
    """An integer, or a condition, of one thread. Python ints mix in; `//` and `%` want operands
    that are not negative.
    """

    def __init__(self, value: ir.Value):
        self.value = value

    def _with(self, op: Callable[..., ir.Value], other: Any) -> "Int":
        if not isinstance(other, Int):
            other = Int(utils.c(other, self.value.type))
        return Int(op(self.value, other.value))

    __add__ = _operator(arith.addi)
    __sub__ = _operator(arith.subi)
    __mul__ = _operator(arith.muli)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)
    __and__ = _operator(arith.andi)
    __or__ = _operator(arith.ori)
    __rshift__ = _operator(arith.shrui)
    __lshift__ = _operator(arith.shli)
    __lt__ = _comparison(arith.CmpIPredicate.slt)
    __le__ = _comparison(arith.CmpIPredicate.sle)
    __gt__ = _comparison(arith.CmpIPredicate.sgt)
    __ge__ = _comparison(arith.CmpIPredicate.sge)

    def __array_ufunc__(self, ufunc: Any, method: str, a: "Int", b: Any) -> "Int":
        """NumPy's minimum and maximum, with which a Mask computes its bounds."""
        del method
        return a._with({"minimum": arith.minsi, "maximum": arith.maxsi}[ufunc.__name__], b)


def do(ptx: str, operands: list[ir.Value], constraints: str) -> None:
    """Instructions that give no result and touch memory."""
    clobbers = ",".join(filter(None, (constraints, "~{memory}")))
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, operands, ptx, clobbers, has_side_effects=True)


def do_where(where: ir.Value, ptx: str, operands: list[ir.Value], constraints: str) -> None:
    """An instruction with a predicate. Its operands are numbered from $1 on.

    Behind a branch instead, LLVM and ptxas would move there what its operands wait for.
    """
    ptx = f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p {ptx}; }}"
    do(ptx, [arith.extui(i32(), where), *operands], f"r,{constraints}")


def give(kind: ir.Type, ptx: str, operands: list[ir.Value], constraints: str) -> ir.Value:
    """The result of instructions that stay where they are."""
    return llvm.inline_asm(kind, operands, ptx, constraints, has_side_effects=True)


def word_type(nbytes: int) -> ir.Type:
    """The type of a word that is read at once."""
    if nbytes == 16:
        return ir.VectorType.get((4,), i32())
    return ir.IntegerType.get_signless(8 * nbytes)


def number_of(register: ir.Value) -> ir.Value:
    """The number in a register, which some layouts hold as a vector of one."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, [], [0])
    return register


def pointer_of(ref: Ref) -> ir.Value:
    """A pointer to the first element of an array in memory."""
    return utils.memref_ptr(ref) if isinstance(ref.type, ir.MemRefType) else ref


def address_of(ref: Ref, index: Index, nbytes: int) -> ir.Value:
    """A pointer to word `index`, in words of `nbytes`."""
    return utils.getelementptr(pointer_of(ref), [_value(index)], word_type(nbytes))


def shared_address(ref: Ref, index: Index, nbytes: int) -> ir.Value:
    """The 32-bit address of word `index` of shared memory."""
    return llvm.ptrtoint(i32(), address_of(ref, index, nbytes))


def _value(index: Index) -> ir.Value:
    return utils.c(index, i32()) if isinstance(index, int) else index.value
