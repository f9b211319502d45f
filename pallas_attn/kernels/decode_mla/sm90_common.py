"""The tuning, the limits and the launch that all kernels of latent caches for Hopper share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.byte_rows import BYTE_DTYPE
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.decode import limits
from pallas_attn.kernels.decode.combine_splits import Outputs
from pallas_attn.kernels.decode.plan import ROWS_OF_WARPS, DecodeTiling, Plan, counters
from pallas_attn.kernels.decode_mla import combine_latent, producer, rows_as_sequences
from pallas_attn.kernels.decode_mla.producer import TILE, WIDTH
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import KernelConfig

V_WARPGROUPS = 2  # warpgroups that have columns of the output, where there are several
P_SLOTS = 2  # tiles whose probabilities there is room for


def tiling_of(config: KernelConfig) -> DecodeTiling:
    """The fields of a Config that a plan reads."""
    return DecodeTiling(TILE, config.grid, ROWS_OF_WARPS, config.split_tiles, config.stages)


Results = tuple[jax.Array, jax.Array]  # out and lse
Launch = Callable[[DecodeInputs, DecodeProblem, Any], Results]


class Program(NamedTuple):
    """The parts of a kernel that its launch needs."""

    body: Callable[..., None]  # `body(refs, outputs, smem, plan=)`
    scratch: Callable[[Plan], Any]  # shared memory, described once: its bytes are added up, too
    warpgroups: int
    partials: Callable[[Plan], Any]  # types of the accumulators of all partials
    # The launch that combines partials, where the last block of a row does not.
    combine: Callable[[Plan], Callable[..., Results] | None] = lambda plan: None


@functools.partial(jax.jit, static_argnames=("plan", "program"))
def launched(inputs: DecodeInputs, counters: jax.Array, plan: Plan, program: Program) -> Results:
    """Jitted, so that a model of many layers traces it once."""
    rows, shape = plan.queries.chunk_rows, jax.ShapeDtypeStruct
    sums = shape((plan.partials, rows), jnp.float32)
    outputs = Outputs(
        shape((plan.lines * rows, plan.problem.v_head_dim), plan.problem.dtype),
        shape((plan.lines, rows), jnp.float32),
        (program.partials(plan), sums, sums),
    )
    if combine := program.combine(plan):
        outputs = outputs._replace(out=None, lse=None)
    smem = program.scratch(plan)
    kernel = producer.kernel_of(plan, program.body, outputs, smem, program.warpgroups)
    refs = producer.refs_of(inputs, counters, plan)
    ((out, lse, partials),) = kernel(refs)
    if combine is not None:
        out, lse = combine(plan, partials, refs)
    return combine_latent.of_sequences(plan, out, lse)


def kernel_with(
    plan_of: Callable[[DecodeProblem, Any], Plan],
    program: Program,
    limit: Callable[[DecodeProblem], Limit | None],
    launches: Callable[[Launch], Launch] = lambda launch: launch,
) -> Kernel:
    """The kernel that has these plans and this program. `limit`: why it cannot take a problem whose
    rows are not packed. `launches(launch)`: the results of several launches.
    """

    def launch(inputs: DecodeInputs, problem: DecodeProblem, config: KernelConfig) -> Results:
        plan = plan_of(problem, config)
        return launched(inputs, counters(plan), plan, program)

    @dataclasses.dataclass(frozen=True)
    class Config(limits.RingConfig):
        """`stages`: the ring has room for so many blocks of columns, if not for as many as the
        kernel needs.
        """

        @classmethod
        def default(cls, problem: DecodeProblem) -> "Config":
            """The deepest ring that fits in shared memory; and a few blocks less than there are
            multiprocessors, where all of those then have as much to do.
            """
            problem, most = rows_as_sequences.of_rows(problem), cls().grid
            heads = problem.sequences * plan_of(problem, cls()).queries.chunks
            few = range(most, most - most // 16, -1)
            grid = next((n for n in few if heads % n == 0 or n % heads == 0), most)
            return limits.deepest(smem_bytes, problem, cls(grid=grid), mosaic.SMEM_LIMIT)

    def whole_limit(problem: DecodeProblem) -> Limit | None:
        return rows_as_sequences.limit(problem) or limit(rows_as_sequences.of_rows(problem))

    def smem_bytes(problem: DecodeProblem, config: KernelConfig) -> int:
        return limits.smem_bytes(
            program.scratch(plan_of(rows_as_sequences.of_rows(problem), config))
        )

    def run(inputs: DecodeInputs, problem: DecodeProblem, config: KernelConfig) -> Results:
        """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N,
        Hv] and [N, tokens].
        """
        return rows_as_sequences.run(launches(launch), inputs, problem, config)

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
