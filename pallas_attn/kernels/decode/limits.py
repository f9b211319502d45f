"""The limits of decode kernels: dtypes, sizes that are counted in 32 bits, and shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

from pallas_attn._call.problem import DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, tiles, tma_operands
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.types import KernelConfig

RESERVED = 3072  # bytes of a block's shared memory that are Mosaic's and CUDA's own
# A launch has parameters for as many arrays of K and of V; of the others a thread lays out 63.
MOST_SEQUENCES = 2000
# Query rows of a launch whose rows are sequences of their own: shared memory has a table of them.
ROWS_AT_ONCE = 512


def dtype_limit(problem: DecodeProblem) -> Limit | None:
    """Why no decode kernel takes these dtypes, or None."""
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        return Limit(
            f"it takes bfloat16, float16 and float32 q, not {problem.dtype}",
            "cast q to one of them",
        )
    if problem.cache_dtype != problem.dtype and not problem.quantized:
        return Limit(
            f"a {problem.cache_dtype} cache under {problem.dtype} queries",
            "create the cache with q's dtype, or a narrow one with scales; or cast q",
        )
    return None


def size_limit(problem: DecodeProblem) -> Limit | None:
    """Why the scheduler cannot count this problem's tiles, pages or sequences, or None."""
    if problem.functions and (refused := tiles.arrays_limit(problem.functions)) is not None:
        return refused
    most = sum(capacity // 64 + 1 for capacity in problem.capacities)
    if problem.packed:  # rows of all sequences, whose q chunks are as many as they or fewer
        most = (max(problem.capacities) // 64 + 1) * (1 + problem.sequences)
    if most * problem.q_heads * problem.q_len >= 2**31 or max(problem.capacities) >= 2**30:
        return Limit("it counts tiles of keys in 32 bits", "split the sequences over several calls")
    slabs = (problem.layers or 1) * (problem.pages or problem.sequences)
    if slabs >= 2**31:
        what = "sequences" if problem.pages is None else "pages"
        return Limit(f"{slabs} {what} of all layers; it counts them in 32 bits", "split the layers")
    scaled = problem.quantized and cache_layout.layout_of(problem).separate
    most = MOST_SEQUENCES // (2 if scaled else 1)
    if problem.sequences > most:
        return Limit(
            f"{problem.sequences} sequences; it takes up to {most}",
            "split them over several calls",
        )
    return None


def quantized_limit(problem: DecodeProblem) -> Limit | None:
    """Why quantised rows cannot be copied as they lie, or None."""
    if problem.head_dim % 64 or problem.v_head_dim % 8:
        return Limit(
            f"a quantised cache of head dim {problem.head_dim}; it takes multiples of 64",
            tma_operands.HOW_TO_PAD,
        )
    sizes = problem.capacities if problem.page_size is None else (problem.page_size,)
    uneven = not problem.unscaled and any(size % 4 for size in sizes)
    if uneven or problem.v_head_dim % 16:
        return Limit(
            "rows are copied 16 bytes at a time, scales too",
            "make capacities (or the page size) a multiple of 4 and v_head_dim one of 16",
        )
    if problem.dtype == "float32":
        return Limit(
            "float32 queries over a quantised cache; it takes bfloat16 and float16",
            "cast q to one of them",
        )
    return None


def smem_bytes(scratch: Any) -> int:
    """Shared memory of a block with these buffers."""
    return RESERVED + mosaic.bytes_of(scratch)


def deepest(
    smem_bytes: Callable[[DecodeProblem, Any], int],
    problem: DecodeProblem,
    config: KernelConfig,
    room: int,
) -> Any:
    """The config with as many stages, up to 8, as there is room for; but at least 2."""
    deeper = [dataclasses.replace(config, stages=stages) for stages in range(8, 2, -1)]
    fitting = (config for config in deeper if smem_bytes(problem, config) <= room)
    return next(fitting, dataclasses.replace(config, stages=2))


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """The tuning that all decode kernels have. `stages`: kv tiles in the ring; with a single one
    nothing arrives under the matmuls of a tile. `grid`: persistent blocks. `split_tiles`: kv tiles
    of a split where `batch_invariant` is asked for.
    """

    stages: int = 6
    grid: int = mosaic.MULTIPROCESSORS
    split_tiles: int = 16
    fewest_stages: ClassVar[int] = 2

    def __post_init__(self) -> None:
        fewest = self.fewest_stages
        check(
            self,
            stages=(self.stages >= fewest, f"at least {fewest}"),
            grid=(self.grid >= 1, "at least 1"),
            split_tiles=(self.split_tiles >= 1, "at least 1"),
        )

    def shallower(self) -> Self | None:
        """The config with a stage less, which changes no bits; None where it has the fewest."""
        if self.stages <= self.fewest_stages:
            return None
        return dataclasses.replace(self, stages=self.stages - 1)
