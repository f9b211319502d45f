"""A decode beside the reference path: the likeliest token and the logits of every step.

The reference path keeps no cache: the whole text goes through the model at once by the oracle, with
weights and arithmetic in float32. The budget is twice the error that the same path makes in the
decode's own type, plus rounding; where the decode's type is float32 the rounding is all there is.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.lm import mesh as lm_mesh
from pallas_attn.lm.decode import Run
from pallas_attn.lm.model import Config, Params
from pallas_attn.lm.progress import Generation

_ROUNDINGS = 64  # of the largest logit: what sums in another order may differ by


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence of the parity table."""

    sequence: int  # counted from 1
    steps: int
    same: int  # steps whose likeliest token is the reference's
    ties: int  # steps where it is not, and the reference's two logits lie within the budget
    error: float  # the largest difference of a logit,
    at: int  # the step that it was seen at
    budget: float

    @property
    def held(self) -> bool:
        return self.error <= self.budget and self.same + self.ties == self.steps


def rows(run: Run, params: Params) -> Iterator[Row]:
    """A row a sequence of a run that kept its logits."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    texts = [one.prompt + one.tokens[:-1] for one in run.sequences if one.tokens]
    width = max(map(len, texts), default=0)
    done = [one for one in run.sequences if one.tokens]
    for one, text in zip(done, texts, strict=True):
        padded = np.asarray([text + [0] * (width - len(text))], np.int32)
        first = len(one.prompt) - 1
        told = slice(first, first + len(one.tokens))
        with jax.default_matmul_precision("highest"):
            truth = _forward(run, wide, padded)[told]
        plain = _forward(run, params, padded)[told]
        yield _row(one, truth, plain, float(jnp.finfo(run.options.dtype).eps))


def _forward(run: Run, params: Params, tokens: np.ndarray) -> np.ndarray:
    mesh = run.options.mesh
    return np.asarray(_logits(run.config, mesh, params, lm_mesh.everywhere(mesh, tokens))[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(config: Config, mesh: Any, params: Params, tokens: jax.Array) -> jax.Array:
    return lm_mesh.logits(config, mesh, params, tokens, "reference")


def _row(one: Generation, truth: np.ndarray, plain: np.ndarray, eps: float) -> Row:
    got = np.stack(one.logits)
    budget = 2 * np.abs(plain - truth).max() + _ROUNDINGS * eps * np.abs(truth).max()
    errors = np.abs(got - truth).max(axis=-1)
    mine, theirs = got.argmax(axis=-1), truth.argmax(axis=-1)
    steps = np.arange(len(got))
    margin = truth[steps, theirs] - truth[steps, mine]
    ties = (mine != theirs) & (margin <= 2 * budget)
    worst = int(np.where(np.isnan(errors), np.inf, errors).argmax())
    return Row(
        sequence=one.number + 1,
        steps=len(got),
        same=int((mine == theirs).sum()),
        ties=int(ties.sum()),
        error=float(errors[worst]),
        at=worst,
        budget=float(budget),
    )
