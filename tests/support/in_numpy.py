"""A jaxpr computed in NumPy, one equation after the other, as `tests/support/mosaic.py` runs
kernels: XLA takes seconds to compile one that runs once, and its callbacks take longer than what
they call. `call` does so with any function, in the place of `jax.jit`; within `instead_of_xla`
every program of one device is computed so, whoever calls it.

Values are arrays, which nobody writes to; refs of a program become values; a key of random numbers
is one number of 64 bits. Integers wrap around, divide towards zero and shift as in XLA; products of
matmuls are added in float32. Primitives without a rule here are computed by JAX, one by one.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback, core, pjit
from jax._src.array import ArrayImpl
from jax._src.random import prng
from jax._src.state import discharge
from jax.sharding import AxisType

from tests.support import devices_in_numpy, numpy_rows

Rule = Callable[..., Any]


def run(jaxpr: Any, consts: Any, *args: Any) -> list[Any]:
    """`jax.core.eval_jaxpr(jaxpr, consts, *args)`."""
    with _one_at_a_time:  # the threads of a block have one program
        program = _steps_of(jaxpr)
    with np.errstate(all="ignore"):  # NaN and infinity are none of an error on a GPU
        return program(*map(np.asarray, consts), *map(np.asarray, args))


def call(function: Callable[..., Any], *args: Any) -> Any:
    """`jax.jit(function)(*args)`."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    traced = jitted.trace(*args)
    jaxpr = _without_refs(traced.jaxpr)
    results = run(jaxpr, jaxpr.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), map(jnp.asarray, results))


_one_at_a_time = threading.RLock()


class Program:
    """The equations as steps: (function, places of its arguments, places of its results)."""

    def __init__(self, jaxpr: Any):
        places: dict[Any, int] = {}
        self.start: list[Any] = []
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self._add(places, var)
        self.steps = []
        for eqn in jaxpr.eqns:
            inputs = [self._place(places, atom) for atom in eqn.invars]
            rule = _rule(eqn)
            if eqn.primitive.name in FOLDED and all(hasattr(atom, "val") for atom in eqn.invars):
                self._add(places, eqn.outvars[0], rule(*[self.start[i] for i in inputs]))
                continue
            outputs = [self._add(places, var) for var in eqn.outvars]
            self.steps.append((rule, inputs, outputs))
        self.results = [self._place(places, atom) for atom in jaxpr.outvars]

    def _add(self, places, var, value=None):
        places[var] = len(self.start)
        self.start.append(value)
        return places[var]

    def _place(self, places, atom):
        if not hasattr(atom, "val"):
            return places[atom]
        self.start.append(np.asarray(atom.val, atom.aval.dtype))
        return len(self.start) - 1

    def __call__(self, *args: Any) -> list[Any]:
        values = self.start.copy()
        values[: len(args)] = args
        for rule, inputs, outputs in self.steps:
            results = rule(*[values[i] for i in inputs])
            if len(outputs) == 1:
                values[outputs[0]] = results
                continue
            for place, result in zip(outputs, results, strict=True):
                values[place] = result
        return [values[i] for i in self.results]


_steps_of = functools.lru_cache(maxsize=256)(Program)


def _program(jaxpr: Any) -> Callable[..., list[Any]]:
    """The function of a jaxpr that brings its constants."""
    jaxpr = _without_refs(jaxpr)
    return functools.partial(_steps_of(jaxpr), *map(np.asarray, jaxpr.consts))


def _rule(eqn: Any) -> Rule:
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return ELEMENTWISE[name]
    rule = RULES[name](eqn, **eqn.params) if name in RULES else by_jax(eqn)
    several = name not in RULES or name in SEVERAL
    return (lambda *args: rule(*args)[0]) if several and len(eqn.outvars) == 1 else rule


_by_jax = threading.local()  # `running` where JAX itself computes an equation


def by_jax(eqn: Any) -> Rule:
    """The rule of a primitive that has none here: JAX compiles it alone."""

    def call(*args):
        _by_jax.running = True
        try:
            results = eqn.primitive.bind(*args, **eqn.params)
        finally:
            _by_jax.running = False
        results = results if eqn.primitive.multiple_results else [results]
        return [x if isinstance(x, jax.Ref) else np.asarray(x) for x in results]

    return call


# ---- element by element --------------------------------------------------------------------------


def _is_integer(x) -> bool:
    return x.dtype.kind in "iu"


def _divide(x, y):
    if not _is_integer(x):
        return x / y
    quotient = np.abs(x.astype(np.int64)) // np.maximum(np.abs(y.astype(np.int64)), 1)
    quotient = np.where((x < 0) != (y < 0), -quotient, quotient)
    return np.where(y == 0, -1, quotient).astype(x.dtype)


def _remainder(x, y):
    return np.where(y == 0, x, np.fmod(x, y)) if _is_integer(x) else np.fmod(x, y)


def _bits(x) -> int:
    return 8 * x.dtype.itemsize


def _unsigned(x):
    return x.astype(np.dtype(f"u{x.dtype.itemsize}"))


def _outside(x, y):
    return y.astype(np.uint64) >= _bits(x)


def _shift_left(x, y):
    return np.where(_outside(x, y), x.dtype.type(0), np.left_shift(x, y))


def _shift_right(x, y):
    shifted = np.right_shift(_unsigned(x), _unsigned(y))
    return np.where(_outside(x, y), 0, shifted).astype(x.dtype)


def _shift_with_sign(x, y):
    signed = np.dtype(f"i{x.dtype.itemsize}")
    y = np.where(_outside(x, y), _bits(x) - 1, y).astype(signed)
    return np.right_shift(x.astype(signed), y).astype(x.dtype)


def _select(which, *cases):
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


ELEMENTWISE: dict[str, Rule] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "shift_left": _shift_left,
    "shift_right_logical": _shift_right,
    "shift_right_arithmetic": _shift_with_sign,
    "population_count": lambda x: np.bitwise_count(_unsigned(x)).astype(x.dtype),
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "is_finite": np.isfinite,
    "logistic": lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": _select,
    "copy": lambda x: x,
    **dict.fromkeys(("stop_gradient", "name", "reshard"), lambda x: x),
    "optimization_barrier": lambda *args: args if len(args) > 1 else args[0],
    "debug_callback": lambda *args: (),
}


# ---- with parameters -----------------------------------------------------------------------------


def _convert(eqn, new_dtype, **_):
    del eqn
    dtype = jnp.dtype(new_dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        return lambda x: x.astype(dtype)
    least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max

    def convert(x):
        if jnp.issubdtype(x.dtype, jnp.floating):  # too large numbers become the nearest that fits
            x = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0, posinf=most, neginf=least)
            inside = np.clip(x, least, most).astype(np.int64)
            return np.where(x >= most, most, inside).astype(dtype)
        return x.astype(dtype)

    return convert


def _bitcast(eqn, new_dtype):
    del eqn
    dtype = jnp.dtype(new_dtype)

    def bitcast(x):
        if dtype.itemsize > x.dtype.itemsize:
            return np.ascontiguousarray(x).view(dtype)[..., 0]
        if dtype.itemsize < x.dtype.itemsize:
            return np.ascontiguousarray(x[..., None]).view(dtype)
        return np.ascontiguousarray(x).reshape(x.shape).view(dtype)

    return bitcast


SMALL = 1 << 12  # elements of an array that is copied sooner than it is viewed anew


def _broadcast(eqn, shape, broadcast_dimensions, **_):
    wide = [1] * len(shape)
    for place, size in zip(broadcast_dimensions, eqn.invars[0].aval.shape, strict=True):
        wide[place] = size
    if wide == list(shape):
        return lambda x: x.reshape(wide)
    if math.prod(shape) > SMALL:
        return lambda x: np.broadcast_to(x.reshape(wide), shape)

    def broadcast(x):
        result = np.empty(shape, x.dtype)
        result[...] = x.reshape(wide)
        return result

    return broadcast


def _iota(eqn, dtype, shape, dimension, **_):
    del eqn
    numbers = np.arange(shape[dimension]).astype(jnp.dtype(dtype))
    numbers = numbers.reshape([-1 if n == dimension else 1 for n in range(len(shape))])
    result = np.broadcast_to(numbers, shape)
    return lambda: result


def _slice(eqn, start_indices, limit_indices, strides):
    del eqn
    strides = strides or (1,) * len(start_indices)
    where = tuple(map(slice, start_indices, limit_indices, strides))
    return lambda x: x[where]


def _starts(shape, sizes, starts):
    """Slices that would reach past the end begin earlier."""
    pairs = zip(shape, sizes, starts, strict=True)
    return tuple(min(max(int(at), 0), size - taken) for size, taken, at in pairs)


def _dynamic_slice(eqn, slice_sizes, **_):
    del eqn

    def take(x, *starts):
        begin = _starts(x.shape, slice_sizes, starts)
        return x[tuple(slice(at, at + n) for at, n in zip(begin, slice_sizes, strict=True))]

    return take


def _dynamic_update(x, part, *starts):
    begin = _starts(x.shape, part.shape, starts)
    result = x.copy()
    result[tuple(slice(at, at + n) for at, n in zip(begin, part.shape, strict=True))] = part
    return result


def _pad(eqn, padding_config):
    """Rows are put between, before and after; where there are fewer than none, some are cut off."""
    del eqn
    least = [(max(low, 0), max(high, 0)) for low, high, _ in padding_config]
    cut = [(max(-low, 0), max(-high, 0)) for low, high, _ in padding_config]
    steps = [between + 1 for *_, between in padding_config]

    def pad(x, value):
        spread = [max((size - 1) * step + 1, 0) for size, step in zip(x.shape, steps, strict=True)]
        pairs = list(zip(spread, least, steps, strict=True))
        whole = np.full([low + size + high for size, (low, high), _ in pairs], value, x.dtype)
        whole[tuple(slice(low, low + size, step) for size, (low, _), step in pairs)] = x
        ends = zip(whole.shape, cut, strict=True)
        return whole[tuple(slice(low, size - high) for size, (low, high) in ends)]

    return pad


def _dot(eqn, dimension_numbers, **_):
    (left_sums, right_sums), (left_batch, right_batch) = dimension_numbers
    dtype = eqn.outvars[0].aval.dtype

    def as_matrices(x, batch, sums, last):
        kept = [n for n in range(x.ndim) if n not in (*batch, *sums)]
        order = (*batch, *kept, *sums) if last else (*batch, *sums, *kept)
        shape = [math.prod(x.shape[n] for n in some) for some in (kept, sums)]
        x = x.transpose(order).reshape(*(x.shape[n] for n in batch), *shape[:: 1 if last else -1])
        return x.astype(wide) if x.dtype != wide else x

    wide = np.dtype(np.int64 if jnp.issubdtype(dtype, jnp.integer) else np.float32)
    wide = np.dtype(np.float64) if dtype == np.float64 else wide
    shape = eqn.outvars[0].aval.shape

    def dot(left, right):
        left = as_matrices(left, left_batch, left_sums, True)
        right = as_matrices(right, right_batch, right_sums, False)
        return (left @ right).reshape(shape).astype(dtype)

    return dot


def _reduction(function):
    def rule(eqn, axes, **_):
        dtype = eqn.outvars[0].aval.dtype
        return lambda x: np.asarray(function(x, axis=tuple(axes))).astype(dtype)

    return rule


def _arg(function):
    def rule(eqn, axes, index_dtype):
        del eqn
        return lambda x: np.asarray(function(x, axis=axes[0])).astype(index_dtype)

    return rule


def _cumulative(function):
    def rule(eqn, axis, reverse):
        del eqn

        def total(x):
            x = np.flip(x, axis) if reverse else x
            result = function.accumulate(x, axis=axis, dtype=x.dtype)
            return np.flip(result, axis) if reverse else result

        return total

    return rule


def _power(eqn, y):
    del eqn
    return lambda x: (x**y if y >= 0 else 1 / x**-y).astype(x.dtype)


def _pieces(eqn, sizes, axis):
    del eqn
    ends = np.cumsum(sizes)[:-1]
    return lambda x: np.split(x, ends, axis)


def _reshape(eqn, new_sizes, **_):
    del eqn
    return lambda x: x.reshape(new_sizes)


# ---- random numbers ------------------------------------------------------------------------------


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.float32), jax.dtypes.extended)


def _dtype(aval: Any) -> Any:
    return np.dtype(np.uint64) if _is_key(aval) else aval.dtype


def _joined(words: np.ndarray) -> np.ndarray:
    """Keys, of the two words that each consists of."""
    return np.ascontiguousarray(words).view(np.uint64)[..., 0]


def _words(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys[..., None]).view(np.uint32)


def _traced(function):
    """The rule of what jax says by a program over the words that keys consist of."""

    def rule(eqn, **params):
        @functools.cache
        def program(*like):
            return _program(jax.make_jaxpr(functools.partial(function, eqn, **params))(*like))

        def compute(*args):
            pairs = zip(args, eqn.invars, strict=True)
            args = [_words(x) if _is_key(var.aval) else x for x, var in pairs]
            like = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args)
            result = program(*like)(*args)[0]
            return _joined(result) if _is_key(eqn.outvars[0].aval) else result

        return compute

    return rule


def _seed(eqn, seeds, impl):
    del eqn
    return prng.random_seed_impl_base(seeds, impl=impl)


def _split(eqn, words, shape):
    keys = eqn.invars[0].aval
    return prng.random_split_impl_base(keys.dtype._impl, words, keys.ndim, shape=shape)


def _fold_in(eqn, words, numbers):
    keys = eqn.invars[0].aval
    return prng.random_fold_in_impl_base(keys.dtype._impl, words, numbers, keys.shape)


def _random_bits(eqn, words, **what):
    keys = eqn.invars[0].aval
    return prng.random_bits_impl_base(keys.dtype._impl, words, keys.ndim, **what)


def _threefry(low, high, x, y):
    """The 20 rounds of Threefry-2x32 (Salmon et al. 2011)."""
    low, high, x, y = np.broadcast_arrays(low, high, x, y)
    keys = (low, high, low ^ high ^ np.uint32(0x1BD11BDA))
    x, y = x + low, y + high
    for n in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[n % 2]:
            x = x + y
            y = ((y << np.uint32(by)) | (y >> np.uint32(32 - by))) ^ x
        x, y = x + keys[(n + 1) % 3], y + keys[(n + 2) % 3] + np.uint32(n + 1)
    return x, y


def _iota_of_two_words(eqn, shape):
    """The elements' numbers, in 64 bits: the high words and the low ones."""
    del eqn
    number = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    words = (number >> np.uint64(32)).astype(np.uint32), number.astype(np.uint32)
    return lambda: words


# ---- other jaxprs --------------------------------------------------------------------------------


def _call(eqn, jaxpr=None, call_jaxpr=None, fun_jaxpr=None, call=None, **_):
    del eqn
    return _program(jaxpr or call_jaxpr or fun_jaxpr or call)


def _dual(eqn, run, dual, moving, **_):
    return _linear(eqn, dual, run, len(eqn.invars) - len(moving))


def _linear(eqn, jaxpr, run, count, **_):
    """`_autodiff.linear`, which traces its operation late where it is transposed as a rule."""
    if jaxpr is None:
        types = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
        jaxpr = jax.make_jaxpr(run)(tuple(types[:count]), tuple(types[count:]))
    return _program(jaxpr)


def _while(eqn, cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts):
    del eqn
    condition, body = _program(cond_jaxpr), _program(body_jaxpr)

    def loop(*args):
        seen, known = args[:cond_nconsts], args[cond_nconsts : cond_nconsts + body_nconsts]
        carried = args[cond_nconsts + body_nconsts :]
        while condition(*seen, *carried)[0]:
            carried = body(*known, *carried)
        return carried

    return loop


def _cond(eqn, branches, **_):
    del eqn
    programs = [_program(branch) for branch in branches]
    last = len(programs) - 1
    return lambda which, *args: programs[min(max(int(which), 0), last)](*args)


def _scan(eqn, jaxpr, length, reverse, ft_in, **_):
    num_consts, num_carry = (len(list(part)) for part in ft_in.unpack()[:2])
    body, results = _program(jaxpr), eqn.outvars[num_carry:]

    def scan(*args):
        known, rest = args[:num_consts], args[num_consts:]
        carried, arrays = rest[:num_carry], rest[num_carry:]
        made = [np.zeros(var.aval.shape, _dtype(var.aval)) for var in results]
        for i in reversed(range(length)) if reverse else range(length):
            outs = body(*known, *carried, *(x[i] for x in arrays))
            carried = outs[:num_carry]
            for array, value in zip(made, outs[num_carry:], strict=True):
                array[i] = value
        return [*carried, *made]

    return scan


def _callback(eqn, callback, result_avals, **_):
    """Copies go there and back: some of what is told is kept, and what comes may be written to."""
    del eqn

    def call(*args):
        results = [np.array(x) for x in callback(*map(np.array, args))]
        for have, want in zip(results, result_avals, strict=True):
            assert (have.shape, have.dtype) == (want.shape, want.dtype), (callback, have, want)
        return results

    return call


CALLS = {"io_callback", "while", "cond", "scan"}
CALLS |= {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
CALLS |= {
    "pallas_attn_choose",
    "pallas_attn_dual",
    "pallas_attn_function",
    "pallas_attn_linear",
    "remat2",
    "checkpoint",
    "custom_vmap_call",
    "custom_partitioning",
}  # on one device
SEVERAL = CALLS | {"unstack", "split"}  # primitives with several results, or one
SEVERAL |= {"shard_map", "mpmd_map"} | devices_in_numpy.COLLECTIVES.keys()

# Computed once a program where all arguments are literals.
FOLDED = {"broadcast_in_dim", "convert_element_type", "iota"}

# Rare primitives that JAX computes one by one.
ALONE = {"argmin", "ceil", "clz", "erf_inv", "expm1", "floor", "le_to", "log1p", "lt_to", "pow"}
ALONE |= {"reduce", "reduce_precision", "round", "sort", "square", "one_minus_square", "top_k"}

RULES: dict[str, Callable[..., Rule]] = {
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda eqn, dimensions: lambda x: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda eqn, permutation: lambda x: x.transpose(permutation),
    "rev": lambda eqn, dimensions: lambda x: np.flip(x, tuple(dimensions)),
    "concatenate": lambda eqn, dimension: lambda *xs: np.concatenate(xs, dimension),
    "unstack": lambda eqn, axis: lambda x: list(np.moveaxis(x, axis, 0)),
    "stack": lambda eqn, axis: lambda *xs: np.stack(xs, axis),
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": lambda eqn, **_: _dynamic_update,
    "pad": _pad,
    "tile": lambda eqn, reps: lambda x: np.tile(x, reps),
    "dot_general": _dot,
    "integer_pow": _power,
    "split": _pieces,
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.bitwise_and.reduce),
    "reduce_or": _reduction(np.bitwise_or.reduce),
    "argmax": _arg(np.argmax),
    "cumsum": _cumulative(np.add),
    "cumprod": _cumulative(np.multiply),
    "gather": numpy_rows.gather,
    "scatter": numpy_rows.scatter(numpy_rows.put),
    "scatter-add": numpy_rows.scatter(np.add.at),
    "random_seed": _traced(_seed),
    "random_split": _traced(_split),
    "random_fold_in": _traced(_fold_in),
    "random_bits": _traced(_random_bits),
    "threefry2x32": lambda eqn: _threefry,
    "random_wrap": lambda eqn, **_: _joined,
    "random_unwrap": lambda eqn, **_: _words,
    "iota_2x32_shape": _iota_of_two_words,
    "while": _while,
    "cond": _cond,
    "scan": _scan,
    "io_callback": _callback,
    "shard_map": devices_in_numpy.shard_map(_steps_of),
    **devices_in_numpy.COLLECTIVES,
    **dict.fromkeys(CALLS - {"io_callback", "while", "cond", "scan"}, _call),
    "pallas_attn_choose": lambda eqn, **_: lambda *arrays: arrays[: len(eqn.outvars)],
    "pallas_attn_dual": _dual,
    "pallas_attn_linear": _linear,
}


# ---- in the place of XLA -------------------------------------------------------------------------


@contextlib.contextmanager
def instead_of_xla() -> Iterator[None]:
    """Programs that are compiled in here are computed in NumPy, also those of a single operation;
    but not those of several devices without a `shard_map`, with other effects than callbacks have,
    or with anything that has no rule. What is donated is gone afterwards; results are on the first
    device.
    """
    by_xla = pjit._pjit_call_impl_python

    def call(*args, jaxpr, **params):
        if getattr(_by_jax, "running", False):
            return by_xla(*args, jaxpr=jaxpr, **params)
        whole, jaxpr = jaxpr, _without_refs(jaxpr)
        if not (_takes(jaxpr) and _is_here(args, params, _is_mapped(jaxpr))):
            return by_xla(*args, jaxpr=whole, **params)
        pairs = zip((*jaxpr.consts, *args), (*jaxpr.constvars, *jaxpr.invars), strict=True)
        numbers = [_numbers(x, var.aval) for x, var in pairs]
        consts = len(jaxpr.consts)
        results = run(jaxpr, numbers[:consts], *numbers[consts:])
        made = [_array(x, var.aval) for x, var in zip(results, jaxpr.outvars, strict=True)]
        for x, donated in zip(args, params["donated_invars"], strict=True):
            if donated and isinstance(x, jax.Array):
                x.delete()
        return made, None, None, []

    with mock.patch.object(pjit, "_pjit_call_impl_python", call):
        yield


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """`instead_of_xla` on a machine with a GPU, too: arrays that are made in here are the CPU's,
    and follow those of a GPU that they meet later.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]), instead_of_xla():
        yield


def _is_here(args, params, mapped) -> bool:
    """On the first CPU device, whose programs may be anyone's: a GPU's own are what is tested. What
    is mapped may be on all of them.
    """
    here = jax.config.jax_default_device or jax.local_devices()[0]
    if here.platform != "cpu" or jax.config.jax_debug_nans:
        return False
    arrays = [x for x in args if isinstance(x, jax.Array)]
    if mapped:
        return all(x.is_fully_addressable for x in arrays)
    where = (*params["in_shardings"], *params["out_shardings"])
    if any(type(x).__name__ != "UnspecifiedValue" for x in where if x is not None):
        return False
    return params["ctx_mesh"].empty and all(x.devices() == {here} for x in arrays)


@functools.lru_cache(maxsize=4096)
def _is_mapped(jaxpr: Any) -> bool:
    """Whether there is a `shard_map` in the program, of axes that types of arrays do not name."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return all(kind == AxisType.Auto for kind in eqn.params["mesh"].axis_types)
    return any(
        _is_mapped(inner) for eqn in jaxpr.eqns for inner in core.jaxprs_in_params(eqn.params)
    )


@functools.lru_cache(maxsize=4096)
def _without_refs(jaxpr: Any) -> Any:
    """The program with values in place of the refs that it creates, writes and reads."""
    kinds = {type(effect) for effect in jaxpr.effects}
    return discharge.discharge_state(jaxpr) if core.InternalMutableArrayEffect in kinds else jaxpr


EFFECTS = (core.NamedAxisEffect, callback.IOEffect, callback.OrderedIOEffect)


@functools.lru_cache(maxsize=4096)
def _takes(jaxpr: Any, mapped: bool = False) -> bool:
    """Whether every equation of the program has a rule, or can be left to JAX. Programs within lose
    their refs, too, but for those that are `mapped`, whose axes JAX knows in a `shard_map` only.
    """
    effects = EFFECTS if mapped else (*EFFECTS, core.InternalMutableArrayEffect)
    if any(not isinstance(effect, effects) for effect in jaxpr.effects):
        return False
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name not in ELEMENTWISE and name not in RULES and not _stands_alone(eqn):
            return False
        if (
            name == "mpmd_map" and eqn.params["interpret"]
        ):  # tests/support/mosaic.py takes all kernels
            continue
        keys = [var.aval.dtype._impl for var in eqn.outvars if _is_key(var.aval)]
        if any(impl.key_shape != (2,) for impl in keys):
            return False
        inside = mapped or name == "shard_map"
        within = core.jaxprs_in_params(eqn.params)
        within = within if inside else map(_without_refs, within)
        if not all(_takes(inner, inside) for inner in within):
            return False
    return True


def _stands_alone(eqn: Any) -> bool:
    """Whether JAX can compute the equation outside of its program: no keys, and no effects."""
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name in ALONE and not any(map(_is_key, avals))


def _numbers(x: Any, aval: Any) -> np.ndarray:
    if isinstance(x, prng.PRNGKeyArray):
        return _joined(np.asarray(x._base_array))
    return np.asarray(x, aval.dtype)


def _array(x: np.ndarray, aval: Any) -> Any:
    assert (x.shape, x.dtype) == (aval.shape, _dtype(aval)), (x.shape, x.dtype, aval)
    if _is_key(aval):
        return prng.PRNGKeyArray(aval.dtype._impl, jax.device_put(_words(x)))
    made = jax.device_put(x)
    if aval.weak_type:
        made = ArrayImpl(made.aval.update(weak_type=True), made.sharding, [made], False)
    return made
