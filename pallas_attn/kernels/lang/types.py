"""Names for what crosses a function's border in a kernel.

A type checker sees `Any`: refs and tiles of Mosaic have no types of their own. A reader sees where
a value lives and what it is.
"""

from typing import Any

Ref = Any  # a ref to an array in global or shared memory
GmemRef = Any  # a ref to an array in global memory
SmemRef = Any  # a ref to a buffer in shared memory
Barrier = Any  # a ref to one barrier or to several
RegisterTile = Any  # an array in the registers of a warpgroup, with a layout
RegisterTiles = Any  # a tree of register tiles
Carry = Any  # the tree of values that a loop hands from one step to the next
KernelConfig = Any  # a frozen dataclass with the tuning values of a kernel
Index = Any  # an int, or an int32 scalar that is known when the kernel runs
Scalar = Any  # a float, or a floating-point scalar that is known when the kernel runs
Predicate = Any  # a bool, or a boolean scalar that is known when the kernel runs
Operand = Any  # an array that a kernel is launched with
Layout = Any  # how a tile is spread over the threads of a warpgroup
DType = Any  # whatever jnp.dtype takes
