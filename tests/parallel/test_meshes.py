"""Every public operation over a mesh, with automatic and explicit axes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa

B, T, S, N, K, H = 4, 8, 8, 4, 2, 8
QKV = {"q": "bth", "k": "b.h", "v": "b.h"}
PACKED = {"q": ".h", "k": ".h", "v": ".h"}
PLACE = {"b": "x", "B": "x", "t": "x", "h": "y", "H": "y"}


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def integers(seed, high, *shape, low=-1):
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


class Case(NamedTuple):
    call: Callable[..., Any]
    arrays: dict[str, Any]
    axes: dict[str, str]  # a letter an axis, as in PLACE; an array without letters is whole


def qkv(dtype=jnp.float32):
    arrays = {"q": draw(0, B, T, N, H), "k": draw(1, B, S, K, H), "v": draw(2, B, S, K, H)}
    return {name: x.astype(dtype) for name, x in arrays.items()}


def attention(more=None, axes=None, call=pa.flash_attention_with_lse, **options):
    arrays = qkv() | (more or {})
    return Case(functools.partial(call, **options), arrays, QKV | (axes or {}))


def gradients(q, k, v, **options):
    def loss(floats):
        out, lse = pa.flash_attention_with_lse(**floats, **options)
        return (out * jnp.cos(out)).sum() + lse.sum()

    return jax.grad(loss)({"q": q, "k": k, "v": v})


def all_gradients(**floats):
    fixed = {name: floats.pop(name) for name in tuple(floats) if floats[name].dtype == jnp.int32}
    if "slopes" in floats:
        fn = lambda s, b, h, q, kv, m: s - m[h] * (q - kv)  # noqa: E731

    def loss(floats):
        floats = dict(floats)
        options = {}
        if "slopes" in floats:
            options = {"score": pa.score_fn(fn, floats.pop("slopes"))}
        out, lse = pa.flash_attention_with_lse(**floats, **fixed, **options, mask=pa.CAUSAL)
        return (out * jnp.cos(out)).sum() + lse.sum()

    return jax.grad(loss)(floats)


def tangents(q, k, v, **options):
    run = functools.partial(pa.flash_attention_with_lse, **options)
    return jax.jvp(lambda q, k: run(q, k, v), (q, k), (jnp.cos(q), jnp.sin(k)))


def second(q, k, v):
    def loss(q):
        return (pa.flash_attention(q, k, v, mask=pa.CAUSAL) ** 2).sum()

    return jax.jvp(jax.grad(loss), (q,), (jnp.cos(q),))


def mapped(q, k, v, **options):
    run = functools.partial(pa.flash_attention_with_lse, mask=pa.CAUSAL, **options)
    return jax.vmap(run)(*(x[:, None] for x in (q, k, v)))


def mapped_q(q, k, v):
    run = functools.partial(pa.flash_attention_with_lse, mask=pa.CAUSAL)
    return jax.vmap(lambda q: run(q, k, v))(jnp.stack([q, 2 * q]))


def checkpointed(q, k, v):
    run = jax.checkpoint(lambda *x: pa.flash_attention(*x, mask=pa.CAUSAL))
    return jax.grad(lambda *x: (run(*x) ** 2).sum(), (0, 1, 2))(q, k, v)


def scores(q, k, v, slopes):
    score = pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), slopes)
    return pa.flash_attention_with_lse(q, k, v, score=score)


def documents(q, k, v, ids):
    mask = pa.mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids) & pa.CAUSAL
    return pa.flash_attention_with_lse(q, k, v, mask=mask)


def blocks_of_mask(q, k, v, ids):
    mask = pa.mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids) & pa.CAUSAL
    mask = mask.blocks(T, S, batch=B)
    return pa.flash_attention_with_lse(q, k, v, mask=mask)


def traced_window(q, k, v, left):
    return pa.flash_attention_with_lse(q, k, v, mask=pa.Mask(left, 0))


def rotated(q, k, v, at=None):
    rotary = pa.Rotary.create(positions=32, dims=H)
    return pa.flash_attention_with_lse(q, k, v, rotary=rotary, rotary_positions=at)


def float8(q, k, v, **lengths):
    return pa.flash_attention_with_lse(**pa.quantize_qkv(q, k, v, rows=4)._asdict(), **lengths)


def trained_in_float8(q, k, v):
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))

    def loss(q):
        return pa.flash_attention(q, k, v, float8=True).astype(jnp.float32).sum()

    return pa.flash_attention(q, k, v, float8=True, mask=pa.CAUSAL), jax.grad(loss)(q)


def packed(q, k, v, starts, kv_starts=None, **options):
    return pa.flash_attention_with_lse(
        q, k, v, q_starts=starts, kv_starts=kv_starts, mask=pa.CAUSAL, **options
    )


def packed_rotated(q, k, v, starts):
    return packed(q, k, v, starts, rotary=pa.Rotary.create(positions=32, dims=H))


def packed_gradients(q, k, v, starts):
    return jax.grad(lambda q, k, v: (packed(q, k, v, starts)[0] ** 2).sum(), (0, 1, 2))(q, k, v)


def listed_gradients(q, k, v, kv_indices):
    def loss(*x):
        return (pa.flash_attention(*x, kv_indices=kv_indices, mask=pa.CAUSAL) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def listed_tangents(q, k, v, kv_indices):
    run = functools.partial(pa.flash_attention, kv_indices=kv_indices)
    return jax.jvp(run, (q, k, v), (jnp.cos(q), k, v))


def dot_product(q, k, v, lengths):
    return pa.dot_product_attention(
        q, k, v, is_causal=True, key_value_seq_lengths=lengths, return_residual=True
    )


def merged(q, k, v):
    parts = [pa.flash_attention_with_lse(q, k[:, x], v[:, x]) for x in (slice(3), slice(3, S))]
    return pa.merge_attention(*zip(*parts, strict=True))


def merged_stacked(outs, lses):
    return pa.merge_attention(outs, lses)


def quantized(q, k, v, **lengths):
    return pa.quantize_qkv(q, k, v, rows=4, **lengths)


ROWS = {"q": draw(0, 5 + 8, N, H), "k": draw(1, 13, K, H), "v": draw(2, 13, K, H)}
STARTS = jnp.asarray([0, 3, 3, 9, 12], jnp.int32)
LENGTHS = jnp.asarray([5, 0, 8, 3], jnp.int32)
IDS = jnp.sort(integers(3, 3, B, T, low=0), axis=1)
BOOLS = draw(5, B, N, T, S) > -0.5

ATTENTION = {
    "plain": attention(),
    "causal": attention(mask=pa.CAUSAL),
    "window": attention(mask=pa.sliding_window(3), softcap=3.0),
    "window traced": attention({"left": jnp.int32(2)}, call=traced_window),
    "bias": attention({"bias": draw(4, B, N, T, S)}, {"bias": "bht"}),
    "bias of heads": attention({"bias": draw(4, N, 1, S)}, {"bias": "h"}),
    "mask array": attention({"mask_array": BOOLS}, {"mask_array": "bht"}),
    "mask array of batch": attention({"mask_array": BOOLS[:, :1]}, {"mask_array": "b.t"}),
    "sinks": attention({"sinks": draw(4, N)}, {"sinks": "h"}),
    "segment ids": attention({"segment_ids": (IDS, IDS[:, ::-1])}, {"segment_ids": "b"}),
    "lengths": attention(
        {"q_lengths": LENGTHS, "kv_lengths": LENGTHS[::-1]}, {"q_lengths": "b", "kv_lengths": "b"}
    ),
    "offset": attention(mask=pa.CAUSAL, q_offset=3),
    "offsets": attention({"q_offset": LENGTHS}, {"q_offset": "b"}, mask=pa.CAUSAL),
    "no keys": attention(call=lambda q, k, v: pa.flash_attention_with_lse(q, k[:, :0], v[:, :0])),
    "documents": attention({"ids": IDS}, call=documents),
    "documents split": attention({"ids": IDS}, {"ids": "b"}, call=documents),
    "mask blocks": attention({"ids": IDS}, {"ids": "b"}, call=blocks_of_mask),
    "kv_blocks": attention(
        {"kv_blocks": integers(6, 4, B, K, 2, 2)}, {"kv_blocks": "bh"}, block_size=(4, 2)
    ),
    "kv_blocks of all": attention(
        {"kv_blocks": integers(6, 4, 1, 1, 2, 2)}, block_size=(4, 2), mask=pa.CAUSAL
    ),
    "kv_indices": attention({"kv_indices": integers(7, S, B, K, T, 3)}, {"kv_indices": "bht"}),
    "kv_indices of all heads": attention(
        {"kv_indices": integers(7, S, B, 1, T, 3)},
        {"kv_indices": "b.t"},
        mask=pa.CAUSAL,
        softcap=2.0,
    ),
    "kv_indices gradients": attention(
        {"kv_indices": integers(7, S, B, K, T, 3)}, {"kv_indices": "bht"}, listed_gradients
    ),
    "kv_indices tangents": attention(
        {"kv_indices": integers(7, S, B, K, T, 3)}, {"kv_indices": "bht"}, listed_tangents
    ),
    "rotary": attention(call=rotated),
    "rotary at": attention({"at": integers(8, 32, B, T, low=0)}, {"at": "b."}, call=rotated),
    "score": attention({"slopes": draw(9, N)}, {"slopes": "h"}, call=scores),
    "gradients": attention(call=gradients, mask=pa.CAUSAL),
    "gradients of all": attention(
        {"bias": draw(4, 1, N, T, S), "sinks": draw(5, N)},
        {"bias": ".ht", "sinks": "h"},
        all_gradients,
    ),
    "gradients of a score": attention({"slopes": draw(9, N)}, {"slopes": "h"}, all_gradients),
    "tangents": attention(call=tangents, mask=pa.CAUSAL),
    "second derivative": attention(call=second),
    "checkpoint": attention(call=checkpointed),
    "vmap": attention(call=mapped),
    "vmap of q": attention(call=mapped_q),
    "float8": attention(call=float8),
    "float8 lengths": attention({"kv_lengths": LENGTHS}, {"kv_lengths": "b"}, float8),
    "float8 training": attention(call=trained_in_float8),
    "packed": Case(packed, ROWS | {"starts": STARTS}, PACKED),
    "packed otherwise": Case(
        packed, ROWS | {"starts": STARTS, "kv_starts": STARTS // 2, "q_offset": LENGTHS}, PACKED
    ),
    "packed rotary": Case(packed_rotated, ROWS | {"starts": STARTS}, PACKED),
    "packed gradients": Case(packed_gradients, ROWS | {"starts": STARTS}, PACKED),
    "dot_product_attention": Case(
        dot_product, qkv() | {"lengths": LENGTHS}, QKV | {"lengths": "b"}
    ),
    "merge": attention(call=merged),
    "merge stacked": Case(
        merged_stacked,
        {"outs": draw(0, 2, B, T, N, H), "lses": draw(1, 2, B, N, T)},
        {"outs": ".bth", "lses": ".bht"},
    ),
    "quantize": attention(call=quantized),
    "quantize lengths": attention(
        {"q_lengths": LENGTHS, "kv_lengths": LENGTHS}, {"q_lengths": "b"}, quantized
    ),
}

# ---- caches --------------------------------------------------------------------------------------

SIZES = {"kv_heads": K, "head_dim": H}
KINDS = {
    "stacked": functools.partial(pa.StackedCache.create, B, 16),
    "separate": functools.partial(pa.PerSequenceCache.create, (16, 24, 16, 20)),
    "paged": functools.partial(pa.PagedCache.create, B, 12, 4, capacity=16),
}
HELD = {
    "plain": {"dtype": jnp.float32},
    "int8": {"dtype": jnp.int8},
    "layers": {"dtype": jnp.float32, "layers": 2},
    "latent": {"dtype": jnp.float32, "shared_kv": True, "v_head_dim": 4, "kv_heads": K},
    "float8": {"dtype": jnp.float8_e4m3fn, "scales": False},
}


def cache_of(kind, held="plain"):
    cache = KINDS[kind](**SIZES | HELD[held])
    layers = {} if cache.layers is None else {"layer": 1}
    rows = draw(20, B, 6, K, H).astype(
        jnp.float32 if cache.dtype != jnp.float8_e4m3fn else cache.dtype
    )
    cache = cache.extend(jnp.asarray([6, 1, 4, 3]))
    return pa.write_kv(cache, rows, None if cache.shared_kv else rows[::-1], **layers)


def over(kind, call, more=None, axes=None, held="plain", cache=None):
    arrays = {"cache": cache_of(kind, held) if cache is None else cache} | (more or {})
    return Case(call, arrays, axes or {})


NEW = {"k": draw(1, B, 3, K, H), "v": draw(2, B, 3, K, H)}
NEW_AXES = {"k": "b.h", "v": "b.h"}
Q = {"q": draw(0, B, 3, N, H)}
Q_AXES = {"q": "b.h"}
STEP = NEW | Q, NEW_AXES | Q_AXES
PACKED_NEW = {"k": draw(1, 12, K, H), "v": draw(2, 12, K, H)}
PACKED_Q = {"q": draw(0, 12, N, H)}
PACKED_AXES = {"k": ".h", "v": ".h", "q": ".h"}
TREE = {"parents": integers(11, 2, B, 3)}


def change():
    norm = pa.RMSNorm(jnp.linspace(0.5, 2, H), 1e-5)
    return {"rotary": pa.Rotary.create(positions=40, dims=H), "norm": norm}


def append(cache, k, v, **options):
    return pa.append_kv(cache, k, None if cache.shared_kv else v, **options)


def append_changed(cache, k, v, **options):
    return pa.append_kv(cache, k, v, **options, **change())


def layered(cache, k, v, q, layer):
    cache = pa.write_kv(cache.extend(3), k, v, layer=layer)
    return cache, pa.decode_attention(q, cache, layer=layer)


def loop(cache, k, v, q):
    def step(cache, layer):
        cache = pa.write_kv(cache, k, v, layer=layer)
        return cache, pa.decode_attention(q, cache, layer=layer)

    return jax.lax.scan(step, cache.extend(3), jnp.arange(2, dtype=jnp.int32))


def decode(q, cache, **options):
    return pa.decode_attention_with_lse(q, cache, **options)


def decode_changed(q, cache, **options):
    return pa.decode_attention_with_lse(q, cache, **options, **change())


def decode_where(q, cache):
    mask = pa.CAUSAL & pa.mask_fn(lambda b, h, q, kv: (q + kv + b) % 3 > 0)
    return pa.decode_attention_with_lse(q, cache, mask=mask)


def decode_prefix(q, cache, other):
    return pa.decode_attention_with_lse(
        q, cache, prefix=pa.Prefix(other, jnp.asarray([0, 0, 1, 2]))
    )


def decode_shared(q, cache, starts=None):
    tokens = q.shape[0] if starts is not None else q.shape[1]
    shared = cache.shared_prefixes(tokens=tokens, starts=starts)
    return pa.decode_attention_with_lse(q, cache, shared_prefixes=shared, starts=starts)


def decode_made_tree(q, cache, parents, starts=None):
    tree = pa.DraftTree.create(parents, starts)
    return pa.decode_attention_with_lse(q, cache, parents=tree, starts=starts)


def keep(cache, counts, path=None):
    return cache.extend(3).keep(counts, path)


def bookkeeping(cache, counts):
    cache = cache.extend(counts).reset(1)
    return cache, cache.overflowed


def pages(cache):
    return cache.fork(0, 3, 5).extend(2).free(2)


def mapped_decode(q, cache):
    many = jax.tree.map(lambda x: jnp.stack([x, x]), (q, cache))
    return jax.vmap(pa.decode_attention)(*many)


def gradient_of_q(q, cache):
    return jax.grad(lambda q: (pa.decode_attention(q, cache) ** 2).sum())(q)


def bare(k_caches, v_caches, k, v, lengths):
    return pa.append_kv_arrays(k_caches, v_caches, k, v, lengths)


def bare_pages(k_caches, v_caches, k, v, lengths, page_table):
    return pa.append_kv_arrays(k_caches, v_caches, k, v, lengths, page_table=page_table)


def ragged(q, kv_pages, **options):
    sizes = {"kv_lens": jnp.asarray([6, 4, 5, 8]), "num_seqs": jnp.asarray([4])}
    table = jnp.arange(12, dtype=jnp.int32).reshape(B, 3)
    return pa.ragged_paged_attention(
        q, kv_pages, page_indices=table, cu_q_lens=STARTS, **sizes, **options
    )


def update(kv_pages, k, v):
    sizes = {"kv_lens": jnp.asarray([6, 4, 7, 8]), "num_seqs": jnp.asarray([4])}
    table = jnp.arange(12, dtype=jnp.int32).reshape(B, 3)
    return pa.update_kv_pages(kv_pages, k, v, page_indices=table, cu_q_lens=STARTS, **sizes)


def shared_pages():
    return cache_of("paged").fork(0, 1).fork(0, 3, 4)


CACHES = {}
for kind in KINDS:
    CACHES |= {
        f"{kind}: append": over(kind, append, NEW, NEW_AXES),
        f"{kind}: append some": over(
            kind, append, NEW | {"new_lengths": LENGTHS}, NEW_AXES | {"new_lengths": "b"}
        ),
        f"{kind}: append packed": over(kind, append, PACKED_NEW | {"starts": STARTS}, PACKED_AXES),
        f"{kind}: append changed": over(kind, append_changed, NEW, NEW_AXES),
        f"{kind}: append a tree": over(
            kind, append_changed, NEW | TREE, NEW_AXES | {"parents": "b"}
        ),
        f"{kind}: append int8": over(kind, append, NEW, NEW_AXES, "int8"),
        f"{kind}: append latent": over(kind, append, NEW, NEW_AXES, "latent"),
        f"{kind}: layers": over(
            kind, layered, STEP[0] | {"layer": jnp.int32(1)}, STEP[1], "layers"
        ),
        f"{kind}: loop": over(kind, loop, *STEP, "layers"),
        f"{kind}: decode": over(kind, decode, Q, Q_AXES),
        f"{kind}: decode one": over(kind, decode, {"q": Q["q"][:, 0]}, {"q": "bh"}),
        f"{kind}: decode int8": over(kind, decode, Q, Q_AXES, "int8"),
        f"{kind}: decode float8": over(kind, decode, Q, Q_AXES, "float8"),
        f"{kind}: decode latent": over(kind, decode, Q, Q_AXES, "latent"),
        f"{kind}: decode packed": over(kind, decode, PACKED_Q | {"starts": STARTS}, PACKED_AXES),
        f"{kind}: decode packed tree": over(
            kind,
            decode_made_tree,
            PACKED_Q | {"starts": STARTS, "parents": integers(12, 3, 12)},
            PACKED_AXES,
        ),
        f"{kind}: decode tree": over(kind, decode_changed, Q | TREE, Q_AXES | {"parents": "b"}),
        f"{kind}: decode tree in a window": over(
            kind, functools.partial(decode_made_tree), Q | TREE, Q_AXES | {"parents": "b"}
        ),
        f"{kind}: decode window": over(
            kind,
            functools.partial(decode, mask=pa.sliding_window(3)),
            Q | {"sinks": draw(3, N)},
            Q_AXES | {"sinks": "h"},
        ),
        f"{kind}: decode where": over(kind, decode_where, Q, Q_AXES),
        f"{kind}: decode changed": over(kind, decode_changed, Q, Q_AXES),
        f"{kind}: decode lists": over(
            kind, decode, Q | {"kv_indices": integers(13, 6, B, 3, 4)}, Q_AXES | {"kv_indices": "b"}
        ),
        f"{kind}: decode packed lists": over(
            kind,
            decode,
            PACKED_Q | {"starts": STARTS, "kv_indices": integers(13, 6, 12, 4)},
            PACKED_AXES,
        ),
        f"{kind}: prefix": over(kind, decode_prefix, Q | {"other": cache_of("stacked")}, Q_AXES),
        f"{kind}: keep": over(kind, keep, {"counts": LENGTHS // 3}, {"counts": "b"}),
        f"{kind}: keep path": over(
            kind,
            keep,
            {"counts": LENGTHS // 3, "path": integers(14, 3, B, 2)},
            {"counts": "b", "path": "b"},
            "layers",
        ),
        f"{kind}: keep int8": over(
            kind, keep, {"counts": jnp.int32(1), "path": integers(14, 3, B, 2)}, {}, "int8"
        ),
        f"{kind}: bookkeeping": over(kind, bookkeeping, {"counts": LENGTHS}, {"counts": "b"}),
        f"{kind}: vmap": over(kind, mapped_decode, Q, Q_AXES),
        f"{kind}: gradient": over(kind, gradient_of_q, Q, Q_AXES),
    }
POOL = draw(0, 12, 4, 2 * K, H)
CACHES |= {
    "paged: shared prefixes": over("paged", decode_shared, Q, Q_AXES, cache=shared_pages()),
    "paged: shared prefixes packed": over(
        "paged", decode_shared, PACKED_Q | {"starts": STARTS}, PACKED_AXES, cache=shared_pages()
    ),
    "paged: pages": over("paged", pages),
    "bare stacked": Case(
        bare,
        {"k_caches": draw(3, B, K, 16, H), "v_caches": draw(4, B, K, 16, H), "lengths": LENGTHS}
        | NEW,
        {"k_caches": "BH", "v_caches": "BH", "lengths": "b"} | NEW_AXES,
    ),
    "bare separate": Case(
        bare,
        {
            "k_caches": [draw(3, K, 16, H)] * B,
            "v_caches": [draw(4, K, 16, H)] * B,
            "lengths": LENGTHS,
        }
        | NEW,
        {"k_caches": "H", "v_caches": "H", "lengths": "b"} | NEW_AXES,
    ),
    "bare pages": Case(
        bare_pages,
        {
            "k_caches": draw(3, 12, K, 4, H),
            "v_caches": draw(4, 12, K, 4, H),
            "lengths": LENGTHS,
            "page_table": jnp.arange(12, dtype=jnp.int32).reshape(B, 3),
        }
        | NEW,
        {"k_caches": ".H", "v_caches": ".H"} | NEW_AXES,
    ),
    "ragged": Case(
        ragged, {"q": draw(0, 12, N, H), "kv_pages": POOL}, {"q": ".h", "kv_pages": "..H"}
    ),
    "ragged scaled": Case(
        functools.partial(ragged, sliding_window=3, k_scale=0.5, v_scale=2.0),
        {"q": draw(0, 12, N, H), "kv_pages": POOL.astype(jnp.float8_e4m3fn), "sinks": draw(1, N)},
        {"q": ".h", "kv_pages": "..H", "sinks": "h"},
    ),
    "update pages": Case(
        update, {"kv_pages": POOL} | PACKED_NEW, {"kv_pages": "..H"} | PACKED_AXES
    ),
}
CASES = ATTENTION | CACHES


def placements(case):
    """Sets of letters that are split."""
    letters = set("".join(case.axes.values())) - {"."}
    for name, x in case.arrays.items():
        if isinstance(x, pa.KVCache):
            letters |= {"H"} | ({"B"} if x.kind == "stacked" else set())
    some = ["", "b", "h", "bh", "t", "B", "H", "hH", "bB", "bhBH"]
    return sorted(
        {"".join(sorted(set(x) & letters)) for x in some if set(x) <= letters or len(x) > 2}
    )


def placed(case, letters, mesh):
    def spec(axes):
        return P(*(PLACE[x] if x in letters else None for x in axes))

    result = {}
    for name, tree in case.arrays.items():
        specs = jax.tree.map(lambda x, n=name: spec(case.axes.get(n, "")), tree)
        if isinstance(tree, pa.KVCache):
            over = {"heads": "y"} if "H" in letters else {}
            over |= {"sequences": "x"} if "B" in letters and tree.kind == "stacked" else {}
            specs = tree.specs(**over)
        result[name] = jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
    return result
