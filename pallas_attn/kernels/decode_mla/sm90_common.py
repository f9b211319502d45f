"""The tuning and the limits that all kernels of latent caches for Hopper share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_attn._call import gpu_specs
from pallas_attn._call.byte_rows import BYTE_DTYPE
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.decode import limits
from pallas_attn.kernels.decode.plan import ROWS_OF_WARPS, DecodeTiling, Plan
from pallas_attn.kernels.decode_mla import packed
from pallas_attn.kernels.decode_mla.producer import TILE, WIDTH
from pallas_attn.kernels.lang.types import KernelConfig


def tiling_of(config: KernelConfig) -> DecodeTiling:
    """The fields of a Config that a plan reads."""
    return DecodeTiling(TILE, config.grid, ROWS_OF_WARPS, config.split_tiles, config.stages)


def kernel_with(
    plan_of: Callable[[DecodeProblem, Any], Plan],
    scratch: Callable[[Plan], Any],
    launch: Callable[[DecodeInputs, DecodeProblem, Any], tuple[jax.Array, jax.Array]],
    limit: Callable[[DecodeProblem], Limit | None],
) -> Kernel:
    """The kernel that has these plans, shared memory and launches. `limit`: why it cannot take a
    problem whose rows are not packed.
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """`stages`: the ring has room for so many blocks of columns, if not for as many as the
        kernel needs. `grid`: persistent blocks. `split_tiles`: kv tiles of a split where
        `batch_invariant` is asked for.
        """

        stages: int = 6
        grid: int = gpu_specs.multiprocessors(gpu_specs.HOPPER)
        split_tiles: int = 16
        shallower = limits.shallower_down_to(2)

        def __post_init__(self):
            limits.check_config(self)

        @classmethod
        def default(cls, problem: DecodeProblem) -> "Config":
            """The deepest ring that fits in shared memory; and a few blocks less than there are
            multiprocessors, where all of those then have as much to do.
            """
            problem, most = packed.of_rows(problem), cls().grid
            heads = problem.sequences * plan_of(problem, cls()).queries.chunks
            few = range(most, most - most // 16, -1)
            grid = next((n for n in few if heads % n == 0 or n % heads == 0), most)
            return limits.deepest(smem_bytes, problem, cls(grid=grid), limits.SMEM_LIMIT)

    def whole_limit(problem: DecodeProblem) -> Limit | None:
        return packed.limit(problem) or limit(packed.of_rows(problem))

    def smem_bytes(problem: DecodeProblem, config: KernelConfig) -> int:
        return limits.smem_bytes(scratch(plan_of(packed.of_rows(problem), config)))

    def run(
        inputs: DecodeInputs, problem: DecodeProblem, config: KernelConfig
    ) -> tuple[jax.Array, jax.Array]:
        """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N,
        Hv] and [N, tokens].
        """
        return packed.run(launch, inputs, problem, config)

    return Kernel(Config, whole_limit, smem_bytes, run)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why no kernel can take such rows of V within K, or None. `problem`: that of a launch."""
    return limits.dtype_limit(problem) or _rows_limit(problem) or limits.size_limit(problem)


def _rows_limit(problem: DecodeProblem) -> Limit | None:
    """Why it cannot take such rows of V within K, or None."""
    if problem.dtype == "float32":
        return Limit(
            "float32 queries over V within K; it takes bfloat16 and float16",
            "cast q to one of them",
        )
    reference = 'say implementation="reference"'
    if cache_layout.layout_of(problem).separate:
        return Limit(
            "separate arrays of latent rows, which would take a tensor map each",
            "use a StackedCache or a PagedCache",
        )
    stored = BYTE_DTYPE if problem.byte_rows else problem.dtype
    if problem.quantized != problem.byte_rows or problem.cache_dtype != stored:
        return Limit(f"a {problem.cache_dtype} cache with V within K", "keep it in q's dtype")
    if problem.kv_heads != 1:
        return Limit(f"V within K of {problem.kv_heads} kv heads; it takes one", reference)
    rest = problem.head_dim - problem.v_head_dim
    if problem.v_head_dim % (2 * WIDTH) or problem.v_head_dim > 512 or rest not in (0, WIDTH):
        return Limit(
            f"V within K of head dims {problem.head_dim} and {problem.v_head_dim}; it takes "
            "v_head_dim 128, 256, 384 or 512, and head_dim as large or larger by 64",
            reference,
        )
    rows = problem.page_size or max(problem.capacities)
    if rows % 8 and not cache_layout.layout_of(problem).listed:
        return Limit(
            f"V within K by {rows} rows; TMA copies 8 at a time",
            "make capacities (or the page size) a multiple of 8",
        )
    return None
