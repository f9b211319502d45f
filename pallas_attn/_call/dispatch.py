"""The dispatch table of each operation, and `select`.

This is the only module that knows every implementation. It imports a kernel when a problem reaches
it, past what the table alone tells.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
from jax import export

from pallas_attn._call import batching, device, gpu_specs, quantization, reference, selection
from pallas_attn._call import config as _config
from pallas_attn._call.kernel import Inputs, Kernel, Problem, Results, never_slower
from pallas_attn._call.problem import (
    SHORT_WINDOW,
    AttentionProblem,
    DecodeProblem,
)
from pallas_attn._call.special import Special
from pallas_attn._mesh import sharding
from pallas_attn.errors import Limit, UnsupportedError, described

store = Special("_call.store")

NAMES = ("sm90", "sm80", "sm100", "reference")
SHORT_ROWS = 512  # most rows of the kernels for short sequences
ONE_TILE = 128  # most rows and keys of the forward of heads that are one kv tile
OLDEST, NEWEST = 80, 999  # GPU generations that kernels serve, or will
HOPPER, FROM_AMPERE, FROM_ADA = (90, 90), (OLDEST, NEWEST), (89, NEWEST)
BLACKWELL = (100, 103)  # in datacenters. Its kernels never ran there: only names choose them


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A Mosaic GPU kernel that may serve an operation, and what is known of it without importing
    it.
    """

    module: str  # within `kernels`; its own name only where the kernel is made of another
    generations: tuple[int, int]  # the first GPU generation that it serves and the last
    # Why another kernel is faster, or None: asked before the kernel is imported.
    slower: Callable[[Any], Limit | None] = never_slower
    # (a module whose `over` makes the kernel, the module of the kernel that it is made of)
    made: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """Its own name, by which errors and `config.forced` speak of it: "prefill_narrow_sm90"."""
        return self.module.replace(".", "_")

    @property
    def implementation(self) -> str:
        """The family that `implementation=` names."""
        return {HOPPER: "sm90", BLACKWELL: "sm100"}.get(self.generations, "sm80")

    @functools.cached_property
    def kernel(self) -> Kernel:
        if self.made is None:
            return _imported(self.module).KERNEL
        maker, base = self.made
        return _imported(maker).over(_imported(base).KERNEL)

    def can_take(self, problem: Problem) -> bool:
        """Whether it can, as far as the table does not say that another is faster."""
        known = self._unavailable(problem) or self.slower(problem)
        return known is None and self._limit(problem) is None

    def takes(self, problem: Problem) -> bool:
        """Whether it is the fastest that can. The kernel is imported for the last two questions,
        if no earlier process has answered them.
        """
        if self._unavailable(problem) is not None or self.slower(problem) is not None:
            return False
        if jax.config.jax_compilation_cache_dir:
            return store.answer(self, problem, self._can)
        return self._can(problem)

    def _can(self, problem: Problem) -> bool:
        return self._limit(problem) is None and self.kernel.slower(problem) is None

    def _limit(self, problem: Problem) -> Limit | None:
        """Why the kernel cannot take the problem, or None: shared memory is asked for last."""
        return self.kernel.limit(problem) or _config.no_room(self.kernel, problem)

    def ends_search(self, problem: Problem) -> bool:
        """Whether no kernel after this one may take a problem that this one does not, for want of
        room: it has other bits, and bits may not depend on how many sequences there are.
        """
        if not (isinstance(problem, DecodeProblem) and problem.batch_invariant):
            return False
        faster = self._unavailable(problem) is None and self.slower(problem) is None
        return faster and self.kernel.limit(problem) is None

    def refusal(self, problem: Problem) -> Limit | None:
        """Why it does not take the problem, or None: what it cannot do before what is faster."""
        refused = self._unavailable(problem) or self._limit(problem)
        return refused or self.slower(problem) or self.kernel.slower(problem)

    def _unavailable(self, problem: Problem) -> Limit | None:
        """Why no kernel of its generations takes the problem, or None."""
        if problem.gpu is None:
            return Limit(
                "it needs an NVIDIA GPU, which the default device is not",
                'leave implementation=None, or say "reference"; '
                f'check_for("{self.implementation}", f, *args) says what a GPU would refuse',
            )
        first, last = self.generations
        if not first <= gpu_specs.number(problem.gpu) <= last:
            span = f"sm{first}" if first == last else f"sm{first} to sm{last}"
            span = f"sm{first} and later" if last == NEWEST else span
            remedy = 'say implementation="reference"'
            if gpu_specs.number(problem.gpu) >= OLDEST:  # another kernel may serve it
                remedy = 'leave implementation=None, or say "reference"'
            return Limit(f"it is built for {span}", remedy)
        if any(export.is_symbolic_dim(size) for size in vars(problem).values()):
            return Limit(
                "it is compiled for sizes that are known",
                'export a program for each size, or say implementation="reference"',
            )
        return None

    def run(self, inputs: Inputs, problem: Problem) -> Results:
        """The results of the kernel, which is traced with Python's numbers in 32 bits, unless an
        earlier process has lowered it.
        """
        keeps = jax.config.jax_compilation_cache_dir
        if keeps and (kept := store.results(self, inputs, problem)) is not None:
            return kept
        kernel = self.kernel
        if _config.observer.get() is None is _config.tuned.get():
            config = _config.default(kernel, problem)
        else:
            config = _config.choose(self.name, kernel, problem)
        begins_early = device.asked_to_overlap.get() and gpu_specs.number(str(problem.gpu)) >= 90
        if kernel.overlaps and begins_early:
            config = dataclasses.replace(config, overlaps=True)
        if jax.config.jax_enable_x64:
            return sharding.in_32_bits(lambda arrays: kernel.run(arrays, problem, config), inputs)
        return kernel.run(inputs, problem, config)


def _imported(module: str) -> Any:
    return importlib.import_module(f"pallas_attn.kernels.{module}")


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _compiled(call: Callable[[Any, Any], Any], inputs: Inputs, problem: Problem) -> Results:
    """One compilation for a call outside of jit: 0.1 s the first time, against 0.9 s one operation
    after the other.
    """
    return call(inputs, problem)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The oracle. The natural choice without a GPU; with one it is taken only by name."""

    call: Callable[[Any, Any], Any]
    cost: Callable[[Any], str]  # why a GPU is not to run it unasked
    name = implementation = "reference"

    def takes(self, problem: Problem) -> bool:
        return problem.gpu is None

    def refusal(self, problem: Problem) -> Limit | None:
        if self.takes(problem):
            return None
        return Limit(self.cost(problem), 'ask for it by name: implementation="reference"')

    def run(self, inputs: Inputs, problem: Problem) -> Results:
        return batching.by_xla(functools.partial(_compiled, self.call), inputs, problem)


@dataclasses.dataclass(frozen=True)
class Refused:
    """An entry that only explains why the name that people will try is not the answer."""

    why: Limit
    name = implementation = "reference"

    def takes(self, problem: Problem) -> bool:
        del problem
        return False

    def refusal(self, problem: Problem) -> Limit:
        del problem
        return self.why

    def run(self, inputs: Inputs, problem: Problem) -> Results:
        raise UnsupportedError(f"{self.name} does not take {problem}", {self.name: self.why})


Implementation = Candidate | Reference | Refused


def _score_matrix(problem: AttentionProblem) -> str:
    return f"it would write every score to memory (T*S = {problem.q_len * problem.kv_len})"


def _dense_copy(problem: DecodeProblem) -> str:
    del problem
    return "it would copy every cache to a dense array"


def _without_float8(problem: DecodeProblem) -> Limit | None:
    """Why no kernel is to round q to float8, or None."""
    if problem.precision == "float8":
        return None
    return Limit("precision does not ask for matmuls on float8", "leave implementation=None")


def _long_window(problem: AttentionProblem) -> Limit | None:
    """A Limit where the kernels for short windows of 8 heads and more a kv head are of no use, so
    that plain problems do not import them; `group_windows.limit` has all that they need.
    """
    width = problem.mask.width
    short = width is not None and width <= SHORT_WINDOW
    if short and problem.kv_heads and problem.group % 8 == 0:
        return None
    return Limit(
        f"it is for windows of up to {SHORT_WINDOW} keys where 8 heads or more share K and V",
        "leave implementation=None",
    )


def _listed(
    name: str,
    generations: tuple[int, int],
    base: str,
    slower: Callable[[Any], Limit | None] = never_slower,
) -> Candidate:
    """The kernel whose lists `base` reads."""
    return Candidate(name, generations, slower, made=("decode_listed.lists", base))


def _long_window_of_a_head(problem: AttentionProblem) -> Limit | None:
    """`_long_window`, where heads share no keys."""
    width = problem.mask.width
    if width is not None and width <= SHORT_WINDOW + 1 and problem.q_heads == problem.kv_heads:
        return None
    return Limit(
        f"it is for windows of up to {SHORT_WINDOW + 1} keys of heads that share none",
        "leave implementation=None",
    )


def _many_keys(problem: AttentionProblem) -> Limit | None:
    """A Limit where the kernel for heads of one kv tile is of no use, so that plain problems do not
    import it.
    """
    if max(problem.q_len, problem.kv_len) <= ONE_TILE:
        return None
    return Limit(f"it is for heads of up to {ONE_TILE} rows and keys", "leave implementation=None")


def _long_sequence(problem: AttentionProblem) -> Limit | None:
    """A Limit where kernels for short sequences of heads that share no keys are of no use, so that
    plain problems do not import them.
    """
    if max(problem.q_len, problem.kv_len) <= SHORT_ROWS and problem.q_heads == problem.kv_heads:
        return None
    return Limit(
        f"it is for up to {SHORT_ROWS} rows of heads that share no keys",
        "leave implementation=None",
    )


def _gathered(name: str, generations: tuple[int, int], forward: str) -> Candidate:
    """The kernel that copies the keys of many query rows for a forward."""
    return Candidate(name, generations, selection.gathered, made=("prefill.gathered", forward))


_DECODE = (
    _gathered("prefill.gathered_sm80", FROM_AMPERE, "flash_fwd.sm80"),
    Candidate("decode.sm80", FROM_AMPERE),
    Reference(reference.decode, _dense_copy),
)
# The candidates of each operation, the fastest first.
TABLES: dict[str, tuple[Implementation, ...]] = {
    "flash_forward": (
        # few query rows, many keys
        Candidate("prefill.contiguous_sm90", HOPPER, selection.contiguous_sm90),
        # short windows, 8 heads or more that share K and V
        Candidate("flash_fwd.sm90_group_window", HOPPER, _long_window),
        Candidate("flash_fwd.sm90_one_tile", HOPPER, _many_keys),  # many heads of few keys
        Candidate("flash_fwd.sm90", HOPPER),
        Candidate("flash_fwd.sm90_wide", HOPPER),  # head dims above 256
        Candidate("flash_fwd.sm80", FROM_AMPERE),
        Candidate("flash_fwd.sm80_float8", FROM_ADA),
        Candidate("flash_fwd.sm100", BLACKWELL),
        Reference(reference.attention, _score_matrix),
    ),
    "flash_backward": (
        Candidate("flash_bwd.sm90_group_window", HOPPER, _long_window),
        Candidate("flash_bwd.sm90_heads", HOPPER, _long_sequence),  # many heads
        Candidate("flash_bwd.sm90_short", HOPPER, _long_sequence),
        Candidate("flash_bwd.sm90_window", HOPPER, _long_window_of_a_head),
        Candidate("flash_bwd.sm90", HOPPER),
        Candidate("flash_bwd.sm90_two_kernels", HOPPER),
        Candidate("flash_bwd.sm90_wide", HOPPER),  # head dims above 256
        Candidate("flash_bwd.sm80", FROM_AMPERE),
        # Behind the forward that a name chooses.
        Candidate("flash_bwd.sm100", BLACKWELL),
        Candidate("flash_bwd.sm80", BLACKWELL),
        Refused(
            Limit(
                "it differentiates only what it computed itself",
                'pass implementation="reference" to the forward call: it writes T*S scores',
            ),
        ),
    ),
    # Problems that no kernel takes: see `derivative.by_definition`.
    "flash_jvp": (
        Candidate("flash_jvp.sm90", HOPPER),
        Candidate("flash_jvp.sm80", FROM_AMPERE),
    ),
    # The forward and its tangents in one launch, where forward mode alone asks for them.
    "flash_dual": (Candidate("flash_jvp.sm90_dual", HOPPER),),
    "quantize": (
        Candidate("quantize.blocks", FROM_AMPERE),
        Reference(quantization.quantize_blocks, lambda problem: "it reads every array twice"),
    ),
    "append": (
        Candidate("append.copy", FROM_AMPERE),
        Reference(reference.append, lambda problem: "it is one scatter a cache"),
    ),
    "keep": (
        Candidate("append.keep", FROM_AMPERE),
        Reference(reference.keep, lambda problem: "it is a gather and a scatter a cache"),
    ),
    "decode": (
        Candidate("prefill.sm90", HOPPER, selection.sm90),  # many query rows
        _gathered("prefill.gathered_sm90", HOPPER, "flash_fwd.sm90_wide"),
        Candidate("prefill.gathered_packed_sm90", HOPPER, selection.gathered_packed),
        Candidate("decode.sm90", HOPPER),
        *_DECODE,
    ),
    # Results of packed rows that the kernel merges with others itself (`DecodeProblem.merged`).
    "decode_merged": (Candidate("prefill.sm90", HOPPER, selection.sm90),),
    "decode_quantized": (
        # many query rows, where matmuls on 8 bits are allowed
        Candidate("prefill.float8_sm90", HOPPER, _without_float8),
        Candidate("prefill.widened_sm90", HOPPER, selection.widened_sm90),  # many query rows
        Candidate("prefill.narrow_sm90", HOPPER, selection.narrow_sm90),  # fewer of them
        _gathered("prefill.gathered_sm90", HOPPER, "flash_fwd.sm90_wide"),
        Candidate("prefill.gathered_packed_sm90", HOPPER, selection.gathered_packed),
        Candidate("decode.sm90", HOPPER),
        *_DECODE,
    ),
    "decode_mla": (  # V is the first columns of K
        Candidate("decode_mla.sm90_byte_rows", HOPPER, selection.latent_bytes),
        Candidate("decode_mla.sm90_few_rows", HOPPER, selection.few_latent_rows),
        Candidate("decode_mla.sm90", HOPPER, selection.many_latent_rows),
        Candidate("decode_mla.sm80", FROM_AMPERE),
        Reference(reference.decode, _dense_copy),
    ),
    "decode_listed": (  # each query row attends to the positions that it names
        _listed("decode_listed.sm90", HOPPER, "decode.sm90"),
        _listed("decode_listed.sm80", FROM_AMPERE, "decode.sm80"),
        Reference(reference.decode_listed, _dense_copy),
    ),
    # Gradients of `decode_listed` for one kv head of one array; elsewhere XLA's: `listed.py`.
    "listed_backward": (Candidate("decode_listed.gradients_sm90", HOPPER),),
    "decode_listed_mla": (
        _listed(
            "decode_listed.latent_sm90_few_rows",
            HOPPER,
            "decode_mla.sm90_few_rows",
            selection.few_latent_rows,
        ),
        _listed("decode_listed.latent_sm90", HOPPER, "decode_mla.sm90", selection.many_latent_rows),
        _listed("decode_listed.latent_sm80", FROM_AMPERE, "decode_mla.sm80"),
        Reference(reference.decode_listed, _dense_copy),
    ),
}


_record: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "pallas_attn_chosen", default=None
)


@contextlib.contextmanager
def chosen() -> Iterator[list[str]]:
    """The implementations that calls traced in this block run, in order: "sm90", "sm80",
    "sm100" or "reference". For reports on what ran::

        with pa.chosen() as names:
            jax.jit(step).trace(params, batch)

    Example::

        >>> q = jnp.ones((1, 8, 2, 64))
        >>> with pa.chosen() as names:
        ...     out = pa.flash_attention(q, q, q, implementation="reference")
        >>> names
        ['reference']
    """
    names: list[str] = []
    token = _record.set(names)
    try:
        yield names
    finally:
        _record.reset(token)


def table_of(problem: Problem) -> tuple[Implementation, ...]:
    """The candidates for a problem, fastest first."""
    if isinstance(problem, DecodeProblem) and problem.listed is not None:
        return TABLES["decode_listed_mla" if problem.shared_kv else "decode_listed"]
    if isinstance(problem, DecodeProblem) and (problem.shared_kv or problem.quantized):
        return TABLES["decode_mla" if problem.shared_kv else "decode_quantized"]
    return TABLES[problem.op]


def named_by(implementation: str | None, table: tuple[Implementation, ...]) -> list[Implementation]:
    """The rows of a table that `implementation=` means. None means no kernel of `BLACKWELL`."""
    if implementation is None:
        return [x for x in table if x.implementation != "sm100"]
    return [x for x in table if x.implementation == implementation]


def kernel_of(chosen: Implementation) -> Kernel | None:
    """The record of a kernel; None where no kernel is chosen."""
    return chosen.kernel if isinstance(chosen, Candidate) else None


def merging(problem: DecodeProblem, implementation: str | None) -> Candidate | None:
    """The kernel that merges the results of packed rows with others itself
    (`DecodeProblem.merged`), if there is one.
    """
    for candidate in TABLES["decode_merged"]:
        named = implementation in (None, candidate.implementation)
        if named and candidate.takes(problem):
            if (names := _record.get()) is not None:
                names.append(candidate.implementation)
            return candidate  # type: ignore[return-value]
    return None


def of_derivative(problem: Problem, implementation: str | None) -> Implementation | None:
    """The kernel of a derivative that takes the problem, if there is one."""
    named = named_by(implementation, TABLES[problem.op])
    return next((x for x in named if x.takes(problem)), None)


def check_name(implementation: str | None) -> None:
    """ValueError where no operation at all has an implementation of that name."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation: expected one of {', '.join(map(repr, NAMES))} or None (the "
            f"fastest), got {described(implementation)}"
        )


def select(problem: Problem, implementation: str | None) -> Implementation:
    """The first of the operation's table that takes the problem, of those that are named."""
    chosen: Implementation | None = None
    if (observer := _config.observer.get()) is not None:
        chosen = _forced(problem, implementation, observer.forced)
    chosen = chosen or _select(table_of(problem), problem, implementation)
    if (names := _record.get()) is not None:
        names.append(chosen.implementation)
    return chosen


def _forced(
    problem: Problem, implementation: str | None, forced: Container[str]
) -> Candidate | None:
    """The kernel that `config.forced` names, if it can take the problem, be another faster or not;
    what the table says against it counts.
    """
    named = [x for x in table_of(problem) if implementation in (None, x.implementation)]
    candidates = (x for x in named if isinstance(x, Candidate) and x.name in forced)
    return next((x for x in candidates if x.can_take(problem)), None)


@functools.lru_cache(maxsize=1024)
def _select(
    table: tuple[Implementation, ...], problem: Problem, implementation: str | None
) -> Implementation:
    check_name(implementation)
    named = named_by(implementation, table)
    for candidate in named:
        by_name = isinstance(candidate, Reference) and implementation is not None
        if by_name or candidate.takes(problem):
            return candidate
        if isinstance(candidate, Candidate) and candidate.ends_search(problem):
            break
    if named:
        who = (
            "No implementation takes"
            if implementation is None
            else f"{implementation} does not take"
        )
        limits = {candidate.name: candidate.refusal(problem) for candidate in named}
        raise UnsupportedError(f"{who} {problem}", {k: x for k, x in limits.items() if x})
    others = ", ".join(dict.fromkeys(repr(candidate.implementation) for candidate in table))
    raise UnsupportedError(
        f"{problem.op} has no implementation {described(implementation)}",
        {str(implementation): Limit("it does not exist", f"there is {others}")},
    )
