"""Masks of queries and keys as bits (`attention/mask_bits.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.attention import mask_bits
from tests.support import mosaic as support

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def check(batches, heads, rows, keys):
    """Bits of all words are those of the mask, and 0 past its ends."""
    rng = np.random.default_rng(keys)
    mask = rng.random((batches, heads, rows, keys)) < 0.5
    packed = jax.jit(mask_bits.packed, static_argnums=(1, 2))(jnp.asarray(mask), rows, keys)
    words = np.asarray(packed).view(np.uint32)
    bits = words[:, :, :, None] >> np.arange(32, dtype=np.uint32)[:, None] & 1
    bits = bits.reshape(batches, heads, -1, words.shape[3])
    np.testing.assert_array_equal(bits[:, :, :rows, :keys], mask)
    assert not bits[:, :, rows:].any() and not bits[..., keys:].any()


@pytest.mark.guards
@pytest.mark.parametrize("sizes", [(2, 1, 70, 516), (1, 2, 33, 131)])
def test_interpreted(sizes):
    with support.interpret():
        check(*sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 2, 33, 131), (2, 3, 197, 198), (2, 1, 1000, 2048)])
def test_on_the_gpu(sizes):
    check(*sizes)
