"""The append kernel: bit for bit what per-item appends give, and not a byte more.

Without a GPU its program runs in the interpreter, every address checked, and its machine code is
made ahead of time; `-m gpu` runs the same cases, and the large ones, for real.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_attn
from pallas_attn._call.problem import AppendInputs, AppendProblem
from pallas_attn.kernels.append import copy as append_copy
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.lang.thread_program import ThreadContext
from tests.support import append_cases, mosaic
from tests.support import operations as support
from tests.support.append_cases import CASES, Case, assert_same_bytes
from tests.support.threads import Ledger

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def run(problem: AppendProblem, inputs: AppendInputs) -> tuple:
    return append_copy.run(inputs, problem)


def on_device(inputs: AppendInputs) -> AppendInputs:
    return jax.tree.map(jnp.asarray, inputs)


@pytest.mark.guards
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case, rng):
    inputs = case.draw(rng)
    with mosaic.interpret():
        got = jax.jit(functools.partial(run, case.problem))(on_device(inputs))
    assert_same_bytes(got, case.expected(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_gpu(case, rng):
    write = jax.jit(functools.partial(run, case.problem))
    for _ in range(3):  # other starts each time
        inputs = case.draw(rng)
        there = on_device(inputs)
        got = write(there)
        assert_same_bytes(got, case.expected(inputs))
        assert_same_bytes((there.k_cache, there.v_cache), (inputs.k_cache, inputs.v_cache))


# ---- nothing to write ----------------------------------------------------------------------------


@pytest.mark.guards
@pytest.mark.parametrize(
    "fields",
    [
        {"sequences": 0},
        {"new_rows": 0},
        {"kv_heads": 0},
        {"head_dim": 0},
        {"capacity": 0, "spread": 0},
        {"layers": 0},
        {"head_dim": 0, "v_head_dim": 8},
        {"capacity": 0, "spread": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["per_sequence", "stacked", "paged"])
def test_zero_of_anything(kind, fields, rng):
    case = Case(kind, **fields)
    inputs = case.draw(rng)
    with mosaic.interpret():
        got = jax.jit(functools.partial(run, case.problem))(on_device(inputs))
    assert_same_bytes(got, case.expected(inputs))


@pytest.mark.guards
def test_a_length_that_wraps_has_no_rows(rng):
    """A negative length less the new rows is a position that the cache has."""
    case = Case("stacked", ragged=True)
    inputs = case.draw(rng)
    least, many = np.full(case.sequences, -(2**31), np.int32), np.int32(2**31 - 1)
    new = many - np.arange(case.sequences, dtype=np.int32)
    inputs = inputs._replace(end=least, new_lengths=new)
    with mosaic.interpret():
        got = jax.jit(functools.partial(run, case.problem))(on_device(inputs))
    assert_same_bytes(got, (inputs.k_cache, inputs.v_cache))


# ---- addresses past 2**31 ------------------------------------------------------------------------


@pytest.mark.guards
@pytest.mark.parametrize("kind", ["per_sequence", "stacked", "paged"])
def test_addresses_past_two_to_the_31(kind):
    """The program's own arithmetic, on arrays that no machine here could hold: 2**40 words and
    more.
    """
    capacity, layer, sequence, page = 2**31 - 16, 77, 1_000, 2**20 + 3
    problem = dataclasses.replace(
        support._BASE["append"],
        kind=kind,
        sequences=4096,
        capacities=(capacity,) * 4096,
        page_size=16 if kind == "paged" else None,
        pages=2**21 if kind == "paged" else None,
        layers=80,
    )
    plan = append_copy.Plan.of(problem, ("k", "v"), append_copy.Config().words)
    refs = append_plan.AppendRefs(
        ("k", "v"), (("k cache", "v cache"),), "end", None, "counts", None, "page_table", "layer"
    )
    start = capacity - 1
    scalars = dict(sequence=sequence, chunk=0, start=start, rows=1, layer=layer)
    at = append_plan.At(capacity=None, **{k: np.full(128, v, np.int32) for k, v in scalars.items()})
    ledger = Ledger({"page_table": page})
    append_copy._append(ThreadContext(mosaic.BlockOfThreads(0, ledger), refs, at, plan))
    slab = {
        "per_sequence": layer,
        "stacked": layer * 4096 + sequence,
        "paged": layer * 2**21 + page,
    }
    rows, row = (16, start % 16) if kind == "paged" else (capacity, start)
    words = [
        ((slab[kind] * 8 + head) * rows + row) * 16 + column
        for head in range(8)
        for column in range(16)
    ]
    assert ledger.stored == [(f"{side} cache", i, 16) for side in "kv" for i in words]


# ---- machine code and buffers, without a GPU -----------------------------------------------------


def step(problem, k_cache, v_cache, rest):
    return append_copy.run(rest._replace(k_cache=k_cache, v_cache=v_cache), problem)[:2]


def all_layers(problem, k_cache, v_cache, rest):
    """A step of a model: a scan over its layers, all of which live in the same buffers."""

    def of_layer(caches, layer):
        return step(problem, *caches, rest._replace(layer=layer)), None

    return lax.scan(of_layer, (k_cache, v_cache), jnp.arange(problem.layers, dtype=jnp.int32))[0]


LARGE = Case("per_sequence", 4, 1, 8, 128, capacity=512, spread=0)


def shapes_of(case: Case) -> tuple:
    """(k_cache, v_cache, the rest), with nothing allocated."""
    problem, of = case.problem, lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    sides = []
    for dim in append_cases._dims(problem):
        arrays = tuple(of(shape, case.dtype) for shape in case.cache_shapes(dim))
        sides.append(arrays if case.kind == "per_sequence" else arrays[0])
    dims = append_cases._dims(problem)
    new = [of((case.sequences, case.new_rows, case.kv_heads, d), problem.dtype) for d in dims]
    counts = of((case.sequences,), "int32")
    table = of((case.sequences, case.capacity // case.page_size), "int32")
    rest = AppendInputs(
        None,
        None,
        *new,
        counts,
        counts,
        table if case.kind == "paged" else None,
        None if case.layers is None else of((), "int32"),
    )
    return *sides, rest


def compiled(f, case: Case, **options) -> mosaic.Report:
    return mosaic.compile_for(functools.partial(f, case.problem), *shapes_of(case), **options)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "kind, target",
    [  # how rows are found is the same code everywhere
        *((kind, "h100") for kind in ("per_sequence", "stacked", "paged")),
        *(("paged", target) for target in ("a100", "b200")),
    ],
)
@pytest.mark.parametrize("new_rows", [1, 2048])
def test_machine_code(kind, new_rows, target):
    case = dataclasses.replace(LARGE, kind=kind, new_rows=new_rows, page_size=16)
    report = compiled(step, case, target=target, donate_argnums=(0, 1), sass=True)
    assert report.launches == 1
    assert report.spill_bytes == 0
    assert report.registers <= (
        40 if new_rows == 1 else 80
    )  # 80: 6 blocks of 128 threads a multiprocessor
    assert report.tensor_maps == 0
    assert report.sass.count("LDG.E.128") == report.sass.count("STG.E.128") > 0
    if (
        new_rows == 1
    ):  # the rows are asked for before anything is waited for, or a token costs another trip
        assert not re.search(r"\b(EXIT|BRX|STG)\b", report.sass[: report.sass.rindex("LDG.E.128")])


def public_loop(cache, k, v):
    """Generation as a caller writes it."""
    return lax.fori_loop(0, 5, lambda _, cache: pallas_attn.append_kv(cache, k, v), cache)


def public_layers(cache, k, v):
    """A model's step as a caller writes it."""

    def of_layer(cache, layer):
        return pallas_attn.write_kv(cache, k, v, layer=layer), None

    layers = jnp.arange(cache.layers, dtype=jnp.int32)
    return lax.scan(of_layer, cache.extend(1), layers)[0]


PUBLIC = {
    "per_sequence": functools.partial(
        pallas_attn.PerSequenceCache.create, (64, 80) * 8, kv_heads=2, head_dim=64
    ),
    "stacked": functools.partial(pallas_attn.StackedCache.create, 16, 64, kv_heads=2, head_dim=64),
    "paged": functools.partial(
        pallas_attn.PagedCache.create, 16, pages=70, page_size=16, kv_heads=2, head_dim=64
    ),
}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("kind", PUBLIC)
@pytest.mark.parametrize("f", [public_loop, public_layers])
def test_no_copy_through_the_public_functions(kind, f):
    layers = 4 if f is public_layers else None
    cache = jax.eval_shape(functools.partial(PUBLIC[kind], layers=layers))
    new = jax.ShapeDtypeStruct((16, 1, 2, 64), jnp.bfloat16)
    report = mosaic.compile_for(f, cache, new, new, donate_argnums=0)
    assert (report.copies, report.launches) == (0, 1)
    assert report.aliases >= len(jax.tree.leaves((cache.k, cache.v)))


@pytest.mark.machine_code
@pytest.mark.guards
def test_a_copy_would_be_seen():
    """Undonated, each cache is copied once and JAX's semantics hold: the guard above counts those
    copies.
    """
    report = compiled(step, LARGE)
    assert (report.copies, report.aliases) == (2 * LARGE.sequences, 0)


@pytest.mark.machine_code
@pytest.mark.guards
def test_as_many_sequences_in_a_launch_as_its_parameters_hold():
    report = compiled(step, dataclasses.replace(LARGE, sequences=256), donate_argnums=(0, 1))
    assert (report.launches, report.copies) == (1, 0)


@pytest.mark.guards
@pytest.mark.parametrize(
    "sequences, launches, sizes", [(20, 1, 1), (21, 2, 2), (50, 3, 2), (60, 3, 1)]
)
def test_more_sequences_take_a_second_launch(monkeypatch, sequences, launches, sizes):
    """With room for 20: lowering 2100, which are too many for what there is, takes 7 s. Launches of
    one size are one kernel.
    """
    assert append_copy.mosaic.PARAMETER_BYTES == 32764
    monkeypatch.setattr(append_copy.separate_arrays, "ARRAYS_OF_A_LAUNCH", 2 * 20)
    case = Case("per_sequence", sequences, kv_heads=1, head_dim=8, capacity=4, spread=0)
    text = mosaic.lower_for_cuda(functools.partial(step, case.problem), *shapes_of(case))
    assert text.count("stablehlo.custom_call @mosaic_gpu") == sizes
    assert text.count("call @_launch") == launches


# ---- on the GPU ----------------------------------------------------------------------------------


def on_gpu_in_place(case: Case, inputs: AppendInputs, f=step) -> tuple:
    """Runs with the caches donated; their buffers must be the ones that come back."""
    there = on_device(inputs)
    caches, rest = (there.k_cache, there.v_cache), there._replace(k_cache=None, v_cache=None)
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(caches)]
    got = jax.jit(functools.partial(f, case.problem), donate_argnums=(0, 1))(*caches, rest)
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(got)] == before
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("new_rows", [1, 7, 300])
@pytest.mark.parametrize("sequences", [128, 256])
@pytest.mark.parametrize("kind", ["per_sequence", "stacked", "paged"])
def test_many_sequences_in_place_on_the_gpu(kind, sequences, new_rows, rng):
    case = Case(kind, sequences, new_rows, 4, 64, capacity=320, spread=7, page_size=16)
    inputs = case.draw(rng)
    assert_same_bytes(on_gpu_in_place(case, inputs), case.expected(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["per_sequence", "stacked", "paged"])
def test_scan_over_layers_in_place_on_the_gpu(kind, rng):
    case = Case(kind, 64, 2, 2, 64, capacity=48, spread=3, page_size=16, layers=32)
    inputs = case.draw(rng)
    want = case.expected(inputs)
    for layer in range(case.layers):
        after = inputs._replace(k_cache=want[0], v_cache=want[1], layer=np.int32(layer))
        want = dataclasses.replace(case, layer=layer).expected(after)
    assert_same_bytes(on_gpu_in_place(case, inputs, all_layers), want)


@pytest.mark.gpu
def test_more_sequences_than_a_launch_holds_on_the_gpu(rng, monkeypatch):
    """With room for fewer than there is: 2100 of them take 90 s to compile."""
    monkeypatch.setattr(append_copy.separate_arrays, "ARRAYS_OF_A_LAUNCH", 2 * 20)
    case = Case("per_sequence", 50, kv_heads=1, head_dim=8, capacity=4, spread=2)
    inputs = case.draw(rng)
    assert_same_bytes(on_gpu_in_place(case, inputs), case.expected(inputs))
