"""Drive pallas_attn on this machine.

python run.py                               a small model continues a few prompts, checked
python run.py --prompt="ROMEO:"             the same model, your prompt
python run.py --flagfile=configs/NAME.cfg   flags from a file
python run.py --task=parity                 every operation here, beside the reference
python run.py --task=bench --op=forward --cases=grid --out=results/mine.jsonl --plot=mine.svg
python run.py --task=tune --kernel=flash_fwd_sm90 --cases=h128*

Exit status: 0 all is well, 1 something did not hold, 2 what was asked is wrong, 130 Ctrl-C, 141
nobody reads the output any more.
"""

import os
import pathlib
import re
import sys

from absl import app, flags, logging

OPS = ("forward", "backward", "backward_alone", "decode", "append")

_TASK = flags.DEFINE_enum(
    "task",
    "decode",
    ["decode", "parity", "bench", "tune", "train"],
    "What to do. decode: continue prompts with a language model. train: make a small one from a "
    "text. parity: run a small case of every operation beside the reference. bench: time checked "
    "kernels beside their peers. tune: search the settings of a kernel. The last two want a GPU.",
)
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation",
    None,
    ["sm90", "sm80", "reference"],
    "Which implementation to run. Default: the fastest that takes each problem on this machine. "
    "decode takes no other than reference; train takes any that has gradients here.",
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of all random inputs.", lower_bound=0, upper_bound=2**32 - 1
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["bfloat16", "float16", "float32"],
    "The type of what is computed with. Default: bfloat16; without a GPU decode takes float32, and "
    "train always does.",
)
_OP = flags.DEFINE_enum("op", "forward", OPS, "bench: which operation.")
_CASES = flags.DEFINE_string(
    "cases",
    "grid",
    "bench, tune: which cases, by tags and globs over names, with commas. grid+causal wants both "
    "tags; -h256 takes away.",
)
_PEERS = flags.DEFINE_string(
    "peers", "all", "bench: whom to time beside: all, none, or names with commas."
)
_TURNS = flags.DEFINE_integer("turns", 5, "bench: how often everybody has a turn.", lower_bound=1)
_COLD = flags.DEFINE_bool("cold", False, "bench: empty the L2 cache before each timed call.")
_OUT = flags.DEFINE_string(
    "out",
    None,
    "bench, decode --report: a .jsonl file to add rows to. train: the folder of the model.",
)
_PLOT = flags.DEFINE_string("plot", None, "bench: an .svg file to draw.")
_COMMIT = flags.DEFINE_string(
    "commit", None, "bench, tune, decode --report: the commit, where git cannot say."
)
_KERNEL = flags.DEFINE_string("kernel", "flash_fwd_sm90", "tune: which kernel module.")
_TEXT = flags.DEFINE_string("text", None, "train: a file; the model learns its bytes.")
_BATCH = flags.DEFINE_integer(
    "batch",
    32,
    "train: windows of the text a step. decode: sequences at a time.",
    lower_bound=1,
)
_STEPS = flags.DEFINE_integer("steps", 3000, "train: how many steps.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 512, "train: bytes of a window of the text.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "train: its peak, for AdamW.")


_MODEL = flags.DEFINE_string(
    "model",
    "tiny",
    "decode: tiny, which is in the package, or llama2_7b, llama3_8b, llama3.1_8b, mistral_7b, "
    "qwen2_7b, qwen3_8b with random weights.",
)
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "decode: a folder in Hugging Face's layout, instead of --model."
)
_PROMPT = flags.DEFINE_multi_string(
    "prompt", [], r"decode: a prompt; may be repeated. \n is a new line."
)
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file", None, "decode: a file with a prompt a line; - is standard input."
)
_RANDOM_PROMPTS = flags.DEFINE_integer(
    "random_prompts", 0, "decode: this many prompts of random tokens instead.", lower_bound=0
)
_PROMPT_LENGTH = flags.DEFINE_integer(
    "prompt_length", 128, "decode: tokens of a random prompt.", lower_bound=1
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 200, "decode: tokens after each prompt, at most."
)
_CACHE = flags.DEFINE_enum(
    "cache", "per_sequence", ["per_sequence", "stacked", "paged"], "decode: which KV cache."
)
_CAPACITY = flags.DEFINE_integer(
    "capacity",
    None,
    "decode: rows that a sequence can hold. Default: what the prompts need.",
    lower_bound=1,
)
_PAGE_SIZE = flags.DEFINE_integer("page_size", 64, "decode, --cache=paged: rows of a page.")
_PAGES = flags.DEFINE_integer(
    "pages",
    None,
    "decode, --cache=paged: pages of the pool. Default: enough for all; with fewer, prompts wait.",
    lower_bound=1,
)
_CHUNK = flags.DEFINE_integer("chunk", 16, "decode: steps inside one jit.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "decode: 0 takes the likeliest token.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "decode: sample from this many; 0: from all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "decode: sample from the likeliest that make up this.")
_STOP_IDS = flags.DEFINE_list(
    "stop_ids", None, "decode: tokens that end a sequence. Default: what the checkpoint says."
)
_CHECK = flags.DEFINE_bool(
    "check", False, "decode: compare every step with the reference path, and print the table."
)
_JSON = flags.DEFINE_bool("json", False, "decode: one JSON object a line, for machines.")
_REPORT = flags.DEFINE_string(
    "report", None, "decode: a folder for report.json and report.png: where a step's time goes."
)


def main(argv: list[str]) -> int:
    if argv[1:]:
        return _refuse(f"run.py takes flags only, got {argv[1]!r}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # jax reports each platform that it does not find
    # Peers and kernels share the GPU's memory: nobody may take it all at the start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    tasks = {"decode": _decode, "train": _train, "parity": _parity, "bench": _bench, "tune": _tune}
    if idle := [flag.name for flag in _given() if _TASK.value not in _tasks_of(flag.help)]:
        return _refuse(f"{idle[0]}: --task={_TASK.value} does nothing with it")
    try:
        return tasks[_TASK.value]()
    except ValueError as error:
        return _refuse(str(error))
    except NotImplementedError as error:  # pallas_attn.UnsupportedError: who, why, what to do
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has enough, as `head` does; nothing is left to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a folder that cannot be read, or not be written
        return _refuse(_of_path(error) if error.filename else str(error))


def _given() -> list[flags.Flag]:
    """The flags of this file that somebody has set."""
    own = flags.FLAGS.get_flags_for_module(sys.argv[0])
    return [flag for flag in own if flag.present and flag.name != "task"]


def _tasks_of(text: str) -> set[str]:
    """The tasks that a flag is for: those that its help names in front of a colon, or else all."""
    every = "|".join(flags.FLAGS["task"].parser.enum_values)
    text = text.partition(">: ")[2] or text  # absl puts an enum's values first
    return set(re.findall(rf"\b({every})\b(?=[^.:]*:)", text)) or set(every.split("|"))


def _of_path(error: OSError) -> str:
    """What is wrong with a file, behind the name of the flag that it came by."""
    path = str(error.filename)
    for flag in (_CHECKPOINT, _REPORT, _OUT, _PLOT):
        if flag.value and (path.startswith(flag.value) or flag.value.startswith(path)):
            return f"{flag.name}: {path}: {error.strerror}"
    return f"{path}: {error.strerror}"


def _decode() -> int:
    from pallas_attn.lm import sampling, session

    settings = session.Settings(
        model=_MODEL.value,
        checkpoint=_CHECKPOINT.value,
        prompts=_prompts(),
        random_prompts=_RANDOM_PROMPTS.value,
        prompt_length=_PROMPT_LENGTH.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        batch=_BATCH.value,
        cache=_CACHE.value,
        capacity=_CAPACITY.value,
        page_size=_PAGE_SIZE.value,
        pages=_PAGES.value,
        chunk=_CHUNK.value,
        sampling=sampling.Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value),
        stop=_stop_ids(),
        dtype=_DTYPE.value,
        implementation=_IMPLEMENTATION.value,
        seed=_SEED.value,
        check=_CHECK.value,
        json=_JSON.value,
        report=_REPORT.value,
        out=_OUT.value,
        commit=_COMMIT.value,
    )
    return session.decode(settings, sys.stdout, sys.stderr)


def _prompts() -> tuple[str, ...]:
    """The prompts of --prompt, or else the lines of --prompt_file."""
    lines, path = list(_PROMPT.value), _PROMPT_FILE.value
    if not lines and path is not None:
        try:
            text = sys.stdin.read() if path == "-" else pathlib.Path(path).read_text("utf-8")
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"prompt_file: {path}: {why}") from None
        lines = [line for line in text.splitlines() if line]
        if not lines:
            raise ValueError(f"prompt_file: {path} has no prompt")
    return tuple(line.replace("\\n", "\n") for line in lines)


def _stop_ids() -> tuple[int, ...] | None:
    if _STOP_IDS.value is None:
        return None
    try:
        return tuple(int(one) for one in _STOP_IDS.value)
    except ValueError:
        raise ValueError(f"stop_ids: expected numbers, got {_STOP_IDS.value}") from None


def _parity() -> int:
    """The table: 0 where every row held, 1 where one did not, or could not run."""
    import jax

    from pallas_attn.bench import parity

    devices = jax.devices()
    _say(f"jax {jax.__version__} on {len(devices)} x {devices[0].device_kind}")
    _say(f"implementation: {_IMPLEMENTATION.value or 'the fastest that takes each problem'}")
    _say(f"{'operation':<18}{'case':<40}{'runs on':<12}{'error':>9}{'budget':>9}")
    failed = 0
    for row in parity.rows(_IMPLEMENTATION.value, _DTYPE.value or "bfloat16", _SEED.value):
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

    options = bench.Options(
        implementation=_IMPLEMENTATION.value,
        peers=_PEERS.value,
        seed=_SEED.value,
        turns=_TURNS.value,
        cold=_COLD.value,
        commit=_COMMIT.value,
        out=_OUT.value,
        plot=_PLOT.value,
    )
    return bench.run_bench(_OP.value, _CASES.value, options)


def _tune() -> int:
    from pallas_attn import bench

    return bench.run_tune(_KERNEL.value, _CASES.value, commit=_COMMIT.value)


def _train() -> int:
    from pallas_attn.lm import train

    if _TEXT.value is None or _OUT.value is None:
        return _refuse("--task=train needs --text=FILE and --out=FOLDER")
    recipe = train.Recipe(
        steps=_STEPS.value,
        batch=_BATCH.value,
        context=_CONTEXT.value,
        learning_rate=_LEARNING_RATE.value,
        dtype=_DTYPE.value or "float32",
        implementation=_IMPLEMENTATION.value,
    )
    text = train.read_text(_TEXT.value)
    _say(f"{'step':>6}{'nats a byte':>13}{'held out':>10}{'seconds':>9}")
    for line in train.train(text, _OUT.value, recipe, _SEED.value):
        _say(f"{line.step:>6}{line.loss:>13.3f}{line.held_out:>10.3f}{line.seconds:>9.1f}")
    _say(f"the model is in {_OUT.value}: python run.py --checkpoint={_OUT.value}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _refuse(line: str) -> int:
    sys.stderr.write(f"{line}; see python run.py --help\n")
    return 2


def _parse(argv: list[str]) -> list[str]:
    """Flags, or one line that says what is wrong with them; without any, those of the demo."""
    if not argv[1:]:
        argv = [*argv, f"--flagfile={pathlib.Path(__file__).parent / 'configs' / 'demo.cfg'}"]
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_refuse(str(error).splitlines()[0]))


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
