"""`--task=decode`: from settings, as flags have them, to text, JSON lines, tables and a report."""

import contextlib
import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TextIO

import jax
import numpy as np

from pallas_lm import chat, checkpoint, clone, decode_check, text
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config, Params
from pallas_lm.decode import Run, refuse
from pallas_lm.generation import Model, opened, options_of
from pallas_lm.hf_config import config_from
from pallas_lm.machine import default_dtype, matmul_precision, memory
from pallas_lm.options import Call, Options, asked
from pallas_lm.presets import PRESETS
from pallas_lm.texts import Texts
from pallas_lm.views import Json, Text, View

EMBEDDED = "tiny"
DEMO_PROMPTS = (
    "ROMEO:\n",
    "First Citizen:\nWe have no bread, and",
    "KING HENRY:\nMy lords, ",
    "The sea was",
    "Nurse:\n",
    "DUKE OF YORK:\nTell me, good cousin,",
)
INTERRUPTED = 130  # the exit status that a shell gives for Ctrl-C


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run. Fields have the names of their flags; `options` has those that
    `lm.generate` takes too.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str = EMBEDDED
    checkpoint: str | None = None
    prompts: tuple[str, ...] = ()
    random_prompts: int = 0
    prompt_length: int = 128  # tokens of a random prompt
    check: bool = False
    json: bool = False
    report: str | None = None
    out: str | None = None  # a .jsonl file for the report's rows
    commit: str | None = None


def decode(settings: Settings, out: TextIO, err: TextIO) -> int:
    """Decodes, shows it, checks it, reports on it; the exit status."""
    call, chosen = asked(settings.options)
    if settings.out is not None and settings.report is None:
        raise ValueError("out: the rows are those of a report; say --report=FOLDER as well")
    chosen.setdefault("dtype", default_dtype())
    with matmul_precision(call.precision, chosen["dtype"]):
        return _decode(settings, call, chosen, out, err)


def _decode(
    settings: Settings, call: Call, chosen: dict[str, Any], out: TextIO, err: TextIO
) -> int:
    model, weights = _model(settings, call, chosen)
    config, prompts = model.config, _prompts(settings, call, model)
    options = options_of(model, prompts, call, chosen | {"keep_logits": settings.check})
    sequences = max(len(prompts), 1) * options.samples
    options = dataclasses.replace(options, batch=min(options.batch, sequences))
    refuse(config, options, prompts, call.max_new_tokens)
    _must_fit(config, options, memory())
    params = weights(options.dtype, options.mesh)
    run = Run(config, params, options, prompts, call.max_new_tokens, call.seed)
    texts = Texts(run, model.tokenizer, call.stop)
    view: View = (Json if settings.json else Text)(texts, out, err)
    view.quiet = bool(settings.random_prompts)
    reports = None
    if settings.report is not None:
        reports = clone.benchmarks("decode_loop", "--report")
        reports.begin(settings)
    if _is_demo(settings) and not settings.prompts:
        view.say(_introduction(config, len(prompts)))
    start, interrupted = time.perf_counter(), False
    try:
        _show(run, view)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        run.wait()  # jax ends a process by force that leaves while a chunk is being computed
    summary = view.finish(time.perf_counter() - start)
    if interrupted:
        return INTERRUPTED
    held = _check(run, params, view) if settings.check else True
    if reports is not None:
        reports.finish(settings, run, params, view, summary)
    return int(not held)


# ---- the run that is asked for ------------------------------------------------------------------


def _model(
    settings: Settings, call: Call, chosen: dict[str, Any]
) -> tuple[Model, checkpoint.Loader]:
    """The model without its weights, and what loads them."""
    folder, where = settings.checkpoint, (chosen["dtype"], chosen.get("mesh"))
    if folder is None and settings.model == EMBEDDED:
        folder = str(checkpoint.EMBEDDED)
    if folder is not None:
        return opened("checkpoint", folder, *where)
    if settings.model not in PRESETS:
        names = ", ".join((EMBEDDED, *PRESETS))
        raise ValueError(f"model: expected one of {names}, got {settings.model!r}")
    config = config_from(PRESETS[settings.model])
    draw = functools.partial(lm_mesh.random_params, config, call.seed)
    return Model(config, {}, text.Numbers(), (), *where), draw


def _prompts(settings: Settings, call: Call, model: Model) -> list[list[int]]:
    if settings.random_prompts:
        shape = (settings.random_prompts, settings.prompt_length)
        return np.random.default_rng(call.seed).integers(0, model.config.vocab, shape).tolist()
    prompts = settings.prompts
    if not prompts and _is_demo(settings):
        prompts = DEMO_PROMPTS
    reader = chat.Reader(model.tokenizer, model.template, call.chat)
    return [reader.tokens(prompt, n) for n, prompt in enumerate(prompts, 1)]


def _is_demo(settings: Settings) -> bool:
    """Whether the model is the one inside the package, which has prompts of its own."""
    embedded = settings.checkpoint is None and settings.model == EMBEDDED
    return embedded and not settings.random_prompts


def _introduction(config: Config, prompts: int) -> str:
    on_cpu = "; here the jax.numpy reference runs, on an NVIDIA GPU the kernels do"
    return (
        f"A toy model of Shakespeare's plays ({config.size / 1e6:.1f} million numbers) continues "
        f"{prompts} prompts{'' if jax.default_backend() == 'gpu' else on_cpu}."
    )


def _must_fit(config: Config, options: Options, room: int) -> None:
    """Refuses a model that does not fit in memory: JAX's own error comes late and says little."""
    if options.mesh is not None and jax.default_backend() != "cpu":  # devices of a CPU share it
        room *= options.mesh.size
    weights = config.size * jax.numpy.dtype(options.dtype).itemsize
    rows = options.batch * options.rows
    if options.cache == "paged":
        rows = options.pool * options.page_size
    cache = config.kv_bytes(options.dtype) * rows
    if weights + cache > room:
        raise ValueError(
            f"model: weights take {weights / 1e9:.1f} GB and the cache {cache / 1e9:.1f} GB as "
            f"{options.dtype}, there are {room / 1e9:.1f} GB; give another --model, --dtype, "
            "--batch or --capacity"
        )


# ---- while it runs, and after -------------------------------------------------------------------


def _show(run: Run, view: View) -> None:
    with _asked_to_stop() as stopped:
        for status in run:
            view.show(status)
            if stopped():
                raise KeyboardInterrupt
        if stopped():
            raise KeyboardInterrupt


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, which waits until a chunk is there and written: in the midst of
    jax it may take the process with it, and half of a text would be written, or written twice. A
    second one does not wait.
    """
    pressed: list[int] = []

    def first(number: int, frame: FrameType | None) -> None:
        del frame
        pressed.append(number)
        signal.signal(number, signal.default_int_handler)

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours &= threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, first)
    try:
        yield lambda: bool(pressed)
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _check(run: Run, params: Params, view: View) -> bool:
    """The table of `--check`; whether every row held."""
    header = f"{'sequence':>8}{'steps':>7}{'likeliest':>12}{'ties':>6}"
    view.say(
        "likeliest: steps whose likeliest token is the reference's; ties: others, within rounding; "
        "budget: the error of a logit that rounding explains",
        f"{header}{'worst logit':>13}{'at step':>9}{'budget':>9}",
    )
    held = True
    for row in decode_check.rows(run, params):
        held &= row.held
        line = f"{row.sequence:>8}{row.steps:>7}{row.same:>12}{row.ties:>6}{row.error:>13.1e}"
        verdict = "" if row.held else "  WRONG"
        view.say(f"{line}{row.at:>9}{row.budget:>9.1e}{verdict}")
        view.record("check", dataclasses.asdict(row) | {"held": row.held})
    view.say(
        "every step is the reference's: the likeliest token, and logits within the budget"
        if held
        else "the decode is not what the reference computes"
    )
    return held
