"""What a call asks for, in two halves: the static facts (a `...Problem`, a jit key, what dispatch
and tuning decide on) and the arrays (a `...Inputs`, a pytree, what the chosen implementation is
handed).
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn._functions.program import Program
from pallas_attn.masks import FULL, SIDES, Mask

Array = Any

# What numbers of a cache may carry scales.
QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")

MOST_ROWS = 2**31 - 1  # of a sequence: lengths are int32


class AttentionInputs(NamedTuple):
    """The arrays of one attention call. None where the caller gave nothing. `_checks` has clipped
    offsets and lengths to the ranges below: no kernel clips them again.
    """

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]; [B / AttentionProblem.share, S, K, H]
    v: Array  # [B, S, K, Hv], and so here
    # int32[B], -2**29 .. 2**29; None: AttentionProblem.q_offset, for every row
    q_offset: Array | None = None
    q_lengths: Array | None = None  # int32[B], 0 .. T
    kv_lengths: Array | None = None  # int32[B], 0 .. S
    q_segment_ids: Array | None = None  # int32[B, T]
    kv_segment_ids: Array | None = None  # int32[B, S]
    # int32[B, T], -2**29 .. 2**29 + S: in place of q_offset + row; with segment ids only
    q_positions: Array | None = None
    bias: Array | None = None  # [B or 1, N or 1, T or 1, S or 1], any float type
    mask_array: Array | None = None  # bool[B or 1, N or 1, T or 1, S or 1]
    sinks: Array | None = None  # float32[N]
    # int32[B], within 2**30: the bounds of AttentionProblem.mask that arrive at run time
    mask_left: Array | None = None
    mask_right: Array | None = None
    device: Array | None = None  # int32[1]: which of AttentionProblem.fetches devices this is
    mask_aux: tuple[Array, ...] = ()  # what AttentionProblem.mask_program reads
    score_aux: tuple[Array, ...] = ()  # what AttentionProblem.score_program reads

    def named(self) -> dict[str, Array]:
        """The arrays that are there, by the names of their fields; those of functions numbered."""
        found = {name: getattr(self, name) for name in self._fields[:-2]}
        for side in ("mask_aux", "score_aux"):
            found |= {f"{side}{n}": x for n, x in enumerate(getattr(self, side))}
        return {name: x for name, x in found.items() if x is not None}

    @classmethod
    def of(cls, named: dict[str, Array]) -> "AttentionInputs":
        """What `named` takes apart."""
        fields: dict[str, Any] = {"q": None, "k": None, "v": None}
        for name, x in named.items():
            side = name.rstrip("0123456789")
            if side in ("mask_aux", "score_aux"):
                fields[side] = (*fields.get(side, ()), x)
            else:
                fields[name] = x
        return cls(**fields)


def owner_of_rows(starts: Array, rows: int) -> Array:
    """int32[rows]: which sequence owns each packed row; -1 before the first start, M from the last
    on. `starts`: int32[M + 1], ascending.
    """
    at = jnp.arange(rows, dtype=jnp.int32)
    return (starts[None] <= at[:, None]).sum(axis=1, dtype=jnp.int32) - 1


def bounds_of(inputs: Any) -> dict[str, Array]:
    """The bounds of a mask that arrive at run time, by side: of inputs, or of a kernel's refs."""
    named = {side: getattr(inputs, f"mask_{side}") for side in SIDES}
    return {side: x for side, x in named.items() if x is not None}


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """The static facts of one forward or backward call."""

    op: str  # "flash_forward" or "flash_backward"
    gpu: str | None  # "sm80", "sm90", ...: the generation; None where there is no GPU
    dtype: str  # of q, k and v
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    mask: Mask
    scale: float
    softcap: float | None = None
    q_offset: int = 0  # meaningless where inputs.q_offset is given
    # So many batch rows of q, one after the other, read one batch row of k and v: the chunks of a
    # device's rows, each with an offset of its own.
    share: int = 1
    # The offsets of those, one tuple for each device, where they are arrays and yet known: none
    # but these may come.
    offsets: tuple[tuple[int, ...], ...] = ()
    # k and v, and their gradients, lie as so many devices have them in the order zigzag, one after
    # the other; 1: in the order of positions.
    zigzag: int = 1
    # Of a forward: k and v are the rows of this one of so many devices, S of all of them; the
    # kernel fetches what it needs of the others'. They lie there as `zigzag` says.
    fetches: int = 1
    precision: str | None = None  # None or "highest"
    arrays: tuple[str, ...] = ()  # the optional fields of AttentionInputs that are given, in order
    bias_shape: tuple[int, ...] | None = None
    mask_shape: tuple[int, ...] | None = None
    deterministic: bool = False  # of a backward: the same bits each time
    mask_program: Program | None = None  # hides keys beside `mask`: of b, h, q, kv
    mask_within: Mask = FULL  # a static band that shows all that mask_program shows
    score_program: Program | None = None  # of a score, b, h, q, kv
    # T, S and q_offset (None: an array) of `MaskFunction.blocks`, which are then the last of
    # mask_aux; None: none.
    mask_blocks: tuple[int, int, int | None] | None = None

    @property
    def uses_batch(self) -> bool:
        """Whether a function asks which batch row it is."""
        return self._functions_use(0)

    @property
    def uses_head(self) -> bool:
        """Whether a function asks which query head it is."""
        return self._functions_use(1)

    @property
    def uses_position(self) -> bool:
        """Whether a function asks where a query stands."""
        return self._functions_use(2)

    def _functions_use(self, which: int) -> bool:
        mask, score = self.mask_program, self.score_program
        by_mask = mask is not None and mask.depends_on(which)
        return by_mask or (score is not None and score.depends_on(which + 1))

    @property
    def group(self) -> int:
        """Query heads that read the same kv head."""
        return self.q_heads // self.kv_heads

    @property
    def lse_dtype(self) -> str:
        """Of the logits, the LSE and every sum."""
        return "float64" if self.dtype == "float64" else "float32"

    def __str__(self) -> str:
        q = f"{self.dtype} q[{self.batch},{self.q_len},{self.q_heads},{self.head_dim}]"
        k = f"k[{self.batch},{self.kv_len},{self.kv_heads},{self.head_dim}]"
        facts = [q, k, f"v[...,{self.v_head_dim}]", f"mask {self.mask}", *self.arrays]
        facts += ["a mask function"] if self.mask_program is not None else []
        facts += ["a score function"] if self.score_program is not None else []
        if self.softcap is not None:
            facts.append(f"softcap {self.softcap:g}")
        if self.precision is not None:
            facts.append(f"precision {self.precision}")
        if self.deterministic:
            facts.append("deterministic")
        return f"{self.op} on {self.gpu or 'a machine without a GPU'}: " + ", ".join(facts)


@dataclasses.dataclass(frozen=True)
class Change:
    """What is static of a norm and a rotation of rows: `pallas_attn.rotary`."""

    dim: int  # H, without columns that a cache adds
    eps: float | None = None  # of the norm; None: there is none
    pairs: int = 0  # that are rotated; 0: nothing is
    first: int = 0  # column of the first of them
    interleaved: bool = False
    positions: int = 0  # rows of the tables
    weight_dtype: str = "float32"


class AppendInputs(NamedTuple):
    """The arrays of one append: new rows into M caches.

    The caches are, by kind: per_sequence, a tuple of M arrays [K, capacity_i, H]; stacked, one
    [M, K, capacity, H]; paged, one pool [pages, K, page_size, H]; each with a leading axis of
    layers where `layer` is given. The scales of a quantised cache lie as the rows do, without the
    head dim: [K, capacity_i], [M, K, capacity], [pages, K, page_size].
    """

    k_cache: Array
    v_cache: Array | None  # None where one array alone is served
    k: Array  # [M, t, K, H]
    v: Array | None  # [M, t, K, Hv]
    start: Array  # int32[M]: the position of row 0, or of the end (AppendProblem.from_end)
    new_lengths: Array | None  # int32[M]: rows of each sequence that count; None: all t
    page_table: Array | None  # int32[M, pages a sequence]; -1 where there is no page
    layer: Array | int | None
    k_scale: Array | None = None  # float32; given where AppendProblem.quantized
    v_scale: Array | None = None  # None as well where there is no v_cache
    # Packed rows: k [tokens, K, H], v [tokens, K, Hv], start int32[tokens] the position of each row
    # (negative: it is dropped), new_lengths None, and int32[tokens], the sequence of each.
    owners: Array | None = None
    # What AppendProblem.change reads: float32[positions, pairs] twice, and [H]
    cos: Array | None = None
    sin: Array | None = None
    norm_weight: Array | None = None


class Caches(NamedTuple):
    """What an append gives back: the arrays of the same names in `AppendInputs`, new rows in."""

    k_cache: Array
    v_cache: Array | None
    k_scale: Array | None = None
    v_scale: Array | None = None


@dataclasses.dataclass(frozen=True)
class AppendProblem:
    """The static facts of one append."""

    gpu: str | None
    kind: str  # "per_sequence", "stacked" or "paged"
    dtype: str  # of the new rows
    cache_dtype: str
    sequences: int
    new_rows: int  # of each sequence; where they are packed, of all
    kv_heads: int
    head_dim: int
    v_head_dim: int | None  # None: one array alone
    capacities: tuple[int, ...]  # per_sequence: M of them; stacked and paged: that of a sequence
    page_size: int | None = None
    pages: int | None = None
    layers: int | None = None
    ragged: bool = False
    # inputs.start is where the rows end: row 0 goes to start - new_lengths. The kernel subtracts,
    # since an operation of XLA's between extend and the launch would be a launch of its own.
    from_end: bool = False
    quantized: bool = False  # rows are stored as `reference.quantize` says, a scale beside each
    packed: bool = False  # inputs.owners is given
    change: Change | None = None  # of the rows of K, before they are stored
    op: str = "append"

    def __str__(self) -> str:
        rows = f"packed {self.new_rows}" if self.packed else f"{self.sequences},{self.new_rows}"
        new = f"{self.dtype} k[{rows},{self.kv_heads},{self.head_dim}]"
        dtype = _stored(self.cache_dtype, self.quantized)
        into = f"{self.kind} {dtype} caches of {max(self.capacities, default=0)} rows"
        return f"append on {self.gpu or 'a machine without a GPU'}: {new} into {into}"


class KeepInputs(NamedTuple):
    """The arrays of one `keep`: caches as in `AppendInputs`, and what says which rows stay. Every
    int32 means something.
    """

    k_cache: Any
    v_cache: Any
    k_scale: Any
    v_scale: Any
    # int32[M, p]: row j of those that stay in sequence m becomes what row path[m, j] of its newest
    # was, for j < p; later ones are not moved. None: the first ones stay
    path: Array | None
    lengths: Array  # int32[M]
    new_lengths: Array  # int32[M]: how many of the rows are the newest
    counts: Array  # int32[M], or int32[1] for all: how many of these stay
    page_table: Array | None
    holders: Array | None  # int32[pages]: how many sequences hold a page


class Kept(NamedTuple):
    """What a `keep` gives."""

    caches: Any  # `Caches`, rows moved
    # int32[M]: how many of the newest rows stay that the path speaks of, at most its width; or one
    # of the two below
    rows: Array


UNCHANGED, OVERFLOWS = -1, -2  # the sequence stays as it is; it has overflowed from now on


@dataclasses.dataclass(frozen=True)
class KeepProblem:
    """The static facts of one `keep`; its fields as those of `AppendProblem`."""

    gpu: str | None
    kind: str
    cache_dtype: str
    sequences: int
    width: int  # of the path
    kv_heads: int
    head_dim: int
    v_head_dim: int | None
    capacities: tuple[int, ...]
    page_size: int | None = None
    pages: int | None = None
    layers: int | None = None
    quantized: bool = False
    packed = False
    op: str = "keep"

    def __str__(self) -> str:
        into = f"{self.kind} {_stored(self.cache_dtype, self.quantized)} caches"
        rows = f"up to {self.width} rows of {self.sequences} sequences"
        return f"keep on {self.gpu or 'a machine without a GPU'}: {rows} of {into}"


class DecodeInputs(NamedTuple):
    """The arrays of one decode call; caches as in `AppendInputs`."""

    q: Array  # [M, t, N, H]; row i stands at position lengths - t + i. Packed: [tokens, N, H]
    k_cache: Array
    v_cache: Array | None  # None: V is the first DecodeProblem.v_head_dim columns of K
    lengths: Array  # int32[M], the rows just appended included
    page_table: Array | None
    layer: Array | int | None
    sinks: Array | None = None  # float32[N]
    k_scale: Array | None = None  # float32, given where DecodeProblem.quantized: a row is
    v_scale: Array | None = None  # cache * scale[..., None]. None where v_cache is: V has K's scale
    new_lengths: Array | None = None  # int32[M]: an empty sequence where it is negative gives NaN
    # int32[M + 1], by `checks.row_starts`: sequence m owns the packed rows starts[m] to
    # starts[m + 1], the last of which stands at position lengths - 1
    starts: Array | None = None
    # int32, within 2**30: the bounds of DecodeProblem.mask that arrive at run time
    mask_left: Array | None = None
    mask_right: Array | None = None
    mask_aux: tuple[Array, ...] = ()  # what DecodeProblem.mask_program reads
    # Where DecodeProblem.merged: int32[tokens], which row of q a packed row is; and the result of
    # those rows over other keys
    rows: Array | None = None
    into: Any = None  # `Into`
    own: Any = None  # `Own`, where DecodeProblem.own


class Own(NamedTuple):
    """What differs of the same queries over rows of their own, in the same cache."""

    lengths: Array  # int32[M]
    page_table: Array  # int32[M, W]
    new_lengths: Array | None  # int32[M]
    sinks: Array | None


class Into(NamedTuple):
    """Results that those of packed rows are merged with, and which packed rows are theirs."""

    out: Array | None  # [M, t, N, Hv]; None: the same launch makes them
    lse: Array | None  # float32[M, N, t]
    parts: Array  # int32[levels, M * t]: which packed sequence has a row, -1 where none has
    places: Array  # int32[levels, M * t]: which packed row it is


@dataclasses.dataclass(frozen=True)
class DecodeProblem:
    """The static facts of one decode call."""

    gpu: str | None
    kind: str
    dtype: str  # of q
    cache_dtype: str
    sequences: int
    q_len: int  # of each sequence; where rows are packed, at most
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    capacities: tuple[int, ...]
    mask: Mask
    scale: float
    softcap: float | None = None
    page_size: int | None = None
    pages: int | None = None
    layers: int | None = None
    sinks: bool = False
    precision: str | None = None  # None or "highest"
    batch_invariant: bool = False
    quantized: bool = False
    shared_kv: bool = False  # V is the first columns of K (a latent cache): there is no v_cache
    tokens: int | None = None  # packed rows of all sequences; None: rows are not packed
    fewest: int = 1  # packed rows of a sequence: those of fewer, or more than q_len, are left alone
    mask_program: Program | None = None  # hides keys beside `mask`: of sequence, head, q, kv
    # Whether the program is that of a tree of drafts: it counts q and kv from the first of the
    # q_len newest rows, and hides keys among these alone (`trees.program`).
    tree: bool = False
    # Packed rows are copies of rows of q, and the result is that of inputs.into merged with theirs:
    # (levels, M, t), or None
    merged: tuple[int, int, int] | None = None
    # The same queries over rows of their own, which the same launch reads (`DecodeInputs.own`)
    own: "DecodeProblem | None" = None
    op: str = "decode"

    @property
    def uses_batch(self) -> bool:
        """Whether the function asks which sequence it is."""
        return self.mask_program is not None and self.mask_program.depends_on(0)

    @property
    def uses_head(self) -> bool:
        """Whether the function asks which query head it is."""
        return self.mask_program is not None and self.mask_program.depends_on(1)

    @property
    def packed(self) -> bool:
        """Whether inputs.starts is given."""
        return self.tokens is not None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the output but for the head dim: [M, t, N], or [tokens, N] where rows are packed."""
        return (*self._rows, self.q_heads)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """[M, N, t], or [N, tokens] where rows are packed."""
        *sequences, rows = self._rows
        return (*sequences, self.q_heads, rows)

    @property
    def _rows(self) -> tuple[int, ...]:
        return (self.sequences, self.q_len) if self.tokens is None else (self.tokens,)

    @property
    def lse_dtype(self) -> str:
        """Of the logits, the LSE and every sum."""
        return "float64" if self.dtype == "float64" else "float32"

    def __str__(self) -> str:
        rows = f"{self.sequences},{self.q_len}" if self.tokens is None else f"packed {self.tokens}"
        q = f"{self.dtype} q[{rows},{self.q_heads},{self.head_dim}]"
        dtype = _stored(self.cache_dtype, self.quantized)
        over = f"{self.kind} {dtype} caches of {max(self.capacities, default=0)} rows"
        over += ", V within K" if self.shared_kv else ""
        return (
            f"decode on {self.gpu or 'a machine without a GPU'}: {q} over {over}, "
            f"{self.kv_heads} kv heads, mask {self.mask}"
            + (f", precision {self.precision}" if self.precision else "")
            + ("" if self.mask_program is None else self._function)
        )

    @property
    def _function(self) -> str:
        return ", a tree of drafts" if self.tree else ", a mask function"


def _stored(dtype: str, quantized: bool) -> str:
    return f"quantised {dtype}" if quantized else dtype
