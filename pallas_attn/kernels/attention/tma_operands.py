"""How operands lie in shared memory, and the copies by XLA of arrays that TMA cannot read.

Mosaic's TMA clips a tiled buffer at whole tiles of 8 rows and of 16 columns or more. A kernel reads
other sizes by panels (`lang.panels`), or XLA pads them. Rows and columns beyond are zeros.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import FLOAT8, AttentionInputs, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.errors import Limit
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import Operand
from pallas_attn.kernels.mma.wgmma import Kind

booleans = Special("kernels.lang.booleans")
wgmma_float32 = Special("kernels.mma.wgmma_float32")

# Arrays that kernels read in whole tiles of queries and keys.
IN_WHOLE_TILES = {"bias", "mask_array", "q_segment_ids", "kv_segment_ids", "q_positions"}
WIDEST = 512  # largest head dim that any kernel takes
# Attention pads what it is given; what still comes with such dims are buffers of a cache.
HOW_TO_PAD = "make the cache by create() where a GPU is the default device: it pads its buffers"


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def dims_limit(problem: Any, widest: int = 256) -> Limit | None:
    """Why a kernel that takes multiples of 8 up to `widest` refuses the head dims, or None."""
    dims = {"head_dim": problem.head_dim, "v_head_dim": problem.v_head_dim}
    for name, size in dims.items():
        reason = f"{name} is {size}; it takes multiples of 8 up to {widest}"
        if size > widest:
            remedies = "leave implementation=None", 'say implementation="reference"'
            return Limit(reason, remedies[size > WIDEST or problem.dtype in FLOAT8])
        if size % 8:
            return Limit(reason, HOW_TO_PAD)
    return None


def rows_in_tma(rows: int) -> int:
    """Rows that an array must have for its last ones to be read."""
    return rows if rows <= 8 else round_up(rows, 8)


def width_in_tma(dim: int) -> int:
    """The head dim that an array must have for its last columns to be read."""
    return dim if dim <= 64 else round_up(dim, 16)


def swizzle(dim: int) -> int:
    """Bytes: the widest that divides a row of `dim` 16-bit numbers, or that holds one whole."""
    return 128 if dim <= 64 and dim % 16 else swizzle_of(2 * width_in_tma(dim))


def swizzle_of(row: int) -> int:
    """Bytes: the widest that divides a row of so many, a multiple of 32."""
    return math.gcd(row, 128)


def width_in_smem(dim: int, dtype: str = "bfloat16") -> int:
    """The head dim in shared memory, in whole swizzles. float32 is padded on its way there: see
    `terms`.
    """
    return (
        round_up(dim, 16) if dtype == "float32" else round_up(width_in_tma(dim), swizzle(dim) // 2)
    )


class OperandFormat(NamedTuple):
    """How rows of q and k, or of v, lie in shared memory."""

    dtype: str
    terms: int  # numbers side by side whose sum stands for one of float32; else 1
    width: int  # columns of one term
    swizzle: int  # bytes
    panels: tuple[int, ...] = ()  # widths of `lang.panels`; none: all columns lie in one buffer
    transposed: bool = False  # whether rows of a tile lie along the last axis (V^T)

    def scratch(self, *shape: int) -> Any:
        """Shared memory [*shape, columns], or with the last two axes exchanged."""
        if self.transposed:
            *outer, rows = shape
            return mosaic.swizzled((*outer, self.columns, rows), self.dtype, self.swizzle)
        if self.panels:
            return tuple(panels.scratch(shape, self.dtype, width) for width in self.panels)
        return mosaic.swizzled((*shape, self.columns), self.dtype, self.swizzle)

    @property
    def copies(self) -> int:
        """Copies by TMA of a tile of rows: one a panel."""
        return len(self.panels) or 1

    @property
    def kind(self) -> Kind:
        return Kind(self.dtype, self.terms)

    @property
    def columns(self) -> int:
        return self.terms * self.width

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


def formats_of(problem: AttentionProblem, block_kv: int) -> tuple[OperandFormat, OperandFormat]:
    """The formats of q and k, and of v."""
    if problem.dtype in FLOAT8:
        dim, v_dim = round_up(problem.head_dim, 32), round_up(problem.v_head_dim, 16)
        return (
            OperandFormat(problem.dtype, 1, dim, swizzle_of(dim)),
            OperandFormat(problem.dtype, 1, v_dim, swizzle_of(block_kv), transposed=True),
        )
    dims = problem.head_dim, problem.v_head_dim
    widths = [width_in_smem(dim, problem.dtype) for dim in dims]
    if problem.dtype != "float32":
        qk, v = map(swizzle, dims)
        return (
            OperandFormat(problem.dtype, 1, widths[0], qk),
            OperandFormat(problem.dtype, 1, widths[1], v),
        )
    scores: Kind = wgmma_float32.score_kind(problem)
    values: Kind = wgmma_float32.value_kind(problem)
    k_row, v_row = widths[0] * scores.itemsize, widths[1] * values.itemsize
    p_row = block_kv * values.itemsize  # matmuls take probabilities by whole swizzles, too
    return (
        OperandFormat(*scores, widths[0], swizzle_of(k_row)),
        OperandFormat(*values, widths[1], min(swizzle_of(v_row), swizzle_of(p_row))),
    )


def takes_panels(problem: AttentionProblem) -> bool:
    """Whether q, k, v and the output lie in panels: 16-bit arrays whose sizes TMA would clip
    elsewhere, or head dims that a swizzle does not divide.
    """
    if problem.dtype in ("float32", *FLOAT8) or problem.fetches > 1:
        return False
    narrow = [n for n in (problem.head_dim, problem.v_head_dim) if n < 64 and n % 16]
    return bool(narrow) or not is_read_as_it_is(problem)


def in_panels(dtype: str, dim: int) -> OperandFormat:
    """The format of rows of `dim` 16-bit numbers in panels."""
    widths = panels.widths(dim)
    return OperandFormat(dtype, 1, sum(widths), 2 * max(widths), widths)


def stored(x: jax.Array, form: OperandFormat, power: jax.Array | None = None) -> Operand:
    """[B, rows, heads, dim] as kernels read it; float32 in columns of `form.width` for each term,
    of x / power [B, kv heads] (None: 1).
    """
    if x.dtype != jnp.float32:
        return x if form.panels else for_tma(x)
    split = wgmma_float32.split(x, power, form.kind, form.width)
    return padded(split, {1: rows_in_tma(x.shape[1])})


def is_read_as_it_is(problem: AttentionProblem) -> bool:
    """Whether q, k and v are 16-bit arrays in sizes that TMA reads whole."""
    dims, rows = [problem.head_dim, problem.v_head_dim], [problem.q_len, problem.kv_len]
    whole = [*map(width_in_tma, dims), *map(rows_in_tma, rows)] == dims + rows
    return whole and problem.dtype != "float32" and problem.fetches == 1


def for_tma(x: Operand) -> Any:
    """[B, rows, heads, dim], padded with zeros where its sizes ask for it."""
    sizes = {1: rows_in_tma(x.shape[1]), 3: width_in_tma(x.shape[3])}
    return padded(x, sizes)


def padded(array: Operand, sizes: dict[int, int]) -> Any:
    """Axes as long as `sizes` says, zeros at the end; one of length 1 stays: it broadcasts."""
    more = [sizes.get(axis, n) - n if n > 1 else 0 for axis, n in enumerate(array.shape)]
    return jnp.pad(array, [(0, n) for n in more]) if any(more) else array


def bias_and_mask(
    inputs: AttentionInputs,
    rows: int,
    keys: int,
    in_tiles: Collection[str] = (),
    *,
    only_read: bool = False,
) -> dict[str, Any]:
    """The operands of bias and mask_array. Masks of keys stay boolean (`key_masks`). Arrays of
    2**31 numbers or more, which `array_tiles` cannot count, are padded to `rows` and `keys`, whole
    tiles, unless TMA clips them (`in_tiles`). `only_read`: XLA does not read the operands.
    """
    operands, mask = {"bias": inputs.bias}, inputs.mask_array
    if mask is not None:
        of_keys = mask.shape[2] == 1 < mask.shape[3]
        read = only_read and ("mask_array" in in_tiles or mask.size < 2**31)
        operands["mask_array"] = mask if of_keys else _in_int8(mask, read)
        in_tiles = {*in_tiles, *["mask_array"] * of_keys}
    return {
        name: x if name in in_tiles or x.size < 2**31 else padded(x, {2: rows, 3: keys})
        for name, x in operands.items()
        if x is not None
    }


def _in_int8(mask: jax.Array, only_read: bool) -> jax.Array:
    if not only_read:
        return mask.astype(jnp.int8)
    return booleans.as_bytes(mask)


def segment_ids(inputs: AttentionInputs, rows: int, keys: int) -> dict[str, Any]:
    """q_segment_ids [B, rows] and kv_segment_ids [B, keys], and q_positions [B, rows], if there are
    any.
    """
    sizes = {"q_segment_ids": rows, "kv_segment_ids": keys, "q_positions": rows}
    arrays = {name: getattr(inputs, name) for name in sizes}
    return {name: extended(x, sizes[name]) for name, x in arrays.items() if x is not None}


def extended(ids: Operand, length: int) -> Any:
    """[B, n] -> [B, length]: the last one goes on."""
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), mode="edge")


def edge(v: Operand, lengths: Operand, block: int) -> Any:
    """[B, block, K, Hv]: the value tile in which each sequence ends, 0 past its length.

    What lies there may be NaN, and a matmul would multiply it by 0.
    """
    where = (lengths // block * block)[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    taken = jax.vmap(lambda rows, at: jnp.take(rows, at, axis=0, mode="clip"))(v, where)
    return jnp.where((where < lengths[:, None])[..., None, None], taken, 0)
