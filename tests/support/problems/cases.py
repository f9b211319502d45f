"""Named problems. Tests and benchmarks draw from here: what is fast is also what is proven.

A case is a frozen record of one call: its sizes, its options, and how to draw its arrays from a
seed (random normal: zeros and ones hide permutations, and some hardware runs them faster).
`case.tags` are the labels that it is listed under, and those that its own fields imply ("causal",
"gqa", "bfloat16", "h128", "kv_lengths", ...). `select` finds cases by a tag or by a glob over
names.
"""

import dataclasses
import fnmatch
import functools
import itertools
import random
from collections.abc import Iterable
from typing import Any

from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.support.problems import gemma_cases
from tests.support.problems.case import AppendCase, AttentionCase, DecodeCase

Case = AttentionCase | DecodeCase | AppendCase
Cache = tuple[str, int | None]  # kind, rows of a page
_EXACT: dict[str, Any] = {"dtype": "float32", "precision": "highest"}
_KINDS: tuple[Cache, ...] = (("per_sequence", None), ("stacked", None), ("paged", 16))
_STACKED, _PAGED16, _PAGED64 = ("stacked", None), ("paged", 16), ("paged", 64)


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


_PROMPTS = _lognormal(16, 32768)


# ---- attention ----------------------------------------------------------------------------------


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


def _grid(dtype: str, label: str, tail: str) -> list[AttentionCase]:
    rows = []
    for dim, mask, (batch, length), (n, k) in _GRID:
        name = f"h{dim}_{mask}_b{batch}_t{length}_n{n}{f'k{k}' * (n != k)}{tail}"
        rows.append(_attention(name, (batch, length), (n, k), dim, label, mask=mask, dtype=dtype))
    return rows


def _large_attention() -> list[AttentionCase]:
    full, causal = _attention, functools.partial(_attention, mask=CAUSAL)
    equal, grouped = (16, 16), (32, 8)
    f32: dict[str, Any] = {"dtype": "float32"}
    rows = [*_grid("bfloat16", "grid", ""), *_grid("float16", "twin", "_f16")]

    def window(name: str, keys: int, sizes: tuple[int, int], heads: int, dim: int, **fields: Any):
        mask = sliding_window(keys)
        rows.append(full(name, sizes, (heads, heads), dim, "windows", mask=mask, **fields))

    window("h128_window1024_t8192", 1024, (2, 8192), 16, 128)
    window("h128_window4096_t32768", 4096, (1, 32768), 16, 128)
    window("h64_window128_t8192", 128, (2, 8192), 32, 64)
    for keys in (128, 1024):
        name = f"h128_window{keys}_t8192_at_run_time"
        window(name, keys, (2, 8192), 16, 128, mask_at_run_time=True)
    # gpt-oss and DeepSeek-V4, and their windows without sinks, which peers take.
    for tail, sinks in (("", True), ("_no_sinks", False)):
        local: dict[str, Any] = {"mask": sliding_window(128), "sinks": sinks}
        rows.append(full(f"gpt_oss_t8192{tail}", (1, 8192), (64, 8), 64, "windows", **local))
        labels: tuple[str, ...] = ("windows", "deepseek_v4")
        rows.append(full(f"deepseek_v4_t4096{tail}", (1, 4096), (64, 1), 512, *labels, **local))
    rows += [
        causal("h80_causal_t4096", (4, 4096), equal, 80, "odd"),
        causal("h96_causal_t4096", (4, 4096), equal, 96, "odd"),
        causal("h192_hv128_causal_t4096", (4, 4096), equal, (192, 128), "odd"),
        causal("h128_causal_t3000_n28k4", (4, 3000), (28, 4), 128, "odd"),
        # Gemma 4's global layers
        full("h512_full_b1_t8192_n32k4", (1, 8192), (32, 4), 512, "gemma4"),
        causal("h512_causal_b1_t8192_n32k4", (1, 8192), (32, 4), 512, "gemma4"),
        # The price of bits that repeat: the same cases without are in the grid.
        full("h64_full_b2_t8192_n32_bits", (2, 8192), (32, 32), 64, "bits", deterministic=True),
        causal("h128_causal_b2_t8192_n16_bits", (2, 8192), equal, 128, "bits", deterministic=True),
    ]
    for tail, how in (("", f32), ("_highest", _EXACT)):
        rows += [
            causal(f"f32_h64_causal_t2048{tail}", (4, 2048), equal, 64, "corner", **how),
            full(f"f32_h128_full_t2048{tail}", (4, 2048), equal, 128, "corner", **how),
            causal(f"f32_h128_causal_t4096{tail}", (2, 4096), equal, 128, "corner", **how),
        ]
    for dim, mask in ((192, FULL), (256, FULL), (256, CAUSAL)):
        for tail, how in (("", f32), ("_highest", _EXACT)):
            name = f"f32_h{dim}_{mask}_t2048{tail}"
            rows.append(full(name, (2, 2048), equal, dim, "wide", mask=mask, **how))
    # Promises: 8 packed documents cost what 8 batch rows do; keys past a length cost nothing.
    segments: tuple[int, ...]
    for length in (1024, 4096):
        name, segments = f"documents_8x{length}", (length,) * 8
        rows.append(causal(name, (1, 8 * length), equal, 128, "cost", segments=segments))
        rows.append(causal(f"rows_8x{length}", (8, length), equal, 128, "cost"))
    for name, packed in (("documents_16_lognormal", False), ("packed_16_lognormal", True)):
        sizes, segments = (1, 32768), _PROMPTS
        rows.append(causal(name, sizes, grouped, 128, "cost", segments=segments, packed=packed))
    # One kv head's rows are more than L2 holds.
    name, segments = "documents_8x4096_n32k8", (4096,) * 8
    rows.append(causal("h128_causal_t65536_n32k8", (1, 65536), grouped, 128, "long"))
    rows.append(causal(name, (1, 32768), grouped, 128, "long", segments=segments))
    for m, t in ((8, 64), (8, 16), (1, 1024), (1, 256), (1, 64), (1, 16)):
        name, offset = f"few_rows_m{m}_t{t}", 8192 - t
        rows.append(causal(name, (m, t, 8192), grouped, 128, "few_rows", q_offset=offset))
    # Triangle attention and pair bias of AlphaFold 3, T5's encoder, a padded batch.
    sizes_of_pairs = (384, 384, 4, 32), (768, 768, 4, 32), (512, 384, 8, 32), (384, 384, 4, 16)
    for batch, length, n, dim in sizes_of_pairs:
        pair: dict[str, Any] = {"bias_shape": (1, n, length, length), "bias_dtype": "bfloat16"}
        pair |= {"mask_shape": (batch, 1, 1, length), "shown_keys": ((0, length),) * batch}
        name = f"h{dim}_pair_bias_b{batch}_t{length}_n{n}"
        labels = ("pair_bias", "alphafold3") if dim == 32 and n == 4 else ("pair_bias",)
        rows.append(full(name, (batch, length), (n, n), dim, *labels, **pair))
    # The Pairformer has a bias for each protein, samples of the diffusion transformer share one.
    for dim, batch, biases in ((24, 4, 4), (48, 5, 1)):
        pair = {"bias_shape": (biases, 16, 768, 768), "bias_dtype": "bfloat16"}
        name, labels = f"h{dim}_pair_bias_b{batch}_t768_n16", ("pair_bias", "alphafold3")
        rows.append(full(name, (batch, 768), equal, dim, *labels, **pair))
    pair = {"bias_shape": (1, 12, 512, 512), "bias_dtype": "bfloat16"}
    rows.append(full("h64_t5_bias_b32_t512_n12", (32, 512), (12, 12), 64, "pair_bias", **pair))
    shown = tuple((0, 2048 - 128 * n) for n in range(8))
    padding: dict[str, Any] = {"mask_shape": (8, 1, 1, 2048), "shown_keys": shown}
    rows.append(full("h64_padding_b8_t2048_n16", (8, 2048), equal, 64, "pair_bias", **padding))
    # RoPE of all columns, of GPT-NeoX's first quarter, of DeepSeek's last 64, and interleaved.
    for name, sizes, heads, dims, rotary in (
        ("h128_causal_b2_t8192_n16", (2, 8192), equal, 128, (0, 128, False)),
        ("h128_causal_b2_t8192_n32k8", (2, 8192), grouped, 128, (0, 128, False)),
        ("h64_causal_b8_t2048_n32", (8, 2048), (32, 32), 64, (0, 64, False)),
        ("h128_causal_b8_t2048_n16_quarter", (8, 2048), equal, 128, (0, 32, False)),
        ("h192_hv128_causal_t4096", (4, 4096), equal, (192, 128), (128, 64, True)),
    ):
        rows.append(causal(f"{name}_rotary", sizes, heads, dims, "rope", rotary=rotary))
    name, half = "lengths_half_of_8192", (4096,) * 4
    rows.append(full(name, (4, 8192), equal, 128, "cost", kv_lengths=half))
    rows.append(full("lengths_none_of_8192", (4, 8192), equal, 128, "cost"))
    return rows + _models()


# (model, (B, T) or (B, T, S), heads, H): sizes that are no multiple of a tile.
_MODELS = (
    ("vit_b", (256, 197), 12, 64),
    ("vit_l_384", (64, 577), 16, 64),
    ("siglip_so400m", (64, 729), 16, 72),
    ("dit_xl_256", (128, 256), 16, 72),
    ("whisper_large", (16, 1500), 20, 64),
    ("bert_base", (64, 512), 12, 64),
    ("clip_text", (512, 77), 8, 64),
    ("swin_windows", (2048, 49), 4, 32),
    ("windows_of_64", (512, 64), 8, 64),
    ("sd_cross", (8, 4096, 77), 8, 40),
)


def _models() -> list[AttentionCase]:
    """Attention of models other than text decoders."""
    masks = {"clip_text": CAUSAL}
    return [
        _attention(name, sizes, (heads, heads), dim, "models", mask=masks.get(name, FULL))
        for name, sizes, heads, dim in _MODELS
    ]


def _shapes() -> list[AttentionCase]:
    """Cases of op "shapes": attention of models other than text decoders, forward alone and with
    the backward.
    """
    listed = [case for case in ATTENTION if not case.tags.isdisjoint({"models", "pair_bias"})]
    both = [dataclasses.replace(case, name=f"{case.name}_both", both=True) for case in listed]
    return [*listed, *both]


# (B, T), (N, K), H, mask: keys of few kv heads, as when a model of grouped heads is tuned on few
# sequences.
_FEW_TILES = (
    ((1, 1024), (14, 2), 64, CAUSAL),
    ((1, 3000), (14, 2), 64, CAUSAL),
    ((1, 4096), (14, 2), 64, CAUSAL),
    ((2, 2048), (14, 2), 64, CAUSAL),
    ((1, 2048), (8, 1), 256, CAUSAL),
    ((1, 512), (32, 8), 128, CAUSAL),
    ((1, 1024), (32, 8), 128, CAUSAL),
    ((1, 1500), (96, 8), 128, CAUSAL),
    ((1, 4096), (32, 2), 256, CAUSAL),
    ((1, 8192), (16, 1), 128, CAUSAL),
    ((1, 2048), (48, 1), 128, FULL),
    ((4, 300), (4, 1), 64, CAUSAL),
    ((1000, 17), (4, 4), 128, FULL),
    ((4, 260), (8, 8), 112, CAUSAL),
    ((4, 400), (8, 8), 112, CAUSAL),
    ((4, 260), (8, 8), 48, CAUSAL),
    ((1, 1024), (12, 12), 64, CAUSAL),
)


def _few_tiles() -> list[AttentionCase]:
    """Cases of op "few_tiles": forward alone, and forward and backward. Tag `sweep`: from one head
    of one sequence to work for all multiprocessors, so that no size between the others is slow
    unseen.
    """
    listed = [(*sizes, "grid") for sizes in _FEW_TILES]
    named = {sizes[:3] for sizes in _FEW_TILES}
    drawn = itertools.product(
        (1, 2, 4), (1, 2, 4, 8), (1, 4, 7, 16), (300, 1024, 2048, 4096), (64, 128, 256)
    )
    for batch, kv_heads, group, length, dim in drawn:
        drawn_sizes = (batch, length), (kv_heads * group, kv_heads), dim
        listed += [] if drawn_sizes in named else [(*drawn_sizes, CAUSAL, "sweep")]
    rows = []
    for both in (False, True):
        for sizes, heads, dim, mask, tag in listed:
            kind = "causal" if mask == CAUSAL else "full"
            name = f"few_b{sizes[0]}_t{sizes[1]}_n{heads[0]}_k{heads[1]}_h{dim}_{kind}"
            name += "_both" if both else ""
            rows.append(_attention(name, sizes, heads, dim, tag, mask=mask, both=both))
    return rows


def _functions() -> list[AttentionCase]:
    """Masks and scores as functions: those that an option says too, and those that none says."""
    heads = {64: 32, 128: 16, 256: 8}
    named = [(dim, name, n) for dim in heads for name, n in (("causal", 0), ("window", 1024))]
    named += [(128, "full", 0), (128, "documents", 1000), (128, "prefix", 1024)]
    named += [(128, "block_diffusion", 32), (128, "dilated", 4), (128, "alibi", 0)]
    named += [(128, "random_blocks", 128)]
    rows = []
    for tail, both in (("", False), ("_both", True)):
        for dim, name, n in named:
            title = f"mask_h{dim}_{name}{n or ''}{tail}"
            sizes = (2, 8192), (heads[dim],) * 2, dim, "grid"
            rows.append(_attention(title, *sizes, function=(name, n), both=both))
        # The case of jax-ml/jax#35114.
        sizes = (1, 4096), (16, 16), 128, "grid"
        title = f"mask_h128_causal_t4096{tail}"
        rows.append(_attention(title, *sizes, function=("causal", 0), both=both))
    for name in ("alibi", "t5"):
        for dim in (64, 128):
            for length in (1024, 4096, 8192):
                title = f"mask_h{dim}_{name}_t{length}_learned"
                sizes = (16384 // length, length), (16, 16), dim, "learned"
                rows.append(_attention(title, *sizes, function=(name, 0), both=True, learned=True))
    return rows


def _tangents() -> list[AttentionCase]:
    """Cases of op "jvp": 16384 rows, and DiT-XL at 256 pixels."""
    rows = [
        _attention(f"jvp_h{dim}_{mask}_t{length}_n16", (16384 // length, length), (16, 16), dim,
                   "grid", mask=mask)
        for dim in (64, 128) for mask in (FULL, CAUSAL) for length in (1024, 4096, 8192)
    ]  # fmt: skip
    return [*rows, _attention("jvp_h72_full_t256_n16", (128, 256), (16, 16), 72, "grid")]


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
        plain("mask_array_by_row", (2, 130, 208), (4, 2), mask_shape=(2, 1, 130, 208)),
        plain("bias_shared", (3, 130, 208), (4, 2), bias_shape=(1, 4, 130, 208),
              bias_dtype="bfloat16", mask_shape=(3, 1, 1, 208),
              shown_keys=((0, 208), (0, 140), (30, 100))),
        *(_attention(f"pair_bias_dim{dim}", (3, 72), (2, 2), dim, bias_shape=(1, 2, 72, 72),
                     mask_shape=(3, 1, 1, 72), shown_keys=((0, 72), (0, 41), (0, 72)))
          for dim in (24, 48)),
        plain("padding", (4, 130, 300), (4, 2), mask_shape=(4, 1, 1, 300),
              shown_keys=((0, 300), (0, 128), (140, 290), (70, 70))),
        plain("padding_ragged", (3, 130, 197), (2, 2), mask=CAUSAL, mask_shape=(3, 1, 1, 197),
              shown_keys=((0, 197), (0, 77), (3, 60))),
        plain(
            "everything", (3, 130, 200), (8, 2), mask=sliding_window(90), q_offset=(0, 70, 199),
            kv_lengths=(0, 150, 200), segments=(100, 100), softcap=30.0, sinks=True,
            bias_shape=(1, 8, 130, 200), mask_shape=(3, 1, 130, 200),
        ),
    ]  # fmt: skip
    for group, kv_heads in ((1, 3), (4, 2), (7, 1), (7, 2), (8, 1)):
        name, heads = f"group{group}_kv{kv_heads}", (group * kv_heads, kv_heads)
        rows.append(plain(name, (2, 130, 190), heads, mask=CAUSAL, q_offset=60))
    for dim in (8, 32, 72, 80, 96, 112, 128, 160, 192, 224, 256):
        rows.append(_attention(f"dim{dim}", (1, 130), (2, 1), dim, "dims", mask=CAUSAL))
    for h, hv in ((192, 128), (64, 128), (128, 64), (40, 256), (72, 24)):
        rows.append(_attention(f"dim{h}_{hv}", (1, 130), (2, 1), (h, hv), "dims", mask=CAUSAL))
    for dims in ((264, 264), (512, 512), (512, 64), (72, 320)):
        name = "_".join(map(str, dict.fromkeys(dims)))
        labels = ("dims", "wide")
        rows.append(_attention(f"dim{name}", (1, 130), (2, 1), dims, *labels, mask=CAUSAL))
    window: dict[str, Any] = {"mask": sliding_window(40), "sinks": True}
    rows.append(_attention("dim512_window_sinks", (1, 130), (4, 1), 512, "dims", "wide", **window))
    for dtype in ("float16", "float32"):
        for mask in (FULL, CAUSAL):
            rows.append(plain(f"{dtype}_{mask}", (2, 130, 200), (4, 2), mask=mask, dtype=dtype))
    rows.append(plain("float32_highest", (2, 130, 200), (4, 2), **_EXACT))
    rows.append(plain("uniform", (2, 130), (2, 2), magnitude=0.0))
    return [dataclasses.replace(row, labels=(*row.labels, "edge")) for row in rows]


# ---- over caches --------------------------------------------------------------------------------


def _over(
    name: str,
    lengths: tuple[int, ...],
    cache: Cache,
    *labels: str,
    heads: tuple[int, int, int, int] = (32, 8, 128, 128),
    capacity: int | None = None,
    **fields: Any,
) -> DecodeCase:
    """heads (N, K, H, Hv). By default the longest sequence fills its cache, of whole pages."""
    kind, page = cache
    capacity = capacity or -(-max(*lengths, 64) // 64) * 64
    return DecodeCase(
        name, lengths, *heads, capacity, kind=kind, page_size=page, labels=labels, **fields
    )


def _decode() -> list[DecodeCase]:
    # For each label: batch, rows in the cache, query heads, kv heads, head dim.
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "grid": (
            (1, 8192, 32, 8, 128),
            (1, 131072, 32, 8, 128),
            (16, 8192, 32, 8, 128),
            (32, 8192, 8, 8, 128),
            (32, 8192, 64, 8, 64),
            (64, 2048, 32, 8, 128),
            (64, 8192, 32, 8, 128),
            (128, 1024, 32, 8, 128),
        ),
        "latency": ((1, 1024, 32, 8, 128), (8, 512, 32, 8, 128), (8, 4096, 64, 8, 128)),
        "uneven": ((32, 8192, 32, 8, 128), (64, 4096, 28, 4, 128)),
    }
    rows = []
    for label, every in shapes.items():
        for batch, length, n, k, dim in every:
            tail = "_uneven" if label == "uneven" else ""
            lengths = _uniform(batch, length) if tail else (length,) * batch
            for cache in _KINDS:
                name = f"decode_{cache[0]}_b{batch}_s{length}_n{n}k{k}_h{dim}{tail}"
                heads = (n, k, dim, dim)
                rows.append(_over(name, lengths, cache, label, heads=heads, capacity=length))
    for cache in _KINDS:
        for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
            rows.append(_even(cache, 64, 8192, "narrow", cache_dtype=dtype))
        rows.append(_even(cache, 1, 8192, "narrow", cache_dtype="float8_e4m3fn"))
        for batch, length, n in ((64, 4096, 16), (32, 8192, 128)):  # multi-head latent attention
            name, heads = f"decode_{cache[0]}_b{batch}_s{length}_n{n}_latent", (n, 1, 576, 512)
            lengths = (length,) * batch
            rows.append(_over(name, lengths, cache, "latent", heads=heads, shared_kv=True))
            if cache != _KINDS[0]:  # top-k attention reads some rows of each sequence
                some: dict[str, Any] = {"heads": heads, "shared_kv": True, "listed": 2048}
                rows.append(_over(f"{name}_top2048", lengths, cache, "latent", **some))
        rows.append(_even(cache, 64, 4096, "wide", dtype="float32"))
    return [
        *rows,
        _even(_STACKED, 64, 4096, "wide", **_EXACT),
        _even(_STACKED, 1, 8192, "wide", dtype="float32"),
        *(_served_latent(*sizes) for sizes in _SERVED),
        *_deepseek_v4(),
        _even(_PAGED64, 64, 8192, "pages"),
        _even(("paged", 128), 64, 8192, "pages"),
        _even(("per_sequence", None), 256, 1024, "many"),
        *(_edge_decode(cache, *edge) for cache in _KINDS for edge in _DECODE_EDGES),
    ]


def _deepseek_v4() -> list[DecodeCase]:
    """A window with sinks over tokens, and 512 of the keys that stand for 4 tokens each."""
    shape: dict[str, Any] = {"heads": (64, 1, 512, 512), "shared_kv": True}
    window: dict[str, Any] = {"mask": sliding_window(128), "sinks": True}
    name, label = "decode_paged_b64_s{}_n64k1_h512_{}_page64", "deepseek_v4"
    rows = (8192, "window128_sinks", window), (2048, "top512", {"listed": 512})
    return [
        _over(name.format(length, what), (length,) * 64, _PAGED64, label, **shape, **fields)
        for length, what, fields in rows
    ]


def _even(cache: Cache, batch: int, length: int, label: str, **fields: Any) -> DecodeCase:
    """Sequences of one length, 32 query heads on 8 kv heads of 128."""
    kind, page = cache
    tail = "".join(f"_{value}" for value in fields.values())
    tail += f"_page{page}" if page not in (None, 16) else ""
    name = f"decode_{kind}_b{batch}_s{length}_n32k8_h128{tail}"
    return _over(name, (length,) * batch, cache, label, **fields)


_BYTES: dict[str, Any] = {"cache_dtype": "float8_e4m3fn", "byte_rows": True}
# Sequences, rows, query heads and rows of bytes of latent caches with pages of 64 rows.
_SERVED: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (128, 4096, 128, {}),
    (64, 8192, 64, {}),
    (1, 65536, 128, {}),
    (8, 32768, 128, {}),
    (64, 8192, 16, {}),
    (64, 8192, 16, _BYTES),
)


def _served_latent(batch: int, length: int, n: int, fields: dict[str, Any]) -> DecodeCase:
    tail = "_bytes" if fields else ""
    name, heads = f"decode_paged_b{batch}_s{length}_n{n}_latent{tail}_page64", (n, 1, 576, 512)
    lengths = (length,) * batch
    return _over(name, lengths, _PAGED64, "latent", heads=heads, shared_kv=True, **fields)


Edge = tuple[str, tuple[int, ...], dict[str, Any]]  # name, lengths, fields
_DECODE_EDGES: tuple[Edge, ...] = (
    ("edges", (1, 2, 63, 64, 65, 128, 255, 256), {}),
    ("empty", (0, 100, 0), {}),
    ("chunk", (5, 64, 200), {"q_len": 5}),
    ("chunk_longer_than_cache", (0, 2, 4), {"q_len": 4}),
    ("window", (3, 100, 256), {"mask": sliding_window(50), "q_len": 2}),
    ("softcap_sinks", (17, 130), {"softcap": 20.0, "sinks": True}),
    ("group7", (33, 256), {"heads": (7, 1, 64, 64)}),
    ("mha", (33, 256), {"heads": (4, 4, 64, 64)}),
    ("dims_128_64", (33, 256), {"heads": (8, 2, 128, 64)}),
    ("float16", (33, 256), {"dtype": "float16"}),
    ("float32", (33, 256), {"dtype": "float32"}),
    ("float32_highest", (33, 256), _EXACT),
    ("float8_e4m3fn", (0, 33, 256), {"cache_dtype": "float8_e4m3fn"}),
    ("int8", (64, 1, 200), {"cache_dtype": "int8", "q_len": 3}),
    ("latent", (0, 100, 256), {"heads": (8, 1, 576, 512), "shared_kv": True}),
    (
        "k_is_v",
        (0, 33, 256),
        {"heads": (8, 1, 512, 512), "shared_kv": True}
        | {"mask": sliding_window(50), "sinks": True},
    ),
    ("k_is_v_listed", (0, 33, 256), {"heads": (8, 1, 512, 512), "shared_kv": True, "listed": 70}),
    ("listed", (0, 33, 256), {"q_len": 2, "listed": 70, "sinks": True}),
    ("alibi", (0, 33, 256), {"q_len": 2, "alibi": True}),
    ("latent_bytes", (0, 100, 256), {"heads": (8, 1, 576, 512), "shared_kv": True, **_BYTES}),
)


def _edge_decode(
    cache: Cache, name: str, lengths: tuple[int, ...], fields: dict[str, Any]
) -> DecodeCase:
    sizes: dict[str, Any] = {"heads": (8, 2, 64, 64), "capacity": 256}
    return _over(f"decode_{cache[0]}_{name}", lengths, cache, "edge", **sizes | fields)


def _prefill() -> list[DecodeCase]:
    """Many new rows a sequence over caches that are full: the price of a chunk of a prompt."""
    per_sequence = ("per_sequence", None)
    narrow = [
        (8, rows, cache, dtype)
        for rows in (4096, 1024, 256, 64, 16)
        for cache, dtype in (
            (_STACKED, "float8_e4m3fn"),
            (_STACKED, "int8"),
            (per_sequence, "float8_e4m3fn"),
            (_PAGED64, "float8_e4m3fn"),
        )
    ]
    sizes = [(8, rows) for rows in (4096, 1024, 256, 64, 16, 8)]
    sizes += [(1, rows) for rows in (1024, 256, 64, 16)]
    caches = _STACKED, per_sequence, _PAGED16, _PAGED64
    plain = [(*size, cache, None) for size in sizes for cache in caches]
    matmuls = [
        _over(
            f"prefill_stacked_m8_t{rows}_float8_e4m3fn_matmuls",
            (8192,) * 8,
            _STACKED,
            "matmuls",
            q_len=rows,
            cache_dtype="float8_e4m3fn",
            precision="ANY_F8_ANY_F8_F32",
        )
        for rows in (4096, 1024, 256)
    ]
    return matmuls + [
        _over(
            f"prefill_{kind}{page or ''}_m{batch}_t{rows}{f'_{dtype}' if dtype else ''}",
            (8192,) * batch,
            (kind, page),
            "narrow" if dtype else "grid",
            q_len=rows,
            cache_dtype=dtype,
        )
        for batch, rows, (kind, page), dtype in (*narrow, *plain)
    ]


def _packed() -> list[DecodeCase]:
    """Packed rows: a server's step, beside its parts; whole prompts; single tokens. And drafts of
    speculative decoding, which form trees; packed, as many of each sequence or not.
    """
    tokens = tuple(min(n, 8192) for n in _lognormal(64, 64 * 2000))
    mixture, full = ((*tokens, 8192), (*(1,) * 64, 2048)), (8192,) * 64
    tree: dict[str, Any] = {"tree": True}
    # Name, lengths, label, fields:
    every: tuple[tuple[str, tuple[int, ...], str, dict[str, Any]], ...] = (
        ("mixed_{}", mixture[0], "mixed", {"rows": mixture[1]}),
        ("mixed_{}_tokens_alone", tokens, "mixed", {}),
        ("mixed_{}_chunk_alone", (8192,), "mixed", {"q_len": 2048}),
        ("packed_{}_16_lognormal", _PROMPTS, "packed", {"rows": _PROMPTS}),
        ("packed_{}_one_token", full, "packed", {"rows": (1,) * 64}),
        ("packed_{}_one_token_lognormal", tokens, "packed", {"rows": (1,) * 64}),
        ("tree_{}_m8_t64", full[:8], "trees", {"q_len": 64} | tree),
        ("tree_{}_m1_t64", full[:1], "trees", {"q_len": 64} | tree),
        ("tree_{}_m64_t4", full, "trees", {"q_len": 4} | tree),
        ("tree_{}_packed_m8_t64", full[:8], "trees", {"rows": (64,) * 8} | tree),
        ("tree_{}_packed_m64", full, "trees", {"rows": (1, 64, 4, 16) * 16} | tree),
    )
    return [
        _over(name.format(f"{kind}{page or ''}"), lengths, (kind, page), label, **fields)
        for name, lengths, label, fields in every
        for kind, page in (_STACKED, _PAGED16, _PAGED64)
    ]


def _interleaved() -> list[DecodeCase]:
    """Cases over pages with K and V interleaved: a step of a server, and single tokens."""
    tokens = tuple(min(n, 8192) for n in _lognormal(64, 64 * 2000))
    mixture: dict[str, Any] = {"rows": (*(1,) * 64, 2048)}
    rows = []
    for page in (16, 64):
        cache = "interleaved", page
        name = f"interleaved{page}"
        rows.append(_over(f"mixed_{name}", (*tokens, 8192), cache, "mixed", **mixture))
        tokens_alone = f"packed_{name}_one_token_4096"
        rows.append(_over(tokens_alone, (4096,) * 64, cache, "packed", rows=(1,) * 64))
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
        for page, finding in ((16, False), (64, False), (16, True)):
            title, lengths = f"shared_{name}_pages{page}{'_found' * finding}", (length,) * 64
            fields: dict[str, Any] = {"shared": shared, "finding": finding}
            rows.append(_over(title, lengths, ("paged", page), "grid", **fields))
    return rows


# ---- appends ------------------------------------------------------------------------------------


def _append() -> list[AppendCase]:
    # (name, lengths, capacity, label, whether quantised caches are appended to as well, fields)
    sizes: list[tuple[str, tuple[int, ...], int, str, bool, dict[str, Any]]] = [
        (f"append_{{}}_m{m}", _uniform(m, 1023), 1024, "grid", m in (1, 128), {})
        for m in (1, 32, 128, 256)
    ]
    sizes.append(("append_{}_m8_t2048", _uniform(8, 512), 2560, "long", True, {"new_rows": 2048}))
    for t in (8, 16):  # drafts, half of which are kept, and all of those move
        name, kept = f"keep_{{}}_m128_t{t}", {"new_rows": t, "kept": t // 2}
        sizes.append((name, _uniform(128, 1000), 1024, "keep", t == 8, kept))
    rows = []
    for name, lengths, capacity, label, narrow, fields in sizes:
        for kind, page in _KINDS:
            each = (capacity,) * (len(lengths) if kind == "per_sequence" else 1)
            cache: dict[str, Any]
            cache = {"kind": kind, "page_size": page, "capacities": each}
            for dtype in (None, "float8_e4m3fn", "int8") if narrow else (None,):
                title = name.format(kind) + (f"_{dtype}" if dtype else "")
                labels = ("narrow" if dtype else label,)
                more: dict[str, Any] = fields | cache | {"cache_dtype": dtype, "labels": labels}
                rows.append(AppendCase(title, lengths, 8, 128, 128, **more))
    return rows + _edge_append()


def _edge_append() -> list[AppendCase]:
    mixed, chunk = (0, 1, 63, 4, 31), (0, 1, 59, 4, 31)
    edges: tuple[Edge, ...] = (
        ("append_{}_ancestor", (4,) * 4, {}),
        ("append_{}_distinct", mixed, {}),
        ("append_{}_chunk", chunk, {"new_rows": 5}),
        ("append_{}_ragged_chunk", chunk, {"new_rows": 5, "new_lengths": (5, 0, 1, 3, 4)}),
        ("append_{}_float8_e4m3fn", chunk, {"new_rows": 5, "cache_dtype": "float8_e4m3fn"}),
        ("keep_{}_few", chunk, {"new_rows": 5, "kept": 2}),
    )
    rows = []
    for kind, page in _KINDS:
        for name, lengths, fields in edges:
            each = (64, 72, 64, 80, 128) if len(lengths) == 5 else (64,) * 4
            capacities = each if kind == "per_sequence" else (64,)
            cache: dict[str, Any] = {"kind": kind, "page_size": page, "labels": ("edge",)}
            title = name.format(kind)
            rows.append(AppendCase(title, lengths, 8, 128, 128, capacities, **cache, **fields))
    for dtype, lengths, dims in (("float32", (0, 29), (64, 32)), ("float16", (7, 37), (72, 72))):
        title = f"append_{dtype}_dims_{dims[0]}_{dims[1]}"
        more: dict[str, Any] = {"new_rows": 3, "dtype": dtype, "labels": ("edge",)}
        rows.append(AppendCase(title, lengths, 2, *dims, (32, 40), **more))
    return rows


# ---- float8 -------------------------------------------------------------------------------------


def _float8() -> list[AttentionCase]:
    """Cases of op "float8": the shapes of cuDNN's published figures, and small ones."""
    large = functools.partial(_attention, dtype="float8_e4m3fn")
    heads, size = (64, 8), (1, 8192)
    labels, blocks = ("float8",), {"scale_rows": 128}
    return [
        large("float8_h128_full_b1_t8192_n64k8", size, heads, 128, *labels),
        large("float8_h128_full_b1_t8192_n64k8_blocks", size, heads, 128, *labels, **blocks),
        large("float8_h128_full_b1_t8191_n64k8_blocks", (1, 8191), heads, 128, *labels, **blocks),
        large("float8_h128_causal_b1_t16384_n64k8", (1, 16384), heads, 128, *labels, mask=CAUSAL),
        large("float8_h256_full_b1_t8192_n64k8", size, heads, 256, *labels),
        large("float8_h64_full_b1_t8192_n64k8", size, heads, 64, *labels),
        large("float8_h192_hv128_full_b1_t8192_n32", size, (32, 32), (192, 128), *labels),
        large("float8_e5m2_edges", (2, 70, 130), (4, 2), 64, mask=CAUSAL, dtype="float8_e5m2"),
        large("float8_blocks_edges", (1, 129, 301), (2, 1), 64, **blocks),
    ]


def _rounded() -> list[AttentionCase]:
    """Cases of op "quantize"."""
    size, heads = (1, 8192), (64, 8)
    blocks = functools.partial(_attention, scale_rows=128)
    return [
        blocks("quantize_h128_t8192_n64k8", size, heads, 128, "large"),
        blocks("quantize_h256_t8192_n64k8", size, heads, 256, "large"),
        blocks("quantize_h64_t8192_n64k8", size, heads, 64, "large"),
        blocks("quantize_h192_hv128_t8192_n32", size, (32, 32), (192, 128), "large"),
        blocks("quantize_h128_t8192_n64k8_f32", size, heads, 128, "large", dtype="float32"),
        _attention("quantize_h128_t8192_n64k8_rows", size, heads, 128, "large", scale_rows=1),
        _attention("quantize_h128_t8192_n64k8_heads", size, heads, 128, "large"),
        blocks("quantize_edges", (2, 129, 301), (4, 2), (72, 20)),
    ]


# ---- lists --------------------------------------------------------------------------------------

ATTENTION: tuple[AttentionCase, ...] = (*_large_attention(), *_edge_attention())
DECODE: tuple[DecodeCase, ...] = (*_decode(), *gemma_cases.decode())
PREFILL: tuple[DecodeCase, ...] = (
    *_prefill(),
    *_packed(),
    *_interleaved(),
    *gemma_cases.prefill(),
)
APPEND: tuple[AppendCase, ...] = tuple(_append())
SHARED_PREFIX: tuple[DecodeCase, ...] = tuple(_shared())
MASK: tuple[AttentionCase, ...] = tuple(_functions())
SHAPES: tuple[AttentionCase, ...] = tuple(_shapes())
FEW_TILES: tuple[AttentionCase, ...] = tuple(_few_tiles())
JVP: tuple[AttentionCase, ...] = tuple(_tangents())
FLOAT8: tuple[AttentionCase, ...] = tuple(_float8())
QUANTIZE: tuple[AttentionCase, ...] = tuple(_rounded())
# Operations of attention draw from ATTENTION.
LISTS: dict[str, tuple[Case, ...]] = {
    "decode": DECODE,
    "prefill": PREFILL,
    "shared_prefix": SHARED_PREFIX,
    "append": APPEND,
    "mask": MASK,
    "shapes": SHAPES,
    "few_tiles": FEW_TILES,
    "jvp": JVP,
    "float8": FLOAT8,
    "quantize": QUANTIZE,
}


def select(cases: Iterable[Case], wanted: str) -> tuple[Any, ...]:
    """The cases, in their order, that a comma-separated list of tags and name globs asks for.

    `grid+causal` wants both tags; `-h256` takes away cases that an earlier term brought in.
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
        alibi=pick.random() < 0.2,
        labels=("drawn",),
    )
