"""What a kernel does under `jax.vmap` and under `jax.jit` with sharded inputs, in one place.

`vmap` of attention folds the mapped axis into one that the kernel has already, so that one launch
still serves everything and the schedule stays what was tuned: into the batch in general; into the
query heads of a group where only q is mapped, so that keys and values are neither copied nor read
twice. The cache operations have a batch of their own (sequences); vmap runs them one by one. What
merges the results of several devices takes batches as more sequences.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap, sequential_vmap

from pallas_attn._call import config, device, sharding
from pallas_attn._call.problem import (
    AppendInputs,
    AppendProblem,
    AttentionInputs,
    AttentionProblem,
    Caches,
    DecodeInputs,
    DecodeProblem,
    KeepInputs,
    KeepProblem,
    Kept,
    bounds_of,
)
from pallas_attn.errors import Limit, UnsupportedError

Array = jax.Array
CacheProblem = AppendProblem | KeepProblem | DecodeProblem


def kept(call: Callable[..., Any], kernel: Any, problem: Any, inputs: Any) -> Any:
    """`call(kernel, problem, inputs)`, of a function below. Where nothing is traced, outside of
    jit, by a program that is kept: each such call would trace and compile its kernel anew.
    """
    leaves, tree = jax.tree.flatten(inputs)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if traced or config.observed() or device.overlaps():  # which no key of jit's knows of
        return call(kernel, problem, inputs)
    static = tuple(leaf if isinstance(leaf, int) else None for leaf in leaves)
    arrays = [leaf for leaf in leaves if not isinstance(leaf, int)]
    return _program(call, kernel, problem, (tree, static), arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _program(
    call: Callable[..., Any], kernel: Any, problem: Any, how: Any, arrays: list[Array]
) -> Any:
    (tree, static), rest = how, iter(arrays)
    leaves = [next(rest) if leaf is None else leaf for leaf in static]
    return call(kernel, problem, jax.tree.unflatten(tree, leaves))


def attention(kernel: Any, problem: AttentionProblem, inputs: AttentionInputs):
    """`kernel.run(inputs, problem)` -> (out, lse), for any batching and sharding of the inputs."""

    held = inputs.named()
    given = list(held)

    def named(arrays: tuple[Array, ...]) -> AttentionInputs:
        return AttentionInputs.of(dict(zip(given, arrays, strict=True)))

    @custom_vmap
    def call(*arrays: Array):
        return _attention_over_devices(kernel, problem, named(arrays))

    @call.def_vmap
    def rule(axis_size: int, batched: list[bool], *arrays: Array):
        mapped = [name for name, is_mapped in zip(given, batched, strict=True) if is_mapped]
        split = jax.typeof(arrays[0]).sharding.spec[:1] != (None,)  # by explicit mesh axes
        placed = _placed(dict(zip(given, arrays, strict=True)), mapped)
        foldable = axis_size and not placed and _is_foldable(problem, mapped)
        over_scores = problem.bias_shape or problem.mask_shape or problem.uses_head
        if not foldable or "sinks" in mapped:  # a sink a head is all that the kernels know
            results = _one_by_one(kernel, problem, named(arrays), mapped)
        elif mapped == ["q"] and not (split or over_scores):
            results = _fold_into_heads(kernel, problem, named(arrays), axis_size)
        else:
            results = _fold_into_batch(kernel, problem, named(arrays), mapped, axis_size)
        return results, (True, True)

    return call(*held.values())


def _is_foldable(problem: AttentionProblem, mapped: list[str]) -> bool:
    """Whether functions of positions mean the same where the mapped axis is a part of the batch."""
    return not problem.uses_batch and not any("_aux" in name for name in mapped)


def _placed(arrays: dict[str, Array], mapped: list[str]) -> bool:
    """Whether an axis but the mapped one is split over devices by the types of the arrays (explicit
    mesh axes), which a reshape cannot fold another axis into.
    """
    specs = {name: jax.typeof(x).sharding.spec for name, x in arrays.items()}
    return any(axis is not None for name, spec in specs.items() for axis in spec[name in mapped :])


def resized(problem: AttentionProblem, inputs: AttentionInputs) -> AttentionProblem:
    """The same problem at the sizes of `inputs`, and with those of its optional arrays that are
    there.
    """
    given = inputs.named()
    return dataclasses.replace(
        problem,
        batch=inputs.q.shape[0],
        q_len=inputs.q.shape[1],
        kv_len=inputs.k.shape[1] * problem.fetches,
        q_heads=inputs.q.shape[2],
        kv_heads=inputs.k.shape[2],
        arrays=tuple(name for name in AttentionInputs._fields[3:] if name in given),
        bias_shape=None if inputs.bias is None else inputs.bias.shape,
        mask_shape=None if inputs.mask_array is None else inputs.mask_array.shape,
    )


def _fold_into_heads(kernel, problem, inputs, size: int):
    batch, q_len, kv_heads = problem.batch, problem.q_len, problem.kv_heads
    q = inputs.q.reshape(size, batch, q_len, kv_heads, problem.group, problem.head_dim)
    q = jnp.moveaxis(q, 0, 3).reshape(batch, q_len, size * problem.q_heads, problem.head_dim)
    sinks = inputs.sinks
    if sinks is not None:
        grouped = sinks.reshape(kv_heads, 1, problem.group)
        sinks = jnp.broadcast_to(grouped, (kv_heads, size, problem.group)).reshape(-1)
    folded = inputs._replace(q=q, sinks=sinks)
    out, lse = attention(kernel, resized(problem, folded), folded)
    out = out.reshape(batch, q_len, kv_heads, size, problem.group, problem.v_head_dim)
    lse = lse.reshape(batch, kv_heads, size, problem.group, q_len)
    return (
        jnp.moveaxis(out, 3, 0).reshape(size, batch, q_len, problem.q_heads, -1),
        jnp.moveaxis(lse, 2, 0).reshape(size, batch, problem.q_heads, q_len),
    )


def _fold_into_batch(kernel, problem, inputs, mapped, size: int):
    batch = problem.batch
    inputs = AttentionInputs.of(_folded(inputs.named(), mapped, size, batch))
    results = attention(kernel, resized(problem, inputs), inputs)
    return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results)


def _folded(arrays: dict[str, Any], mapped: list[str], size: int, batch: int) -> dict[str, Any]:
    """The mapped axis made a part of the batch axis, in every array that has one."""
    broadcasts = ("bias", "mask_array")  # whose batch axis may be of 1

    def fold(name: str, x: Array):
        if name == "sinks" or "_aux" in name:
            return x
        if name in mapped:
            if name in broadcasts and x.shape[1] != batch:
                x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        elif x.shape[0] == 1 and name in broadcasts:
            return x
        else:
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        return x.reshape(size * x.shape[1], *x.shape[2:])

    return {name: fold(name, x) for name, x in arrays.items()}


def _one_by_one(kernel, problem, inputs, mapped):
    held = inputs.named()

    def one(fields: dict[str, Array]):
        return attention(kernel, problem, AttentionInputs.of(held | fields))

    return sharding.one_after_another(one, {name: held[name] for name in mapped})


def _attention_axes(problem: AttentionProblem, inputs: AttentionInputs) -> dict[str, Any]:
    """Axes of the arrays of an attention call, by factors; and which of those are "free"."""
    heads = {"q": "k" if problem.group == 1 else "k g", "kv": "k"}
    if problem.kv_heads == 1:
        heads["q"] = "g"  # every query head reads the one kv head: they split freely
    score_axes = ("b", heads["q"], "t", "s")
    kv_batch = "b" if problem.share == 1 else "kv_b"

    def broadcast_axes(name: str) -> tuple[str, ...]:
        array = getattr(inputs, name)
        if array is None:
            return ()
        named = zip(array.shape, score_axes, range(4), strict=True)
        return tuple(f"{name[0]}one{i}" if size == 1 else axis for size, axis, i in named)

    return {
        "q": ("b", "t", heads["q"], "h"),
        "k": (kv_batch, "s", "k", "h"),
        "v": (kv_batch, "s", "k", "e"),
        "q_segment_ids": ("b", "t"),
        "kv_segment_ids": ("b", "s"),
        "q_positions": ("b", "t"),
        "sinks": (heads["q"],),
        **dict.fromkeys(("q_offset", "q_lengths", "kv_lengths"), ("b",)),
        **dict.fromkeys(("mask_left", "mask_right"), ("b",)),
        "device": ("one",),
        **{name: broadcast_axes(name) for name in ("bias", "mask_array")},
        **{
            name: tuple(f"{name}_{axis}" for axis in range(x.ndim))
            for name, x in inputs.named().items()
            if "_aux" in name
        },
        "out": ("b", "t", heads["q"], "e"),
        "lse": ("b", heads["q"], "t"),
    }


def _attention_over_devices(kernel, problem: AttentionProblem, inputs: AttentionInputs):
    held = inputs.named()
    given = list(held)
    axes = _attention_axes(problem, inputs)

    def run(*arrays: Array):
        local = AttentionInputs.of(dict(zip(given, arrays, strict=False)))
        return kernel.run(*_of_rows(problem, local, arrays[len(given) :]))

    return sharding.over_devices(
        run,
        list(held.values()),
        [axes[name] for name in given],
        [axes["out"], axes["lse"]],
        free=_free(problem),
        begins="t",
    )


def _of_rows(
    problem: AttentionProblem, inputs: AttentionInputs, begin: tuple[Array, ...]
) -> tuple[AttentionInputs, AttentionProblem]:
    """The arrays and the problem of a device's rows: `begin` holds the number of the first one
    where rows are split over devices, and nothing where they are not.
    """
    if not begin:
        return inputs, resized(problem, inputs)
    rows, (first,) = inputs.q.shape[1], begin
    lengths, offset = inputs.q_lengths, inputs.q_offset
    if lengths is not None:
        inputs = inputs._replace(q_lengths=jnp.clip(lengths - first, 0, rows))
    if inputs.q_positions is not None:  # which are split as the rows are
        return inputs, resized(problem, inputs)
    if offset is None:
        firsts = range(0, problem.q_len, rows)
        known = tuple((problem.q_offset + n,) for n in firsts)
        problem = dataclasses.replace(problem, q_offset=0, offsets=known)
        offset = jnp.full((inputs.q.shape[0],), known[0][0], jnp.int32)
    inputs = inputs._replace(q_offset=offset + first)
    return inputs, resized(problem, inputs)


def _free(problem: AttentionProblem) -> tuple[str, ...]:
    """The factors that split over devices. A function of positions that asks for a batch row or a
    head means those of the whole array.
    """
    functions = problem.mask_program is not None or problem.score_program is not None
    rows = () if functions else ("t",)
    batch = rows if problem.uses_batch else ("b", *rows)
    if problem.share > 1:  # in a shard_map, where nothing else is split
        return ()
    if problem.uses_head:
        return batch
    return (*batch, "k", "g") if problem.kv_heads == 1 else (*batch, "k")


RESIDUALS = ("out", "lse", "d_out", "d_lse")  # what a backward pass has beside the inputs
FLOATS = ("q", "k", "v", "bias", "sinks")  # the inputs that have gradients


def attention_backward(kernel: Any, problem: AttentionProblem, residuals: Any) -> AttentionInputs:
    """`kernel.run((inputs, out, lse, d_out, d_lse), problem)` -> the inputs' cotangents, for any
    batching and sharding. None for inputs that have none.
    """
    inputs, *rest = residuals
    arrays = inputs.named()
    arrays |= dict(zip(RESIDUALS, rest, strict=True))
    given, floats = list(arrays), [name for name in FLOATS if name in arrays]

    @custom_vmap
    def call(*values: Array):
        named = dict(zip(given, values, strict=True))
        return _backward_over_devices(kernel, problem, named, floats)

    @call.def_vmap
    def rule(axis_size: int, batched: list[bool], *values: Array):
        named = dict(zip(given, values, strict=True))
        mapped = [name for name, is_mapped in zip(given, batched, strict=True) if is_mapped]

        def run(named: dict[str, Array], problem: AttentionProblem) -> tuple[Array, ...]:
            results = attention_backward(kernel, problem, _residuals(named))
            return tuple(getattr(results, name) for name in floats)

        # the others' gradients are sums over the batch; of no rows no kernel is launched
        alone = floats != ["q", "k", "v"] or not _is_foldable(problem, mapped)
        if alone or not axis_size or _placed(named, mapped):
            results = sharding.one_after_another(
                lambda fields: run(named | fields, problem), {name: named[name] for name in mapped}
            )
        else:
            folded = _folded(named, mapped, axis_size, problem.batch)
            results = run(folded, resized(problem, _residuals(folded)[0]))
            shape = (axis_size, problem.batch)
            results = tuple(x.reshape(*shape, *x.shape[1:]) for x in results)
        return results, (True,) * len(floats)

    remedy = 'pass implementation="reference" to the forward call'
    once = _underived(problem, Limit("kernels have first derivatives only", remedy))
    gradients = {
        name: sharding.gradient_of(arrays[name], gradient)
        for name, gradient in zip(floats, call(*once(*arrays.values())), strict=True)
    }
    nothing: Any = None
    aux = (nothing,) * len(inputs.mask_aux), (nothing,) * len(inputs.score_aux)
    fields: dict[str, Any] = dict.fromkeys(("q", "k", "v")) | gradients
    return AttentionInputs(**fields, mask_aux=aux[0], score_aux=aux[1])


def _residuals(named: dict[str, Array]) -> tuple[Any, ...]:
    inputs: dict[str, Any] = {name: x for name, x in named.items() if name not in RESIDUALS}
    return AttentionInputs.of(inputs), *(named[name] for name in RESIDUALS)


def _backward_over_devices(
    kernel: Any, problem: AttentionProblem, named: dict[str, Array], floats: list[str]
):
    axes = _attention_axes(problem, _residuals(named)[0])
    axes |= {"d_out": axes["out"], "d_lse": axes["lse"]}
    free = _free(problem)

    def run(*arrays: Array):
        local, *rows = _residuals(dict(zip(named, arrays, strict=False)))
        local, sizes = _of_rows(problem, local, arrays[len(named) :])
        results = kernel.run((local, *rows), sizes)
        return tuple(getattr(results, name) for name in floats)

    def summed(name: str) -> tuple[str, ...]:
        """What a gradient is a sum over, of what may be split."""
        own = {factor for axis in axes[name] for factor in axis.split()}
        return tuple(factor for factor in free if factor not in own)

    return sharding.over_devices(
        run,
        list(named.values()),
        [axes[name] for name in named],
        [axes[name] for name in floats],
        free=free,
        sums=[summed(name) for name in floats],
        begins="t",
    )


def append(kernel: Any, problem: AppendProblem, inputs: AppendInputs):
    """`kernel.run(inputs, problem)` -> Caches, for any batching and sharding."""
    leaves, tree = jax.tree.flatten(inputs)
    held = Caches(*(getattr(inputs, name) for name in Caches._fields))

    def run(*arrays: Array):
        local = jax.tree.unflatten(tree, arrays)
        sequences = problem.sequences if problem.packed else local.k.shape[0]
        sizes = dataclasses.replace(problem, sequences=sequences, kv_heads=local.k.shape[-2])
        return tuple(jax.tree.leaves(kernel.run(local, sizes)))

    caches = _cache_axes(problem, inputs.k_cache, "h") + _cache_axes(problem, inputs.v_cache, "e")
    rows = ("t",) if problem.packed else ("m", "t")
    new = [(*rows, "k", "h"), (*rows, "k", "e")][: 1 if inputs.v is None else 2]
    scales = _cache_axes(problem, inputs.k_scale) + _cache_axes(problem, inputs.v_scale)
    state = _state_axes(inputs.new_lengths, inputs.page_table, inputs.layer)
    state[0] = rows[:1]  # of inputs.start
    owners = [("t",)] if problem.packed else []
    tables: list = [("angle", "pair")] * 2 if inputs.cos is not None else []
    tables += [("column",)] if inputs.norm_weight is not None else []
    axes = caches + new + state + scales + owners + tables
    outputs = caches + scales
    results = _cache_call(run, leaves, axes, outputs, problem, writes=len(outputs))
    return jax.tree.unflatten(jax.tree.structure(held), results)


def keep(kernel: Any, problem: KeepProblem, inputs: KeepInputs):
    """`kernel.run(inputs, problem)` -> Kept, for any batching and sharding."""
    leaves, tree = jax.tree.flatten(inputs)
    held = Caches(*(getattr(inputs, name) for name in Caches._fields))

    def run(*arrays: Array):
        local = jax.tree.unflatten(tree, arrays)
        heads = jax.tree.leaves(local.k_cache)[0].shape[-3]
        sizes = dataclasses.replace(problem, sequences=local.lengths.shape[0], kv_heads=heads)
        return tuple(jax.tree.leaves(kernel.run(local, sizes)))

    caches = _cache_axes(problem, inputs.k_cache, "h") + _cache_axes(problem, inputs.v_cache, "e")
    caches += _cache_axes(problem, inputs.k_scale) + _cache_axes(problem, inputs.v_scale)
    axes = [*caches, ("m", "j"), ("m",), ("m",)]
    axes += [("m",) if inputs.counts.shape == inputs.lengths.shape else ("one",)]
    axes += [] if inputs.page_table is None else [("m", "w"), ("p",)]
    outputs = [*caches, ("m",)]
    *moved, rows = _cache_call(run, leaves, axes, outputs, problem, writes=len(caches))
    return Kept(jax.tree.unflatten(jax.tree.structure(held), moved), rows)


def decode(kernel: Any, problem: DecodeProblem, inputs: DecodeInputs):
    """`kernel.run(inputs, problem)` -> (out, lse), for any batching and sharding."""
    leaves, tree = jax.tree.flatten(inputs)
    group = problem.q_heads // problem.kv_heads
    heads = "k" if group == 1 else "k g"

    def run(*arrays: Array):
        local = jax.tree.unflatten(tree, arrays)
        q_heads = local.q.shape[-2]
        sizes = dataclasses.replace(
            problem,
            sequences=local.lengths.shape[0],
            q_heads=q_heads,
            kv_heads=q_heads // group,
        )
        return kernel.run(local, sizes)

    rows = ("t",) if problem.packed else ("m", "t")
    axes: list[tuple[str, ...]] = [(*rows, heads, "h")]
    axes += _cache_axes(problem, inputs.k_cache, "h") + _cache_axes(problem, inputs.v_cache, "e")
    axes += _state_axes(None, inputs.page_table, inputs.layer)
    axes += [] if inputs.sinks is None else [(heads,)]
    axes += _cache_axes(problem, inputs.k_scale) + _cache_axes(problem, inputs.v_scale)
    axes += [] if inputs.new_lengths is None else [("m",)]
    axes += [] if inputs.starts is None else [("s",)]
    axes += [()] * len(bounds_of(inputs))
    whole = [tuple(f"aux{n}_{i}" for i in range(x.ndim)) for n, x in enumerate(inputs.mask_aux)]
    axes += [("m", "t", "w")] if problem.tree and not problem.packed else whole
    outputs = [(*rows, heads, "e"), (*rows[:-1], heads, "t")]
    if problem.merged is not None:
        outputs = [("im", "it", heads, "e"), ("im", heads, "it")]
        given = outputs if problem.own is None else []
        axes += [("r",), *given, ("level", "ir"), ("level", "ir")]
    if inputs.own is not None:
        axes += [("im",), ("im", "iw")]
        axes += [] if inputs.own.new_lengths is None else [("im",)]
        axes += [] if inputs.own.sinks is None else [(heads,)]
    return _cache_call(run, leaves, axes, outputs, problem)


def _cache_call(
    run: Any, leaves: list, axes: list, outputs: list, problem: CacheProblem, writes: int = 0
) -> tuple[Array, ...]:
    """`run` of the leaves that are arrays, NumPy's too; a static layer stays what it is."""
    dynamic = [n for n, leaf in enumerate(leaves) if not isinstance(leaf, int)]

    def given(*arrays: Array):
        full = list(leaves)
        for n, array in zip(dynamic, arrays, strict=True):
            full[n] = array
        return run(*full)

    @sequential_vmap
    def call(*arrays: Array):
        inputs, free = [axes[n] for n in dynamic], _free_of_caches(problem)
        return sharding.over_devices(given, arrays, inputs, outputs, free, writes=writes)

    limit = Limit("kernels over caches have no derivative", 'pass implementation="reference"')
    return call(*_underived(problem, limit)(*(leaves[n] for n in dynamic)))


def merged(run: Callable[..., Any], problem: Any, out: Array, lse: Array) -> tuple[Array, Array]:
    """`run(out, lse, problem)` of out [M, t, N, Hv] and lse [M, N, t] within jax.shard_map: (out,
    lse), which jax takes to be the same on all devices.
    """

    @custom_vmap
    def call(out: Array, lse: Array):
        return sharding.sealed(functools.partial(run, problem=problem), out, lse)

    @call.def_vmap
    def rule(axis_size: int, batched: list[bool], *part: Array):
        part = tuple(
            x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_mapped in zip(part, batched, strict=True)
        )
        more = dataclasses.replace(problem, sequences=axis_size * problem.sequences)
        found = merged(run, more, *(x.reshape(-1, *x.shape[2:]) for x in part))
        results = tuple(x.reshape(like.shape) for x, like in zip(found, part, strict=True))
        return results, (True, True)

    out, lse = call(out, lse)
    return out, lse


def _free_of_caches(problem: CacheProblem) -> tuple[str, ...]:
    """The factors that split over devices; as for attention, not those that a function asks for.
    The bits of a tree are split as its sequences are.
    """
    sequences, heads = problem.kind == "stacked" and not problem.packed, True
    if isinstance(problem, DecodeProblem):
        sequences = sequences and (problem.tree or not problem.uses_batch)
        heads = not problem.uses_head
    return ("m",) * sequences + ("k",) * heads


def _underived(problem: AttentionProblem | CacheProblem, limit: Limit) -> Any:
    """The arrays as they are, and an error where somebody takes a derivative. Around the arrays,
    not around the call: jax cannot take references out of a custom_jvp.
    """

    @jax.custom_jvp
    def underived(*arrays: Array):
        return arrays

    @underived.defjvp
    def no_derivative(primals: Any, tangents: Any):
        del primals, tangents
        raise UnsupportedError(f"{problem.op} is differentiated: {problem}", {problem.op: limit})

    return underived


def _cache_axes(problem: CacheProblem, cache: Any, *dim: str) -> list:
    """Axes of each array of a cache; without `dim`, of its scales."""
    layer = () if problem.layers is None else ("l",)
    if cache is None:
        return []
    if problem.kind == "per_sequence":
        return [(*layer, "k", f"c{n}", *dim) for n in range(len(cache))]
    rows = ("m", "k", "c") if problem.kind == "stacked" else ("p", "k", "z")
    return [(*layer, *rows, *dim)]


def _state_axes(new_lengths: Any, page_table: Any, layer: Any) -> list:
    """Axes of the small arrays, in the order of the fields."""
    axes: list = [("m",)]
    axes += [] if new_lengths is None else [("m",)]
    axes += [] if page_table is None else [("m", "w")]
    return axes + ([] if layer is None else [()])
