"""Inline PTX, and the addresses of words in memory."""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_attn.kernels.lang.types import Index, Ref


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


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
