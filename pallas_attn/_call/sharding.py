"""Kernels under plain `jax.jit` with sharded inputs: which axes split without communication.

XLA cannot look into a kernel, so without help it would gather every operand on every device. Each
operation names the axes of its arrays by factors (`b`, `k`, `t`, ...); the factors in `free` may
be split over devices, every device then runs the same kernel on its own part; all others are whole
on every device. Inside `jax.shard_map` and on one device none of this leaves a trace.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]  # a factor an axis; ("k g") is an axis made of two, the major one first


def over_devices(
    run: Callable[..., tuple[jax.Array, ...]],
    arrays: Sequence[jax.Array],
    inputs: Sequence[Axes],
    outputs: Sequence[Axes],
    free: Sequence[str],
    sums: Sequence[Sequence[str]] = (),
    begins: str | None = None,
    writes: int = 0,
) -> tuple[jax.Array, ...]:
    """`run(*arrays)`, split over devices along the free factors where the arrays are.

    `run` must take its sizes from the arrays it is handed. `sums`: factors, for each output, that
    it is a sum over; what the devices have of it is added up along those that are split. `begins`:
    a free factor; where it is split, `run` is handed the number of its first element as well.
    `writes`: how many of the results are arrays that `run` holds as refs and writes into; a result
    after those follows from the arrays after as many alone.
    """
    run, types = _as_now(run), [jax.typeof(array) for array in arrays]
    mesh = _explicit_mesh(types)
    varying = frozenset().union(*(varying_axes(array) for array in arrays))
    if varying or _is_manual():  # inside jax.shard_map: the arrays are this device's part already
        # Pallas takes no refs that differ along mesh axes, so it is not to see that these do.
        results = _sealed.bind(*arrays, run=run) if writes else run(*arrays)
        rest = varying
        if writes:
            rest = frozenset().union(*(varying_axes(array) for array in arrays[writes:]))
        return tuple(
            varying_along(result, varying if n < writes else rest)
            for n, result in enumerate(results)
        )
    sums = sums or [()] * len(outputs)
    if mesh is not None:
        # Explicit mesh axes: the shardings are part of the types, so the split is known already.
        places = _places(mesh, types, inputs, free)
        ins, outs = (tuple(_spec(axes, places) for axes in many) for many in (inputs, outputs))
        parts = [
            jax.sharding.reshard(array, NamedSharding(mesh, spec))
            for array, spec in zip(arrays, ins, strict=True)
        ]
        local = functools.partial(_local, run, sums, places, _axis_of(begins, inputs))
        specs: dict[str, Any] = {"in_specs": ins, "out_specs": outs}
        return jax.shard_map(local, mesh=mesh, **specs, check_vma=False)(*parts)
    run = jax.jit(run)  # which keeps the constants that it makes inside of it
    call = custom_partitioning(run)
    sealed = functools.partial(_sealed.bind, run=run)

    def partition(mesh: Any, shapes: Any, results: Any) -> Any:
        del results
        if mesh.empty:  # `jax.set_mesh` alone says where: jax gives no names, so nothing is split
            devices = sorted(shapes[0].sharding.device_set, key=lambda device: device.id)
            mesh, places = Mesh(np.array(devices), ("device",)), {}
        else:
            places = _places(mesh, shapes, inputs, free)
        ins, outs = (
            tuple(NamedSharding(mesh, _spec(axes, places)) for axes in many)
            for many in (inputs, outputs)
        )
        local = functools.partial(_local, sealed, sums, places, _axis_of(begins, inputs))
        return mesh, local, outs, ins

    sizes = _factor_sizes(arrays, inputs)
    every = [axis for axes in (*inputs, *outputs) for axis in axes]
    used = dict.fromkeys(factor for axis in every for factor in axis.split())
    whole = tuple(factor for factor in used if factor not in free)
    within = [factor for factor in used if factor not in every]  # only ever a part of an axis
    call.def_partition(
        partition,
        sharding_rule=_rule(inputs, outputs),
        need_replication_factors=whole,
        **{factor: sizes[factor] for factor in within},
    )
    with jax.disable_jit(False):  # or the constants would show
        return call(*arrays)


def _is_manual() -> bool:
    """Whether jax.shard_map maps every axis here, whether or not it keeps track of what differs."""
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    return kinds == {AxisType.Manual}


def _explicit_mesh(types: Sequence[Any]) -> Any:
    """The mesh whose explicit axes split one of the arrays, or could; None where there is none."""
    for each in types:
        if any(name is not None for name in each.sharding.spec):
            return each.sharding.mesh
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if set(mesh.axis_types) == {AxisType.Explicit} else None


# `run(*arrays)` that shows nothing of the refs in it: a kernel may hold what it writes as refs,
# which custom_partitioning does not lower by itself.
_sealed = Primitive("pallas_attn_sealed")
_sealed.multiple_results = True


def sealed(run: Callable[..., Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`run(*arrays)` within jax.shard_map, which may hold arrays as refs. Of its results jax then
    takes for granted that they are the same on all devices.
    """
    return tuple(_sealed.bind(*arrays, run=_as_now(run)))


def _as_now(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the context variables of this call (`device.overlapping`, `config.forced`), also
    where jax calls it later, to lower it.
    """
    context = contextvars.copy_context()

    @functools.wraps(run)
    def now(*arrays: jax.Array) -> Any:
        return context.copy().run(run, *arrays)

    return now


def _lower_sealed(context: Any, *arrays: Any, run: Callable[..., Any]) -> Any:
    alike = [
        jax.core.ShapedArray(x.shape, x.dtype) if x.manual_axis_type.varying else x
        for x in context.avals_in
    ]
    context = context.replace(avals_in=alike)
    with jax.enable_x64(False):
        return mlir.lower_fun(lambda *arrays: run(*arrays))(context, *arrays)


mlir.register_lowering(_sealed, _lower_sealed)


@_sealed.def_abstract_eval
def _(*arrays: Any, run: Callable[..., Any]) -> Any:
    with jax.enable_x64(False):
        results = jax.eval_shape(run, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]


def in_32_bits(run: Callable[[Any], Any], inputs: Any) -> Any:
    """`run(inputs)` of a tree of arrays and static ints, where Python's numbers have 32 bits
    whatever the application has chosen: as it is traced and, since Mosaic asks again, lowered.
    """
    if not jax.config.jax_enable_x64:
        return run(inputs)
    leaves, tree = jax.tree.flatten(inputs)
    static = [leaf if isinstance(leaf, int) else None for leaf in leaves]
    made: list[Any] = []

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        rest = iter(arrays)
        full = [next(rest) if leaf is None else leaf for leaf in static]
        results, structure = jax.tree.flatten(run(jax.tree.unflatten(tree, full)))
        made.append(structure)
        return results

    arrays = [leaf for leaf in leaves if not isinstance(leaf, int)]
    results = jax.jit(functools.partial(_sealed.bind, run=_as_now(flat)))(*arrays)
    return jax.tree.unflatten(made[-1], results)


class _Axis(NamedTuple):
    """Where a factor's size is to be seen."""

    factor: str
    array: int
    axis: int


def _axis_of(factor: str | None, inputs: Sequence[Axes]) -> _Axis | None:
    found = (n for n, axes in enumerate(inputs) if factor in axes)
    if factor is None or (array := next(found, None)) is None:
        return None
    return _Axis(factor, array, inputs[array].index(factor))


def _local(
    run: Callable[..., tuple[jax.Array, ...]],
    sums: Sequence[Sequence[str]],
    places: dict[str, tuple[str, ...]],
    begins: _Axis | None,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """One device's part of `run`, its sums added up over the devices: in float32, so that they are
    rounded once however many devices there are.
    """
    if begins is not None and (names := places.get(begins.factor)):
        size = arrays[begins.array].shape[begins.axis]
        arrays = (*arrays, jax.lax.axis_index(names) * size)
    results = []
    for result, factors in zip(run(*arrays), sums, strict=True):
        names = tuple(name for factor in factors for name in places.get(factor, ()))
        if names:
            wide = jnp.promote_types(result.dtype, jnp.float32)
            result = jax.lax.psum(result.astype(wide), names).astype(result.dtype)
        results.append(result)
    return tuple(results)


def _rule(inputs: Sequence[Axes], outputs: Sequence[Axes]) -> str:
    """The axes in the notation of Shardy: "b t (k g) h, b s k h -> b t (k g) h"."""

    def side(many: Sequence[Axes]) -> str:
        return ", ".join(
            " ".join(f"({axis})" if " " in axis else axis for axis in axes) for axes in many
        )

    return f"{side(inputs)} -> {side(outputs)}"


def _factor_sizes(arrays: Sequence[jax.Array], inputs: Sequence[Axes]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for array, axes in zip(arrays, inputs, strict=True):
        for size, axis in zip(array.shape, axes, strict=True):
            if " " not in axis:
                sizes[axis] = size
    for array, axes in zip(arrays, inputs, strict=True):
        for size, axis in zip(array.shape, axes, strict=True):
            if " " in axis:
                major, minor = axis.split()
                sizes[minor] = size // sizes[major]
    return sizes


def _places(
    mesh: Any, shapes: Sequence[Any], inputs: Sequence[Axes], free: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Which mesh axes split each free factor: the first array that is split along it decides."""
    sizes = _factor_sizes(shapes, inputs)
    places: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for shape, axes in zip(shapes, inputs, strict=True):
        spec = shape.sharding.spec
        for axis, names in zip(axes, tuple(spec) + (None,) * (len(axes) - len(spec)), strict=True):
            factor = axis.split()[0]
            names = (names,) if isinstance(names, str) else tuple(names or ())
            ways = 1
            for name in names:
                ways *= mesh.shape[name]
            fits = factor in free and sizes[factor] % ways == 0 and not taken.intersection(names)
            if names and factor not in places and fits:
                places[factor] = names
                taken.update(names)
    return places


def _spec(axes: Axes, places: dict[str, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(places.get(axis.split()[0]) for axis in axes))


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The mesh axes along which the array differs."""
    return jax.typeof(array).manual_axis_type.varying


def varying_like(array: jax.Array, *others: jax.Array) -> jax.Array:
    """The array, said to differ along the mesh axes that any of the others differs along."""
    return varying_along(array, frozenset().union(*map(varying_axes, others)))


def gradient_of(array: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient, with the type that jax wants for this array's: added up over the mesh axes
    along which the array is the same everywhere, and split as the array is.
    """
    alike = tuple(sorted(varying_axes(gradient) - varying_axes(array)))
    gradient = jax.lax.psum(gradient, alike) if alike else gradient
    sharding = jax.typeof(array).sharding
    if jax.typeof(gradient).sharding.spec == sharding.spec:
        return gradient
    return jax.sharding.reshard(gradient, NamedSharding(sharding.mesh, sharding.spec))


def one_after_another(run: Callable[[Any], Any], arrays: Any) -> Any:
    """`jax.lax.map`, also over an axis that explicit mesh axes split: it is gathered, and what
    comes of it split again.
    """
    types = [jax.typeof(array).sharding for array in jax.tree.leaves(arrays)]
    split = next((each for each in types if each.spec and each.spec[0] is not None), None)
    if split is None:
        return jax.lax.map(run, arrays)

    def along(names: Any, array: jax.Array) -> jax.Array:
        rest = jax.typeof(array).sharding.spec[1:]
        return jax.sharding.reshard(array, NamedSharding(split.mesh, PartitionSpec(names, *rest)))

    whole = jax.tree.map(functools.partial(along, None), arrays)
    return jax.tree.map(functools.partial(along, split.spec[0]), jax.lax.map(run, whole))


def varying_along(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, said to differ along these mesh axes."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
