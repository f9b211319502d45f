"""A mask that no option names, written as a function of positions.

A reader of many documents sees the earlier tokens of its own document, and of every document before
it the last token alone, as a summary:

    documents  0 0 0 1 1 2 2
               1 . . . . . .
               1 1 . . . . .
               1 1 1 . . . .
               . . 1 1 . . .        the third token is the summary of document 0
               . . 1 1 1 . .
               . . 1 . 1 1 .        the fifth is that of document 1
               . . 1 . 1 1 1

The kernels skip tiles of keys that the mask hides. Gradients work as for any other mask.

    python examples/custom_mask.py
"""
# ruff: noqa: T201

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa

BATCH, ROWS, HEADS, DIM = 2, 192, 4, 32


def summaries_of_earlier_documents(documents):
    """documents: int32[B, T], rising ids. A mask is called with scalars: batch row, head, query
    position, key position, and the arrays that it reads.
    """
    ends = documents != jnp.roll(documents, -1, axis=1)
    ends = ends.at[:, -1].set(True)
    own = pa.mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], documents)
    summary = pa.mask_fn(lambda b, h, q, kv, ends: ends[b, kv], ends)
    return (own | summary) & pa.CAUSAL  # masks combine by &, | and ~


def layers(q, documents):
    """Two layers. `blocks` finds once, for both of them and their backward passes, which blocks of
    64 queries by 64 keys are empty, and which are whole.
    """
    mask = summaries_of_earlier_documents(documents).blocks(ROWS, ROWS, batch=BATCH)
    for _ in range(2):
        q = pa.flash_attention(q, q, q, mask=mask)
    return q


def dense_layers(q, seen):
    """The same by a softmax over all pairs; seen: bool[B, T, T]."""
    for _ in range(2):
        scores = jnp.einsum("btnh,bsnh->bnts", q, q) * DIM**-0.5
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        q = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), q)
    return q


def dense_mask(documents):
    """bool[B, T, T], by loops in Python: what the mask is meant to be."""
    seen = np.zeros((BATCH, ROWS, ROWS), bool)
    for b, ids in enumerate(documents):
        for q in range(ROWS):
            for kv in range(q + 1):
                is_summary = kv == ROWS - 1 or ids[kv] != ids[kv + 1]
                seen[b, q, kv] = ids[q] == ids[kv] or is_summary
    return seen


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would take TF32
    rng = np.random.default_rng(0)
    lengths = np.array([[50, 70, 30, 42], [100, 1, 64, 27]])
    documents = np.stack([np.repeat(np.arange(4), row) for row in lengths]).astype(np.int32)
    q = jnp.asarray(rng.standard_normal((BATCH, ROWS, HEADS, DIM)), jnp.float32)
    target = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)
    seen = dense_mask(documents)
    mask = summaries_of_earlier_documents(jnp.asarray(documents))
    assert np.array_equal(mask.dense(ROWS, ROWS, batch=BATCH)[:, 0], seen)
    print(f"pairs seen: {seen.mean():.0%}")

    @jax.jit
    def ours(q, documents):
        return jax.value_and_grad(lambda q: jnp.sum(layers(q, documents) * target))(q)

    value, gradient = ours(q, documents)
    wanted, wanted_gradient = jax.value_and_grad(lambda q: jnp.sum(dense_layers(q, seen) * target))(
        q
    )
    error = float(jnp.abs(gradient - wanted_gradient).max())
    print(f"value {float(value):.3f}, dense {float(wanted):.3f}; gradients differ by {error:.0e}")
    assert jnp.allclose(value, wanted, rtol=1e-4) and error < 1e-4


if __name__ == "__main__":
    main()
