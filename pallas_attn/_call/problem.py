"""The two halves of a call: its static facts (a `...Problem`, a jit key by which kernel and tuning
are chosen) and its arrays (a `...Inputs`, a pytree, which the chosen implementation reads).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_attn._functions.program import Program
from pallas_attn.masks import FULL, SIDES, Mask

Array = Any
WithBounds = Any  # inputs, or the refs of a kernel, that have mask_left and mask_right

# Cache dtypes that are stored with one float32 scale per row.
QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")

# Dtypes of the numbers that a cache holds.
CACHE_DTYPES = ("bfloat16", "float16", "float32", "float64", *QUANTIZED)

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")  # dtypes of q, k and v with scales
# Names of jax.lax.DotAlgorithmPreset that allow matmuls on the numbers of a float8 cache.
FLOAT8_PRECISIONS = ("ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM")

MOST_ROWS = 2**31 - 1  # rows of a sequence: lengths are int32
# Keys of a window up to which many query heads that share K and V have kernels of their own.
SHORT_WINDOW = 128


class AttentionInputs(NamedTuple):
    """The arrays of one attention call; None where the caller gave nothing. `bind` has clipped
    offsets and lengths to the ranges below: no kernel clips them again.
    """

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]; [B / AttentionProblem.share, S, K, H]
    v: Array  # [B, S, K, Hv], the batch as that of k
    q_offset: Array | None = None  # int32[B], -2**29 .. 2**29; None: AttentionProblem.q_offset
    q_lengths: Array | None = None  # int32[B], 0 .. T
    kv_lengths: Array | None = None  # int32[B], 0 .. S
    q_segment_ids: Array | None = None  # int32[B, T]
    kv_segment_ids: Array | None = None  # int32[B, S]
    # int32[B, T], -2**29 .. 2**29 + S: positions in place of q_offset + row; with segment ids only
    q_positions: Array | None = None
    bias: Array | None = None  # [B or 1, N or 1, T or 1, S or 1], any float type
    mask_array: Array | None = None  # bool[B or 1, N or 1, T or 1, S or 1]
    sinks: Array | None = None  # float32[N]
    # int32[B], within 2**30: bounds of AttentionProblem.mask that arrive at run time
    mask_left: Array | None = None
    mask_right: Array | None = None
    # Scales of float8 q, k and v: float32, at least 2**-100, one for each rows / n rows of a head
    q_scale: Array | None = None  # [B, n, N]
    k_scale: Array | None = None  # [B, n, K]
    v_scale: Array | None = None  # [B, n, K]
    device: Array | None = None  # int32[1]: number of this device among AttentionProblem.fetches
    mask_aux: tuple[Array, ...] = ()  # arrays that AttentionProblem.mask_program reads
    score_aux: tuple[Array, ...] = ()  # arrays that AttentionProblem.score_program reads

    def named(self) -> dict[str, Array]:
        """The arrays that are there, in the order of `jax.tree.leaves`, by the names of their
        fields; arrays of functions are numbered.
        """
        arrays = {name: getattr(self, name) for name in self._fields[:-2]}
        for side in ("mask_aux", "score_aux"):
            arrays |= {f"{side}{n}": x for n, x in enumerate(getattr(self, side))}
        return {name: x for name, x in arrays.items() if x is not None}

    @classmethod
    def of(cls, named: dict[str, Array]) -> "AttentionInputs":
        """The inputs of `named`, put together again."""
        fields: dict[str, Any] = {"q": None, "k": None, "v": None}
        for name, x in named.items():
            side = name.rstrip("0123456789")
            if side in ("mask_aux", "score_aux"):
                fields[side] = (*fields.get(side, ()), x)
            else:
                fields[name] = x
        return cls(**fields)


# Optional inputs but for arrays of functions; `AttentionProblem.arrays` has those that are there.
OPTIONAL = AttentionInputs._fields[3:-2]


def of_nothing(q: Array, v_dim: int, dtype: DTypeLike, lse_dtype: DTypeLike) -> tuple[Array, Array]:
    """out and lse of rows [B, T, N, H] that see no key. They depend on q: jax takes the devices
    from what a result depends on.
    """
    rows = jnp.where(False, q[..., :1], 0).astype(dtype)
    out = jnp.broadcast_to(rows, (*rows.shape[:3], v_dim))
    lse = jnp.swapaxes(rows[..., 0], 1, 2).astype(lse_dtype)
    return out, jnp.where(True, -jnp.inf, lse)


def live(x: Array, ends: Array | None) -> Array:
    """x [B, rows, heads, dim] with zeros in rows from `ends` int32[B] on."""
    if ends is None:
        return x
    inside = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < ends[:, None]
    return jnp.where(inside[:, :, None, None], x, jnp.zeros((), x.dtype))


SCALE_ROWS = 128  # blocks of as many rows and more that have one scale are multiples of it


def rows_of_scale(rows: int, blocks: int) -> int:
    """Rows of a block that has one scale, of `blocks` blocks: of up to rows / 128 a multiple of 128
    rows, and what is left in the last block; of more an equal part, which is a whole number.
    """
    if blocks in (1, rows):
        return rows // blocks
    if (blocks - 1) * SCALE_ROWS < rows:
        return -(-rows // (blocks * SCALE_ROWS)) * SCALE_ROWS
    return rows // blocks


def owner_of_chunk(chunk: Any, devices: int) -> tuple[Any, Any]:
    """The device that has a chunk of the sequence in the order zigzag, and which of its own that
    is; of ints, NumPy's numbers and traced ones. `context.chunks_of` says which a device has.
    """
    late = chunk >= devices
    if isinstance(late, bool):
        return (2 * devices - 1 - chunk, 1) if late else (chunk, 0)
    where: Any = np.where if isinstance(chunk, np.ndarray) else jnp.where
    return where(late, 2 * devices - 1 - chunk, chunk), where(late, 1, 0)


def owner_of_rows(starts: Array, rows: int) -> Array:
    """int32[rows]: the sequence that owns each packed row; -1 before the first start, M from the
    last on. `starts`: int32[M + 1], ascending.
    """
    at = jnp.arange(rows, dtype=jnp.int32)
    return (starts[None] <= at[:, None]).sum(axis=1, dtype=jnp.int32) - 1


def owned_rows(starts: Array, rows: int) -> tuple[Array, Array]:
    """int32[rows]: the sequence that owns each packed row, or some sequence; bool[rows]: whether
    one owns it.
    """
    owners, sequences = owner_of_rows(starts, rows), starts.size - 1
    owned = (owners >= 0) & (owners < sequences)
    return jnp.clip(owners, 0, max(sequences - 1, 0)), owned


def probabilities_of_sinks(
    sinks: Array, lse: Array, exp: Callable[[Array], Array] = jnp.exp
) -> Array:
    """The probabilities of sinks in rows, by the log-sum-exp of each, in which they are: 0 where a
    row sees no key, 1 where the sink is inf. At most 1, however a large lse is rounded.
    """
    below = jnp.where(jnp.abs(lse) == jnp.inf, 0, jnp.minimum(sinks - lse, 0))  # no inf - inf
    return jnp.where(lse == -jnp.inf, 0, exp(below))


def gradients_of_sinks(sinks: Array, lse: Array, delta: Array) -> Array:
    """[N] from [B, N, T] of rows: a sink is one more logit with a probability of its own and no
    value, so that its dS is P (0 - delta), in every row that sees a key.
    """
    p = probabilities_of_sinks(sinks.astype(lse.dtype)[None, :, None], lse)
    return -jnp.where(lse == -jnp.inf, 0, p * delta).sum(axis=(0, 2))


def bounds_of(inputs: WithBounds) -> dict[str, Array]:
    """The bounds of a mask that arrive at run time, by side, from inputs or a kernel's refs."""
    named = {side: getattr(inputs, f"mask_{side}") for side in SIDES}
    return {side: x for side, x in named.items() if x is not None}


class _OfFunctions:
    """A problem with functions of positions, and the numbers that these ask for."""

    mask_program: Program | None
    score_program: Program | None

    @property
    def functions(self) -> list[Program]:
        """The functions that are not None."""
        return [f for f in (self.mask_program, self.score_program) if f is not None]

    @property
    def uses_batch(self) -> bool:
        """Whether a function reads the number of its batch row or sequence."""
        return any([f.depends_on(f.inputs - 4) for f in self.functions])

    @property
    def uses_head(self) -> bool:
        """Whether a function reads the number of its query head."""
        return any([f.depends_on(f.inputs - 3) for f in self.functions])


@dataclasses.dataclass(frozen=True)
class AttentionProblem(_OfFunctions):
    """The static facts of one forward or backward call."""

    op: str  # "flash_forward", "flash_backward", "flash_jvp" or "flash_dual"
    gpu: str | None  # "sm80", "sm90", ...: the generation; None where there is no GPU
    dtype: str  # dtype of q, k and v
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
    q_offset: int = 0  # position of query row 0; meaningless where inputs.q_offset is given
    # Consecutive batch rows of q that read the same batch row of k and v: the chunks of a device's
    # rows, each with an offset of its own.
    share: int = 1
    # All values that inputs.q_offset may take, a tuple for each device; (): any.
    offsets: tuple[tuple[int, ...], ...] = ()
    # Devices whose zigzag chunks make up k, v and their gradients, one device after the other;
    # 1: rows lie in the order of positions.
    zigzag: int = 1
    # Devices that the kernel fetches k and v from: k and v hold the rows of this device, kv_len
    # counts those of all. Forward only.
    fetches: int = 1
    precision: str | None = None  # None, "highest", or of float8 "fast_accum"
    arrays: tuple[str, ...] = ()  # optional fields of AttentionInputs that are given, in order
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: str = "float32"  # meaningless without a bias
    mask_shape: tuple[int, ...] | None = None
    deterministic: bool = False  # whether a backward has the same bits each time
    mask_program: Program | None = None  # function of (b, h, q, kv) that hides keys beside `mask`
    mask_within: Mask = FULL  # a static band that shows all that mask_program shows
    score_program: Program | None = None  # function of (score, b, h, q, kv)
    # Indices of the arrays of score_aux whose gradients a backward computes, sorted
    learned: tuple[int, ...] = ()
    # T, S and q_offset (None: an array) of `MaskFunction.blocks`, the last array of mask_aux;
    # None: mask_aux has no blocks.
    mask_blocks: tuple[int, int, int | None] | None = None
    out_dtype: str | None = None  # dtype of the output; None: that of q
    scale_blocks: tuple[int, int, int] = (1, 1, 1)  # n of q_scale, k_scale and v_scale
    # Inputs whose tangents are given, sorted: of "flash_jvp" and "flash_dual"
    tangents: tuple[str, ...] = ()

    @property
    def masks_keys(self) -> bool:
        """Whether mask_array hides keys from all queries alike, as padding masks do."""
        return self.mask_shape is not None and self.mask_shape[2] == 1 < self.mask_shape[3]

    @functools.cached_property
    def group(self) -> int:
        """Query heads that read the same kv head."""
        return self.q_heads // self.kv_heads

    @property
    def lse_dtype(self) -> str:
        """The dtype of logits, LSE and sums."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def result_dtype(self) -> str:
        """The dtype of the output."""
        return self.out_dtype or self.dtype

    def __str__(self) -> str:
        facts = [_sizes(self), f"mask {self.mask}", *self.arrays]
        facts += ["a mask function"] if self.mask_program is not None else []
        facts += ["a score function"] if self.score_program is not None else []
        if self.softcap is not None:
            facts.append(f"softcap {self.softcap:g}")
        if self.precision is not None:
            facts.append(f"precision {self.precision}")
        if self.deterministic:
            facts.append("deterministic")
        if self.learned:
            facts.append("gradients of aux " + ", ".join(map(str, self.learned)))
        if self.tangents:
            facts.append("tangents of " + ", ".join(self.tangents))
        return f"{self.op} on {self.gpu or 'a machine without a GPU'}: " + ", ".join(facts)


class QuantizeInputs(NamedTuple):
    """The arrays of one `quantize_qkv`: q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]."""

    q: Array
    k: Array
    v: Array
    q_lengths: Array | None  # int32[B], 0 .. T
    kv_lengths: Array | None  # int32[B], 0 .. S


@dataclasses.dataclass(frozen=True)
class QuantizeProblem:
    """The static facts of one `quantize_qkv`, which gives q, k, v and scales [B, n, heads]."""

    gpu: str | None
    dtype: str  # dtype of q, k and v
    to: str  # dtype of the results
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    blocks: tuple[int, int, int]  # n of the scales of q, k and v: `rows_of_scale` each
    op: str = "quantize"

    def __str__(self) -> str:
        return f"quantize on {self.gpu or 'a machine without a GPU'}: {_sizes(self)} to {self.to}"


def _sizes(problem: AttentionProblem | QuantizeProblem) -> str:
    """The sizes of q, k and v."""
    q = f"{problem.dtype} q[{problem.batch},{problem.q_len},{problem.q_heads},{problem.head_dim}]"
    k = f"k[{problem.batch},{problem.kv_len},{problem.kv_heads},{problem.head_dim}]"
    return f"{q}, {k}, v[...,{problem.v_head_dim}]"


@dataclasses.dataclass(frozen=True)
class Change:
    """The static facts of a norm and a rotation of rows (`pallas_attn.rotary`)."""

    dim: int  # H, without columns that a cache adds
    eps: float | None = None  # epsilon of the norm; None: no norm
    pairs: int = 0  # pairs of columns that are rotated; 0: no rotation
    first: int = 0  # column of the first pair
    interleaved: bool = False
    positions: int = 0  # rows of the tables of cosines and sines
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
    # int32[M]: position behind the last new row, as `cache.lengths` after an extend. Row 0 goes to
    # end - new_lengths: the kernel subtracts, since an operation of XLA's between extend and the
    # launch is a launch of its own. None where rows are packed, or `start` is given.
    end: Array | None
    new_lengths: Array | None  # int32[M]: rows of each sequence that count; None without `end`: all
    page_table: Array | None  # int32[M, pages a sequence]; -1 where there is no page
    layer: Array | int | None
    k_scale: Array | None = None  # float32; given where quantized and not byte_rows
    v_scale: Array | None = None  # None as well where there is no v_cache
    # Packed rows: k [tokens, K, H], v [tokens, K, Hv], and int32[tokens] each, the sequence of a
    # row and its position (negative: it is dropped).
    owners: Array | None = None
    positions: Array | None = None
    start: Array | None = None  # int32[M], in place of the end: position of row 0
    # Arrays that AppendProblem.change reads: float32[positions, pairs] twice, and [H]
    cos: Array | None = None
    sin: Array | None = None
    norm_weight: Array | None = None


class Caches(NamedTuple):
    """The arrays that an append returns: those of the same names in `AppendInputs`, new rows in."""

    k_cache: Array
    v_cache: Array | None
    k_scale: Array | None = None
    v_scale: Array | None = None


@dataclasses.dataclass(frozen=True)
class AppendProblem:
    """The static facts of one append."""

    gpu: str | None
    kind: str  # "per_sequence", "stacked", "paged" or "interleaved"
    dtype: str  # dtype of the new rows
    cache_dtype: str
    sequences: int
    new_rows: int  # new rows of each sequence; of all sequences where they are packed
    kv_heads: int
    head_dim: int
    v_head_dim: int | None  # None: one array alone
    capacities: tuple[int, ...]  # rows of each sequence in these buffers
    page_size: int | None = None
    pages: int | None = None
    layers: int | None = None
    quantized: bool = False  # rows are stored as `quantization.quantize` says, a scale beside each
    byte_rows: bool = False  # the cache is uint8, and a row of it is `BYTE_ROW`
    packed: bool = False  # inputs.owners is given
    change: Change | None = None  # norm and rotation of the rows of K, before they are stored
    op: str = "append"

    def __str__(self) -> str:
        rows = f"packed {self.new_rows}" if self.packed else f"{self.sequences},{self.new_rows}"
        new = f"{self.dtype} k[{rows},{self.kv_heads},{self.head_dim}]"
        dtype = _stored(self.cache_dtype, self.quantized)
        into = f"{self.kind} {dtype} caches of {max(self.capacities, default=0)} rows"
        return f"append on {self.gpu or 'a machine without a GPU'}: {new} into {into}"


class KeepInputs(NamedTuple):
    """The arrays of one `keep`: caches as in `AppendInputs`, and the rows that stay. Any int32 is
    valid.
    """

    k_cache: Any
    v_cache: Any
    k_scale: Any
    v_scale: Any
    # int32[M, p]: row j < p of those that stay becomes a copy of row path[m, j] of the newest rows;
    # later rows are not moved. None: the first rows stay
    path: Array | None
    lengths: Array  # int32[M]
    new_lengths: Array  # int32[M]: number of newest rows
    counts: Array  # int32[M], or int32[1] for all: number of newest rows that stay
    page_table: Array | None
    holders: Array | None  # int32[pages]: number of sequences that hold a page


class Kept(NamedTuple):
    """The results of a `keep`."""

    caches: Caches  # buffers with the rows moved
    # int32[M]: number of newest rows that stay, at most the width of the path; or one of the two
    # constants below
    rows: Array


UNCHANGED, OVERFLOWS = -1, -2  # the sequence stays as it is; it overflows from now on


@dataclasses.dataclass(frozen=True)
class KeepProblem:
    """The static facts of one `keep`; fields as in `AppendProblem`."""

    gpu: str | None
    kind: str
    cache_dtype: str
    sequences: int
    width: int  # width of the path
    kv_heads: int
    head_dim: int
    v_head_dim: int | None
    capacities: tuple[int, ...]
    page_size: int | None = None
    pages: int | None = None
    layers: int | None = None
    quantized: bool = False
    packed: ClassVar[bool] = False
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
    # int32, within 2**30: bounds of DecodeProblem.mask that arrive at run time
    mask_left: Array | None = None
    mask_right: Array | None = None
    mask_aux: tuple[Array, ...] = ()  # arrays that DecodeProblem.mask_program reads
    rows: Array | None = None  # int32[tokens]: row of q of a packed row (DecodeProblem.merged)
    into: Any = None  # an `Into`: results of those rows over other keys (DecodeProblem.merged)
    # int32[M, t, n], of packed rows [tokens, n]: positions that a query row attends to
    kv_indices: Array | None = None
    score_aux: tuple[Array, ...] = ()  # arrays that DecodeProblem.score_program reads


class ListedResiduals(NamedTuple):
    """R query rows of the heads that share a list, S rows of keys, the lists, the results and their
    cotangents.
    """

    q: Array  # [R, heads, H]
    k: Array  # [S, H]
    v: Array  # [S, Hv]
    rows: Array  # int32[R, n]: rows of k and v, -1 for none
    out: Array  # [R, heads, Hv]
    lse: Array  # [R, heads]
    d_out: Array
    d_lse: Array


class Into(NamedTuple):
    """Results that those of packed rows are merged into, and the places of these rows."""

    out: Array  # [M, t, N, Hv]
    lse: Array  # float32[M, N, t]
    parts: Array  # int32[levels, M * t]: the packed sequence that has a row, -1 where none has
    places: Array  # int32[levels, M * t]: its number among the packed rows


@dataclasses.dataclass(frozen=True)
class DecodeProblem(_OfFunctions):
    """The static facts of one decode call."""

    gpu: str | None
    kind: str
    dtype: str  # dtype of q
    cache_dtype: str
    sequences: int
    q_len: int  # query rows of each sequence; the most that one may have where rows are packed
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    capacities: tuple[int, ...]  # rows of each sequence in these buffers
    mask: Mask
    scale: float
    softcap: float | None = None
    page_size: int | None = None
    pages: int | None = None
    layers: int | None = None
    sinks: bool = False
    # None, "highest", or "float8", which allows matmuls on the numbers of a float8 cache.
    precision: str | None = None
    batch_invariant: bool = False
    quantized: bool = False
    # Whether a cache of 8-bit numbers has no scales: the numbers are the values.
    unscaled: bool = False
    shared_kv: bool = False  # V is the first columns of K (a latent cache): there is no v_cache
    byte_rows: bool = False  # the cache is uint8, and a row of it is `BYTE_ROW`
    tokens: int | None = None  # packed rows of all sequences; None: rows are not packed
    # Packed rows that a sequence must have: a launch leaves sequences of fewer, or of more than
    # q_len, alone.
    fewest: int = 1
    mask_program: Program | None = None  # function of (sequence, head, q, kv) that hides keys
    # Whether the program describes a tree of drafts: it counts q and kv from the first of the q_len
    # newest rows, and hides keys among these alone (`trees.program`).
    tree: bool = False
    # (levels, M, t) where packed rows are copies of rows of q and their results are merged into
    # inputs.into; else None
    merged: tuple[int, int, int] | None = None
    listed: int | None = None  # n of inputs.kv_indices; None: each row attends to all that it sees
    score_program: Program | None = None  # function of (score, sequence, head, q, kv)
    op: str = "decode"

    @property
    def mask_uses_head(self) -> bool:
        """Whether the mask function reads the number of its query head."""
        return self.mask_program is not None and self.mask_program.depends_on(1)

    @property
    def packed(self) -> bool:
        """Whether inputs.starts is given."""
        return self.tokens is not None

    @property
    def has_no_rows(self) -> bool:
        """Whether the cache has no row at all."""
        return not max(self.capacities, default=0) or self.pages == 0

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The output's shape without its head dim: [M, t, N], or [tokens, N] of packed rows."""
        rows = (self.sequences, self.q_len) if self.tokens is None else (self.tokens,)
        return (*rows, self.q_heads)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """[M, N, t], or [N, tokens] of packed rows."""
        *sequences, rows, heads = self.out_shape
        return (*sequences, heads, rows)

    @property
    def lse_dtype(self) -> str:
        """The dtype of logits, LSE and sums."""
        return "float64" if self.dtype == "float64" else "float32"

    def __str__(self) -> str:
        rows = f"{self.sequences},{self.q_len}" if self.tokens is None else f"packed {self.tokens}"
        q = f"{self.dtype} q[{rows},{self.q_heads},{self.head_dim}]"
        dtype = _stored(self.cache_dtype, self.quantized)
        over = f"{self.kind} {dtype} caches of {max(self.capacities, default=0)} rows"
        over += ", V within K" if self.shared_kv else ""
        function = ", a tree of drafts" if self.tree else ", a mask function"
        return (
            f"decode on {self.gpu or 'a machine without a GPU'}: {q} over {over}, "
            f"{self.kv_heads} kv heads, mask {self.mask}"
            + (f", precision {self.precision}" if self.precision else "")
            + ("" if self.mask_program is None else function)
            + ("" if self.score_program is None else ", a score function")
            + ("" if self.listed is None else f", {self.listed} indices a row")
        )


def _stored(dtype: str, quantized: bool) -> str:
    return f"quantised {dtype}" if quantized else dtype
