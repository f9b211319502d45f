"""The Hopper backward of short windows where 8 heads or more share K and V."""

import pytest

from pallas_attn.kernels.flash_bwd import sm90_group_window as kernel
from tests.kernels.flash_bwd.test_flash_bwd import check
from tests.kernels.flash_fwd.test_group_window import windowed
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

CASES = {
    # Chunks of two tiles and of one, the last tile not whole.
    "window128": (windowed(296, 128, sinks=True, batch=1), kernel.Config(chunks=3)),
    "window65": (windowed(136, 65, (16, 1), batch=1), kernel.Config(2)),
    "window8": (windowed(88, 8, (16, 2), dtype="float16", batch=1), kernel.Config(chunks=1)),
    # Kv tiles follow each other in the same place.
    "long_chunk": (windowed(456, 120, batch=1), kernel.Config(chunks=1)),
}


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    with mosaic.interpret():
        check(*CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    check(*CASES[name])
