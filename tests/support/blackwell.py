"""Cycles of the kernels for Blackwell on paper: the tables of docs/blackwell.md.

Instructions are counted in the machine code of the loops over tiles, and each is charged to its
unit at the rate of a data sheet. `python -m tests.support.blackwell` writes the tables anew.
"""

import dataclasses
import functools
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_attn as pa
from tests.support import aot, builds

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "blackwell.md"
BEGIN, END = "<!-- cycles:begin -->", "<!-- cycles:end -->"
TILE, ROWS = 128, 8192

# Rates of a multiprocessor, a cycle.
FLOP = 8192  # in matmuls, in 16 bits
BYTES = 128  # shared memory's, and those of tensor memory in each of the 4 sub-partitions
# Cycles of an instruction of a warp in a sub-partition, which has 32 lanes for float32, 4 for
# exponentials, and 16 for all else. FFMA2 and its like are two operations a lane.
EXPONENTIAL, PAIRED, SINGLE, OTHER = 8, 2, 1, 2
PROCESSORS, CLOCK = 148, 1.85e9
PEAK = PROCESSORS * CLOCK * FLOP / 1e12  # TFLOP/s

# Published by FlashAttention-4, head dim 128: forward full and backward full, TFLOP/s.
PUBLISHED = {"forward": 1702, "backward": 1383}
SHARE = PUBLISHED["forward"] / PEAK  # part of the busiest unit's rate that its forward reaches


@dataclasses.dataclass(frozen=True)
class Call:
    """A call whose loops are counted."""

    op: str  # "forward" or "backward"
    head_dim: int
    mask: str  # "full" or "causal"

    def __str__(self) -> str:
        return f"{self.op} {self.head_dim} {self.mask}"

    @property
    def tiles(self) -> int:
        """Tiles of scores that the loops of a block take in one turn."""
        return 2 if self.op == "forward" else 1

    @property
    def counted(self) -> float:
        """The share of the tiles that a count of FLOP has: half of a causal square, while blocks
        take whole tiles on the diagonal, and both q tiles of a forward's block all of its steps.
        """
        n = ROWS // TILE
        taken = {"forward": n * (n + 2) / 2, "backward": n * (n + 1) / 2}
        return 1.0 if self.mask == "full" else n * n / 2 / taken[self.op]


CALLS = tuple(
    Call(op, dim, mask)
    for op in ("forward", "backward")
    for dim in (64, 128)
    for mask in ("full", "causal")
)


# ---- loops of machine code -----------------------------------------------------------------------


def loops(sass: str, kernel: str) -> Iterator[list[str]]:
    """The instructions of each loop of a kernel, but for those that only wait."""
    sections = re.split(r"(?m)^\.text\.(\w+):[ \t]*$", sass)
    named = zip(sections[1::2], sections[2::2], strict=True)
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in next(text for name, text in named if name.startswith(kernel)).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(instruction[1])
    for end, instruction in enumerate(instructions):
        start = labels.get(_target(instruction), end + 1)
        body = instructions[start : end + 1]
        # Waits that failed at first lie behind the program's end, from where they jump back.
        if _works(body) and not any(_name(x) == "EXIT" for x in body):
            yield _unskipped(body, start, labels)


def _target(instruction: str) -> str:
    jump = re.search(r"\bBRA\b.*\((\.L_x_\d+)\)", instruction)
    return jump[1] if jump else ""


def _works(body: list[str]) -> bool:
    wanted = ("LDTM", "UTCHMMA", "UTMALDG")
    return any(_name(x).partition(".")[0] in wanted for x in body)


def _unskipped(body: list[str], start: int, labels: dict[str, int]) -> list[str]:
    """A loop without the parts that store tensor memory and that a jump skips: O is rescaled only
    where a maximum has risen by more than the threshold.
    """
    skipped: set[int] = set()
    for number, instruction in enumerate(body):
        end = labels.get(_target(instruction), start) - start
        part = {_name(x).partition(".")[0] for x in body[number + 1 : max(end, 0)]}
        if "STTM" in part and "SYNCS" not in part and end < len(body):
            skipped |= set(range(number + 1, end))
    return [x for number, x in enumerate(body) if number not in skipped]


def _name(instruction: str) -> str:
    """With its modifiers: LDTM.x32."""
    return re.sub(r"^@!?\w+\s+", "", instruction).split()[0]


# ---- cycles --------------------------------------------------------------------------------------


class Cycles(NamedTuple):
    """Cycles of each unit for one tile of 128 x 128 scores; `issue` is of the sub-partition that
    has the warp of matmuls too.
    """

    matmuls: float = 0
    exponentials: float = 0
    fma: float = 0
    other: float = 0
    issue: float = 0
    shared: float = 0
    tensor: float = 0
    chain: float = 0  # matmul, softmax, matmul: what waits for each other


NAMES = (
    *("matmuls", "exponentials", "FMA", "other", "issue"),
    *("shared memory", "tensor memory", "chain"),
)


def of_warp(body: list[str]) -> dict[str, float]:
    """Cycles of a sub-partition for a loop of one of its warps, and of shared memory."""
    units: Counter[str] = Counter(issue=len(body))
    for instruction in body:
        name = _name(instruction)
        base = name.partition(".")[0]
        if base == "MUFU":
            units["exponentials"] += EXPONENTIAL
        elif base in ("FFMA2", "FADD2", "FMUL2"):
            units["fma"] += PAIRED
        elif base in ("FFMA", "FADD", "FMUL"):
            units["fma"] += SINGLE
        elif base in ("LDTM", "STTM"):
            units["tensor"] += _tensor_memory_bytes(name) / BYTES
        elif base in ("LDS", "LDSM", "STS", "STSM"):
            units["shared"] += _shared_bytes(name) / BYTES
        elif re.match(r"FMNMX|FSETP|FSEL|SEL|F2FP|ISETP|IADD|IMAD|LOP3|LEA|SHF|VI|MOV|PRMT", name):
            units["other"] += OTHER
            units["maxima"] += OTHER * name.startswith("FMNMX")
    return units


def _tensor_memory_bytes(name: str) -> int:
    """x32: 32 columns of the 32 lanes of a warp. 16dp256bit.x4: 4 times 256 bits of 16 lanes."""
    times = int(re.search(r"\.x(\d+)", name)[1])
    shape = re.search(r"16dp(\d+)bit", name)
    return times * (16 * int(shape[1]) // 8 if shape else 32 * 4)


def _shared_bytes(name: str) -> int:
    """Bytes of a warp. Loads are of statistics, of which many threads read the same."""
    if name.startswith(("STSM", "LDSM")):
        return 128 * int((re.search(r"\.M88\.(\d)", name) or ["", "1"])[1])
    width = re.search(r"\.(64|128)\b", name)
    return 32 * int(width[1]) // 8 if width and name.startswith("STS") else BYTES


def of_matmuls(body: list[str], head_dim: int) -> tuple[float, float]:
    """Cycles of the tensor core, and of shared memory for its operands, of the matmuls of a loop:
    each is of 128 x 128 x head dim, its instructions of depth 16, and the first of a matmul alone
    may not add.
    """
    matmuls: list[list[str]] = []
    for instruction in body:
        if _name(instruction) == "UTCHMMA":
            if not instruction.endswith(", UPT"):
                matmuls.append([])
            matmuls[-1].append(instruction)
    cycles = moved = 0.0
    for parts in matmuls:
        columns = TILE * head_dim // (16 * len(parts))
        cycles += len(parts) * 2 * TILE * columns * 16 / FLOP
        for part in parts:
            left, right = part.split(maxsplit=1)[1].split(", ")[:2]
            moved += 32 * (TILE * left.startswith("gdesc") + columns * right.startswith("gdesc"))
    return cycles, moved / BYTES


def of_copies(call: Call) -> float:
    """Cycles of shared memory for the copies of TMA in one turn of the loops: two operands; and
    dQ, in float32, on its way out.
    """
    loaded, added = 2 * TILE * call.head_dim * 2, TILE * call.head_dim * 4
    return (loaded + added * (call.op == "backward")) / BYTES


def count(call: Call, sass: str) -> Cycles:
    """Cycles of a tile, from the loops of its kernel."""
    name = "fwd" if call.op == "forward" else "bwd"
    total: Counter[str] = Counter(shared=of_copies(call))
    roles = Counter()
    for body in loops(sass, f"flash_{name}_sm100"):
        names = {_name(x).partition(".")[0] for x in body}
        units = of_warp(body)
        if "UTCHMMA" in names:  # one warp
            roles["matmuls"] += 1
            cycles, operands = of_matmuls(body, call.head_dim)
            total.update(units | {"matmuls": cycles, "shared": operands})
        elif "UTMALDG" in names:  # one warp, in another sub-partition
            roles["loads"] += 1
        else:  # four warps, one in each sub-partition
            roles["softmax" if "MUFU" in names else "rest"] += 1
            total.update(units | {"shared": 4 * units["shared"]})
            if "MUFU" in names:  # its loads of S, maxima and exponentials
                loads = (x for x in map(_name, body) if x.startswith("LDTM"))
                share = 1 if call.op == "forward" else 2  # half of them are of dP
                total["phase"] += sum(map(_tensor_memory_bytes, loads)) / BYTES / share
                total["phase"] += units["maxima"] + units["exponentials"]
    if roles != {"matmuls": 1, "softmax": 2, "rest": 1, "loads": 1}:
        raise ValueError(f"sass of {call}: loops of each role once, softmax twice; got {roles}")
    # Two q tiles take turns in the forward; both warpgroups of the backward have half a tile.
    chain = 2 * 2 * TILE * TILE * call.head_dim / FLOP + total["phase"] / call.tiles
    per_tile = {unit: total[unit] / call.tiles for unit in Cycles._fields}
    return Cycles(**per_tile | {"chain": chain / call.tiles})


def tflops(call: Call, cycles: Cycles, share: float) -> float:
    """The rate of a GPU whose busiest unit, or the chain, is busy for a share of the time."""
    return share * PEAK * cycles.matmuls / max(cycles) * call.counted


# ---- the page ------------------------------------------------------------------------------------


@functools.cache
def counted(call: Call) -> Cycles:
    """Compiles the call for a B200."""
    shape = jax.ShapeDtypeStruct((1, ROWS, 16, call.head_dim), jnp.bfloat16)
    how = {"mask": {"full": pa.FULL, "causal": pa.CAUSAL}[call.mask], "implementation": "sm100"}
    f = functools.partial(getattr(builds, f"_{call.op}"), how)
    report = aot.compile_for(f, dict.fromkeys("qkv", shape), target="b200", sass=True)
    return count(call, report.sass)


def row(call: Call, cycles: Cycles) -> str:
    published: Any = "-"
    if (call.head_dim, call.mask) == (128, "full"):
        published = PUBLISHED[call.op]
    rates = [tflops(call, cycles, share) for share in (1, SHARE)]
    cells = [str(call), *map(round, cycles), *map(round, rates), published]
    return f"| {' | '.join(map(str, cells))} |"


def table() -> str:
    names = f"call | {' | '.join(NAMES)} | bound | predicted | FlashAttention-4"
    head = [f"| {names} |", "|" + "---|" * (names.count("|") + 1)]
    return "\n".join([*head, *(row(call, counted(call)) for call in CALLS)])


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
