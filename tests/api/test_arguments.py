"""The arguments of attention and decode: each reaches its call under its own name."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import attention, decode
from pallas_attn._cache.bind import DecodeCall
from pallas_attn._call.bind import Call

CALLS = {
    pa.flash_attention: (attention, Call, ("q", "k", "v")),
    pa.flash_attention_with_lse: (attention, Call, ("q", "k", "v")),
    pa.decode_attention: (decode, DecodeCall, ("q", "cache")),
    pa.decode_attention_with_lse: (decode, DecodeCall, ("q", "cache")),
}


@pytest.mark.parametrize("function", CALLS)
def test_each_argument_arrives_under_its_name(function, monkeypatch):
    module, record, operands = CALLS[function]
    monkeypatch.setattr(module, "_attend", lambda *values: (values, None))
    names = [x.name for x in named(function)]
    (*arrays, call), *_ = results(function(**{name: name for name in names}))
    assert tuple(arrays) == operands
    assert call == record(*record._fields)
    assert (*operands, *record._fields) == tuple(names)


def named(function):
    """Its parameters but for old keywords."""
    parameters = inspect.signature(function).parameters.values()
    return [x for x in parameters if x.kind != inspect.Parameter.VAR_KEYWORD]


def results(result):
    return result if isinstance(result[-1], type(None)) else (result,)


@pytest.mark.parametrize("function", CALLS)
def test_defaults_are_those_of_the_call(function):
    _, record, operands = CALLS[function]
    parameters = named(function)[len(operands) :]
    assert {x.name: x.default for x in parameters} == record._field_defaults


# ---- earlier keywords ----------------------------------------------------------------------------

Q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 16)), jnp.float32)
NARROW = Q.astype(jnp.float8_e4m3fn)
STARTS, ROTARY, AT = jnp.array([0, 3, 8]), pa.Rotary.create(16, 16), jnp.arange(8)[::-1]
LISTS = jnp.zeros((1, 1, 2, 1), jnp.int32)
OLD = {  # q, old keywords, what is written now, words of the warning
    "packed": (Q[0], {"q_starts": STARTS}, {"packed": pa.Packed(STARTS)}, "q_starts.*pa.Packed"),
    "packed otherwise": (
        Q[0],
        {"q_starts": STARTS, "kv_starts": STARTS // 2},
        {"packed": pa.Packed(STARTS, STARTS // 2)},
        "q_starts.*pa.Packed",
    ),
    "blocks": (
        Q,
        {"kv_blocks": LISTS, "block_size": 4},
        {"kv_blocks": pa.Blocks(LISTS, 4)},
        "block_size.*pa.Blocks",
    ),
    "blocks of 128": (
        Q,
        {"kv_blocks": LISTS[:, :, :1]},
        {"kv_blocks": pa.Blocks(LISTS[:, :, :1])},
        "kv_blocks.*pa.Blocks",
    ),
    "positions": (
        Q,
        {"rotary": ROTARY, "rotary_positions": AT},
        {"rotary": ROTARY.at(AT)},
        r"rotary_positions.*rotary\.at",
    ),
    "scales": (
        NARROW,
        {"k_scale": 2.0, "out_dtype": jnp.float32},
        {"float8": pa.Float8(k_scale=2.0, out_dtype=jnp.float32)},
        "k_scale.*pa.Float8",
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_old_keywords_warn_and_say_what_to_write(name):
    q, old, new, words = OLD[name]
    with pytest.warns(DeprecationWarning, match=words) as caught:
        out, lse = pa.flash_attention_with_lse(q, q, q, **old)
    assert len(caught) == 1 and caught[0].filename == __file__
    want, want_lse = pa.flash_attention_with_lse(q, q, q, **new)
    np.testing.assert_array_equal(np.float32(out), np.float32(want))
    np.testing.assert_array_equal(lse, want_lse)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"q_starts": STARTS, "packed": pa.Packed(STARTS)},
            "q_starts: expected None beside packed",
        ),
        ({"q_scale": 1.0, "float8": True}, "q_scale: expected None beside"),
        ({"block_size": 4}, "block_size: expected None without kv_blocks, got 4"),
        ({"rotary_positions": AT}, "rotary_positions: expected None without rotary"),
        ({"packed": STARTS}, r"packed: expected a Packed\(q_starts\) or None"),
    ],
)
def test_old_keywords_beside_their_value_or_without_it(options, words):
    with pytest.raises(ValueError, match=words):
        pa.flash_attention(Q, Q, Q, **options)


def test_a_keyword_that_there_never_was():
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        pa.flash_attention(Q, Q, Q, window=3)
