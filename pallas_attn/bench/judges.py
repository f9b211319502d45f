"""What checks results before they are timed: attention within its budget, an append bit for bit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.bench import peers, subjects, verify
from pallas_attn.bench.case import AppendCase, DecodeCase
from pallas_attn.bench.timing import Subject

Judge = Callable[[Subject, Any], str | None]


def judge_of(call: peers.Call) -> Judge:
    """What checks a subject's result for this call; the oracle runs once."""
    case, arrays = call.case, call.arrays
    if isinstance(case, AppendCase):
        return _AppendJudge(call)
    options = case.options()
    if isinstance(case, DecodeCase):
        k, v = subjects.held_rows(case, arrays)
        lengths, q, each = arrays["lengths"], arrays["q"], jnp.array(case.each, jnp.int32)
        place = {"kv_lengths": lengths, "q_offset": lengths - each}
        if case.rows is not None:  # as rows of a batch that are not all there
            packed = subjects.packed_places(case)
            padded = (case.sequences, max(case.rows), *q.shape[1:])
            q, place["q_lengths"] = jnp.zeros(padded, q.dtype).at[packed].set(q), each
        arrays = {"q": q, "k": k, "v": v, "sinks": arrays.get("sinks"), **place}
    elif case.function is not None:
        arrays = {name: x for name, x in arrays.items() if name != "aux"} | case.written_out()
    elif "q_offset" in options:
        arrays = arrays | {"q_offset": options["q_offset"]}
    if isinstance(case, DecodeCase) and case.tree:
        return _tree_judge(case, arrays, options)
    oracle, naive = verify.expected(arrays, options, call.cotangent)
    if isinstance(case, DecodeCase) and case.rows is not None:
        oracle, naive = (tuple(x[packed] for x in found) for found in (oracle, naive))
    axis = 0 if isinstance(case, DecodeCase) else 1

    def judge(subject: Subject, produced: Any) -> str | None:
        return verify.judge(subject.outputs(produced), oracle, naive, axis=axis)

    return judge


def _tree_judge(case: DecodeCase, arrays: dict[str, Any], options: dict[str, Any]) -> Judge:
    """A tree against its dense mask, and the chain that it is measured by against causal."""
    seen = {"mask_array": case.seen_in_tree()}
    tree, chain = (verify.expected(arrays | some, options, None) for some in (seen, {}))
    if case.rows is not None:
        packed = subjects.packed_places(case)
        tree, chain = (tuple(tuple(x[packed] for x in y) for y in both) for both in (tree, chain))

    def judge(subject: Subject, produced: Any) -> str | None:
        oracle, naive = chain if subject.name == "chain" else tree
        return verify.judge(subject.outputs(produced), oracle, naive, axis=0)

    return judge


class _AppendJudge:
    """Every element of every buffer, bit for bit, beside the same rows looked up one by one."""

    def __init__(self, call: peers.Call):
        case, arrays = call.case, call.arrays
        cache = subjects.noisy(subjects.empty_cache(case)).extend(arrays["lengths"])
        cache = cache.extend(arrays.get("new_lengths", case.new_rows))
        new = {"k": arrays["k"], "v": arrays["v"]}
        if case.cache_dtype:
            for side in ("k", "v"):
                pair = verify.quantized(new[side], case.cache_dtype)
                new[side], new[f"{side}_scale"] = (jnp.asarray(x) for x in pair)
        owners = None if cache.page_table is None else _owners(cache)
        place = jax.jit(functools.partial(_placed, case.kind))
        rest = arrays["lengths"], cache.new_lengths, owners
        buffers = subjects.buffers(cache)
        self.expected = {name: place(x, new[name], *rest) for name, x in buffers.items()}
        if case.kept is not None:
            kept = {name: x[:, case.new_rows - case.kept :] for name, x in new.items()}
            rest = arrays["lengths"], jnp.full(case.sequences, case.kept, jnp.int32), owners
            self.expected = {name: place(x, kept[name], *rest) for name, x in self.expected.items()}

    def __call__(self, subject: Subject, produced: Any) -> str | None:
        got = produced if isinstance(produced, dict) else subjects.buffers(produced)
        same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
        if all(bool(x) for x in jax.tree.leaves(same(got, self.expected))):
            return None
        return "a buffer differs from the same rows written one at a time"


def _owners(cache: Any) -> Any:
    """(sequence, position of its first row) of each page; sequence -1 where it has none."""
    table = np.asarray(cache.page_table)
    found = np.full((cache.pages, 2), -1, np.int32)
    for m, slot in zip(*np.nonzero(table >= 0), strict=True):
        found[table[m, slot]] = m, slot * cache.page_size
    return jnp.asarray(found)


def _placed(kind: str, cache: Any, new: Any, start: Any, count: Any, owners: Any) -> Any:
    """A buffer with the new rows in, each place asking whether there is a row for it: no scatter,
    which is what XLA's own append is made of.
    """
    if kind == "per_sequence":
        rows = zip(cache, new, start, count, strict=True)
        return tuple(_looked_up(*one) for one in rows)
    if kind == "stacked":
        return jax.lax.map(lambda one: _looked_up(*one), (cache, new, start, count))

    def page(one):
        held, (m, first) = one
        rows = jnp.where(m >= 0, count[m], 0)
        return _looked_up(held, new[m], start[m] - first, rows)

    return jax.lax.map(page, (cache, owners))


def _looked_up(cache: Any, new: Any, start: Any, count: Any) -> Any:
    """[K, rows, ...] with new [t, K, ...] at start, start + 1, ..."""
    row = jnp.arange(cache.shape[1], dtype=jnp.int32) - start
    here = ((row >= 0) & (row < count)).reshape(1, -1, *[1] * (cache.ndim - 2))
    fresh = jnp.swapaxes(new[jnp.clip(row, 0, new.shape[0] - 1)], 0, 1)
    return jnp.where(here, fresh, cache)
