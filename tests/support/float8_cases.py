"""Calls of `flash_attention` on float8 by name, for the reference and for kernels."""

from typing import Any

import jax.numpy as jnp

from pallas_attn import CAUSAL, sliding_window
from tests.support.fuzz_float8 import Case

E4M3 = jnp.float8_e4m3fn


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


def case(sizes, dims=64, kinds: Any = "none", heads=(2, 1), batch=1, **fields: Any) -> Case:
    """`sizes`: T and S; `kinds`: those of the scales of q, k and v, or the one that all have."""
    head_dim, v_head_dim = dims if isinstance(dims, tuple) else (dims, dims)
    fields = {"dtype": "float8_e4m3fn"} | fields
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * 3
    return Case("float8", batch, *sizes, *heads, head_dim, v_head_dim, kinds=kinds, **fields)


TWO: dict[str, Any] = {"batch": 2, "heads": (4, 2), "mask": CAUSAL, "q_offset": 70}
CASES = {
    "plain": case((128, 300)),
    "numbers": case((32, 32), 128, "number", mask=CAUSAL),
    "heads": case((70, 140), 64, "head", **TWO),
    "rows": case((70, 140), 64, "row", **TWO),
    "blocks": case((256, 512), 64, (4, 2, 4), mask=sliding_window(200), q_offset=256),
    "short_blocks": case((129, 301), 64, (2, 3, 3), mask=CAUSAL, q_offset=172),
    "blocks_of_128": case((150, 300), 64, (2, 3, 3), mask=CAUSAL, q_offset=150),  # 3 divides 300
    "small_blocks": case((132, 300), 64, (4, 12, 5)),
    "e5m2": case((65, 130), 64, ("none", "none", "number"), dtype="float8_e5m2"),
    "float16": case((65, 130), 32, out_dtype="float16"),
    "odd": case((13, 37), (80, 24), softcap=3.0),
    "wide": case((64, 200), 256, ("none", "number", "none"), mask=CAUSAL),
    "mla": case((64, 200), (192, 128), mask=CAUSAL),
    "fast": case((64, 200), 128, precision="ANY_F8_ANY_F8_F32_FAST_ACCUM"),
    "lengths": case(
        *((70, 300), 64, ("none", "row", "row")),
        **{"batch": 3, "mask": CAUSAL, "q_lengths": (70, 50, 0), "kv_lengths": (10, 0, 300)},
    ),
    "documents": case((200, 200), 64, ("none", "row", "none"), mask=CAUSAL, segments=(90, 110)),
    "bias": case((96, 144), 64, ("none", "row", "row"), bias_shape=(1, 2, 96, 144)),
    "mask_array": case((96, 144), mask_shape=(1, 1, 96, 144)),
    "sinks": case((96, 144), 64, ("number", "none", "none"), sinks=True),
}
