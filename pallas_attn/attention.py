"""Flash attention: softmax(mask(softcap(scale * q k^T) + bias)) v, differentiable."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_attn._autodiff import float8 as float8_calls
from pallas_attn._autodiff import linear, listed
from pallas_attn._autodiff.derivative import Attention, KernelCall
from pallas_attn._call import batching, bind, block_lists, checks, dispatch
from pallas_attn._call.axes import of_attention
from pallas_attn._call.bind import Call
from pallas_attn._call.old_names import Old, renamed
from pallas_attn._call.problem import AttentionInputs, AttentionProblem, live, of_nothing
from pallas_attn._call.rotation import rotated
from pallas_attn._context_parallel import attention as attention_over_devices
from pallas_attn._context_parallel import heads
from pallas_attn._context_parallel.layout import Split
from pallas_attn._mesh import sharding
from pallas_attn.context import Context, checked, devices_of, shards_of
from pallas_attn.masks import CAUSAL, FULL, LONGEST, Mask, MaskFunction
from pallas_attn.rotary import Rotary
from pallas_attn.scores import ScoreFunction
from pallas_attn.values import Blocks, Float8, Packed

Array = jax.Array
Results = tuple[Array, Array]  # out and lse


def flash_attention(  # noqa: PLR0913
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | MaskFunction = FULL,
    score: ScoreFunction | None = None,
    scale: float | None = None,
    q_offset: int | Array = 0,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    packed: Packed | None = None,
    bias: Array | None = None,
    mask_array: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    precision: checks.Precision = None,
    deterministic: bool = False,
    context: Context | None = None,
    rotary: Rotary | None = None,
    float8: Float8 | bool = False,
    kv_blocks: Blocks | None = None,
    kv_indices: Array | None = None,
    implementation: str | None = None,
    **old: Unpack[Old],
) -> Array:
    """Attention of every query to the keys it may see.

    Args:
      q: `[B, T, N, H]`. N query heads share K kv heads: query head n reads kv head n // (N // K).
      k: `[B, S, K, H]`.
      v: `[B, S, K, Hv]`; Hv need not be H. Kernels take multiples of 8 up to 512: q, k and v of
        other head dims are zero-padded to a multiple of 8 first, which copies them.
      mask: the keys that a query sees: `FULL`, `CAUSAL`, `sliding_window(n)` or any `Mask(left,
        right)`, whose bounds may be traced. Query row i stands at position q_offset + i and key j
        at j; with the default q_offset a causal mask is top-left::

            T = 2, S = 4, q_offset = 0     q_offset = S - T = 2 (bottom-right)
            1 . . .                        1 1 1 .
            1 1 . .                        1 1 1 1

        Or a function of positions: `mask_fn(f, *aux)`, which combines with these by &, | and ~.
        Tiles of keys that it hides from all of some queries are not computed.
      score: a function of the scaled, capped scores, `score_fn(f, *aux)`. Differentiable, and so
        are its aux. The backward kernels add up gradients of arrays that are read at indices which
        depend on the batch row, the head, and at most one of the query's position, the key's and
        their distance. For other reads, and with a `context`, the reference computes them, some
        rows at a time, which takes far longer.
      scale: multiplies the logits; default H**-0.5. Static.
      q_offset: position of query row 0: an int, or int32[B]. Within -2**29 .. 2**29: an int outside
        is a ValueError, numbers of an array are clipped.
      q_lengths: int32[B], clipped to 0 .. T; rows at or past it give 0 and take no gradient.
      kv_lengths: int32[B], clipped to 0 .. S; keys and values at or past it are not used. Past a
        length there may be any numbers, NaN included: in q, k, v, bias, mask_array, segment_ids,
        and in the cotangents of out and lse.
      segment_ids: int32[B, T] and int32[B, S] as a pair, or one array for both: a query sees keys
        of its own segment.
      packed: sequences one behind the other, without a batch axis: `Packed(q_starts, kv_starts)`.
        Not with lengths, segment_ids, bias and mask_array.
      bias: floating point, broadcasts to `[B, N, T, S]`; added to the (scaled, capped) logits.
        Differentiable. A logit of -inf, or below -2.3e38, hides its key.
      mask_array: bool, broadcasts to `[B, N, T, S]`; False hides. Prefer `mask`, lengths and
        segment ids: they skip work.
      softcap: cap * tanh(logits / cap) after scale, before bias and mask. Static.
      sinks: float[N], one learned logit a head that takes part in the denominator only.
        Differentiable.
      precision: for float32 inputs, as in JAX: the default is JAX's default for float32 matmuls on
        the device (TF32 on Hopper), or better, and so is "high", which JAX takes for TF32 on GPUs;
        "highest" (or "float32") is float32-accurate.
      deterministic: whether gradients must have the same bits each time. The fastest kernel adds
        what many blocks contribute to dq in the order in which they come, so its last bits vary;
        True has them add in one order, or dq computed by a kernel of its own. All other results
        never vary. Static.
      context: within `jax.shard_map`, over a mesh axis that the rows of q, k and v are split over:
        the rows that each device has, and how they move (`Context`). T and S are those of this
        device; positions, q_offset, q_lengths and kv_lengths those of the whole sequence.
        segment_ids are those of this device's rows; a bias or mask_array has the T of this device
        and all keys, in the order of their positions. Static.
      rotary: RoPE of q and k before attention, by position, as `write_kv` and `decode_attention`
        have it: `Rotary.create(positions, dims)`. XLA computes it in float32, rounded once to q's
        dtype, and fuses it with the operations that make q and k. q, k and the tables have
        gradients. Positions are those that masks count: rows of the whole sequence, also with a
        `context`; rows within each sequence where they are packed; others by `Rotary.at`. With
        segment_ids they go on from document to document, which changes nothing: scores depend on
        differences of positions.
      float8: the scales of float8 q, k and v, and the dtype of the output: `Float8(q_scale=..)`.
        True trains with a float8 forward: 16-bit q, k and v are rounded to float8_e4m3fn, with a
        power of 2 as the scale of each 128 rows of a head, and the forward multiplies float8.
        Derivatives are those of 16-bit attention on the rounded numbers ("straight through").
        Static.
      kv_blocks: lists of blocks of keys for blocks of query rows: `Blocks(lists, 64)`. It takes no
        packed rows, no context, and of offsets an int.
      kv_indices: int32[B, K or 1, T, n], traced or not: a query row attends to these positions
        only, as in `decode_attention`: -1 is none, and so is a position that there is not or that
        `mask` hides; one that is listed twice counts twice. The forward is a kernel of decode; the
        backward gathers rows and adds to gradients of k and v in float32, in any order, by a kernel
        on Hopper (16 bits, head dims to 128), else by XLA. It goes with a `Mask`, scale, softcap,
        sinks, kv_lengths and q_offset.
      implementation: "sm90", "sm80", "reference", or None for the fastest that takes the problem.
        There is no silent fallback on a GPU; without one the reference is what runs. "sm100" are
        kernels for Blackwell that have never run on their GPU: only their name chooses them.
      old: earlier keywords. Each gives a DeprecationWarning that says what to write.

    Returns:
      `[B, T, N, Hv]`, or `[tokens, N, Hv]` of packed rows, in q's dtype; of float8 in bfloat16, or
      in its `out_dtype`.
      A row that sees no key is 0 and so are its gradients, also where S == 0.

    Differentiable in forward and reverse mode, any number of times, with every implementation;
    float8 arrays by the reference alone (train with `float8=True`).
    Kernels compute first derivatives, with few exceptions (some arrays of a score function,
    tangents of head dims above 256); the reference computes those, and a part of higher ones, some
    query rows at a time, which takes longer. Under
    `jax.checkpoint` a kernel's results have the names "flash_attention_out" and
    "flash_attention_lse": a policy that saves both
    (`jax.checkpoint_policies.save_only_these_names`) spares the backward pass a second forward.

    Example::

        >>> q = jnp.ones((1, 8, 2, 64))
        >>> pa.flash_attention(q, q, q, mask=pa.CAUSAL).shape
        (1, 8, 2, 64)
    """
    call = Call(
        mask=mask, score=score, scale=scale, softcap=softcap, bias=bias, mask_array=mask_array,
        q_offset=q_offset, q_lengths=q_lengths, kv_lengths=kv_lengths, segment_ids=segment_ids,
        packed=packed, sinks=sinks, precision=precision, deterministic=deterministic,
        context=context, rotary=rotary, float8=float8, kv_blocks=kv_blocks, kv_indices=kv_indices,
        implementation=implementation,
    )  # fmt: skip
    return _attend(q, k, v, renamed(call, old) if old else call)[0]


def flash_attention_with_lse(  # noqa: PLR0913
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | MaskFunction = FULL,
    score: ScoreFunction | None = None,
    scale: float | None = None,
    q_offset: int | Array = 0,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    packed: Packed | None = None,
    bias: Array | None = None,
    mask_array: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    precision: checks.Precision = None,
    deterministic: bool = False,
    context: Context | None = None,
    rotary: Rotary | None = None,
    float8: Float8 | bool = False,
    kv_blocks: Blocks | None = None,
    kv_indices: Array | None = None,
    implementation: str | None = None,
    **old: Unpack[Old],
) -> tuple[Array, Array]:
    """`flash_attention`, with the same arguments, and the log of each row's softmax denominator.

    Returns:
      out `[B, T, N, Hv]`, and lse `[B, N, T]` (`[N, tokens]` of packed rows), a natural log in
      float32 (float64 for float64 inputs), differentiable, the sink included;
      -inf for a row that sees no key.

    Example::

        >>> q = jnp.ones((1, 8, 2, 64))
        >>> out, lse = pa.flash_attention_with_lse(q, q, q)
        >>> out.shape, lse.shape
        ((1, 8, 2, 64), (1, 2, 8))
    """
    call = Call(
        mask=mask, score=score, scale=scale, softcap=softcap, bias=bias, mask_array=mask_array,
        q_offset=q_offset, q_lengths=q_lengths, kv_lengths=kv_lengths, segment_ids=segment_ids,
        packed=packed, sinks=sinks, precision=precision, deterministic=deterministic,
        context=context, rotary=rotary, float8=float8, kv_blocks=kv_blocks, kv_indices=kv_indices,
        implementation=implementation,
    )  # fmt: skip
    return _attend(q, k, v, renamed(call, old) if old else call)


def _attend(q: Array, k: Array, v: Array, call: Call) -> Results:
    """(out, lse) of a call. Each special case makes another call or problem of it, which lacks what
    it is about.
    """
    if call.kv_indices is not None:
        return listed.attention((q, k, v), call)
    if call.kv_blocks is not None:
        shown = block_lists.shown(q, k, call)
        return _attend(q, k, v, call._replace(mask=shown, kv_blocks=None))
    if call.float8 is not False and not isinstance(call.float8, Float8):
        call = call._replace(float8=checks.boolean("float8", call.float8))
    if call.rotary is not None:
        q, k = rotated((q, k, v), call)
        return _attend(q, k, v, call._replace(rotary=None))
    if call.packed is not None:
        out, lse = _bound(*bind.packed_attention(q, k, v, call), call)
        return out[0], lse[0]
    if call.context is not None and checked(call.context) and devices_of(call.context) == 1:
        call = call._replace(context=None)
    problem, inputs = bind.attention(q, k, v, call)
    if call.float8 is True and call.context is not None:
        raise ValueError("context: expected None with float8; leave one of them out")
    return _bound(problem, inputs, call)


def _bound(problem: AttentionProblem, inputs: AttentionInputs, call: Call) -> Results:
    """`_attend` of a problem and its inputs. Of `call` the context counts, float8 and the
    implementation.
    """
    implementation = call.implementation
    if implementation is not None:
        dispatch.check_name(implementation)
    if 0 in (problem.batch, problem.q_len, problem.kv_len):
        return batching.by_xla(_nothing_seen, inputs, problem)
    if problem.out_dtype is not None and call.context is not None:
        float8_calls.refuse_devices(problem)
    odd = problem.head_dim % 8 or problem.v_head_dim % 8
    if odd and problem.gpu is not None and implementation != "reference":
        return _attend_padded(problem, inputs, call)
    if call.context is not None:
        return _attend_over_devices(problem, inputs, call)
    if call.float8 is True:
        return float8_calls.straight_through(problem, inputs, implementation)
    if problem.out_dtype is not None:
        return float8_calls.of_float8(problem, inputs, implementation)
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    kernel = KernelCall(problem, implementation, chosen)
    traced = functools.partial(batching.traced_once, batching.attention, chosen, problem)
    out, lse = linear.differentiable(Attention, kernel, inputs, traced)
    return out, lse


def _attend_padded(problem: AttentionProblem, inputs: AttentionInputs, call: Call) -> Results:
    """`_bound` with head dims zero-padded to a multiple of 8; the scale stays that of the true
    head dim.
    """
    dim, v_dim = (
        problem.head_dim + -problem.head_dim % 8,
        problem.v_head_dim + -problem.v_head_dim % 8,
    )
    q, k = checks.widened(inputs.q, dim), checks.widened(inputs.k, dim)
    padded = dataclasses.replace(problem, head_dim=dim, v_head_dim=v_dim)
    inputs = inputs._replace(q=q, k=k, v=checks.widened(inputs.v, v_dim))
    out, lse = _bound(padded, inputs, call)
    return out[..., : problem.v_head_dim], lse


def _attend_over_devices(problem: AttentionProblem, inputs: AttentionInputs, call: Call) -> Results:
    """`_bound` for this device's rows of a sequence that several devices have."""
    context = call.context
    assert context is not None
    leaves, tree = jax.tree.flatten(inputs)
    if sharding.explicit_mesh(leaves) is not None:  # batch or heads, by axes beside the context's
        axes = of_attention(problem, tree, tuple([leaf.shape for leaf in leaves]))

        def local(*leaves: Array) -> tuple[Array, Array]:
            inputs = jax.tree.unflatten(tree, leaves)
            resized = batching.resized(problem, inputs)
            return _attend_over_devices(resized, inputs, call)

        free = tuple([factor for factor in axes.free if factor != "t"])
        axes = axes._replace(free=free, begins=None)
        nested = context.method != "heads"  # its derivative keeps everything that it moves
        out, lse = sharding.by_parts(local, leaves, axes, nested=nested)
        return out, lse
    split = Split(problem, call.implementation, context, shards_of(context))
    how = f"split it by in_specs, as P(None, {context.axis!r}), or leave context out"
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        sharding.check_split(context.axis, name, x, how)
    if context.method != "heads":
        return attention_over_devices.attend(split, inputs)
    problem, inputs = heads.by_heads(split, inputs)
    return heads.by_rows(split, *_bound(problem, inputs, call._replace(context=None)))


def _nothing_seen(inputs: AttentionInputs, problem: AttentionProblem) -> tuple[Array, Array]:
    """The results where an axis is empty, placed over devices as q is."""
    dtypes = problem.result_dtype, problem.lse_dtype
    return of_nothing(inputs.q, problem.v_head_dim, *dtypes)


def dot_product_attention(  # noqa: PLR0913
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | Array | tuple[int | Array, int | Array] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention`, argument for argument: replacing the import is enough.

    It takes `[B, T, N, H]` or `[T, N, H]`, and `implementation` also as "xla" or "cudnn", which
    mean None here. Where it differs from jax.nn, on purpose:

    - a row that sees no key gives 0; jax.nn gives the mean of the values it was told not to look
      at;
    - the residual is float32 and differentiable; jax.nn rounds it to the key's dtype and stops its
      gradient. Its shape is the same, `[B, T, N]`, and it is -inf for a row that sees no key;
    - value's head dim may differ from key's; lengths, masks and windows keep their cost down
      instead of adding a bias;
    - a traced scale is multiplied into query, and rounded to its dtype there; a mask or a bias of
      the wrong kind (numbers for a mask, bool for a bias) is a ValueError; local_window_size may be
      traced, as the bounds of a `Mask` may.

    Example::

        >>> q = jnp.ones((1, 8, 2, 64))
        >>> pa.dot_product_attention(q, q, q, is_causal=True).shape
        (1, 8, 2, 64)
    """
    arrays = [
        checks.array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    ]
    unbatched = arrays[0].ndim == 3
    q, k, v = (x[None] if x.ndim == 3 else x for x in arrays)
    band = _band(local_window_size)
    if bias is not None and jnp.issubdtype(checks.array("bias", bias).dtype, jnp.integer):
        bias = jnp.asarray(bias, jnp.float32)
    if isinstance(mask, Mask | MaskFunction):
        raise ValueError(
            f"mask: expected a bool array, as in jax.nn, got a {type(mask).__name__}; pass it to "
            "flash_attention, or say is_causal or local_window_size"
        )
    with _names_of_jax_nn(arrays):
        if isinstance(scale, jax.core.Tracer):
            q, scale = _scaled(q, scale, query_seq_lengths), 1.0
        out, lse = flash_attention_with_lse(
            q,
            k,
            v,
            mask=band & CAUSAL if checks.boolean("is_causal", is_causal) else band,
            scale=scale,
            q_lengths=query_seq_lengths,
            kv_lengths=key_value_seq_lengths,
            bias=bias,
            mask_array=mask,
            implementation=None if implementation in ("xla", "cudnn") else implementation,
        )
    residual = jnp.swapaxes(lse, 1, 2)
    if unbatched:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _band(local_window_size: checks.Argument) -> Mask:
    """The mask of a window as jax.nn takes it."""
    if local_window_size is None:
        return FULL
    both = local_window_size
    sides = tuple(both) if isinstance(both, (tuple, list)) else (both, both)
    try:
        left, right = (_unbounded_if_large(side) for side in sides)
        return Mask(left, right)
    except ValueError as error:
        traced = any(isinstance(side, jax.core.Tracer) for side in sides)
        got = "a traced array that is none" if traced else repr(local_window_size)
        raise ValueError(
            "local_window_size: expected an int, or a pair of ints (left, right), both of at least "
            f"0, or traced integer scalars, got {got}"
        ) from error


def _unbounded_if_large(side: checks.Argument) -> Any:
    """None for a bound that lies beyond every key."""
    static = checks.static_int(side)
    return None if static is not None and static >= LONGEST else side


def _scaled(q: Array, scale: Array, q_lengths: Array | None) -> Array:
    """q times a traced scale, whose gradient is a sum over all rows of q."""
    if scale.shape != ():
        raise ValueError(f"scale: expected a number, got {scale.dtype}{list(scale.shape)}")
    if q.ndim == 4:  # else an error, in the call itself
        q = live(q, checks.lengths("q_lengths", q_lengths, *q.shape[:2]))
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return (q.astype(wide) * scale.astype(wide)).astype(q.dtype)


_NAMES_OF_JAX_NN = {
    "q": "query",
    "k": "key",
    "v": "value",
    "q_lengths": "query_seq_lengths",
    "kv_lengths": "key_value_seq_lengths",
    "mask_array": "mask",
}


@contextlib.contextmanager
def _names_of_jax_nn(arrays: list[Array]) -> Iterator[None]:
    """Errors that name arguments as jax.nn does, with the shapes of query, key and value as they
    came where a batch axis was added to one of them.
    """
    try:
        yield
    except ValueError as error:
        text = re.sub(r"\b[a-z_]+\b", lambda m: _NAMES_OF_JAX_NN.get(m[0], m[0]), str(error))
        if any(x.ndim == 3 for x in arrays):
            shapes = zip(("query", "key", "value"), arrays, strict=True)
            came = ", ".join(f"{name} {x.shape}" for name, x in shapes)
            text += f" (a batch axis of 1 was added; what came: {came})"
        raise ValueError(text) from None
