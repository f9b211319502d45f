"""Panels of columns in shared memory: exact ends, and matmuls over all of them."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_attn.kernels.lang import mosaic as lang
from pallas_attn.kernels.lang import panels
from tests.support import in_numpy, mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

ROWS, KEYS = 64, 40
BATCH, HEADS, LENGTH = 2, 3, 77


def test_widths():
    assert [panels.widths(dim) for dim in (8, 16, 24, 40, 64)] == [
        (16,),
        (16,),
        (32,),
        (64,),
        (64,),
    ]
    assert panels.widths(72) == (64, 16) and panels.widths(88) == (64, 32)
    assert panels.widths(128) == (64, 64) and panels.widths(136) == (64, 64, 16)


def scores_and_copy(q, k):
    """q k^T of tiles of rows and keys, and a copy of q that went through shared memory."""
    batch, length, heads, dim = q.shape
    row_tiles, key_tiles = pl.cdiv(length, ROWS), pl.cdiv(length, KEYS)

    def kernel(q, k, scores, copy, q_smem, k_smem, barrier):
        b, h, t, s = (lax.axis_index(name) for name in "bhts")
        rows, keys = pl.ds(t * ROWS, ROWS), pl.ds(s * KEYS, KEYS)
        panels.load(q, (b, rows, h), q_smem, 0, barrier)
        panels.load(k, (b, keys, h), k_smem, 1, barrier)
        plgpu.barrier_wait(barrier)

        def product(acc):
            for x, y in zip(panels.tiles(q_smem, 0), panels.tiles(k_smem, 1), strict=True):
                plgpu.wgmma(acc, x, y.transpose((1, 0)))
            return acc[...]

        lang.store(scores.at[b, h, t, s], pl.run_scoped(product, plgpu.ACC((ROWS, KEYS))))
        plgpu.commit_smem()  # all warps have read q
        for x in panels.tiles(q_smem, 0):
            x[...] = plgpu.load(x, layout=lang.TILE, optimized=False) + 1
        plgpu.commit_smem()
        pl.when(s == 0)(lambda: panels.store(q_smem, 0, copy, (b, rows, h)))
        plgpu.wait_smem_to_gmem(0)

    def buffers(*shape):
        return tuple(panels.scratch(shape, q.dtype, width) for width in panels.widths(dim))

    tiles = batch, heads, row_tiles, key_tiles, ROWS, KEYS
    q_smem, k_smem = buffers(1, ROWS), buffers(2, KEYS)
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(tiles, jnp.float32), q),
        scratch_types=[q_smem, k_smem, plgpu.Barrier(num_arrivals=2 * len(q_smem))],
        grid=(batch, heads, row_tiles, key_tiles),
        grid_names=("b", "h", "t", "s"),
        compiler_params=lang.without_barriers(),
    )(q, k)


def arrays(dim):
    shape = (BATCH, LENGTH, HEADS, dim)
    numbers = np.random.default_rng(0).integers(-3, 4, (2, *shape))
    return [jnp.asarray(x, jnp.bfloat16) for x in numbers]


@pytest.mark.parametrize("dim", [24, 72])
def test_ends_are_exact(dim):
    q, k = arrays(dim)
    with mosaic.interpret():
        scores, copy = in_numpy.call(scores_and_copy, q, k)
    q, k = np.asarray(q, np.float32), np.asarray(k, np.float32)
    rows, keys = scores.shape[2] * ROWS, scores.shape[3] * KEYS
    padded = [
        np.pad(x, ((0, 0), (0, n - LENGTH), (0, 0), (0, 0))) for x, n in ((q, rows), (k, keys))
    ]
    want = np.einsum("bthd,bshd->bhts", *padded)
    want = want.reshape(BATCH, HEADS, rows // ROWS, ROWS, -1, KEYS).swapaxes(3, 4)
    np.testing.assert_array_equal(scores, want)
    np.testing.assert_array_equal(np.asarray(copy, np.float32), q + 1)


@pytest.mark.parametrize("dim", [8, 40, 104])
def test_lowers(dim):
    mosaic.lower_for_cuda(scores_and_copy, *arrays(dim))
