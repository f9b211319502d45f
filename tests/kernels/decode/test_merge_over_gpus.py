"""The kernel in which GPUs send each other partial results of decode attention, one of them at a
time in the interpreter; which calls it serves; its machine code.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn._call import device as _device
from pallas_attn._mesh import sharding
from pallas_attn.kernels.decode import merge_over_gpus
from pallas_attn.kernels.lang import peer_memory, threads
from tests.support import builds, mosaic, reach

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SENTINEL = np.int32(threads.SENTINEL)


def problem_of(sizes, dtype, devices):
    return merge_over_gpus.Problem(*sizes, dtype, "cp", devices)


def drawn(problem):
    """out and lse of each device; some devices have no key for some rows, and one row has none."""
    rng = np.random.default_rng(0)
    sequences, rows, heads, dim = (
        getattr(problem, x) for x in ("sequences", "rows", "heads", "dim")
    )
    outs = rng.normal(size=(problem.devices, sequences, rows, heads, dim)).astype(np.float32)
    lses = 3 * rng.normal(size=(problem.devices, sequences, heads, rows)).astype(np.float32)
    if problem.lines > 1:
        lses[0, 0, 0] = -np.inf
        outs[0, 0, :, 0] = np.nan  # a row that does not count
        lses[:, -1, -1, -1] = -np.inf
    return jnp.asarray(outs, problem.dtype), jnp.asarray(lses)


def words_of(problem, out, lse):
    """int32[lines, words of 4 bytes]: what a device sends."""
    lines = np.asarray(out, np.float32).reshape(problem.lines, -1)
    each = np.asarray(lse).swapaxes(1, 2).reshape(-1, 1)
    return np.concatenate([lines, np.tile(each, 4)], axis=1).view(np.int32)


def empty(problem):
    return np.full((problem.devices, problem.lines, 4 * problem.words), SENTINEL, np.int32)


def call(monkeypatch, problem, device, partial, received):
    """The result of one device, and the words that it sends to each."""
    sent = {n: empty(problem) for n in range(problem.devices)}
    monkeypatch.setattr(peer_memory, "this_device", lambda axis: jnp.int32(device))
    with mosaic.interpret(), mosaic.with_peers(lambda _, number: sent[int(number)]):
        result = merge_over_gpus.send_and_merge(*partial, jnp.asarray(received), problem)
        return jax.block_until_ready(result), sent


CASES = {
    "a token": ((1, 1, 8, 128), "bfloat16", 2),
    "rows": ((2, 3, 5, 64), "float32", 3),
    "wide": ((1, 2, 6, 192), "float16", 4),
    "eight": ((1, 1, 2, 512), "bfloat16", 8),
    "narrow": ((3, 1, 1, 4), "float32", 2),
}


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(monkeypatch, name):
    """Each device sends what it has to each other one, and all have the same bits."""
    problem = problem_of(*CASES[name])
    outs, lses = drawn(problem)
    words = [words_of(problem, *own) for own in zip(outs, lses, strict=True)]
    results = []
    for device in range(problem.devices):
        received = empty(problem)
        for n in range(problem.devices):
            if n != device:
                received[n] = words[n]
        own = outs[device], lses[device]
        result, sent = call(monkeypatch, problem, device, own, received)
        results.append(result)
        wanted = empty(problem)
        wanted[device] = words[device]
        for n, parts in sent.items():
            parts, want = (np.where(x == SENTINEL, 0, x) for x in (parts, wanted))
            want = np.zeros_like(want) if n == device else want
            floats = parts.view(np.float32), want.view(np.float32)  # a NaN may change its bits
            np.testing.assert_array_equal(*floats)
    want = pa.merge_attention(outs.astype(jnp.float32), lses)
    for got in results:
        for x, y, first in zip(got, want, results[0], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(x, first)


@pytest.mark.guards
@pytest.mark.parametrize("word", [0, 63, 64, 67])
def test_it_waits_for_every_word(monkeypatch, word):
    problem = problem_of((1, 1, 5, 64), "float32", 3)
    partial, received = tuple(x[1] for x in drawn(problem)), empty(problem)
    received[[0, 2]] = 0
    call(monkeypatch, problem, 1, partial, received)
    received[2, 4, word] = SENTINEL
    with pytest.raises(Exception, match="DEADLOCK"):
        call(monkeypatch, problem, 1, partial, received)


def lowered(step, *, axes=("cp",), overlap=True, check_vma=True, **options):
    """The program for Hopper GPUs that reach each other, of a step over rows of eight of them."""
    context = pa.Context("cp", overlap=overlap)
    made = functools.partial(pa.StackedCache.create, 2, 1024, 2, 64, context=context)
    cache = jax.eval_shape(made)
    q = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16)
    shape = tuple(8 if name == "cp" else 1 for name in axes)
    mesh = jax.make_mesh(shape, axes, (AxisType.Auto,) * len(axes))
    heads = P(None, None, "tp") if "tp" in axes else P()
    specs = cache.specs(heads="tp" if "tp" in axes else None), heads
    call = jax.shard_map(
        functools.partial(step, **options),
        mesh=mesh,
        in_specs=specs,
        out_specs=heads,
        check_vma=check_vma,
    )
    with _device.assume("sm90"), reach.assumed():
        return mosaic.lower_for_cuda(call, cache, q)


def decode(cache, q, **options):
    return pa.decode_attention(q, cache.extend(1), **options)


@pytest.mark.guards
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [("cp",), ("tp", "cp")], ids=str)
def test_who_reaches_the_others_gathers_nothing(axes, check_vma):
    text = lowered(decode, axes=axes, check_vma=check_vma)
    assert "decode_merge" in text and "all_gather" not in text


@pytest.mark.guards
def test_who_does_not_gathers():
    """Devices that must not reach others, and calls of another implementation."""
    for how in ({"overlap": False}, {"implementation": "sm80"}, {"implementation": "reference"}):
        text = lowered(decode, **how)
        assert "decode_merge" not in text and "all_gather" in text


@pytest.mark.guards
def test_a_batch_is_merged_in_one_launch():
    def batch(cache, q):
        return jax.vmap(decode, (None, 0))(cache, jnp.stack([q, -q]))[0]

    text = lowered(batch)
    assert text.count("mosaic_gpu_v2") == 2 and "all_gather" not in text  # a loop, and the merge


@pytest.mark.guards
def test_more_words_are_refused():
    """Places of words are int32. A call that has more is XLA's, unless vmap makes it of smaller
    ones.
    """
    fits, more = (problem_of((n, 1, 128, 508), "bfloat16", 8) for n in (16383, 16384))
    assert merge_over_gpus.takes(fits) and not merge_over_gpus.takes(more)
    assert more.devices * more.lines * more.words == 2**31
    out = jax.ShapeDtypeStruct((more.sequences, 1, 128, 508), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((more.sequences, 128, 1), jnp.float32)
    with pytest.raises(ValueError, match="fewer than 2\\*\\*31, got 2097152 rows of 508 columns"):
        jax.eval_shape(functools.partial(merge_over_gpus.run, problem=more), out, lse)


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code():
    """A loop that appends and decodes: lengths are not copied, and nothing spills."""
    shapes = builds.ROWS_OF_A_CACHE
    report = mosaic.compile_for(builds.rows_of_a_cache, *shapes, target="h100x4")
    body = report.hlo[: report.hlo.index("\nENTRY")]
    assert report.launches == 3 and "all-gather" not in body and " copy(" not in body
    (kernel,) = (x for x in report.kernels if x.name.startswith("decode_merge"))
    assert kernel.spill_bytes == 0 and kernel.registers <= 64


def of_eight(out, lse):
    """The largest merge of eight devices: 512 columns."""
    problem = problem_of((1, 1, 32, 512), "bfloat16", 8)

    def local(out, lse):
        parts = out.reshape(1, 1, 32, 512), lse.reshape(1, 32, 1)
        result = sharding.sealed(functools.partial(merge_over_gpus.run, problem=problem), *parts)
        return tuple(x.reshape(1, -1) for x in result)

    rows = P(None, "cp")
    with reach.assumed():
        return jax.shard_map(local, in_specs=rows, out_specs=rows, check_vma=False)(out, lse)


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code_of_most():
    out = jax.ShapeDtypeStruct((1, 8 * 32 * 512), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((1, 8 * 32), jnp.float32)
    report = mosaic.compile_for(of_eight, out, lse, target="h100x8")
    assert (report.launches, report.spill_bytes) == (1, 0)
