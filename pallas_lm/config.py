"""Sizes and choices of a Llama-family model, the shapes of its parameters, and random ones."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_attn.masks import CAUSAL, Mask, sliding_window
from pallas_lm.experts import Experts
from pallas_lm.gemma4 import Gemma4
from pallas_lm.latent import Latent
from pallas_lm.rows import Angles

Array = jax.Array
Params = dict[str, Any]
Tree = Any  # a pytree of arrays
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and how its frequencies are stretched for longer contexts."""

    theta: float = 10000.0
    kind: str = "default"  # or linear, llama3, yarn, proportional
    factor: float = 1.0  # divides the frequencies that are stretched
    original_positions: int = 0  # llama3, yarn: the context before it was stretched
    low_freq_factor: float = 1.0  # llama3: frequencies of fewer turns in it are stretched
    high_freq_factor: float = 4.0  # llama3: frequencies of more turns are kept
    beta_fast: float = 32.0  # yarn: the same two bounds
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: bounds at whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    rotated: float = 1.0  # proportional: share of the pairs that turn, the first ones

    def angles(self, positions: Array, head_dim: int) -> Angles:
        """cos and sin of positions int32[...], float32[..., H / 2]."""
        radians = self.frequencies(head_dim).reshape((1,) * positions.ndim + (-1,))
        angles = positions.astype(jnp.float32)[..., None] * radians
        factor = self.attention_factor
        return Angles(jnp.cos(angles) * factor, jnp.sin(angles) * factor)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """float32[H / 2]: radians a position."""
        plain = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if self.kind == "default":
            keep = np.ones_like(plain)
        elif self.kind == "linear":
            keep = np.zeros_like(plain)
        elif self.kind == "proportional":
            turned = np.arange(head_dim // 2) < int(self.rotated * head_dim // 2)
            return np.where(turned, plain / self.factor, 0).astype(np.float32)
        elif self.kind == "llama3":
            turns = self.original_positions * plain / (2 * math.pi)
            low, high = self.low_freq_factor, self.high_freq_factor
            keep = np.clip((turns - low) / (high - low), 0, 1)
        elif self.kind == "yarn":
            low, high = self._yarn_bounds(head_dim)
            keep = 1 - np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        else:
            raise ValueError(
                f"rope: expected default, linear, llama3, yarn or proportional, got {self.kind!r}"
            )
        return (keep * plain + (1 - keep) * plain / self.factor).astype(np.float32)

    def _yarn_bounds(self, head_dim: int) -> tuple[float, float]:
        """The dimensions between which yarn goes from keeping a frequency to stretching it."""

        def dimension(turns: float) -> float:
            positions = self.original_positions / (turns * 2 * math.pi)
            return head_dim * math.log(positions) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, head_dim - 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and choices of one model. Hashable: a jit key."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    positions: int  # the longest context that the model was made for
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    tied: bool = False  # the head is the embedding
    windows: tuple[int | None, ...] = ()  # keys that each layer sees, its own counted; None: all
    scale: float | None = None  # factor of attention scores; None: head_dim ** -0.5
    softcap: float | None = None  # softcap of attention scores (Gemma 2)
    logit_softcap: float | None = None  # softcap of the model's logits (Gemma 2)
    window_rope: Rope | None = None  # RoPE of layers with a window (Gemma 3); None: `rope`
    # Gemma also normalises the results of attention and MLP, scales embeddings, and has a GELU as
    # the gate. Its checkpoints hold the weights of norms minus 1.
    gemma: bool = False
    gemma4: Gemma4 | None = None  # choices of Gemma 4, beside those of Gemma
    # In some layers of Gemma 4 (`of_run`): no matrix makes v; k and v are those of another layer.
    values_are_keys: bool = False
    reads_only: bool = False
    latent: Latent | None = None  # latent attention (DeepSeek), whose q and k have head_dim
    experts: Experts | None = None  # in place of the MLP of later layers (DeepSeek)
    # The mesh axis whose devices have the other heads and columns of the MLP. Sizes are then those
    # of one device, within jax.shard_map (`mesh.local`).
    over: str | None = None

    @property
    def runs(self) -> tuple[tuple[int, Mask], ...]:
        """Layers in a row with the same mask and kind of MLP: (number of layers, mask)."""
        return tuple(
            (count, CAUSAL if window is None else sliding_window(window))
            for count, window, _, _ in self._kinds
        )

    @property
    def _kinds(self) -> tuple[tuple[int, int | None, Experts | None, bool], ...]:
        """Layers, window and experts of each run, and whether they read the rows of another."""
        first = self.layers if self.experts is None else self.experts.first
        experts = (self.experts if n >= first else None for n in range(self.layers))
        readers = 0 if self.gemma4 is None else self.gemma4.readers
        reads = (n >= self.layers - readers for n in range(self.layers))
        layers = zip(self.windows or (None,) * self.layers, experts, reads, strict=True)
        return tuple((len(list(run)), *kind) for kind, run in itertools.groupby(layers))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The RoPE of all layers, or of layers without a window and of layers with one."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """Columns of a head that each of `ropes` turns."""
        if self.gemma4 is not None:
            return (self.gemma4.head_dim, self.head_dim)
        dim = self.head_dim if self.latent is None else self.latent.rotated
        return (dim,) * len(self.ropes)

    def of_run(self, run: int) -> "Config":
        """The model with the heads of a run's layers."""
        if self.gemma4 is None:
            return self
        heads = dataclasses.replace(self, reads_only=self._kinds[run][3])
        if self.runs[run][1].left is not None:
            return heads
        names = "kv_heads", "head_dim", "values_are_keys"
        return dataclasses.replace(heads, **{name: getattr(self.gemma4, name) for name in names})

    def first_layer(self, run: int) -> int:
        """The number in its cache of a run's first layer, or of the one that all of them read."""
        mask, reads = self.runs[run][1], self._kinds[run][3]
        return self._written(mask, run) - reads

    def layers_like(self, mask: Mask) -> int:
        """Layers in the cache of layers with this mask."""
        return self._written(mask, len(self.runs))

    def _written(self, mask: Mask, runs: int) -> int:
        """Layers of the first runs whose rows are in the cache of layers with this mask."""
        kinds = zip(self.runs[:runs], self._kinds, strict=False)
        return sum(
            count for (count, other), kind in kinds if self._alike(other, mask) and not kind[3]
        )

    def _alike(self, mask: Mask, other: Mask) -> bool:
        """Whether layers with these masks share a cache: all, but in Gemma 4."""
        return self.gemma4 is None or (mask.left is None) == (other.left is None)

    def rope_number(self, mask: Mask) -> int:
        """The index in `ropes` for layers with this mask."""
        return int(self.window_rope is not None and mask.left is not None)

    def kv_bytes(self, dtype: DTypeLike) -> int:
        """Bytes of cache that one token takes."""
        numbers = 0
        for run, (count, _) in enumerate(self.runs):
            heads = self.of_run(run)
            row = 0 if heads.reads_only else 2 * heads.kv_heads * heads.head_dim
            numbers += count * (row if self.latent is None else self.latent.row)
        return numbers * jnp.dtype(dtype).itemsize

    @property
    def size(self) -> int:
        """Numbers in all parameters."""
        return sum(map(math.prod, jax.tree.leaves(self.shapes(), is_leaf=is_shape)))

    def joined(self, name: str, run: int = 0) -> Shape:
        """Rows of q, k and v, or of gates and ups, in the parameter of a run that joins them; () in
        others.
        """
        if name in ("qkv", "qkv_bias"):
            if self.latent is not None:
                return self.latent.joined(self.heads)
            heads = self.of_run(run)
            kv = heads.kv_heads * heads.head_dim
            made = 0 if heads.reads_only else 1 if heads.values_are_keys else 2
            return self.heads * heads.head_dim, *(kv,) * made
        return 2 * self._widths(run) if name == "gate_up" else ()

    def joined_columns(self, name: str, run: int) -> Shape:
        """Columns of each expert's matrix in `down`, in a run with experts; () in others."""
        return self._widths(run) if name == "down" and self.experts_of(run) is not None else ()

    def experts_of(self, run: int) -> Experts | None:
        """The experts of a run's layers; None where they have an MLP."""
        return self._kinds[run][2]

    def _widths(self, run: int) -> Shape:
        """Inner columns of the MLP of a run's layers, or of each expert."""
        experts, reads = self._kinds[run][2:]
        if experts is not None:
            return experts.widths
        twice = reads and self.gemma4 is not None and self.gemma4.wide_readers
        return (self.mlp * (1 + twice),)

    def shapes(self) -> Params:
        """The shape of every parameter, in the tree that the parameters form."""
        params: Params = {"embed": (self.vocab, self.hidden), "norm": (self.hidden,)}
        if not self.tied:
            params["head"] = (self.vocab, self.hidden)
        if self.gemma4 is not None and (columns := self.gemma4.inputs):
            params["embed_inputs"] = (self.vocab, self.layers * columns)
            params["inputs_proj"] = (self.layers * columns, self.hidden)
            params["inputs_norm"] = (columns,)
        params["runs"] = tuple(
            {name: (count, *shape) for name, shape in self._layer_shapes(run).items()}
            for run, (count, _) in enumerate(self.runs)
        )
        return params

    def _layer_shapes(self, run: int) -> dict[str, Shape]:
        """The shapes of the parameters of one of a run's layers."""
        inner, experts = sum(self._widths(run)), self.experts_of(run)
        qkv, head_dim = sum(self.joined("qkv", run)), self.of_run(run).head_dim
        layer: dict[str, Shape] = {
            "attn_norm": (self.hidden,),
            "qkv": (qkv, self.hidden),
            "out": (self.hidden, self.heads * head_dim),
            "mlp_norm": (self.hidden,),
            "gate_up": (2 * inner, self.hidden),
            "down": (self.hidden, inner),
        }
        if self.gemma:
            layer |= {"attn_post_norm": (self.hidden,), "mlp_post_norm": (self.hidden,)}
        if self.qkv_bias:
            layer["qkv_bias"] = (qkv,)
        if self.qk_norm:
            layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        if self.gemma4 is not None:
            layer |= self.gemma4.shapes(self.hidden)
        if self.of_run(run).reads_only:
            del layer["k_norm"]
        if self.latent is not None:
            layer |= self.latent.shapes(self.hidden, self.heads)
        if experts is not None:
            layer["router"] = (experts.count, self.hidden)
        return layer


def is_shape(x: object) -> bool:
    """Whether x is a leaf of `Config.shapes`."""
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def num_bytes(params: Params) -> int:
    """Bytes of all parameters."""
    return sum(x.nbytes for x in jax.tree.leaves(params))


def random_params(
    config: Config, seed: int, dtype: DTypeLike, place: Callable[[str, Array], Array] | None = None
) -> Params:
    """Random weights, for training to start from and for throughput to be measured with.

    A matrix is drawn layer by layer, so that little more is held than the result. `place(name, x)`
    moves one layer's matrix to the devices of a mesh.
    """
    leaves, tree = jax.tree.flatten_with_path(config.shapes(), is_leaf=is_shape)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    params = []
    for (path, shape), key in zip(leaves, keys, strict=True):
        name = path[-1].key
        if name.endswith(("norm", "factor", "scale")):
            params.append(jnp.ones(shape, dtype))
        elif name == "qkv_bias":
            params.append(jnp.zeros(shape, dtype))
        else:  # the more layers add to the residual stream, the less each adds
            deviation = 0.02 / math.sqrt(2 * config.layers) if name in ("out", "down") else 0.02
            finish = None if place is None else functools.partial(place, name)
            params.append(_normal(key, deviation, shape, jnp.dtype(dtype).name, finish))
    return jax.tree.unflatten(tree, params)


@jax.jit(static_argnums=(2, 3, 4))
def _normal(
    key: Array, deviation: float, shape: Shape, dtype: str, finish: Callable[[Array], Array] | None
) -> Array:
    def matrix(key: Array, shape: Shape) -> Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)

    def layer(key: Array) -> Array:
        x = matrix(key, shape[1:])
        return x if finish is None else finish(x)

    if len(shape) < 3:  # embedding and head
        return matrix(key, shape)
    return jax.lax.map(layer, jax.random.split(key, shape[0]))
