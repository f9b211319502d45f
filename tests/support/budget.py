"""The one tolerance (tests/support/tolerance.py) for results of any test.

Bands of positions are those of gradients of q, k, v and bias (for dbias, of query rows); out and
lse are one band. A row's error is mostly that of its delta, one number, made from out as it was
stored: one draw, which may happen to be near 0. So rows are held together, and dbias, dsinks
and those of q, k and v of a random problem of few rows, to the worst of several naive runs, whose
roundings fall on different grids. In float32 their scores are sums in different orders instead,
and out is held to the worst of them, too.

For float8 the oracle multiplies dequantised numbers; the naive one rounds probabilities to
float8_e4m3fn, relative to the largest of a row. Such errors are 2 to 3 % of the values, so their
RMS is held as well as each, and it is that budget which must prove something.

The oracle is `definition` in float64. The naive one does what every implementation for tensor cores
must: it multiplies operands of the inputs' dtype (so the probabilities are rounded to it before
they meet v, and so is dS before it meets q and k), adds up in float32, and keeps the result
unrounded, since rounding has its own term; but the gradient works with the out that the forward
pass stored, in the inputs' dtype. A budget above 10 % of the oracle's RMS proves nothing, and
fails; for a derivative above 20 %: that stored out is most of it where few keys count. Both are
computed in NumPy, wherever the subject runs: one budget everywhere, and no minutes of compiling
float64 code that runs once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tests.support import definition, tolerance

VACUOUS = 0.1
VACUOUS_GRADIENT = 0.2
GRIDS = (1.0, 1.19, 1.41, 1.68)  # a number is rounded as so many times itself: one draw each
# A fifth draw of a number exceeds twice the worst of four in 4 %, that of 64 in less than 0.01 %.
MANY_GRIDS = tuple(2 ** (i / 64) for i in range(64))
# lse is float32 whatever the inputs are; GPUs' ex2 and lg2 are good to 2**-22, a sum of them to:
LSE_ROUNDING = 2.0**-20
EX2 = 2.0**-22
FORWARDS = 8  # naive gradients that read the lse of a forward with sums in another order
LSE_STORED = 2.0**-23  # share of lse by which an exponent of a launch that reads it may be off
AUX_ROUNDING = 1e-5  # share of an array's largest gradient that a sum over all scores may lose

# Scores of latent rows of bytes are sums of float8 products, for the most part. By
# `definition.float8_scores` 8,192 scores of 512 random columns are up to 0.9 * 2**-13 of `_largest`
# off. The lse of one problem of the fuzzer was 1.4 * 2**-13 of it off on a GPU (results/fuzz).
SCORE_FLOAT8 = 1.5 * 2.0**-13
FEW_NUMBERS = 8  # all errors of fewer can be near 0 by chance
OF_FEW = 1.25  # factor of their naive error
RMS_FLOAT8 = 2.0  # share of the naive errors' RMS that errors of float8 may have

_STATIC = ("mask", "scale", "softcap")
_BESIDE = ("implementation", "precision", "rotary", "rotary_positions", "out_dtype")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


class VacuousError(AssertionError):
    """The budget is too wide to prove anything."""


class Expected(NamedTuple):
    """Expected results by name: out, lse, and dq, dk, dv, dbias, dsinks with cotangents; out_dot
    and lse_dot with tangents; daux.. of arrays that a score function reads.
    """

    oracle: dict[str, np.ndarray]
    naive: dict[str, np.ndarray]
    dtype: str
    noise: float = 2.0**-23  # rounding of a product in a matmul
    slack: float = 0.0  # share of each number, beside the rounding of its dtype
    lse: Any = None  # input of a gradient alone
    float8: bool = False
    first: Any = None  # out of one naive run, in float8
    score: float = 0.0  # the largest that a score of float8 may be
    lse_slack: float = 0.0  # error of lse beside its rounding


def attention(  # noqa: PLR0913
    arguments: dict[str, Any],
    do: Any = None,
    dlse: Any = None,
    *,
    tensor_cores: bool = False,
    handed: bool = False,
    random: bool = False,
    grids: tuple[float, ...] = GRIDS,
    sums: Callable[[Any], dict[str, Any]] | None = None,
    of_rows: Callable[[Any, Any], Any] | None = None,
) -> Expected:
    """Oracle and naive result of `flash_attention_with_lse(**arguments)`; gradients where `do`
    (or `dlse`) is given. What lies past a length should be finite here, whatever the subject got.

    `tensor_cores`: whether the subject multiplies float32 there. At the default precision scores
    are then TF32, 11 bits of q and k, as for everybody; of all else our kernels owe 16 bits. At the
    highest they owe float32, but for the last bits of an ex2, of a sum and of what is multiplied:
    where all rows see one key, whose v a float32 sum returns as it is, kernels may be a bit off.

    `handed`: whether the subject is a gradient alone, and finds an lse that others made. Where all
    is float32 the naive one is then handed the best there is, too. Its own has the error of the
    score that counts most, which cancels in exp(score - lse): with logits of 20 any other way to
    add up scores, an exact one too, is 2 to 3 times as far off. Without that, how far depends on
    the rounding of few scores: the worst of several orders of the columns counts.

    `random`: whether nobody chose the problem. Gradients of q, k and v of few rows are then held to
    the worst of several naive runs, too; such a budget may prove nothing, which the caller counts.

    `grids`: of the naive runs. With `MANY_GRIDS` every number of every result is held to the worst
    of 64: where one query's delta makes most of a gradient, a single run says little about it. In
    float32 these add up scores one product at a time, on every machine, and every second one as
    tensor cores do, with a tanh made of exponentials, which shows where rows see few keys and where
    logits are large; some more read the lse of a forward that has added up scores in another order.
    Beside runs whose scores are in TF32 as many have scores of 16 bits.

    `of_rows`: how the last of these runs in float32 adds up over query rows; None: term by term.

    `sums`: makes further results, of the dbias of a run, which are then not expected itself.
    """
    static = {name: arguments[name] for name in _STATIC if arguments.get(name) is not None}
    if isinstance(arguments.get("q_offset"), int):
        static["q_offset"] = arguments["q_offset"]
    arrays = {
        name: value
        for name, value in arguments.items()
        if name not in static and name not in _BESIDE and value is not None
    }
    dtype = str(arrays["q"].dtype)
    if float8 := dtype in _FLOAT8:
        dtype = str(jnp.dtype(arguments.get("out_dtype") or "bfloat16"))
        arrays = definition.dequantised(arrays)
    narrow = dtype if dtype in ("bfloat16", "float16") else None
    narrow = "float8" if float8 else narrow
    slack = EX2 if tensor_cores and dtype == "float32" else 0.0
    if slack and not float8:
        narrow = "tf32" if arguments.get("precision") is None else "terms"
    plain_results = functools.partial(_attention, do=do, dlse=dlse, sums=sums, **static)
    rotating = functools.partial(_rotating, arguments)
    results = rotating(plain_results)
    oracle = results(arrays)
    names = {name for name in oracle if name in ("dbias", "dsinks") or name.startswith("daux")}
    lse = None
    if random:
        rows = {name: np.prod(oracle[name].shape[:3]) for name in {"dq", "dk", "dv"} & set(oracle)}
        names |= {name for name, number in rows.items() if number < tolerance.FEW}
    if grids is MANY_GRIDS:
        names = set(oracle)
    if float8:  # the largest probability of a row, 1, is a float8 on one grid alone
        names |= {"out"}
    if narrow in (None, "terms"):
        names |= {"out"}  # in float32 mostly the error of the few scores that count
        if handed:
            names, lse = oracle.keys() - {"out", "lse"}, oracle["lse"].astype(np.float32)
        plain = definition.naive(narrow)._replace(lse=lse)
        if grids is MANY_GRIDS:
            plain = plain._replace(scores=definition.one_by_one)
        kinds = [plain]
        if grids is MANY_GRIDS and tensor_cores:
            kinds.append(
                plain._replace(scores=definition.towards_zero, tanh=definition.tanh_by_exponentials)
            )
        draws = [results(arrays, arithmetic=kind) for kind in kinds]
        for seed in range(len(grids) if names else 0):
            other = functools.partial(_reordered, do=do, seed=seed, call=plain_results)
            draws.append(rotating(other)(arrays, arithmetic=kinds[seed % len(kinds)]))
        if grids is MANY_GRIDS:  # many rows that see one key
            in_turn = plain._replace(of_rows=of_rows or _in_turn)
            draws.append(results(arrays, arithmetic=in_turn))
            if do is not None and not handed:
                other = functools.partial(_reordered, do=do, call=plain_results)
                draws += _by_other_forwards(arrays, definition.naive(narrow), other, rotating)
    else:
        grids = grids if names else grids[:1]
        kinds = _narrow(arguments, narrow, grids, tensor_cores)
        draws = [results(arrays, arithmetic=kind) for kind in kinds]
    naive = _worst_of(oracle, draws, names)
    lse = naive["lse"] if lse is None else lse
    expected = Expected(oracle, naive, dtype, lse=lse)
    if float8:
        first = _draw_of_float8(arguments, oracle, draws)
        expected = expected._replace(float8=True, first=first, score=_largest(arguments, arrays))
    return expected._replace(slack=slack, noise=2.0**-16 if narrow == "tf32" else expected.noise)


def _narrow(
    arguments: dict[str, Any], narrow: str, grids: tuple[float, ...], tensor_cores: bool
) -> list[definition.Arithmetic]:
    """The arithmetic of the naive runs of a problem whose operands have less than 32 bits."""
    kinds = [definition.naive(narrow, grid) for grid in grids]
    if narrow == "float8":
        scores = definition.float8_scores(arguments)
        return [kind._replace(scores=lambda q, k: scores) for kind in kinds]
    if grids is MANY_GRIDS:
        scores = definition.towards_zero if tensor_cores else definition.one_by_one
        kinds.append(kinds[0]._replace(scores=scores))
        if narrow == "tf32":
            # Portable kernels have scores of 16 bits. A row's only score may be near by chance in
            # TF32: then naive runs by TF32 alone say too little.
            kinds += [kind._replace(score=kind.value) for kind in kinds]
    return kinds


def over_quantized(arguments: dict[str, Any], **how: Any) -> Expected:
    """The expected results over a quantised cache, k and v in float64. Kernels may round its rows
    to q's dtype, as a cache in that dtype holds them. So do the naive runs, by which lse is judged
    as out is.
    """
    expected, dtype = attention(arguments, **how), arguments["q"].dtype
    if dtype == jnp.float32:
        return expected
    near = {name: jnp.asarray(arguments[name], jnp.float32).astype(dtype) for name in "kv"}
    return expected._replace(naive=attention(arguments | near, **how).naive)


def by_8_bits(expected: Expected, arguments: dict[str, Any]) -> Expected:
    """`expected` of a kernel that multiplies q and k by 8-bit matmuls, as terms of float8."""
    arrays = {name: np.asarray(arguments[name], np.float64) for name in "qk"}
    score = _largest(arguments, arrays)
    return expected._replace(score=score, lse_slack=SCORE_FLOAT8 * score)


def tangents(
    arguments: dict[str, Any],
    along: dict[str, Any],
    *,
    tensor_cores: bool = False,
    grids: tuple[float, ...] = GRIDS,
) -> Expected:
    """Oracle and naive result of out and lse, and of their tangents out_dot and lse_dot by those of
    some inputs; of a problem that nobody chose. The tangents are held to the worst of several naive
    runs, in float32 of other orders of the columns.
    """
    expected = attention(arguments, tensor_cores=tensor_cores, random=True, grids=grids)
    static = {name: arguments[name] for name in _STATIC if arguments.get(name) is not None}
    if isinstance(arguments.get("q_offset"), int):
        static["q_offset"] = arguments["q_offset"]
    arrays = {name: x for name, x in arguments.items() if name not in (*static, *_BESIDE)}
    results = functools.partial(definition.tangents, **static)
    if expected.dtype != "float32":
        kinds = [definition.naive(expected.dtype, grid) for grid in grids]
        draws = [results(arrays, along, arithmetic=kind) for kind in kinds]
    else:
        narrow = "tf32" if arguments.get("precision") is None else "terms"
        plain = definition.naive(narrow if tensor_cores else None)
        draws = [results(arrays, along, arithmetic=plain)]
        for seed in range(len(grids)):
            scores, values = _orders(arrays, seed)
            turned, moved = (_in_order(x, scores, values) for x in (arrays, along))
            other = results(turned, moved, arithmetic=plain)
            draws.append(other | {"out_dot": other["out_dot"][..., np.argsort(values)]})
        if narrow == "tf32" and tensor_cores:  # scores of 16 bits, by a forward in TF32
            forward = {name: expected.naive[name] for name in ("out", "lse")}
            draws.append(
                results(arrays, along, arithmetic=plain._replace(score=plain.value, **forward))
            )
    arithmetic = kinds[0] if expected.dtype != "float32" else plain
    for by in (1 - LSE_STORED, 1 + LSE_STORED):
        stored = arithmetic._replace(lse=expected.naive["lse"] * by)
        draws.append(results(arrays, along, arithmetic=stored))
    oracle = results(arrays, along)
    naive = _worst_of(oracle, draws, set(oracle))
    return expected._replace(oracle=expected.oracle | oracle, naive=expected.naive | naive)


def _by_other_forwards(
    arrays: dict[str, Any], kind: definition.Arithmetic, call: Any, rotating: Any
) -> list[dict[str, Any]]:
    """Results whose gradients read the lse of another forward, which adds up in another order."""
    runs = [rotating(functools.partial(call, seed=seed)) for seed in range(FORWARDS + 1)]
    forwards = [np.float32(run(arrays, arithmetic=kind)["lse"]) for run in runs[1:]]
    return [
        run(arrays, arithmetic=kind._replace(lse=lse))
        for run, lse in zip(runs[:-1], forwards, strict=True)
    ]


def _attention(arrays: dict[str, Any], *, sums: Any, **options: Any) -> dict[str, Any]:
    results = definition.attention(arrays, **options)
    return results if sums is None else results | sums(results.pop("dbias"))


def _rotating(arguments: dict[str, Any], call: Any) -> Any:
    """A call with q and k rotated as `arguments` say, and dq and dk rotated back; what is stored in
    between is rounded as it is.
    """
    if (rotary := arguments.get("rotary")) is None:
        return call
    positions = arguments.get("rotary_positions")
    if positions is None:
        first = np.reshape(arguments.get("q_offset", 0), (-1, 1))
        positions = (first + np.arange(arguments["q"].shape[1]), arguments["k"].shape[1])
        positions = positions[0], np.arange(positions[1])[None]

    def rotated(x, at, arithmetic, back=False):
        x = np.array(x, arithmetic.dtype)
        cos, sin = (
            np.asarray(t)[np.asarray(at)][..., None, :].astype(arithmetic.dtype)
            for t in (rotary.cos, rotary.sin)
        )
        sin, pairs = -sin if back else sin, rotary.cos.shape[1]
        columns = rotary.first + np.arange(2 * pairs)
        a, b = columns.reshape(-1, 2).T if rotary.interleaved else columns.reshape(2, -1)
        x[..., a], x[..., b] = (
            x[..., a] * cos - x[..., b] * sin,
            x[..., b] * cos + x[..., a] * sin,
        )
        return x

    def both(arrays, arithmetic=definition.EXACT):
        turned = {
            name: arithmetic.stored(rotated(arrays[name], at, arithmetic))
            for name, at in zip("qk", positions, strict=True)
        }
        got = call(arrays | turned, arithmetic=arithmetic)
        gradients = {
            name: rotated(arithmetic.stored(got[name]), at, arithmetic, back=True)
            for name, at in zip(("dq", "dk"), positions, strict=True)
            if name in got
        }
        return got | gradients

    return both


def _draw_of_float8(arguments: dict[str, Any], oracle: dict[str, Any], draws: list[Any]) -> Any:
    """out of the naive run whose RMS error is the measure. Scales of rows of v multiply the
    probabilities before they are rounded: then no probability is exact, the largest of a row
    neither, and the run with the largest error counts.
    """
    if np.ndim(arguments.get("v_scale", 0)) < 2 or arguments["v_scale"].shape[-2] == 1:
        return draws[0]["out"]
    finite = np.where(np.isfinite(oracle["out"]), oracle["out"], 0)
    return max((draw["out"] for draw in draws), key=lambda out: ((out - finite) ** 2).mean())


def _reordered(arrays: dict[str, Any], do: Any, seed: int, *, call: Any, **how: Any) -> Any:
    """With the columns of q and k in an order of its own, and those of v and do."""
    scores, values = _orders(arrays, seed)
    do = None if do is None else np.asarray(do)[..., values]
    result = call(_in_order(arrays, scores, values), do=do, **how)
    places = {"dq": scores, "dk": scores, "dv": values, "out": values}
    back = {n: result[n][..., np.argsort(order)] for n, order in places.items() if n in result}
    return result | back


def _in_turn(a: Any, b: Any) -> Any:
    """a @ b of each query head, added up over the heads of a kv head: one sum, term by term."""
    wide = np.moveaxis(a, 2, 3)
    wide = wide.reshape(*wide.shape[:2], 1, wide.shape[2], -1)
    return definition.one_by_one(wide, b.reshape(*b.shape[:2], 1, -1, b.shape[-1]))


def _orders(arrays: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """Orders of the columns of q and k, and of those of v."""
    rng = np.random.default_rng(seed)
    scores, values = (rng.permutation(arrays[name].shape[3]) for name in "kv")
    return scores, values


def _in_order(arrays: dict[str, Any], scores: Any, values: Any) -> dict[str, Any]:
    orders = {"q": scores, "k": scores, "v": values}
    turned = {n: np.asarray(arrays[n])[..., order] for n, order in orders.items() if n in arrays}
    return arrays | turned


def _worst_of(oracle: dict[str, Any], draws: list[dict[str, Any]], names: set[str]) -> Any:
    """The first draw, but each number of `names` from the draw that is farthest off."""
    naive = dict(draws[0])
    for name in names:
        zero = np.where(np.isfinite(oracle[name]), oracle[name], 0)  # `_compare` wants others as is
        for other in draws[1:]:
            farther = np.abs(other[name] - zero) > np.abs(naive[name] - zero)
            naive[name] = np.where(farther, other[name], naive[name])
    return naive


def check(got: dict[str, Any], expected: Expected) -> dict[str, tuple[float, float]]:
    """Fails where something in `got` is off by more than its budget; (error, budget) by name."""
    report = {}
    for name, value in got.items():
        oracle, naive = expected.oracle[name], expected.naive[name]
        report[name] = _compare(name, np.asarray(value), oracle, naive, expected)
    return report


def _compare(
    name: str, got: Any, oracle: Any, naive: Any, expected: Expected
) -> tuple[float, float]:
    assert got.shape == oracle.shape, f"{name}: expected shape {oracle.shape}, got {got.shape}"
    eps = max(float(jnp.finfo(x).eps) for x in (expected.dtype, got.dtype))
    got = got.astype(np.float64)
    finite = np.isfinite(oracle)
    # An oracle of -inf (a row that sees no key) or NaN has to be met exactly.
    np.testing.assert_array_equal(got[~finite], oracle[~finite], err_msg=name)
    got, oracle, naive = (x[finite] for x in (got, oracle, naive))
    if not oracle.size:
        return 0.0, 0.0
    if name in ("lse", "lse_dot"):
        rounding = LSE_ROUNDING * np.maximum(np.abs(oracle), 1) + expected.lse_slack
    else:  # a value of the result's own dtype is at best half a unit in the last place away
        tiny = float(jnp.finfo(expected.dtype).tiny)
        # The exponent of a key's probability is off by its score's last bit, also where it is 1.
        share = eps / 2 + expected.slack + 2.0**-24 * expected.score
        rounding = share * np.abs(oracle) + tiny
        if name.startswith("daux"):  # float32 sums of many numbers that cancel
            rounding = rounding + AUX_ROUNDING * np.abs(oracle).max()
    live = oracle != 0  # keys and queries that nobody sees have exact zeros, which say nothing
    worst = _worst(name, np.abs(naive - oracle), (finite, live), expected.noise)
    worst = worst * (OF_FEW if oracle.size < FEW_NUMBERS else 1)
    allowed = tolerance.allowed(worst, rounding)
    error = np.abs(got - oracle)
    rms = np.sqrt(np.mean(oracle[live] ** 2)) if live.any() else 0.0
    assert np.all(error <= allowed), (  # a NaN is no <= either
        f"{name}: off by {np.max(error):.3e} at worst, allowed {np.min(allowed):.3e} to "
        f"{np.max(allowed):.3e}, RMS of the oracle {rms:.3e}, {np.sum(~(error <= allowed))} of "
        f"{error.size} elements"
    )
    vague = np.sqrt(np.mean(allowed**2))
    if expected.float8 and name == "out":
        vague = _check_rms(error, expected.first[finite] - oracle, rounding)
    share = VACUOUS_GRADIENT if name.startswith("d") or name.endswith("_dot") else VACUOUS
    if rms != 0 and not vague <= share * rms:
        raise VacuousError(
            f"{name}: a budget of {vague:.2e} proves nothing about values of RMS {rms:.2e}"
        )
    return float(error.max()), float(np.max(allowed))


def _largest(arguments: dict[str, Any], arrays: dict[str, Any]) -> float:
    """A bound of the scores' magnitudes."""
    lengths = [np.sqrt((arrays[name] ** 2).sum(axis=-1)).max(initial=0) for name in "qk"]
    return abs(arguments.get("scale") or arrays["q"].shape[-1] ** -0.5) * lengths[0] * lengths[1]


def _check_rms(error: Any, naive: Any, rounding: Any) -> float:
    """Fails where the errors of float8 are larger than those of the naive one on the whole; the
    budget.
    """
    of_error, of_naive = (float(np.sqrt(np.mean(x**2))) for x in (error, naive))
    most = RMS_FLOAT8 * of_naive + float(np.sqrt(np.mean(rounding**2)))
    assert of_error <= most, f"out: off by {of_error:.3e} in RMS, allowed {most:.3e}"
    return most


def _worst(name: str, error: np.ndarray, which: Any, noise: float) -> Any:
    """The naive error that each element is held to; `error` is of those that are finite, `which`
    is (finite, live).
    """
    finite, live = which
    if name == "dsinks":  # one sum of many rows, each made of what is multiplied
        return error.max() + 16 * noise
    if name not in ("dq", "dk", "dv", "dbias", "out_dot") or not finite.all():
        return error.max()
    error, live = error.reshape(finite.shape), live.reshape(finite.shape)
    axis = 2 if name == "dbias" else 1  # axis of positions: [B, N, T, S], else [B, T, N, H]
    # dP and delta, which cancel where a row sees one key, are made of rounded operands.
    noise = 16 * noise if name == "dbias" else tolerance.NOISE
    band = tolerance.bands(live.any(axis=3).sum(axis=(0, 3 - axis)))
    worst = tolerance.worst_of_band(error.max(axis=(0, 3 - axis, 3)), band)
    spread = np.expand_dims(worst + noise, [n for n in range(4) if n != axis])
    return np.broadcast_to(spread, error.shape)[finite]
