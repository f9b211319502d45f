"""Trains a small model on the bytes of a text, with this package's own forward and backward.

It is here so that the demo has something to say: AdamW, a cosine schedule, random windows of the
text, and the loss on its last tenth, which is never trained on.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_attn.context import Context
from pallas_attn.devices import chosen
from pallas_lm import checkpoint
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config, Params, random_params
from pallas_lm.folder import Folder
from pallas_lm.hf_config import config_from
from pallas_lm.machine import memory
from pallas_lm.model import forward

Array = jax.Array

# A model of bytes: 1.8 million parameters, 3.6 MB as bfloat16.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tokenizer": "bytes",
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The way to train. A jit key."""

    steps: int = 3000
    batch: int = 32
    context: int = 512
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    every: int = 100  # steps inside one jit, between two lines of the log
    dtype: str = "float32"
    implementation: str | None = None
    mesh: Mesh | None = (
        None  # a mesh of "dp", over which windows are split, and "cp", over which rows are
    )

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        sizes = {} if self.mesh is None else dict(self.mesh.shape)
        for name, unit in (("batch", sizes.get("dp", 1)), ("context", 2 * sizes.get("cp", 0) or 1)):
            if getattr(self, name) % unit:
                raise ValueError(
                    f"{name}: expected a multiple of {unit} on this mesh, got {getattr(self, name)}"
                )
        if not 0 < (rate := self.learning_rate) < 1:  # NaN is refused
            raise ValueError(f"learning_rate: expected above 0 and below 1, got {rate}")


class Moment(NamedTuple):
    """The state of AdamW."""

    params: Params  # float32
    mean: Params
    square: Params
    step: Array


class Line(NamedTuple):
    """One line of the log: losses in nats a byte."""

    step: int
    loss: float
    held_out: float
    seconds: float
    implementation: str  # names of those that the steps were traced with


def train(
    text: bytes, folder: str, recipe: Recipe, seed: int = 0, overwrite: bool = False
) -> Iterator[Line]:
    """Trains on `text` and leaves the model in `folder`; a line each `recipe.every` steps."""
    described = TINY | {"max_position_embeddings": recipe.context}
    config = config_from(described)
    ids = np.frombuffer(text, np.uint8)
    cut = len(ids) * 9 // 10
    if len(ids) - cut < recipe.context + 1:
        needed = 10 * (recipe.context + 2)
        raise ValueError(f"text: expected at least {needed} bytes, got {len(ids)}")
    _must_fit(config, recipe)
    # A folder that cannot be written fails before the work, not after.
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    held = [name for name in checkpoint.NAMES if Folder(folder).has(name)]
    if held and not overwrite:
        raise ValueError(f"out: {folder} holds {held[0]}; name another folder, or say --overwrite")
    learnt, held_out = lm_mesh.everywhere(recipe.mesh, ids[:cut]), ids[cut:]
    moment = lm_mesh.made(recipe.mesh, functools.partial(_begin, config, seed))
    key = lm_mesh.made(recipe.mesh, functools.partial(jax.random.key, seed + 1))
    start, done = time.perf_counter(), 0
    ran: set[str] = set()
    while done < recipe.steps:
        count = min(recipe.every, recipe.steps - done)
        with chosen() as names:
            moment, loss = _steps(config, recipe, count, moment, learnt, key)
        ran.update(names)
        done += count
        other = evaluate(config, recipe, moment.params, held_out)
        seconds = time.perf_counter() - start
        yield Line(done, float(loss), other, seconds, "+".join(sorted(ran)))
    if jax.process_index() == 0:
        checkpoint.save(folder, described, moment.params)


def _begin(config: Config, seed: int) -> Moment:
    params = random_params(config, seed, jnp.float32)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return Moment(params, zeros(params), zeros(params), jnp.asarray(0, jnp.int32))


def _must_fit(config: Config, recipe: Recipe) -> None:
    """Refuses a batch whose activations alone, which the backward needs, are more than there is."""
    width = config.heads * config.head_dim
    layer = 4 * config.hidden + 2 * width + 3 * config.mlp
    numbers = recipe.batch * recipe.context * (config.layers * layer + config.vocab)
    needed = numbers * np.dtype(jnp.dtype(recipe.dtype)).itemsize + 16 * config.size
    room = memory()
    if recipe.mesh is not None and jax.default_backend() != "cpu":  # devices of a CPU share it
        room *= recipe.mesh.size
    if needed > room:
        raise ValueError(
            f"batch: {recipe.batch} windows of {recipe.context} bytes take more than "
            f"{needed / 1e9:.1f} GB, there are {room / 1e9:.1f} GB; give a smaller --batch or "
            "--context"
        )


def evaluate(config: Config, recipe: Recipe, params: Params, ids: np.ndarray) -> float:
    """Mean nats a byte over whole windows of `ids`, at most 64 of them."""
    width = recipe.context + 1
    count = min(len(ids) // width, 64)
    windows = lm_mesh.everywhere(recipe.mesh, ids[: count * width].reshape(count, width))
    return float(_evaluate(config, recipe, params, windows))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(config: Config, recipe: Recipe, params: Params, windows: Array) -> Array:
    alone = dataclasses.replace(recipe, mesh=None)
    rows = jax.lax.map(lambda row: _loss(params, config, alone, row[None]), windows)
    return rows.mean()


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _steps(
    config: Config, recipe: Recipe, count: int, moment: Moment, ids: Array, key: Array
) -> tuple[Moment, Array]:
    """`count` steps; the mean of their losses."""

    def step(moment: Moment, _: None) -> tuple[Moment, Array]:
        drawn = jax.random.fold_in(key, moment.step)
        last = ids.size - recipe.context
        starts = jax.random.randint(drawn, (recipe.batch, 1), 0, last)
        windows = jnp.take(ids, starts + jnp.arange(recipe.context + 1)[None], axis=0)
        loss, gradients = jax.value_and_grad(_loss)(moment.params, config, recipe, windows)
        return _adamw(recipe, moment, gradients), loss

    moment, losses = jax.lax.scan(step, moment, None, length=count)
    return moment, losses.mean()


def _loss(params: Params, config: Config, recipe: Recipe, windows: Array) -> Array:
    """Mean nats a byte of windows uint8[b, t + 1]."""
    tokens = windows.astype(jnp.int32)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    if recipe.mesh is None:
        return _loss_of_rows(params, config, recipe, tokens, targets)
    sizes, context = dict(recipe.mesh.shape), None
    if "cp" in sizes:
        context = Context("cp", "zigzag")
        tokens, targets = (context.reorder(x, sizes["cp"]) for x in (tokens, targets))

    def local(params: Params, tokens: Array, targets: Array) -> Array:
        loss = _loss_of_rows(params, config, recipe, tokens, targets, context)
        return jax.lax.pmean(loss, tuple(sizes))

    rows = P(*(axis if axis in sizes else None for axis in ("dp", "cp")))
    mapped = jax.shard_map(local, mesh=recipe.mesh, in_specs=(P(), rows, rows), out_specs=P())
    return mapped(params, tokens, targets)


def _loss_of_rows(
    params: Params,
    config: Config,
    recipe: Recipe,
    tokens: Array,
    targets: Array,
    context: Context | None = None,
) -> Array:
    """Mean nats a byte of tokens int32[b, t] whose next ones are `targets`."""
    params = jax.tree.map(lambda x: x.astype(recipe.dtype), params)
    logits = forward(config, params, tokens, implementation=recipe.implementation, context=context)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - target).mean()


def _adamw(recipe: Recipe, moment: Moment, gradients: Params) -> Moment:
    """One step of AdamW: gradients clipped by their norm, decay for matrices only."""
    step = moment.step + 1
    now = step.astype(jnp.float32)
    warm = jnp.minimum(now / recipe.warmup, 1.0)
    done = jnp.minimum(now / recipe.steps, 1.0)
    rate = recipe.learning_rate * warm * (0.55 + 0.45 * jnp.cos(jnp.pi * done))
    squares = [jnp.sum(x * x) for x in jax.tree.leaves(gradients)]
    shrink = jnp.minimum(1.0, recipe.clip / (jnp.sqrt(sum(squares[1:], squares[0])) + 1e-6))
    first = 1 - recipe.beta1**now
    second = 1 - recipe.beta2**now

    def update(path: Sequence[Any], param: Array, gradient: Array, mean: Array, square: Array):
        gradient = gradient * shrink
        mean = recipe.beta1 * mean + (1 - recipe.beta1) * gradient
        square = recipe.beta2 * square + (1 - recipe.beta2) * gradient * gradient
        move = mean / first / (jnp.sqrt(square / second) + 1e-8)
        if not path[-1].key.endswith(("norm", "bias")):
            move = move + recipe.weight_decay * param
        return param - rate * move, mean, square

    paths, tree = jax.tree.flatten_with_path(moment.params)
    others = (jax.tree.leaves(x) for x in (gradients, moment.mean, moment.square))
    moved = [update(*leaf, *rest) for leaf, *rest in zip(paths, *others, strict=True)]
    params, mean, square = (jax.tree.unflatten(tree, x) for x in zip(*moved, strict=True))
    return Moment(params, mean, square, step)


def read_text(path: str) -> bytes:
    """The bytes of a file."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"text: {path}: {error.strerror or error}") from None
