"""Triangle attention of AlphaFold 3, around the starting and the ending node.

The pair tensor z has a row and a column for each token. Around the starting node a pair (i, j)
attends to the pairs (i, k) of its row, around the ending node to those of its column. The bias of
(j, k) is made of z itself, the same for all rows, so its gradient is a sum over them. Rows of z are
the batch of the attention; pairs with a token of padding are hidden as keys.

    python examples/triangle_attention.py
"""
# ruff: noqa: T201

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa

TOKENS, REAL, CHANNELS, HEADS, DIM = 40, 33, 16, 4, 8
WIDTH = HEADS * DIM


def weights(key):
    sizes = {"qkv": (CHANNELS, 3 * WIDTH), "gate": (CHANNELS, WIDTH)}
    sizes |= {"bias": (CHANNELS, HEADS), "out": (WIDTH, CHANNELS)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def flash(q, k, v, bias, pairs):
    """q, k, v [T, T, HEADS, DIM], bias [HEADS, T, T], pairs bool[T, T]."""
    return pa.flash_attention(q, k, v, bias=bias[None], mask_array=pairs[:, None, None])


def dense(q, k, v, bias, pairs):
    """The same by a softmax over all pairs; rows without a visible pair are 0."""
    logits = jnp.einsum("ijnh,iknh->injk", q, k) * DIM**-0.5 + bias
    logits = jnp.where(pairs[:, None, None], logits, -1e9)
    out = jnp.einsum("injk,iknh->ijnh", jax.nn.softmax(logits), v)
    return jnp.where(pairs.any(axis=1)[:, None, None, None], out, 0)


def normed(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def starting_node(attend, w, z, pairs):
    """z [T, T, CHANNELS]."""
    x = normed(z)
    q, k, v = jnp.split((x @ w["qkv"]).reshape(*z.shape[:2], 3 * HEADS, DIM), 3, axis=2)
    bias = jnp.einsum("jkc,cn->njk", x, w["bias"])
    out = attend(q, k, v, bias, pairs).reshape(*z.shape[:2], WIDTH)
    return (out * jax.nn.sigmoid(x @ w["gate"])) @ w["out"]


def ending_node(attend, w, z, pairs):
    return starting_node(attend, w, z.swapaxes(0, 1), pairs.T).swapaxes(0, 1)


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would take TF32
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.standard_normal((TOKENS, TOKENS, CHANNELS)), jnp.float32)
    target = jnp.asarray(rng.standard_normal(z.shape), jnp.float32)
    real = jnp.arange(TOKENS) < REAL
    pairs = real[:, None] & real
    both = [weights(key) for key in jax.random.split(jax.random.key(0))]

    def loss(attend, both, z):
        z = z + starting_node(attend, both[0], z, pairs)
        z = z + ending_node(attend, both[1], z, pairs)
        return jnp.mean((z - target) ** 2, where=pairs[..., None])

    (value, gradients), (wanted, wanted_gradients) = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: loss(f, *x), argnums=(0, 1)))(both, z)
        for f in (flash, dense)
    )
    print(f"loss {float(value):.5f}, dense {float(wanted):.5f}")
    assert jnp.allclose(value, wanted, rtol=1e-5)
    for name, got, want in zip(("weights", "z"), gradients, wanted_gradients, strict=True):
        leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        error = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in leaves)
        print(f"gradient of {name}: largest relative difference {error:.0e}")
        assert error < 1e-4
    assert not gradients[1][REAL:].any() and not gradients[1][:, REAL:].any()
    print("padding takes no gradient: True")


if __name__ == "__main__":
    main()
