"""RoPE of q and k by `flash_attention(rotary=)`: against the definition, on every implementation;
positions of offsets, packed rows, documents and callers; gradients; under vmap, meshes, remat.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn import CAUSAL, Rotary
from tests.support import budget, subjects
from tests.support.problems import by_name
from tests.support.problems.case import AttentionCase
from tests.support.subjects import cotangents, forward_and_backward

pytestmark = pytest.mark.usefixtures("programs_in_numpy")
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)

SIZES = {"batch": 2, "q_len": 40, "kv_len": 70, "q_heads": 4, "kv_heads": 2}
SIZES |= {"head_dim": 64, "v_head_dim": 64}
PLAIN = AttentionCase("rotary", **SIZES, mask=CAUSAL, rotary=(0, 64, False))
CASES = (
    PLAIN,
    dataclasses.replace(PLAIN, name="offset", q_offset=30, rotary=(8, 24, True)),
    dataclasses.replace(
        PLAIN, name="odd", head_dim=36, q_lengths=(0, 33), kv_lengths=(70, 9), rotary=(4, 32, False)
    ),
    dataclasses.replace(
        PLAIN, name="positions", segments=(13, 17), q_offset=(-3, 50), rotary=(0, 16, True),
        rotary_positions=True,
    ),
)  # fmt: skip


def arguments_of(case):
    do, dlse = cotangents(case)
    return forward_and_backward, case.arguments(poison=True) | {"do": do, "dlse": dlse}


@pytest.mark.parametrize(
    "subject, case", subjects.pairs("flash_backward", CASES, arguments_of, interpreted=CASES[1:3])
)
def test_by_the_definition(subject, case):
    """Results, and gradients of q, k and v."""
    function, arguments = arguments_of(case)
    got = subject.call(function, **arguments)
    expected = budget.attention(
        case.arguments(), *cotangents(case), tensor_cores=subject.tensor_cores
    )
    budget.check(got, expected)


ROTARY = Rotary.create(64, 8, base=100.0)


def drawn(rng, *lead, rows=(24, 24), heads=(4, 2)):
    """q, k and v."""
    shapes = (*lead, rows[0], heads[0], 8), (*lead, rows[1], heads[1], 8)
    return [jnp.asarray(rng.standard_normal(shapes[i]), jnp.float32) for i in (0, 1, 1)]


def rotated(x, at, rotary=ROTARY):
    """x [.., rows, heads, 8] by hand."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = (jnp.broadcast_to(t[at][..., None, :], a.shape) for t in (rotary.cos, rotary.sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def loss(call, *args):
    """A random sum of the results."""
    out, lse = call(*args)
    weight = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return (weight * out).sum() + jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0).sum()


def test_the_tables_have_gradients(rng):
    """The ones that autodiff of a rotation by hand gives."""
    q, k, v = drawn(rng, 2)
    at = jnp.arange(24)

    def by_hand(q, k, v, rotary):
        q, k = (rotated(x, jnp.broadcast_to(at, x.shape[:2]), rotary) for x in (q, k))
        return by_name.flash_attention_with_lse(q, k, v, mask=CAUSAL)

    def ours(q, k, v, rotary):
        return by_name.flash_attention_with_lse(q, k, v, mask=CAUSAL, rotary=rotary)

    results = [
        jax.jit(jax.value_and_grad(functools.partial(loss, call), (0, 1, 2, 3)))(q, k, v, ROTARY)
        for call in (ours, by_hand)
    ]
    jax.tree.map(functools.partial(close, atol=2e-5), *results)


def test_positions_are_those_of_masks(rng):
    """Offsets of each batch row; one for all; and positions as the caller says."""
    q, k, v = drawn(rng, 2)
    call = functools.partial(by_name.flash_attention, mask=CAUSAL, rotary=ROTARY)
    offsets = jnp.array([3, 17], jnp.int32)
    at = offsets[:, None] + jnp.arange(24, dtype=jnp.int32)[None]
    rows = jnp.broadcast_to(jnp.arange(24), (2, 24))
    want = by_name.flash_attention(
        rotated(q, at), rotated(k, rows), v, mask=CAUSAL, q_offset=offsets
    )
    close(call(q, k, v, q_offset=offsets), want)
    close(call(q, k, v, q_offset=offsets, rotary_positions=(at, jnp.arange(24))), want)
    for row, offset in enumerate((3, 17)):
        close(call(q, k, v, q_offset=offset)[row], want[row])
    close(call(q, k, v), call(q, k, v, rotary_positions=jnp.arange(24) + 9))


def test_packed_rows_count_within_their_sequences(rng):
    q, k, v = drawn(rng, rows=(40, 50))
    starts, kv_starts = jnp.array([2, 9, 9, 31]), jnp.array([0, 12, 20, 44])
    offsets = jnp.array([5, 1, 2])
    got = by_name.flash_attention(
        q, k, v, mask=CAUSAL, q_starts=starts, kv_starts=kv_starts, q_offset=offsets, rotary=ROTARY
    )
    for m in range(3):
        rows, keys = (slice(int(x[m]), int(x[m + 1])) for x in (starts, kv_starts))
        alone = [x[None, part] for x, part in ((q, rows), (k, keys), (v, keys))]
        want = by_name.flash_attention(*alone, mask=CAUSAL, q_offset=int(offsets[m]), rotary=ROTARY)
        close(got[rows], want[0])
    assert not got[:2].any() and not got[31:].any()
    assert jnp.isfinite(got).all()
    two = (jnp.zeros(40, jnp.int32).at[9:31].set(jnp.arange(2, 24)), jnp.arange(50) % 24)
    assert by_name.flash_attention(
        q, k, v, q_starts=starts, kv_starts=kv_starts, rotary=ROTARY, rotary_positions=two
    ).shape == q.shape  # fmt: skip


def test_documents_as_if_alone(rng):
    """Their positions go on from document to document, which changes nothing; or begin anew."""
    q, k, v = drawn(rng, 1)
    ids = jnp.array([[0] * 7 + [1] * 12 + [2] * 5])
    within = jnp.concatenate([jnp.arange(n) for n in (7, 12, 5)])
    call = functools.partial(by_name.flash_attention_with_lse, mask=CAUSAL, rotary=ROTARY)
    out, lse = call(q, k, v, segment_ids=ids)
    again = call(q, k, v, segment_ids=ids, rotary_positions=within)
    short = dataclasses.replace(ROTARY, cos=ROTARY.cos[:12], sin=ROTARY.sin[:12])
    least = call(q, k, v, segment_ids=ids, rotary=short, rotary_positions=within[None])
    for begin, end in ((0, 7), (7, 19), (19, 24)):
        alone = call(*(x[:, begin:end] for x in (q, k, v)))
        for results in ((out, lse), again, least):
            close(results[0][:, begin:end], alone[0])
            close(results[1][..., begin:end], alone[1])


def test_a_prompt_is_that_of_the_cache(rng):
    """Rows that a cache rotates as it writes them, and queries that decoding rotates."""
    q, k, v = drawn(rng, 2)
    cache = pa.append_kv(pa.StackedCache.create(2, 32, 2, 8, dtype=q.dtype), k, v, rotary=ROTARY)
    want = pa.decode_attention(q, cache, rotary=ROTARY)
    close(by_name.flash_attention(q, k, v, mask=CAUSAL, rotary=ROTARY), want)


def test_positions_outside_of_the_tables(rng):
    """NaN for the rows that have them, and no gradients; in rows past a length nothing shows."""
    q, k, v = drawn(rng, 2)
    at = jnp.arange(24, dtype=jnp.int32).at[5].set(64).at[9].set(-1)
    keys = jnp.arange(24, dtype=jnp.int32).at[20].set(99)
    lengths = {"kv_lengths": jnp.array([20, 20]), "q_lengths": jnp.array([24, 9])}

    def run(q, k, positions):
        return by_name.flash_attention_with_lse(
            q, k, v, rotary=ROTARY, rotary_positions=positions, **lengths
        )

    out, _ = jax.jit(run)(q, k, (at, keys))
    lost = np.isnan(out).any((2, 3))
    np.testing.assert_array_equal(np.nonzero(lost[0])[0], [5, 9])
    np.testing.assert_array_equal(np.nonzero(lost[1])[0], [5])
    rows = jnp.array([0, 1, 2, 23])
    total = lambda q, k, at: jnp.nansum(run(q, k, at)[0][0, rows])  # noqa: E731
    dq, dk = jax.jit(jax.grad(total, (0, 1)))(q, k, (at, keys))
    assert jnp.isfinite(dq[1]).all() and not dq[0, 9].any() and not dk[:, 20:].any()


BEFORE = "{}: expected at least 0 with rotary, whose tables begin at position 0, got -1{}"
BEYOND = (
    "rotary.cos, rotary.sin: expected float[positions, pairs], positions at least the {} at which "
    "rows of q and k stand, got [64, 4] and [64, 4]"
)
AT = np.arange(24)
KNOWN = {  # arguments, the message, arguments of rows alone that lengths or starts leave out
    "positions": (
        {"rotary_positions": (np.where(AT == 5, 64, AT), AT)},
        BEYOND.format(65),
        {"q_lengths": np.array([5, 5])},
    ),
    "of_keys": (
        {"rotary_positions": (AT, np.stack([AT, np.where(AT == 20, -1, AT)]))},
        BEFORE.format("rotary.at", ""),
        {"kv_lengths": np.array([24, 20])},
    ),
    "offsets": ({"q_offset": np.array([0, 41])}, BEYOND.format(65), {"q_lengths": [24, 23]}),
    "offsets_below": (
        {"q_offset": np.array([-1, 0])},
        BEFORE.format("q_offset", "; pass rotary.at(positions)"),
        {"q_lengths": np.array([0, 9])},
    ),
    "packed_below": (
        {"q_starts": np.array([3, 13]), "q_offset": -1},
        BEFORE.format("q_offset", "; pass rotary.at(positions)"),
        None,
    ),
    "packed": (
        {"q_starts": [0, 4, 24], "q_offset": np.array([63, 45])},
        BEYOND.format(67),
        {"q_starts": [0, 0, 19]},
    ),
    "packed_positions": (
        {"q_starts": np.array([3, 13]), "rotary_positions": np.where(AT == 12, -1, AT)},
        BEFORE.format("rotary.at", ""),
        {"q_starts": np.array([0, 12])},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_positions_outside_of_the_tables(rng, name):
    """ValueErrors, in jit and outside, of the rows that count; at run time they give NaN."""
    options, message, others = KNOWN[name]
    packed = "q_starts" in options
    qkv = drawn(rng, *() if packed else (2,))
    arrays = {x: y for x, y in options.items() if not isinstance(y, int)}
    as_jax = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    of_jax = jax.tree.map(as_jax, arrays, is_leaf=lambda x: isinstance(x, list))

    def call(*qkv, **more):
        return by_name.flash_attention(*qkv, rotary=ROTARY, **options | more)

    for each in (arrays, of_jax):
        closed = functools.partial(call, **each)
        for run in (closed, jax.jit(lambda *qkv, closed=closed: closed(*qkv))):
            with pytest.raises(ValueError) as caught:
                run(*qkv)
            assert str(caught.value) == message
    if others is not None:  # rows of positions that others have
        assert jnp.isfinite(call(*qkv, **others)).all()
        lost = jnp.isnan(jax.jit(lambda arrays, qkv: call(*qkv, **arrays))(of_jax, qkv))
        assert lost.any() and not lost.all()


LIVE = jnp.array([9, 24]), jnp.array([20, 7])
BESIDE_NAN = {  # arguments, and the rows of q and of k that count
    "lengths": ({"q_lengths": LIVE[0], "kv_lengths": LIVE[1]}, LIVE),
    "offsets": ({"q_offset": jnp.array([0, 5]), "q_lengths": LIVE[0]}, (LIVE[0], None)),
    "positions": ({"rotary_positions": AT, "kv_lengths": LIVE[1]}, (None, LIVE[1])),
    "packed": ({"q_starts": jnp.array([0, 2, 9]), "kv_starts": jnp.array([0, 3, 20])}, (9, 20)),
}


@pytest.mark.parametrize("name", BESIDE_NAN)
def test_the_tables_have_gradients_beside_nan_past_a_length(rng, name):
    """Rows past a length read the same numbers of the tables as others do; tangents, too."""
    options, live = BESIDE_NAN[name]
    qkv = drawn(rng, *() if name == "packed" else (2,))

    def filled(x, ends, by):
        if ends is None:
            return x
        past = np.asarray(ends)[..., None] <= AT
        return jnp.asarray(np.where(past[..., None, None], np.float32(by), x))

    def gradients(by):
        q, k, v = (filled(x, live[n > 0], by) for n, x in enumerate(qkv))
        call = functools.partial(by_name.flash_attention_with_lse, mask=CAUSAL, **options)
        run = lambda rotary: loss(functools.partial(call, rotary=rotary), q, k, v)  # noqa: E731
        return jax.jit(jax.grad(run))(ROTARY), jax.jvp(run, (ROTARY,), (ROTARY,))[1]

    got, want = gradients(jnp.nan), gradients(0.0)
    assert np.abs(want[0].cos[:5]).max(axis=1).min() > 0
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---- transforms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", ["q", "qkv", "positions", "tables", "offsets"])
def test_vmap(rng, mapped):
    """One by one; and the gradients."""
    q, k, v = (
        x if name in mapped else x[0] for name, x in zip("qkv", drawn(rng, 3, 2), strict=True)
    )
    if mapped not in ("q", "qkv"):
        q, k, v = drawn(rng, 2)
    tables = jax.tree.map(lambda x: jnp.stack([x, x[::-1], x[:, ::-1]]), ROTARY)
    options = {
        "positions": {"rotary_positions": jnp.asarray(rng.integers(0, 64, (3, 2, 24)), jnp.int32)},
        "tables": {"rotary": tables},
        "offsets": {"q_offset": jnp.asarray(rng.integers(0, 30, (3, 2)), jnp.int32)},
    }.get(mapped, {})

    def gradients(q, k, v, options):
        how = {"rotary": ROTARY, **options}
        call = functools.partial(by_name.flash_attention_with_lse, mask=CAUSAL, **how)
        return jax.value_and_grad(functools.partial(loss, call), (0, 1, 2))(q, k, v)

    arrays = dict(zip("qkv", (q, k, v), strict=True))
    axes = [0 if mapped in ("q", "qkv") and n in mapped else None for n in "qkv"]
    axes.append(0 if options else None)
    got = jax.jit(jax.vmap(gradients, axes))(*arrays.values(), options)
    for i in range(3):
        pick = lambda x, axis, i=i: x if axis is None else jax.tree.map(lambda y: y[i], x)  # noqa: E731
        alone = gradients(*map(pick, (q, k, v, options), axes))
        jax.tree.map(functools.partial(close, atol=2e-5), pick(got, 0), alone)


@pytest.mark.by_xla
def test_the_tables_have_gradients_beside_nan_of_a_context(rng):
    """Rows of two devices, of which a length leaves some out on both."""
    q, k, v = drawn(rng, 2)
    ends = jnp.array([5, 20])
    mesh = jax.make_mesh((2,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows, context = P(None, "cp"), pa.Context("cp", "zigzag")

    def gradients(by):
        past = (np.asarray(ends)[:, None] <= AT)[..., None, None]
        arrays = [context.reorder(np.where(past, np.float32(by), x), 2) for x in (q, k, v)]

        def local(rotary, q, k, v):
            how = {"q_lengths": ends, "kv_lengths": ends, "mask": CAUSAL, "context": context}
            return by_name.flash_attention(q, k, v, rotary=rotary, **how)

        call = jax.shard_map(local, mesh=mesh, in_specs=(P(), *(rows,) * 3), out_specs=rows)
        return jax.jit(jax.grad(lambda rotary: (call(rotary, *arrays) ** 2).sum()))(ROTARY)

    got, want = gradients(jnp.nan), gradients(0.0)
    assert np.abs(want.cos[:20]).max(axis=1).min() > 0
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.by_xla
def test_in_shard_map_and_remat(rng):
    """Positions of the local part; a checkpoint that saves the names of results."""
    q, k, v = drawn(rng, 4)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention_out")

    def layer(q, k, v):
        return by_name.flash_attention_with_lse(q, k, v, mask=CAUSAL, rotary=ROTARY)

    def gradients(q, k, v):
        call = jax.checkpoint(layer, policy=policy)
        return jax.grad(functools.partial(loss, call), (0, 1, 2))(q, k, v)

    split = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    jax.tree.map(close, jax.jit(split)(q, k, v), layer(q, k, v))
    want = jax.grad(functools.partial(loss, layer), (0, 1, 2))(q, k, v)
    jax.tree.map(functools.partial(close, atol=2e-5), jax.jit(gradients)(q, k, v), want)


def test_export_with_symbolic_sizes(rng):
    """One exported program for every batch and length; longer than the tables is NaN."""
    run = jax.jit(
        functools.partial(by_name.flash_attention, mask=CAUSAL, rotary=ROTARY, q_offset=1)
    )
    batch, length = jax.export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((batch, length, n, 8), "float32") for n in (4, 2, 2)]
    exported = jax.export.export(run)(*shapes)
    arrays = drawn(rng, 2)
    close(exported.call(*arrays), run(*arrays))
    assert jnp.isnan(exported.call(*drawn(rng, 1, rows=(65, 65)))[0, 63:]).all()
