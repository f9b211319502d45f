"""The guards themselves: that each finds what it is there to find, and takes what is right.

Small kernels, each with one fault that can be switched on.
"""

import contextlib
import functools
import pathlib
import sys
import threading
import time

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_attn import kernels
from pallas_attn._call import device
from pallas_attn.kernels.lang import mosaic as lang
from pallas_attn.kernels.lang import thread_program, threads
from tests.support import aot, builds, in_numpy, mosaic, watch

pytestmark = pytest.mark.guards

TILE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
HALF = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@pytest.fixture(params=["by XLA", "in NumPy"])
def around(request):
    """NumPy or XLA computes the program that launches a kernel."""
    with in_numpy.instead_of_xla() if request.param == "in NumPy" else contextlib.nullcontext():
        yield


either_way = pytest.mark.usefixtures("around")


def numbers(like=TILE):
    return jnp.arange(like.size, dtype=jnp.float32).reshape(like.shape).astype(like.dtype)


# ---- tiles through shared memory ----------------------------------------------------------------


def through_shared_memory(x, *, wait=True, commit=True, arrivals=1):
    """x + 1 by way of two buffers and a barrier; each option but the first values is a fault."""

    def body(x_ref, o_ref, here, there, arrived):
        plgpu.copy_gmem_to_smem(x_ref, here, arrived)
        if wait:
            plgpu.barrier_wait(arrived)
        there[...] = here[...] + 1
        if commit:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(there, o_ref)
        plgpu.wait_smem_to_gmem(0)

    buffer, barrier = plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(num_arrivals=arrivals)
    return plgpu.kernel(body, out_type=TILE, scratch_types=[buffer, buffer, barrier])(x)


@either_way
def test_what_is_right_passes():
    with mosaic.interpret():
        got = jax.jit(through_shared_memory)(numbers())
    np.testing.assert_array_equal(got, numbers() + 1)


@either_way
@pytest.mark.parametrize("fault", ["wait", "commit"])
def test_a_race_is_found_and_the_next_kernel_runs(fault):
    with pytest.raises(AssertionError, match="RACE DETECTED"), mosaic.interpret():
        jax.block_until_ready(
            jax.jit(functools.partial(through_shared_memory, **{fault: False}))(numbers())
        )
    test_what_is_right_passes()


def twice(x):
    """A launch with a race, and one without behind it."""
    return through_shared_memory(through_shared_memory(x, commit=False))


@either_way
def test_a_race_in_another_launch_than_the_last_is_found():
    with pytest.raises(AssertionError, match="RACE DETECTED"), mosaic.interpret():
        jax.block_until_ready(jax.jit(twice)(numbers()))


def half_arrived(x, *, wait=False):
    """A barrier that is left with one arrival of two."""

    def body(x_ref, o_ref, barrier):
        plgpu.barrier_arrive(barrier)
        if wait:
            plgpu.barrier_wait(barrier)
        o_ref[...] = x_ref[...]

    scratch = [plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(body, out_type=TILE, scratch_types=scratch)(x)


@either_way
def test_a_barrier_left_half_way_is_found_and_the_next_kernel_runs():
    with pytest.raises(jax.errors.JaxRuntimeError, match="arrivals pending"), mosaic.interpret():
        jax.block_until_ready(jax.jit(half_arrived)(numbers()))
    test_what_is_right_passes()


@either_way
def test_a_deadlock_is_ended_and_the_next_kernel_runs():
    told = r"DEADLOCK: 0\.5 s, Warpgroup\(.*\) is in _barrier_wait at .*test_guards\.py"
    with pytest.raises(jax.errors.JaxRuntimeError, match=told), mosaic.interpret(patience=0.5):
        jax.block_until_ready(jax.jit(functools.partial(half_arrived, wait=True))(numbers()))
    test_what_is_right_passes()


def test_a_machine_that_is_busy_is_no_deadlock():
    """A thread that computes, or waits for its turn to, is not asleep."""
    ended, over = [], threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)])
    busy.start()
    with watch.Watch(0.1, ended.append).watching():
        time.sleep(0.5)
        over.set()
    busy.join()
    assert not ended


# ---- additions to the interpreter ----------------------------------------------------------------


def matmuls(a, b):
    """a @ b + a @ a in one accumulator, the left operand from shared memory and from registers."""

    def body(a_ref, b_ref, o_ref, a_smem, b_smem, arrived):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, arrived)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, arrived)
        plgpu.barrier_wait(arrived)
        left = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA)

        def both(accumulator):
            plgpu.wgmma(accumulator, a_smem, b_smem)
            plgpu.wgmma(accumulator, left, a_smem)

        zero = plgpu.layout_cast(jnp.zeros((64, 64), jnp.float32), plgpu.Layout.WGMMA)
        o_ref[...] = pl.run_state(both)(plgpu.ACC.init(zero))

    buffer = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=SWIZZLED)
    scratch = [buffer, buffer, plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(body, out_type=TILE, scratch_types=scratch)(a, b)


@either_way
def test_matmuls_with_accumulators_and_registers(rng):
    a, b = (jnp.asarray(rng.standard_normal((64, 64)), jnp.bfloat16) for _ in range(2))
    with mosaic.interpret():
        got = jax.jit(matmuls)(a, b)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(got, a @ b + a @ a, rtol=1e-5, atol=1e-4)


def given_back(a, *, waits=0, commit=True, used=1):
    """a @ a of a tile that one warpgroup puts into shared memory and multiplies, and that another
    one overwrites as soon as it is told to.
    """

    def body(a_ref, o_ref, smem, released):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            smem[...] = plgpu.load(a_ref, layout=plgpu.Layout.WGMMA, optimized=False)
            if commit:
                plgpu.commit_smem()

            def multiplied(acc):
                lang.results_are_used(jnp.int32(used), 1)
                plgpu.wgmma(acc, smem, smem)
                plgpu.wgmma_wait(waits)
                plgpu.barrier_arrive(released)
                return acc[...]

            o_ref[...] = pl.run_scoped(multiplied, plgpu.ACC((64, 64), jnp.float32))

        @pl.when(wg == 1)
        def _():
            plgpu.barrier_wait(released)
            smem[...] = plgpu.layout_cast(jnp.zeros((64, 64), jnp.bfloat16), plgpu.Layout.WGMMA)

    kernel = plgpu.kernel(
        body,
        out_type=TILE,
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16, transforms=SWIZZLED), plgpu.Barrier()],
        num_threads=2,
        thread_name="wg",
        compiler_params=lang.without_barriers(),
    )
    return kernel(a)


@either_way
@pytest.mark.parametrize("fault", [{"waits": 1}, {"commit": False}, {}], ids=str)
def test_what_matmuls_read_is_watched_until_they_are_waited_for(fault):
    call = jax.jit(functools.partial(given_back, **fault))
    race = pytest.raises(AssertionError, match="RACE DETECTED")
    with race if fault else contextlib.nullcontext(), mosaic.interpret(patience=3):
        jax.block_until_ready(call(numbers(HALF)))


@either_way
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_an_accumulator_is_read_when_its_matmuls_are_done(behind):
    """Another matmul is in flight, so wait_n is 1 at most."""
    early = pytest.raises(Exception, match="wait_n is 1 at most")
    call = functools.partial(two_accumulators, wait=behind)
    with contextlib.nullcontext() if behind < 2 else early, mosaic.interpret(patience=3):
        jax.block_until_ready(jax.jit(call)(numbers(HALF), numbers(HALF)))


@either_way
def test_what_nobody_uses_may_read_anything():
    with mosaic.interpret():
        jax.block_until_ready(
            jax.jit(functools.partial(given_back, waits=1, used=0))(numbers(HALF))
        )


def reloaded(a, *, commit=True, barriers=False, used=1):
    """a @ a of a tile that TMA overwrites as soon as the warpgroup that asks for it is done."""

    def body(a_ref, o_ref, smem, arrived):
        plgpu.copy_gmem_to_smem(a_ref, smem, arrived)
        plgpu.barrier_wait(arrived)

        def multiplied(acc):
            lang.results_are_used(jnp.int32(used))
            plgpu.wgmma(acc, smem, smem)
            return acc[...]

        result = pl.run_scoped(multiplied, plgpu.ACC((64, 64), jnp.float32))
        if commit:
            plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(a_ref, smem, arrived)
        plgpu.barrier_wait(arrived)
        o_ref[...] = result

    kernel = plgpu.kernel(
        body,
        out_type=TILE,
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16, transforms=SWIZZLED), plgpu.Barrier()],
        compiler_params=None if barriers else lang.without_barriers(),
    )
    return kernel(a)


@either_way
@pytest.mark.parametrize("how", [{}, {"barriers": True}, {"used": 0}, {"commit": True}], ids=str)
def test_a_copy_waits_for_matmuls_of_all_warps(how):
    call = jax.jit(functools.partial(reloaded, **{"commit": False, **how}))
    race = pytest.raises(AssertionError, match="RACE DETECTED")
    with contextlib.nullcontext() if how else race, mosaic.interpret():
        jax.block_until_ready(call(numbers(HALF)))


@either_way
@pytest.mark.parametrize("fault", ["commit", "wait"])
def test_reductions_read_shared_memory_until_they_are_waited_for(fault):
    call = jax.jit(functools.partial(added_up, **{fault: False}))
    with pytest.raises(AssertionError, match="RACE DETECTED"), mosaic.interpret():
        jax.block_until_ready(call(numbers(), jnp.ones(TILE.shape)))


def added_up(x, start, *, commit=True, wait=True):
    """Four blocks add x into the same place by TMA; the last also stores under a predicate."""

    def body(x_ref, o_ref, last_ref, smem, arrived):
        smem[...] = x_ref[...]
        if commit:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref, reduction_op="add")
        if wait:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.copy_gmem_to_smem(x_ref, smem, arrived)
        plgpu.barrier_wait(arrived)
        is_last = lax.axis_index("i") == 3
        plgpu.copy_smem_to_gmem(smem, last_ref, predicate=is_last)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(4,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )
    total, last = jax.new_ref(start), jax.new_ref(start)
    kernel(x, total, last)
    return jax.freeze(total), jax.freeze(last)


@either_way
def test_reductions_and_predicates():
    with mosaic.interpret():
        total, last = jax.jit(added_up)(numbers(), jnp.ones(TILE.shape))
    np.testing.assert_array_equal(total, 4 * numbers() + 1)
    np.testing.assert_array_equal(last, numbers())


# ---- programs of one thread ----------------------------------------------------------------------


def doubled(x, *, step=1, shift=0):
    """Each of 256 threads writes the word that it read, `step` and `shift` put it elsewhere."""
    out = jax.new_ref(jnp.zeros_like(x))

    def program(thread, refs, block):
        index = block * lang.THREADS + thread.index
        word = thread.load(refs[0], index, 4)
        thread.store(refs[1], index * step + shift, word + word, 4, index < 200)

    def body(x_ref, o_ref):
        thread_program.each_thread(program, (x_ref, o_ref), lax.axis_index("block"))

    thread_program.lane_kernel(body, grid=2, name="doubled")(x, out)
    return jax.freeze(out)


@either_way
def test_a_program_of_one_thread():
    x = jnp.arange(256, dtype=jnp.int32)
    with mosaic.interpret():
        got = jax.jit(doubled)(x)
    np.testing.assert_array_equal(got, jnp.where(x < 200, 2 * x, 0))


def handed_on(x, *, meet="sync", read="a word", warpgroups=1):
    """Thread 0 stores a word of shared memory, which all warps of the kernel read."""

    def program(thread, refs, _):
        word = thread.load(refs[0], thread.index * 0, 4)
        thread.shared_store(refs[1], thread.index * 0, word, thread.index < 1)
        if meet == "sync":
            thread.sync()

    def body(x_ref, o_ref, smem, ready):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            thread_program.each_thread(program, (x_ref, smem), jnp.int32(0), threads.Thread())
            if meet == "commit":
                plgpu.commit_smem()
            if meet in ("barrier", "arrival"):
                plgpu.barrier_arrive(ready)
            if meet == "barrier":
                plgpu.barrier_wait(ready)

        @pl.when(wg == warpgroups - 1)
        def _():
            if meet == "arrival":
                plgpu.barrier_wait(ready)
            if read == "a word":
                o_ref[...] = jnp.full((128,), smem[0])
            else:
                plgpu.copy_gmem_to_smem(x_ref, smem, ready)
                plgpu.barrier_wait(ready)
                o_ref[...] = smem[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
        scratch_types=[plgpu.SMEM((128,), jnp.int32), plgpu.Barrier()],
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=lang.without_barriers(),
    )
    return kernel(x)


@either_way
@pytest.mark.parametrize(
    "how, is_right",
    [
        ({"meet": "sync"}, True),
        ({"meet": "commit"}, True),
        ({"meet": "barrier"}, True),
        ({"meet": "nothing"}, False),
        ({"meet": "nothing", "read": "all, by TMA"}, False),
        ({"meet": "commit", "read": "all, by TMA"}, True),
        ({"meet": "arrival", "warpgroups": 2}, True),
        ({"meet": "sync", "warpgroups": 2}, False),
    ],
    ids=str,
)
def test_a_word_of_a_program_is_read_behind_a_barrier(how, is_right):
    call = jax.jit(functools.partial(handed_on, **how))
    race = pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE DETECTED")
    with contextlib.nullcontext() if is_right else race, mosaic.interpret(patience=3):
        jax.block_until_ready(call(jnp.arange(128, dtype=jnp.int32)))


def put_and_copied(x, *, commit=True):
    """Inline code with a twin puts a tile into shared memory, from where TMA takes it."""

    def body(x_ref, o_ref, smem):
        def twin(tile, to):
            to[:32], to[32:] = tile[:32], tile[32:]

        tile = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        types = (plgpu.Layout.WGMMA, plgpu.RefType())
        lang.inline(lambda tile, to: None, twin, (tile, smem), types, None)
        if commit:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(body, out_type=TILE, scratch_types=[plgpu.SMEM(x.shape, x.dtype)])(x)


@either_way
@pytest.mark.parametrize("commit", [True, False])
def test_twins_take_part_in_race_detection(commit):
    race = pytest.raises(AssertionError, match="RACE DETECTED")
    with contextlib.nullcontext() if commit else race, mosaic.interpret():
        got = jax.jit(functools.partial(put_and_copied, commit=commit))(numbers())
        np.testing.assert_array_equal(got, numbers())


@either_way
def test_two_threads_on_one_word_are_found():
    with pytest.raises(AssertionError, match="RACE DETECTED"), mosaic.interpret():
        jax.block_until_ready(jax.jit(functools.partial(doubled, step=0))(jnp.arange(256)))


def in_place(x):
    """Every thread moves its neighbour's word, which that one overwrites."""
    ref = jax.new_ref(x)

    def program(thread, ref, _):
        word = thread.load(ref, thread.index + 1, 4)
        thread.store(ref, thread.index, word, 4, thread.index >= 0)

    def body(ref):
        thread_program.each_thread(program, ref, lax.axis_index("block"))

    thread_program.lane_kernel(body, grid=1, name="in_place")(ref)
    return jax.freeze(ref)


@either_way
def test_reading_what_another_thread_writes_is_found():
    with pytest.raises(AssertionError, match="RACE DETECTED"), mosaic.interpret():
        jax.block_until_ready(jax.jit(in_place)(jnp.arange(129)))


@either_way
@pytest.mark.parametrize("shift", [57, -1])
def test_a_wild_store_is_found(shift):
    error = r"a word of 4 bytes is written at .* of 256"
    with pytest.raises(jax.errors.JaxRuntimeError, match=error), mosaic.interpret():
        jax.block_until_ready(jax.jit(functools.partial(doubled, shift=shift))(jnp.arange(256)))


# ---- lowering ------------------------------------------------------------------------------------


def too_much_shared_memory(x):
    def body(x_ref, o_ref, buffer):
        o_ref[...] = x_ref[...]

    scratch = [plgpu.SMEM((512, 128), jnp.float32)]
    return plgpu.kernel(body, out_type=TILE, scratch_types=scratch)(x)


def test_lowering_takes_what_is_right():
    text = mosaic.lower_for_cuda(through_shared_memory, TILE)
    assert text.count("@mosaic_gpu") == 1


def test_lowering_finds_too_much_shared_memory():
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        mosaic.lower_for_cuda(too_much_shared_memory, TILE)


# ---- machine code --------------------------------------------------------------------------------


def crowded(x, y):
    """Needs 400 registers a thread at once: there are 255."""

    def body(x_ref, y_ref, o_ref):
        a, b = jnp.exp2(x_ref[...]), jnp.exp2(y_ref[...])
        o_ref[...] = a * jnp.sum(b) + b * jnp.sum(a)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


def two_accumulators(a, b, wait=1):
    """Wgmma into two accumulators at once. 256 columns are more than there are registers: ptxas has
    them wait for each other.
    """

    def body(a_ref, b_ref, o_ref, a_smem, b_smem, arrived):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, arrived)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, arrived)
        plgpu.barrier_wait(arrived)

        def both(first, second):
            plgpu.wgmma(first, a_smem, b_smem)
            plgpu.wgmma(second, a_smem, b_smem)
            loaded = plgpu.wgmma_accumulator_load(first, wait_n=wait)
            return loaded * plgpu.wgmma_accumulator_load(second, wait_n=0)

        accumulator = plgpu.ACC((64, b.shape[1]), jnp.float32)
        o_ref[...] = pl.run_scoped(both, accumulator, accumulator)

    buffers = [plgpu.SMEM(s.shape, s.dtype, transforms=SWIZZLED) for s in (a, b)]
    out = jax.ShapeDtypeStruct((64, b.shape[1]), jnp.float32)
    scratch = [*buffers, plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(body, out_type=out, scratch_types=scratch)(a, b)


@pytest.mark.machine_code
def test_machine_code_of_what_is_right():
    report = mosaic.compile_for(through_shared_memory, TILE, sass=True)
    assert (report.spill_bytes, report.notes, report.launches) == (0, (), 1)
    assert 0 < report.registers < 128
    assert "EXIT" in report.sass
    report = mosaic.compile_for(matmuls, HALF, HALF)
    assert report.tensor_maps == 2
    with pytest.raises(AssertionError, match="without sass=True"):
        _ = report.sass
    report = mosaic.compile_for(matmuls, HALF, HALF, sass=True)  # which the worker had compiled
    assert "HGMMA" in report.sass


@pytest.mark.machine_code
def test_spills_are_seen():
    row = jax.ShapeDtypeStruct((200 * 128,), jnp.float32)
    assert mosaic.compile_for(crowded, row, row).spill_bytes > 0


@pytest.mark.machine_code
def test_serialised_wgmma_is_seen():
    wide = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    report = mosaic.compile_for(two_accumulators, HALF, wide, serialised=True)
    assert report.kernels[0].serialised and report.notes
    with pytest.raises(AssertionError, match="matmuls that wait for each other"):
        mosaic.compile_for(two_accumulators, HALF, wide)


@pytest.mark.machine_code
def test_a_kernel_of_hopper_does_not_compile_for_an_a100():
    with pytest.raises(RuntimeError, match="wgmma|sm_90|arch|Hopper|not supported"):
        mosaic.compile_for(matmuls, HALF, HALF, target="a100")


@pytest.mark.machine_code
def test_donated_buffers_are_counted():
    start = [TILE, TILE]
    assert mosaic.compile_for(added_up, *start, donate_argnums=1).aliases == 1
    report = mosaic.compile_for(added_up, *start)
    assert (report.aliases, report.copies) == (0, 2)


@pytest.mark.machine_code
def test_a_function_that_cannot_travel_is_refused():
    with pytest.raises(TypeError, match="compile_for wants a function of a module"):
        mosaic.compile_for(lambda x: x, TILE)


@pytest.mark.machine_code
def test_an_error_of_the_function_comes_back_and_the_next_compiles():
    with pytest.raises(RuntimeError, match="exceeds available shared memory"):
        mosaic.compile_for(too_much_shared_memory, TILE)
    assert mosaic.compile_for(through_shared_memory, TILE).launches == 1


def test_remarks_stand_before_the_function_they_are_about():
    said = f"""ptxas info    : (C7512) Potential Performance Loss: {aot.SERIALISED} due to 'f'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_90a'
    304 bytes stack frame, 512 bytes spill stores, 516 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 304 bytes cumulative stack size
"""
    assert aot._kernels(said + "\f" + said.replace("'f'", "'g'")) == [
        ("f", 168, 512, ("C7512",), True),
        ("g", 168, 512, ("C7512",), True),
    ]


# ---- digests of machine code ---------------------------------------------------------------------


@pytest.mark.machine_code
@pytest.mark.guards
def test_a_digest_repeats_and_tells_programs_apart():
    """The same program has one digest, however ptxas names its registers; a scale is another."""
    first, other = (builds.BUILDS[f"append/sm90/{kind}"] for kind in ("stacked", "per_sequence"))
    assert builds.digest(first) == builds.digest(first) != builds.digest(other)


def test_a_digest_forgets_names_and_keeps_constants():
    line = "        /*01a0*/  @P0 IADD3 R6, P1, R2.reuse, 0x30, RZ ;"
    renamed = "        /*02b0*/  @P1 IADD3 R7, P2, R9, 0x30, RZ ;"
    forgets = builds._instructions
    assert forgets(line) == forgets(renamed) != forgets(line.replace("0x30", "0x31"))


def test_builds_cover_every_family_on_both_generations():
    families = {tuple(name.split("/")[:2]) for name in builds.BUILDS}
    kinds = ("flash_fwd", "flash_bwd", "flash_jvp", "decode", "decode_mla", "append")
    assert {(kind, gpu) for kind in kinds for gpu in ("sm80", "sm90")} <= families
    assert len(builds.BUILDS) >= 24


KERNELS = pathlib.Path(kernels.__file__).parent


@contextlib.contextmanager
def entered():
    """A set that grows by the files of kernels/ of which a function is called in this block."""
    files, watch = set(), sys.monitoring
    tool = next(n for n in range(6) if watch.get_tool(n) is None)

    def called(code, _):
        if code.co_filename.startswith(str(KERNELS)) and code.co_name != "<module>":
            files.add(pathlib.Path(code.co_filename).relative_to(KERNELS))
        return watch.DISABLE

    watch.use_tool_id(tool, "entered")
    try:
        watch.register_callback(tool, watch.events.PY_START, called)
        watch.set_events(tool, watch.events.PY_START)
        watch.restart_events()
        yield files
    finally:
        watch.set_events(tool, 0)
        watch.free_tool_id(tool)


def _trace(build):
    """Programs of single threads are traced only where the result is lowered. Of several GPUs: for
    as many as there are devices here.
    """
    gpu, _, several = build.target.partition("x")
    generation = aot.GENERATIONS.get(gpu, gpu)
    mesh = contextlib.nullcontext()
    if several:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.set_mesh(jax.make_mesh((jax.device_count(),), ("cp",), auto))
    with device.assume(generation), mesh:
        return jax.jit(build.call).trace(*build.shapes)


def test_builds_reach_every_kernel_module():
    """Each file of kernels/ has a part in a build, where it can in one of its own folder."""
    untraced, folders = dict(builds.BUILDS), {name.split("/")[0] for name in builds.BUILDS}
    paths = [path for path in KERNELS.glob("*/[!_]*.py") if "def " in path.read_text()]
    files = [path.relative_to(KERNELS) for path in paths]
    jax.clear_caches()  # or programs that are traced already would not be traced again
    with entered() as reached:
        for name in (
            "append/sm90/stacked_rotary",
            "append/sm90/latent_bytes",
            "decode/sm80/stacked",
            "decode/sm80/stacked_packed",
            "decode/sm90/stacked",
        ):  # programs of threads are traced when they are lowered
            _trace(untraced.pop(name)).lower(lowering_platforms=("cuda",))
        for path in sorted(files, key=lambda path: path.parts[0] not in folders):
            likely = [name for name in untraced if name.split("/")[0] == path.parts[0]]
            likely.sort(key=lambda name: -sum(x in name for x in path.stem.split("_")))
            names = [*likely, *(name for name in untraced if name not in likely)]
            while names and path not in reached:
                _trace(untraced.pop(names.pop(0)))
    assert not [str(path) for path in files if path not in reached]
