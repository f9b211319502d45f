"""examples/one_kernel.py, a kernel to learn from: right within the one tolerance, without races,
compiled for Hopper. tests/project/test_examples.py runs it as its readers do.
"""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest

from examples import one_kernel
from pallas_attn import CAUSAL
from tests.support import budget, mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SOURCE = pathlib.Path(one_kernel.__file__).read_text()
HEAD_DIMS = (64, 128)


def arrays(rows, heads, dim, batch=1):
    """q, and k and v of half as many heads."""
    keys = jax.random.split(jax.random.key(rows + dim), 3)
    sizes = zip(keys, (heads, heads // 2, heads // 2), strict=True)
    return [jax.random.normal(key, (batch, rows, n, dim), jnp.bfloat16) for key, n in sizes]


def check(call, q, k, v):
    expected = budget.attention({"q": q, "k": k, "v": v, "mask": CAUSAL})
    budget.check({"out": jax.jit(call)(q, k, v)}, expected)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_is_right_without_races(dim):
    """Three tiles of keys: the producer waits for a place, which the consumer hands back."""
    with mosaic.interpret():
        check(one_kernel.flash_attention, *arrays(384, 2, dim))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("first + row >= t", "first + row > t"),
        ("_across(shrunk, acc)", "1"),
        ("            pl.when(t >= STAGES)(lambda: plgpu.barrier_wait(shared.free.at[n]))\n", ""),
        ("        plgpu.barrier_wait(shared.v_ready.at[n])\n", ""),
        ("        plgpu.commit_smem()  # tensor", "        # tensor"),
        ("t + STAGES <= last", "t + STAGES < last"),
    ],
)
def test_the_interpreter_finds_faults(old, new):
    """The tests here can fail: by wrong numbers, races, a wait without end."""
    assert SOURCE.count(old) == 1
    scope = {"__name__": "changed"}
    exec(compile(SOURCE.replace(old, new), "one_kernel.py", "exec"), scope)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)), mosaic.interpret(2):
        check(scope["flash_attention"], *arrays(384, 2, 64))


def test_imports_jax_alone():
    modules = [
        x for x in ast.walk(ast.parse(SOURCE)) if isinstance(x, (ast.Import, ast.ImportFrom))
    ]
    names = {ast.unparse(x).split()[1].partition(".")[0] for x in modules}
    assert names == {"contextlib", "math", "types", "jax"}


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        ([(1, 128, 4, 64), (1, 128, 3, 64)], "bfloat16",
         "k, v: expected [1, 128, K, 64], got (1, 128, 3, 64), (1, 128, 3, 64)"),
        ([(1, 128, 4, 64), (1, 256, 4, 64)], "bfloat16",
         "k, v: expected [1, 128, K, 64], got (1, 256, 4, 64), (1, 256, 4, 64)"),
        ([(1, 64, 4, 64)] * 2, "bfloat16",
         "expected bfloat16, T % 128 == 0, H 64 or 128, got bfloat16(1, 64, 4, 64)"),
        ([(1, 128, 4, 64)] * 2, "float16",
         "expected bfloat16, T % 128 == 0, H 64 or 128, got float16(1, 128, 4, 64)"),
    ],
)  # fmt: skip
def test_says_what_it_takes(shapes, dtype, message):
    q, k = (jnp.zeros(shape, dtype) for shape in shapes)
    with pytest.raises(ValueError) as caught:
        one_kernel.flash_attention(q, k, k)
    assert str(caught.value) == message


def large(dim):
    return [jax.ShapeDtypeStruct((2, 4096, heads, dim), jnp.bfloat16) for heads in (16, 4, 4)]


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_lowers(dim):
    assert "mosaic_gpu" in mosaic.lower_for_cuda(one_kernel.flash_attention, *large(dim))


@pytest.mark.machine_code
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_compiles_for_hopper(dim):
    """One launch: two TMA loads in a loop, two matmuls beside the two of the last tile."""
    report = mosaic.compile_for(one_kernel.flash_attention, *large(dim), sass=True)
    assert (report.launches, report.copies, report.spill_bytes, report.notes) == (1, 0, 0, ())
    steps = 2 * (dim // 16 + 128 // 16)  # 16 numbers of the sum in an instruction
    assert report.sass.count("HGMMA") == steps


@pytest.mark.gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_on_the_gpu(dim):
    check(one_kernel.flash_attention, *arrays(1024, 8, dim, batch=2))
