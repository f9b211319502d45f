"""The package as a whole: what importing it costs, who imports whom, how large things are."""

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import pathlib
import subprocess
import sys
import tomllib
import types

import pytest

import pallas_attn as pa
from pallas_attn import _jax_versions

ROOT = pathlib.Path(pa.__file__).parent
PUBLIC = ("attention", "decode", "cache", "append", "context", "masks", "merge", "rotary")
PUBLIC += ("scores", "trees", "errors", "prefixes", "ragged", "float8", "check", "devices")
PUBLIC += ("tuning", "values")
PACKAGES = ("pallas_attn", "pallas_lm", "benchmarks")  # the last is not in the wheel
FILES = sorted(path for name in PACKAGES for path in (ROOT.parent / name).rglob("*.py"))


def named(path):
    """pallas_attn/kernels/append/copy.py -> kernels.append.copy; other packages keep their name."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__").removeprefix("pallas_attn.")


MODULES = {named(path): path for path in FILES}


@functools.cache
def tree(path):
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(path):
    return tuple(ast.walk(tree(path)))


# ---- importing ----------------------------------------------------------------------------------

_COST = """
import sys, time
start = time.process_time()
import jax, jax.numpy
between = time.process_time()
import pallas_attn
print((time.process_time() - between) / (between - start))
"""
_QUIET = """
import os, sys
import jax, jax.numpy
from jax._src import xla_bridge

class Watched(dict):
    def _note(self, name):
        raise SystemExit(f"pallas_attn reads the environment variable {name}")
    def __getitem__(self, name): self._note(name)
    def get(self, name, default=None): self._note(name)
    def __contains__(self, name): self._note(name)
    def __iter__(self): self._note("*")

real, os.environ = os.environ, Watched()
os.getenv = os.environ.get
before = set(sys.modules)
import pallas_attn
os.environ = real
assert not xla_bridge.backends_are_initialized(), "importing pallas_attn asks for devices"
pallas = [m for m in sys.modules if m.startswith("jax.experimental.pallas")]
assert not pallas, f"importing pallas_attn imports {pallas}"
new = {m.partition(".")[0] for m in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
"""


def run(code):
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_costs_little():
    """Beside jax itself, on a machine that may be busy."""
    assert min(float(run(_COST)) for _ in range(4)) < 0.5


def test_importing_asks_no_device_and_reads_no_environment():
    assert run(_QUIET) == "['jax', 'pallas_attn']"


# ---- imports -------------------------------------------------------------------------------------


@functools.cache
def imports(module, special=True):
    """Modules of this package that one imports: at its top, within functions, and `special` cases,
    `Special("kernels.attention.claims")`.
    """
    path, modules = MODULES[module], set()
    for node in nodes(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif special and isinstance(node, ast.Call) and ast.unparse(node.func) == "Special":
            names = [f"pallas_attn.{node.args[0].value}"]
        modules |= {_module(name) for name in names if name.partition(".")[0] in PACKAGES}
    return modules


@functools.cache
def _module(name):
    """The longest front of a dotted name that is a module: pallas_attn.masks.CAUSAL -> masks."""
    parts = name.split(".")
    while not (ROOT.parent.joinpath(*parts).with_suffix(".py").exists()):
        if len(parts) > 1 and ROOT.parent.joinpath(*parts).is_dir():
            break
        parts.pop()
        if len(parts) <= 1:
            break
    name = ".".join(parts)
    return "" if name == "pallas_attn" else name.removeprefix("pallas_attn.")


def who_imports(module):
    return {name for name in MODULES if module in imports(name)}


def test_the_walk_sees_imports():
    assert imports("pallas_attn") == {*PUBLIC, "_jax_versions"}
    assert {"_call.checks", "_call.dispatch", "masks"} <= imports("attention")
    assert "kernels.lang.mosaic" in imports("kernels.append.copy")


@pytest.mark.parametrize("module", PUBLIC)
def test_public_modules_import_no_kernel(module):
    assert not [name for name in imports(module) if name.startswith("kernels")]


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("kernels")])
def test_kernels_import_nothing_that_is_public_but_masks_and_errors(module):
    allowed = {
        "masks",
        "errors",
        "_call.problem",
        "_call.kernel",
        "_functions.program",
        "_functions.reads",
        "_functions.tracing",
        "_functions.tile_bounds",
        "_call.gpu_specs",
        "_call.byte_rows",
        "_call.selection",
        "_call.special",
        "_call.launches",
    }
    others = {name for name in imports(module) if not name.startswith("kernels")}
    assert others <= allowed


MOST_LATE_IMPORTS = 6
# The folders of kernels/, each with its floor: a file imports from its own folder and from those on
# lower floors.
FLOORS = {
    "lang": 0,
    "mma": 1,
    "attention": 2,
    "flash_fwd": 3,
    "append": 3,
    "quantize": 3,
    "decode": 3,
    "flash_bwd": 4,
    "prefill": 4,
    "decode_mla": 4,
    "decode_listed": 5,
    "flash_jvp": 5,
}


def _folder(module):
    return module.split(".")[1]


@pytest.mark.parametrize("module", [name for name in MODULES if name.count(".") == 2])
def test_kernels_import_from_their_own_folder_and_lower_floors(module):
    if not module.startswith("kernels."):
        return
    for name in imports(module):
        if name.startswith("kernels."):
            there, here = _folder(name), _folder(module)
            assert there == here or FLOORS[there] < FLOORS[here], f"{module} imports {name}"


def test_every_kernel_file_lies_in_a_folder_with_a_floor():
    folders = {path.name for path in (ROOT / "kernels").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(FLOORS)
    assert [path.name for path in (ROOT / "kernels").glob("*.py")] == ["__init__.py"]


_LOADED = """
import sys
from tests.support import call_trace
call_trace.CALLS[{call!r}]()
print(*(name for name in sys.modules if name.startswith("pallas_attn.kernels.")))
"""
KERNEL_OF = {
    "forward": "flash_fwd.sm90",
    "decode": "decode.sm90",
    "append": "append.copy",
    "prefill": "prefill.sm90",
}


@pytest.mark.parametrize("call", KERNEL_OF)
def test_a_call_imports_its_own_kernel_and_no_other(call):
    """Beside the modules by which dispatch chooses."""
    reached = {f"kernels.{KERNEL_OF[call]}", "_call.dispatch"}
    while more := {name for module in reached for name in imports(module)} - reached:
        reached |= more
    modules = {name.removeprefix("pallas_attn.") for name in run(_LOADED.format(call=call)).split()}
    folders = {f"kernels.{folder}" for folder in FLOORS}
    assert f"kernels.{KERNEL_OF[call]}" in modules
    assert not modules - folders - reached


def _in_circles(edges):
    """Names that cannot be put in an order in which each needs only those before it."""
    left = {name: needed - {name} for name, needed in edges.items()}
    while ready := [name for name, needed in left.items() if not needed & set(left)]:
        for name in ready:
            del left[name]
    return set(left)


def test_no_circle_of_imports():
    """Every import counts, wherever it stands."""
    assert not _in_circles({name: imports(name) for name in MODULES})


def test_no_circle_of_rooms():
    """Folders and public modules. The folders of kernels/ have floors."""
    rooms = {}
    for name in MODULES:
        room = rooms.setdefault(name.partition(".")[0], set())
        room |= {other.partition(".")[0] for other in imports(name) if other}
    assert not _in_circles(rooms)


def test_circles_are_seen():
    assert _in_circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == {"a", "b"}


def test_few_imports_within_functions():
    """A special case stands at the top of a file, as a `Special`."""
    late = [
        f"{path}:{node.lineno}"
        for name, path in MODULES.items()
        if not name.startswith(("pallas_lm", "benchmarks"))
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert len(late) <= MOST_LATE_IMPORTS, late


def test_the_reference_knows_only_records_and_programs():
    known = {
        "_call.problem",
        "_call.byte_rows",
        "_call.quantization",
        "_functions.program",
        "masks",
    }
    assert imports("_call.reference") == known


def test_only_the_dispatch_knows_the_reference():
    """But for derivatives and numbers of rows that it alone computes."""
    users = who_imports("_call.reference")
    assert users == {"_call.dispatch", "_autodiff.by_rows", "_cache.keep"}


def test_who_knows_the_dispatch():
    users = who_imports("_call.dispatch")
    ours = {
        "attention",
        "devices",  # which one was taken
        "tuning",  # the kernel whose Config varies
        "_autodiff.derivative",
        "_autodiff.listed",
        "_autodiff.float8",
        "_call.float8",
        "_context_parallel.gather",
        "_context_parallel.launch",
        "_cache.write",
        "_cache.keep",
        "_cache.attend",
    }
    assert users == ours


# Imports of the demo and the benchmarks from the package, but for public modules: this list only
# gets shorter. The demo's kernels read pieces of the package's.
PRIVATE = {
    "pallas_lm.kernels.linear": {
        "kernels.attention.tiles",
        "kernels.attention.tma_operands",
        "kernels.lang.mosaic",
        "kernels.lang.types",
    },
    "pallas_lm.kernels.norm": {"kernels.lang.mosaic", "kernels.lang.types"},
    "benchmarks.contest": {"_call.config"},
    "benchmarks.float8": {"_call.problem"},
}


def test_who_uses_more_than_the_public_api():
    users = {}
    for name in MODULES:
        if name.startswith(("pallas_lm", "benchmarks")):
            reached = {x for x in imports(name) if x.startswith(("_", "kernels"))}
            users |= {name: reached} if reached else {}
    assert users == PRIVATE


def test_the_demo_reads_public_names_alone():
    """Names of modules and names in them. Its kernels read pieces of the package's kernels, too."""
    for name, path in MODULES.items():
        if not name.startswith("pallas_lm"):
            continue
        ours, read = set(), set()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("pallas_attn"):
                read |= {f"{node.module}.{alias.name}" for alias in node.names}
                ours |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                modules = [x for x in node.names if x.name.startswith("pallas_attn")]
                read |= {x.name for x in modules}
                ours |= {x.asname or "pallas_attn" for x in modules}
        texts = [ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Attribute)]
        read |= {text for text in texts if text.partition(".")[0] in ours}
        parts = {part for text in read for part in text.split(".")}
        assert not {part for part in parts if part[0] == "_" and part[:2] != "__"}, name
        assert name.startswith("pallas_lm.kernels") or "kernels" not in parts, name


def test_the_package_knows_neither_the_demo_nor_the_benchmarks():
    for name in MODULES:
        if not name.startswith(("pallas_lm", "benchmarks")):
            assert not {x for x in imports(name) if x.startswith(("pallas_lm", "benchmarks"))}
        elif name.startswith("pallas_lm") and name != "pallas_lm.cli.driver":
            assert not {x for x in imports(name) if x.startswith("benchmarks")}, name


def test_run_time_dependencies_are_the_four_we_said():
    allowed = {"pallas_attn", "jax", "jaxlib", "numpy", "absl"}
    allowed |= {"pallas_lm"}
    extras = {
        "benchmarks": {
            "benchmarks",
            "tests",
            "matplotlib",
            "torch",
            "tokamax",
            "fa4_jax",
            "flash_attn",
            "flashinfer",
        }
    }
    extras |= {"keras": {"keras"}, "equinox": {"equinox"}}  # modules for layers of these
    extras["_functions.picture"] = {"matplotlib"}
    extras["pallas_lm"] = {"tokenizers", "jinja2"}
    for path in FILES:
        name = named(path)
        here = allowed | extras.get(name, extras.get(name.partition(".")[0], set()))
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module.partition(".")[0]}
            else:
                continue
            assert names <= here | sys.stdlib_module_names, f"{path}: {names - here}"


def test_the_oldest_jax_is_the_same_everywhere():
    """The version that pip asks for, that CI tests with and that pages name."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["cuda12"], *extras["cuda13"]]
    (oldest,) = {need.partition(">=")[2] for need in needs if need.startswith("jax")}
    assert oldest == ".".join(map(str, _jax_versions.OLDEST))
    for name, text in {
        ".ci/run": f"\noldest={oldest}\n",
        "README.md": f"with JAX {oldest}, the oldest",
        "CONTRIBUTING.md": f"'jax=={oldest}' 'jaxlib=={oldest}'",
        "docs/architecture.md": f"JAX >= {oldest}",
        "docs/testing.md": f"oldest jax ({oldest})",
        "docs/support.md": f"| {pa.__version__} | {_jax_versions.TESTED} |",
    }.items():
        assert text in (ROOT.parent / name).read_text(), name


def test_an_untested_jax_is_named():
    assert not any(map(_jax_versions.warning_for, [(0, 11, 2), (0, 11, 9), (0, 12, 0, 1)]))
    assert _jax_versions.warning_for((0, 11, 1)).startswith("older than this pallas_attn takes")
    assert _jax_versions.warning_for((1, 0, 0)).startswith("newer than this pallas_attn was tested")


_WARNS = """
import warnings
import jax
jax.__version__, jax.__version_info__ = "0.99.1", (0, 99, 1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pallas_attn
for x in caught:
    print(x.category.__name__, x.filename, x.message, sep="; ")
"""


def test_importing_on_an_untested_jax_warns_once_and_names_the_import():
    assert run(_WARNS) == (
        "UserWarning; <string>; jax 0.99.1 is newer than this pallas_attn was tested with "
        "(0.11.2 to 0.12.*): kernels may fail to compile; take a newer pallas_attn or an older jax"
    )
    assert not run(_WARNS.replace('"0.99.1", (0, 99, 1)', '"0.12.3", (0, 12, 3)'))


def test_cuda_is_the_newer_of_its_versions():
    extras = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    newest = max(name for name in extras if name.startswith("cuda"))
    assert extras["cuda"] == [f"pallas_attn[{newest}]"]


def users_of(*modules):
    """Files that import from modules whose names begin so."""
    for path in FILES:
        for node in nodes(path):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith(modules) for name in names if name):
                yield named(path)


def test_jax_is_private_in_few_files():
    """Private modules only in the timer and for cuDNN's float8; Mosaic's own dialects also in the
    files that speak of single threads and instructions, which no version of JAX changes.
    """
    of_benchmarks = {"benchmarks.timing", "benchmarks.float8"}
    assert set(users_of("jax._src")) <= of_benchmarks
    users = set(users_of("jax.experimental.mosaic", "jaxlib")) - of_benchmarks
    of_instructions = {name for name in users if name.startswith(("kernels.lang.", "kernels.mma."))}
    assert users - of_instructions <= {
        "kernels.attention.logits",
        "kernels.decode_mla.combine_latent",
    }


# ---- sizes and words ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_and_functions_are_of_a_size_to_be_read(path):
    assert len(path.read_text().splitlines()) <= 800
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.stmt)]
            assert len(inner) - 1 <= 60, f"{node.name} has {len(inner) - 1} statements"


def test_kernels_read_none_of_a_masks_fields():
    """They ask `Mask.allows`, `row_bounds`, `kv_range` and the like: what a mask means is said in
    masks.py alone. By name, so that none is read by way of another variable: no attribute of
    anything in kernels/ bears a field's name, but what a class says of itself.
    """
    fields = {field.name for field in dataclasses.fields(pa.Mask)}
    result = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in (ROOT / "kernels").rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in fields
        and ast.unparse(node.value) != "self"
    ]
    assert not result


# Files outside kernels/ that shift, split, widen or choose by a band, and the fields of a `Mask`
# that each one takes or refuses.
READERS_OF_MASKS = {
    "_cache.attend_in_parts": {"left", "right"},
    "_cache.bind": {"left", "right"},  # by `bounds_right`, too
    "_cache.sharded_rows": {"left", "right"},
    "_call.bind": {"left", "right"},
    "_context_parallel.layout": {"left", "right"},
    "context": {"left", "right"},
}


def test_every_reader_of_a_masks_fields_answers_for_all_of_them():
    """A new field of `Mask` fails here for each file that does not know it yet."""
    fields = {field.name for field in dataclasses.fields(pa.Mask)}
    readers = {
        named(path)
        for path in ROOT.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in fields
        if ast.unparse(node.value) != "self" and not named(path).startswith("kernels.")
    }
    unknown = {name: fields - known for name, known in READERS_OF_MASKS.items() if fields - known}
    assert not unknown, f"these files take or refuse no such field of a Mask: {unknown}"
    assert readers - {"masks"} == set(READERS_OF_MASKS)


def test_nobody_compares_positions_but_masks():
    """`kv_pos <=` and the like outside of masks.py would be a second definition of visibility."""
    for path in FILES:
        if named(path) == "masks":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert not ("q_pos" in text and "kv_pos" in text), f"{path}: {text}"


def test_kernels_know_kinds_of_caches_from_their_layout():
    """cache_layout.py alone says where rows lie; other kernels ask it."""
    kinds = {"per_sequence", "stacked", "paged"}
    users = {
        named(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in kinds
    }
    users = {name for name in users if name.startswith("kernels.")}
    # both make a problem over rows that lie in another way
    makers = {"kernels.decode_mla.rows_as_sequences", "kernels.prefill.sm90"}
    assert users == {"kernels.attention.cache_layout"} | makers


def _bare_tuples(annotation):
    nodes = list(ast.walk(annotation))
    held = [node.value for node in nodes if isinstance(node, ast.Subscript)]
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == "tuple"]
    return [name for name in names if name not in held]


def test_no_parameter_is_a_bare_tuple():
    """Values that always travel together are a record with names, or the annotation names them."""
    for path in FILES:
        typed = [x for x in nodes(path) if isinstance(x, ast.arg) and x.annotation]
        result = [f"{path}:{x.lineno} {x.arg}" for x in typed if _bare_tuples(x.annotation)]
        assert not result


_MAKERS = (
    "Context",
    "in_context",
    "kernel",
    "kernel_of",
    "run",
)  # makers of the record, and the launch of a kernel


def _loose(function):
    """Which of plan, refs and smem a function takes, where it should be given one record."""
    arguments = function.args
    names = {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    called = {call.attr if isinstance(call, ast.Attribute) else ast.unparse(call) for call in calls}
    makes_operands = function.returns is not None and ast.unparse(function.returns).endswith("Refs")
    makes_record = any(name.endswith(_MAKERS) for name in called)
    return set() if makes_record or makes_operands else names & {"plan", "refs", "smem"}


@pytest.mark.parametrize("path", [x for x in FILES if "kernels" in x.parts], ids=named)
def test_functions_of_a_kernel_are_given_one_record(path):
    """`KernelContext`, or `ThreadContext`. Its parts stand side by side only in what makes it, in
    what launches a kernel, and in what makes a kernel's operands.
    """
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]
    assert not [
        f"{path}:{function.lineno} {function.name}"
        for function in functions
        if len(_loose(function)) > 1
    ]


def test_loose_parts_of_a_record_are_seen():
    body = "def f(plan, refs, t): return "
    loose = [_loose(ast.parse(body + x).body[0]) for x in ("t", "g(Context(plan, refs))")]
    assert loose == [{"plan", "refs"}, set()]


def test_every_file_says_what_it_is():
    for path in FILES:
        if path.name != "__init__.py" or path.read_text():
            assert ast.get_docstring(tree(path)), f"{path} has no docstring"


def test_no_environment_no_print():
    """The store puts into the environment what importing Mosaic does: the files of its compiler."""
    for path in FILES:
        exempt = named(path) in ("pallas_lm.cli.driver", "_call.store")
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and not exempt:
                assert node.attr not in ("environ", "getenv"), f"{path} reads the environment"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path} prints"


@pytest.mark.parametrize("name", pa.__all__)
def test_public_names_are_documented(name):
    value = getattr(pa, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return
    assert value.__doc__ and not value.__doc__.startswith(f"{name}(")
    methods = vars(value) if inspect.isclass(value) else {}
    for method, function in methods.items():
        if not method.startswith("_") and inspect.isfunction(function):
            assert inspect.getdoc(getattr(value, method)), f"{name}.{method}"


def test_all_is_all_and_in_order():
    assert sorted(pa.__all__) == pa.__all__
    public = {n for n, x in vars(pa).items() if not n.startswith("_") and not inspect.ismodule(x)}
    assert public == set(pa.__all__)


@pytest.mark.parametrize("name", pa.__all__)
def test_docstrings_name_every_argument(name):
    function = getattr(pa, name)
    text = inspect.getdoc(function) or ""
    if inspect.isfunction(function) and "Args:" in text:
        missing = [x for x in inspect.signature(function).parameters if x not in text]
        assert not missing


def test_no_skips_makes_a_skip_a_failure(tmp_path):
    """The command for a machine with a GPU relies on it."""
    path = tmp_path / "test_skips.py"
    path.write_text("import pytest\n\ndef test_it():\n    pytest.skip('no machine for it')\n")
    command = ["-q", "-p", "tests.conftest", str(path), "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT.parent / "pyproject.toml")]
    twice = f"import pytest; asked = {command}\n"
    twice += "print([int(pytest.main(asked + more)) for more in ([], ['--no-skips'])])"
    done = subprocess.run(
        [sys.executable, "-c", twice], capture_output=True, text=True, cwd=ROOT.parent, check=True
    )
    plain, strict = done.stdout.split("1 skipped")
    assert "no machine for it" in plain and "no machine for it" in strict
    assert "1 failed" in strict and done.stdout.endswith("[0, 1]\n"), done.stdout + done.stderr


def test_the_console_command_is_there():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["pallas-attn"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_every_module_imports():
    for name in MODULES:
        if not name.startswith(("benchmarks", "kernels", "pallas_lm", *LIBRARIES)):
            importlib.import_module(f"pallas_attn.{name}" if name != "pallas_attn" else name)


# Modules that need a library, and what they say where it is not installed.
LIBRARIES = {
    "keras": "expected Keras 3 with the backend jax: pip install keras, and set KERAS_BACKEND=jax "
    "before keras is imported",
    "equinox": "expected Equinox: pip install equinox",
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"pallas_attn.{name}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"pallas_attn.{name}")
    assert str(caught.value) == f"pallas_attn.{name}: {LIBRARIES[name]}"


def test_another_backend_of_keras_is_refused(monkeypatch):
    keras = types.ModuleType("keras")
    keras.backend = types.SimpleNamespace(backend=lambda: "torch")
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.delitem(sys.modules, "pallas_attn.keras", raising=False)
    with pytest.raises(
        ImportError, match='^pallas_attn.keras: expected the backend "jax", got "to'
    ):
        importlib.import_module("pallas_attn.keras")
