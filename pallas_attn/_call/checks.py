"""Checks of single arguments, which return them as `bind` and kernels want them.

Everything here raises ValueError: the argument's name, what was wanted, what came, what to do.
"""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_attn._call.problem import CACHE_DTYPES, Change
from pallas_attn._functions.program import check_reads
from pallas_attn._mesh import sharding
from pallas_attn.errors import described
from pallas_attn.masks import LONGEST, Mask, in_int32, known, saturated, traced_bound
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_attn.scores import ScoreFunction

Argument = Any  # an argument of a public function, as the caller gave it
# Farthest position of a query, either way: with the bound of a mask it stays in int32.
FARTHEST = LONGEST // 2
Precision = str | lax.Precision | lax.DotAlgorithmPreset | None


def array(name: str, x: Argument) -> jax.Array:
    """The argument as an array of jax's."""
    if isinstance(x, jax.Array):
        return x
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name}: expected an array, got {type(x).__name__}")
    try:
        return jnp.asarray(x)
    except TypeError:  # objects, strings, or a shape without an array
        raise ValueError(
            f"{name}: expected an array of numbers, got {type(x).__name__} of {x.dtype}"
        ) from None


def mask(value: Argument) -> Mask:
    """The argument `mask` where it is no function of positions."""
    if not isinstance(value, Mask):
        got = described(value) if hasattr(value, "dtype") else type(value).__name__
        raise ValueError(
            "mask: expected a Mask (FULL, CAUSAL, sliding_window(n), Mask(left, right)), got "
            f"{got}; a boolean array goes in as mask_array, a function of positions as mask_fn(f)"
        )
    return value


def mask_bounds(band: Mask) -> dict[str, jax.Array]:
    """The bounds that arrive at run time, by side: int32 scalars."""
    return {side: traced_bound(f"mask.{side}", x) for side, x in band.arrays.items()}


def scale(value: Argument) -> float:
    return static_float("scale", value, "multiply q by it instead")


def softcap(value: Argument) -> float:
    cap = static_float("softcap", value, "softcap is part of the compiled kernel")
    if cap < SMALLEST:  # float32 would divide by it as by 0
        raise ValueError(
            f"softcap: expected a positive float or None, got {cap:g}; None turns it off"
        )
    return cap


def static_float(name: str, value: Argument, remedy: str) -> float:
    """A finite Python float; `remedy`: what to do with a traced one."""
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        kind = "a traced array" if isinstance(value, jax.core.Tracer) else type(value).__name__
        raise ValueError(f"{name}: expected a Python float, got {kind}; {remedy}") from None
    if not abs(number) <= LARGEST:  # NaN is not either
        raise ValueError(f"{name}: expected a finite float32, got {number:g}")
    return number


LEAST_SCALE = 2.0**-100  # smaller scales of float8 are raised to it


def scale_of_numbers(name: str, value: Argument) -> float:
    """A factor of narrow numbers that is known now."""
    factor = static_float(name, value, "multiply q or the result instead")
    if factor < LEAST_SCALE:
        raise ValueError(f"{name}: expected at least 2**-100 or None, got {factor:g}")
    return factor


SMALLEST, LARGEST = (float(getattr(np.finfo(np.float32), end)) for end in ("tiny", "max"))


# JAX takes "high" for TF32 on a GPU, as the default: kernels compute that by default, or better.
_PRECISIONS: dict[Any, str | None] = {
    **dict.fromkeys(("default", "bfloat16", "fastest", "high", "tensorfloat32", "bfloat16_3x")),
    **dict.fromkeys(("highest", "float32"), "highest"),
    **dict.fromkeys((lax.Precision.DEFAULT, lax.Precision.HIGH)),
    lax.Precision.HIGHEST: "highest",
}
# Dot algorithms that are more accurate than TF32.
_MORE_THAN_TF32 = frozenset(
    f"{name}_F32{times}"
    for name, times in (
        ("F32_F32", ""),
        ("TF32_TF32", "_X3"),
        *(("BF16_BF16", f"_X{n}") for n in (3, 6, 9)),
    )
) | {"F64_F64_F64"}


def boolean(name: str, value: Argument) -> bool:
    """A static switch."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}: expected True or False, got {described(value)}; it is static")
    return bool(value)


def precision(value: Precision, dtype: DTypeLike) -> str | None:
    """None or "highest", as jax names precisions; by jax.default_matmul_precision where the call
    says nothing. It holds for float32 inputs only.
    """
    if value is None:
        value = jax.config.jax_default_matmul_precision or "default"
    algorithm = value.name if isinstance(value, lax.DotAlgorithmPreset) else value
    if isinstance(algorithm, str) and algorithm in lax.DotAlgorithmPreset.__members__:
        value = "highest" if algorithm in _MORE_THAN_TF32 else "default"
    if not isinstance(value, Hashable) or value not in _PRECISIONS:
        names = ", ".join(sorted(repr(p) for p in _PRECISIONS if isinstance(p, str)))
        raise ValueError(
            f"precision: expected one of {names}, a jax.lax.Precision or None, got "
            f"{described(value)}"
        )
    return _PRECISIONS[value] if dtype == jnp.float32 else None


def integers(
    name: str,
    value: Argument,
    wanted: str,
    shape: tuple[int | None, ...],
    remedy: str = "",
    saturate: bool = True,
) -> jax.Array:
    """An int32 array of the shape (None: any size) from whatever jax takes for one. Numbers that
    int32 does not hold become such as lie beyond every row as well; without `saturate`, as for ids,
    their low bits stay.
    """
    try:
        x = jnp.asarray(saturated(value) if saturate else value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: expected {wanted}, got {type(value).__name__}{remedy}") from None
    fits = len(shape) == x.ndim and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        remedy = "" if fits else remedy  # which is for shapes
        raise ValueError(f"{name}: expected {wanted}, got {x.dtype}{list(x.shape)}{remedy}")
    return saturated(x) if saturate else x.astype(jnp.int32)


def int_vector(name: str, value: Argument, size: int, meaning: str) -> jax.Array | None:
    """int32[size] or None."""
    if value is None:
        return None
    return integers(name, value, f"int32[{size}] ({meaning})", (size,))


def lengths(name: str, value: Argument, batch: int, most: int) -> jax.Array | None:
    """Rows that count in each batch row, 0 to `most`; None where the caller said nothing."""
    rows = int_vector(name, value, batch, "one length a batch row")
    return None if rows is None else jnp.clip(rows, 0, most)


def row_starts(name: str, value: Argument, rows: int, sequences: int | None = None) -> jax.Array:
    """int32[M + 1] of packed rows, of which there are `rows`: sequence i owns rows starts[i] to
    starts[i + 1]. Clipped to 0 .. rows and then never below an earlier one, so that whatever comes
    gives each row to one sequence at most; rows before the first and from the last on belong to
    none.
    """
    size = "M + 1" if sequences is None else str(sequences + 1)
    wanted = f"int32[{size}] (where each sequence's rows start, and where the last one's end)"
    starts = integers(name, value, wanted, (None if sequences is None else sequences + 1,))
    starts = sharding.whole(starts)
    if not starts.size:
        raise ValueError(f"{name}: expected {wanted}, got {starts.dtype}{list(starts.shape)}")
    starts = jnp.clip(starts, 0, rows)
    at = jnp.arange(starts.size, dtype=jnp.int32)
    earlier = jnp.where(at[None] <= at[:, None], starts[None], 0)
    return earlier.max(axis=1)  # a cummax, in one kernel


def known_starts(value: Argument, rows: int) -> np.ndarray | None:
    """`row_starts` where the numbers are known now, as in jit those of a captured array are."""
    starts = known(value)
    if starts is None or starts.ndim != 1 or starts.dtype.kind not in "iu":
        return None
    return np.maximum.accumulate(starts.clip(0, rows))


def change(
    rotary: Argument, norm: Argument, dim: int, stored: int, capacity: tuple[int, int]
) -> tuple[Change | None, dict[str, Any]]:
    """The norm and the rotation of rows of `dim` columns, which a cache keeps as `stored`, and the
    arrays that they read, by name. `capacity`: rows that its longest sequence was to have, and
    those that it holds: tables get rows of NaN for the others.
    """
    static: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    if norm is not None:
        if not isinstance(norm, RMSNorm):
            raise ValueError(f"norm: expected an RMSNorm or None, got {type(norm).__name__}")
        weight = sharding.whole(array("norm.weight", norm.weight))
        if weight.shape != (dim,) or not jnp.issubdtype(weight.dtype, jnp.floating):
            got = f"{weight.dtype}{list(weight.shape)}"
            raise ValueError(f"norm.weight: expected float[{dim}], a number a column, got {got}")
        eps = static_float("norm.eps", norm.eps, "it is part of the compiled kernel")
        if eps < 0:
            raise ValueError(f"norm.eps: expected a number of at least 0, got {eps:g}")
        if weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            weight = weight.astype(jnp.float32)
        arrays["norm_weight"] = jnp.pad(weight, (0, stored - dim)) if stored > dim else weight
        static |= {"eps": eps, "weight_dtype": str(weight.dtype)}
    if rotary is not None:
        if getattr(rotary, "rows", None) is not None:
            raise ValueError(
                "rotary: expected one without positions of its own, got that of `at`; rows of a "
                "cache stand where they lie"
            )
        least, held = capacity
        rows = f"{least} rows that a sequence of this cache may have"
        more, tables = rotation(rotary, dim, least, rows)
        if (missing := held - more["positions"]) > 0:
            more["positions"] = held
            pad = ((0, missing), (0, 0))
            tables = {n: jnp.pad(x, pad, constant_values=jnp.nan) for n, x in tables.items()}
        static |= more
        arrays |= tables
    return (Change(dim, **static) if static else None), arrays


def rotation(
    rotary: Argument, dim: int, positions: int, meaning: str
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Fields of `Change` for rows of `dim` columns, and the tables by name. `positions`: the least
    that tables must have, which are `meaning`.
    """
    if not isinstance(rotary, Rotary):
        raise ValueError(f"rotary: expected a Rotary or None, got {type(rotary).__name__}")
    cos, sin = (array(f"rotary.{name}", getattr(rotary, name)) for name in ("cos", "sin"))
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] < positions:
        raise ValueError(
            f"rotary.cos, rotary.sin: expected float[positions, pairs], positions at least the "
            f"{meaning}, got {list(cos.shape)} and {list(sin.shape)}"
        )
    for name, x in (("cos", cos), ("sin", sin)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"rotary.{name}: expected float[positions, pairs], got {x.dtype}{list(x.shape)}; "
                "Rotary.create(positions, dims) makes tables"
            )
    first, pairs = static_int(rotary.first), cos.shape[1]
    if first is None or first < 0 or pairs < 1 or first + 2 * pairs > dim:
        raise ValueError(
            f"rotary: expected columns within the {dim} of a row, got {2 * pairs} from column "
            f"{described(rotary.first)} on"
        )
    static = {"pairs": pairs, "first": first, "positions": cos.shape[0]}
    interleaved = boolean("rotary.interleaved", rotary.interleaved)
    tables = sharding.whole({"cos": cos.astype(jnp.float32), "sin": sin.astype(jnp.float32)})
    return static | {"interleaved": interleaved}, tables


def one_or_each(name: str, value: Argument, size: int, meaning: str) -> jax.Array:
    """int32[size], of a vector or of a scalar that serves all."""
    if getattr(value, "shape", None) == ():
        value = jnp.broadcast_to(value, (size,))
    return integers(name, value, f"int32[{size}] ({meaning}, or one int)", (size,))


def static_int(value: Argument) -> int | None:
    """A Python (or NumPy) integer as an int; None for anything else."""
    if isinstance(value, (bool, jax.Array)) or hasattr(value, "ndim") and value.ndim:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def scalar(name: str, value: Argument, wanted: str) -> tuple[int | jax.Array, Any]:
    """An int, or an int32 scalar, and its number; None where that is not known yet."""
    static = static_int(value)
    if static is not None:
        return static, static
    index = integers(name, value, wanted, ())
    return index, known(index)


def positive(none: bool = False, **sizes: int | None) -> None:
    """ValueError for a size that is no int of at least 1; `none`: None is one."""
    for name, size in sizes.items():
        if not (none and size is None) and (static_int(size) or 0) < 1:
            raise ValueError(f"{name}: expected an int of at least 1, got {described(size)}")


def dtype_name(value: Argument) -> str:
    """The name of a dtype; "" where it is none."""
    try:
        return str(jnp.dtype(value))
    except TypeError:
        return ""


def cache_dtype(name: str, value: Argument) -> None:
    """ValueError for a dtype in which no cache holds numbers: a write would lose them."""
    dtype = "" if value is None else dtype_name(value)  # NumPy takes None for float64
    if dtype not in CACHE_DTYPES:
        known = f"{', '.join(CACHE_DTYPES[:-1])} or {CACHE_DTYPES[-1]}"
        raise ValueError(f"{name}: expected numbers in {known}, got {dtype or described(value)}")


def offset(
    value: Argument, batch: int, each: str = "one a batch row"
) -> tuple[int, jax.Array | None]:
    """The argument `q_offset`, as an int or as int32[batch]."""
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


def segments(
    ids: Argument, batch: int, q_len: int, kv_len: int, axis: str | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """The segment ids of queries and of keys. `axis`: the mesh axis that splits their rows."""
    if ids is None:
        return None, None
    pair = ids if isinstance(ids, (tuple, list)) else (ids, ids)
    if len(pair) != 2:
        raise ValueError(
            f"segment_ids: expected a pair (of q, of kv) or one array for both, got {len(pair)} "
            "arrays"
        )
    if any(_is_wide(x) for x in pair):
        pair = _numbered(pair, axis)
    checked = []
    for name, of_rows, size in (("q", pair[0], q_len), ("kv", pair[1], kv_len)):
        wanted = f"int32[{batch}, {size}] for {name}"
        remedy = "; pass a pair (of q, of kv) where T and S differ"
        checked.append(integers("segment_ids", of_rows, wanted, (batch, size), remedy, False))
    return checked[0], checked[1]


def _is_wide(x: Argument) -> bool:
    """Whether these are integers of 64 bits."""
    dtype = getattr(x, "dtype", np.dtype("int32"))
    return dtype in (np.int64, np.uint64)


def _numbered(pair: Sequence[Argument], axis: str | None) -> list[Argument]:
    """Segment ids of 64 bits as int32 that are equal where these are: their low bits if int32 holds
    them all, else their places among all ids, in order.
    """
    if all(isinstance(x, np.ndarray) for x in pair):
        if all(map(in_int32, pair)):
            return list(pair)
        known = np.concatenate([x.ravel().astype(np.int64) for x in pair])
        numbers = np.unique(known, return_inverse=True)[1].astype(np.int32)
        parts = np.split(numbers, [pair[0].size])
        return [part.reshape(x.shape) for part, x in zip(parts, pair, strict=True)]
    ids = [jnp.asarray(x).astype(jnp.int64) for x in pair]
    every = jnp.concatenate([x.ravel() for x in ids])
    if axis is not None:  # devices compare theirs with those of others
        every = lax.all_gather(every, axis, tiled=True)
    fits = (every == every.astype(jnp.int32).astype(jnp.int64)).all()

    def places() -> list[jax.Array]:
        order = jnp.sort(every)
        return [jnp.searchsorted(order, x).astype(jnp.int32) for x in ids]

    return lax.cond(fits, lambda: [x.astype(jnp.int32) for x in ids], places)


def score(value: Argument, sizes: tuple[int | None, ...]) -> ScoreFunction:
    """A score function; `sizes` as in `check_reads`."""
    if not isinstance(value, ScoreFunction):
        raise ValueError(
            f"score: expected what score_fn(f, *aux) makes, or None, got {type(value).__name__}"
        )
    check_reads("score", value.program, sizes)
    return value


def bias_or_mask(
    name: str, value: Argument, scores: tuple[int, ...], kind: DTypeLike
) -> jax.Array | None:
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


def sink_logits(value: Argument, q: jax.Array) -> jax.Array | None:
    """The sinks of queries [.., N, H], in the dtype of logits."""
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
    if x.shape[-1] == dim:
        return x
    pads = (*((0, 0),) * (x.ndim - 1), (0, dim - x.shape[-1]))
    spec = PartitionSpec(*sharding.spec_of(x)[:-1], None)
    return sharding.on_automatic_axes(lambda x: jnp.pad(x, pads), (x,), spec)


def no_layer(layers: int, remedy: str) -> ValueError:
    """The error of a call that names none of several layers."""
    return ValueError(
        f"layer: expected 0 to {layers - 1} for a cache of {layers} layers, got None; {remedy}"
    )


def layer(value: Argument, layers: int | None) -> int | jax.Array | None:
    """The layer as an int or an int32 scalar; None where the cache has no layer axis. A value of
    None means the only layer.
    """
    if value is None:
        if layers not in (None, 1):
            raise no_layer(layers, "pass layer=l")
        return None if layers is None else 0
    index, number = scalar("layer", value, "an int or an int32 scalar")
    if number is not None and not 0 <= number < (layers or 1):
        raise ValueError(
            f"layer: expected 0 to {(layers or 1) - 1} for a cache of {layers or 1} layers, "
            f"got {number}"
        )
    if isinstance(index, int):
        return None if layers is None else index
    if layers is None:
        raise ValueError(
            "layer: the cache has no layer axis; leave layer out, or create the cache with "
            "layers=..."
        )
    return index
