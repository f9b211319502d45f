"""The choice of a configuration: the nearest row, where it carries over; every row holds."""

import dataclasses
import importlib
import json
import math
import tomllib
import types

import pytest

import pallas_attn
from pallas_attn import _gpus, _support, _tuning, cases
from pallas_attn._problem import AttentionProblem
from pallas_attn.bench import Options, run_tune, tune
from pallas_attn.bench.timing import Sample
from pallas_attn.masks import CAUSAL, FULL, sliding_window


def attention(**changes):
    base = AttentionProblem(
        op="flash_forward",
        gpu="sm90",
        dtype="bfloat16",
        batch=2,
        q_len=8192,
        kv_len=8192,
        q_heads=16,
        kv_heads=16,
        head_dim=128,
        v_head_dim=128,
        mask=CAUSAL,
        scale=1.0,
    )
    return dataclasses.replace(base, **changes)


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 7
    stages: int = 1

    def __post_init__(self):
        if self.block < 1:
            raise ValueError("block: expected at least 1")


def kernel(bytes_a_block=1):
    """A stand-in for a kernel module: what lookup needs of one."""
    module = types.ModuleType("pallas_attn.kernels.flash_fwd_fake")
    module.Config = Config
    module.smem_bytes = lambda problem, config: config.block * bytes_a_block
    return module


def row(block, problem):
    return {"problem": _tuning.describe(problem), "config": {"block": block}}


@pytest.fixture
def tables(monkeypatch):
    """Lets a test say what the tuning files hold."""

    def hold(**files):
        monkeypatch.setattr(_tuning, "_tables", lambda: files)

    return hold


def test_an_exact_row_is_taken(tables):
    other = attention(q_len=512, kv_len=512, batch=32)
    tables(sm90={"flash_fwd_fake": [row(64, other), row(128, attention())]})
    assert _tuning.lookup(kernel(), attention()) == Config(block=128)
    assert _tuning.lookup(kernel(), other) == Config(block=64)


@pytest.mark.parametrize(
    ("problem", "block"),
    [
        (attention(q_len=6000, kv_len=6000), 1),
        (attention(q_len=700, kv_len=700, batch=20), 2),
        (attention(mask=FULL), 3),
        (attention(mask=sliding_window(200)), 4),
        (attention(head_dim=256, v_head_dim=256), 5),
        (attention(head_dim=136, v_head_dim=136), 5),  # padded to 192: no row of 128 holds it
        (attention(head_dim=96, v_head_dim=96), 1),
        (attention(dtype="float16"), 1),
        (attention(arrays=("bias",)), 6),
    ],
)
def test_the_nearest_row_serves_what_nobody_tuned(tables, problem, block):
    wide = {"head_dim": 256, "v_head_dim": 256}
    tables(
        sm90={
            "flash_fwd_fake": [
                row(1, attention()),
                row(2, attention(q_len=512, kv_len=512, batch=32)),
                row(3, attention(mask=FULL)),
                row(4, attention(mask=sliding_window(128))),
                row(5, attention(**wide)),
                row(6, attention(arrays=("bias",), bias_shape=(1, 1, 8192, 8192))),
            ]
        }
    )
    assert _tuning.lookup(kernel(), problem).block == block


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"head_dim": 192}, {"v_head_dim": 192}])
def test_a_row_that_would_not_carry_over_is_not_taken(tables, changes):
    tables(sm90={"flash_fwd_fake": [row(64, attention())]})
    assert _tuning.lookup(kernel(), attention(**changes)) == Config()


def test_precision_separates(tables):
    tables(sm90={"flash_fwd_fake": [row(64, attention(dtype="float32"))]})
    assert _tuning.lookup(kernel(), attention(dtype="float32")).block == 64
    highest = attention(dtype="float32", precision="highest")
    assert _tuning.lookup(kernel(), highest) == Config()


def test_a_row_that_does_not_fit_gives_way_to_the_next(tables):
    near, far = row(128, attention()), row(64, attention(q_len=512))
    tables(sm90={"flash_fwd_fake": [near, far]})
    limit = _gpus.shared_memory("sm90")
    assert _tuning.lookup(kernel(limit // 128), attention()).block == 128
    assert _tuning.lookup(kernel(limit // 64), attention()).block == 64
    assert _tuning.lookup(kernel(limit), attention()) == Config()


def test_a_kernel_may_refuse_a_combination_or_name_its_own_default(tables):
    module = kernel()

    def refuse(problem, config):
        raise ValueError("block must divide the page")

    tables(sm90={"flash_fwd_fake": [row(64, attention())]})
    module.smem_bytes = refuse
    assert _tuning.lookup(module, attention()) == Config()
    module.Config = type("Config", (Config,), {"default": staticmethod(lambda p: Config(p.q_len))})
    assert _tuning.lookup(module, attention()) == Config(8192)


def test_what_is_known_of_a_gpu():
    kib = {"sm80": 163, "sm86": 99, "sm87": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}
    assert {gpu: _gpus.shared_memory(gpu) / 1024 for gpu in kib} == kib
    blocks = {"sm80": 108, "sm86": 84, "sm89": 128, "sm90": 132, "sm100": 148, "sm120": 132}
    assert {gpu: _gpus.multiprocessors(gpu) for gpu in blocks} == blocks


def test_a_generation_without_a_file_uses_the_nearest(tables):
    tables(
        sm80={"flash_fwd_fake": [row(80, attention())]},
        sm90={"flash_fwd_fake": [row(90, attention())]},
        sm100={"other": [row(100, attention())]},
    )
    found = {
        gpu: _tuning.lookup(kernel(), attention(gpu=gpu)).block for gpu in ("sm80", "sm89", "sm100")
    }
    assert found == {"sm80": 80, "sm89": 90, "sm100": 90}
    assert _tuning.lookup(kernel(), attention(gpu=None)) == Config()


def test_forced_wins_and_ends(tables):
    tables(sm90={"flash_fwd_fake": [row(64, attention())]})
    with _tuning.forced("flash_fwd_fake", {"block": 3}), _tuning.forced("other", {}):
        assert _tuning.lookup(kernel(), attention()) == Config(block=3)
    assert _tuning.lookup(kernel(), attention()) == Config(block=64)


def test_describe_leaves_out_what_is_off_and_what_does_not_matter():
    facts = _tuning.describe(attention(mask=sliding_window(5), softcap=2.0))
    assert facts["mask"] == {"left": 4, "right": 0}
    assert facts["softcap"] == 2.0
    assert not facts.keys() & {"scale", "op", "gpu", "precision", "arrays", "q_offset"}
    assert _tuning.describe(attention(mask=FULL))["mask"] == {}


def test_decode_rows_keep_to_their_kind_of_cache_where_they_can():
    plain = _support._BASE["decode"]
    kinds = (dataclasses.replace(plain, kind=kind) for kind in ("stacked", "paged"))
    stacked, paged = map(_tuning.describe, kinds)
    assert stacked["capacity"] == 1024
    assert _tuning.distance(stacked, stacked) == 0 < _tuning.distance(stacked, paged) < math.inf


def _rows():
    return [
        pytest.param(gpu, kernel, row, id=f"{gpu}-{kernel}-{row['case']}")
        for gpu, kernels in _tuning._tables().items()
        for kernel, found in kernels.items()
        for row in found
    ]


@pytest.mark.parametrize(("gpu", "kernel", "row"), _rows())
def test_every_row_builds_fits_and_is_reached(gpu, kernel, row):
    module = importlib.import_module(f"pallas_attn.kernels.{kernel.replace('_sm', '.sm')}")
    problem = tune.problem_of(kernel, row["problem"], gpu)
    config = module.Config(**row["config"])
    assert module.limit(problem) is None
    assert _tuning.fits(module, problem, config)
    assert _tuning.lookup(module, problem) == config
    assert row["ms"] > 0
    assert all(row[name] for name in ("device", "jax", "commit", "date"))


def test_search_walks_to_the_optimum_and_tries_nothing_twice():
    tried = []

    def time_of(settings):
        tried.append(tuple(settings.values()))
        return abs(settings["block"] - 64) + (10 if settings["stages"] != 3 else 0) + 1.0

    space = {"block": (16, 32, 64, 128), "stages": (1, 2, 3)}
    ranked = tune.search(space, {"block": 16, "stages": 1}, time_of)
    assert ranked[0] == ({"block": 64, "stages": 3}, 1.0)
    assert len(set(tried)) == len(tried) < 12


@pytest.mark.parametrize("kernel", tune.SPACES)
def test_what_is_searched_are_settings_of_the_kernel(kernel):
    module = importlib.import_module(f"pallas_attn.kernels.{kernel.replace('_sm', '.sm')}")
    assert set(tune.SPACES[kernel]) <= {field.name for field in dataclasses.fields(module.Config)}


def test_a_kernel_without_a_space_is_searched_around_where_it_stands():
    assert tune.space_of("unheard_of", {"block": 64, "lazy": False, "stages": 1}) == {
        "block": (32, 64, 128),
        "lazy": (False, True),
        "stages": (1, 2),
    }


class SettingsTimer:
    """Bigger blocks are faster; the settings are the subject's name."""

    def __call__(self, subject, times):
        block = Config().block if subject.name == "incumbent" else json.loads(subject.name)["block"]
        return [Sample(1.0 / block, 1)] * times


@pytest.fixture
def fake_flash(monkeypatch):
    """flash_attention by a kernel with settings: 28 is fast and wrong, 14 does not build."""
    module = kernel()
    right = pallas_attn.flash_attention

    def flash_attention(q, k, v, **rest):
        problem = attention(batch=q.shape[0], q_len=q.shape[1])
        config = _tuning.lookup(module, problem)
        if config.block == 14:
            raise NotImplementedError("no such tile")
        return right(q, k, v, **rest) * (1.5 if config.block == 28 else 1)

    monkeypatch.setattr(pallas_attn, "flash_attention", flash_attention)
    monkeypatch.setitem(tune.SPACES, "flash_fwd_fake", {"block": (7, 14, 21, 28), "stages": (1, 2)})


def test_tuning_writes_the_fastest_that_is_right(fake_flash, tables, tmp_path):
    tables()
    path, lines = tmp_path / "sm90.toml", []
    case = next(case for case in cases.ATTENTION if case.name == "causal_32x32")
    options = Options(commit="abc", turns=1)
    arguments = {"timer": SettingsTimer(), "path": path, "say": lines.append}
    assert run_tune("flash_fwd_fake", [case], options, **arguments) == 0
    (found,) = tomllib.loads(path.read_text())["flash_fwd_fake"]
    assert found["config"] == {"block": 21, "stages": 1}
    assert found["ms"] == round(1 / 21, 5)
    assert found["problem"] == _tuning.describe(attention(batch=1, q_len=32))
    assert all(found[name] for name in ("case", "device", "jax", "commit", "date", "tflops"))
    assert any("fast and wrong: out: positions" in line for line in lines)
    assert any("'block': 14" in line and "no such tile" in line for line in lines)


def test_a_row_in_force_gives_way_only_to_a_win(fake_flash, tables, tmp_path):
    best = row(21, attention(batch=1, q_len=32))
    tables(sm90={"flash_fwd_fake": [best]})
    path, lines = tmp_path / "sm90.toml", []
    case = next(case for case in cases.ATTENTION if case.name == "causal_32x32")
    arguments = {"timer": SettingsTimer(), "path": path, "say": lines.append}
    assert run_tune("flash_fwd_fake", [case], Options(commit="abc", turns=1), **arguments) == 0
    assert not path.exists()
    assert any("kept as it is" in line for line in lines)


def test_nothing_to_tune_is_said(tmp_path):
    case = next(case for case in cases.ATTENTION if case.name == "causal_32x32")
    lines = []
    arguments = {"timer": SettingsTimer(), "path": tmp_path / "x.toml", "say": lines.append}
    assert run_tune("flash_fwd_fake", [case], Options(commit="abc"), **arguments) == 1
    assert any("nothing to tune" in line for line in lines)
    with pytest.raises(ValueError, match="tuning times a GPU"):
        run_tune("flash_fwd_fake", [case])
    with pytest.raises(ValueError, match="kernel: expected a name that starts with flash_fwd"):
        run_tune("forward", [case])


def test_rows_are_replaced_in_place_and_survive_the_file(tmp_path):
    path = tmp_path / "sm90.toml"
    facts = _tuning.describe(attention(mask=sliding_window(9), arrays=("bias", "sinks")))
    facts_full = _tuning.describe(attention(mask=FULL))
    rest = {"ms": 0.5, "device": "NVIDIA H200", "jax": "0.11.2", "commit": "abc", "date": "today"}
    first = {"case": "b", "problem": facts, "config": {"block": 1, "lazy": True}, **rest}
    second = {"case": "a", "problem": facts_full, "config": {"block": 2}, **rest}
    tune.write_row(path, "flash_fwd_fake", first)
    tune.write_row(path, "flash_fwd_fake", second)
    tune.write_row(path, "fake_bwd", first)
    tune.write_row(path, "flash_fwd_fake", first | {"ms": 0.25})
    assert tomllib.loads(path.read_text()) == {
        "fake_bwd": [first],
        "flash_fwd_fake": [second, first | {"ms": 0.25}],
    }


def test_problems_come_back_from_their_facts():
    for problem in (
        attention(mask=sliding_window(9), softcap=2.0, arrays=("bias",)),
        attention(op="flash_backward"),
    ):
        name = "flash_bwd_sm90" if problem.op == "flash_backward" else "flash_fwd_sm90"
        again = tune.problem_of(name, _tuning.describe(problem), "sm90")
        assert again == dataclasses.replace(problem, scale=128**-0.5)
