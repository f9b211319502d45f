"""Named problems. Tests and benchmarks draw from here: what is fast is also what is proven.

A case is a frozen record of one call: its sizes, its options, and how to draw its arrays from a
seed (random normal: zeros and ones hide permutations, and some hardware runs them faster).
`case.tags` says what is special about it: the labels it was listed under, and what its own fields
imply ("causal", "gqa", "bfloat16", "h128", "kv_lengths", ...). `select` finds cases by a tag or by
a glob over names.
"""

import dataclasses
import fnmatch
import functools
import random
from collections.abc import Iterable
from typing import Any

from pallas_attn.bench.case import AppendCase, AttentionCase, DecodeCase
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window

Case = AttentionCase | DecodeCase | AppendCase


def _attention(
    name: str,
    sizes: tuple[int, ...],
    heads: tuple[int, int],
    dims: int | tuple[int, int],
    *labels: str,
    **fields: Any,
) -> AttentionCase:
    """sizes (B, T) or (B, T, S); heads (N, K); dims H or (H, Hv)."""
    batch, q_len, kv_len = sizes if len(sizes) == 3 else (*sizes, sizes[1])
    head_dim, v_head_dim = dims if isinstance(dims, tuple) else (dims, dims)
    return AttentionCase(
        name, batch, q_len, kv_len, *heads, head_dim, v_head_dim, labels=labels, **fields
    )


# (H, mask, (B, T), (N, K)): the shapes that every flash attention publishes.
_GRID = (
    (64, FULL, (8, 2048), (32, 32)),
    (64, FULL, (2, 8192), (32, 32)),
    (64, CAUSAL, (32, 512), (32, 32)),
    (64, CAUSAL, (8, 2048), (32, 32)),
    (64, CAUSAL, (2, 8192), (32, 32)),
    (128, FULL, (8, 2048), (16, 16)),
    (128, FULL, (2, 8192), (16, 16)),
    (128, CAUSAL, (8, 2048), (16, 16)),
    (128, CAUSAL, (2, 8192), (16, 16)),
    (128, CAUSAL, (2, 8192), (32, 8)),
    (128, CAUSAL, (1, 16384), (16, 16)),
    (256, FULL, (8, 2048), (8, 8)),
    (256, FULL, (2, 8192), (8, 8)),
    (256, CAUSAL, (8, 2048), (8, 8)),
    (256, CAUSAL, (2, 8192), (8, 8)),
)


def _grid(dtype: str, label: str) -> list[AttentionCase]:
    tail = "" if dtype == "bfloat16" else "_f16"
    rows = []
    for dim, mask, (batch, length), heads in _GRID:
        shape = f"b{batch}_t{length}_n{heads[0]}" + (f"k{heads[1]}" if heads[0] != heads[1] else "")
        name = f"h{dim}_{mask}_{shape}{tail}"
        rows.append(_attention(name, (batch, length), heads, dim, label, mask=mask, dtype=dtype))
    return rows


def _large_attention() -> list[AttentionCase]:
    causal = functools.partial(_attention, mask=CAUSAL)
    half, prompts = tuple([4096] * 4), _lognormal(16, 32768)
    exact: Any = {"dtype": "float32", "precision": "highest"}
    return [
        *_grid("bfloat16", "grid"),
        *_grid("float16", "twin"),
        _attention(
            "h128_window1024_t8192", (2, 8192), (16, 16), 128, "windows", mask=sliding_window(1024)
        ),
        _attention(
            "h128_window4096_t32768",
            (1, 32768),
            (16, 16),
            128,
            "windows",
            mask=sliding_window(4096),
        ),
        _attention(
            "h64_window128_t8192", (2, 8192), (32, 32), 64, "windows", mask=sliding_window(128)
        ),
        *(
            _attention(
                f"h128_window{window}_t8192_at_run_time",
                (2, 8192),
                (16, 16),
                128,
                "windows",
                mask=sliding_window(window),
                mask_at_run_time=True,
            )
            for window in (128, 1024)
        ),
        causal("h80_causal_t4096", (4, 4096), (16, 16), 80, "odd"),
        causal("h96_causal_t4096", (4, 4096), (16, 16), 96, "odd"),
        causal("h192_hv128_causal_t4096", (4, 4096), (16, 16), (192, 128), "odd"),
        causal("h128_causal_t3000_n28k4", (4, 3000), (28, 4), 128, "odd"),
        # What bits that repeat cost: the same without is in the grid.
        _attention(
            "h64_full_b2_t8192_n32_bits", (2, 8192), (32, 32), 64, "bits", deterministic=True
        ),
        causal(
            "h128_causal_b2_t8192_n16_bits", (2, 8192), (16, 16), 128, "bits", deterministic=True
        ),
        causal("f32_h64_causal_t2048", (4, 2048), (16, 16), 64, "corner", dtype="float32"),
        _attention("f32_h128_full_t2048", (4, 2048), (16, 16), 128, "corner", dtype="float32"),
        causal("f32_h128_causal_t4096", (2, 4096), (16, 16), 128, "corner", dtype="float32"),
        causal("f32_h64_causal_t2048_highest", (4, 2048), (16, 16), 64, "corner", **exact),
        _attention("f32_h128_full_t2048_highest", (4, 2048), (16, 16), 128, "corner", **exact),
        causal("f32_h128_causal_t4096_highest", (2, 4096), (16, 16), 128, "corner", **exact),
        *(
            _attention(name, (2, 2048), (16, 16), dim, "wide", mask=mask, **how)
            for dim, mask in ((192, FULL), (256, FULL), (256, CAUSAL))
            for name, how in (
                (f"f32_h{dim}_{mask}_t2048", {"dtype": "float32"}),
                (f"f32_h{dim}_{mask}_t2048_highest", exact),
            )
        ),
        # Promises: 8 packed documents cost what 8 batch rows do; keys past a length cost nothing.
        causal("documents_8x1024", (1, 8192), (16, 16), 128, "cost", segments=(1024,) * 8),
        causal("rows_8x1024", (8, 1024), (16, 16), 128, "cost"),
        causal("documents_8x4096", (1, 32768), (16, 16), 128, "cost", segments=(4096,) * 8),
        causal("rows_8x4096", (8, 4096), (16, 16), 128, "cost"),
        *(
            causal(name, (1, 32768), (32, 8), 128, "cost", segments=prompts, packed=packed)
            for name, packed in (("documents_16_lognormal", False), ("packed_16_lognormal", True))
        ),
        # One kv head's rows are more than L2 holds.
        causal("h128_causal_t65536_n32k8", (1, 65536), (32, 8), 128, "long"),
        causal("documents_8x4096_n32k8", (1, 32768), (32, 8), 128, "long", segments=(4096,) * 8),
        *(
            causal(f"few_rows_m{m}_t{t}", (m, t, 8192), (32, 8), 128, "few_rows", q_offset=8192 - t)
            for m, t in ((8, 64), (8, 16), (1, 1024), (1, 256), (1, 64), (1, 16))
        ),
        _attention("lengths_half_of_8192", (4, 8192), (16, 16), 128, "cost", kv_lengths=half),
        _attention("lengths_none_of_8192", (4, 8192), (16, 16), 128, "cost"),
    ]


def _functions() -> list[AttentionCase]:
    """Masks and scores as functions: those that an option says too, and those that none says."""
    heads = {64: 32, 128: 16, 256: 8}
    named = [(name, dim) for dim in heads for name in (("causal", 0), ("window", 1024))]
    named += [
        (name, 128)
        for name in (
            ("full", 0),
            ("documents", 1000),
            ("prefix", 1024),
            ("block_diffusion", 32),
            ("dilated", 4),
            ("alibi", 0),
            ("random_blocks", 128),
        )
    ]
    rows = []
    for both in (False, True):
        how: dict[str, Any] = {"both": both}
        tail = "_both" if both else ""
        rows += [
            _attention(
                f"mask_h{dim}_{name}{n or ''}{tail}",
                (2, 8192),
                (heads[dim],) * 2,
                dim,
                "grid",
                function=(name, n),
                **how,
            )
            for (name, n), dim in named
        ]
        # That of jax-ml/jax#35114.
        causal: Any = {"function": ("causal", 0), **how}
        rows.append(
            _attention(f"mask_h128_causal_t4096{tail}", (1, 4096), (16, 16), 128, "grid", **causal)
        )
    return rows


def _edge_attention() -> list[AttentionCase]:
    """Small and awkward: both sides of a tile's edge, empty rows, every argument alone."""
    lengths = (0, 1, 63, 64, 65, 127, 128, 129)
    plain = functools.partial(_attention, dims=64)
    rows = [
        _attention("attention_16x16", (2, 16), (1, 1), 32, "ancestor", dtype="float32"),
        _attention("causal_32x32", (1, 32), (1, 1), 64, "ancestor", dtype="float32", mask=CAUSAL),
        _attention("attention_10x20", (4, 10, 20), (1, 1), (32, 48), "ancestor", dtype="float32"),
        _attention("attention_8x24", (1, 8, 24), (1, 1), 16, "ancestor", dtype="float32"),
        plain("one_row", (2, 1), (2, 2)),
        plain("one_query_many_keys", (2, 1, 300), (4, 2), mask=Mask(right=299), magnitude=0.3),
        plain("no_keys", (2, 64, 0), (2, 2)),
        plain("no_queries", (2, 0, 64), (2, 2)),
        plain("no_batch", (0, 64), (2, 2)),
        plain("t_below_s", (2, 100, 300), (2, 2), mask=CAUSAL),
        plain("t_equals_s", (2, 300), (2, 2), mask=CAUSAL),
        plain("t_above_s", (2, 300, 100), (2, 2), mask=CAUSAL),
        plain("bottom_right", (2, 100, 300), (2, 2), mask=CAUSAL, q_offset=200),
        plain("offsets_by_row", (3, 70, 300), (2, 2), mask=CAUSAL, q_offset=(0, 129, -40)),
        plain("band", (2, 200, 260), (2, 2), mask=Mask(left=70, right=40)),
        plain("strictly_causal", (2, 130), (2, 2), mask=Mask(right=-1)),
        plain("lookahead", (1, 130, 300), (2, 2), mask=Mask(right=65)),
        plain("window_of_one", (2, 130), (2, 2), mask=sliding_window(1)),
        plain("window_t_below_s", (2, 100, 300), (2, 2), mask=sliding_window(50), q_offset=200),
        plain("window_t_above_s", (2, 300, 100), (2, 2), mask=sliding_window(50)),
        plain("band_at_run_time", (2, 200, 260), (2, 2), mask=Mask(70, 40), mask_at_run_time=True),
        plain("kv_lengths", (8, 130), (2, 2), kv_lengths=lengths),
        plain("kv_lengths_causal", (8, 130), (2, 2), mask=CAUSAL, kv_lengths=lengths),
        plain("q_lengths", (8, 130), (2, 2), q_lengths=lengths, kv_lengths=lengths[::-1]),
        plain("documents", (2, 260), (2, 2), mask=CAUSAL, segments=(1, 63, 65, 120)),
        plain("documents_full", (2, 260, 200), (2, 2), segments=(100, 160), kv_segments=(40, 128)),
        plain("documents_unseen", (2, 260, 200), (2, 2), segments=(100, 160), kv_segments=(200,)),
        plain("segments_mixed", (2, 130, 200), (2, 2), segments=3),
        plain("softcap", (2, 130), (2, 2), mask=CAUSAL, softcap=20.0),
        plain("softcap_huge_logits", (2, 130), (2, 2), softcap=5.0, magnitude=300.0),
        plain("saturated", (2, 130), (2, 2), mask=CAUSAL, magnitude=30.0),
        plain("scale", (2, 130), (2, 2), scale=0.7),
        plain("scale_negative", (2, 130), (2, 2), scale=-0.1),
        plain("sinks", (2, 130), (4, 2), mask=CAUSAL, sinks=True),
        plain("sinks_empty_rows", (2, 130), (2, 2), kv_lengths=(0, 77), sinks=True),
        plain("bias", (2, 130, 200), (4, 2), bias_shape=(2, 4, 130, 200)),
        plain("bias_by_head", (2, 130), (4, 2), mask=CAUSAL, bias_shape=(1, 4, 1, 130)),
        plain("bias_by_row", (2, 130), (2, 2), bias_shape=(2, 1, 130, 1), bias_dtype="bfloat16"),
        plain("mask_array", (2, 130, 200), (4, 2), mask_shape=(2, 4, 130, 200)),
        plain("mask_array_by_batch", (2, 130), (2, 2), mask=CAUSAL, mask_shape=(2, 1, 1, 130)),
        plain(
            "everything",
            (3, 130, 200),
            (8, 2),
            mask=sliding_window(90),
            q_offset=(0, 70, 199),
            kv_lengths=(0, 150, 200),
            segments=(100, 100),
            softcap=30.0,
            bias_shape=(1, 8, 130, 200),
            mask_shape=(3, 1, 130, 200),
            sinks=True,
        ),
    ]
    for group, kv_heads in ((1, 3), (4, 2), (7, 1), (7, 2), (8, 1)):
        heads = (group * kv_heads, kv_heads)
        rows.append(
            plain(f"group{group}_kv{kv_heads}", (2, 130, 190), heads, mask=CAUSAL, q_offset=60)
        )
    for dim in (8, 32, 72, 80, 96, 112, 128, 160, 192, 224, 256):
        rows.append(_attention(f"dim{dim}", (1, 130), (2, 1), dim, "dims", mask=CAUSAL))
    for dims in ((192, 128), (64, 128), (128, 64), (40, 256), (72, 24)):
        rows.append(
            _attention(f"dim{dims[0]}_{dims[1]}", (1, 130), (2, 1), dims, "dims", mask=CAUSAL)
        )
    for dtype in ("float16", "float32"):
        for mask in (FULL, CAUSAL):
            rows.append(plain(f"{dtype}_{mask}", (2, 130, 200), (4, 2), mask=mask, dtype=dtype))
    rows.append(
        plain("float32_highest", (2, 130, 200), (4, 2), dtype="float32", precision="highest")
    )
    rows.append(_attention("uniform", (2, 130), (2, 2), 64, magnitude=0.0))
    return [dataclasses.replace(row, labels=(*row.labels, "edge")) for row in rows]


def _lognormal(sequences: int, total: int) -> tuple[int, ...]:
    """Lengths as prompts have them, which add up to `total`; the same in every run."""
    generator = random.Random(sequences * total)
    drawn = [generator.lognormvariate(0, 1) for _ in range(sequences)]
    lengths = [int(total * x / sum(drawn)) for x in drawn]
    return (*lengths[:-1], total - sum(lengths[:-1]))


def _uniform(sequences: int, high: int) -> tuple[int, ...]:
    """Lengths as a serving batch has them: uniform in 1..high, the same in every run."""
    generator = random.Random(sequences * high)
    return tuple(generator.randint(1, high) for _ in range(sequences))


_KINDS = (("per_sequence", None), ("stacked", None), ("paged", 16))


def _decode() -> list[DecodeCase]:
    # Each row: batch, rows in the cache, query heads, kv heads, head dim.
    dense = (
        (1, 8192, 32, 8, 128),
        (1, 131072, 32, 8, 128),
        (16, 8192, 32, 8, 128),
        (32, 8192, 8, 8, 128),
        (32, 8192, 64, 8, 64),
        (64, 2048, 32, 8, 128),
        (64, 8192, 32, 8, 128),
        (128, 1024, 32, 8, 128),
    )
    latency = ((1, 1024, 32, 8, 128), (8, 512, 32, 8, 128), (8, 4096, 64, 8, 128))
    uneven = ((32, 8192, 32, 8, 128), (64, 4096, 28, 4, 128))
    rows = []
    for label, shapes in (("grid", dense), ("latency", latency), ("uneven", uneven)):
        for batch, length, q_heads, kv_heads, dim in shapes:
            heads, dims = (q_heads, kv_heads), (dim, dim)
            lengths = _uniform(batch, length) if label == "uneven" else (length,) * batch
            suffix = "_uneven" if label == "uneven" else ""
            for kind, page in _KINDS:
                name = f"decode_{kind}_b{batch}_s{length}_n{q_heads}k{kv_heads}_h{dim}{suffix}"
                fields: dict[str, Any] = {"kind": kind, "page_size": page, "labels": (label,)}
                rows.append(DecodeCase(name, lengths, *heads, *dims, length, **fields))
    for kind, page in _KINDS:
        rows += _quantized_and_latent(kind, page)
        rows.append(_dense_decode(kind, page, 64, 4096, "wide", dtype="float32"))
    exact: Any = {"dtype": "float32", "precision": "highest"}
    rows.append(_dense_decode("stacked", None, 64, 4096, "wide", **exact))
    rows.append(_dense_decode("stacked", None, 1, 8192, "wide", dtype="float32"))
    rows.append(_dense_decode("paged", 64, 64, 8192, "pages"))
    rows.append(_dense_decode("paged", 128, 64, 8192, "pages"))
    rows.append(_dense_decode("per_sequence", None, 256, 1024, "many"))
    small = functools.partial(
        DecodeCase,
        q_heads=8,
        kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        capacity=256,
        labels=("edge",),
    )
    for kind, page in _KINDS:
        make = functools.partial(small, kind=kind, page_size=page)
        rows += [
            make(f"decode_{kind}_edges", (1, 2, 63, 64, 65, 128, 255, 256)),
            make(f"decode_{kind}_empty", (0, 100, 0)),
            make(f"decode_{kind}_chunk", (5, 64, 200), q_len=5),
            make(f"decode_{kind}_chunk_longer_than_cache", (0, 2, 4), q_len=4),
            make(f"decode_{kind}_window", (3, 100, 256), mask=sliding_window(50), q_len=2),
            make(f"decode_{kind}_softcap_sinks", (17, 130), softcap=20.0, sinks=True),
            make(f"decode_{kind}_group7", (33, 256), q_heads=7, kv_heads=1),
            make(f"decode_{kind}_mha", (33, 256), q_heads=4, kv_heads=4),
            make(f"decode_{kind}_dims_128_64", (33, 256), head_dim=128, v_head_dim=64),
            make(f"decode_{kind}_float16", (33, 256), dtype="float16"),
            make(f"decode_{kind}_float32", (33, 256), dtype="float32"),
            make(f"decode_{kind}_float32_highest", (33, 256), dtype="float32", precision="highest"),
            make(f"decode_{kind}_float8_e4m3fn", (0, 33, 256), cache_dtype="float8_e4m3fn"),
            make(f"decode_{kind}_int8", (64, 1, 200), cache_dtype="int8", q_len=3),
            make(
                f"decode_{kind}_latent",
                (0, 100, 256),
                kv_heads=1,
                head_dim=576,
                v_head_dim=512,
                shared_kv=True,
            ),
        ]
    return rows


def _full(op: str, batch: int, rows: int, cache: tuple[str, int | None], **more: Any) -> DecodeCase:
    """Several new rows a sequence over caches of 8192 rows that are full."""
    (kind, page), end = cache, f"_{more['cache_dtype']}" if "cache_dtype" in more else ""
    name = f"{op}_{kind}{page or ''}_m{batch}_t{rows}{end}"
    sizes = (8192,) * batch, 32, 8, 128, 128, 8192
    return DecodeCase(name, *sizes, q_len=rows, kind=kind, page_size=page, **more)


def _prefill() -> list[DecodeCase]:
    """Many new rows a sequence over caches that are full: what a chunk of a prompt costs."""
    caches = (("stacked", None), ("per_sequence", None), ("paged", 16), ("paged", 64))
    sizes = [(8, rows) for rows in (4096, 1024, 256, 64, 16, 8)]
    sizes += [(1, rows) for rows in (1024, 256, 64, 16)]
    narrow = [
        _full("prefill", 8, rows, cache, cache_dtype=dtype, labels=("narrow",))
        for rows in (4096, 1024, 256, 64, 16)
        for cache, dtype in (
            (("stacked", None), "float8_e4m3fn"),
            (("stacked", None), "int8"),
            (("per_sequence", None), "float8_e4m3fn"),
            (("paged", 64), "float8_e4m3fn"),
        )
    ]
    return narrow + [
        _full("prefill", *size, cache, labels=("grid",)) for size in sizes for cache in caches
    ]


def _trees() -> list[DecodeCase]:
    """Drafts of speculative decoding, which form trees; packed, as many of each sequence or not."""
    caches = (("stacked", None), ("paged", 16), ("paged", 64))
    sizes: dict[str, dict[str, Any]] = {
        f"m{batch}_t{drafts}": {"lengths": (8192,) * batch, "q_len": drafts}
        for batch, drafts in ((8, 64), (1, 64), (64, 4))
    }
    sizes["packed_m8_t64"] = {"lengths": (8192,) * 8, "rows": (64,) * 8}
    sizes["packed_m64"] = {"lengths": (8192,) * 64, "rows": (1, 64, 4, 16) * 16}
    heads: dict[str, int] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    return [
        DecodeCase(
            f"tree_{kind}{page or ''}_{name}",
            **fields | heads,
            capacity=8192,
            kind=kind,
            page_size=page,
            tree=True,
            labels=("trees",),
        )
        for name, fields in sizes.items()
        for kind, page in caches
    ]


def _mixtures() -> list[DecodeCase]:
    """Packed rows: what a server's step costs, beside its parts; whole prompts; single tokens."""
    tokens = tuple(min(n, 8192) for n in _lognormal(64, 64 * 2000))
    prompts = _lognormal(16, 32768)
    full = (8192,) * 64
    sizes: dict[str, dict[str, Any]] = {
        "mixed_{}": {"lengths": (*tokens, 8192), "rows": (*(1,) * 64, 2048), "labels": ("mixed",)},
        "mixed_{}_tokens_alone": {"lengths": tokens, "labels": ("mixed",)},
        "mixed_{}_chunk_alone": {"lengths": (8192,), "q_len": 2048, "labels": ("mixed",)},
        "packed_{}_16_lognormal": {"lengths": prompts, "rows": prompts, "labels": ("packed",)},
        "packed_{}_one_token": {"lengths": full, "rows": (1,) * 64, "labels": ("packed",)},
        "packed_{}_one_token_lognormal": {"lengths": tokens, "rows": (1,) * 64},
    }
    heads: dict[str, int] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    return [
        DecodeCase(
            name.format(f"{kind}{page or ''}"),
            capacity=-(-max(max(fields["lengths"]), 64) // 64) * 64,
            kind=kind,
            page_size=page,
            **{"labels": ("packed",)} | fields | heads,
        )
        for name, fields in sizes.items()
        for kind, page in (("stacked", None), ("paged", 16), ("paged", 64))
    ]


def _dense_decode(
    kind: str, page: int | None, batch: int, length: int, label: str, **fields: Any
) -> DecodeCase:
    """Sequences of one length, 32 query heads on 8 kv heads of 128."""
    tail = "".join(f"_{value}" for value in fields.values())
    tail += f"_page{page}" if page not in (None, 16) else ""
    name = f"decode_{kind}_b{batch}_s{length}_n32k8_h128{tail}"
    sizes = ((length,) * batch, 32, 8, 128, 128, length)
    return DecodeCase(name, *sizes, kind=kind, page_size=page, labels=(label,), **fields)


def _quantized_and_latent(kind: str, page: int | None) -> list[DecodeCase]:
    """Caches of one byte a number, and the latent cache of multi-head latent attention."""
    rows = [
        _dense_decode(kind, page, 64, 8192, "narrow", cache_dtype=dtype)
        for dtype in ("float8_e4m3fn", "float8_e5m2", "int8")
    ]
    rows.append(_dense_decode(kind, page, 1, 8192, "narrow", cache_dtype="float8_e4m3fn"))
    fields: dict[str, Any] = {"kind": kind, "page_size": page, "shared_kv": True}
    for batch, length, heads in ((64, 4096, 16), (32, 8192, 128)):
        name = f"decode_{kind}_b{batch}_s{length}_n{heads}_latent"
        sizes = ((length,) * batch, heads, 1, 576, 512, length)
        rows.append(DecodeCase(name, *sizes, labels=("latent",), **fields))
    return rows


def _appends(
    name: str, lengths: tuple[int, ...], capacity: int, label: str, narrow: bool = True, **more: Any
) -> list[AppendCase]:
    """An append of 8 heads of 128 to caches of every kind; `narrow`: and to quantised ones."""
    rows = []
    for kind, page in _KINDS:
        capacities = (capacity,) * (len(lengths) if kind == "per_sequence" else 1)
        fields: dict[str, Any] = more | {"kind": kind, "page_size": page, "capacities": capacities}
        for dtype in (None, "float8_e4m3fn", "int8") if narrow else (None,):
            tail, labels = (f"_{dtype}", ("narrow",)) if dtype else ("", (label,))
            fields |= {"cache_dtype": dtype, "labels": labels}
            rows.append(AppendCase(f"append_{kind}_{name}{tail}", lengths, 8, 128, 128, **fields))
    return rows


def _append() -> list[AppendCase]:
    rows = []
    for m in (1, 32, 128, 256):
        rows += _appends(f"m{m}", _uniform(m, 1023), 1024, "grid", narrow=m in (1, 128))
    rows += _appends("m8_t2048", _uniform(8, 512), 2560, "long", new_rows=2048)
    for t in (8, 16):  # drafts, half of which are kept, and all of those move
        rows += [
            dataclasses.replace(one, name=one.name.replace("append", "keep"), kept=t // 2)
            for one in _appends(f"m128_t{t}", _uniform(128, 1000), 1024, "keep", t == 8, new_rows=t)
        ]
    edges: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    edges["labels"] = ("edge",)
    lengths, mixed = (0, 1, 63, 4, 31), (64, 72, 64, 80, 128)
    for kind, page in _KINDS:
        make: Any = functools.partial(AppendCase, kind=kind, page_size=page, **edges)
        sizes = mixed if kind == "per_sequence" else (64,)
        rows += [
            make(
                f"append_{kind}_ancestor",
                (4,) * 4,
                capacities=(64,) * 4 if kind == "per_sequence" else (64,),
            ),
            make(f"append_{kind}_distinct", lengths, capacities=sizes),
            make(f"append_{kind}_chunk", (0, 1, 59, 4, 31), capacities=sizes, new_rows=5),
            make(
                f"append_{kind}_ragged_chunk",
                (0, 1, 59, 4, 31),
                capacities=sizes,
                new_rows=5,
                new_lengths=(5, 0, 1, 3, 4),
            ),
            make(
                f"append_{kind}_float8_e4m3fn",
                (0, 1, 59, 4, 31),
                capacities=sizes,
                new_rows=5,
                cache_dtype="float8_e4m3fn",
            ),
        ]
        rows.append(
            make(f"keep_{kind}_few", (0, 1, 59, 4, 31), capacities=sizes, new_rows=5, kept=2)
        )
    make = functools.partial(
        AppendCase, kv_heads=2, labels=("edge",), capacities=(32, 40), new_rows=3
    )
    rows.append(
        make("append_float32_dims_64_32", (0, 29), head_dim=64, v_head_dim=32, dtype="float32")
    )
    rows.append(
        make("append_float16_dims_72_72", (7, 37), head_dim=72, v_head_dim=72, dtype="float16")
    )
    return rows


def _shared() -> list[DecodeCase]:
    """Sequences with rows in common, in pages that they share, and 256 rows of their own each."""
    rows = []
    for name, shared in (
        ("prompt32768", ((64, 32768),)),
        ("groups8_prompt4096", ((8, 4096),)),
        ("prompt8192_groups8_4096", ((64, 8192), (8, 4096))),
        ("nothing", ()),
    ):
        length = sum(count for _, count in shared) + 256 if shared else 8192
        sizes = ((length,) * 64, 32, 8, 128, 128, length)
        for page, finding in ((16, False), (64, False), (16, True)):  # of one group
            title = f"shared_{name}_pages{page}" + ("_found" if finding else "")
            fields: dict[str, Any] = {"kind": "paged", "page_size": page, "finding": finding}
            rows.append(DecodeCase(title, *sizes, **fields, shared=shared, labels=("grid",)))
    return rows


ATTENTION: tuple[AttentionCase, ...] = (*_large_attention(), *_edge_attention())
DECODE: tuple[DecodeCase, ...] = tuple(_decode())
PREFILL: tuple[DecodeCase, ...] = (*_prefill(), *_mixtures(), *_trees())
APPEND: tuple[AppendCase, ...] = tuple(_append())
SHARED_PREFIX: tuple[DecodeCase, ...] = tuple(_shared())
MASK: tuple[AttentionCase, ...] = tuple(_functions())
# Those of attention draw from ATTENTION.
LISTS: dict[str, tuple[Case, ...]] = {
    "decode": DECODE,
    "prefill": PREFILL,
    "shared_prefix": SHARED_PREFIX,
    "append": APPEND,
    "mask": MASK,
}


def select(cases: Iterable[Case], wanted: str) -> tuple[Any, ...]:
    """The cases, in their order, that a comma-separated list of tags and name globs asks for.

    `grid+causal` wants both tags; `-h256` takes away what an earlier term brought in.
    """
    cases, chosen = tuple(cases), dict[str, Case]()
    for term in filter(None, wanted.split(",")):
        drop, term = term.startswith("-"), term.removeprefix("-")
        hits = [case for case in cases if all(_matches(case, part) for part in term.split("+"))]
        if not hits:
            tags = sorted(frozenset().union(*(case.tags for case in cases)))
            raise ValueError(
                f"No case matches {term!r}. Tags: {', '.join(tags)}; or a glob over names."
            )
        for case in hits:
            chosen.pop(case.name, None) if drop else chosen.setdefault(case.name, case)
    if not chosen:
        raise ValueError(f"cases: expected tags or globs that leave a case, got {wanted!r}")
    return tuple(case for case in cases if case.name in chosen)


def _matches(case: Case, part: str) -> bool:
    return part in case.tags or fnmatch.fnmatchcase(case.name, part)


def draw_attention(seed: int) -> AttentionCase:
    """One small problem from the whole argument space of `flash_attention`; fixed by its seed."""
    pick = random.Random(seed)

    def maybe(value):
        return value if pick.random() < 0.25 else None

    batch, kv_heads, group = pick.randint(1, 3), pick.randint(1, 3), pick.choice((1, 1, 2, 4, 7, 8))
    q_len = pick.choice((1, 17, 64, 127, 128, 129, 200, 333))
    kv_len = pick.choice((q_len, q_len, 1, 63, 64, 65, 190, 300, 400))
    head_dim = pick.choice((8, 64, 64, 72, 96, 128, 128, 192, 256))
    v_head_dim = pick.choice((head_dim, head_dim, head_dim, 64, 128))
    left, right = pick.randint(0, 200), pick.randint(0, 100)
    mask = pick.choice(
        (
            FULL,
            CAUSAL,
            CAUSAL,
            sliding_window(left + 1),
            Mask(left, right),
            Mask(None, right),
            Mask(left, None),
        )
    )
    heads = group * kv_heads
    shapes = [tuple(pick.choice((n, 1)) for n in (batch, heads, q_len, kv_len)) for _ in range(2)]
    offsets = (pick.randint(-50, 300), tuple(pick.randint(-50, 300) for _ in range(batch)))
    return AttentionCase(
        f"drawn_{seed}", batch, q_len, kv_len, heads, kv_heads, head_dim, v_head_dim,
        dtype=pick.choice(("bfloat16", "bfloat16", "float16")),
        mask=mask,
        scale=maybe(pick.uniform(0.02, 0.5)),
        softcap=maybe(pick.uniform(2.0, 50.0)),
        q_offset=pick.choice((0, 0, 0, *offsets)),
        q_lengths=maybe(tuple(pick.randint(0, q_len) for _ in range(batch))),
        kv_lengths=maybe(tuple(pick.randint(0, kv_len) for _ in range(batch))),
        segments=maybe(pick.choice((2, (q_len // 3 + 1, q_len // 2 + 1)))),
        bias_shape=maybe(shapes[0]),
        mask_shape=maybe(shapes[1]),
        sinks=pick.random() < 0.25,
        labels=("drawn",),
    )  # fmt: skip


def draw_decode(seed: int) -> DecodeCase:
    """One small problem from the argument space of `decode_attention`; fixed by its seed."""
    pick = random.Random(seed)

    def maybe(value):
        return value if pick.random() < 0.25 else None

    kind, page = pick.choice((*_KINDS, ("paged", 8), ("paged", 24), ("paged", 128)))
    kv_heads, group = pick.randint(1, 3), pick.choice((1, 1, 2, 4, 7, 8, 20))
    head_dim = pick.choice((8, 64, 64, 72, 96, 128, 128, 192, 256))
    v_head_dim = pick.choice((head_dim, head_dim, head_dim, 64, 128))
    if shared := pick.random() < 0.1:
        kv_heads, head_dim, v_head_dim = 1, 576, 512
    capacity = pick.choice((1, 64, 65, 200, 300, 520))
    capacity = capacity if page is None else -(-capacity // page) * page
    near = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, capacity - 1, capacity)
    most = pick.choice((1, 2, 5, 9, 40))
    lengths = [
        pick.choice((*near, pick.randint(0, capacity))) for _ in range(pick.randint(1, most))
    ]
    left, right = pick.randint(0, 200), pick.randint(-3, 3)
    mask = pick.choice((CAUSAL, CAUSAL, FULL, sliding_window(left + 1), Mask(left + 3, right)))
    return DecodeCase(
        f"drawn_decode_{seed}",
        tuple(max(min(n, capacity), 0) for n in lengths),
        *(group * kv_heads, kv_heads, head_dim, v_head_dim, capacity),
        q_len=pick.choice((1, 1, 1, 2, 3, 5, 16)),
        dtype=pick.choice(("bfloat16", "bfloat16", "float16")),
        kind=kind,
        page_size=page,
        mask=mask,
        scale=maybe(pick.choice((0.3, 0.05, -0.1, 0.0))),
        softcap=maybe(pick.uniform(2.0, 50.0)),
        sinks=pick.random() < 0.25,
        cache_dtype=maybe(pick.choice(("float8_e4m3fn", "float8_e5m2", "int8"))),
        shared_kv=shared,
        batch_invariant=pick.random() < 0.25,
        labels=("drawn",),
    )
