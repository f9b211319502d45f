"""The flags: what each is for, which tasks read it, and which others leave it nothing to do."""

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import flags

USAGE = """\
{0}                               a small model continues a few prompts, checked
{0} --prompt="ROMEO:"             the same model, your prompt
{0} --checkpoint=DIR --prompt_file=prompts.txt   a Hugging Face folder
{0} --flagfile=configs/NAME.cfg   flags from a file
{0} --task=parity                 every operation here, beside the reference
{0} --task=bench --op=forward --cases=grid --out=results/mine.jsonl --plot=mine.svg
{0} --task=tune --kernel=flash_fwd_sm90 --cases=h128*

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
OPS = ("forward", "backward", "backward_alone", "decode", "append")
DECODE, TRAIN, PARITY, BENCH, TUNE = TASKS = ("decode", "train", "parity", "bench", "tune")


class Use(NamedTuple):
    """What a flag is for."""

    tasks: tuple[str, ...]
    text: str


USES: dict[str, Use] = {}


def _flag(define: Callable[..., Any], name: str, default: Any, tasks: Any, text: str, **how: Any):
    """A flag, and the tasks that read it."""
    USES[name] = Use(tuple(tasks), text)
    return define(name=name, default=default, help=text, **how)


HELP = _flag(flags.DEFINE_bool, "help", False, TASKS, "Print this and end.", short_name="h")
TASK = _flag(
    flags.DEFINE_enum,
    "task",
    DECODE,
    TASKS,
    "What to do. decode: continue prompts with a language model. train: make a small one from a "
    "text. parity: run a small case of every operation beside the reference. bench: time checked "
    "kernels beside their peers. tune: search the settings of a kernel. The last two want a GPU.",
    enum_values=TASKS,
)
IMPLEMENTATION = _flag(
    flags.DEFINE_enum,
    "implementation",
    None,
    (DECODE, TRAIN, PARITY, BENCH),
    "Which implementation to run. Default: the fastest that takes each problem on this machine. "
    "decode takes no other than reference; train takes any that has gradients here.",
    enum_values=["sm90", "sm80", "reference"],
)
SEED = _flag(
    flags.DEFINE_integer,
    "seed",
    0,
    (DECODE, TRAIN, PARITY, BENCH),
    "Of all random inputs.",
    lower_bound=0,
    upper_bound=2**32 - 1,
)
DTYPE = _flag(
    flags.DEFINE_enum,
    "dtype",
    None,
    (DECODE, TRAIN, PARITY),
    "The type of what is computed with. Default: bfloat16; without a GPU decode takes float32, and "
    "train always does.",
    enum_values=["bfloat16", "float16", "float32"],
)
PRECISION = _flag(
    flags.DEFINE_enum,
    "precision",
    None,
    (DECODE, TRAIN),
    "Of matmuls, as jax.default_matmul_precision has it. Default: highest with float32, so that "
    "float32 is no TF32 on a GPU; else default.",
    enum_values=["default", "high", "highest"],
)
COMPILE_CACHE = _flag(
    flags.DEFINE_bool,
    "compile_cache",
    True,
    (DECODE, TRAIN, PARITY),
    "Keep compiled programs between runs, in $XDG_CACHE_HOME/pallas_attn or ~/.cache/pallas_attn. "
    "Where jax has a compilation cache of its own already, that one.",
)
OP = _flag(flags.DEFINE_enum, "op", "forward", (BENCH,), "Which operation.", enum_values=OPS)
CASES = _flag(
    flags.DEFINE_string,
    "cases",
    "grid",
    (BENCH, TUNE),
    "Which cases, by tags and globs over names, with commas. grid+causal wants both tags; -h256 "
    "takes away.",
)
PEERS = _flag(
    flags.DEFINE_string,
    "peers",
    "all",
    (BENCH,),
    "Whom to time beside: all, none, or names with commas.",
)
TURNS = _flag(
    flags.DEFINE_integer, "turns", 5, (BENCH,), "How often everybody has a turn.", lower_bound=1
)
COLD = _flag(
    flags.DEFINE_bool, "cold", False, (BENCH,), "Empty the L2 cache before each timed call."
)
OUT = _flag(
    flags.DEFINE_string,
    "out",
    None,
    (DECODE, TRAIN, BENCH),
    "bench, decode with --report: a .jsonl file to add rows to. train: the folder of the model.",
)
PLOT = _flag(flags.DEFINE_string, "plot", None, (BENCH,), "An .svg file to draw.")
COMMIT = _flag(
    flags.DEFINE_string,
    "commit",
    None,
    (DECODE, BENCH, TUNE),
    "The commit that rows name, where git cannot say.",
)
KERNEL = _flag(flags.DEFINE_string, "kernel", "flash_fwd_sm90", (TUNE,), "Which kernel module.")
TEXT = _flag(flags.DEFINE_string, "text", None, (TRAIN,), "A file; the model learns its bytes.")
OVERWRITE = _flag(
    flags.DEFINE_bool, "overwrite", False, (TRAIN,), "Replace a model that --out holds already."
)
BATCH = _flag(
    flags.DEFINE_integer,
    "batch",
    32,
    (DECODE, TRAIN),
    "train: windows of the text a step. decode: sequences at a time.",
    lower_bound=1,
    upper_bound=2**20,
)
STEPS = _flag(
    flags.DEFINE_integer,
    "steps",
    3000,
    (TRAIN,),
    "How many steps.",
    lower_bound=1,
    upper_bound=2**30,
)
CONTEXT = _flag(
    flags.DEFINE_integer,
    "context",
    512,
    (TRAIN,),
    "Bytes of a window of the text; the model is made for as many positions.",
    lower_bound=1,
    upper_bound=2**20,
)
LEARNING_RATE = _flag(flags.DEFINE_float, "learning_rate", 3e-3, (TRAIN,), "Its peak, for AdamW.")
MODEL = _flag(
    flags.DEFINE_string,
    "model",
    "tiny",
    (DECODE,),
    "tiny, which is in the package, or llama2_7b, llama3_8b, llama3.1_8b, mistral_7b, qwen2_7b, "
    "qwen3_8b with random weights.",
)
CHECKPOINT = _flag(
    flags.DEFINE_string,
    "checkpoint",
    None,
    (DECODE,),
    "A folder in Hugging Face's layout, or one that --task=train made, instead of --model.",
)
PROMPT = _flag(
    flags.DEFINE_multi_string,
    "prompt",
    [],
    (DECODE,),
    r"A prompt; may be repeated. \n (a backslash and an n) is a new line.",
)
PROMPT_FILE = _flag(
    flags.DEFINE_string,
    "prompt_file",
    None,
    (DECODE,),
    r"A file of UTF-8 with a prompt a line, in which \n is a new line as in --prompt; empty lines "
    "are left out; - is standard input.",
)
RANDOM_PROMPTS = _flag(
    flags.DEFINE_integer,
    "random_prompts",
    0,
    (DECODE,),
    "This many prompts of random tokens instead.",
    lower_bound=0,
    upper_bound=2**20,
)
PROMPT_LENGTH = _flag(
    flags.DEFINE_integer,
    "prompt_length",
    128,
    (DECODE,),
    "Tokens of a random prompt.",
    lower_bound=1,
    upper_bound=2**28,
)
MAX_NEW_TOKENS = _flag(
    flags.DEFINE_integer,
    "max_new_tokens",
    200,
    (DECODE,),
    "Tokens after each prompt, at most.",
    upper_bound=2**28,
)
CACHE = _flag(
    flags.DEFINE_enum,
    "cache",
    "per_sequence",
    (DECODE,),
    "Which KV cache.",
    enum_values=["per_sequence", "stacked", "paged"],
)
CAPACITY = _flag(
    flags.DEFINE_integer,
    "capacity",
    None,
    (DECODE,),
    "Rows that a sequence can hold. Default: what the prompts need.",
    lower_bound=1,
)
PAGE_SIZE = _flag(
    flags.DEFINE_integer,
    "page_size",
    64,
    (DECODE,),
    "With --cache=paged: rows of a page.",
    lower_bound=1,
    upper_bound=2**20,
)
PAGES = _flag(
    flags.DEFINE_integer,
    "pages",
    None,
    (DECODE,),
    "With --cache=paged: pages of the pool. Default: enough for all; with fewer, prompts wait.",
    lower_bound=1,
    upper_bound=2**28,
)
CHUNK = _flag(
    flags.DEFINE_integer,
    "chunk",
    16,
    (DECODE,),
    "Steps inside one jit.",
    lower_bound=1,
    upper_bound=2**16,
)
TEMPERATURE = _flag(
    flags.DEFINE_float, "temperature", 0.0, (DECODE,), "0 takes the likeliest token."
)
TOP_K = _flag(
    flags.DEFINE_integer,
    "top_k",
    0,
    (DECODE,),
    "Sample from this many; 0: from all.",
    upper_bound=2**30,
)
TOP_P = _flag(
    flags.DEFINE_float, "top_p", 1.0, (DECODE,), "Sample from the likeliest that make up this."
)
STOP_IDS = _flag(
    flags.DEFINE_list,
    "stop_ids",
    None,
    (DECODE,),
    "Tokens that end a sequence. Default: what the checkpoint says.",
)
CHECK = _flag(
    flags.DEFINE_bool,
    "check",
    False,
    (DECODE,),
    "Compare every step with the reference path, and print the table.",
)
JSON = _flag(flags.DEFINE_bool, "json", False, (DECODE,), "One JSON object a line, for machines.")
REPORT = _flag(
    flags.DEFINE_string,
    "report",
    None,
    (DECODE,),
    "A folder for report.json and report.png: where a step's time goes.",
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
    for arg in argv[1:]:
        name = arg.lstrip("-").partition("=")[0]
        if arg.startswith("-") and name in idle:
            raise ValueError(f"{name}: {idle[name]}")


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
