"""Random problems of derivatives beside the gradients that `fuzz` draws: tangents along random
tangents of some inputs, tangents of gradients, and gradients of the arrays that a score function
reads.

The oracle of tangents is `definition.tangents`, and that of tangents of gradients a difference of
gradients in float64. That of a score function's arrays adds up dS by
NumPy: what the function adds to scores becomes a bias, and its gradient is taken to the elements
that a logit reads.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from tests.support import budget, definition, fuzz, subjects
from tests.support.fuzz_positions import POSITIONS, Round
from tests.support.problems import by_name
from tests.support.problems import case as _case

# ---- tangents ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tangents(_case.AttentionCase):
    """`along`: the inputs that have tangents. `linearized`: by a launch after the forward's."""

    along: tuple[str, ...] = ("q", "k", "v")
    linearized: bool = False

    def functions(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of the call that are functions of positions, and of the oracle in their place."""
        return {}, {}


def draw_tangents(seed: int, tiny: bool) -> Tangents:
    drawn, pick = fuzz.draw_attention(seed, tiny), random.Random(f"fuzz tangents {seed}")
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn) if f.init}
    fields |= {"rotary": None, "rotary_positions": False, "deterministic": False}
    names = pick.choice((("q", "k", "v"), subjects.GRADIENTS, subjects.GRADIENTS))
    there = [name for name in names if _has(drawn, name)]
    along = pick.sample(there, pick.randint(1, len(there)))
    return Tangents(**fields, along=tuple(sorted(along)), linearized=pick.random() < 0.5)


def _has(case: _case.AttentionCase, name: str) -> bool:
    return {"bias": case.bias_shape is not None, "sinks": case.sinks}.get(name, True)


def _along(case: Tangents, plain: dict[str, Any], turn: int) -> tuple[Any, Any]:
    """Tangents for the call, NaN past every length, and for the oracle."""
    rng = np.random.default_rng((turn, 11))
    shapes = {name: plain[name] for name in case.along if _has(case, name)}
    along = {
        name: jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)
        for name, x in shapes.items()
    }
    poisoned = dict(along)
    axes = {"q": {"q_lengths": 1}, "bias": {"q_lengths": 2, "kv_lengths": 3}}
    axes |= dict.fromkeys("kv", {"kv_lengths": 1})
    for name, x in along.items():
        for lengths, axis in axes.get(name, {}).items():
            if lengths in plain:
                ends = tuple(np.asarray(plain[lengths]).tolist())
                x = _case._poison(x, ends, axis)
        poisoned[name] = x
    return poisoned, along


def with_tangents(*, along, linearized, implementation, **arguments):
    """out, lse and their tangents; `along`: tangents of inputs by name."""
    own = {name: arguments[name] for name in along}

    def run(some):
        return by_name.flash_attention_with_lse(**(arguments | some), implementation=implementation)

    if linearized:
        (out, lse), linear = jax.linearize(run, own)
        out_dot, lse_dot = linear(along)
    else:
        (out, lse), (out_dot, lse_dot) = jax.jvp(run, (own,), (along,))
    return {"out": out, "lse": lse, "out_dot": out_dot, "lse_dot": lse_dot}


def run_tangents(case: Tangents, place: fuzz.Place, tally: fuzz.Tally) -> None:
    options = {name: x for name, x in case.options().items() if x is not None}
    functions, dense = case.functions()
    for turn in range(1) if place.lowered else fuzz.turns(place, tally):
        handed, plain = fuzz.attention_inputs(case, turn)
        for arrays in (handed, plain):
            del arrays["do"], arrays["dlse"]
        poisoned, along = _along(case, plain, turn)
        handed |= options | functions
        arguments = handed | {"along": poisoned, "linearized": case.linearized}
        if place.lowered:
            with fuzz.pretended(case, place) as generation:
                fuzz.lower("flash_forward", with_tangents, arguments, generation, tally)
            return
        wanted = functools.partial(_tangents_expected, plain | options | dense, along)
        round_ = Round(with_tangents, arguments, functools.cache(wanted), turn)
        round_._replace(operation="flash_forward").try_each(place, tally)


def _tangents_expected(
    arguments: dict[str, Any],
    along: dict[str, Any],
    tensor_cores: bool,
    grids: tuple[float, ...],
) -> budget.Expected:
    with np.errstate(all="ignore"):
        return budget.tangents(arguments, along, tensor_cores=tensor_cores, grids=grids)


def simpler_tangents(case: Tangents) -> Iterator[dict[str, Any]]:
    for name in case.along if len(case.along) > 1 else ():
        yield {"along": tuple(x for x in case.along if x != name)}
    yield {"linearized": True}
    for fields in fuzz.simpler_attention(case):
        lost = {"bias"} if fields.get("bias_shape", 0) is None else set()
        lost |= {"sinks"} if fields.get("sinks") is False else set()
        if left := set(case.along) - lost:
            yield {**fields, "along": tuple(sorted(left))}


# ---- second derivatives --------------------------------------------------------------------------

STEP = 2.0**-16  # a difference in float64 takes
OFF = 2.0**-10  # largest error, in the largest number of a result


def draw_second(seed: int, tiny: bool) -> Tangents:
    """A problem in float32: the oracle, a difference, tells no smaller errors apart."""
    drawn = draw_tangents(seed, True)
    fields = {"dtype": "float32", "precision": "highest", "bias_dtype": "float32"}
    return dataclasses.replace(drawn, **fields, magnitude=min(drawn.magnitude, 1.0))


def with_second(*, do, dlse, along, implementation, **arguments):
    """The gradients of what has tangents, which kernels compute, and their tangents, which the
    reference does.
    """
    own = {name: arguments[name] for name in along}

    def loss(some):
        call = functools.partial(by_name.flash_attention_with_lse, implementation=implementation)
        out, lse = call(**(arguments | some))
        return (out * do).sum() + jnp.where(dlse == 0, 0, lse * dlse).sum()

    first, second = jax.jvp(jax.grad(loss), (own,), (along,))
    return {f"d{name}": x for name, x in first.items()} | {f"d2{n}": x for n, x in second.items()}


def run_second(case: Tangents, place: fuzz.Place, tally: fuzz.Tally) -> None:
    options = {name: x for name, x in case.options().items() if x is not None}
    for turn in range(1) if place.lowered else fuzz.turns(place, tally):
        _, plain = fuzz.attention_inputs(case, turn)
        _, along = _along(case, plain, turn)
        arguments = plain | options | {"along": along}
        if place.lowered:
            with fuzz.pretended(case, place) as generation:
                fuzz.lower("flash_backward", with_second, arguments, generation, tally)
            return
        want = _second_expected(plain, options, along)
        takes = functools.partial(fuzz.takes, operation="flash_backward", function=with_second)
        for subject in (x for x in place.subjects if takes(x, arguments=arguments)):
            tally.calls[subject.name] += 1
            with fuzz.by(subject, turn):
                _compare(subject.call(with_second, **arguments), want)


def _compare(got: dict[str, Any], want: dict[str, np.ndarray]) -> None:
    for name, x in got.items():
        error = np.abs(np.asarray(x, np.float64) - want[name])
        most = OFF * max(1.0, np.abs(want[name]).max(initial=0.0))
        assert (error <= most).all(), f"{name}: off by {error.max()}, allowed {most}"


def _second_expected(
    plain: dict[str, Any], options: dict[str, Any], along: dict[str, Any]
) -> dict[str, np.ndarray]:
    arrays = {name: x for name, x in plain.items() if name not in ("do", "dlse")}
    known = {"precision", "deterministic"}
    how = {name: x for name, x in options.items() if name not in known}

    def gradients(step: float) -> dict[str, Any]:
        moved = {
            name: np.asarray(arrays[name], np.float64) + step * np.asarray(x, np.float64)
            for name, x in along.items()
        }
        with np.errstate(all="ignore"):
            return definition.attention(arrays | moved, plain["do"], plain["dlse"], **how)

    below, here, above = map(gradients, (-STEP, 0.0, STEP))
    first = {f"d{name}": here[f"d{name}"] for name in along}
    slopes = {f"d2{n}": (above[f"d{n}"] - below[f"d{n}"]) / (2 * STEP) for n in along}
    return first | slopes


# ---- arrays that a score function reads ----------------------------------------------------------


class Term(NamedTuple):
    """A number that is added to a score: a weight times the element of an array at an index. Both
    follow from batch row, head, query and key.
    """

    shape: Callable[["Learned"], tuple[int, ...]]
    index: Callable[..., tuple[Any, ...]]
    weight: Callable[..., Any] = lambda b, h, q, kv: 1
    size: float = 0.5  # standard deviation of the numbers


BUCKETS, BEGIN = 24, 1_700_000_000
TERMS = {
    "slopes": Term(
        lambda c: (c.q_heads,), lambda b, h, q, kv: (h,), lambda b, h, q, kv: q - kv, 0.02
    ),
    # Integers that no float32 holds, whose difference one does
    "times": Term(
        lambda c: (c.q_heads,),
        lambda b, h, q, kv: (h,),
        lambda b, h, q, kv: (q + BEGIN) - (kv + BEGIN),
        0.02,
    ),
    "distance": Term(
        lambda c: (1,), lambda b, h, q, kv: (0,), lambda b, h, q, kv: -abs(q - kv), 0.02
    ),
    "heads": Term(lambda c: (c.batch, c.q_heads), lambda b, h, q, kv: (b, h)),
    "buckets": Term(
        lambda c: (c.q_heads, BUCKETS),
        lambda b, h, q, kv: (h, (q - kv).clip(0, 8 * BUCKETS - 1) // 8),
    ),
    "both_ways": Term(
        lambda c: (2 * BUCKETS + 1, c.q_heads),
        lambda b, h, q, kv: ((q - kv).clip(-BUCKETS, BUCKETS) + BUCKETS, h),
    ),
    "offsets": Term(lambda c: (2 * POSITIONS,), lambda b, h, q, kv: (q - kv + POSITIONS,)),
    "keys": Term(lambda c: (c.batch, c.kv_len), lambda b, h, q, kv: (b, kv)),
    "few_keys": Term(
        lambda c: (c.q_heads, 16), lambda b, h, q, kv: (h, kv % 16), lambda b, h, q, kv: q % 2
    ),
    "rows": Term(lambda c: (c.q_heads, POSITIONS), lambda b, h, q, kv: (h, q)),
    "tiles": Term(lambda c: (64, 64), lambda b, h, q, kv: (q // 16, kv // 16)),  # by autodiff
}
# Terms that no problem draws: a place that all pairs read, a weight that is NaN past 149 keys, and
# positions that no float32 holds.
RARE = {
    "one_place": Term(
        lambda c: (1,),
        lambda b, h, q, kv: ((q - kv + 1000).clip(max=0),),
        lambda b, h, q, kv: kv & 7,
        0.02,
    ),
    "roots": Term(
        lambda c: (c.q_heads,),
        lambda b, h, q, kv: (h,),
        lambda b, h, q, kv: _root((149 - kv) * (kv % 5)),
        0.02,
    ),
    "far": Term(
        lambda c: (c.q_heads,), lambda b, h, q, kv: (h,), lambda b, h, q, kv: q - 2**25 - kv, 0.02
    ),
}
_EVERY = TERMS | RARE


def _root(x: Any) -> Any:
    return np.sqrt(x) if isinstance(x, np.ndarray) else jnp.sqrt(x.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Learned(_case.AttentionCase):
    """`terms`: names of those that are added to scores. `alone`: no other gradients are asked."""

    terms: tuple[str, ...] = ("slopes",)
    aux_dtype: str = "float32"
    alone: bool = False


def draw_learned(seed: int, tiny: bool) -> Learned:
    drawn, pick = fuzz.draw_attention(seed, tiny), random.Random(f"fuzz learned {seed}")
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn) if f.init}
    offset = drawn.q_offset if isinstance(drawn.q_offset, int) else 0
    fields |= {"rotary": None, "rotary_positions": False, "q_offset": max(offset, 0)}
    return Learned(
        **fields | {"bias_shape": None},
        terms=tuple(pick.sample(tuple(TERMS), pick.choice((1, 1, 2)))),
        aux_dtype=pick.choice(("float32", "float32", "bfloat16")),
        alone=pick.random() < 0.15,
    )


def _aux(case: Learned, turn: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng((turn, 13))
    terms = [_EVERY[name] for name in case.terms]
    drawn = [term.size * rng.standard_normal(term.shape(case)) for term in terms]
    return tuple(jnp.asarray(x, case.aux_dtype) for x in drawn)


def added(terms: tuple[str, ...], b: Any, h: Any, q: Any, kv: Any, aux: Any) -> Any:
    """The sum of the terms, in float32: jax rounds bfloat16 or not, as XLA likes."""
    total: Any = 0
    for name, x in zip(terms, aux, strict=True):
        term = _EVERY[name]
        number = x[term.index(b, h, q, kv)].astype(jnp.float32)
        total = total + term.weight(b, h, q, kv) * number
    return total


def with_learned(*, do, dlse, aux, terms, alone, implementation, **arguments):
    """out, lse and gradients: those of `aux`, and of the inputs unless `alone`."""
    inputs = () if alone else subjects.GRADIENTS
    wanted = {name: arguments[name] for name in inputs if arguments.get(name) is not None}

    def run(some, aux):
        score = pa.score_fn(lambda s, b, h, q, kv, *aux: s + added(terms, b, h, q, kv, aux), *aux)
        call = functools.partial(by_name.flash_attention_with_lse, implementation=implementation)
        return call(**(arguments | some), score=score)

    (out, lse), pull = jax.vjp(run, wanted, aux)
    gradients, daux = pull((do, dlse))
    results = {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}
    return results | {f"daux{n}": x for n, x in enumerate(daux)}


def learned_inputs(case: Learned, turn: int) -> tuple[dict, dict]:
    """Arguments of the call, and arrays of the oracle."""
    handed, plain = fuzz.attention_inputs(case, turn)
    options = {name: x for name, x in case.options().items() if x is not None}
    handed |= options | {"aux": _aux(case, turn), "terms": case.terms, "alone": case.alone}
    return handed, plain


def run_learned(case: Learned, place: fuzz.Place, tally: fuzz.Tally) -> None:
    options = {name: x for name, x in case.options().items() if x is not None}
    for turn in range(1) if place.lowered else fuzz.turns(place, tally):
        aux = _aux(case, turn)
        arguments, plain = learned_inputs(case, turn)
        if place.lowered:
            with fuzz.pretended(case, place) as generation:
                fuzz.lower("flash_backward", with_learned, arguments, generation, tally)
            return
        wanted = functools.partial(_learned_expected, case, plain, aux, options)
        round_ = Round(with_learned, arguments, functools.cache(wanted), turn)
        round_.try_each(place, tally)


def _learned_expected(
    case: Learned,
    plain: dict[str, Any],
    aux: tuple[jax.Array, ...],
    options: dict[str, Any],
    tensor_cores: bool,
    grids: tuple[float, ...],
) -> budget.Expected:
    sizes = (case.batch, case.q_heads, case.q_len, case.kv_len)
    b, h, q, kv = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, sizes))])
    at = b, h, q + np.reshape(np.int32(case.q_offset), (-1, 1, 1, 1)), kv
    numbers = [np.asarray(x, np.float32) for x in aux]
    by_terms = np.float32(added(case.terms, *at, numbers)) + np.asarray(plain.get("bias", 0))
    dense = {"bias": np.broadcast_to(by_terms, sizes)}
    sums = functools.partial(_summed, case, at)
    return fuzz.attention_expected(plain | dense, options, tensor_cores, grids, sums=sums)


def _summed(case: Learned, at: tuple[Any, ...], ds: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of the arrays by that of the scores, [B, N, T, S]."""
    results = {}
    for n, name in enumerate(case.terms):
        term = _EVERY[name]
        shape, wide = term.shape(case), ds.astype(np.float64) * term.weight(*at)
        index = np.ravel_multi_index(np.broadcast_arrays(*term.index(*at)), shape)
        index = np.broadcast_to(index, ds.shape).reshape(-1)
        total = np.bincount(index, wide.reshape(-1), math.prod(shape))
        results[f"daux{n}"] = total.reshape(shape)
    return results


def simpler_learned(case: Learned) -> Iterator[dict[str, Any]]:
    for name in case.terms if len(case.terms) > 1 else ():
        yield {"terms": tuple(x for x in case.terms if x != name)}
    yield from ({"alone": False}, {"aux_dtype": "float32"})
    yield from fuzz.simpler_attention(case)
