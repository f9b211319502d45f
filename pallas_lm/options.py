"""Options of a decode run, and which of them are refused."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from pallas_attn import prefixes
from pallas_attn.cache import KVCache, PagedCache, PerSequenceCache, StackedCache
from pallas_attn.errors import described
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config
from pallas_lm.gemma4 import TwoCaches
from pallas_lm.sampling import Sampling, at_least_1, is_int

CACHES = ("per_sequence", "stacked", "paged")
DRAFTS = ("ngram",)
DTYPES = ("bfloat16", "float16", "float32")


def check_dtype(dtype: object) -> None:
    """Raises ValueError for a dtype in which no model runs."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype!r}")


def check_stop_ids(stop_ids: object, vocab: int) -> None:
    """Raises ValueError for `stop_ids` that the model does not have."""
    if isinstance(stop_ids, (list, tuple)) and all(map(is_int, stop_ids)):
        wrong = [token for token in stop_ids if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"stop_ids: expected tokens from 0 to {vocab - 1}, got {wrong}")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of decoding that programs are compiled for: a jit key. Names and meanings are those
    of the flags of `run.py`.

    Args:
      batch: sequences at a time.
      cache: "per_sequence", "stacked" or "paged".
      capacity: rows that a sequence can hold.
      page_size: rows of a page, with cache="paged".
      pages: pages of the whole pool, with cache="paged". None: enough for `batch` sequences of the
        full capacity; with fewer, prompts wait for pages.
      chunk: steps inside one jit.
      prefill: tokens of prompts that are prefilled together at most, padding counted.
      prefill_chunk: rows of prompts that a step takes beside the sequences that decode. None:
        prompts come in whole, between two chunks of steps.
      samples: answers to each prompt, which is prefilled once and forked. More than one take
        cache="paged" and a temperature.
      draft: the source of drafts: "ngram", or None.
      drafts: drafts of each sequence that a step checks.
      dtype: "bfloat16", "float16" or "float32", of weights, cache and arithmetic.
      sampling: the choice of tokens; the flags temperature, top_k and top_p.
      stop_ids: tokens that end a sequence.
      logprobs: whether the log-probability of every token is computed.
      implementation: "reference", or None for the fastest that takes each problem.
      keep_logits: whether logits are kept, as the flag check asks for.
      mesh: devices that heads and columns of the model are split over.
    """

    batch: int = 8
    cache: str = "per_sequence"
    capacity: int = 512
    page_size: int = 64
    pages: int | None = None
    chunk: int = 16
    prefill: int = 16384
    prefill_chunk: int | None = None
    samples: int = 1
    draft: str | None = None
    drafts: int = 7
    dtype: str = "bfloat16"
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False
    implementation: str | None = None
    keep_logits: bool = False
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "capacity", "page_size", "chunk", "prefill", "drafts", "samples"):
            at_least_1(name, getattr(self, name))
        for name in ("pages", "prefill_chunk"):
            if getattr(self, name) is not None:
                at_least_1(name, getattr(self, name))
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling: expected a Sampling, got {described(self.sampling)}")
        if not (isinstance(self.stop_ids, tuple) and all(map(is_int, self.stop_ids))):
            raise ValueError(
                f"stop_ids: expected a tuple of tokens, ints, got {described(self.stop_ids)}"
            )
        if not isinstance(self.logprobs, bool):
            raise ValueError(f"logprobs: expected True or False, got {described(self.logprobs)}")
        lm_mesh.check(self.mesh)
        check_dtype(self.dtype)
        if self.cache not in CACHES:
            raise ValueError(f"cache: expected one of {CACHES}, got {described(self.cache)}")
        if self.samples > 1:
            self._refuse_samples()
        if self.draft is not None and self.draft not in DRAFTS:
            raise ValueError(
                f"draft: expected one of {DRAFTS} or None, got {described(self.draft)}"
            )

    def _refuse_samples(self) -> None:
        """Raises ValueError where several answers are not possible, or would all be the same."""
        for name, wrong, wanted in (
            ("cache", self.cache != "paged", "'paged', whose pages are forked,"),
            ("samples", not self.sampling.draws, "1, or a temperature,"),
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
