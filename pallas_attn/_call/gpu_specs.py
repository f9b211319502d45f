"""Facts of a GPU by the name of its generation alone ("sm90")."""

# Bytes of shared memory that one block may have; elsewhere `_LEAST`, which the smaller Amperes, Ada
# and the smaller Blackwells have.
_SHARED_MEMORY = {"sm80": 166_912, "sm87": 166_912, "sm90": 232_448}
_SHARED_MEMORY |= {"sm100": 232_448, "sm103": 232_448}
_LEAST = 101_376

HOPPER = "sm90"
_MULTIPROCESSORS = {"sm80": 108, "sm86": 84, "sm89": 128, HOPPER: 132, "sm100": 148}


def number(generation: str) -> int:
    """90 of "sm90": generations are in the order of their numbers."""
    return int(generation.removeprefix("sm"))


def shared_memory(generation: str | None) -> int:
    """Bytes that one block may have."""
    return _SHARED_MEMORY.get(generation or "", _LEAST)


def multiprocessors(generation: str | None) -> int:
    """Multiprocessors of a usual GPU of the generation, or of Hopper's, for numbers of blocks."""
    return _MULTIPROCESSORS.get(generation or "", _MULTIPROCESSORS[HOPPER])
