"""Which Config a kernel runs with: what is forced, what was measured, and what fits."""

import dataclasses
import re

import numpy as np
import pytest

from pallas_attn._call import block_lists, dispatch, gpu_specs
from pallas_attn._call import config as _config
from pallas_attn._call.bind import Call
from pallas_attn._call.kernel import Kernel
from pallas_attn.kernels.append import copy as append_copy
from pallas_attn.kernels.decode import sm80 as decode_sm80
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.flash_bwd import sm80 as flash_bwd_sm80
from pallas_attn.kernels.flash_bwd import sm90 as flash_bwd_sm90
from pallas_attn.kernels.flash_bwd import sm90_heads, sm90_two_kernels
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd_sm90
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.prefill import gathered_packed_sm90
from pallas_attn.kernels.prefill import sm90 as prefill_sm90
from pallas_attn.kernels.quantize import blocks
from pallas_attn.masks import CAUSAL, FULL, sliding_window
from pallas_attn.values import Blocks
from tests.support import operations as support


def attention(**changes):
    sizes = {"q_len": 8192, "kv_len": 8192, "q_heads": 16, "kv_heads": 16}
    fields = sizes | {"mask": CAUSAL, "scale": 1.0} | changes
    return dataclasses.replace(support._BASE["flash_forward"], **fields)


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 7
    stages: int = 1

    def __post_init__(self):
        check(self, block=(self.block >= 1, "at least 1"), stages=(self.stages >= 1, "at least 1"))

    @classmethod
    def default(cls, problem):
        return cls(problem.q_len)


def kernel(bytes_a_block=1):
    """A stand-in for a kernel: what `choose` needs of one."""
    need = lambda problem, config: config.block * bytes_a_block  # noqa: E731
    return Kernel(Config, lambda problem: None, need, lambda inputs, problem, config: None)


def choose(problem=None):
    return _config.choose("flash_fwd_fake", kernel(), problem or attention())


def test_a_kernel_has_its_own_default():
    assert choose() == Config(8192)
    assert choose(attention(q_len=64)) == Config(64)


def test_forced_wins_and_ends():
    with _config.forced("flash_fwd_fake", {"block": 3}), _config.forced("other", {}):
        assert choose() == Config(block=3)
        assert _config.observer.get() is not None
    assert choose() == Config(8192)
    assert _config.observer.get() is None


def test_watched_collects_what_is_chosen():
    with _config.watched() as choices:
        config = choose()
        assert _config.observer.get() is not None
    choose()
    assert choices == [("flash_fwd_fake", attention(), config)]


def test_fits_asks_for_the_shared_memory_of_the_gpu():
    limit = gpu_specs.shared_memory("sm90")
    assert _config.fits(kernel(limit // 7), attention(), Config())
    assert not _config.fits(kernel(limit // 7 + 1), attention(), Config())


def test_a_combination_that_a_kernel_refuses_does_not_fit():
    def refuse(problem, config):
        raise ValueError("block must divide the page")

    refusing = dataclasses.replace(kernel(), smem_bytes=refuse)
    assert not _config.fits(refusing, attention(), Config())


def test_heads_come_together_where_they_share_lists_only():
    said = re.escape(
        "Config.heads_together must be False (forward), or Config.dq_warpgroups 1, for "
        "flash_forward on sm90: "
    )
    with pytest.raises(ValueError, match=f"^{said}.* and 2 warpgroups$"):
        flash_fwd_sm90.plan_of(attention(), flash_fwd_sm90.Config(2, heads_together=True))


def test_a_config_names_the_first_field_that_is_wrong():
    with pytest.raises(ValueError, match=r"^Config\.stages must be at least 1, got 0$"):
        Config(stages=0)
    with pytest.raises(ValueError, match=r"^Config\.block must be at least 1, got -2$"):
        Config(-2, 0)


def test_what_is_known_of_a_gpu():
    kib = {"sm80": 163, "sm86": 99, "sm87": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}
    kib |= {"sm103": 227, "sm110": 227, "sm121": 99, "sm107": 327}
    assert {gpu: gpu_specs.shared_memory(gpu) / 1024 for gpu in kib} == kib
    blocks = {
        "sm80": 108,
        "sm86": 84,
        "sm89": 128,
        "sm90": 132,
        "sm100": 148,
        "sm103": 148,
        "sm120": 132,
    }
    assert {gpu: gpu_specs.multiprocessors(gpu) for gpu in blocks} == blocks


# The warpgroups, block_kv, stages, l2_heads and other fields of Config that were fastest in a
# search on an H200, by problem.
_MEASURED = [
    (64, FULL, 8, 2048, 32, 32, (3, 128, 4, 48), {}),
    (64, FULL, 2, 8192, 32, 32, (3, 128, 4, 12), {}),
    (64, CAUSAL, 32, 512, 32, 32, (4, 64, 6, 32), {}),
    (64, CAUSAL, 8, 2048, 32, 32, (4, 64, 6, 16), {}),
    (64, CAUSAL, 2, 8192, 32, 32, (4, 64, 6, 8), {}),
    (64, sliding_window(128), 2, 8192, 32, 32, (4, 64, 6, 64), {}),
    (80, CAUSAL, 4, 4096, 16, 16, (3, 64, 4, 16), {}),
    (96, CAUSAL, 4, 4096, 16, 16, (3, 64, 4, 0), {}),
    (128, FULL, 8, 2048, 16, 16, (3, 64, 3, 1), {}),
    (128, FULL, 2, 8192, 16, 16, (3, 64, 3, 0), {}),
    (128, CAUSAL, 8, 1024, 16, 16, (3, 64, 3, 16), {}),
    (128, CAUSAL, 8, 2048, 16, 16, (3, 64, 3, 32), {}),
    (128, CAUSAL, 4, 3000, 28, 4, (3, 64, 3, 28), {}),
    (128, CAUSAL, 8, 4096, 16, 16, (3, 64, 3, 8), {}),
    (128, CAUSAL, 2, 8192, 16, 16, (3, 64, 3, 8), {}),
    (128, CAUSAL, 2, 8192, 32, 8, (3, 64, 3, 8), {}),
    (128, CAUSAL, 1, 16384, 16, 16, (3, 64, 3, 0), {}),
    (128, sliding_window(1024), 2, 8192, 16, 16, (3, 64, 3, 0), {}),
    (128, sliding_window(4096), 1, 32768, 16, 16, (3, 64, 3, 0), {}),
    ((192, 128), CAUSAL, 4, 4096, 16, 16, (3, 64, 3, 0), {}),
    (64, FULL, 256, 197, 12, 12, (4, 64, 6, 48), {}),  # ViT-B
    (64, FULL, 64, 257, 16, 16, (3, 64, 4, 48), {}),
    (64, FULL, 64, 577, 16, 16, (4, 64, 6, 48), {}),
    (72, FULL, 64, 729, 16, 16, (3, 64, 4, 0), {}),  # SigLIP
    (72, FULL, 128, 256, 16, 16, (4, 64, 5, 0), {"q_slots": 1}),  # DiT-XL
    (64, FULL, 1, 197, 12, 12, (1, 128, 4, 48), {}),  # work tiles for a part of the GPU
    (64, FULL, 16, 1500, 20, 20, (4, 64, 6, 48), {}),  # Whisper
    (64, CAUSAL, 512, 77, 8, 8, (2, 80, 4, 32), {}),  # CLIP's text encoder
    (256, FULL, 8, 2048, 8, 8, (2, 64, 2, 4), {}),
    (256, FULL, 2, 8192, 8, 8, (2, 64, 2, 3), {}),
    (256, CAUSAL, 8, 2048, 8, 8, (2, 64, 2, 8), {}),
    (256, CAUSAL, 2, 8192, 8, 8, (2, 64, 2, 0), {}),
]
# By the rules for few rows, and where the largest tiles have no room.
_BY_RULES = [
    ({"q_len": 384, "kv_len": 1000, "batch": 64, "head_dim": 16}, (3, 128, 4)),
    ({"q_len": 300, "kv_len": 64, "batch": 2, "head_dim": 96}, (2, 64, 4)),
    (
        {"q_len": 2048, "batch": 8, "head_dim": 144, "v_head_dim": 128, "bias_shape": (1, 1)},
        (2, 64, 2),
    ),
]


@pytest.mark.parametrize("changes, settings", _BY_RULES, ids=str)
def test_the_default_of_the_forward_on_hopper_has_room(changes, settings):
    changes = {"mask": FULL, "v_head_dim": changes["head_dim"]} | changes
    if shape := changes.pop("bias_shape", None):
        changes |= {"arrays": ("bias",), "bias_shape": (*shape, changes["q_len"], 8192)}
    problem = attention(**changes)
    config = flash_fwd_sm90.Config.default(problem)
    assert (config.warpgroups, config.block_kv, config.stages) == settings
    assert _config.fits(flash_fwd_sm90, problem, config)


@pytest.mark.parametrize(
    "dim, sequences, settings", [(128, 1, (1, 128, 3)), (256, 64, (2, 64, 2))], ids=str
)
def test_the_default_of_shared_rows_on_hopper_has_room(dim, sequences, settings):
    """Consumers for all rows that share keys."""
    sizes = {"head_dim": dim, "v_head_dim": dim, "q_heads": 8, "kv_heads": 1}
    sizes |= {"merged": (1, sequences, 8)}
    problem = dataclasses.replace(support._BASE["decode"], **support._PACKED, **sizes)
    config = prefill_sm90.Config.default(problem)
    assert (config.warpgroups, config.block_kv, config.stages) == settings
    assert _config.fits(prefill_sm90, problem, config)


def test_a_config_that_matmuls_do_not_take():
    """Keys of other devices, in tiles that are no whole swizzles."""
    problem = attention(fetches=2)
    with pytest.raises(ValueError, match=r"^Config\.block_kv must be a multiple of \d+ where "):
        flash_fwd_sm90.smem_bytes(problem, flash_fwd_sm90.Config(1, block_kv=48))


def test_a_kernel_of_lists_has_the_stages_of_the_other():
    kernel = dispatch.TABLES["decode_listed"][0].kernel
    deep, least = (kernel.config(decode_sm90.Config(stages=n)) for n in (3, 2))
    assert deep.shallower() == least and least.shallower() is None


def test_quantize_has_registers():
    with pytest.raises(ValueError, match="^registers: expected at least 1, got 0$"):
        blocks.Config(registers=0)


@pytest.mark.parametrize("row", _MEASURED, ids=lambda row: "-".join(map(str, row[:6])))
def test_the_default_of_the_forward_on_hopper_is_what_was_measured(row):
    dims, mask, batch, length, q_heads, kv_heads, settings, others = row
    dim, v_dim = dims if isinstance(dims, tuple) else (dims, dims)
    problem = attention(
        mask=mask,
        batch=batch,
        q_len=length,
        kv_len=length,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
    )
    result = dataclasses.asdict(flash_fwd_sm90.Config.default(problem))
    names = ("warpgroups", "block_kv", "stages", "l2_heads")
    plain = {"grid": 132, "q_slots": 2, "fetchers": 16, "claims": False}
    plain |= {"float32_sums": True, "heads_together": False}
    assert result == dict(zip(names, settings, strict=True)) | plain | others


@pytest.mark.parametrize(
    ("sizes", "dim", "heads", "forward", "backward"),
    [
        (128, 128, (8, 2), (2, 128, False), None),
        ((64, 256), 128, (8, 2), (2, 128, True), 2),
        (64, 128, (8, 2), (2, 64, True), 2),
        (64, 128, (6, 2), (3, 64, True), 1),
        (64, 64, (16, 2), (4, 64, True), 2),
        (64, 128, (2, 2), (1, 64, False), 1),
        (32, 128, (8, 2), (2, 128, False), None),
    ],
    ids=str,
)
def test_tiles_on_hopper_follow_blocks(sizes, dim, heads, forward, backward):
    """Consumers, keys of a tile, and whether heads share work tiles; heads of a work tile of dq."""
    q_heads, kv_heads = heads
    q, k = (np.zeros((1, 1024, n, dim), np.float32) for n in heads)
    rows = sizes[0] if isinstance(sizes, tuple) else sizes
    blocks = np.zeros((1, kv_heads, 1024 // rows, 2), np.int32)
    mask = block_lists.shown(q, k, Call(CAUSAL, kv_blocks=Blocks(blocks, sizes)))
    shape = {"q_len": 1024, "kv_len": 1024, "q_heads": q_heads, "kv_heads": kv_heads}
    shape |= {"head_dim": dim, "v_head_dim": dim}
    problem = attention(mask=FULL, mask_program=mask.program, **shape)
    config = flash_fwd_sm90.Config.default(problem)
    assert (config.warpgroups, config.block_kv, config.heads_together) == forward
    assert _config.fits(flash_fwd_sm90, problem, config)
    backward_problem = dataclasses.replace(problem, op="flash_backward")
    has_block_table = flash_bwd_sm90.has_block_table(backward_problem)
    module = sm90_two_kernels if has_block_table else flash_bwd_sm90
    config = module.Config.default(backward_problem)
    assert (config.dq_warpgroups if has_block_table else None) == backward
    assert _config.fits(module, backward_problem, config)


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "kv_heads", "heads"),
    [
        (CAUSAL, 8192, 8192, 8, 8),
        (CAUSAL, 16384, 16384, 8, 16),
        (CAUSAL, 16384, 16384, 32, 4),
        (CAUSAL, 32768, 32768, 8, 8),
        (CAUSAL, 65536, 65536, 8, 4),
        (CAUSAL, 131072, 131072, 8, 4),  # a kv head alone is more than there is room for
        (CAUSAL, 8192, 65536, 8, 4),  # by how many keys there are
        (CAUSAL, 4096, 131072, 32, 1),
        (sliding_window(4096), 65536, 65536, 8, 8),  # few of them for each row
    ],
)
def test_l2_groups_of_long_sequences_have_room_for_their_keys(mask, q_len, kv_len, kv_heads, heads):
    sizes = {"batch": 1, "q_len": q_len, "kv_len": kv_len, "q_heads": 32, "kv_heads": kv_heads}
    problem = attention(mask=mask, head_dim=128, v_head_dim=128, **sizes)
    plan = flash_fwd_sm90.plan_of(problem, flash_fwd_sm90.Config.default(problem))
    assert plan.order.l2_heads == heads


_IDS = ("q_segment_ids", "kv_segment_ids")
_BIAS, _ONE_BIAS = (
    {"arrays": ("bias",), "bias_shape": (1, heads, 4096, 4096)} for heads in (16, 1)
)


@pytest.mark.parametrize(
    ("dim", "mask", "changes", "settings"),
    [
        (128, CAUSAL, {"arrays": _IDS, "batch": 1, "q_len": 8192, "kv_len": 8192}, (2, 128, 2)),
        (128, CAUSAL, {"arrays": _IDS, "batch": 1, "q_len": 32768, "kv_len": 32768}, (2, 128, 2)),
        (128, FULL, {"q_len": 1024, "kv_len": 1024}, (2, 128, 2)),
        (128, CAUSAL, _BIAS, (2, 64, 2)),
        (128, FULL, _BIAS, (2, 64, 2)),
        (128, CAUSAL, _ONE_BIAS, (2, 64, 2)),
        (128, FULL, _ONE_BIAS, (2, 64, 2)),
        (128, CAUSAL, {"arrays": ("q_lengths",)}, (3, 64, 3)),
        (64, FULL, _BIAS, (4, 64, 2)),
        (64, FULL, _ONE_BIAS, (4, 64, 2)),
        (64, FULL, {"arrays": ("mask_array",)}, (4, 64, 6)),
        (64, FULL, {"arrays": ("kv_lengths",)}, (4, 64, 6)),
        (64, FULL, {"arrays": ("q_lengths", "kv_lengths")}, (3, 128, 4)),
        (64, CAUSAL, {"arrays": ("q_lengths",)}, (3, 128, 4)),
        (64, FULL, {"softcap": 30.0}, (4, 64, 6)),
        (64, CAUSAL, {"arrays": _IDS}, (4, 64, 6)),
    ],
    ids=str,
)
def test_what_else_a_call_asks_for_decides_about_tiles(dim, mask, changes, settings):
    """The faster of two or three on an H200, at 4096 rows where it says nothing else."""
    sizes = {"q_len": 4096, "kv_len": 4096, "head_dim": dim, "v_head_dim": dim, "mask": mask}
    config = flash_fwd_sm90.Config.default(attention(**(sizes | changes)))
    assert (config.warpgroups, config.block_kv, config.stages) == settings


_REFUSED = {
    flash_fwd_sm90: [
        ("warpgroups", 5, "1, 2, 3 or 4"),
        ("block_kv", 76, "16, 24, .. 256"),
        ("stages", 1, "at least 2"),
        ("l2_heads", -1, "at least 0"),
        ("grid", -1, "at least 0"),
        ("q_slots", 3, "1 or 2"),
    ],
    flash_bwd_sm90: [
        ("block_q", 96, "64 or 128"),
        ("stages", 1, "at least 2"),
        ("l2_heads", -1, "at least 0"),
        ("grid", -1, "at least 0"),
        ("dq_lag", 3, "1 or 2"),
        ("kv_slots", 3, "1 or 2"),
        ("parts", 0, "from 1 to 64"),
    ],
    sm90_two_kernels: [
        ("block_q", 96, "16, 32, 64 or 128"),
        ("stages", 1, "at least 2"),
        ("l2_heads", -1, "at least 0"),
        ("grid", -1, "at least 0"),
        ("dq_block_kv", 48, "32, 64 or 128"),
        ("dq_stages", 1, "at least 2"),
        ("dq_warpgroups", 4, "1, 2 or 3"),
        ("parts", 0, "from 1 to 64"),
    ],
    sm90_heads: [("grid", -1, "at least 0")],
    flash_fwd_sm80: [
        ("columns", 64, "0; or a multiple of 16 if row_blocks is 1 and q is in memory"),
        ("columns_before_v", 8, "a multiple of 16"),
    ],
    flash_bwd_sm80: [("columns", 64, "0; or a multiple of 16 with dq_block_kv if kv_blocks and "
                      "warpgroups are 1 and warp_rows is 4")],
    decode_sm80: [("q_rows", 5, "4, 8, 16, 32 or 64"), ("stages", 0, "at least 1")],
    gathered_packed_sm90: [("most", 0, "at least 1")],
    append_copy: [("words", 0, "1 to 16: registers hold them")],
    decode_sm90: [
        ("tile", 8, "16, 32, 64, 128 or 256"),
        ("stages", 1, "at least 2"),
        ("grid", 0, "at least 1"),
        ("split_tiles", 0, "at least 1"),
        ("head_overhead", 8, "a multiple of 16"),
    ],
    prefill_sm90: [
        ("warpgroups", 4, "1, 2 or 3"),
        ("block_kv", 32, "64 or 128"),
        ("stages", 1, "at least 2"),
        ("q_slots", 3, "1 or 2"),
        ("splits", 33, "1 to 32"),
        ("grid", 0, "at least 1"),
        ("together", 0, "at least 1"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "field", "value", "want"),
    [(kernel, *row) for kernel, rows in _REFUSED.items() for row in rows],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_config_checks_itself(kernel, field, value, want):
    said = f"Config.{field} must be {want}, got {value}"
    with pytest.raises(ValueError, match=re.escape(said)):
        kernel.Config(**{field: value})
