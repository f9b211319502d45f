"""The environment of every test: eight CPU devices, strict jax, a printed seed, no silent skip.

What has to be settled before jax is imported is settled while this file is imported; what depends
on the command line in `pytest_configure`, before jax looks for its devices.
"""

import contextlib
import gc
import os
import pathlib
import re
import tempfile

# Eight devices on one CPU: shard_map and sharded jit are tested on any machine. The next two leave
# the optimisation of CPU code out, a third of the suite's time, and the last takes XLA's older way
# from HLO to LLVM where there still is one (not in JAX 0.12): a program is there in a third of the
# time. HLO is optimised as ever. On a GPU nothing is run often enough to be worth XLA's search for
# its fastest matmuls. (--xla_cpu_parallel_codegen_split_count=1 saves a tenth more, and does not
# keep the bits of a NaN that a copy of bfloat16 moves.)
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_gpu_autotune_level": "0",
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}
_given = os.environ.get("XLA_FLAGS", "")
_flags = (f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given)
os.environ["XLA_FLAGS"] = " ".join([_given, *_flags]).strip()
# NumPy's matmuls are small here: threads of their own take 20 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads of XLA's pool. Interpreted kernels wait in it: with one thread a core, kernels of four
# warpgroups could fill it on a machine of two cores, and hang.
os.environ.setdefault("NPROC", "32")
# The CUDA plugin may be installed for ahead-of-time compilation where there is no GPU; its check of
# the driver would then fail at import.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# Tracing makes many objects and few cycles; the collector took 3 % of the time, and takes 1 %.
gc.set_threshold(50_000, 20, 20)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from pallas_attn._call import device, store  # noqa: E402
from tests.support import aot, durations, gpu_cases, in_numpy, reached  # noqa: E402


def pytest_addoption(parser):
    group = parser.getgroup("pallas_attn")
    group.addoption("--seed", type=int, default=0, help="of all random inputs (default 0)")
    group.addoption("--seconds", type=float, default=60, help="that -m fuzz runs (default 60)")
    group.addoption("--case", help="of -m fuzz: one problem, as a failure says it")
    group.addoption("--no-skips", action="store_true", help="a skipped test is a failed test")
    group.addoption(
        "--write-durations", action="store_true", help=f"writes {durations.FILE.name} anew"
    )
    group.addoption(
        "--keep-kernels", action="store_true", help="tests on a GPU share lowered kernels"
    )
    group.addoption(
        "--reached", metavar="FOLDER", type=pathlib.Path, help="for tests/support/reached.py"
    )


GPU_MARKS = ("gpu", "multigpu")
NAMED_MARKS = ("machine_code", "recipes", "fuzz")  # each file that has one names it


def _asks_for(config, mark) -> bool:
    return re.search(rf"(?<!not )\b{mark}\b", config.option.markexpr or "") is not None


def _asks_for_gpu(config) -> bool:
    return any(_asks_for(config, mark) for mark in GPU_MARKS)


def _share_programs(config, least):
    """Lets the other workers, and the run.py that a test starts, read the programs that one process
    has compiled for `least` seconds: 8 % of the suite's time on a CPU.
    """
    settings = {
        "jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR"),
        "jax_persistent_cache_min_compile_time_secs": least,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if settings["jax_compilation_cache_dir"] is None:
        folder = tempfile.TemporaryDirectory(prefix="pallas_attn_compiled_")
        config.add_cleanup(folder.cleanup)
        settings["jax_compilation_cache_dir"] = folder.name
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


REAL_GPU = store._gpu


def no_gpu():
    """In place of `store._gpu`: no lowered kernel is kept."""


WATCH = pytest.StashKey[reached.Watch]()


def pytest_configure(config):
    if config.option.reached:
        config.stash[WATCH] = reached.Watch()
        config.stash[WATCH].start()
        aot.reached_folder = str(config.option.reached.absolute())
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    config.option.whole_suite = whole and not (config.option.keyword or config.option.markexpr)
    on_gpu = _asks_for_gpu(config)
    if on_gpu:
        from tests.support import mosaic

        mosaic.without_numbers()
    else:
        jax.config.update("jax_platforms", "cpu")
    _share_programs(config, 0.0 if on_gpu else 0.1)
    if not (on_gpu and config.option.keep_kernels):
        store._gpu = no_gpu
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_report_header(config):
    where = "the GPU" if _asks_for_gpu(config) else "8 CPU devices"
    return f"jax {jax.__version__} on {where}; --seed={config.option.seed}"


def pytest_ignore_collect(collection_path, config):
    """Leaves out files that do not name the only mark that is asked for: to import and collect all
    files takes a process 8 seconds.
    """
    mark = config.option.markexpr
    if mark not in NAMED_MARKS or not collection_path.match("test_*.py"):
        return None
    return None if f"mark.{mark}" in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The plain suite runs one of the long tests of each function, unless it takes very long; `-m
    exhaustive` runs the others, and a command that names files or tests runs them all.

    Tests for a GPU run when `-m gpu` asks for them, and only then, and those for two when `-m
    multigpu` does; those that compile kernels to machine code when `-m guards` or `-m machine_code`
    does; the recipes, the fuzzer and memcheck when theirs. `quick` are those of a list.
    """
    config.stash[gpu_cases.COLLECTED] = frozenset(item.nodeid for item in items)
    left_out = {mark for mark in GPU_MARKS if not _asks_for(config, mark)}
    if not re.search("guards|machine_code", config.option.markexpr or ""):
        left_out.add("machine_code")
    for mark in ("recipes", "fuzz", "memcheck"):
        if mark not in (config.option.markexpr or ""):
            left_out.add(mark)
    missing = pytest.mark.skipif(not aot.available(), reason="the aot extra is not installed")
    if config.option.whole_suite:
        left_out.add("exhaustive")
    kept, rest, named = [], [], set()
    compiled = [item.nodeid for item in items if item.get_closest_marker("machine_code")]
    exhaustive = durations.exhaustive(item.nodeid for item in items)
    exhaustive |= durations.also_elsewhere(compiled)
    for item in items:
        if gpu_cases.is_quick(item.nodeid):
            item.add_marker("quick")
        if item.nodeid in exhaustive:
            item.add_marker("exhaustive")
        marks = {mark.name for mark in item.iter_markers()}
        (rest if marks & left_out else kept).append(item)
        for mark in {(item.path, name) for name in marks.intersection(NAMED_MARKS)} - named:
            if f"mark.{mark[1]}" not in mark[0].read_text():
                raise pytest.UsageError(f"{mark[0]} has to write mark.{mark[1]}: see NAMED_MARKS")
            named.add(mark)
        if "machine_code" in marks:
            item.add_marker(missing)
        if "fuzz" in marks:  # the last problem may be a slow one
            item.add_marker(pytest.mark.timeout(config.option.seconds + 300))
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Arrays that modules hold and cases that subjects are asked about are no reason to compile,
    on a GPU neither: there they are made on the CPU. Refusals need no filtered traceback.
    """
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    with contextlib.ExitStack() as stack:
        stack.callback(jax.config.update, "jax_traceback_filtering", filtering)
        if _asks_for_gpu(session.config):
            stack.enter_context(device.assume(device.gpu_generation()))
        stack.enter_context(in_numpy.on_the_host())
        return (yield)


def pytest_collection_finish(session):
    """Keeps the objects of today out of later collections."""
    del session
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    if watch := session.config.stash.get(WATCH, None):
        watch.stop()  # while Python ends there is no sys.monitoring
        watch.write(session.config.option.reached)
        aot.close_workers()  # which write, too


def pytest_unconfigure():
    """pytest looks five times for what the collector finds at the end: once says the same."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    if config.option.whole_suite:
        terminalreporter.write_line(
            f"left out: of {len(durations.recorded())} long tests all but one of each function "
            "(-m exhaustive), machine code (-m machine_code), tests on a GPU (-m gpu), random "
            "problems (-m fuzz), other libraries (-m recipes): docs/testing.md"
        )
    if config.option.write_durations:
        durations.write(terminalreporter)
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", ()):
            if name == "fuzz" and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid}: {value}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbours run in one process, where they share programs and what their file keeps."""
    if config.option.dist != "load":  # which -n alone means
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def _refuse_skip(report, config):
    if report.skipped and config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"{reason}\n(--no-skips: a skip is a failure)"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _refuse_skip((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _refuse_skip((yield), collector.config)


@pytest.fixture
def seed(request) -> int:
    return request.config.getoption("--seed")


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def programs_in_numpy(request):
    """For the tests of a module: what they jit is computed in NumPy, but for the mark `by_xla`."""
    if request.node.get_closest_marker("by_xla"):
        yield
        return
    with in_numpy.instead_of_xla():
        yield


@pytest.fixture(autouse=True)
def no_kept_kernels_of_a_changed_package(request):
    """Tests that replace constants and functions of the package: no key of the store has those."""
    gpu = store._gpu
    if "monkeypatch" in request.fixturenames:
        store._gpu = no_gpu
    yield
    store._gpu = gpu


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_code():
    """Every program compiled for the CPU holds memory maps, of which a process may have 65,530: the
    whole suite in one process died of them.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
