"""The flags: what each is for, which tasks read it, and which others leave it nothing to do."""

import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags

USAGE = """\
{0}                               a small model continues a few prompts, checked
{0} --prompt="ROMEO:"             the same model, your prompt
{0} --checkpoint=DIR --prompt_file=prompts.txt   a Hugging Face folder
{0} --flagfile=configs/NAME.cfg   flags from a file
{0} --task=parity                 every operation here, beside the reference
{0} --task=bench --op=forward --cases=grid --out=results/mine.jsonl --plot=mine.svg

Exit status: 0 all is well, 1 something did not hold, 2 what was asked is wrong, 130 Ctrl-C, 141
nobody reads the output any more.
"""
# What is run where nothing is asked: the small model continues six prompts, four at a time, and
# every step is compared with the reference path. It runs anywhere, in well under a minute.
DEMO = (
    "--task=decode",
    "--model=tiny",
    "--batch=4",
    "--max_new_tokens=200",
    "--temperature=0.7",
    "--top_k=40",
    "--seed=1",
    "--check",
)
OPS = (
    *("forward", "backward", "backward_alone", "decode", "prefill", "shared_prefix", "append"),
    *("mask", "context"),
)
DECODE, TRAIN, PARITY, BENCH = TASKS = ("decode", "train", "parity", "bench")


class Use(NamedTuple):
    """What a flag is for."""

    tasks: tuple[str, ...]
    text: str


USES: dict[str, Use] = {}


# What defines a flag of each type: its name, its default, the tasks that read it, what it is for.


def _flag(define: Callable[..., Any], name: str, default: Any, tasks: Any, text: str, **how: Any):
    USES[name] = Use((tasks,) if isinstance(tasks, str) else tasks, text)
    return define(name=name, default=default, help=text, **how)


def _integer(
    name: str, default: int | None, tasks: Any, text: str, low: int | None = 0, high: int = 2**28
):
    return _flag(
        flags.DEFINE_integer, name, default, tasks, text, lower_bound=low, upper_bound=high
    )


def _enum(name: str, default: str | None, tasks: Any, values: Sequence[str], text: str):
    return _flag(flags.DEFINE_enum, name, default, tasks, text, enum_values=values)


_bool = functools.partial(_flag, flags.DEFINE_bool)
_float = functools.partial(_flag, flags.DEFINE_float)
_list = functools.partial(_flag, flags.DEFINE_list)
_string = functools.partial(_flag, flags.DEFINE_string)
_strings = functools.partial(_flag, flags.DEFINE_multi_string)

HELP = _bool("help", False, TASKS, "Print this and end.", short_name="h")
TASK = _enum(
    "task",
    DECODE,
    TASKS,
    TASKS,
    "What to do. decode: continue prompts with a language model. train: make a small one from"
    " a text. parity: run a small case of every operation beside the reference. bench: time "
    "checked kernels beside their peers, on a GPU.",
)
IMPLEMENTATION = _enum(
    "implementation",
    None,
    (DECODE, TRAIN, PARITY, BENCH),
    ["sm90", "sm80", "reference"],
    "Which implementation to run. Default: the fastest that takes each problem on this "
    "machine. decode takes no other than reference; train takes any that has gradients here.",
)
SEED = _integer("seed", 0, (DECODE, TRAIN, PARITY, BENCH), "Of all random inputs.", high=2**32 - 1)
DTYPE = _enum(
    "dtype",
    None,
    (DECODE, TRAIN, PARITY),
    ["bfloat16", "float16", "float32"],
    "The type of what is computed with. Default: bfloat16; without a GPU decode takes "
    "float32, and train always does.",
)
PRECISION = _enum(
    "precision",
    None,
    (DECODE, TRAIN),
    ["default", "high", "highest"],
    "Of matmuls, as jax.default_matmul_precision has it. Default: highest with float32, so "
    "that float32 is no TF32 on a GPU; else default.",
)
COMPILE_CACHE = _bool(
    "compile_cache",
    True,
    (DECODE, TRAIN, PARITY),
    "Keep compiled programs between runs, in $XDG_CACHE_HOME/pallas_attn or "
    "~/.cache/pallas_attn. Where jax has a compilation cache of its own already, that one.",
)
OP = _enum("op", "forward", BENCH, OPS, "Which operation.")
CASES = _string(
    "cases",
    "grid",
    BENCH,
    "Which cases, by tags and globs over names, with commas. grid+causal wants both tags; "
    "-h256 takes away.",
)
PEERS = _string("peers", "all", BENCH, "Whom to time beside: all, none, or names with commas.")
TURNS = _integer("turns", 5, BENCH, "How often everybody has a turn.", 1)
COLD = _bool("cold", False, BENCH, "Empty the L2 cache before each timed call.")
OUT = _string(
    "out",
    None,
    (DECODE, TRAIN, BENCH),
    "bench, decode with --report: a .jsonl file to add rows to. train: the folder of the model.",
)
PLOT = _string("plot", None, BENCH, "An .svg file to draw.")
COMMIT = _string(
    "commit", None, (DECODE, BENCH), "The commit that rows name, where git cannot say."
)
MESH = _string(
    "mesh",
    None,
    (DECODE, TRAIN),
    "Devices to spread the work over. decode: tp:4 splits a model's heads, and the columns of its "
    "MLP, over four. train: dp:2 splits the batch, cp:4 the rows of each window, cp:4,dp:2 both.",
)
COORDINATOR = _string(
    "coordinator",
    None,
    (DECODE, TRAIN),
    "With --mesh, one of several processes: HOST:PORT, where the first of them listens.",
)
PROCESSES = _integer("processes", 1, (DECODE, TRAIN), "With --coordinator: how many there are.", 1)
PROCESS = _integer(
    "process", 0, (DECODE, TRAIN), "With --coordinator: which of them this is, from 0."
)
TEXT = _string("text", None, TRAIN, "A file; the model learns its bytes.")
OVERWRITE = _bool("overwrite", False, TRAIN, "Replace a model that --out holds already.")
BATCH = _integer(
    "batch",
    32,
    (DECODE, TRAIN),
    "train: windows of the text a step. decode: sequences at a time.",
    1,
    2**20,
)
STEPS = _integer("steps", 3000, TRAIN, "How many steps.", 1, 2**30)
CONTEXT = _integer(
    "context",
    512,
    TRAIN,
    "Bytes of a window of the text; the model is made for as many positions.",
    1,
    2**20,
)
LEARNING_RATE = _float("learning_rate", 0.003, TRAIN, "Its peak, for AdamW.")
MODEL = _string(
    "model",
    "tiny",
    DECODE,
    "tiny, which is in the package, or llama2_7b, llama3_8b, llama3.1_8b, mistral_7b, "
    "qwen2_7b, qwen3_8b with random weights.",
)
CHECKPOINT = _string(
    "checkpoint",
    None,
    DECODE,
    "A folder in Hugging Face's layout, or one that --task=train made, instead of --model.",
)
PROMPT = _strings(
    "prompt", [], DECODE, r"A prompt; may be repeated. \n (a backslash and an n) is a new line."
)
PROMPT_FILE = _string(
    "prompt_file",
    None,
    DECODE,
    r"A file of UTF-8 with a prompt a line, in which \n is a new line as in --prompt; empty "
    r"lines are left out; - is standard input.",
)
RANDOM_PROMPTS = _integer(
    "random_prompts", 0, DECODE, "This many prompts of random tokens instead.", high=2**20
)
PROMPT_LENGTH = _integer("prompt_length", 128, DECODE, "Tokens of a random prompt.", 1)
MAX_NEW_TOKENS = _integer("max_new_tokens", 200, DECODE, "Tokens after each prompt, at most.")
CACHE = _enum(
    "cache", "per_sequence", DECODE, ["per_sequence", "stacked", "paged"], "Which KV cache."
)
CAPACITY = _integer(
    "capacity", None, DECODE, "Rows that a sequence can hold. Default: what the prompts need.", 1
)
PAGE_SIZE = _integer("page_size", 64, DECODE, "With --cache=paged: rows of a page.", 1, 2**20)
PAGES = _integer(
    "pages",
    None,
    DECODE,
    "With --cache=paged: pages of the pool. Default: enough for all; with fewer, prompts wait.",
    1,
)
CHUNK = _integer("chunk", 16, DECODE, "Steps inside one jit.", 1, 2**16)
PREFILL_CHUNK = _integer(
    "prefill_chunk",
    None,
    DECODE,
    "Rows of prompts that a step takes beside the sequences that decode, which then do not wait "
    "for long prompts. Default: prompts come in whole, before the next chunk of steps.",
    1,
    2**20,
)
SAMPLES = _integer(
    "samples",
    1,
    DECODE,
    "Answers to each prompt, which is prefilled once and forked: takes --cache=paged and a "
    "--temperature.",
    1,
    2**20,
)
DRAFT = _enum(
    "draft",
    None,
    DECODE,
    ["ngram"],
    "Where drafts come from, of which a step checks several at once. ngram: what followed the "
    "newest tokens where they stood before. The tokens are those of plain decoding, but for ties.",
)
DRAFTS = _integer("drafts", 7, DECODE, "With --draft: how many a step checks.", 1, 2**10)
TEMPERATURE = _float("temperature", 0.0, DECODE, "0 takes the likeliest token.")
TOP_K = _integer("top_k", 0, DECODE, "Sample from this many; 0: from all.", high=2**30)
TOP_P = _float("top_p", 1.0, DECODE, "Sample from the likeliest that make up this.")
STOP_IDS = _list(
    "stop_ids", None, DECODE, "Tokens that end a sequence. Default: what the checkpoint says."
)
CHECK = _bool(
    "check", False, DECODE, "Compare every step with the reference path, and print the table."
)
JSON = _bool("json", False, DECODE, "One JSON object a line, for machines.")
REPORT = _string(
    "report", None, DECODE, "A folder for report.json and report.png: where a step's time goes."
)


def parse(argv: list[str]) -> list[str]:
    """What is left of the arguments when the flags are read; without any, those of the demo."""
    try:
        return flags.FLAGS(argv if argv[1:] else [*argv, *DEMO])[1:]
    except flags.Error as error:
        raise ValueError(str(error).splitlines()[0].removeprefix("ERROR:: ")) from None
    except UnicodeError:
        raise ValueError("flagfile: not a file of text") from None


def refuse_idle(argv: list[str]) -> None:
    """Raises where a flag does nothing: in this task, or, if it stands on the command line itself,
    beside the other flags. A flagfile may say more than is used.
    """
    for name, use in USES.items():
        if flags.FLAGS[name].present and TASK.value not in use.tasks:
            raise ValueError(f"{name}: --task={TASK.value} does nothing with it")
    idle = _idle() if TASK.value == DECODE else {}
    idle |= _alone()
    for arg in argv[1:]:
        name = arg.lstrip("-").partition("=")[0]
        if arg.startswith("-") and name in idle:
            raise ValueError(f"{name}: {idle[name]}")


def _alone() -> dict[str, str]:
    """The flags of several processes, where there is one."""
    if COORDINATOR.value is None:
        why = "only --coordinator=HOST:PORT has several processes"
        return dict.fromkeys(("processes", "process"), why)
    return {} if MESH.value else {"coordinator": "only a --mesh has several processes"}


def _idle() -> dict[str, str]:
    """The flags that another one leaves nothing to do, and why."""
    idle = {}
    if CHECKPOINT.value is not None:
        idle["model"] = "--checkpoint is the model; give one of the two"
    if CACHE.value != "paged":
        idle |= dict.fromkeys(("page_size", "pages"), "only --cache=paged has pages")
    if RANDOM_PROMPTS.value:
        why = "--random_prompts takes no other prompts; give one of the two"
        idle |= dict.fromkeys(("prompt", "prompt_file"), why)
    else:
        idle["prompt_length"] = "only --random_prompts draws prompts of a length"
    if PROMPT.value and not RANDOM_PROMPTS.value:
        idle["prompt_file"] = "--prompt is given; give one of the two"
    if not TEMPERATURE.value:
        why = "nothing is drawn without a --temperature"
        idle |= dict.fromkeys(("top_k", "top_p"), why)
    if DRAFT.value is None:
        idle["drafts"] = "there are none without a --draft"
    if REPORT.value is None:
        idle |= dict.fromkeys(("out", "commit"), "its rows are those of a --report=FOLDER")
    return idle


def help_text(program: str) -> str:
    """All flags, those of one task together."""
    lines = [USAGE.format(program)]
    for tasks in dict.fromkeys(use.tasks for use in USES.values()):
        lines.append("every task:" if tasks == TASKS else f"{', '.join(tasks)}:")
        for name, use in USES.items():
            lines += _help_of(flags.FLAGS[name], use.text) if use.tasks == tasks else []
        lines.append("")
    return "\n".join(lines)


def _help_of(flag: flags.Flag, text: str) -> list[str]:
    values = getattr(flag.parser, "enum_values", None)
    shown = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}=.."
    shown = f"--{flag.name}={'|'.join(values)}" if values else shown
    default = "" if flag.default in (None, [], False) else f" Default: {flag.default}."
    wrapped = textwrap.wrap(text + default, 92)
    return [f"  {shown}", *(f"      {line}" for line in wrapped)]
