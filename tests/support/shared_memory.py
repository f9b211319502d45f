"""Random problems of every operation, and whether kernels ask for shared memory before they launch:
what `Kernel.smem_bytes` says of the Config that `default` gives has room on the GPU, and no launch
takes more.

A problem is drawn as kernels get it, so hundreds of them take a second.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pallas_attn import trees
from pallas_attn._call import config as _config
from pallas_attn._call import device, dispatch, gpu_specs
from pallas_attn._call.problem import (
    FLOAT8,
    QUANTIZED,
    AppendProblem,
    AttentionInputs,
    AttentionProblem,
    Change,
    DecodeProblem,
    KeepProblem,
    QuantizeProblem,
)
from pallas_attn.masks import AT_RUN_TIME, CAUSAL, FULL, Mask, mask_fn, sliding_window
from pallas_attn.scores import score_fn
from tests.support import operations as support

GPUS = ("sm90", "sm90", "sm90", "sm90", "sm80", "sm86", "sm89", "sm100", "sm103", "sm120")
FLOATS = ("bfloat16", "float16", "float32")
DIMS = (8, 16, 32, 40, 64, 64, 72, 80, 96, 100, 128, 128, 160, 192, 192, 200, 256, 256)
WIDE_DIMS = (*DIMS, 264, 320, 512)

_TABLE, _NUMBERS = np.zeros((64, 64), bool), np.ones(64, np.float32)
MASK_PROGRAMS = (
    mask_fn(lambda b, h, q, kv: (q ^ kv) & 3 != 3).program,
    mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], np.zeros((8, 512), np.int32)).program,
    mask_fn(lambda b, h, q, kv, table: table[q // 64, kv // 64], _TABLE).program,
)
# Functions of scores, by the number of their arrays.
SCORES = (
    (0, lambda s, b, h, q, kv: s - (q - kv)),
    (1, lambda s, b, h, q, kv, m: s - m[h] * (q - kv)),
    (1, lambda s, b, h, q, kv, m: s + m[(q - kv) & 63]),
    (2, lambda s, b, h, q, kv, m, n: s * m[q & 63] + n[kv & 63]),
)
SCORE_PROGRAMS = tuple((score_fn(f, *[_NUMBERS] * n).program, n) for n, f in SCORES)


@dataclasses.dataclass(frozen=True)
class Case:
    """Problems number `first` to `first + count - 1` of a seed."""

    seed: int
    first: int = 0
    count: int = 100

    def problems(self) -> Iterator[Any]:
        for number in range(self.first, self.first + self.count):
            yield problem(random.Random(f"{self.seed} {number}"))


def problem(pick: random.Random) -> Any:
    draws = (attention, attention, attention, own_kernels, decode, decode, many_rows, others)
    return pick.choice(draws)(pick)


def attention(pick: random.Random) -> AttentionProblem:
    """A forward, a backward or tangents."""
    op = "flash_" + pick.choice(("forward", "backward", "backward", "jvp"))
    dtype = pick.choice((*FLOATS, "bfloat16", *FLOAT8))
    narrow = dtype in FLOAT8
    has_mask_program, has_score_program = pick.random() < 0.15, pick.random() < 0.15
    kv_heads, group = pick.choice((1, 2, 3, 8)), pick.choice((1, 1, 2, 4, 7, 8, 16))
    batch, q_len = pick.choice((1, 1, 2, 3, 64)), pick.choice((1, 17, 64, 100, 129, 512, 3000))
    kv_len = pick.choice((q_len, q_len, q_len, 1, 64, 128, 777, 4096))
    if has_mask_program or has_score_program:  # functions are evaluated for each size
        batch, q_len, kv_len = 2, 512, 512
    head_dim = pick.choice(WIDE_DIMS)
    dims = head_dim, pick.choice((head_dim, head_dim, 8, 64, 128, 256, 512))
    heads = group * kv_heads
    arrays = {name for name in ("q_offset", "q_lengths", "kv_lengths", "sinks") if _maybe(pick)}
    fields: dict[str, Any] = {"mask": _mask(pick), "softcap": 20.0 if _maybe(pick) else None}
    if fields["mask"].arrives:
        sides = ("left", "right")
        arrays |= {f"mask_{x}" for x in sides if getattr(fields["mask"], x) == AT_RUN_TIME}
    for name, field in (("bias", "bias_shape"), ("mask_array", "mask_shape")):
        if _maybe(pick):
            arrays.add(name)
            fields[field] = tuple(pick.choice((n, 1)) for n in (batch, heads, q_len, kv_len))
    if "bias" in arrays:
        fields["bias_dtype"] = pick.choice(FLOATS)
    if has_mask_program:
        fields |= {"mask": FULL, "mask_program": pick.choice(MASK_PROGRAMS)}
        arrays -= {"mask_left", "mask_right"}
    elif _maybe(pick):
        arrays |= {"q_segment_ids", "kv_segment_ids"} | ({"q_positions"} if _maybe(pick) else set())
    if has_score_program:
        fields["score_program"], count = pick.choice(SCORE_PROGRAMS)
        if op == "flash_backward" and "q_positions" not in arrays:
            fields["learned"] = tuple(n for n in range(count) if pick.random() < 0.7)
    if narrow:
        blocks = ((1, -(-n // 128)) for n in (q_len, kv_len, kv_len))
        fields |= {"out_dtype": "bfloat16", "scale_blocks": tuple(map(pick.choice, blocks))}
        arrays |= {"q_scale", "k_scale", "v_scale"}
    if op == "flash_jvp":
        op = pick.choice((op, "flash_dual"))
        moving = [name for name in ("bias", "k", "q", "v") if name != "bias" or "bias" in arrays]
        fields["tangents"] = tuple(x for x in moving if pick.random() < 0.7) or ("q",)
    if op == "flash_jvp":
        arrays -= {"sinks"}
    elif batch % 2 == 0 and "q_segment_ids" not in arrays and pick.random() < 0.2:
        arrays.add("q_offset")
        fields |= {"share": 2, "offsets": ((0, q_len), (q_len, 2 * q_len)), "learned": ()}
        fields["zigzag"] = pick.choice((1, 2))
        if op == "flash_forward" and _maybe(pick):
            arrays.add("device")
            fields["fetches"] = 2
    precision: str | None = "fast_accum" if narrow else "highest" if dtype == "float32" else None
    return AttentionProblem(
        op=op,
        gpu=pick.choice(GPUS),
        dtype=dtype,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=heads,
        kv_heads=kv_heads,
        head_dim=dims[0],
        v_head_dim=dims[1],
        scale=0.1,
        precision=pick.choice((None, precision)),
        deterministic=_maybe(pick),
        arrays=tuple(name for name in AttentionInputs._fields if name in arrays),
        **fields,
    )


def own_kernels(pick: random.Random) -> AttentionProblem:
    """Attention that Hopper has kernels of its own for: many small heads; windows of heads that
    share keys, or none; few query rows of long sequences; long documents; wide heads. And that
    Blackwell has.
    """
    op, gpu = pick.choice(("flash_forward", "flash_backward")), "sm90"
    rows, dim = pick.choice((16, 49, 64, 77, 197, 256, 500)), pick.choice((32, 64, 64, 72, 80, 128))
    sizes: dict[str, Any] = {"batch": pick.choice((1, 8, 256)), "q_len": rows, "kv_len": rows}
    heads, mask, arrays = (12, 12), FULL, pick.choice(((), (), ("sinks",), ("kv_lengths",)))
    kind = pick.choice(("small", "small", "keys", "window", "few", "long", "wide", "blackwell"))
    if kind == "blackwell":
        gpu, dim = pick.choice(("sm100", "sm103")), pick.choice((64, 96, 128, 192))
    if kind == "keys":
        sizes |= {"q_len": pick.choice((300, 4096)), "kv_len": pick.choice((77, 128))}
    if kind == "window":
        heads, dim = pick.choice(((64, 8), (64, 8), (8, 8))), 64
        mask = sliding_window(pick.choice((8, 64, 128)))
        sizes |= {"batch": 1, "q_len": 4096, "kv_len": 4096}
        arrays = pick.choice(((), ("sinks",)))
    if kind == "wide":
        dim, arrays = pick.choice((264, 320, 512)), ()
    if kind == "few":
        op, heads, mask = "flash_forward", (32, 8), pick.choice((CAUSAL, FULL))
        sizes |= {"batch": 4, "q_len": pick.choice((1, 16, 64)), "kv_len": 8192}
    if kind == "long":
        heads, mask, arrays = (8, 2), CAUSAL, ("q_segment_ids", "kv_segment_ids")
        sizes |= {"batch": 1, "q_len": 32768, "kv_len": 32768}
    if kind in ("small", "keys", "blackwell"):
        mask, extra = pick.choice((FULL, FULL, CAUSAL)), pick.choice((None, "bias", "mask_array"))
        shape = (1, heads[0], sizes["q_len"], sizes["kv_len"])
        if extra == "mask_array":
            shape = (sizes["batch"], 1, 1, sizes["kv_len"])
        if extra is not None:
            arrays = tuple(x for x in AttentionInputs._fields if x in (*arrays, extra))
            sizes["bias_shape" if extra == "bias" else "mask_shape"] = shape
    return AttentionProblem(
        op=op,
        gpu=gpu,
        dtype=pick.choice(("bfloat16", "float16")),
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dim,
        v_head_dim=128 if dim == 192 else dim,
        mask=mask,
        scale=0.125,
        deterministic=_maybe(pick),
        arrays=arrays,
        **sizes,
    )


def decode(pick: random.Random) -> DecodeProblem:
    """A decode over any cache: of one row or many, packed, in a tree, by lists."""
    dtype, quantized, latent = pick.choice((*FLOATS, "bfloat16")), pick.random() < 0.4, _maybe(pick)
    kinds = ("stacked", "paged", "per_sequence", "stacked", "interleaved")
    kind = pick.choice(kinds[: 4 if latent else 5])
    sequences, capacity = pick.choice((1, 3, 8, 33, 130, 1900)), pick.choice((0, 64, 520, 8192))
    kv_heads, group = pick.choice((1, 2, 8)), pick.choice((1, 1, 4, 5, 8, 16, 64))
    head_dim = pick.choice((*WIDE_DIMS, 64, 128, 128, 128, 512, 512))
    dims = head_dim, pick.choice((head_dim, head_dim, 64, 128, 512))
    cache = {"cache_dtype": pick.choice(QUANTIZED) if quantized else dtype, "quantized": quantized}
    fields: dict[str, Any] = cache | {"layers": pick.choice((None, 3))}
    if kind == "interleaved":
        dims, fields["unscaled"] = (head_dim, head_dim), quantized
    if latent:
        kv_heads, dims = 1, pick.choice(((576, 512), (192, 128), (320, 256), (512, 512)))
        fields["shared_kv"] = True
        if quantized:
            fields |= {"byte_rows": True, "cache_dtype": "float8_e4m3fn"}
    if kind in ("paged", "interleaved"):
        size = pick.choice((1, 8, 16, 64, 128))
        capacity = -(-capacity // size) * size
        fields |= {"page_size": size, "pages": sequences * capacity // size}
    q_len, tokens = pick.choice((1, 1, 2, 5, 16, 64, 200, 1024)), None
    if kind == "interleaved" or _maybe(pick):
        tokens = pick.choice((1, 64, 200, 2112))
        q_len = max(tokens, 64)
    extras = ("", "", "", "", "tree", "function", "lists", "lists", "merged")
    mask, extra = _mask(pick), pick.choice(extras)
    if extra == "tree" and kind != "interleaved":
        q_len, mask = 8 if tokens is None else q_len, CAUSAL
        shape = (sequences, 8, 2) if tokens is None else (tokens, 3)
        by_rows = None if tokens is None else sequences
        fields |= {"tree": True, "mask_program": trees.program(shape, by_rows)}
    if extra == "function" and kind != "interleaved":
        mask, fields["mask_program"] = FULL, pick.choice(MASK_PROGRAMS)
    if extra == "lists" and kind != "interleaved":
        fields["listed"] = pick.choice((1, 64, 200, 2048))
    if extra == "merged" and kind == "paged" and tokens:
        mask, fields["merged"] = FULL, (1, sequences, 4)
    precisions = (None, "highest" if dtype == "float32" else None)
    if quantized and fields["cache_dtype"] in FLOAT8 and kind != "interleaved":
        precisions = (None, "float8")
    uneven = 8 if kind == "per_sequence" else 0
    return DecodeProblem(
        gpu=pick.choice(GPUS),
        kind=kind,
        dtype=dtype,
        sequences=sequences,
        q_len=q_len,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=dims[0],
        v_head_dim=dims[1],
        capacities=tuple(capacity + uneven * (m % 3) for m in range(sequences)),
        mask=mask,
        scale=0.1,
        softcap=20.0 if _maybe(pick) else None,
        sinks=_maybe(pick),
        precision=pick.choice(precisions),
        batch_invariant=_maybe(pick),
        tokens=tokens,
        **fields,
    )


def many_rows(pick: random.Random) -> DecodeProblem:
    """A decode that Hopper has kernels of its own for: many rows, or lists of latent rows."""
    dim, tokens = pick.choice((64, 128, 256, 512)), pick.choice((None, None, 2112))
    fields: dict[str, Any] = {"head_dim": dim, "v_head_dim": dim, "tokens": tokens}
    fields["q_len"] = pick.choice((64, 1024)) if tokens is None else tokens
    if dim <= 256 and pick.random() < 0.6:
        fields |= {"cache_dtype": pick.choice(QUANTIZED), "quantized": True}
        if fields["cache_dtype"] in FLOAT8:
            fields["precision"] = pick.choice((None, "float8"))
    elif pick.random() < 0.3:
        fields |= {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "shared_kv": True}
        fields |= {"q_heads": pick.choice((1, 16, 128)), "listed": pick.choice((64, 2048))}
    elif dim <= 128 and pick.random() < 0.5:
        op = pick.choice(("decode", "listed_backward"))
        fields |= {"op": op, "q_heads": 16, "listed": pick.choice((64, 2048))}
    if pick.random() < 0.5:
        fields |= {"kind": "paged", "page_size": 64, "pages": 8 * 16}
    return dataclasses.replace(support._BASE["decode"], **fields)


def others(pick: random.Random) -> AppendProblem | KeepProblem | QuantizeProblem:
    """Operations that write to caches, and the rounding to float8."""
    op, kind = pick.choice("akq"), pick.choice(("per_sequence", "stacked", "paged"))
    gpu, dim, heads = pick.choice(GPUS), pick.choice(WIDE_DIMS), pick.choice((1, 2, 8))
    v_dim, dtype, quantized = pick.choice((dim, 64, None)), pick.choice(FLOATS), _maybe(pick)
    if op == "q":
        rows, to = pick.choice((1, 100, 1024)), pick.choice(FLOAT8)
        blocks = (pick.choice((1, rows)),) * 3
        sizes = (2, rows, rows, 4 * heads, heads, dim, v_dim or dim, blocks)
        return QuantizeProblem(gpu, dtype, to, *sizes)
    sequences, capacity = pick.choice((1, 64, 1900)), pick.choice((64, 8192))
    fields: dict[str, Any] = {
        "gpu": gpu,
        "kind": kind,
        "cache_dtype": pick.choice(QUANTIZED) if quantized else dtype,
        "sequences": sequences,
        "kv_heads": heads,
        "head_dim": dim,
        "v_head_dim": v_dim,
        "capacities": (capacity,) * sequences,
        "layers": pick.choice((None, 3)),
        "quantized": quantized,
    }
    if kind == "paged":
        fields |= {"page_size": 16, "pages": sequences * capacity // 16}
    if op == "k":
        return KeepProblem(width=pick.choice((0, 1, 16, 48, 200, 1000)), **fields)
    packed = _maybe(pick)
    change = Change(dim, eps=1e-6, pairs=dim // 2, positions=64) if _maybe(pick) else None
    fields |= {"packed": packed, "change": change}
    return AppendProblem(dtype=dtype, new_rows=pick.choice((1, 16, 300)), **fields)


def _maybe(pick: random.Random) -> bool:
    return pick.random() < 0.25


def _mask(pick: random.Random) -> Mask:
    width = pick.choice((0, 15, 63, 100, 127, 500))
    masks = (FULL, CAUSAL, CAUSAL, sliding_window(width + 1), Mask(width, 2), Mask(None, 30))
    arrive = (CAUSAL.filled(left=AT_RUN_TIME), FULL.filled(left=AT_RUN_TIME, right=AT_RUN_TIME))
    return pick.choice((*masks, *arrive))


# ---- checks --------------------------------------------------------------------------------------

# Bytes that `smem_bytes` may count beside a launch's own, at most: barriers and reductions.
RESERVED = 3072
# Launches beside those of a kernel: they look at functions, masks and ids for several kernels.
BESIDE = ("listed_tiles", "segments", "mask_bits", "key_mask_tiles")


def takers(problem: Any) -> Iterator[dispatch.Candidate]:
    """The kernels that no limit of their own keeps from a problem, whether others are faster or
    not.
    """
    of_lists = problem.op == "listed_backward"
    for row in dispatch.TABLES[problem.op] if of_lists else dispatch.table_of(problem):
        if not isinstance(row, dispatch.Candidate) or row._unavailable(problem) is not None:
            continue
        kernel, serves = row.kernel, True
        if isinstance(problem, AttentionProblem):  # asked where rows are split over devices
            serves = problem.share == 1 or kernel.shares_keys(problem)
            serves = serves and (problem.zigzag == 1 or kernel.reads_zigzag(problem))
            serves = serves and (problem.fetches == 1 or kernel.fetches(problem))
        if serves and kernel.limit(problem) is None:
            yield row


def may_lack_room(problem: Any) -> bool:
    """Whether no Config may fit: lengths of very many sequences; rows on the smallest GPUs; rows
    and their tangents in float32.
    """
    small = gpu_specs.shared_memory(problem.gpu) == gpu_specs.shared_memory("sm86")
    if isinstance(problem, DecodeProblem):
        return small or problem.sequences > 1000
    return problem.op == "flash_jvp" and (small or problem.dtype == "float32")


def check(problem: Any) -> list[str]:
    """The kernels whose own choice for a problem was compared with the limit of its GPU."""
    rows = list(takers(problem))
    for row in rows:
        if (refused := _config.no_room(row.kernel, problem)) is not None:
            assert may_lack_room(problem), f"{row.name}: {refused.reason}; {problem}"
            assert row.refusal(problem) == refused and not row.takes(problem)
    return [row.name for row in rows]


def run(case: Case, place: Any, tally: Any) -> None:
    """For the fuzzer: no kernel is called."""
    del place
    for some in case.problems():
        tally.calls["the choice of a Config"] += len(check(some))


def draw(seed: int, tiny: bool) -> Case:
    del tiny
    return Case(seed)


def simpler(case: Case) -> Iterator[dict[str, Any]]:
    """Halves."""
    half = case.count // 2
    if half:
        yield {"count": half}
        yield {"first": case.first + half, "count": case.count - half}


def allocate(call: Callable[[Any], Any], arguments: Any, generation: str) -> int:
    """Traces a call, and compares what Mosaic allocates for its launches with what kernels say and
    with what the GPU has. Returns the number of launches.
    """
    from tests.support import mosaic

    taken: dict[tuple[str, int], int] = {}  # the choice that launches belong to: the first
    with device.assume(generation), _config.watched() as choices:
        note = lambda *launch: taken.setdefault(launch, len(choices) - 1)  # noqa: E731
        with mosaic.launches_noted(note):
            mosaic.lower_for_cuda(call, arguments)
    tables = itertools.chain(*dispatch.TABLES.values())
    kernels = {row.name: row.kernel for row in tables if isinstance(row, dispatch.Candidate)}
    room = gpu_specs.shared_memory(generation)
    assert all(need <= room for _, need in taken), taken
    for number, (name, problem, config) in enumerate(choices):
        own = [launch for launch, owner in taken.items() if owner == number]
        own = [need for launch, need in own if launch not in BESIDE]
        blocks = 2 if getattr(config, "window", False) else 1  # on a multiprocessor
        said, most = kernels[name].smem_bytes(problem, config), blocks * max(own, default=0)
        assert most <= said <= room, f"{name}: {said} of {room}, allocates {most}; {problem}"
        # Sums for a score function's arrays may need no walk.
        exact = own and not getattr(problem, "learned", ())
        assert not exact or said - most <= RESERVED, f"{name}: {said}, allocates {most}; {problem}"
    return len(taken)
