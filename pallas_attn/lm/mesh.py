"""A model over the devices of a mesh: which device has what of its weights.

Query and kv heads, columns of the MLP and the vocabulary (rows of the embedding and of the head)
are split over the axis "tp"; norms are whole on each device. A device then has a smaller model of
the same layers, whose last matmul of attention and of the MLP gives a part of the sum. Where the
devices do not divide the vocabulary, rows of zeros fill up the last ones.

Matrices that are several in one (q, k and v; gate and up) have their rows in the order of the
devices: first all that the first one has of each, then all of the second. Splitting them evenly
gives each device its heads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn.lm import model
from pallas_attn.lm.model import Config, Params, is_shape

HEADS = "tp"
_VOCABULARY = ("embed", "head")
_ROWS, _COLUMNS = ("qkv", "qkv_bias", "gate_up"), ("out", "down")


def make(text: str, axes: tuple[str, ...]) -> Mesh:
    """The mesh that a flag asks for, "tp:4" or "cp:2,dp:2", of the first devices that there are."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition(":")
        if name not in axes or name in sizes or not size.isdecimal() or int(size) < 1:
            wanted = " and ".join(f"{axis}:N" for axis in axes)
            raise ValueError(f"mesh: expected {wanted}, N at least 1, got {text!r}")
        sizes[name] = int(size)
    count, devices = int(np.prod(list(sizes.values()))), jax.devices()
    if count > len(devices):
        raise ValueError(f"mesh: {text} takes {count} devices, there are {len(devices)}")
    if jax.process_count() > 1 and count < len(devices):
        raise ValueError(
            f"mesh: expected all {len(devices)} devices where there are several processes, got "
            f"{text}, which takes {count}"
        )
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices[:count]
    )


def check(mesh: Any) -> None:
    """ValueError for what no model is split over."""
    if mesh is not None and not (isinstance(mesh, Mesh) and HEADS in mesh.shape):
        raise ValueError(
            f"mesh: expected a mesh with the axis {HEADS!r}, as lm.mesh.make('tp:2', ('tp',)) "
            f"makes it, or None, got {mesh!r}"
        )


def local(config: Config, mesh: Mesh) -> Config:
    """The model that one device has."""
    shards = mesh.shape[HEADS]
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


def specs(config: Config, mesh: Mesh) -> Params:
    """A PartitionSpec for every parameter, in the tree that they form."""
    local(config, mesh)  # raises where the mesh does not divide the model

    def of(path: Any, shape: tuple[int, ...]) -> P:
        del shape
        name = path[-1].key
        if name in _ROWS:
            return P(None, HEADS)
        if name in _COLUMNS:
            return P(None, None, HEADS)
        return P(HEADS) if name in _VOCABULARY else P()

    return jax.tree.map_with_path(of, config.shapes(), is_leaf=is_shape)


def over(mesh: Mesh | None, config: Config, run: Callable[..., Any], *given: Any) -> Any:
    """`run(config, params, cache, *rest)` -> (cache, *results), on each device of a mesh with its
    own part of the parameters and the cache, and the same rest and results.
    """
    if mesh is None:
        return run(config, *given)
    held = given[1].specs(heads=HEADS)
    ins = (specs(config, mesh), held, *(P() for _ in given[2:]))
    mapped = functools.partial(run, local(config, mesh))
    outs = (held, P(), P(), P())
    return jax.shard_map(mapped, mesh=mesh, in_specs=ins, out_specs=outs)(*given)


def over_heads(
    mesh: Mesh | None, config: Config, run: Callable[..., Any], cache: Any, *rows: jax.Array
) -> Any:
    """`run(config, cache, *rows)` of rows [M, .., heads, H] -> (cache, such rows), on each device
    of a mesh with its own heads.
    """
    if mesh is None:
        return run(config, cache, *rows)
    held = cache.specs(heads=HEADS)
    ins = (held, *(spec_of_heads(x.ndim) for x in rows))
    mapped = functools.partial(run, local(config, mesh))
    outs = (held, spec_of_heads(rows[0].ndim))
    return jax.shard_map(mapped, mesh=mesh, in_specs=ins, out_specs=outs)(cache, *rows)


def spec_of_heads(axes: int) -> P:
    """Of rows with so many axes, of which heads are the last but one."""
    return P(*(None,) * (axes - 2), HEADS)


def logits(
    config: Config, mesh: Mesh | None, params: Params, tokens: jax.Array, implementation: str | None
) -> jax.Array:
    """`model.forward`, on a mesh as well."""
    if mesh is None:
        return model.forward(config, params, tokens, implementation=implementation)
    part = functools.partial(model.forward, local(config, mesh), implementation=implementation)
    ins = (specs(config, mesh), P())
    return jax.shard_map(part, mesh=mesh, in_specs=ins, out_specs=P())(params, tokens)


def devices(mesh: Mesh | None) -> str:
    """How many of which kind, as a person reads it."""
    kind = jax.devices()[0].device_kind
    return kind if mesh is None else f"{mesh.size} x {kind}"


def everywhere(mesh: Mesh | None, x: np.ndarray) -> jax.Array:
    """An array of the host's, which is the same in all processes, on every device."""
    if mesh is None:
        return jnp.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), lambda at: x[at])


def made(mesh: Mesh | None, create: Callable[[], Any], heads: str | None = None) -> Any:
    """`create()`, its arrays made where they are to be: heads of a cache, or of rows [M, .., heads,
    H], over an axis.
    """
    if mesh is None:
        return create()
    where = jax.tree.map(lambda x: x.sharding, shapes(mesh, create, heads))
    return jax.jit(create, out_shardings=where)()


def shapes(mesh: Mesh | None, create: Callable[[], Any], heads: str | None = None) -> Any:
    """What `made` gives, by shape."""
    found = jax.eval_shape(create)
    if mesh is None:
        return found
    if heads is None:
        spec = jax.tree.map(lambda _: P(), found)
    elif hasattr(found, "specs"):
        spec = found.specs(heads=heads)
    else:
        spec = jax.tree.map(lambda x: spec_of_heads(x.ndim), found)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        found,
        _shardings(mesh, spec),
    )


def _shardings(mesh: Mesh, spec: Any) -> Any:
    return jax.tree.map(lambda one: NamedSharding(mesh, one), spec, is_leaf=is_spec)


def is_spec(x: Any) -> bool:
    return isinstance(x, P)


# ---- weights ------------------------------------------------------------------------------------


def segments(config: Config, name: str) -> tuple[int, ...]:
    """The rows of each matrix in a parameter of a layer; () where there is one alone."""
    kv = config.kv_heads * config.head_dim
    if name in ("qkv", "qkv_bias"):
        return config.heads * config.head_dim, kv, kv
    return (config.mlp,) * 2 if name == "gate_up" else ()


def in_order(config: Config, mesh: Mesh | None, name: str, x: jax.Array) -> jax.Array:
    """A stacked parameter [layers, rows, ..] with its rows in the order of the devices."""
    sizes = segments(config, name)
    if mesh is None or not sizes:
        return x
    shards = mesh.shape[HEADS]
    pieces = jnp.split(x, np.cumsum(sizes)[:-1], axis=1)
    by_device = [piece.reshape(len(x), shards, -1, *x.shape[2:]) for piece in pieces]
    return jnp.concatenate(by_device, axis=2).reshape(x.shape)


def spans(sizes: tuple[int, ...], at: slice, total: int) -> list[tuple[int, slice]]:
    """The rows that a device has of a parameter whose matrices have `sizes` rows: (matrix, rows of
    it), one after the other. `at`: its rows of the parameter, of `total`.
    """
    start, stop, _ = at.indices(total)
    shards = total // (stop - start)
    device = start // (stop - start)
    return [
        (n, slice(device * size // shards, (device + 1) * size // shards))
        for n, size in enumerate(sizes)
    ]


def placed(
    mesh: Mesh | None, spec: P, shape: tuple[int, ...], read: Callable[[Any], np.ndarray]
) -> jax.Array:
    """A parameter of which `read` has any part, by slices: each device is handed its own."""
    if mesh is None:
        return jnp.asarray(read((slice(None),) * len(shape)))
    if spec != P(HEADS):
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), read)
    count = shape[0]
    whole = (filled_up(count, mesh), *shape[1:])

    def part(at: Any) -> np.ndarray:
        start, stop, _ = at[0].indices(whole[0])
        first, end = min(start, count - 1), min(stop, count)
        rows = read((slice(first, end), *at[1:]))[: max(end - start, 0)]
        return _with_zeros(np, rows, stop - start)

    return jax.make_array_from_callback(whole, NamedSharding(mesh, spec), part)


def filled_up(vocab: int, mesh: Mesh) -> int:
    """Rows of an embedding or a head, as many on each device."""
    return -(-vocab // mesh.shape[HEADS]) * mesh.shape[HEADS]


def _with_zeros(xp: Any, x: Any, rows: int) -> Any:
    """The rows of x, and zeros after them."""
    return x if len(x) == rows else xp.pad(x, ((0, rows - len(x)), (0, 0)))


def random_params(config: Config, seed: int, dtype: Any, mesh: Mesh | None = None) -> Params:
    """`model.random_params`, the same numbers on any mesh."""
    if mesh is None:
        return model.random_params(config, seed, dtype)

    spec = specs(config, mesh)

    def place(name: str, x: jax.Array) -> jax.Array:
        axes = next(run[name] for run in spec["runs"] if name in run)[1:]
        x = in_order(config, mesh, name, x[None])[0]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def create() -> Params:
        params = model.random_params(config, seed, dtype, place)
        rows = filled_up(config.vocab, mesh)
        words = {
            name: _with_zeros(jnp, params[name], rows) for name in _VOCABULARY if name in params
        }
        return params | words

    return jax.jit(create, out_shardings=_shardings(mesh, spec))()
