"""Kernels under `jax.vmap`, under `jax.jit` with sharded inputs, and outside of jit.

`vmap` of attention folds the mapped axis into one that the kernel has already, so that one launch
still serves everything and the schedule stays what was tuned: into the batch in general; into the
query heads of a group where only q is mapped, so that keys and values are neither copied nor read
twice. The cache operations have a batch of their own (sequences); vmap runs them one by one. The
merge of the results of several devices takes batches as more sequences.

Each operation is a function of the chosen kernel, the problem and the inputs, of which the first
two are static.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_attn._call import axes, config, device
from pallas_attn._call.axes import CacheProblem
from pallas_attn._call.kernel import Chosen, Inputs, Problem, Results
from pallas_attn._call.problem import (
    OPTIONAL,
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
    ListedResiduals,
    QuantizeInputs,
    QuantizeProblem,
)
from pallas_attn._mesh import sharding
from pallas_attn.errors import Limit, UnsupportedError

Array = jax.Array
Named = dict[str, Array]
Operands = Any  # the inputs of attention, or a tuple of them and of other arrays
Operation = Callable[..., Results]  # one of the functions below that take a kernel


def compiled_once(
    operation: Operation, chosen: Chosen, problem: Problem, inputs: Inputs
) -> Results:
    """`operation(chosen, problem, inputs)`, one of the functions below, as an inner `jax.jit` whose
    key is all that decides the launches: so a program traces, lowers and compiles a kernel once,
    however often it calls it.
    """
    if config.observer.get() is not None:  # no key has what it forces or watches
        return operation(chosen, problem, inputs)
    return _program(*_keyed(operation, chosen, problem, inputs))


def traced_once(
    operation: Operation, chosen: Chosen, problem: Problem, inputs: Inputs
) -> jax.extend.core.ClosedJaxpr:
    """The jaxpr of `compiled_once`, which jax keeps under the same key."""
    if config.observer.get() is not None:
        return jax.make_jaxpr(functools.partial(operation, chosen, problem))(inputs)
    return _called.trace(_program, *_keyed(operation, chosen, problem, inputs)).jaxpr


class _Key(NamedTuple):
    """The static part of a call."""

    operation: Operation
    chosen: Chosen
    problem: Problem
    tree: jax.tree_util.PyTreeDef  # structure of the inputs
    ints: tuple[int | None, ...]  # leaves of the inputs that are static, None for arrays
    overlaps: bool  # `device.overlapping` holds
    tuned: Any  # `config.tuned`


def _keyed(
    operation: Operation, chosen: Chosen, problem: Problem, inputs: Inputs
) -> tuple[_Key, list[Array]]:
    """The key of a call, and its arrays."""
    leaves, tree = jax.tree.flatten(inputs)
    ints = tuple([leaf if isinstance(leaf, int) else None for leaf in leaves])
    arrays = [leaf for leaf in leaves if not isinstance(leaf, int)]
    settings = device.asked_to_overlap.get(), config.tuned.get()
    return _Key(operation, chosen, problem, tree, ints, *settings), arrays


_called = jax.jit(operator.call, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=0)
def _program(key: _Key, arrays: list[Array]) -> Results:
    rest = iter(arrays)
    leaves = [next(rest) if leaf is None else leaf for leaf in key.ints]
    return key.operation(key.chosen, key.problem, jax.tree.unflatten(key.tree, leaves))


def by_xla(call: Callable[..., Results], inputs: Inputs, problem: Problem) -> Results:
    """`call(inputs, problem)` by operations of XLA, which jax may differentiate. Explicit mesh axes
    split the results as they would those of a kernel.
    """

    def run(inputs: Inputs) -> Results:
        return call(inputs, problem)

    arrays, flat, made = sharding.on_arrays(run, inputs)
    if sharding.explicit_mesh(arrays) is None:
        return run(inputs)
    results = sharding.by_xla(flat, arrays, axes.of(problem, inputs))
    return jax.tree.unflatten(made[-1], results)


# ---- attention -----------------------------------------------------------------------------------

FLOATS = ("q", "k", "v", "bias", "sinks")  # inputs that have gradients
RESULTS = ("out", "lse")
# Results with a row for each batch row. The others are sums over the batch.
_BY_ROWS = frozenset(("q", "k", "v", *RESULTS, "out_dot", "lse_dot"))


def attention(
    chosen: Chosen,
    problem: AttentionProblem,
    operands: Operands,
    others: tuple[str, ...] = (),
    results: tuple[str, ...] = RESULTS,
) -> tuple[Array, ...]:
    """`chosen.run(operands, problem)` -> `results`, for any batching and sharding of the operands:
    the inputs, or a tuple of the inputs and of the arrays that `others` names.
    """
    leaves, tree = jax.tree.flatten(operands)
    shapes = tuple([leaf.shape for leaf in leaves])
    split = axes.of_attention(problem, tree, shapes, others, results)

    def run(*arrays: Array) -> tuple[Array, ...]:
        local, sizes = jax.tree.unflatten(tree, arrays[: len(leaves)]), problem
        inputs, *rest = local if others else (local,)
        if len(arrays) > len(leaves):
            inputs, sizes = _from_row(problem, inputs, arrays[-1])
        made = chosen.run((inputs, *rest) if others else inputs, resized(sizes, inputs))
        if isinstance(made, AttentionInputs):
            gradients = made.named()
            made = [gradients[name] for name in results]
        return tuple(made)

    @custom_vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return sharding.over_devices(run, arrays, split)

    @call.def_vmap
    def rule(size: int, batched: list[bool], *arrays: Array) -> Any:
        def again(operands: Operands) -> tuple[Array, ...]:
            sizes = resized(problem, operands[0] if others else operands)
            return attention(chosen, sizes, operands, others, results)

        names = (operands[0] if others else operands).named()
        named = dict(zip((*names, *others), arrays, strict=True))
        mapped = _mapped(named, batched)
        if not others and size and _folds_into_heads(problem, named, mapped):
            made = _fold_into_heads(again, problem, jax.tree.unflatten(tree, arrays), size)
        else:
            # Kernels take one sink a head; a function of positions may read batch numbers.
            apart = any("_aux" in name or name == "sinks" for name in mapped)
            apart |= problem.uses_batch or not _BY_ROWS.issuperset(results)
            batch = None if apart else problem.batch
            made = _of_many(again, tree, named, mapped, size, batch)
        return made, (True,) * len(made)

    return tuple(call(*leaves))


def _mapped(arrays: Named, batched: Sequence[bool]) -> list[str]:
    """The names of the arrays that vmap maps."""
    return [name for name, is_mapped in zip(arrays, batched, strict=True) if is_mapped]


def _of_many(
    call: Callable[[Operands], tuple[Array, ...]],
    tree: jax.tree_util.PyTreeDef,
    arrays: Named,
    mapped: list[str],
    size: int,
    batch: int | None,
) -> tuple[Array, ...]:
    """`call` of the tree of `arrays`, of which the `mapped` ones have an axis of `size` in front:
    at once, folded into a batch of `batch` rows, or one after another, without it.
    """
    if batch is not None and size and not _is_split(arrays, mapped):
        folded = _folded(arrays, mapped, size, batch).values()
        made = call(jax.tree.unflatten(tree, folded))
        return tuple([x.reshape(size, -1, *x.shape[1:]) for x in made])
    return sharding.one_after_another(
        lambda some: call(jax.tree.unflatten(tree, (arrays | some).values())),
        {name: arrays[name] for name in mapped},
    )


def _is_split(arrays: Named, mapped: list[str]) -> bool:
    """Whether the types of the arrays split another axis than the mapped one over devices (explicit
    mesh axes), which a reshape cannot fold another axis into.
    """
    specs = {name: jax.typeof(x).sharding.spec for name, x in arrays.items()}
    return any(axis is not None for name, spec in specs.items() for axis in spec[name in mapped :])


def resized(problem: AttentionProblem, inputs: AttentionInputs) -> AttentionProblem:
    """The same problem at the sizes of `inputs`, and with those of its optional arrays that are
    there.
    """
    bias, mask = inputs.bias, inputs.mask_array
    return dataclasses.replace(
        problem,
        batch=inputs.q.shape[0],
        q_len=inputs.q.shape[1],
        kv_len=inputs.k.shape[1] * problem.fetches,
        q_heads=inputs.q.shape[2],
        kv_heads=inputs.k.shape[2],
        arrays=tuple([name for name in OPTIONAL if getattr(inputs, name) is not None]),
        bias_shape=None if bias is None else bias.shape,
        mask_shape=None if mask is None else mask.shape,
    )


def _folds_into_heads(problem: AttentionProblem, arrays: Named, mapped: list[str]) -> bool:
    """Whether q alone is mapped, and more heads of a group may have what the heads have."""
    differs_by_head = problem.bias_shape or problem.mask_shape or problem.uses_head
    if mapped != ["q"] or differs_by_head or problem.uses_batch or problem.out_dtype:
        return False
    split = jax.typeof(arrays["q"]).sharding.spec[:1] != (None,)  # by explicit mesh axes
    return not split and not _is_split(arrays, mapped)


def _fold_into_heads(
    call: Callable[[Operands], tuple[Array, ...]],
    problem: AttentionProblem,
    inputs: AttentionInputs,
    size: int,
) -> tuple[Array, ...]:
    batch, q_len, kv_heads, group = problem.batch, problem.q_len, problem.kv_heads, problem.group
    q = inputs.q.reshape(size, batch, q_len, kv_heads, group, problem.head_dim)
    q = jnp.moveaxis(q, 0, 3).reshape(batch, q_len, size * problem.q_heads, problem.head_dim)
    sinks = inputs.sinks
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, 1, group)
        sinks = jnp.broadcast_to(sinks, (kv_heads, size, group)).reshape(-1)
    out, lse = call(inputs._replace(q=q, sinks=sinks))
    out = out.reshape(batch, q_len, kv_heads, size, group, problem.v_head_dim)
    lse = lse.reshape(batch, kv_heads, size, group, q_len)
    return (
        jnp.moveaxis(out, 3, 0).reshape(size, batch, q_len, problem.q_heads, -1),
        jnp.moveaxis(lse, 2, 0).reshape(size, batch, problem.q_heads, q_len),
    )


def _folded(arrays: Named, mapped: list[str], size: int, batch: int) -> Named:
    """The mapped axis made a part of the batch axis, in every array that has one."""
    broadcasts = ("bias", "bias_dot", "mask_array")  # their batch axis may be of 1

    def fold(name: str, x: Array) -> Array:
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


def _from_row(
    problem: AttentionProblem, inputs: AttentionInputs, first: Array
) -> tuple[AttentionInputs, AttentionProblem]:
    """Inputs and problem of one device, where query rows are split over devices. `first`: the index
    of its first row in the whole array. The problem keeps its sizes.
    """
    rows, offset = inputs.q.shape[1], inputs.q_offset
    if inputs.q_lengths is not None:
        inputs = inputs._replace(q_lengths=jnp.clip(inputs.q_lengths - first, 0, rows))
    if inputs.q_positions is not None:  # split as the rows are
        return inputs, problem
    if offset is None:
        firsts = range(0, problem.q_len, rows)
        known = tuple((problem.q_offset + n,) for n in firsts)
        problem = dataclasses.replace(problem, q_offset=0, offsets=known)
        offset = jnp.full((inputs.q.shape[0],), known[0][0], jnp.int32)
    return inputs._replace(q_offset=offset + first), problem


def attention_backward(
    chosen: Chosen, problem: AttentionProblem, residuals: tuple[Any, ...]
) -> Named:
    """`chosen.run((inputs, out, lse, d_out, d_lse), problem)` -> the gradients of inputs by name,
    for any batching and sharding.
    """
    named = residuals[0].named()
    floats = [name for name in FLOATS if name in named]
    floats += [f"score_aux{n}" for n in problem.learned]
    gradients = attention(chosen, problem, residuals, axes.ROWS, tuple(floats))
    each = zip(floats, gradients, strict=True)
    return {name: sharding.gradient_of(named[name], x) for name, x in each}


def attention_tangents(
    chosen: Chosen, problem: AttentionProblem, residuals: tuple[Any, ...]
) -> tuple[Array, ...]:
    """`chosen.run(residuals, problem)`, for any batching and sharding: (inputs, out, lse, tangents)
    -> the tangents of out and lse, or (inputs, tangents) -> out, lse and their tangents.
    `tangents`: a dict by the names in `AttentionProblem.tangents`.
    """
    known, made = (RESULTS, ()) if len(residuals) > 2 else ((), RESULTS)
    others = (*known, *[f"{name}_dot" for name in problem.tangents])
    return attention(chosen, problem, residuals, others, (*made, "out_dot", "lse_dot"))


# ---- rounding q, k and v -------------------------------------------------------------------------


def quantize(chosen: Chosen, problem: QuantizeProblem, inputs: QuantizeInputs) -> tuple[Array, ...]:
    """`chosen.run(inputs, problem)` -> numbers and scales of q, k and v, for any batching and
    sharding.
    """
    leaves, tree = jax.tree.flatten(inputs)
    split = axes.of_quantize(problem, tree, tuple([leaf.shape for leaf in leaves]))

    def run(*arrays: Array) -> tuple[Array, ...]:
        local: QuantizeInputs = jax.tree.unflatten(tree, arrays)
        batch, heads = local.q.shape[0], (local.q.shape[2], local.k.shape[2])
        sizes = dict(zip(("batch", "q_heads", "kv_heads"), (batch, *heads), strict=True))
        return chosen.run(local, dataclasses.replace(problem, **sizes))

    @custom_vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return sharding.over_devices(run, arrays, split)

    @call.def_vmap
    def rule(size: int, batched: list[bool], *arrays: Array) -> Any:
        named = {str(n): x for n, x in enumerate(arrays)}
        again = functools.partial(quantize, chosen, problem)
        results = _of_many(again, tree, named, _mapped(named, batched), size, problem.batch)
        return results, (True,) * len(results)

    return call(*leaves)


# ---- operations over caches ----------------------------------------------------------------------


def append(chosen: Chosen, problem: AppendProblem, inputs: AppendInputs) -> Caches:
    """`chosen.run(inputs, problem)` -> the caches, for any batching and sharding."""
    caches = Caches(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale)
    results = _over_caches(chosen, problem, inputs, axes.of_append)
    return jax.tree.unflatten(jax.tree.structure(caches), results)


def keep(chosen: Chosen, problem: KeepProblem, inputs: KeepInputs) -> Kept:
    """`chosen.run(inputs, problem)` -> caches and rows, for any batching and sharding."""
    caches = Caches(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale)
    *moved, rows = _over_caches(chosen, problem, inputs, axes.of_keep)
    return Kept(jax.tree.unflatten(jax.tree.structure(caches), moved), rows)


def decode(chosen: Chosen, problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Array, Array]:
    """`chosen.run(inputs, problem)` -> (out, lse), for any batching and sharding."""
    out, lse = _over_caches(chosen, problem, inputs, axes.of_decode)
    return out, lse


def listed_gradients(
    chosen: Chosen, problem: DecodeProblem, residuals: ListedResiduals
) -> tuple[Array, ...]:
    """`chosen.run(residuals, problem)` -> dq, dk and dv of listed rows, whole on each device."""

    def run(*arrays: Array) -> tuple[Array, ...]:
        return tuple(chosen.run(ListedResiduals(*arrays), problem))

    @custom_vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return sharding.over_devices(run, arrays, axes.OF_LISTED_GRADIENTS)

    @call.def_vmap
    def rule(size: int, batched: list[bool], *arrays: Array) -> Any:
        del size
        return _of_each(call, batched, arrays)

    return call(*residuals)


def _of_each(
    call: Callable[..., tuple[Array, ...]], batched: list[bool], arrays: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    """The rule for vmap of a call: one after another."""
    mapped = {n: x for n, x in enumerate(arrays) if batched[n]}
    results = sharding.one_after_another(
        lambda some: call(*[some.get(n, x) for n, x in enumerate(arrays)]), mapped
    )
    return results, (True,) * len(results)


def _over_caches(
    chosen: Chosen,
    problem: CacheProblem,
    inputs: AppendInputs | KeepInputs | DecodeInputs,
    axes_of: Callable[..., sharding.Split],
) -> tuple[Array, ...]:
    """The arrays of the results. A static layer, an int among the leaves, stays what it is."""
    leaves, tree = jax.tree.flatten(inputs)
    shapes = tuple([None if isinstance(leaf, int) else leaf.shape for leaf in leaves])
    split = axes_of(problem, tree, shapes)

    def run(*arrays: Array) -> tuple[Array, ...]:
        rest = iter(arrays)
        full = [leaf if isinstance(leaf, int) else next(rest) for leaf in leaves]
        local = axes.local_problem(problem, split, tuple([array.shape for array in arrays]))
        return tuple(jax.tree.leaves(chosen.run(jax.tree.unflatten(tree, full), local)))

    @custom_vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return sharding.over_devices(run, arrays, split)

    @call.def_vmap
    def rule(size: int, batched: list[bool], *arrays: Array) -> Any:
        del size
        return _of_each(call, batched, arrays)

    refuse = underived(problem, _NO_DERIVATIVE)
    return call(*refuse(*[leaf for leaf in leaves if not isinstance(leaf, int)]))


_NO_DERIVATIVE = Limit("kernels over caches have no derivative", 'pass implementation="reference"')


@functools.lru_cache(maxsize=1024)
def underived(problem: AttentionProblem | CacheProblem, limit: Limit) -> Callable[..., Any]:
    """The arrays as they are, and an error where somebody takes a derivative. Around the arrays,
    not around the call: jax cannot take references out of a custom_jvp.
    """

    @jax.custom_jvp
    def underived(*arrays: Array) -> tuple[Array, ...]:
        return arrays

    @underived.defjvp
    def no_derivative(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> Any:
        del primals, tangents
        raise UnsupportedError(f"{problem.op} is differentiated: {problem}", {problem.op: limit})

    return underived


def merged(run: Callable[..., Any], problem: Any, out: Array, lse: Array) -> tuple[Array, Array]:
    """`run(out, lse, problem)` of out [M, t, N, Hv] and lse [M, N, t] within jax.shard_map: (out,
    lse), which jax takes to be the same on all devices.
    """

    @custom_vmap
    def call(out: Array, lse: Array) -> tuple[Array, ...]:
        return sharding.sealed(functools.partial(run, problem=problem), out, lse)

    @call.def_vmap
    def rule(size: int, batched: list[bool], *part: Array) -> Any:
        part = tuple(
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(part, batched, strict=True)
        )
        more = dataclasses.replace(problem, sequences=size * problem.sequences)
        results = merged(run, more, *(x.reshape(-1, *x.shape[2:]) for x in part))
        shaped = tuple(x.reshape(like.shape) for x, like in zip(results, part, strict=True))
        return shaped, (True, True)

    out, lse = call(out, lse)
    return out, lse
