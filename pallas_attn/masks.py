"""Who sees whom: the one definition of visibility.

Everything that masks (the reference, every kernel, the tile schedulers) asks a `Mask` and nothing
else. `Mask.allows` is the definition; `kv_range` and `kv_full_range` are bounds that follow from it
and let a kernel skip tiles that nobody sees and leave the mask out of tiles that everybody sees;
those of the `transposed` mask say the same of the queries that meet some keys. All of it is plain
arithmetic: it works on Python integers, NumPy arrays, jax arrays and the tiles and scalars inside a
Pallas kernel.

What no band says, a function of positions does: `mask_fn` makes a `MaskFunction` of it.

Bounds are ints, or int32 scalars that arrive at run time. A problem, which is static, holds
`Mask.static`: `AT_RUN_TIME` in place of the latter, which come beside it (`Mask.arrays`);
`Mask.filled` puts both together again, inside a kernel of what it reads.
"""

import contextlib
import dataclasses
import enum
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._functions import block_summary
from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Program
from pallas_attn.context import Context, checked, shards_of

Position = Any  # int, np.ndarray, jax.Array or an in-kernel value of an integer type


LONGEST = 2**30  # bounds stay below it and offsets below half of it: their sums stay in int32


class RunTime(enum.Enum):
    """What stands for a bound in a static mask."""

    BOUND = "at run time"


AT_RUN_TIME = RunTime.BOUND
SIDES = ("left", "right")


@dataclasses.dataclass(frozen=True)
class Mask:
    """A band around the diagonal: the query at position p sees the keys p - left .. p + right, both
    inclusive.

    `None` leaves that side unbounded. `Mask(right=0)` is causal, `Mask()` hides nothing. Negative
    bounds are allowed (`Mask(right=-1)` is strictly causal) as long as the band holds at least one
    diagonal. A mask of ints is static: frozen, hashable, a jit key by value, also where it is an
    argument of a jitted function. A bound may also be a traced integer scalar, for example a window
    that a scan over layers reads from an array; kernels then read it at run time. It is clipped to
    +-(2**30 - 1), which is beyond every key: 2**31 - 1 means unbounded. Where left + right is
    negative then, no query sees a key. Lengths, offsets and segment ids are arrays and stay beside
    the mask::

        Mask()          Mask(right=0)    Mask(left=1, right=0)    Mask(left=1, right=1)
        1 1 1 1         1 . . .          1 . . .                  1 1 . .
        1 1 1 1         1 1 . .          1 1 . .                  1 1 1 .
        1 1 1 1         1 1 1 .          . 1 1 .                  . 1 1 1
    """

    left: Any = None
    right: Any = None

    def __post_init__(self):
        for side in SIDES:
            value = getattr(self, side)
            if value is None:
                continue
            if isinstance(value, jax.core.Tracer):
                object.__setattr__(self, side, traced_bound(f"Mask({side}=...)", value))
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__") or np.ndim(value):
                raise ValueError(
                    f"Mask({side}=...) wants an int, a traced integer scalar or None, got "
                    f"{value!r}. Pass lengths and offsets as arrays beside the mask."
                )
            if not -LONGEST < value < LONGEST:
                raise ValueError(
                    f"Mask({side}=...) wants less than 2**30 either way, got {value}: positions "
                    "are int32. None leaves the side unbounded."
                )
            object.__setattr__(self, side, operator.index(value))
        if self.width is not None and self.width < 1:
            raise ValueError(
                f"Mask(left={self.left}, right={self.right}) hides every key from every query: "
                "left + right must be at least 0."
            )

    @property
    def is_full(self) -> bool:
        """Whether the mask itself hides nothing (lengths and segments may still)."""
        return self.left is None and self.right is None

    @property
    def bounds_left(self) -> bool:
        """Whether it hides keys that lie far enough before the query."""
        return self.left is not None

    @property
    def bounds_right(self) -> bool:
        """Whether it hides keys that lie far enough after the query."""
        return self.right is not None

    @property
    def is_causal(self) -> bool:
        """Whether the last key that a query sees is known to be the one at its own position."""
        return isinstance(self.right, int) and self.right == 0

    @property
    def width(self) -> int | None:
        """How many positions the band has in each row; None where a side is unbounded, or known at
        run time only.
        """
        known = isinstance(self.left, int) and isinstance(self.right, int)
        return self.left + self.right + 1 if known else None

    @property
    def transposed(self) -> "Mask":
        """The same band seen from the keys: the key at position p meets the queries of this one."""
        return _unchecked(self.right, self.left)

    @property
    def arrays(self) -> dict[str, Any]:
        """The bounds that arrive at run time, by side."""
        sides = {side: getattr(self, side) for side in SIDES}
        static = (int, RunTime, type(None))
        return {side: x for side, x in sides.items() if not isinstance(x, static)}

    @property
    def static(self) -> "Mask":
        """The same with `AT_RUN_TIME` in place of bounds that arrive then: hashable."""
        return self.filled(**dict.fromkeys(self.arrays, AT_RUN_TIME))

    @property
    def arrives(self) -> tuple[str, ...]:
        """The sides of a static mask whose bounds arrive at run time."""
        return tuple(side for side in SIDES if getattr(self, side) is AT_RUN_TIME)

    @property
    def widest(self) -> "Mask":
        """The same without the bounds that arrive at run time: what is known before shows all keys
        that the mask will show.
        """
        return self.filled(**dict.fromkeys(self.arrives))

    def filled(self, **bounds: Any) -> "Mask":
        """The same with other bounds, which may be values inside a kernel: nothing checks them."""
        return _unchecked(**{side: getattr(self, side) for side in SIDES} | bounds)

    def __and__(self, other: "Mask") -> "Mask":
        """The keys that both masks show."""
        if not isinstance(other, Mask):
            return NotImplemented
        tighter = []
        for pair in ((self.left, other.left), (self.right, other.right)):
            given = [bound for bound in pair if bound is not None]
            tighter.append(functools.reduce(_minimum, given) if given else None)
        return Mask(*tighter)

    def __or__(self, other: "Mask") -> "MaskFunction":
        """The keys that one of two masks shows."""
        if not isinstance(other, Mask):
            return NotImplemented
        return as_function(self) | other

    def __invert__(self) -> "MaskFunction":
        """The keys that the mask hides."""
        return ~as_function(self)

    def allows(
        self,
        q_pos: Position,
        kv_pos: Position,
        kv_len: Position = None,
        q_segment: Position = None,
        kv_segment: Position = None,
    ) -> Any:
        """Whether the query at `q_pos` sees the key at `kv_pos`; the arguments broadcast against
        each other.

        `kv_len`: keys at or past it do not exist. Segments: both must carry the same id. Terms that
        are absent cost nothing; with no term at all the answer is the Python value True.
        """
        terms = []
        if self.right is not None:
            terms.append(kv_pos - q_pos <= self.right)
        if self.left is not None:
            terms.append(q_pos - kv_pos <= self.left)
        if kv_len is not None:
            terms.append(kv_pos < kv_len)
        if q_segment is not None:
            terms.append(q_segment == kv_segment)
        seen: Any = True
        for term in terms:
            seen = term if seen is True else seen & term
        return seen

    def row_bounds(self, q_pos: Position) -> tuple[Any, Any]:
        """Keys [low, high) that the query at `q_pos` sees; a bound is None where there is none.
        Neither is clipped: `low` may lie before key 0, and `high` past the last key.
        """
        low = None if self.left is None else q_pos - self.left
        high = None if self.right is None else q_pos + (self.right + 1)
        return low, high

    def kv_range(self, q_lo: Position, q_hi: Position, kv_len: Position) -> tuple[Any, Any]:
        """Keys [lo, hi) that *some* query at a position in [q_lo, q_hi) may see; empty when hi <=
        lo.
        """
        lo = 0 if self.left is None else q_lo - self.left
        hi = kv_len if self.right is None else q_hi + self.right
        if not (self.left is None or isinstance(self.left, int) and self.left >= 0):
            lo = _minimum(lo, kv_len)  # the band may begin after the query
        return _maximum(lo, 0), _minimum(hi, kv_len)

    def kv_full_range(self, q_lo: Position, q_hi: Position, kv_len: Position) -> tuple[Any, Any]:
        """Keys [lo, hi) that *every* query position in [q_lo, q_hi) sees; empty when hi <= lo."""
        lo = 0 if self.left is None else q_hi - 1 - self.left
        hi = kv_len if self.right is None else q_lo + self.right + 1
        return _maximum(lo, 0), _minimum(hi, kv_len)

    def dense(
        self, q_len: int, kv_len: int, *, q_offset: int = 0, kv_length: int | None = None
    ) -> np.ndarray:
        """The mask as bool[q_len, kv_len], for a look at it and for tests."""
        q_pos = q_offset + np.arange(q_len)[:, None]
        return np.broadcast_to(
            self.allows(q_pos, np.arange(kv_len)[None], kv_length), (q_len, kv_len)
        )

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        if self.left is None and self.is_causal:
            return "causal"
        left, right = (_name(bound) for bound in (self.left, self.right))
        return f"left={left}, right={right}"


def _unchecked(left: Any, right: Any) -> Mask:
    mask = object.__new__(Mask)
    object.__setattr__(mask, "left", left)
    object.__setattr__(mask, "right", right)
    return mask


def _name(bound: Any) -> str:
    return str(bound) if bound is None or isinstance(bound, int) else AT_RUN_TIME.value


def _flatten(mask: Mask) -> tuple[tuple[Any, ...], tuple[Mask, tuple[str, ...]]]:
    arrays = mask.arrays
    return tuple(arrays.values()), (mask.static, tuple(arrays))


def _unflatten(static: tuple[Mask, tuple[str, ...]], arrays: Any) -> Mask:
    mask, sides = static
    return mask.filled(**dict(zip(sides, arrays, strict=True)))


# Static but for the bounds that arrive at run time.
jax.tree_util.register_pytree_node(Mask, _flatten, _unflatten)

FULL = Mask()
CAUSAL = Mask(right=0)


def sliding_window(n: int) -> Mask:
    """Causal attention to the last `n` keys, the query's own among them: `Mask(left=n - 1,
    right=0)`. A traced `n` below 1 shows nothing.
    """
    if isinstance(n, jax.core.Tracer):
        return Mask(left=jnp.maximum(traced_bound("sliding_window(n)", n), 0) - 1, right=0)
    if isinstance(n, bool) or not hasattr(n, "__index__") or np.ndim(n) or n < 1:
        raise ValueError(
            "sliding_window(n) wants an int of at least 1 (n counts the query's own key), or a "
            f"traced integer scalar, got {n!r}."
        )
    return Mask(left=operator.index(n) - 1, right=0)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskFunction:
    """A mask by a function of positions, and the arrays that it reads: what `mask_fn` makes.

    It goes where a `Mask` goes in `flash_attention`, and is a pytree: its arrays are its leaves,
    what it computes is static. Masks of both kinds combine by `&`, `|` and `~`.
    """

    program: Program  # of a batch row, a query head, a query's position and a key's
    aux: tuple[jax.Array, ...] = ()
    # A static band that shows all that the function shows: kernels over caches read no other keys.
    within: Mask = FULL
    kinds: jax.Array | None = None  # uint8, of blocks: see `blocks`
    sizes: tuple[Any, ...] | None = None  # T, S and q_offset of these, and a context if it has one

    @property
    def read(self) -> tuple[jax.Array, ...]:
        """`aux`, and what is known of blocks after it."""
        return self.aux if self.kinds is None else (*self.aux, self.kinds)

    def blocks(  # noqa: PLR0913
        self,
        q_len: int,
        kv_len: int,
        *,
        q_offset: int = 0,
        batch: int = 1,
        heads: int = 1,
        context: Context | None = None,
    ) -> "MaskFunction":
        """The same mask, which carries what it leaves of each block of 64 queries by 64 keys:
        nothing, some, or all. Calls find that out by themselves; a mask that reads arrays and
        serves many of them (layers, microbatches, both passes) is spared it here::

            mask = (pa.mask_fn(same_document, ids) & pa.CAUSAL).blocks(T, T, batch=B)

        Of calls with q `[batch, q_len, heads, H]`, k `[batch, kv_len, ..]` and that q_offset; of 1
        batch row or head where the mask is the same in all. `&`, `|` and `~` drop it. Of a mask
        that reads no array all is known when it is traced, and nothing is added.

        `context`: that of the calls, within `jax.shard_map`; sizes are then those of this device,
        as q and k are. It finds what is left of its own rows, by method "heads" of its own heads,
        and a ring takes from it what each step needs.
        """
        sizes = block_summary.Sizes(batch, heads, q_len, kv_len, q_offset)
        of: tuple[Any, ...] = (q_len, kv_len, q_offset)
        place = checked(context)
        if place is not None and shards_of(place) > 1:
            found = block_summary.of_device(self.program, self.aux, self.within, sizes, place)
            of = (*of, place)
        else:
            found = block_summary.of_call(self.program, self.aux, sizes)
        return self if found is None else dataclasses.replace(self, kinds=found, sizes=of)

    def __and__(self, other: "Mask | MaskFunction") -> "MaskFunction":
        return _combined("and", self, other)

    def __or__(self, other: "Mask | MaskFunction") -> "MaskFunction":
        return _combined("or", self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> "MaskFunction":
        return MaskFunction(_program.joined("not", self.program), self.aux)

    def __bool__(self) -> bool:
        raise ValueError("mask: a mask function is neither true nor false; say &, | and ~ for and, "
                         "or and not")  # fmt: skip

    def allows(self, batch: Any, head: Any, q_pos: Position, kv_pos: Position) -> Any:
        """Whether a query head's query at `q_pos` sees the key at `kv_pos`; the arguments broadcast
        against each other.
        """
        where = (batch, head, q_pos, kv_pos)
        return _program.evaluate(self.program, where, self.aux, _program.Broadcasting())

    def dense(
        self, q_len: int, kv_len: int, *, q_offset: int = 0, batch: int = 1, heads: int = 1
    ) -> np.ndarray:
        """The mask as bool[batch, heads, q_len, kv_len], for a look at it and for tests."""
        sizes = (batch, heads, q_len, kv_len)
        at = np.ogrid[tuple(map(slice, sizes))]
        b, h, q, kv = (x.astype(np.int32) for x in at)
        return np.broadcast_to(np.asarray(self.allows(b, h, q + q_offset, kv)), sizes)


jax.tree_util.register_dataclass(
    MaskFunction, data_fields=["aux", "kinds"], meta_fields=["program", "within", "sizes"]
)


def mask_fn(f: Callable[..., Any], *aux: Any) -> MaskFunction:
    """A mask by a function: `f(b, h, q, kv, *aux)` says whether query head h of batch row b, at
    position q, sees the key at position kv. Goes where `mask=` goes, and combines with others::

        prefix = pa.mask_fn(lambda b, h, q, kv, n: kv < n[b], lengths) | pa.CAUSAL
        documents = pa.mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids)

    The four are int32 scalars, positions those of `Mask` (q counts from `q_offset`), under
    `jax.shard_map` of the device's own part, and with a `Context` of the whole sequence. `aux` are
    arrays that f reads at scalar positions; positions past an end are clipped to it. f is traced
    once, here: what it does with numbers of Python is static, an array that it captures is as good
    as one of `aux`, and a traced one is a ValueError. The result is bool. What it may contain is in
    the [documentation](recipes.md).
    """
    arrays = aux_arrays("mask_fn", f, aux)
    program, kept = _program.trace("mask_fn", f, (jnp.int32,) * 4, arrays)
    if program.result_dtype != "bool":
        raise ValueError(
            f"mask_fn: expected a function that gives a bool, got {program.result_dtype}; compare "
            "with something (x != 0), or use score_fn for numbers that are added to scores"
        )
    return MaskFunction(program, tuple(kept))


def as_function(mask: "Mask | MaskFunction") -> MaskFunction:
    """A band as a function; a function as it is."""
    if isinstance(mask, MaskFunction):
        return mask
    arrays = mask.arrays

    def seen(b: Any, h: Any, q: Any, kv: Any, *given: Any) -> Any:
        bounds = dict(zip(arrays, (x[0] for x in given), strict=True))
        return jnp.bool_(mask.filled(**bounds).allows(q, kv))

    function = mask_fn(seen, *(x.reshape(1) for x in arrays.values()))
    return dataclasses.replace(function, within=mask.static.widest)


def _combined(how: str, a: Any, b: Any) -> Any:
    if not isinstance(b, (Mask, MaskFunction)):
        return NotImplemented
    functions = [as_function(x) for x in (a, b)]
    program = _program.joined(how, *(x.program for x in functions))
    within = _common(*(x.within for x in functions)) if how == "and" else FULL
    return MaskFunction(program, functions[0].aux + functions[1].aux, within)


def _common(a: Mask, b: Mask) -> Mask:
    """A band that shows what both show, at least."""
    with contextlib.suppress(ValueError):  # nothing, which no Mask says
        return a & b
    return a


def aux_arrays(what: str, f: Any, aux: tuple[Any, ...]) -> list[jax.Array]:
    """The arrays that a function reads, as kernels compute them: of 16 or 32 bits, or bool."""
    if not callable(f):
        raise ValueError(f"{what}: expected a function, got {type(f).__name__}")
    found = []
    for number, value in enumerate(aux):
        try:
            x = jnp.asarray(value)
        except (TypeError, ValueError):
            kind = type(value).__name__
            raise ValueError(
                f"{what}: aux: expected arrays, got {kind} as number {number}"
            ) from None
        real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
        if 0 in x.shape or not (jnp.issubdtype(x.dtype, jnp.number) and real or x.dtype == bool):
            raise ValueError(
                f"{what}: aux: expected arrays of some numbers, got {x.dtype}{list(x.shape)}"
            )
        if _program.is_narrow(x.dtype):
            wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
            x = x.astype(wide)
        found.append(x.astype(jnp.int32) if x.dtype in (jnp.int64, jnp.uint64) else x)
    return found


def traced_bound(what: str, value: Any) -> Any:
    """An int32 scalar within +-(2**30 - 1)."""
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
        raise ValueError(
            f"{what} wants an int or a traced integer scalar, got a traced "
            f"{value.dtype}{list(value.shape)}: one bound serves all sequences and heads"
        )
    return saturated(value).clip(1 - LONGEST, LONGEST - 1)


def saturated(x: Any) -> Any:
    """Integers of any type as int32, NumPy's (before jax cuts bits off) or jax's: those of more
    bits within 2**30. Anything else as it is.
    """
    if not isinstance(x, (np.ndarray, np.generic, jax.Array)) or x.dtype.kind not in "iu":
        return x
    held = jnp.iinfo(x.dtype)
    if held.max > np.iinfo(np.int32).max:
        x = x.clip(max(held.min, -LONGEST), LONGEST)
    return x.astype(np.int32)


def _minimum(a: Position, b: Position) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return (jnp if _is_jax(a, b) else np).minimum(a, b)


def _maximum(a: Position, b: Position) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return (jnp if _is_jax(a, b) else np).maximum(a, b)


def _is_jax(*values: Position) -> bool:
    return any(isinstance(value, jax.Array) for value in values)
