"""Work tiles that blocks claim (kernels/flash_fwd/claims.py): packed documents, forward."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import _config
from pallas_attn._problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.flash_fwd import segments, sm90, tile_scheduler
from tests import builds, mosaic, threads

CAUSAL, FULL = pa.CAUSAL, pa.FULL
TWO, THREE, FOUR = (
    {"warpgroups": 2, "block_kv": 64, "stages": 2},
    {"warpgroups": 3, "block_kv": 64, "stages": 3},
    {"warpgroups": 4, "block_kv": 64, "stages": 6},
)


def made(documents, heads, dim=64, batch=1, offset=None, seed=0):
    """q, k, v, and what else a call is given."""
    rows = sum(documents)
    keys = jax.random.split(jax.random.key(seed), 3)
    arrays = [
        jax.random.normal(key, (batch, rows, n, dim), jnp.bfloat16)
        for key, n in zip(keys, (heads[0], heads[1], heads[1]), strict=True)
    ]
    ids = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
    # Each batch row begins elsewhere in the row of documents.
    ids = jnp.asarray(np.stack([np.roll(ids, 100 * b) for b in range(batch)]))
    options = {"segment_ids": ids}
    if offset is not None:
        options["q_offset"] = jnp.full((batch,), offset, jnp.int32)
    return arrays, options


def problem_of(q, k, mask, names):
    sizes = {"batch": q.shape[0], "q_len": q.shape[1], "kv_len": k.shape[1]}
    sizes |= {"q_heads": q.shape[2], "kv_heads": k.shape[2]}
    return AttentionProblem(
        op="flash_forward",
        gpu="sm90",
        dtype="bfloat16",
        head_dim=q.shape[3],
        v_head_dim=q.shape[3],
        mask=mask,
        scale=q.shape[3] ** -0.5,
        arrays=names,
        **sizes,
    )


CASES = {
    "causal": ((100, 250, 50, 300), (4, 2), CAUSAL, TWO | {"grid": 3}, {}),
    "three": ((100, 450, 50, 300), (4, 2), CAUSAL, THREE | {"grid": 2}, {"batch": 2}),
    "full": ((30, 450, 1, 19, 300), (2, 2), FULL, THREE | {"grid": 3}, {}),
    "window": ((100, 450, 150), (3, 1), pa.sliding_window(70), TWO | {"grid": 4}, {}),
    "offset": ((100, 450, 150), (4, 2), CAUSAL, THREE | {"grid": 2}, {"offset": -200}),
    "one head": ((64, 700), (1, 1), CAUSAL, TWO | {"grid": 5}, {}),
    "one block": ((300, 400), (2, 1), CAUSAL, TWO | {"grid": 1}, {}),
    "a block each": ((64, 320), (1, 1), CAUSAL, TWO, {}),
    "four": ((500, 600), (2, 1), CAUSAL, FOUR | {"grid": 3}, {}),
    "wide": ((100, 300), (2, 1), CAUSAL, TWO | {"grid": 2, "q_slots": 1}, {"dim": 256}),
    "short": ((1,) * 40 + (3,) * 100, (2, 1), CAUSAL, THREE | {"grid": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_claim_all_work_tiles(case):
    """Without a race, and with no work tile left out; rows of no key too."""
    documents, heads, mask, config, how = CASES[case]
    (q, k, v), options = made(documents, heads, **how)
    want, want_lse = pa.flash_attention_with_lse(
        q, k, v, mask=mask, **options, implementation="reference"
    )
    ids = options["segment_ids"]
    arrays = {"q_segment_ids": ids, "kv_segment_ids": ids}
    arrays |= {"q_offset": options["q_offset"]} if "q_offset" in options else {}
    names = tuple(name for name in AttentionInputs._fields if name in arrays)
    problem, config = problem_of(q, k, mask, names), sm90.Config(**config, claims=True)
    assert sm90.plan_of(problem, config).claims
    with mosaic.interpret():
        call = jax.jit(functools.partial(sm90.run, problem=problem, config=config))
        out, lse = (np.asarray(x, np.float32) for x in call(AttentionInputs(q, k, v, **arrays)))
    np.testing.assert_allclose(out, np.asarray(want, np.float32), atol=0.02)
    np.testing.assert_allclose(lse, np.asarray(want_lse), atol=1e-4)


def test_each_claim_counts_once(monkeypatch):
    """A block claims once for each work tile that it takes: all there are, and no more."""
    claimed, take = [], threads.BlockOfThreads.take

    def counted(self, counters, index, where):
        claimed.append(np.count_nonzero(where))
        return take(self, counters, index, where)

    monkeypatch.setattr(threads.BlockOfThreads, "take", counted)
    (q, k, v), options = made((200, 333), (2, 1))
    ids = options["segment_ids"]
    problem = problem_of(q, k, CAUSAL, ("q_segment_ids", "kv_segment_ids"))
    config = sm90.Config(**TWO, grid=3, claims=True)
    inputs = AttentionInputs(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)
    with mosaic.interpret():
        jax.jit(functools.partial(sm90.run, problem=problem, config=config))(inputs)
    assert sum(claimed) == sm90.plan_of(problem, config).work_tiles == 10


def test_the_last_head_goes_by_rank():
    """Of the last batch row, its longest work tile first; by the small kernel as by XLA."""
    (q, k, v), options = made((130, 500, 70, 400), (4, 2), batch=2)
    ids = options["segment_ids"]
    names = ("q_segment_ids", "kv_segment_ids")
    problem, config = problem_of(q, k, CAUSAL, names), sm90.Config(**TWO, claims=True)
    plan = sm90.plan_of(problem, config)
    inputs = AttentionInputs(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)
    keys = tma_operands.round_up(problem.kv_len, config.block_kv)
    fields = tma_operands.segment_ids(inputs, plan.padded_rows, keys)
    records, want = segments.by_xla(plan, inputs, fields)
    with mosaic.interpret():
        found = jax.jit(functools.partial(segments.prepare, plan))(ids, ids)
    for x, w in zip(found, (records, want), strict=True):
        np.testing.assert_array_equal(x, w)
    codes, static = np.asarray(want)[0, 1:], tile_scheduler.schedule(plan)[0, 1:]
    ranked = static >> plan.code_bits >= plan.first_ranked_head
    np.testing.assert_array_equal(codes[~ranked], static[~ranked])
    tiles = codes[ranked][:: problem.group] & ((1 << plan.code_bits) - 1)
    assert sorted(tiles) == list(range(plan.q_tiles))
    spans = np.asarray(records)[-1][:, : 4 * config.warpgroups].reshape(plan.q_tiles, -1, 4)
    causal = tile_scheduler.mask_bounds(plan)[1]
    lengths = np.minimum(spans[..., 3].max(1), causal) - spans[..., 0].min(1)
    assert (np.diff(lengths[tiles]) <= 0).all() and lengths[tiles[0]] > lengths[tiles[-1]]


def test_claims_are_for_long_documents():
    """The default: not where rows are few, nor where a work tile may need no kv tile."""
    ids = ("q_segment_ids", "kv_segment_ids")

    def config(rows, names=ids, kv_heads=8):
        q, k = (jax.ShapeDtypeStruct((1, rows, n, 128), jnp.bfloat16) for n in (32, kv_heads))
        return sm90.Config.default(problem_of(q, k, CAUSAL, names))

    assert config(sm90.LONG).claims and config(sm90.LONG).warpgroups == 3
    assert config(sm90.LONG, ("q_offset", *ids)).claims
    assert not config(sm90.LONG - 1).claims and config(sm90.LONG - 1).warpgroups == 2
    assert not config(sm90.LONG, ("kv_lengths", *ids)).claims
    assert not config(sm90.LONG, ()).claims and not config(sm90.LONG, kv_heads=32).claims
    with pytest.raises(ValueError, match="claims must be False: stages are many"):
        sm90.Config(stages=13, claims=True)


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_shared_memory_is_enough(dim):
    """At every head dim, with what is fetched from another GPU too."""
    q, k = (jax.ShapeDtypeStruct((1, sm90.LONG, n, dim), jnp.bfloat16) for n in (8, 4))
    names = ("q_offset", "q_segment_ids", "kv_segment_ids")
    problem = problem_of(q, k, CAUSAL, names)
    config = sm90.Config.default(problem)
    assert config.claims and sm90.smem_bytes(problem, config) <= sm90.SMEM_LIMIT
    fetching = dataclasses.replace(
        problem, arrays=(*names, "device"), kv_len=2 * sm90.LONG, fetches=2
    )
    assert sm90.fetches(fetching) and sm90.Config.default(fetching).claims


def test_neighbours_are_claimed_together():
    """All work tiles once: the heads of a group side by side, rows from the last on."""
    q, k = (jax.ShapeDtypeStruct((2, 1000, n, 64), jnp.bfloat16) for n in (6, 2))
    problem = problem_of(q, k, CAUSAL, ("q_segment_ids", "kv_segment_ids"))
    plan = sm90.plan_of(problem, sm90.Config(**TWO, grid=4, claims=True))
    (count, *codes) = tile_scheduler.schedule(plan)[0].tolist()
    assert count == len(codes) == len(set(codes)) == plan.work_tiles
    head, tile = (np.array(codes) >> plan.code_bits, np.array(codes) % (1 << plan.code_bits))
    assert head[:4].tolist() == [0, 1, 2, 0] and tile[:4].tolist() == [7, 7, 7, 6]
    assert plan.first_ranked_head == 9 and tile[head >= 9][:4].tolist() == [0, 0, 0, 1]


@pytest.mark.machine_code
@pytest.mark.guards
def test_compiles_without_spills_or_serialised_matmuls():
    build = builds.BUILDS["flash_fwd/sm90/h128_claims"]
    report = mosaic.compile_for(build.call, *build.shapes, target=build.target, sass=False)
    assert {kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in report.kernels} == {
        "flash_fwd_sm90",
        "segments",
    }
    assert report.spill_bytes == 0
    assert not {"C7510", "C7511", "C7512", "C7513", "C7514"} & set(report.notes)


LONG_ONES = (
    ((8192,) * 2, (8, 2), CAUSAL),
    ((1, 5000, 300, 11083), (8, 4), CAUSAL),
    ((700,) * 24, (4, 1), FULL),
    ((20000,), (2, 1), pa.sliding_window(1000)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("documents, heads, mask", LONG_ONES, ids=str)
@pytest.mark.parametrize("dim", (64, 96, 128, 256))
def test_long_documents_on_the_gpu(documents, heads, mask, dim):
    """As by rank, with no row left as it was: the arrays hold NaN before."""
    arrays, options = made(documents, heads, dim)
    call = functools.partial(pa.flash_attention_with_lse, mask=mask, **options)

    def compiled(config):
        """The step, and the Config that it runs with."""
        forced = _config.forced("flash_fwd_sm90", config) if config else contextlib.nullcontext()
        with forced, _config.watched() as choices:
            step = jax.jit(lambda *x: call(*x)).lower(*arrays).compile()
        return step, choices[-1].config

    by_rank, _ = compiled({"warpgroups": 2, "block_kv": 64, "q_slots": 1})
    want = [np.asarray(x, np.float32) for x in by_rank(*arrays)]
    step, config = compiled(None)
    assert config.claims
    for _ in range(3):
        before = [jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.eval_shape(call, *arrays)]
        jax.block_until_ready(before)
        del before
        for x, w, atol in zip(step(*arrays), want, (0.02, 1e-4), strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), w, atol=atol)
