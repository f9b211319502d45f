"""Every kernel family at the boundaries of tests/support/boundaries.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import CAUSAL, FULL, sliding_window
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
from tests.kernels.flash_bwd import test_flash_bwd
from tests.kernels.flash_fwd import test_flash_fwd
from tests.support import boundaries, decode_cases, mosaic
from tests.support.problems.case import AttentionCase

pytestmark = [pytest.mark.guards, pytest.mark.usefixtures("programs_in_numpy")]


# ---- over caches ---------------------------------------------------------------------------------


class HardPages:
    """Cases over pages that others share, and pages that are missing where they are not needed."""

    def inputs(self, seed=0, fill=None):
        inputs = super().inputs(seed, fill)
        if self.kind != "paged":
            return inputs
        table = np.asarray(inputs.page_table)
        table = boundaries.with_hard_pages(table, self.page_size, self.lengths)
        return inputs._replace(page_table=jnp.asarray(table))


@dataclasses.dataclass(frozen=True)
class Decode(HardPages, decode_cases.Case):
    lengths: tuple[int, ...] = boundaries.lengths(boundaries.CAPACITY)
    capacity: int = boundaries.CAPACITY


@dataclasses.dataclass(frozen=True)
class Latent(HardPages, test_decode_mla.Case):
    lengths: tuple[int, ...] = boundaries.lengths(boundaries.CAPACITY)
    capacity: int = boundaries.CAPACITY


ROWS = {"q_len": 20, "q_heads": 3, "kv_heads": 1}
OVER_CACHES = {
    "decode": (Decode(), decode_sm90.Config(stages=3, grid=5)),
    "decode_sm80": (Decode(q_len=2), decode_sm80.Config(stages=2, grid=5)),
    "latent": (Latent(q_heads=40), mla_sm90.Config(stages=6, grid=5)),
    "latent_few_rows": (Latent(), mla_sm90.Config(stages=2, grid=5)),
    "latent_sm80": (Latent(), mla_sm80.Config(stages=2, grid=5)),
    "prefill": (Decode(**ROWS), prefill_sm90.Config(2, block_kv=64, grid=3, in_turn=True)),
    "prefill_splits": (
        Decode(**ROWS, mask=sliding_window(100)),
        prefill_sm90.Config(2, block_kv=64, grid=3, splits=2),
    ),
}


@pytest.mark.parametrize("kind", ["paged", "stacked"])
@pytest.mark.parametrize("name", OVER_CACHES)
def test_lengths_and_pages(name, kind):
    case, config = OVER_CACHES[name]
    with mosaic.interpret():
        decode_cases.check(dataclasses.replace(case, kind=kind), config)


LONG = {"lengths": (64 * boundaries.PARTS, 0, 64 * boundaries.PARTS - 1), "capacity": 640}
IN_PARTS = {
    "decode": (Decode(**LONG, q_heads=2, kv_heads=1), decode_sm90.Config(stages=2, grid=20)),
    "decode_sm80": (Decode(**LONG, q_heads=2, kv_heads=1), decode_sm80.Config(stages=2, grid=20)),
    "latent": (Latent(**LONG, q_heads=40), mla_sm90.Config(stages=6, grid=20)),
    "latent_few_rows": (Latent(**LONG), mla_sm90.Config(stages=2, grid=20)),
    "latent_sm80": (Latent(**LONG), mla_sm80.Config(stages=2, grid=20)),
    "prefill": (Decode(**LONG, **ROWS), prefill_sm90.Config(2, block_kv=64, grid=9, splits=10)),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_many_partials_of_two_neighbours(name):
    """Two split sequences, with an empty one between them."""
    case, config = IN_PARTS[name]
    with mosaic.interpret():
        decode_cases.check(case, config)


@dataclasses.dataclass(frozen=True)
class Quantized(Decode):
    """Rows of int8 with a scale each, which is NaN past the length."""

    @property
    def problem(self):
        return dataclasses.replace(super().problem, cache_dtype="int8", quantized=True)

    def inputs(self, seed=0, fill=None):
        rng = np.random.default_rng(seed)
        inputs = super().inputs(seed)
        live = np.arange(self.capacity) < np.array(self.lengths)[:, None, None]
        scales = []
        for _ in range(2):
            scale = rng.uniform(0.01, 0.03, (len(self.lengths), self.kv_heads, self.capacity))
            scales.append(np.where(live, scale, fill or 0.0).astype(np.float32))
        scales[0][..., boundaries.TILE :] *= 20  # row maxima rise behind the first tile
        shape = np.shape(inputs.k_cache)
        rows = [jnp.asarray(rng.integers(-127, 128, shape), jnp.int8) for _ in range(2)]
        scales = dict(zip(("k_scale", "v_scale"), map(jnp.asarray, scales), strict=True))
        return inputs._replace(k_cache=rows[0], v_cache=rows[1], **scales)


QUANTIZED = {
    "sm90": decode_sm90.Config(stages=3, grid=5),
    "sm80": decode_sm80.Config(stages=2, grid=5),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name):
    case = Quantized("stacked")
    with mosaic.interpret():
        got = decode_cases.launched(case, case.inputs(fill=np.nan), QUANTIZED[name])
    inputs = case.inputs()
    k, v = (
        np.asarray(rows, np.float32) * np.asarray(scale)[..., None]
        for rows, scale in ((inputs.k_cache, inputs.k_scale), (inputs.v_cache, inputs.v_scale))
    )
    plain = Decode("stacked")
    want = decode_cases.of_definition(plain, inputs._replace(k_cache=k, v_cache=v))
    decode_cases.close(got[0], want[0], 2.0**-6, 2.0**-6)
    decode_cases.close(got[1], want[1], 1e-3, 1e-3)


# ---- attention -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attention(AttentionCase):
    """Its segment ids are at the ends of int32."""

    def arrays(self, seed=0, *, poison=False):
        arrays = super().arrays(seed, poison=poison)
        if "segment_ids" in arrays and not isinstance(arrays["q"], jax.core.Tracer):
            ends = np.array(boundaries.ENDS, np.int32)
            both = (ends[np.asarray(ids) % len(ends)] for ids in arrays["segment_ids"])
            arrays["segment_ids"] = tuple(map(jnp.asarray, both))
        return arrays


def attention(q_len, kv_len, **fields):
    some = slice(0, None, 2)  # every other length
    sizes = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "v_head_dim": 64, "mask": CAUSAL}
    sizes |= {"batch": 4, "q_offset": kv_len - q_len}
    sizes |= {"kv_lengths": boundaries.lengths(kv_len)[some]}
    sizes |= {"q_lengths": boundaries.lengths(q_len)[some][::-1]}
    return Attention("boundaries", q_len=q_len, kv_len=kv_len, **(sizes | fields))


CASES = {
    "whole_tiles": attention(64, boundaries.SIZES[0]),
    "cut_tiles": attention(65, boundaries.SIZES[1]),
    "ids": attention(*[boundaries.SIZES[1]] * 2, batch=1, kv_lengths=(193,), q_lengths=(199,),
                     segments=(70, 58, 72), mask=FULL),
}  # fmt: skip
FORWARD = {
    "sm90": fwd_sm90.Config(warpgroups=2, block_kv=64, stages=2, grid=3),
    "sm80": fwd_sm80.Config(block_kv=64, stages=2),
}
BACKWARD = {
    "sm90": bwd_sm90.Config(grid=3),
    "sm90_two_kernels": sm90_two_kernels.Config(grid=3),
    "sm80": bwd_sm80.Config(warp_rows=2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", FORWARD)
def test_forward(kernel, name):
    with mosaic.interpret():
        test_flash_fwd.check(CASES[name], FORWARD[kernel])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_backward(kernel, name):
    with mosaic.interpret():
        test_flash_bwd.check(CASES[name], BACKWARD[kernel])
