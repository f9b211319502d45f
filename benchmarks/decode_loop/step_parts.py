"""A decode step, and parts of it as programs of their own, timed at the sizes of the step."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks import timing
from pallas_attn.append import write_kv
from pallas_attn.cache import KVCache
from pallas_attn.decode import decode_attention
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config
from pallas_lm.options import Options
from pallas_lm.sampling import sample
from pallas_lm.state import State

Array = jax.Array
TURNS = 3


class Rate(NamedTuple):
    """ms of a call, of several that were timed."""

    ms: float
    ms_min: float
    n: int
    kernels: int = 0

    @classmethod
    def of(cls, ms: Sequence[float]) -> "Rate":
        return cls(statistics.median(ms), min(ms), len(ms))

    def facts(self) -> dict[str, float]:
        """The fields of a row."""
        return {name: round(x, 5) for name, x in self._asdict().items()}


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


# ---- the programs -------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of the step: `program(*static, cache, *operands)`, or without a cache."""

    name: str
    program: Any  # jitted
    static: tuple[Any, ...]
    create: Callable[[], tuple[Any, ...]]  # random operands
    heads: str | None = lm_mesh.HEADS  # the mesh axis that their heads are split over
    writes: bool = False  # the cache is donated, and is the result

    def compile(self, mesh: Mesh | None, cache: KVCache) -> None:
        """`cache`: by shape."""
        held = () if self.heads is None else (cache,)
        operands = lm_mesh.shapes(mesh, self.create, self.heads)
        self.program.lower(*self.static, *held, *operands).compile()

    def ms(self, mesh: Mesh | None, cache: list[KVCache]) -> float:
        """ms of the device. `cache`: one that a part which writes to it replaces."""
        operands = lm_mesh.made(mesh, self.create, self.heads)

        def call() -> Array:
            if self.writes:
                cache.append(self.program(*self.static, cache.pop(), *operands))
                return cache[0].lengths
            held = () if self.heads is None else cache
            return self.program(*self.static, *held, *operands)

        return device_ms(call, mesh)


def parts(config: Config, options: Options) -> list[Part]:
    """Append and attention over all layers, and sampling over the vocabulary."""

    def normal(seed: int, *shape: int, dtype: str = options.dtype) -> Array:
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    slots, dim, static = options.batch, config.head_dim, (config, options)
    new = (slots, 1, config.kv_heads, dim)
    if config.latent is not None:
        dim = config.latent.row
        new = (slots, 1, 1, dim)

    def rows() -> tuple[Array, ...]:
        k = normal(2, *new)
        return (k,) if config.latent is not None else (k, normal(3, *new))

    def logits() -> tuple[Any, ...]:
        state = State.create(options)
        return normal(5, slots, config.vocab, dtype="float32"), state.key, state.sampling

    return [
        Part("attention", _attend, static, lambda: (normal(4, slots, config.heads, dim),)),
        Part("append", _append, static, rows, writes=True),
        Part("sampling", _sample, (), logits, heads=None),
    ]


@jax.jit(static_argnums=(0, 1), donate_argnums=2)
def _append(config: Config, options: Options, cache: KVCache, *rows: Array) -> KVCache:
    def run(config: Config, cache: KVCache, *rows: Array) -> tuple[KVCache, Array]:
        def write(cache: KVCache, layer: Array) -> tuple[KVCache, None]:
            how: dict[str, Any] = {"layer": layer, "implementation": options.implementation}
            return write_kv(cache, *rows, **how), None

        layers = jnp.arange(config.layers, dtype=jnp.int32)
        return jax.lax.scan(write, cache.extend(1), layers)[0], rows[0]

    return lm_mesh.over_heads(options.mesh, config, run, cache, *rows)[0]


@jax.jit(static_argnums=(0, 1))
def _attend(config: Config, options: Options, cache: KVCache, q: Array) -> Array:
    def run(config: Config, cache: KVCache, q: Array) -> tuple[KVCache, Array]:
        first, implementation = 0, options.implementation
        for count, mask in config.runs:

            def attend(q: Array, layer: Array, mask=mask) -> tuple[Array, None]:
                how: dict[str, Any] = {"layer": layer, "mask": mask}
                out = decode_attention(q, cache, **how, implementation=implementation)
                if (rest := q.shape[-1] - out.shape[-1]) > 0:  # latent attention
                    out = jnp.pad(out, ((0, 0), (0, 0), (0, rest)))
                return out.astype(q.dtype), None

            layers = jnp.arange(first, first + count, dtype=jnp.int32)
            q, first = jax.lax.scan(attend, q, layers)[0], first + count
        return cache, q

    return lm_mesh.over_heads(options.mesh, config, run, cache, q)[1]


_sample = jax.jit(sample)


# ---- caches -------------------------------------------------------------------------------------


def filled(config: Config, options: Options) -> KVCache:
    """An empty cache whose buffers are full of random numbers."""
    create = functools.partial(options.create_cache, config)
    cache = lm_mesh.made(options.mesh, create, lm_mesh.HEADS)
    leaves, tree = jax.tree.flatten((cache.k, cache.v))
    for n, x in enumerate(leaves):
        fill = _filler(None if options.mesh is None else x.sharding)
        leaves[n] = fill(x, n)
    k, v = jax.tree.unflatten(tree, leaves)
    return dataclasses.replace(cache, k=k, v=v)


@functools.cache
def _filler(sharding: NamedSharding | None) -> Callable[[Array, int], Array]:
    def normal(x: Array, seed: Array) -> Array:
        return jax.random.normal(jax.random.key(seed), x.shape, x.dtype)

    return jax.jit(normal, donate_argnums=0, out_shardings=sharding)


@jax.jit(donate_argnums=0)
def hold(cache: KVCache, lengths: Array) -> KVCache:
    """The cache with so many rows in each sequence, whatever it held."""
    return cache.reset(jnp.ones(lengths.shape, bool)).extend(lengths)


def each(mesh: Mesh | None, count: int, number: int) -> Array:
    """int32[count] of one number."""
    return lm_mesh.everywhere(mesh, np.full(count, number, np.int32))


# ---- times --------------------------------------------------------------------------------------


def pace(chunk: Callable[[], Array], steps: int) -> Rate:
    """Wall time of a step in chunks, each launched while the one before runs, as in the loop."""
    chunk().block_until_ready()
    ahead, ends = chunk(), []
    for _ in range(TURNS + 1):
        now, ahead = ahead, chunk()
        now.block_until_ready()
        ends.append(time.perf_counter() * 1e3 / steps)
    ahead.block_until_ready()
    return Rate.of([after - before for before, after in itertools.pairwise(ends)])


def device_ms(call: Callable[[], Array], mesh: Mesh | None = None) -> float:
    """ms that the device takes for a call, after one that is not counted; the wall's without a
    GPU.
    """
    call().block_until_ready()
    if on_gpu():
        return kernels_of("part", call, mesh)[0]
    seconds = []
    for _ in range(TURNS):
        start = time.perf_counter()
        call().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def kernels_of(name: str, call: Callable[[], Array], mesh: Mesh | None) -> tuple[float, float]:
    """(ms of the kernels of a call, how many); on a mesh the mean of the devices."""
    samples = timing.CuptiTimer()(timing.Subject(name, call), TURNS)
    devices = 1 if mesh is None else len(mesh.local_devices)
    ms = statistics.median(sample.ms for sample in samples)
    return ms / devices, statistics.median(sample.kernels for sample in samples) / devices


def read_rate(mesh: Mesh | None = None) -> float:
    """TB/s that a sum over 4 GiB on each GPU reads; on a mesh, all devices together."""
    devices = 1 if mesh is None else mesh.size

    def create() -> Array:
        drawn = jax.random.normal(jax.random.key(0), (1, 2**20), jnp.float32)
        return jnp.tile(drawn, (2**10 * devices, 1))

    block = lm_mesh.made(mesh, create, lm_mesh.HEADS)
    total = jax.jit(lambda x: x.reshape(-1, 2**18).sum(axis=1))
    return block.nbytes / device_ms(lambda: total(block), mesh) / 1e9
