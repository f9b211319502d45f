"""The driver: what each task does with the flags. `python run.py` and the command `pallas-attn`."""

import contextlib
import os
import pathlib
import sys

import jax
from absl import flags, logging

from pallas_attn.cli import flags as given
from pallas_attn.cli.flags import BENCH, DECODE, PARITY, TRAIN


def command() -> int:
    """The console command."""
    return main(sys.argv)


def main(argv: list[str]) -> int:
    """Runs what the flags ask for; the exit status."""
    _open_standard_streams()
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except ValueError as error:
        return _refuse(str(error))
    except NotImplementedError as error:  # pallas_attn.UnsupportedError: who, why, what to do
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has enough, as `head` does
        _discard_output()
        return 141
    except OSError as error:  # a folder that cannot be read, or not be written
        if not error.filename:
            _discard_output()
        return _refuse(_of_path(error) if error.filename else error.strerror or str(error))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return _refuse(f"out of memory: {error}; a smaller --batch takes less")
        raise


def _main(argv: list[str]) -> int:
    left = given.parse(argv)
    if given.HELP.value:
        sys.stdout.write(given.help_text(_program()))
        return 0
    if left:
        raise ValueError(f"expected flags only, got {left[0]!r}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # jax reports each platform that it does not find
    given.refuse_idle(argv)
    # Peers and kernels share the GPU's memory: nobody may take it all at the start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if given.TASK.value in (DECODE, TRAIN, PARITY) and given.COMPILE_CACHE.value:
        _keep_programs()
    if given.COORDINATOR.value:
        _join()
    run = {DECODE: _decode, TRAIN: _train, PARITY: _parity, BENCH: _bench}
    return run[given.TASK.value]()


# ---- the process --------------------------------------------------------------------------------


def _open_standard_streams() -> None:
    """A closed one is /dev/null, before another file gets its number; and no character is an error
    of the terminal's encoding.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Nothing is left for Python to flush to an output that takes nothing any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _join() -> None:
    """This process becomes one of several; the first alone says what there is to say."""
    count, number = given.PROCESSES.value, given.PROCESS.value
    if number >= count:
        raise ValueError(f"process: expected 0 to {count - 1} of {count} --processes, got {number}")
    jax.distributed.initialize(given.COORDINATOR.value, count, number)
    if number:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _keep_programs() -> None:
    """jax keeps what it compiles where people expect it; nowhere, if nothing can be written."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    with contextlib.suppress(OSError, RuntimeError):  # no home is a RuntimeError
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "")
        base = base if base.is_absolute() else pathlib.Path.home() / ".cache"
        folder = base / "pallas_attn"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _program() -> str:
    name = pathlib.Path(sys.argv[0]).name
    return f"python {name}" if name.endswith(".py") else name


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _refuse(line: str) -> int:
    line = " ".join(line.split())
    line = "".join(x if x.isprintable() else ascii(x)[1:-1] for x in line)
    sys.stderr.write(f"{line}; see {_program()} --help\n")
    return 2


def _of_path(error: OSError) -> str:
    """What is wrong with a file, behind the name of the flag that it came by."""
    path = str(error.filename)
    for flag in (given.CHECKPOINT, given.REPORT, given.OUT, given.PLOT):
        if flag.value and (path.startswith(flag.value) or flag.value.startswith(path)):
            return f"{flag.name}: {path}: {error.strerror}"
    return f"{path}: {error.strerror}"


# ---- the tasks ----------------------------------------------------------------------------------


def _decode() -> int:
    from pallas_attn.lm import sampling, session

    settings = session.Settings(
        model=given.MODEL.value,
        checkpoint=given.CHECKPOINT.value,
        prompts=_prompts(),
        random_prompts=given.RANDOM_PROMPTS.value,
        prompt_length=given.PROMPT_LENGTH.value,
        max_new_tokens=given.MAX_NEW_TOKENS.value,
        batch=given.BATCH.value,
        cache=given.CACHE.value,
        capacity=given.CAPACITY.value,
        page_size=given.PAGE_SIZE.value,
        pages=given.PAGES.value,
        chunk=given.CHUNK.value,
        prefill_chunk=given.PREFILL_CHUNK.value,
        samples=given.SAMPLES.value,
        draft=given.DRAFT.value,
        drafts=given.DRAFTS.value,
        sampling=sampling.Sampling(given.TEMPERATURE.value, given.TOP_K.value, given.TOP_P.value),
        stop=_stop_ids(),
        dtype=given.DTYPE.value,
        precision=given.PRECISION.value,
        implementation=given.IMPLEMENTATION.value,
        seed=given.SEED.value,
        check=given.CHECK.value,
        json=given.JSON.value,
        report=given.REPORT.value,
        mesh=given.MESH.value,
        out=given.OUT.value,
        commit=given.COMMIT.value,
    )
    return session.decode(settings, sys.stdout, sys.stderr)


def _prompts() -> tuple[str, ...]:
    """The prompts of --prompt, or else the lines of --prompt_file."""
    lines, path = list(given.PROMPT.value), given.PROMPT_FILE.value
    if not lines and path is not None:
        try:
            data = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
            text = data.decode("utf-8")
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"prompt_file: {path}: {why}") from None
        lines = [line for line in text.replace("\r\n", "\n").split("\n") if line]
        if not lines:
            raise ValueError(f"prompt_file: {path} has no prompt")
    return tuple(line.replace("\\n", "\n") for line in lines)


def _stop_ids() -> tuple[int, ...] | None:
    if given.STOP_IDS.value is None:
        return None
    try:
        return tuple(int(one) for one in given.STOP_IDS.value)
    except ValueError:
        raise ValueError(f"stop_ids: expected numbers, got {given.STOP_IDS.value}") from None


def _parity() -> int:
    """The table: 0 where every row held, 1 where one did not, or could not run."""
    from pallas_attn.bench import parity

    devices = jax.devices()
    _say(f"jax {jax.__version__} on {len(devices)} x {devices[0].device_kind}")
    _say(f"implementation: {given.IMPLEMENTATION.value or 'the fastest that takes each problem'}")
    _say(f"{'operation':<18}{'case':<40}{'runs on':<12}{'error':>9}{'budget':>9}")
    failed = 0
    for row in parity.rows(
        given.IMPLEMENTATION.value, given.DTYPE.value or "bfloat16", given.SEED.value
    ):
        failed += not row.held
        start = f"{row.operation:<18}{row.case:<40}{row.implementation:<12}"
        if row.error is None:
            _say(f"{start}{'cannot run':>18}")
        else:
            verdict = "" if row.held else "  WRONG"
            _say(f"{start}{row.error:>9.1e}{row.budget:>9.1e}{verdict}")
        for line in row.note.splitlines():
            _say(f"  {line}")
    _say("every operation is within its budget" if not failed else f"{failed} rows did not hold")
    return int(failed > 0)


def _bench() -> int:
    from pallas_attn import bench

    if given.OP.value == "context":
        return bench.context.run(
            given.CASES.value,
            given.SEED.value,
            given.TURNS.value,
            given.COMMIT.value,
            given.OUT.value,
        )
    options = bench.Options(
        implementation=given.IMPLEMENTATION.value,
        peers=given.PEERS.value,
        seed=given.SEED.value,
        turns=given.TURNS.value,
        cold=given.COLD.value,
        commit=given.COMMIT.value,
        out=given.OUT.value,
        plot=given.PLOT.value,
    )
    return bench.run_bench(given.OP.value, given.CASES.value, options)


def _train() -> int:
    from pallas_attn.lm import machine, mesh, train

    if given.TEXT.value is None or given.OUT.value is None:
        raise ValueError("--task=train needs --text=FILE and --out=FOLDER")
    devices = None
    if given.MESH.value is not None:
        devices = mesh.make(given.MESH.value, ("cp", "dp"))
    recipe = train.Recipe(
        steps=given.STEPS.value,
        batch=given.BATCH.value,
        context=given.CONTEXT.value,
        learning_rate=given.LEARNING_RATE.value,
        dtype=given.DTYPE.value or "float32",
        implementation=given.IMPLEMENTATION.value,
        mesh=devices,
    )
    text = train.read_text(given.TEXT.value)
    with machine.matmul_precision(given.PRECISION.value, recipe.dtype):
        lines = train.train(text, given.OUT.value, recipe, given.SEED.value, given.OVERWRITE.value)
        header = f"{'step':>6}{'nats a byte':>13}{'held out':>10}{'seconds':>9}"
        for line in lines:
            if header:
                _say(header)
            header = ""
            _say(f"{line.step:>6}{line.loss:>13.3f}{line.held_out:>10.3f}{line.seconds:>9.1f}")
    folder = given.OUT.value
    _say(f"trained on {mesh.devices(devices)}, {line.implementation}, {recipe.dtype}")
    _say(f"the model is in {folder}: {_program()} --checkpoint={folder}")
    return 0
