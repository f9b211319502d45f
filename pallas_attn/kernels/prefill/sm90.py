"""Attention of many new rows to a KV cache, for Hopper: chunked prefill and speculative decoding.

The mainloop is that of `flash_fwd.warpgroups`: wgmma, with the softmax of one kv
tile under the value matmul of the one before. Two things differ: rows of a q tile are pairs of
query heads and query rows that share a kv head (`plan.RowTiles`), so that K and V are read once for
the whole head group; and K and V come from the cache as it lies.

Grid: persistent blocks, `warpgroups` consumers of 64 rows each and one producer. A work unit is a q
tile and one of `splits` ranges of the kv tiles that it sees; the number of units is known
statically, where they begin and end is known from the lengths. Block i takes units i, i + blocks,
and so on: q tiles of one kv head run side by side and read K and V from L2. Where blocks have few
units each and L2 holds K and V of a whole sequence, units are taken from all its kv heads, the
longest first. With one split the block writes the result. With more it writes a partial
(accumulator, row max, row sum), and `combine_partials` makes the result.

Shared memory, and who owns it when:
  q [warpgroup]   the consumer's own: it loads its rows, where there are two slots those of the next
                  unit before it computes this one
  k, v [stages]   the dense forward's ring: entry e of a unit holds its e-th kv tile from the end
                  and the value tile before it; `ready` when all copies have landed, `free` when
                  every consumer has released it
  out [warpgroup] a slice of columns at a time on its way to global memory

A kv tile that the length cuts holds rows that do not exist. Scores of such keys are masked. For the
values the producer waits, puts zeros in their place and only then says that the entry is ready.

To follow a call, read `run` and `launch` here, then kernel.py, queries.py (units, and the rows of a
consumer), tma_producer.py and plan.py. Calls with packed rows (packed_queries.py), with keys that
several sequences share (shared_parts.py) and with mask functions (mask_functions.py) read more.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_attn._call import launches
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionProblem, DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, separate_caches, tiles, tma_operands
from pallas_attn.kernels.attention.tile_scheduler import L2_BYTES
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS, SMEM_LIMIT
from pallas_attn.kernels.prefill import (
    combine_partials,
    kernel,
    packed_queries,
    queries,
    shared_parts,
    tma_producer,
)
from pallas_attn.kernels.prefill.plan import (
    Plan,
    PrefillRefs,
    bytes_of,
    kernel_of,
    operands,
    over_contiguous_keys,
    partial_types,
)

Array = jax.Array
Results = tuple[Array, Array]  # out and lse

MOST_SPLITS = 32  # a lane of `combine_partials` has one
MOST_ARRAYS = 32  # separate caches
# Each takes two tensor maps, and host code loads the maps of a launch as one array of bytes, which
# LLVM splits: 18 maps compile in a second, 66 in half a minute.
CACHES_OF_A_LAUNCH = 8
FEW_UNITS = 12  # units a block: where they are more, long ones and short ones even out
FEW_UNITS_PACKED = 4  # the same where packed rows may be those of one sequence
# The cost model (`cost`): keys of a tile, the speed of a consumer where a block has so many, and
# tiles that a unit costs more than it has. As measured on an H200, three consumers are faster a row
# than two; a single one has nobody to compute while it waits.
COST_TILE = 128
COST_SPEEDS = {1: 0.75, 2: 1.0, 3: 1.08, 4: 1.08}
COST_OF_UNIT = 1.5
UNEVEN = 8  # new rows are one in so many, or more: below, all q tiles see nearly as many keys


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 2  # consumers
    block_kv: int = 128  # keys of a kv tile
    stages: int = 2  # entries of the ring of K and V
    q_slots: int = 2  # q tiles of a consumer; 2: the next unit's is loaded early
    splits: int = 1  # ranges that the kv tiles of a q tile are split into
    grid: int = MULTIPROCESSORS  # persistent blocks
    together: int = 1  # kv heads whose q tiles are taken in turn, the longest first
    in_turn: bool = False  # whether two consumers issue their matmuls in turn

    def __post_init__(self):
        check(
            self,
            warpgroups=(self.warpgroups in (1, 2, 3), "1, 2 or 3"),
            block_kv=(self.block_kv in (64, 128), "64 or 128"),
            stages=(self.stages >= 2, "at least 2"),
            q_slots=(self.q_slots in (1, 2), "1 or 2"),
            splits=(1 <= self.splits <= MOST_SPLITS, f"1 to {MOST_SPLITS}"),
            grid=(self.grid >= 1, "at least 1"),
            together=(self.together >= 1, "at least 1"),
            in_turn=(not self.in_turn or self.warpgroups == 2, "False but for two consumers"),
        )

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def default(cls, problem: DecodeProblem) -> "Config":
        """The number of consumers and of splits that should take the least time where all sequences
        are full, and as many stages as there is room for.
        """
        if problem.merged is not None:
            return _for_shared_parts(problem)
        alike = problem
        if problem.tokens is not None:  # few others change much
            alike = _of_one_sequence(problem)
        most = 1 if problem.packed and launches.of_single_rows(problem) else MOST_SPLITS
        config = fastest(plan_of(alike, cls()), max(problem.capacities), most)
        return dataclasses.replace(config, together=_together(plan_of(problem, config)))


def _of_one_sequence(problem: DecodeProblem) -> DecodeProblem:
    """A problem of packed rows as if one sequence, the longest, had all of them."""
    assert problem.tokens is not None
    return dataclasses.replace(
        problem,
        kind="stacked",
        sequences=1,
        capacities=(max(problem.capacities),),
        q_len=problem.tokens,
        tokens=None,
        page_size=None,
        pages=None,
    )


def fastest(
    plan: Plan, keys: int, most_splits: int = MOST_SPLITS, configs: Sequence[Config] = ()
) -> Config:
    """The Config that should take the least time where query rows see so many keys; `plan` may have
    any other. `configs`: those without splits to choose from; none: all that 16 bits have.
    """
    configs = configs or _configs(plan.problem)
    splits = range(1, 1 + min(most_splits, pl.cdiv(keys, 128)))
    config = min(
        (dataclasses.replace(config, splits=n) for config in configs for n in splits),
        key=lambda config: cost(dataclasses.replace(plan, config=config), keys),
    )
    config = _fitting(plan, config, q_slots=(config.q_slots, 1))
    config = _fitting(plan, config, stages=range(6, 1, -1))
    return _in_turn(config, dataclasses.replace(plan, config=config).tiles.q_tiles)


def _configs(problem: AttentionProblem) -> list[Config]:
    dim = max(problem.head_dim, problem.v_head_dim)
    wide = 128 if dim <= 128 else 64
    configs = [Config(1, wide, q_slots=1), Config(2, wide)]
    return [*configs, Config(3, 128 if dim <= 64 else 64)] if dim <= 128 else configs


def _for_shared_parts(problem: DecodeProblem) -> Config:
    """Consumers for as many rows as a level can have: blocks share out kv tiles."""
    assert problem.merged is not None
    _, sequences, tokens = problem.merged
    rows = sequences * tokens * problem.q_heads // problem.kv_heads
    dim = max(problem.head_dim, problem.v_head_dim)
    config = _in_turn(Config(1 if rows <= ROWS else 2, 128 if dim <= 128 else 64, q_slots=1))
    return _fitting(plan_of(problem, config), config, stages=range(6, 1, -1))


def _fitting(plan: Plan, config: Config, **choices: Iterable[int]) -> Config:
    """The config with the first value of a field that fits in shared memory, or as it is."""
    ((field, values),) = choices.items()
    kwargs: list[dict[str, Any]] = [{field: value} for value in values]
    configs = (dataclasses.replace(config, **fields) for fields in kwargs)
    plans = (dataclasses.replace(plan, config=choice) for choice in configs)
    return next((plan.config for plan in plans if bytes_of(plan) <= SMEM_LIMIT), config)


def _in_turn(config: Config, q_tiles: int = 1) -> Config:
    """The Config, with `in_turn` where it helps. Two consumers that begin at the same moment may
    stay in step to the end: both compute their softmax at once, while no tensor core has work.
    Which launches do changes from one machine and cache to the next. Three consumers do not fall in
    step. Where keys are split for one of `q_tiles`, all wait for memory; more splits were not
    timed.
    """
    busy = config.splits == 1 or (config.splits == 2 and q_tiles > 1)
    return dataclasses.replace(config, in_turn=config.warpgroups == 2 and busy)


def cost(plan: Plan, keys: int) -> float:
    """An estimate of the time, in multiples of what a kv tile of 128 keys takes one consumer of
    several. A launch of `combine_partials` costs three, and partials what it takes to read them
    once.
    """
    config = plan.config
    waves, tiles = pl.cdiv(plan.units, config.grid), pl.cdiv(keys, COST_TILE)
    speed = COST_SPEEDS[config.warpgroups]
    estimate = waves * config.warpgroups / speed * (pl.cdiv(tiles, config.splits) + COST_OF_UNIT)
    if config.splits > 1:
        estimate += 3 + config.splits * plan.result_rows * plan.v.width * 4 / 2**21
    return estimate


def _together(plan: Plan) -> int:
    """All kv heads of a sequence where their q tiles see unequally many keys, blocks have a few
    units each, and K and V of so many heads leave half of L2 to others; else 1. Packed rows are
    taken for those of one sequence where they are few, else for as many of each.
    """
    problem, grid = plan.problem, plan.config.grid
    units, rows, most = plan.units, problem.q_len, FEW_UNITS * grid
    if plan.packed:
        units = problem.kv_heads * plan.tiles.q_tiles * plan.config.splits
        if units > FEW_UNITS_PACKED * grid:
            rows, most = rows // problem.batch, units
    if plan.tiles.q_tiles == 1 or not grid < units <= most:
        return 1
    row = (problem.head_dim + problem.v_head_dim) * jnp.dtype(problem.dtype).itemsize
    small = problem.kv_heads * problem.kv_len * row <= L2_BYTES
    causal = problem.mask.bounds_right and not problem.mask.bounds_left
    return problem.kv_heads if small and causal and rows * UNEVEN >= problem.kv_len else 1


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.dtype not in ("bfloat16", "float16") or problem.cache_dtype != problem.dtype:
        return Limit(
            f"{problem.dtype} queries over a {problem.cache_dtype} cache; it takes bfloat16 or "
            "float16 for both",
            "leave implementation=None",
        )
    if problem.shared_kv or problem.batch_invariant:
        return Limit("it takes no latent cache and no batch_invariant", "leave implementation=None")
    refused = tma_operands.dims_limit(problem) or tiles.arrays_limit(problem.functions)
    if refused is not None:
        return refused
    for name, dim in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if tma_operands.width_in_tma(dim) != dim:
            return Limit(
                f"{name} is {dim}: TMA wants a multiple of 16", "leave implementation=None"
            )
    if cache_layout.layout_of(problem).separate and problem.sequences > MOST_ARRAYS:
        return Limit(
            f"{problem.sequences} separate caches; it takes up to {MOST_ARRAYS}",
            "leave implementation=None",
        )
    if problem.kind == "interleaved" and problem.head_dim % 64:
        return Limit(
            f"head_dim is {problem.head_dim}; of K and V in one array it takes multiples of 64",
            "leave implementation=None",
        )
    sizes = problem.capacities if problem.page_size is None else (problem.page_size,)
    block = 128 if max(problem.head_dim, problem.v_head_dim) <= 128 else 64
    if problem.page_size is not None and (
        problem.page_size % 8 or (block % problem.page_size and problem.page_size % block)
    ):
        return Limit(
            f"pages of {problem.page_size} rows; it takes 8, 16, 32, .. and multiples of 128",
            "leave implementation=None",
        )
    if any(tma_operands.rows_in_tma(size) != size for size in sizes):
        return Limit("TMA wants capacities that are a multiple of 8", "leave implementation=None")
    if max(problem.capacities) >= 2**30 or min(problem.capacities) == 0 or problem.pages == 0:
        return Limit("it wants caches of 1 to 2**30 rows", "leave implementation=None")
    return None


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    """Shared memory of the launch that needs most."""
    most = bytes_of(plan_of(problem, config))
    return most if problem.merged is not None else max(most, packed_queries.bytes_of_few(problem))


# ---- the kernel and its call --------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def plan_of(problem: DecodeProblem, config: Config) -> Plan:
    rows = packed_queries.QUERIES if problem.packed else queries.QUERIES
    rows = shared_parts.QUERIES if problem.merged is not None else rows
    return Plan(
        over_contiguous_keys(problem),
        config,
        cache_layout.layout_of(problem),
        queries=rows,
        keys_of=queries.keys_of,
        producer_of=tma_producer.producer_of,
        fewest=problem.fewest,
        merged=problem.merged,
        tree=problem.tree,
    )


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> Results:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N, Hv]
    and [N, tokens]: sequences of few rows by decoding, the others by this kernel, which leaves
    those alone.
    """
    if problem.merged is not None:
        return shared_parts.run(plan_of(problem, config), inputs)
    into, whole = None, problem
    if problem.packed:
        into, problem = packed_queries.decode_few(inputs, problem)
    if problem.kind != "per_sequence" or problem.sequences <= CACHES_OF_A_LAUNCH:
        return launch_over_cache(plan_of(problem, config), inputs, into)
    some = separate_caches.groups(problem, CACHES_OF_A_LAUNCH)
    if len(some) == 1:
        return launch_over_cache(plan_of(problem, config), inputs, into)
    default, parts = config == Config.default(whole), []
    for group in some:
        part = separate_caches.problem_of(problem, group)
        plan = plan_of(part, Config.default(part) if default else config)
        rows = separate_caches.inputs_of(problem, inputs, group)
        parts.append(launch_over_cache(plan, rows, into))
        into = parts[-1] if problem.packed else None
    return separate_caches.joined(parts) if into is None else into


@functools.partial(jax.jit, static_argnames=("plan",))
def launch_over_cache(plan: Plan, inputs: DecodeInputs, into: Results | None) -> Results:
    """Jitted, so that a model of many layers traces it once."""
    return launch(plan, operands(plan, inputs), into)


def launch(plan: Plan, refs: PrefillRefs, into: Results | None = None) -> Results:
    """out and lse; `into`: where rows are packed, those of the other rows, which these go to."""
    if plan.config.splits > 1:
        partials = kernel_of(plan, kernel.block, partial_types(plan))(refs)
        return combine_partials.run(plan, partials, refs, into)
    if into is not None:
        written = [jax.new_ref(x) for x in into]
        kernel_of(plan, kernel.block, ())(refs, *written)
        return jax.freeze(written[0]), jax.freeze(written[1])
    problem, shape = plan.problem, jax.ShapeDtypeStruct
    lse = problem.batch, problem.kv_heads, plan.tiles.padded_wg_tiles, ROWS
    results = (
        shape((*refs.q.shape[:3], problem.v_head_dim), plan.q.dtype),
        shape(lse, jnp.float32),
    )
    out, lse_of_tiles = kernel_of(plan, kernel.block, results)(refs)
    return out[:, : problem.q_len], queries.rows_of_tiles(plan, lse_of_tiles)


KERNEL = Kernel(Config, limit, smem_bytes, run)
