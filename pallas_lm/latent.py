"""Multi-head latent attention (DeepSeek): K and V of all heads are made of one short row a token.

The row has `rank` columns, normalised, and the rotated columns of K, which all heads share. It is
all that a cache holds. Two forms of the same attention:

    expanded   prompts and training: K and V of each head are made of the rows, [M, t, N, H]
    absorbed   over a cache: the matrix that would make K of a row is applied to q instead, and the
               one that would make V to the result, so attention reads the rows as they are

Axes: M sequences, t rows of each, N heads; a head's q and k have `plain` columns that are not
rotated, then `rotated` ones.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_lm.rows import Angles, linear, rms_norm, rotate

Array = jax.Array
Shape = tuple[int, ...]

_EPS = 1e-6  # the norms of this file have no epsilon in config.json


@dataclasses.dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention."""

    rank: int  # columns of a row that K and V of all heads are made of; V is within them
    plain: int  # columns of a head's q and k that are not rotated
    rotated: int  # columns that are
    values: int  # columns of a head's v
    q_rank: int | None = None  # columns that q is made by way of; None: q is made at once

    @property
    def head_dim(self) -> int:
        """Columns of a head's q and k."""
        return self.plain + self.rotated

    @property
    def row(self) -> int:
        """Columns of a row of the cache."""
        return self.rank + self.rotated

    def joined(self, heads: int) -> Shape:
        """Rows of the two matrices in the parameter `qkv`: q's, or the first of q's, and the cache
        row's.
        """
        return self.q_rank or heads * self.head_dim, self.row

    def shapes(self, hidden: int, heads: int) -> dict[str, Shape]:
        """The parameters of a layer's attention."""
        shapes: dict[str, Shape] = {
            "qkv": (sum(self.joined(heads)), hidden),
            "kv_norm": (self.rank,),
            "kv_b": (heads * (self.plain + self.values), self.rank),
            "out": (hidden, heads * self.values),
        }
        if self.q_rank is not None:
            shapes |= {"q_norm": (self.q_rank,), "q_b": (heads * self.head_dim, self.q_rank)}
        return shapes

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """The tensors of each of these parameters in a checkpoint."""
        q = "q_proj" if self.q_rank is None else "q_a_proj"
        return {
            "qkv": (f"self_attn.{q}.weight", "self_attn.kv_a_proj_with_mqa.weight"),
            "kv_norm": ("self_attn.kv_a_layernorm.weight",),
            "kv_b": ("self_attn.kv_b_proj.weight",),
            "out": ("self_attn.o_proj.weight",),
            "q_norm": ("self_attn.q_a_layernorm.weight",),
            "q_b": ("self_attn.q_b_proj.weight",),
        }


def queries_and_rows(
    latent: Latent, weights: Mapping[str, Array], x: Array, angles: Angles
) -> tuple[Array, Array]:
    """q [M, t, N, plain + rotated] and the cache's rows [M, t, 1, rank + rotated] of x."""
    both = linear(x, weights["qkv"])
    q, row = jnp.split(both, [both.shape[-1] - latent.row], axis=-1)
    if latent.q_rank is not None:
        q = linear(rms_norm(q, weights["q_norm"], _EPS), weights["q_b"])
    q = q.reshape(*x.shape[:2], -1, latent.head_dim)
    plain, turned = jnp.split(q, [latent.plain], axis=-1)
    q = jnp.concatenate([plain, rotate(_halves(turned), angles)], axis=-1)
    shared, turned = jnp.split(row[:, :, None], [latent.rank], axis=-1)
    shared = rms_norm(shared, weights["kv_norm"], _EPS)
    return q, jnp.concatenate([shared, rotate(_halves(turned), angles)], axis=-1)


def _halves(x: Array) -> Array:
    """Columns with those of even number first: checkpoints rotate neighbours, `rotate` columns that
    lie half a head apart. q and k change alike, so scores stay as they are.
    """
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def expanded(latent: Latent, row: Array, kv_b: Array) -> tuple[Array, Array]:
    """k [M, t, N, plain + rotated] and v [M, t, N, values] of rows [M, t, 1, rank + rotated]."""
    shared, turned = jnp.split(row, [latent.rank], axis=-1)
    both = linear(shared, kv_b).reshape(*row.shape[:2], -1, latent.plain + latent.values)
    k, v = jnp.split(both, [latent.plain], axis=-1)
    turned = jnp.broadcast_to(turned, (*k.shape[:3], latent.rotated))
    return jnp.concatenate([k, turned], axis=-1), v


def absorbed(latent: Latent, q: Array, kv_b: Array) -> Array:
    """q [..., N, rank + rotated] for attention to the rows themselves."""
    plain, turned = jnp.split(q, [latent.plain], axis=-1)
    keys = _by_head(latent, kv_b)[:, : latent.plain]
    return jnp.concatenate([jnp.einsum("...np,npr->...nr", plain, keys), turned], axis=-1)


def values(latent: Latent, out: Array, kv_b: Array) -> Array:
    """The heads' results [..., N, values] of attention to the rows, [..., N, rank]."""
    return jnp.einsum("...nr,nvr->...nv", out, _by_head(latent, kv_b)[:, latent.plain :])


def _by_head(latent: Latent, kv_b: Array) -> Array:
    """The matrix [N, plain + values, rank]."""
    return kv_b.reshape(-1, latent.plain + latent.values, latent.rank)
