"""Drafts of a sequence that form a tree, which speculative decoding checks in one call."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_attn._call import checks
from pallas_attn._call.problem import owned_rows
from pallas_attn._functions.program import Constant, Operand, Operation, Program
from pallas_attn._mesh import sharding
from pallas_attn.errors import described
from pallas_attn.masks import LONGEST, Mask, MaskFunction

Array = jax.Array

Left = int | Array  # positions that a window reaches back, static or traced

WORD = 32  # bits of a word


@dataclasses.dataclass(frozen=True, eq=False)
class DraftTree:
    """The drafts that each draft of a sequence sees: itself and its ancestors. A pytree, made once
    a step and used by every layer, with the starts that it was made with: a call with others is a
    ValueError if both are known, else NaN for the sequences that have other rows.

    Draft i of a sequence is row i of its t newest rows. A draft whose parent is no earlier draft
    follows the sequence itself; there may be several.

    Example::

        >>> cache = pa.StackedCache.create(1, 16, kv_heads=2, head_dim=64)
        >>> drafts = jnp.ones((1, 3, 2, 64), cache.k.dtype)
        >>> cache = pa.append_kv(cache, drafts, drafts)
        >>> tree = pa.DraftTree.create(jnp.array([[-1, 0, 0]]))
        >>> pa.decode_attention(drafts, cache, parents=tree).shape
        (1, 3, 2, 64)
    """

    # int32[M, t, 1 + ceil(t / 32)]: bit j % 32 of word 1 + j // 32 says whether draft j is draft i
    # or an ancestor of it; all bits of word 0 are set, for the rows before the drafts. Packed rows:
    # int32[tokens, words], j counts from the sequence's first row; rows that are no drafts have all
    # bits set.
    bits: Array
    depth: Array  # int32[M, t] or int32[tokens]: number of ancestors
    starts: Array | None = None  # int32[M + 1] of packed rows, as they were checked
    unchecked: ArrayLike | None = None  # the same as they came, to know them again; no leaf

    @classmethod
    def create(
        cls,
        parents: ArrayLike,
        starts: ArrayLike | None = None,
        *,
        drafts_most: int | None = None,
    ) -> "DraftTree":
        """The tree of `parents`, int32[M, t], traced or not: the draft that each draft follows.

        A parent of draft i outside 0 to i - 1, such as -1, says that it follows the sequence. The
        ancestors are found in about log2(t) small operations of XLA.

        Args:
          parents: int32[M, t]; with `starts`, int32[tokens], one a packed row, with drafts counted
            from the first row of the sequence.
          starts: int32[M + 1], the packed rows of each sequence, as in `decode_attention`.
          drafts_most: with `starts`, the most drafts of a sequence. The rows of a longer one, a
            prompt for example, see all rows before them. Each row keeps bits for so many drafts;
            default: as many as there are rows.
        """
        if starts is None:
            wanted = "int32[M, t] (the draft that each draft follows, -1 for none)"
            parents = sharding.whole(checks.integers("parents", parents, wanted, (None, None)))
            if drafts_most is not None:
                raise ValueError(
                    "drafts_most: expected None without starts, where each sequence has t drafts, "
                    f"got {described(drafts_most)}"
                )
            drafts = parents.shape[1]
            at = jnp.arange(drafts, dtype=jnp.int32)[None]
            after = jnp.where((parents >= 0) & (parents < at), parents, -1)
            return cls(*_of_ancestors(at, after, drafts))
        wanted = "int32[tokens] (of each packed row, the draft that it follows, -1 for none)"
        parents = sharding.whole(checks.integers("parents", parents, wanted, (None,)))
        rows = parents.shape[0]
        checks.positive(none=True, drafts_most=drafts_most)
        drafts = rows if drafts_most is None else min(drafts_most, rows)
        checked = checks.row_starts("starts", starts, rows)
        first, within, count = _owned(checked, rows)
        in_tree = count <= drafts
        own = jnp.where(in_tree & (within >= 0), within, 0)
        after = jnp.where(in_tree & (parents >= 0) & (parents < within), first + parents, -1)
        bits, depth = _of_ancestors(own, after, max(drafts, 1))
        bits, depth = jnp.where(in_tree[:, None], bits, -1), jnp.where(in_tree, depth, within)
        return cls(bits, depth, checked, starts)


jax.tree_util.register_dataclass(
    DraftTree, data_fields=["bits", "depth", "starts"], meta_fields=[], drop_fields=["unchecked"]
)


def _of_ancestors(row: Array, after: Array, drafts: int) -> tuple[Array, Array]:
    """`bits` and `depth` of drafts [.., rows]. `row`: the number of each in its sequence; `after`:
    the row that it follows, -1 for none. No path is longer than `drafts`.
    """
    words = -(-drafts // WORD)
    word = jnp.arange(-1, words, dtype=jnp.int32).reshape(*[1] * after.ndim, -1)
    row = row[..., None]
    own = jnp.where(row // WORD == word, 1 << row % WORD, 0)
    own = jnp.broadcast_to(jnp.where(word < 0, -1, own), (*after.shape, words + 1))
    # Bits of the nearest 1, 2, 4, .. ancestors of a draft (itself included), and the next one.
    held = jnp.concatenate([own, after[..., None]], axis=-1)
    for _ in range(max(drafts - 1, 0).bit_length()):
        bits, after = held[..., :-1], held[..., -1:]
        further = jnp.take_along_axis(held, jnp.maximum(after, 0), axis=-2, mode="clip")
        bits = jnp.where(after >= 0, bits | further[..., :-1], bits)
        after = jnp.where(after >= 0, further[..., -1:], after)
        held = jnp.concatenate([bits, after], axis=-1)
    bits = held[..., :-1]
    return bits, jax.lax.population_count(bits[..., 1:]).sum(axis=-1, dtype=jnp.int32) - 1


def _owned(starts: Array, rows: int) -> tuple[Array, Array, Array]:
    """int32[rows] each: the first row of a packed row's sequence, its number there, and the rows of
    the sequence; 0, -1 and 0 where no sequence owns it.
    """
    owners, owned = owned_rows(starts, rows)
    first = jnp.where(owned, starts[owners], 0)
    within = jnp.where(owned, jnp.arange(rows, dtype=jnp.int32) - first, -1)
    end = starts[jnp.minimum(owners + 1, starts.size - 1)]
    return first, within, jnp.where(owned, end - first, 0)


def of_packed(
    value: ArrayLike | DraftTree, starts: Array, rows: int, unchecked: ArrayLike | None
) -> DraftTree:
    """The tree of `parents=` of a call with packed rows, by its starts, checked and before."""
    wanted = f"int32[{rows}] (one a packed row) or a DraftTree of them, made with starts"
    if not isinstance(value, DraftTree):
        tree = DraftTree.create(checks.integers("parents", value, wanted, (rows,)), starts)
        return dataclasses.replace(tree, starts=None)  # starts of the call: nothing to compare
    of_row = jnp.shape(value.bits)[1:]
    if len(of_row) != 1 or jnp.shape(value.bits)[0] != rows or jnp.shape(value.depth) != (rows,):
        got = f"a DraftTree of {value.depth.dtype}{list(jnp.shape(value.depth))}"
        raise ValueError(f"parents: expected {wanted}, got {got}")
    if (wrong := of_other_rows(value, starts, unchecked)) is None:
        return value
    return dataclasses.replace(value, bits=jnp.where(wrong[:, None], -1, value.bits))


def of_other_rows(tree: DraftTree, starts: Array, unchecked: ArrayLike | None) -> Array | None:
    """bool[tokens]: packed rows of sequences that have other rows in a call than in its tree, by
    the starts of the call, checked and before; None where there are none. ValueError where that is
    known.
    """
    if tree.starts is None or (tree.unchecked is unchecked and isinstance(unchecked, jax.Array)):
        return None
    both, rows = (tree.starts, starts), tree.depth.shape[0]
    said = (tree.starts, starts if unchecked is None else unchecked)
    known = [x for x in (checks.known_starts(each, rows) for each in said) if x is not None]
    if tree.starts.shape != starts.shape or (len(known) == 2 and (known[0] != known[1]).any()):
        got = [x.tolist() for x in known] if len(known) == 2 else [list(x.shape) for x in both]
        raise ValueError(
            "parents: expected a DraftTree made with the starts of this call, "
            f"{got[-1]}, got one made with {got[0]}; make it with DraftTree.create(parents, starts)"
        )
    if len(known) == 2:
        return None
    owners, owned = owned_rows(starts, rows)
    differ = tree.starts != starts
    return (differ[:-1] | differ[1:])[owners] & owned


def of(value: ArrayLike | DraftTree, sequences: int, drafts: int) -> DraftTree:
    """The tree of `parents=` of a call: a DraftTree, or the argument of `DraftTree.create`."""
    wanted = f"int32[{sequences}, {drafts}] (one a draft) or a DraftTree of them"
    if not isinstance(value, DraftTree):
        value = DraftTree.create(checks.integers("parents", value, wanted, (sequences, drafts)))
    shapes = (sequences, drafts, 1 + -(-drafts // WORD)), (sequences, drafts)
    for x, shape in zip((value.bits, value.depth), shapes, strict=True):
        if getattr(x, "shape", None) != shape or x.dtype != jnp.int32:
            depth = value.depth
            kind, sizes = getattr(depth, "dtype", type(depth).__name__), getattr(depth, "shape", ())
            got = f"a DraftTree of {kind}{list(sizes)}"
            raise ValueError(f"parents: expected {wanted}, got {got}")
    return value


def program(shape: tuple[int, ...], sequences: int | None = None) -> Program:
    """Whether draft q of sequence b sees row kv, both counted from the first draft, by the bits of
    a `DraftTree` of this shape: a read, a shift and a comparison a logit.

    `sequences`: their number where rows are packed; their starts are read too.
    """
    b, _, q, kv = range(4)
    do = _Operations()
    word = do.add("shift_right_arithmetic", kv, _number(5))
    word = do.add("add", word, _number(1))  # rows before the drafts: word 0
    row = (b, q) if sequences is None else (do.add("add", q, do.add("read", b, read=1)),)
    word = do.add("read", *row, word, read=0)
    place = do.add("and", do.add("xor", kv, _number(WORD - 1)), _number(WORD - 1))
    bit = do.add("shift_left", word, place)  # the row's bit becomes the sign
    result = do.add("lt", bit, _number(0), dtype="bool")
    starts = [] if sequences is None else [((sequences + 1,), "int32")]
    return Program(4, tuple(do), result, ((shape, "int32"), *starts))


class _Operations(list[Operation]):
    """Operations of a program of sequence, head, q and kv."""

    def add(
        self, name: str, *operands: Operand, dtype: str = "int32", read: int | None = None
    ) -> int:
        """Append an operation; returns the number of its value."""
        self.append(Operation(name, operands, dtype, read=read))
        return 3 + len(self)


def packed(tree: DraftTree, starts: Array) -> MaskFunction:
    """The mask of packed drafts, counted from the first draft of their sequence."""
    return MaskFunction(program(tree.bits.shape, starts.size - 1), (tree.bits, starts))


def split(tree: DraftTree, left: Left | None, begins: tuple[Array, Array]) -> MaskFunction:
    """The mask of `windowed` where a device has some rows of each sequence; a `left` of None is no
    window. `begins`: where the drafts begin among its queries and among its keys, int32[M] each.
    """
    _, function = windowed(tree, LONGEST - 1 if left is None else left, begins[0])
    program = program_of_window(tree.bits.shape, split=True)
    return MaskFunction(program, (*function.aux, begins[1]))


def windowed(
    tree: DraftTree, left: Left, begin: Array, starts: Array | None = None
) -> tuple[Mask, MaskFunction]:
    """The mask of drafts that see `left` positions back, and a band that shows at least as much.
    Positions are those in the sequence, whose drafts begin at row begin[m].

    A draft stands `depth` positions behind the last row before the drafts: rows between it and its
    ancestors do not count.
    """
    every, bits = tree.depth.shape[-1], tree.bits
    words = bits.shape[-1] - 1
    drafts = every if starts is None else min(every, max(words, 1) * WORD)
    first = tree.depth - left  # first position that a draft sees, from the first draft's on
    if not isinstance(left, int) or left < drafts - 1:  # else it sees all its ancestors
        if starts is None:
            near = tree.depth[:, None] >= first[:, :, None]
            near = jnp.pad(near, ((0, 0), (0, 0), (0, words * WORD - drafts)))
        else:
            number = jnp.arange(words * WORD, dtype=jnp.int32)[None]
            rows = _owned(starts, every)[0][:, None] + number
            near = jnp.take(tree.depth, rows, mode="clip") >= first[:, None]
        near = near.reshape(*near.shape[:-1], words, WORD)
        near = jnp.where(near, jnp.int32(1) << jnp.arange(WORD, dtype=jnp.int32), 0)
        near = near.sum(axis=-1, dtype=jnp.int32)
        bits = jnp.concatenate([bits[..., :1], bits[..., 1:] & near], axis=-1)
    nearest = jnp.minimum(first, 0)
    if starts is not None:  # rows of no tree: each stands where it is
        whole = (tree.bits == -1).all(axis=1)
        bits, nearest = jnp.where(whole[:, None], -1, bits), jnp.where(whole, first, nearest)
    # Counted in rows, the drafts' own among them, a window reaches so far at most.
    reach = left + drafts - 1
    reach = min(reach, LONGEST - 1) if isinstance(left, int) else reach
    aux = bits, nearest, begin, *(() if starts is None else (starts,))
    sequences = None if starts is None else starts.size - 1
    return Mask(left=reach, right=0), MaskFunction(program_of_window(bits.shape, sequences), aux)


def program_of_window(
    shape: tuple[int, ...], sequences: int | None = None, *, split: bool = False
) -> Program:
    """`program` with positions in the sequence, and a window. It reads the bits, of this shape; the
    first position that each draft sees before the drafts, counted from the first draft (int32[M,
    t]); and where the drafts begin (int32[M]), with `split` among queries and among keys.
    `sequences`: their number where rows are packed; their starts are read too.
    """
    b, _, q, kv = range(4)
    do = _Operations()
    add = do.add
    begin = add("read", b, read=2)
    number = add("sub", q, begin)
    key = add("sub", kv, add("read", b, read=3) if split else begin)
    row = (b, number) if sequences is None else (add("add", number, add("read", b, read=3)),)
    words = [add("read", *row, _number(n), read=0) for n in range(1, shape[-1])]
    word = words[0]
    for n, next_word in enumerate(words[1:], 1):  # select, not read: one load a row, not a logit
        word = add("select_n", add("ge", key, _number(WORD * n), dtype="bool"), word, next_word)
    place = add("and", add("xor", key, _number(WORD - 1)), _number(WORD - 1))
    bit = add("lt", add("shift_left", word, place), _number(0), dtype="bool")  # its sign
    near = add("ge", key, add("read", *row, read=1), dtype="bool")
    before = add("lt", key, _number(0), dtype="bool")
    seen = add("or", before, bit, dtype="bool")
    result = add("and", seen, near, dtype="bool")
    numbers = [shape[:1]] * (1 + split) if sequences is None else [(sequences,), (sequences + 1,)]
    return Program(4, tuple(do), result, tuple((x, "int32") for x in (shape, shape[:-1], *numbers)))


def _number(n: int) -> Constant:
    return Constant("int32", str(n))
