"""A representative set of compiled programs, and a digest of the machine code of each.

`python -m tests.support.aot --digest [NAME ...]` prints one line a build, or only those whose names
contain one of the given words. Whoever moves, renames or merges kernel code compares the lines from
before and after: the same digest is the same machine code.

Builds are said in terms of the public API, so they outlive any move. Numbers of registers and
predicates, offsets of spilled registers, labels and names are left out of a digest: ptxas assigns
them differently between builds of one tree. Instructions, their order, their other operands and
the constants they read all count.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from pallas_attn._call.problem import DecodeProblem, ListedResiduals
from pallas_lm import config as lm_config
from pallas_lm import decode as lm_decode
from pallas_lm import state as lm_state
from tests.support import aot, reach
from tests.support.problems import by_name

LM = lm_config.Config(
    vocab=1024,
    hidden=1024,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=128,
    mlp=2048,
    positions=1024,
    tied=True,
)


@dataclasses.dataclass(frozen=True)
class Build:
    """One program: `call(*shapes)` compiled for `target`, one of tests/support/aot.py's GPUs."""

    target: str
    call: Callable[..., Any]
    shapes: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    options: Any = None  # XLA's


def _forward(options, arrays):
    return by_name.flash_attention_with_lse(**arrays, **options)


def fetching(options, q, k, v):
    """Attention of rows that several GPUs have, in the order zigzag: "h100x2" for `compile_for`."""
    call = functools.partial(by_name.flash_attention, **options, context=pa.Context("cp", "zigzag"))
    spec = jax.P(None, "cp")
    with reach.assumed():
        return jax.shard_map(call, in_specs=spec, out_specs=spec)(q, k, v)


def _fetching(rows: int, heads: int, kv_heads: int, dim: int, **options: Any) -> Build:
    shapes = (_shape("bfloat16", 1, rows, n, dim) for n in (heads, kv_heads, kv_heads))
    return Build("h100x2", functools.partial(fetching, options), tuple(shapes))


def rows_of_a_cache(k, v, *rows):
    """Tokens that are appended and decoded one after the other, over a cache whose rows several
    GPUs have: q [1, tokens, N * H] and what is appended, whole on each.
    """

    def local(k, v, *rows):
        k, v = (x.reshape(1, -1, 8, 128).swapaxes(1, 2) for x in (k, v))
        lengths = jnp.full(1, 131000, jnp.int32)
        how = {"lengths": lengths, "new_lengths": 0 * lengths, "context": pa.Context("cp")}
        cache = pa.StackedCache(k=k, v=v, **how)

        def step(cache, row):
            q, k, v = (x.reshape(1, 1, -1, 128) for x in row)
            cache = pa.append_kv(cache, k, v)
            return cache, pa.decode_attention(q, cache)

        every = tuple(x[0] for x in rows)
        return jax.lax.scan(step, cache, every)[1].reshape(1, 1, -1)

    split, whole = jax.P(None, "cp"), jax.P()
    with reach.assumed():
        specs = {"in_specs": (split, split, whole, whole, whole), "out_specs": split}
        return jax.shard_map(local, **specs, check_vma=False)(k, v, *rows)


ROWS_OF_A_CACHE = tuple(
    jax.ShapeDtypeStruct((1, *size), jnp.bfloat16)
    for size in ((131072, 1024), (131072, 1024), (32, 4096), (32, 1024), (32, 1024))
)


def _backward(options, arrays):
    floats = {name: x for name, x in arrays.items() if name in ("q", "k", "v", "bias", "sinks")}
    rest = {name: x for name, x in arrays.items() if name not in floats}

    def loss(floats):
        return by_name.flash_attention(**floats, **rest, **options).astype(jnp.float32).sum()

    return jax.grad(loss)(floats)


def _shape(dtype: str, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def _attention(
    target: str,
    dim: int,
    *,
    heads: tuple[int, int] = (4, 4),
    rows: int = 1024,
    keys: int = 1024,
    dtype: str = "bfloat16",
    also: tuple[str, ...] = (),
    backward: bool = False,
    **options: Any,
) -> Build:
    batch = () if "q_starts" in also else (2,)
    k = _shape(dtype, *batch, keys, heads[1], dim)
    arrays: dict[str, Any] = {"q": _shape(dtype, *batch, rows, heads[0], dim), "k": k, "v": k}
    ids = _shape("int32", 2, rows)
    optional = {
        "bias": _shape("float32", 1, heads[0], rows, rows),
        "bias_16": _shape("bfloat16", 1, heads[0], rows, keys),
        "mask_array": _shape("bool", 2, 1, 1, keys),
        "mask_array_of_rows": _shape("bool", 2, 1, rows, keys),
        "sinks": _shape("float32", heads[0]),
        "kv_lengths": _shape("int32", 2),
        "q_lengths": _shape("int32", 2),
        "segment_ids": (ids, ids),
        "q_starts": _shape("int32", 9),
        "kv_blocks": _shape("int32", 1, heads[1], rows // 64, 4),
    }
    arrays |= {name.removesuffix("_16").removesuffix("_of_rows"): optional[name] for name in also}
    # Arguments, as they may hold arrays; what is static of them stays so.
    arrays |= {name: options.pop(name) for name in ("mask", "score") if name in options}
    call = functools.partial(_backward if backward else _forward, options)
    return Build(target, call, (arrays,))


def _decode_call(options, q, cache, arrays):
    return pa.decode_attention_with_lse(q, cache, **arrays, **options)


_SIZES = {"stacked": (16, 4096), "per_sequence": ([4096] * 16,), "paged": (16, 16 * 256, 16)}
_KINDS = {
    "stacked": pa.StackedCache,
    "per_sequence": pa.PerSequenceCache,
    "paged": pa.PagedCache,
}


def _cache(kind: str, **sizes: Any) -> Any:
    more = {"capacity": 4096} if kind == "paged" else {}
    sizes = {"kv_heads": 8, "head_dim": 128} | sizes
    return jax.eval_shape(lambda: _KINDS[kind].create(*_SIZES[kind], **more, **sizes))


def _decode(  # noqa: PLR0913
    target: str,
    kind: str,
    *,
    rows: int | None = 1,
    heads: int = 32,
    mask: Any = pa.CAUSAL,
    parents: bool = False,
    listed: int | None = None,
    sinks: bool = False,
    options: Any = (),
    **sizes: Any,
) -> Build:
    """`rows` of each sequence; None: packed. `parents`: they are drafts of a tree. `listed`:
    positions that a row attends to. `sinks`: with attention sinks.
    """
    dtype = sizes.get("dtype", "bfloat16")
    dtype = dtype if dtype in ("bfloat16", "float16", "float32") else "bfloat16"
    count = (_TOKENS,) if rows is None else (16, rows)
    q = _shape(dtype, *count, heads, sizes.get("head_dim", 128))
    arrays = {"mask": mask} | ({"starts": _STARTS} if rows is None else {})
    if parents:
        create, arguments = pa.DraftTree.create, [_shape("int32", *count)]
        if rows is None:
            create, arguments = functools.partial(create, drafts_most=64), [*arguments, _STARTS]
        arrays["parents"] = jax.eval_shape(create, *arguments)
    if listed:
        arrays["kv_indices"] = _shape("int32", *count, listed)
    if sinks:
        arrays["sinks"] = _shape("float32", heads)
    call = functools.partial(_decode_call, dict(options))
    return Build(target, call, (q, _cache(kind, **sizes), arrays))


def _with_slopes(build: Build) -> Build:
    """A decode with ALiBi."""
    q, cache, arrays = build.shapes
    slopes = np.ones(q.shape[-2], np.float32)
    score = pa.score_fn(lambda s, b, h, q, kv, t: s + t[h] * (kv - q), slopes)
    return dataclasses.replace(build, shapes=(q, cache, arrays | {"score": score}))


def _decode_shared(kind: str) -> Build:
    """Keys that sequences share: pages of one cache, or rows of another before them."""
    q = _shape("bfloat16", 16, 32, 128)
    if kind == "paged":
        cache = _cache("paged")
        shared = jax.eval_shape(pa.PagedCache.shared_prefixes, cache)
        return Build(
            "h100", functools.partial(_decode_call, {}), (q, cache, {"shared_prefixes": shared})
        )
    prefix = pa.Prefix(_cache(kind), _shape("int32", 16))
    return Build(
        "h100", functools.partial(_decode_call, {}), (q, _cache("stacked"), {"prefix": prefix})
    )


def _listed_gradients_call(kernel, problem, residuals):
    return kernel.run(residuals, problem, kernel.config.default(problem))


def _listed_gradients() -> Build:
    """Gradients of 4096 query rows of 16 heads, each with a list."""
    from pallas_attn.kernels.decode_listed import gradients_sm90

    rows, heads, keys, listed, dim = 4096, 16, 32768, 1024, 128
    sizes: Any = {"sequences": 1, "q_len": rows, "q_heads": heads, "kv_heads": 1, "listed": listed}
    sizes |= {"head_dim": dim, "v_head_dim": dim, "capacities": (keys,), "scale": 1.0}
    facts: Any = {"kind": "stacked", "dtype": "bfloat16", "cache_dtype": "bfloat16"}
    problem = DecodeProblem("sm90", mask=pa.FULL, **sizes, **facts)
    q, k = _shape("bfloat16", rows, heads, dim), _shape("bfloat16", keys, dim)
    lse = _shape("float32", rows, heads)
    residuals = ListedResiduals(q, k, k, _shape("int32", rows, listed), q, lse, q, lse)
    call = functools.partial(_listed_gradients_call, gradients_sm90.KERNEL, problem)
    return Build("h100", call, (residuals,))


_FLOAT8 = (("precision", jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32),)
_TOKENS, _STARTS = 1200, _shape("int32", 17)
_LATENT = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "shared_kv": True}


def _append_call(cache, k, v):
    return pa.write_kv(cache.extend(k.shape[1]), k, v)


def _packed_call(cache, k, v, starts):
    return pa.append_kv(cache, k, v, starts=starts)


def _changed_call(cache, k, v, rotary, norm):
    return pa.write_kv(cache.extend(k.shape[1]), k, v, rotary=rotary, norm=norm)


def _append(
    target: str, kind: str, rows: int, rotary: pa.Rotary | None = None, **sizes: Any
) -> Build:
    new = _shape("bfloat16", 16, rows, 8, 128)
    arrays = (_cache(kind, **sizes), new, new)
    if rotary is None:
        return Build(target, _append_call, arrays, donate=(0,))
    norm = pa.RMSNorm(_shape("bfloat16", 128))
    return Build(target, _changed_call, (*arrays, rotary, norm), donate=(0,))


def _latent_call(cache, k):
    return pa.write_kv(cache.extend(k.shape[1]), k)


def _append_bytes() -> Build:
    """Latent rows in FlashMLA's format."""
    cache = _cache("stacked", dtype="float8_e4m3fn", scales=128, **_LATENT)
    return Build("h100", _latent_call, (cache, _shape("bfloat16", 16, 1, 1, 576)), donate=(0,))


def _append_packed(target: str, kind: str, **sizes: Any) -> Build:
    new = _shape("bfloat16", _TOKENS, 8, 128)
    arrays = (_cache(kind, **sizes), new, new, _STARTS)
    return Build(target, _packed_call, arrays, donate=(0,))


def _interleaved(target: str, *, update: bool = False, page: int = 16, **options: Any) -> Build:
    """Packed rows over pages with K and V interleaved."""
    pages = _shape(options.pop("dtype", "bfloat16"), 4096, page, 16, 128)
    small = [_shape("int32", *sizes) for sizes in ((16,), (16, 256), (17,), (1,))]
    if update:
        new = _shape("bfloat16", _TOKENS, 8, 128)
        return Build(target, pa.update_kv_pages, (pages, new, new, *small), donate=(0,))
    q = _shape("bfloat16", _TOKENS, 32, 128)
    call = functools.partial(pa.ragged_paged_attention, **options)
    return Build(target, call, (q, pages, *small))


def _keep_call(cache, counts, path):
    return cache.keep(counts, path)


def _keep(target: str, kind: str, rows: int, **sizes: Any) -> Build:
    arrays = _cache(kind, **sizes), _shape("int32", 16), _shape("int32", 16, rows)
    return Build(target, _keep_call, arrays, donate=(0,))


_TABLE = _shape("float32", 4096, 64)


def _lm_call(options, params, cache, state):
    return lm_decode.steps.__wrapped__(LM, options, params, cache, state)


def _lm() -> Build:
    options = lm_decode.Options(cache="stacked", batch=4, capacity=512, chunk=8)
    params = jax.tree.map(
        lambda shape: _shape("bfloat16", *shape), LM.shapes(), is_leaf=lm_config.is_shape
    )
    cache = jax.eval_shape(lambda: options.create_cache(LM))
    state = jax.eval_shape(lambda: lm_decode.State.create(options))
    call = functools.partial(_lm_call, options)
    return Build("h100", call, (params, cache, state), (1, 2), lm_state.COMPILER)


def tangents(options, alone, q, k, v, *along):
    """Along all of q, k and v: `alone` beside the results, in one launch where there is one; else
    as jax.linearize has them.
    """
    attend = functools.partial(by_name.flash_attention_with_lse, **options)
    if alone:
        return jax.jvp(attend, (q, k, v), along)
    return jax.linearize(attend, q, k, v)[1](*along)


def _tangents(target: str, dim: int, alone: bool = False, **options: Any) -> Build:
    shapes = (_shape("bfloat16", 2, 1024, 4, dim),) * 6
    return Build(target, functools.partial(tangents, options, alone), shapes)


_attention_sm90 = functools.partial(_attention, "h100")
_attention_sm80 = functools.partial(_attention, "a100")
_backward_sm90 = functools.partial(_attention, "h100", backward=True)
_backward_sm80 = functools.partial(_attention, "a100", backward=True)
_float32_sm86 = functools.partial(_attention, "sm86", dtype="float32", precision="highest")
_CAUSAL, _WINDOW = {"mask": pa.CAUSAL}, {"mask": pa.sliding_window(100)}
_GROUP_WINDOW = {"heads": (64, 8), "also": ("sinks",), "mask": pa.sliding_window(128)}
_WINDOW_AT_RUN_TIME = pa.CAUSAL.filled(left=_shape("int32"))
_KV_BLOCKS = _CAUSAL | {"also": ("kv_blocks",), "block_size": 64}
_PACKED = {"rows": 4096, "keys": 4096, "also": ("q_starts",), "mask": pa.CAUSAL}
# A mask that reads an array, tile by tile, and a score function; and a mask that reads none.
_FUNCTIONS = {
    "mask": pa.mask_fn(lambda b, h, q, kv, i: i[b, q] == i[b, kv], np.zeros((2, 1024), np.int32)),
    "score": pa.score_fn(lambda s, b, h, q, kv, t: s + t[h, q - kv + 1024], np.ones((4, 2048))),
}
_ALIBI = {
    "mask": pa.CAUSAL,
    "score": pa.score_fn(lambda s, b, h, q, kv, t: s + t[h] * (kv - q), np.ones(4, np.float32)),
}
_BLOCKS = {"mask": pa.mask_fn(lambda b, h, q, kv: (q // 32 >= kv // 32) & ((q + kv) % 3 != h % 2))}

_QKV = tuple([_shape("bfloat16", 1, 1024, heads, 128) for heads in (8, 2, 2)])

BUILDS: dict[str, Build] = {
    "flash_fwd/sm90/h64_causal": _attention_sm90(64, **_CAUSAL),
    "flash_fwd/sm90/h128_full": _attention_sm90(128),
    "flash_fwd/sm90/h64_batch_rows": _attention_sm90(64, heads=(300, 300), rows=16, keys=16),
    "flash_fwd/sm90/float8_h128": _attention_sm90(128, dtype="float8_e4m3fn"),
    "flash_fwd/sm90/h128_causal_gqa": _attention_sm90(128, heads=(8, 2), **_CAUSAL),
    "flash_fwd/sm90/h128_fetched": _fetching(32768, 32, 8, 128, mask=pa.CAUSAL),
    "flash_fwd/sm90/h128_segments": _attention_sm90(128, also=("segment_ids",), **_CAUSAL),
    "flash_fwd/sm90/h128_claims": _attention_sm90(
        128, heads=(8, 2), rows=16384, keys=16384, also=("segment_ids",), **_CAUSAL
    ),
    "flash_fwd/sm90/h128_long": _attention_sm90(
        128, heads=(8, 2), rows=131072, keys=131072, **_CAUSAL
    ),
    "flash_fwd/sm90/h128_everything": _attention_sm90(
        128, also=("bias", "sinks", "kv_lengths", "q_lengths"), softcap=20.0, **_WINDOW
    ),
    "flash_fwd/sm90/h256_causal": _attention_sm90(256, **_CAUSAL),
    "flash_fwd/sm90/h512_causal": _attention_sm90(512, **_CAUSAL),
    "flash_fwd/sm90/h128_packed": _attention_sm90(128, **_PACKED),
    "flash_fwd/sm90/h64_functions": _attention_sm90(64, **_FUNCTIONS),
    "flash_fwd/sm90/h128_documents": _attention_sm90(128, mask=_FUNCTIONS["mask"] & pa.CAUSAL),
    "flash_fwd/sm90/h128_alibi": _attention_sm90(128, **_ALIBI),
    "flash_fwd/sm90/h128_mask_fn": _attention_sm90(128, **_BLOCKS),
    "flash_fwd/sm90/h128_kv_blocks": _attention_sm90(128, heads=(8, 2), **_KV_BLOCKS),
    "flash_fwd/sm90/h128_window_at_run_time": _attention_sm90(128, mask=_WINDOW_AT_RUN_TIME),
    "flash_fwd/sm90/h32_windows": _attention_sm90(32, heads=(128, 128), rows=49, keys=49),
    "flash_fwd/sm90/h64_group_window": _attention_sm90(64, **_GROUP_WINDOW),
    "flash_fwd/sm90/h72_any_size": _attention_sm90(72, rows=729, keys=729),
    "flash_fwd/sm90/h64_float32": _attention_sm90(64, dtype="float32", **_CAUSAL),
    "flash_fwd/sm90/h128_float32_highest": _attention_sm90(
        128, dtype="float32", precision="highest"
    ),
    "flash_fwd/sm100/h128_causal": _attention("b200", 128, implementation="sm100", **_CAUSAL),
    "flash_fwd/sm80/h64_causal": _attention_sm80(64, **_CAUSAL),
    "flash_fwd/sm80/h128_full": _attention_sm80(128),
    "flash_fwd/sm80/h256_lengths": _attention_sm80(256, also=("kv_lengths",), **_CAUSAL),
    "flash_fwd/sm80/h512_full": _attention_sm80(512),
    "flash_fwd/sm80/h64_packed": _attention_sm80(64, **_PACKED),
    "flash_fwd/sm80/h64_padded": _attention_sm80(64, also=("mask_array",)),
    "flash_fwd/sm80/h64_clipped": _attention_sm80(64, rows=333, keys=333, also=("bias_16",)),
    "flash_fwd/sm80/h64_functions": _attention_sm80(64, **_FUNCTIONS),
    "flash_fwd/sm80/h128_float32": _attention_sm80(128, dtype="float32", **_CAUSAL),
    "flash_fwd/sm89/float8_h128": _attention("sm89", 128, dtype="float8_e4m3fn"),
    "flash_fwd/sm86/h256_float32_highest": _float32_sm86(256),
    "flash_bwd/sm90/h64_causal": _backward_sm90(64, **_CAUSAL),
    "flash_bwd/sm90/h128_full": _backward_sm90(128),
    "flash_bwd/sm90/h128_deterministic": _backward_sm90(128, deterministic=True, **_CAUSAL),
    "flash_bwd/sm90/h128_turns": _backward_sm90(
        128, heads=(64, 8), rows=8192, keys=8192, deterministic=True
    ),
    "flash_bwd/sm90/h128_turns_causal": _backward_sm90(
        128, heads=(64, 8), rows=8192, keys=8192, deterministic=True, **_CAUSAL
    ),
    "flash_bwd/sm90/h128_long": _backward_sm90(
        128, heads=(8, 2), rows=65536, keys=65536, **_CAUSAL
    ),
    "flash_bwd/sm90/h128_claims": _backward_sm90(
        128, heads=(8, 2), rows=32768, keys=32768, also=("segment_ids",), **_CAUSAL
    ),
    "flash_bwd/sm90/h256_causal": _backward_sm90(256, **_CAUSAL),
    "flash_bwd/sm90/h512_causal": _backward_sm90(512, **_CAUSAL),
    "flash_bwd/sm90/h64_group7_short": _backward_sm90(64, heads=(14, 2), **_CAUSAL),
    "flash_bwd/sm90/h128_mqa": _backward_sm90(128, heads=(16, 1), **_CAUSAL),
    "flash_bwd/sm90/h256_mqa": _backward_sm90(256, heads=(8, 1)),
    "flash_bwd/sm90/h64_window": _backward_sm90(64, **_WINDOW),
    "flash_bwd/sm90/h64_group_window": _backward_sm90(64, **_GROUP_WINDOW),
    "flash_bwd/sm90/h72_short": _backward_sm90(72, rows=49, keys=64),
    "flash_bwd/sm90/h128_short": _backward_sm90(128, rows=49, keys=64),
    "flash_bwd/sm90/h128_joined": _backward_sm90(128, rows=17, keys=17),
    "flash_bwd/sm90/h64_heads": _backward_sm90(64, heads=(130, 130), rows=197, keys=197),
    "flash_bwd/sm90/h40_cross": _backward_sm90(40, heads=(8, 8), rows=4096, keys=77),
    "flash_bwd/sm90/h72_odd": _backward_sm90(72, rows=729, keys=729),
    "flash_bwd/sm90/h136_odd": _backward_sm90(136, rows=577, keys=577),
    "flash_bwd/sm90/h64_bias": _backward_sm90(64, also=("bias", "sinks", "kv_lengths")),
    "flash_bwd/sm90/h64_padded": _backward_sm90(64, also=("mask_array", "bias_16")),
    "flash_bwd/sm90/h64_packed": _backward_sm90(64, **_PACKED),
    "flash_bwd/sm90/h64_functions": _backward_sm90(64, **_FUNCTIONS),
    "flash_bwd/sm90/h128_kv_blocks": _backward_sm90(128, heads=(8, 2), **_KV_BLOCKS),
    "flash_bwd/sm90/h128_float32_highest": _backward_sm90(
        128, dtype="float32", precision="highest", **_CAUSAL
    ),
    "flash_bwd/sm90/h64_mask_of_rows": _backward_sm90(64, also=("mask_array_of_rows",)),
    "flash_jvp/sm90/h128_causal": _tangents("h100", 128, mask=pa.CAUSAL),
    "flash_jvp/sm90/h64_dual": _tangents("h100", 64, alone=True, mask=pa.CAUSAL),
    "flash_jvp/sm90/h128_dual": _tangents("h100", 128, alone=True),
    "flash_jvp/sm80/h64_causal": _tangents("a100", 64, alone=True, mask=pa.CAUSAL),
    "flash_bwd/sm100/h128_causal": _attention(
        "b200", 128, backward=True, implementation="sm100", **_CAUSAL
    ),
    "flash_bwd/sm80/h512_causal": _backward_sm80(512, **_CAUSAL),
    "flash_bwd/sm80/h64_causal": _backward_sm80(64, **_CAUSAL),
    "flash_bwd/sm80/h128_full": _backward_sm80(128),
    "flash_bwd/sm80/h64_bias": _backward_sm80(64, also=("bias",)),
    "flash_bwd/sm80/h64_packed": _backward_sm80(64, **_PACKED),
    "flash_bwd/sm80/h64_functions": _backward_sm80(64, **_FUNCTIONS),
    "flash_bwd/sm80/h128_float32": _backward_sm80(128, dtype="float32"),
    "flash_bwd/sm86/h256_float32_highest": _float32_sm86(256, backward=True),
    "decode/sm90/stacked": _decode("h100", "stacked"),
    "decode/sm90/per_sequence_rows8": _decode("h100", "per_sequence", rows=8),
    # 16 bits where blocks have less than a head each; and few keys, too.
    "decode/sm90/stacked_few_heads": _decode("h100", "stacked", heads=20, kv_heads=5),
    "decode/sm90/stacked_few_keys": _decode("h100", "stacked", heads=8, kv_heads=2),
    "decode/sm90/stacked_sinks": _decode("h100", "stacked", sinks=True),
    "decode/sm90/paged_window": _decode("h100", "paged", **_WINDOW),
    "decode/sm90/paged": _decode("h100", "paged"),
    "decode/sm90/paged_int8": _decode("h100", "paged", dtype="int8"),
    "decode/sm90/stacked_float8": _decode("h100", "stacked", dtype="float8_e4m3fn"),
    "decode/sm90/stacked_float32": _decode("h100", "stacked", dtype="float32"),
    "decode/sm90/stacked_window_invariant": _decode(
        "h100", "stacked", options=(("batch_invariant", True),), **_WINDOW
    ),
    "decode/sm90/stacked_window_at_run_time": _decode("h100", "stacked", mask=_WINDOW_AT_RUN_TIME),
    "decode/sm80/stacked": _decode("a100", "stacked"),
    "decode/sm80/paged_float8": _decode("a100", "paged", dtype="float8_e4m3fn"),
    "decode/sm80/stacked_packed": _decode("a100", "stacked", rows=None),
    "decode/sm90/paged_tree": _decode("h100", "paged", rows=4, parents=True),
    "decode/sm80/stacked_tree": _decode("a100", "stacked", rows=16, parents=True),
    "decode/sm80/paged_packed_tree": _decode("a100", "paged", rows=None, parents=True),
    "decode/sm90/stacked_alibi": _with_slopes(_decode("h100", "stacked")),
    "decode/sm80/paged_packed_alibi": _with_slopes(_decode("a100", "paged", rows=None)),
    "decode/sm90/stacked_mask_fn": _decode("h100", "stacked", mask=pa.CAUSAL & _BLOCKS["mask"]),
    # Two launches, the other of prefill's kernel.
    "decode/sm90/interleaved": _interleaved("h100"),
    "decode/sm90/interleaved_float8": _interleaved(
        "h100", dtype="float8_e4m3fn", page=64, k_scale=0.5
    ),
    "decode/sm80/interleaved": _interleaved("a100"),
    "decode/sm90/stacked_wide": _decode("h100", "stacked", kv_heads=4, head_dim=512),
    "decode/sm90/paged_int8_wide": _decode(
        "h100", "paged", rows=4, kv_heads=4, head_dim=512, dtype="int8"
    ),
    "decode/sm80/stacked_float32_wide": _decode(
        "a100", "stacked", kv_heads=4, head_dim=512, dtype="float32"
    ),
    "decode/sm90/stacked_rows_split": Build("h100x2", rows_of_a_cache, ROWS_OF_A_CACHE),
    "decode_mla/sm90/heads16_tree": _decode(
        "h100", "stacked", rows=2, heads=16, parents=True, **_LATENT
    ),
    "decode_mla/sm90/heads16_alibi": _with_slopes(_decode("h100", "paged", heads=16, **_LATENT)),
    "decode_mla/sm90/heads128": _decode("h100", "stacked", heads=128, **_LATENT),
    "decode_mla/sm90/heads64_rows4": _decode(  # partials are combined by the last block
        "h100", "paged", rows=4, heads=64, sinks=True, **_LATENT
    ),
    "decode_mla/sm90/heads16_paged": _decode("h100", "paged", heads=16, **_LATENT),
    "decode_mla/sm80/per_sequence": _decode("a100", "per_sequence", heads=16, **_LATENT),
    "decode_mla/sm90/heads16_bytes": _decode(
        "h100", "stacked", heads=16, dtype="float8_e4m3fn", scales=128, **_LATENT
    ),
    "decode_mla/sm90/heads16_packed": _decode("h100", "paged", rows=None, heads=16, **_LATENT),
    "decode_mla/sm90/heads16_packed_tree": _decode(
        "h100", "paged", rows=None, heads=16, parents=True, **_LATENT
    ),
    "decode_listed/latent_sm90/heads128": _decode(
        "h100", "paged", heads=128, listed=2048, **_LATENT
    ),
    "decode_listed/latent_sm90/heads16": _decode(
        "h100", "stacked", heads=16, listed=2048, **_LATENT
    ),
    "decode_listed/latent_sm80/heads16": _decode("a100", "paged", heads=16, listed=2048, **_LATENT),
    "decode_listed/sm90/paged": _decode("h100", "paged", listed=1024),
    "decode_listed/sm90/paged_alibi": _with_slopes(_decode("h100", "paged", listed=1024)),
    "decode_listed/sm90/gradients": _listed_gradients(),
    "decode_listed/sm80/paged_int8": _decode("a100", "paged", dtype="int8", listed=1024),
    "prefill/sm90/stacked": _decode("h100", "stacked", rows=1024),
    "prefill/sm90/paged": _decode("h100", "paged", rows=64),
    "prefill/sm90/paged_tree": _decode("h100", "paged", rows=64, parents=True),
    "prefill/sm90/paged_tree_window": _decode(
        "h100", "paged", rows=64, parents=True, mask=pa.sliding_window(1024)
    ),
    "prefill/sm90/paged_packed_tree": _decode("h100", "paged", rows=None, parents=True),
    "prefill/sm90/paged_packed_tree_window": _decode(
        "h100", "paged", rows=None, parents=True, mask=pa.sliding_window(1024)
    ),
    "prefill/sm90/stacked_mask_fn": _decode(
        "h100", "stacked", rows=64, mask=pa.CAUSAL & _BLOCKS["mask"]
    ),
    "prefill/sm90/paged_alibi": _with_slopes(_decode("h100", "paged", rows=64)),
    "prefill/sm90/per_sequence_split": _decode(
        "h100", "per_sequence", rows=16, heads=8, kv_heads=2
    ),
    "prefill/widened_sm90/paged_int8": _decode("h100", "paged", dtype="int8", rows=512),
    "prefill/narrow_sm90/paged_int8": _decode("h100", "paged", dtype="int8", rows=64),
    "prefill/narrow_sm90/stacked_float8": _decode(
        "h100", "stacked", dtype="float8_e4m3fn", rows=16
    ),
    "prefill/float8_sm90/stacked": _decode(
        "h100", "stacked", dtype="float8_e4m3fn", rows=512, options=_FLOAT8
    ),
    "prefill/gathered_sm80/paged_int8": _decode("a100", "paged", dtype="int8", rows=512),
    "prefill/gathered_sm90/paged_wide": _decode(
        "h100", "paged", rows=512, kv_heads=4, head_dim=512
    ),
    # Two launches each, the other of decode's kernel.
    "prefill/gathered_packed_sm90/paged_wide": _decode(
        "h100", "paged", rows=None, kv_heads=4, head_dim=512
    ),
    "prefill/sm90/paged_packed": _decode("h100", "paged", rows=None),
    # Two launches after one of decode's kernel.
    "prefill/sm90/paged_shared": _decode_shared("paged"),
    "prefill/sm90/stacked_prefix": _decode_shared("stacked"),
    "prefill/sm90/contiguous": _attention_sm90(
        128,
        **{"heads": (32, 8), "rows": 16, "keys": 4096, "q_offset": 4080},
        **{"also": ("sinks", "kv_lengths"), "mask": pa.CAUSAL},
    ),
    "append/sm90/stacked": _append("h100", "stacked", 1),
    "append/sm90/per_sequence": _append("h100", "per_sequence", 1),
    "append/sm90/paged_int8": _append("h100", "paged", 7, dtype="int8"),
    "append/sm90/paged_packed": _append_packed("h100", "paged"),
    "append/sm90/interleaved": _interleaved("h100", update=True),
    "append/sm80/paged": _append("a100", "paged", 7),
    "append/sm90/stacked_rotary": _append("h100", "stacked", 1, pa.Rotary(_TABLE, _TABLE)),
    "append/sm80/paged_int8_interleaved": _append(
        "a100", "paged", 7, pa.Rotary(_TABLE, _TABLE, interleaved=True), dtype="int8"
    ),
    "append/sm90/latent_bytes": _append_bytes(),
    "append/sm90/keep_stacked": _keep("h100", "stacked", 8, layers=4),
    "append/sm80/keep_per_sequence": _keep("a100", "per_sequence", 8),
    "append/sm90/keep_paged_int8": _keep("h100", "paged", 48, dtype="int8"),
    "quantize/sm90/h128": Build("h100", pa.quantize_qkv, _QKV),
    "quantize/sm80/h128": Build("a100", pa.quantize_qkv, _QKV),
    "lm/sm90/decode_loop": _lm(),
}

_NOISE = [
    (r"/\*.*?\*/", ""),  # addresses, encodings
    (r"\b(U?R|U?P|B)\d+\b", r"\1"),
    (r"\.reuse\b", ""),
    (r"((?:STL|LDL)\S* (?:R, )?)\[\S+\]", r"\1[offset]"),
    (r"\.L_x_\d+", "label"),
    (r"[ \t]+", " "),
]


def digest(build: Build) -> str:
    """Hash of all Mosaic kernels of the program, in the order in which they were compiled."""
    report = aot.compile_for(
        build.call,
        *build.shapes,
        target=build.target,
        donate_argnums=build.donate,
        compiler_options=build.options,
        sass=True,
    )
    texts = [_instructions(module) for module in report.sass.split("\f")]
    return hashlib.sha256("\f".join(sorted(texts)).encode()).hexdigest()[:16]


def _instructions(sass: str) -> str:
    """The instructions of disassembled machine code, without comments, addresses and encodings."""
    lines = [line for line in sass.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]
    text = "\n".join(lines)
    for pattern, instead in _NOISE:
        text = re.sub(pattern, instead, text)
    return text


def write_digests(words: list[str], write: Callable[[str], Any]) -> None:
    """A line for each build whose name contains one of the words; for all of them without any."""
    for name, build in BUILDS.items():
        if not words or any(word in name for word in words):
            write(f"{digest(build)}  {name}\n")
