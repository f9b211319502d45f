"""Random calls of `flash_attention(kv_indices=)` and their gradients, as `fuzz` runs them: any
int32 for a position, some listed twice.

For the oracle a list is a mask of the positions that it names, and how often it names each is the
exponential of a bias.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support import fuzz, subjects
from tests.support.fuzz_positions import Round
from tests.support.problems import case as _case


@dataclasses.dataclass(frozen=True)
class Listed(_case.AttentionCase):
    """`listed`: entries of a list; `by_head`: each kv head has lists of its own."""

    listed: int = 8
    by_head: bool = True


_WITHOUT: dict[str, Any] = {
    **dict.fromkeys(("q_lengths", "segments", "kv_segments", "bias_shape", "mask_shape", "rotary")),
    **{"deterministic": False, "rotary_positions": False},
}


def draw(seed: int, tiny: bool) -> Listed:
    drawn, pick = fuzz.draw_attention(seed, tiny), random.Random(f"fuzz lists {seed}")
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn) if f.init}
    offset = drawn.q_offset if isinstance(drawn.q_offset, int) else 0
    fields |= _WITHOUT | {"q_offset": offset}
    return Listed(**fields, listed=pick.choice((1, 7, 64, 90)), by_head=pick.random() < 0.7)


def lists_of(case: Listed, turn: int) -> np.ndarray:
    rng = np.random.default_rng((turn, 13, case.listed))
    shape = case.batch, case.kv_heads if case.by_head else 1, case.q_len, case.listed
    lists = rng.integers(-2, case.kv_len + 2, shape)
    edges = np.array([-1, fuzz.LEAST, fuzz.MOST, case.kv_len])
    lists = np.where(rng.random(shape) < 0.1, rng.choice(edges, shape), lists)
    return np.where(rng.random(shape[:3])[..., None] < 0.1, -1, lists).astype(np.int32)


def times_of(lists: np.ndarray, keys: int) -> np.ndarray:
    """How often lists [B, K, T, n] have a position, [B, K, T, keys]."""
    times = np.zeros((*lists.shape[:3], keys), np.float32)
    *rows, at = np.nonzero((lists >= 0) & (lists < keys))
    np.add.at(times, (*rows, lists[*rows, at]), 1)
    return times


def written_out(times: np.ndarray, heads: int) -> dict[str, np.ndarray]:
    """The mask, and the logarithm of how often a position is listed, of so many query heads."""
    times = np.repeat(times, heads // times.shape[1], axis=1)
    return {"mask_array": times > 0, "bias": np.log(np.maximum(times, 1))}


def _by_entries(times: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [B, K, N / K, S, T] @ b [B, K, N / K, T, H], added up over heads as lists add to a key:
    one query row after the other, as often as its list has the key.
    """
    total = np.zeros((*a.shape[:2], a.shape[3], b.shape[4]), a.dtype)
    for t, often in enumerate(np.moveaxis(times, 2, 0)[..., None]):
        once = np.einsum("bkgs,bkgh->bksh", a[..., t], b[..., t, :]) / np.maximum(often, 1)
        for n in range(int(often.max(initial=0))):
            total += np.where(n < often, once, 0)
    return total[:, :, None]


def wanted(case: Listed, options: dict[str, Any], plain: dict[str, Any], lists: np.ndarray) -> Any:
    """`Round.expected` of a call."""
    times = times_of(lists, case.kv_len)
    times = np.repeat(times, case.kv_heads // times.shape[1], axis=1)
    dense = plain | written_out(times, case.q_heads)
    of_rows = functools.partial(_by_entries, times)
    return functools.partial(fuzz.attention_expected, dense, options, of_rows=of_rows)


def run(case: Listed, place: fuzz.Place, tally: fuzz.Tally) -> None:
    options = {name: x for name, x in case.options().items() if x is not None}
    options.pop("deterministic", None)
    function = subjects.forward_and_backward
    for turn in range(1) if place.lowered else fuzz.turns(place, tally):
        handed, plain = fuzz.attention_inputs(case, turn)
        lists = lists_of(case, turn)
        arguments = handed | options | {"kv_indices": jnp.asarray(lists)}
        if place.lowered:
            with fuzz.pretended(case, place) as generation:
                fuzz.lower("decode", function, arguments, generation, tally)
            return
        expected = functools.cache(wanted(case, options, plain, lists))
        round_ = Round(function, arguments, expected, turn)
        round_._replace(operation="decode").try_each(place, tally)


def simpler(case: Listed) -> Iterator[dict[str, Any]]:
    if case.listed > 1:
        yield {"listed": 1}
    yield {"by_head": True}
    yield from fuzz.simpler_attention(case)
