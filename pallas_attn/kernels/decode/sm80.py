"""Decode attention for every GPU from Ampere on: the kernel of `decode.sm90`, whose kv tiles are
copied by the threads themselves (`thread_copies`). All else is that kernel's: the scheduler, the
matmuls (mma.sync), the softmax and how partials are combined.
"""

import dataclasses
import functools

from pallas_attn._call import gpu_specs
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeProblem
from pallas_attn.kernels.decode import limits, thread_copies
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.decode.plan import DecodeTiling, Plan, is_wide
from pallas_attn.kernels.decode.sm90 import bytes_of_launch
from pallas_attn.kernels.decode.sm90 import limit_of_any_copies as limit
from pallas_attn.kernels.lang.config import check, first_that_fits
from pallas_attn.kernels.mma import mma_rowmajor


@dataclasses.dataclass(frozen=True)
class Config(limits.RingConfig):
    """`tile`: keys of a kv tile; 32 only for float32 or head dims above 256, 16 only for the
    latter. `load_first`: the load of the next tile begins before the wait for this one. `q_rows`:
    query rows that a block takes at once, at most; where they are fewer than a kv head has, keys
    are read more than once.
    """

    tile: int = 64
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`
    load_first: bool = False
    q_rows: int = 4 * mma_rowmajor.ROWS
    fewest_stages = 1

    def __post_init__(self):
        super().__post_init__()
        check(
            self,
            tile=(self.tile in (16, 32, 64, 128, 256), "16, 32, 64, 128 or 256"),
            q_rows=(self.q_rows in (4, 8, 16, 32, 64), "4, 8, 16, 32 or 64"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """The most bytes in flight that there is room for."""
        grid = gpu_specs.multiprocessors(problem.gpu)
        choices = [cls(tile=64, stages=stages, grid=grid) for stages in (6, 5, 4, 3, 2)]
        is_float32 = problem.dtype == "float32"
        if is_float32:
            # Two blocks a multiprocessor, one of which computes while the other waits.
            pairs = [cls(tile=tile, stages=2, grid=2 * grid) for tile in (64, 32)]
            pairs = [x for x in pairs if gpu_specs.fits(_bytes_of_two(problem, x), problem.gpu)]
            small = [cls(tile=32, stages=stages, grid=grid) for stages in (6, 5, 4, 3, 2)]
            choices = [*pairs, *choices[:-1], *small]
        # A tile at a time, or few queries, where rows are wide and shared memory is little.
        tile = 32 if is_float32 else 64
        if is_wide(problem):
            sizes, tile = ((32, (4, 3, 2)), (16, (6, 5, 4, 3, 2))), 16
            choices = [cls(tile=n, stages=s, grid=grid) for n, deep in sizes for s in deep]
        choices += [
            cls(tile=tile, stages=stages, grid=grid, load_first=True, q_rows=rows)
            for rows in (16, 8, 4)
            for stages in (2, 1)
        ]
        return first_that_fits(problem, bytes_of_launch, choices)

    def plan(self, problem: DecodeProblem) -> Plan:
        return plan_of(problem, self)


@functools.lru_cache(maxsize=1024)
def plan_of(problem: DecodeProblem, config: Config) -> Plan:
    """The plan of one launch."""
    tiling = DecodeTiling(**vars(config))
    return decode_sm90.plan_for(problem, tiling, thread_copies.COPIES, "decode_sm80")


def _bytes_of_two(problem: DecodeProblem, config: Config) -> int:
    """Shared memory of two blocks, and of CUDA for the second."""
    return 2 * bytes_of_launch(problem, config) + 1024


smem_bytes, run = decode_sm90.smem_bytes, decode_sm90.run
KERNEL = Kernel(Config, limit, smem_bytes, run, overlaps=True)
