"""A decode beside the reference path: the likeliest token and the logits of every step.

The reference path keeps no cache: the whole text goes through the model at once by the oracle, with
weights and arithmetic in float32. The budget is twice the error that the same path makes in the
decode's own type, plus rounding; where the decode's type is float32 the rounding is all there is.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config, Params
from pallas_lm.decode import Run
from pallas_lm.progress import Generation

_ROUNDINGS = 64  # roundings of the largest logit by which sums in another order may differ


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence of the table."""

    sequence: int  # counted from 1
    steps: int
    same: int  # steps whose likeliest token is the reference's
    ties: int  # other steps, where the reference's two logits lie within the budget
    error: float  # the largest difference of a logit,
    at: int  # the step that it was seen at
    budget: float

    @property
    def held(self) -> bool:
        return self.error <= self.budget and self.same + self.ties == self.steps


def rows(run: Run, params: Params) -> Iterator[Row]:
    """A row for each sequence of a run that kept its logits."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    eps = float(jnp.finfo(run.options.dtype).eps)
    done = [sequence for sequence in run.sequences if sequence.tokens]
    width = max((len(x.prompt) + len(x.tokens) - 1 for x in done), default=0)
    for sequence in done:
        text = sequence.prompt + sequence.tokens[:-1]
        padded = np.asarray([text + [0] * (width - len(text))], np.int32)
        tokens = lm_mesh.everywhere(run.options.mesh, padded)
        steps = slice(len(sequence.prompt) - 1, len(text))
        with jax.default_matmul_precision("highest"):
            truth = _logits(run.config, run.options.mesh, wide, tokens)
        plain = _logits(run.config, run.options.mesh, params, tokens)
        yield _row(sequence, np.asarray(truth)[0, steps], np.asarray(plain)[0, steps], eps)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(config: Config, mesh: Mesh | None, params: Params, tokens: jax.Array) -> jax.Array:
    return lm_mesh.logits(config, mesh, params, tokens, "reference")


def _row(sequence: Generation, truth: np.ndarray, plain: np.ndarray, eps: float) -> Row:
    got = np.stack(sequence.logits)
    budget = 2 * np.abs(plain - truth).max() + _ROUNDINGS * eps * np.abs(truth).max()
    errors = np.abs(got - truth).max(axis=-1)
    token, wanted = got.argmax(axis=-1), truth.argmax(axis=-1)
    steps = np.arange(len(got))
    margin = truth[steps, wanted] - truth[steps, token]
    worst = int(np.where(np.isnan(errors), np.inf, errors).argmax())
    return Row(
        sequence=sequence.number + 1,
        steps=len(got),
        same=int((token == wanted).sum()),
        ties=int(((token != wanted) & (margin <= 2 * budget)).sum()),
        error=float(errors[worst]),
        at=worst,
        budget=float(budget),
    )
