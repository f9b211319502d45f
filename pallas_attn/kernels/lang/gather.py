"""Numbers of an array in global memory, at positions that each thread holds in registers."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_attn.kernels.lang import mosaic

Array = jax.Array


def gather(ref: Any, index: Array, layout: Any) -> Array:
    """`ref[index]` of a flat array of int32 or float32; `index`, int32, is a tile of that layout or
    a vector along one side of it, and within the array.
    """
    dtype = ref.dtype

    def code(_, ref, index):
        kind = utils.dtype_to_ir_type(dtype)
        base, registers = mosaic.pointer_of(ref), index.registers.copy()
        for at, register in enumerate(index.registers.flat):
            is_vector = isinstance(register.type, ir.VectorType)
            count = ir.VectorType(register.type).shape[0] if is_vector else 1
            places = [vector.extract(register, [], [i]) if is_vector else register
                      for i in range(count)]  # fmt: skip
            loaded = [llvm.load(kind, utils.getelementptr(base, [place], kind)) for place in places]
            result = loaded[0]
            if is_vector:
                result = vector.from_elements(ir.VectorType.get((count,), kind), loaded)
            registers[np.unravel_index(at, registers.shape)] = result
        signed = None if kind == ir.F32Type.get() else True
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=signed)

    def twin(ref, index):
        return ref[index]

    inline: Any = code
    inline.twin = twin
    result = plgpu.ShapeDtypeStruct(index.shape, dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=result)(inline)(
        ref, index
    )
