"""Our subjects: each operation through the public API, on the arrays of a case."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn
from benchmarks import verify
from benchmarks.rows import OF_CASES
from tests.support.problems import by_name
from tests.support.problems.case import AppendCase, AttentionCase, DecodeCase
from tests.support.problems.cases import Case

Cache = Any  # a cache of any kind
Jitted = Any  # a function as jax.jit returns it
Directions = Any  # the cotangent of out, the tangents of q, k and v, or None
Function = Callable[[Any, Any, Any, dict[str, Any]], Any]  # (q, k, v, other arrays) -> out


class Step:
    """A jitted function and its arguments, compiled when it is first called."""

    def __init__(self, jitted: Jitted, arguments: tuple[Any, ...]):
        self.jitted, self.arguments = jitted, arguments

    @functools.cached_property
    def compiled(self) -> Any:
        return self.jitted.lower(*self.arguments).compile()

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)

    @property
    def memory_mib(self) -> int:
        """Memory beside its arguments and results."""
        return round(self.compiled.memory_analysis().temp_size_in_bytes / 2**20)


def attention_launch(
    function: Function,
    arrays: dict[str, Any],
    cotangent: Directions,
    op: str,
    learned: bool = False,
) -> Callable[[], Any]:
    """A launch of attention for op `op`. It returns (out,); with gradients (out, dq, dk, dv), and
    in a training step the gradient of a bias; for "jvp" (out, its tangent), where `cotangent` holds
    the tangents of q, k and v. `learned`: gradients include those of a score function's arrays.
    """
    names = ("q", "k", "v")
    q, k, v = (arrays[name] for name in names)
    rest = {name: array for name, array in arrays.items() if name not in names}
    if op == "forward":
        return Step(jax.jit(lambda *operands: (function(*operands),)), (q, k, v, rest))
    if op == "forward+backward":

        def with_aux(q, k, v, rest, do):
            of_all = lambda q, k, v, aux: function(q, k, v, rest | {"aux": aux})  # noqa: E731
            out, pullback = jax.vjp(of_all, q, k, v, rest["aux"])
            *gradients, of_aux = pullback(do)
            return (out, *gradients, *of_aux)

        def both(q, k, v, rest, do):
            biases = {name: x for name, x in rest.items() if name == "bias"}

            def forward(q, k, v, biases):
                return function(q, k, v, rest | biases)

            out, pullback = jax.vjp(forward, q, k, v, biases)
            *gradients, of_biases = pullback(do)
            return (out, *gradients, *of_biases.values())

        return Step(jax.jit(with_aux if learned else both), (q, k, v, rest, cotangent))
    if op == "jvp":

        def along(q, k, v, rest, tangents):
            return jax.jvp(lambda q, k, v: function(q, k, v, rest), (q, k, v), tangents)

        return Step(jax.jit(along), (q, k, v, rest, cotangent))
    if op != "backward":
        wanted = "forward, forward+backward, backward or jvp"
        raise ValueError(f"op: expected {wanted}, got {op!r}")
    forward = jax.jit(function)
    out, residuals = jax.vjp(lambda q, k, v: forward(q, k, v, rest), q, k, v)
    pull = jax.jit(lambda pullback, do: pullback(do))
    return lambda: (out, *pull(residuals, cotangent))


def attention(
    case: AttentionCase,
    arrays: dict[str, Any],
    cotangent: Directions,
    op: str,
    implementation: str | None,
) -> Callable[[], Any]:
    """A launch of `flash_attention`, with the derivatives that `op` names."""
    static = case.options() | {"implementation": implementation}
    if case.packed:
        arrays = {name: x for name, x in arrays.items() if name != "segment_ids"}
        arrays["q_starts"] = case.q_starts()

    def function(q, k, v, rest):
        if case.function is not None:
            rest = dict(rest)
            aux, positions = rest.pop("aux"), case.positions()
            rest["mask"] = pallas_attn.mask_fn(positions.mask, *aux)
            if positions.score is not None:
                rest["score"] = pallas_attn.score_fn(positions.score, *aux)
            return by_name.flash_attention(q, k, v, **static | rest)
        if case.packed:
            q, k, v = (x[0] for x in (q, k, v))
            return by_name.flash_attention(q, k, v, **rest, **static)[None]
        return by_name.flash_attention(q, k, v, **rest, **static)

    return attention_launch(function, arrays, cotangent, op, case.learned)


def measure_of(op: str, case: Case) -> str:
    """The measure of attention that an operation of the benchmark is."""
    if op == "float8":
        return "forward"
    if op not in OF_CASES:
        return op
    assert isinstance(case, AttentionCase)
    return "forward+backward" if case.both else "forward"


def empty_cache(case: DecodeCase | AppendCase) -> Cache:
    """A cache of the case's kind with room for all its rows; pages will be given out shuffled."""
    dims: dict[str, Any] = {"v_head_dim": case.v_head_dim, "dtype": case.cache_dtype or case.dtype}
    if isinstance(case, DecodeCase):
        dims["shared_kv"] = case.shared_kv
        dims |= {"scales": 128} if case.byte_rows else {}
    sizes = (case.kv_heads, case.head_dim)
    capacities = (case.capacity,) if isinstance(case, DecodeCase) else case.capacities
    if case.kind == "per_sequence":
        each = capacities if len(capacities) == case.sequences else capacities * case.sequences
        return pallas_attn.PerSequenceCache.create(each, *sizes, **dims)
    if case.kind == "stacked":
        return pallas_attn.StackedCache.create(case.sequences, capacities[0], *sizes, **dims)
    assert case.page_size is not None
    pages = case.sequences * -(-capacities[0] // case.page_size)
    cache = pallas_attn.PagedCache.create(
        case.sequences, pages, case.page_size, *sizes, capacity=capacities[0], **dims
    )
    order = jax.random.permutation(jax.random.key(1), pages).astype(jnp.int32)
    return dataclasses.replace(cache, free_list=order)


def filled_cache(case: DecodeCase, arrays: dict[str, Any]) -> Cache:
    """The case's dense, head-major k and v as a cache that holds `lengths` rows a sequence."""
    if case.shared:
        return _shared_cache(case, arrays)
    cache = empty_cache(case).extend(arrays["lengths"])
    k, v = arrays["k"], arrays["v"]
    if case.cache_dtype or case.shared_kv:
        new = [jnp.swapaxes(x, 1, 2) for x in ((k,) if case.shared_kv else (k, v))]
        return jax.jit(pallas_attn.write_kv, donate_argnums=0)(cache, *new)
    if case.kind == "per_sequence":
        return dataclasses.replace(cache, k=tuple(k), v=tuple(v))
    if case.kind == "stacked":
        return dataclasses.replace(cache, k=k, v=v)
    pools = [_into_pages(x, cache.page_table, cache.pages) for x in (k, v)]
    return dataclasses.replace(cache, k=pools[0], v=pools[1])


def _shared_cache(case: DecodeCase, arrays: dict[str, Any]) -> Cache:
    """`filled_cache` of pages that sequences share, and of no other pages."""
    cache = jax.eval_shape(functools.partial(empty_cache, dataclasses.replace(case, shared=())))
    width, page_size = cache.page_table.shape[1], cache.page_size
    own = np.arange(case.sequences * width).reshape(-1, width)
    owner = case.first_with(np.arange(width) * page_size)
    numbers, table = np.unique(np.take_along_axis(own, owner, axis=0), return_inverse=True)
    order = np.random.default_rng(1).permutation(numbers.size)
    mixed = jnp.asarray(order[table].reshape(own.shape), jnp.int32)
    small = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), dataclasses.replace(cache, k=None, v=None)
    )
    pools = {name: _into_pages(arrays[name], mixed, numbers.size) for name in ("k", "v")}
    return dataclasses.replace(small, **pools, page_table=mixed, lengths=arrays["lengths"])


def held_rows(case: DecodeCase, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """k and v as `[M, S, K, H]`, as the case's cache gives them back: a loss by quantising them is
    no error of a reader.
    """
    k, v = arrays["k"], arrays["v"]
    if case.byte_rows:
        cache = filled_cache(dataclasses.replace(case, kind="stacked", page_size=None), arrays)
        k = verify.latent_rows(cache.k)
        v = k[..., : case.v_head_dim]
    elif case.cache_dtype:
        cache = filled_cache(dataclasses.replace(case, kind="stacked", page_size=None), arrays)
        k = cache.k.astype(jnp.float32) * cache.k_scale[..., None]
        v = k[..., : case.v_head_dim]
        if not case.shared_kv:
            v = cache.v.astype(jnp.float32) * cache.v_scale[..., None]
    return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def packed_places(case: DecodeCase) -> tuple[jax.Array, jax.Array]:
    """The sequence of every packed row, and its number there."""
    assert case.rows is not None
    places = [jnp.arange(n, dtype=jnp.int32) for n in case.rows]
    owners = [jnp.full(n, m, jnp.int32) for m, n in enumerate(case.rows)]
    return jnp.concatenate(owners), jnp.concatenate(places)


def _into_pages(dense: jax.Array, table: jax.Array, pages: int) -> jax.Array:
    """[M, K, S, H] as a pool [pages, K, page_size, H] in the order of the page table."""
    m, heads, rows, dim = dense.shape
    width = table.shape[1]
    size = -(-rows // width)
    dense = jnp.pad(dense, ((0, 0), (0, 0), (0, width * size - rows), (0, 0)))
    blocks = jnp.moveaxis(dense.reshape(m, heads, width, size, dim), 1, 2)
    pool = jnp.zeros((pages, heads, size, dim), dense.dtype)
    place = jnp.where(table >= 0, table, pages).reshape(-1)
    return pool.at[place].set(blocks.reshape(-1, heads, size, dim), mode="drop")


def decode(
    case: DecodeCase, arrays: dict[str, Any], implementation: str | None, *, shared: bool = False
) -> Callable[[], Any]:
    """`decode_attention` over a cache that is full to its lengths; `shared`: shared rows are read
    once. A tree is made beforehand, as a model makes it once for all of its layers. So are shared
    prefixes, unless the time to find them counts.
    """
    if case.kind == "interleaved":
        return _over_interleaved_pages(case, arrays, implementation)
    cache, parents = filled_cache(case, arrays), case.parents()
    static = case.options() | {"implementation": implementation}
    tree, starts = None, case.starts()
    if parents is not None:
        most = {} if case.rows is None else {"drafts_most": max(case.rows)}
        tree = pallas_attn.DraftTree.create(parents, starts, **most)
    find = functools.partial(pallas_attn.PagedCache.shared_prefixes, levels=2)
    rest = {"sinks": arrays.get("sinks"), "starts": starts, "parents": tree}
    if (indices := case.indices()) is not None:
        rest["kv_indices"] = jnp.asarray(indices)
    if (score := case.score()) is not None:
        rest["score"] = score
    if shared and not case.finding:
        rest["shared_prefixes"] = jax.jit(find)(cache)

    def step(q, cache, rest):
        if shared and case.finding:
            rest = rest | {"shared_prefixes": find(cache)}
        elif shared:  # a layer of the step that made them, which compares nothing
            searched = cache.lengths, cache.page_table, None
            made = dataclasses.replace(rest["shared_prefixes"], searched=searched)
            rest = rest | {"shared_prefixes": made}
        return (pallas_attn.decode_attention(q, cache, **rest, **static),)

    return Step(jax.jit(step), (arrays["q"], cache, rest))


def _over_interleaved_pages(
    case: DecodeCase, arrays: dict[str, Any], implementation: str | None
) -> Callable[[], Any]:
    """A launch of `ragged_paged_attention` over the rows of a `PagedCache`, interleaved."""
    cache = filled_cache(dataclasses.replace(case, kind="paged"), arrays)
    pages = jnp.swapaxes(jnp.stack([cache.k, cache.v], axis=2), 1, 3)  # [pages, rows, 2, K, H]
    pages = jnp.swapaxes(pages, 2, 3).reshape(*pages.shape[:2], -1, case.head_dim)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    options: dict[str, Any] = {"sm_scale": scale, "soft_cap": case.softcap}
    options["implementation"], left = implementation, case.mask.left
    options["sliding_window"] = None if left is None else left + 1
    count = jnp.array([case.sequences], jnp.int32)
    operands = (arrays["q"], pages, cache.lengths, cache.page_table, case.starts(), count)

    def step(*operands):
        return (pallas_attn.ragged_paged_attention(*operands, **options),)

    return Step(jax.jit(step), operands)


class Repeated:
    """Calls of `step(state, *rest) -> (state, ...)`; each is donated the state of the last one."""

    def __init__(self, step: Callable[..., tuple[Any, ...]], state: Any, *rest: Any):
        self.step, self.state, self.rest = jax.jit(step, donate_argnums=0), state, rest

    def __call__(self) -> Any:
        self.state, *_ = self.step(self.state, *self.rest)
        return self.state


def writes(case: AppendCase, arrays: dict[str, Any], implementation: str | None) -> Repeated:
    """`write_kv` of rows that were taken once, or `cache.keep` of drafts; lengths stay."""
    cache, new = extended(case, arrays), (arrays["k"], arrays["v"])
    if case.kept is None:
        write = functools.partial(pallas_attn.write_kv, implementation=implementation)
        return Repeated(lambda *operands: (write(*operands),), cache, *new)

    def keep(cache, counts, path):
        kept = cache.keep(counts, path, implementation=implementation)
        before = {"lengths": cache.lengths, "new_lengths": cache.new_lengths}
        # The lengths are returned since they are part of the work.
        return dataclasses.replace(kept, **before), kept.lengths, kept.new_lengths

    held = jax.jit(pallas_attn.write_kv, donate_argnums=0)(cache, *new)
    counts = jnp.full(case.sequences, case.kept, jnp.int32)
    return Repeated(keep, held, counts, case.path())


def extended(case: AppendCase, arrays: dict[str, Any]) -> Cache:
    """A cache of random rows that has taken the rows that an append writes."""
    cache = noisy(empty_cache(case)).extend(arrays["lengths"])
    return cache.extend(arrays.get("new_lengths", case.new_rows))


def noisy(cache: Cache) -> Cache:
    """The cache with random rows in place of zeros, so that a stray write cannot hide."""
    leaves, structure = jax.tree.flatten(buffers(cache))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    filled = [jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype) for key, x in pairs]
    return dataclasses.replace(cache, **jax.tree.unflatten(structure, filled))


def buffers(cache: Cache) -> dict[str, Any]:
    """The buffers that an append writes to: k and v, and the scales of a quantised cache."""
    held = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
    return {name: x for name, x in held.items() if x is not None}
