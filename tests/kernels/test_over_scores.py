"""Bias and mask_array in machine code: how kernels load them, and that nothing copies them."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from tests.support import aot

pytestmark = [pytest.mark.machine_code, pytest.mark.guards]


def forward(q, bias, shown):
    return pa.flash_attention(q, q, q, bias=bias, mask_array=shown)


def backward(q, bias, shown):
    def loss(q, bias):
        return forward(q, bias, shown).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))(q, bias)


def gradients_of_q(q, bias, shown):
    return jax.grad(lambda q: forward(q, bias, shown).astype(jnp.float32).sum())(q)


def compiled(call, sizes, bias, shown=None, **options):
    of = jax.ShapeDtypeStruct
    shown = None if shown is None else of(shown, jnp.bool_)
    arrays = of(sizes, jnp.bfloat16), None if bias is None else of(bias, jnp.bfloat16), shown
    return aot.compile_for(call, *arrays, **options)


@pytest.mark.parametrize("target", ["h100", "a100"])
@pytest.mark.parametrize("rows", [49, 197, 333, 384])
def test_no_copy_of_a_bias_or_a_mask_of_keys(rows, target):
    """At any size: TMA or the threads clip."""
    call = functools.partial(compiled, target=target)
    report = call(forward, (2, rows, 4, 64), (1, 4, rows, rows), (2, 1, 1, rows))
    assert report.others == ()


@pytest.mark.parametrize("rows", [333, 384])
def test_a_backward_transposes_no_bias_of_16_bits(rows):
    report = compiled(backward, (2, rows, 4, 64), (1, 4, rows, rows))
    assert not [name for name in report.others if "transpose" in name]


@pytest.mark.parametrize(("rows", "target"), [(197, "h100"), (512, "a100")])
def test_a_backward_reads_booleans_as_they_are(rows, target):
    """XLA neither converts nor transposes a mask of queries and keys: one launch reads it."""
    shapes = (2, rows, 4, 64), None, (2, 1, rows, rows)
    report = compiled(gradients_of_q, *shapes, target=target)
    masks = re.findall(rf"(?:s8|pred)\[2,1,{rows},{rows}\]\S* (\S+)\(", report.hlo)
    assert set(masks) == {"parameter"}, masks


def test_tiles_of_a_bias_come_by_tma():
    """To registers by matrices, not number by number, and nothing spills."""
    for sizes, bias in (((4, 384, 4, 32), (1, 4, 384, 384)), ((4, 512, 12, 64), (4, 12, 512, 512))):
        report = compiled(forward, sizes, bias, sass=True)
        assert len(re.findall(r"\bLDSM", report.sass)) >= 8
        assert len(re.findall(r"\bLDG", report.sass)) < 16
        assert report.spill_bytes <= 4


def test_masked_keys_are_read_as_booleans():
    report = compiled(forward, (2, 512, 4, 64), None, (2, 1, 1, 512))
    assert (report.others, report.launches, report.spill_bytes) == ((), 2, 0)


@pytest.mark.parametrize("target", ["h100", "a100"])
@pytest.mark.parametrize("rows", [197, 512])
def test_booleans_are_read_as_bytes(rows, target):
    """A mask of queries and keys that heads share is no array of int8 beforehand."""
    shape = (2, 1, rows, rows)
    report = compiled(forward, (2, rows, 4, 64), None, shape, target=target)
    assert (report.others, report.launches) == ((), 1)
