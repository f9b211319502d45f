"""Who computes what: one table an operation (decoding has a second, for V within K), and `select`.

This is the only module that knows every implementation, and it imports a kernel only when a problem
reaches it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from pallas_attn._call import config as _config
from pallas_attn._call import device, gpu_specs, reference, sharding
from pallas_attn._call.problem import (
    AppendInputs,
    AppendProblem,
    AttentionInputs,
    AttentionProblem,
    Caches,
    DecodeInputs,
    DecodeProblem,
    KeepInputs,
    KeepProblem,
    Kept,
    bounds_of,
)
from pallas_attn.errors import Limit, UnsupportedError

Problem = AttentionProblem | AppendProblem | KeepProblem | DecodeProblem

NAMES = ("sm90", "sm80", "reference")
OLDEST, NEWEST = 80, 999  # of the generations that kernels serve, or will


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Mosaic GPU kernel module, by name: it exports Config, limit, smem_bytes and run."""

    name: str  # what `implementation=` says
    module: str
    generations: tuple[int, int]  # the first GPU generation it serves and the last

    def limit(self, problem: Problem) -> Limit | None:
        if problem.gpu is None:
            return Limit(
                "it needs an NVIDIA GPU and the default device is none",
                'leave implementation=None, or say "reference"',
            )
        first, last = self.generations
        if not first <= gpu_specs.number(problem.gpu) <= last:
            span = f"sm{first}" if first == last else f"sm{first} and later"
            remedy = 'say implementation="reference"'
            if gpu_specs.number(problem.gpu) >= OLDEST:  # another kernel may serve it
                remedy = 'leave implementation=None, or say "reference"'
            return Limit(f"it is built for {span}", remedy)
        if any(export.is_symbolic_dim(size) for size in vars(problem).values()):
            return Limit(
                "it is compiled for sizes that are known",
                'export a program for each size, or say implementation="reference"',
            )
        return self._module().limit(problem)

    def shares_keys(self, problem: AttentionProblem) -> bool:
        shares = getattr(self._module(), "shares_keys", None)
        return shares is not None and shares(problem)

    def reads_zigzag(self, problem: AttentionProblem) -> bool:
        reads = getattr(self._module(), "reads_zigzag", None)
        return reads is not None and reads(problem)

    def fetches(self, problem: AttentionProblem) -> bool:
        fetches = getattr(self._module(), "fetches", None)
        return fetches is not None and fetches(problem)

    def merges(self, problem: DecodeProblem) -> bool:
        return getattr(self._module(), "MERGES", False) and self.limit(problem) is None

    def run(self, inputs: Any, problem: Problem) -> Any:
        module = self._module()
        config = _config.choose(module, problem)
        if device.overlaps() and hasattr(config, "overlaps"):
            config = dataclasses.replace(config, overlaps=True)
        return sharding.in_32_bits(lambda given: module.run(given, problem, config), inputs)

    def _module(self) -> Any:
        return importlib.import_module(f"pallas_attn.kernels.{self.module}")


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _compiled(call: Callable[[Any, Any], Any], inputs: Any, problem: Problem) -> Any:
    """One compilation for a call outside of jit: 0.1 s the first time, against 0.9 s one operation
    after the other.
    """
    return call(inputs, problem)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The oracle. The natural choice without a GPU; with one it is taken only by name."""

    call: Callable[[Any, Any], Any]
    cost: Callable[[Any], str]
    name: str = "reference"

    def limit(self, problem: Problem) -> Limit | None:
        if problem.gpu is None:
            return None
        return Limit(
            self.cost(problem), 'it is the oracle; ask for it by name: implementation="reference"'
        )

    def run(self, inputs: Any, problem: Problem) -> Any:
        return _compiled(self.call, inputs, problem)


@dataclasses.dataclass(frozen=True)
class Refused:
    """An entry that only explains itself: the name that people will try, and why it is not the
    answer.
    """

    name: str
    why: Limit

    def limit(self, problem: Problem) -> Limit | None:
        del problem
        return self.why

    def run(self, inputs: Any, problem: Problem) -> Any:
        raise UnsupportedError(f"{self.name} does not take {problem}", {self.name: self.why})


Implementation = Kernel | Reference | Refused


def by_definition(inputs: AttentionInputs, problem: AttentionProblem) -> tuple[Any, Any]:
    """out and lse by the reference."""
    ids: Any = (inputs.q_segment_ids, inputs.kv_segment_ids)
    functions = {
        name: None if program is None else (program, aux)
        for name, program, aux in (
            ("mask_function", problem.mask_program, inputs.mask_aux),
            ("score_function", problem.score_program, inputs.score_aux),
        )
    }
    bounds = {side: x[:, None, None, None] for side, x in bounds_of(inputs).items()}
    return reference.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        mask=problem.mask.filled(**bounds),
        scale=problem.scale,
        softcap=problem.softcap,
        q_offset=problem.q_offset if inputs.q_offset is None else inputs.q_offset,
        q_lengths=inputs.q_lengths,
        kv_lengths=inputs.kv_lengths,
        segment_ids=None if inputs.q_segment_ids is None else ids,
        q_positions=inputs.q_positions,
        bias=inputs.bias,
        mask_array=inputs.mask_array,
        sinks=inputs.sinks,
        **functions,
    )


def _append(inputs: AppendInputs, problem: AppendProblem):
    start = inputs.start
    if problem.from_end:  # no sequence has a negative number of rows
        start = jnp.where(start >= 0, start - inputs.new_lengths, -1)
    written = reference.append(
        inputs.k_cache,
        inputs.v_cache,
        inputs.k,
        inputs.v,
        start,
        new_lengths=inputs.new_lengths,
        page_table=inputs.page_table,
        layer=inputs.layer,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
        owners=inputs.owners,
    )
    return Caches(*written)


def rows_kept(inputs: KeepInputs, problem: KeepProblem) -> Any:
    """`Kept.rows` by the definition, which XLA computes."""
    return reference.rows_kept(
        inputs.lengths,
        inputs.new_lengths,
        inputs.counts,
        None if inputs.path is None else problem.width,
        problem.capacities,
        page_table=inputs.page_table,
        page_size=problem.page_size or 0,
        holders=inputs.holders,
    )


def _keep(inputs: KeepInputs, problem: KeepProblem):
    rows = rows_kept(inputs, problem)
    given = inputs._asdict()
    del given["counts"], given["holders"]
    moved = reference.keep(**given, count=rows, layers=problem.layers is not None)
    return Kept(Caches(*moved), rows)


def _decode(inputs: DecodeInputs, problem: DecodeProblem):
    program = problem.mask_program
    return reference.decode(
        inputs.q,
        inputs.k_cache,
        problem.v_head_dim if problem.shared_kv else inputs.v_cache,
        inputs.lengths,
        mask=problem.mask.filled(**bounds_of(inputs)),
        scale=problem.scale,
        softcap=problem.softcap,
        sinks=inputs.sinks,
        page_table=inputs.page_table,
        layer=inputs.layer,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
        new_lengths=inputs.new_lengths,
        starts=inputs.starts,
        mask_function=None if program is None else (program, inputs.mask_aux),
        tree=problem.tree,
    )


def _score_matrix(problem: AttentionProblem) -> str:
    return f"it would store the whole score matrix (T*S = {problem.q_len * problem.kv_len})"


def _dense_copy(problem: DecodeProblem) -> str:
    del problem
    return "it would copy every cache to a dense array"


TABLES: dict[str, tuple[Implementation, ...]] = {
    "flash_forward": (
        Kernel("sm90", "prefill.contiguous_sm90", (90, 90)),  # few query rows, many keys
        Kernel("sm90", "flash_fwd.sm90", (90, 90)),
        Kernel("sm80", "flash_fwd.sm80", (OLDEST, NEWEST)),
        Reference(by_definition, _score_matrix),
    ),
    "flash_backward": (
        Kernel("sm90", "flash_bwd.sm90", (90, 90)),
        Kernel("sm80", "flash_bwd.sm80", (OLDEST, NEWEST)),
        Refused(
            "reference",
            Limit(
                "it differentiates only what it computed itself",
                'pass implementation="reference" to the forward call: it stores all T*S scores',
            ),
        ),
    ),
    "append": (
        Kernel("sm80", "append.copy", (OLDEST, NEWEST)),
        Reference(_append, lambda problem: "it is one scatter a cache"),
    ),
    "keep": (
        Kernel("sm80", "append.keep", (OLDEST, NEWEST)),
        Reference(_keep, lambda problem: "it is a gather and a scatter a cache"),
    ),
    "decode": (
        Kernel("sm90", "prefill.sm90", (90, 90)),  # many query rows
        Kernel("sm90", "prefill.widened_sm90", (90, 90)),  # the same over quantised caches
        Kernel("sm90", "prefill.narrow_sm90", (90, 90)),  # fewer of them
        Kernel("sm90", "decode.sm90", (90, 90)),
        Kernel("sm80", "prefill.gathered_sm80", (OLDEST, NEWEST)),  # many query rows
        Kernel("sm80", "decode.sm80", (OLDEST, NEWEST)),
        Reference(_decode, _dense_copy),
    ),
    "decode_mla": (  # V is the first columns of K
        Kernel("sm90", "decode_mla.sm90", (90, 90)),
        Kernel("sm80", "decode_mla.sm80", (OLDEST, NEWEST)),
        Reference(_decode, _dense_copy),
    ),
}


_record: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "pallas_attn_chosen", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The names of what is selected in this block, in order: for reports on what ran."""
    names: list[str] = []
    token = _record.set(names)
    try:
        yield names
    finally:
        _record.reset(token)


def table_of(problem: Problem) -> tuple[Implementation, ...]:
    """Who may take the problem, fastest first."""
    latent = isinstance(problem, DecodeProblem) and problem.shared_kv
    return TABLES["decode_mla" if latent else problem.op]


def shares_keys(chosen: Implementation, problem: AttentionProblem) -> bool:
    """Whether it reads the same k and v for several batch rows (`AttentionProblem.share`)."""
    return isinstance(chosen, Kernel) and chosen.shares_keys(problem)


def reads_zigzag(chosen: Implementation, problem: AttentionProblem) -> bool:
    """Whether it reads k and v where they lie (`AttentionProblem.zigzag`)."""
    return isinstance(chosen, Kernel) and chosen.reads_zigzag(problem)


def fetches(chosen: Implementation, problem: AttentionProblem) -> bool:
    """Whether it fetches k and v of other devices itself (`AttentionProblem.fetches`)."""
    return isinstance(chosen, Kernel) and chosen.fetches(problem)


def merging(problem: DecodeProblem, implementation: str | None) -> Kernel | None:
    """The kernel that merges the results of packed rows with others itself
    (`DecodeProblem.merged`), if there is one.
    """
    for one in table_of(problem):
        named = implementation in (None, one.name)
        if isinstance(one, Kernel) and named and one.merges(problem):
            if (names := _record.get()) is not None:
                names.append(one.name)
            return one
    return None


def check_name(implementation: str | None) -> None:
    """ValueError where no operation at all has an implementation of that name."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation: expected one of {', '.join(map(repr, NAMES))} or None (the "
            f"fastest), got {implementation!r}"
        )


def select(problem: Problem, implementation: str | None) -> Implementation:
    """The first of the operation's table, fastest first, that takes the problem; or the one that
    was named.
    """
    chosen = _select(problem, implementation)
    if (names := _record.get()) is not None:
        names.append(chosen.name)
    return chosen


def _select(problem: Problem, implementation: str | None) -> Implementation:
    table = table_of(problem)
    if implementation is None:
        limits = {}
        for candidate in table:
            limit = candidate.limit(problem)
            if limit is None:
                return candidate
            limits[candidate.name] = limit
        raise UnsupportedError(f"No implementation takes {problem}", limits)
    check_name(implementation)
    named = [candidate for candidate in table if candidate.name == implementation]
    for candidate in named:
        limit = None if isinstance(candidate, Reference) else candidate.limit(problem)
        if limit is None:
            return candidate
        if candidate is named[-1]:
            raise UnsupportedError(
                f"{implementation} does not take {problem}", {implementation: limit}
            )
    others = ", ".join(repr(candidate.name) for candidate in table)
    raise UnsupportedError(
        f"{problem.op} has no implementation {implementation!r}",
        {implementation: Limit("it does not exist", f"there is {others}")},
    )
