"""Experts in place of an MLP (DeepSeek), computed plainly.

The gated MLPs of all experts side by side are a single wide one: `gate_up` and `down` have the
columns of every expert, and then those of the shared experts. A router gives each row a share of a
few experts, by which their inner columns are multiplied, and 0 of all others. A step over many rows
reads every expert anyway; for few rows and for prompts this computes more than is needed.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_lm.rows import gated, linear

Array = jax.Array
Shape = tuple[int, ...]

_ROWS = 1024  # rows at a time: their inner columns of all experts are held together


@dataclasses.dataclass(frozen=True)
class Experts:
    """The sizes of the experts and the rule by which a router chooses."""

    first: int  # the first layer that has experts; those before have an MLP
    count: int  # experts that the router chooses from
    columns: int  # inner columns of each
    shared: int  # experts that every row takes
    active: int  # experts that are chosen for a row
    scale: float = 1.0  # factor of the shares
    groups: int = 1  # experts form groups, and only the best of them are chosen from
    active_groups: int = 1

    @property
    def widths(self) -> Shape:
        """Inner columns of each matrix in `gate_up` and `down`."""
        shared = (self.shared * self.columns,) if self.shared else ()
        return (*(self.columns,) * self.count, *shared)

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """The tensors of each parameter in a checkpoint."""
        names = [f"mlp.experts.{n}" for n in range(self.count)]
        names += ["mlp.shared_experts"] if self.shared else []
        gate, up, down = (
            tuple(f"{name}.{kind}_proj.weight" for name in names) for kind in ("gate", "up", "down")
        )
        return {"router": ("mlp.gate.weight",), "gate_up": gate + up, "down": down}


def mlp(experts: Experts, x: Array, weights: Mapping[str, Array]) -> Array:
    """The sum of the experts' results [..., D], each times its share."""
    rows = x.reshape(-1, x.shape[-1])
    return in_blocks(lambda rows: _mlp(experts, rows, weights), rows).reshape(x.shape)


def in_blocks(of_rows: Callable[[Array], Array], rows: Array) -> Array:
    """`of_rows` of rows [R, D], which it takes one by one or in any number, some at a time."""
    if len(rows) <= _ROWS:
        return of_rows(rows)
    return lax.map(lambda row: of_rows(row[None])[0], rows, batch_size=_ROWS)


def _mlp(experts: Experts, x: Array, weights: Mapping[str, Array]) -> Array:
    inner = gated(x, weights["gate_up"])
    shares = jnp.repeat(_shares(experts, x, weights["router"]), experts.columns, axis=-1)
    shares = jnp.pad(
        shares,
        [(0, 0)] * (x.ndim - 1) + [(0, experts.shared * experts.columns)],
        constant_values=1,
    )
    return linear((inner * shares).astype(x.dtype), weights["down"])


def _shares(experts: Experts, x: Array, router: Array) -> Array:
    """float32[..., count]: the share of every expert, 0 where it is not chosen."""
    wide = (x.astype(jnp.float32), router.astype(jnp.float32))
    shares = jax.nn.softmax(linear(*wide), axis=-1)
    if experts.groups > 1:
        groups = shares.reshape(*shares.shape[:-1], experts.groups, -1)
        chosen = largest(groups.max(axis=-1), experts.active_groups)
        shares = jnp.where(chosen[..., None], groups, 0.0).reshape(shares.shape)
    return jnp.where(largest(shares, experts.active), shares, 0.0) * experts.scale


def largest(x: Array, count: int) -> Array:
    """bool[..., n]: the `count` largest of the last axis."""
    _, places = lax.top_k(x, count)
    return jax.nn.one_hot(places, x.shape[-1], dtype=jnp.bool_).any(axis=-2)
