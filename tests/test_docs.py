"""README.md: its code runs, its matrix is that of the dispatch table, its links lead somewhere."""

import dataclasses
import pathlib
import re

import pytest

import pallas_attn as pa
from pallas_attn import _dispatch, _support

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_readmes_programs_print_what_they_say(number, capsys):
    exec(compile(PROGRAMS[number], f"README.md, program {number}", "exec"), {})
    said = re.search(r"print\(.*?\)\s*# (.*)", PROGRAMS[number]).group(1)
    assert capsys.readouterr().out.strip() == said


def test_the_program_is_of_fifteen_lines():
    lines = [line for line in PROGRAMS[0].splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_program_updates_its_cache_in_place():
    scope = {}
    exec(compile(PROGRAMS[0], "README.md", "exec"), scope)
    cache, q, k, v = (scope[name] for name in ("cache", "q", "k", "v"))
    before = [x.unsafe_buffer_pointer() for x in (*cache.k, *cache.v)]
    cache, _ = scope["step"](cache, q[:, 0], k[:, 0], v[:, 0])
    assert [x.unsafe_buffer_pointer() for x in (*cache.k, *cache.v)] == before


def test_the_support_matrix_is_that_of_the_dispatch_table():
    _, rest = README.split(_support.BEGIN)
    written, _ = rest.split(_support.END)
    assert written.strip() == _support.support_matrix(), (
        "README.md is behind the dispatch table: "
        """python -c 'from pallas_attn import _support; _support.rewrite("README.md")'"""
    )


@pytest.mark.parametrize("operation", ["flash_forward", "flash_backward", "decode"])
def test_hoppers_kernels_are_for_hopper(operation):
    """As README says of Ampere, Ada and Blackwell."""
    chosen = {}
    for gpu in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"):
        problem = dataclasses.replace(_support._BASE[operation], gpu=gpu)
        chosen[gpu] = _dispatch.select(problem, None).name
    assert chosen == dict.fromkeys(chosen, "sm80") | {"sm90": "sm90"}


_QUANTIZED = {"cache_dtype": "int8", "quantized": True}
_SEPARATE = _QUANTIZED | {"kind": "per_sequence"}
_LATENT = {"shared_kv": True, "kv_heads": 1, "q_heads": 16, "head_dim": 576, "v_head_dim": 512}


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        *((name, {"dtype": "float64"}) for name in ("flash_forward", "flash_backward", "decode")),
        *((name, {"head_dim": 264}) for name in ("flash_forward", "flash_backward", "decode")),
        *((name, {"v_head_dim": 36}) for name in ("flash_forward", "flash_backward", "decode")),
        ("decode", {"sequences": 2001, "capacities": (8,) * 2001}),
        ("decode", _SEPARATE | {"sequences": 1001, "capacities": (8,) * 1001}),
        ("decode", _QUANTIZED | {"dtype": "float32"}),
        ("decode", _LATENT | {"dtype": "float32", "cache_dtype": "float32"}),
        ("decode", _LATENT | _QUANTIZED),
        ("decode", {"cache_dtype": "float16"}),
        ("decode", {"cache_dtype": "int8"}),
        ("decode", _QUANTIZED | {"head_dim": 96, "v_head_dim": 96}),
    ],
)
def test_what_no_kernel_takes(operation, fields):
    """As README says below the matrix."""
    for gpu in _support.GENERATIONS:
        problem = dataclasses.replace(_support._BASE[operation], gpu=gpu, **fields)
        assert all(kernel.limit(problem) for kernel in _support._kernels(operation)), gpu


def test_the_matrix_knows_every_operation():
    assert set(_support.OPERATIONS) == set(_dispatch.TABLES)


def test_links_within_the_repository_lead_somewhere():
    for name in ("README.md", "DESIGN.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} points at {target}"


def test_names_in_the_readme_exist():
    for name in set(re.findall(r"`(?:pa|pallas_attn)\.(\w+)`", README)):
        assert hasattr(pa, name), name


def test_the_semantics_that_the_readme_and_the_docstrings_share():
    """The table is the contract; what a call says of itself must not contradict it."""
    assert "a row that sees no key | out 0, lse -inf" in README
    assert "row that sees no key is 0" in pa.flash_attention.__doc__
    assert "-inf for a row that sees no key" in pa.flash_attention_with_lse.__doc__
    assert "NaN" in pa.decode_attention.__doc__


def test_the_tree_in_the_design_is_that_of_the_package():
    """Every file that it names is there; of modules, it names all but kernels by algorithm."""
    named = set(re.findall(r"[\w]+\.py", (ROOT / "DESIGN.md").read_text()))
    files = {path.name: path for folder in ("pallas_attn", "tests") for path in _modules(folder)}
    assert named <= {"run.py", *files}
    rest = {name for name, path in files.items() if path.parent.name in ("pallas_attn", "lm")}
    assert rest - {"__init__.py"} <= named


def _modules(folder):
    return (ROOT / folder).rglob("*.py")
