"""Train one transformer layer on packed documents.

Documents of any lengths lie one behind the other in one buffer, without padding. `Packed(starts)`
says where each begins; a token sees the earlier tokens of its own document and no others.

Each document uses four words of a vocabulary of 32, at random. To predict the next one, attention
has to learn to look back within the document.

    python examples/train_packed.py
"""
# ruff: noqa: T201

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa

VOCABULARY, WIDTH, HEADS = 32, 64, 4
TOKENS, DOCUMENTS, STEPS = 512, 8, 60


def batch(rng):
    """(tokens int32[TOKENS], starts int32[DOCUMENTS + 1]): random documents that fill a buffer."""
    cuts = np.sort(rng.choice(np.arange(1, TOKENS), DOCUMENTS - 1, replace=False))
    starts = np.concatenate([[0], cuts, [TOKENS]]).astype(np.int32)
    words = [rng.choice(VOCABULARY, 4, replace=False) for _ in range(DOCUMENTS)]
    lengths = np.diff(starts)
    tokens = [rng.choice(w, n) for w, n in zip(words, lengths, strict=True)]
    return np.concatenate(tokens).astype(np.int32), starts


def weights(key):
    sizes = {"embed": (VOCABULARY, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    sizes |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def logits(w, tokens, starts):
    x = w["embed"][tokens] * VOCABULARY**0.5
    # Packed rows have no batch axis: [tokens, heads, head_dim].
    q, k, v = jnp.split((normed(x) @ w["qkv"]).reshape(TOKENS, 3 * HEADS, -1), 3, axis=1)
    seen = pa.flash_attention(q, k, v, mask=pa.CAUSAL, packed=pa.Packed(starts))
    x = x + seen.reshape(TOKENS, WIDTH) @ w["out"]
    x = x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"]
    return normed(x) @ w["head"]


def loss(w, tokens, starts):
    """Mean over the tokens that have a next one in their own document."""
    picked = jax.nn.log_softmax(logits(w, tokens, starts)[:-1])
    picked = jnp.take_along_axis(picked, tokens[1:, None], axis=1)[:, 0]
    is_first = jnp.zeros(TOKENS, bool).at[starts[1:-1]].set(True)
    return -jnp.mean(picked, where=~is_first[1:])


@jax.jit(donate_argnums=(0, 1))
def step(w, moments, tokens, starts, number):
    """Adam. One program serves every batch: lengths arrive as an array."""
    value, gradient = jax.value_and_grad(loss)(w, tokens, starts)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], gradient)
    unbias = (1 - 0.99**number) ** 0.5 / (1 - 0.9**number)
    w = jax.tree.map(lambda w, a, b: w - 0.005 * unbias * a / (b**0.5 + 1e-8), w, first, second)
    return w, (first, second), value


def main():
    rng, w = np.random.default_rng(0), weights(jax.random.key(0))
    moments = jax.tree.map(jnp.zeros_like, (w, w))
    losses = []
    for number in range(1, STEPS + 1):
        w, moments, value = step(w, moments, *batch(rng), number)
        losses.append(float(value))
        if number in (1, 10, STEPS):
            print(f"step {number:3d}: loss {losses[-1]:.2f}")
    # A model that sees one token alone gets 3.1 at best.
    assert losses[0] > 3.1 and np.mean(losses[-5:]) < 2.6

    # Documents do not see each other: a change in the first one leaves the others as they are.
    tokens, starts = batch(rng)
    other = np.where(np.arange(TOKENS) < starts[1], (tokens + 1) % VOCABULARY, tokens)
    a, b = logits(w, tokens, starts), logits(w, other, starts)
    assert jnp.array_equal(a[starts[1] :], b[starts[1] :])
    print("documents do not see each other: True")


if __name__ == "__main__":
    main()
