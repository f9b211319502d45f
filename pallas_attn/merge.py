"""Partial results of attention, each of some of the keys, combined by their log-sum-exp."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import checks
from pallas_attn._mesh import sharding

Array = jax.Array


def merge_attention(
    outs: Sequence[Array] | Array, lses: Sequence[Array] | Array
) -> tuple[Array, Array]:
    """The attention of the same queries to all the keys of several calls together.

    Args:
      outs: what the calls returned, `[B, T, N, Hv]` each (`[B, N, Hv]` for one token a sequence):
        a sequence of at least one, or one array with the partial results along its first axis.
      lses: their log-sum-exps, `[B, N, T]` each (`[B, N]`), as many and in the same order.

    Returns:
      out in the dtype of `outs`, and lse in that of `lses`; as one call would give them, whose keys
      are all those of the calls. A row that no call has a key for is 0, its lse -inf. A call whose
      lse is -inf in a row counts for nothing there, whatever its out holds, NaN included. One
      whose lse is inf, by a sink of inf, has all the weight there, and lse is inf; several share it
      equally.

    The sums are made in the dtype of `lses` (float32), one multiplication a partial result, in one
    pass of XLA over all of them. Differentiable in both, in either mode and any number of times. A
    sink must be in one of the calls only, and in one that sees a key in each row that any sees.

    Example::

        >>> q, k = jnp.ones((1, 4, 2, 64)), jnp.ones((1, 8, 2, 64))
        >>> parts = [pa.flash_attention_with_lse(q, x, x) for x in (k[:, :4], k[:, 4:])]
        >>> out, lse = pa.merge_attention(*zip(*parts))
        >>> bool(jnp.allclose(out, pa.flash_attention(q, k, k)))
        True
    """
    partials, stats = _arrays("outs", outs), _arrays("lses", lses)
    _check(partials, stats)
    of_out, of_lse = _AXES[partials[0].ndim]
    inputs = (*[of_out] * len(partials), *[of_lse] * len(stats))
    split = sharding.Split(inputs, (of_out, of_lse), free=of_out)
    out, lse = sharding.by_xla(_merged, (*partials, *stats), split)
    return out, lse


_AXES = {3: (("b", "n", "e"), ("b", "n")), 4: (("b", "t", "n", "e"), ("b", "n", "t"))}


def _merged(*arrays: Array) -> tuple[Array, Array]:
    """`merge_attention` of outs, and as many lses behind them."""
    partials, stats = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    dtype = stats[0].dtype
    shares, lse = _shares(stats)
    out = jnp.zeros(partials[0].shape, dtype)
    for partial, share, stat in zip(partials, shares, stats, strict=True):
        seen = jnp.where(_by_row(stat == -jnp.inf), 0, partial.astype(dtype))
        out = out + seen * _by_row(share)
    return out.astype(partials[0].dtype), lse


def add_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """out [B, T, N, Hv] and lse [B, N, T], in the dtype of sums, with a sink a head more in the
    denominator of each row that sees a key.
    """
    sinks = jnp.where(lse == -jnp.inf, -jnp.inf, sinks.astype(lse.dtype)[None, :, None])
    (share, _), with_sink = _shares([lse, sinks])
    return out * _by_row(share), with_sink


def _shares(lses: Sequence[Array]) -> tuple[list[Array], Array]:
    """The weights of partial results, by their log-sum-exps, and the log-sum-exp of all."""
    # Not `top == -inf`: XLA's maximum of nothing but NaN is -inf on a CPU.
    empty = jnp.stack([lse == -jnp.inf for lse in lses]).all(axis=0)
    most = jnp.finfo(lses[0].dtype).max
    levels = [jnp.where(lse == jnp.inf, most, lse) for lse in lses]
    top = jnp.where(empty, 0, lax.stop_gradient(jnp.stack(levels).max(axis=0)))
    weights = [jnp.exp(level - top) for level in levels]
    total = jnp.where(empty, 1, sum(weights[1:], weights[0]))
    shares, log = [weight / total for weight in weights], top + jnp.log(total)
    for lse, share in zip(lses, shares, strict=True):  # inf, with the derivative that has the limit
        log = log + jnp.where(lse == jnp.inf, lse * lax.stop_gradient(share), 0)
    return shares, jnp.where(empty, -jnp.inf, log)


def cotangents_of_part(
    own: tuple[Array, Array], rows: tuple[Array, Array, Array, Array]
) -> tuple[Array, Array]:
    """The cotangents of out and lse of some of the keys, by out, lse, d_out and d_lse of all keys
    (`rows`). Past a length these may be NaN: no row there sees a key.
    """
    out, lse, d_out, d_lse = rows
    own_out, own_lse = own
    seen = own_lse != -jnp.inf
    weight = jnp.where(seen, jnp.exp(own_lse - jnp.where(seen, lse, 0)), 0)
    weight = jnp.where(own_lse == jnp.inf, 1, weight)  # a sink made both inf
    by_row = _by_row(seen)
    d_out = jnp.where(by_row, d_out, 0).astype(lse.dtype)
    away = own_out.astype(lse.dtype) - jnp.where(by_row, out, 0).astype(lse.dtype)
    d_own_lse = weight * (jnp.where(seen, d_lse, 0) + (d_out * away).sum(-1).swapaxes(1, 2))
    return (d_out * _by_row(weight)).astype(own_out.dtype), d_own_lse


def _by_row(x: Array) -> Array:
    """[B, N, T] (or [B, N]) as it meets [B, T, N, Hv] (or [B, N, Hv])."""
    return (x.swapaxes(1, 2) if x.ndim == 3 else x)[..., None]


def _arrays(name: str, value: checks.Argument) -> list[Array]:
    try:
        each = list(sharding.whole(value, 1) if isinstance(value, Array) else value)
    except TypeError:
        kind = "a scalar" if hasattr(value, "shape") else type(value).__name__
        raise ValueError(
            f"{name}: expected a sequence of arrays, or one array with the partial results along "
            f"its first axis, got {kind}"
        ) from None
    return [checks.array(name, x) for x in each]


def _check(outs: list[Array], lses: list[Array]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"lses: expected one of each of the outs, and at least one, got {len(outs)} outs and "
            f"{len(lses)} lses"
        )
    first = outs[0]
    if first.ndim not in (3, 4):
        raise ValueError(
            f"outs: expected [B, T, N, Hv] or [B, N, Hv] each, got shape {first.shape}"
        )
    rows = first.shape[:-1] if first.ndim == 3 else tuple(first.shape[i] for i in (0, 2, 1))
    for name, arrays, shape in (("outs", outs, first.shape), ("lses", lses, rows)):
        for x in arrays:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(f"{name}: expected a floating-point dtype, got {x.dtype}")
            if x.shape != shape or x.dtype != arrays[0].dtype:
                raise ValueError(
                    f"{name}: expected {arrays[0].dtype}{list(shape)} each, as outs[0] "
                    f"{first.shape} says, got {x.dtype}{list(x.shape)}"
                )
