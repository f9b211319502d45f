"""The operands of kernels whose kv tiles are numbers in a list (`tile_lists`): the lists, and the
schedule where it follows from them. Lists that depend on arrays are made by a small kernel
(`listed_tiles`), or by XLA; the schedule then has ranks in place of work tiles.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.attention import block_tables, listed_tiles, tile_lists
from pallas_attn.kernels.lang.types import Operand


def tables(
    make: Callable[[Any, tuple[int, ...]], np.ndarray], plan: Any, inputs: AttentionInputs
) -> dict[str, Operand]:
    """Operands of `tile_scheduler.table`: the lists, and the schedule where it follows from them at
    run time.
    """
    problem, sizes = plan.problem, plan.tiling.list_sizes
    if tile_lists.static(problem, *sizes) is not None:
        return {"tiles": tile_lists.tiles(problem, inputs, *sizes)}
    ranked, heads = make(plan, ()), plan.heads // problem.batch
    *_, by_keys, row_blocks = sizes
    kinds = tile_lists.kinds(problem, inputs, sizes)
    if not by_keys and kinds.shape[2] > 1:
        kinds = kinds[:, :, :: block_tables.heads_of_list(plan)]
    if listed_tiles.fits(kinds):
        codes, of_codes = tile_lists.codes(kinds), (plan.code_bits, heads)
        made = listed_tiles.prepare(codes, ranked, row_blocks, not by_keys, of_codes)
    else:
        lists = tile_lists.of_kinds(kinds, never_empty=not by_keys)
        made = lists, by_length(ranked, plan.code_bits, heads, lists)
    return dict(zip(("tiles", "schedule"), made, strict=True))


def by_length(ranked: np.ndarray, bits: int, heads: int, lists: jax.Array) -> jax.Array:
    """A table of codes in which rank r of a head stands for its work tile with the r-th longest
    list. `lists`: `tile_lists.tiles`.
    """
    order = tile_lists.longest_first(lists[..., 0])
    head, low = ranked >> bits, (1 << bits) - 1
    batch = head // heads if order.shape[0] > 1 else 0 * head
    head = head % heads * order.shape[1] // heads
    codes = (ranked & ~low) | order[batch, head, ranked & low]
    return jnp.concatenate([ranked[:, :1], codes[:, 1:]], axis=1)
