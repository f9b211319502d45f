"""Argument checks. Everything here raises ValueError: the argument's name, what was wanted, what
came, what to do.

Each public call is turned into its two halves (`_problem`): the static problem and the arrays.
"""

import dataclasses
import math
import operator
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call import device
from pallas_attn._call.problem import AttentionInputs, AttentionProblem, Change, owner_of_rows
from pallas_attn.context import Context, shards_of, window_of
from pallas_attn.masks import FULL, LONGEST, Mask, MaskFunction, mask_fn, saturated, traced_bound
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_attn.scores import ScoreFunction

Array = Any
FARTHEST = (
    LONGEST // 2
)  # a query's position, either way: with the bound of a mask it stays in int32
Precision = str | lax.Precision | lax.DotAlgorithmPreset | None


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    q_offset: Any,
    segment_ids: Any,
    options: dict[str, Any],
    q_positions: Any = None,
    context: Context | None = None,
) -> tuple[AttentionProblem, AttentionInputs]:
    """The problem and the arrays of one flash_attention call; `options` are its remaining arguments
    by name. `q_positions`: of `AttentionInputs`, which only we make (`packed_attention`).
    `context`: one of several devices, which have as many rows each; lengths are of them all.
    """
    q, k, v = _operands(q, k, v)
    shards = 1 if context is None else shards_of(context)
    (batch, q_len, q_heads, head_dim), (_, kv_len, kv_heads, v_dim) = q.shape, v.shape
    scores = (batch, q_heads, q_len, kv_len * shards)
    static_offset, offset = _offset(q_offset, batch)
    q_ids, kv_ids = _segments(segment_ids, batch, q_len, kv_len)
    band, score = options["mask"], _score(options["score"])
    function: MaskFunction | None = None
    if isinstance(band, MaskFunction):
        function, band = band, FULL
        if q_ids is not None and shards == 1:
            ids, q_ids, kv_ids = (q_ids, kv_ids), None, None
            function = function & of_segments(*ids, static_offset if offset is None else offset)
        elif q_ids is not None:  # of which each launch makes a part of the function
            function = dataclasses.replace(function, kinds=None, sizes=None)
    band = mask(band)
    bounds = {f"mask_{side}": jnp.broadcast_to(x, batch) for side, x in mask_bounds(band).items()}
    inputs = AttentionInputs(
        q,
        k,
        v,
        offset,
        _lengths("q_lengths", options["q_lengths"], batch, q_len * shards),
        _lengths("kv_lengths", options["kv_lengths"], batch, kv_len * shards),
        q_ids,
        kv_ids,
        q_positions,
        _no_wider(_over_scores("bias", options["bias"], scores, jnp.floating), q),
        _over_scores("mask_array", options["mask_array"], scores, jnp.bool_),
        sink_logits(options["sinks"], q),
        mask_aux=() if function is None else tuple(map(lax.stop_gradient, function.read)),
        score_aux=() if score is None else score.aux,
        **bounds,
    )
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
        v_head_dim=v_dim,
        mask=band.static,
        scale=scale(options["scale"], head_dim),
        softcap=softcap(options["softcap"]),
        q_offset=static_offset,
        precision=precision(options["precision"], q.dtype),
        arrays=tuple(n for n in AttentionInputs._fields[3:-2] if getattr(inputs, n) is not None),
        bias_shape=None if inputs.bias is None else inputs.bias.shape,
        mask_shape=None if inputs.mask_array is None else inputs.mask_array.shape,
        deterministic=boolean("deterministic", options["deterministic"]),
        mask_program=None if function is None else function.program,
        mask_within=FULL if function is None else function.within,
        mask_blocks=_blocks(function, inputs, (q_len, kv_len, static_offset), context),
        score_program=None if score is None else score.program,
    ), inputs


def _score(value: Any) -> ScoreFunction | None:
    if value is not None and not isinstance(value, ScoreFunction):
        kind = type(value).__name__
        raise ValueError(f"score: expected what score_fn(f, *aux) makes, or None, got {kind}")
    return value


def _blocks(
    mask: MaskFunction | None, inputs: AttentionInputs, here: tuple[int, int, int], context: Any
) -> tuple[int, int, int] | None:
    """`AttentionProblem.mask_blocks`; `here`: what they must be of, beside a context."""
    if mask is None or mask.kinds is None:
        return None
    of = here if context is None else (*here, context)
    wanted = ("(T, S, q_offset)" if context is None else "(T, S, q_offset, context)") + f" = {of}"
    wanted = wanted if inputs.q_offset is None else "an int q_offset"
    if inputs.q_offset is not None or mask.sizes != of:
        raise _other_blocks(wanted, f"those of {mask.sizes}")
    uses, (batch, _, heads, _) = mask.program.depends_on, inputs.q.shape
    shards, chunks = 1 if context is None else shards_of(context), 1
    if context is not None and context.method == "heads":
        heads //= shards
    elif context is not None:
        chunks = context.chunks
    axes = chunks * (batch if uses(0) else 1), heads if uses(1) else 1
    if mask.kinds.shape[-4:-2] != axes:
        wanted = f"batch = {batch} and heads = {inputs.q.shape[2]}, on which the mask depends"
        raise _other_blocks(wanted, "those of other numbers")
    over_keys = any(x is not None and x.shape[3] > 1 for x in (inputs.bias, inputs.mask_array))
    windows = context is not None and context.method == "gather" and over_keys
    if windows and window_of(context, shards, mask.within, here[:2], here[2]) is not None:
        wanted = "no window, since a bias or mask_array lies over all keys, which all move"
        raise _other_blocks(wanted, "those of a mask within a static band")
    return here


def _other_blocks(wanted: str, got: str) -> ValueError:
    return ValueError(
        f"mask: expected blocks of {wanted}, got {got}; call mask.blocks with the sizes of this "
        "call, or pass the mask without blocks"
    )


def of_segments(q_ids: Any, kv_ids: Any, offset: Any) -> MaskFunction:
    """Segment ids as a function of positions."""
    if isinstance(offset, int):
        return mask_fn(lambda b, h, q, kv, i, j: i[b, q - offset] == j[b, kv], q_ids, kv_ids)
    return mask_fn(
        lambda b, h, q, kv, i, j, first: i[b, q - first[b]] == j[b, kv], q_ids, kv_ids, offset
    )


def packed_attention(
    q: Array,
    k: Array,
    v: Array,
    starts: tuple[Any, Any],
    *,
    q_offset: Any,
    segment_ids: Any,
    options: dict[str, Any],
) -> tuple[AttentionProblem, AttentionInputs]:
    """`attention` of packed rows, as one batch row: a sequence is a segment. `starts`: q_starts and
    kv_starts.

    Positions are counted through all keys: a query's is that of its sequence's first key and its
    own within the sequence. Where queries and keys are packed alike that is its row.
    """
    q, k, v = _packed_operands(q, k, v, starts)
    given = {"segment_ids": segment_ids} | {name: options[name] for name in _NOT_PACKED}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected None with q_starts, which say where sequences begin and end; "
                "leave it out"
            )
    if isinstance(options["mask"], MaskFunction) or options["score"] is not None:
        raise ValueError(
            "mask, score: expected a Mask and no function of positions with q_starts, since packed "
            "rows have other positions; give each sequence a batch row"
        )
    q_len, kv_len = q.shape[0], k.shape[0]
    q_starts, kv_starts = _both_starts(*starts, q_len, kv_len)
    sequences = q_starts.size - 1
    static_offset, offset = _offset(q_offset, sequences, "one a sequence")
    owner, kv_owner = owner_of_rows(q_starts, q_len), owner_of_rows(kv_starts, kv_len)
    # Rows of no sequence are of segments that no key is of, in an order that goes on rising.
    kv_owner = kv_owner + jnp.where(kv_owner < 0, -1, 0) + jnp.where(kv_owner < sequences, 0, 1)
    positions = None
    if not (mask(options["mask"]).is_full or (kv_starts is q_starts and offset is None)):
        own = jnp.clip(owner, 0, max(sequences - 1, 0))
        first = jnp.full_like(q_starts, static_offset) if offset is None else offset
        within = jnp.arange(q_len, dtype=jnp.int32) - q_starts[own]
        # Nobody sees a key from farther away: positions stay in int32.
        within = jnp.clip(first[own] + within if sequences else within, -FARTHEST, FARTHEST)
        positions, static_offset = (kv_starts[own] + within)[None], 0
    lengths = {"q_lengths": q_starts[-1:], "kv_lengths": kv_starts[-1:]}
    return attention(
        *(x[None] for x in (q, k, v)),
        q_offset=static_offset,
        segment_ids=(owner[None], kv_owner[None]),
        options=options | lengths,
        q_positions=positions,
    )


_NOT_PACKED = ("q_lengths", "kv_lengths", "bias", "mask_array")


def _packed_operands(q: Array, k: Array, v: Array, starts: tuple[Any, Any]) -> tuple[Any, ...]:
    """q, k and v without a batch axis, against each other."""
    wanted = {"q": "[tokens, N, H]", "k": "[kv_tokens, K, H]", "v": "[kv_tokens, K, Hv]"}
    given = [array(name, x) for name, x in zip(wanted, (q, k, v), strict=True)]
    if starts[0] is None:
        raise ValueError("q_starts: expected int32[M + 1] with kv_starts, got None")
    for (name, axes), x in zip(wanted.items(), given, strict=True):
        if x.ndim != 3:
            raise ValueError(
                f"{name}: expected 3 axes {axes} with q_starts (packed rows), got {x.ndim} in "
                f"shape {x.shape}"
            )
    return tuple(given)


def _both_starts(q_starts: Any, kv_starts: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
    """Those of queries and of keys, cleaned; the same array where both are packed alike."""
    found = row_starts("q_starts", q_starts, q_len)
    if kv_starts is None:
        if kv_len != q_len:
            raise ValueError(
                f"kv_starts: expected int32[M + 1], since q has {q_len} packed rows and k "
                f"{kv_len}; without it keys are packed as queries are"
            )
        return found, found
    if kv_starts is q_starts and kv_len == q_len:
        return found, found
    return found, row_starts("kv_starts", kv_starts, kv_len, found.size - 1)


def _operands(q: Array, k: Array, v: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v against each other."""
    q, k, v = (array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    batch, _, q_heads, head_dim = _shape("q", q, "[B, T, N, H]")
    kv_batch, _, kv_heads, k_dim = _shape("k", k, "[B, S, K, H]")
    v_dim = _shape("v", v, "[B, S, K, Hv]")[3]
    if kv_batch != batch:
        raise ValueError(
            f"k: expected batch {batch} as in q {q.shape}, got {kv_batch} in k {k.shape}"
        )
    if k_dim != head_dim:
        raise ValueError(
            f"k: expected head dim {head_dim} as in q {q.shape}, got {k_dim} in k {k.shape}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: expected [B, S, K, ...] = {k.shape[:3]} as in k {k.shape}, got {v.shape[:3]} in "
            f"v {v.shape}"
        )
    if head_dim < 1 or v_dim < 1:
        raise ValueError(f"q, v: head dims must be at least 1, got q {q.shape} and v {v.shape}")
    grouped_heads(q_heads, kv_heads)
    float_dtype("q", q)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(
                f"{name}: expected dtype {q.dtype} as in q, got {x.dtype}; cast one of them"
            )
    return q, k, v


def array(name: str, x: Any) -> jax.Array:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name}: expected an array, got {type(x).__name__}")
    try:
        return jnp.asarray(x)
    except TypeError:  # of objects or strings, or a shape without an array
        raise ValueError(
            f"{name}: expected an array of numbers, got {type(x).__name__} of {x.dtype}"
        ) from None


def _shape(name: str, x: jax.Array, wanted: str) -> tuple[int, ...]:
    if x.ndim != 4:
        raise ValueError(
            f"{name}: expected 4 axes {wanted}, got {x.ndim} in shape {x.shape}; add a batch axis "
            "of 1 or use jax.vmap"
        )
    return x.shape


def grouped_heads(q_heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            f"q: expected a number of query heads N that is a multiple of the {kv_heads} kv heads "
            f"K, got N = {q_heads}"
        )


def float_dtype(name: str, x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name}: expected a floating-point dtype, got {x.dtype}")


def mask(value: Any) -> Mask:
    if not isinstance(value, Mask):
        raise ValueError(
            "mask: expected a Mask (FULL, CAUSAL, sliding_window(n), Mask(left, right)), got "
            f"{type(value).__name__}; "
            "a boolean array goes in as mask_array"
        )
    return value


def mask_bounds(given: Mask) -> dict[str, jax.Array]:
    """The bounds that arrive at run time, by side: int32 scalars."""
    return {side: traced_bound(f"mask.{side}", x) for side, x in given.arrays.items()}


def scale(value: Any, head_dim: int) -> float:
    return (
        head_dim**-0.5
        if value is None
        else _static_float("scale", value, "multiply q by it instead")
    )


def softcap(value: Any) -> float | None:
    if value is None:
        return None
    cap = _static_float("softcap", value, "softcap is part of the compiled kernel")
    if cap < _SMALLEST:  # which float32 would divide by as if it were 0
        raise ValueError(
            f"softcap: expected a positive float or None, got {cap:g}; None turns it off"
        )
    return cap


def _static_float(name: str, value: Any, remedy: str) -> float:
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        kind = "a traced array" if isinstance(value, jax.core.Tracer) else type(value).__name__
        raise ValueError(f"{name}: expected a Python float, got {kind}; {remedy}") from None
    if not abs(number) <= _LARGEST:  # NaN is not either
        raise ValueError(f"{name}: expected a finite float32, got {number:g}")
    return number


_SMALLEST, _LARGEST = (float(getattr(np.finfo(np.float32), end)) for end in ("tiny", "max"))


# "high" is TF32 on a GPU, says JAX, as the default is: what we do by default is that, or better.
_PRECISIONS: dict[Any, str | None] = {
    **dict.fromkeys(("default", "bfloat16", "fastest", "high", "tensorfloat32", "bfloat16_3x")),
    **dict.fromkeys(("highest", "float32"), "highest"),
    **dict.fromkeys((lax.Precision.DEFAULT, lax.Precision.HIGH)),
    lax.Precision.HIGHEST: "highest",
}
# The dot algorithms that are more than TF32.
_MORE_THAN_TF32 = frozenset(
    f"{name}_F32{times}"
    for name, times in (
        ("F32_F32", ""),
        ("TF32_TF32", "_X3"),
        *(("BF16_BF16", f"_X{n}") for n in (3, 6, 9)),
    )
) | {"F64_F64_F64"}


def boolean(name: str, value: Any) -> bool:
    """A static switch."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}: expected True or False, got {value!r}; it is static")
    return bool(value)


def precision(value: Precision, dtype: Any) -> str | None:
    """None or "highest", as jax names precisions; jax.default_matmul_precision holds where the call
    says nothing.

    It speaks of float32 inputs only: other types have one way to be multiplied.
    """
    if value is None:
        value = jax.config.jax_default_matmul_precision or "default"
    algorithm = value.name if isinstance(value, lax.DotAlgorithmPreset) else value
    if isinstance(algorithm, str) and algorithm in lax.DotAlgorithmPreset.__members__:
        value = "highest" if algorithm in _MORE_THAN_TF32 else "default"
    if not isinstance(value, Hashable) or value not in _PRECISIONS:
        names = ", ".join(sorted(repr(p) for p in _PRECISIONS if isinstance(p, str)))
        raise ValueError(
            f"precision: expected one of {names}, a jax.lax.Precision or None, got {value!r}"
        )
    return _PRECISIONS[value] if dtype == jnp.float32 else None


def integers(
    name: str,
    value: Any,
    wanted: str,
    shape: tuple[int | None, ...],
    remedy: str = "",
    saturate: bool = True,
) -> jax.Array:
    """An int32 array of the shape (None: any size) from whatever jax takes for one. What int32 does
    not hold becomes a number that lies beyond every row as well; or, of names (not `saturate`), its
    low bits.
    """
    try:
        x = jnp.asarray(saturated(value) if saturate else value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: expected {wanted}, got {type(value).__name__}{remedy}") from None
    fits = len(shape) == x.ndim and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name}: expected {wanted}, got {x.dtype}{list(x.shape)}{remedy}")
    return saturated(x) if saturate else x.astype(jnp.int32)


def int_vector(name: str, value: Any, size: int, meaning: str) -> Any:
    """int32[size] or None."""
    if value is None:
        return None
    return integers(name, value, f"int32[{size}] ({meaning})", (size,))


def _lengths(name: str, value: Any, batch: int, most: int) -> jax.Array | None:
    """How many rows count in each batch row, 0 to `most`; None where the caller said nothing."""
    found = int_vector(name, value, batch, "one length a batch row")
    return None if found is None else jnp.clip(found, 0, most)


def row_starts(name: str, value: Any, rows: int, sequences: int | None = None) -> jax.Array:
    """int32[M + 1] of packed rows, of which there are `rows`: sequence i owns rows starts[i] to
    starts[i + 1]. Clipped to 0 .. rows and then never below an earlier one, so that whatever comes
    gives each row to one sequence at most; rows before the first and from the last on belong to
    none.
    """
    size = "M + 1" if sequences is None else str(sequences + 1)
    wanted = f"int32[{size}] (where each sequence's rows start, and where the last one's end)"
    found = integers(name, value, wanted, (None if sequences is None else sequences + 1,))
    if not found.size:
        raise ValueError(f"{name}: expected {wanted}, got {found.dtype}{list(found.shape)}")
    found = jnp.clip(found, 0, rows)
    at = jnp.arange(found.size, dtype=jnp.int32)
    earlier = jnp.where(at[None] <= at[:, None], found[None], 0)
    return earlier.max(axis=1)  # a cummax, in one kernel


def change(
    rotary: Any, norm: Any, dim: int, stored: int, capacity: int
) -> tuple[Change | None, dict[str, Any]]:
    """What is done to rows of `dim` columns, which a cache keeps as `stored`, before they are used;
    and the arrays that it takes, by name.
    """
    static: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    if norm is not None:
        if not isinstance(norm, RMSNorm):
            raise ValueError(f"norm: expected an RMSNorm or None, got {type(norm).__name__}")
        weight = array("norm.weight", norm.weight)
        if weight.shape != (dim,) or not jnp.issubdtype(weight.dtype, jnp.floating):
            got = f"{weight.dtype}{list(weight.shape)}"
            raise ValueError(f"norm.weight: expected float[{dim}], a number a column, got {got}")
        eps = _static_float("norm.eps", norm.eps, "it is part of the compiled kernel")
        if eps < 0:
            raise ValueError(f"norm.eps: expected a number of at least 0, got {eps:g}")
        if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            weight = weight.astype(jnp.float32)
        arrays["norm_weight"] = jnp.pad(weight, (0, stored - dim)) if stored > dim else weight
        static |= {"eps": eps, "weight_dtype": str(weight.dtype)}
    if rotary is not None:
        if not isinstance(rotary, Rotary):
            raise ValueError(f"rotary: expected a Rotary or None, got {type(rotary).__name__}")
        cos, sin = (array(f"rotary.{name}", getattr(rotary, name)) for name in ("cos", "sin"))
        if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] < capacity:
            raise ValueError(
                f"rotary.cos, rotary.sin: expected float[positions, pairs], positions at least the "
                f"{capacity} rows that a sequence of this cache may have, got {list(cos.shape)} "
                f"and {list(sin.shape)}"
            )
        first, pairs = static_int(rotary.first), cos.shape[1]
        if first is None or first < 0 or pairs < 1 or first + 2 * pairs > dim:
            raise ValueError(
                f"rotary: expected columns within the {dim} of a row, got {2 * pairs} from column "
                f"{rotary.first!r} on"
            )
        static |= {"pairs": pairs, "first": first, "positions": cos.shape[0]}
        static["interleaved"] = boolean("rotary.interleaved", rotary.interleaved)
        arrays |= {"cos": cos.astype(jnp.float32), "sin": sin.astype(jnp.float32)}
    return (Change(dim, **static) if static else None), arrays


def one_or_each(name: str, value: Any, size: int, meaning: str) -> jax.Array:
    """int32[size], of a vector or of a scalar that serves all."""
    if getattr(value, "shape", None) == ():
        value = jnp.broadcast_to(value, (size,))
    return integers(name, value, f"int32[{size}] ({meaning}, or one int)", (size,))


def static_int(value: Any) -> int | None:
    """A Python (or NumPy) integer as an int; None for anything else."""
    if isinstance(value, (bool, jax.Array)) or hasattr(value, "ndim") and value.ndim:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def positive(none: bool = False, **sizes: int | None) -> None:
    """ValueError for a size that is no int of at least 1; `none`: None is one."""
    for name, size in sizes.items():
        if not (none and size is None) and (static_int(size) or 0) < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")


def _offset(value: Any, batch: int, each: str = "one a batch row") -> tuple[int, jax.Array | None]:
    static = static_int(value)
    if static is not None:
        if not -FARTHEST <= static <= FARTHEST:
            raise ValueError(
                f"q_offset: expected -2**29 to 2**29, got {static}: positions are int32"
            )
        return static, None
    if value is None:
        return 0, None
    where = f"the position of query row 0, {each}"
    return 0, jnp.clip(one_or_each("q_offset", value, batch, where), -FARTHEST, FARTHEST)


def _segments(ids: Any, batch: int, q_len: int, kv_len: int) -> tuple[Any, Any]:
    if ids is None:
        return None, None
    pair = ids if isinstance(ids, (tuple, list)) else (ids, ids)
    if len(pair) != 2:
        raise ValueError(
            f"segment_ids: expected a pair (of q, of kv) or one array for both, got {len(pair)} "
            "arrays"
        )
    checked = []
    for name, one, size in (("q", pair[0], q_len), ("kv", pair[1], kv_len)):
        wanted = f"int32[{batch}, {size}] for {name}"
        remedy = "; pass a pair (of q, of kv) where T and S differ"
        checked.append(integers("segment_ids", one, wanted, (batch, size), remedy, False))
    return checked[0], checked[1]


def _over_scores(name: str, value: Any, scores: tuple[int, ...], kind: Any) -> jax.Array | None:
    """An array that broadcasts over the scores [B, N, T, S], with its missing leading axes added;
    or None.
    """
    if value is None:
        return None
    x = array(name, value)
    if x.ndim > 4 or any(
        have not in (1, want) for have, want in zip(x.shape[::-1], scores[::-1], strict=False)
    ):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to [B, N, T, S] = {list(scores)}, got "
            f"{list(x.shape)}"
        )
    if not jnp.issubdtype(x.dtype, kind):
        wanted, remedy = "a floating-point dtype", "cast it"
        if name == "mask_array":
            wanted, remedy = "bool (True: may be seen)", "pass x != 0 where 1 means that"
            if jnp.issubdtype(x.dtype, jnp.floating):
                remedy += "; what is added to the logits (0 and -inf) goes in as bias"
        elif x.dtype == jnp.bool_:
            remedy = "did you mean mask_array?"
        raise ValueError(f"{name}: expected {wanted}, got {x.dtype}; {remedy}")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _no_wider(bias: jax.Array | None, q: jax.Array) -> jax.Array | None:
    """float64 is for float64 queries: the logits of all others are float32."""
    if bias is None or q.dtype == jnp.float64 or bias.dtype != jnp.float64:
        return bias
    return bias.astype(jnp.float32)


def sink_logits(value: Any, q: jax.Array) -> jax.Array | None:
    """The sinks in the dtype of the logits, for queries [.., N, H]."""
    if value is None:
        return None
    x, q_heads = array("sinks", value), q.shape[-2]
    if x.shape != (q_heads,) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"sinks: expected float[{q_heads}] (one logit a query head), got "
            f"{x.dtype}{list(x.shape)}"
        )
    return x.astype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)


def widened(x: jax.Array, dim: int) -> jax.Array:
    """[.., heads, H] with columns of zeros up to `dim`."""
    lacking = dim - x.shape[-1]
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, lacking))) if lacking else x


def layer(value: Any, layers: int | None) -> int | jax.Array | None:
    """The layer as an int or an int32 scalar; None where the cache has no layer axis."""
    static = static_int(value)
    if static is not None:
        if not 0 <= static < (layers or 1):
            raise ValueError(
                f"layer: expected 0 to {(layers or 1) - 1} for a cache of {layers or 1} layers, "
                f"got {static}"
            )
        return None if layers is None else static
    index = integers("layer", value, "an int or an int32 scalar", ())
    if layers is None:
        raise ValueError(
            "layer: the cache has no layer axis; leave layer out, or create the cache with "
            "layers=..."
        )
    return index


def twin_caches(k_name: str, k: Any, v_name: str, v: Any) -> None:
    """K and V of a sequence lie in arrays that differ in nothing but the head dim: a kernel finds
    both by one index, and would write past the end of a smaller one.
    """
    if v is None:
        return
    ks, vs = (x if isinstance(x, tuple) else (x,) for x in (k, v))
    if len(ks) != len(vs):
        raise ValueError(f"{v_name}: expected {len(ks)} arrays as in {k_name}, got {len(vs)}")
    for one, other in zip(ks, vs, strict=True):
        if (one.shape[:-1], one.dtype) != (other.shape[:-1], other.dtype):
            raise ValueError(
                f"{v_name}: expected {one.dtype}{list(one.shape)} as in {k_name}, but for the last "
                f"axis, got {other.dtype}{list(other.shape)}"
            )


def scales(name: str, scale: Any, cache_name: str, cache: Any) -> None:
    """The scales of a quantised cache lie as its rows do, without the head dim."""
    if scale is None:
        return
    ones, others = (x if isinstance(x, tuple) else (x,) for x in (scale, cache))
    if isinstance(scale, tuple) != isinstance(cache, tuple) or len(ones) != len(others):
        raise ValueError(
            f"{name}: expected {len(others)} arrays as in {cache_name}, got {len(ones)}"
        )
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape[:-1] or one.dtype != jnp.float32:
            raise ValueError(
                f"{name}: expected float32{list(other.shape[:-1])}, a scale for each row of "
                f"{cache_name} {list(other.shape)}, got {one.dtype}{list(one.shape)}"
            )


def _kept(name: str, value: Any, wanted: str, shape: tuple[int | None, ...]) -> None:
    """ValueError where a small array of a cache is no int32 of that shape (None: any size)."""
    found = getattr(value, "shape", None)
    if found is None:
        raise ValueError(f"cache.{name}: expected {wanted}, got {type(value).__name__}")
    sizes = [have if want is None else want for want, have in zip(shape, found, strict=False)]
    if len(found) != len(shape) or tuple(sizes) != found or value.dtype != jnp.int32:
        raise ValueError(f"cache.{name}: expected {wanted}, got {value.dtype}{list(found)}")


def _buffers(name: str, held: Any) -> None:
    """ValueError for leaves that are no arrays: None, specs, or shapes of `jax.eval_shape`."""
    for x in held if isinstance(held, tuple) else (held,):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise ValueError(
                f"{name}: expected arrays, got {type(x).__name__}; where nothing but shapes is "
                "known, pass the cache to the function that jax.eval_shape calls"
            )


def kv_cache(cache: Any) -> None:
    """A cache's arrays against each other: kernels find their way by what is in the small ones."""
    _buffers("cache.k", cache.k)
    for name in ("v", "k_scale", "v_scale"):
        if getattr(cache, name) is not None:
            _buffers(f"cache.{name}", getattr(cache, name))
    twin_caches("cache.k", cache.k, "cache.v", cache.v)
    if (cache.v is None) != cache.shared_kv:
        raise ValueError(
            "cache.v: expected None where v_columns says that V is part of K, and only there; make "
            "caches with create(shared_kv=True)"
        )
    scales("cache.k_scale", cache.k_scale, "cache.k", cache.k)
    scales("cache.v_scale", cache.v_scale, "cache.v", cache.v)
    if (cache.v_scale is None) != (cache.k_scale is None or cache.v is None):
        raise ValueError("cache.v_scale: expected scales of k and of v, or none of both")
    if cache.kind == "paged":
        _kept("page_table", cache.page_table, "int32[M, W]", (None, None))
        sequences = cache.page_table.shape[0]
    else:
        sequences = len(cache.k) if cache.kind == "per_sequence" else cache.k.shape[-4]
    for name in ("lengths", "new_lengths"):
        _kept(name, getattr(cache, name), f"int32[{sequences}] (one a sequence)", (sequences,))


def holders(cache: Any) -> Any:
    """Of each page of a PagedCache, for a kernel that reads them; None of other caches."""
    if cache.kind != "paged":
        return None
    _kept("holders", cache.holders, f"int32[{cache.pages}] (one a page)", (cache.pages,))
    return cache.holders


def extended(cache: Any) -> None:
    """ValueError where write_kv would fill no rows of a sequence, if that is known already."""
    new = cache.new_lengths
    if isinstance(new, jax.core.Tracer) or not getattr(new, "is_fully_addressable", True):
        return
    without = np.flatnonzero(np.asarray(new) < 0).tolist()
    if without:
        raise ValueError(
            "cache: write_kv fills the rows that the latest extend took, and there was none since "
            f"sequences {without} were made, emptied or forked into; call cache.extend(rows) "
            "first, with 0 for a sequence that gets no rows"
        )


def decode_query(q: jax.Array, cache: Any, packed: bool, one_token: bool = False) -> None:
    """q [M, t, N, H], which came without t for `one_token`, or packed rows [tokens, N, H], against
    the cache it reads.
    """
    if packed:
        wanted = f"packed rows [tokens, N, H] = [tokens, N, {cache.head_dim}] to go with starts"
        fits = q.ndim == 3
    else:
        wanted = f"[M, t, N, H] = [{cache.num_sequences}, t, N, {cache.head_dim}] (or without t)"
        fits = q.ndim == 4 and q.shape[0] == cache.num_sequences
    if not fits or q.shape[-1] != cache.head_dim:
        shape = [*q.shape[:1], *q.shape[2:]] if one_token else list(q.shape)
        hint = "; packed rows take starts" if one_token and not fits else ""
        raise ValueError(f"q: expected {wanted} for this cache, got {shape}{hint}")
    grouped_heads(q.shape[-2], cache.kv_heads)
    float_dtype("q", q)
