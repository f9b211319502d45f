"""Rotation of q and k by position (RoPE) before the launch of attention. It consists of plain
operations of XLA, so gradients and vmap need no code here.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_attn import masks
from pallas_attn._call import bind, checks
from pallas_attn._call.changed_rows import rotated_pairs
from pallas_attn._call.problem import FLOAT8, Change, owner_of_rows
from pallas_attn._mesh import sharding
from pallas_attn.context import checked, shards_of
from pallas_attn.values import Packed

Array = jax.Array
# Positions of rows: int32[rows] or int32[B, rows]; or an int, the position of the first row of
# consecutive ones, all of which are known to be in the tables.
Positions = int | Array


def rotated(rows: tuple[Array, Array, Array], options: bind.Call) -> tuple[Array, Array]:
    """q and k of `rows` (q, k and v) rotated, in their dtypes."""
    rotary, packed = options.rotary, options.packed
    if packed is not None:
        packed = bind.packed_beside(options)
    q, k, _ = bind.operands(*rows) if packed is None else bind.packed_operands(*rows)
    if str(q.dtype) in FLOAT8:
        raise ValueError(
            f"rotary: expected None for {q.dtype} q and k, which a rotation would round; rotate "
            "before they are quantised"
        )
    said, least = getattr(rotary, "rows", None), 1
    at_q: Positions
    at_k: Positions
    late = not all(isinstance(size, int) for size in (*q.shape, *k.shape))
    if options.context is not None:  # this device's rows among all are known at run time
        late |= said is None or options.q_lengths is not None or options.kv_lengths is not None
    # Known positions are computed at once, so that they can be compared with the tables.
    with contextlib.nullcontext() if late else jax.ensure_compile_time_eval():
        if said is not None:
            at_q, at_k = _as_said(said, q, k)
        elif packed is not None:
            at_q, at_k = _within_sequences(q.shape[0], k.shape[0], packed, options.q_offset)
        else:
            at_q, at_k, least = _by_rows(q, k, options)
        live_q, live_k = _live(q, k, options)
        if not isinstance(at_q, int):  # an int is known to be in the tables
            name = "q_offset" if said is None else "rotary.at"
            each = (_least_rows(name, at_q, live_q), _least_rows(name, at_k, live_k))
            least = max(least, *each)
    fields, tables = checks.rotation(
        rotary, q.shape[-1], least, f"{least} at which rows of q and k stand"
    )
    change = Change(q.shape[-1], **fields)
    return (
        _rotated_rows(q, at_q, live_q, change, tables),
        _rotated_rows(k, at_k, live_k, change, tables),
    )


def _as_said(positions: checks.Argument, q: Array, k: Array) -> list[Array]:
    """Positions that the caller passes: one array for q and k, or a pair."""
    pair = positions if isinstance(positions, (tuple, list)) else (positions, positions)
    if len(pair) != 2:
        raise ValueError(
            f"rotary.at: expected a pair (of q, of k) or one array for both, got {len(pair)} arrays"
        )
    checked_pair = []
    for name, x, value in (("q", q, pair[0]), ("k", k, pair[1])):
        shape, each = x.shape[:-2], getattr(value, "ndim", 1) < 2
        wanted = f"int32[{shape[-1]}]"
        wanted += f" or int32[{', '.join(map(str, shape))}] for {name}" if len(shape) > 1 else ""
        remedy = "; pass a pair (of q, of k) where T and S differ"
        checked_pair.append(
            checks.integers("rotary.at", value, wanted, shape[-1:] if each else shape, remedy)
        )
    return checked_pair


def _within_sequences(
    q_rows: int, kv_rows: int, packed: Packed, q_offset: checks.Argument
) -> tuple[Array, Array]:
    """Positions of packed rows in their sequences; 0 for rows of none."""
    both = bind.both_starts(packed, q_rows, kv_rows)
    sequences = both[0].size - 1
    static, offset = _offset(q_offset, sequences, "one a sequence")
    first = jnp.full(sequences, static, jnp.int32) if offset is None else offset

    def positions(begins: Array, add: Array, rows: int) -> Array:
        owner = owner_of_rows(begins, rows)
        own = jnp.clip(owner, 0, max(sequences - 1, 0))
        at = jnp.arange(rows, dtype=jnp.int32) - begins[own]
        at = at + add[own] if sequences else at
        return jnp.where((owner >= 0) & (owner < sequences), at, 0)

    def of_both(both: tuple[Array, Array], first: Array) -> tuple[Array, Array]:
        at_k = positions(both[1], jnp.zeros(sequences, jnp.int32), kv_rows)
        return positions(both[0], first, q_rows), at_k

    return sharding.on_automatic_axes(of_both, (both, first), PartitionSpec())


def _by_rows(q: Array, k: Array, options: bind.Call) -> tuple[Positions, Positions, int]:
    """Positions of rows that are not packed, and the number of them that are known to occur."""
    static, offset = _offset(options.q_offset, q.shape[0], "one a batch row")
    context, q_rows, kv_rows, shards = checked(options.context), q.shape[1], k.shape[1], 1
    at_q: Positions
    at_k: Positions
    at_q, at_k = static, 0
    if context is not None and (shards := shards_of(context)) > 1:
        at_q, at_k = context.positions(q_rows) + static, context.positions(kv_rows)
    if not (isinstance(q_rows, int) and isinstance(kv_rows, int)):  # symbolic sizes of jax.export
        at_q, at_k = (jnp.arange(n, dtype=jnp.int32) for n in (q_rows, kv_rows))
        return (at_q + static if offset is None else offset[:, None] + at_q[None]), at_k, 1
    if offset is not None:
        own = at_q if isinstance(at_q, jax.Array) else jnp.arange(q_rows, dtype=jnp.int32)
        at_q = offset[:, None] + own[None]
    known = 0 if offset is not None else static + q_rows * shards
    return at_q, at_k, max(known, kv_rows * shards, 1)


def _live(q: Array, k: Array, options: bind.Call) -> list[Array | None]:
    """bool[.., rows] of q and of k: the rows that no length and no starts leave out; None: all."""
    if options.packed is not None:
        both = bind.both_starts(options.packed, q.shape[0], k.shape[0])
        owners = [owner_of_rows(s, len(x)) for s, x in zip(both, (q, k), strict=True)]
        return [(owner >= 0) & (owner < both[0].size - 1) for owner in owners]
    context, live = options.context, list[Array | None]()
    shards = 1 if context is None else shards_of(context)
    for x, name in ((q, "q_lengths"), (k, "kv_lengths")):
        rows = x.shape[1]
        ends = checks.lengths(name, getattr(options, name), x.shape[0], rows * shards)
        if ends is None:
            live.append(None)
            continue
        at = jnp.arange(rows, dtype=jnp.int32) if context is None else context.positions(rows)
        live.append(at[None] < ends[:, None])
    return live


def _offset(value: checks.Argument, count: int, each: str) -> tuple[int, Array | None]:
    """`checks.offset` of positions that tables have."""
    static, offset = checks.offset(value, count, each)
    if static < 0:
        raise _before_tables("q_offset", static)
    return static, offset


def _before_tables(name: str, got: int) -> ValueError:
    remedy = "" if name == "rotary.at" else "; pass rotary.at(positions)"
    return ValueError(
        f"{name}: expected at least 0 with rotary, whose tables begin at position 0, got "
        f"{got}{remedy}"
    )


def _least_rows(name: str, at: Positions, live: Array | None) -> int:
    """The rows that tables must have for positions, if they are known now; ValueError for one below
    0. Rows that are not `live` count for nothing.
    """
    numbers, counts = masks.known(at), masks.known(True if live is None else live)
    if numbers is None or counts is None:
        return 1
    numbers, counts = np.broadcast_arrays(numbers, counts)
    numbers = numbers[counts]
    if not numbers.size:
        return 1
    if numbers.min() < 0:
        raise _before_tables(name, numbers.min())
    return int(numbers.max()) + 1


def _rotated_rows(
    x: Array, at: Positions, live: Array | None, change: Change, tables: dict[str, Array]
) -> Array:
    """Rows x [.., rows, heads, H] rotated; NaN, without gradients, outside of the tables, and 0
    where they are not `live`.
    """
    if isinstance(at, int) and live is None:
        lead = (None,) * (x.ndim - 3)
        cos, sin = (tables[name][at : at + x.shape[-3]][lead] for name in ("cos", "sin"))
        return rotated_pairs(x, cos, sin, change).astype(x.dtype)
    if isinstance(at, int):
        at = at + jnp.arange(x.shape[-3], dtype=jnp.int32)
    run = functools.partial(_rotated_at, change)
    return sharding.on_automatic_axes(run, (x, at, live, tables), sharding.spec_of(x))


def _rotated_at(
    change: Change, x: Array, at: Array, live: Array | None, tables: dict[str, Array]
) -> Array:
    """Rows x [.., rows, heads, H] rotated by positions [rows] or [B, rows]. What rows hold that are
    not `live` is selected away first: the gradient of a number of the tables is a sum over all rows
    that read it.
    """
    lead, zero = (None,) * (x.ndim - 3), jnp.zeros((), x.dtype)
    alive: Any = True if live is None else jnp.broadcast_to(live[..., None, None], x.shape)
    inside = (at >= 0) & (at < change.positions)
    at = jnp.where(inside, at, 0)
    cos, sin = tables["cos"][at], tables["sin"][at]
    if at.ndim == 1:
        cos, sin = cos[lead], sin[lead]
    inside = jnp.broadcast_to(inside[..., None, None], x.shape)
    x = jnp.where(inside & alive, x, zero)
    return jnp.where(~inside & alive, jnp.nan, rotated_pairs(x, cos, sin, change)).astype(x.dtype)
