"""Kernels ask for shared memory before they launch."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn._call import device
from tests.support import mosaic


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
