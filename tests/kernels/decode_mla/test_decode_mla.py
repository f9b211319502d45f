"""The decode kernels over latent caches, Hopper's and the portable one: right in the interpreter
and, with `-m gpu`, on the real thing; what they refuse; their machine code.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import FULL, sliding_window
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.decode_mla import combine_apart
from pallas_attn.kernels.decode_mla import sm80 as mla_sm80
from pallas_attn.kernels.decode_mla import sm90 as kernel
from tests.kernels.decode import test_decode_kernel
from tests.kernels.decode.test_decode_kernel import ADDED, ALIBI
from tests.support import mosaic
from tests.support.decode_cases import check, launched

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


@dataclasses.dataclass(frozen=True)
class Case(test_decode_kernel.Case):
    """A decode call over rows of 192, of which 128 are V."""

    lengths: tuple[int, ...] = (0, 1, 64, 65, 200)
    kv_heads: int = 1
    head_dim: int = 192
    v_head_dim: int = 128

    @property
    def problem(self) -> DecodeProblem:
        return dataclasses.replace(super().problem, shared_kv=True)

    def inputs(self, seed: int = 0, fill: float | None = None) -> DecodeInputs:
        return super().inputs(seed, fill)._replace(v_cache=None)


SMALL = kernel.Config(stages=2, grid=3)
CASES = {
    "stacked": (Case(), SMALL),
    "two_chunks_window": (
        Case("paged", (70, 208), q_len=5, q_heads=16, mask=sliding_window(50), page_size=8),
        kernel.Config(stages=3, grid=5),
    ),
    "layers_softcap_sinks_float16": (
        Case(layers=2, q_len=2, mask=FULL, softcap=3.0, sinks=True, dtype="float16"), SMALL
    ),
    "overflow_no_rest": (Case(lengths=(5, 500, 7), head_dim=128), SMALL),
    "two_chunks_side_by_side": (
        Case(lengths=(65, 0, 130), q_len=2, q_heads=40, sinks=True), kernel.Config(stages=2, grid=4)
    ),
    "two_chunks_no_rest": (
        Case("paged", (140, 3), q_heads=80, head_dim=256, v_head_dim=256),
        kernel.Config(stages=2, grid=4),
    ),
    "three_chunks_wide": (
        Case(lengths=(130,), q_len=3, q_heads=50, head_dim=448, v_head_dim=384), SMALL
    ),
    "wide_no_rest": (Case(lengths=(70,), q_heads=33, head_dim=512, v_head_dim=512), SMALL),
    "blocks_of_rest": (Case(lengths=(65, 130), head_dim=320, v_head_dim=256), SMALL),
    "combined_apart": (
        Case(lengths=(330, 3), q_heads=40, capacity=384, sinks=True),
        kernel.Config(stages=2, grid=9),
    ),
    "two_chunks_apart": (
        Case("paged", (500,), q_len=2, q_heads=40, layers=2, capacity=512),
        kernel.Config(stages=2, grid=8),
    ),
    "batch_invariant": (
        Case(lengths=(200, 3), batch_invariant=True), kernel.Config(stages=2, grid=4, split_tiles=1)
    ),
    "tree": (Case(lengths=(65, 3, 70), q_len=5, hides="tree"), SMALL),
    "alibi": (Case(lengths=(65, 130), q_len=2, adds=ALIBI), SMALL),
    "scores_two_chunks": (
        Case("paged", (70, 200), q_len=5, q_heads=16, softcap=3.0, adds=ADDED),
        kernel.Config(stages=2, grid=4),
    ),
}  # fmt: skip


PORTABLE = mla_sm80.Config
OF_WARPS = {
    "separate": (
        Case("per_sequence", (70, 130), q_len=5, q_heads=8, mask=sliding_window(50)),
        PORTABLE(stages=2, grid=3),
    ),
    "paged_one_stage": (
        Case("paged", (70, 132), layers=2, softcap=3.0, sinks=True, head_dim=200),
        PORTABLE(tile=32, stages=1, grid=3),
    ),
    "tree": (Case(lengths=(65, 3, 70), q_len=5, hides="tree"), PORTABLE(stages=2, grid=3)),
    "scores": (Case(lengths=(65, 130), q_len=5, adds=ADDED), PORTABLE(stages=2, grid=3)),
}  # fmt: skip


@pytest.mark.guards
@pytest.mark.parametrize(
    "case, config",
    [*CASES.values(), *OF_WARPS.values()],
    ids=[*CASES, *(f"portable-{name}" for name in OF_WARPS)],
)
def test_interpreted(case, config):
    with mosaic.interpret():
        check(case, config)


@pytest.mark.guards
def test_partials_of_many_splits(monkeypatch):
    """More partials than are loaded together, of row maxima that rise."""
    monkeypatch.setattr(combine_apart, "AT_ONCE", 4)
    case = Case(lengths=(640,), q_heads=33, capacity=640)
    inputs = case.inputs(fill=0.0)
    rising = jnp.arange(1, 641, dtype=jnp.float32).reshape(1, 1, -1, 1) / 320
    cache = (inputs.k_cache.astype(jnp.float32) * rising).astype(inputs.k_cache.dtype)
    inputs = inputs._replace(k_cache=cache)
    with mosaic.interpret():
        out, lse = launched(case, inputs, kernel.Config(stages=2, grid=20))
        want, want_lse = launched(case, inputs, kernel.Config(stages=2, grid=1))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, want)), 0.02, 0.02)
    np.testing.assert_allclose(lse, want_lse, 1e-5, 1e-5)


def compiled(q, cache):
    return pa.decode_attention_with_lse(q, cache)


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code_of_one_long_sequence():
    """A launch more, which combines the partials."""
    sizes = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "shared_kv": True}
    cache = jax.eval_shape(lambda: pa.PagedCache.create(1, 1024, 64, **sizes))
    q = jax.ShapeDtypeStruct((1, 1, 128, 576), jnp.bfloat16)
    report = mosaic.compile_for(compiled, q, cache)
    assert (report.launches, report.copies) == (2, 0)
    assert report.spill_bytes <= 64


def test_tiles_of_the_portable_kernel():
    with pytest.raises(ValueError, match=r"Config\.tile must be 32 or 64 of V within K, got 128"):
        launched(Case(), Case().inputs(), PORTABLE(tile=128))


# ---- on a GPU ------------------------------------------------------------------------------------

LARGE = {
    f"{kind}_{heads}_heads": Case(
        kind,
        (0, 1, 63, 64, 1000, 2048),
        q_heads=heads,
        head_dim=576,
        v_head_dim=512,
        capacity=2048,
        page_size=page,
    )
    for kind, heads, page in (("stacked", 128, 16), ("paged", 16, 64))
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_on_the_gpu(name):
    case, *config = CASES[name] if name in CASES else (LARGE[name],)
    check(case, *config)


@pytest.mark.gpu
@pytest.mark.parametrize(  # the GPU whose shared memory is assumed, in turns
    "case, gpu",
    [
        (case, ("sm80", "sm89", "sm90")[number % 3])
        for number, case in enumerate([*CASES, *OF_WARPS, *LARGE])
    ],
)
def test_portable_on_the_gpu(case, gpu):
    case, *_ = ({**CASES, **OF_WARPS}[case]) if case not in LARGE else (LARGE[case],)
    check(case, PORTABLE.default(dataclasses.replace(case.problem, gpu=gpu)))
