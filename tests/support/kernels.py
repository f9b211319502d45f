"""The one list of kernels: `KERNELS` has a row for each kernel of dispatch, with calls on hard data
(tests/support/hard_data.py) and at boundaries (tests/support/boundaries.py), by the plan that a
Config makes, or the name of the test that does instead. tests/kernels/test_every_kernel.py runs
them, in the interpreter and on a GPU; who adds a kernel adds its row.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import CAUSAL, FULL, sliding_window
from pallas_attn._call import dispatch, gpu_specs
from pallas_attn._call.kernel import Kernel
from pallas_attn.kernels.decode import sm80 as decode_sm80
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.decode_mla import sm80 as mla_sm80
from pallas_attn.kernels.decode_mla import sm90 as mla_sm90
from pallas_attn.kernels.flash_bwd import sm80 as bwd_sm80
from pallas_attn.kernels.flash_bwd import sm90 as bwd_sm90
from pallas_attn.kernels.flash_bwd import sm90_short, sm90_two_kernels, sm90_window
from pallas_attn.kernels.flash_bwd import sm90_wide as bwd_wide
from pallas_attn.kernels.flash_bwd import sm100 as bwd_sm100
from pallas_attn.kernels.flash_fwd import sm80 as fwd_sm80
from pallas_attn.kernels.flash_fwd import sm90 as fwd_sm90
from pallas_attn.kernels.flash_fwd import sm90_one_tile
from pallas_attn.kernels.flash_fwd import sm90_wide as fwd_wide
from pallas_attn.kernels.flash_fwd import sm100 as fwd_sm100
from pallas_attn.kernels.prefill import contiguous_sm90, narrow_sm90, widened_sm90
from pallas_attn.kernels.prefill import sm90 as prefill_sm90
from tests.kernels.decode_listed import test_decode_listed, test_listed_gradients
from tests.kernels.decode_mla import test_decode_mla
from tests.kernels.flash_bwd import test_flash_bwd, test_heads, test_one_key_tile
from tests.kernels.flash_bwd import test_group_window as test_bwd_group_window
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_fwd import test_flash_fwd, test_group_window, test_wide
from tests.kernels.flash_jvp import test_flash_jvp
from tests.kernels.prefill import test_prefill_gathered
from tests.support import boundaries, decode_cases, hard_data
from tests.support.fuzz_derivatives import Tangents
from tests.support.problems.case import AttentionCase

Calls = dict[str, tuple[Any, Any]]  # (case, Config), by the plan that it makes
FUZZED = {"pairs": "guards/test_fuzz.py::test_fuzz"}  # by a kind of problem of its own


class Row(NamedTuple):
    """`check(case, config)`: the results are right, with NaN past every length."""

    module: str  # a Candidate's
    check: Callable[[Any, Any], Any] | None
    hard: Calls
    ends: Calls
    excused: dict[str, str] = {}  # property -> the test that has it instead

    @property
    def lacks(self) -> set[str]:
        """Properties that no call has. Where keys are split over blocks, one block has to take all
        tiles of hard data, too: with a tile each, no block would rescale what it has.
        """
        blocks = [_grid(config) for _, config in self.hard.values()]
        split = self.module.startswith(("decode", "prefill")) and "gathered" not in self.module
        case, config = next(iter(self.hard.values()), (None, None))
        has = {"hard": self.hard, "ends": self.ends, "one_block": 1 in blocks or not split}
        drawn = isinstance(case, AttentionCase | decode_cases.Case)
        drawn &= not isinstance(case, Tangents)
        has["pairs"] = drawn and not isinstance(config, tuple)  # see tests/support/pairs.py
        return {name for name, calls in has.items() if not calls}

    @property
    def candidate(self) -> dispatch.Candidate:
        rows = itertools.chain(*dispatch.TABLES.values())
        return next(x for x in rows if getattr(x, "module", None) == self.module)

    @property
    def kernel(self) -> Kernel:
        return self.candidate.kernel

    def runs_on(self, gpu: str | None) -> bool:
        """Whether this GPU runs the kernel; True without a GPU."""
        first, last = self.candidate.generations
        return gpu is None or first <= gpu_specs.number(gpu) <= last


def _grid(config: Any) -> int | None:
    """The number of blocks that a Config asks for."""
    if isinstance(config, dict):
        return config.get("grid")
    inner = getattr(config, "prefill", config)
    return getattr(inner, "grid", None)


def problem_of(row: Row, case: Any) -> Any:
    if not isinstance(case, AttentionCase):
        return case.problem
    of = test_flash_bwd if "bwd" in row.module else test_flash_fwd
    return of.problem_of(case)


# ---- calls of attention --------------------------------------------------------------------------

LENGTHS = (200, 129, 128, 127, 192)  # numbers of keys: kv tiles have 32, 64 or 128


@dataclasses.dataclass(frozen=True)
class Hard(AttentionCase):
    """A call of `flash_attention` with hard data."""

    def arrays(self, seed=0, *, poison=False):
        arrays = super().arrays(seed, poison=poison)
        if isinstance(arrays["q"], jax.core.Tracer):  # only shapes are wanted
            return arrays
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        q, k = hard_data.hardened(*(np.asarray(arrays[x]) for x in "qk"), scale, 1)
        return arrays | {"q": jnp.asarray(q), "k": jnp.asarray(k)}


@dataclasses.dataclass(frozen=True)
class Endless(AttentionCase):
    """A call of `flash_attention` with a sink of inf, and one of -inf where there are many."""

    def arrays(self, seed=0, *, poison=False):
        arrays = super().arrays(seed, poison=poison)
        if isinstance(arrays["q"], jax.core.Tracer):
            return arrays
        return arrays | {"sinks": jnp.asarray(hard_data.sinks_without_end(arrays["sinks"]))}


@dataclasses.dataclass(frozen=True)
class AtEnds(AttentionCase):
    """Its segment ids are at the ends of int32."""

    def arrays(self, seed=0, *, poison=False):
        arrays = super().arrays(seed, poison=poison)
        if "segment_ids" in arrays and not isinstance(arrays["q"], jax.core.Tracer):
            ends = np.array(boundaries.ENDS, np.int32)
            both = (ends[np.asarray(ids) % len(ends)] for ids in arrays["segment_ids"])
            arrays["segment_ids"] = tuple(map(jnp.asarray, both))
        return arrays


def remade(kind: type, case: Any, /, **changes: Any) -> Any:
    """A case as one of another class."""
    known = {field.name for field in dataclasses.fields(kind)}
    fields = {x.name: getattr(case, x.name) for x in dataclasses.fields(case) if x.name in known}
    return kind(**(fields | changes))


def hard(**fields: Any) -> Hard:
    sizes = {"batch": hard_data.NUMBER, "q_len": 70, "kv_len": 200, "q_heads": 2, "kv_heads": 1}
    sizes |= {"head_dim": 64, "v_head_dim": 64, "mask": CAUSAL, "q_offset": 130}
    return Hard("hard", **(sizes | {"kv_lengths": LENGTHS, "magnitude": 0.5} | fields))


def at_ends(q_len: int, kv_len: int, **fields: Any) -> AtEnds:
    some = slice(0, None, 2)  # every other length
    sizes = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "v_head_dim": 64, "mask": CAUSAL}
    sizes |= {"batch": 4, "q_offset": kv_len - q_len}
    sizes |= {"kv_lengths": boundaries.lengths(kv_len)[some]}
    sizes |= {"q_lengths": boundaries.lengths(q_len)[some][::-1]}
    return AtEnds("boundaries", q_len=q_len, kv_len=kv_len, **(sizes | fields))


WHOLE, CUT = at_ends(64, boundaries.SIZES[0]), at_ends(65, boundaries.SIZES[1])
IDS = at_ends(*[boundaries.SIZES[1]] * 2, batch=1, kv_lengths=(193,), q_lengths=(199,),
              segments=(70, 58, 72), mask=FULL)  # fmt: skip


def at(config: Any) -> Calls:
    return {"whole_tiles": (WHOLE, config), "cut_tiles": (CUT, config), "ids": (IDS, config)}


def named(prefix: str, calls: Calls) -> Calls:
    return {f"{prefix}_{name}": call for name, call in calls.items()}


def forward(case: AttentionCase, config: Any) -> Any:
    problem = test_flash_fwd.problem_of(case)
    return test_flash_fwd.check(case, config or fwd_sm90.Config.default(problem))


def backward(case: AttentionCase, config: Any) -> Any:
    """Past a length gradients are 0, exactly. Probabilities of a head with a sink of inf are 0,
    too; the sink has the gradient of lse.
    """
    got = test_flash_bwd.check(case, config)
    for x, lengths in ((got.q, case.q_lengths), (got.k, case.kv_lengths), (got.v, case.kv_lengths)):
        for rows, length in zip(np.asarray(x, np.float32), lengths or (), strict=False):
            assert not rows[length:].any()
    if isinstance(case, Endless):
        assert not np.asarray(got.q, np.float32)[:, :, 0].any()
        assert np.asarray(got.sinks)[0] != 0
    return got


WIDE = {"head_dim": 264, "v_head_dim": 264, "q_heads": 1, "scale": 0.125}
OF_WIDE = {"head_dim": 264, "v_head_dim": 264, "q_heads": 1}
PAIR = {"q_heads": 2, "kv_heads": 2}
LENGTHS_OF_Q = {"q_lengths": (70, 65, 64, 63, 1)}
FEW_ROWS = dataclasses.replace(CUT, q_len=7, q_lengths=(7, 1, 0, 7), q_offset=193)
FUSED, PORTABLE = bwd_sm90.Config(grid=3), bwd_sm80.Config(warp_rows=2)
TWO_KERNELS = sm90_two_kernels.Config(grid=3)
APART = bwd_sm80.Config(block_q=32, dq_block_kv=32)
FORWARD = fwd_sm90.Config(warpgroups=2, block_kv=64, stages=2, grid=3)
SPLIT = prefill_sm90.Config(2, block_kv=64, grid=3, splits=3)
NARROW = prefill_sm90.Config(2, block_kv=64, grid=1)
ONE_CONSUMER = prefill_sm90.Config(1, block_kv=64, grid=3, splits=2)


def with_sinks(call: tuple[AttentionCase, Any]) -> tuple[AttentionCase, Any]:
    return remade(Endless, call[0], sinks=True), call[1]


def windows(test: Any) -> tuple[Calls, Calls]:
    """Short windows, which take no lengths: rows on both sides of a tile's edge."""
    case, config = test.CASES["window128"]
    rising = remade(Hard, case, q_len=72, kv_len=72, magnitude=0.5, batch=2, sinks=False)
    calls = {"window": (rising, config), "sinks": with_sinks((case, config))}
    ends = {f"rows{n}": (dataclasses.replace(case, q_len=n, kv_len=n), config) for n in (64, 72)}
    return calls, ends


def short_sequences(case: AttentionCase, config: Any) -> tuple[Calls, Calls]:
    """Plain calls without lengths: rows and keys on both sides of a tile's edge."""
    rising = remade(Hard, case, magnitude=0.5, batch=2)
    calls = {"plain": (rising, config), "sinks": (remade(Endless, case, sinks=True), config)}
    ends = {
        f"rows{q}_{kv}": (dataclasses.replace(case, q_len=q, kv_len=kv), config)
        for q, kv in ((64, 65), (65, 64), (1, 63))
    }
    return calls, ends


def windows_of_a_head() -> tuple[Calls, Calls]:
    """Rows on both sides of a tile's edge."""
    case, config = test_flash_bwd.windowed(64, 135, batch=1, **PAIR), sm90_window.Config()
    rising = remade(Hard, case, magnitude=0.5, batch=2)
    calls = {"plain": (rising, config), "sinks": with_sinks((case, config))}
    rows = {n: test_flash_bwd.windowed(65, n, batch=1, **PAIR) for n in (127, 128, 129)}
    return calls, {f"rows{n}": (x, config) for n, x in rows.items()}


def tangents(module: str) -> Row:
    """The bias of the hard call rises from key to key."""
    check = lambda case, _: test_flash_jvp.check(case, module)  # noqa: E731
    sizes = {"q": (4, 65, 2, 32), "kv": (130, 1), "mask": CAUSAL, "q_offset": 65}
    lengths = {"q_lengths": (0, 1, 64, 65), "kv_lengths": (130, 129, 64, 63)}
    ends = test_flash_jvp.case(**sizes, **lengths)
    calls = {"ramp": (test_flash_jvp.CASES["ramp"], None)}, {"lengths": (ends, None)}
    return Row(f"flash_jvp.{module}", check, *calls, FUZZED)


# ---- calls over caches ---------------------------------------------------------------------------


class HardRows:
    """Cases over caches with hard data."""

    def inputs(self, seed=0, fill=None):
        inputs = super().inputs(seed, fill)
        q, k = (np.asarray(x) for x in (inputs.q, inputs.k_cache))
        q, k = hard_data.hardened(q, k, self.head_dim**-0.5, 2)
        return inputs._replace(q=jnp.asarray(q), k_cache=jnp.asarray(k))


class MissingPages:
    """Cases over pages of which some are missing: past the length, where they are not needed; in
    the middle; at the end; and several that a window hides. All others hold numbers, so NaN in the
    results is what the kernel has written.
    """

    def inputs(self, seed=0, fill=None):
        del fill
        inputs = super().inputs(seed)
        table = np.array(inputs.page_table)
        for m, row, holes in ((2, 64, 2), (3, 16, 1), (4, 64, 1), (5, 16, 3)):
            slots = slice(row // self.page_size, row // self.page_size + holes)
            table[m, slots] = boundaries.ENDS[:holes] if m != 4 else self.pages
        return inputs._replace(page_table=jnp.asarray(table))


class HardPages:
    """Cases over pages that others share, and pages that are missing where they are not needed."""

    def inputs(self, seed=0, fill=None):
        inputs = super().inputs(seed, fill)
        if self.kind != "paged":
            return inputs
        table = np.asarray(inputs.page_table)
        table = boundaries.with_hard_pages(table, self.page_size, self.lengths)
        return inputs._replace(page_table=jnp.asarray(table))


@dataclasses.dataclass(frozen=True)
class HardDecode(HardRows, decode_cases.Case):
    lengths: tuple[int, ...] = LENGTHS


@dataclasses.dataclass(frozen=True)
class HardLatent(HardRows, test_decode_mla.Case):
    lengths: tuple[int, ...] = LENGTHS


@dataclasses.dataclass(frozen=True)
class HardListed(HardRows, test_decode_listed.Case):
    lengths: tuple[int, ...] = LENGTHS


@dataclasses.dataclass(frozen=True)
class Decode(HardPages, decode_cases.Case):
    lengths: tuple[int, ...] = boundaries.lengths(boundaries.CAPACITY)
    capacity: int = boundaries.CAPACITY


@dataclasses.dataclass(frozen=True)
class Latent(HardPages, test_decode_mla.Case):
    lengths: tuple[int, ...] = boundaries.lengths(boundaries.CAPACITY)
    capacity: int = boundaries.CAPACITY


@dataclasses.dataclass(frozen=True)
class DecodeOfMissingPages(MissingPages, decode_cases.Case):
    pass


@dataclasses.dataclass(frozen=True)
class LatentOfMissingPages(MissingPages, test_decode_mla.Case):
    pass


@dataclasses.dataclass(frozen=True)
class Quantized(decode_cases.Quantized, Decode):
    lengths: tuple[int, ...] = boundaries.lengths(boundaries.CAPACITY)
    capacity: int = boundaries.CAPACITY


MANY_ROWS = {"q_len": 20, "q_heads": 3, "kv_heads": 1}
LONG = {"lengths": (64 * boundaries.PARTS, 0, 64 * boundaries.PARTS - 1), "capacity": 640}


TWO = {"q_heads": 2, "kv_heads": 1}
LATENT = {"latent": True, "kv_heads": 1, "head_dim": 192, "v_head_dim": 128}


def caches(case: decode_cases.Case, config: Any) -> Calls:
    """Lengths and pages."""
    kinds = ("paged", "stacked")
    calls = {kind: (dataclasses.replace(case, kind=kind), config) for kind in kinds}
    changes = {"kind": "paged", "mask": sliding_window(100)}
    changes["lengths"] = (*case.lengths[:-1], case.capacity + 1)
    kind = LatentOfMissingPages if isinstance(case, Latent) else DecodeOfMissingPages
    return calls | {"missing": (remade(kind, case, **changes), config)}


def quantized(config: Any) -> Calls:
    """Rows with scales: each kind of cache, and each dtype."""
    window = {"q_len": 4, "mask": sliding_window(20), "layers": 2}
    return {
        "quantized": (Quantized("stacked"), config),
        "quantized_pages": (Quantized("paged", stored="float8_e4m3fn", page_size=64), config),
        "quantized_window": (Quantized("per_sequence", stored="float8_e5m2", **window), config),
    }


def gathered(module: str, **sizes: Any) -> Row:
    """Rows that XLA copies for a forward."""
    kernel, gpu = test_prefill_gathered.KERNELS[module], module.rpartition("_")[2]
    check = lambda case, _: test_prefill_gathered.agree(case, kernel, gpu)  # noqa: E731
    hard = HardDecode(q_len=9, **sizes)
    ends = caches(Decode(q_len=9, page_size=8, **sizes), None)
    ends.pop("stacked")  # the hard call has that kind
    return Row(f"prefill.{module}", check, {"plain": (hard, None)}, ends)


def listed(module: str, **fields: Any) -> Row:
    check = lambda case, config: test_decode_listed.check(case, module, **config)  # noqa: E731
    config = {"stages": 2, "grid": 3} if module != "sm90" else {"grid": 3}
    ends = test_decode_listed.Case("paged", (0, 1, 64, 208), listed=65, sinks=True, **fields)
    return Row(
        f"decode_listed.{module}",
        check,
        {"lists": (HardListed(listed=130, **fields), config | {"grid": 1})},
        {"rows": (ends, config), "lists_of_1": (dataclasses.replace(ends, listed=1), config)},
    )


def elsewhere(module: str, hard: str, ends: str | None = None) -> Row:
    """The row of a kernel whose hard data and boundaries are tested elsewhere."""
    row, tests = Row(module, None, {}, {}), {"ends": ends or hard} | FUZZED
    return row._replace(excused={name: tests.get(name, hard) for name in row.lacks})


def lists_of(entries: int) -> tuple[Any, Any]:
    return test_listed_gradients.Case(3, 4, 90, entries), {"grid": 1}


def endless(case: AttentionCase) -> AttentionCase:
    return with_sinks((case, None))[0]


LARGE = test_wide.wide("sinks_empty_rows", 128)
SHORT = sized(49, 70, 32, batch=1, **PAIR)
HEADS = sized(70, 100, 64, batch=1, **PAIR)
HARD_ROWS = HardDecode(q_len=40, q_heads=4, kv_heads=1)
IN_TURN = prefill_sm90.Config(2, block_kv=64, grid=3, in_turn=True)
ALONE = dataclasses.replace(IN_TURN, grid=1)
ROWS_OF_8_BITS = Quantized("stacked", **MANY_ROWS, exact=True)
PACKED_SIZES = {"q_len": 9, "page_size": 8, "head_dim": 264, "v_head_dim": 264, "sinks": True}
PACKED_ROWS = Decode("paged", lengths=(0, 1, 64, 65), layers=2, **PACKED_SIZES)
IN_A_WINDOW = Decode(**MANY_ROWS, mask=sliding_window(100))
KERNELS = (
    Row("flash_fwd.sm90", forward, {
        "plain": (hard(), FORWARD),
        "wide_tiles": (hard(), fwd_sm90.Config(2, block_kv=128, stages=2, grid=3)),
        "float32": (hard(dtype="float32"), FORWARD),
        "sinks": (endless(sized(40, 70, 64, q_heads=2, kv_heads=1, dtype="float32")), None),
    }, at(FORWARD)),
    Row("flash_fwd.sm90_one_tile", forward,
        *short_sequences(SHORT, sm90_one_tile.Config(2, block_kv=72, grid=3))),
    Row("flash_fwd.sm80", forward, {
        "plain": (hard(), fwd_sm80.Config(block_kv=32, stages=3)),
        "rows_in_registers": (hard(), fwd_sm80.Config(1, block_kv=64, q_in_registers=True)),
        "columns": (hard(dtype="float32"), fwd_sm80.Config(1, 32, columns=32)),
    }, at(fwd_sm80.Config(block_kv=64, stages=2))),
    Row("flash_fwd.sm90_wide", forward, {
        "plain": (hard(**WIDE), fwd_wide.Config(grid=2, k_ring=4, v_ring=3)),
        "sinks": (endless(LARGE), test_wide.ROUND),
    }, {"cut_tiles": (dataclasses.replace(CUT, **OF_WIDE), fwd_wide.Config(grid=2))}),
    Row("flash_fwd.sm90_group_window", forward, *windows(test_group_window)),
    Row("flash_fwd.sm100", forward, {
        "plain": (hard(), fwd_sm100.Config()),
        "one_q_tile": (hard(), fwd_sm100.Config(q_tiles=1, rescale_threshold=2.0)),
        "sinks": (endless(sized(40, 70, 64, q_heads=2, kv_heads=1)), fwd_sm100.Config()),
    }, {
        "whole_tiles": (WHOLE, fwd_sm100.Config(q_tiles=1)),
        "cut_tiles": (CUT, fwd_sm100.Config()),
        "ids": (IDS, fwd_sm100.Config()),
        "head_dim192": (dataclasses.replace(CUT, head_dim=192, v_head_dim=128),
                        fwd_sm100.Config(block_kv=96)),
    }),
    Row("prefill.contiguous_sm90", forward,
        {"splits": (hard(q_len=5, q_offset=195), contiguous_sm90.Config(SPLIT)),
         "alone": (hard(q_len=5, q_offset=195), contiguous_sm90.Config(ALONE))},
        {"cut_tiles": (FEW_ROWS, contiguous_sm90.Config(SPLIT))}),
    Row("flash_bwd.sm90", backward, {
        "plain": (hard(**LENGTHS_OF_Q), FUSED),
        "sinks_one_key_tile": with_sinks(test_one_key_tile.CASES["group"]),
    }, at(FUSED)),
    Row("flash_bwd.sm90_two_kernels", backward, {
        "plain": (hard(**LENGTHS_OF_Q), TWO_KERNELS),
        "sinks": (endless(SHORT), TWO_KERNELS),
    }, at(TWO_KERNELS)),
    Row("flash_bwd.sm90_short", backward, *short_sequences(SHORT, sm90_short.Config())),
    Row("flash_bwd.sm90_heads", backward, *short_sequences(HEADS, test_heads.EACH)),
    Row("flash_bwd.sm90_window", backward, *windows_of_a_head()),
    Row("flash_bwd.sm80", backward, {
        "plain": (hard(**LENGTHS_OF_Q), PORTABLE),
        "apart": (hard(**LENGTHS_OF_Q), APART),
        "sinks_apart": (endless(SHORT), APART),
    }, at(PORTABLE)),
    Row("flash_bwd.sm100", backward, {
        "plain": (hard(**LENGTHS_OF_Q), bwd_sm100.Config()),
        "sinks": (endless(sized(40, 70, 64, q_heads=2, kv_heads=1)), bwd_sm100.Config(panels=1)),
    }, at(bwd_sm100.Config(do_stages=2))),
    Row("flash_bwd.sm90_wide", backward, {
        "plain": (hard(**WIDE, dtype="float16"), bwd_wide.Config(grid=2)),
        "sinks": (endless(LARGE), bwd_wide.Config(grid=2)),
    }, {"cut_tiles": (dataclasses.replace(CUT, **OF_WIDE), bwd_wide.Config(grid=2))}),
    Row("flash_bwd.sm90_group_window", backward, *windows(test_bwd_group_window)),
    *map(tangents, ("sm90", "sm80", "sm90_dual")),
    Row("decode.sm90", decode_cases.check, {
        "plain": (HardDecode(), decode_sm90.Config(stages=3, grid=1)),
        "in_parts": (HardDecode(q_len=2), decode_sm90.Config(stages=2, grid=9)),
    }, caches(Decode(), decode_sm90.Config(stages=3, grid=5)) | {
        "partials": (Decode(**LONG, **TWO), decode_sm90.Config(stages=2, grid=20)),
    } | quantized(decode_sm90.Config(stages=3, grid=5))),
    Row("decode.sm80", decode_cases.check, {
        "plain": (HardDecode(q_len=3, mask=sliding_window(150)), decode_sm80.Config(grid=1)),
        "folded": (HardDecode(), decode_sm80.Config(stages=2, grid=9)),
    }, caches(Decode(q_len=2), decode_sm80.Config(stages=2, grid=5)) | {
        "partials": (Decode(**LONG, **TWO), decode_sm80.Config(stages=2, grid=20)),
    } | quantized(decode_sm80.Config(stages=2, grid=5)) | {
        "quantized_128_keys": (Quantized(), decode_sm80.Config(tile=128, stages=2, grid=5)),
    }),
    Row("decode_mla.sm90", decode_cases.check, {
        "plain": (HardLatent(q_heads=40), mla_sm90.Config(stages=6, grid=1)),
        "in_parts": (HardLatent(q_heads=40), mla_sm90.Config(stages=6, grid=9)),
    }, caches(Latent(q_heads=40), mla_sm90.Config(stages=6, grid=5))
        | {"partials": (Latent(**LONG, q_heads=40), mla_sm90.Config(stages=6, grid=20))}),
    Row("decode_mla.sm90_few_rows", decode_cases.check, {
        "plain": (HardLatent(), mla_sm90.Config(stages=2, grid=1)),
        "in_parts": (HardLatent(), mla_sm90.Config(stages=2, grid=9)),
    }, caches(Latent(), mla_sm90.Config(stages=2, grid=5))
        | {"partials": (Latent(**LONG), mla_sm90.Config(stages=2, grid=20))}),
    Row("decode_mla.sm80", decode_cases.check, {
        "plain": (HardLatent(q_heads=8), mla_sm80.Config(stages=2, grid=1)),
        "in_parts": (HardLatent(q_len=2), mla_sm80.Config(tile=32, stages=2, grid=9)),
    }, caches(Latent(), mla_sm80.Config(stages=2, grid=5))
        | {"partials": (Latent(**LONG), mla_sm80.Config(stages=2, grid=20))}),
    Row("prefill.sm90", decode_cases.check,
        {"plain": (HARD_ROWS, ALONE), "in_parts": (HARD_ROWS, SPLIT)},
        caches(Decode(**MANY_ROWS), IN_TURN)
        | named("splits", caches(IN_A_WINDOW, dataclasses.replace(SPLIT, splits=2)))
        | {"partials": (Decode(**LONG, **MANY_ROWS), dataclasses.replace(SPLIT, grid=9, splits=10))
    }),
    listed("sm90"),
    listed("sm80"),
    listed("latent_sm90", q_heads=64, **LATENT),
    listed("latent_sm90_few_rows", **LATENT),
    listed("latent_sm80", **LATENT),
    Row("decode_listed.gradients_sm90", lambda x, config: test_listed_gradients.check(x, **config),
        {"low": (test_listed_gradients.CASES["heads4_low"], {"grid": 1})},
        {f"lists_of_{n}": lists_of(n) for n in (1, 63, 64, 65)}, FUZZED),
    Row("prefill.widened_sm90", decode_cases.check,
        {"alone": (ROWS_OF_8_BITS, widened_sm90.Config(ALONE))},
        {"splits": (ROWS_OF_8_BITS, widened_sm90.Config(SPLIT))}),
    Row("prefill.narrow_sm90", decode_cases.check,
        {"alone": (ROWS_OF_8_BITS, narrow_sm90.Config(NARROW, slots=4))},
        {"splits": (ROWS_OF_8_BITS, narrow_sm90.Config(ONE_CONSUMER, producers=2))}),
    gathered("gathered_sm80"),
    gathered("gathered_sm90", head_dim=264, v_head_dim=264, q_heads=2, kv_heads=1),
    Row("prefill.gathered_packed_sm90", test_prefill_gathered.packed_agree,
        {name: (HardDecode(lengths=(192, 65), layers=layers, **PACKED_SIZES), (9, 1))
         for name, layers in (("plain", None), ("layers", 2))},
        {"paged": (PACKED_ROWS, (1, 9, 7, 1))}, FUZZED),
    elsewhere("flash_fwd.sm80_float8",
              "kernels/flash_fwd/test_float8.py::test_portable_interpreted"),
    elsewhere("decode_mla.sm90_byte_rows", "caches/test_byte_rows.py::test_all_tiles_by_one_block",
              "caches/test_byte_rows.py::test_what_is_read"),
    elsewhere("prefill.float8_sm90", "kernels/prefill/test_prefill_float8.py::test_interpreted"),
    elsewhere("quantize.blocks", "kernels/quantize/test_quantize_blocks.py::test_interpreted"),
    elsewhere("append.copy", "kernels/append/test_append_kernel.py::test_interpreted"),
    elsewhere("append.keep", "caches/test_keep.py::test_every_byte"),
)  # fmt: skip


def named(module: str) -> Row:
    return next(row for row in KERNELS if row.module == module)
