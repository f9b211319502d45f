"""Prompts to texts: all at once (`generate`, `complete`), or as tokens come (`stream`).

A call is compiled for its options, for the buckets of its prompts and of its cache (`buckets`), and
for numbers of prompts rounded up to powers of two: another call in the same buckets compiles
nothing.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from pallas_attn.errors import described
from pallas_lm import chat, checkpoint, hf_config, machine, text
from pallas_lm import mesh as lm_mesh
from pallas_lm.buckets import bucket, power_of_two
from pallas_lm.config import Config, Params
from pallas_lm.decode import Run
from pallas_lm.folder import Folder
from pallas_lm.options import Call, Options, asked, check_stop_ids, dtype_name
from pallas_lm.progress import Status
from pallas_lm.sampling import is_int
from pallas_lm.texts import Piece, Texts, finish_reason

Prompt = str | Sequence[int] | Sequence[chat.Message]

_TOGETHER = 8  # sequences at a time by default


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
    dtype: DTypeLike | None = None,
    mesh: Mesh | str | None = None,
) -> Model:
    """Reads a model onto the default device, or over a mesh.

    Args:
      folder: config.json, weights, and tokenizer.json; a chat template if there is one. Nothing is
        downloaded. Default: the model inside the package.
      dtype: of weights, cache and arithmetic: "bfloat16", "float16" or "float32", or jax's names
        of them. Default: bfloat16 on a GPU, float32 elsewhere.
      mesh: devices over which heads and columns are split: a mesh with the axis "tp", or "tp:4".

    Raises:
      ValueError: a file is missing or not what it has to be; the message names it.
    """
    machine.must_be_host()
    devices = lm_mesh.of(mesh)
    dtype = dtype_name(machine.default_dtype() if dtype is None else dtype)
    model, weights = opened("folder", folder, dtype, devices)
    return model._replace(params=weights(dtype, devices))


def opened(
    argument: str, folder: str | os.PathLike[str], dtype: str, mesh: Mesh | None
) -> tuple[Model, checkpoint.Loader]:
    """A model without its weights, gigabytes that load when all else has been checked, and what
    loads them. `argument` names the folder in messages.
    """
    files = Folder.of(argument, folder)
    config, tokenizer = checkpoint.config_of(folder), text.tokenizer_of(folder)
    stop, template = hf_config.stop_tokens(files), chat.template_of(files)
    weights = checkpoint.weights_of(folder, config)
    return Model(config, {}, tokenizer, stop, dtype, mesh, template), weights


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
      seed: of the tokens that are drawn, from 0 to 2**32 - 1. A sequence's tokens depend on its
        prompt's place in `prompts`, and on nothing else in the batch.
      **options: by the names of the flags of `run.py`, and checked as those are. None stands for
        the default.

        - temperature, top_k, top_p: the choice of tokens, for all prompts or a list with one for
          each; or `sampling=Sampling(..)`. Default: the likeliest.
        - stop: a text or several; the first that a sequence makes ends it, and is left out.
        - stop_ids: tokens that end a sequence, as its last ones. Default: the model's.
        - chat: whether texts are messages of a user, for the chat template. Default: False.
        - logprobs: whether `complete` and `stream` give log-probabilities; `generate` takes none.
          Default: False.
        - samples: answers to each prompt, which stand together in the result. Default: 1.
        - batch: sequences at a time. Default: as many as there are, eight at most, as a power of
          two.
        - capacity: rows of cache that each may take. Default: the bucket of the longest prompt and
          its new tokens.
        - cache, page_size, pages, chunk, prefill, prefill_chunk, draft, drafts, implementation:
          as in `Options`.
        - dtype: of the cache. Default: the model's.
        - mesh: that of the model, where its weights lie; no other.
        - precision: of matmuls, as `jax.default_matmul_precision` has it. Default: "highest" with
          float32.

    Raises:
      ValueError: a prompt or an option is not valid; the message names it.
    """
    options |= {"max_new_tokens": max_new_tokens, "seed": seed}
    if options.get("logprobs") is True:
        raise ValueError(
            "logprobs: expected False: lm.generate returns texts alone, got True; take lm.complete"
        )
    return [completion.text for completion in complete(model, prompts, **options)]


def complete(model: Model, prompts: Sequence[Prompt], **options: object) -> list[Completion]:
    """`generate`, with the same options: answers with their tokens, log-probabilities and the
    reason for which each ended.
    """
    job = _Job.of(model, prompts, options)
    if job is None:
        return []
    for _ in job.pieces():
        pass
    return [
        Completion(
            sequence.number // job.run.options.samples,
            sequence.sample,
            job.texts.whole[sequence],
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
        call, chosen = asked(options)
        _check_call(model, prompts)
        reader = chat.Reader(model.tokenizer, model.template, call.chat)
        ids = [reader.tokens(prompt, n) for n, prompt in enumerate(prompts, 1)]
        how = options_of(model, ids, call, chosen)
        if not ids:
            return None
        run = Run(model.config, model.params, how, ids, call.max_new_tokens, call.seed)
        return cls(run, Texts(run, model.tokenizer, call.stop), call.precision)

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


def _check_call(model: object, prompts: object) -> None:
    """Raises ValueError for wrong arguments that would end in a less clear error later."""
    if isinstance(prompts, str):
        raise ValueError(f"prompts: expected a list of texts, got one; did you mean [{prompts!r}]?")
    if not isinstance(model, Model):
        raise ValueError(f"model: expected what lm.load returns, got {type(model).__name__}")
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise ValueError(f"prompts: expected a list of texts, got {described(prompts)}")
    machine.must_be_host(model.params)
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(model.params)):
        raise ValueError(
            "model: expected arrays in its params, got deleted ones, which were donated to a "
            "program; load it again, and donate a copy"
        )


def options_of(
    model: Model, prompts: Sequence[Sequence[int]], call: Call, chosen: dict[str, Any]
) -> Options:
    """The options of a run: those that are chosen, else what fits the prompts, in buckets."""
    longest = max(map(len, prompts), default=1) + call.max_new_tokens
    samples = chosen.get("samples", 1)
    samples = samples if is_int(samples) else 1
    count = max(min(len(prompts) * samples, _TOGETHER), samples, 1)
    defaults: dict[str, Any] = {
        "batch": power_of_two(count),
        "capacity": min(bucket(longest), model.config.positions),
        "dtype": model.dtype,
        "mesh": model.mesh,
        "stop_ids": model.stop,
    }
    options = Options(**defaults | chosen)
    check_stop_ids(chosen.get("stop_ids", ()), model.config.vocab)
    if options.mesh != model.mesh:
        raise ValueError(
            f"mesh: expected that of the model, {model.mesh}, got {options.mesh}; its weights lie "
            "where lm.load(.., mesh=..) puts them"
        )
    return options
