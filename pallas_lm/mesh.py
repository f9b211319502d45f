"""A model over the devices of a mesh: where its parameters, caches and other arrays lie.

Query and kv heads, columns of the MLP and the vocabulary (rows of the embedding and of the head)
are split over the axis "tp"; norms are whole on each device. A device then has a smaller model of
the same layers, whose last matmul of attention and of the MLP gives a part of the sum. Where the
devices do not divide the vocabulary, rows of zeros fill up the last ones.

Matrices that are joined (`Config.joined`) have their rows in the order of the devices: first all
rows of the first device, of each matrix, then those of the second. Splitting them evenly gives each
device its heads.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pallas_lm import config as lm_config
from pallas_lm import model
from pallas_lm.config import Config, Params, Shape, Tree, is_shape

HEADS = "tp"
Specs = Any  # a pytree of PartitionSpecs
_VOCABULARY, _COLUMNS = ("embed", "head"), ("out", "down")


def make(text: str, axes: tuple[str, ...]) -> Mesh:
    """The mesh that a flag asks for, "tp:4" or "cp:2,dp:2", of the first devices that there are."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else [""]:
        name, _, size = part.partition(":")
        if name not in axes or name in sizes or not size.isdecimal() or int(size) < 1:
            wanted = " and ".join(f"{axis}:N" for axis in axes)
            raise ValueError(f"mesh: expected {wanted}, N at least 1, got {text!r}")
        sizes[name] = int(size)
    count, devices = math.prod(sizes.values()), jax.devices()
    if count > len(devices):
        raise ValueError(f"mesh: {text} takes {count} devices, there are {len(devices)}")
    if jax.process_count() > 1 and count < len(devices):
        raise ValueError(
            f"mesh: expected all {len(devices)} devices where there are several processes, got "
            f"{text}, which takes {count}"
        )
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), automatic, devices=devices[:count])


def of(asked: object) -> Mesh | None:
    """The mesh that a caller asks for: itself, a text as "tp:4", or None."""
    mesh: Any = make(asked, (HEADS,)) if isinstance(asked, str) else asked
    check(mesh)
    return mesh


def check(mesh: object) -> None:
    """Raises ValueError for anything but None and a mesh that a model can be split over."""
    if mesh is not None and not (isinstance(mesh, Mesh) and HEADS in mesh.shape):
        raise ValueError(
            f"mesh: expected a mesh with the axis {HEADS!r}, as lm.mesh.make('tp:2', ('tp',)) "
            f"makes it, or None, got {mesh!r}"
        )


def local(config: Config, mesh: Mesh) -> Config:
    """The model that one device has."""
    shards = mesh.shape[HEADS]
    if config.latent or config.gemma4:
        what = "latent attention" if config.latent else "two head dims"
        raise ValueError(
            f"mesh: expected none: a model with {what} is not split over devices, got "
            f"{HEADS}:{shards}; leave mesh out"
        )
    for name, size in (("kv heads", config.kv_heads), ("columns of the MLP", config.mlp)):
        if size % shards:
            raise ValueError(
                f"mesh: expected {HEADS} to divide the {size} {name} of the model, got {shards}"
            )
    return dataclasses.replace(
        config,
        heads=config.heads // shards,
        kv_heads=config.kv_heads // shards,
        mlp=config.mlp // shards,
        over=HEADS,
    )


def devices(mesh: Mesh | None) -> str:
    """Number and kind of the devices, in words."""
    kind = jax.devices()[0].device_kind
    return kind if mesh is None else f"{mesh.size} x {kind}"


# ---- calls on each device -----------------------------------------------------------------------


def over(mesh: Mesh | None, config: Config, run: Callable[..., Any], *arrays: Tree) -> Tree:
    """`run(config, params, cache, *rest)` -> (cache, three results), on each device of a mesh with
    its own part of parameters and cache, and the same rest and results.
    """
    if mesh is None:
        return run(config, *arrays)
    held = arrays[1].specs(heads=HEADS)
    ins = (specs(config, mesh), held, *(P() for _ in arrays[2:]))
    return _mapped(mesh, config, run, ins, (held, P(), P(), P()))(*arrays)


def logits(
    config: Config, mesh: Mesh | None, params: Params, tokens: jax.Array, implementation: str | None
) -> jax.Array:
    """`model.forward`, on a mesh as well."""
    run = functools.partial(model.forward, implementation=implementation)
    if mesh is None:
        return run(config, params, tokens)
    return _mapped(mesh, config, run, (specs(config, mesh), P()), P())(params, tokens)


def _mapped(mesh: Mesh, config: Config, run: Callable[..., Any], ins: Specs, outs: Specs) -> Any:
    part = functools.partial(run, local(config, mesh))
    return jax.shard_map(part, mesh=mesh, in_specs=ins, out_specs=outs)


# ---- arrays where they belong -------------------------------------------------------------------


def everywhere(mesh: Mesh | None, x: np.ndarray) -> jax.Array:
    """An array of the host's, which is the same in all processes, on every device."""
    if mesh is None:
        return jnp.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), lambda at: x[at])


def made(mesh: Mesh | None, create: Callable[[], Any], heads: str | None = None) -> Any:
    """`create()`, its arrays made in their places; `heads`: the axis that the heads of a cache are
    split over.
    """
    if mesh is None:
        return create()
    results = jax.eval_shape(create)
    spec = results.specs(heads=heads) if heads else jax.tree.map(lambda _: P(), results)
    return jax.jit(create, out_shardings=_shardings(mesh, spec))()


def _shardings(mesh: Mesh, spec: Specs) -> Any:
    return jax.tree.map(functools.partial(NamedSharding, mesh), spec, is_leaf=is_spec)


def is_spec(x: object) -> bool:
    return isinstance(x, P)


# ---- parameters ---------------------------------------------------------------------------------


def specs(config: Config, mesh: Mesh) -> Params:
    """A PartitionSpec for every parameter, in the tree that they form."""
    local(config, mesh)  # raises where the mesh does not divide the model

    def spec_of(path: Sequence[Any], shape: Shape) -> P:
        del shape
        name = path[-1].key
        if config.joined(name):
            return P(None, HEADS)
        if name in _COLUMNS:
            return P(None, None, HEADS)
        return P(HEADS) if name in _VOCABULARY else P()

    return jax.tree.map_with_path(spec_of, config.shapes(), is_leaf=is_shape)


def spans(sizes: Shape, at: slice, total: int) -> list[tuple[int, slice]]:
    """The rows that a device has of joined matrices: (matrix, rows of it), one after the other.
    `sizes`: rows of each matrix; `at`: the device's rows of the parameter, which has `total`.
    """
    start, stop, _ = at.indices(total)
    shards = total // (stop - start)
    device = start // (stop - start)
    return [
        (n, slice(device * size // shards, (device + 1) * size // shards))
        for n, size in enumerate(sizes)
    ]


def placed(
    mesh: Mesh | None, spec: P | None, shape: Shape, read: Callable[[Any], np.ndarray]
) -> jax.Array:
    """A parameter from `read(slices)`: each device reads its own part."""
    if mesh is None:
        return jnp.asarray(read((slice(None),) * len(shape)))
    assert spec is not None
    if spec != P(HEADS):
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)
    count = shape[0]
    whole = (filled_up(count, mesh), *shape[1:])

    def part(at: tuple[slice, ...] | None) -> np.ndarray:
        assert at is not None
        start, stop, _ = at[0].indices(whole[0])
        first, end = min(start, count - 1), min(stop, count)
        rows = read((slice(first, end), *at[1:]))[: max(end - start, 0)]
        return np.pad(rows, ((0, stop - start - len(rows)), (0, 0)))

    return jax.make_array_from_callback(whole, NamedSharding(mesh, spec), part)


def filled_up(vocab: int, mesh: Mesh) -> int:
    """Rows of an embedding or a head, as many on each device."""
    return -(-vocab // mesh.shape[HEADS]) * mesh.shape[HEADS]


def random_params(config: Config, seed: int, dtype: DTypeLike, mesh: Mesh | None = None) -> Params:
    """`config.random_params`, the same numbers on any mesh."""
    if mesh is None:
        return lm_config.random_params(config, seed, dtype)
    spec = specs(config, mesh)

    def place(name: str, x: jax.Array) -> jax.Array:
        axes = next(run[name] for run in spec["runs"] if name in run)[1:]
        x = _in_order(x, config.joined(name), mesh.shape[HEADS])
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def create() -> Params:
        params = lm_config.random_params(config, seed, dtype, place)
        more = ((0, filled_up(config.vocab, mesh) - config.vocab), (0, 0))
        return params | {x: jnp.pad(params[x], more) for x in _VOCABULARY if x in params}

    return jax.jit(create, out_shardings=_shardings(mesh, spec))()


def _in_order(x: jax.Array, sizes: Shape, shards: int) -> jax.Array:
    """Joined matrices [rows, ..] with their rows in the order of the devices."""
    if not sizes:
        return x
    pieces = jnp.split(x, np.cumsum(sizes)[:-1])
    each = [piece.reshape(shards, -1, *x.shape[1:]) for piece in pieces]
    return jnp.concatenate(each, axis=1).reshape(x.shape)
