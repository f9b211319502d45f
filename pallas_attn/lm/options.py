"""Options of a decode run, and which of them are refused."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from pallas_attn import prefixes
from pallas_attn.cache import KVCache, PagedCache, PerSequenceCache, StackedCache
from pallas_attn.errors import described
from pallas_attn.lm import mesh as lm_mesh
from pallas_attn.lm.config import Config
from pallas_attn.lm.sampling import Sampling, at_least_1, is_int

CACHES = ("per_sequence", "stacked", "paged")
DRAFTS = ("ngram",)
DTYPES = ("bfloat16", "float16", "float32")


def check_dtype(dtype: object) -> None:
    """ValueError for a dtype in which no model runs."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype!r}")


@dataclasses.dataclass(frozen=True)
class Options:
    """The way to decode. A jit key."""

    cache: str = "per_sequence"
    slots: int = 8
    capacity: int = 512  # rows of each slot
    page_size: int = 64
    pages: int | None = None  # in the whole pool; None: enough for every slot's capacity
    chunk: int = 16  # steps inside one jit
    prefill: int = 16384  # tokens that one prefill takes at most, padding counted
    prefill_chunk: int | None = None  # rows of prompts that a step takes; None: prompts are whole
    samples: int = 1  # answers to each prompt, which is prefilled once and forked
    draft: str | None = None  # source of drafts: "ngram", or None
    drafts: int = 7  # taken by a step, of each sequence
    dtype: str = "bfloat16"
    sampling: Sampling = Sampling()
    stop: tuple[int, ...] = ()
    implementation: str | None = None
    keep_logits: bool = False
    mesh: Mesh | None = None  # devices that heads and columns of the model are split over

    def __post_init__(self) -> None:
        for name in ("slots", "capacity", "page_size", "chunk", "prefill", "drafts", "samples"):
            at_least_1(name, getattr(self, name))
        for name in ("pages", "prefill_chunk"):
            if getattr(self, name) is not None:
                at_least_1(name, getattr(self, name))
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling: expected a Sampling, got {described(self.sampling)}")
        if not (isinstance(self.stop, tuple) and all(map(is_int, self.stop))):
            raise ValueError(f"stop: expected a tuple of tokens, ints, got {described(self.stop)}")
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
        """Raises ValueError where several answers cannot be, or would all be the same."""
        for name, wrong, wanted in (
            ("cache", self.cache != "paged", "'paged', whose pages are forked,"),
            ("samples", not self.sampling.draws, "1, or a temperature,"),
            ("slots", self.slots < self.samples, f"at least {self.samples}"),
        ):
            if wrong:
                raise ValueError(
                    f"{name}: expected {wanted} for {self.samples} samples of a prompt, got "
                    f"{getattr(self, name)!r}"
                )

    @property
    def pool(self) -> int:
        """Pages of the pool."""
        return self.pages or self.slots * -(-self.rows // self.page_size)

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
        """Rows of each slot, those of drafts as well: then a multiple of 8, as kernels want it."""
        return -(-(self.capacity + self.ahead) // 8) * 8 if self.ahead else self.capacity

    def create_cache(self, config: Config) -> KVCache:
        sizes: dict[str, Any] = {
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "layers": config.layers,
            "dtype": self.dtype,
        }
        if self.cache == "per_sequence":
            return PerSequenceCache.create((self.rows,) * self.slots, **sizes)
        if self.cache == "stacked":
            return StackedCache.create(self.slots, self.rows, **sizes)
        return PagedCache.create(self.slots, self.pool, self.page_size, capacity=self.rows, **sizes)
