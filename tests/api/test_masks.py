"""The one definition of visibility, by brute force."""

import copy
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, FULL, Mask, sliding_window

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

BOUNDS = (None, -1, 0, 1, 3)
MASKS = [
    Mask(left, right)
    for left, right in itertools.product(BOUNDS, BOUNDS)
    if None in (left, right) or left + right >= 0
]
by_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


def seen(mask, q_pos, kv_pos, kv_len=None):
    """The docstring of Mask in Python: p - left <= j <= p + right, and j < kv_len."""
    return (
        (mask.right is None or kv_pos <= q_pos + mask.right)
        and (mask.left is None or kv_pos >= q_pos - mask.left)
        and (kv_len is None or kv_pos < kv_len)
    )


def test_the_pictures_in_the_docstring_are_the_masks():
    text = Mask.__doc__
    heading = re.search(r"^ *(Mask\(.*)$", text.split("`Mask(right=-1)`")[1], re.M).group(1)
    masks = [eval(name) for name in re.split(r" {2,}", heading)]
    rows = re.findall(r"^ *([1.][1. ]+)$", text, re.M)
    assert len(masks) == 4 and len(rows) == 3
    for column, mask in enumerate(masks):
        drawn = [re.split(r" {2,}", row)[column].split() for row in rows]
        assert [["1" if x else "." for x in row] for row in mask.dense(3, 4)] == drawn, mask


@by_mask
def test_allows_is_the_definition(mask):
    for q_pos, kv_pos, kv_len in itertools.product(range(-3, 6), range(6), (None, 0, 2, 9)):
        assert bool(mask.allows(q_pos, kv_pos, kv_len)) == seen(mask, q_pos, kv_pos, kv_len)


BUILT = {
    "filled": Mask.filled,
    "static": lambda mask: mask.static,
    "widest": lambda mask: mask.widest,
    "transposed, twice": lambda mask: mask.transposed.transposed,
    "& FULL": lambda mask: mask & FULL,
    "a pytree": lambda mask: jax.tree.map(lambda x: x, mask),
    "copy.copy": copy.copy,
}


@pytest.mark.parametrize("name", BUILT)
def test_masks_built_of_a_mask_have_all_of_its_fields(name):
    for mask in MASKS:
        assert BUILT[name](mask) == mask


def test_every_field_of_a_mask_is_compared_with_the_definition():
    """The tests here know no field that `MASKS` do not set."""
    for field in dataclasses.fields(Mask):
        values = {getattr(mask, field.name) for mask in MASKS}
        shown = {tuple(seen(mask, 3, key) for key in range(9)) for mask in MASKS}
        alike = {tuple(seen(without(mask, field), 3, key) for key in range(9)) for mask in MASKS}
        assert len(values) > 1, f"Mask.{field.name}: set it in MASKS"
        assert shown != alike, f"Mask.{field.name}: `seen` does not read it"


def without(mask, field):
    return mask.filled(**{field.name: field.default})


@by_mask
def test_the_bounds_of_a_row_are_the_keys_that_it_sees(mask):
    keys = range(-12, 12)  # more on either side of a query than any of these masks reaches
    for q_pos in range(-3, 6):
        low, high = mask.row_bounds(q_pos)
        inside = [(low is None or low <= j) and (high is None or j < high) for j in keys]
        assert inside == [seen(mask, q_pos, j) for j in keys]
    low, high = mask.row_bounds(np.arange(3))
    assert (low is None, high is None) == (not mask.bounds_left, not mask.bounds_right)
    assert [bound.shape for bound in (low, high) if bound is not None] in ([], [(3,)], [(3,)] * 2)


@by_mask
def test_what_a_mask_says_of_itself(mask):
    keys = range(-12, 12)
    visible = [j for j in keys if seen(mask, 0, j)]
    assert mask.bounds_left == (visible[0] != keys[0])
    assert mask.bounds_right == (visible[-1] != keys[-1])
    assert mask.is_full == (len(visible) == len(keys))
    assert mask.is_causal == (visible[-1] == 0)
    both = mask.bounds_left and mask.bounds_right
    assert mask.width == (len(visible) if both else None)


@by_mask
def test_allows_is_the_same_in_numpy_and_jax(mask):
    q_pos, kv_pos = np.arange(-2, 5, dtype=np.int32)[:, None], np.arange(6, dtype=np.int32)[None]
    wanted = [[seen(mask, p, j, 4) for j in range(6)] for p in range(-2, 5)]
    np.testing.assert_array_equal(np.broadcast_to(mask.allows(q_pos, kv_pos, 4), (7, 6)), wanted)
    got = mask.allows(jnp.asarray(q_pos), jnp.asarray(kv_pos), jnp.int32(4))
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(np.broadcast_to(got, (7, 6)), wanted)


def test_absent_terms_cost_nothing():
    assert FULL.allows(np.arange(3), np.arange(3)) is True
    assert FULL.dense(2, 3).all()


def test_segments_must_be_equal():
    q_ids, kv_ids = np.array([[0], [1], [5]]), np.array([[0, 0, 1, 7]])
    got = CAUSAL.allows(np.arange(3)[:, None], np.arange(4)[None], None, q_ids, kv_ids)
    np.testing.assert_array_equal(got, [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    got = FULL.allows(None, None, None, q_ids, kv_ids)
    np.testing.assert_array_equal(got, q_ids == kv_ids)


@by_mask
def test_dense_offsets_and_lengths(mask):
    got = mask.dense(3, 7, q_offset=2, kv_length=5)
    wanted = [[seen(mask, 2 + i, j, 5) for j in range(7)] for i in range(3)]
    np.testing.assert_array_equal(got, wanted)


def tiles(size):
    return [(lo, hi) for lo in range(size) for hi in range(lo + 1, size + 1)]


def check_range(mask, range_of, by):
    """`range_of(first, end, keys)` are the keys that `by`, any or all, of the queries see."""
    for (q_lo, q_hi), offset, kv_len in itertools.product(tiles(5), (-2, 0, 4), (0, 3, 8)):
        lo, hi = range_of(q_lo + offset, q_hi + offset, kv_len)
        keys = [
            j for j in range(kv_len) if by(seen(mask, p + offset, j) for p in range(q_lo, q_hi))
        ]
        assert list(range(lo, hi)) == keys
        assert by is all or (lo >= 0 and hi <= kv_len)


@by_mask
def test_kv_range_holds_every_key_that_somebody_sees_and_is_tight(mask):
    # The union of a band over adjacent rows has no hole: the bound is tight.
    check_range(mask, mask.kv_range, any)


@by_mask
def test_kv_full_range_is_what_everybody_sees(mask):
    check_range(mask, mask.kv_full_range, all)


@by_mask
def test_ranges_of_the_transposed_mask_are_those_of_the_queries(mask):
    for (kv_lo, kv_hi), q_len in itertools.product(tiles(5), (0, 3, 6)):
        lo, hi = mask.transposed.kv_range(kv_lo, kv_hi, q_len)
        some = [p for p in range(q_len) if any(seen(mask, p, j) for j in range(kv_lo, kv_hi))]
        assert list(range(lo, hi)) == some
        lo, hi = mask.transposed.kv_full_range(kv_lo, kv_hi, q_len)
        every = [p for p in range(q_len) if all(seen(mask, p, j) for j in range(kv_lo, kv_hi))]
        assert list(range(lo, hi)) == every


@by_mask
def test_ranges_are_the_same_traced(mask):
    for method, arguments in (
        (mask.kv_range, (1, 4, 6)),
        (mask.kv_full_range, (1, 4, 6)),
    ):
        traced = jax.eval_shape(method, *map(jnp.int32, arguments))
        assert all(getattr(x, "shape", ()) == () for x in traced)
        arrays = method(*map(np.int32, arguments))
        assert tuple(map(int, arrays)) == tuple(map(int, method(*arguments)))
        jaxed = method(*map(jnp.int32, arguments))
        assert tuple(map(int, jaxed)) == tuple(map(int, method(*arguments)))


@pytest.mark.parametrize("mask, other", [*itertools.product(MASKS[::2], MASKS[1::3])], ids=str)
def test_and_shows_what_both_show(mask, other):
    both = mask.dense(6, 6) & other.dense(6, 6)
    tightest = [
        None if a is None and b is None else min(x for x in (a, b) if x is not None)
        for a, b in ((mask.left, other.left), (mask.right, other.right))
    ]
    if None not in tightest and sum(tightest) < 0:
        with pytest.raises(ValueError, match="hides every key from every query"):
            _ = mask & other
        assert not both.any()
        return
    assert (mask & other) == Mask(*tightest) == (other & mask)
    np.testing.assert_array_equal((mask & other).dense(6, 6), both)


def test_names():
    assert Mask() == FULL and FULL.is_full and not CAUSAL.is_full
    assert Mask(right=0) == CAUSAL
    assert sliding_window(1) == Mask(0, 0)
    assert sliding_window(np.int64(4)) == Mask(3, 0)
    assert (Mask(3, 0) & FULL) == Mask(3, 0)
    assert [str(m) for m in (FULL, CAUSAL, Mask(2, 1))] == ["full", "causal", "left=2, right=1"]


def test_a_window_counts_the_querys_own_key():
    np.testing.assert_array_equal(sliding_window(2).dense(6, 6).sum(1), [1, 2, 2, 2, 2, 2])


def test_masks_are_values():
    same = Mask(np.int32(3), 0)
    assert same == Mask(3, 0) and hash(same) == hash(Mask(3, 0)) and type(same.left) is int
    assert Mask(3, 0) != Mask(3, 1)
    assert len({Mask(3, 0), same, Mask(3, 1)}) == 2
    with pytest.raises(AttributeError):
        same.left = 4


def test_two_equal_masks_compile_once():
    traces = []

    @functools.partial(jax.jit, static_argnames="mask")
    def attend(x, *, mask):
        traces.append(mask)
        return pa.flash_attention(x, x, x, mask=mask)

    x = jnp.ones((1, 2, 1, 4))
    attend(x, mask=Mask(1, 0))
    attend(x, mask=Mask(np.int64(1), 0))
    attend(x, mask=sliding_window(2))
    attend(x, mask=Mask(None, 3) & Mask(1, 0))
    assert traces == [Mask(1, 0)]


def test_a_mask_is_static_also_as_an_argument_of_a_jitted_function():
    x = jnp.ones((1, 3, 1, 4))
    attend = jax.jit(lambda *qkv, mask: pa.flash_attention(*qkv, mask=mask))  # a cache of its own
    for mask in (pa.CAUSAL, Mask(0, 0), Mask(np.int64(0), 0)):
        np.testing.assert_array_equal(
            attend(x, x, x, mask=mask), pa.flash_attention(x, x, x, mask=mask)
        )
    assert attend._cache_size() == 2


def test_the_longest_bounds_and_offsets_are_right():
    """Sums of positions and bounds near the largest stay in int32, in plain Python and traced."""
    most = 2**30 - 1
    x = jnp.ones((1, 3, 1, 4))
    for mask, offset, sees in (
        (Mask(most, most), -(2**29), [3, 3, 3]),
        (Mask(most, 2**29 - 1), -(2**29), [0, 1, 2]),
        (Mask(most, most), 2**29, [3, 3, 3]),
        (Mask(2**29, most), 2**29, [3, 2, 1]),
    ):
        _, lse = pa.flash_attention_with_lse(x, x, x, mask=mask, q_offset=offset, scale=0.0)
        want = mask.dense(3, 3, q_offset=offset).sum(1)
        np.testing.assert_allclose(np.exp(lse)[0, 0], want, rtol=1e-6)
        np.testing.assert_array_equal(want, sees)
    for mask, sees in ((pa.CAUSAL, [3, 0]), (Mask(left=5), [0, 3])):  # int32 arrays
        ends = jnp.asarray([2**31 - 1, -(2**31)], jnp.int32)
        both = jnp.broadcast_to(x, (2, *x.shape[1:]))
        _, lse = pa.flash_attention_with_lse(both, both, both, mask=mask, q_offset=ends, scale=0.0)
        np.testing.assert_allclose(np.exp(lse)[:, 0], np.tile(np.c_[sees], 3), rtol=1e-6)


def test_the_benchmarks_count_pairs_with_the_same_ranges():
    # kv_range over arrays of positions, as cases.visible_pairs uses it.
    positions = np.arange(7)
    low, high = Mask(2, 1).kv_range(positions, positions + 1, np.full_like(positions, 5))
    np.testing.assert_array_equal(
        np.maximum(high - low, 0), Mask(2, 1).dense(7, 9, kv_length=5).sum(1)
    )


@pytest.mark.parametrize("other", [3, None, "causal", 1.0, np.zeros(())])
def test_a_mask_meets_masks_alone(other):
    with pytest.raises(TypeError, match="unsupported operand"):
        pa.CAUSAL & other


def test_masks_say_where_arrays_and_functions_go():
    """An array takes no turn: it would ask each of its elements."""
    even = pa.mask_fn(lambda b, h, q, kv: kv % 2 == 0)
    for call, got in (
        (lambda: even & np.ones((3, 3), bool), "ndarray"),
        (lambda: pa.CAUSAL | np.ones((3, 3), bool), "ndarray"),
        (lambda: pa.CAUSAL | (lambda b, h, q, kv: True), "function"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == (
            f"mask: unsupported operand of & and |: expected a Mask or a mask function, got {got}; "
            "a boolean array goes in as mask_array, a Python function as mask_fn(f)"
        )
