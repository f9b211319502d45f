"""Calls of all public operations on small arrays, with a letter for each axis that a mesh may
split: `b` batch rows or sequences, `t` query rows, `h` heads. Buffers of a cache have their own:
`B` sequences of a StackedCache, `H` kv heads.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from tests.support.problems import by_name

B, T, N, K, H = 4, 8, 4, 2, 8
TOKENS = 12  # packed rows


class Call(NamedTuple):
    function: Callable[..., Any]
    arrays: dict[str, Any]  # arguments: trees of arrays
    axes: dict[str, str]  # by argument, the letters of its first axes; "." is none

    def run(self, arrays: dict[str, Any]) -> Any:
        return self.function(**arrays)

    @property
    def letters(self) -> set[str]:
        """Letters that may be split."""
        kinds = {x.kind for x in self.arrays.values() if isinstance(x, pa.KVCache)}
        caches = "H" * bool(kinds) + "B" * ("stacked" in kinds)
        return set("".join(self.axes.values()) + caches) - {"."}


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def integers(seed, high, *shape, low=-1):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


def scalar_of(results):
    """A number that depends on all results that are finite."""
    finite = [
        jnp.where(jnp.isfinite(x), x.astype(jnp.float32), 0) for x in jax.tree.leaves(results)
    ]
    return sum((x * jnp.cos(x)).sum() for x in finite)


def gradients_of(function):
    """The gradients of all floats among the arguments of a function."""

    def gradients(**arrays):
        floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        return jax.grad(lambda some: scalar_of(function(**arrays | some)))(floats)

    return gradients


# ---- attention -----------------------------------------------------------------------------------

QKV = {"q": draw(0, B, T, N, H), "k": draw(1, B, T, K, H), "v": draw(2, B, T, K, H)}
QKV_AXES = {"q": "bth", "k": "b.h", "v": "b.h"}
ROWS = {"q": draw(0, TOKENS, N, H), "k": draw(1, TOKENS, K, H), "v": draw(2, TOKENS, K, H)}
ROWS_AXES = {"q": ".h", "k": ".h", "v": ".h"}
STARTS = jnp.asarray([0, 3, 3, 9, 11], jnp.int32)
LENGTHS = jnp.asarray([5, 0, 8, 3], jnp.int32)
IDS = jnp.sort(integers(3, 3, B, T, low=0), axis=1)
BOOLS = draw(5, B, N, T, T) > -0.5
LISTS = {"kv_indices": integers(7, T, B, K, T, 3)}
LISTS_AXES = {"kv_indices": "bht"}

attend = by_name.flash_attention_with_lse
causal = functools.partial(attend, mask=pa.CAUSAL)


def attention(function=attend, more=None, axes=None):
    return Call(function, QKV | (more or {}), QKV_AXES | (axes or {}))


def packed(function, more=None):
    return Call(function, ROWS | {"q_starts": STARTS} | (more or {}), ROWS_AXES)


def tangents(q, k, v, **options):
    run = functools.partial(attend, **options)
    return jax.jvp(lambda q, k: run(q, k, v), (q, k), (jnp.cos(q), jnp.sin(k)))


def second_derivative(q, k, v):
    gradient = jax.grad(lambda q: scalar_of(causal(q, k, v)))
    return jax.jvp(gradient, (q,), (jnp.cos(q),))


def mapped(q, k, v):
    return jax.vmap(causal)(*(x[:, None] for x in (q, k, v)))


def mapped_q(q, k, v):
    return jax.vmap(lambda q: causal(q, k, v))(jnp.stack([q, 2 * q]))


def biased_by_distance(q, k, v, slopes):
    score = pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), slopes)
    return causal(q, k, v, score=score)


def of_documents(ids):
    return pa.CAUSAL & pa.mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids)


def rotated(q, k, v, **options):
    return attend(q, k, v, rotary=pa.Rotary.create(positions=32, dims=H), **options)


def float8(q, k, v, **lengths):
    x = pa.quantize_qkv(q, k, v, rows=4, **lengths)
    return pa.flash_attention_with_lse(x.q, x.k, x.v, float8=x.scales, **lengths)


def trained_in_float8(q, k, v):
    return attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)), float8=True)


def dot_product(q, k, v, lengths):
    more = {"key_value_seq_lengths": lengths, "return_residual": True}
    return pa.dot_product_attention(q, k, v, is_causal=True, **more)


def merged(q, k, v):
    return pa.merge_attention(*zip(causal(q, k, v), attend(q, k, v), strict=True))


def quantized(q, k, v, **lengths):
    return pa.quantize_qkv(q, k, v, rows=4, **lengths)


ATTENTION = {
    "plain": attention(),
    "causal": attention(causal),
    "window": attention(functools.partial(attend, mask=pa.sliding_window(3), softcap=3.0)),
    "window traced": attention(
        lambda q, k, v, left: attend(q, k, v, mask=pa.Mask(left, 0)), {"left": jnp.int32(2)}
    ),
    "bias": attention(attend, {"bias": draw(4, B, N, T, T)}, {"bias": "bht"}),
    "bias of heads": attention(attend, {"bias": draw(4, N, 1, T)}, {"bias": "h"}),
    "mask_array": attention(attend, {"mask_array": BOOLS}, {"mask_array": "bht"}),
    "mask_array of batch": attention(attend, {"mask_array": BOOLS[:, :1]}, {"mask_array": "b.t"}),
    "sinks": attention(attend, {"sinks": draw(4, N)}, {"sinks": "h"}),
    "segment_ids": attention(attend, {"segment_ids": (IDS, IDS[:, ::-1])}, {"segment_ids": "b"}),
    "lengths": attention(
        attend,
        {"q_lengths": LENGTHS, "kv_lengths": LENGTHS[::-1]},
        {"q_lengths": "b", "kv_lengths": "b"},
    ),
    "q_offset": attention(functools.partial(causal, q_offset=3)),
    "q_offset of batch": attention(causal, {"q_offset": LENGTHS}, {"q_offset": "b"}),
    "no keys": attention(lambda q, k, v: attend(q, k[:, :0], v[:, :0])),
    "mask function": attention(
        lambda q, k, v, ids: attend(q, k, v, mask=of_documents(ids)), {"ids": IDS}, {"ids": "b"}
    ),
    "mask blocks": attention(
        lambda q, k, v, ids: attend(q, k, v, mask=of_documents(ids).blocks(T, T, batch=B)),
        {"ids": IDS},
        {"ids": "b"},
    ),
    "kv_blocks": attention(
        functools.partial(attend, block_size=(4, 2)),
        {"kv_blocks": integers(6, 4, B, K, 2, 2)},
        {"kv_blocks": "bh"},
    ),
    "kv_blocks of all": attention(
        functools.partial(causal, block_size=(4, 2)), {"kv_blocks": integers(6, 4, 1, 1, 2, 2)}
    ),
    "kv_indices": attention(attend, LISTS, LISTS_AXES),
    "kv_indices of all heads": attention(
        functools.partial(causal, softcap=2.0),
        {"kv_indices": LISTS["kv_indices"][:, :1], "kv_lengths": LENGTHS, "q_offset": LENGTHS // 2},
        {"kv_indices": "b.t", "kv_lengths": "b"},
    ),
    "kv_indices of one kv head": Call(
        attend,
        QKV
        | {"k": QKV["k"][:, :, :1], "v": QKV["v"][:, :, :1]}
        | {"kv_indices": LISTS["kv_indices"][:, :1]},
        {"q": "bth", "k": "b", "v": "b", "kv_indices": "b.t"},
    ),
    "kv_indices of odd dims": attention(
        attend, LISTS | {name: x[..., :6] for name, x in QKV.items()}, LISTS_AXES
    ),
    "kv_indices of no keys": attention(
        lambda q, k, v, **lists: attend(q, k[:, :0], v[:, :0], **lists), LISTS, LISTS_AXES
    ),
    "kv_indices gradients": attention(gradients_of(attend), LISTS, LISTS_AXES),
    "kv_indices tangents": attention(tangents, LISTS, LISTS_AXES),
    "rotary": attention(rotated),
    "rotary_positions": attention(
        rotated, {"rotary_positions": integers(8, 32, B, T, low=0)}, {"rotary_positions": "bt"}
    ),
    "score": attention(biased_by_distance, {"slopes": draw(9, N)}, {"slopes": "h"}),
    "gradients": attention(gradients_of(causal)),
    "gradients of all": attention(
        gradients_of(causal),
        {"bias": draw(4, 1, N, T, T), "sinks": draw(5, N)},
        {"bias": ".ht", "sinks": "h"},
    ),
    "gradients of a score": attention(
        gradients_of(biased_by_distance), {"slopes": draw(9, N)}, {"slopes": "h"}
    ),
    "gradients of rotary": attention(gradients_of(rotated)),
    "gradients again": attention(gradients_of(jax.checkpoint(causal))),
    "tangents": attention(functools.partial(tangents, mask=pa.CAUSAL)),
    "second derivative": attention(second_derivative),
    "vmap": attention(mapped),
    "vmap of q": attention(mapped_q),
    "float8": attention(float8),
    "float8 lengths": attention(float8, {"kv_lengths": LENGTHS}, {"kv_lengths": "b"}),
    "float8 training": attention(trained_in_float8),
    "float8 gradients": attention(gradients_of(trained_in_float8)),
    "packed": packed(causal),
    "packed otherwise": packed(causal, {"kv_starts": STARTS // 2, "q_offset": LENGTHS}),
    "packed rotary": packed(functools.partial(rotated, mask=pa.CAUSAL)),
    "packed gradients": packed(gradients_of(causal)),
    "dot_product_attention": attention(dot_product, {"lengths": LENGTHS}, {"lengths": "b"}),
    "merge_attention": attention(merged),
    "merge_attention stacked": Call(
        pa.merge_attention,
        {"outs": draw(0, 2, B, T, N, H), "lses": draw(1, 2, B, N, T)},
        {"outs": ".bth", "lses": ".bht"},
    ),
    "quantize_qkv": attention(quantized),
    "quantize_qkv lengths": attention(
        quantized, {"q_lengths": LENGTHS, "kv_lengths": LENGTHS}, {"q_lengths": "b"}
    ),
}

# ---- caches --------------------------------------------------------------------------------------

KINDS = {
    "stacked": functools.partial(pa.StackedCache.create, B, 16),
    "separate": functools.partial(pa.PerSequenceCache.create, (16, 24, 16, 20)),
    "paged": functools.partial(pa.PagedCache.create, B, 12, 4, capacity=16),
}
HELD = {
    "plain": {"dtype": jnp.float32},
    "layers": {"dtype": jnp.float32, "layers": 2},
    "int8": {"dtype": jnp.int8},
    "float8": {"dtype": jnp.float8_e4m3fn, "scales": False},
    "latent": {"dtype": jnp.float32, "shared_kv": True, "v_head_dim": 4},
    "one head": {"dtype": jnp.float32, "shared_kv": True, "v_head_dim": 4, "kv_heads": 1},
}
NEW = {"k": draw(1, B, 3, K, H), "v": draw(2, B, 3, K, H)}
NEW_AXES = {"k": "b.h", "v": "b.h"}
Q, Q_AXES = {"q": draw(0, B, 3, N, H)}, {"q": "b.h"}
PACKED_NEW = {"k": ROWS["k"], "v": ROWS["v"], "starts": STARTS}
PACKED_Q = {"q": ROWS["q"], "starts": STARTS}
TREE, TREE_AXES = {"parents": integers(11, 2, B, 3)}, {"parents": "b"}
COUNTS, COUNTS_AXES = {"counts": LENGTHS // 3}, {"counts": "b"}


def cache_of(kind, held="plain"):
    """A cache with some rows in each sequence."""
    cache = KINDS[kind](**{"kv_heads": K, "head_dim": H} | HELD[held])
    rows = draw(20, B, 6, cache.kv_heads, H)
    rows = rows if cache.quantized else rows.astype(cache.dtype)
    how = {"implementation": "reference"} | ({} if cache.layers is None else {"layer": 1})
    cache = cache.extend(jnp.asarray([6, 1, 4, 3]))
    return pa.write_kv(cache, rows, None if cache.shared_kv else rows[::-1], **how)


def over(kind, function, more=None, axes=None, held="plain"):
    return Call(function, {"cache": cache_of(kind, held)} | (more or {}), axes or {})


def changes():
    norm = pa.RMSNorm(jnp.linspace(0.5, 2, H), 1e-5)
    return {"rotary": pa.Rotary.create(positions=40, dims=H), "norm": norm}


def append(cache, k, v, **options):
    return pa.append_kv(cache, k, None if cache.shared_kv else v, **options)


def layered(cache, k, v, q, layer):
    cache = pa.write_kv(cache.extend(3), k, v, layer=layer)
    return cache, pa.decode_attention(q, cache, layer=layer)


def loop(cache, k, v, q):
    def step(cache, layer):
        cache = pa.write_kv(cache, k, v, layer=layer)
        return cache, pa.decode_attention(q, cache, layer=layer)

    return jax.lax.scan(step, cache.extend(3), jnp.arange(2, dtype=jnp.int32))


decode = pa.decode_attention_with_lse


def decode_where(q, cache):
    mask = pa.CAUSAL & pa.mask_fn(lambda b, h, q, kv: (q + kv + b) % 3 > 0)
    return decode(q, cache, mask=mask)


def decode_tree(q, cache, parents, starts=None, **options):
    parents = pa.DraftTree.create(parents, starts)
    return decode(q, cache, parents=parents, starts=starts, **options)


def decode_after_prefix(q, cache, other):
    return decode(q, cache, prefix=pa.Prefix(other, jnp.asarray([0, 0, 1, 2])))


def decode_shared(q, cache, starts=None):
    cache = cache.fork(0, 1).fork(0, 3, 4).extend(0)
    shared = cache.shared_prefixes(tokens=q.shape[int(starts is None)], starts=starts)
    return decode(q, cache, shared_prefixes=shared, starts=starts)


def bookkeeping(cache, counts):
    cache = cache.extend(counts).reset(1)
    return cache, cache.overflowed


def pages(cache):
    return cache.fork(0, 3, 5).extend(2).free(2)


def decode_mapped(q, cache):
    many = jax.tree.map(lambda x: jnp.stack([x, x]), (q, cache))
    return jax.vmap(pa.decode_attention)(*many)


def decode_gradient(q, cache):
    reference = functools.partial(decode, implementation="reference")
    return jax.grad(lambda q: scalar_of(reference(q, cache)))(q)


def _over_each(kind):
    changed, some = functools.partial(append, **changes()), {"new_lengths": LENGTHS}
    lists = {"kv_indices": integers(13, 6, B, 3, 4)}
    packed_lists = {"kv_indices": integers(13, 6, TOKENS, 4)}
    windowed = functools.partial(decode, mask=pa.sliding_window(3))
    path = {"path": integers(14, 3, B, 2)}
    keep = lambda cache, counts, path=None: cache.extend(3).keep(counts, path)  # noqa: E731
    other = {"other": cache_of("stacked")}
    return {
        "append": over(kind, append, NEW, NEW_AXES),
        "append some": over(kind, append, NEW | some, NEW_AXES | {"new_lengths": "b"}),
        "append packed": over(kind, append, PACKED_NEW, ROWS_AXES),
        "append changed": over(kind, changed, NEW, NEW_AXES),
        "append tree": over(kind, changed, NEW | TREE, NEW_AXES | TREE_AXES),
        "append int8": over(kind, append, NEW, NEW_AXES, "int8"),
        "append latent": over(kind, append, NEW, NEW_AXES, "latent"),
        "layers": over(
            kind, layered, NEW | Q | {"layer": jnp.int32(1)}, NEW_AXES | Q_AXES, "layers"
        ),
        "loop": over(kind, loop, NEW | Q, NEW_AXES | Q_AXES, "layers"),
        "decode": over(kind, decode, Q, Q_AXES),
        "decode one": over(kind, decode, {"q": Q["q"][:, 0]}, {"q": "bh"}),
        "decode int8": over(kind, decode, Q, Q_AXES, "int8"),
        "decode float8": over(kind, decode, Q, Q_AXES, "float8"),
        "decode latent": over(kind, decode, Q, Q_AXES, "latent"),
        "decode one head": over(kind, decode, Q, Q_AXES, "one head"),
        "decode packed": over(kind, decode, PACKED_Q, ROWS_AXES),
        "decode packed tree": over(
            kind, decode_tree, PACKED_Q | {"parents": integers(12, 3, TOKENS)}, ROWS_AXES
        ),
        "decode tree": over(
            kind, functools.partial(decode_tree, **changes()), Q | TREE, Q_AXES | TREE_AXES
        ),
        "decode window": over(kind, windowed, Q | {"sinks": draw(3, N)}, Q_AXES | {"sinks": "h"}),
        "decode where": over(kind, decode_where, Q, Q_AXES),
        "decode changed": over(kind, functools.partial(decode, **changes()), Q, Q_AXES),
        "decode lists": over(kind, decode, Q | lists, Q_AXES | {"kv_indices": "b"}),
        "decode packed lists": over(kind, decode, PACKED_Q | packed_lists, ROWS_AXES),
        "decode prefix": over(kind, decode_after_prefix, Q | other, Q_AXES),
        "decode vmap": over(kind, decode_mapped, Q, Q_AXES),
        "decode gradient": over(kind, decode_gradient, Q, Q_AXES),
        "keep": over(kind, keep, COUNTS, COUNTS_AXES),
        "keep path": over(kind, keep, COUNTS | path, COUNTS_AXES | {"path": "b"}, "layers"),
        "keep int8": over(kind, keep, {"counts": jnp.int32(1)} | path, {}, "int8"),
        "bookkeeping": over(kind, bookkeeping, COUNTS, COUNTS_AXES),
    }


def _bare(axes, caches, **more):
    arrays = {"k_caches": caches(3), "v_caches": caches(4), "lengths_before": LENGTHS} | NEW | more
    buffers = {"k_caches": axes, "v_caches": axes}
    return Call(pa.append_kv_arrays, arrays, NEW_AXES | buffers)


TABLE = jnp.arange(12, dtype=jnp.int32).reshape(B, 3)
POOL = {"kv_pages": draw(0, 12, 4, 2 * K, H)}
TABLES = {"page_indices": TABLE, "cu_q_lens": STARTS, "num_seqs": jnp.asarray([4], jnp.int32)}
TABLES |= {"kv_lens": jnp.asarray([6, 4, 7, 8], jnp.int32)}
RAGGED_AXES = ROWS_AXES | {"kv_pages": "..H"}
NARROW = {"kv_pages": POOL["kv_pages"].astype(jnp.float8_e4m3fn), "sinks": draw(1, N)}

OF_EACH_KIND = tuple(_over_each("stacked"))
CACHES = {f"{kind}: {name}": call for kind in KINDS for name, call in _over_each(kind).items()} | {
    "paged: decode shared": over("paged", decode_shared, Q, Q_AXES),
    "paged: decode packed shared": over("paged", decode_shared, PACKED_Q, ROWS_AXES),
    "paged: pages": over("paged", pages),
    "arrays stacked": _bare("BH", lambda seed: draw(seed, B, K, 16, H)),
    "arrays separate": _bare("H", lambda seed: [draw(seed, K, 16, H)] * B),
    "arrays paged": _bare(".H", lambda seed: draw(seed, 12, K, 4, H), page_table=TABLE),
    "ragged": Call(pa.ragged_paged_attention, POOL | TABLES | {"q": ROWS["q"]}, RAGGED_AXES),
    "ragged narrow": Call(
        functools.partial(pa.ragged_paged_attention, sliding_window=3, k_scale=0.5, v_scale=2.0),
        POOL | NARROW | TABLES | {"q": ROWS["q"]},
        RAGGED_AXES | {"sinks": "h"},
    ),
    "update_kv_pages": Call(
        pa.update_kv_pages, POOL | TABLES | {"k": ROWS["k"], "v": ROWS["v"]}, RAGGED_AXES
    ),
}
CALLS = ATTENTION | CACHES
