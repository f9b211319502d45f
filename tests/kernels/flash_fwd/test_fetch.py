"""The forward kernel that fetches K and V of other devices itself: right in the interpreter, where
other devices are arrays, and what it fetches is what its rows may see.
tests/parallel/test_multigpu.py runs it on GPUs.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import batching
from pallas_attn._call import config as _config
from pallas_attn._call import device as _device
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.context import chunks_of
from pallas_attn.kernels.attention import tile_scheduler
from pallas_attn.kernels.attention.tiles import ForwardRefs, KernelContext
from pallas_attn.kernels.flash_fwd import fetch, fetch_producer, sm90
from tests.support import builds, mosaic, reach, threads

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SHARDS, DIM = 2, 64
AUTO = (jax.sharding.AxisType.Auto,)


def problem_of(order, mask, *, rows=64, keys=512, shards=SHARDS, arrays=(), fetches=True):
    """The problem of a device's rows, `rows` a chunk, and all keys."""
    context = pa.Context("cp", order)
    chunks = context.chunks
    size = keys // (shards * chunks)
    offsets = tuple(
        tuple(n * size + size - rows for n in chunks_of(context, device, shards))
        for device in range(shards)
    )
    return AttentionProblem(
        op="flash_forward",
        gpu="sm90",
        dtype="bfloat16",
        batch=chunks,
        q_len=rows,
        kv_len=keys,
        q_heads=2,
        kv_heads=1,
        head_dim=DIM,
        v_head_dim=DIM,
        mask=mask,
        scale=DIM**-0.5,
        share=chunks,
        offsets=offsets,
        zigzag=shards if fetches and chunks == 2 else 1,
        fetches=shards if fetches else 1,
        arrays=("q_offset", *arrays),
    )


def config_of(problem, **changes):
    return dataclasses.replace(
        sm90.Config.default(problem), **({"grid": 2, "fetchers": 1} | changes)
    )


BOTH = (0, 1)  # devices of one program
NAMES = ("causal", "full", "window", "documents", "causal claimed", "claimed")
ORDERS = ("contiguous", "zigzag")
READ = [("causal", "zigzag", 2, BOTH, 64), ("claimed", "contiguous", 2, BOTH, 64)]
READ += [(name, ORDERS[n % 2], 2, BOTH, 64) for n, name in enumerate(NAMES)]  # in turns
# Work tiles of several warpgroups, whose rows see keys of others that only some of them mask.
READ += [("ahead", "zigzag", 2, BOTH, 128)]
# Rows that end within a warpgroup's, which takes the kv tiles of those past the end too: here the
# first of the next chunk.
READ += [("causal", "zigzag", 2, (0,), 40), ("documents", "contiguous", 2, (0,), 40)]
# Offsets that nobody knew, of which one leaves no key and one lies past all of them.
READ += [("anywhere", "zigzag", 2, BOTH, 64)]
# Work tiles without a key, which take the first kv tile: another GPU's for one of the two.
READ += [("unseen", "zigzag", 2, BOTH, 64)]
READ += [("causal", "zigzag", 4, (1,), 64), ("full", "contiguous", 4, (2,), 64)]
# A sink, with which work tiles without a key take no kv tile; and a mask that asks for no offset.
READ += [("documents, sinks", "contiguous", 2, (0,), 64)]


def gathered_for(name, problem, device):
    """The rows of a device, and all keys."""
    keys = problem.kv_len
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    k, v = (draw(jax.random.key(n), (1, keys, 1, DIM)) for n in (1, 2))
    q = draw(jax.random.key(3), (problem.batch, problem.q_len, 2, DIM))
    offsets = problem.offsets[device]
    if name == "anywhere":
        offsets = ((10**6, 100), (-1000, 10**6))[device][-problem.batch :]
    gathered = AttentionInputs(q, k, v, jnp.asarray(offsets, jnp.int32))
    if name == "documents, sinks":
        gathered = gathered._replace(sinks=jnp.zeros(2), q_offset=None)
    if name in ("documents", "documents, sinks", "claimed", "unseen"):
        ids = jnp.arange(keys, dtype=jnp.int32)[None] // 150
        q_ids = jnp.concatenate([ids[:, n : n + problem.q_len] for n in offsets])
        q_ids = q_ids.at[0].add(1000 if name == "unseen" else 0)
        kv_ids = jnp.repeat(ids, problem.batch, axis=0)
        gathered = gathered._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    return gathered


@pytest.mark.guards
@pytest.mark.parametrize("name, order, shards, devices, rows", READ)
def test_what_is_fetched_is_read_as_if_it_were_here(
    monkeypatch, name, order, shards, devices, rows
):
    """The same bits as of the kernel that is given all keys, but for the rounding of another order
    of kv tiles. Pieces of 16 rows, eight of a tile. All is here when the first work tile asks
    whether it is; only in "full" is it told so.
    """
    monkeypatch.setattr(fetch, "PIECE", 16 * DIM * 2)
    if name != "full":
        not_yet = np.zeros(128, np.int32)
        monkeypatch.setattr(threads.BlockOfThreads, "reached", lambda *_: not_yet)
    masks = {"full": pa.FULL, "window": pa.sliding_window(100), "ahead": pa.Mask(right=200)}
    masks["documents, sinks"] = pa.FULL
    mask = masks.get(name, pa.CAUSAL)
    sizes = {"keys": 256 * shards, "shards": shards, "rows": rows}
    here, all_keys = (problem_of(order, mask, fetches=x, **sizes) for x in (True, False))
    inputs = {device: gathered_for(name, all_keys, device) for device in devices}
    if name in ("anywhere", "documents, sinks"):
        here, all_keys = (dataclasses.replace(x, offsets=()) for x in (here, all_keys))
    context, awaited = pa.Context("cp", order), []

    def run(problem, inputs):
        narrow = {"block_kv": 64} if rows > 64 else {}  # one of them masks what another does not
        config = config_of(problem, claims=name.endswith("claimed"), **narrow)
        assert sm90.plan_of(problem, config).order.claims == config.claims
        return sm90.run(inputs, problem, config)

    def wait_until(self, counters, index, least, remote=False):
        if remote:
            awaited.append((counters, int(np.max(index)), int(np.max(least))))
        return as_before(self, counters, index, least, remote)

    as_before = threads.BlockOfThreads.wait_until
    monkeypatch.setattr(threads.BlockOfThreads, "wait_until", wait_until)
    jitted = jax.jit(run, static_argnums=0)
    for device, gathered in inputs.items():
        parts = {
            x: np.split(np.asarray(context.reorder(getattr(gathered, x), shards)), shards, 1)
            for x in "kv"
        }
        own = {x: jnp.asarray(part[device]) for x, part in parts.items()}
        own = gathered._replace(**own, device=jnp.asarray([device], jnp.int32))
        fetching = batching.resized(here, own)
        assert fetching.kv_len == all_keys.kv_len and sm90.fetches(fetching)
        with mosaic.interpret(), mosaic.with_peers(functools.partial(on_peer, parts, device)):
            got = jitted(fetching, own)
            want = jitted(batching.resized(all_keys, gathered), gathered)
        # The others count here as this device counts on them: it waits for all of them.
        counters, word, least = awaited[-1]
        assert counters.reshape(-1)[word] == least
        any_order = fetch.takes_any_order(sm90.plan_of(fetching, config_of(fetching)))
        assert any_order == (name in ("causal", "full", "causal claimed", "ahead", "anywhere"))
        for g, w in zip(got, want, strict=True):
            g, w = (np.asarray(x, np.float32) for x in (g, w))
            assert np.isfinite(w).any()
            np.testing.assert_allclose(g, w, 2**-7 * any_order, 2**-10 * any_order)


def on_peer(parts, device, array, number):
    """All devices do the same: what this one counts there, others count here."""
    for part in parts.values():
        if array.dtype == part[device].dtype and np.array_equal(array, part[device]):
            assert number != device
            return part[number]
    assert array.dtype == np.int32
    return array


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [pa.CAUSAL, pa.FULL, pa.sliding_window(300)], ids=str)
def test_every_tile_that_rows_see_comes_once(mask, order, shards):
    """The last of each chunk first; none that is here. No two devices read from the same one at a
    time, where each of them needs whole chunks.
    """
    keys, rows = 4096, 4096 // shards // pa.Context("cp", order).chunks
    problem = problem_of(order, mask, rows=rows, keys=keys, shards=shards)
    plan = sm90.plan_of(problem, sm90.Config.default(problem))
    sizes = fetch.Sizes.of(plan)
    at, sources = np.arange(keys), []
    for device, offsets in enumerate(problem.offsets):
        seen = np.zeros(keys, bool)
        for first in offsets:
            q = (first + np.arange(rows))[:, None]
            seen |= ((q >= at) | (mask.right is None)).any(axis=0) & (
                (q - at <= mask.left).any(axis=0) if mask.left is not None else True
            )
            seen[first : first + rows] = False
        for first in offsets:
            seen[first : first + rows] = False
        wanted = np.unique(np.flatnonzero(seen) // fetch.TILE)
        tiles = fetch.tiles_in_order(plan, device)
        assert sorted(tiles) == wanted.tolist()
        chunks = tiles * fetch.TILE // sizes.chunk
        begins = np.flatnonzero(np.diff(chunks, prepend=-1))
        assert len(set(chunks)) == len(begins) and (np.diff(tiles)[np.diff(chunks) == 0] < 0).all()
        sources.append([min(chunk, 2 * shards - 1 - chunk) for chunk in chunks[begins]])
        assert sizes.tiles == keys // fetch.TILE
        here = jnp.asarray([device], jnp.int32)
        order_of = np.asarray(fetch.order(plan, here, AttentionInputs(None, None, None), None))
        assert order_of[0] == len(tiles) and order_of[1 : 1 + len(tiles)].tolist() == tiles.tolist()
    for some in itertools.zip_longest(*sources):
        used = [source for source in some if source is not None]
        whole = order == "zigzag" and mask.left is None
        assert not whole or len(set(used)) == len(used)


def _long_zigzag(shards):
    rows, keys = 16384 // shards, 32768
    problem = problem_of("zigzag", pa.CAUSAL, rows=rows, keys=keys, shards=shards)
    problem = dataclasses.replace(problem, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128)
    return sm90.plan_of(problem, sm90.Config.default(problem))


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [pa.CAUSAL, pa.FULL], ids=str)
def test_kv_tiles_are_taken_as_they_arrive(mask, order, shards):
    """Each once: from the last on those that need a mask, then those of this device, then those of
    others in the order in which they are fetched.
    """
    keys = 4096
    rows = keys // shards // pa.Context("cp", order).chunks
    problem = problem_of(order, mask, rows=rows, keys=keys, shards=shards)
    plan = sm90.plan_of(problem, config_of(problem))
    assert fetch.takes_any_order(plan)
    block = plan.config.block_kv

    def taken(device, ends):
        chunks = fetch.chunk_order(plan, jnp.asarray([device], jnp.int32))
        refs = ForwardRefs(None, None, None)
        ctx = KernelContext(plan, refs._replace(fetching=fetch.Operands(None, None, chunks, None)))
        device_order = jnp.int32(device), fetch_producer.chunk_order_of(ctx)

        def one_range(some, tiles):
            def take(i, tiles):
                return tiles.at[some.entry + i].set(some.tile - i)

            return jax.lax.fori_loop(0, some.count, take, tiles)

        nothing = jnp.full((ends[2] + 1,), -1, jnp.int32)
        return fetch_producer.in_order_of_arrival(ctx, device_order, ends, one_range, nothing)[:-1]

    for device, offsets in enumerate(problem.offsets):
        fetched = fetch.tiles_in_order(plan, device).tolist()
        for offset in offsets:
            for row in (0, rows // 2, rows - 64):
                span = plan.span(mask, offset + row, 64, keys)
                whole = span.full_hi
                ends = span.lo, whole, span.hi
                got = np.asarray(jax.jit(taken, static_argnums=(0, 1))(device, ends))
                assert sorted(got) == list(range(span.hi)) and span.lo == 0
                behind, others = got[: span.hi - whole], got[span.hi - whole :]
                assert behind.tolist() == list(range(whole, span.hi))[::-1]
                places = [
                    fetched.index(n) if n in fetched else -1 for n in others * block // fetch.TILE
                ]
                assert places == sorted(places)


@pytest.mark.parametrize("shards", [2, 4])
def test_a_fetcher_takes_fewer_work_tiles(shards):
    """All blocks end together, on the GPU whose last work tiles are not cheap too."""
    plan = _long_zigzag(shards)
    problem = plan.problem
    for device, offsets in enumerate(problem.offsets):
        table = tile_scheduler.schedule(plan, offsets)
        busy = fetch.busy_before(plan, device)
        assert len(busy) == plan.config.fetchers and min(busy) > 10
        codes = [code for row in table.tolist() for code in row[1 : row[0] + 1]]
        assert len(set(codes)) == len(codes) == plan.order.work_tiles
        loads = np.zeros(plan.order.grid)
        loads[: len(busy)] = busy
        for block, row in enumerate(table.tolist()):
            for code in row[1 : row[0] + 1]:
                chunk, tile = code >> plan.code_bits, code & ((1 << plan.code_bits) - 1)
                row_end = offsets[chunk // problem.q_heads] + (tile + 1) * plan.tiling.tile_rows
                steps = -(-row_end // plan.config.block_kv)
                loads[block] += steps * tile_scheduler.step_cost(plan, tile)
                loads[block] += tile_scheduler.TILE_OVERHEAD
        assert loads.max() < 1.003 * loads.mean()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"arrays": ("q_offset", "kv_lengths")},
        {"kv_len": 4 * 192},
        {"fetches": 16, "zigzag": 16, "kv_len": 32 * 128},
        {"kv_heads": 256, "q_heads": 256},
    ],
    ids=["float32", "kv_lengths", "chunks", "devices", "heads"],
)
def test_what_is_gathered_instead(changes):
    problem = problem_of("zigzag", pa.CAUSAL)
    assert sm90.fetches(problem)
    assert not sm90.fetches(dataclasses.replace(problem, **changes))


@pytest.mark.parametrize("dim", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 64])
def test_several_pieces_are_in_flight(kv_heads, dim):
    """By every default, or rows are gathered: with one slot nothing would ever be loaded."""
    changes = {"kv_heads": kv_heads, "q_heads": kv_heads, "head_dim": dim, "v_head_dim": dim}
    for rows, keys in ((64, 512), (8192, 32768)):
        problem = problem_of("zigzag", pa.CAUSAL, rows=rows, keys=keys)
        problem = dataclasses.replace(problem, **changes)
        if sm90.fetches(problem):
            plan = sm90.plan_of(problem, sm90.Config.default(problem))
            sizes = fetch.Sizes.of(plan)
            assert fetch.LEAST_SLOTS <= sizes.slots <= fetch.MOST_SLOTS
            ring = plan.config.stages * plan.config.block_kv * plan.qk.width * 2
            assert sizes.slots * sizes.rows * sizes.k_words * fetch.WORD <= ring
        else:
            assert kv_heads == 64


def test_a_config_that_cannot_fetch():
    problem = problem_of("zigzag", pa.CAUSAL)
    wide = dataclasses.replace(problem, kv_heads=64, q_heads=64)
    for refused, config, message in (
        (
            problem,
            {"block_kv": 192},
            "Config.block_kv must divide 128 where the kernel fetches k and v of other devices, "
            "got 192",
        ),
        (
            wide,
            {"block_kv": 32, "stages": 2},
            "Config.stages * Config.block_kv must be at least twice the number of kv heads, 64, "
            "where the kernel fetches k and v of other devices, got 2 * 32",
        ),
    ):
        with pytest.raises(ValueError) as caught:
            fetch.check(sm90.plan_of(refused, config_of(refused, **config)))
        assert str(caught.value) == message


@pytest.mark.parametrize("sizes", [(8,), (8, 1), (1, 8), (4, 2), (2,)], ids=str)
def test_only_where_devices_reach_each_other(sizes):
    """On CPU devices K and V are gathered; so they are where the axis is not all of the mesh, or
    the mesh not all devices, or an axis is left to the compiler.
    """
    devices = jax.devices()[: np.prod(sizes)]
    names = ("cp", "dp") if sizes[0] > 1 else ("dp", "cp")
    mesh = jax.make_mesh(sizes, names[: len(sizes)], AUTO * len(sizes), devices=devices)
    reached = []

    def local(x):
        reached.append(_device.reaches_peers("cp"))
        with reach.assumed():
            reached.append(_device.reaches_peers("cp"))
        return x

    spec = jax.P("cp")
    for axes in ({}, {"axis_names": {"cp"}}):
        call = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, **axes)
        jax.eval_shape(jax.jit(call), jnp.zeros(8))
    whole = max(sizes) == jax.device_count()
    assert reached == [False, whole, False, whole and len(sizes) == 1]


@pytest.mark.guards
def test_the_kernel_is_handed_the_rows_of_its_own_device():
    """Lowered for all devices here: nothing is gathered, and XLA is told that GPUs read the memory
    of each other, without multicast.
    """
    shards, context = jax.device_count(), pa.Context("cp", "zigzag")
    mesh, spec = jax.make_mesh((shards,), ("cp",), AUTO), jax.P(None, "cp")
    shapes = [jax.ShapeDtypeStruct((1, 256 * shards, n, DIM), jnp.bfloat16) for n in (2, 1, 1)]

    def text(context):
        call = functools.partial(pa.flash_attention, mask=pa.CAUSAL, context=context)
        mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
        with _device.assume("sm90"), reach.assumed():
            return mosaic.lower_for_cuda(mapped, *shapes)

    fetching, gathering = text(context), text(dataclasses.replace(context, overlap=False))
    assert "all_gather" not in fetching and "all_gather" in gathering
    assert "uses_xla_collective_metadata = true" in fetching
    assert "uses_xla_collective_metadata = true" not in gathering
    assert "symmetric_memory_parameters" not in fetching and "nvshmem" not in fetching


def fetching_with(claims, options, *arrays):
    """`builds.fetching`; by the tiles of the default of causal rows if blocks claim work tiles."""
    tiles = {"warpgroups": 3, "block_kv": 64, "stages": 3, "claims": True}
    forced = _config.forced("flash_fwd_sm90", tiles) if claims else contextlib.nullcontext()
    with forced:
        return builds.fetching(options, *arrays)


COMPILED = {  # rows of all, query heads, kv heads, head dim, options
    "causal": (32768, 32, 8, 128, {"mask": pa.CAUSAL}),
    "claimed": (131072, 32, 8, 128, {"mask": pa.CAUSAL}),
    "full": (32768, 32, 8, 128, {}),
    "window": (131072, 32, 8, 128, {"mask": pa.sliding_window(4096)}),
    "h64": (32768, 32, 8, 64, {"mask": pa.CAUSAL}),
    "h256": (8192, 8, 4, 256, {"mask": pa.CAUSAL}),
}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills_or_serialised_matmuls(name):
    rows, heads, kv_heads, dim, options = COMPILED[name]
    shapes = [
        jax.ShapeDtypeStruct((1, rows, n, dim), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)
    ]
    call = functools.partial(fetching_with, name == "claimed", options)
    report = mosaic.compile_for(call, *shapes, target="h100x2")
    assert [kernel.name for kernel in report.kernels] == ["flash_fwd_sm90_mosaic_gpu_kernel"]
    assert report.spill_bytes == 0
