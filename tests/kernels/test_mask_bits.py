"""Masks of queries and keys as bits (`attention/mask_bits.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.attention import mask_bits
from tests.support import mosaic as support

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


@support.here_and_on_a_gpu
@pytest.mark.parametrize("sizes", [(2, 1, 70, 516), (1, 2, 33, 131)])
def test_bits(sizes, where):
    """Bits of all words are those of the mask, and 0 past its ends."""
    batches, heads, rows, keys = sizes
    mask = np.random.default_rng(keys).random((batches, heads, rows, keys)) < 0.5
    with where():
        packed = jax.jit(mask_bits.packed, static_argnums=(1, 2))(jnp.asarray(mask), rows, keys)
    words = np.asarray(packed).view(np.uint32)
    bits = words[:, :, :, None] >> np.arange(32, dtype=np.uint32)[:, None] & 1
    bits = bits.reshape(batches, heads, -1, words.shape[3])
    np.testing.assert_array_equal(bits[:, :, :rows, :keys], mask)
    assert not bits[:, :, rows:].any() and not bits[..., keys:].any()
