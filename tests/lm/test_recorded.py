"""The demo's decode loop beside transformers, whose tokens `recorded.py` has recorded."""

import itertools
import json

import numpy as np
import pytest

from pallas_lm import checkpoint, decode
from pallas_lm.options import CACHES
from tests.lm import recorded, witness

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

HELD = json.loads(recorded.FILE.read_text("utf-8"))["families"]
CACHE_OF = dict(zip(witness.CONFIGS, itertools.cycle(CACHES), strict=False))


def test_each_family_is_recorded():
    assert list(HELD) == list(witness.CONFIGS)


@pytest.mark.parametrize("family", witness.CONFIGS)
def test_tokens_are_those_of_transformers(tmp_path, family):
    """Prefill and decode steps of two prompts side by side, over a cache."""
    described, tensors = witness.made(family)
    total = sum(np.abs(x).sum(dtype=np.float64) for x in tensors.values())
    assert total == pytest.approx(HELD[family]["weights"], abs=1e-2), "NumPy draws other weights"
    texts = HELD[family]["texts"]
    prompts = [text["prompt"] for text in texts]
    assert prompts == recorded.prompts(family, described["vocab_size"])
    how = {"dtype": "float32", "cache": CACHE_OF[family], "logprobs": True}
    options = decode.Options(batch=2, capacity=40, page_size=8, chunk=4, **how)
    loaded = checkpoint.load(witness.write(tmp_path, described, tensors), "float32")
    run = decode.Run(*loaded, options, prompts, recorded.TOKENS)
    for _ in run:
        pass
    for sequence, text in zip(run.sequences, texts, strict=True):
        assert sequence.tokens == text["tokens"]
        np.testing.assert_allclose(sequence.logprobs, text["logprobs"], atol=recorded.CLOSE)
