"""Every kernel family on data that hurts: row maxima that rise and fall by more than 2**8 from tile
to tile, logits on one side of 0, equal logits; lengths on both sides of a tile's edge.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import CAUSAL, sliding_window
from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.decode import sm80 as decode_sm80
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.decode_mla import sm80 as mla_sm80
from pallas_attn.kernels.decode_mla import sm90 as mla_sm90
from pallas_attn.kernels.flash_bwd import sm80 as bwd_sm80
from pallas_attn.kernels.flash_bwd import sm90 as bwd_sm90
from pallas_attn.kernels.flash_bwd import sm90_two_kernels
from pallas_attn.kernels.flash_fwd import sm80 as fwd_sm80
from pallas_attn.kernels.flash_fwd import sm90 as fwd_sm90
from pallas_attn.kernels.prefill import sm90 as prefill_sm90
from tests.kernels.decode_mla import test_decode_mla
from tests.kernels.flash_bwd import (
    test_bwd_wide,
    test_flash_bwd,
    test_heads,
    test_one_key_tile,
)
from tests.kernels.flash_bwd import test_group_window as test_bwd_group_window
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_fwd import test_flash_fwd, test_group_window, test_wide
from tests.support import decode_cases, hard_data, mosaic
from tests.support.problems.case import AttentionCase

pytestmark = [pytest.mark.guards, pytest.mark.usefixtures("programs_in_numpy")]

LENGTHS = (200, 129, 128, 127, 192)  # numbers of keys: kv tiles have 32, 64 or 128


@dataclasses.dataclass(frozen=True)
class Attention(AttentionCase):
    """A call of `flash_attention` with hard data."""

    def arrays(self, seed=0, *, poison=False):
        arrays = super().arrays(seed, poison=poison)
        if isinstance(arrays["q"], jax.core.Tracer):  # only shapes are wanted
            return arrays
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        q, k = hard_data.hardened(*(np.asarray(arrays[x]) for x in "qk"), scale, 1)
        return arrays | {"q": jnp.asarray(q), "k": jnp.asarray(k)}


def attention(**fields):
    sizes = {"batch": hard_data.NUMBER, "q_len": 70, "kv_len": 200, "q_heads": 2, "kv_heads": 1}
    sizes |= {"head_dim": 64, "v_head_dim": 64, "mask": CAUSAL, "q_offset": 130}
    return Attention("hard", **(sizes | {"kv_lengths": LENGTHS, "magnitude": 0.5} | fields))


FORWARD = {
    "sm90": (attention(), fwd_sm90.Config(warpgroups=2, block_kv=64, stages=2, grid=3)),
    "sm90_wide_tiles": (attention(), fwd_sm90.Config(2, block_kv=128, stages=2, grid=3)),
    "sm90_float32": (
        attention(dtype="float32"),
        fwd_sm90.Config(warpgroups=2, block_kv=64, stages=2, grid=3),
    ),
    "sm80": (attention(), fwd_sm80.Config(block_kv=32, stages=3)),
    "sm80_rows_in_registers": (
        attention(), fwd_sm80.Config(row_blocks=1, block_kv=64, q_in_registers=True)
    ),
    "sm80_columns": (attention(dtype="float32"), fwd_sm80.Config(1, 32, columns=32)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    with mosaic.interpret():
        test_flash_fwd.check(*FORWARD[name])


@dataclasses.dataclass(frozen=True)
class Endless(AttentionCase):
    """A call of `flash_attention` with a sink of inf, and one of -inf where there are many."""

    def arrays(self, seed=0, *, poison=False):
        arrays = super().arrays(seed, poison=poison)
        if isinstance(arrays["q"], jax.core.Tracer):
            return arrays
        return arrays | {"sinks": jnp.asarray(hard_data.sinks_without_end(arrays["sinks"]))}


def endless(case: AttentionCase) -> Endless:
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    return Endless(**(fields | {"sinks": True}))


WIDE = test_wide.wide("sinks")
OF_SINKS = {
    "sm90_float32": (sized(40, 70, 64, q_heads=2, kv_heads=1, dtype="float32"), None),
    "group_window": test_group_window.CASES["window128"],
    "wide": (WIDE, test_wide.ROUND),
}


@pytest.mark.parametrize("name", OF_SINKS)
def test_forward_with_sinks_without_end(name):
    case, config = OF_SINKS[name]
    with mosaic.interpret():
        problem = test_flash_fwd.problem_of(case)
        test_flash_fwd.check(endless(case), config or fwd_sm90.Config.default(problem))


SMALL = bwd_sm90.Config(grid=3)
SHORT = sized(49, 70, 32, batch=1, q_heads=2, kv_heads=2)
BACKWARD_OF_SINKS = {
    "two_kernels": (SHORT, sm90_two_kernels.Config(grid=3)),
    "short": (SHORT, None),
    "heads": (sized(70, 100, 64, batch=1, q_heads=2, kv_heads=2), test_heads.EACH),
    "one_key_tile": test_one_key_tile.CASES["group"],
    "window": (test_flash_bwd.windowed(1, 135, batch=1, q_heads=2, kv_heads=2), None),
    "group_window": test_bwd_group_window.CASES["window128"],
    "wide": (WIDE, test_bwd_wide.SMALL),
    "sm80_apart": (SHORT, bwd_sm80.Config(block_q=32, dq_block_kv=32)),
}


@pytest.mark.parametrize("name", BACKWARD_OF_SINKS)
def test_backward_with_sinks_without_end(name):
    """Probabilities of such a head are 0, exactly; its sink has the gradient of lse."""
    case, config = BACKWARD_OF_SINKS[name]
    with mosaic.interpret():
        got = test_flash_bwd.check(endless(case), config)
    assert not np.asarray(got.q, np.float32)[:, :, 0].any()
    assert np.asarray(got.sinks)[0] != 0


BACKWARD = {
    "sm90": {"config": SMALL},
    "sm90_two_kernels": {"config": sm90_two_kernels.Config(grid=3)},
    "sm80": {"config": bwd_sm80.Config(warp_rows=2)},
    "sm80_apart": {"config": bwd_sm80.Config(block_q=32, dq_block_kv=32)},
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name):
    """Past a length gradients are 0, exactly."""
    case = attention(q_lengths=(70, 65, 64, 63, 1))
    with mosaic.interpret():
        got = test_flash_bwd.check(case, **BACKWARD[name])
    for x, lengths in ((got.q, case.q_lengths), (got.k, LENGTHS), (got.v, LENGTHS)):
        for rows, length in zip(np.asarray(x, np.float32), lengths, strict=True):
            assert not rows[length:].any()


@dataclasses.dataclass(frozen=True)
class Decode(decode_cases.Case):
    """A decode with hard data."""

    lengths: tuple[int, ...] = LENGTHS

    def inputs(self, seed: int = 0, fill: float | None = None) -> DecodeInputs:
        return hardened(self, super().inputs(seed, fill))


@dataclasses.dataclass(frozen=True)
class Latent(test_decode_mla.Case):
    lengths: tuple[int, ...] = LENGTHS

    def inputs(self, seed: int = 0, fill: float | None = None) -> DecodeInputs:
        return hardened(self, super().inputs(seed, fill))


def hardened(case, inputs):
    q, k = (np.asarray(x) for x in (inputs.q, inputs.k_cache))
    q, k = hard_data.hardened(q, k, case.head_dim**-0.5, 2)
    return inputs._replace(q=jnp.asarray(q), k_cache=jnp.asarray(k))


def prefill(**fields):
    return Decode(q_len=40, q_heads=4, kv_heads=1, **fields)


OVER_CACHES = {
    "decode": (Decode(), decode_sm90.Config(stages=3, grid=2)),
    "decode_in_parts": (Decode(q_len=2), decode_sm90.Config(stages=2, grid=9)),
    "decode_sm80": (Decode(q_len=3, mask=sliding_window(150)), decode_sm80.Config(grid=3)),
    "decode_sm80_folded": (Decode(), decode_sm80.Config(stages=2, grid=9)),
    "latent": (Latent(q_heads=40), mla_sm90.Config(stages=6, grid=3)),
    "latent_in_parts": (Latent(q_heads=40), mla_sm90.Config(stages=6, grid=9)),
    "latent_few_rows": (Latent(), mla_sm90.Config(stages=2, grid=3)),
    "latent_few_rows_in_parts": (Latent(), mla_sm90.Config(stages=2, grid=9)),
    "latent_sm80": (Latent(q_heads=8), mla_sm80.Config(stages=2, grid=3)),
    "latent_sm80_in_parts": (Latent(q_len=2), mla_sm80.Config(tile=32, stages=2, grid=9)),
    "prefill": (prefill(), prefill_sm90.Config(2, block_kv=64, grid=3, in_turn=True)),
    "prefill_in_parts": (prefill(), prefill_sm90.Config(2, block_kv=64, grid=3, splits=3)),
}


@pytest.mark.parametrize("name", OVER_CACHES)
def test_over_caches(name):
    with mosaic.interpret():
        decode_cases.check(*OVER_CACHES[name])
