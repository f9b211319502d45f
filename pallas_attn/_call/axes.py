"""The axes of the arrays of each operation, by factors, and which factors split over devices.

A factor is a letter: arrays that have it in common have axes of one size. Everything here follows
from the problem and the shapes of the inputs, and is kept.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from pallas_attn._call.kernel import Inputs, Problem
from pallas_attn._call.problem import (
    AppendInputs,
    AppendProblem,
    AttentionProblem,
    Caches,
    DecodeInputs,
    DecodeProblem,
    KeepInputs,
    KeepProblem,
    QuantizeInputs,
    QuantizeProblem,
)
from pallas_attn._mesh.sharding import Axes, Split, factor_sizes

CacheProblem = AppendProblem | KeepProblem | DecodeProblem
CacheInputs = AppendInputs | KeepInputs | DecodeInputs
Shapes = tuple[Any, ...]  # shapes of the leaves; None: a static int


def _inputs_of(tree: PyTreeDef, shapes: Shapes) -> Any:
    """Inputs whose arrays are shapes alone."""
    leaves = [0 if shape is None else jax.ShapeDtypeStruct(shape, bool) for shape in shapes]
    return jax.tree.unflatten(tree, leaves)


def _query_heads(problem: AttentionProblem | QuantizeProblem | DecodeProblem) -> str:
    """The axis of query heads."""
    if problem.kv_heads == 1:
        return "g"  # every query head reads the one kv head: they split freely
    return "k" if problem.q_heads == problem.kv_heads else "k g"


def _free_heads(problem: AttentionProblem | QuantizeProblem | CacheProblem) -> tuple[str, ...]:
    return ("k", "g") if problem.kv_heads == 1 else ("k",)


# ---- attention -----------------------------------------------------------------------------------

ROWS = ("out", "lse", "d_out", "d_lse")  # arrays that a backward pass has beside the inputs


@functools.lru_cache(maxsize=1024)
def of_attention(
    problem: AttentionProblem,
    tree: PyTreeDef,
    shapes: Shapes,
    others: tuple[str, ...] = (),
    results: tuple[str, ...] = ROWS[:2],
) -> Split:
    """The axes of the inputs, of the arrays that `others` names and of the results. A tangent
    ("q_dot") has the axes of what it is one of. Gradients are summed over the factors they lack.
    """
    operands = _inputs_of(tree, shapes)
    names = (*(operands[0] if others else operands).named(), *others)
    axes = _of_arrays(problem, dict(zip(names, shapes, strict=True)))
    free = _free(problem)

    def summed(name: str) -> tuple[str, ...]:
        own = {factor for axis in axes[name] for factor in axis.split()}
        return tuple(factor for factor in free if factor not in own)

    return Split(
        tuple(axes[name.removesuffix("_dot")] for name in names),
        tuple(axes[name.removesuffix("_dot")] for name in results),
        free,
        sums=tuple(summed(name) for name in results) if "q" in results else (),
        begins="t",
    )


def _of_arrays(problem: AttentionProblem, shapes: dict[str, tuple[int, ...]]) -> dict[str, Axes]:
    """The axes of all arrays of an attention call, by name."""
    heads = _query_heads(problem)
    kv_batch = "b" if problem.share == 1 else "kv_b"

    def of_bias_or_mask(name: str) -> Axes:
        if name not in shapes:
            return ()
        named = zip(shapes[name], ("b", heads, "t", "s"), range(4), strict=True)
        return tuple(f"{axis[0]}one{i}" if size == 1 else axis for size, axis, i in named)

    out, lse = ("b", "t", heads, "e"), ("b", heads, "t")
    by_batch = ("q_offset", "q_lengths", "kv_lengths", "mask_left", "mask_right")
    axes: dict[str, Axes] = {
        "q": ("b", "t", heads, "h"),
        "k": (kv_batch, "s", "k", "h"),
        "v": (kv_batch, "s", "k", "e"),
        "q_segment_ids": ("b", "t"),
        "kv_segment_ids": ("b", "s"),
        "q_positions": ("b", "t"),
        "sinks": (heads,),
        "q_scale": ("b", "q_blocks", heads),
        "k_scale": (kv_batch, "k_blocks", "k"),
        "v_scale": (kv_batch, "v_blocks", "k"),
        **dict.fromkeys(by_batch, ("b",)),
        "device": ("one",),
        "bias": of_bias_or_mask("bias"),
        "mask_array": of_bias_or_mask("mask_array"),
        **dict(zip(ROWS, (out, lse, out, lse), strict=True)),
    }
    for name, shape in shapes.items():
        if "_aux" in name:
            axes[name] = tuple(f"{name}_{axis}" for axis in range(len(shape)))
    return axes


def _free(problem: AttentionProblem) -> tuple[str, ...]:
    """The factors that split over devices. A function of positions that asks for a batch row or a
    head means those of the whole array.
    """
    functions = problem.mask_program is not None or problem.score_program is not None
    rows = () if functions or problem.scale_blocks[0] > 1 else ("t",)
    batch = rows if problem.uses_batch else ("b", *rows)
    if problem.share > 1:  # in a shard_map, where nothing else is split
        return ()
    if problem.uses_head:
        return batch
    return (*batch, *_free_heads(problem))


@functools.lru_cache(maxsize=1024)
def of_quantize(problem: QuantizeProblem, tree: PyTreeDef, shapes: Shapes) -> Split:
    """Batch rows and heads split over devices; a scale has rows of one device."""
    inputs: QuantizeInputs = _inputs_of(tree, shapes)
    heads = _query_heads(problem)
    axes: dict[str, Axes] = {
        "q": ("b", "t", heads, "h"),
        "k": ("b", "s", "k", "h"),
        "v": ("b", "s", "k", "e"),
        "q_lengths": ("b",),
        "kv_lengths": ("b",),
    }
    blocks = (("b", "q_blocks", heads), ("b", "kv_blocks", "k"), ("b", "kv_blocks", "k"))
    return Split(
        tuple([axes[name] for name, x in inputs._asdict().items() if x is not None]),
        (axes["q"], axes["k"], axes["v"], *blocks),
        ("b", *_free_heads(problem)),
    )


# ---- operations over caches ----------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def of_append(problem: AppendProblem, tree: PyTreeDef, shapes: Shapes) -> Split:
    inputs: AppendInputs = _inputs_of(tree, shapes)
    rows = ("t",) if problem.packed else ("m", "t")
    axes = _of_caches(problem, inputs) | {
        "k": [(*rows, "k", "h")],
        "v": [(*rows, "k", "e")],
        "end": [("m",)],
        "start": [("m",)],
        "owners": [("t",)],
        "positions": [("t",)],
        "cos": [("angle", "pair")],
        "sin": [("angle", "pair")],
        "norm_weight": [("column",)],
    }
    outputs = _present(inputs, axes, Caches._fields)
    ordered = _ordered(inputs, axes, shapes)
    return Split(ordered, outputs, _free_of_caches(problem), writes=_buffers(tree, shapes))


@functools.lru_cache(maxsize=1024)
def of_keep(problem: KeepProblem, tree: PyTreeDef, shapes: Shapes) -> Split:
    inputs: KeepInputs = _inputs_of(tree, shapes)
    each = inputs.counts.shape == inputs.lengths.shape
    axes = _of_caches(problem, inputs) | {
        "path": [("m", "j")],
        "counts": [("m",) if each else ("one",)],
        "holders": [("p",)],
    }
    caches = _present(inputs, axes, Caches._fields)
    ordered = _ordered(inputs, axes, shapes)
    outputs, writes = (*caches, ("m",)), _buffers(tree, shapes)
    return Split(ordered, outputs, _free_of_caches(problem), writes=writes)


@functools.lru_cache(maxsize=1024)
def of_decode(problem: DecodeProblem, tree: PyTreeDef, shapes: Shapes) -> Split:
    inputs: DecodeInputs = _inputs_of(tree, shapes)
    heads = _query_heads(problem)
    rows = ("t",) if problem.packed else ("m", "t")
    aux, score_aux = (
        [tuple(f"{name}{n}_{i}" for i in range(x.ndim)) for n, x in enumerate(arrays)]
        for name, arrays in (("aux", inputs.mask_aux), ("score_aux", inputs.score_aux))
    )
    if problem.tree and not problem.packed:
        aux = [("m", "t", "w")]  # the bits of a tree split as its sequences do
    results: list[Axes] = [(*rows, heads, "e"), (*rows[:-1], heads, "t")]
    if problem.merged is not None:
        results = [("im", "it", heads, "e"), ("im", heads, "it")]
    axes = _of_caches(problem, inputs) | {
        "q": [(*rows, heads, "h")],
        "sinks": [(heads,)],
        "starts": [("s",)],
        "mask_left": [()],
        "mask_right": [()],
        "mask_aux": aux,
        "score_aux": score_aux,
        "rows": [("r",)],
        "into": [*results, *[("level", "ir")] * 2],
        "kv_indices": [(*rows, "n")],
    }
    return Split(_ordered(inputs, axes, shapes), tuple(results), _free_of_caches(problem))


OF_LISTED_GRADIENTS = Split(
    inputs=(
        *(("r", "n", "h"), ("s", "h"), ("s", "e"), ("r", "i")),
        *(("r", "n", "e"), ("r", "n"), ("r", "n", "e"), ("r", "n")),
    ),
    outputs=(("r", "n", "h"), ("s", "h"), ("s", "e")),
    free=(),
)


_OF: dict[type, Callable[..., Split]] = {
    AttentionProblem: of_attention,
    QuantizeProblem: of_quantize,
    AppendProblem: of_append,
    KeepProblem: of_keep,
    DecodeProblem: of_decode,
}


def of(problem: Problem, inputs: Inputs) -> Split:
    """The axes of the forward call of any problem."""
    leaves, tree = jax.tree.flatten(inputs)
    shapes = tuple([None if isinstance(leaf, int) else leaf.shape for leaf in leaves])
    return _OF[type(problem)](problem, tree, shapes)


def _of_caches(problem: CacheProblem, inputs: CacheInputs) -> dict[str, list[Axes]]:
    """The axes of the arrays that a cache has, by the names of their fields."""
    layer = () if problem.layers is None else ("l",)
    rows = ("m", "k", "c") if problem.kind == "stacked" else ("p", "k", "z")
    axes: dict[str, list[Axes]] = {
        "lengths": [("m",)],
        "new_lengths": [("m",)],
        "page_table": [("m", "w")],
        "layer": [()],
    }
    if problem.kind == "interleaved":
        return axes | {"k_cache": [(*layer, "p", "z", "k", "columns")]}
    for name, dim in zip(Caches._fields, (("h",), ("e",), (), ()), strict=True):
        axes[name] = [(*layer, *rows, *dim)]
        if problem.kind == "per_sequence":
            count = len(getattr(inputs, name) or ())
            axes[name] = [(*layer, "k", f"c{n}", *dim) for n in range(count)]
    return axes


def _present(
    inputs: CacheInputs, axes: dict[str, list[Axes]], names: Sequence[str]
) -> tuple[Axes, ...]:
    """The axes of the fields of these names that are there."""
    there = [name for name in names if getattr(inputs, name) is not None]
    return tuple(each for name in there for each in axes[name])


def _buffers(tree: PyTreeDef, shapes: Shapes) -> tuple[int, ...]:
    """The numbers of the cache's buffers among the leaves that are arrays."""
    numbers = itertools.count()
    leaves = [None if shape is None else next(numbers) for shape in shapes]
    numbered = jax.tree.unflatten(tree, leaves)
    return tuple(jax.tree.leaves([getattr(numbered, name) for name in Caches._fields]))


def _ordered(inputs: CacheInputs, axes: dict[str, list[Axes]], shapes: Shapes) -> tuple[Axes, ...]:
    """The axes of all leaves that are arrays."""
    every = _present(inputs, axes, inputs._fields)
    return tuple(each for each, shape in zip(every, shapes, strict=True) if shape is not None)


def _free_of_caches(problem: CacheProblem) -> tuple[str, ...]:
    """The factors that split over devices; as for attention, not those that a function asks for.
    The bits of a tree are split as its sequences are.
    """
    sequences, heads = problem.kind == "stacked" and not problem.packed, True
    if isinstance(problem, DecodeProblem):
        sequences = sequences and (problem.tree or not problem.uses_batch)
        heads = not problem.uses_head
    return ("m",) * sequences + _free_heads(problem) * heads


@functools.lru_cache(maxsize=1024)
def local_problem(problem: CacheProblem, split: Split, shapes: Shapes) -> CacheProblem:
    """The problem of the sequences and heads that a device has."""
    sizes = factor_sizes(split.inputs, shapes)
    sequences, heads = sizes.get("m", problem.sequences), sizes["k"]
    if isinstance(problem, DecodeProblem):
        q_heads = sizes.get("g", 1) * heads
        problem = dataclasses.replace(problem, q_heads=q_heads)
    capacities = problem.capacities[:sequences]  # equal, where sequences are split
    return dataclasses.replace(problem, sequences=sequences, capacities=capacities, kv_heads=heads)
