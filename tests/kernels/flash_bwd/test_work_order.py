"""The order in which the backward kernels over keys take work tiles and query tiles: blocks that
claim work tiles (attention/claims.py) and blocks in lockstep (flash_bwd/work_order.py).
"""

import contextlib
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import config as _config
from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.attention import segment_spans, tma_operands
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import key_tiles, sm80, sm90, sm90_two_kernels, work_order
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.masks import CAUSAL, FULL, sliding_window
from tests.kernels.flash_bwd.test_flash_bwd import check, default_of, problem_of
from tests.kernels.flash_fwd.test_claims import count_claims, decoded, of, plain
from tests.kernels.flash_fwd.test_flash_fwd import arguments_of, case_named, small
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

NO_REFS = BackwardRefs(*[None] * 4)
MIB = 2**20


@pytest.mark.guards
@pytest.mark.parametrize(
    "name, changes, claims",
    [
        ("group7_kv1", {"block_q": 128}, True),
        ("kv_lengths_causal", {"dq_lag": 2}, True),
        ("kv_lengths_causal", {"block_q": 128}, False),
        ("kv_lengths_causal", {}, False),
    ],
    ids=str,
)
def test_blocks_in_lockstep_interpreted(name, changes, claims):
    """The one block goes down over its first work tile, and up again over its second."""
    case, how = small(name), {"grid": 1, "l2_heads": 1, "lockstep": True}
    module, also = (sm90, {"claims": claims}) if changes else (sm90_two_kernels, {})
    config = module.Config(**how, **also, **changes)
    order = module.plan_of(problem_of(case), config).order
    assert order.lockstep and order.claims == claims
    with mosaic.interpret():
        check(case, config)


@pytest.mark.guards
@pytest.mark.parametrize(
    "name, changes",
    [
        ("documents", {"dq_lag": 2}),
        ("q_lengths", {"block_q": 128}),
        ("offsets_by_row", {"dq_lag": 2}),
        ("bias_by_row", {"block_q": 128}),
    ],
    ids=str,
)
def test_blocks_that_claim_interpreted(name, changes):
    """Without a race; with work tiles of no query tile among them."""
    case, config = small(name), sm90.Config(grid=2, claims=True, **changes)
    order = sm90.plan_of(problem_of(case), config).order
    assert order.claims and not order.lockstep and order.work_tiles > order.grid
    with mosaic.interpret():
        check(case, config)


def context_of(plan, case):
    """The context of a kernel that knows documents."""
    inputs, tiling = AttentionInputs(**arguments_of(case)), plan.tiling
    fields = tma_operands.segment_ids(inputs, tiling.padded_rows, tiling.padded_keys)
    sizes = tiling.block_kv, tiling.block_q
    spans = segment_spans.spans_of(plan.problem, inputs, fields, sizes, of_keys=True)
    return KernelContext(plan, NO_REFS._replace(segment_spans=spans))


def full_tiles(plan, case):
    """Query tiles of all work tiles that need no mask."""
    ctx, whole, tiling = context_of(plan, case), 0, plan.tiling
    for tile in range(tiling.kv_tiles):
        work = key_tiles.key_tile(ctx, jnp.int32(tile))
        steps = range(int(work.span.lo), int(work.span.hi))
        masked = (key_tiles.needs_mask(tiling, work, t, t - steps.start) for t in steps)
        whole += sum(not bool(x) for x in masked)
    return whole


@pytest.mark.guards
@pytest.mark.parametrize(
    "mask, config",
    [
        (CAUSAL, sm90.Config(grid=3, claims=True, dq_lag=2)),
        (FULL, sm90.Config(grid=3, claims=True, dq_lag=2)),
        (CAUSAL, sm90.Config(grid=3, block_q=128)),
        (sliding_window(300), sm90_two_kernels.Config(grid=3)),
        (CAUSAL, sm80.Config()),
    ],
    ids=["claims", "full", "table", "window", "sm80"],
)
def test_tiles_within_a_document_need_no_mask(mask, config):
    """Only tiles of one document that the mask does not cut."""
    case = of((400, 120), (1, 1), mask=mask)
    module = sys.modules[type(config).__module__]
    assert full_tiles(module.plan_of(problem_of(case), config), case) >= 2
    with mosaic.interpret():
        check(case, config)


@pytest.mark.guards
def test_wide_rows_in_lockstep_interpreted():
    """By `sm90_dkdv`."""
    case = dataclasses.replace(small("kv_lengths_causal"), head_dim=136, v_head_dim=136)
    config = sm90_two_kernels.Config(grid=1, l2_heads=1, lockstep=True)
    order = sm90_two_kernels.plan_of(problem_of(case), config).order
    assert order.lockstep and not order.claims
    with mosaic.interpret():
        check(case, config)


@pytest.mark.parametrize("lockstep", [False, True])
def test_each_claim_counts_once(monkeypatch, lockstep):
    """A block claims once for each work tile that it takes: all there are, and no more."""
    claimed = count_claims(monkeypatch)
    case, config = plain(700, 700, (1, 1)), sm90.Config(grid=2, claims=True, lockstep=lockstep)
    with mosaic.interpret():
        check(case, config)
    assert sum(claimed) == sm90.plan_of(problem_of(case), config).order.work_tiles == 6


@pytest.mark.parametrize("group", [1, 3])
def test_query_tiles_in_lockstep(group):
    """All query tiles of every head once; the work tiles of a wave begin at the last one, those of
    the next wave at their own keys.
    """
    sizes = {"q_len": 1024, "kv_len": 1024, "batch": 1, "q_heads": group, "kv_heads": 1}
    problem = problem_of(dataclasses.replace(case_named("t_equals_s"), mask=CAUSAL, **sizes))
    plan = sm90.plan_of(problem, sm90.Config(grid=3, lockstep=True))
    for tile in range(plan.tiling.kv_tiles):
        work = key_tiles.key_tile(KernelContext(plan, NO_REFS), jnp.int32(tile))
        steps, (g, i) = [], (jnp.int32(0), jnp.int32(0))
        for n in range(group * int(work.steps)):
            assert (int(g), int(i)) == tuple(map(int, key_tiles.step_of(plan, work, jnp.int32(n))))
            steps.append((int(work.q_tiles.tile(i)), int(g)))
            g, i = key_tiles.step_after(plan, work, g, i)
        down = tile // 3 % 2 == 0
        wanted = [t for t in range(2 * tile, plan.tiling.q_tiles) for _ in range(group)]
        assert [t for t, _ in steps] == (wanted[::-1] if down else wanted)
        assert [head for _, head in steps] == list(range(group)) * int(work.steps)


def chunks(rows, **changes):
    """A problem of two chunks of causal rows on the first of two GPUs, in the order zigzag."""
    problem = problem_of(plain(rows, 4 * rows, (32, 8), 128, batch=2))
    offsets = (0, 3 * rows), (rows, 2 * rows)
    known = {"offsets": offsets, "share": 2, "zigzag": 2, "arrays": ("q_offset",)}
    return dataclasses.replace(problem, **known | changes)


@pytest.mark.parametrize("rows, together", [(1024, 16), (8192, 4), (32768, 2)])
def test_chunks_begin_with_what_meets_all_of_their_rows(rows, together):
    """Head by head; then the others, longest first, of several heads at a time."""
    order = sm90.plan_of(chunks(rows), sm90.Config(claims=True, lockstep=True)).order
    assert order.claims and not order.lockstep
    for offsets in order.problem.offsets:
        head, tile = decoded(order, work_order.schedule(order, offsets))
        first = tile * order.tiling.block_kv - np.array(offsets)[head // 8]  # sees the first key
        steps = np.clip(rows - np.maximum(first, 0), 0, None) // order.tiling.block_q
        whole = steps == rows // order.tiling.block_q
        count = np.count_nonzero(whole)
        assert 0 < count < order.work_tiles and whole[:count].all()
        assert (np.diff(head[:count]) >= 0).all()
        group = head[count:] // together
        assert (np.diff(group) >= 0).all()
        for each in set(group):
            assert (np.diff(steps[count:][group == each]) <= 0).all()


@pytest.mark.parametrize("heads, batch, ranked", [((4, 2), 2, 1), ((6, 3), 1, 0)])
def test_documents_are_claimed_in_the_order_of_keys(heads, batch, ranked):
    """The last head's longest first, where it is one of several."""
    case = of((300, 700), heads, batch=batch)
    plan = sm90.plan_of(problem_of(case), sm90.Config(grid=3, claims=True))
    order = plan.order
    assert order.heads - order.first_ranked_head == ranked
    ctx = context_of(plan, case)
    head, tile = decoded(order, key_tiles.schedule_by_rank(ctx))
    np.testing.assert_array_equal(head, np.repeat(np.arange(order.heads), 8))
    known = 8 * order.first_ranked_head
    np.testing.assert_array_equal(tile[:known], np.tile(np.arange(8), order.first_ranked_head))
    codes = ((head << plan.tiling.code_bits) + tile)[known:].tolist()
    steps = [int(key_tiles.key_tile(ctx, jnp.int32(code)).steps) for code in codes]
    assert steps == sorted(steps, reverse=True) and (not ranked or steps[0] > steps[-1])


ROWS = 64 * MIB // (8 * 128 * 4)  # rows of 4 heads of 128: two such arrays are more than L2 holds
NEITHER, LOCKSTEP, CLAIMS, BOTH = (False, False), (True, False), (False, True), (True, True)


def causal(rows, heads=(32, 8), dim=128, **changes):
    return dataclasses.replace(problem_of(plain(rows, rows, heads, dim)), **changes)


def documents(rows, heads=(32, 8)):
    return problem_of(of((rows // 2, rows - rows // 2), heads, 128))


DEFAULTS = {
    "heads share keys": (causal(ROWS), True, BOTH),
    "few rows, in parts": (causal(1200), True, NEITHER),
    "few work tiles, in parts": (causal(ROWS, (8, 1)), True, NEITHER),
    "heads of their own": (causal(4 * ROWS, (8, 8)), True, NEITHER),
    "long heads of their own": (causal(4 * ROWS + 8, (8, 8)), True, BOTH),
    "an offset": (causal(ROWS, arrays=("q_offset",)), True, BOTH),
    "lengths": (causal(ROWS, arrays=("kv_lengths",)), True, BOTH),
    "too few rows": (causal(500), False, NEITHER),
    "bits": (causal(ROWS, deterministic=True), False, NEITHER),
    "long, bits": (causal(ROWS + 8, deterministic=True), False, LOCKSTEP),
    "shared keys, bits": (causal(8192, (64, 8), batch=2, deterministic=True), True, BOTH),
    "full, bits": (causal(ROWS, deterministic=True, mask=FULL), True, CLAIMS),
    "wide": (causal(ROWS // 2, dim=256), False, NEITHER),
    "long, wide": (causal(ROWS // 2 + 8, dim=256), False, LOCKSTEP),
    "full": (causal(ROWS, mask=FULL), True, NEITHER),
    "long, full": (causal(ROWS + 8, mask=FULL), True, CLAIMS),
    "window": (causal(ROWS, mask=sliding_window(4096)), True, NEITHER),
    "long, window": (causal(ROWS + 8, mask=sliding_window(4096)), True, CLAIMS),
    "documents": (documents(ROWS), True, NEITHER),
    "long documents": (documents(ROWS + 8), True, CLAIMS),
    "chunks": (chunks(ROWS // 2), True, CLAIMS),
    "chunks, bits": (chunks(ROWS // 2, deterministic=True), False, NEITHER),
    # Few work tiles of rows that L2 does not hold.
    "few, causal": (causal(8200), True, BOTH),
    "few, full": (causal(8200, mask=FULL), True, NEITHER),
    "few, documents": (documents(ROWS, (32, 2)), False, NEITHER),
    "too few without parts": (causal(8192, (64, 1)), True, NEITHER),
    "too few, bits": (causal(8192, (64, 1), deterministic=True), False, NEITHER),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_default_order(name):
    """Whether dq is added up in global memory, and who claims or stays in lockstep."""
    problem, fused, order = DEFAULTS[name]
    config = default_of(problem)
    module = sys.modules[type(config).__module__]
    assert module is (sm90 if fused else sm90_two_kernels)
    assert module.smem_bytes(problem, config) <= sm90.SMEM_LIMIT
    chosen = module.plan_of(problem, config).order
    assert (chosen.lockstep, chosen.claims) == order


@pytest.mark.parametrize(
    "rows, heads, batch, together",
    [(8192, (32, 8), 2, 4), (16384, (32, 8), 1, 2), (65536, (32, 8), 1, 1), (8200, (6, 3), 2, 6)],
)
def test_heads_of_two_waves_are_taken_together(rows, heads, batch, together):
    problem = causal(rows, heads, batch=batch)
    assert sm90.plan_of(problem, sm90.Config(lockstep=True)).order.l2_heads == together


LONG_ONES = {
    "causal": plain(40_000, 40_000, (4, 1)),
    "causal, two": plain(20_100, 20_100, (8, 2), batch=2),
    "more keys": plain(20_000, 33_000, (4, 1), q_offset=13_000),
    "full": dataclasses.replace(plain(20_000, 20_000, (4, 1)), mask=FULL),
    "window": dataclasses.replace(plain(70_000, 70_000, (4, 1)), mask=sliding_window(5000)),
    "documents": of((1, 9000, 300, 25_083), (8, 2)),
    "short documents": of((700,) * 60, (4, 1), mask=FULL),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dim, name",
    [((128, 64)[number % 2], name) for number, name in enumerate(LONG_ONES)]
    + [(64, "causal"), (128, "documents")],
)
def test_long_rows_on_the_gpu(name, dim):
    """Results by a table, in arrays that held NaN before: no work tile is left out, none is added
    twice. dK and dV, each the sum of one block, have the same bits if the order is the same.
    """
    case = dataclasses.replace(LONG_ONES[name], head_dim=dim, v_head_dim=dim)
    arrays, cotangent = case.arrays(), case.cotangent(1)

    def loss(arrays, cotangent):  # a large constant would be folded while XLA compiles
        out = pa.flash_attention(**arrays, **case.options())
        return (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum()

    taken = [name for name in arrays if name in ("q", "k", "v")]

    def traced(config=None):
        """The step, and the Config of the backward that it runs with."""
        forced = _config.forced("flash_bwd_sm90", config) if config else contextlib.nullcontext()
        with forced, _config.watched() as choices:
            step = jax.jit(lambda some, *rest: jax.grad(lambda x: loss(x | rest[0], rest[1]))(some))
            step = step.trace(*split)
        return step, choices[-1].config

    split = (
        {name: arrays[name] for name in taken},
        {name: x for name, x in arrays.items() if name not in taken},
        cotangent,
    )
    config = dataclasses.asdict(traced()[1]) | {"claims": True, "lockstep": True}
    dealt = traced(config | {"claims": False, "lockstep": False})[0].lower().compile()
    want = {name: np.asarray(x, np.float32) for name, x in dealt(*split).items()}
    for changes in ({}, {"lockstep": False}):
        step = traced(config | changes)[0].lower().compile()
        same = case.mask != CAUSAL or case.segments or changes
        for _ in range(3):
            before = [jnp.full(x.shape, jnp.nan, x.dtype) for x in want.values()]
            jax.block_until_ready(before)
            del before
            compare(step(*split), want, ("k", "v") if same else ())


def compare(got, want, same_bits):
    """Within a rounding of bfloat16, or a little of the row: float32 sums are in another order."""
    for name, x in got.items():
        x, w = np.asarray(x, np.float32), want[name]
        least = 0.004 * np.sqrt(np.square(w).mean(axis=-1, keepdims=True))
        assert (np.abs(x - w) <= 2**-7 * np.abs(w) + least).all(), name
        if name in same_bits:
            np.testing.assert_array_equal(x, want[name])
