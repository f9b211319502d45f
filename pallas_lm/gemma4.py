"""Gemma 4: layers without a window have other kv heads and another head dim than those with one, so
a model has two caches, which hold the same sequences.

Some models have experts beside the MLP, computed plainly: all of them for every row, weighted by a
router that gives a share to a few and 0 to the others. The router sees the residual stream, the
experts another norm of it; their sum and the result of the MLP are normalised apart and added up.
The small models (E2B, E4B) have inputs of each layer beside the residual stream: an embedding of
the token for each layer, plus a projection of the model's own embedding of it.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_attn.cache import KVCache, PagedCache
from pallas_attn.masks import Mask
from pallas_attn.prefixes import SharedPrefixes
from pallas_lm.experts import in_blocks, largest
from pallas_lm.rows import linear, rms_norm, total

Array = jax.Array
Weights = Mapping[str, Array]
Rows = int | Array


@dataclasses.dataclass(frozen=True)
class ExpertsBesideMlp:
    """Experts beside the MLP of each layer (`with_experts`)."""

    count: int
    columns: int  # inner columns of each
    active: int  # experts that are chosen for a row

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer."""
        return {
            "mlp_own_norm": (hidden,),
            "experts_norm": (hidden,),
            "experts_post_norm": (hidden,),
            "router": (self.count, hidden),
            "router_scale": (hidden,),
            "expert_scale": (self.count,),
            "experts_gate_up": (self.count, 2 * self.columns, hidden),
            "experts_down": (self.count, hidden, self.columns),
        }


# The tensors of parameters of Gemma 4 in a checkpoint.
TENSORS = {
    "factor": ("layer_scalar",),
    "input_gate": ("per_layer_input_gate.weight",),
    "input_out": ("per_layer_projection.weight",),
    "input_post_norm": ("post_per_layer_input_norm.weight",),
    "mlp_own_norm": ("post_feedforward_layernorm_1.weight",),
    "experts_norm": ("pre_feedforward_layernorm_2.weight",),
    "experts_post_norm": ("post_feedforward_layernorm_2.weight",),
    "router": ("router.proj.weight",),
    "router_scale": ("router.scale",),
    "expert_scale": ("router.per_expert_scale",),
    "experts_gate_up": ("experts.gate_up_proj",),
    "experts_down": ("experts.down_proj",),
}


@dataclasses.dataclass(frozen=True)
class Gemma4:
    """Choices of Gemma 4. Its v is normalised, without weights; what a layer leaves is multiplied
    by a factor of the layer; its checkpoints hold the weights of norms as they are.
    """

    kv_heads: int  # heads of layers without a window
    head_dim: int
    values_are_keys: bool  # such layers make v of k, which was not normalised yet
    experts: ExpertsBesideMlp | None = None
    inputs: int = 0  # columns of each layer's own input (`inputs_of`); 0: there is none
    # Last layers, which have no k and v of their own: they read the cache rows of the last layer of
    # their kind before them. Their MLP may be twice as wide.
    readers: int = 0
    wide_readers: bool = False

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer that other models do not have."""
        shapes: dict[str, tuple[int, ...]] = {"factor": (1,)}
        if self.experts is not None:
            shapes |= self.experts.shapes(hidden)
        if self.inputs:
            shapes |= {"input_gate": (self.inputs, hidden), "input_out": (hidden, self.inputs)}
            shapes["input_post_norm"] = (hidden,)
        return shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoCaches:
    """The caches of layers with a window and without, with the methods of a KVCache that the loop
    calls.
    """

    windowed: KVCache
    full: KVCache

    def extend(self, rows: Rows) -> "TwoCaches":
        return TwoCaches(self.windowed.extend(rows), self.full.extend(rows))

    def reset(self, sequences: Rows) -> "TwoCaches":
        return TwoCaches(self.windowed.reset(sequences), self.full.reset(sequences))

    def keep(self, rows: Array, *, implementation: str | None = None) -> "TwoCaches":
        windowed = self.windowed.keep(rows, implementation=implementation)
        return TwoCaches(windowed, self.full.keep(rows, implementation=implementation))

    def fork(self, sequence: Rows, target: Rows) -> "TwoCaches":
        parts = self.windowed, self.full
        assert isinstance(parts[0], PagedCache) and isinstance(parts[1], PagedCache)
        return TwoCaches(parts[0].fork(sequence, target), parts[1].fork(sequence, target))

    @property
    def lengths(self) -> Array:
        return self.full.lengths

    @property
    def capacities(self) -> tuple[int, ...]:
        return self.full.capacities

    @property
    def num_sequences(self) -> int:
        return self.full.num_sequences

    @property
    def num_bytes(self) -> int:
        return self.windowed.num_bytes + self.full.num_bytes


Held = KVCache | TwoCaches | None  # caches of a model


def part_of(cache: Held, mask: Mask) -> KVCache | None:
    """The cache of layers with this mask."""
    if not isinstance(cache, TwoCaches):
        return cache
    return cache.full if mask.left is None else cache.windowed


def with_part(cache: Held, mask: Mask, part: KVCache | None) -> Held:
    """The caches, with another one of the layers with this mask."""
    if not isinstance(cache, TwoCaches) or part is None:
        return part
    return TwoCaches(cache.windowed, part) if mask.left is None else TwoCaches(part, cache.full)


def shared_prefixes(
    cache: KVCache | TwoCaches, tokens: int, levels: int, starts: jax.Array | None = None
) -> SharedPrefixes | None:
    """`PagedCache.shared_prefixes` of paged caches, None of others. Two caches have the same table
    of pages, and layers with a window read all that each sequence has.
    """
    cache = cache.full if isinstance(cache, TwoCaches) else cache
    if not isinstance(cache, PagedCache):
        return None
    return cache.shared_prefixes(tokens=tokens, levels=levels, starts=starts)


# ---- experts, and inputs of each layer ----------------------------------------------------------


def with_experts(
    experts: ExpertsBesideMlp, x: Array, result: Array, weights: Weights, eps: float
) -> Array:
    """`result` of the MLP, with that of the experts for rows x [M, t, D] of the residual stream."""
    rows = x.reshape(-1, x.shape[-1])
    added = in_blocks(lambda rows: _experts(experts, rows, weights, eps), rows).reshape(x.shape)
    result = rms_norm(result, weights["mlp_own_norm"], eps)
    return result + rms_norm(added, weights["experts_post_norm"], eps)


def _experts(experts: ExpertsBesideMlp, x: Array, weights: Weights, eps: float) -> Array:
    shares = _shares(experts, x, weights, eps)
    normed = rms_norm(x, weights["experts_norm"], eps)
    inner = jnp.einsum("rd,ecd->rec", normed, weights["experts_gate_up"])
    gate, up = jnp.split(inner, 2, axis=-1)
    inner = (jax.nn.gelu(gate, approximate=True) * up * shares[..., None]).astype(x.dtype)
    return jnp.einsum("rec,edc->erd", inner, weights["experts_down"]).sum(axis=0)


def _shares(experts: ExpertsBesideMlp, x: Array, weights: Weights, eps: float) -> Array:
    """float32[rows, experts]: the shares of those that are chosen add up to 1, before each is
    multiplied by its expert's factor.
    """
    scale = weights["router_scale"] * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    scores = linear(rms_norm(x, scale, eps), weights["router"]).astype(jnp.float32)
    shares = jax.nn.softmax(scores, axis=-1)
    shares = jnp.where(largest(shares, experts.active), shares, 0.0)
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares * weights["expert_scale"][None].astype(jnp.float32)


def inputs_of(columns: int, params: Weights, x: Array, tokens: Array, eps: float) -> Array:
    """[layers, M, t, columns] for tokens int32[M, t] whose embedding is x [M, t, D]."""
    known = jnp.take(params["embed_inputs"], tokens, axis=0, mode="clip")
    known *= jnp.asarray(columns**0.5, known.dtype)
    made = linear(x, params["inputs_proj"]) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    known, made = (rows.reshape(*tokens.shape, -1, columns) for rows in (known, made))
    both = rms_norm(made, params["inputs_norm"], eps) + known
    return jnp.moveaxis(both * jnp.asarray(2**-0.5, both.dtype), -2, 0)


def with_input(x: Array, added: Array, weights: Weights, eps: float) -> tuple[Array, Array]:
    """The residual stream x with `added` and the term that the layer's input adds to it."""
    x += total(added, x.dtype)
    gate = jax.nn.gelu(linear(x, weights["input_gate"]), approximate=True)
    rows = linear(gate * weights["input"], weights["input_out"])
    return x, rms_norm(rows, weights["input_post_norm"], eps)[None]
