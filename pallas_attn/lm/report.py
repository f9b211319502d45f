"""Where the time of a step goes, over batch sizes: rows, a JSON file and a plot.

Parts are timed as programs of their own at the sizes of the step: append and attention over all
layers, sampling over the vocabulary. Matmuls are what the whole step takes beyond these (norms and
rotations ride along), the host is wall time that no kernel ran in. On a GPU the time of kernels is
CUPTI's, and the same loop as people write it today is timed beside ours; elsewhere time is the
wall's, and the host cannot be told apart. Where kernels overlap their times add up to more than the
step's, and then the device is said to have worked all of it.

On a mesh a step is that of all devices, and so are bytes and the rate at which memory is read; the
time of kernels is the mean of the devices, and sums over devices count as matmuls. The loop beside
ours is split over the same devices.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_attn.append import write_kv
from pallas_attn.bench import rows, timing
from pallas_attn.decode import decode_attention
from pallas_attn.lm import check, decode, model, peer
from pallas_attn.lm import mesh as lm_mesh
from pallas_attn.lm.model import Config, Params
from pallas_attn.lm.options import Options
from pallas_attn.lm.sampling import Sampling, sample

Array = jax.Array
Row = dict[str, Any]
Say = Callable[[str], None]
PARTS = ("append", "attention", "matmuls", "sampling", "host")
_TURNS = 3
_PROMPTS = (8, 2048)  # of the first token: how many, how long


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is measured: a model at a context."""

    name: str
    config: Config
    params: Params
    options: Options
    context: int  # rows in every sequence

    @property
    def split(self) -> dict[str, Any]:
        """Over how many devices, where there are several."""
        mesh = self.options.mesh
        return {} if mesh is None else {"devices": mesh.size}

    @property
    def case(self) -> str:
        """The start of the names of its cases."""
        return "".join([self.name, *(f"_tp{n}" for n in self.split.values())])

    def at(self, cache: str, batch: int) -> Options:
        """The options of a step of `batch` sequences."""
        return dataclasses.replace(
            self.options,
            cache=cache,
            slots=batch,
            capacity=room(self.context, self.options.chunk),
            keep_logits=False,
            stop=(),
            pages=None,
            prefill_chunk=None,
            draft=None,
            samples=1,
        )


def room(context: int, chunk: int) -> int:
    """The capacity that a context takes, with the steps that are timed."""
    return -(-(context + (2 * _TURNS + 2) * chunk) // 64) * 64


@dataclasses.dataclass(frozen=True)
class Rate:
    """ms of a call, of several that were timed."""

    ms: float
    ms_min: float
    n: int
    kernels: int = 0

    @classmethod
    def of(cls, found: Sequence[float], kernels: int = 0) -> "Rate":
        return cls(statistics.median(found), min(found), len(found), kernels)


def _nothing(line: str) -> None:
    del line


def prepare(
    subject: Subject,
    batches: Sequence[int],
    say: Say = _nothing,
    others: Sequence[Callable[[], Any]] = (),
) -> list[Options]:
    """Compiles what `measure` times, beside `others`, and looks whether it is right: the steps that
    it is to measure, of each batch size with the cache asked for, and with the stacked one.

    Side by side in threads it takes a third of the time.
    """
    caches = dict.fromkeys((subject.options.cache, "stacked"))
    asked = [subject.at(cache, batch) for batch in batches for cache in caches]
    jobs: list[Callable[[], Any]] = [
        functools.partial(_compile, subject, options, say) for options in reversed(asked)
    ]
    if _compared(subject):
        peers = [subject.at("stacked", batch) for batch in batches]
        jobs += [functools.partial(_compile_peer, subject, options, say) for options in peers]
    if _on_gpu() and subject.config.positions > _PROMPTS[1]:
        jobs.append(functools.partial(_prompted, subject))
    jobs += [*(functools.partial(_must_hold, subject, cache, say) for cache in caches), *others]
    # Programs of several devices that run side by side would wait for each other's devices.
    threads = len(jobs) if subject.options.mesh is None else 1
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()
    return asked


def measure(
    subject: Subject, asked: Sequence[Options], commit: str | None = None, say: Say = _nothing
) -> Iterator[Row]:
    """A row a step, and on a GPU the peer's beside each. Rows come as they are measured; `say`
    hears how far it is.
    """
    provenance = dataclasses.asdict(rows.Provenance.here(commit))
    for row in _measure(subject, asked, say):
        yield row | provenance


def _measure(subject: Subject, asked: Sequence[Options], say: Say) -> Iterator[Row]:
    read = read_rate(subject.options.mesh)
    yield {"op": "ceiling", "case": "read", "impl": "xla", "tbps": round(read, 4)}
    for options in asked:
        row = _row(subject, options, read, say)
        yield row
        if _compared(subject):
            theirs = _peer_row(subject, subject.at("stacked", options.slots), read)
            yield theirs | {"case": row["case"]}
    if _on_gpu() and subject.config.positions > _PROMPTS[1]:
        yield _first_token(subject)


def _compared(subject: Subject) -> bool:
    return _on_gpu() and not subject.config.windows


def _compile(subject: Subject, options: Options, say: Say) -> None:
    config, mesh = subject.config, options.mesh
    shapes = functools.partial(lm_mesh.shapes, mesh)
    params = _shapes_of(subject, subject.params)
    cache = shapes(functools.partial(options.create_cache, config), lm_mesh.HEADS)
    state = shapes(functools.partial(decode.State.create, options))
    lengths = shapes(lambda: jnp.zeros(options.slots, jnp.int32))
    rows, q = (shapes(functools.partial(x, config, options), lm_mesh.HEADS)
               for x in (_new_rows, _queries))  # fmt: skip
    decode.steps.lower(config, options, params, cache, state).compile()
    _all_appends.lower(config, options, cache, *rows).compile()
    _all_attentions.lower(config, options, cache, q).compile()
    _holding.lower(cache, lengths).compile()
    logits = shapes(functools.partial(_logits, config, options))
    _chosen.lower(options.sampling, *logits).compile()
    say(f"{options.cache}, {options.slots}: compiled")


def _shapes_of(subject: Subject, arrays: Any) -> Any:
    """Arrays by shape; on a mesh with where they lie."""

    def there(x: Array) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    alone = subject.options.mesh is None
    return jax.eval_shape(lambda: arrays) if alone else jax.tree.map(there, arrays)


def _compile_peer(subject: Subject, options: Options, say: Say) -> None:
    mesh = options.mesh
    caches = lm_mesh.shapes(
        mesh,
        lambda: peer.create(subject.config, dataclasses.replace(options, mesh=None), 7),
        lm_mesh.HEADS,
    )
    numbers = lm_mesh.shapes(mesh, lambda: jnp.zeros(options.slots, jnp.int32))
    params = _shapes_of(subject, subject.params)
    program = _peer_program(subject.config, options)
    program.lower(params, (caches, numbers, numbers)).compile()
    say(f"cudnn, {options.slots}: compiled")


def _must_hold(subject: Subject, cache: str, say: Say) -> None:
    """Nothing is timed that is wrong: two layers of the model, beside the reference."""
    config, params = subject.config, subject.params
    if not config.windows:
        count = min(2, config.layers)
        config = dataclasses.replace(config, layers=count)
        params = params | {"runs": (jax.tree.map(lambda x: x[:count], params["runs"][0]),)}
    options = dataclasses.replace(subject.at(cache, 2), capacity=128, chunk=4, keep_logits=True)
    prompts = np.random.default_rng(0).integers(0, config.vocab, (3, 33)).tolist()
    run = decode.Run(config, params, options, prompts, 9)
    for _ in run:
        pass
    for row in check.rows(run, params):
        if not row.held:
            raise ValueError(f"report: the {cache} cache decodes wrongly, nothing is timed: {row}")
    say(f"{cache}: two layers are the reference's")


def _row(subject: Subject, options: Options, read: float, say: Say) -> Row:
    config = subject.config
    cache, wall, device = _step(subject, options, filled(config, options))
    say(f"{options.cache}, {options.slots}: {wall.ms:.3f} ms a step, kernels {device:.3f}")
    cache = _hold(cache, subject.context, options.mesh)
    ms = {"attention": _attention(config, options, cache)}
    ms["append"] = _append(config, options, cache)
    ms["sampling"] = _sampling(config, options)
    ms["matmuls"] = max(device - sum(ms.values()), 0.0)
    ms["host"] = max(wall.ms - device, 0.0)
    row = _facts(subject, options, wall, read)
    kv = row["live_kv_bytes"]
    return row | {
        "impl": f"pallas_attn/{options.cache}",
        "parts": {name: round(ms[name], 4) for name in PARTS},
        "kv_roofline": round(kv / read / 1e9 / (ms["append"] + ms["attention"]), 4),
    }


def _facts(subject: Subject, options: Options, wall: Rate, read: float) -> Row:
    """What a row says of any implementation of the step."""
    config, batch = subject.config, options.slots
    kv = config.kv_bytes(options.dtype) * subject.context * batch
    weights = _weights_read(config, subject.params)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    sizes = {"batch": batch, "context": subject.context, "dtype": options.dtype}
    sizes |= subject.split
    return {
        "op": "decode_loop",
        "case": f"{subject.case}_{options.cache}_b{batch}_s{subject.context}",
        "problem": {"model": subject.name, **sizes, "chunk": options.chunk},
        **{name: round(x, 5) for name, x in dataclasses.asdict(wall).items()},
        "tbps": round((weights + kv) / wall.ms / 1e9, 4),
        "checked": True,
        "tokens_per_second": round(batch / wall.ms * 1e3, 1),
        "weight_bytes": weights,
        "live_kv_bytes": kv,
        "roofline": round((weights + kv) / read / 1e9 / wall.ms, 4),
        "peak_bytes": peak,
    }


def _peer_row(subject: Subject, options: Options, read: float) -> Row:
    """`dynamic_update_slice` and cuDNN."""
    program = _peer_program(subject.config, options)
    carry = [_peer_state(subject, options)]

    def chunk() -> Array:
        state, tokens = program(subject.params, carry.pop())
        carry.append(state)
        return tokens

    wall = _pace(chunk, options.chunk)
    return _facts(subject, options, wall, read) | {"impl": "cudnn"}


@functools.cache
def _peer_program(config: Config, options: Options) -> Any:
    step = functools.partial(peer.steps, config, options, "cudnn")
    return jax.jit(step, donate_argnums=1, compiler_options=peer.COMPILER)


def _peer_state(subject: Subject, options: Options) -> Any:
    lengths = _each(options.mesh, options.slots, _before(subject, options))
    tokens = _each(options.mesh, options.slots, 0)
    return peer.create(subject.config, options, 7), lengths, tokens


def _prompted(subject: Subject) -> float:
    """ms from prompts to the first token of each: one prefill."""
    count, length = _PROMPTS
    options = dataclasses.replace(subject.at(subject.options.cache, count), capacity=length + 64)
    drawn = np.random.default_rng(0).integers(0, subject.config.vocab, (count, length))
    run = decode.Run(subject.config, subject.params, options, drawn.tolist(), 1)
    start = time.perf_counter()
    for _ in run:
        pass
    return (time.perf_counter() - start) * 1e3


def _first_token(subject: Subject) -> Row:
    count, length = _PROMPTS
    found = [_prompted(subject) for _ in range(_TURNS + 1)]
    rate = Rate.of(found[1:])
    work = 2 * count * length * sum(x.size for x in jax.tree.leaves(subject.params["runs"]))
    return {
        "op": "first_token",
        "case": f"{subject.case}_b{count}_s{length}",
        "impl": f"pallas_attn/{subject.options.cache}",
        "problem": {"model": subject.name, "batch": count, "length": length} | subject.split,
        **{name: round(x, 5) for name, x in dataclasses.asdict(rate).items()},
        "tflops": round(work / rate.ms / 1e9, 1),
        "checked": True,
    }


def _weights_read(config: Config, params: Params) -> int:
    """Bytes of weights that a step reads: of an embedding that is no head, next to nothing."""
    embed = 0 if config.tied else params["embed"].nbytes
    return model.num_bytes(params) - embed


def read_rate(mesh: Mesh | None = None) -> float:
    """TB/s that a sum over a large array reads; of all devices of a mesh together."""
    nbytes = 2**32 * (1 if mesh is None else mesh.size) if _on_gpu() else 2**27
    devices = 1 if mesh is None else mesh.size
    count = -(-nbytes // 2**22 // devices) * devices

    def create() -> Array:
        drawn = jax.random.normal(jax.random.key(0), (1, 2**20), jnp.float32)
        return jnp.tile(drawn, (count, 1))

    block = lm_mesh.made(mesh, create, lm_mesh.HEADS)
    total = jax.jit(lambda x: x.reshape(-1, 2**18).sum(axis=1))
    return block.nbytes / _device_ms(lambda: total(block), mesh) / 1e9


def filled(config: Config, options: Options) -> Any:
    """An empty cache whose buffers are full of random numbers."""
    create = functools.partial(options.create_cache, config)
    cache = lm_mesh.made(options.mesh, create, lm_mesh.HEADS)
    leaves, tree = jax.tree.flatten((cache.k, cache.v))
    fill = [_filler(None if options.mesh is None else x.sharding) for x in leaves]
    drawn = [one(x, n) for n, (one, x) in enumerate(zip(fill, leaves, strict=True))]
    k, v = jax.tree.unflatten(tree, drawn)
    return dataclasses.replace(cache, k=k, v=v)


def _hold(cache: Any, rows: int, mesh: Mesh | None) -> Any:
    """The cache with `rows` rows in every sequence, whatever it held."""
    return _holding(cache, _each(mesh, cache.num_sequences, rows))


def _each(mesh: Mesh | None, count: int, number: int) -> Array:
    """int32[count] of one number."""
    return lm_mesh.everywhere(mesh, np.full(count, number, np.int32))


@jax.jit(donate_argnums=0)
def _holding(cache: Any, lengths: Array) -> Any:
    return cache.reset(jnp.ones(lengths.shape, bool)).extend(lengths)


@functools.cache
def _filler(where: Any) -> Any:
    """(array, seed) -> random numbers in its place."""

    def normal(x: Array, seed: Array) -> Array:
        return jax.random.normal(jax.random.key(seed), x.shape, x.dtype)

    return jax.jit(normal, donate_argnums=0, out_shardings=where)


# ---- the parts ----------------------------------------------------------------------------------


def _before(subject: Subject, options: Options) -> int:
    """Rows at the start, so that the chunks that are timed lie around the context."""
    return max(subject.context - (2 + _TURNS // 2) * options.chunk, 1)


def _step(subject: Subject, options: Options, cache: Any) -> tuple[Any, Rate, float]:
    """The cache on, a step's wall time, and ms of it that the device works."""
    config = subject.config
    mesh = options.mesh
    state = lm_mesh.made(mesh, functools.partial(decode.State.create, options))
    state = dataclasses.replace(state, left=_each(mesh, options.slots, 2**30))
    carry = [(_hold(cache, _before(subject, options), mesh), state)]
    del cache

    def chunk() -> Array:
        cache, state, tokens, _ = decode.steps(config, options, subject.params, *carry.pop())
        carry.append((cache, state))
        return tokens

    wall = _pace(chunk, options.chunk)
    if not _on_gpu():
        return carry.pop()[0], wall, wall.ms
    ms, count = _of_kernels("step", chunk, options.mesh)
    wall = dataclasses.replace(wall, kernels=round(count / options.chunk))
    return carry.pop()[0], wall, min(ms / options.chunk, wall.ms)


def _append(config: Config, options: Options, cache: Any) -> float:
    new = functools.partial(_new_rows, config, options)
    k, v = lm_mesh.made(options.mesh, new, lm_mesh.HEADS)
    carry = [cache]

    def append() -> Array:
        carry.append(_all_appends(config, options, carry.pop(), k, v))
        return carry[0].lengths

    return _device_ms(append, options.mesh)


def _new_rows(config: Config, options: Options) -> list[Array]:
    shape = (options.slots, 1, config.kv_heads, config.head_dim)
    return [jax.random.normal(jax.random.key(n), shape, options.dtype) for n in (2, 3)]


@jax.jit(static_argnums=(0, 1), donate_argnums=2)
def _all_appends(config: Config, options: Options, cache: Any, k: Array, v: Array) -> Any:
    def run(config: Config, cache: Any, k: Array, v: Array) -> tuple[Any, Array]:
        def one(cache: Any, layer: Array):
            return write_kv(cache, k, v, layer=layer, implementation=options.implementation), None

        layers = jnp.arange(config.layers, dtype=jnp.int32)
        return jax.lax.scan(one, cache.extend(1), layers)[0], k

    return lm_mesh.over_heads(options.mesh, config, run, cache, k, v)[0]


def _attention(config: Config, options: Options, cache: Any) -> float:
    q = lm_mesh.made(options.mesh, functools.partial(_queries, config, options), lm_mesh.HEADS)
    return _device_ms(lambda: _all_attentions(config, options, cache, q), options.mesh)


def _queries(config: Config, options: Options) -> Array:
    shape = (options.slots, config.heads, config.head_dim)
    return jax.random.normal(jax.random.key(4), shape, options.dtype)


@jax.jit(static_argnums=(0, 1))
def _all_attentions(config: Config, options: Options, cache: Any, q: Array) -> Array:
    def run(config: Config, cache: Any, q: Array) -> tuple[Any, Array]:
        first = 0
        for count, mask in config.runs:

            def one(q: Array, layer: Array, mask=mask):
                how = options.implementation
                out = decode_attention(q, cache, layer=layer, mask=mask, implementation=how)
                return out.astype(q.dtype), None

            layers = jnp.arange(first, first + count, dtype=jnp.int32)
            q, first = jax.lax.scan(one, q, layers)[0], first + count
        return cache, q

    return lm_mesh.over_heads(options.mesh, config, run, cache, q)[1]


def _sampling(config: Config, options: Options) -> float:
    create = functools.partial(_logits, config, options)
    logits, keys = lm_mesh.made(options.mesh, create)
    return _device_ms(lambda: _chosen(options.sampling, logits, keys), options.mesh)


def _logits(config: Config, options: Options) -> tuple[Array, Array]:
    logits = jax.random.normal(jax.random.key(5), (options.slots, config.vocab), jnp.float32)
    return logits, jax.random.split(jax.random.key(6), options.slots)


@jax.jit(static_argnums=0)
def _chosen(sampling: Sampling, logits: Array, keys: Array) -> Array:
    return sample(logits, keys, sampling)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _wall(call: Callable[[], Array], parts: int) -> Rate:
    """The wall's ms of one of the equal parts of a call."""
    found = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        call().block_until_ready()
        found.append((time.perf_counter() - start) * 1e3 / parts)
    return Rate.of(found)


def _pace(chunk: Callable[[], Array], steps: int) -> Rate:
    """The wall's ms of a step in chunks, each of which is launched while the one before it runs, as
    the loop does.
    """
    chunk().block_until_ready()
    ahead, ends = chunk(), []
    for _ in range(_TURNS + 1):
        now, ahead = ahead, chunk()
        now.block_until_ready()
        ends.append(time.perf_counter() * 1e3 / steps)
    ahead.block_until_ready()
    return Rate.of([after - before for before, after in itertools.pairwise(ends)])


def _device_ms(call: Callable[[], Array], mesh: Mesh | None = None) -> float:
    """ms that the device takes for a call, after one that is not counted."""
    call().block_until_ready()
    if not _on_gpu():
        return _wall(call, 1).ms
    return _of_kernels("part", call, mesh)[0]


def _of_kernels(name: str, call: Callable[[], Array], mesh: Mesh | None) -> tuple[float, float]:
    """ms of the kernels of a call, and how many; of a device of a mesh, in the mean."""
    found = timing.CuptiTimer()(timing.Subject(name, call), _TURNS)
    devices = 1 if mesh is None else len(mesh.local_devices)
    ms = statistics.median(sample.ms for sample in found)
    return ms / devices, statistics.median(sample.kernels for sample in found) / devices
