"""Decode attention for every GPU from Ampere on: the kernel of `decode.sm90`, whose kv tiles are
copied by the threads themselves (cp.async) where Hopper has bulk copies. All else is that kernel's:
the scheduler, the matmuls (mma.sync), the softmax and how partials are combined.

A tile is there when each thread's own copies are and all threads have met, which they do once a
tile anyway. Rows that do not exist are zeros that cp.async puts there.
"""

import dataclasses
from typing import Any

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention.sm80_common import fits
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.mma import mma_rowmajor


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding. `tile`: keys of a kv tile; 32 of float32
    only. `stages`: tiles of K and V in the ring; with a single one nothing arrives under the
    matmuls of a tile. `grid`: persistent blocks. `split_tiles`: kv tiles of a split where
    `batch_invariant` is asked for. `load_first`: the load of the next tile begins before the wait
    for this one. `q_rows`: query rows that a block takes at once, at most; where they are fewer
    than a kv head has, keys are read more than once.
    """

    tile: int = 64
    stages: int = 6
    grid: int = gpu_specs.multiprocessors(gpu_specs.HOPPER)
    split_tiles: int = 16
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`
    load_first: bool = False
    q_rows: int = 4 * mma_rowmajor.ROWS
    # What `scheduler.Plan` asks of the Config of every decode kernel.
    fewest_stages, bulk, many_heads, head_overhead, heads_at_once = 1, False, False, 0, 1

    def __post_init__(self):
        scheduler.check_config(
            self,
            tile=(self.tile in (32, 64, 128, 256), "32, 64, 128 or 256"),
            q_rows=(self.q_rows in (4, 8, 16, 32, 64), "4, 8, 16, 32 or 64"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """What serves a problem that nobody tuned: as many bytes in flight as there is room for."""
        grid = gpu_specs.multiprocessors(problem.gpu)
        choices = [cls(tile=64, stages=stages, grid=grid) for stages in (6, 5, 4, 3, 2)]
        wide = problem.dtype == "float32"
        if wide:
            # Two blocks a multiprocessor, one of which computes while the other waits.
            pair = [cls(tile=tile, stages=2, grid=2 * grid) for tile in (64, 32)]
            pair = [one for one in pair if fits(problem, _bytes_of_two, one)]
            small = [cls(tile=32, stages=stages, grid=grid) for stages in (6, 5, 4, 3, 2)]
            choices = [*pair, *choices[:-1], *small]
        # Where rows are wide and shared memory is little: one tile at a time, or few queries.
        tile = 32 if wide else 64
        choices += [
            cls(tile=tile, stages=stages, grid=grid, load_first=True, q_rows=rows)
            for rows in (16, 8, 4)
            for stages in (2, 1)
        ]
        return next((one for one in choices if fits(problem, smem_bytes, one)), choices[-1])


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := decode_sm90.limit(problem)) is not None:
        return refused
    if not fits(problem, smem_bytes, Config.default(problem)):
        return Limit(
            "such rows do not fit in the shared memory of this GPU",
            "decode fewer tokens at once, or use smaller head dims",
        )
    return None


def smem_bytes(problem: DecodeProblem, config: Any) -> int:
    return decode_sm90.smem_bytes(problem, config)


def _bytes_of_two(problem: DecodeProblem, config: Any) -> int:
    """Of two blocks, and what CUDA keeps of the second."""
    return 2 * smem_bytes(problem, config) + 1024


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Any) -> tuple[Any, Any]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]."""
    return decode_sm90.run(inputs, problem, config)
