"""The flags: a table of them, and the ones that do nothing in a task or beside other flags."""

import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import flags

from pallas_lm import options
from pallas_lm.machine import PRECISIONS

USAGE = """\
{0}                               a small model continues a few prompts, checked
{0} --prompt="ROMEO:"             the same model, your prompt
{0} --checkpoint=DIR --prompt_file=prompts.txt   a Hugging Face folder
{0} --flagfile=configs/NAME.cfg   flags from a file
{0} check                         whether the kernels work on this GPU, with a report
{0} tune --shape=1,4096,32,8,128  faster Configs of kernels for this GPU, kept in a file
{0} --task=bench --op=forward --cases=grid --out=results/mine.jsonl --plot=mine.svg

Exit status: 0 all is well, 1 something did not hold, 2 what was asked is wrong, 130 Ctrl-C, 141
nobody reads the output any more.
"""
# The flags of a call without arguments: the small model continues six prompts, four at a time, and
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
DECODE, TRAIN, CHECK, TUNE, BENCH = TASKS = ("decode", "train", "check", "tune", "bench")
_OPS = ["forward", "backward", "backward_alone", "decode", "prefill", "shared_prefix", "append",
        "mask", "shapes", "few_tiles", "float8", "quantize", "jvp", "context",
        "first_call", "all"]  # fmt: skip


class Flag(NamedTuple):
    """One flag. `kind`: the range of an integer, a list of values, bool, int, float or str; tuple:
    may be repeated; list: with commas. None as the default: that of the record which it fills.
    """

    name: str
    tasks: tuple[str, ...]  # readers
    kind: Any
    default: Any
    text: str


def _ints(least: int = 0, most: int = 2**28) -> range:
    return range(least, most + 1)


SAID = (
    Flag("help", TASKS, bool, False, "Print this and end; behind a task, its flags alone."),
    Flag("task", TASKS, list(TASKS), DECODE,
         "What to do. decode: continue prompts with a language model. train: make a small one from"
         " a text. check: small cases of every operation beside a definition in float64, on a GPU, "
         "each in a process with a time limit, then three timings, and a file to attach to a "
         "report; with --implementation=reference anywhere. tune: look for faster Configs of the "
         "kernels of some calls on a GPU, and keep them in a file. bench: time checked kernels "
         "beside their peers, on a GPU. The first argument may be the task's name alone."),
    Flag("implementation", TASKS, ["sm90", "sm80", "sm100", "reference"], None,
         "Which implementation to run. Default: the fastest that takes each problem on this "
         "machine. decode takes no other than reference; train takes any that has gradients here."),
    Flag("seed", TASKS, _ints(most=2**32 - 1), 0, "Of all random inputs."),
    Flag("dtype", (DECODE, TRAIN, CHECK, TUNE), list(options.DTYPES), None,
         "The type of what is computed with. Default: bfloat16; without a GPU decode takes "
         "float32, and train always does."),
    Flag("precision", (DECODE, TRAIN), list(PRECISIONS), None,
         "Of matmuls, as jax.default_matmul_precision has it. Default: highest with float32, so "
         "that float32 is no TF32 on a GPU; else default."),
    Flag("compile_cache", (DECODE, TRAIN, TUNE), bool, True,
         "Keep compiled programs between runs, in $XDG_CACHE_HOME/pallas_attn or "
         "~/.cache/pallas_attn. Where jax has a compilation cache of its own already, that one."),
    Flag("limit", (CHECK, TUNE), _ints(1), 120,
         "Seconds that a case or a Config may take, with its compilation; then it counts as hung."),
    Flag("gpu", (CHECK, TUNE), _ints(most=2**10), 0, "Which of several GPUs, from 0."),
    Flag("shape", (TUNE,), tuple, [],
         "Sizes B,T,N,K,H or B,T,N,K,H,S: batch, query rows, query heads, kv heads, head dim, and "
         "keys (of decode and prefill the rows of the cache); may be repeated. Default: those of "
         "the models that --model names, or of all whose cache is not latent."),
    Flag("mask", (TUNE,), str, "causal", "full, causal, or window:N for the newest N keys."),
    Flag("op", (TUNE, BENCH), _OPS, "forward",
         "Which operation. tune takes forward, backward (both passes), decode and prefill. bench, "
         "all: the cases of configs/bench_*.cfg, with --workers."),
    Flag("cases", (BENCH,), str, "grid",
         "Which cases, by tags and globs over names, with commas. grid+causal wants both tags; "
         "-h256 takes away."),
    Flag("peers", (BENCH,), str, "all",
         "Whom to time beside: all, none, or names with commas; -xla takes away from all. "
         "--op=all asks each operation for those that it has, and leaves out attention that "
         "keeps all scores."),
    Flag("turns", (BENCH,), _ints(1), 5, "How often everybody has a turn."),
    Flag("workers", (BENCH,), _ints(1, 256), 1,
         "Processes, on all GPUs together, that share the cases: they compile side by side and "
         "time in turns on each GPU. --out is a "
         "folder, and cases that have rows of this commit there are not measured again."),
    Flag("within", (BENCH,), _ints(1), None,
         "Seconds after which --workers begin no more cases; what is left is listed."),
    Flag("cold", (BENCH,), bool, False, "Empty the L2 cache before each timed call."),
    Flag("out", (DECODE, TRAIN, CHECK, TUNE, BENCH), str, None,
         "bench, decode with --report: a .jsonl file to add rows to; with --workers a folder. "
         "train: the folder of the model. check: the report; default: pallas_attn_check.json. "
         "tune: the file of Configs; default: tuned.json, beside the lowered kernels that are "
         "kept."),
    Flag("plot", (BENCH,), str, None, "An .svg file to draw."),
    Flag("commit", (DECODE, BENCH), str, None,
         "The commit that rows name, where git cannot say."),
    Flag("mesh", (DECODE, TRAIN), str, None,
         "Devices to spread the work over. decode: tp:4 splits a model's heads, and the columns of "
         "its MLP, over four. train: dp:2 splits the batch, cp:4 the rows of each window, "
         "cp:4,dp:2 both."),
    Flag("coordinator", (DECODE, TRAIN), str, None,
         "With --mesh, one of several processes: HOST:PORT, where the first of them listens."),
    Flag("processes", (DECODE, TRAIN), _ints(1), 1, "With --coordinator: how many there are."),
    Flag("process", (DECODE, TRAIN), _ints(), 0,
         "With --coordinator: which of them this is, from 0."),
    Flag("text", (TRAIN,), str, None, "A file; the model learns its bytes."),
    Flag("overwrite", (TRAIN,), bool, False, "Replace a model that --out holds already."),
    Flag("batch", (DECODE, TRAIN), _ints(1, 2**20), 32,
         "train: windows of the text a step. decode: sequences at a time."),
    Flag("steps", (TRAIN,), _ints(1, 2**30), None, "How many steps."),
    Flag("context", (TRAIN,), _ints(1, 2**20), None,
         "Bytes of a window of the text; the model is made for as many positions."),
    Flag("learning_rate", (TRAIN,), float, None, "Its peak, for AdamW."),
    Flag("model", (DECODE, TUNE), str, None,
         "tiny, which is in the package, or llama2_7b, llama3_8b, llama3_70b, llama3.1_8b, "
         "mistral_7b, qwen2_7b, qwen3_8b, deepseek_v2_lite with random weights."),
    Flag("checkpoint", (DECODE,), str, None,
         "A folder in Hugging Face's layout, or one that --task=train made, instead of --model."),
    Flag("prompt", (DECODE,), tuple, [],
         r"A prompt; may be repeated. \n (a backslash and an n) is a new line."),
    Flag("prompt_file", (DECODE,), str, None,
         r"A file of UTF-8 with a prompt a line, in which \n is a new line as in --prompt; empty "
         r"lines are left out; - is standard input."),
    Flag("chat", (DECODE,), bool, None,
         "Prompts are messages of a user, for the chat template in the --checkpoint; takes "
         "pallas_attn[lm]."),
    Flag("random_prompts", (DECODE,), _ints(most=2**20), None,
         "This many prompts of random tokens instead."),
    Flag("prompt_length", (DECODE,), _ints(1), None, "Tokens of a random prompt."),
    Flag("stop", (DECODE,), tuple, None,
         r"A text that ends a sequence and is left out; may be repeated. \n is a new line."),
    Flag("stop_ids", (DECODE,), list, None,
         "Tokens that end a sequence, with commas; --stop_ids= for none. Default: what the "
         "checkpoint says."),
    Flag("check", (DECODE,), bool, False,
         "Compare every step with the reference path, and print the table."),
    Flag("json", (DECODE, CHECK, TUNE), bool, False, "One JSON object a line, for machines."),
    Flag("logprobs", (DECODE,), bool, None,
         "With --json: the log-probability of each token, before temperature, top_k and top_p."),
    Flag("report", (DECODE,), str, None,
         "A folder for report.json: the time of a step, over batch sizes."),
)  # fmt: skip


def _of_options() -> Iterator[Flag]:
    """The other options of `lm.generate`, as their records describe them, and check them."""
    said = {"sampling", *(flag.name for flag in SAID)}
    for record in (options.Call, options.Options, options.Sampling):
        _, _, arguments = str(inspect.getdoc(record)).partition("Args:\n")
        lines = re.split(r"\n(?=  \w)", arguments.partition("\n\n")[0])
        texts = {name.strip(): text for name, _, text in (x.partition(": ") for x in lines)}
        for field in dataclasses.fields(record):
            if field.name in options.NAMES and field.name not in said:
                kind: Any = int if "range" in field.metadata else type(field.default)
                kind = list(field.metadata.get("choices", ())) or kind
                text = " ".join(texts.get(field.name, "").split())  # none of them under python -OO
                text = re.sub(r'(\w+)="(\w+)"', r"--\1=\2", text)
                text = text[:1].upper() + text[1:].replace("None: ", "Default: ")
                yield Flag(field.name, (DECODE,), kind, None, text)


FLAGS = (*SAID, *_of_options())
NAMES = {flag.name for flag in FLAGS}
_DEFINE: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    list: flags.DEFINE_list,
    tuple: flags.DEFINE_multi_string,
}


def _define(flag: Flag) -> None:
    basics: dict[str, Any] = {"name": flag.name, "default": flag.default, "help": flag.text}
    if isinstance(flag.kind, range):
        low, high = flag.kind.start, flag.kind.stop - 1
        flags.DEFINE_integer(**basics, lower_bound=low, upper_bound=high)
    elif isinstance(flag.kind, list):
        flags.DEFINE_enum(**basics, enum_values=flag.kind)
    else:
        short = {"short_name": "h"} if flag.name == "help" else {}
        _DEFINE[flag.kind](**basics, **short)


for _flag in FLAGS:
    _define(_flag)


def parse(argv: list[str]) -> list[str]:
    """The arguments that are no flags; without any arguments, the flags are those of the demo."""
    if argv[1:] and argv[1] in TASKS:
        argv = [argv[0], f"--task={argv[1]}", *argv[2:]]
    try:
        return flags.FLAGS(argv if argv[1:] else [*argv, *DEMO])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, NAMES, 1, 0.7)
        near = ["help"] if error.flagname.startswith("help") else near
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise ValueError(f"Unknown command line flag {error.flagname!r}{hint}") from None
    except flags.Error as error:
        line = str(error).splitlines()[0].removeprefix("ERROR:: ")
        start, no_bool, _ = line.partition(": ('Non-boolean argument to boolean flag', ")
        if no_bool:
            name = start.removeprefix("flag --").partition("=")[0]
            line = f"{start}: expected --{name} or --no{name}, without a value"
        raise ValueError(line) from None
    except UnicodeError:
        raise ValueError("flagfile: not a file of text") from None


def refuse_idle(argv: list[str]) -> None:
    """Raises where a flag does nothing: in this task, or, if it stands on the command line itself,
    beside the other flags. A flagfile may say more than is used: that is left out.
    """
    values = flags.FLAGS
    for flag in FLAGS:
        if flag.kind is str and values[flag.name].value == "":
            raise ValueError(
                f"{flag.name}: expected a value after --{flag.name}=; leave the flag out for its "
                "default"
            )
        if values[flag.name].present and values.task not in flag.tasks:
            raise ValueError(f"{flag.name}: --task={values.task} does nothing with it")
    idle = _idle_in_decode(values) if values.task == DECODE else {}
    if values.task == BENCH and values.op == "all":
        idle["cases"] = "--op=all has those of configs/bench_*.cfg"
    elif values.task == BENCH and values.workers == 1:
        idle["within"] = "only --workers end at a time"
    if values.coordinator is None:
        why = "only --coordinator=HOST:PORT has several processes"
        idle |= dict.fromkeys(("processes", "process"), why)
    elif not values.mesh:
        idle["coordinator"] = "only a --mesh has several processes"
    for arg in argv[1:]:
        name = arg.lstrip("-").partition("=")[0]
        if arg.startswith("-") and name in idle:
            raise ValueError(f"{name}: {idle[name]}")
    for name in idle:
        values[name].unparse()


def _idle_in_decode(values: flags.FlagValues) -> dict[str, str]:
    """The flags that another one leaves nothing to do, and why."""
    drawn = bool(values.random_prompts)
    others = "--random_prompts takes no other prompts; give one of the two"
    rules = (
        (values.checkpoint is not None, "--checkpoint is the model; give one of the two", "model"),
        (drawn, others, "prompt", "prompt_file"),
        (drawn, "--random_prompts are no messages", "chat"),
        (not values.json, "only --json shows them", "logprobs"),
        (not drawn, "only --random_prompts draws prompts of a length", "prompt_length"),
        (values.prompt and not drawn, "--prompt is given; give one of the two", "prompt_file"),
        (values.report is None, "its rows are those of a --report=FOLDER", "out", "commit"),
    )
    idle = {name: why for applies, why, *names in rules if applies for name in names}
    return idle | options.idle(said_options())


def said_options() -> dict[str, Any]:
    """The options of `lm.generate` that flags say."""
    values = flags.FLAGS
    return {name: values[name].value for name in options.NAMES if name in NAMES}


def help_text(program: str, task: str | None) -> str:
    """The flags of a task; of all tasks, those of one together, where it is None."""
    lines, defaults = [USAGE.format(program)], _defaults()
    if task is not None:
        lines = [f"{program} {task} takes these flags; {program} --help has all tasks.\n"]
    for tasks in dict.fromkeys(flag.tasks for flag in FLAGS if task in (None, *flag.tasks)):
        if task is None:
            lines.append("every task:" if tasks == TASKS else f"{', '.join(tasks)}:")
        for flag in FLAGS:
            default = flag.default if flag.default is not None else defaults.get(flag.name)
            lines += _help_of(flag, default) if flag.tasks == tasks else []
        lines += [""] if task is None else []
    return "\n".join(lines).rstrip() + "\n"


def _defaults() -> dict[str, Any]:
    """The defaults of the records that flags fill."""
    from pallas_lm import session, train

    records = (train.Recipe, session.Settings, options.Call, options.Options, options.Sampling)
    return {x.name: x.default for record in records for x in dataclasses.fields(record)}


def _help_of(flag: Flag, default: object) -> list[str]:
    shown = f"--[no]{flag.name}" if flag.kind is bool else f"--{flag.name}=.."
    shown = f"--{flag.name}={'|'.join(flag.kind)}" if isinstance(flag.kind, list) else shown
    unsaid = default not in (None, [], (), False) and "Default: " not in flag.text
    said = f" Default: {default}." if unsaid else ""
    wrapped = textwrap.wrap(flag.text + said, 92)
    shown = textwrap.fill(shown.replace("|", "| "), 96, subsequent_indent="      ")  # breaks at |
    shown = shown.replace("| ", "|").replace("\n", "\n  ")
    return [*f"  {shown}".splitlines(), *(f"      {line}" for line in wrapped)]
