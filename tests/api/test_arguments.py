"""The arguments of attention and decode: each reaches its call under its own name."""

import inspect

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
    names = inspect.signature(function).parameters
    (*arrays, call), *_ = results(function(**{name: name for name in names}))
    assert tuple(arrays) == operands
    assert call == record(*record._fields)
    assert (*operands, *record._fields) == tuple(names)


def results(result):
    return result if isinstance(result[-1], type(None)) else (result,)


@pytest.mark.parametrize("function", CALLS)
def test_defaults_are_those_of_the_call(function):
    _, record, operands = CALLS[function]
    parameters = list(inspect.signature(function).parameters.values())[len(operands) :]
    assert {x.name: x.default for x in parameters} == record._field_defaults
