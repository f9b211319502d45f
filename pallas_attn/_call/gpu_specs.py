"""Facts of a GPU by the name of its generation alone ("sm90")."""

# Bytes of shared memory that one block may have, by the table "Technical Specifications per Compute
# Capability" of NVIDIA's CUDA programming guide: 163 KiB of 8.0 and 8.7, 227 of 9.0, 10.0, 10.3 and
# 11.0, 327 of 10.7, 99 of 8.6, 8.9 and 12.x. Whatever it does not name is taken for the smallest.
_SHARED_MEMORY = dict.fromkeys(("sm80", "sm87"), 166_912)
_SHARED_MEMORY |= dict.fromkeys(("sm90", "sm100", "sm103", "sm110"), 232_448)
_SHARED_MEMORY["sm107"] = 334_848
_LEAST = 101_376

HOPPER = "sm90"
# Generations from Volta on, by NVIDIA's table of compute capabilities.
GENERATIONS = ("sm70", "sm72", "sm75", "sm80", "sm86", "sm87", "sm88", "sm89", HOPPER, "sm100",
               "sm103", "sm107", "sm110", "sm120", "sm121")  # fmt: skip
_MULTIPROCESSORS = {"sm80": 108, "sm86": 84, "sm89": 128, HOPPER: 132, "sm100": 148, "sm103": 148}


def number(generation: str) -> int:
    """90 of "sm90": generations are in the order of their numbers."""
    return int(generation.removeprefix("sm"))


def shared_memory(generation: str | None) -> int:
    """Bytes that one block may have."""
    return _SHARED_MEMORY.get(generation or "", _LEAST)


def fits(nbytes: int, generation: str | None) -> bool:
    """Whether a block may have so many bytes of shared memory."""
    return nbytes <= shared_memory(generation)


def multiprocessors(generation: str | None) -> int:
    """Multiprocessors of a usual GPU of the generation, for numbers of blocks; Hopper's where it is
    not known.
    """
    return _MULTIPROCESSORS.get(generation or "", _MULTIPROCESSORS[HOPPER])
