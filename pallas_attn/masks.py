"""Who sees whom: the one definition of visibility.

Everything that masks (the reference, every kernel, the tile schedulers) asks a `Mask` and nothing
else. `Mask.allows` is the definition; `kv_range` and `kv_full_range` are bounds that follow from it
and let a kernel skip tiles that nobody sees and leave the mask out of tiles that everybody sees;
those of the `transposed` mask say the same of the queries that meet some keys. All of it is plain
arithmetic: it works on Python integers, NumPy arrays, jax arrays and the tiles and scalars inside a
Pallas kernel.
"""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Position = Any  # int, np.ndarray, jax.Array or an in-kernel value of an integer type


LONGEST = 2**30  # bounds stay below it and offsets below half of it: their sums stay in int32


def _not_traced(what: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{what} wants a Python int, got a traced array. A mask is static, a part of the "
            "compiled kernel: choose between calls with jax.lax.cond or jax.lax.switch, or scan "
            "over groups of layers whose windows alternate in the same way."
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Mask:
    """A band around the diagonal: the query at position p sees the keys p - left .. p + right, both
    inclusive.

    `None` leaves that side unbounded. `Mask(right=0)` is causal, `Mask()` hides nothing. Negative
    bounds are allowed (`Mask(right=-1)` is strictly causal) as long as the band holds at least one
    diagonal. A mask is static: frozen, hashable, a jit key by value, also where it is an argument
    of a jitted function. Lengths, offsets and segment ids are arrays and stay beside it::

        Mask()          Mask(right=0)    Mask(left=1, right=0)    Mask(left=1, right=1)
        1 1 1 1         1 . . .          1 . . .                  1 1 . .
        1 1 1 1         1 1 . .          1 1 . .                  1 1 1 .
        1 1 1 1         1 1 1 .          . 1 1 .                  . 1 1 1
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self):
        for side in ("left", "right"):
            value = getattr(self, side)
            if value is None:
                continue
            _not_traced(f"Mask({side}=...)", value)
            if isinstance(value, bool) or not hasattr(value, "__index__") or np.ndim(value):
                raise ValueError(
                    f"Mask({side}=...) wants an int or None, got {value!r}. A mask is static: "
                    "pass lengths and offsets as arrays beside it."
                )
            if not -LONGEST < value < LONGEST:
                raise ValueError(
                    f"Mask({side}=...) wants less than 2**30 either way, got {value}: positions "
                    "are int32. None leaves the side unbounded."
                )
            object.__setattr__(self, side, operator.index(value))
        if self.left is not None and self.right is not None and self.left + self.right < 0:
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
        """Whether the last key that a query sees is the one at its own position."""
        return self.right == 0

    @property
    def width(self) -> int | None:
        """How many positions the band has in each row; None where a side is unbounded."""
        return None if self.left is None or self.right is None else self.left + self.right + 1

    @property
    def transposed(self) -> "Mask":
        """The same band seen from the keys: the key at position p meets the queries of this one."""
        return Mask(left=self.right, right=self.left)

    def __and__(self, other: "Mask") -> "Mask":
        """The keys that both masks show."""
        if not isinstance(other, Mask):
            return NotImplemented
        tighter = [
            min((b for b in pair if b is not None), default=None)
            for pair in ((self.left, other.left), (self.right, other.right))
        ]
        return Mask(*tighter)

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
        if self == CAUSAL:
            return "causal"
        return f"left={self.left}, right={self.right}"


FULL = Mask()
CAUSAL = Mask(right=0)


def sliding_window(n: int) -> Mask:
    """Causal attention to the last `n` keys, the query's own among them: `Mask(left=n - 1,
    right=0)`.
    """
    _not_traced("sliding_window(n)", n)
    if isinstance(n, bool) or not hasattr(n, "__index__") or np.ndim(n) or n < 1:
        raise ValueError(
            "sliding_window(n) wants an int of at least 1 (n counts the query's own key), got "
            f"{n!r}."
        )
    return Mask(left=operator.index(n) - 1, right=0)


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
