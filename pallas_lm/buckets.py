"""Buckets: prompts and caches are padded to few sizes, which few compiled programs serve."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def bucket(rows: int, least: int = 64) -> int:
    """The smallest bucket that holds so many rows: a power of two from `least` on, past 1,024 one
    of four sizes an octave, a quarter larger at most.
    """
    size = power_of_two(max(rows, least))
    if size <= 1024:
        return size
    part = size // 8
    return -(-rows // part) * part
