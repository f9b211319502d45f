"""The argument `kv_blocks` of attention as a mask function: block-sparse attention by lists of key
blocks. What a list shows is an array of bools, a number a pair of blocks, which the function reads;
the tiles that it leaves come from its bounds, forward and backward.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call import checks
from pallas_attn._call.bind import Call
from pallas_attn._call.old_names import renamed
from pallas_attn.errors import described
from pallas_attn.masks import Mask, MaskFunction, mask_fn
from pallas_attn.values import Blocks

Array = jax.Array


def shown(q: checks.Argument, k: checks.Argument, call: Call) -> Mask | MaskFunction:
    """The mask that shows what the call's `mask` and the lists of `kv_blocks` show."""
    if not isinstance(call.kv_blocks, Blocks):
        call = renamed(call, {})
    mask, blocks = call.mask, call.kv_blocks
    assert blocks is not None
    for name in ("packed", "context"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name}: expected its default beside kv_blocks, got both")
    if not isinstance(mask, MaskFunction):
        checks.mask(mask)
    q, k = checks.array("q", q), checks.array("k", k)
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q, k: expected 4 axes beside kv_blocks, got {q.ndim} and {k.ndim}")
    batch, q_len, q_heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    q_size, kv_size = _block_size(blocks.size)
    first, traced = checks.offset(call.q_offset, batch)
    if traced is not None:
        raise ValueError(
            "q_offset: expected an int beside kv_blocks, got an array; lists are of rows of q"
        )
    q_blocks, count = -(-q_len // q_size), -(-kv_len // kv_size)
    wanted = (
        f"int32[B, heads, {q_blocks}, n], B {batch} or 1, heads {q_heads}, {kv_heads} or 1 (a list "
        f"of blocks of {kv_size} keys for each {q_size} query rows, -1 for none)"
    )
    lists = checks.integers("kv_blocks", blocks.lists, wanted, (None, None, q_blocks, None))
    batches, heads, _, n = lists.shape
    if batches not in (1, batch) or heads not in (1, kv_heads, q_heads) or not n:
        raise ValueError(f"kv_blocks: expected {wanted}, got {lists.dtype}{list(lists.shape)}")
    if not lists.size:  # no query row, or no batch row
        return mask
    at = jnp.arange(max(count, 1), dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
    seen = (lists[..., None] == at).any(axis=3)
    group = q_heads // heads if heads else 1

    def function(b: Array, h: Array, row: Array, key: Array, seen: Array) -> Array:
        own_batch = b if batches > 1 else 0
        head = lax.div(h, np.int32(group)) if heads > 1 else 0
        row = row - np.int32(first) if first else row  # from a position to a row of q
        block = lax.div(row, np.int32(q_size)), lax.div(key, np.int32(kv_size))
        return seen[own_batch, head, *block]

    return mask_fn(function, seen) & mask


def _block_size(value: checks.Argument) -> tuple[int, int]:
    """Query rows of a list, and keys of a block."""
    sizes = value if isinstance(value, tuple) else (value, value)
    try:
        q_size, kv_size = map(operator.index, sizes)
    except (TypeError, ValueError):
        q_size = kv_size = 0
    if not (0 < min(q_size, kv_size) <= max(q_size, kv_size) < 2**31) or bool in map(type, sizes):
        raise ValueError(
            "kv_blocks: expected an int of at least 1 as the size, or a pair (query rows, keys) of "
            f"them, got {described(value)}; it is static"
        )
    return q_size, kv_size
