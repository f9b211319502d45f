"""From the arguments of a call of attention to its problem and its inputs.

Every call has q, k and v checked. What is optional has checks of its own (`checks`), which run
where it is given. Wrong arguments are ValueErrors.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import checks, device, float8
from pallas_attn._call.problem import OPTIONAL, AttentionInputs, AttentionProblem, owner_of_rows
from pallas_attn._functions.program import check_reads
from pallas_attn._mesh import sharding
from pallas_attn.context import Context, shards_of, window_of
from pallas_attn.errors import described
from pallas_attn.masks import FULL, Mask, MaskFunction, mask_fn
from pallas_attn.rotary import Rotary
from pallas_attn.scores import ScoreFunction
from pallas_attn.values import Blocks, Float8, Packed

Array = jax.Array


class Call(NamedTuple):
    """The arguments of `flash_attention` beside q, k and v."""

    mask: Mask | MaskFunction = FULL
    score: ScoreFunction | None = None
    scale: float | None = None
    q_offset: int | Array = 0
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    segment_ids: Array | tuple[Array, Array] | None = None
    packed: Packed | None = None
    bias: Array | None = None
    mask_array: Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    precision: checks.Precision = None
    deterministic: bool = False
    context: Context | None = None  # several devices; lengths are those of all
    rotary: Rotary | None = None
    float8: Float8 | bool = False
    kv_blocks: Blocks | None = None
    kv_indices: Array | None = None
    implementation: str | None = None


_OPTIONAL = ("score", "q_lengths", "kv_lengths", "segment_ids", "bias", "mask_array", "sinks")


def attention(
    q: Array, k: Array, v: Array, options: Call, q_positions: Array | None = None
) -> tuple[AttentionProblem, AttentionInputs]:
    """The problem and the inputs of a call of `flash_attention`. `q_positions`: the field of
    `AttentionInputs`, for packed rows.
    """
    q, k, v = operands(q, k, v)
    (batch, q_len, q_heads, head_dim), (_, kv_len, kv_heads, v_head_dim) = q.shape, v.shape
    mask, offset, inputs = options.mask, options.q_offset, AttentionInputs(q, k, v)
    facts: dict[str, Any] = {"mask": mask, "q_offset": offset}
    plain = is_static(mask) and type(offset) is int and abs(offset) <= checks.FARTHEST
    narrow = q.dtype.itemsize == 1 or isinstance(options.float8, Float8)
    if narrow or not plain or any([getattr(options, name) is not None for name in _OPTIONAL]):
        inputs, facts = _optional(inputs._replace(q_positions=q_positions), options)
    softcap, deterministic = options.softcap, options.deterministic
    return AttentionProblem(
        op="flash_forward",
        gpu=device.gpu_generation(),
        dtype=str(q.dtype),
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        scale=head_dim**-0.5 if options.scale is None else checks.scale(options.scale),
        softcap=None if softcap is None else checks.softcap(softcap),
        precision=precision(options.precision, q),
        deterministic=deterministic is not False and checks.boolean("deterministic", deterministic),
        **facts,
    ), inputs


def operands(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """q, k and v as arrays that fit each other."""
    named = (("q", q, "[B, T, N, H]"), ("k", k, "[B, S, K, H]"), ("v", v, "[B, S, K, Hv]"))
    q, k, v = [x if isinstance(x, Array) else checks.array(name, x) for name, x, _ in named]
    for x, (name, _, axes) in zip((q, k, v), named, strict=True):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: expected 4 axes {axes}, got {x.ndim} in shape {x.shape}; add a batch "
                "axis of 1 or use jax.vmap"
            )
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k: expected batch {q.shape[0]} as in q {q.shape}, got {k.shape[0]} in k {k.shape}"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k: expected head dim {q.shape[3]} as in q {q.shape}, got {k.shape[3]} in k {k.shape}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: expected [B, S, K, ...] = {k.shape[:3]} as in k {k.shape}, got {v.shape[:3]} in "
            f"v {v.shape}"
        )
    if q.shape[3] < 1 or v.shape[3] < 1:
        raise ValueError(f"q, v: head dims must be at least 1, got q {q.shape} and v {v.shape}")
    query_heads(q, k.shape[2])
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(
                f"{name}: expected dtype {q.dtype} as in q, got {x.dtype}; cast one of them"
            )
    return q, k, v


def query_heads(q: Array, kv_heads: int) -> None:
    """ValueError for queries [.., N, H] that kv heads do not serve, or that are no floats."""
    q_heads = q.shape[-2]
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            f"q: expected a number of query heads N that is a multiple of the {kv_heads} kv heads "
            f"K, got N = {q_heads}"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: expected a floating-point dtype, got {q.dtype}")


def is_static(mask: Mask | MaskFunction) -> bool:
    """Whether it is a mask whose bounds are known now."""
    known = (int, type(None))
    return type(mask) is Mask and isinstance(mask.left, known) and isinstance(mask.right, known)


def precision(value: checks.Precision, q: Array) -> str | None:
    """None, "highest" for float32, or "fast_accum" for float8."""
    if q.dtype.itemsize == 1:
        if getattr(value, "name", value) == "ANY_F8_ANY_F8_F32_FAST_ACCUM":
            return "fast_accum"
        return None if value is None else checks.precision(value, q.dtype)
    if q.dtype != jnp.float32 and value is None:
        return None
    return checks.precision(value, q.dtype)


def _optional(inputs: AttentionInputs, options: Call) -> tuple[AttentionInputs, dict[str, Any]]:
    """The inputs with all that is given beside q, k and v, and the facts of the problem that follow
    from it.
    """
    q, mask, context = inputs.q, options.mask, options.context
    if isinstance(mask, MaskFunction) and mask.is_full:
        mask = FULL
    (batch, q_len, q_heads, _), kv_len = q.shape, inputs.k.shape[1]
    shards = 1 if context is None else shards_of(context)
    scores = (batch, q_heads, q_len, kv_len * shards)
    q_offset, offsets = checks.offset(options.q_offset, batch)
    axis = None if context is None else context.axis
    q_ids, kv_ids = checks.segments(options.segment_ids, batch, q_len, kv_len, axis)
    band = FULL if isinstance(mask, MaskFunction) else checks.mask(mask)
    bounds = {side: jnp.broadcast_to(x, batch) for side, x in checks.mask_bounds(band).items()}
    bias = checks.bias_or_mask("bias", options.bias, scores, jnp.floating)
    if bias is not None and bias.dtype == jnp.float64 != q.dtype:  # logits are float32
        bias = bias.astype(jnp.float32)
    inputs = inputs._replace(
        q_offset=offsets,
        q_lengths=checks.lengths("q_lengths", options.q_lengths, batch, q_len * shards),
        kv_lengths=checks.lengths("kv_lengths", options.kv_lengths, batch, kv_len * shards),
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        bias=bias,
        mask_array=checks.bias_or_mask("mask_array", options.mask_array, scores, jnp.bool_),
        sinks=checks.sink_logits(options.sinks, q),
        mask_left=bounds.get("left"),
        mask_right=bounds.get("right"),
    )
    facts: dict[str, Any] = {"mask": band.static, "q_offset": q_offset}
    last = None if offsets is not None else q_offset + scores[2] * shards
    sizes = batch, q_heads, last, scores[3]
    if isinstance(mask, MaskFunction):
        check_reads("mask", mask.program, sizes)
        inputs, more = _with_function(inputs, mask, q_offset, context)
        facts |= more
    if options.score is not None:
        score = checks.score(options.score, sizes)
        inputs, facts["score_program"] = inputs._replace(score_aux=score.aux), score.program
    if q.dtype.itemsize == 1 or isinstance(options.float8, Float8):
        inputs, more = float8.bound(inputs, options.float8)
        facts |= more
    facts["arrays"] = tuple([name for name in OPTIONAL if getattr(inputs, name) is not None])
    for name, x in (("bias_shape", inputs.bias), ("mask_shape", inputs.mask_array)):
        facts[name] = None if x is None else x.shape
    if inputs.bias is not None:
        facts["bias_dtype"] = str(inputs.bias.dtype)
    return inputs, facts


def _with_function(
    inputs: AttentionInputs, mask: MaskFunction, q_offset: int, context: Context | None
) -> tuple[AttentionInputs, dict[str, Any]]:
    """The inputs with what a mask function reads, and its part of the problem. Segment ids become a
    part of the function; each launch does that itself where rows are split over devices.
    """
    q_ids, kv_ids = inputs.q_segment_ids, inputs.kv_segment_ids
    on_one = context is None or shards_of(context) == 1
    if q_ids is not None and kv_ids is not None and on_one and q_ids.size and kv_ids.size:
        offset = q_offset if inputs.q_offset is None else inputs.q_offset
        mask = mask & of_segments(q_ids, kv_ids, offset)
        inputs = inputs._replace(q_segment_ids=None, kv_segment_ids=None)
    elif q_ids is not None:
        mask = dataclasses.replace(mask, kinds=None, sizes=None)
    inputs = inputs._replace(mask_aux=tuple(map(lax.stop_gradient, mask.read)))
    return inputs, {
        "mask_program": mask.program,
        "mask_within": mask.within,
        "mask_blocks": _blocks(mask, inputs, q_offset, context),
    }


def of_segments(q_ids: Array, kv_ids: Array, offset: int | Array) -> MaskFunction:
    """Segment ids as a function of positions."""
    if isinstance(offset, int):
        return mask_fn(lambda b, h, q, kv, i, j: i[b, q - offset] == j[b, kv], q_ids, kv_ids)
    return mask_fn(
        lambda b, h, q, kv, i, j, first: i[b, q - first[b]] == j[b, kv], q_ids, kv_ids, offset
    )


def _blocks(
    mask: MaskFunction, inputs: AttentionInputs, q_offset: int, context: Context | None
) -> tuple[int, int, int] | None:
    """`AttentionProblem.mask_blocks` of blocks that were made for such a call."""
    if mask.kinds is None:
        return None
    (batch, q_len, all_heads, _), kv_len = inputs.q.shape, inputs.k.shape[1]
    sizes = (q_len, kv_len, q_offset)
    expected = sizes if context is None else (*sizes, context)
    wanted = "(T, S, q_offset)" if context is None else "(T, S, q_offset, context)"
    wanted = f"{wanted} = {expected}" if inputs.q_offset is None else "an int q_offset"
    if inputs.q_offset is not None or mask.sizes != expected:
        raise _other_blocks(wanted, f"those of {mask.sizes}")
    shards, chunks, heads = 1, 1, all_heads
    if context is not None:
        shards = shards_of(context)
        chunks, heads = context.chunks, all_heads
        if context.method == "heads":
            chunks, heads = 1, all_heads // shards
    uses = mask.program.depends_on
    if mask.kinds.shape[-4:-2] != (chunks * (batch if uses(0) else 1), heads if uses(1) else 1):
        wanted = f"batch = {batch} and heads = {all_heads}, on which the mask depends"
        raise _other_blocks(wanted, "those of other numbers")
    over_keys = any(x is not None and x.shape[3] > 1 for x in (inputs.bias, inputs.mask_array))
    if context is None or context.method != "gather" or not over_keys:
        return sizes
    if window_of(context, shards, mask.within, sizes[:2], q_offset) is not None:
        wanted = "no window, since a bias or mask_array lies over all keys, which all move"
        raise _other_blocks(wanted, "those of a mask within a static band")
    return sizes


def _other_blocks(wanted: str, got: str) -> ValueError:
    return ValueError(
        f"mask: expected blocks of {wanted}, got {got}; call mask.blocks with the sizes of this "
        "call, or pass the mask without blocks"
    )


# ---- packed rows ---------------------------------------------------------------------------------


def packed_attention(
    q: Array, k: Array, v: Array, options: Call
) -> tuple[AttentionProblem, AttentionInputs]:
    """`attention` of packed rows, as one batch row whose segments are the sequences.

    Positions are counted through all keys: a query stands at the position of its sequence's first
    key plus its own within the sequence. Where queries and keys are packed alike that is its row.
    """
    packed = packed_beside(options)
    q, k, v = packed_operands(q, k, v)
    q_len, kv_len = q.shape[0], k.shape[0]
    q_starts, kv_starts = both_starts(packed, q_len, kv_len)
    sequences = q_starts.size - 1
    static_offset, offset = checks.offset(options.q_offset, sequences, "one a sequence")
    offset = sharding.whole(offset)
    owner, kv_owner = owner_of_rows(q_starts, q_len), owner_of_rows(kv_starts, kv_len)
    # Rows of no sequence get ids that no key has; ids still rise from row to row.
    kv_owner = kv_owner + jnp.where(kv_owner < 0, -1, 0) + jnp.where(kv_owner < sequences, 0, 1)
    positions = None
    alike = kv_starts is q_starts and offset is None
    if not (alike or checks.mask(options.mask).is_full):
        own = jnp.clip(owner, 0, max(sequences - 1, 0))
        first = jnp.full_like(q_starts, static_offset) if offset is None else offset
        within = jnp.arange(q_len, dtype=jnp.int32) - q_starts[own]
        # No query sees a key from farther away: positions stay in int32.
        within = first[own] + within if sequences else within
        within = jnp.clip(within, -checks.FARTHEST, checks.FARTHEST)
        positions, static_offset = (kv_starts[own] + within)[None], 0
    options = options._replace(
        q_offset=static_offset,
        q_lengths=q_starts[-1:],
        kv_lengths=kv_starts[-1:],
        segment_ids=(owner[None], kv_owner[None]),
    )
    return attention(q[None], k[None], v[None], options, positions)


def packed_operands(q: Array, k: Array, v: Array) -> list[Array]:
    """q, k and v as arrays without a batch axis."""
    operands = []
    wanted = {"q": "[tokens, N, H]", "k": "[kv_tokens, K, H]", "v": "[kv_tokens, K, Hv]"}
    for (name, axes), value in zip(wanted.items(), (q, k, v), strict=True):
        operands.append(x := checks.array(name, value))
        if x.ndim != 3:
            raise ValueError(
                f"{name}: expected 3 axes {axes} of packed rows, got {x.ndim} in shape {x.shape}"
            )
    return operands


def packed_beside(options: Call) -> Packed:
    """The argument `packed`; ValueError for arguments that packed rows do not take."""
    packed = options.packed
    if not isinstance(packed, Packed):
        raise ValueError(f"packed: expected a Packed(q_starts) or None, got {described(packed)}")
    if packed.q_starts is None:
        raise ValueError("q_starts: expected int32[M + 1] with kv_starts, got None")
    if options.context is not None:
        raise ValueError(
            "context: expected None beside packed; rows over devices are [B, T, N, H], with "
            "segment_ids for what is packed"
        )
    for name in ("segment_ids", "q_lengths", "kv_lengths", "bias", "mask_array"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{name}: expected None beside packed, which says where sequences begin and end; "
                "leave it out"
            )
    if isinstance(options.mask, MaskFunction) or options.score is not None:
        raise ValueError(
            "mask, score: expected a Mask and no function of positions beside packed, since packed "
            "rows have other positions; give each sequence a batch row"
        )
    return packed


def both_starts(packed: Packed, q_len: int, kv_len: int) -> tuple[Array, Array]:
    """The starts of queries and of keys, checked; the same array where both are packed alike."""
    q_starts, kv_starts = packed.q_starts, packed.kv_starts
    checked = checks.row_starts("q_starts", q_starts, q_len)
    if kv_starts is None and kv_len != q_len:
        raise ValueError(
            f"kv_starts: expected int32[M + 1], since q has {q_len} packed rows and k {kv_len}; "
            "without it keys are packed as queries are"
        )
    if kv_starts is None or (kv_starts is q_starts and kv_len == q_len):
        return checked, checked
    return checked, checks.row_starts("kv_starts", kv_starts, kv_len, checked.size - 1)
