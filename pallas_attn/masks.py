"""Masks: the one definition of the keys that a query sees.

Everything that masks (the reference, every kernel, the tile schedulers) asks a `Mask` and nothing
else. `Mask.allows` is the definition. `kv_range` and `kv_full_range` are bounds that follow from
it: a kernel skips tiles that no query sees, and does not mask tiles that every query sees; a
`transposed` mask gives the same bounds of the queries that see some keys. All of it is plain
arithmetic on Python integers, NumPy arrays, jax arrays, or tiles and scalars in a Pallas kernel.

`mask_fn` makes a `MaskFunction` of a function of positions, for masks that are no band.

Bounds are ints, or int32 scalars that arrive at run time. A problem is static and holds
`Mask.static`, with `AT_RUN_TIME` in place of the latter; they come beside it (`Mask.arrays`), and
`Mask.filled` puts both together again inside a kernel.
"""

import contextlib
import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from pallas_attn._functions import block_summary, folding, tracing
from pallas_attn._functions import program as _program
from pallas_attn._functions.picture import Picture, positions
from pallas_attn._functions.program import Program
from pallas_attn._mesh import sharding
from pallas_attn.context import Context, checked, shards_of
from pallas_attn.errors import described

Position = Any  # int, np.ndarray, jax.Array or an in-kernel value of an integer type
Bound = Any  # a Position; None where a side is unbounded; AT_RUN_TIME in a static mask
Seen = Any  # a bool, or an array or in-kernel value of them

LONGEST = 2**30  # bounds stay below it and offsets below half of it: their sums stay in int32


class RunTime(enum.Enum):
    """A bound of a static mask that arrives at run time."""

    BOUND = "at run time"


AT_RUN_TIME = RunTime.BOUND
SIDES = ("left", "right")


class Combinable:
    """A mask. `and`, `or` and `not` of Python would drop one of two, so they are errors."""

    def __bool__(self) -> bool:
        raise ValueError("mask: a mask is neither true nor false; say &, | and ~ for and, or and "
                         "not")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mask(Combinable):
    """A band around the diagonal: the query at position p sees keys p - left to p + right,
    inclusive.

    `None` leaves a side unbounded. `Mask(right=0)` is causal, `Mask()` hides nothing. Negative
    bounds are allowed (`Mask(right=-1)` is strictly causal) as long as the band has a diagonal. A
    mask of ints is static: frozen, hashable, a jit key by value, also as an argument of a jitted
    function. A bound may also be a traced integer scalar, for example a window that a scan over
    layers reads from an array; kernels read it at run time. It is clipped to +-(2**30 - 1), beyond
    every key: 2**31 - 1 means unbounded; where left + right is negative, no query sees a key.
    Lengths, offsets and segment ids are arrays beside the mask::

        Mask()          Mask(right=0)    Mask(left=1, right=0)    Mask(left=1, right=1)
        1 1 1 1         1 . . .          1 . . .                  1 1 . .
        1 1 1 1         1 1 . .          1 1 . .                  1 1 1 .
        1 1 1 1         1 1 1 .          . 1 1 .                  . 1 1 1

    Example::

        >>> (pa.CAUSAL & pa.Mask(left=2)) == pa.sliding_window(3)
        True
    """

    left: Bound = None
    right: Bound = None

    def __post_init__(self):
        for side in SIDES:
            value = getattr(self, side)
            if value is None:
                continue
            if isinstance(value, jax.core.Tracer):
                object.__setattr__(self, side, traced_bound(f"Mask({side}=...)", value))
                continue
            bound = _index(value)
            if bound is None:
                raise ValueError(
                    f"Mask({side}=...): expected an int, a traced integer scalar or None, got "
                    f"{described(value)}; pass lengths and offsets as arrays beside the mask"
                )
            if not -LONGEST < bound < LONGEST:
                raise ValueError(
                    f"Mask({side}=...): expected less than 2**30 either way, as positions are "
                    f"int32, got {bound}; None leaves the side unbounded"
                )
            object.__setattr__(self, side, bound)
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
        """Whether keys far enough before the query are hidden."""
        return self.left is not None

    @property
    def bounds_right(self) -> bool:
        """Whether keys far enough after the query are hidden."""
        return self.right is not None

    @property
    def is_causal(self) -> bool:
        """Whether the last key that a query sees is statically the one at its own position."""
        return isinstance(self.right, int) and self.right == 0

    @property
    def width(self) -> int | None:
        """Positions of the band in each row; None if a side is unbounded or arrives at run time."""
        known = isinstance(self.left, int) and isinstance(self.right, int)
        return self.left + self.right + 1 if known else None

    @property
    def transposed(self) -> "Mask":
        """The band of queries that see the key at position p."""
        return self.filled(left=self.right, right=self.left)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The bounds that arrive at run time, by side."""
        sides = {side: getattr(self, side) for side in SIDES}
        static = (int, RunTime, type(None))
        return {side: x for side, x in sides.items() if not isinstance(x, static)}

    @property
    def static(self) -> "Mask":
        """The mask with `AT_RUN_TIME` for bounds that arrive then: hashable."""
        return self.filled(**dict.fromkeys(self.arrays, AT_RUN_TIME))

    @functools.cached_property
    def arrives(self) -> tuple[str, ...]:
        """The sides of a static mask whose bounds arrive at run time."""
        sides = ("left", self.left), ("right", self.right)
        return tuple([side for side, bound in sides if bound is AT_RUN_TIME])

    @property
    def widest(self) -> "Mask":
        """A static mask without bounds that arrive at run time: it shows all that this shows."""
        return self.filled(**dict.fromkeys(self.arrives))

    def filled(self, **bounds: Bound) -> "Mask":
        """The mask with other bounds, unchecked: they may be values inside a kernel."""
        mask = object.__new__(Mask)
        for name in _FIELDS:
            object.__setattr__(mask, name, bounds.pop(name, getattr(self, name)))
        if bounds:
            raise TypeError(f"a Mask has no {', '.join(bounds)}")
        return mask

    def __and__(self, other: "Mask") -> "Mask":
        """The keys that both masks show."""
        if not isinstance(other, Mask):
            return _reflected(other)
        tighter = []
        for pair in ((self.left, other.left), (self.right, other.right)):
            bounds = [bound for bound in pair if bound is not None]
            least = functools.partial(_extreme, "minimum")
            tighter.append(functools.reduce(least, bounds) if bounds else None)
        return Mask(*tighter)

    def __or__(self, other: "Mask") -> "MaskFunction":
        """The keys that one of two masks shows."""
        if not isinstance(other, Mask):
            return _reflected(other)
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
    ) -> Seen:
        """Whether the query at `q_pos` sees the key at `kv_pos`; arguments broadcast.

        `kv_len`: keys at or past it do not exist. Segments: both must have the same id. Absent
        terms cost nothing; without any the answer is the Python value True.
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
        seen: Seen = True
        for term in terms:
            seen = term if seen is True else seen & term
        return seen

    def row_bounds(self, q_pos: Position) -> tuple[Bound, Bound]:
        """Keys [low, high) that the query at `q_pos` sees; None where a side is unbounded. Neither
        is clipped to the keys that exist.
        """
        low = None if self.left is None else q_pos - self.left
        high = None if self.right is None else q_pos + (self.right + 1)
        return low, high

    def kv_range(
        self, q_lo: Position, q_hi: Position, kv_len: Position
    ) -> tuple[Position, Position]:
        """Keys [lo, hi) that *some* query in [q_lo, q_hi) may see; empty if hi <= lo."""
        lo = 0 if self.left is None else q_lo - self.left
        hi = kv_len if self.right is None else q_hi + self.right
        if not (self.left is None or isinstance(self.left, int) and self.left >= 0):
            lo = _extreme("minimum", lo, kv_len)  # the band may begin after the query
        return _extreme("maximum", lo, 0), _extreme("minimum", hi, kv_len)

    def kv_full_range(
        self, q_lo: Position, q_hi: Position, kv_len: Position
    ) -> tuple[Position, Position]:
        """Keys [lo, hi) that *every* query in [q_lo, q_hi) sees; empty if hi <= lo."""
        lo = 0 if self.left is None else q_hi - 1 - self.left
        hi = kv_len if self.right is None else q_lo + self.right + 1
        return _extreme("maximum", lo, 0), _extreme("minimum", hi, kv_len)

    def dense(
        self, q_len: int, kv_len: int, *, q_offset: int = 0, kv_length: int | None = None
    ) -> np.ndarray:
        """The mask as bool[q_len, kv_len], to look at and for tests."""
        check_sizes(0, q_offset, q_len=q_len, kv_len=kv_len)
        q_pos = q_offset + np.arange(q_len)[:, None]
        return np.broadcast_to(
            self.allows(q_pos, np.arange(kv_len)[None], kv_length), (q_len, kv_len)
        )

    def show(self, q_len: int, kv_len: int, *, q_offset: int = 0, most: int = 64) -> Picture:
        """A picture of the mask for q_len queries, the first at position q_offset, and kv_len keys.

        A notebook draws it, `print` writes it::

            >>> pa.sliding_window(2).show(4, 6)
            left=1, right=0: 4 queries (down), 6 keys (across)
            ■ · · · · ·
            ■ ■ · · · ·
            · ■ ■ · · ·
            · · ■ ■ · ·

        With more than `most` queries or keys it shows one of every few, and says so.
        """
        where = shown_at(q_len, kv_len, q_offset, most)
        bounds = {}
        for side, x in self.arrays.items():
            number = known(x)
            if number is None:
                raise ValueError(UNKNOWN)
            bounds[side] = int(number)
        mask = self.filled(**bounds)
        return Picture(_over(np.asarray(mask.allows(*where)), where), str(mask), q_len, kv_len)

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        if self.left is None and self.is_causal:
            return "causal"
        left, right = (_name(bound) for bound in (self.left, self.right))
        return f"left={left}, right={right}"


UNKNOWN = (
    "show: expected a mask or a score function whose arrays are known, got traced ones; call it "
    "outside of jax.jit"
)


def shown_at(
    q_len: int, kv_len: int, q_offset: int, most: int, **others: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the queries [n, 1] and of the keys [1, m] in a picture. `others` are numbers of
    at least 0.
    """
    check_sizes(1, q_offset, q_len=q_len, kv_len=kv_len, most=most)
    check_sizes(0, 0, **others)
    if max(abs(q_offset) + q_len, kv_len) > LONGEST:
        raise ValueError(
            f"show: expected positions of at most 2**30, got q_len {q_len}, kv_len {kv_len} and "
            f"q_offset {q_offset}"
        )
    rows, keys = positions(q_len, kv_len, most)
    return rows + np.int32(q_offset), keys


def shown(
    program: Program,
    aux: tuple[jax.Array, ...],
    where: tuple[np.ndarray, np.ndarray],
    *before: np.ndarray,
    b: int,
    h: int,
) -> np.ndarray:
    """The results of a function at positions of queries and keys, for one batch row and head.
    `before`: what it takes before these.
    """
    _program.check_reads("show", program, (b + 1, h + 1, *(int(x.max()) + 1 for x in where)))
    if any(known(x) is None for x in aux):
        raise ValueError(UNKNOWN)
    numbers = (*before, np.int32(b), np.int32(h), *where)
    with jax.ensure_compile_time_eval():
        result = _program.evaluate(program, numbers, aux, _program.Broadcasting())
        return _over(np.asarray(result), where)


def named_at(program: Program, b: int, h: int) -> str:
    """The batch row and the head in a title, where the function depends on them."""
    first = program.inputs - 4
    names = (("batch row", b), ("head", h))
    return "".join(
        f", {name} {n}" for at, (name, n) in enumerate(names, first) if program.depends_on(at)
    )


def _over(values: np.ndarray, where: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return np.broadcast_to(values, np.broadcast_shapes(*(x.shape for x in where)))


def _reflected(other: Any) -> Any:
    """The result of & and | where the other mask is no band: that of the mask function."""
    if isinstance(other, MaskFunction):
        return NotImplemented
    raise TypeError(  # operators raise no ValueError
        f"mask: unsupported operand of & and |: expected a Mask or a mask function, got "
        f"{type(other).__name__}; a boolean array goes in as mask_array, a Python function as "
        "mask_fn(f)"
    )


def check_sizes(least: int, q_offset: int, **sizes: int) -> None:
    """ValueError for a size that is no int of at least `least`, or an offset that is no int."""
    for name, size in {"q_offset": q_offset, **sizes}.items():
        number = None if isinstance(size, jax.core.Tracer) else _index(size)
        wanted = "an int" if name == "q_offset" else f"an int of at least {least}"
        if number is None or name in sizes and number < least:
            raise ValueError(f"{name}: expected {wanted}, got {described(size)}")


def _index(value: Bound) -> int | None:
    """A scalar of an integer type as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) or np.ndim(value) else operator.index(value)
    except (TypeError, ValueError):  # also lists of unequal lengths
        return None


_FIELDS = tuple([field.name for field in dataclasses.fields(Mask)])


def _name(bound: Bound) -> str:
    return str(bound) if bound is None or isinstance(bound, int) else AT_RUN_TIME.value


def _flatten(mask: Mask) -> tuple[tuple[jax.Array, ...], tuple[Mask, tuple[str, ...]]]:
    arrays = mask.arrays
    return tuple(arrays.values()), (mask.static, tuple(arrays))


def _unflatten(static: tuple[Mask, tuple[str, ...]], arrays: Iterable[Bound]) -> Mask:
    mask, sides = static
    return mask.filled(**dict(zip(sides, arrays, strict=True)))


# Static but for the bounds that arrive at run time.
jax.tree_util.register_pytree_node(Mask, _flatten, _unflatten)

FULL = Mask()
CAUSAL = Mask(right=0)


def sliding_window(n: int) -> Mask:
    """Causal attention to the last `n` keys, the query's own included: `Mask(left=n - 1, right=0)`.
    A traced `n` below 1 shows nothing.

    Example::

        >>> pa.sliding_window(3)
        Mask(left=2, right=0)
    """
    if isinstance(n, jax.core.Tracer):
        return Mask(left=jnp.maximum(traced_bound("sliding_window(n)", n), 0) - 1, right=0)
    keys = _index(n)
    if keys is None or keys < 1:
        raise ValueError(
            "sliding_window(n): expected an int of at least 1, as n counts the query's own key, or "
            f"a traced integer scalar, got {described(n)}"
        )
    return Mask(left=keys - 1, right=0)


@dataclasses.dataclass(frozen=True, eq=False)
class MaskFunction(Combinable):
    """A mask by a function of positions with the arrays that it reads, made by `mask_fn`.

    It goes where a `Mask` goes, and is a pytree: the arrays are its leaves, the function is static.
    Masks of both kinds combine by `&`, `|` and `~`.

    Example::

        >>> near = pa.mask_fn(lambda b, h, q, kv: abs(q - kv) < 2)
        >>> int((near & pa.CAUSAL).dense(4, 4).sum())
        7
    """

    program: Program  # inputs: batch row, query head, a query's position, a key's position
    aux: tuple[jax.Array, ...] = ()
    # A static band that shows all that the function shows: kernels over caches read no other keys.
    within: Mask = FULL
    kinds: jax.Array | None = None  # uint8 for each block: see `blocks`
    sizes: tuple[Any, ...] | None = None  # T, S, q_offset and, if any, the context of `kinds`

    def __post_init__(self) -> None:
        _program.check(self.program, "mask_fn")

    @property
    def is_full(self) -> bool:
        """Whether it shows every key to every query."""
        return self.program.result == folding.YES

    @property
    def read(self) -> tuple[jax.Array, ...]:
        """`aux`, and after it the kinds of blocks, if any."""
        return self.aux if self.kinds is None else (*self.aux, self.kinds)

    def blocks(
        self,
        q_len: int,
        kv_len: int,
        *,
        q_offset: int = 0,
        batch: int = 1,
        heads: int = 1,
        context: Context | None = None,
    ) -> "MaskFunction":
        """The mask with the kind of each block of 64 queries by 64 keys: nothing, some or all seen.

        Calls find the kinds by themselves; here a mask that reads arrays finds them once for many
        calls (layers, microbatches, both passes)::

            mask = (pa.mask_fn(same_document, ids) & pa.CAUSAL).blocks(T, T, batch=B)

        The calls have q `[batch, q_len, heads, H]`, k `[batch, kv_len, ..]` and this q_offset;
        batch and heads are 1 where the mask is the same in all. `&`, `|` and `~` drop the kinds. A
        mask that reads no array is returned as it is: its kinds are known when it is traced.

        `context`: that of the calls, within `jax.shard_map`. Sizes are then this device's, as those
        of q and k are; the kinds are those of its own rows, or by method "heads" of its own heads.
        """
        check_sizes(1, q_offset, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)
        sizes = block_summary.Sizes(batch, heads, q_len, kv_len, q_offset)
        key: tuple[Any, ...] = (q_len, kv_len, q_offset)
        place = checked(context)
        if place is not None and shards_of(place) > 1:
            kinds = block_summary.of_device(self.program, self.aux, self.within, sizes, place)
            key = (*key, place)
        else:
            kinds = sharding.on_automatic_axes(
                lambda aux: block_summary.of_call(self.program, aux, sizes),
                (self.aux,),
                PartitionSpec(),
            )
        return self if kinds is None else dataclasses.replace(self, kinds=kinds, sizes=key)

    def __and__(self, other: "Mask | MaskFunction") -> "MaskFunction":
        return _combined("and", self, other)

    def __or__(self, other: "Mask | MaskFunction") -> "MaskFunction":
        return _combined("or", self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> "MaskFunction":
        return _joined("not", self)

    def allows(self, batch: Position, head: Position, q_pos: Position, kv_pos: Position) -> Seen:
        """Whether a query head's query at `q_pos` sees the key at `kv_pos`; arguments broadcast."""
        where = (batch, head, q_pos, kv_pos)
        return _program.evaluate(self.program, where, self.aux, _program.Broadcasting())

    def dense(
        self, q_len: int, kv_len: int, *, q_offset: int = 0, batch: int = 1, heads: int = 1
    ) -> np.ndarray:
        """The mask as bool[batch, heads, q_len, kv_len], to look at and for tests."""
        check_sizes(0, q_offset, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)
        sizes = (batch, heads, q_len, kv_len)
        at = np.ogrid[tuple(map(slice, sizes))]
        b, h, q, kv = (x.astype(np.int32) for x in at)
        return np.broadcast_to(np.asarray(self.allows(b, h, q + q_offset, kv)), sizes)

    def show(
        self,
        q_len: int,
        kv_len: int,
        *,
        q_offset: int = 0,
        b: int = 0,
        h: int = 0,
        most: int = 64,
    ) -> Picture:
        """A picture of the mask in batch row b and query head h.

        The rest is as in `Mask.show`::

            >>> pa.mask_fn(lambda b, h, q, kv: (q - kv) % 2 == 0).show(3, 6)
            mask function: 3 queries (down), 6 keys (across)
            ■ · ■ · ■ ·
            · ■ · ■ · ■
            ■ · ■ · ■ ·
        """
        where = shown_at(q_len, kv_len, q_offset, most, b=b, h=h)
        seen = shown(self.program, self.aux, where, b=b, h=h)
        return Picture(seen, "mask function" + named_at(self.program, b, h), q_len, kv_len)


jax.tree_util.register_dataclass(
    MaskFunction, data_fields=["aux", "kinds"], meta_fields=["program", "within", "sizes"]
)


def mask_fn(f: Callable[..., Any], *aux: ArrayLike) -> MaskFunction:
    """A mask function: `f(b, h, q, kv, *aux)` says whether query head h of batch row b, at position
    q, sees the key at position kv. For arguments `mask=`; combines with other masks::

        prefix = pa.mask_fn(lambda b, h, q, kv, n: kv < n[b], lengths) | pa.CAUSAL
        documents = pa.mask_fn(lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ids)

    The four are int32 scalars. Positions are those of `Mask` (q counts from `q_offset`); under
    `jax.shard_map` all four count the device's own part, with a `Context` positions are in the
    whole sequence. `aux` are arrays that f reads at scalar positions, clipped to the array (below 0
    from its end, as NumPy's); read at b, h, q or kv itself, an array needs a number for each. f is
    traced once, here: Python numbers are static, a captured array is like one of `aux`, and a
    captured traced array is a ValueError. The result is bool. The page "Masks and scores
    that no option names" lists what f may contain.

    Example::

        >>> (pa.mask_fn(lambda b, h, q, kv: kv < 2) | pa.CAUSAL).show(4, 4)
        mask function: 4 queries (down), 4 keys (across)
        ■ ■ · ·
        ■ ■ · ·
        ■ ■ ■ ·
        ■ ■ ■ ■
    """
    arrays = aux_arrays("mask_fn", f, aux)
    program, kept = tracing.trace("mask_fn", f, (jnp.int32,) * 4, arrays, "b, h, q, kv")
    if program.result_dtype != "bool":
        raise ValueError(
            f"mask_fn: expected a function that gives a bool, got {program.result_dtype}; compare "
            "with something (x != 0), or use score_fn for numbers that are added to scores"
        )
    return MaskFunction(program, tuple(kept))


def as_function(mask: "Mask | MaskFunction") -> MaskFunction:
    """A band as a mask function; a mask function as it is."""
    if isinstance(mask, MaskFunction):
        return mask
    arrays = mask.arrays

    def seen(b: Position, h: Position, q: Position, kv: Position, *aux: Position) -> Seen:
        bounds = dict(zip(arrays, (x[0] for x in aux), strict=True))
        return jnp.bool_(mask.filled(**bounds).allows(q, kv))

    function = mask_fn(seen, *(x.reshape(1) for x in arrays.values()))
    return dataclasses.replace(function, within=mask.static.widest)


def _combined(how: str, a: MaskFunction, b: "Mask | MaskFunction") -> MaskFunction:
    if not isinstance(b, (Mask, MaskFunction)):
        return _reflected(b)
    functions = [as_function(x) for x in (a, b)]
    within = _common(*(x.within for x in functions)) if how == "and" else FULL
    return dataclasses.replace(_joined(how, *functions), within=within)


def _joined(how: str, *functions: MaskFunction) -> MaskFunction:
    program, used = folding.joined(how, *(x.program for x in functions))
    aux = [x for function in functions for x in function.aux]
    return MaskFunction(program, tuple(aux[n] for n in used))


def _common(a: Mask, b: Mask) -> Mask:
    """A band that shows at least all that both show."""
    with contextlib.suppress(ValueError):  # no Mask shows nothing
        return a & b
    return a


def aux_arrays(what: str, f: Callable[..., Any], aux: tuple[ArrayLike, ...]) -> list[jax.Array]:
    """The arrays that a function reads, in dtypes of kernels: 16 or 32 bits, or bool."""
    if not callable(f) or isinstance(f, type):
        got = type(f).__name__
        if isinstance(f, type):
            got = f"the class {f.__name__}; give an instance, which has __call__"
        raise ValueError(f"{what}: expected a function, got {got}")
    arrays = []
    for number, value in enumerate(aux):
        try:
            x = jnp.asarray(value)
        except (TypeError, ValueError, OverflowError):
            kind = type(value).__name__
            raise ValueError(
                f"{what}: aux: expected arrays, got {kind} as number {number}"
            ) from None
        _refuse_wide(what, number, value)
        real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
        if 0 in x.shape or not (jnp.issubdtype(x.dtype, jnp.number) and real or x.dtype == bool):
            raise ValueError(
                f"{what}: aux: expected arrays of some numbers, got {x.dtype}{list(x.shape)}"
            )
        if _program.is_narrow(x.dtype):
            wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
            x = x.astype(wide)
        arrays.append(x.astype(jnp.int32) if x.dtype in (jnp.int64, jnp.uint64) else x)
    return arrays


def _refuse_wide(what: str, number: int, value: ArrayLike) -> None:
    """ValueError for integers that lose bits as int32, if they are known."""
    if getattr(value, "dtype", None) in (np.dtype(np.int64), np.dtype(np.uint64)):
        x = known(value)
        if x is not None and not in_int32(x):
            raise ValueError(
                f"{what}: aux: expected integers that int32 holds, got {x.dtype}{list(x.shape)} as "
                f"number {number}, from {x.min()} to {x.max()}; np.unique(x, return_inverse=True)"
                "[1] are smaller ones that are equal where these are"
            )


def traced_bound(what: str, value: jax.Array) -> jax.Array:
    """An int32 scalar within +-(2**30 - 1)."""
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
        raise ValueError(
            f"{what}: expected an int or a traced integer scalar, got a traced "
            f"{value.dtype}{list(value.shape)}; one bound serves all sequences and heads"
        )
    return saturated(value).clip(1 - LONGEST, LONGEST - 1)


def known(x: ArrayLike) -> np.ndarray | None:
    """The numbers of what jax takes for an array, if they are known now."""
    leaves = jax.tree.leaves(x)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    return np.asarray(x) if getattr(x, "is_fully_addressable", True) else None


def in_int32(x: np.ndarray) -> bool:
    """Whether int32 holds all of some integers."""
    held = np.iinfo(np.int32)
    return not x.size or held.min <= int(x.min()) and int(x.max()) <= held.max


def saturated(x: Position) -> Position:
    """NumPy or jax integers as int32; wider ones are clipped to 2**30, before jax would cut their
    bits off. Other values as they are.
    """
    if not isinstance(x, (np.ndarray, np.generic, jax.Array)) or x.dtype.kind not in "iu":
        return x
    held = jnp.iinfo(x.dtype)
    if held.max > np.iinfo(np.int32).max:
        x = x.clip(max(held.min, -LONGEST), LONGEST)
    return x.astype(np.int32)


def _extreme(name: str, a: Position, b: Position) -> Position:
    """The "minimum" or the "maximum" (`name`) of two positions."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if name == "minimum" else max(a, b)
    module = jnp if isinstance(a, jax.Array) or isinstance(b, jax.Array) else np
    return getattr(module, name)(a, b)
