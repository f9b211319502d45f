"""Continuous batching over a paged KV cache.

Each step takes prompts that come in and the newest token of every sequence that decodes, packed
one behind the other (`starts`): one compiled program for any mixture. A request is admitted when a
slot and enough pages are free, and gives both back when it is done. The result is compared with
decoding each request alone.

    python examples/serve_batching.py
"""
# ruff: noqa: T201

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa

VOCABULARY, HEADS, KV_HEADS, DIM, LAYERS = 64, 4, 2, 16, 2
WIDTH = HEADS * DIM
SLOTS, PAGES, PAGE_SIZE, ROOM = 3, 12, 8, 32  # ROOM: rows of one step at most
ROTARY = pa.Rotary.create(positions=PAGES * PAGE_SIZE, dims=DIM)


@dataclasses.dataclass
class Request:
    prompt: list[int]
    wanted: int  # tokens to make
    made: list[int] = dataclasses.field(default_factory=list)

    def pages(self):  # at its end: reserved on admission, so that it never runs out of them
        return -(-(len(self.prompt) + self.wanted) // PAGE_SIZE)


def weights(key):
    """Embedding, projections to q, k and v, projections of the output."""
    qkv = LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * DIM
    shapes = (VOCABULARY, WIDTH), qkv, (LAYERS, WIDTH, WIDTH)
    keys = jax.random.split(key, 3)
    return [jax.random.normal(*x) * WIDTH**-0.5 for x in zip(keys, shapes, strict=True)]


@jax.jit(donate_argnums=1)  # the cache is updated in place
def step(w, cache, tokens, starts):
    """The next token of each slot. tokens int32[ROOM]; slot i owns starts[i] .. starts[i + 1]."""
    embed, qkv, out = w
    cache = cache.extend(jnp.diff(starts))  # once a step, for all layers
    x = embed[tokens]
    for layer in range(LAYERS):
        rows = (x @ qkv[layer]).reshape(ROOM, -1, DIM)
        q, k, v = jnp.split(rows, [HEADS, HEADS + KV_HEADS], axis=1)
        cache = pa.write_kv(cache, k, v, layer=layer, starts=starts, rotary=ROTARY)
        seen = pa.decode_attention(q, cache, layer=layer, starts=starts, rotary=ROTARY)
        x = x + seen.reshape(ROOM, WIDTH) @ out[layer]
    return cache, jnp.argmax(x[starts[1:] - 1] @ embed.T, axis=-1)  # a slot's last row


def serve(w, requests, slots=SLOTS):
    shape = {"kv_heads": KV_HEADS, "head_dim": DIM, "layers": LAYERS, "dtype": jnp.float32}
    cache = pa.PagedCache.create(slots, PAGES, PAGE_SIZE, **shape)
    waiting, running, steps = collections.deque(requests), {}, 0
    while waiting or running:
        rows = {slot: request.made[-1:] for slot, request in running.items()}  # decode
        for slot in set(range(slots)) - set(running):  # admit, prefill
            pages = PAGES - sum(request.pages() for request in running.values())
            room = ROOM - sum(map(len, rows.values()))
            if waiting and waiting[0].pages() <= pages and len(waiting[0].prompt) <= room:
                running[slot] = waiting.popleft()
                rows[slot] = running[slot].prompt
        packed = [rows.get(slot, []) for slot in range(slots)]
        starts = np.cumsum([0, *map(len, packed)], dtype=np.int32)
        tokens = np.zeros(ROOM, np.int32)
        tokens[: starts[-1]] = np.concatenate(packed)
        cache, made = step(w, cache, tokens, starts)
        steps += 1
        for slot, request in list(running.items()):
            request.made.append(int(made[slot]))
            if len(request.made) == request.wanted:
                cache = cache.free(slot)  # gives its pages back
                del running[slot]
    assert not cache.overflowed.any() and cache.num_free == PAGES
    return steps


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would take TF32
    rng, w = np.random.default_rng(0), weights(jax.random.key(0))
    sizes = [(5, 9), (20, 4), (1, 12), (13, 6), (30, 3), (8, 8), (3, 15)]  # prompt, new tokens
    requests = [Request(rng.integers(0, VOCABULARY, n).tolist(), m) for n, m in sizes]
    alone = [Request(request.prompt, request.wanted) for request in requests]
    steps, steps_alone = serve(w, requests), sum(serve(w, [x], slots=1) for x in alone)
    print(f"{len(requests)} requests: {steps} steps of {SLOTS} slots, {steps_alone} one by one")
    assert [x.made for x in requests] == [x.made for x in alone] and steps < steps_alone
    print("the same tokens: True")


if __name__ == "__main__":
    main()
