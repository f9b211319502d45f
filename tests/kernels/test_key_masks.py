"""Masks of keys (`attention/key_masks.py`): the tiles that they leave, and the keys of a tile."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_attn.kernels.attention import key_masks
from pallas_attn.kernels.lang import mosaic
from tests.support import mosaic as support

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SHAPE = (64, 64)


def read(mask, block):
    """Spans of tiles of `block` keys; [B, N, 2, 64, 64], keys 8 .. 71 along each axis of a
    tile.
    """
    batch, heads = mask.shape[:2]

    def kernel(mask, tiles):
        b, h = lax.axis_index("b"), lax.axis_index("h")
        row = key_masks.row_of(mask, b, h)
        for axis in range(2):
            shown = key_masks.shown(mask, row, 8, SHAPE, axis, mosaic.TILE)
            mosaic.store(tiles.at[b, h, axis], jnp.where(shown, mosaic.filled(SHAPE, 1.0), 0.0))

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, heads, 2, *SHAPE), jnp.float32),
        **mosaic.grid_of(b=batch, h=heads),
        compiler_params=mosaic.without_barriers(),
    )
    return jax.jit(key_masks.spans, static_argnums=1)(mask, block), jax.jit(call)(mask)


def rows_of(keys, block):
    """bool[rows, keys]: hidden, whole, cut at and beside the edges of tiles, and with holes."""
    at = np.arange(keys)
    ends = {n + d for n in range(0, keys + 1, block) for d in (-1, 0, 1)} & set(range(keys + 1))
    ends = sorted(ends)[:: max(1, len(ends) // 12)]
    rows = [at < end for end in ends] + [at >= end for end in ends]
    rows += [(at >= block) & (at < keys - 5), at % (2 * block) < block, at % 7 < 5]
    return np.stack(rows)


def check(keys, block):
    rows = rows_of(keys, block)
    rows = rows[: len(rows) // 2 * 2].reshape(-1, 2, 1, keys)
    spans, tiles = map(np.asarray, read(jnp.asarray(rows), block))
    codes = np.asarray(jax.jit(key_masks.codes, static_argnums=1)(jnp.asarray(rows), block))
    count = -(-keys // block)
    for b, h in np.ndindex(rows.shape[:2]):
        row = rows[b, h, 0]
        lo, full_lo, full_hi, hi = map(int, key_masks.span_in(spans[b, h]))
        some = [row[n * block : (n + 1) * block] for n in range(count)]
        seen, whole = ([n for n in range(count) if f(some[n])] for f in (np.any, np.all))
        assert (lo, hi) == (seen[0], seen[-1] + 1) if seen else lo >= hi
        wanted = [int(n in seen) + int(n in whole) for n in range(count)]
        np.testing.assert_array_equal(codes[b, h], wanted)
        run = list(range(full_lo, full_hi))
        assert set(run) <= set(whole) and bool(run) == bool(whole)
        assert not whole or (full_lo == whole[0] and full_hi not in whole)
        columns = row[np.minimum(8 + np.arange(64), keys - 1)]
        np.testing.assert_array_equal(tiles[b, h, 1], np.broadcast_to(columns, SHAPE))
        np.testing.assert_array_equal(tiles[b, h, 0], np.broadcast_to(columns[:, None], SHAPE))


SIZES = [(300, 128), (197, 64), (2560, 64), (200, 200), (96, 16)]


@pytest.mark.guards
@pytest.mark.parametrize("keys, block", [(300, 128), (2304, 64)])
def test_tiles_and_keys_interpreted(keys, block):
    with support.interpret():
        check(keys, block)


@pytest.mark.gpu
@pytest.mark.parametrize("keys, block", [*SIZES, (9001, 128), (4096, 128), (1024, 256)])
def test_tiles_and_keys_on_the_gpu(keys, block):
    check(keys, block)
