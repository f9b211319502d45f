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
from pallas_attn import masks
from pallas_attn._call import bind, device
from pallas_attn._functions import tile_bounds
from pallas_attn.kernels.attention import listed_tiles, tile_lists
from tests.support import fuzz, fuzz_positions, in_numpy, mosaic, subjects
from tests.support.fuzz_positions import Case
from tests.support.problems import cases

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SIZES = {"batch": 2, "q_len": 137, "kv_len": 149, "q_heads": 2, "kv_heads": 1}
SIZES |= {"head_dim": 64, "v_head_dim": 64}
MASKS = tuple(
    ["causal", "documents", "signs", "blocks", "batch", "distant", "narrow", "tiles", "nothing"]
)


def case_of(mask, score, band=None, **facts):
    """`mask`, `score`: names of tests/support/fuzz_positions.py."""
    terms = () if mask is None else (("and", mask),)
    facts["mask"] = band if band is not None else pa.CAUSAL if mask == "documents" else pa.FULL
    return Case("functions", **(SIZES | facts), terms=terms, added=score)


def mask_of(name, q_len, kv_len):
    case = case_of(name, None, q_len=q_len, kv_len=kv_len)
    return fuzz_positions.functions(case, fuzz_positions.arrays_of(case, 1))["mask"]


def check(subject, mask, score, **facts):
    """A call with functions, and its gradients, against one with dense arrays."""
    fuzz.prove(fuzz_positions.run, case_of(mask, score, **facts), subject)


def subject_of(generation, interpreted):
    return subjects.Subject(generation, generation, generation if interpreted else None)


@pytest.mark.parametrize(
    "generation, mask, score",
    [
        *(("sm90", "documents", "table"), ("sm80", "signs", None)),
        *(("sm90", "nothing", None), ("sm80", "narrow", None), ("sm90", "blocks", "linear")),
        *(("sm90", "tiles", None), ("sm90", "bytes", "queries")),
    ],
)
def test_in_the_interpreter(generation, mask, score):
    few = mask in ("nothing", "narrow", "bytes") or score == "linear"
    facts = {"q_len": 70, "kv_len": 75, "batch": 1} if few else {"bent": score == "table"}
    check(subject_of(generation, True), mask, score, **facts)


def test_lists_that_a_mask_carries_in_the_interpreter(rng):
    """The bits that the mask gives without them."""
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 1, 64)), "bfloat16") for n in (70, 75, 75))
    ids = np.sort(rng.integers(0, 3, (2, 80)), axis=1).astype(np.int32)
    mask = pa.mask_fn(lambda b, h, q, kv, i: i[b, q] == i[b, kv], ids)
    subject = subject_of("sm90", True)
    some = mask, mask.blocks(70, 75, batch=2)
    fuzz.same_bits(*(subject.call(pa.flash_attention, q, k, v, mask=x) for x in some))


def test_lists_of_many_tiles_in_the_interpreter(monkeypatch):
    """XLA makes them where they are too many for the small kernel; large reads are not kept."""
    monkeypatch.setattr(listed_tiles, "MOST_PAIRS", 0)
    monkeypatch.setattr(tile_lists, "MOST_READ", 0)
    facts = {"q_len": 70, "kv_len": 75, "batch": 1}
    check(subject_of("sm90", True), "signs", None, **facts)


def test_a_mask_of_keys_beside_a_function_in_the_interpreter():
    """Lists decide which kv tiles are taken, not the mask's own."""
    facts = {"q_len": 17, "kv_len": 75, "batch": 2, "mask_shape": (2, 1, 1, 75)}
    check(subject_of("sm90", True), "causal", None, **facts)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
def test_lists_of_one_tile_in_the_interpreter(generation, deterministic):
    """A tile is asked for ahead: none past the end of a list is read."""
    facts = {"q_len": 17, "kv_len": 40, "batch": 1, "q_heads": 1, "deterministic": deterministic}
    check(subject_of(generation, True), "documents", None, **facts)


@pytest.mark.parametrize(
    "generation, mask, score",
    [("sm90", "documents", None), ("sm90", "batch", "table"), ("sm80", "blocks", None)],
)
def test_a_bias_beside_functions_in_the_interpreter(generation, mask, score):
    """Its gradient is that of the logits, which the function's derivative does not scale."""
    facts = {"q_len": 70, "kv_len": 80, "batch": 1, "bias_shape": (1, SIZES["q_heads"], 70, 80)}
    check(subject_of(generation, True), mask, score, **facts)


def test_slopes_must_be_finite():
    """Heads do not disturb each other, and a number that is added may be -inf."""
    q, k, v = (jnp.asarray(np.ones((1, 8, 3, 64)), jnp.bfloat16) for _ in range(3))
    slopes, added = np.float32([-np.inf, 0.3, 0.3]), np.float32([0, 0, -np.inf])
    score = pa.score_fn(lambda s, b, h, q, kv, t, w: s + t[h] * (kv + 1) + w[h], slopes, added)
    call = pa.flash_attention_with_lse
    out, lse = call(q, k, v, score=score, implementation="reference")
    assert (np.asarray(lse[0, ::2]) == -np.inf).all() and not np.asarray(out[:, :, ::2]).any()
    got, got_lse = subject_of("sm90", True).call(call, q, k, v, score=score)
    np.testing.assert_allclose(np.asarray(got_lse)[0, 1], np.asarray(lse)[0, 1], rtol=1e-3)
    np.testing.assert_array_equal(np.asarray(got_lse)[0, 2], -np.inf)
    assert np.isnan(np.asarray(got_lse)[0, 0]).all()


@pytest.mark.guards
def test_arithmetic_of_any_width_lowers():
    case = cases.AttentionCase(name="narrow", **(SIZES | {"batch": 1}))
    q, k, v = (case.arguments(0)[name] for name in "qkv")
    numbers = jnp.zeros(600, jnp.bfloat16)
    half = pa.mask_fn(lambda b, h, q, kv, z: jnp.exp(z[q]) + jnp.tanh(z[kv]) > z[h], numbers)
    attend = functools.partial(pa.flash_attention, mask=mask_of("narrow", 1, 1) & half)
    with device.assume("sm90"):
        jax.jit(attend).trace(q, k, v).lower(lowering_platforms=("cuda",))


ONE_NUMBER = {
    "key": lambda b, h, q, kv: kv >= 5,
    "nothing": lambda b, h, q, kv: True,
}
OF_KEYS = pa.mask_fn(lambda b, h, q, kv: q // 32 >= kv // 32)
# Masks that Mosaic finds to be constant: it would search minutes for the layout of positions that
# nobody uses.
CONSTANT = {
    "and nothing": OF_KEYS & ~pa.FULL,
    "unfolded": pa.mask_fn(lambda b, h, q, kv: jnp.clip(kv, 3, 3) == 3),
}


@pytest.mark.guards
@pytest.mark.parametrize("asks", [*ONE_NUMBER, *CONSTANT])
def test_a_function_of_one_number_lowers(asks):
    """Arguments that the function does not use are not made: Mosaic's search for their layout may
    not end, with rows that need three consumers and with rows over a cache.
    """
    mask = CONSTANT[asks] if asks in CONSTANT else pa.mask_fn(ONE_NUMBER[asks])
    of = jax.ShapeDtypeStruct
    q, kv = (of((2, 4096, heads, 128), jnp.bfloat16) for heads in (4, 2))
    new, cache = of((2, 64, 4, 128), jnp.bfloat16), pa.StackedCache.create(2, 1024, 2, 128)
    attend = functools.partial(pa.flash_attention, mask=mask)
    decode = functools.partial(pa.decode_attention, mask=mask)
    with device.assume("sm90"):
        jax.jit(attend).trace(q, kv, kv).lower(lowering_platforms=("cuda",))
        jax.jit(decode).trace(new, cache).lower(lowering_platforms=("cuda",))


EVERYWHERE = [
    *((mask, None, {}) for mask in MASKS),
    ("documents", "table", {"bent": True}),
    (None, "alibi", {"band": pa.CAUSAL}),
    ("documents", "of_rows", {}),
    (None, "of_rows", {"band": pa.CAUSAL, "q_offset": 9}),
    (None, "table", {"bent": True}),
    ("signs", None, {"q_offset": 9}),
    ("blocks", None, {"kv_lengths": (130, 7), "q_lengths": (137, 50)}),
    ("blocks", "alibi", {"segments": 2, "kv_segments": 2}),
    ("blocks", None, {"mask_shape": (2, 1, 137, 149)}),
    ("documents", None, {"sinks": True, "softcap": 10.0}),
    ("blocks", None, {"mask_shape": (2, 1, 1, 149)}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "generation, number, dtype",
    [
        (generation, number, dtype)
        for number in range(len(EVERYWHERE))
        for turn, generation in enumerate(("sm90", "sm80"))
        for dtype in ("bfloat16", "float32")
        if dtype == "bfloat16" or number % 2 == turn  # float32 in one of the two kernels
    ],
)
def test_functions_on_the_gpu(generation, number, dtype):
    mask, score, facts = EVERYWHERE[number]
    check(subject_of(generation, False), mask, score, dtype=dtype, **facts)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "generation, mask, score, head_dim",
    [
        (generation, mask, score, head_dim)
        for i, head_dim in enumerate((32, 128, 256))
        for j, (mask, score) in enumerate((("documents", "linear"), ("blocks", None)))
        for k, generation in enumerate(("sm90", "sm80"))
        if (i + j + k) % 2 == 0
    ],
)
def test_head_dims_on_the_gpu(generation, mask, score, head_dim):
    facts = {"q_len": 523, "kv_len": 541, "q_heads": 4, "kv_heads": 2, "dtype": "float16"}
    dims = {"head_dim": head_dim, "v_head_dim": head_dim}
    check(subject_of(generation, False), mask, score, **facts, **dims)


PARTS = 2


def lists_of(mask, case, by_keys):
    """The lists of tiles of 64 queries, in two parts, by 64 keys, [B, N, tiles, ..]; of 32 queries
    by 64 keys, for each tile of keys.
    """
    arrays = case.arguments(0)
    options = bind.Call(mask=mask)
    problem, inputs = bind.attention(*(arrays[name] for name in "qkv"), options)
    sizes = (32, 64, True) if by_keys else (32 * PARTS, 64, False, PARTS)
    find = lambda inputs: tile_lists.tiles(problem, inputs, *sizes)  # noqa: E731
    result = np.asarray(in_numpy.call(find, inputs))
    heads = case.kv_heads if by_keys else case.q_heads
    return np.broadcast_to(result, (case.batch, heads, *result.shape[2:]))


def kinds_of(seen, by_keys):
    """(some, whole), bool[tiles of 32 queries, tiles of 64 keys], of bool[heads, T, S]."""
    tiles = [-(-n // size) for n, size in zip(seen.shape[1:], (32, 64), strict=True)]
    some, whole = np.zeros(tiles, bool), np.zeros(tiles, bool)
    for i, j in np.ndindex(*tiles):
        part = seen[:, i * 32 : i * 32 + 32, j * 64 : j * 64 + 64]
        some[i, j], whole[i, j] = part.any(), part.all() and part.shape[2] == 64
    if by_keys:
        return some.T, whole.T
    rest = ((0, -tiles[0] % PARTS), (0, 0))
    return np.pad(some, rest), np.pad(whole, rest, constant_values=True)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_lists_are_those_of_the_dense_mask(name, by_keys):
    case = cases.AttentionCase(name="tiles", **(SIZES | {"q_len": 150, "kv_len": 197}))
    mask = mask_of(name, case.q_len, case.kv_len)
    seen = mask.dense(case.q_len, case.kv_len, batch=2, heads=2)
    got = lists_of(mask, case, by_keys)
    parts = 1 if by_keys else PARTS
    for batch, head, tile in np.ndindex(*got.shape[:3]):
        heads = slice(0, 2) if by_keys else slice(head, head + 1)
        kinds = [
            x[tile * parts : (tile + 1) * parts] for x in kinds_of(seen[batch, heads], by_keys)
        ]
        check_list(got[batch, head, tile], *kinds, never_empty=not by_keys)


def check_list(tiles, some, whole, never_empty):
    """A list holds the tiles that some row of a part sees, `some` [parts, n]; spans are right."""
    parts, (count, full_lo, full_hi, last) = len(some), tiles[:4]
    every = [int(i) for i in np.flatnonzero(some.any(0))] or [0] * never_empty
    listed = tiles[tile_lists.first(parts if never_empty else 1) :][:count].tolist()
    assert sorted(listed) == every and (not count or last == listed[-1])
    assert sorted(listed[full_lo:full_hi]) == [i for i in every if whole[:, i].all()]
    if not never_empty:
        return
    for part, numbers in enumerate(tiles[4 : 4 + 5 * PARTS].reshape(-1, 5)):
        lo, own_lo, own_hi, hi, last = numbers
        assert lo < hi <= count and last == listed[hi - 1]
        assert {i for i in every if i in listed[lo:hi]} >= set(np.flatnonzero(some[part]))
        assert all(whole[part, i] for i in listed[own_lo:own_hi])


SIGNS = np.random.default_rng(11).integers(0, 2, (4, 1200)).astype(bool)
BOUNDED = {
    "causal": (pa.CAUSAL, {}),
    "window": (pa.mask_fn(lambda b, h, q, kv: (q >= kv) & (q - kv < 100)), {}),
    "documents": (mask_of("documents", 1, 1), {}),
    "diffusion": (pa.mask_fn(lambda b, h, q, kv: q // 32 >= kv // 32), {}),
    "prefix": (
        pa.mask_fn(lambda b, h, q, kv, n: kv < n[b], np.full(2, 100, np.int32)) | pa.CAUSAL,
        {},
    ),
    "far": (pa.mask_fn(lambda b, h, q, kv: abs(q - kv) % 256 < 64), {}),
    "table": (pa.mask_fn(lambda b, h, q, kv, t: t[q // 64, kv // 64 + h], SIGNS), {}),
    "odd_table": (pa.mask_fn(lambda b, h, q, kv, t: t[q // 48, kv // 50], SIGNS), {}),
    "lengths": (
        pa.mask_fn(lambda b, h, q, kv: q >= kv),
        {"kv_lengths": (300, 77), "q_lengths": (290, 100), "mask_shape": (2, 1, 301, 331)},
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_find_the_tiles_of_the_dense_mask(name):
    mask, facts = BOUNDED[name]
    sizes = SIZES | {"q_len": 301, "kv_len": 331, "kv_heads": 2}
    case = cases.AttentionCase(name="bounds", **(sizes | facts))
    arguments = case.arguments(0)
    options = {name: arguments.get(name) for name in ("q_lengths", "kv_lengths", "mask_array")}
    options = bind.Call(mask=masks.as_function(mask), **options)
    problem, inputs = bind.attention(*(arguments[name] for name in "qkv"), options)
    result = in_numpy.call(lambda inputs: tile_lists._bounds(problem, inputs, 64, 64), inputs)
    assert result is not None
    seen = np.broadcast_to(
        masks.as_function(mask).dense(301, 331, batch=2, heads=2), (2, 2, 301, 331)
    )
    seen = seen & np.asarray(arguments.get("mask_array", True))
    for batch in range(2):
        q_len, kv_len = (facts.get(x, (10**4,) * 2)[batch] for x in ("q_lengths", "kv_lengths"))
        seen[batch, :, q_len:], seen[batch, :, :, kv_len:] = False, False
    for which, count in enumerate(result):
        got = np.broadcast_to(count, (2, 2, 5, 6))
        for at in np.ndindex(*got.shape):
            b, h, i, j = at
            part = seen[b, h, i * 64 : i * 64 + 64, j * 64 : j * 64 + 64]
            want = (part.all() and part.shape[1] == 64) if which else part.any()
            assert got[at] == want or facts and which and not got[at], (which, at)


@pytest.mark.parametrize("rows, block, count", [(64, 64, 1), (64, 128, 1), (64, 80, 2)])
def test_bounds_in_all_tiles_are_one_reduction(rows, block, count):
    """XLA launches one reduction each, for tiles whose sizes have few common divisors."""
    grid = tile_bounds.Grid(2, 1, 300, 300, rows, block)

    def find(*aux):
        mask = pa.mask_fn(lambda b, h, q, kv, i, f: (i[b, q] == i[b, kv]) & f[q], *aux)
        return tile_bounds.kinds(mask.program, mask.aux, grid, 0)

    ids, flags = np.zeros((2, 300), np.int32), np.ones(300, bool)
    result = jax.make_jaxpr(find)(ids, flags).jaxpr.eqns
    assert sum(equation.primitive.name.startswith("reduce") for equation in result) == count


@pytest.mark.parametrize("name", ["documents", "signs"])
def test_blocks_that_a_mask_carries(name):
    """They leave what the mask leaves, in tiles of any size, and are for calls of their sizes."""
    case = cases.AttentionCase(name="blocks", **(SIZES | {"q_len": 150, "kv_len": 397}))
    mask = mask_of(name, 150, 397)
    carrying = jax.jit(lambda mask: mask.blocks(150, 397, batch=2, heads=2))(mask)
    seen = np.broadcast_to(mask.dense(150, 397, batch=2, heads=2), (2, 2, 150, 397))
    for rows, block in ((64, 128), (128, 64), (32, 64), (16, 192)):
        grid = tile_bounds.Grid(2, 2, 150, 397, rows, block)
        kinds = [
            np.broadcast_to(x, (2, 2, *grid.tiles)) for x in tile_bounds.taken(carrying.kinds, grid)
        ]
        for b, h, i, j in np.ndindex(*kinds[0].shape):
            part = seen[b, h, i * rows :, j * block :][:rows, :block]
            some, whole = (x[b, h, i, j] for x in kinds)
            finer = rows < 64 and some and not whole  # tiles of a block that is seen in part
            assert finer or (some, whole) == (part.any(), part.all() and part.shape[1] == block)
    q, k, v = (case.arguments(0)[x] for x in "qkv")
    same = [
        pa.flash_attention(q, k, v, mask=x, implementation="reference") for x in (mask, carrying)
    ]
    np.testing.assert_array_equal(*same)
    with pytest.raises(ValueError, match="mask: expected blocks of"):
        pa.flash_attention(q[:, :7], k, v, mask=carrying)
    with pytest.raises(ValueError, match="expected blocks of an int q_offset"):
        pa.flash_attention(q, k, v, mask=carrying, q_offset=jnp.zeros(2, jnp.int32))
    assert (carrying & pa.CAUSAL).kinds is None and pa.mask_fn(lambda b, h, q, kv: q > kv).blocks(
        9, 9
    ).kinds is None


@pytest.mark.guards
def test_a_mask_of_more_elements_than_int32_counts_lowers():
    """It is copied with rows and keys of whole tiles."""
    rows = jax.ShapeDtypeStruct((1, 46344, 1, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, 1, 46344, 46344), jnp.bool_)
    call = lambda q, mask: pa.flash_attention(q, q, q, mask_array=mask)  # noqa: E731
    with device.assume("sm90"):
        assert "mosaic_gpu" in mosaic.lower_for_cuda(call, rows, mask)
