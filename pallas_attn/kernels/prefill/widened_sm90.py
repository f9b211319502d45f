"""Attention of many new rows to a quantised cache, for Hopper.

The tensor cores of `prefill.sm90` want K and V in q's dtype. Here `widen` writes the rows of one
layer first, to a buffer that lives as long as the call, and `prefill.sm90` reads that. Each row is
then rounded to q's dtype, where `decode.sm90` multiplies the numbers as they are stored and scales
the scores. It pays where there are enough queries, and `limit` says where that is; where they are
fewer, `narrow_sm90` widens rows in the kernel, once for each q tile.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.prefill import sm90, widen

# Pairs of query head and query row that each widened row meets, by what is stored, of which the
# narrow kernel widens int8 more slowly; as measured on an H200. Where keys are split, half as many
# again.
FEWEST_PAIRS = {"int8": 512, "float8_e4m3fn": 768, "float8_e5m2": 768}
MOST_BYTES = 2**32  # of the buffer


class Config(sm90.Config):
    """Tuning only: the result is the same up to rounding."""

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        return cls(**dataclasses.asdict(sm90.Config.default(_widened(problem))))


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    other = "leave implementation=None"
    if not problem.quantized:
        return Limit("the cache is not quantised", other)
    if (refused := sm90.limit(_widened(problem))) is not None:
        return refused
    rows = problem.q_len * problem.sequences if problem.tokens is None else problem.tokens
    stored = _stored_rows(problem)
    fewest = FEWEST_PAIRS[str(problem.cache_dtype)]
    if Config.default(problem).splits > 1:
        fewest += fewest // 2
    if rows * problem.q_heads * max(problem.capacities) < fewest * stored:
        return Limit("few query rows are faster without it", other)
    size = stored * (problem.head_dim + problem.v_head_dim) * 2
    if size > MOST_BYTES:
        return Limit(f"rows in {problem.dtype} would take {size / 2**30:.1f} GiB", other)
    return None


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    return sm90.smem_bytes(_widened(problem), config)


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Any, Any]:
    """As `sm90.run`."""
    return _launch(inputs, problem, config)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Any, Any]:
    layer = index = None
    if problem.layers is not None:
        index = jnp.clip(inputs.layer, 0, problem.layers - 1)
        layer = jnp.where(inputs.layer == index, 0, -1)  # one that the cache lacks stays one
    k, v = widen.run(inputs, problem, index)
    widened = inputs._replace(k_cache=k, v_cache=v, k_scale=None, v_scale=None, layer=layer)
    return sm90.run(widened, _widened(problem), config)


def _widened(problem: DecodeProblem) -> DecodeProblem:
    layers = None if problem.layers is None else 1
    return dataclasses.replace(problem, quantized=False, cache_dtype=problem.dtype, layers=layers)


def _stored_rows(problem: DecodeProblem) -> int:
    """Rows of all kv heads in the buffers of a layer."""
    rows = sum(problem.capacities)
    if problem.pages is not None and problem.page_size is not None:
        rows = problem.pages * problem.page_size
    return rows * problem.kv_heads
