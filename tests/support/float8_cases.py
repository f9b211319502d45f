"""Calls of `flash_attention` on float8 by name, for the reference and for kernels."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_attn as pa

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def draw(  # noqa: PLR0913
    rng, batch=1, q_len=32, kv_len=32, q_heads=2, kv_heads=1, dim=16, v_dim=None, dtype=E4M3
) -> tuple[Any, ...]:
    """q, k and v of normal numbers."""
    shapes = (
        (batch, q_len, q_heads, dim),
        (batch, kv_len, kv_heads, dim),
        (batch, kv_len, kv_heads, v_dim or dim),
    )
    return tuple([jnp.asarray(rng.standard_normal(s), jnp.float32).astype(dtype) for s in shapes])


def _scales(rng, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Scales between a half and 2, by "q", "k" and "v"."""
    return {
        f"{name}_scale": jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32)
        for name, shape in shapes.items()
    }


def _past(x: Any, ends: tuple[int, ...], by: float) -> Any:
    for row, end in enumerate(ends):
        x = x.at[row, end:].set(by)
    return x


# Sizes and dtype, shapes of scales, other arguments.
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "plain": ({"q_len": 128, "kv_len": 300, "dim": 64}, {}, {}),
    "numbers": ({"dim": 128}, {"q": (), "k": (), "v": ()}, {"mask": pa.CAUSAL}),
    "heads": (
        {"batch": 2, "q_len": 70, "kv_len": 140, "q_heads": 4, "kv_heads": 2, "dim": 64},
        {"q": (2, 1, 4), "k": (2,), "v": (2, 1, 2)},
        {"mask": pa.CAUSAL, "q_offset": 70},
    ),
    "rows": (
        {"batch": 2, "q_len": 70, "kv_len": 140, "q_heads": 4, "kv_heads": 2, "dim": 64},
        {"q": (1, 70, 1), "k": (2, 140, 2), "v": (1, 140, 2)},
        {"mask": pa.CAUSAL, "q_offset": 70},
    ),
    "blocks": (
        {"q_len": 256, "kv_len": 512, "dim": 64},
        {"q": (1, 4, 1), "k": (1, 2, 1), "v": (1, 4, 1)},
        {"mask": pa.sliding_window(200), "q_offset": 256},
    ),
    "short_blocks": (
        {"q_len": 129, "kv_len": 301, "dim": 64},
        {"q": (1, 2, 1), "k": (1, 3, 1), "v": (1, 3, 1)},
        {"mask": pa.CAUSAL, "q_offset": 172},
    ),
    "blocks_of_128": (  # 3 divides 300
        {"q_len": 150, "kv_len": 300, "dim": 64},
        {"q": (1, 2, 1), "k": (1, 3, 1), "v": (1, 3, 1)},
        {"mask": pa.CAUSAL, "q_offset": 150},
    ),
    "small_blocks": (
        {"q_len": 132, "kv_len": 300, "dim": 64},
        {"q": (1, 4, 1), "k": (1, 12, 1), "v": (1, 5, 1)},
        {},
    ),
    "e5m2": ({"q_len": 65, "kv_len": 130, "dim": 64, "dtype": E5M2}, {"v": ()}, {}),
    "float16": ({"q_len": 65, "kv_len": 130, "dim": 32}, {}, {"out_dtype": jnp.float16}),
    "odd": ({"q_len": 13, "kv_len": 37, "dim": 80, "v_dim": 24}, {}, {"softcap": 3.0}),
    "wide": ({"q_len": 64, "kv_len": 200, "dim": 256}, {"k": ()}, {"mask": pa.CAUSAL}),
    "mla": ({"q_len": 64, "kv_len": 200, "dim": 192, "v_dim": 128}, {}, {"mask": pa.CAUSAL}),
    "fast": (
        {"q_len": 64, "kv_len": 200, "dim": 128},
        {},
        {"precision": "ANY_F8_ANY_F8_F32_FAST_ACCUM"},
    ),
    "lengths": (
        {"batch": 3, "q_len": 70, "kv_len": 300, "dim": 64},
        {"k": (3, 300, 1), "v": (3, 300, 1)},
        {"mask": pa.CAUSAL, "q_lengths": (70, 50, 0), "kv_lengths": (10, 0, 300)},
    ),
    "documents": (
        {"q_len": 200, "kv_len": 200, "dim": 64},
        {"k": (1, 200, 1)},
        {"mask": pa.CAUSAL, "segment_ids": (0,) * 90 + (1,) * 110},
    ),
    "bias": (
        {"q_len": 96, "kv_len": 144, "dim": 64},
        {"k": (1, 144, 1), "v": (1, 144, 1)},
        {"bias": (1, 2, 96, 144)},
    ),
    "mask_array": ({"q_len": 96, "kv_len": 144, "dim": 64}, {}, {"mask_array": (1, 1, 96, 144)}),
    "sinks": ({"q_len": 96, "kv_len": 144, "dim": 64}, {"q": ()}, {"sinks": (2,)}),
}


def case_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a case, and those with finite numbers past lengths for the oracle."""
    sizes, shapes, options = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    arguments = dict(zip("qkv", draw(rng, **sizes), strict=True)) | _scales(rng, **shapes) | options
    if "segment_ids" in options:
        arguments["segment_ids"] = (jnp.array([options["segment_ids"]], jnp.int32),) * 2
    if "bias" in options:
        arguments["bias"] = jnp.asarray(rng.standard_normal(options["bias"]), jnp.float32)
    if "mask_array" in options:
        arguments["mask_array"] = jnp.asarray(rng.random(options["mask_array"]) < 0.7)
    if "sinks" in options:
        arguments["sinks"] = jnp.asarray(rng.standard_normal(options["sinks"]), jnp.float32)
    finite = dict(arguments)
    if "kv_lengths" in options:
        ends = {"q": options["q_lengths"], "k": options["kv_lengths"], "v": options["kv_lengths"]}
        for each, by in ((arguments, jnp.nan), (finite, 0.0)):
            each |= {x: _past(each[x], end, by) for x, end in ends.items()}
            for x in "kv":
                each[f"{x}_scale"] = _past(each[f"{x}_scale"], ends[x], by)
            each |= {x: jnp.array(options[x], jnp.int32) for x in ("q_lengths", "kv_lengths")}
    return arguments, finite
