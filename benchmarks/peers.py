"""Peers of each operation: what can be had on this machine for a case, and why the rest cannot.

A peer gives one subject or several (its tuned configurations; the fastest competes). It gets every
advantage that costs nothing: its own layout, made beforehand, and inputs scaled where it has no
scale. It refuses options that it cannot express, so that nobody is ever compared with half of the
work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_attn
from benchmarks import float8, rotation, subjects, torch_peers
from benchmarks.call import Call, Peer, Unavailable
from benchmarks.timing import Subject
from pallas_attn.masks import CAUSAL, FULL
from tests.support.problems.case import AttentionCase, DecodeCase
from tests.support.problems.cases import Case

Array = jax.Array
SCORES = 2**33  # bytes of float32 scores up to which a quadratic implementation is asked at all
# Nothing is recorded as a CUDA graph: a kernel takes as long without.
LAUNCHED = {"xla_gpu_graph_min_graph_size": 2**30}


# ---- attention ----------------------------------------------------------------------------------


def _masked(call: Call) -> dict[str, Any]:
    """Scale and mask as jax.nn and tokamax have them."""
    mask = call.case.mask
    static = {"scale": call.case.scale, "is_causal": mask.right == 0}
    return static | ({} if mask.left is None else {"local_window_size": (mask.left, mask.right)})


def _arrays(rest: dict[str, Any]) -> dict[str, Any]:
    """The other arrays as jax.nn and tokamax have them."""
    names = {"bias": "bias", "mask": "mask_array"}
    names |= {"query_seq_lengths": "q_lengths", "key_value_seq_lengths": "kv_lengths"}
    return {theirs: rest.get(ours) for theirs, ours in names.items()}


_JAX_NN = ("q_lengths", "kv_lengths", "bias", "mask_array", "window", "precision", "rotary")


def _jax_nn(name: str, call: Call) -> list[Subject]:
    call.require(*_JAX_NN, float32=name == "xla")
    _require_gpu_of(name)
    static = _masked(call) | {"implementation": name}

    def function(q: Array, k: Array, v: Array, rest: dict[str, Any]) -> Array:
        q, k, rest = rotation.in_model(q, k, rest)
        with jax.default_matmul_precision(call.case.precision):
            return jax.nn.dot_product_attention(q, k, v, **_arrays(rest), **static)

    return [Subject(name, call.launch(function))]


def _require_gpu_of(name: str) -> None:
    if name == "cudnn" and jax.devices()[0].platform != "gpu":
        raise Unavailable("no cuDNN without a GPU")


def cudnn(call: Call) -> list[Subject]:
    """cuDNN's fused attention, as jax.nn offers it."""
    arrays = call.arrays
    if "mask_array" in arrays and "bias" not in arrays:  # cuDNN takes no mask that all rows share
        shape = (*arrays["mask_array"].shape[:2], call.case.q_len, call.case.kv_len)
        arrays = arrays | {"mask_array": jnp.broadcast_to(arrays["mask_array"], shape)}
    return _jax_nn("cudnn", dataclasses.replace(call, arrays=arrays))


def xla(call: Call) -> list[Subject]:
    """jax.nn's own einsums."""
    case = call.case
    scores = 4 * case.batch * case.q_heads * case.q_len * case.kv_len
    if scores > SCORES:
        raise Unavailable(f"its scores would take {scores / 2**30:.0f} GiB")
    return _jax_nn("xla", call)


def _xla_masked(call: Call) -> list[Subject]:
    """`xla` with a boolean mask: its causal one lets query 0 see key 0 alone."""
    case: AttentionCase = call.case
    assert isinstance(case.q_offset, int)  # caches are full
    rows = jnp.arange(case.q_len, dtype=jnp.int32)[:, None] + case.q_offset
    seen = case.mask.allows(rows, jnp.arange(case.kv_len, dtype=jnp.int32)[None], case.kv_len)
    arrays = call.arrays | {"mask_array": seen[None, None]}
    return xla(Call(dataclasses.replace(case, mask=FULL, q_offset=0), arrays, None, call.op))


# (block_q, block_kv, stages) that fit, by head dim: the first of its own benchmark, and those that
# the fastest published kernel of the same design settled on.
_MGPU_TILES = {
    64: ((64, 256, 2), (128, 128, 2)),
    128: ((64, 128, 2),),
    256: ((64, 64, 2),),
}


def attention_mgpu(call: Call) -> list[Subject]:
    """jax.experimental.pallas.ops.gpu.attention_mgpu; it computes in float16 whatever comes in."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as module

    call.require()
    case, backward = call.case, call.op != "forward"
    if case.head_dim not in _MGPU_TILES or "hv" in case.tags:
        raise Unavailable(f"no head dims {case.head_dim}, {case.v_head_dim}")
    if backward and not case.mask.is_full:
        raise Unavailable("no causal backward")
    arrays = {name: call.arrays[name].astype(jnp.float16) for name in ("q", "k", "v")}
    # It has no scale: that is part of the time where a gradient flows back through it.
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    blocks: dict[str, Any] = {}
    cotangent = None
    if backward:
        cotangent = call.cotangent.astype(jnp.float16)
        names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
        blocks = dict.fromkeys(names, 64)
    else:
        arrays["q"] = (arrays["q"].astype(jnp.float32) * scale).astype(jnp.float16)
    converted = Call(case, arrays, cotangent, call.op)
    tuned = []
    for block_q, block_kv, stages in _MGPU_TILES[case.head_dim]:
        causal = case.mask == CAUSAL
        tiles = module.TuningConfig(block_q, block_kv, stages, causal=causal, **blocks)

        def function(q: Array, k: Array, v: Array, rest: Any, tiles: Any = tiles) -> Array:
            del rest
            return module.attention(q * jnp.float16(scale) if backward else q, k, v, tiles)

        tuned.append(Subject("attention_mgpu", converted.launch(function)))
    return tuned


def tokamax(call: Call) -> list[Subject]:
    """tokamax's Mosaic kernel with its own choice of tiles."""
    takes = ("q_lengths", "kv_lengths", "bias", "mask_array", "window", "softcap")
    call.require(*takes, package="tokamax", float32=True)
    import tokamax as module

    case = call.case
    if case.mask.left is not None and case.q_len != case.kv_len:
        raise Unavailable("its window is wrong where T != S")
    name = "triton" if case.dtype == "float32" else "mosaic"
    static = _masked(call) | {"implementation": name}
    if case.softcap is not None:
        static["logits_soft_cap"] = case.softcap

    def function(q: Array, k: Array, v: Array, rest: dict[str, Any]) -> Array:
        return module.dot_product_attention(q, k, v, **_arrays(rest), **static)

    return [Subject(f"tokamax_{name}", call.launch(function))]


def fa4_jax(call: Call) -> list[Subject]:
    """FlashAttention-4's kernels in JAX, and a kernel for tangents that is its own."""
    call.require("window", package="fa4_jax")
    case = call.case
    if case.q_len != case.kv_len and not case.mask.is_full:
        raise Unavailable("its masks count from the last key")
    from fa4_jax import flash_attn

    static: dict[str, Any] = {"scale": case.scale, "causal": case.mask == CAUSAL}
    if not (case.mask.is_full or case.mask == CAUSAL):
        static["window_size"] = case.mask.left, case.mask.right

    def function(q: Array, k: Array, v: Array, rest: dict[str, Any]) -> Array:
        del rest
        return flash_attn(q, k, v, **static)

    return [Subject("fa4_jax", call.launch(function))]


def built_in(call: Call) -> list[Subject]:
    """Ours with the options that say the same as the function."""
    options = dict(call.case.positions().built_in or {})
    if not options:
        raise Unavailable("no option says the same")
    case = dataclasses.replace(call.case, function=None, mask=options.pop("mask"))
    arrays = {name: x for name, x in call.arrays.items() if name != "aux"}
    if options:
        arrays["segment_ids"] = tuple(map(jnp.asarray, options["segment_ids"]))
    launch = subjects.attention(case, arrays, call.cotangent, call.op, None)
    return [Subject("built_in", launch)]


def in_model(call: Call) -> list[Subject]:
    """Our attention with q and k rotated by the model, in the same program."""
    if call.case.rotary is None:
        raise Unavailable("nothing to rotate")
    static = call.case.options()

    def function(q: Array, k: Array, v: Array, rest: dict[str, Any]) -> Array:
        q, k, rest = rotation.in_model(q, k, rest)
        return pallas_attn.flash_attention(q, k, v, **rest, **static)

    return [Subject("in_model", call.launch(function))]


def not_learned(call: Call) -> list[Subject]:
    """Our attention without gradients of the function's arrays."""
    if not call.case.learned:
        raise Unavailable("for gradients of a function's arrays only")
    case = dataclasses.replace(call.case, learned=False)
    launch = subjects.attention(case, call.arrays, call.cotangent, call.op, None)
    return [Subject("not_learned", launch)]


# ---- decode and prefill -------------------------------------------------------------------------


def _dense_decode(name: str, call: Call) -> list[Subject]:
    """jax.nn over dense [B, S, K, H], which is how cuDNN likes it."""
    case: DecodeCase = call.case
    call.refuse("window", "softcap", "sinks", "chunk", "listed", "alibi")
    if case.shared_kv:
        return _latent_decode(name, call)
    _require_gpu_of(name)
    k, v = (x.astype(case.dtype) for x in subjects.held_rows(case, call.arrays))
    lengths = call.arrays["lengths"] if "ragged" in case.tags else None

    @functools.partial(jax.jit, compiler_options=LAUNCHED)
    def step(q: Array, k: Array, v: Array, lengths: Array | None) -> tuple[Array]:
        static: dict[str, Any] = {"implementation": name, "key_value_seq_lengths": lengths}
        with jax.default_matmul_precision(case.precision):
            return (jax.nn.dot_product_attention(q, k, v, **static),)

    return [Subject(name, subjects.Step(step, (call.arrays["q"], k, v, lengths)))]


def _latent_decode(name: str, call: Call) -> list[Subject]:
    """Multi-head latent attention as einsums over dense [B, S, H]: jax.nn wants V as wide as K."""
    case: DecodeCase = call.case
    if name != "xla" or "ragged" in case.tags:
        raise Unavailable("no V within K")
    scale = case.head_dim**-0.5 if case.scale is None else case.scale

    @jax.jit
    def step(q: Array, k: Array) -> tuple[Array]:
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        logits = product("bnh,bsh->bns", q, k) * jnp.float32(scale)
        weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
        out = product("bns,bsh->bnh", weights, k[..., : case.v_head_dim])
        return (out.astype(q.dtype)[:, None],)

    return [Subject(name, subjects.Step(step, (call.arrays["q"][:, 0], call.arrays["k"][:, 0])))]


def _over_dense(peer: Peer, call: Call) -> list[Subject]:
    """A peer of attention over contiguous K and V in place of a cache."""
    case: DecodeCase = call.case
    call.refuse("listed", "alibi")
    if case.rows is not None or case.tree:
        raise Unavailable("no packed rows, and no trees of drafts")
    if any(length < case.capacity for length in case.lengths):
        raise Unavailable("full caches only")
    k, v = (x.astype(case.dtype) for x in subjects.held_rows(case, call.arrays))
    arrays = {name: x for name, x in call.arrays.items() if name != "lengths"}
    return peer(Call(case.dense(), arrays | {"k": k, "v": v}, None, "forward"))


def dense(call: Call) -> list[Subject]:
    """Ours without a cache; packed prompts are documents of one batch row."""
    case: DecodeCase = call.case
    if case.rows is None:
        return _over_dense(_flash_attention, call)
    if case.rows != case.lengths:
        raise Unavailable("packed rows are whole prompts only")
    places, tokens = subjects.packed_places(case), sum(case.rows)
    documents = dataclasses.replace(
        case.dense(), batch=1, q_len=tokens, kv_len=tokens, q_offset=0, q_lengths=None,
        kv_lengths=None, segments=case.rows,
    )  # fmt: skip
    ids = jnp.asarray(documents.segment_ids()[0])
    k, v = (x[places][None].astype(case.dtype) for x in subjects.held_rows(case, call.arrays))
    arrays = {"q": call.arrays["q"][None], "k": k, "v": v, "segment_ids": (ids, ids)}
    launch = subjects.attention(documents, arrays, None, "forward", None)
    return [Subject("dense", launch, lambda produced: (produced[0][0],))]


def _flash_attention(call: Call) -> list[Subject]:
    return [Subject("dense", subjects.attention(call.case, call.arrays, None, call.op, None))]


def _ours(name: str, call: Call, arrays: dict[str, Any] | None = None, **changes: Any) -> Subject:
    """Our decode of a changed case."""
    case = dataclasses.replace(call.case, **changes)
    return Subject(name, subjects.decode(case, call.arrays | (arrays or {}), None))


def unpacked(call: Call) -> list[Subject]:
    """Ours over the same cache, not packed, where sequences have as many rows as each other."""
    case: DecodeCase = call.case
    if case.rows is None or len(set(case.rows)) != 1 or case.kind == "interleaved":
        raise Unavailable("for packed rows, as many of each sequence, over a cache")
    q = call.arrays["q"]
    q = q.reshape(case.sequences, case.rows[0], *q.shape[1:])
    subject = _ours("unpacked", call, {"q": q}, rows=None, q_len=case.rows[0])

    def outputs(produced: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x.reshape(-1, *x.shape[2:]) for x in produced)

    return [dataclasses.replace(subject, outputs=outputs)]


def wide_cache(call: Call) -> list[Subject]:
    """Ours over rows that are not quantised: the measure of a narrow cache."""
    case: DecodeCase = call.case
    if not case.cache_dtype:
        raise Unavailable("for quantised caches only")
    k, v = (jnp.swapaxes(x, 1, 2) for x in subjects.held_rows(case, call.arrays))
    arrays = {"k": k.astype(case.dtype), "v": v.astype(case.dtype)}
    return [_ours("wide_cache", call, arrays, cache_dtype=None)]


def case_of(case: Case) -> Case:
    """The case of a peer, which reads rows as wide as they came where ours are quantised."""
    if isinstance(case, DecodeCase) and case.cache_dtype:
        return dataclasses.replace(case, cache_dtype=None, byte_rows=False)
    return case


# Our decode of a case that is changed: whether it applies, where it does, and the changes.
# own_pages: K and V in two arrays; chain: drafts that follow each other, which causal attention
# serves; plain: as if no two sequences shared a page; unshared: rows in pages of their own.
_CHANGED: dict[str, tuple[Callable[[DecodeCase], Any], str, dict[str, Any]]] = {
    "own_pages": (lambda case: case.kind == "interleaved", "for pages with K and V interleaved",
                  {"kind": "paged"}),
    "chain": (lambda case: case.tree, "for trees of drafts only", {"tree": False}),
    "plain": (lambda case: True, "", {}),
    "unshared": (lambda case: case.shared and not case.finding, "where pages are shared, once",
                 {"shared": ()}),
}  # fmt: skip


def _changed(name: str, call: Call) -> list[Subject]:
    applies, why, changes = _CHANGED[name]
    if not applies(call.case):
        raise Unavailable(why)
    return [_ours(name, call, **changes)]


def changed(*names: str) -> dict[str, Peer]:
    """Our decodes of changed cases, by name."""
    return {name: functools.partial(_changed, name) for name in names}


# ---- append -------------------------------------------------------------------------------------


Buffers = tuple[Any, ...]  # k and v
_DISTINCT: dict[str, Any] = {
    "mode": "drop",
    "unique_indices": True,
}  # 43 us for 8 x 2048 rows, else 260


def _update_slices(buffers: Buffers, k: Array, v: Array, start: Array, table: None) -> Buffers:
    del table
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    done = []
    for caches, new in zip(buffers, (jnp.swapaxes(x, 1, 2) for x in (k, v)), strict=True):
        places = zip(caches, new, start, strict=True)
        done.append(tuple(update(cache, row, at) for cache, row, at in places))
    return tuple(done)


def _scatter(buffers: Buffers, k: Array, v: Array, start: Array, table: None) -> Buffers:
    del table
    m = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    rows = start[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    pairs = zip(buffers, (k, v), strict=True)
    return tuple(cache.at[m, :, rows].set(new, **_DISTINCT) for cache, new in pairs)


def _scatter_pages(buffers: Buffers, k: Array, v: Array, start: Array, table: Array) -> Buffers:
    rows = start[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    size = buffers[0].shape[2]
    page = jnp.take_along_axis(table, rows // size, axis=1)
    pairs = zip(buffers, (k, v), strict=True)
    return tuple(pool.at[page, :, rows % size].set(new, **_DISTINCT) for pool, new in pairs)


def xla_append(call: Call) -> list[Subject]:
    """XLA's updates of every cache, the natural program without a kernel for it. Where rows are
    quantised, or kept, the reference, which is XLA's too.
    """
    case, arrays = call.case, call.arrays
    if case.cache_dtype or case.kept is not None:
        return [Subject("xla", subjects.writes(case, arrays, "reference"))]
    if "new_lengths" in arrays:
        raise Unavailable("no ragged chunks")
    update: dict[str, Callable[..., Buffers]]
    update = {"per_sequence": _update_slices, "stacked": _scatter, "paged": _scatter_pages}
    cache = subjects.extended(case, arrays)  # like ours: both write the same places
    rest = arrays["k"], arrays["v"], arrays["lengths"], cache.page_table

    def step(buffers: dict[str, Any], *rest: Array) -> tuple[dict[str, Any]]:
        k, v = update[case.kind]((buffers["k"], buffers["v"]), *rest)
        return ({"k": k, "v": v},)

    return [Subject("xla", subjects.Repeated(step, {"k": cache.k, "v": cache.v}, *rest))]


# ---- tables -------------------------------------------------------------------------------------

# Peers that read a cache of the case's kind; the others have their own layout.
BY_KIND = ("wide_cache", "unpacked", "chain", "own_pages", "flashinfer", "plain", "unshared")

_ATTENTION: dict[str, Peer] = {
    "cudnn": cudnn,
    "attention_mgpu": attention_mgpu,
    "tokamax": tokamax,
    "fa4_jax": fa4_jax,
    **torch_peers.SDPA,
    "xla": xla,
    "in_model": in_model,
}
PEERS: dict[str, dict[str, Peer]] = {
    "forward": _ATTENTION,
    "forward+backward": _ATTENTION,
    "backward": _ATTENTION,
    "shapes": _ATTENTION,
    "few_tiles": _ATTENTION,
    "float8": {"bfloat16": float8.bfloat16, "cudnn_float8": float8.cudnn},
    "quantize": {"xla": float8.by_xla},
    "jvp": {"cudnn": cudnn, "fa4_jax": fa4_jax, "xla": xla},
    "decode": {
        **{name: functools.partial(_dense_decode, name) for name in ("cudnn", "xla")},
        "wide_cache": wide_cache,
    },
    "prefill": {
        "dense": dense,
        "unpacked": unpacked,
        **changed("chain", "own_pages"),
        "wide_cache": wide_cache,
        "flashinfer": torch_peers.flashinfer,
        "flash_attention_4": functools.partial(_over_dense, torch_peers.flash_attention_4),
        "xla": functools.partial(_over_dense, _xla_masked),
    },
    "shared_prefix": {**changed("plain", "unshared"), "flashinfer": torch_peers.flashinfer},
    "append": {"xla": xla_append},
    "mask": {"built_in": built_in, "not_learned": not_learned, "flex": torch_peers.flex},
}


def wanted(op: str, names: str) -> list[str]:
    """The peers of an operation that "all", "none" or a list of names asks for. Names with a - take
    away from all.
    """
    table = list(PEERS[op])
    if names in ("all", "none"):
        return table if names == "all" else []
    asked = names.split(",")
    for name in asked:
        if name.removeprefix("-") not in table:
            raise ValueError(f"peers: expected names of {', '.join(table)}, got {name!r}")
    kept = [name for name in asked if not name.startswith("-")]
    return kept or [name for name in table if f"-{name}" not in asked]
