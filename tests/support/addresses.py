"""The proof of addresses in arrays past 2**31 words: for each file of kernels in which threads
load, store or copy, a test that evaluates its program there, or why there need not be one. All else
is copied by TMA, whose coordinates are numbers of 32 bits in each dimension, and no addresses.
"""

import ast
import functools
import pathlib
import re

KERNELS = pathlib.Path(__file__).parents[2] / "pallas_attn" / "kernels"
MOVES = re.compile(
    r"\bthread\.(load|store|copy|send|receive|prefetch|signal|wait_until|take|peek|clear)"
)

_HERE, _CODE = "kernels/test_addresses.py::test_", "guards/test_emitted_code.py::test_"
_APPEND = "kernels/append/test_append_kernel.py::test_addresses_past_two_to_the_31"
_RESULTS = f"{_CODE}results_past_two_to_the_31"
TABLES = "int32 tables, with an entry for each tile, sequence or row of q: fewer than 2**31"
PARTIALS = "partials of blocks, one for each tile that a block has begun"
BY_LAYOUT = f"rows by `Layout.number`, which counts in 64 bits: {_APPEND}"

# By file: the test, or the reason.
PROGRAMS = {
    "append/byte_rows": BY_LAYOUT,
    "append/change": f"new rows as in append/quantize: {BY_LAYOUT}",
    "append/copy": _APPEND,
    "append/keep": BY_LAYOUT,
    "append/plan": _APPEND,
    "append/quantize": BY_LAYOUT,
    "attention/cache_layout": _APPEND,
    "attention/claims": TABLES,
    "attention/listed_tiles": TABLES,
    "decode/box_copies": BY_LAYOUT,
    "decode/combine_splits": f"{_HERE}results_of_decode",
    "decode/loads": BY_LAYOUT,
    "decode/merge_over_gpus": (
        "2**31 words are refused: "
        "kernels/decode/test_merge_over_gpus.py::test_more_words_are_refused"
    ),
    "decode/packed": f"{_HERE}packed_rows_that_nothing_serves",
    "decode/scheduler": TABLES,
    "decode/thread_copies": BY_LAYOUT,
    "decode_listed/gradients_sm90": TABLES,
    "decode_mla/sm80": BY_LAYOUT,
    "flash_bwd/statistics": f"{_HERE}statistics_of_the_last_rows",
    "flash_bwd/turns": TABLES,
    "flash_fwd/fetch": f"{_HERE}pieces_that_are_fetched",
    "flash_fwd/float8_values": f"{_HERE}values_of_float8",
    "flash_fwd/segments": TABLES,
    "mma/gathered_rows": f"{_CODE}listed_rows_past_two_to_the_31",
    "mma/mma_2x2": _RESULTS,
    "mma/mma_sync": _RESULTS,
    "mma/packed_rows": f"{_CODE}packed_rows_past_two_to_the_31",
    "prefill/combine_partials": f"{_HERE}partials_of_splits",
    "prefill/float8_tiles": f"{_HERE}tiles_of_a_float8_cache",
    "prefill/merge_parts": PARTIALS,
    "prefill/packed_queries": TABLES,
    "prefill/shares": TABLES,
    "prefill/widened_sm90": f"{_HERE}a_widened_cache",
    "prefill/widening_producer": f"{_HERE}a_tile_that_is_widened_on_its_way",
    "quantize/blocks": f"{_HERE}rounding",
}


@functools.cache
def _text(file: str) -> str:
    return (KERNELS / f"{file}.py").read_text()


def _files(module: str) -> set[str]:
    """The files of a module of a Candidate; where a function makes it, all of its folder."""
    file = module.replace(".", "/")
    if (KERNELS / f"{file}.py").exists():
        return {file}
    folder = pathlib.PurePath(file).parent
    return {f"{folder}/{x.stem}" for x in (KERNELS / folder).glob("*.py")}


@functools.cache
def _imported(file: str) -> frozenset[str]:
    """Files of kernels that a file imports."""
    named = set()
    for node in ast.walk(ast.parse(_text(file))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "pallas_attn.kernels"
        ):
            place = "/".join(node.module.split(".")[2:])
            named |= {place, *(f"{place}/{x.name}" for x in node.names)}
    return frozenset(x for x in named if (KERNELS / f"{x}.py").exists())


def programs_of(module: str) -> set[str]:
    """Files with programs of single threads that read or write, of a Candidate's module and of all
    that it imports.
    """
    left, seen = _files(module), set[str]()
    while left:
        seen.add(file := left.pop())
        left |= _imported(file) - seen
    return seen & set(FILES)


# Files in lang/ define what programs are made of, and have none.
FILES = tuple(
    name
    for path in sorted(KERNELS.rglob("*.py"))
    if not (name := f"{path.parent.name}/{path.stem}").startswith("lang/")
    and MOVES.search(path.read_text())
)
