"""The demo's loop compiled for a GPU that is not here: what is launched, and that neither a cache
nor a layer's weights are copied.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_lm import decode, programs
from pallas_lm.config import is_shape
from pallas_lm.options import CACHES
from pallas_lm.state import COMPILER, State
from tests.support import mosaic
from tests.support.builds import LM as CONFIG

pytestmark = [
    pytest.mark.guards,
    pytest.mark.machine_code,
]

# One layer's matrices as they would lie outside of the stack.
LAYER = (
    r"= bf16\[(?:1,)?(?:1536,1024|1024,1024|4096,1024|1024,2048)\]\S* (?:fusion|fusion-done|copy)\("
)


def chunk(options, params, cache, state):
    """The loop's own function, without its jit."""
    return programs.steps.__wrapped__(CONFIG, options, params, cache, state)


def shapes(options):
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        CONFIG.shapes(),
        is_leaf=is_shape,
    )
    cache = jax.eval_shape(lambda: options.create_cache(CONFIG))
    return params, cache, jax.eval_shape(lambda: State.create(options))


@pytest.mark.parametrize("kind", CACHES)
def test_a_chunk_copies_neither_caches_nor_weights(kind):
    options = decode.Options(cache=kind, batch=4, capacity=512, chunk=8)
    params, cache, state = shapes(options)
    report = mosaic.compile_for(
        functools.partial(chunk, options),
        *(params, cache, state),
        donate_argnums=(1, 2),
        compiler_options=COMPILER,
        sass=True,
    )
    # Lengths and page tables, which are kept as they were before the step, are integers.
    assert not re.findall(r"= bf16\[\d\S* copy", report.hlo)
    assert report.aliases >= len(jax.tree.leaves((cache.k, cache.v)))
    # The append, the attention, four matmuls and two norms of every layer; the last norm and the
    # head.
    assert report.launches == 8 * CONFIG.layers + 2
    waits = [text for text in report.sass.split("\f") if "ACQBULK" in text]
    assert len(waits) == len(report.kernels) >= 8  # each kind of kernel waits for the one before
    # XLA's own kernels stand before the first layer and after the last one. Each layer has two, to
    # take q, k and v apart and to rotate q.
    assert len(re.findall(r" fusion\(", report.hlo)) < 20 + 2 * CONFIG.layers
    assert not re.findall(LAYER, report.hlo)


def test_triton_matmuls_would_copy_the_weights():
    """The guard above sees them, and the option is still needed: of more than 64 sequences."""
    options = decode.Options(cache="stacked", batch=72, capacity=512, chunk=8)
    report = mosaic.compile_for(
        functools.partial(chunk, options), *shapes(options), donate_argnums=(1, 2)
    )
    assert re.findall(LAYER, report.hlo)
