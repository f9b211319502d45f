"""docs/blackwell.md: its tables are those of the machine code."""

import re

import pytest

from tests.support import blackwell
from tests.support.blackwell import CALLS, Call, Cycles

SASS = """
.text.flash_bwd_other_kernel:
        /*0000*/                   EXIT ;
.text.flash_fwd_sm100_kernel:
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   LDTM.x32 R4, tmem[UR4] ;
.L_x_2:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_9) ;
.L_x_3:
        /*0040*/               @P1 BRA `(.L_x_4) ;
        /*0050*/                   FMUL2 R4, R4, R6 ;
        /*0060*/                   STTM.x32 tmem[UR4], R4 ;
.L_x_4:
        /*0070*/                   MUFU.EX2 R4, R4 ;
        /*0080*/                   FFMA2 R4, R4, R6, R8 ;
        /*0090*/                   BRA.U UP0, `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_9:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00c0*/              @!P0 BRA `(.L_x_9) ;
        /*00d0*/                   BRA `(.L_x_3) ;
"""


def test_loops_are_those_that_work():
    """Neither waits nor what is skipped while no maximum rises."""
    (body,) = blackwell.loops(SASS, "flash_fwd_sm100")
    names = [instruction.split()[0] for instruction in body]
    assert names == ["LDTM.x32", "SYNCS.PHASECHK.TRANS64.TRYWAIT", *["@!P0", "@P1"]] + [
        *("MUFU.EX2", "FFMA2", "BRA.U")
    ]
    assert blackwell.of_warp(body) == {"issue": 7, "tensor": 32, "exponentials": 8, "fma": 2}


def test_a_matmul_moves_its_operands():
    """A matmul of 128 x 128 x 64, then one of 128 x 64 x 128 with P in tensor memory."""
    first = "UTCHMMA {}[UR10], gdesc[UR8], tmem[UR15], tmem[UR30], idesc[UR31], {}"
    body = [first.format("gdesc", more) for more in ("!UPT", *["UPT"] * 3)]
    body += [first.format("tmem", more) for more in ("UP0", *["UPT"] * 7)]
    assert blackwell.of_matmuls(body, 64) == (512, (4 * 8192 + 8 * 2048) / 128)


def test_the_bound_is_of_the_busiest_unit():
    cycles = Cycles(matmuls=1024, shared=2048, chain=100)
    full, causal = (Call("backward", 128, mask) for mask in ("full", "causal"))
    assert blackwell.tflops(full, cycles, 0.5) == pytest.approx(0.25 * 2243, rel=1e-3)
    assert blackwell.tflops(causal, cycles, 1) == pytest.approx(2243 / 2 * 64 / 65, rel=1e-3)


@pytest.mark.parametrize("sass", [SASS, SASS.replace("MUFU.EX2", "FADD2")])
def test_a_kernel_without_some_role_is_refused(sass):
    with pytest.raises(ValueError, match="sass of forward 64 full: loops of each role once"):
        blackwell.count(Call("forward", 64, "full"), sass)


def rows_of_the_page() -> dict[str, list[str]]:
    table = blackwell.PAGE.read_text().split(blackwell.BEGIN)[1].split(blackwell.END)[0]
    lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()]
    return {name: cells for name, *cells in lines[2:]}


def test_the_page_has_every_call_and_its_assumptions():
    assert list(rows_of_the_page()) == list(map(str, CALLS))
    page = " ".join(blackwell.PAGE.read_text().split())
    assert f"{blackwell.SHARE:.2f} of the bound" in page
    assert f"(peak: {blackwell.PEAK:.0f})" in page
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", page)) <= 500


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_page_is_what_the_machine_code_says(call):
    """Within 2 %, by which versions of jax and of ptxas differ."""
    *cells, published = blackwell.row(call, blackwell.counted(call)).strip("| ").split(" | ")[1:]
    *said, also_published = rows_of_the_page()[str(call)]
    assert list(map(int, said)) == pytest.approx(list(map(int, cells)), rel=0.02)
    assert also_published == published
