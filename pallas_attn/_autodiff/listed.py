"""Attention of contiguous keys by lists of positions (`flash_attention(kv_indices=)`), and its
derivatives.

Rows of k and v [B, S, K, ..] are those of one kv head of one sequence, [B * S * K, ..], as they
lie; each query row and kv head is a query row of N / K heads, with a list of such rows. So the
forward is decode by lists, and a kernel makes the gradients of 16-bit arrays on Hopper
(`decode_listed/gradients_sm90.py`). Elsewhere XLA gathers the rows of some lists at a time, and
adds to gradients of k and v in float32: its memory is that of the gradients and of these rows.
Tangents, and derivatives of derivatives, are those of the reference, some lists at a time.

Sinks are added to the results by XLA, in one pass over out, since a launch has one sink for the
heads of all kv heads. jax differentiates that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import PyTreeDef

from pallas_attn._autodiff import linear
from pallas_attn._cache.attend import attend
from pallas_attn._call import batching, bind, checks, device, dispatch
from pallas_attn._call.bind import Call
from pallas_attn._call.problem import (
    DecodeInputs,
    DecodeProblem,
    ListedResiduals,
    of_nothing,
)
from pallas_attn._mesh import sharding
from pallas_attn.errors import described
from pallas_attn.masks import FULL, Mask
from pallas_attn.merge import add_sinks

Array = jax.Array
Arrays = tuple[Array, ...]
Results = tuple[Array, Array]  # out and lse

GATHERED = 2**24  # numbers of k or v that a step of the backward gathers, about


class Facts(NamedTuple):
    """Static facts of a call."""

    scale: float
    softcap: float | None
    precision: str | None
    implementation: str | None
    kv_heads: int = 1  # query row r of `Lists` is of kv head r % kv_heads


class Lists(NamedTuple):
    """Rows of queries, keys and values, and the lists."""

    q: Array  # [R, N / K, H]
    k: Array  # [B * S * K, H]
    v: Array  # [B * S * K, Hv]
    rows: Array  # int32[R, n], -1 for none


def attention(rows: tuple[Array, Array, Array], call: Call) -> tuple[Array, Array]:
    """out [B, T, N, Hv] and lse [B, N, T] of q, k, v, whose keys are listed."""
    dispatch.check_name(call.implementation)
    for name, default in REFUSED.items():
        if (value := getattr(call, name)) is not default:
            remedy = "give each sequence a batch row" if name == "packed" else "leave it out"
            raise ValueError(
                f"{name}: expected {default} beside kv_indices, got {described(value)}; {remedy}"
            )
    q, k, v = bind.operands(*rows)
    mask = _checked_mask(q, call)
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    wanted = (
        f"int32[{batch}, heads, {q_len}, n], heads {kv_heads} or 1 (n >= 1 positions a query row, "
        "-1 for none)"
    )
    indices = checks.integers("kv_indices", call.kv_indices, wanted, (batch, None, q_len, None))
    if indices.shape[1] not in (1, kv_heads) or not indices.shape[3]:
        raise ValueError(f"kv_indices: expected {wanted}, got int32{list(indices.shape)}")
    if batch * kv_len * kv_heads >= 2**31:
        raise ValueError(
            "k: expected B * S * K below 2**31 beside kv_indices, whose rows are counted in 32 "
            f"bits, got {batch} * {kv_len} * {kv_heads}; split the batch or the kv heads"
        )
    sinks = checks.sink_logits(call.sinks, q)
    scale, softcap = call.scale, call.softcap
    facts = Facts(
        dim**-0.5 if scale is None else checks.scale(scale),
        None if softcap is None else checks.softcap(softcap),
        checks.precision(call.precision, q.dtype),
        call.implementation,
    )
    lengths = checks.lengths("kv_lengths", call.kv_lengths, batch, kv_len)
    offset, offsets = checks.offset(call.q_offset, batch)
    bounds, mask = checks.mask_bounds(mask), mask.static
    optional = {"lengths": lengths, "offsets": offsets, **bounds}
    named = {name: x for name, x in optional.items() if x is not None}

    def attend(q: Array, k: Array, v: Array, indices: Array, *more: Array) -> Results:
        some = dict(zip(named, more, strict=False))
        first = offset if "offsets" not in some else some.pop("offsets").reshape(-1, 1, 1, 1)
        if len(more) > len(named):  # the number of this device's first query row
            first = first + more[-1]
        seen = Seen(mask.filled(**{x: some[x] for x in bounds}), first, some.get("lengths"))
        return _attention(facts, (q, k, v), _rows(indices, (k.shape[1], k.shape[2]), seen))

    arrays = (q, k, v, indices, *named.values())
    split = _split(q_heads, indices.shape[1], kv_heads, [x.ndim for x in named.values()])
    out, lse = sharding.by_parts(attend, arrays, split)
    if sinks is None:
        return out, lse
    specs = sharding.spec_of(out), sharding.spec_of(lse)
    return sharding.on_automatic_axes(_with_sinks, (out, lse, sinks), specs)


def _with_sinks(out: Array, lse: Array, sinks: Array) -> Results:
    some, lse = add_sinks(out.astype(lse.dtype), lse, sinks)
    return some.astype(out.dtype), lse


def _split(q_heads: int, listed: int, kv_heads: int, more: list[int]) -> sharding.Split:
    """The axes of a call. `listed`: heads of the lists; `more`: axes of each other array."""
    heads = "k" if q_heads == kv_heads else "g" if kv_heads == 1 else "k g"
    return sharding.Split(
        inputs=(
            *(("b", "t", heads, "h"), ("b", "s", "k", "h"), ("b", "s", "k", "e")),
            ("b", "k" if listed == kv_heads else "one", "t", "n"),
            *[("b",)[:ndim] for ndim in more],
        ),
        outputs=(("b", "t", heads, "e"), ("b", heads, "t")),
        free=("b", "t", heads.split()[0]),
        begins="t",
    )


def _attention(facts: Facts, arrays: tuple[Array, Array, Array], rows: Array) -> Results:
    """out [B, T, N, Hv] and lse [B, N, T] of q, k, v and lists of rows of k."""
    q, k, v = arrays
    (batch, q_len, q_heads, dim), heads, v_dim = q.shape, k.shape[2], v.shape[3]
    if 0 in (batch, q_len, k.shape[1]):
        wide = jnp.promote_types(q.dtype, jnp.float32)
        return of_nothing(q, v_dim, q.dtype, wide)
    q, k = (checks.widened(x, dim + -dim % 8) for x in (q, k))
    v = checks.widened(v, v_dim + -v_dim % 8)
    q = q.reshape(-1, q_heads // heads, q.shape[3])
    k, v = (x.reshape(-1, x.shape[3]) for x in (k, v))
    call = ListedCall(facts._replace(kv_heads=heads))
    out, lse = linear.differentiable(ListedAttention, call, Lists(q, k, v, rows))
    out = out.reshape(batch, q_len, q_heads, -1)[..., :v_dim]
    return out, jnp.swapaxes(lse.reshape(batch, q_len, q_heads), 1, 2)


def _checked_mask(q: Array, call: Call) -> Mask:
    """The mask; ValueError for masks and dtypes that do not go with lists."""
    if not isinstance(call.mask, Mask):
        raise ValueError(
            "mask: expected a Mask beside kv_indices, got "
            f"{type(call.mask).__name__}; leave hidden positions out of the lists"
        )
    if q.dtype.itemsize < 2 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            "q, k, v: expected floating-point numbers of 16 bits or more beside kv_indices, got "
            f"{q.dtype}; cast them"
        )
    return call.mask


# Arguments that lists do not go with, and their defaults.
REFUSED: dict[str, Any] = dict.fromkeys(
    ("score", "q_lengths", "segment_ids", "packed", "bias", "mask_array", "context", "rotary")
    + ("kv_blocks",)
)
REFUSED |= {"float8": False, "deterministic": False}


class Seen(NamedTuple):
    """Which of the listed positions count."""

    mask: Mask
    first: int | Array  # position of query row 0: one, or [B, 1, 1, 1]
    lengths: Array | None  # int32[B]


def _rows(indices: Array, sizes: tuple[int, int], seen: Seen) -> Array:
    """int32[B * T * K, n]: rows of k that a list names and the mask shows, -1 for none."""
    kv_len, kv_heads = sizes
    batch, _, q_len, n = indices.shape
    end = jnp.full(batch, kv_len, jnp.int32) if seen.lengths is None else seen.lengths
    query = seen.first + jnp.arange(q_len, dtype=jnp.int32).reshape(1, 1, -1, 1)
    exists = (indices >= 0) & (indices < end.reshape(-1, 1, 1, 1))
    key = jnp.where(exists, indices, 0)
    first = (jnp.arange(batch, dtype=jnp.int32) * kv_len).reshape(-1, 1, 1, 1)
    head = jnp.arange(kv_heads, dtype=jnp.int32).reshape(1, -1, 1, 1)
    rows = jnp.where(exists & seen.mask.allows(query, key), (first + key) * kv_heads, -1)
    rows = jnp.where(rows >= 0, rows + head, -1)  # [B, K, T, n]
    return jnp.swapaxes(rows, 1, 2).reshape(-1, n)


@dataclasses.dataclass(frozen=True)
class ListedCall:
    """A call: a static, hashable value."""

    facts: Facts

    def run(self, lists: Lists) -> Results:
        """out [R, N / K, Hv] and lse [R, N / K]."""
        return _attend(self.facts, lists)


@dataclasses.dataclass(frozen=True)
class ListedAttention:
    """A call as a function of q, k, v and the lists: a `linear.Function`."""

    call: ListedCall
    tree: PyTreeDef  # structure of `Lists`

    def evaluate(self, arrays: Arrays) -> Results:
        return self.call.run(Lists(*arrays))

    def named(self, results: Arrays) -> Arrays:
        out, lse = results
        out = checkpoint_name(out, "flash_attention_out")
        return out, checkpoint_name(lse, "flash_attention_lse")

    def derivative(self, moving: tuple[int, ...]) -> "AlongLists":
        return AlongLists(self.call.facts, moving)

    def dual(self, moving: tuple[int, ...]) -> None:
        """No launch computes results and tangents."""
        del moving


@dataclasses.dataclass(frozen=True)
class AlongLists:
    """The derivative of a call along some of q, k and v, by their numbers: a `linear.Linear`. Its
    residuals are q, k, v, the lists, out and lse.
    """

    facts: Facts
    moving: tuple[int, ...]

    def apply(self, residuals: Arrays, linear: Arrays) -> Arrays:
        return self.definition(residuals, linear)

    def transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        gradients = _gradients(self.facts, ListedResiduals(*residuals, *cotangents))
        return tuple(sharding.gradient_of(residuals[n], gradients[n]) for n in self.moving)

    def definition(self, residuals: Arrays, linear: Arrays) -> Arrays:
        run, own = self._of_moving(residuals)
        return jax.jvp(run, own, linear)[1]

    def definition_of_transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        run, own = self._of_moving(residuals)
        return jax.vjp(run, *own)[1](tuple(cotangents))

    def result_types(self, residuals: Arrays, linear: Arrays) -> linear.Types:
        del linear
        return tuple(jax.typeof(x) for x in residuals[4:])

    def linear_types(self, residuals: Arrays, cotangents: Arrays) -> linear.Types:
        del cotangents
        return tuple(jax.typeof(residuals[n]) for n in self.moving)

    def _of_moving(self, residuals: Arrays) -> tuple[Callable[..., Results], Arrays]:
        """The call as a function of the arrays of these numbers, and their values."""

        def run(*some: Array) -> Results:
            arrays = dict(enumerate(residuals[:4])) | dict(zip(self.moving, some, strict=True))
            return _by_reference(self.facts, Lists(*arrays.values()))

        return run, tuple(residuals[n] for n in self.moving)


def _problem(facts: Facts, lists: Lists) -> DecodeProblem:
    q, k, v, rows = lists
    return DecodeProblem(
        gpu=device.gpu_generation(),
        kind="stacked",
        dtype=str(q.dtype),
        cache_dtype=str(k.dtype),
        sequences=1,
        q_len=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=1,
        head_dim=q.shape[2],
        v_head_dim=v.shape[1],
        capacities=(k.shape[0],),
        mask=FULL,
        scale=facts.scale,
        softcap=facts.softcap,
        precision=facts.precision,
        listed=rows.shape[1],
    )


def _attend(facts: Facts, lists: Lists) -> Results:
    """out [R, N / K, Hv] and lse [R, N / K]."""
    q, k, v, rows = lists
    lengths = jnp.full(1, k.shape[0], jnp.int32)
    inputs = DecodeInputs(
        q[None], k[None, None], v[None, None], lengths, None, None, kv_indices=rows[None]
    )
    out, lse = attend(_problem(facts, lists), inputs, facts.implementation)
    return out[0], lse[0].T


def _some_at_a_time(rows: Array, width: int) -> tuple[int, int]:
    """Steps over all lists, and lists of a step, which reads rows of `width` numbers."""
    size = max(1, GATHERED // (rows.shape[1] * width))
    steps = -(-len(rows) // size)
    return steps, -(-len(rows) // steps) if steps else 1


def _cut(x: Array, steps: tuple[int, int], fill: float = 0) -> Array:
    """[steps, lists of a step, ..], filled up."""
    count, size = steps
    pads = ((0, count * size - len(x)),) + ((0, 0),) * (x.ndim - 1)
    return jnp.pad(x, pads, constant_values=fill).reshape(count, size, *x.shape[1:])


def _by_reference(facts: Facts, lists: Lists) -> Results:
    """`_attend` by operations that jax differentiates."""
    q, k, v, rows = lists
    wide = sharding.sum_dtype(q.dtype)
    steps = _some_at_a_time(rows, max(k.shape[1], v.shape[1]))
    keys, values = k.astype(wide), v.astype(wide)
    exact = facts._replace(implementation="reference", precision="highest")

    @jax.checkpoint
    def step(some: tuple[Array, Array]) -> Results:
        return _attend(exact, Lists(some[0].astype(wide), keys, values, some[1]))

    out, lse = lax.map(step, (_cut(q, steps), _cut(rows, steps, -1)))
    out, lse = (x.reshape(-1, *x.shape[2:])[: len(q)] for x in (out, lse))
    return out.astype(q.dtype), lse


def _gradients(facts: Facts, residuals: ListedResiduals) -> Arrays:
    """dq, dk and dv."""
    lists = Lists(*residuals[:4])
    problem = _problem(facts, lists)
    problem = dataclasses.replace(problem, op="listed_backward", kv_heads=facts.kv_heads)
    kernel = dispatch.of_derivative(problem, facts.implementation)
    if kernel is None:
        return _gradients_by_xla(facts, residuals)
    return batching.compiled_once(batching.listed_gradients, kernel, problem, residuals)


def _gradients_by_xla(facts: Facts, residuals: ListedResiduals) -> Arrays:
    q, k, v, rows, out, lse, *cotangents = residuals
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    d_out, d_lse = (x.astype(wide) for x in cotangents)
    # Everything is 0 for a row that sees no key.
    delta = (d_out * out.astype(wide)).sum(-1) - d_lse
    empty = lse == -jnp.inf
    lse, delta = jnp.where(empty, jnp.inf, lse), jnp.where(empty, 0, delta)
    d_out = jnp.where(empty[..., None], 0, d_out)
    steps = _some_at_a_time(rows, max(k.shape[1], v.shape[1]))

    def step(sums: tuple[Array, Array], some: tuple[Array, ...]) -> tuple[Any, Array]:
        q, d_out, lse, delta, rows = some
        there, at = (rows >= 0)[..., None], jnp.maximum(rows, 0)
        to = jnp.where(rows >= 0, rows, len(k))  # past the end: nothing is added
        keys, values = (jnp.where(there, x[at], 0).astype(wide) for x in (k, v))
        q = q.astype(wide)
        dot = functools.partial(jnp.einsum, precision="highest")
        logits = dot("rgh,rnh->rgn", q, keys) * facts.scale
        slope = jnp.asarray(facts.scale, wide)
        if facts.softcap is not None:
            bent = jnp.tanh(logits / facts.softcap)
            logits, slope = bent * facts.softcap, (1 - bent * bent) * facts.scale
        seen = (rows >= 0)[:, None]
        p = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0)
        dp = dot("rgh,rnh->rgn", d_out, values) - delta[..., None]
        ds = jnp.where(seen, p * dp * slope, 0)
        dk, dv = sums
        dk = dk.at[to].add(dot("rgn,rgh->rnh", ds, q), mode="drop")
        dv = dv.at[to].add(dot("rgn,rgh->rnh", p, d_out), mode="drop")
        return (dk, dv), dot("rgn,rnh->rgh", ds, keys)

    filled = [_cut(x, steps, fill) for x, fill in ((lse, jnp.inf), (delta, 0), (rows, -1))]
    each = _cut(q, steps), _cut(d_out, steps), *filled
    zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    sums = sharding.varying_like(zeros[0], *residuals), sharding.varying_like(zeros[1], *residuals)
    (dk, dv), dq = lax.scan(step, sums, each)
    dq = dq.reshape(-1, *q.shape[1:])[: len(q)]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
