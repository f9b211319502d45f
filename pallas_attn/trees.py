"""Drafts of a sequence that form a tree: what speculative decoding checks in one call."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import _checks
from pallas_attn._program import Constant, Operation, Program
from pallas_attn.masks import LONGEST, Mask, MaskFunction

Array = jax.Array

WORD = 32  # bits of a word


@dataclasses.dataclass(frozen=True, eq=False)
class DraftTree:
    """Which of its drafts each draft of a sequence sees: itself and its ancestors. A pytree, made
    once a step and used by every layer.

    Draft i of a sequence is row i of its t newest rows. A draft whose parent is no earlier draft of
    the sequence continues the sequence itself; there may be several such drafts.
    """

    # int32[M, t, 1 + ceil(t / 32)]: bit j % 32 of word 1 + j // 32 says whether draft j is draft i
    # or an ancestor of it; all bits of word 0 are set, which stands for the rows before the drafts.
    bits: Array
    depth: Array  # int32[M, t]: how many ancestors a draft has

    @classmethod
    def create(cls, parents: Any) -> "DraftTree":
        """The tree of `parents`, int32[M, t], traced or not: the draft that each draft follows.

        A parent that is not from 0 to i - 1 for draft i, as -1, says that draft i continues the
        sequence. The ancestors are found in about log2(t) small operations of XLA.
        """
        wanted = "int32[M, t] (the draft that each draft follows, -1 for none)"
        parents = _checks.integers("parents", parents, wanted, (None, None))
        drafts = parents.shape[1]
        words = -(-drafts // WORD)
        at = jnp.arange(drafts, dtype=jnp.int32)[None]
        word, row = jnp.arange(-1, words, dtype=jnp.int32)[None], at.T
        own = jnp.where(row // WORD == word, 1 << row % WORD, 0)
        own = jnp.broadcast_to(jnp.where(word < 0, -1, own)[None], (*parents.shape, words + 1))
        # The bits of the nearest 1, 2, 4, .. of a draft and its ancestors, and who follows those.
        after = jnp.where((parents >= 0) & (parents < at), parents, -1)
        held = jnp.concatenate([own, after[..., None]], axis=2)
        for _ in range(max(drafts - 1, 0).bit_length()):
            bits, after = held[..., :-1], held[..., -1:]
            further = jnp.take_along_axis(held, jnp.maximum(after, 0), axis=1, mode="clip")
            bits = jnp.where(after >= 0, bits | further[..., :-1], bits)
            after = jnp.where(after >= 0, further[..., -1:], after)
            held = jnp.concatenate([bits, after], axis=2)
        bits = held[..., :-1]
        depth = jax.lax.population_count(bits[..., 1:]).sum(axis=2, dtype=jnp.int32) - 1
        return cls(bits, depth)


jax.tree_util.register_dataclass(DraftTree, data_fields=["bits", "depth"], meta_fields=[])


def of(value: Any, sequences: int, drafts: int) -> DraftTree:
    """The tree of `parents=` of a call: a DraftTree, or what `DraftTree.create` takes."""
    wanted = f"int32[{sequences}, {drafts}] (one a draft) or a DraftTree of them"
    if not isinstance(value, DraftTree):
        value = DraftTree.create(_checks.integers("parents", value, wanted, (sequences, drafts)))
    shapes = (sequences, drafts, 1 + -(-drafts // WORD)), (sequences, drafts)
    for x, shape in zip((value.bits, value.depth), shapes, strict=True):
        if getattr(x, "shape", None) != shape or x.dtype != jnp.int32:
            depth = value.depth
            kind, sizes = getattr(depth, "dtype", type(depth).__name__), getattr(depth, "shape", ())
            got = f"a DraftTree of {kind}{list(sizes)}"
            raise ValueError(f"parents: expected {wanted}, got {got}")
    return value


def program(shape: tuple[int, ...]) -> Program:
    """Whether draft q of sequence b sees row kv, both counted from the first draft, by the bits of
    a `DraftTree`, which have this shape. Written out, as a read, a shift and a comparison a logit.
    """
    b, _, q, kv = range(4)
    operations = (
        Operation("shift_right_arithmetic", (kv, _number(5)), "int32"),
        Operation("add", (4, _number(1)), "int32"),
        Operation("read", (b, q, 5), "int32", read=0),  # rows before the drafts: word 0
        Operation("xor", (kv, _number(WORD - 1)), "int32"),
        Operation("and", (7, _number(WORD - 1)), "int32"),
        Operation("shift_left", (6, 8), "int32"),  # the row's bit becomes the sign
        Operation("lt", (9, _number(0)), "bool"),
    )
    return Program(4, operations, 10, ((shape, "int32"),))


def split(tree: DraftTree, left: Any, begins: tuple[Array, Array]) -> MaskFunction:
    """What `windowed` shows, or with a `left` of None all that drafts see, where a device has some
    rows of each sequence: `begins` says where the drafts begin, int32[M] among its queries and
    int32[M] among its keys.
    """
    _, function = windowed(tree, LONGEST - 1 if left is None else left, begins[0])
    return MaskFunction(program_of_window(tree.bits.shape, split=True), (*function.aux, begins[1]))


def windowed(tree: DraftTree, left: Any, begin: Array) -> tuple[Mask, MaskFunction]:
    """What drafts see that see `left` positions back, an int or traced: of the rows before them and
    of their ancestors. Of positions in the sequence, whose drafts begin at row begin[m]. Before it
    a band, which shows all of that.

    A draft stands `depth` positions behind the last row before the drafts, so that rows which lie
    between it and its ancestors count for nothing.
    """
    drafts, bits = tree.depth.shape[1], tree.bits
    first = tree.depth - left  # of the positions that a draft sees, from the first draft's on
    if not isinstance(left, int) or left < drafts - 1:  # else it sees all its ancestors
        near = tree.depth[:, None] >= first[:, :, None]
        words = bits.shape[2] - 1
        near = jnp.pad(near, ((0, 0), (0, 0), (0, words * WORD - drafts)))
        near = near.reshape(*near.shape[:2], words, WORD)
        near = jnp.where(near, jnp.int32(1) << jnp.arange(WORD, dtype=jnp.int32), 0)
        near = near.sum(axis=3, dtype=jnp.int32)
        bits = jnp.concatenate([bits[..., :1], bits[..., 1:] & near], axis=2)
    # Counted in rows, the drafts' own among them, a window reaches so far at most.
    reach = left + drafts - 1
    reach = min(reach, LONGEST - 1) if isinstance(left, int) else reach
    aux = bits, jnp.minimum(first, 0), begin
    return Mask(left=reach, right=0), MaskFunction(program_of_window(bits.shape), aux)


def program_of_window(shape: tuple[int, ...], *, split: bool = False) -> Program:
    """`program` with positions in the sequence, and a window. It reads the bits, of this shape, the
    first position that each draft sees of the rows before the drafts, counted from the first draft
    (int32[M, t]), and where the drafts begin (int32[M]); `split`: among queries, and another one
    among keys.
    """
    b, _, q, kv = range(4)
    operations: list[Operation] = []

    def add(name: str, *operands: Any, dtype: str = "int32", read: int | None = None) -> int:
        operations.append(Operation(name, operands, dtype, read=read))
        return 3 + len(operations)

    begin = add("read", b, read=2)
    row = add("sub", q, begin)
    key = add("sub", kv, add("read", b, read=3) if split else begin)
    words = [add("read", b, row, _number(n), read=0) for n in range(1, shape[2])]
    word = words[0]
    for n, next_word in enumerate(words[1:], 1):  # chosen, not read: a load a row, not a logit
        word = add("select_n", add("ge", key, _number(WORD * n), dtype="bool"), word, next_word)
    place = add("and", add("xor", key, _number(WORD - 1)), _number(WORD - 1))
    bit = add("lt", add("shift_left", word, place), _number(0), dtype="bool")  # as the sign
    near = add("ge", key, add("read", b, row, read=1), dtype="bool")
    before = add("lt", key, _number(0), dtype="bool")
    seen = add("or", before, bit, dtype="bool")
    result = add("and", seen, near, dtype="bool")
    each = (shape[:1], "int32")
    arrays = (shape, "int32"), (shape[:2], "int32"), *[each] * (1 + split)
    return Program(4, tuple(operations), result, arrays)


def _number(n: int) -> Constant:
    return Constant("int32", str(n))
