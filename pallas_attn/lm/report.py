"""Where the time of a step goes, over batch sizes: a JSON file and a plot.

Parts are timed as programs of their own at the sizes of the step: append and attention over all
layers, sampling over the vocabulary. Matmuls are what the whole step takes beyond these (norms and
rotations ride along), the host is wall time that the device did not work in. On a GPU the time of
kernels is CUPTI's; elsewhere it is the wall's, and the host cannot be told apart.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn.append import write_kv
from pallas_attn.bench import rows, timing
from pallas_attn.decode import decode_attention
from pallas_attn.lm import decode, model
from pallas_attn.lm.decode import Options
from pallas_attn.lm.model import Config, Params
from pallas_attn.lm.sampling import sample

Array = jax.Array
Row = dict[str, Any]
PARTS = ("append", "attention", "matmuls", "sampling", "host")
_TURNS = 3


def measure(
    config: Config,
    params: Params,
    options: Options,
    context: int,
    batches: Sequence[int],
    commit: str | None = None,
) -> list[Row]:
    """A row a batch size: a step with `context` rows in every sequence."""
    provenance = dataclasses.asdict(rows.Provenance.here(commit))
    read = read_rate()
    found = []
    for batch in batches:
        chosen = dataclasses.replace(options, slots=batch, keep_logits=False, stop=(), pages=None)
        row = _row(config, params, chosen, context, read)
        found.append(row | {"read_tbps": round(read, 4)} | provenance)
    return found


def _row(config: Config, params: Params, options: Options, context: int, read: float) -> Row:
    wall, device = _step(config, params, options, context)
    ms = {"append": _append(config, options, context)}
    ms["attention"] = _attention(config, options, context)
    ms["sampling"] = _sampling(config, options)
    ms["matmuls"] = max(device - sum(ms.values()), 0.0)
    ms["host"] = max(wall - device, 0.0)
    kv = config.kv_bytes(options.dtype) * context * options.slots
    weights = _weights_read(config, params)
    best = (weights + kv) / read / 1e9
    return {
        "op": "decode_loop",
        "impl": f"pallas_attn/{options.cache}",
        "batch": options.slots,
        "context": context,
        "ms_step": round(wall, 4),
        "ms": {name: round(ms[name], 4) for name in PARTS},
        "tokens_per_second": round(options.slots / wall * 1e3, 1),
        "weight_bytes": weights,
        "live_kv_bytes": kv,
        "roofline": round(best / wall, 4),
        "kv_roofline": round(kv / read / 1e9 / (ms["append"] + ms["attention"]), 4),
        "problem": {"model": dataclasses.asdict(config), "dtype": options.dtype},
    }


def _weights_read(config: Config, params: Params) -> int:
    """Bytes of weights that a step reads: of an embedding that is no head, next to nothing."""
    embed = 0 if config.tied else params["embed"].nbytes
    return model.num_bytes(params) - embed


def read_rate() -> float:
    """TB/s that a sum over a large array reads."""
    on_gpu = jax.default_backend() == "gpu"
    nbytes = 2**32 if on_gpu else 2**27
    block = jax.random.normal(jax.random.key(0), (nbytes // 4,), jnp.float32)
    total = jax.jit(lambda x: x.reshape(4096, -1).sum(axis=1))
    return nbytes / _device_ms(lambda: total(block)) / 1e9


def filled(config: Config, options: Options, context: int) -> Any:
    """A cache with `context` rows of random numbers in every sequence."""
    if not 0 < context < options.capacity:
        raise ValueError(f"context: expected 1 to {options.capacity - 1} rows, got {context}")
    cache = options.create_cache(config)
    leaves, tree = jax.tree.flatten((cache.k, cache.v))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [_normal_like(x, key) for x, key in zip(leaves, keys, strict=True)]
    k, v = jax.tree.unflatten(tree, drawn)
    return jax.jit(lambda x: x.extend(context))(dataclasses.replace(cache, k=k, v=v))


@jax.jit(donate_argnums=0)
def _normal_like(x: Array, key: Array) -> Array:
    return jax.random.normal(key, x.shape, x.dtype)


# ---- the parts ----------------------------------------------------------------------------------


def _step(config: Config, params: Params, options: Options, context: int) -> tuple[float, float]:
    """ms of a step: (wall, device)."""
    cache = filled(config, options, context - options.chunk * (2 * _TURNS + 1) // 2)
    state = decode.State.create(options.slots)
    many = jnp.full(options.slots, 2**30, jnp.int32)
    carry = [(cache, dataclasses.replace(state, left=many))]

    def chunk() -> Array:
        cache, state, tokens, _ = decode.steps(config, options, params, *carry.pop())
        carry.append((cache, state))
        return tokens

    chunk().block_until_ready()
    wall = min(_wall_ms(chunk) for _ in range(_TURNS))
    device = _device_ms(chunk) if jax.default_backend() == "gpu" else wall
    return wall / options.chunk, device / options.chunk


def _append(config: Config, options: Options, context: int) -> float:
    shape = (options.slots, 1, config.kv_heads, config.head_dim)
    k, v = (jax.random.normal(jax.random.key(n), shape, options.dtype) for n in (2, 3))

    @jax.jit(donate_argnums=0)
    def all_layers(cache: Any, k: Array, v: Array) -> Any:
        def one(cache: Any, layer: Array):
            how = options.implementation
            return write_kv(cache, k, v, layer=layer, implementation=how), None

        layers = jnp.arange(config.layers, dtype=jnp.int32)
        return jax.lax.scan(one, cache.extend(1), layers)[0]

    carry = [filled(config, options, context - _TURNS - 2)]

    def append() -> Array:
        carry.append(all_layers(carry.pop(), k, v))
        return carry[0].lengths

    return _device_ms(append)


def _attention(config: Config, options: Options, context: int) -> float:
    shape = (options.slots, config.heads, config.head_dim)
    q = jax.random.normal(jax.random.key(4), shape, options.dtype)
    cache = filled(config, options, context)
    masks = [mask for count, mask in config.runs for _ in range(count)]

    @jax.jit
    def all_layers(cache: Any, q: Array) -> Array:
        first = 0
        for count, mask in config.runs:

            def one(q: Array, layer: Array, mask=mask):
                how = options.implementation
                out = decode_attention(q, cache, layer=layer, mask=mask, implementation=how)
                return out.astype(q.dtype), None

            layers = jnp.arange(first, first + count, dtype=jnp.int32)
            q, first = jax.lax.scan(one, q, layers)[0], first + count
        return q

    assert len(masks) == config.layers
    return _device_ms(lambda: all_layers(cache, q))


def _sampling(config: Config, options: Options) -> float:
    logits = jax.random.normal(jax.random.key(5), (options.slots, config.vocab), jnp.float32)
    keys = jax.random.split(jax.random.key(6), options.slots)
    choose = jax.jit(lambda x, keys: sample(x, keys, options.sampling))
    return _device_ms(lambda: choose(logits, keys))


def _wall_ms(call: Callable[[], Array]) -> float:
    start = time.perf_counter()
    call().block_until_ready()
    return (time.perf_counter() - start) * 1e3


def _device_ms(call: Callable[[], Array]) -> float:
    """ms that the device takes for a call, after one that is not counted."""
    call().block_until_ready()
    if jax.default_backend() != "gpu":
        return min(_wall_ms(call) for _ in range(_TURNS))
    subject = timing.Subject("part", call)
    return min(sample.ms for sample in timing.CuptiTimer()(subject, _TURNS))


# ---- what is left behind ------------------------------------------------------------------------


def write(folder: str, found: Sequence[Row], run: Row) -> list[str]:
    """report.json, and report.png where matplotlib is there: their paths."""
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"run": run, "steps": list(found)}, indent=2)
    (path / "report.json").write_text(text + "\n", "utf-8")
    try:
        import matplotlib.figure
    except ImportError:
        return [str(path / "report.json")]
    figure = matplotlib.figure.Figure((10, 4.2), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2)
    _draw_parts(left, found)
    _draw_rates(right, found)
    facts = found[0]
    figure.suptitle(
        f"A decode step: {facts['gpu']}, JAX {facts['jax']}, context {facts['context']}",
        fontsize=11,
    )
    figure.savefig(path / "report.png")
    return [str(path / "report.json"), str(path / "report.png")]


_COLOURS = ("#E69F00", "#003f5c", "#56B4E9", "#CC79A7", "#BBBBBB")  # Okabe and Ito's, as in bench


def _draw_parts(axis: Any, found: Sequence[Row]) -> None:
    """Shares of a step, a bar a batch size, the step's time above it."""
    names = [str(row["batch"]) for row in found]
    base = [0.0] * len(found)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        shares = [row["ms"][part] / sum(row["ms"].values()) for row in found]
        axis.bar(names, shares, bottom=base, color=colour, label=part)
        base = [a + b for a, b in zip(base, shares, strict=True)]
    for n, row in enumerate(found):
        axis.text(n, 1.01, f"{row['ms_step']:.2f} ms", ha="center", fontsize=8)
    axis.set_ylim(0, 1.08)
    axis.set_xlabel("sequences")
    axis.set_ylabel("share of a step")
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _draw_rates(axis: Any, found: Sequence[Row]) -> None:
    """Tokens a second, and what reading weights and live rows alone would allow."""
    batches = [row["batch"] for row in found]
    rates = [row["tokens_per_second"] for row in found]
    bounds = [row["tokens_per_second"] / row["roofline"] for row in found]
    axis.loglog(batches, bounds, "--", color="#444444", label="memory's bound")
    axis.loglog(batches, rates, "o-", color="#003f5c", label="measured")
    for row in found:
        share = f"{100 * row['roofline']:.0f} %"
        axis.annotate(share, (row["batch"], row["tokens_per_second"]), (4, -12),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axis.set_xlabel("sequences")
    axis.set_ylabel("tokens/s")
    axis.legend(frameon=False, fontsize=8)
