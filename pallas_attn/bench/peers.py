"""Everybody else: what can be had on this machine for a case, and why the rest cannot.

A peer gives one subject or several (its tuned configurations; the fastest competes). It gets every
advantage that costs nothing: its own layout, made beforehand, and inputs scaled where it has no
scale. What it cannot express it refuses, so that nobody is ever compared with half of the work.
"""

import dataclasses
import functools
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn.bench import subjects
from pallas_attn.bench.case import AppendCase, AttentionCase, DecodeCase
from pallas_attn.bench.timing import Subject
from pallas_attn.masks import CAUSAL, FULL

SCORES = 2**33  # bytes of float32 scores up to which a quadratic implementation is asked at all
# Nothing is recorded as a CUDA graph: a kernel takes as long without.
LAUNCHED = {"xla_gpu_graph_min_graph_size": 2**30}


class Unavailable(Exception):
    """Why a peer is not there for a case."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a peer is asked to do."""

    case: Any
    arrays: dict[str, Any]
    cotangent: Any
    op: str


Peer = Callable[[Call], list[Subject]]


def _require(call: Call, *features: str) -> None:
    """Refuses a case with an option that is not among `features`."""
    options: tuple[str, ...] = (
        "q_lengths",
        "kv_lengths",
        "segments",
        "bias",
        "mask_array",
        "softcap",
        "sinks",
    )
    options += ("q_offset", "window", "band", "precision")
    for option in options:
        if option in call.case.tags and option not in features:
            raise Unavailable(f"no {option}")


def _jax_nn(name: str, call: Call) -> list[Subject]:
    features = ("q_lengths", "kv_lengths", "bias", "mask_array", "window", "precision")
    _require(call, *features)
    _require_gpu_of(name)
    mask = call.case.mask
    static: dict[str, Any] = {"scale": call.case.scale, "implementation": name}
    static["is_causal"] = mask.right == 0
    if mask.left is not None:
        static["local_window_size"] = (mask.left, mask.right)

    def function(q, k, v, rest):
        arrays: dict[str, Any] = {
            "bias": rest.get("bias"),
            "mask": rest.get("mask_array"),
            "query_seq_lengths": rest.get("q_lengths"),
            "key_value_seq_lengths": rest.get("kv_lengths"),
        }
        with jax.default_matmul_precision(call.case.precision):
            return jax.nn.dot_product_attention(q, k, v, **arrays, **static)

    launch = subjects.attention_launch(function, call.arrays, call.cotangent, call.op)
    return [Subject(name, launch)]


def _require_gpu_of(name: str) -> None:
    if name == "cudnn" and jax.devices()[0].platform != "gpu":
        raise Unavailable("no cuDNN without a GPU")


def cudnn(call: Call) -> list[Subject]:
    """cuDNN's fused attention, as jax.nn offers it."""
    if call.case.dtype == "float32":
        raise Unavailable("no float32")
    return _jax_nn("cudnn", call)


def xla(call: Call) -> list[Subject]:
    """jax.nn's own einsums."""
    case = call.case
    scores = 4 * case.batch * case.q_heads * case.q_len * case.kv_len
    if scores > SCORES:
        raise Unavailable(f"its scores would take {scores / 2**30:.0f} GiB")
    return _jax_nn("xla", call)


# (block_q, block_kv, stages) that fit, by head dim: those its own benchmark starts from, and those
# that the fastest published kernel of the same design settled on.
_MGPU_TILES = {
    64: ((64, 256, 2), (128, 128, 2)),
    128: ((64, 128, 2),),
    256: ((64, 64, 2),),
}


def attention_mgpu(call: Call) -> list[Subject]:
    """jax.experimental.pallas.ops.gpu.attention_mgpu; it computes in float16 whatever comes in."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as module

    _require(call)
    case = call.case
    if case.dtype == "float32" or case.head_dim not in _MGPU_TILES or "hv" in case.tags:
        raise Unavailable(f"no {case.dtype} at head dims {case.head_dim}, {case.v_head_dim}")
    backward = call.op != "forward"
    if backward and not case.mask.is_full:
        raise Unavailable("no causal backward")
    arrays = {name: call.arrays[name].astype(jnp.float16) for name in ("q", "k", "v")}
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    cotangent = call.cotangent.astype(jnp.float16) if backward else None
    if not backward:  # it has no scale; ahead of time where nothing flows back through it
        arrays["q"] = (arrays["q"].astype(jnp.float32) * scale).astype(jnp.float16)
    sizes = {"block_q_dkv": 64, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 64}
    found = []
    for block_q, block_kv, stages in _MGPU_TILES[case.head_dim]:
        blocks: dict[str, Any] = sizes if backward else {}
        causal = case.mask == CAUSAL
        config = module.TuningConfig(block_q, block_kv, stages, causal=causal, **blocks)
        function = functools.partial(_mgpu_function, module, config, scale if backward else None)
        launch = subjects.attention_launch(function, arrays, cotangent, call.op)
        found.append(Subject("attention_mgpu", launch))
    return found


def _mgpu_function(
    module: Any, config: Any, scale: float | None, q: Any, k: Any, v: Any, rest: Any
):
    del rest
    q = q if scale is None else q * jnp.float16(scale)
    return module.attention(q, k, v, config)


def _torch(name: str, backend: str, call: Call) -> list[Subject]:
    _torch_on_gpu()
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _require(call, "precision")  # its float32 is float32
    case = call.case
    if (case.dtype == "float32") != (backend in ("EFFICIENT_ATTENTION", "MATH")):
        raise Unavailable("float32 is for torch_efficient and torch_math, and nothing else is")
    if case.mask != CAUSAL and not case.mask.is_full or case.q_len != case.kv_len:
        raise Unavailable("no such mask")
    options = {"is_causal": case.mask == CAUSAL, "scale": case.scale}
    if case.q_heads != case.kv_heads:
        options["enable_gqa"] = True

    def forward(q, k, v):
        with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, backend)):
            warnings.simplefilter("ignore")  # it says why each of the others was not taken
            return functional.scaled_dot_product_attention(q, k, v, **options)

    return [_torch_subject(name, forward, call)]


def _torch_subject(name: str, function: Callable[..., Any], call: Call) -> Subject:
    """Attention of torch's, of q, k and v [B, N, T, H], and its gradient."""
    import torch

    q, k, v = (
        torch.from_dlpack(call.arrays[name]).transpose(1, 2).detach() for name in ("q", "k", "v")
    )
    backward = call.op != "forward"
    do = torch.from_dlpack(call.cotangent).transpose(1, 2) if backward else None
    for x in (q, k, v):
        x.requires_grad_(backward)
    kept = function(q, k, v) if call.op == "backward" else None

    def launch():
        out = function(q, k, v) if kept is None else kept
        if not backward:
            return (out,)
        keep = kept is not None
        return (out, *torch.autograd.grad(out, (q, k, v), do, retain_graph=keep))

    outputs = functools.partial(_of_torch, lambda x: x.transpose(1, 2))
    return Subject(name, launch, outputs, _torch_done)


def flex(call: Call) -> list[Subject]:
    """torch's FlexAttention, compiled; the blocks that are live are found before it is timed."""
    torch, case = _torch_on_gpu(), call.case
    from torch.nn.attention import flex_attention as module

    if case.dtype == "float32":
        raise Unavailable("no float32")
    torch._dynamo.config.recompile_limit = 512  # a program for every case
    given = case.positions()
    aux = [torch.from_numpy(x).cuda() for x in given.aux]
    mask = lambda b, h, q, kv: given.mask(b, h, q, kv, *aux)  # noqa: E731
    sizes = case.batch, None, case.q_len, case.kv_len
    options: dict[str, Any] = {"block_mask": module.create_block_mask(mask, *sizes, device="cuda")}
    options |= {"scale": case.scale, "enable_gqa": case.q_heads != case.kv_heads}
    if given.score is not None:
        score = given.score
        options["score_mod"] = lambda s, b, h, q, kv: score(s, b, h, q, kv, *aux)
    compiled = torch.compile(module.flex_attention, dynamic=False)
    return [_torch_subject("flex", lambda q, k, v: compiled(q, k, v, **options), call)]


def built_in(call: Call) -> list[Subject]:
    """Ours with the options that say what the function says."""
    options = dict(call.case.positions().built_in or {})
    if not options:
        raise Unavailable("no option says the same")
    case = dataclasses.replace(call.case, function=None, mask=options.pop("mask"))
    arrays = {name: x for name, x in call.arrays.items() if name != "aux"}
    if options:
        arrays["segment_ids"] = tuple(map(jnp.asarray, options["segment_ids"]))
    launch = subjects.attention(case, arrays, call.cotangent, call.op, None)
    return [Subject("built_in", launch)]


def release() -> None:
    """Gives back what torch keeps for itself between cases: jax needs the memory too."""
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def tokamax(call: Call) -> list[Subject]:
    """tokamax's Mosaic kernel with its own choice of tiles."""
    if importlib.util.find_spec("tokamax") is None:
        raise Unavailable("tokamax is not installed")
    import tokamax as module

    _require(call, "q_lengths", "kv_lengths", "window", "softcap")
    mask = call.case.mask
    if mask.left is not None and call.case.q_len != call.case.kv_len:
        raise Unavailable("its window is wrong where T != S")
    static: dict[str, Any] = {"scale": call.case.scale, "is_causal": mask.right == 0}
    if mask.left is not None:
        static["local_window_size"] = (mask.left, mask.right)
    if call.case.softcap is not None:
        static["logits_soft_cap"] = call.case.softcap
    name = "triton" if call.case.dtype == "float32" else "mosaic"

    def function(q, k, v, rest):
        lengths = {
            "query_seq_lengths": rest.get("q_lengths"),
            "key_value_seq_lengths": rest.get("kv_lengths"),
        }
        return module.dot_product_attention(q, k, v, implementation=name, **lengths, **static)

    launch = subjects.attention_launch(function, call.arrays, call.cotangent, call.op)
    return [Subject(f"tokamax_{name}", launch)]


def _dense_decode(name: str, call: Call) -> list[Subject]:
    """jax.nn over dense [B, S, K, H], which is how cuDNN likes it."""
    case: DecodeCase = call.case
    for feature in ("window", "softcap", "sinks", "chunk"):
        if feature in case.tags:
            raise Unavailable(f"no {feature}")
    if case.shared_kv:
        return _latent_decode(name, call)
    _require_gpu_of(name)
    k, v = (x.astype(case.dtype) for x in subjects.held_rows(case, call.arrays))
    lengths = call.arrays["lengths"] if "ragged" in case.tags else None

    @functools.partial(jax.jit, compiler_options=LAUNCHED)
    def step(q, k, v, lengths):
        static = {"implementation": name, "key_value_seq_lengths": lengths}
        with jax.default_matmul_precision(case.precision):
            return (jax.nn.dot_product_attention(q, k, v, **static),)

    return [Subject(name, subjects.Step(step, (call.arrays["q"], k, v, lengths)))]


def _over_dense(peer: Peer, call: Call) -> list[Subject]:
    """A peer of attention over contiguous K and V in place of a cache."""
    case: DecodeCase = call.case
    if case.rows is not None or case.tree:
        raise Unavailable("no packed rows, and no trees of drafts")
    if any(length < case.capacity for length in case.lengths):
        raise Unavailable("full caches only")
    k, v = (x.astype(case.dtype) for x in subjects.held_rows(case, call.arrays))
    arrays = {name: x for name, x in call.arrays.items() if name != "lengths"}
    return peer(Call(case.dense(), arrays | {"k": k, "v": v}, None, "forward"))


def _flash_attention(call: Call) -> list[Subject]:
    """Ours without a cache: what reading a cache is measured by."""
    return [Subject("dense", subjects.attention(call.case, call.arrays, None, call.op, None))]


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


def unpacked(call: Call) -> list[Subject]:
    """Ours over the same cache, not packed, where sequences have as many rows as each other."""
    case: DecodeCase = call.case
    if case.rows is None or len(set(case.rows)) != 1:
        raise Unavailable("for packed rows, as many of each sequence")
    plain = dataclasses.replace(case, rows=None, q_len=case.rows[0])
    q = call.arrays["q"].reshape(case.sequences, plain.q_len, *call.arrays["q"].shape[1:])
    launch = subjects.decode(plain, call.arrays | {"q": q}, None)

    def outputs(produced: Any) -> tuple[Any, ...]:
        return tuple(x.reshape(-1, *x.shape[2:]) for x in produced)

    return [Subject("unpacked", launch, outputs)]


def chain(call: Call) -> list[Subject]:
    """Ours with drafts that follow each other, which causal attention serves."""
    case: DecodeCase = call.case
    if not case.tree:
        raise Unavailable("for trees of drafts only")
    launch = subjects.decode(dataclasses.replace(case, tree=False), call.arrays, None)
    return [Subject("chain", launch)]


def flashinfer(call: Call) -> list[Subject]:
    """FlashInfer over the very pages of ours; where sequences share some, its cascade, which is
    told on the host what they share, level by level.
    """
    case: DecodeCase = call.case
    if case.tree or case.finding:
        raise Unavailable("no trees of drafts" if case.tree else "what is shared is told to it")
    torch = _torch_on_gpu()
    if importlib.util.find_spec("flashinfer") is None:
        raise Unavailable("flashinfer is not installed")
    if case.kind != "paged" or case.page_size is None:
        raise Unavailable("paged caches only")
    for feature in ("window", "softcap", "sinks", "quantized", "shared_kv", "float32"):
        if feature in case.tags:
            raise Unavailable(f"no {feature}")
    import flashinfer as module

    cache = subjects.filled_cache(case, call.arrays)
    table = torch.from_dlpack(cache.page_table)
    levels: list[tuple[Any, ...]] = []
    for runs, rows in page_levels(case):
        held = torch.cat([table[run.sequence, run.begin : run.end] for run in runs])
        pages, last = [run.end - run.begin for run in runs], [run.rows_of_last for run in runs]
        starts, firsts, ends = (
            torch.tensor(x, dtype=torch.int32, device="cuda")
            for x in (_sums(rows), _sums(pages), last)
        )
        levels.append((starts, firsts, held, ends))
    room = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    if len(levels) > 1:
        wrapper = module.MultiLevelCascadeAttentionWrapper(len(levels), room, "HND")
        plan = [list(x) for x in zip(*levels, strict=True)]
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(room, "HND")
        plan = list(levels[0])
    heads = case.q_heads, case.kv_heads, case.head_dim, case.page_size
    dtype = getattr(torch, case.dtype)
    wrapper.plan(*plan, *heads, causal=case.mask == CAUSAL,
                 sm_scale=case.scale, q_data_type=dtype, kv_data_type=dtype)  # fmt: skip
    k, v = (torch.from_dlpack(x) for x in (cache.k, cache.v))
    q = torch.from_dlpack(call.arrays["q"].reshape(-1, case.q_heads, case.head_dim))
    shape = call.arrays["q"].shape[:-1] + (case.v_head_dim,)
    outputs = functools.partial(_of_torch, lambda x: x.reshape(shape))
    return [Subject("flashinfer", lambda: (wrapper.run(q, (k, v)),), outputs, _torch_done)]


class PageRun(NamedTuple):
    """Neighbouring entries of one row of a page table."""

    sequence: int
    begin: int
    end: int
    rows_of_last: int  # rows of the last page


def page_levels(case: DecodeCase) -> list[tuple[list[PageRun], list[int]]]:
    """Level by level, from what most sequences share to what each has alone: the pages of each
    group's first sequence, and how many query rows the group has.
    """
    assert case.page_size is not None
    size, begin, levels = case.page_size, 0, []
    for group, count in (*case.shared, (1, None)):
        firsts = range(0, case.sequences, group)
        ends = [case.lengths[m] if count is None else begin + count for m in firsts]
        runs = [
            PageRun(m, begin // size, -(-end // size), (end - 1) % size + 1)
            for m, end in zip(firsts, ends, strict=True)
        ]
        levels.append((runs, [sum(case.each[m : m + group]) for m in firsts]))
        begin += count or 0
    return levels


def _sums(counts: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(counts, initial=0))


def _flash_attention_4(call: Call) -> list[Subject]:
    """FlashAttention's kernels in CuTe: causal from the last row on, as over a full cache."""
    torch, case = _torch_on_gpu(), call.case
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        raise Unavailable("flash_attn.cute is not installed") from None
    _require(call, "q_offset")
    if case.dtype == "float32" or case.mask != CAUSAL or case.q_offset != case.kv_len - case.q_len:
        raise Unavailable("no such dtype, mask or offset")
    q, k, v = (torch.from_dlpack(call.arrays[name]) for name in ("q", "k", "v"))

    def launch() -> tuple[Any, ...]:
        out = flash_attn_func(q, k, v, softmax_scale=case.scale, causal=True)
        return (out[0] if isinstance(out, tuple) else out,)

    outputs = functools.partial(_of_torch, lambda x: x)
    return [Subject("flash_attention_4", launch, outputs, _torch_done)]


def _torch_on_gpu() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU")
    return torch


def _torch_done(produced: Any) -> None:
    del produced
    sys.modules["torch"].cuda.synchronize()


def _of_torch(change: Callable[[Any], Any], produced: Any) -> tuple[Any, ...]:
    """What torch made, as arrays of jax that are their own."""
    _torch_done(produced)
    made = (change(x.detach()).contiguous() for x in produced)
    return tuple(jnp.copy(jax.dlpack.from_dlpack(x)) for x in made)


def _xla_masked(call: Call) -> list[Subject]:
    """`xla` with a boolean mask: its causal one lets query 0 see key 0 alone."""
    case: AttentionCase = call.case
    assert isinstance(case.q_offset, int)  # of a full cache
    rows = jnp.arange(case.q_len, dtype=jnp.int32)[:, None] + case.q_offset
    seen = case.mask.allows(rows, jnp.arange(case.kv_len, dtype=jnp.int32)[None], case.kv_len)
    arrays = call.arrays | {"mask_array": seen[None, None]}
    return xla(Call(dataclasses.replace(case, mask=FULL, q_offset=0), arrays, None, call.op))


def _latent_decode(name: str, call: Call) -> list[Subject]:
    """Multi-head latent attention as einsums over dense [B, S, H]: jax.nn wants V as wide as K."""
    case: DecodeCase = call.case
    if name != "xla" or "ragged" in case.tags:
        raise Unavailable("no V within K")
    scale = case.head_dim**-0.5 if case.scale is None else case.scale

    @jax.jit
    def step(q, k):
        wide = {"preferred_element_type": jnp.float32}
        logits = jnp.einsum("bnh,bsh->bns", q, k, **wide) * jnp.float32(scale)
        weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
        out = jnp.einsum("bns,bsh->bnh", weights, k[..., : case.v_head_dim], **wide)
        return (out.astype(q.dtype)[:, None],)

    return [Subject(name, subjects.Step(step, (call.arrays["q"][:, 0], call.arrays["k"][:, 0])))]


def case_of(case: Any) -> Any:
    """What a peer does for a case: it reads rows as wide as they came, where ours are quantised."""
    if isinstance(case, DecodeCase) and case.cache_dtype:
        return dataclasses.replace(case, cache_dtype=None)
    return case


def wide_cache(call: Call) -> list[Subject]:
    """Ours over rows that are not quantised: what a narrow cache is measured by."""
    case: DecodeCase = call.case
    if not case.cache_dtype:
        raise Unavailable("for quantised caches only")
    k, v = (jnp.swapaxes(x, 1, 2) for x in subjects.held_rows(case, call.arrays))
    arrays = call.arrays | {"k": k.astype(case.dtype), "v": v.astype(case.dtype)}
    launch = subjects.decode(case_of(case), arrays, None)
    return [Subject("wide_cache", launch)]


def plain(call: Call) -> list[Subject]:
    """Ours over the same pages, as if no two sequences shared one."""
    return [Subject("plain", subjects.decode(call.case, call.arrays, None))]


def unshared(call: Call) -> list[Subject]:
    """Ours over the same rows in pages of each sequence's own."""
    case: DecodeCase = call.case
    if not case.shared or case.finding:
        raise Unavailable("where pages are shared, once")
    alone = dataclasses.replace(case, shared=())
    return [Subject("unshared", subjects.decode(alone, call.arrays, None))]


class _Scatter:
    """The same append by XLA alone: what a program without a kernel for it would write."""

    def __init__(self, case: AppendCase, arrays: dict[str, Any]):
        # The cache of ours, so that both write the same places; donated from call to call.
        cache = subjects.noisy(subjects.empty_cache(case)).extend(arrays["lengths"])
        cache = cache.extend(arrays.get("new_lengths", case.new_rows))
        self.buffers = {"k": cache.k, "v": cache.v}
        self.rest = arrays["k"], arrays["v"], arrays["lengths"], cache.page_table
        write = {"per_sequence": _update_slices, "stacked": _scatter, "paged": _scatter_pages}

        def step(buffers, *rest):
            return dict(
                zip(("k", "v"), write[case.kind](tuple(buffers.values()), *rest), strict=True)
            )

        self.step = jax.jit(step, donate_argnums=0)

    def __call__(self) -> Any:
        self.buffers = self.step(self.buffers, *self.rest)
        return self.buffers


def _update_slices(buffers: Any, k: Any, v: Any, start: Any, table: Any) -> Any:
    del table
    done = []
    for caches, new in zip(buffers, (jnp.swapaxes(x, 1, 2) for x in (k, v)), strict=True):
        places = zip(caches, new, start, strict=True)
        update = jax.lax.dynamic_update_slice_in_dim
        done.append(tuple(update(cache, row, at, axis=1) for cache, row, at in places))
    return tuple(done)


def _scatter(buffers: Any, k: Any, v: Any, start: Any, table: Any) -> Any:
    del table
    m = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    rows = start[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    pairs = zip(buffers, (k, v), strict=True)
    update = {"mode": "drop", "unique_indices": True}  # 43 us for 8 x 2048 rows, else 260
    return tuple(cache.at[m, :, rows].set(new, **update) for cache, new in pairs)


def _scatter_pages(buffers: Any, k: Any, v: Any, start: Any, table: Any) -> Any:
    rows = start[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    size = buffers[0].shape[2]
    page = jnp.take_along_axis(table, rows // size, axis=1)
    pairs = zip(buffers, (k, v), strict=True)
    update = {"mode": "drop", "unique_indices": True}
    return tuple(pool.at[page, :, rows % size].set(new, **update) for pool, new in pairs)


def xla_append(call: Call) -> list[Subject]:
    """XLA's updates of every cache; where rows are quantised, or kept, the reference, which is
    XLA's too.
    """
    if call.case.cache_dtype or call.case.kept is not None:
        return [Subject("xla", subjects.writes(call.case, call.arrays, "reference"))]
    if "new_lengths" in call.arrays:
        raise Unavailable("no ragged chunks")
    return [Subject("xla", _Scatter(call.case, call.arrays))]


# What reads a cache of the case's kind; the others have their own layout.
BY_KIND = ("wide_cache", "unpacked", "chain", "flashinfer", "plain", "unshared")

_ATTENTION: dict[str, Peer] = {
    "cudnn": cudnn,
    "attention_mgpu": attention_mgpu,
    "tokamax": tokamax,
    "torch_cudnn": functools.partial(_torch, "torch_cudnn", "CUDNN_ATTENTION"),
    "torch_flash2": functools.partial(_torch, "torch_flash2", "FLASH_ATTENTION"),
    "torch_efficient": functools.partial(_torch, "torch_efficient", "EFFICIENT_ATTENTION"),
    "torch_math": functools.partial(_torch, "torch_math", "MATH"),
    "xla": xla,
}
PEERS: dict[str, dict[str, Peer]] = {
    "forward": _ATTENTION,
    "forward+backward": _ATTENTION,
    "backward": _ATTENTION,
    "decode": {
        **{name: functools.partial(_dense_decode, name) for name in ("cudnn", "xla")},
        "wide_cache": wide_cache,
    },
    "prefill": {
        "dense": dense,
        "unpacked": unpacked,
        "chain": chain,
        "wide_cache": wide_cache,
        "flashinfer": flashinfer,
        "flash_attention_4": functools.partial(_over_dense, _flash_attention_4),
        "xla": functools.partial(_over_dense, _xla_masked),
    },
    "shared_prefix": {"plain": plain, "unshared": unshared, "flashinfer": flashinfer},
    "append": {"xla": xla_append},
    "mask": {"built_in": built_in, "flex": flex},
}
