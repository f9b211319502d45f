"""`flash_attention(kv_blocks=)`: lists of key blocks, forward and backward, against the same mask
written out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from tests.support import budget, in_numpy, subjects
from tests.support.problems import by_name

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

T, S, N, K, DIM = 90, 140, 4, 2, 64


def arrays(rng, dtype):
    shapes = (2, T, N, DIM), (2, S, K, DIM), (2, S, K, DIM)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def lists(rng, batches, heads, sizes, n=3):
    """Numbers of blocks, some twice, some of none."""
    q_blocks, count = -(-T // sizes[0]), -(-S // sizes[1])
    blocks = rng.integers(-1, count + 1, (batches, heads, q_blocks, n))
    odd = rng.choice([-(2**31), 2**31 - 1, -5], blocks.shape)
    return np.where(rng.random(blocks.shape) < 0.1, odd, blocks).astype(np.int32)


def written_out(blocks, sizes):
    """bool[B or 1, N or 1, T, S], one list after the other."""
    batches, heads, _, _ = blocks.shape
    seen = np.zeros((batches, heads, T, S), bool)
    for b, h, i in np.ndindex(blocks.shape[:3]):
        for block in blocks[b, h, i]:
            if block >= 0:
                rows = slice(i * sizes[0], (i + 1) * sizes[0])
                first = min(int(block) * sizes[1], S)
                seen[b, h, rows, first : first + sizes[1]] = True
    return np.repeat(seen, N // heads, axis=1) if heads > 1 else seen


# Batch rows and heads of lists, sizes of blocks, mask, offset of the rows.
CASES = {
    "by_kv_head": (2, K, (64, 64), pa.FULL, 0),
    "by_head": (2, N, (64, 64), pa.CAUSAL, 45),
    "by_head_causal": (1, N, (32, 16), pa.CAUSAL, 45),
    "one_list_window": (1, 1, (50, 70), pa.sliding_window(90), 0),
}


SHOWN_BY = {"interpreted": ("by_kv_head", "by_head"), "portable": ("by_head_causal",)}


@pytest.mark.parametrize(
    "subject, name",
    [
        row.param(name, id=name)
        for row in subjects.ROWS
        if row.exists("flash_forward")
        for name in SHOWN_BY.get(row.name, CASES)
    ],
)
def test_forward(rng, subject, name):
    batches, heads, sizes, mask, offset = CASES[name]
    q, k, v = arrays(rng, subject.dtype)
    blocks = lists(rng, batches, heads, sizes)
    options = {"kv_blocks": jnp.asarray(blocks), "block_size": sizes, "mask": mask}
    options["q_offset"] = offset
    out, lse = subject.call(by_name.flash_attention_with_lse, q, k, v, **options)
    plain = {"q": q, "k": k, "v": v, "mask": mask, "mask_array": written_out(blocks, sizes)}
    plain["q_offset"] = offset
    wanted = budget.attention(plain, tensor_cores=subject.tensor_cores)
    budget.check({"out": out, "lse": lse}, wanted)


def gradients(q, k, v, implementation=None, **options):
    def loss(q, k, v):
        out = by_name.flash_attention(q, k, v, implementation=implementation, **options)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32) * weights).sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("subject", subjects.rows("flash_backward"))
@pytest.mark.parametrize("name", ["by_kv_head"])
def test_gradients_are_those_of_the_mask_written_out(rng, subject, name):
    batches, heads, sizes, mask, _ = CASES[name]
    q, k, v = arrays(rng, subject.dtype)
    blocks = lists(rng, batches, heads, sizes)
    options = {"kv_blocks": jnp.asarray(blocks), "block_size": sizes, "mask": mask}
    got = subject.call(gradients, q, k, v, **options)
    plain = {"mask": mask, "mask_array": jnp.asarray(written_out(blocks, sizes))}
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    want = in_numpy.call(functools.partial(gradients, implementation="reference", **plain), *wide)
    for x, y in zip(got, want, strict=True):
        size = np.abs(np.asarray(y)).max()
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=0.02 * size)


def test_mapped_over_a_batch(rng):
    q, k, v = (jnp.stack([x, 2 * x]) for x in arrays(rng, "float32"))
    blocks = jnp.asarray(np.stack([lists(rng, 2, K, (64, 64)) for _ in range(2)]))

    def call(q, k, v, blocks):
        return by_name.flash_attention(q, k, v, kv_blocks=blocks, block_size=64)

    got = in_numpy.call(jax.vmap(call), q, k, v, blocks)
    for n in range(2):
        want = in_numpy.call(call, q[n], k[n], v[n], blocks[n])
        np.testing.assert_allclose(got[n], want, atol=1e-5)
