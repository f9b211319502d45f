"""Checks of results before they are timed: attention within its budget, an append bit for bit."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import float8, rotation, subjects, verify
from benchmarks.call import Call
from benchmarks.rows import OURS
from benchmarks.timing import Produced, Subject
from pallas_attn.cache import KVCache
from tests.support.problems.case import AppendCase, DecodeCase

Array = jax.Array
Buffer = Any  # an array, or one for each sequence
Judge = Callable[[Subject, Produced], str | None]  # (subject, produced) -> complaint


def judge_of(call: Call) -> Judge:
    """The check of results for this call; the oracle runs once."""
    if isinstance(call.case, AppendCase):
        return _append_judge(call)
    if call.op == "quantize":
        return float8.judge_of_rounding(call)
    if call.case.dtype.startswith("float8"):
        return float8.judge_of_attention(call)
    return (_decode_judge if isinstance(call.case, DecodeCase) else _attention_judge)(call)


def _attention_judge(call: Call) -> Judge:
    case, arrays, options = call.case, call.arrays, call.case.options()
    if case.function is not None:
        arrays = {name: x for name, x in arrays.items() if name != "aux"} | case.written_out()
    elif "q_offset" in options:
        arrays = arrays | {"q_offset": options["q_offset"]}
    if call.op == "jvp":
        oracle, naive = verify.expected(arrays, options, tangents=call.cotangent)
        names = ("out", "out_dot")
        return lambda subject, produced: verify.judge(
            subject.outputs(produced), oracle, naive, names=names
        )
    expected = verify.expected if case.rotary is None else rotation.expected
    oracle, naive = expected(arrays, options, call.cotangent)
    return lambda subject, produced: verify.judge(subject.outputs(produced), oracle, naive)


def _decode_judge(call: Call) -> Judge:
    """Packed rows are judged as rows of a batch that are not all there; a tree by its dense mask,
    and the chain that it is measured by as causal rows.
    """
    case: DecodeCase = call.case
    k, v = subjects.held_rows(case, call.arrays)
    lengths, q, each = call.arrays["lengths"], call.arrays["q"], jnp.array(case.each, jnp.int32)
    place = {"kv_lengths": lengths, "q_offset": lengths - each}
    packed: Any = ...
    if case.rows is not None:
        packed = subjects.packed_places(case)
        padded = (case.sequences, max(case.rows), *q.shape[1:])
        q, place["q_lengths"] = jnp.zeros(padded, q.dtype).at[packed].set(q), each
    arrays = {"q": q, "k": k, "v": v, "sinks": call.arrays.get("sinks"), **place}
    if case.alibi:
        arrays["bias"] = jnp.asarray(case.added())

    def expected(narrow: str | None = None, **more: Array) -> list[tuple[Array, ...]]:
        both = verify.expected(arrays | more, case.options(), call.cotangent, narrow=narrow)
        return [tuple(x[packed] for x in results) for results in both]

    causal = expected()
    tree = causal
    if case.tree or case.listed:
        seen = case.seen_in_tree() if case.tree else case.seen_in_lists()
        tree = expected(mask_array=seen)
    ours = tree
    if case.multiplies_float8:
        ours = expected("float8", **_multiplied(case, call.arrays, q))

    def judge(subject: Subject, produced: Produced) -> str | None:
        others = causal if subject.name == "chain" else tree
        oracle, naive = ours if subject.name.startswith(OURS) else others
        return verify.judge(subject.outputs(produced), oracle, naive, axis=0)

    return judge


_KEYS = 128  # rows of K and V that share a scale


def _multiplied(case: DecodeCase, arrays: dict[str, Array], q: Array) -> dict[str, Array]:
    """q, k and v [M, S, heads, dim] as matmuls on float8 have them: q with a scale a row, k and v
    with the largest of 128. In NumPy, as XLA may round to float8 by way of float16.
    """
    cache = subjects.filled_cache(dataclasses.replace(case, kind="stacked", page_size=None), arrays)
    numbers, scales = verify.quantized(q, "float8_e4m3fn")
    made = {"q": jnp.asarray(numbers.astype(np.float32) * scales[..., None])}
    for name in "kv":
        numbers, scales = (np.asarray(getattr(cache, name + end)) for end in ("", "_scale"))
        tiles = scales.reshape(*scales.shape[:-1], -1, _KEYS)
        largest = tiles.max(axis=-1, keepdims=True)
        ratios = (tiles * (np.float32(1) / largest)).reshape(scales.shape)
        rounded = (numbers.astype(np.float32) * ratios[..., None]).astype(numbers.dtype)
        each = np.repeat(largest[..., 0], _KEYS, axis=-1)
        rows = rounded.astype(np.float32) * each[..., None]
        made[name] = jnp.asarray(rows.swapaxes(1, 2))
    return made


def _append_judge(call: Call) -> Judge:
    """Compares every element of every buffer with the same rows looked up one by one."""
    case, arrays = call.case, call.arrays
    cache = subjects.extended(case, arrays)
    new = {"k": arrays["k"], "v": arrays["v"]}
    if case.cache_dtype:
        for side in ("k", "v"):
            pair = verify.quantized(new[side], case.cache_dtype)
            new[side], new[f"{side}_scale"] = (jnp.asarray(x) for x in pair)
    owners = None if cache.page_table is None else _owners(cache)
    place = jax.jit(functools.partial(_placed, case.kind))
    lengths, counts = arrays["lengths"], cache.new_lengths
    expected = {
        name: place(x, new[name], lengths, counts, owners)
        for name, x in subjects.buffers(cache).items()
    }
    if case.kept is not None:
        counts = jnp.full(case.sequences, case.kept, jnp.int32)
        expected = {
            name: place(x, new[name][:, case.new_rows - case.kept :], lengths, counts, owners)
            for name, x in expected.items()
        }
    same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))

    def judge(subject: Subject, produced: Produced) -> str | None:
        del subject
        got = produced if isinstance(produced, dict) else subjects.buffers(produced)
        if all(bool(x) for x in jax.tree.leaves(same(got, expected))):
            return None
        return "a buffer differs from the same rows written one at a time"

    return judge


def _owners(cache: KVCache) -> Array:
    """int32[pages, 2]: each page's sequence, -1 if it has none, and position of its first row."""
    table = np.asarray(cache.page_table)
    owners = np.full((cache.pages, 2), -1, np.int32)
    for m, slot in zip(*np.nonzero(table >= 0), strict=True):
        owners[table[m, slot]] = m, slot * cache.page_size
    return jnp.asarray(owners)


def _placed(
    kind: str, cache: Buffer, new: Array, start: Array, count: Array, owners: Array | None
) -> Buffer:
    """A buffer with the new rows in. Each place asks whether there is a row for it: no scatter,
    which is what XLA's own append is made of.
    """
    if kind == "per_sequence":
        return tuple(_looked_up(*row) for row in zip(cache, new, start, count, strict=True))
    if kind == "stacked":
        return jax.lax.map(lambda row: _looked_up(*row), (cache, new, start, count))

    def page(held_by: tuple[Array, Array]) -> Array:
        held, (m, first) = held_by
        rows = jnp.where(m >= 0, count[m], 0)
        return _looked_up(held, new[m], start[m] - first, rows)

    return jax.lax.map(page, (cache, owners))


def _looked_up(cache: Array, new: Array, start: Array, count: Array) -> Array:
    """[K, rows, ...] with new [t, K, ...] at start, start + 1, ..."""
    row = jnp.arange(cache.shape[1], dtype=jnp.int32) - start
    here = ((row >= 0) & (row < count)).reshape(1, -1, *[1] * (cache.ndim - 2))
    fresh = jnp.swapaxes(new[jnp.clip(row, 0, new.shape[0] - 1)], 0, 1)
    return jnp.where(here, fresh, cache)
