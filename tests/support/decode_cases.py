"""Decode calls for kernels over caches: a case, its arrays, and the comparison with the oracle."""

import dataclasses
import functools
import sys
from collections.abc import Container, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import CAUSAL, Mask, MaskFunction, ScoreFunction, score_fn, trees
from pallas_attn._call import reference, selection
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.decode_mla import sm90 as mla_sm90
from pallas_attn.kernels.decode_mla import sm90_common, sm90_few_rows
from tests.support import boundaries, definition, hard_data, in_numpy

KINDS = ("per_sequence", "stacked", "paged")
every_kind = pytest.mark.parametrize("kind", KINDS)


def turns(names: Iterable[str], of_every_kind: Container[str]) -> list[tuple[str, str]]:
    """Names with kinds of caches: some with all, the others with one each, in turns."""
    return [
        (name, kind)
        for n, name in enumerate(names)
        for kind in (KINDS if name in of_every_kind else (KINDS[n % 3],))
    ]


LENGTHS = (0, 1, 63, 64, 65, 130, 200)


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode call; `capacity` is rounded up to pages, and differs by sequence where it may."""

    kind: str = "stacked"
    lengths: tuple[int, ...] = LENGTHS
    q_len: int = 1
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    capacity: int = 208
    page_size: int = 16
    layers: int | None = None
    dtype: str = "bfloat16"
    mask: Mask = CAUSAL
    softcap: float | None = None
    sinks: bool = False
    precision: str | None = None
    batch_invariant: bool = False
    # A mask function, whose band `mask` has, or "tree": the rows are drafts of a random tree.
    hides: Any = None
    # A function (b, h, q, kv, *arrays) of NumPy and jax that is added to scores, and its arrays
    adds: tuple[Any, ...] = ()

    @property
    def capacities(self) -> tuple[int, ...]:
        if self.kind == "per_sequence":
            return tuple(self.capacity + 8 * (m % 3) for m in range(len(self.lengths)))
        if self.kind == "paged":
            return (-(-self.capacity // self.page_size) * self.page_size,) * len(self.lengths)
        return (self.capacity,) * len(self.lengths)

    @property
    def small(self) -> bool:
        """Whether NumPy computes it in less time than XLA compiles it."""
        scores = len(self.lengths) * self.q_heads * self.q_len * max(self.capacities, default=0)
        return scores * (self.head_dim + self.v_head_dim) <= 2**29

    @property
    def pages(self) -> int | None:
        if self.kind != "paged":
            return None
        return sum(self.capacities) // self.page_size + 3

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(
            gpu="sm90",
            kind=self.kind,
            dtype=self.dtype,
            cache_dtype=self.dtype,
            sequences=len(self.lengths),
            q_len=self.q_len,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            capacities=self.capacities,
            mask=self.mask,
            scale=self.head_dim**-0.5,
            softcap=self.softcap,
            page_size=self.page_size if self.kind == "paged" else None,
            pages=self.pages,
            layers=self.layers,
            sinks=self.sinks,
            precision=self.precision,
            batch_invariant=self.batch_invariant,
            mask_program=None if self.function is None else self.function.program,
            tree=self.hides == "tree",
            score_program=None if self.score is None else self.score.program,
        )

    @functools.cached_property
    def score(self) -> ScoreFunction | None:
        if not self.adds:
            return None
        function, *arrays = self.adds
        return score_fn(lambda s, *at: s + function(*at), *arrays)

    @functools.cached_property
    def function(self) -> MaskFunction | None:
        if self.hides != "tree":
            return self.hides
        return _tree_of(len(self.lengths), self.q_len)

    def shapes(self, dim: int) -> tuple[tuple[int, ...], ...]:
        layers = () if self.layers is None else (self.layers,)
        if self.kind == "per_sequence":
            return tuple((*layers, self.kv_heads, c, dim) for c in self.capacities)
        rows = (len(self.lengths), self.kv_heads, self.capacity)
        if self.kind == "paged":
            rows = (self.pages, self.kv_heads, self.page_size)
        return ((*layers, *rows, dim),)

    def inputs(self, seed: int = 0, fill: float | None = None) -> DecodeInputs:
        """Arrays; `fill` is what lies past the lengths, and in layers that are not asked for."""
        rng = np.random.default_rng(seed)
        table = self._table(rng)
        caches = []
        for dim in (self.head_dim, self.v_head_dim):
            arrays = [rng.standard_normal(shape) for shape in self.shapes(dim)]
            if fill is not None:
                arrays = self._filled(arrays, table, fill)
            arrays = tuple(jnp.asarray(x.astype(jnp.dtype(self.dtype))) for x in arrays)
            caches.append(arrays if self.kind == "per_sequence" else arrays[0])
        q = rng.standard_normal((len(self.lengths), self.q_len, self.q_heads, self.head_dim))
        return DecodeInputs(
            jnp.asarray(q.astype(jnp.dtype(self.dtype))),
            *caches,
            jnp.asarray(self.lengths, jnp.int32),
            None if table is None else jnp.asarray(table),
            None if self.layers is None else jnp.int32(self.layers - 1),
            self._sinks(rng) if self.sinks else None,
            mask_aux=() if self.function is None else self.function.aux,
            score_aux=() if self.score is None else self.score.aux,
        )

    def _sinks(self, rng):
        sinks = rng.standard_normal(self.q_heads)
        if self.q_heads > 2:
            sinks = hard_data.sinks_without_end(sinks)
        return jnp.asarray(sinks, jnp.float32)

    def _table(self, rng):
        if self.kind != "paged":
            return None
        width = self.capacities[0] // self.page_size
        order = rng.permutation(self.pages)[: width * len(self.lengths)]
        return order.reshape(len(self.lengths), width).astype(np.int32)

    def _filled(self, arrays, table, fill):
        kept = [np.full_like(x, fill) for x in arrays]
        lead = () if self.layers is None else (self.layers - 1,)
        for m, length in enumerate(self.lengths):
            for row in range(min(length, self.capacities[m])):
                which, where = 0, (m, slice(None), row)
                if self.kind == "per_sequence":
                    which, where = m, (slice(None), row)
                if self.kind == "paged":
                    slot, row = divmod(row, self.page_size)
                    where = (table[m, slot], slice(None), row)
                kept[which][(*lead, *where)] = arrays[which][(*lead, *where)]
        return kept


@dataclasses.dataclass(frozen=True)
class Quantized(Case):
    """Rows of `stored` numbers with a scale each, which is NaN past the length. Row maxima rise
    behind the first tile, or from page to page. `exact`: scales are powers of two, so bfloat16
    holds the rows.
    """

    stored: str = "int8"
    exact: bool = False

    @property
    def problem(self) -> DecodeProblem:
        return dataclasses.replace(super().problem, cache_dtype=self.stored, quantized=True)

    def inputs(self, seed: int = 0, fill: float | None = None) -> DecodeInputs:
        rng = np.random.default_rng(seed)
        inputs = super().inputs(seed)
        shapes = self.shapes(self.head_dim), self.shapes(self.v_head_dim)
        scales = [[self._scales(rng, shape[:-1]) for shape in side] for side in shapes]
        for scale in scales[0]:
            loud = scale[..., ::2, :, :] if self.kind == "paged" else scale[..., boundaries.TILE :]
            loud *= 16
        if fill is not None:
            scales = [self._filled(x, np.asarray(inputs.page_table), fill) for x in scales]
        rows = [[self._numbers(rng, shape) for shape in side] for side in shapes]
        k, v, k_scale, v_scale = (
            tuple(map(jnp.asarray, x)) if self.kind == "per_sequence" else jnp.asarray(x[0])
            for x in (*rows, *scales)
        )
        return inputs._replace(k_cache=k, v_cache=v, k_scale=k_scale, v_scale=v_scale)

    def _scales(self, rng, shape):
        scales = rng.uniform(0.01, 0.03, shape)
        scales = 2.0 ** np.round(np.log2(scales)) if self.exact else scales
        return scales.astype(np.float32)

    def _numbers(self, rng, shape):
        """With scales as of int8: within 127."""
        return rng.integers(-127, 128, shape).astype(jnp.dtype(self.stored))

    def widened(self, inputs: DecodeInputs) -> DecodeInputs:
        """The rows as they are read, in float32."""

        def exactly(rows, scale):
            return np.asarray(rows, np.float32) * np.asarray(scale)[..., None]

        k = jax.tree.map(exactly, inputs.k_cache, inputs.k_scale)
        v = jax.tree.map(exactly, inputs.v_cache, inputs.v_scale)
        return inputs._replace(k_cache=k, v_cache=v)


@functools.cache
def _tree_of(sequences: int, drafts: int) -> MaskFunction:
    parents = some_parents(sequences, drafts)
    bits = jax.jit(lambda parents: trees.DraftTree.create(parents).bits)(parents)
    return MaskFunction(trees.program(bits.shape), (bits,))


def run(inputs, *, problem, config):
    """By the kernel whose configuration it is; kernels of latent caches for Hopper share theirs."""
    module = sys.modules[type(config).__module__]
    kernel = _latent_kernel(problem) if module is sm90_common else module.KERNEL
    return kernel.run(inputs, problem, config)


def _latent_kernel(problem):
    return (mla_sm90 if selection.few_latent_rows(problem) else sm90_few_rows).KERNEL


def of_reference(case: Case, inputs: DecodeInputs):
    call = functools.partial(reference.decode, problem=case.problem)
    return in_numpy.call(call, inputs) if case.small else jax.jit(call)(inputs)


def of_definition(case: Case, inputs: DecodeInputs) -> tuple[np.ndarray, np.ndarray]:
    """The same in float64, in NumPy: no program to compile for each case."""
    if case.function is not None and not case.problem.tree:
        return of_reference(case, inputs)
    lengths = np.asarray(inputs.lengths)
    (k, lost), (v, _) = (_dense(case, inputs, cache) for cache in (inputs.k_cache, inputs.v_cache))
    arrays = {"q": inputs.q, "k": k, "v": v, "q_offset": lengths - case.q_len}
    arrays["kv_lengths"] = lengths
    if case.sinks:
        arrays["sinks"] = inputs.sinks
    if case.adds:
        arrays["bias"] = added(case, lengths, k.shape[1])
    if case.problem.tree:
        parents = some_parents(len(lengths), case.q_len)
        arrays["mask_array"] = seen_in_tree(parents, lengths, k.shape[1])
    result = definition.attention(arrays, mask=case.mask, softcap=case.softcap)
    lost = lost[:, None, None]
    return np.where(lost[..., None], np.nan, result["out"]), np.where(lost, np.nan, result["lse"])


def added(case: Case, lengths: np.ndarray, keys: int) -> np.ndarray:
    """float[M, N, t, keys]: what the score function adds, where positions are not negative."""
    function, *arrays = case.adds
    sizes = len(lengths), case.q_heads, case.q_len, keys
    b, h, t, kv = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, sizes))])
    q = np.maximum(t + (lengths - case.q_len).astype(np.int32)[:, None, None, None], 0)
    return np.broadcast_to(function(b, h, q, kv, *arrays), sizes)


def _dense(case: Case, inputs: DecodeInputs, cache) -> tuple[np.ndarray, np.ndarray]:
    """Rows [M, S, K, H] of one layer, and whether a sequence lacks some before its length."""
    layer = () if case.layers is None else (int(inputs.layer),)
    each = [np.asarray(x)[layer] for x in (cache if case.kind == "per_sequence" else (cache,))]
    there = np.asarray(case.capacities)[:, None] > np.arange(max(case.capacities))
    if case.kind == "paged":
        table = np.asarray(inputs.page_table)
        known = (table >= 0) & (table < case.pages)
        pages = each[0][np.where(known, table, 0)]  # [M, width, K, page, H]
        each = [np.concatenate(list(rows), axis=1) for rows in pages]
        there = np.repeat(known, case.page_size, axis=1)
    if case.kind == "stacked":
        each = list(each[0])
    rows = np.zeros((len(each), there.shape[1], case.kv_heads, each[0].shape[-1]), each[0].dtype)
    for m, have in enumerate(each):
        rows[m, : have.shape[1]] = have.swapaxes(0, 1)
    lengths = np.asarray(inputs.lengths)[:, None]
    lost = (~there & (np.arange(there.shape[1]) < lengths)).any(axis=1)
    return rows, lost | (lengths[:, 0] > there.shape[1])


def some_parents(sequences: int, drafts: int) -> np.ndarray:
    """int32[M, t]: trees at random, of which the first is a chain, the second a star, the third a
    forest; numbers that name no earlier draft come from all of int32.
    """
    rng, at = np.random.default_rng(drafts), np.arange(drafts)
    parents = rng.integers(-1, np.maximum(at, 1), (sequences, drafts))
    parents[:1] = at - 1
    parents[1:2] = 0
    none = np.array([-(2**31), 2**31 - 1, -1, drafts])[at % 4]
    parents[2:3] = np.where(at % 3 == 0, none, parents[2:3])
    parents[3:, :1] = 2**31 - 1
    parents[3:, 1:2] = -(2**31)
    return parents.astype(np.int32)


def ancestors(parents):
    """bool[M, t, t]: whether a draft is another or an ancestor of it, one step after the other."""
    known = np.zeros((*parents.shape, parents.shape[1]), bool)
    for m, tree in enumerate(parents):
        for draft in range(len(tree)):
            at = draft
            known[m, draft, at] = True
            while 0 <= tree[at] < at:
                at = tree[at]
                known[m, draft, at] = True
    return known


def seen_in_tree(parents, lengths, keys):
    """bool[M, 1, t, keys]: the rows before the drafts, and ancestors."""
    sequences, drafts = parents.shape
    seen = np.zeros((sequences, 1, drafts, keys), bool)
    for m, (length, known) in enumerate(zip(lengths, ancestors(parents), strict=True)):
        begin = length - drafts
        seen[m, 0, :, : max(begin, 0)] = True
        for row in range(max(begin, 0), length):
            seen[m, 0, :, row] = known[:, row - begin]
        seen[m, 0, : max(-begin, 0)] = False  # drafts that the cache does not hold
    return seen


def launched(case: Case, inputs: DecodeInputs, config=None):
    kernel = _latent_kernel(case.problem) if case.problem.shared_kv else decode_sm90.KERNEL
    config = config or kernel.config.default(case.problem)
    program = _kept if jax.default_backend() == "gpu" else _fresh  # interpreted kernels: each time
    return program(case.problem, config)(inputs)


def _fresh(problem, config):
    return jax.jit(functools.partial(run, problem=problem, config=config))


_kept = functools.lru_cache(maxsize=8)(_fresh)


def check(case: Case, config=None, seed: int = 0):
    """The kernel against the oracle, with NaN past every length.

    The oracle computes in float64 or float32, the kernel in 16 bits: an output is off by a
    rounding of p (a share of the values' size) and one of its own. float32 it takes as it is.
    """
    out, lse = launched(case, case.inputs(seed, fill=np.nan), config)
    if isinstance(case, Quantized):
        want, want_lse = of_definition(case, case.widened(case.inputs(seed)))
        close(out, want, 2.0**-6, 2.0**-6)
        close(lse, want_lse, 1e-3, 1e-3)
        return
    assert out.dtype == jnp.dtype(case.dtype) and lse.dtype == jnp.float32
    inputs = case.inputs(seed, fill=0.0)
    by_definition = case.small and inputs.v_cache is not None
    want, want_lse = (of_definition if by_definition else of_reference)(case, inputs)
    step = float(jnp.finfo(case.dtype).eps)
    if case.dtype == "float32":
        step = 2.0**-20
    close(out, want, 2 * step, 2 * step)
    close(lse, want_lse, 1e-5, 1e-5)


def close(got, want, rtol, atol):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, equal_nan=True)


def shapes_of(case: Case) -> DecodeInputs:
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # noqa: E731
    caches = []
    for dim in (case.head_dim, case.v_head_dim):
        arrays = tuple(of(shape, case.dtype) for shape in case.shapes(dim))
        caches.append(arrays if case.kind == "per_sequence" else arrays[0])
    m = len(case.lengths)
    table = of((m, case.capacities[0] // case.page_size), "int32")
    return DecodeInputs(
        of((m, case.q_len, case.q_heads, case.head_dim), case.dtype),
        *caches,
        of((m,), "int32"),
        table if case.kind == "paged" else None,
        None if case.layers is None else of((), "int32"),
        of((case.q_heads,), "float32") if case.sinks else None,
        score_aux=() if case.score is None else case.score.aux,
    )
