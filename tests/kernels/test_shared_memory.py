"""Kernels ask for shared memory before they launch: `smem_bytes` of the Config that `default` gives
is what Mosaic allocates, and the GPU has as much, or dispatch refuses.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn._call import config as _config
from pallas_attn._call import device, dispatch
from tests.support import builds, fuzz, mosaic, shared_memory
from tests.support import operations as support

DRAWN = 3000  # problems
# Portable kernels have least shared memory on sm86.
GENERATIONS = {"h100": "sm90", "a100": "sm86", "sm86": "sm86", "sm89": "sm89"}
BUILDS = [name for name, build in builds.BUILDS.items() if build.target in GENERATIONS]


def test_every_choice_fits_or_is_refused(seed):
    counts = collections.Counter()
    for problem in shared_memory.Case(seed, count=DRAWN).problems():
        counts.update(shared_memory.check(problem))
    every = {
        row.name
        for table in dispatch.TABLES.values()
        for row in table
        if isinstance(row, dispatch.Candidate)
    }
    assert set(counts) == every


@pytest.mark.parametrize("kind", sorted(set(fuzz.kinds()) - {"memory", "pairs"}))
def test_what_is_drawn_allocates_what_it_says(kind, seed, monkeypatch):
    monkeypatch.setattr(fuzz, "lowered", shared_memory.allocate)
    tally = fuzz.Tally()
    word = f"{kind}/lowered:{seed}"
    assert (wrong := fuzz.attempt(word, tally)) is None, f"{word}: {wrong}"


@pytest.mark.parametrize("name", BUILDS)
def test_each_build_allocates_what_it_says(name):
    build = builds.BUILDS[name]
    call = lambda shapes: build.call(*shapes)  # noqa: E731
    assert shared_memory.allocate(call, build.shapes, GENERATIONS[build.target])


def test_what_has_no_room_is_refused():
    sizes = {"head_dim": 256, "v_head_dim": 256, "q_len": 4, "sequences": 1000}
    wide = {"dtype": "float32", "cache_dtype": "float32", "precision": "highest"}
    facts = sizes | wide | {"capacities": (64,) * 1000}
    problem = dataclasses.replace(support._BASE["decode"], **facts)
    rows = {row.name: row for row in dispatch.table_of(problem)}
    assert rows["decode_sm90"].refusal(problem) == pa.Limit(
        "a block needs 238592 bytes of shared memory; sm90 has 232448",
        "decode fewer tokens at once, split the sequences over several calls, or use smaller head "
        "dims",
    )
    assert dispatch.select(problem, None).name == "decode_sm80"
    invariant = dataclasses.replace(problem, batch_invariant=True)
    with pytest.raises(pa.UnsupportedError) as caught:
        dispatch.select(invariant, None)
    assert "decode_sm90" in str(caught.value) and "decode_sm80" not in str(caught.value)


def test_lists_have_fewer_stages_where_bits_may_not_depend_on_the_batch():
    facts = {"gpu": "sm89", "sequences": 33, "capacities": (8192,) * 33, "q_len": 64}
    facts |= {"head_dim": 192, "v_head_dim": 192, "cache_dtype": "float8_e4m3fn", "quantized": True}
    alone = dataclasses.replace(support._BASE["decode"], **facts, listed=200)
    problem = dataclasses.replace(alone, batch_invariant=True)
    chosen = dispatch.select(problem, None)
    assert chosen.name == "decode_listed_sm80"
    single = dataclasses.replace(alone, sequences=1, capacities=alone.capacities[:1])
    config, own = (_config.default(chosen.kernel, x).of_lists for x in (problem, single))
    assert config.stages < own.stages and config.tile == own.tile


# ---- calls that had no room ----------------------------------------------------------------------


def gradients(arrays, **options):
    fixed = {name: x for name, x in arrays.items() if x.dtype == jnp.int32}
    moving = {name: x for name, x in arrays.items() if name not in fixed}

    def run(moving):
        return pa.flash_attention(**moving, **fixed, mask=pa.CAUSAL, **options).sum()

    return jax.grad(run)(moving)


def shapes(rows, dim, v_dim, **others):
    sizes = {"q": (1, rows, 2, dim), "k": (1, rows, 2, dim), "v": (1, rows, 2, v_dim)}
    named = sizes | {"bias": (1, 2, rows, rows)} | others
    ints = ("segment_ids", "q_offset")
    return {
        name: jax.ShapeDtypeStruct(size, jnp.int32 if name in ints else jnp.float32)
        for name, size in named.items()
    }


DOCUMENTS = (
    functools.partial(gradients, precision="highest"),
    shapes(128, 72, 256, segment_ids=(1, 128), sinks=(2,)),
)
MAPPED = (
    jax.vmap(functools.partial(gradients, precision="highest", deterministic=True)),
    jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), shapes(128, 192, 192, q_offset=())
    ),
)


@pytest.mark.guards
@pytest.mark.parametrize("call", [DOCUMENTS, MAPPED], ids=["documents", "mapped offsets"])
def test_gradients_beside_a_bias_in_float32_have_room(call):
    """A walk of the bias had two stages of wide rows of float32."""
    with device.assume("sm90"):
        assert "mosaic_gpu" in mosaic.lower_for_cuda(*call)
