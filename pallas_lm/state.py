"""State of the sequences on the device, and the choice of a token: the base of the loop's programs.

A program is `body(config, options, params, cache, state, ...)`, jitted, with cache and state
donated; it returns (cache, state, tokens, `Kept`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.cache import KVCache, PagedCache
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config, Tree
from pallas_lm.gemma4 import TwoCaches
from pallas_lm.options import Options
from pallas_lm.sampling import Sampling, sample

Array = jax.Array
Program = Any  # jitted
# XLA's Triton matmuls cannot read a layer's weights where they lie in the stack that is scanned:
# each is copied out first, three times the traffic and almost three times the time of cuBLAS on
# an H200.
# Kernels that were recorded as a CUDA graph do not begin early (see `rows`), which costs more than
# their launches: no part of a program is large enough to be recorded.
COMPILER = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_graph_min_graph_size": 2**30}
# In place of a token:
NOTHING = -1  # the sequence was not running
NO_NUMBER = -2  # its logit is no finite number
DROPPED = -3  # a draft was not kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of each slot between two steps."""

    token: Array  # int32[M]: the newest token, not yet in the cache
    left: Array  # int32[M]: tokens still wanted; 0: not running
    key: Array  # a key of each sequence
    sampling: Sampling  # arrays [M]
    text: Array | None = None  # int32[M, rows + 1]: its tokens, for drafts to be looked up in

    @classmethod
    def create(cls, options: Options) -> "State":
        slots = options.batch
        token, left = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
        text = jnp.zeros((slots, options.rows + 1), jnp.int32) if options.draft else None
        sampling = jax.tree.map(jnp.asarray, options.sampling.of(np.zeros(slots, int)))
        return cls(token, left, jax.random.split(jax.random.key(0), slots), sampling, text)


class Kept(NamedTuple):
    """Results beside the tokens, where options ask for them; axes as those of the tokens."""

    logits: Array | None = None  # float32[.., vocab]
    logprobs: Array | None = None  # float32: of each token among all, before sampling changes them

    @classmethod
    def of(cls, options: Options, logits: Array, tokens: Array) -> "Kept":
        logprobs = None
        if options.logprobs:
            chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)
            logprobs = chosen[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        return cls(logits if options.keep_logits else None, logprobs)


def program(body: Callable[..., Any]) -> Program:
    """Jits a program of the loop; on a mesh each device runs it on its own part."""

    @jax.jit(static_argnums=(0, 1), donate_argnums=(3, 4), compiler_options=COMPILER)
    @functools.wraps(body)
    def run(config: Config, options: Options, *arrays: Tree) -> Tree:
        def local(config: Config, *arrays: Tree) -> Tree:
            return body(config, options, *arrays)

        return lm_mesh.over(options.mesh, config, local, *arrays)

    return run


def next_tokens(sampling: Sampling, logits: Array, keys: Array, positions: Array) -> Array:
    """int32[M]: the token after each row of logits, or NO_NUMBER. The position is part of the key:
    a sequence draws the same tokens whenever and beside whichever others it runs.
    """
    if sampling.draws:
        keys = jax.vmap(jax.random.fold_in)(keys, positions)
    token = sample(logits, keys, sampling)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return jnp.where(jnp.isfinite(chosen), token, NO_NUMBER)


def stops(options: Options, token: Array) -> Array:
    """bool[M]: whether a text ends with this token."""
    stop = jnp.asarray((*options.stop_ids, NO_NUMBER), jnp.int32)
    return (token[:, None] == stop[None]).any(axis=1)


def forked[Cache: (KVCache, TwoCaches)](cache: Cache, source: Array) -> Cache:
    """The paged cache, each slot a fork of its `source` int32[M] where that is another slot."""
    assert isinstance(cache, (PagedCache, TwoCaches))
    slot = jnp.arange(source.size, dtype=jnp.int32)
    others = source != slot
    targets = jnp.nonzero(others, size=source.size, fill_value=0)[0].astype(jnp.int32)
    fork = lambda n, cache: cache.fork(source[targets[n]], targets[n])  # noqa: E731
    return jax.lax.fori_loop(0, others.sum(), fork, cache)
