"""The Config of the Hopper forward for a problem, by rules that were measured on an H200."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental.pallas import cdiv

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import FLOAT8, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.kernels.attention import tile_scheduler
from pallas_attn.kernels.attention.tile_scheduler import L2_BYTES, STEP_OVERHEAD
from pallas_attn.kernels.attention.tiles import ROWS, QueryTiling, heads_in
from pallas_attn.kernels.attention.tma_operands import round_up

block_tables = Special("kernels.attention.block_tables")
claims = Special("kernels.attention.claims")
tile_lists = Special("kernels.attention.tile_lists")

_TILE = 2 * ROWS, 128  # rows and keys of the tiles by which claims are judged
LONG = 16384  # rows from which blocks claim work tiles; few are then of two packed documents
SHORT = 2048  # rows below which idle rows of work tiles decide how many consumers there are
HELD_BY_L2 = 48 * 2**20  # bytes of K and V of a kv head up to which L2 holds them


Config = Any  # `sm90.Config`


class Configs(NamedTuple):
    """How a Config of `sm90` is made, and the shared memory that it takes."""

    make: Callable[..., Config]
    smem_bytes: Callable[[AttentionProblem, Config], int]

    def has_room(self, problem: AttentionProblem, config: Config) -> bool:
        return gpu_specs.fits(self.smem_bytes(problem, config), problem.gpu)


@functools.lru_cache(maxsize=256)
def config_of(problem: AttentionProblem, configs: Configs) -> Config:
    """The fastest on an H200 of those that fit in registers and shared memory."""
    if problem.dtype == "float32":
        return _float32(problem, configs)
    if problem.dtype in FLOAT8:
        return _with_room(problem, configs, _float8(problem, configs.make))
    config = _of_16_bits(problem, configs)
    in_tiles = ({"bias", "mask_array"} & set(problem.arrays)) and not problem.fetches > 1
    return _with_room(problem, configs, config) if in_tiles else config


def _with_room(problem: AttentionProblem, configs: Configs, config: Config) -> Config:
    """`config` with fewer stages, keys or consumers, where bias and mask_array need the room."""
    tiles = ((config.block_kv, config.stages), (64, max(config.stages, 4)))
    choices = (
        dataclasses.replace(config, warpgroups=warpgroups, block_kv=keys, stages=stages)
        for warpgroups in range(config.warpgroups, 0, -1)
        for keys, most in tiles
        for stages in range(most, 1, -1)
    )
    last = dataclasses.replace(config, warpgroups=1, block_kv=64, stages=2, q_slots=1)
    fitting = (choice for choice in choices if configs.has_room(problem, choice))
    return next(fitting, last)


def _of_16_bits(problem: AttentionProblem, configs: Configs) -> Config:
    dim = max(problem.head_dim, problem.v_head_dim)
    heads = l2_heads(problem, dim)
    if dim <= 128 and _reads_block_table(problem):
        return block_tables.config_of(problem, functools.partial(configs.make, l2_heads=heads))
    segments, claimed = "q_segment_ids" in problem.arrays, _gains_by_claims(problem)
    made = functools.partial(configs.make, l2_heads=heads, claims=claimed)
    few = problem.q_len <= 128 or problem.kv_len < 2 * SHORT
    short = (problem.q_len < SHORT and few) or problem.kv_len <= 128
    most = ROWS * (4 if dim <= 64 else 3)  # rows of the largest work tile
    # If no block takes two work tiles, some blocks are idle.
    short = short or tile_scheduler.rounds(problem, most) <= 1
    plain = not segments and problem.fetches == 1 and problem.mask_program is None
    if short and dim <= 128 and plain:
        return _of_few_rows(problem, dim, made)
    if dim <= 64 and _fits(problem, 4) and not _takes_wide_tiles(problem):
        return made(4, block_kv=64, stages=6)
    if dim <= 64:
        return made(3, block_kv=128, stages=4)
    bias = problem.bias_shape is not None and problem.bias_shape[:2] != (1, 1)
    if dim <= 128 and not bias and (claimed or not segments) and _fits(problem, 3):
        return made(3, block_kv=64, stages=4 if dim <= 96 else 3)
    narrow = problem.head_dim <= 192 and problem.v_head_dim <= 128 and not segments
    if narrow and dim > 128 and not bias and _fits(problem, 3):
        config = made(3, block_kv=64, stages=3)
        if configs.has_room(problem, config):
            return config
    if dim <= 128 or narrow:
        return made(2, block_kv=128, stages=2)
    config = made(2, block_kv=64, stages=2)
    return config if configs.has_room(problem, config) else dataclasses.replace(config, q_slots=1)


# Time of the rows of a work tile: by the largest head dim, then by the number of consumers.
_ROW_COSTS = {
    32: {4: 1.0, 3: 1.02, 2: 1.3, 1: 2.0},
    64: {4: 1.0, 3: 1.05, 2: 1.3, 1: 2.0},
    80: {4: 1.15, 3: 1.0, 2: 1.4, 1: 2.0},
    128: {3: 1.0, 2: 1.3, 1: 2.0},
}


def _of_few_rows(problem: AttentionProblem, dim: int, made: Callable[..., Config]) -> Config:
    """The Config that leaves few rows and keys of its tiles, and few blocks, idle. Measured from 33
    to 2047 rows, and up to 4096 where no block takes two work tiles.
    """
    keys, bias = problem.kv_len, "bias" in problem.arrays
    costs = dict(next(costs for widest, costs in _ROW_COSTS.items() if dim <= widest))
    if dim > 64 and (bias or keys <= 128):  # registers
        costs.pop(4, None)
    if dim > 64 and (bias or 64 < keys <= 96):
        del costs[3]
    if bias and dim > 64 and problem.q_len > 64:
        costs = {2: 1.0}

    def time_of(consumers: int) -> float:
        tiles = cdiv(problem.q_len, ROWS * consumers)
        rounds = tile_scheduler.rounds(problem, ROWS * consumers)
        if dim <= 64 and problem.q_len > 256:  # idle consumers give the others their time
            rounds *= (tiles - 1 + _last_cost(problem, consumers)) / tiles
        return costs[consumers] * consumers * rounds

    consumers = min(costs, key=time_of)
    if 64 < keys <= 128 and (dim <= 64 or consumers < 3):
        # All in one tile. Of two, the loop over all but the first has one step, which ptxas takes
        # for no loop, and spills.
        fits = not {"bias", "mask_array"} & set(problem.arrays)
        return made(consumers, round_up(keys, 8) if fits else 128, stages=4 if dim <= 64 else 2)
    if consumers == 1 and keys <= 64:
        return made(1, block_kv=64, stages=6 if dim <= 80 else 4)
    if consumers < 3:
        wide = keys >= 512 or dim <= 64 or bias or consumers == 1
        return made(consumers, 128 if wide else 64, stages=4 if dim <= 64 or not wide else 2)
    if consumers == 3:
        if dim <= 64 and (keys >= 768 or bias or (dim <= 32 and keys > 256)):
            return made(3, block_kv=128, stages=4)
        return made(3, block_kv=64, stages=4 if dim <= 96 else 3)
    if dim <= 64:
        return made(4, block_kv=64, stages=6)
    return made(4, block_kv=64, stages=5, q_slots=1)  # 6 % faster at head dim 80


def _last_cost(problem: AttentionProblem, consumers: int) -> float:
    """The time of a head's last work tile, relative to one with rows for all consumers."""
    busy = cdiv((problem.q_len - 1) % (ROWS * consumers) + 1, ROWS)
    return (busy + STEP_OVERHEAD) / (consumers + STEP_OVERHEAD)


# Heads of an L2 group, by mask and widest head dim, from a query length on; 0: `heads_of_l2_group`.
# Mask functions count as "causal", or as "window" beside a mask with a left bound.
_L2_HEADS = {
    ("causal", 64): ((0, 32), (1024, 16), (4096, 8)),
    ("causal", 80): ((0, 16),),
    ("causal", 128): ((0, 16), (1536, 32), (3584, 8), (12288, 0)),
    ("causal", 256): ((0, 8), (4096, 0)),
    ("window", 64): ((0, 64),),
    ("full", 64): ((0, 48), (4096, 12)),
    ("full", 128): ((0, 0), (1536, 1), (4096, 0)),
    ("full", 256): ((0, 4), (4096, 3)),
}


def l2_heads(problem: AttentionProblem, dim: int) -> int:
    """Heads of an L2 group that were fastest on an H200; 0: `heads_of_l2_group`."""
    mask, widths = problem.mask, (64, 80, 96, 128, 256)
    full = mask.is_full and problem.mask_program is None
    kind = "full" if full else "window" if mask.bounds_left else "causal"
    dim = next((width for width in widths if dim <= width), 0)
    by_rows = _L2_HEADS.get((kind, dim), ((0, 0),))
    wanted = next(heads for start, heads in reversed(by_rows) if problem.q_len >= start)
    group = problem.group  # whole ones: their heads share K and V
    if kind == "causal":  # few rows may see many keys
        row = 2 * (problem.head_dim + problem.v_head_dim)
        wanted = min(wanted, heads_in(L2_BYTES, problem, row))
    return max(wanted // group, 1) * group if wanted else 0


def _gains_by_claims(problem: AttentionProblem) -> bool:
    """Whether blocks are to claim work tiles: see `claims`. Where no heads share K and V they gain
    little or lose. Causal rows were measured at head dim 128.
    """
    if problem.q_len < LONG or problem.group == 1:
        return False
    dims = problem.head_dim, problem.v_head_dim
    causal = problem.mask.bounds_right and not problem.mask.bounds_left and 64 < max(dims) <= 128
    many = 2 * problem.kv_len * sum(dims) > HELD_BY_L2
    gains = "q_segment_ids" in problem.arrays or (causal and many)
    rows, keys = _TILE
    tiling = QueryTiling(problem.q_len, problem.kv_len, rows, keys)
    return gains and bool(claims.is_possible(problem, tiling))


def _reads_block_table(problem: AttentionProblem) -> bool:
    """Whether a mask function reads an array by both positions."""
    if problem.mask_program is None:
        return False
    return tile_lists.reads_pairs(problem.mask_program)


def _takes_wide_tiles(problem: AttentionProblem) -> bool:
    """Whether tiles of 128 keys are faster than more warpgroups, up to head dim 64: where every
    tile is whole and there is little else to do, or where rows past `q_lengths` end in whole tiles.
    """
    arrays = set(problem.arrays)
    if problem.masks_keys:  # most tiles are whole
        arrays -= {"mask_array"}
    if problem.softcap is not None or arrays - {"q_lengths", "kv_lengths"}:
        return False
    hides = not problem.mask.is_full or problem.mask_program is not None
    return "q_lengths" in arrays or not (hides or arrays)


def _fits(problem: AttentionProblem, warpgroups: int) -> bool:
    """Whether work tiles of so many consumers leave few rows idle, beside those of one fewer."""
    wider, narrower = (round_up(problem.q_len, ROWS * n) for n in (warpgroups, warpgroups - 1))
    return wider <= 1.1 * narrower


# Consumers, keys and stages: the first that fits in shared memory, and its three warpgroups in
# registers.
_FLOAT32 = ((3, 64, 3), (2, 64, 3), (2, 64, 2), (2, 32, 2), (1, 32, 2), (1, 16, 2))


def _float32(problem: AttentionProblem, configs: Configs) -> Config:
    few = max(problem.head_dim, problem.v_head_dim) <= 64 and problem.precision is None
    choices = (configs.make(*sizes) for sizes in _FLOAT32 if few or sizes[0] < 3)
    return next(config for config in choices if configs.has_room(problem, config))


def _float8(problem: AttentionProblem, config: Callable[..., Config]) -> Config:
    """The Config for float8, where registers hold two accumulators of the output beside scores."""
    dim = max(problem.head_dim, problem.v_head_dim)
    sums = problem.precision != "fast_accum"
    made = functools.partial(config, l2_heads=l2_heads(problem, dim), float32_sums=sums)
    if dim <= 64:
        return made(3, block_kv=128, stages=4)
    if dim <= 128 and not sums:
        return made(2, block_kv=192, stages=3)
    return made(2, block_kv=128, stages=4 if dim <= 128 else 2)
