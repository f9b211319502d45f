"""Kernels under plain `jax.jit` with sharded inputs: which axes split without communication.

XLA cannot look into a kernel, so without help it would gather every operand on every device. Each
operation names the axes of its arrays by factors (`b`, `k`, `t`, ...); the factors in `free` may
be split over devices, every device then runs the same kernel on its own part; all others are whole
on every device. Inside `jax.shard_map` and on one device none of this leaves a trace.

Explicit mesh axes are part of the types of arrays, and jax refuses an operation whose result it
cannot place. So kernels run in a `jax.shard_map`, and what XLA computes around them runs where
these axes are automatic (`by_xla`, `on_automatic_axes`); in both the axes of the arrays say how the
results are split.
"""

import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

Axes = tuple[str, ...]  # a factor an axis; "k g" is an axis made of two, the major one first
Run = Callable[..., tuple[jax.Array, ...]]
AnyMesh = Mesh | AbstractMesh
Specs = PartitionSpec | tuple[PartitionSpec, ...]
Placed = Any  # a shape with a sharding
Lowering = Any  # mlir.LoweringRuleContext, of arrays


class Split(NamedTuple):
    """The axes of the arrays of a call by factors, and how they split over devices."""

    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    free: tuple[str, ...]  # factors that may be split
    # For each output, factors that it is a sum over: what devices have of it is added up along
    # those that are split.
    sums: tuple[tuple[str, ...], ...] = ()
    # A free factor: where it is split, the call is handed the number of its first element as well.
    begins: str | None = None
    # Numbers of the arrays that the call holds as refs and writes into. They are the first results,
    # and stay split as they are; a result after those follows from the other arrays alone.
    writes: tuple[int, ...] = ()

    def places(self, mesh: AnyMesh, arrays: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """The mesh axes that split each free factor: the first array that is split along it
        decides. Arrays that are written stay as they are split.
        """
        sizes = factor_sizes(self.inputs, [array.shape for array in arrays])
        places: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        written = {axis.split()[0] for n in self.writes for axis in self.inputs[n]}
        for number, (array, axes) in enumerate(zip(arrays, self.inputs, strict=True)):
            spec = tuple(array.sharding.spec)
            for axis, names in zip(axes, spec + (None,) * (len(axes) - len(spec)), strict=True):
                factor = axis.split()[0]
                names = _names(names)
                ways = math.prod(mesh.shape[name] for name in names)
                fits = factor in self.free and sizes[factor] % ways == 0
                fits &= number in self.writes or factor not in written
                if names and factor not in places and fits and not taken.intersection(names):
                    places[factor] = names
                    taken.update(names)
        return places

    def local(self, run: Run, places: dict[str, tuple[str, ...]]) -> Run:
        """One device's part of `run`, its sums added up over the devices: in float32, so that they
        are rounded once however many devices there are.
        """
        number = next((n for n, axes in enumerate(self.inputs) if self.begins in axes), None)
        sums = self.sums or ((),) * len(self.outputs)
        names = None if number is None or self.begins is None else places.get(self.begins)

        def part(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            more: tuple[jax.Array, ...] = ()
            if names and number is not None and self.begins is not None:
                size = arrays[number].shape[self.inputs[number].index(self.begins)]
                more = (jax.lax.axis_index(names) * size,)
            results = []
            for result, factors in zip(run(*arrays, *more), sums, strict=True):
                over = tuple(name for factor in factors for name in places.get(factor, ()))
                if over:
                    result = jax.lax.psum(result.astype(sum_dtype(result.dtype)), over).astype(
                        result.dtype
                    )
                results.append(result)
            return tuple(results)

        return part


def over_devices(run: Run, arrays: Sequence[jax.Array], split: Split) -> tuple[jax.Array, ...]:
    """`run(*arrays)`, split over devices along the free factors where the arrays are. `run` must
    take its sizes from the arrays it is handed.
    """
    run, types = as_now(run), [jax.typeof(array) for array in arrays]
    now = jax.sharding.get_abstract_mesh()
    kinds = set(now.axis_types)
    if kinds == {AxisType.Manual} or any([x.manual_axis_type.varying for x in types]):
        return _on_this_device(run, arrays, split)
    if kinds == {AxisType.Explicit} or any([any(x.sharding.spec) for x in types]):
        mesh = explicit_mesh(arrays)
        return _by_types(run, arrays, split, now if mesh is None else mesh)
    run = jax.jit(run)  # which keeps the constants that it makes inside of it
    call = custom_partitioning(run)
    rule = _rule(split, tuple([array.shape for array in arrays]))
    call.def_partition(
        functools.partial(_partition, run, split),
        sharding_rule=rule.text,
        need_replication_factors=rule.whole,
        **rule.parts,
    )
    with jax.disable_jit(False):  # or the constants would show
        return call(*arrays)


def by_xla(run: Run, arrays: Sequence[jax.Array], split: Split) -> tuple[jax.Array, ...]:
    """`run(*arrays)` of operations of XLA, whose results explicit mesh axes split as they would
    those of `over_devices`.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return run(*arrays)
    places = split.places(mesh, [jax.typeof(array) for array in arrays])
    specs = [_spec(axes, places) for axes in split.outputs]
    specs[: len(split.writes)] = [spec_of(arrays[n]) for n in split.writes]
    return on_automatic_axes(run, arrays, tuple(specs))


def by_parts(
    run: Run, arrays: Sequence[jax.Array], split: Split, *, nested: bool = False
) -> tuple[jax.Array, ...]:
    """`run(*arrays)` of anything that jax.shard_map takes, split over explicit mesh axes as by
    `over_devices`; it is differentiable. `nested`: also within a jax.shard_map over other axes,
    where jax 0.12 lowers no derivative that keeps more than arguments and results.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return run(*arrays)
    if not any([any(spec_of(x)) for x in arrays]) or (mesh.manual_axes and not nested):
        return by_xla(run, arrays, split)
    # Types are checked if an outer jax.shard_map, if there is one, checks them.
    checked = all([varying_axes(jax.lax.axis_index(name)) for name in mesh.manual_axes])
    return _by_types(run, arrays, split, mesh, check_vma=checked)


def on_automatic_axes(run: Callable[..., Any], trees: Sequence[Any], specs: Specs) -> Any:
    """`run(*trees)` where the explicit axes of the mesh that an array lies on are automatic: XLA
    decides what moves. `specs`: the PartitionSpecs of the results.
    """
    mesh = explicit_mesh(jax.tree.leaves(trees))
    if mesh is None:
        return run(*trees)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple([name for name, kind in kinds if kind == AxisType.Explicit])
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=placed)(*trees)


def spec_of(x: jax.Array) -> PartitionSpec:
    """How explicit mesh axes split an array: an entry for each of its axes."""
    return jax.typeof(x).sharding.spec


def explicit_mesh(arrays: Sequence[jax.Array]) -> AnyMesh | None:
    """The mesh with explicit axes that one of the arrays lies on, or None. They may split an axis
    that jax.vmap maps, of which types say nothing.
    """
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def placed_like[Tree](tree: Tree, like: Tree) -> Tree:
    """Arrays that explicit mesh axes split as those of `like`, a tree of the same structure."""
    mesh = explicit_mesh(jax.tree.leaves((tree, like)))
    if mesh is None:
        return tree

    def placed(x: jax.Array, like: jax.Array) -> jax.Array:
        spec = spec_of(like)
        return x if spec_of(x) == spec else jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return jax.tree.map(placed, tree, like)


def whole[Tree](tree: Tree, axes: int | None = None) -> Tree:
    """Arrays whose first `axes` axes, or all, no explicit mesh axis splits."""
    mesh = explicit_mesh(jax.tree.leaves(tree))
    if mesh is None:
        return tree

    def gathered(x: jax.Array) -> jax.Array:
        first, rest = spec_of(x)[:axes], () if axes is None else spec_of(x)[axes:]
        if not any(first):
            return x
        spec = PartitionSpec(*(None,) * len(first), *rest)
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return jax.tree.map(gathered, tree)


def reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x.reshape(shape)` of as many axes: explicit mesh axes split those that they divide."""
    mesh = explicit_mesh((x,))
    if mesh is None:
        return x.reshape(shape)
    ways = [math.prod(mesh.shape[name] for name in _names(names)) for names in spec_of(x)]
    each = zip(spec_of(x), shape, ways, strict=True)
    spec = PartitionSpec(*[None if size % n else names for names, size, n in each])
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec))


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def factor_sizes(inputs: Sequence[Axes], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The sizes of all factors."""
    axes = [
        (axis, size)
        for names, shape in zip(inputs, shapes, strict=True)
        for axis, size in zip(names, shape, strict=True)
    ]
    sizes = {axis: size for axis, size in axes if " " not in axis}
    for axis, size in axes:
        if " " in axis:
            major, minor = axis.split()
            sizes[minor] = size // sizes[major]
    return sizes


def sum_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype in which floats are added up."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _on_this_device(run: Run, arrays: Sequence[jax.Array], split: Split) -> tuple[jax.Array, ...]:
    """`run(*arrays)` inside jax.shard_map, where the arrays are this device's part already, or that
    of the devices along explicit mesh axes.
    """
    mesh = explicit_mesh(arrays)
    # Pallas takes no refs that differ along mesh axes, so it is not to see that these do.
    if split.writes or mesh is not None:
        run = functools.partial(_sealed.bind, run=run)
    results = run(*arrays) if mesh is None else _by_types(run, arrays, split, mesh)
    every = _varying_axes(arrays)
    rest = _varying_axes([x for n, x in enumerate(arrays) if n not in split.writes])
    return tuple(
        varying_along(result, every if n < len(split.writes) else rest)
        for n, result in enumerate(results)
    )


def _by_types(
    run: Run,
    arrays: Sequence[jax.Array],
    split: Split,
    mesh: AnyMesh,
    *,
    check_vma: bool = False,
) -> tuple[jax.Array, ...]:
    """`run(*arrays)` by jax.shard_map: the axes of an explicit mesh are part of the types."""
    places = split.places(mesh, [jax.typeof(array) for array in arrays])
    ins, outs = (tuple(_spec(axes, places) for axes in many) for many in split[:2])
    parts = [
        jax.sharding.reshard(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, ins, strict=True)
    ]
    specs: dict[str, Any] = {"in_specs": ins, "out_specs": outs}
    local = split.local(run, places)
    results = jax.shard_map(local, mesh=mesh, **specs, check_vma=check_vma)(*parts)
    written = placed_like(results[: len(split.writes)], tuple([arrays[n] for n in split.writes]))
    return *written, *results[len(split.writes) :]


def _partition(
    run: Run, split: Split, mesh: Mesh, shapes: Sequence[Placed], results: Sequence[Placed]
) -> Any:
    """The answer to custom_partitioning, which knows how XLA has split the arrays."""
    del results
    places: dict[str, tuple[str, ...]] = {}
    if (
        mesh.empty
    ):  # jax.set_mesh alone names the devices: jax has no names for us, nothing is split
        devices = sorted(shapes[0].sharding.device_set, key=lambda device: device.id)
        mesh = Mesh(np.array(devices), ("device",))
    else:
        places = split.places(mesh, shapes)
    ins, outs = (
        tuple(NamedSharding(mesh, _spec(axes, places)) for axes in many) for many in split[:2]
    )
    platform = mesh.devices.flat[0].platform

    def local(*arrays: jax.Array) -> Any:
        shapes = tuple([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
        return _lowered_once(run, shapes, "cuda" if platform == "gpu" else platform)(*arrays)

    return mesh, split.local(local, places), outs, ins


@functools.lru_cache(maxsize=256)
def _lowered_once(run: Run, shapes: tuple[jax.ShapeDtypeStruct, ...], platform: str) -> Run:
    """`run` on one device. XLA asks for each call of a program by itself, and what it gets would be
    lowered anew: this is lowered already.
    """

    def sealed(*arrays: jax.Array) -> list[jax.Array]:
        each = zip(arrays, shapes, strict=True)
        return _sealed.bind(*[x.reshape(like.shape) for x, like in each], run=run)

    # Not over the mesh of jax.set_mesh, over which jax also places what is a scalar.
    flat = [jax.ShapeDtypeStruct(x.shape or (1,), x.dtype) for x in shapes]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        exported = jax.export.export(jax.jit(sealed), platforms=[platform])(*flat)
    return lambda *arrays: exported.call(*[x.reshape(x.shape or (1,)) for x in arrays])


class _Rule(NamedTuple):
    """The axes as Shardy takes them."""

    text: str  # "b t (k g) h, b s k h -> b t (k g) h"
    whole: tuple[str, ...]  # factors that every device has whole
    parts: dict[str, int]  # sizes of factors that are only ever a part of an axis


@functools.lru_cache(maxsize=1024)
def _rule(split: Split, shapes: tuple[tuple[int, ...], ...]) -> _Rule:
    def side(many: Sequence[Axes]) -> str:
        return ", ".join(
            " ".join(f"({axis})" if " " in axis else axis for axis in axes) for axes in many
        )

    every = [axis for axes in (*split.inputs, *split.outputs) for axis in axes]
    factors = dict.fromkeys(factor for axis in every for factor in axis.split())
    sizes = factor_sizes(split.inputs, shapes)
    return _Rule(
        f"{side(split.inputs)} -> {side(split.outputs)}",
        tuple(factor for factor in factors if factor not in split.free),
        {factor: sizes[factor] for factor in factors if factor not in every},
    )


def _spec(axes: Axes, places: dict[str, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(places.get(axis.split()[0]) for axis in axes))


# `run(*arrays)` that hides its refs: a kernel may hold arrays that it writes as refs, which
# custom_partitioning does not lower by itself.
_sealed = Primitive("pallas_attn_sealed")
_sealed.multiple_results = True


def sealed(run: Callable[..., Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`run(*arrays)` within jax.shard_map, which may hold arrays as refs. Its results are taken to
    be the same on all devices.
    """
    return tuple(_sealed.bind(*arrays, run=as_now(run)))


def as_now(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the context variables of this call (`device.overlapping`, `config.forced`), also
    where jax calls it later, to lower it.
    """
    context = contextvars.copy_context()

    @functools.wraps(run)
    def now(*arrays: jax.Array) -> Any:
        return context.copy().run(run, *arrays)

    return now


def _lower_sealed(context: Lowering, *arrays: jax.Array, run: Callable[..., Any]) -> Any:
    alike = [
        jax.core.ShapedArray(x.shape, x.dtype) if x.manual_axis_type.varying else x
        for x in context.avals_in
    ]
    context = context.replace(avals_in=alike)
    with jax.enable_x64(False):
        return mlir.lower_fun(lambda *arrays: run(*arrays))(context, *arrays)


mlir.register_lowering(_sealed, _lower_sealed)


@_sealed.def_abstract_eval
def _(*arrays: jax.Array, run: Callable[..., Any]) -> Any:
    with jax.enable_x64(False):
        results = jax.eval_shape(run, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]


def in_32_bits[Inputs](run: Callable[[Inputs], Any], inputs: Inputs) -> Any:
    """`run(inputs)`, of a tree of arrays and static ints, with Python's numbers in 32 bits although
    the application has chosen 64: as it is traced and, since Mosaic asks again, lowered.
    """
    arrays, flat, made = on_arrays(run, inputs)
    results = jax.jit(functools.partial(_sealed.bind, run=as_now(flat)))(*arrays)
    return jax.tree.unflatten(made[-1], results)


def on_arrays[Inputs](
    run: Callable[[Inputs], Any], inputs: Inputs
) -> tuple[list[jax.Array], Run, list[Any]]:
    """The arrays of a tree of arrays and static ints; `run(inputs)` as a function of them, which
    returns the leaves of its results; and a list, at whose end it leaves their structure.
    """
    leaves, tree = jax.tree.flatten(inputs)
    static = [leaf if isinstance(leaf, int) else None for leaf in leaves]  # keeps no array
    made: list[Any] = []

    def flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        rest = iter(arrays)
        full = [next(rest) if leaf is None else leaf for leaf in static]
        results, structure = jax.tree.flatten(run(jax.tree.unflatten(tree, full)))
        made.append(structure)
        return tuple(results)

    return [leaf for leaf in leaves if not isinstance(leaf, int)], flat, made


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The mesh axes along which the array differs."""
    return jax.typeof(array).manual_axis_type.varying


def _varying_axes(arrays: Sequence[jax.Array]) -> frozenset[str]:
    return frozenset().union(*[jax.typeof(array).manual_axis_type.varying for array in arrays])


def check_split(axis: str, name: str, arrays: jax.Array | tuple[jax.Array, ...], how: str) -> None:
    """ValueError for arrays that are the same on all devices of a mesh axis, where each should have
    rows of its own. Where `shard_map` does not check types (`check_vma=False`) nothing is known.
    """
    if axis not in varying_axes(jax.lax.axis_index(axis)):
        return
    for x in jax.tree.leaves(arrays):
        if axis not in varying_axes(x):
            raise ValueError(
                f"{name}: expected the rows of this device, since context splits them over mesh "
                f"axis {axis!r}, got an array that is the same on all of its devices; {how}"
            )


def typed_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """The array, said to differ along the mesh axes that `like` differs along, and split over
    explicit ones as `like` is.
    """
    axes = varying_axes(like)
    array = varying_along(array, axes) if axes else array
    alike = jax.typeof(array).sharding.spec == jax.typeof(like).sharding.spec
    return array if alike else placed_like(array, like)


def varying_like(array: jax.Array, *others: jax.Array) -> jax.Array:
    """The array, said to differ along the mesh axes that any of the others differs along."""
    axes = _varying_axes(others)
    return varying_along(array, axes) if axes else array


def gradient_of(array: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient with the type that jax wants for this array's: added up over the mesh axes along
    which the array is the same everywhere, and split as the array is.
    """
    alike = tuple(sorted(varying_axes(gradient) - varying_axes(array)))
    gradient = jax.lax.psum(gradient, alike) if alike else gradient
    return placed_like(gradient, array)


def one_after_another[Arrays](run: Callable[[Arrays], Any], arrays: Arrays) -> Any:
    """`jax.lax.map`, also over an axis that explicit mesh axes split: the axis is gathered, and
    that of the results split again.
    """
    types = [jax.typeof(array).sharding for array in jax.tree.leaves(arrays)]
    split = next((each for each in types if each.spec and each.spec[0] is not None), None)
    if split is None:
        return jax.lax.map(run, arrays)

    def again(array: jax.Array) -> jax.Array:
        spec = PartitionSpec(split.spec[0], *spec_of(array)[1:])
        return jax.sharding.reshard(array, NamedSharding(split.mesh, spec))

    return jax.tree.map(again, jax.lax.map(run, whole(arrays, 1)))


def varying_along(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, said to differ along these mesh axes."""
    missing = tuple(sorted(axes - jax.typeof(array).manual_axis_type.varying))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
