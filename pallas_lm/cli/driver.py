"""The driver: tasks by their flags, for `python run.py` and the command `pallas-attn`."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import socket
import sys
from typing import Any

import jax
from absl import flags
from absl import logging as absl_logging

from pallas_lm.cli.flags import (
    BENCH,
    CHECK,
    DECODE,
    NAMES,
    TASKS,
    TRAIN,
    TUNE,
    help_text,
    parse,
    refuse_idle,
    said_options,
)

values = flags.FLAGS


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
    left = parse(argv)
    if values.help:
        task = values.task if values["task"].present else None
        sys.stdout.write(help_text(_program(), task))
        return 0
    if left:
        raise ValueError(
            f"expected flags, or one of {', '.join(TASKS)} as the first argument, got {left[0]!r}"
        )
    if not values["verbosity"].present:
        # jax reports each platform that it does not find
        absl_logging.set_verbosity(absl_logging.WARNING)
    refuse_idle(argv)
    # Peers and kernels share the GPU's memory: nobody may take it all at the start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if values.task in (DECODE, TRAIN, TUNE) and values.compile_cache:
        _keep_programs()
    if values.coordinator is not None:
        _join()
    _find_devices()
    run = {DECODE: _decode, TRAIN: _train, CHECK: _check, TUNE: _tune}
    return (run | {BENCH: _bench})[values.task]()


# ---- the process --------------------------------------------------------------------------------


def _open_standard_streams() -> None:
    """Opens /dev/null for closed ones, before another file gets their numbers; and no character is
    an error of the terminal's encoding.
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
    """Leaves Python nothing to flush to an output that takes nothing any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _join() -> None:
    """This process becomes one of several; the first alone says what there is to say."""
    address, count, number = values.coordinator, values.processes, values.process
    if number >= count:
        raise ValueError(f"process: expected 0 to {count - 1} of {count} --processes, got {number}")
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(
            f"coordinator: expected HOST:PORT, such as localhost:1234, got {address!r}"
        )
    try:
        socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), int(port))
        sys.stderr.write(f"waiting for {count - 1} of {count} processes at {address}\n")
        jax.distributed.initialize(address, count, number)
    except (OSError, UnicodeError, jax.errors.JaxRuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"coordinator: {address}: {why}") from None
    if number:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _find_devices() -> None:
    """ValueError where jax finds no device of the kind that JAX_PLATFORMS asks for. jax logs the
    reason with a traceback, and raises an error that may have no text.
    """
    logger, keep = logging.getLogger("jax"), _Kept()
    records, propagates = keep.records, logger.propagate
    logger.addHandler(keep)
    logger.propagate = False
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        logged = [x.exc_info[1] for x in records if x.exc_info]
        why = str(next((x for x in logged if x is not None), error)).split("\n")[0]
        why = why.partition(" (set JAX_PLATFORMS")[0]
        asked = f"JAX_PLATFORMS={jax.config.jax_platforms or ''}"
        raise ValueError(
            f"{asked}: jax finds no such device here{f' ({why})' if why else ''}; leave it out, or "
            "say cpu"
        ) from None
    finally:
        logger.removeHandler(keep)
        logger.propagate = propagates
    for record in records:
        logger.handle(record)


def _keep_programs() -> None:
    """Has jax keep compiled programs where people expect it, if that can be written."""
    from pallas_lm import machine

    with contextlib.suppress(OSError, RuntimeError):  # no home is a RuntimeError
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "")
        machine.keep_programs(base / "pallas_attn" if base.is_absolute() else None)


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
    """The error of a file, behind the name of the flag that it came by."""
    path = str(error.filename)
    for name in ("checkpoint", "report", "out", "plot"):
        value = values[name].value
        if value and (path.startswith(value) or value.startswith(path)):
            return f"{name}: {path}: {error.strerror}"
    return f"{path}: {error.strerror}"


# ---- the tasks ----------------------------------------------------------------------------------


def _decode() -> int:
    from pallas_lm import session

    asked = said_options() | _stops()
    settings = _filled(session.Settings, prompts=_prompts(), options=asked)
    return session.decode(settings, sys.stdout, sys.stderr)


def _filled[Record](record: type[Record], **fields: Any) -> Record:
    """A record whose fields have the values of the flags of their names, and others."""
    names = {field.name for field in dataclasses.fields(record)} & NAMES  # type: ignore[arg-type]
    said = {name: x for name in names if (x := values[name].value) is not None}
    return record(**said | fields)


def _prompts() -> tuple[str, ...]:
    """The prompts of --prompt, or else the lines of --prompt_file."""
    lines, path = list(values.prompt), values.prompt_file
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


def _stops() -> dict[str, Any]:
    """The texts and the tokens that end a sequence."""
    stops: dict[str, Any] = {}
    if values.stop is not None:
        stops["stop"] = [text.replace("\\n", "\n") for text in values.stop]
    if values.stop_ids is None:
        return stops
    try:
        return stops | {"stop_ids": tuple(map(int, values.stop_ids))}
    except ValueError:
        raise ValueError(f"stop_ids: expected numbers, got {values.stop_ids}") from None


def _check() -> int:
    from pallas_lm import gpu_check

    settings = _filled(gpu_check.Settings, dtype=values.dtype or "bfloat16")
    return gpu_check.run(settings, values.out or gpu_check.REPORT, _say, values.json)


def _tune() -> int:
    from pallas_lm import tune

    settings = _filled(tune.Settings, shape=tuple(values.shape), dtype=values.dtype or "bfloat16")
    return tune.run(settings, values.out, _say, values.json)


def _bench() -> int:
    from pallas_lm import clone

    bench = clone.benchmarks("", "--task=bench")
    if values.op == "all" or values.workers > 1:
        options = _filled(bench.Options)
        return bench.workers.run(values.op, values.cases, options, values.workers, values.within)
    if values.op == "first_call":
        return bench.first_call.run(
            values.cases, values.peers, values.turns, values.commit, values.out
        )
    if values.op == "context":
        return bench.context.run(values.cases, values.seed, values.turns, values.commit, values.out)
    return bench.run_bench(values.op, values.cases, _filled(bench.Options))


def _train() -> int:
    from pallas_lm import machine, mesh, train

    if values.text is None or values.out is None:
        raise ValueError("--task=train needs --text=FILE and --out=FOLDER")
    devices = None if values.mesh is None else mesh.make(values.mesh, ("cp", "dp"))
    recipe = _filled(train.Recipe, dtype=values.dtype or "float32", mesh=devices)
    text = train.read_text(values.text)
    with machine.matmul_precision(values.precision, recipe.dtype):
        header = f"{'step':>6}{'nats a byte':>13}{'held out':>10}{'seconds':>9}"
        for line in train.train(text, values.out, recipe, values.seed, values.overwrite):
            if header:
                _say(header)
            header = ""
            _say(f"{line.step:>6}{line.loss:>13.3f}{line.held_out:>10.3f}{line.seconds:>9.1f}")
    _say(f"trained on {mesh.devices(devices)}, {line.implementation}, {recipe.dtype}")
    _say(f"the model is in {values.out}: {_program()} --checkpoint={values.out}")
    return 0
