"""Kernels with functions of positions: right in the interpreter with their races watched, and, with
`-m gpu`, on the real thing. What they are compared with knows of no functions: the mask as a dense
array, the scores as a bias.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import _checks, _device, cases
from pallas_attn.kernels.attention import functions
from tests import budget, subjects

SIZES = {"batch": 2, "q_len": 137, "kv_len": 149, "q_heads": 2, "kv_heads": 1}
SIZES |= {"head_dim": 64, "v_head_dim": 64}
DRAW = np.random.default_rng(11)
IDS = np.sort(DRAW.integers(0, 3, (2, 600)), axis=1).astype(np.int32)
SIGNS = DRAW.integers(0, 2, (4, 1200)).astype(bool)
TABLE = DRAW.standard_normal((4, 1200)).astype(np.float32)
SLOPES = (0.5 ** np.arange(4)).astype(np.float32)


BYTES = DRAW.integers(-128, 128, 600).astype(np.int8)
UNSIGNED = DRAW.integers(0, 2**32, 600).astype(np.uint32)
HALF = jnp.asarray(DRAW.standard_normal(600), jnp.bfloat16)


def narrow(b, h, q, kv, x, y):
    """Each term in arithmetic that numbers of another type would do otherwise."""
    captured = jnp.asarray(BYTES)
    return (x[q] + x[kv] > 0) ^ (y[q] - y[kv] < y[kv]) ^ (captured[q] > captured[kv])


def of_keys(q_len, kv_len):
    middle = q_len
    return {
        "causal": pa.mask_fn(lambda b, h, q, kv: q >= kv),
        "documents": pa.mask_fn(lambda b, h, q, kv, i: i[b, q] == i[b, kv], IDS) & pa.CAUSAL,
        "signs": pa.mask_fn(lambda b, h, q, kv, t: t[h, q - kv + middle], SIGNS),
        "blocks": pa.mask_fn(lambda b, h, q, kv: (q // 32 >= kv // 32) & ((q + kv) % 3 != h % 2)),
        "batch": pa.mask_fn(lambda b, h, q, kv: (kv < 70 * b + 30) | (q - kv > 64)),
        "distant": pa.mask_fn(lambda b, h, q, kv: kv % 16 == q % 16) & ~pa.Mask(3, 3),
        "narrow": pa.mask_fn(narrow, BYTES, UNSIGNED),
        "nothing": pa.mask_fn(lambda b, h, q, kv: q < -kv - 10),
    }


def of_scores(q_len, kv_len):
    middle = q_len

    def alibi(s, b, h, q, kv, slope):
        return s - slope[h] * jnp.abs(q - kv)

    def capped(s, b, h, q, kv, t):
        return 20 * jnp.tanh(s / 20) + t[h, q - kv + middle]

    return {"alibi": pa.score_fn(alibi, SLOPES), "table": pa.score_fn(capped, TABLE)}


def biased(name, case):
    """The dense arguments that stand for a score function."""
    at = case.q_offset + np.arange(case.q_len)[:, None] - np.arange(case.kv_len)[None]
    heads = slice(None, case.q_heads)
    if name == "alibi":
        return {"bias": (-SLOPES[heads, None, None] * abs(at)[None])[None]}
    return {"softcap": 20.0, "bias": TABLE[heads][:, at + case.q_len][None]}


def check(subject, function, score, seed=0, gradients=True, **facts):
    """A call with functions against one with dense arrays, by budget."""
    case = cases.AttentionCase(name="functions", **(SIZES | facts))
    sizes = case.q_len, case.kv_len
    arguments = case.arguments(seed)
    options = dict(arguments)
    dense = dict(arguments)
    if function is not None:
        options["mask"] = of_keys(*sizes)[function]
        seen = options["mask"].dense(
            *sizes, q_offset=case.q_offset, batch=case.batch, heads=case.q_heads
        )
        seen = seen & np.asarray(dense.get("mask_array", True))
        dense |= {"mask": pa.FULL, "mask_array": seen}
    if score is not None:
        options["score"] = of_scores(*sizes)[score]
        dense |= biased(score, case)
    do = np.random.default_rng(seed).standard_normal((*arguments["q"].shape[:3], case.v_head_dim))
    do = jnp.asarray(do, case.dtype) if gradients else None
    expected = budget.attention(dense, do, tensor_cores=True)
    q, k, v = (options.pop(name) for name in "qkv")

    def call(q, k, v, *, implementation, **options):
        attend = functools.partial(
            pa.flash_attention_with_lse, implementation=implementation, **options
        )
        if not gradients:
            return dict(zip(("out", "lse"), attend(q, k, v), strict=True))
        (out, lse), back = jax.vjp(attend, q, k, v)
        grads = back((do, jnp.zeros_like(lse)))
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))

    budget.check(subject.call(call, q, k, v, **options), expected)


def subject_of(generation, interpreted):
    return subjects.Subject(generation, generation, generation if interpreted else None)


@pytest.mark.parametrize(
    "generation, mask, score",
    [
        *(("sm90", "documents", "table"), ("sm80", "signs", None)),
        *(("sm90", "nothing", None), ("sm80", "narrow", None)),
    ],
)
def test_in_the_interpreter(generation, mask, score):
    few = mask in ("nothing", "narrow")
    facts = {"q_len": 70, "kv_len": 75, "batch": 1} if few else {}
    check(subject_of(generation, True), mask, score, gradients=not few, **facts)


@pytest.mark.guards
def test_arithmetic_of_any_width_lowers():
    case = cases.AttentionCase(name="narrow", **(SIZES | {"batch": 1}))
    q, k, v = (case.arguments(0)[name] for name in "qkv")
    half = pa.mask_fn(lambda b, h, q, kv, z: jnp.exp(z[q]) + jnp.tanh(z[kv]) > z[h], HALF)
    attend = functools.partial(pa.flash_attention, mask=of_keys(1, 1)["narrow"] & half)
    with _device.assume("sm90"):
        jax.jit(attend).trace(q, k, v).lower(lowering_platforms=("cuda",))


MASKS = tuple(of_keys(1, 1))
EVERYWHERE = [
    *((mask, None, {}) for mask in MASKS),
    ("documents", "table", {}),
    (None, "alibi", {"mask": pa.CAUSAL}),
    (None, "table", {}),
    ("signs", None, {"q_offset": 9}),
    ("blocks", None, {"kv_lengths": (130, 7), "q_lengths": (137, 50)}),
    ("blocks", "alibi", {"segments": 2, "kv_segments": 2}),
    ("blocks", None, {"mask_shape": (2, 1, 137, 149)}),
    ("documents", None, {"sinks": True, "softcap": 10.0}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("number", range(len(EVERYWHERE)))
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
def test_functions_on_the_gpu(generation, number, dtype):
    mask, score, facts = EVERYWHERE[number]
    check(subject_of(generation, False), mask, score, seed=number, dtype=dtype, **facts)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("mask, score", [("documents", "alibi"), ("blocks", None)])
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
def test_head_dims_on_the_gpu(generation, mask, score, head_dim):
    facts = {"q_len": 523, "kv_len": 541, "q_heads": 4, "kv_heads": 2, "dtype": "float16"}
    dims = {"head_dim": head_dim, "v_head_dim": head_dim}
    check(subject_of(generation, False), mask, score, **facts, **dims)


def tiles_of(mask, case, by_keys):
    """The lists of tiles of 32 queries by 64 keys, [B, N or K, tiles, ..]."""
    static = ("scale", "q_lengths", "kv_lengths", "bias", "mask_array", "softcap", "sinks", "score")
    options = dict.fromkeys((*static, "precision")) | {"mask": mask, "deterministic": False}
    arrays = case.arguments(0)
    problem, inputs = _checks.attention(
        *(arrays[name] for name in "qkv"), q_offset=0, segment_ids=None, options=options
    )
    found = np.asarray(functions.tiles(problem, inputs, 32, 64, by_keys))
    heads = case.kv_heads if by_keys else case.q_heads
    return np.broadcast_to(found, (case.batch, heads, *found.shape[2:]))


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_those_of_the_dense_mask(name, by_keys):
    case = cases.AttentionCase(name="tiles", **(SIZES | {"q_len": 150, "kv_len": 197}))
    mask = of_keys(case.q_len, case.kv_len)[name]
    seen = mask.dense(case.q_len, case.kv_len, batch=2, heads=2)
    got = tiles_of(mask, case, by_keys)
    for batch, head, tile in np.ndindex(*got.shape[:3]):
        wholes, every, *listed = got[batch, head, tile]
        heads = slice(0, 2) if by_keys else slice(head, head + 1)
        whole, partial = [], []
        for other in range(5 if by_keys else 4):
            rows, keys = (other, tile) if by_keys else (tile, other)
            part = seen[batch, heads, rows * 32 : rows * 32 + 32, keys * 64 : keys * 64 + 64]
            if part.all() and part.shape[2] == 64:
                whole.append(other)
            elif part.any():
                partial.append(other)
        if not (by_keys or whole or partial):
            partial = [0]
        assert (listed[:wholes], listed[wholes:every]) == (whole, partial)
