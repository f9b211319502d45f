"""A prefix cache: prompts that begin alike are computed once.

The whole pages of a prompt stay in the pool as a sequence of their own. A request takes the longest
run of them that its prompt begins with, and computes the rest. In a full pool the prompt that was
used longest ago goes, but no pinned one; the pages that other sequences hold stay.

    python examples/prefix_cache.py
"""
# ruff: noqa: T201

import os.path

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
import pallas_lm as lm
from pallas_lm import model as decoder

SLOTS, PAGE_SIZE, ROOM, WANTED = 2, 8, 160, 6  # ROOM: rows of a step, WANTED: tokens of an answer
SYSTEM = "KING RICHARD: Speak, every one of you, in turn, and be brief: the night is short.\n\n"


class PrefixCache:
    """The first sequences run requests, `most` others keep prompts."""

    def __init__(self, model, most, pages):
        c = model.config
        sizes = (SLOTS + most, pages, PAGE_SIZE, c.kv_heads, c.head_dim)
        self.cache = pa.PagedCache.create(*sizes, capacity=192, layers=c.layers, dtype=model.dtype)
        self.vacant, self.evicted = list(range(SLOTS, SLOTS + most)), []
        self.kept, self.pinned = {}, set()  # {sequence: tokens}, the one used longest ago first

    def admit(self, slot, prompt):
        """Rows of the prompt that need not be computed; None where there is no room for it."""
        same = {s: len(os.path.commonprefix([t, prompt[:-1]])) for s, t in self.kept.items()}
        kept = max(same, key=same.get, default=None)
        rows = same.get(kept, 0) // PAGE_SIZE * PAGE_SIZE
        if rows:
            self.kept[kept] = self.kept.pop(kept)
            self.cache = self.cache.fork(kept, slot, rows)  # now its pages outlive an eviction
        new = np.where(np.arange(self.cache.num_sequences) == slot, len(prompt) - rows + WANTED, 0)
        while not (taken := self.cache.allocate(new))[1][slot]:  # all pages that it may need
            if not self.evict():
                self.cache = self.cache.free(slot)
                return None
        self.cache = taken[0]
        return rows

    def keep(self, slot, prompt):
        """Keeps the whole pages of a prompt that a slot has computed."""
        tokens = prompt[: len(prompt) // PAGE_SIZE * PAGE_SIZE]
        known = any(kept[: len(tokens)] == tokens for kept in self.kept.values())
        if tokens and not known and (self.vacant or self.evict()):
            kept = self.vacant.pop()
            self.cache = self.cache.fork(slot, kept, len(tokens))  # shares pages, copies none
            self.kept[kept] = tokens

    def evict(self):
        """Drops the prompt that was used longest ago; False where none may go."""
        kept = next((s for s in self.kept if s not in self.pinned), None)
        if kept is not None:
            self.evicted.append(self.kept.pop(kept))
            self.vacant.append(kept)
            self.cache = self.cache.free(kept)  # gives back the pages that nobody else holds
        return kept is not None


@jax.jit(static_argnums=0, donate_argnums=2)
def step(config, params, cache, tokens, starts):
    """The next token of each sequence; `levels`: pages that slots share are read once."""
    rotary, rows = decoder.rotary_of(config, cache), decoder.Packed(tokens, starts, starts[1:] - 1)
    logits, cache = decoder.mixed(config, params, cache, rows, rotary, levels=1)
    return cache, jnp.argmax(logits, axis=-1)


def serve(model, prompts, store):
    """The tokens after each prompt, and the number of rows that were computed."""
    waiting, running, made, computed = list(range(len(prompts))), {}, [[] for _ in prompts], 0
    while waiting or running:
        rows = {slot: made[n][-1:] for slot, n in running.items()}
        for slot in set(range(SLOTS)) - set(running):
            if waiting and (shared := store.admit(slot, prompts[waiting[0]])) is not None:
                running[slot] = waiting.pop(0)
                rows[slot] = prompts[running[slot]][shared:]
        assert running, "the pool has too few pages for this prompt"
        packed = [rows.get(m, []) for m in range(store.cache.num_sequences)]
        starts, tokens = np.cumsum([0, *map(len, packed)], dtype=np.int32), np.zeros(ROOM, np.int32)
        tokens[: starts[-1]] = np.concatenate(packed)
        store.cache, new = step(model.config, model.params, store.cache, tokens, starts)
        computed += int(starts[-1])
        for slot, n in list(running.items()):
            if not made[n]:
                store.keep(slot, prompts[n])
            made[n].append(int(new[slot]))
            if len(made[n]) == WANTED:
                store.cache = store.cache.free(slot)
                del running[slot]
    return made, computed


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would take TF32
    model = lm.load(dtype="float32")
    texts = [SYSTEM + f"{name}: My lord, " for name in ("ROMEO", "NURSE", "KENT")]
    prompts = [model.tokenizer.encode(x) for x in (*texts, "To be, or not to be. " * 3, *texts)]
    store, system = PrefixCache(model, 3, 30), model.tokenizer.encode(SYSTEM)
    serve(model, [system], store)
    store.pinned |= set(store.kept)
    made, computed = serve(model, prompts, store)
    alone = lm.complete(model, prompts, max_new_tokens=WANTED, stop_ids=())  # shares nothing
    assert made == [answer.tokens for answer in alone]
    print(f"{sum(map(len, prompts))} rows of prompts, {len(store.evicted)} evictions")
    print(f"{computed - len(prompts) * (WANTED - 1)} rows computed, the same tokens: True")
    assert store.evicted and system[: len(system) // PAGE_SIZE * PAGE_SIZE] in store.kept.values()


if __name__ == "__main__":
    main()
