"""Attention of packed rows to a cache at head dims above 256, for Hopper: chunks of prompts beside
single tokens, in a model like Gemma 4.

Decode's kernel takes all sequences of few rows in one launch. It reads all keys again for every 64
query rows, so the sequences of many rows are taken one after the other by a loop on the device: XLA
copies the keys of one, as in `gathered`, and rolls the packed rows so that its own come first; the
forward for wide heads reads both. A loop is enough, since each such sequence is work for the whole
GPU, and few calls have more than one or two.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import selection
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.flash_fwd import sm90_wide
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.prefill import gathered

Array = jax.Array
Results = tuple[Array, Array]  # out and lse


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning of both kernels. `most`: the most query rows of a sequence that decode's kernel
    serves.
    """

    most: int = selection.FEWEST_PAIRS_GATHERED
    decode: decode_sm90.Config = decode_sm90.Config()
    forward: sm90_wide.Config = sm90_wide.Config()

    def __post_init__(self) -> None:
        check(self, most=(self.most >= 1, "at least 1"))

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        most = max(selection.rows_gathered(problem) - 1, 1)
        few = dataclasses.replace(problem, q_len=most)
        forward = sm90_wide.Config.default(gathered.contiguous(_of_one(problem)))
        return cls(most, decode_sm90.Config.default(few), forward)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    other = "leave implementation=None"
    if not problem.packed or problem.functions or problem.merged is not None:
        return Limit("it takes packed rows, without trees, functions and shared keys", other)
    if cache_layout.layout_of(problem).separate:
        return Limit("separate arrays of rows", "use a StackedCache or a PagedCache")
    if (refused := decode_sm90.KERNEL.limit(problem)) is not None:
        return refused
    return gathered.limit(_of_one(problem), sm90_wide.KERNEL)


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    few = dataclasses.replace(problem, q_len=config.most)
    alone = gathered.contiguous(_of_one(problem))
    return max(
        decode_sm90.bytes_of_launch(few, config.decode),
        sm90_wide.KERNEL.smem_bytes(alone, config.forward),
    )


def _of_one(problem: DecodeProblem) -> DecodeProblem:
    """The problem of one sequence that has all rows."""
    assert problem.tokens is not None
    fields: dict[str, Any] = {"sequences": 1, "q_len": problem.tokens, "tokens": None}
    return dataclasses.replace(problem, capacities=problem.capacities[:1], **fields)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> Results:
    """out [tokens, N, Hv] in q's dtype, log-sum-exp float32 [N, tokens]."""
    assert inputs.starts is not None
    few = dataclasses.replace(problem, q_len=config.most)
    results = decode_sm90.launch(inputs, few, config.decode)
    many = jnp.diff(inputs.starts) > config.most
    number = jnp.arange(problem.sequences, dtype=jnp.int32)

    def after(last: Array) -> Array:
        """The next sequence of many rows; `sequences` where there is none."""
        return jnp.where(many & (number > last), number, problem.sequences).min()

    def step(carry: tuple[Array, Results]) -> tuple[Array, Results]:
        sequence, results = carry
        return after(sequence), _with(results, inputs, problem, config, sequence)

    first = after(jnp.int32(-1))
    return lax.while_loop(lambda carry: carry[0] < problem.sequences, step, (first, results))[1]


def _with(
    results: Results, inputs: DecodeInputs, problem: DecodeProblem, config: Config, sequence: Array
) -> Results:
    """The results, with those of one sequence's rows."""
    assert inputs.starts is not None and problem.tokens is not None
    start = inputs.starts[sequence]
    rows = inputs.starts[sequence + 1] - start
    own = _own(inputs, problem, sequence)._replace(q=jnp.roll(inputs.q, -start, axis=0)[None])
    out, lse = gathered.attend(
        own, _of_one(problem), sm90_wide.KERNEL, config.forward, rows=rows[None]
    )
    row = jnp.arange(problem.tokens, dtype=jnp.int32)
    mine = (row >= start) & (row < start + rows)
    return (
        jnp.where(mine[:, None, None], jnp.roll(out[0], start, axis=0), results[0]),
        jnp.where(mine, jnp.roll(lse[0], start, axis=1), results[1]),
    )


def _own(inputs: DecodeInputs, problem: DecodeProblem, sequence: Array) -> DecodeInputs:
    """The inputs of one sequence: its table of pages, or its rows in every layer."""

    def of_sequence(x: Array | None, axis: int = 0) -> Array | None:
        return None if x is None else lax.dynamic_slice_in_dim(x, sequence, 1, axis)

    names = ("lengths", "new_lengths", "page_table")
    own: dict[str, Any] = {name: of_sequence(getattr(inputs, name)) for name in names}
    if inputs.page_table is None:
        axis = 0 if problem.layers is None else 1
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            own[name] = of_sequence(getattr(inputs, name), axis)
    return inputs._replace(starts=None, **own)


KERNEL = Kernel(Config, limit, smem_bytes, run)
