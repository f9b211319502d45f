"""Attention with pair bias, as in protein structure models.

Each pair of residues has a learned representation z, which a linear layer makes a bias [B, N, T, T]
of. The bias is added to the logits and takes a gradient, which reaches z. Residues that were not
resolved are hidden as keys, wherever in the chain they are; chains are padded to one length.

    python examples/protein_bias.py
"""
# ruff: noqa: T201

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa

BATCH, RESIDUES, HEADS, DIM, PAIR = 2, 96, 4, 16, 8
WIDTH = HEADS * DIM


def weights(key):
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "gate": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    sizes |= {"bias": (PAIR, HEADS)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def flash(q, k, v, bias, resolved, lengths):
    """bias float[B, N, T, T], resolved bool[B, T], lengths int32[B]."""
    return pa.flash_attention(
        q,
        k,
        v,
        bias=bias,
        mask_array=resolved[:, None, None],  # keys: broadcasts over heads and queries
        q_lengths=lengths,  # padding is not computed, and may hold anything
        kv_lengths=lengths,
    )


def dense(q, k, v, bias, resolved, lengths):
    """The same by a softmax over all pairs."""
    there = jnp.arange(RESIDUES) < lengths[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * DIM**-0.5 + bias
    scores = jnp.where((resolved & there)[:, None, None], scores, -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return jnp.where(there[:, :, None, None], out, 0)


def block(attend, w, x, z, resolved, lengths):
    """Gated attention with pair bias. x: residues [B, T, WIDTH]; z: pairs [B, T, T, PAIR]."""
    q, k, v = jnp.split((x @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, DIM), 3, axis=2)
    bias = jnp.einsum("btsc,cn->bnts", z, w["bias"])
    out = attend(q, k, v, bias, resolved, lengths).reshape(x.shape)
    return (out * jax.nn.sigmoid(x @ w["gate"])) @ w["out"]


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would take TF32
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((BATCH, RESIDUES, WIDTH)), jnp.float32)
    z = jnp.asarray(rng.standard_normal((BATCH, RESIDUES, RESIDUES, PAIR)), jnp.float32)
    lengths = jnp.array([RESIDUES, 70], jnp.int32)
    resolved = jnp.asarray(rng.random((BATCH, RESIDUES)) < 0.9)
    arguments = weights(jax.random.key(0)), x, z

    def loss(attend, w, x, z):
        return jnp.mean(block(attend, w, x, z, resolved, lengths) ** 2)

    results = [
        jax.jit(jax.value_and_grad(lambda *a, f=f: loss(f, *a), argnums=(0, 1, 2)))(*arguments)
        for f in (flash, dense)
    ]
    (value, gradients), (wanted, wanted_gradients) = results
    print(f"loss {float(value):.5f}, dense {float(wanted):.5f}")
    assert jnp.allclose(value, wanted, rtol=1e-5)
    for name, got, want in zip(("weights", "x", "z"), gradients, wanted_gradients, strict=True):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        error = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
        print(f"gradient of {name}: largest relative difference {error:.0e}")
        assert error < 1e-4
    hidden = gradients[2][:, :, :, 0] * ~resolved[:, None]
    assert not hidden.any()  # a hidden key takes no gradient
    print("pairs with hidden residues take no gradient: True")


if __name__ == "__main__":
    main()
