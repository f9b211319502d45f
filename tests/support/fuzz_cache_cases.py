"""Random programs over the three caches, as `fuzz_caches` runs them: what is drawn, and how it is
made simpler.
"""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from pallas_attn import PagedCache, PerSequenceCache, StackedCache
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.support.problems import case as _case
from tests.support.problems import cases

ADDED = ("alibi", "linear", "table", "keys", "sequences")
NUMBERS = 2**22  # most elements of a cache
SCORES = 2**20


@dataclasses.dataclass(frozen=True)
class Case(_case.DecodeCase):
    """`lengths` is what sequences hold at first. `spread`: separate capacities differ by up to so
    many rows; `pool`: the share of pages that there is, of what full sequences would take.
    `packed`: queries are packed, of each sequence up to q_len; `drafts_most`: packed trees have so
    many. `keeps`: some rows are kept after each step, by paths of so many. `shared`: levels of
    prefixes that are read once. `prefix`: what the groups of a prefix hold at first, in a cache of
    its own kind, pages and dtype, whose capacity without pages is a multiple of `prefix_unit`.
    `added`: what a score function adds, one of `ADDED`.
    """

    layers: int | None = None
    spread: int = 0
    pool: float = 1.0
    packed: bool = False
    drafts_most: int | None = None
    keeps: int | None = None
    shared: int = 0
    prefix: tuple[int, ...] | None = None
    prefix_kind: str = "stacked"
    prefix_page: int | None = None
    prefix_dtype: str | None = None
    prefix_unit: int = 8
    added: str | None = None

    @property
    def before(self) -> "Case":
        """The cache of the prefix."""
        assert self.prefix is not None
        unit = self.prefix_page or self.prefix_unit
        return dataclasses.replace(
            self,
            lengths=self.prefix,
            capacity=-(-(max(self.prefix) + 3) // unit) * unit,
            kind=self.prefix_kind,
            page_size=self.prefix_page,
            cache_dtype=self.prefix_dtype,
            byte_rows=False,
            q_len=1,
            mask=FULL,
            sinks=False,
            keeps=None,
            prefix=None,
        )

    def create(self) -> Any:
        sizes = {"head_dim": self.head_dim, "v_head_dim": self.v_head_dim, "layers": self.layers}
        sizes |= {"kv_heads": self.kv_heads, "dtype": self.cache_dtype or self.dtype}
        sizes |= {"shared_kv": self.shared_kv} | ({"scales": 128} if self.byte_rows else {})
        if self.kind == "per_sequence":
            each = [self.capacity + m % (self.spread + 1) for m in range(self.sequences)]
            return PerSequenceCache.create(each, **sizes)
        if self.kind == "stacked":
            return StackedCache.create(self.sequences, self.capacity, **sizes)
        assert self.page_size is not None
        pages = max(1, int(self.pool * self.sequences * -(-self.capacity // self.page_size)))
        return PagedCache.create(
            self.sequences, pages, self.page_size, capacity=self.capacity, **sizes
        )


def draw(seed: int, tiny: bool) -> Case:
    drawn, pick = cases.draw_decode(seed), random.Random(f"fuzz caches {seed}")
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn)} | {"alibi": False}
    more = pick.choice((1, 1, 2, 3, 8, 16, 33, 70, 130))
    if not drawn.shared_kv:
        odd = pick.choice((4, 20, 36, 80, 100))
        if (chance := pick.random()) < 0.1:
            fields |= {"head_dim": odd, "v_head_dim": odd}
        elif chance > 0.93 and not tiny:
            wide = pick.choice((264, 320, 512, 512))
            fields |= {"head_dim": wide, "v_head_dim": pick.choice((64, wide, 512))}
        if pick.random() < 0.2:
            fields |= {"dtype": "float32", "precision": pick.choice((None, "highest"))}
    case = Case(
        **fields | {"q_len": pick.choice((drawn.q_len, more))},
        layers=pick.choice((None, None, 1, 2, 3)),
        spread=pick.choice((0, 0, 3, 8)),
        pool=pick.choice((1.0, 1.0, 0.8, 0.5)),
    )
    if case.shared_kv and not tiny and random.Random(f"bytes {seed}").random() < 0.5:
        case = dataclasses.replace(case, cache_dtype="float8_e4m3fn", byte_rows=True)
    if pick.random() < 0.3:
        case = dataclasses.replace(case, tree=True, mask=CAUSAL)
    case = dataclasses.replace(case, packed=pick.random() < 0.3)
    case = dataclasses.replace(
        case,
        keeps=pick.choice((None, None, None, 0, 1, 3, 8, 40)),
        shared=pick.choice((0, 0, 1, 2, 3)) if case.kind == "paged" else 0,
        drafts_most=pick.choice((None, 1, 4)) if case.packed and case.tree else None,
    )
    if case.keeps is not None:
        case = dataclasses.replace(case, q_len=max(case.q_len, pick.choice((3, 5, 9))))
    if case.tree and pick.random() < 0.4:
        case = dataclasses.replace(case, mask=sliding_window(pick.choice((1, 2, 5, 40))))
    if pick.random() < 0.2:
        case = _with_prefix(case, pick, tiny)
    of_lists = random.Random(f"lists {seed}")
    if not (case.tree or case.shared or case.prefix) and of_lists.random() < 0.4:
        case = dataclasses.replace(case, listed=of_lists.choice((1, 7, 64, 65, 200)))
    of_scores = random.Random(f"scores {seed}")
    if not (case.tree or case.prefix) and of_scores.random() < 0.4:
        case = dataclasses.replace(case, added=of_scores.choice(ADDED))
    if tiny:
        small = {"capacity": 48, "q_len": min(case.q_len, 9), "layers": case.layers and 2}
        dims = (min(case.head_dim, 64), min(case.v_head_dim, 64))
        small |= {"head_dim": 192, "v_head_dim": 128} if case.shared_kv else {}
        small |= {} if case.shared_kv else {"head_dim": dims[0], "v_head_dim": dims[1]}
        case = resized(dataclasses.replace(case, **small), sequences=3, kv_heads=1)
    while case.sequences > 1 and (_numbers(case) > NUMBERS or _scores(case) > SCORES):
        case = resized(case, sequences=case.sequences // 2)
    return resized(case, kv_heads=1) if _numbers(case) > NUMBERS else case


def _with_prefix(case: Case, pick: random.Random, tiny: bool) -> Case:
    """With rows of another cache before those of each sequence, which not all options go with."""
    kind, page = pick.choice((*cases._KINDS, ("paged", 8), ("paged", 24)))
    most = pick.choice((1, 16, 40) if tiny else (1, 16, 65, 130, 300))
    near = (0, 1, 15, 16, 17, 63, 64, 65, most)
    rows = [
        min(pick.choice((*near, pick.randint(0, most))), most) for _ in range(pick.randint(1, 5))
    ]
    if not (case.mask.left is None and (case.mask.right is None or case.mask.right >= 0)):
        case = dataclasses.replace(case, mask=pick.choice((CAUSAL, FULL, Mask(None, 2))))
    return dataclasses.replace(
        case,
        packed=False,
        tree=False,
        batch_invariant=False,
        shared=0,
        drafts_most=None,
        prefix=tuple(rows),
        prefix_kind=kind,
        prefix_page=page,
        prefix_dtype=pick.choice((case.cache_dtype, None, "float8_e4m3fn", "float8_e5m2", "int8")),
        prefix_unit=pick.choice((1, 8, 8)),
    )


def _numbers(case: Case) -> int:
    of_row = (case.layers or 1) * case.kv_heads * (case.head_dim + case.v_head_dim)
    return case.sequences * case.capacity * of_row


def _scores(case: Case) -> int:
    keys = case.capacity + max(case.prefix or (0,))
    return case.sequences * case.q_heads * case.q_len * keys


def resized(case: Case, **sizes: int) -> Case:
    """At other sizes, none larger than its own; query heads go with their kv heads."""
    group = case.q_heads // case.kv_heads
    kv_heads = min(sizes.get("kv_heads", case.kv_heads), case.kv_heads)
    lengths = case.lengths[: sizes.get("sequences", case.sequences)]
    capacity = min(sizes.get("capacity", case.capacity), case.capacity)
    return dataclasses.replace(
        case,
        lengths=tuple(min(n, capacity) for n in lengths),
        capacity=capacity,
        kv_heads=kv_heads,
        q_heads=group * kv_heads,
        q_len=sizes.get("q_len", case.q_len),
    )


def simpler(case: Case) -> Iterator[dict[str, Any]]:
    plain = {"softcap": None, "sinks": False, "layers": None, "spread": 0, "pool": 1.0}
    plain |= {"packed": False, "drafts_most": None, "keeps": None, "shared": 0, "prefix": None}
    plain |= {"scale": None, "mask": CAUSAL, "batch_invariant": False}
    plain |= {"added": None, "precision": None, "dtype": "bfloat16", "q_len": 1, "tree": False}
    if not case.shared_kv:
        plain |= {"head_dim": 64, "v_head_dim": 64}
    stored = {"cache_dtype": None, "byte_rows": False}
    yield from (stored, *({name: value} for name, value in plain.items()))
    yield {"kind": "stacked", "page_size": None}
    if case.prefix is not None:
        yield {"prefix": case.prefix[:1]}
        yield {"prefix_kind": "stacked", "prefix_page": None}
        yield {"prefix_dtype": None, "prefix_unit": 8}
    for sizes in ({"sequences": max(case.sequences // 2, 1)}, {"kv_heads": 1}):
        yield vars(resized(case, **sizes))
