"""Problems of Gemma 4's global layers over caches: 32 query heads, 4 kv heads, head dim 512."""

from tests.support.problems.case import DecodeCase

_CAPACITY = 8192
_STACKED, _PAGED = ("stacked", None), ("paged", 64)


def decode() -> list[DecodeCase]:
    """A token of each sequence, and four (drafts)."""
    return [
        _case(f"decode_{kind}_b32_s8192_n32k4_h512{tail}", kind, page, 32, q_len=rows)
        for kind, page in (("per_sequence", None), _STACKED, ("paged", 16))
        for tail, rows in (("", 1), ("_t4", 4))
    ]


def prefill() -> list[DecodeCase]:
    """Chunks of prompts, alone and, packed, beside single tokens."""
    mixture, one_each = (*(1,) * 8, 2048), (1,) * 8
    return [
        case
        for kind, page in (_STACKED, _PAGED)
        for name in (f"{kind}{page or ''}",)
        for case in (
            _case(f"prefill_{name}_m8_t1024_n32k4_h512", kind, page, 8, q_len=1024),
            _case(f"mixed_{name}_n32k4_h512", kind, page, 9, rows=mixture),
            _case(f"mixed_{name}_tokens_alone_n32k4_h512", kind, page, 8, rows=one_each),
            _case(f"mixed_{name}_chunk_alone_n32k4_h512", kind, page, 1, q_len=2048),
        )
    ]


def _case(
    name: str,
    kind: str,
    page: int | None,
    sequences: int,
    q_len: int = 1,
    rows: tuple[int, ...] | None = None,
) -> DecodeCase:
    """Sequences that fill their caches."""
    return DecodeCase(
        name,
        (_CAPACITY,) * sequences,
        *(32, 4, 512, 512, _CAPACITY),
        q_len=q_len,
        rows=rows,
        kind=kind,
        page_size=page,
        labels=("gemma4",),
    )
