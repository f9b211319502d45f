"""The Hopper prefill kernel: right in the interpreter with its races watched, compiled ahead of
time without spills, and, with `-m gpu`, right on the real thing.

tests/caches/test_decode.py asks every implementation what attention over a cache means. Here is
what only this kernel has: rows of several query heads in one tile, split keys and their combine,
its limits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import FULL, sliding_window
from pallas_attn.kernels.attention import separate_caches
from pallas_attn.kernels.prefill import sm90 as kernel
from tests.kernels.decode.test_decode_kernel import ADDED, ALIBI, SOME
from tests.support import mosaic
from tests.support.decode_cases import (
    KINDS,
    Case,
    check,
    run,
    shapes_of,
    turns,
)

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

Config = kernel.Config
SHORT = (0, 1, 70, 130, 200)
SMALL = Config(2, block_kv=64, grid=3, in_turn=True)
ONE = Config(1, block_kv=64, grid=3)
WIDE = Config(3, block_kv=64, q_slots=1, grid=2)
SPLIT = dataclasses.replace(SMALL, splits=2)


TWO = {"q_heads": 8, "kv_heads": 2}  # for the lookup of rows; after that heads are alike


OF_SEQUENCES = lambda b, h, q, kv, x: x[b], np.arange(9, dtype=np.float32)


def case(**changes) -> Case:
    sizes = {"lengths": SHORT, "capacity": 208, "q_len": 40, "q_heads": 4, "kv_heads": 1}
    return Case(**(sizes | changes))


INTERPRETED = {
    "plain": (case(**TWO), SMALL),
    "together": (case(**TWO), dataclasses.replace(SMALL, together=2)),
    "splits": (case(q_len=19), dataclasses.replace(SPLIT, splits=3)),
    "window_sinks": (case(mask=sliding_window(50), sinks=True), SMALL),
    "layers": (case(layers=3, q_len=8, **TWO), ONE),
    "overflow": (case(lengths=(5, 500, 64, 225), q_len=17, **TWO), SPLIT),
    "group3": (case(q_heads=3, q_len=65), WIDE),
    "group12_two_chunks": (case(q_heads=12, q_len=9, sinks=True), SMALL),
    "group16_of_one_head": (case(q_heads=16, q_len=3), ONE),
    "v_of_another_width": (case(v_head_dim=128, q_len=8), ONE),
    "odd_head_dims_splits": (case(head_dim=80, v_head_dim=40, q_len=9), SPLIT),
    "wide_tiles": (case(q_len=17), Config(2, block_kv=128, grid=2)),
    "tree": (case(lengths=(3, 70, 130), kv_heads=1, q_len=35, hides="tree"), SMALL),
    "tree_splits": (
        case(lengths=(0, 9, 140), q_heads=3, kv_heads=1, q_len=70, hides="tree"),
        SPLIT,
    ),
    "function": (case(lengths=(3, 130), q_len=9, mask=FULL, hides=SOME), ONE),
    "alibi": (case(adds=ALIBI, **TWO), SMALL),
    "alibi_splits_sinks": (case(q_heads=3, q_len=19, sinks=True, adds=ALIBI), SPLIT),
    "scores_window": (case(q_len=9, mask=sliding_window(50), adds=ADDED), SMALL),
}
OF_EVERY_KIND = ("layers", "overflow")  # whole and split; what else there is turns by turns


@pytest.mark.guards
@pytest.mark.parametrize("name, kind", turns(INTERPRETED, OF_EVERY_KIND))
def test_interpreted(name, kind):
    call, config = INTERPRETED[name]
    with mosaic.interpret():
        check(dataclasses.replace(call, kind=kind), config)


@pytest.mark.guards
@pytest.mark.parametrize("name", ["splits", "window_sinks"])
def test_separate_caches_of_several_launches_interpreted(name, monkeypatch):
    monkeypatch.setattr(kernel, "CACHES_OF_A_LAUNCH", 2)
    call, config = INTERPRETED[name]
    call = dataclasses.replace(call, kind="per_sequence")
    assert len(separate_caches.groups(call.problem, 2)) > 1
    with mosaic.interpret():
        check(call, config)


@pytest.mark.guards
def test_separate_caches_whose_numbers_a_function_reads_interpreted():
    """One launch, however many they are."""
    lengths = (3, 9, 0, 17, 30, 31, 32, 8, 5)
    call = case(kind="per_sequence", lengths=lengths, capacity=32, q_len=9, adds=OF_SEQUENCES)
    with mosaic.interpret():
        check(call, ONE)


@pytest.mark.parametrize(
    "count, sizes",
    [(8, [8]), (9, [4, 5]), (12, [6, 6]), (15, [5, 5, 5]), (23, [7, 8, 8]), (32, [8] * 4)],
)
def test_launches_of_separate_caches(count, sizes):
    """The fewest launches, or a few more of one size; together every sequence once."""
    call = Case("per_sequence", (5,) * count)
    launches = separate_caches.groups(call.problem, 8)
    assert [x.stop - x.start for x in launches] == sizes
    assert np.concatenate([np.arange(count)[x] for x in launches]).tolist() == list(range(count))
    for other in ({"kind": "stacked"}, {"hides": SOME}):
        assert len(separate_caches.groups(dataclasses.replace(call, **other).problem, 8)) == 1


@pytest.mark.guards
def test_layers_and_lengths_out_of_range():
    """A layer that the cache does not have gives NaN, a negative length is 0."""
    drawn = case(layers=2, lengths=(70, 130), q_len=9)
    inputs = drawn.inputs()._replace(new_lengths=jnp.zeros(2, jnp.int32))
    call = jax.jit(functools.partial(run, problem=drawn.problem, config=ONE))  # traced once for all
    with mosaic.interpret():
        for layer in (-1, 2, 2**31 - 1, -(2**31)):
            out, lse = call(inputs._replace(layer=jnp.int32(layer)))
            assert np.isnan(np.asarray(out, np.float32)).all() and np.isnan(lse).all()
        # `extend` has been for neither, and the second has rows all the same.
        never = jnp.asarray([-1, -1], jnp.int32)
        lengths = jnp.asarray([0, 70], jnp.int32)
        out, _ = call(inputs._replace(lengths=lengths, new_lengths=never))
        assert np.isnan(np.asarray(out[0], np.float32)).all()
        assert np.isfinite(np.asarray(out[1], np.float32)).all()
        lengths = jnp.asarray([-(2**31), 2**31 - 1], jnp.int32)
        out, lse = call(inputs._replace(lengths=lengths))
    assert not np.asarray(out[0], np.float32).any() and np.isneginf(lse[0]).all()
    assert np.isnan(np.asarray(out[1], np.float32)).all() and np.isnan(lse[1]).all()


# ---- lowered and compiled ------------------------------------------------------------------------


def large(**changes) -> Case:
    sizes = {"lengths": (8192,) * 8, "capacity": 8192, "q_heads": 32, "kv_heads": 8, "q_len": 1024}
    return Case(**(sizes | {"head_dim": 128, "v_head_dim": 128} | changes))


@pytest.mark.parametrize(
    "changes, heads",
    [
        ({}, 8),
        ({"q_len": 2048}, 8),
        ({"lengths": (8192,) * 2}, 8),
        ({"q_len": 2048, "kind": "paged", "kv_heads": 4, "capacity": 16384}, 4),
        ({"lengths": (8192,) * 8, "q_len": 256}, 1),  # q tiles see nearly as many keys
        ({"capacity": 8200}, 1),  # L2 would hold little else
        ({"q_len": 256}, 1),  # a unit a block
        ({"lengths": (8192,) * 8}, 8),
        ({"q_len": 8192}, 8),
        ({"lengths": (8192,) * 8, "q_len": 4096}, 1),  # many
        ({"lengths": (8192,) * 20, "q_len": 32}, 1),  # one q tile
        ({"mask": sliding_window(1024)}, 1),  # q tiles see equally many keys
        ({"mask": FULL}, 1),
    ],
)
def test_which_heads_are_taken_together(changes, heads):
    call = large(**({"lengths": (8192,)} | changes))
    assert Config.default(call.problem).together == heads


@pytest.mark.parametrize(
    "sequences, tokens, heads",
    [
        (64, 64 + 2048, 8),  # may be a long chunk and single tokens
        (16, 16 * 2048, 8),  # prompts
        (8, 8 * 512, 1),  # chunks over much longer sequences
        (64, 64 * 256, 1),
    ],
)
def test_which_heads_of_packed_rows_are_taken_together(sequences, tokens, heads):
    problem = large(lengths=(8192,) * sequences, q_len=1).problem
    packed = dataclasses.replace(problem, tokens=tokens, q_len=tokens)
    assert Config.default(packed).together == heads


COMPILED = {  # bytes spilled: a few scalars of the producer
    "stacked": (large(), 0),
    "per_sequence": (large(kind="per_sequence", q_len=64), 0),
    "pages16": (large(kind="paged", q_len=256), 0),
    "few_rows": (large(q_len=8), 0),
    "alibi": (large(kind="paged", adds=ALIBI), 0),
    "h256": (large(q_len=256, head_dim=256, v_head_dim=256), 96),
}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", COMPILED)
def test_machine_code(name):
    """No copy of a cache, one launch, or two where keys are split; no matmul waits for another."""
    decoded, spilled = COMPILED[name]
    config = Config.default(decoded.problem)
    call = functools.partial(run, problem=decoded.problem, config=config)
    report = mosaic.compile_for(call, shapes_of(decoded))
    assert (report.launches, report.copies) == (1 + (config.splits > 1), 0)
    assert report.spill_bytes <= spilled


def over_a_cache(q, cache):
    return pa.decode_attention(q, cache)


@pytest.mark.machine_code
@pytest.mark.guards
def test_many_separate_caches_are_one_kernel():
    """A launch has few tensor maps, which take LLVM more than linear time."""
    make = functools.partial(pa.PerSequenceCache.create, [1024] * 32, 8, 128)
    q = jax.ShapeDtypeStruct((32, 128, 32, 128), jnp.bfloat16)
    report = mosaic.compile_for(over_a_cache, q, jax.eval_shape(make))
    assert (report.launches, len(report.kernels), report.tensor_maps) == (4, 1, 18)


# ---- capability ----------------------------------------------------------------------------------


def test_keys_are_split_where_query_rows_do_not_fill_the_gpu():
    def splits(m, q_len):
        return Config.default(large(lengths=(8192,) * m, q_len=q_len).problem).splits

    assert splits(8, 1024) == splits(8, 64) == 1
    assert splits(1, 16) >= 12 and splits(1, 64) >= 6 and splits(8, 16) == 2


def test_who_computes_in_turn():
    """Two consumers, but where keys are split in more than two, or a single q tile reads them."""
    cases = (1, 1024, 1, True), (1, 256, 2, True), (1, 64, 8, False), (8, 32, 2, False)
    for sequences, rows, splits, in_turn in cases:
        config = Config.default(large(lengths=(8192,) * sequences, q_len=rows).problem)
        assert (config.warpgroups, config.splits, config.in_turn) == (2, splits, in_turn), rows


# ---- on a GPU ------------------------------------------------------------------------------------


Q_LENS = (5, 7, 8, 16, 63, 64, 65, 128, 300, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_len", Q_LENS)
def test_on_a_gpu(kind, q_len):
    """Lengths that end inside, at and past a tile and a page; NaN past all of them. Options take
    turns: each meets every q_len and every kind.
    """
    lengths = (0, 3, 64, 127, 128, 129, 1000, 1024)
    call = Case(kind, lengths, q_len, 28, 4, 128, 128, capacity=1088)
    other = {"q_heads": 8, "head_dim": 64, "v_head_dim": 64, "softcap": 20.0}
    every = ({}, {"mask": sliding_window(200), "sinks": True, "layers": 2}, other)
    changes = every[(Q_LENS.index(q_len) + KINDS.index(kind)) % 3]
    changed = dataclasses.replace(call, **changes)
    check(changed, Config.default(changed.problem))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [9, 20])
def test_many_separate_caches_on_a_gpu(count):
    """In launches of two sizes, and of one."""
    lengths = tuple(range(1, 40 * count, 40))
    call = Case("per_sequence", lengths, 40, 8, 2, 128, 128, capacity=800)
    check(call, Config.default(call.problem))


@pytest.mark.gpu
@pytest.mark.parametrize("name, kind", turns(INTERPRETED, (*OF_EVERY_KIND, "plain", "splits")))
def test_interpreted_cases_on_a_gpu(name, kind):
    call, config = INTERPRETED[name]
    check(dataclasses.replace(call, kind=kind), config)
