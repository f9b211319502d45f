"""Peers that run in torch: its own attention, FlexAttention, FlashInfer, FlashAttention 4."""

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import subjects
from benchmarks.call import Call, Peer, Unavailable, needed
from benchmarks.timing import Produced, Subject
from pallas_attn.masks import CAUSAL
from tests.support.problems.case import DecodeCase

Tensor = Any  # torch.Tensor: torch may not be there


def _torch_on_gpu() -> Any:
    needed("torch")
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU")
    return torch


def release() -> None:
    """Gives back the memory that torch keeps for itself between cases: jax needs it too."""
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _synchronize(produced: Produced) -> None:
    del produced
    sys.modules["torch"].cuda.synchronize()


def _subject(
    name: str, launch: Callable[[], tuple[Tensor, ...]], change: Callable[[Tensor], Tensor]
) -> Subject:
    """A subject whose tensors, each changed, become arrays of jax that are their own."""

    def outputs(produced: tuple[Tensor, ...]) -> tuple[jax.Array, ...]:
        _synchronize(produced)
        tensors = (change(x.detach()).contiguous() for x in produced)
        return tuple(jnp.copy(jax.dlpack.from_dlpack(x)) for x in tensors)

    return Subject(name, launch, outputs, _synchronize)


# ---- attention ----------------------------------------------------------------------------------


def _sdpa(name: str, backend: str, call: Call) -> list[Subject]:
    """One backend of torch's scaled_dot_product_attention."""
    _torch_on_gpu()
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call.require("precision", float32=True)  # its float32 is float32
    case = call.case
    if (case.dtype == "float32") != (backend in ("EFFICIENT_ATTENTION", "MATH")):
        raise Unavailable("float32 is for torch_efficient and torch_math, and nothing else is")
    if case.mask != CAUSAL and not case.mask.is_full or case.q_len != case.kv_len:
        raise Unavailable("no such mask")
    options = {"is_causal": case.mask == CAUSAL, "scale": case.scale}
    if case.q_heads != case.kv_heads:
        options["enable_gqa"] = True

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, backend)):
            warnings.simplefilter("ignore")  # it says why each of the others was not taken
            return functional.scaled_dot_product_attention(q, k, v, **options)

    return [_attention_subject(name, forward, call)]


SDPA: dict[str, Peer] = {
    name: functools.partial(_sdpa, name, backend)
    for name, backend in (
        ("torch_cudnn", "CUDNN_ATTENTION"),
        ("torch_flash2", "FLASH_ATTENTION"),
        ("torch_efficient", "EFFICIENT_ATTENTION"),
        ("torch_math", "MATH"),
    )
}


def _attention_subject(
    name: str, function: Callable[..., Tensor], call: Call, learned: Sequence[Tensor] = ()
) -> Subject:
    """Attention of q, k and v [B, N, T, H], with gradients of these and of `learned` tensors."""
    import torch

    arrays = [call.arrays[name] for name in ("q", "k", "v")]
    q, k, v = (torch.from_dlpack(x).transpose(1, 2).detach() for x in arrays)
    backward = call.op != "forward"
    do = torch.from_dlpack(call.cotangent).transpose(1, 2) if backward else None
    for x in (q, k, v, *learned):
        x.requires_grad_(backward)
    kept = function(q, k, v) if call.op == "backward" else None

    def launch() -> tuple[Tensor, ...]:
        out = function(q, k, v) if kept is None else kept
        if not backward:
            return (out,)
        keep = kept is not None
        return (out, *torch.autograd.grad(out, (q, k, v, *learned), do, retain_graph=keep)[:3])

    return _subject(name, launch, lambda x: x.transpose(1, 2))


def flex(call: Call) -> list[Subject]:
    """torch's FlexAttention, compiled; live blocks are found before it is timed."""
    torch, case = _torch_on_gpu(), call.case
    from torch.nn.attention import flex_attention as module

    if case.dtype == "float32":
        raise Unavailable("no float32")
    torch._dynamo.config.recompile_limit = 512  # a program for every case
    function = case.positions()
    aux = [torch.from_numpy(x).cuda() for x in function.aux]
    mask = lambda b, h, q, kv: function.mask(b, h, q, kv, *aux)  # noqa: E731
    sizes = case.batch, None, case.q_len, case.kv_len
    options: dict[str, Any] = {"block_mask": module.create_block_mask(mask, *sizes, device="cuda")}
    options |= {"scale": case.scale, "enable_gqa": case.q_heads != case.kv_heads}
    if function.score is not None:
        score = function.score
        options["score_mod"] = lambda s, b, h, q, kv: score(s, b, h, q, kv, *aux)
    compiled = torch.compile(module.flex_attention, dynamic=False)
    attend = lambda q, k, v: compiled(q, k, v, **options)  # noqa: E731
    return [_attention_subject("flex", attend, call, aux if case.learned else ())]


# ---- prefill ------------------------------------------------------------------------------------


def flash_attention_4(call: Call) -> list[Subject]:
    """FlashAttention's kernels in CuTe: causal from the last row on, as over a full cache."""
    torch, case = _torch_on_gpu(), call.case
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        raise Unavailable("flash_attn.cute is not installed") from None
    call.require("q_offset")
    if case.dtype == "float32" or case.mask != CAUSAL or case.q_offset != case.kv_len - case.q_len:
        raise Unavailable("no such dtype, mask or offset")
    q, k, v = (torch.from_dlpack(call.arrays[name]) for name in ("q", "k", "v"))

    def launch() -> tuple[Tensor]:
        out = flash_attn_func(q, k, v, softmax_scale=case.scale, causal=True)
        return (out[0] if isinstance(out, tuple) else out,)

    return [_subject("flash_attention_4", launch, lambda x: x)]


def flashinfer(call: Call) -> list[Subject]:
    """FlashInfer over the very pages of ours; where sequences share some, its cascade, which is
    told on the host which ones, level by level.
    """
    case: DecodeCase = call.case
    if case.tree or case.finding:
        raise Unavailable("no trees of drafts" if case.tree else "what is shared is told to it")
    torch = _torch_on_gpu()
    needed("flashinfer")
    if case.kind != "paged" or case.page_size is None:
        raise Unavailable("paged caches only")
    others = ("quantized", "shared_kv", "float32", "listed", "alibi")
    call.refuse("window", "softcap", "sinks", *others)
    import flashinfer as module

    cache = subjects.filled_cache(case, call.arrays)
    table = torch.from_dlpack(cache.page_table)
    levels: list[tuple[Tensor, ...]] = []
    for runs, rows in page_levels(case):
        pages = torch.cat([table[run.sequence, run.begin : run.end] for run in runs])
        counts, last = [run.end - run.begin for run in runs], [run.rows_of_last for run in runs]
        starts, firsts, ends = (
            torch.tensor(x, dtype=torch.int32, device="cuda")
            for x in (_sums(rows), _sums(counts), last)
        )
        levels.append((starts, firsts, pages, ends))
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
    launch = lambda: (wrapper.run(q, (k, v)),)  # noqa: E731
    return [_subject("flashinfer", launch, lambda x: x.reshape(shape))]


class PageRun(NamedTuple):
    """Neighbouring entries of one row of a page table."""

    sequence: int
    begin: int
    end: int
    rows_of_last: int  # rows of the last page


def page_levels(case: DecodeCase) -> list[tuple[list[PageRun], list[int]]]:
    """Level by level, from the pages that most sequences share to those that each has alone: the
    pages of each group's first sequence, and the number of query rows of the group.
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
