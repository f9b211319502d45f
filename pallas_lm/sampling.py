"""The next token from logits: greedy, temperature, top-k, top-p, with a key a sequence."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.errors import described

Array = jax.Array
Numbers = float | Sequence[float] | np.ndarray | Array

_TINY = float(np.finfo(np.float32).tiny)  # a temperature below it counts as 0


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class _Field(NamedTuple):
    off: float  # its value where it changes nothing
    dtype: Any
    holds: Callable[[np.ndarray], np.ndarray]
    wanted: str  # the same in words


_FIELDS = {
    "temperature": _Field(0.0, np.float32, lambda x: (x >= 0) & (x < np.inf), "at least 0"),
    "top_k": _Field(0, np.int32, lambda x: x >= 0, "at least 0 (0: all)"),
    "top_p": _Field(1.0, np.float32, lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
}


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The choice of a token.

    Each is a number, or several, one for each row of logits (for each prompt, where a call has
    prompts). It is a pytree of the fields that are not at their defaults: a jitted function that
    takes one compiles nothing anew for other numbers. Numbers in jax's arrays are not checked:
    a temperature of NaN or below 0 counts as 0, a top_k below 0 as 0, and with a top_p of NaN or
    of at most 0 the likeliest token is taken.

    Args:
      temperature: divides the logits; 0, or what is 0 as a normal float32, takes the likeliest.
      top_k: sample from this many, the likeliest; 0: from all.
      top_p: sample from the fewest of these, the likeliest, that make up this share.
    """

    temperature: Numbers = 0.0
    top_k: Numbers = 0
    top_p: Numbers = 1.0

    def __post_init__(self) -> None:
        for name, field in _FIELDS.items():
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, value := tuple(value))
            _check(name, field, value)

    @property
    def draws(self) -> bool:
        """Whether any token may be drawn; else the likeliest are taken."""
        return bool(np.any(self._drawn))

    @property
    def always_draws(self) -> bool:
        """Whether no row takes the likeliest token. Numbers in jax's arrays are not known."""
        return bool(np.all(self._drawn))

    @property
    def _drawn(self) -> Any:
        return isinstance(self.temperature, Array) or np.asarray(self.temperature) >= _TINY

    @property
    def used(self) -> dict[str, Any]:
        """The fields that change anything, as arrays."""
        values = {name: getattr(self, name) for name in _FIELDS}
        used = {n: x for n, x in values.items() if not (np.isscalar(x) and x == _FIELDS[n].off)}
        return {name: _array(name, value) for name, value in used.items()}

    def of(self, rows: np.ndarray) -> "Sampling":
        """The fields in use as arrays, with the numbers of these rows."""
        used = {name: np.asarray(x) for name, x in self.used.items()}
        return Sampling(
            **{n: x[rows] if x.ndim else np.full(rows.shape, x) for n, x in used.items()}
        )

    def check_rows(self, count: int, what: str) -> None:
        """Raises ValueError for a field with more or fewer numbers than there are rows."""
        for name, x in self.used.items():
            if x.shape not in ((), (count,)):
                raise ValueError(
                    f"{name}: expected a number, or one for each of the {count} {what}, got "
                    f"{x.shape[0]} of them"
                )

    def tree_flatten(self) -> tuple[list[Any], tuple[str, ...]]:
        used = self.used
        return list(used.values()), tuple(used)

    @classmethod
    def tree_unflatten(cls, used: tuple[str, ...], leaves: Iterable[Any]) -> "Sampling":
        made = object.__new__(cls)  # leaves may be anything
        values = {name: field.off for name, field in _FIELDS.items()}
        for name, value in (values | dict(zip(used, leaves, strict=True))).items():
            object.__setattr__(made, name, value)
        return made


def _check(name: str, field: _Field, value: object) -> None:
    """Raises ValueError for what are no numbers, or numbers out of range."""
    try:
        held = value if isinstance(value, Array) else np.asarray(value)
    except ValueError:  # lists of several lengths
        held = np.asarray(None)
    kinds = (jnp.integer,) if field.dtype is np.int32 else (jnp.integer, jnp.floating)
    if held.ndim > 1 or not (held.size == 0 or any(jnp.issubdtype(held.dtype, x) for x in kinds)):
        wanted = "an int" if field.dtype is np.int32 else "a number"
        raise ValueError(f"{name}: expected {wanted}, or a list of them, got {described(value)}")
    if isinstance(held, np.ndarray) and (wrong := held[~field.holds(held)]).size:
        raise ValueError(f"{name}: expected {field.wanted}, got {wrong[0]}")


def _array(name: str, value: object) -> Any:
    """The numbers of a field as an array; anything else that a pytree may hold as it is."""
    if type(value) not in (int, float, tuple, np.ndarray) and not isinstance(value, np.number):
        return value
    dtype, held = _FIELDS[name].dtype, np.asarray(value)
    # No vocabulary has more words than int32 counts.
    return (np.minimum(held, np.iinfo(dtype).max) if dtype is np.int32 else held).astype(dtype)


def sample(logits: Array, keys: Array, sampling: Sampling) -> Array:
    """int32[M] from float32[M, vocab] and M keys. A sequence's token depends on its own row, its
    key and its numbers alone, so it is the same whatever else is in the batch.

    Raises:
      ValueError: an argument has another shape.
    """
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling: expected a Sampling, got {described(sampling)}")
    if jnp.ndim(logits) != 2:
        raise ValueError(f"logits: expected [rows, vocabulary], got {described(logits)}")
    count = len(logits)
    sampling.check_rows(count, "rows of logits")
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not sampling.draws:
        return likeliest
    _check_keys(keys, count)
    each = {
        name: jnp.broadcast_to(jnp.asarray(x, _FIELDS[name].dtype), (count,))[:, None]
        for name, x in sampling.used.items()
    }
    drawn = each["temperature"] >= _TINY
    # The largest is 0, so that no division by a small number makes two infinities of two logits.
    logits = logits.astype(jnp.float32) - logits.max(axis=-1, keepdims=True).astype(jnp.float32)
    logits /= jnp.where(drawn, each["temperature"], 1)
    kept = _truncated(logits, each.get("top_k"), each.get("top_p"))
    token = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
    return jnp.where(drawn[:, 0], token, likeliest)


def _check_keys(keys: object, count: int) -> None:
    shape, dtype = getattr(keys, "shape", ()), getattr(keys, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if (shape if typed else shape[:-1]) != (count,):
        got = described(keys) if dtype is None else f"{dtype}{list(shape)}"
        raise ValueError(
            f"keys: expected a key for each of the {count} rows of logits, got {got}; "
            f"jax.random.split(key, {count}) makes them"
        )


def _truncated(logits: Array, top_k: Array | None, top_p: Array | None) -> Array:
    """The logits, -inf for tokens that top_k int32[M, 1] and top_p float32[M, 1] leave out; equal
    logits stay together. Both are data: a token stays by its rank among the sorted logits.
    """
    if top_k is None and top_p is None:
        return logits
    ordered = -jnp.sort(-logits, axis=-1)  # largest first
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    stays = jnp.ones(logits.shape, bool)
    if top_k is not None:
        stays = (rank < top_k) | (top_k <= 0)
    if top_p is not None:
        weights = jax.nn.softmax(jnp.where(stays, ordered, -jnp.inf), axis=-1)
        before = jnp.cumsum(weights, axis=-1) - weights
        stays &= (before < top_p) | (rank == 0)
    least = jnp.where(stays, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)
