"""Gradients of the arrays that a score function reads, by backward kernels: in the interpreter with
races watched and, with `-m gpu`, on the real thing, beside dS by hand, added up by NumPy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, FULL, sliding_window
from pallas_attn._call import config
from pallas_attn.kernels.flash_bwd import aux_sums
from tests.support import fuzz, subjects
from tests.support.fuzz_derivatives import Learned, learned_inputs, run_learned, with_learned

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def case(terms: str, q_len: int = 150, kv_len: int = 150, **fields) -> Learned:
    """`terms`: what is added to scores, in tests/support/fuzz_derivatives.py."""
    sizes = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "mask": CAUSAL} | fields
    sizes |= {"q_len": q_len, "kv_len": kv_len}
    return Learned("learned", v_head_dim=sizes["head_dim"], terms=tuple(terms.split()), **sizes)


OF_EACH = {"kv_heads": 4}  # query heads of which each has a kv head
CASES = {
    "t5": case("buckets"),
    "t5_lengths": case("buckets", 70, 190, q_offset=120, kv_lengths=(130, 190)),
    "t5_window": case("buckets", mask=sliding_window(40), aux_dtype="bfloat16", **OF_EACH),
    "offsets": case("both_ways", 70, 130, mask=FULL, q_offset=(0, 33)),
    "t5_far": case("buckets", 420, 420, **OF_EACH),
    "both_ways_far": case("both_ways", 300, 420, mask=FULL, **OF_EACH),
    "alibi": case("slopes", **OF_EACH),
    "alibi_grouped": case("slopes", sinks=True),
    "alibi_bits": case("slopes", deterministic=True, head_dim=72, **OF_EACH),
    "of_times": case("times", 70, 70, **OF_EACH),
    "number": case("distance", 70, 150, mask=FULL, **OF_EACH),
    "of_keys": case("keys", 70, 200, mask=FULL),
    "of_rows": case("rows", 200, 150),
    "of_both": case("buckets slopes", bias_shape=(1, 4, 150, 150), alone=True),
    "of_every_distance": case("offsets", 130, 260, mask=FULL),
    "float32": case("buckets", dtype="float32"),
    "wide": case("slopes", 70, 70, head_dim=160, **OF_EACH),
    "of_rows_and_alibi": case("rows slopes", 70, 150, **OF_EACH),
    "of_one_place": case("one_place", 70, 190, **OF_EACH),
    "of_roots": case("roots", 70, 150, **OF_EACH),
    "of_far": case("far", 70, 70, q_offset=2**25, **OF_EACH),
}


def interpreted(name: str, generation: str) -> None:
    """In the interpreter, whose time is that of its tiles: one batch row where all are alike, and
    half the heads.
    """
    case = CASES[name]
    alike = case.kv_lengths is None and isinstance(case.q_offset, int) and name != "of_keys"
    fewer = {"q_heads": 2, "kv_heads": case.kv_heads // 2, "batch": 1 if alike else 2}
    if case.bias_shape is not None:
        fewer["bias_shape"] = (1, 2, *case.bias_shape[2:])
    subject = subjects.Subject("interpreted", generation, generation)
    fuzz.prove(run_learned, dataclasses.replace(case, **fewer), subject)


@pytest.mark.guards
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("t5", "t5_far", "alibi")])
def test_hopper_interpreted(name):
    interpreted(name, "sm90")


@pytest.mark.guards
@pytest.mark.parametrize(
    "name, changes",
    [
        ("t5_far", {"block_q": 128}),
        ("both_ways_far", {"block_q": 64, "dq_lag": 2}),
        ("t5_far", {"kernel": "flash_bwd_sm90_two_kernels", "block_q": 64}),
        ("alibi", {"block_q": 64, "parts": 3}),
    ],
    ids=str,
)
def test_sums_of_keys_interpreted(name, changes):
    configuration = {"kernel": "flash_bwd_sm90", "grid": 3} | changes
    kernel = configuration.pop("kernel")
    with config.forced(kernel, configuration), config.watched() as choices:
        interpreted(name, "sm90")
    assert choices[-1].kernel == kernel


@pytest.mark.guards
@pytest.mark.parametrize("name", ["t5_lengths", "alibi_grouped", "of_rows", "float32", "wide"])
def test_portable_interpreted(name):
    interpreted(name, "sm80")


@pytest.mark.guards
def test_sums_that_are_sorted_interpreted(monkeypatch):
    """They are too many to compare each with all elements."""
    monkeypatch.setattr(aux_sums, "MOST_COMPARED", 0)
    some = case("keys", 70, 180, mask=FULL, q_heads=2, kv_heads=1)
    fuzz.prove(run_learned, some, subjects.Subject("interpreted", "sm90", "sm90"))


@pytest.mark.guards
def test_a_weight_that_depends_on_the_score_interpreted():
    """The score is the one after softcap, as in the reference."""
    rng, names = np.random.default_rng(5), ("q", "k", "v", "do")
    q, k, v, do = (jnp.asarray(rng.standard_normal((1, 70, 2, 32)), "bfloat16") for _ in names)

    def gradient(q, k, v, do, rates, *, implementation):
        def out(rates):
            score = pa.score_fn(lambda s, b, h, q, kv, x: s * x[h], rates)
            options = {"softcap": 2.0, "implementation": implementation}
            return pa.flash_attention(q, k, v, score=score, **options)

        return jax.vjp(out, rates)[1](do)[0]

    subject = subjects.Subject("interpreted", "sm90", "sm90")
    arrays = q, k, v, do, jnp.asarray([0.5, 2.0], jnp.float32)
    got, want = subject.call(gradient, *arrays), gradient(*arrays, implementation="reference")
    np.testing.assert_allclose(got, want, 0.02, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["sm90", "sm80"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name, implementation):
    """Bits repeat where the case asks for it."""
    case, subject = CASES[name], subjects.Subject("gpu", implementation)
    fuzz.prove(run_learned, case, subject)
    if case.deterministic:
        arguments, _ = learned_inputs(case, 0)
        fuzz.same_bits(*(subject.call(with_learned, **arguments) for _ in range(2)))
