"""The append kernel where it quantises: every byte as `quantization.quantize` says, on every way
through the kernel, and what its machine code costs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import device, quantization
from pallas_attn._call.problem import AppendInputs, AppendProblem
from pallas_attn.kernels.append import copy as append_copy
from pallas_attn.kernels.append import quantize as append_quantize
from pallas_attn.kernels.mma import scales
from tests.support import mosaic
from tests.support.append_cases import assert_same_bytes, random_bits
from tests.support.quantized import LARGEST, awkward_rows, quantized

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def problem_of(rows, dtype, gpu="sm90", **fields):
    """Rows [M, t, K, H] into a stacked cache that they fill."""
    m, t, heads, dim = rows.shape
    default = {"kind": "stacked", "dtype": str(rows.dtype), "cache_dtype": dtype, "sequences": m}
    default |= {"new_rows": t, "kv_heads": heads, "head_dim": dim, "v_head_dim": None}
    return AppendProblem(gpu=gpu, **default | {"capacities": (t,) * m, "quantized": True} | fields)


def written(rows, dtype, rng, gpu="sm90", config=None):
    """Numbers and scales, [M, K, t, ...] each, that the kernel makes of rows [M, t, K, H]."""
    m, t, heads, dim = rows.shape
    cache = random_bits(rng, (m, heads, t, dim), dtype)
    scales = random_bits(rng, (m, heads, t), "float32")
    count = np.full(m, t, np.int32)
    inputs = AppendInputs(cache, None, rows, None, count, count, None, None, scales, None)
    run = functools.partial(append_copy.run, problem=problem_of(rows, dtype, gpu), config=config)
    done = jax.jit(lambda inputs: run(inputs))(jax.tree.map(jnp.asarray, inputs))
    return done.k_cache, done.k_scale


def expected(rows, dtype):
    return [np.moveaxis(x, 1, 2) for x in quantized(rows, dtype)]


def by_head_dim(rng, dim, dtype):
    """Awkward numbers in rows of any length, as [2, t, 3, dim]."""
    values = awkward_rows(rng)[rng.permutation(2000)].reshape(-1)
    values = values[: values.size // (6 * dim) * 6 * dim][: 600 * dim].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.reshape(2, -1, 3, dim).astype(jnp.dtype(dtype))


@pytest.mark.guards
def test_rows_of_other_dtypes_are_widened_first(rng):
    rows = jnp.asarray(rng.standard_normal((2, 3, 2, 20)), "float8_e5m2")
    with mosaic.interpret():
        got = written(rows, "int8", rng)
    for x, want in zip(got, expected(rows.astype("float32"), "int8"), strict=True):
        assert_same_bytes(x, want)


# Words of 16, 8, 4 and 2 bytes; rows of 1 to 32 threads, several words a thread, and an odd end.
DIMS = (1, 3, 20, 64, 72, 128, 300, 576)


@pytest.mark.guards
@pytest.mark.parametrize("gpu", ["sm90", "sm80"])
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_interpreted(rng, dim, dtype, gpu):
    """On sm80 float8 is made by hand; int8 is the same there."""
    if (gpu, dtype) == ("sm80", "int8"):
        gpu = "sm86"
    rows = by_head_dim(
        rng, dim, {20: "float16", 64: "float32", 300: "float32"}.get(dim, "bfloat16")
    )
    with mosaic.interpret():
        assert_same_bytes(written(rows[:, :9], dtype, rng, gpu), expected(rows[:, :9], dtype))


@pytest.mark.guards
@pytest.mark.parametrize("gpu", ["sm90", "sm80"])
@pytest.mark.parametrize("dtype", LARGEST)
def test_awkward_rows_interpreted(rng, dtype, gpu):
    rows = awkward_rows(rng)[-400:].reshape(1, 100, 4, 32)
    with mosaic.interpret():
        assert_same_bytes(written(rows, dtype, rng, gpu), expected(rows, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows_dtype", append_quantize.NEW_DTYPES)
def test_rows_on_the_gpu(rng, dim, dtype, rows_dtype):
    """Both ways to float8, whatever the GPU has."""
    rows = by_head_dim(rng, dim, rows_dtype)
    for gpu in (None, "sm80"):
        got = written(rows, dtype, rng, gpu or device.gpu_generation())
        assert_same_bytes(got, expected(rows, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LARGEST)
def test_the_reference_makes_the_same_bytes_on_the_gpu(rng, dtype):
    rows = awkward_rows(rng)
    got = jax.jit(quantization.quantize, static_argnums=1)(rows, dtype)
    assert_same_bytes(got, quantized(rows, dtype))


def test_a_row_has_threads_of_one_warp():
    for words in range(1, 1100):
        lanes = scales.lanes_of(words)
        assert lanes in (1, 2, 4, 8, 16, 32) and (lanes >= words or lanes == 32)
        assert lanes < 2 * words


def test_which_gpus_convert_to_float8_by_hand():
    gpus = ("sm80", "sm86", "sm89", "sm90", "sm120", None)
    by_hand = [gpu for gpu in gpus if scales.rounds_by_hand("float8_e5m2", gpu)]
    assert by_hand == ["sm80", "sm86"]


# ---- machine code --------------------------------------------------------------------------------


CREATE = {
    "per_sequence": lambda **x: pa.PerSequenceCache.create((128,) * 8, 8, **x),
    "stacked": lambda **x: pa.StackedCache.create(8, 128, 8, **x),
    "paged": lambda **x: pa.PagedCache.create(8, 70, 16, 8, capacity=128, **x),
}


def compiled(kind, dtype, *, dims=(128, 128), t=1, rows_dtype="bfloat16", **options):
    cache = jax.eval_shape(lambda: CREATE[kind](head_dim=dims[0], v_head_dim=dims[1], dtype=dtype))
    new = [jax.ShapeDtypeStruct((8, t, 8, dim), jnp.dtype(rows_dtype)) for dim in dims]
    return mosaic.compile_for(pa.write_kv, cache, *new, donate_argnums=0, **options)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    ("kind", "dtype", "target"),
    [  # how rows are found is the same code everywhere, how numbers are converted is not
        *((kind, dtype, "h100") for kind in CREATE for dtype in LARGEST),
        *(("paged", dtype, target) for dtype in LARGEST for target in ("a100", "b200")),
    ],
)
def test_machine_code(kind, dtype, target):
    """One launch for K, V and both scales, nothing copied, nothing spilled; rows are read 16 bytes
    at a time, and no branch stands around the reciprocal.
    """
    report = compiled(kind, dtype, target=target, sass=True)
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)
    assert report.aliases >= (32 if kind == "per_sequence" else 4)
    assert report.registers <= 64
    assert report.sass.count("LDG.E.128") == report.sass.count("STG.E.64") == 2
    assert "CALL" not in report.sass
    by_itself = dtype != "int8" and target != "a100"
    assert report.sass.count("F2FP.SATFINITE") == (8 if by_itself else 0)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "dims, rows_dtype",
    [
        *(((576, 512), dtype) for dtype in append_quantize.NEW_DTYPES),
        *(((256, 256), "float32"), ((72, 24), "float16"), ((4096, 1), "bfloat16")),
    ],
)
def test_no_spills_for_long_rows(dims, rows_dtype):
    report = compiled("stacked", "float8_e4m3fn", dims=dims, t=128, rows_dtype=rows_dtype)
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)


# ---- refusals ------------------------------------------------------------------------------------
