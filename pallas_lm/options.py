"""Options of a call: those that programs are compiled for (`Options`) and the others (`Call`), with
the one check of both, whoever asks: `lm.generate`, or the command by its flags of the same names.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_attn import prefixes
from pallas_attn.cache import KVCache, PagedCache, PerSequenceCache, StackedCache
from pallas_attn.errors import described
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config
from pallas_lm.gemma4 import TwoCaches
from pallas_lm.machine import PRECISIONS
from pallas_lm.sampling import Sampling, is_int
from pallas_lm.text import ids_of

CACHES = ("per_sequence", "stacked", "paged")
DRAFTS = ("ngram",)
DTYPES = ("bfloat16", "float16", "float32")


def _int(default: int | None, most: int = 2**28, least: int = 1) -> Any:
    return dataclasses.field(default=default, metadata={"range": range(least, most + 1)})


def _choice(default: str | None, choices: tuple[str, ...]) -> Any:
    return dataclasses.field(default=default, metadata={"choices": choices})


def _check_fields(record: "Call | Options") -> None:
    """Raises ValueError for a field that is of another type than it says, or out of its range."""
    for field in dataclasses.fields(record):
        name, value, none = field.name, getattr(record, field.name), field.default is None
        span, choices = field.metadata.get("range"), field.metadata.get("choices")
        if value is None and none:
            continue
        if span and not is_int(value):
            raise ValueError(
                f"{name}: expected an int of at least {span.start}, got {described(value)}"
            )
        if span and value not in span:
            wanted = f"least {span.start}" if value < span.start else f"most {span.stop - 1}"
            raise ValueError(f"{name}: expected at {wanted}, got {value}")
        if choices and value not in choices:
            or_none = " or None" if none else ""
            raise ValueError(f"{name}: expected one of {choices}{or_none}, got {described(value)}")
        if field.type is bool and not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {described(value)}")


def check_stop_ids(stop_ids: tuple[int, ...], vocab: int) -> None:
    """Raises ValueError for `stop_ids` that the model does not have."""
    if all(map(is_int, stop_ids)):
        wrong = [token for token in stop_ids if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"stop_ids: expected tokens from 0 to {vocab - 1}, got {wrong}")


def dtype_name(dtype: DTypeLike) -> str:
    """The name of a dtype, however jax takes one; ValueError for one in which no model runs."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {described(dtype)}")
    return name


@dataclasses.dataclass(frozen=True)
class Call:
    """Options of a call that no program is compiled for.

    Args:
      max_new_tokens: tokens after each prompt, at most.
      seed: of the tokens that are drawn, in 32 bits, as jax's keys take it.
      stop: texts that end a sequence.
      chat: whether texts are messages of a user.
      precision: of matmuls, as `jax.default_matmul_precision` has it. None: "highest" with float32.
    """

    max_new_tokens: int = _int(200)
    seed: int = _int(0, 2**32 - 1, least=0)
    stop: tuple[str, ...] = ()
    chat: bool = False
    precision: str | None = _choice(None, PRECISIONS)

    def __post_init__(self) -> None:
        _check_fields(self)
        stop = self.stop
        if not isinstance(stop, tuple) or not all(isinstance(x, str) and x for x in stop):
            raise ValueError(
                "stop: expected a text or a list of texts, none of them empty, got "
                f"{described(stop)}; tokens that end a sequence are stop_ids"
            )


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of decoding that programs are compiled for: a jit key, without `sampling`, whose
    numbers are arrays of the programs. Names and meanings are those of the flags of `run.py`.

    Args:
      batch: sequences at a time.
      cache: the KV cache, "per_sequence", "stacked" or "paged".
      capacity: rows that a sequence can hold. Default: what the prompts need, or 512 here.
      page_size: rows of a page, with cache="paged".
      pages: pages of the whole pool, with cache="paged". None: enough for `batch` sequences of the
        full capacity; with fewer, prompts wait for pages.
      chunk: steps inside one jit.
      prefill: tokens of prompts that are prefilled together at most, padding counted.
      prefill_chunk: rows of prompts that a step takes beside the sequences that decode, which then
        do not wait for long prompts. None: prompts come in whole, between two chunks of steps.
      samples: answers to each prompt, which is prefilled once and forked. More than one take
        cache="paged" and a temperature.
      draft: where drafts come from, of which a step checks several at once. draft="ngram": what
        followed the newest tokens where they stood before. Tokens are those of plain decoding, but
        for ties. None: no drafts.
      drafts: how many of each sequence a step checks, with draft="ngram".
      dtype: "bfloat16", "float16" or "float32", of weights, cache and arithmetic.
      sampling: the choice of tokens, for all prompts or for each; the flags temperature, top_k and
        top_p.
      stop_ids: tokens that end a sequence.
      logprobs: whether the log-probability of every token is computed.
      implementation: "reference", or None for the fastest that takes each problem.
      keep_logits: whether logits are kept, as the flag check asks for.
      mesh: devices that heads and columns of the model are split over.
    """

    batch: int = _int(8, 2**20)
    cache: str = _choice("per_sequence", CACHES)
    capacity: int = _int(512)
    page_size: int = _int(64, 2**20)
    pages: int | None = _int(None)
    chunk: int = _int(16, 2**16)
    prefill: int = _int(16384)
    prefill_chunk: int | None = _int(None, 2**20)
    samples: int = _int(1, 2**20)
    draft: str | None = _choice(None, DRAFTS)
    drafts: int = _int(7, 2**10)
    dtype: str = _choice("bfloat16", DTYPES)
    sampling: Sampling = dataclasses.field(default=Sampling(), compare=False)
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False
    implementation: str | None = None
    keep_logits: bool = False
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if self.implementation not in (None, "reference"):
            raise ValueError(
                "implementation: a model runs several operations, which no kernel does alone; "
                f"expected 'reference' or None, got {described(self.implementation)}"
            )
        _check_fields(self)
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling: expected a Sampling, got {described(self.sampling)}")
        if not (isinstance(self.stop_ids, tuple) and all(map(is_int, self.stop_ids))):
            raise ValueError(
                f"stop_ids: expected a tuple of tokens, ints, got {described(self.stop_ids)}"
            )
        lm_mesh.check(self.mesh)
        if self.samples > 1:
            self._refuse_samples()

    def _refuse_samples(self) -> None:
        """Raises ValueError where several answers are not possible, or would all be the same."""
        for name, wrong, wanted in (
            ("cache", self.cache != "paged", "'paged', whose pages are forked,"),
            ("samples", not self.sampling.always_draws, "1, or a temperature,"),
            ("batch", self.batch < self.samples, f"at least {self.samples}"),
        ):
            if wrong:
                raise ValueError(
                    f"{name}: expected {wanted} for {self.samples} samples of a prompt, got "
                    f"{getattr(self, name)!r}"
                )

    @property
    def pool(self) -> int:
        """Pages of the pool."""
        return self.pages or self.batch * -(-self.rows // self.page_size)

    @property
    def levels(self) -> int:
        """Levels at which sequences that share pages branch off: 1, after the prompt, if it is
        long enough to be worth it; else 0.
        """
        worth = (self.samples - 1) * self.capacity >= prefixes.LEAST_SAVED
        return int(worth and self.mesh is None)

    @property
    def ahead(self) -> int:
        """Rows of drafts that a sequence may have beside its own."""
        return 0 if self.draft is None else self.drafts

    @property
    def rows(self) -> int:
        """Rows of each slot, with those of drafts; then a multiple of 8, as kernels need."""
        return -(-(self.capacity + self.ahead) // 8) * 8 if self.ahead else self.capacity

    def create_cache(self, config: Config) -> KVCache | TwoCaches:
        if config.gemma4 is None:
            return self._create_cache(config, config.layers)
        caches = {
            mask.left is None: self._create_cache(config.of_run(run), config.layers_like(mask))
            for run, (_, mask) in enumerate(config.runs)
        }
        return TwoCaches(caches[False], caches[True])

    def _create_cache(self, config: Config, layers: int) -> KVCache:
        sizes: dict[str, Any] = {
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "layers": layers,
            "dtype": self.dtype,
        }
        if config.latent is not None:
            sizes |= {"kv_heads": 1, "head_dim": config.latent.row}
            sizes |= {"v_head_dim": config.latent.rank, "shared_kv": True}
        if self.cache == "per_sequence":
            return PerSequenceCache.create((self.rows,) * self.batch, **sizes)
        if self.cache == "stacked":
            return StackedCache.create(self.batch, self.rows, **sizes)
        return PagedCache.create(self.batch, self.pool, self.page_size, capacity=self.rows, **sizes)


# ---- options of a call --------------------------------------------------------------------------

_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))
_CALL, _COMPILED = (
    tuple(field.name for field in dataclasses.fields(record)) for record in (Call, Options)
)
# Names of options, which are those of run.py's flags; `sampling` holds three of them.
NAMES = (*_CALL, *_SAMPLING, *(name for name in _COMPILED if name != "keep_logits"))


def asked(chosen: Mapping[str, Any]) -> tuple[Call, dict[str, Any]]:
    """The call that options ask for by their names, and those of them that are fields of `Options`.
    None stands for an option's default.

    Raises:
      ValueError: there is no such option, it is wrong, or it would do nothing beside the others.
    """
    for name in chosen:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1, 0.7)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name}: no option{hint}; expected one of {', '.join(NAMES)}")
    made = {name: x for name, x in chosen.items() if x is not None}
    stop, ids = made.get("stop"), ids_of(made.get("stop_ids"))
    if isinstance(stop, (str, list)):
        made["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if ids is not None:
        made["stop_ids"] = tuple(ids)
    for name, read in (("dtype", dtype_name), ("mesh", lm_mesh.of)):
        if name in made:
            made[name] = read(made[name])
    drawn = {name: made.pop(name) for name in _SAMPLING if name in made}
    if drawn and "sampling" in made:
        raise ValueError(f"sampling: expected None beside {', '.join(drawn)}, which it holds")
    if drawn:
        made["sampling"] = Sampling(**drawn)
    for name, why in idle(made).items():
        raise ValueError(f"{name}: {why}")
    call = Call(**{name: made.pop(name) for name in _CALL if name in made})
    return call, made


def idle(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The options that the others leave nothing to do, and why; `sampling` may be in its parts."""
    made = {name: x for name, x in chosen.items() if x is not None}
    drawn = {name: made.pop(name) for name in _SAMPLING if name in made}
    sampling = made.get("sampling", Sampling(**drawn))
    if isinstance(sampling, Sampling):
        made |= {name: getattr(sampling, name) for name in sampling.used}
    rules = (
        (not getattr(sampling, "draws", True), "nothing is drawn without a temperature",
         "give one as well", "top_k", "top_p"),
        ("draft" not in made, "no step checks drafts without draft='ngram'", "give it as well",
         "drafts"),
        (made.get("cache") != "paged", "only cache='paged' has pages", "give it as well",
         "page_size", "pages"),
        ("prefill_chunk" in made, "prefill_chunk says how many rows of prompts a step takes",
         "leave that out", "prefill"),
    )  # fmt: skip
    return {
        name: f"expected none, since {why}, got {described(made[name])}; {remedy}, or leave "
        f"{name} out"
        for applies, why, remedy, *names in rules
        if applies
        for name in names
        if name in made
    }
