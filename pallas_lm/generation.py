"""Prompts to texts: all at once (`generate`, `complete`), or as tokens come (`stream`).

A call is compiled for its options, for the buckets of its prompts and of its cache (`buckets`), and
for numbers of prompts rounded up to powers of two: another call in the same buckets compiles
nothing.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from pallas_attn.errors import described
from pallas_lm import chat, checkpoint, hf_config, machine, text
from pallas_lm import mesh as lm_mesh
from pallas_lm.buckets import bucket, power_of_two
from pallas_lm.config import Config, Params
from pallas_lm.decode import Run
from pallas_lm.folder import Folder
from pallas_lm.options import Options, check_dtype, check_stop_ids
from pallas_lm.progress import Status
from pallas_lm.sampling import Sampling, at_least_1, is_int
from pallas_lm.texts import Piece, Texts, finish_reason

Prompt = str | Sequence[int] | Sequence[chat.Message]

_TOGETHER = 8  # sequences at a time by default
_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))
# Options that programs are compiled for, but for those that the model and `sampling` decide.
_COMPILED = tuple(
    field.name
    for field in dataclasses.fields(Options)
    if field.name not in ("sampling", "keep_logits")
)
# Names of options, which are those of run.py's flags; `sampling` holds three of them.
NAMES = ("max_new_tokens", "seed", *_SAMPLING, "sampling", "stop", "chat", "precision", *_COMPILED)


class Model(NamedTuple):
    """A model as `load` returns it."""

    config: Config
    params: Params
    tokenizer: text.Tokenizer
    stop: tuple[int, ...]  # tokens that end a text
    dtype: str
    mesh: Mesh | None = None  # devices that its weights are split over
    template: chat.Template | None = None  # writes conversations, if its folder has one

    def chat(self, messages: Sequence[chat.Message], **variables: object) -> list[int]:
        """The tokens of a conversation, by the chat template of the model's folder: a prompt for
        `generate`. The answer begins where they end.

        Args:
          messages: `{"role": "user", "content": "Hello"}` and the like.
          **variables: the template's own, such as `enable_thinking=False` or `tools=[..]`.

        Raises:
          ValueError: there is no template, or it does not take the messages.
        """
        return chat.Reader(self.tokenizer, self.template).conversation(messages, **variables)


class Completion(NamedTuple):
    """An answer to a prompt."""

    prompt: int  # its place in the list of prompts, from 0
    sample: int  # its place among the answers to this prompt, from 0
    text: str
    tokens: list[int]
    logprobs: list[float] | None  # one a token, if they were asked for
    finish_reason: str  # "stop" or "length"
    prompt_tokens: list[int]


def load(
    folder: str | os.PathLike[str] = checkpoint.EMBEDDED,
    dtype: str | None = None,
    mesh: Mesh | str | None = None,
) -> Model:
    """Reads a model onto the default device, or over a mesh.

    Args:
      folder: config.json, weights, and tokenizer.json; a chat template if there is one. Default:
        the model inside the package.
      dtype: of weights, cache and arithmetic: "bfloat16", "float16" or "float32". Default: bfloat16
        on a GPU, float32 elsewhere.
      mesh: devices over which heads and columns are split: a mesh with the axis "tp", or "tp:4".

    Raises:
      ValueError: a file is missing or not what it has to be; the message names it.
    """
    devices = lm_mesh.make(mesh, (lm_mesh.HEADS,)) if isinstance(mesh, str) else mesh
    lm_mesh.check(devices)
    dtype = machine.default_dtype() if dtype is None else dtype
    check_dtype(dtype)
    config, params = checkpoint.load(folder, dtype, devices)
    files, tokenizer = Folder(folder), text.tokenizer_of(folder)
    stop, template = hf_config.stop_tokens(files), chat.template_of(files)
    return Model(config, params, tokenizer, stop, dtype, devices, template)


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 200,
    seed: int = 0,
    **options: object,
) -> list[str]:
    """Continues prompts, side by side; returns the text after each, without the prompt.

    Args:
      model: from `load`.
      prompts: texts of any lengths, lists of token ids, or conversations (lists of messages), which
        the model's chat template makes texts.
      max_new_tokens: after each prompt, at most: a stop or the cache's capacity may end it before.
      seed: of the tokens that are drawn. A sequence's tokens depend on its prompt's place in
        `prompts`, and on nothing else in the batch.
      **options: by the names of the flags of `run.py`.

        - temperature, top_k, top_p: the choice of tokens; or `sampling=Sampling(..)`. Default: the
          likeliest.
        - stop: a text or several; the first that a sequence makes ends it, and is left out.
        - stop_ids: tokens that end a sequence, as its last ones. Default: the model's.
        - chat: whether texts are messages of a user, for the chat template. Default: False.
        - logprobs: whether `complete` and `stream` give log-probabilities. Default: False.
        - samples: answers to each prompt, which stand together in the result. Default: 1.
        - batch: sequences at a time. Default: as many as there are, eight at most, as a power of
          two.
        - capacity: rows of cache that each may take. Default: the bucket of the longest prompt and
          its new tokens.
        - cache, page_size, pages, chunk, prefill, prefill_chunk, draft, drafts, implementation,
          dtype, mesh: as in `Options`. The last two are by default the model's.
        - precision: of matmuls, as `jax.default_matmul_precision` has it. Default: "highest" with
          float32.

    Raises:
      ValueError: a prompt or an option is not valid; the message names it.
    """
    options |= {"max_new_tokens": max_new_tokens, "seed": seed}
    return [completion.text for completion in complete(model, prompts, **options)]


def complete(model: Model, prompts: Sequence[Prompt], **options: object) -> list[Completion]:
    """`generate`, with the same options: answers with their tokens, log-probabilities and the
    reason for which each ended.
    """
    job = _Job.of(model, prompts, options)
    if job is None:
        return []
    for _ in job.statuses():
        job.texts.watch()
    return [
        Completion(
            sequence.number // job.run.options.samples,
            sequence.sample,
            job.texts.whole(sequence),
            sequence.tokens,
            sequence.logprobs if job.run.options.logprobs else None,
            finish_reason(sequence) or "",
            sequence.prompt,
        )
        for sequence in job.run.sequences
    ]


def stream(model: Model, prompts: Sequence[Prompt], **options: object) -> Iterator[Piece]:
    """`generate`, with the same options: pieces of all sequences as they are decoded, those of a
    chunk of steps together (`chunk=1`: token by token).

    Arguments are checked at once. A stream that is closed, or left, stops after the chunk that the
    device is computing.
    """
    job = _Job.of(model, prompts, options)
    return iter(()) if job is None else job.pieces()


class _Job(NamedTuple):
    """A run and the texts that are read from it."""

    run: Run
    texts: Texts
    precision: str | None

    @classmethod
    def of(cls, model: Model, prompts: Sequence[Prompt], options: dict[str, Any]) -> "_Job | None":
        """The job of a call; None where there are no prompts."""
        _check_call(model, prompts, options)
        wanted, seed = options.pop("max_new_tokens", 200), options.pop("seed", 0)
        at_least_1("max_new_tokens", wanted)
        if not is_int(seed) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed: expected an int of 64 bits, got {described(seed)}")
        precision = options.pop("precision", None)
        if precision not in machine.PRECISIONS:
            raise ValueError(
                f"precision: expected one of {machine.PRECISIONS}, got {described(precision)}"
            )
        stop, conversation = _stop_strings(options.pop("stop", ())), options.pop("chat", False)
        if not isinstance(conversation, bool):
            raise ValueError(f"chat: expected True or False, got {described(conversation)}")
        reader = chat.Reader(model.tokenizer, model.template, conversation)
        ids = [reader.tokens(prompt, n) for n, prompt in enumerate(prompts, 1)]
        asked = _options(model, ids, wanted, options)
        if not ids:
            return None
        run = Run(model.config, model.params, asked, ids, wanted, seed)
        return cls(run, Texts(run, model.tokenizer, stop), precision)

    def pieces(self) -> Iterator[Piece]:
        """The pieces of all texts."""
        for _ in self.statuses():
            yield from self.texts.read()

    def statuses(self) -> Iterator[Status]:
        """The run. The precision of matmuls is the caller's between two of its chunks."""
        statuses = iter(self.run)
        try:
            while True:
                with machine.matmul_precision(self.precision, self.run.options.dtype):
                    status = next(statuses, None)
                if status is None:
                    return
                yield status
        finally:
            self.run.wait()


def _check_call(model: object, prompts: object, options: Mapping[str, Any]) -> None:
    """Raises ValueError for wrong arguments that would end in a less clear error later."""
    for name in options:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1, 0.7)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name}: no option{hint}; expected one of {', '.join(NAMES)}")
    if isinstance(prompts, str):
        raise ValueError(f"prompts: expected a list of texts, got one; did you mean [{prompts!r}]?")
    if not isinstance(model, Model):
        raise ValueError(f"model: expected what lm.load returns, got {type(model).__name__}")
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: expected a list of texts, got {described(prompts)}")


def _stop_strings(value: object) -> tuple[str, ...]:
    stop = (value,) if isinstance(value, str) else value
    if not isinstance(stop, (list, tuple)) or not all(isinstance(x, str) and x for x in stop):
        raise ValueError(
            "stop: expected a text or a list of texts, none of them empty, got "
            f"{described(value)}; tokens that end a sequence are stop_ids"
        )
    return tuple(stop)


def _options(
    model: Model, prompts: Sequence[Sequence[int]], wanted: int, asked: dict[str, Any]
) -> Options:
    """The options of a run: those asked for, else what fits the prompts, in buckets."""
    drawn = {name: asked.pop(name) for name in _SAMPLING if name in asked}
    if drawn and "sampling" in asked:
        raise ValueError(f"sampling: expected None beside {', '.join(drawn)}, which it holds")
    if drawn:
        asked["sampling"] = Sampling(**drawn)
    samples, longest = asked.get("samples", 1), max(map(len, prompts), default=1) + wanted
    samples = samples if is_int(samples) else 1
    count = max(min(len(prompts) * samples, _TOGETHER), samples, 1)
    stop_ids = asked.get("stop_ids", model.stop)
    if "stop_ids" in asked:
        check_stop_ids(stop_ids, model.config.vocab)
    defaults: dict[str, Any] = {
        "batch": power_of_two(count),
        "capacity": min(bucket(longest), model.config.positions),
        "dtype": model.dtype,
        "mesh": model.mesh,
    }
    stop_ids = tuple(stop_ids) if isinstance(stop_ids, list) else stop_ids
    return Options(**defaults | asked | {"stop_ids": stop_ids})
