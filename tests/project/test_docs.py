"""README.md and docs/: their code runs, their tables are those of the package and of results/, and
their links lead somewhere.
"""

import ast
import contextlib
import dataclasses
import doctest
import fnmatch
import functools
import inspect
import io
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
import pallas_lm as lm
from benchmarks import pages, report, rows
from pallas_attn._call import dispatch
from tests.project.test_package import FLOORS, imports
from tests.support import gallery
from tests.support import operations as support

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *RECIPES]
ALL_PAGES = [*PAGES, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
SUPPORT = ROOT / "docs" / "support.md"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
SEMANTICS = (ROOT / "docs" / "semantics.md").read_text()
SETTINGS_OF_CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
PROGRAMS = {
    f"{page.name} {number}": program
    for page in PAGES
    if page.name
    != "libraries.md"  # tests/project/test_libraries.py runs those, beside the libraries
    for number, program in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    )
}


@functools.cache
def executed(name):
    """(names that a program of the pages has bound, its output). A program may write into its
    folder, and set up jax's cache.
    """
    scope, printed = {}, io.StringIO()
    before = {key: getattr(jax.config, key) for key in SETTINGS_OF_CACHE}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
    ):
        try:
            exec(compile(PROGRAMS[name], name, "exec"), scope)
        finally:
            for key, value in before.items():
                jax.config.update(key, value)
    return scope, printed.getvalue()


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.by_xla if "README" in x else ()) for x in PROGRAMS],
)
def test_programs_print_what_they_say(name):
    said = re.search(r"print\(.*?\)\s*# (.*(?:\n# .*)*)", PROGRAMS[name]).group(1)
    assert executed(name)[1].strip() == said.replace("\n# ", "\n")


WRITES = ("append_kv", "write_kv", "update_kv_pages", "extend", "keep", "reset", "fork")


def calls_in(tree):
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def jitted(tree):
    """(function, the call or the name that jits it) of a program."""
    functions = {x.name: x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    for function in functions.values():
        yield from ((function, x) for x in function.decorator_list if "jax.jit" in ast.unparse(x))
    for call in calls_in(tree):
        name = ast.unparse(call.args[0]) if call.args else None
        if ast.unparse(call.func) == "jax.jit" and name in functions:
            yield functions[name], call


def written(function):
    """Names that a function writes to by the package's functions and by methods of caches."""
    for call in calls_in(function):
        if isinstance(call.func, ast.Attribute) and call.func.attr in WRITES:
            of_package = ast.unparse(call.func.value) == "pa"
            yield ast.unparse(call.args[0] if of_package else call.func.value)


def caches_that_are_copied(program):
    """Arguments of jitted functions that are written to in them, but not donated."""
    for function, how in jitted(ast.parse(program)):
        keywords = {x.arg: x.value for x in getattr(how, "keywords", ())}
        donated = ast.literal_eval(keywords.get("donate_argnums", ast.Tuple(elts=[])))
        donated = donated if isinstance(donated, tuple) else (donated,)
        kept = {x.arg for n, x in enumerate(function.args.args) if n not in donated}
        yield from (f"{function.name}: {name}" for name in written(function) if name in kept)


def test_programs_donate_their_caches():
    """Without it a step copies the cache (docs/recipes/on_a_gpu.md)."""
    examples = {x.name: x.read_text() for x in (ROOT / "examples").glob("*.py")}
    copied = {name: list(caches_that_are_copied(x)) for name, x in (PROGRAMS | examples).items()}
    assert {name: caches for name, caches in copied.items() if caches} == {}
    decode = PROGRAMS["README.md 1"]
    assert list(caches_that_are_copied(decode.replace(", donate_argnums=0", ""))) == ["step: cache"]


BUCKETS = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)  # heads, distances


def written_by_hand(scope):
    """NumPy's version of the pages' masks, bool, and of their scores, functions of the logits."""
    T = scope["T"]
    q, kv = np.ogrid[:T, :T]
    causal, far = q >= kv, q - kv
    ids = np.arange(T) // 32
    same = ids[:, None] == ids[None]
    prefix = np.stack([causal | (kv < n) for n in (20, 50)])[:, None]
    masks = {
        "causal": causal,
        "window": causal & (far < 16),
        "prefix-LM": prefix,
        "documents": same & causal,
        "documents, window": same & causal & (far < 16),
        "local and global": causal & ((kv < 4) | (far < 8)),
        "draft tree": np.asarray(scope["parents"]) | np.eye(T, dtype=bool),
    }
    slopes = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 16])[:, None, None]
    later = 16 + np.log(np.maximum(np.arange(T), 1) / 16) / np.log(8) * 16
    bucket = np.where(np.arange(T) < 16, np.arange(T), np.minimum(later.astype(int), 31))
    table = BUCKETS[:, bucket[np.abs(far)]]
    scores = {
        "ALiBi": lambda s: s - slopes * far,
        "T5": lambda s: s + table,
        "soft cap": lambda s: 30 * np.tanh(s / 30),
    }
    return masks, scores


def test_recipes_of_masks_and_scores_are_what_their_names_say():
    (name,) = (name for name, program in PROGRAMS.items() if "documents, window" in program)
    scope, _ = executed(name)
    t5 = executed("relative_positions.md 0")[0]["t5"]
    functions = scope["scores"] | {"T5": pa.score_fn(t5, BUCKETS)}
    masks, scores = written_by_hand(scope)
    assert masks.keys() == scope["masks"].keys() and scores.keys() == functions.keys()
    B, T, N, H = (scope[name] for name in "BTNH")
    q, k, v = (np.asarray(scope[name], np.float32) for name in "qkv")
    logits = np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5

    def close(logits, seen, **options):
        weights = np.exp(np.where(seen, logits, -np.inf) - logits.max(axis=-1, keepdims=True))
        wanted = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
        got = pa.flash_attention(*map(jnp.asarray, (q, k, v)), **options)
        np.testing.assert_allclose(got, wanted, atol=1e-4)

    for name, seen in masks.items():
        dense = scope["masks"][name].dense(T, T, batch=B, heads=N)
        np.testing.assert_array_equal(dense, np.broadcast_to(seen, (B, N, T, T)), name)
        close(logits, seen, mask=scope["masks"][name])
    for name, score in scores.items():
        close(score(logits), masks["causal"], mask=pa.CAUSAL, score=functions[name])


def test_the_programs_are_found():
    assert {
        "README.md 0",
        "README.md 1",
        "packed_documents.md 0",
        "rotary.md 1",
        "devices.md 2",
        "alphafold3.md 0",
    } <= PROGRAMS.keys()


def test_the_first_program_is_of_five_lines_and_the_second_of_fifteen():
    programs = [PROGRAMS[f"README.md {n}"].splitlines() for n in (0, 1)]
    counts = [sum(bool(line.strip()) for line in lines) for lines in programs]
    assert counts[0] <= 5 and counts[1] <= 15


@pytest.mark.by_xla
def test_the_program_updates_its_cache_in_place():
    scope, _ = executed("README.md 1")
    cache, q, k, v = (scope[name] for name in ("cache", "q", "k", "v"))
    before = [x.unsafe_buffer_pointer() for x in (*cache.k, *cache.v)]
    cache, _ = scope["step"](cache, q[:, 0], k[:, 0], v[:, 0])
    assert [x.unsafe_buffer_pointer() for x in (*cache.k, *cache.v)] == before


def test_the_first_page_has_two_lines_and_ci_takes_them():
    """Each sets up all that it needs; .ci/run greps for how they begin, and runs what it finds."""
    shown = re.search(r"^```bash\n(.*?)^```", README, re.S | re.M).group(1).splitlines()
    start = "python3 -m venv .venv && .venv/bin/pip install -e "
    assert len(shown) == 2 and all(line.startswith(start) for line in shown)
    assert [line for line in README.splitlines() if line.startswith("python3 -m venv")] == shown
    assert README.splitlines().index(shown[1]) < 50
    assert "< <(grep '^python3 -m venv' README.md)" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_is_short_and_has_one_picture():
    assert len(README.splitlines()) <= 130
    assert len(re.findall(r"!\[", README)) == 1


def test_pages_and_pictures_are_what_results_make_of_them():
    for name, text in pages.from_results(ROOT).items():
        assert (ROOT / name).read_text("utf-8") == text, (
            f"{name} is behind results/: python -m benchmarks.pages"
        )


def test_pictures_of_the_gallery_are_those_of_its_programs():
    """Each is small, and the page shows all that are there."""
    folder = ROOT / "docs" / "pictures"
    made = gallery.pictures()
    assert made.keys() == set(folder.glob("gallery_*.svg")) and len(made) >= 10
    for path, svg in made.items():
        assert path.read_text("utf-8") == svg, f"{path.name}: python -m tests.support.gallery"
        assert len(svg) < 40_000


def test_figures_of_the_readme_are_of_the_commit_that_it_names():
    """But for lines with a mark, which say that they are not."""
    commit, marks = re.search(r"^Commit `(\w+)`, [-\d]+\.(.*)$", README, re.M).groups()
    lines = re.findall(r"^\| (.+?)( †)? \| [.\d]+ \| [.\d]+ \| (\d+) \|$", README, re.M)
    every = [row for row in pages.current(rows.read(ROOT / "results")) if "H200" in row["gpu"]]
    with_cudnn = {(row["run"], row["case"]) for row in every if row["impl"] == "cudnn"}
    assert lines and bool(marks) == any(mark for _, mark, _ in lines)
    for title, mark, count in lines:
        (op,) = (op for op, whole in report.TITLES.items() if whole.split(",")[0] == title)
        newest = {}
        for row in sorted(every, key=lambda row: row["date"]):
            several = row.get("problem", {}).get("devices", 1) > 1
            if row["op"] == op and rows.is_ours(row) and "_sm80" not in row["impl"] and not several:
                newest[row["case"]] = row
        shown = [row for case, row in newest.items() if (row["run"], case) in with_cudnn]
        of_commit = [row for row in shown if row["commit"].startswith(commit[:7])]
        assert bool(mark) == (len(of_commit) < len(shown)), title
        assert mark or len(of_commit) == int(count), title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_is_written_by_hand(page):
    """Speeds and times of kernels stand between the markers of what results/ made."""
    before, _, rest = page.read_text().partition(pages.BEGIN)
    by_hand = before + rest.partition(pages.END)[2]
    assert not re.findall(r"[^.\n]*\d\s*(?:TFLOP/s|[TG]B/s|us\b|ms\b|times as fast)", by_hand)


def test_the_support_matrix_is_that_of_the_dispatch_table():
    _, rest = SUPPORT.read_text().split(support.BEGIN)
    written, _ = rest.split(support.END)
    assert written.strip() == support.support_matrix(), (
        "docs/support.md is behind the dispatch table: python -c "
        """'from tests.support import operations; operations.rewrite("docs/support.md")'"""
    )


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    for name in pa.__all__:
        assert f":: pallas_attn.{name}\n" in text or f"`{name}` is" in text, name


@pytest.mark.parametrize(
    "name",
    [x for x in pa.__all__ if callable(getattr(pa, x)) and x != "KVCache"],  # a base
)
def test_the_docstring_has_an_example_that_runs(name):
    names, said = {"jax": jax, "jnp": jnp, "pa": pa}, []
    text = inspect.getdoc(getattr(pa, name))
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


def test_the_api_page_has_every_argument_of_attention_once():
    text = (ROOT / "docs" / "api.md").read_text()
    table = text.partition("| for | arguments |\n|---|---|\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row)]
    for function in (pa.flash_attention, pa.flash_attention_with_lse):
        parameters = inspect.signature(function).parameters  # old keywords have no row
        assert sorted([*named, "old"]) == sorted(parameters)


def test_the_api_page_has_every_name_of_the_language_model():
    text = (ROOT / "docs" / "api.md").read_text()
    for name in set(lm.__all__) - {"mesh"}:
        assert f":: pallas_lm.{name}\n" in text, name
        assert getattr(lm, name).__doc__


def test_the_site_has_every_page():
    """In one place of the sidebar."""
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"^```{toctree}\n(.*?)^```", index, re.S | re.M)
    lines = [line for tree in trees for line in tree.splitlines() if line[:1] != ":"]
    entries = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
    for page in PAGES[1:]:
        name = str(page.relative_to(ROOT / "docs").with_suffix(""))
        places = [entry for entry in entries if fnmatch.fnmatch(name, entry)]
        assert len(places) == (name != "index"), f"{name}: {places}"


def test_recipes_are_short_and_listed():
    """With their programs."""
    listed = re.findall(r"\(recipes/(\w+)\.md\)", (ROOT / "docs" / "recipes.md").read_text())
    assert {page.stem for page in RECIPES} == set(listed)
    words = {page.stem: len(page.read_text().split()) for page in RECIPES}
    assert max(words.values()) <= 700 and sum(words.values()) <= 6500, words


@pytest.mark.parametrize("operation", ["flash_forward", "flash_backward", "decode"])
def test_hoppers_kernels_are_for_hopper(operation):
    """docs/support.md: Ampere, Ada and Blackwell get the portable kernels."""
    chosen = {}
    for gpu in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"):
        problem = dataclasses.replace(support._BASE[operation], gpu=gpu)
        chosen[gpu] = dispatch.select(problem, None).implementation
    assert chosen == dict.fromkeys(chosen, "sm80") | {"sm90": "sm90"}


_QUANTIZED = {"cache_dtype": "int8", "quantized": True}
_BYTES = {"quantized": True, "byte_rows": True}
_SEPARATE = _QUANTIZED | {"kind": "per_sequence"}
_LATENT = {"shared_kv": True, "kv_heads": 1, "q_heads": 16, "head_dim": 576, "v_head_dim": 512}


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        *((name, {"dtype": "float64"}) for name in ("flash_forward", "flash_backward", "decode")),
        *((name, {"head_dim": 520}) for name in ("flash_forward", "flash_backward", "decode")),
        *((name, {"v_head_dim": 36}) for name in ("flash_forward", "flash_backward", "decode")),
        ("decode", {"sequences": 2001, "capacities": (8,) * 2001}),
        ("decode", _SEPARATE | {"sequences": 1001, "capacities": (8,) * 1001}),
        ("decode", _QUANTIZED | {"dtype": "float32"}),
        ("decode", _LATENT | {"dtype": "float32", "cache_dtype": "float32"}),
        ("decode", _LATENT | _QUANTIZED),
        ("decode", {"cache_dtype": "float16"}),
        ("decode", {"cache_dtype": "int8"}),
        ("decode", _QUANTIZED | {"head_dim": 96, "v_head_dim": 96}),
        ("decode", _LATENT | {"kind": "per_sequence", "tokens": 8}),
        ("decode", _LATENT | {"mask": pa.FULL, "tokens": 8}),
        ("decode", _SEPARATE | {"listed": 8}),
        ("decode", _LATENT | {"listed": 8, "cache_dtype": "uint8"} | _BYTES),
        ("decode", {"listed": 8, "mask_program": pa.mask_fn(lambda b, h, q, kv: kv > h).program}),
    ],
)
def test_problems_that_no_kernel_takes(operation, fields):
    """docs/support.md, below the matrix."""
    for gpu in support.GENERATIONS:
        problem = dataclasses.replace(support._BASE[operation], gpu=gpu, **fields)
        assert all(kernel.refusal(problem) for kernel in support._kernels(problem)), gpu


def test_the_matrix_knows_every_operation():
    variants = {"decode_mla", "decode_quantized", "decode_merged", "flash_dual"}
    variants |= {"decode_listed", "decode_listed_mla", "listed_backward"}
    assert set(support.OPERATIONS) | variants == set(dispatch.TABLES)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_names_in_the_pages_exist():
    for page in PAGES:
        for name in set(re.findall(r"`(?:pa|pallas_attn)\.(\w+)", page.read_text())):
            path = ROOT / "pallas_attn" / name
            there = path.exists() or path.with_suffix(".py").exists()
            assert hasattr(pa, name) or there, f"{page}: {name}"


def test_paths_in_the_pages_exist():
    """Paths from the root, in code style."""
    for page in ALL_PAGES:
        for name in re.findall(
            r"`((?:pallas_attn|tests|configs|docs|results|examples)/[\w/.]*)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_semantics_that_the_page_and_the_docstrings_share():
    """The page is the contract; a docstring must not contradict it."""
    assert "A row that sees no key gives out 0, lse -inf" in SEMANTICS
    assert "row that sees no key is 0" in pa.flash_attention.__doc__
    assert "-inf for a row that sees no key" in pa.flash_attention_with_lse.__doc__
    assert "NaN" in pa.decode_attention.__doc__


def test_files_in_the_pages_exist():
    """In code style: a path from the root, from the package or its kernels/, or a file's name."""
    roots = [ROOT, ROOT / "pallas_attn", ROOT / "pallas_attn" / "kernels"]
    folders = ("pallas_attn", "pallas_lm", "benchmarks", "tests", "docs")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    for page in ALL_PAGES:
        for name in re.findall(r"`([\w./]*\.py)`", page.read_text()):
            is_path = any((root / name).exists() for root in roots)
            assert is_path or name in names, f"{page.name}: {name}"


def test_the_map_has_every_module_and_every_folder_of_kernels():
    top = {path.name for path in (ROOT / "pallas_attn").glob("*.py")} - {"__init__.py"}
    assert top <= set(re.findall(r"`(\w+\.py)`", ARCHITECTURE))
    floors = {}
    for floor, folders in re.findall(r"^\| (\d) \| ([^|]*) \|", ARCHITECTURE, re.M):
        floors |= dict.fromkeys(re.findall(r"`(\w+)/`", folders), int(floor))
    assert floors == FLOORS


def test_eight_files_are_enough_to_follow_the_hopper_forward():
    """All files that the listed ones import are listed too, or named as not needed."""
    part = ARCHITECTURE.partition("### One call of the Hopper forward")[2].partition("###")[0]
    listed = re.findall(r"^\d\. `([\w/]+)\.py`", part, re.M)
    assert len(listed) <= 8 and listed[0] == "flash_fwd/sm90"
    named = {name for name in re.findall(r"`([\w/]+)\.py`", part)}
    for module in listed:
        for name in imports("kernels." + module.replace("/", "."), special=False):
            folder, _, file = name.removeprefix("kernels.").partition(".")
            if name.startswith("kernels.") and file and folder != "lang":
                assert f"{folder}/{file}" in named, f"{module} imports {name}"
