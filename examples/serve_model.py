"""A server loop: the model in the package, continuous batching over a paged KV cache.

A step takes packed rows (`starts`): the newest token of every sequence that decodes, then rows of
prompts. A system prompt is prefilled once and forked; its pages are read once a step for all. A
request is admitted when a slot and all pages that it may need are free. The tokens are compared
with those of `lm.complete`.

    python examples/serve_model.py
"""
# ruff: noqa: T201

import collections
import dataclasses

import jax
import numpy as np

import pallas_attn as pa
import pallas_lm as lm
from pallas_lm import model as decoder

SLOTS, PAGES, PAGE_SIZE, ROOM = 8, 32, 16, 40  # ROOM: rows of a step at most
WARMTH, TOP_K = np.array([0.6, 0.0, 1.0, 0.3] * 4), 30  # a temperature a request; 0 is greedy
SEED, STOP = 1, ord("\n")
SYSTEM = "KING RICHARD: Speak, every one of you, in turn, and be brief: the night is short.\n\n"


@dataclasses.dataclass
class Request:
    number: int  # part of its key: its tokens depend on nothing else in the batch
    left: list[int]  # rows for the next steps: the prompt, then the newest token
    wanted: int  # tokens at most
    pages: int  # at its end, but for the full pages of the system prompt
    made: list[int] = dataclasses.field(default_factory=list)


@jax.jit(static_argnums=0, donate_argnums=2)
def step(config, params, cache, tokens, starts, numbers, sampling):
    rotary, rows = decoder.rotary_of(config, cache), decoder.Packed(tokens, starts, starts[1:] - 1)
    logits, cache = decoder.mixed(config, params, cache, rows, rotary, levels=1)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(SEED), numbers)
    keys = jax.vmap(jax.random.fold_in)(keys, cache.lengths)
    return cache, lm.sample(logits, keys, sampling)  # a token a slot, after its last row


class Server:
    def __init__(self, model):
        c, self.model, self.running = model.config, model, {}
        sizes = (SLOTS + 1, PAGES, PAGE_SIZE, c.kv_heads, c.head_dim)
        self.cache = pa.PagedCache.create(*sizes, capacity=192, layers=c.layers, dtype=model.dtype)
        self.system = model.tokenizer.encode(SYSTEM)
        for first in range(0, len(self.system), ROOM):  # it stays in the last slot
            self.run({SLOTS: self.system[first : first + ROOM]})
        self.unreserved = int(self.cache.num_free)

    def request(self, number, prompt, wanted):
        pages = self.cache.pages_for(len(self.system) + len(prompt) + wanted)
        return Request(number, prompt, wanted, pages - len(self.system) // PAGE_SIZE)

    def run(self, rows):
        packed = [rows.get(slot, []) for slot in range(SLOTS + 1)]
        starts, tokens = np.cumsum([0, *map(len, packed)], dtype=np.int32), np.zeros(ROOM, np.int32)
        tokens[: starts[-1]] = np.concatenate(packed)
        numbers = [self.running[m].number if m in self.running else 0 for m in range(SLOTS + 1)]
        sampling = lm.Sampling(WARMTH[numbers], TOP_K)
        changing = self.cache, tokens, starts, np.array(numbers), sampling
        self.cache, made = step(self.model.config, self.model.params, *changing)
        return made.tolist()

    def serve(self, waiting):
        """One step, beside which requests are admitted and released."""
        for slot in set(range(SLOTS)) - set(self.running):
            if waiting and waiting[0].pages <= self.unreserved:
                self.running[slot] = waiting.popleft()
                self.unreserved -= self.running[slot].pages
                self.cache = self.cache.fork(SLOTS, slot)
        rows, room = {}, ROOM
        for slot, request in sorted(self.running.items(), key=lambda item: len(item[1].left)):
            rows[slot], request.left = request.left[:room], request.left[room:]
            room -= len(rows[slot])
        tokens = self.run(rows)
        for slot, request in list(self.running.items()):
            if rows[slot] and not request.left:  # else its prompt goes on
                request.made, request.left = [*request.made, tokens[slot]], tokens[slot : slot + 1]
                if len(request.made) == request.wanted or tokens[slot] == STOP:
                    self.cache = self.cache.free(slot)
                    self.unreserved += self.running.pop(slot).pages


def main():
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would take TF32
    model = lm.load(dtype="float32")
    server, names = Server(model), ["ROMEO", "The First Lord of the North", "NURSE", "KENT"] * 4
    prompts = [model.tokenizer.encode(f"{name}: ") for name in names]
    requests = [server.request(n, prompt, 24) for n, prompt in enumerate(prompts)]
    waiting = collections.deque(requests)
    while waiting or server.running:
        server.serve(waiting)
    assert int(server.cache.num_free) == server.unreserved and not server.cache.overflowed.any()
    how = {"max_new_tokens": 24, "stop_ids": [STOP], "temperature": WARMTH, "top_k": TOP_K}
    how |= {"seed": SEED}
    alone = lm.complete(model, [server.system + prompt for prompt in prompts], **how)
    assert [request.made for request in requests] == [answer.tokens for answer in alone]
    print(f"{len(alone)} requests, {SLOTS} side by side, the same tokens as one by one: True")
    print(f"{names[0]}: {alone[0].text!r}")


if __name__ == "__main__":
    main()
