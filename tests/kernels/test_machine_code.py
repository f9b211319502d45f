"""Machine code of programs of tests/support/builds.py: what is launched, and the bytes that
registers spill. A matmul that waits for another is an error (`mosaic.compile_for`).
"""

import pytest

from tests.support import builds, mosaic

pytestmark = [pytest.mark.machine_code, pytest.mark.guards]

# The number of launches, and the bytes of each kernel that spills any; "": of all.
OF_PARTS = {"flash_bwd_dq_sm90": 1200, "flash_bwd_sm90": 100, "flash_bwd_dkdv_sm90": 32}
IN_AN_ORDER = {"flash_bwd_sm90": 200}  # about as many as in the order of a table
ONE_COPY = {"flash_fwd/sm90/h128_claims", "decode_listed/sm90/gradients"}
PROGRAMS = {
    "flash_fwd/sm90/h128_claims": (2, {}),
    "flash_fwd/sm90/h64_group_window": (1, {}),
    "flash_bwd/sm90/h64_group_window": (3, {"flash_bwd_group_window_sm90": 192}),
    "flash_bwd/sm90/h64_group7_short": (4, OF_PARTS),
    "flash_bwd/sm90/h128_mqa": (4, OF_PARTS),
    "flash_bwd/sm90/h256_mqa": (5, OF_PARTS),
    **{
        f"flash_bwd/sm90/h128_{x}": (None, IN_AN_ORDER)
        for x in ("long", "claims", "turns", "turns_causal")
    },
    "append/sm90/stacked": (1, {}),
    "append/sm90/per_sequence": (1, {}),
    "append/sm80/paged": (1, {}),
    "decode_mla/sm90/heads128": (2, {"": 256}),  # one combines partials
    "decode_mla/sm90/heads16_paged": (1, {}),
    "decode_mla/sm80/per_sequence": (1, {}),
    "decode_listed/latent_sm90/heads128": (2, {"": 256}),
    "decode_listed/latent_sm90/heads16": (1, {}),
    "decode_listed/sm90/gradients": (1, {}),
    "flash_jvp/sm90/h128_causal": (None, {"": 32}),
    "flash_jvp/sm90/h64_dual": (None, {"": 32}),
    "flash_jvp/sm90/h128_dual": (None, {"": 400}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_launches_and_spills(name):
    """Copies are counted beside launches."""
    launches, most = PROGRAMS[name]
    build = builds.BUILDS[name]
    how = {"target": build.target, "donate_argnums": build.donate}
    report = mosaic.compile_for(build.call, *build.shapes, **how)
    if launches is not None:
        assert (report.launches, report.copies) == (launches, int(name in ONE_COPY))
    if "" in most:
        assert report.spill_bytes <= most[""]
        return
    for kernel in report.kernels:
        assert kernel.spill_bytes <= most.get(kernel.name.partition("_mosaic")[0], 0), kernel.name
