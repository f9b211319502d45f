"""The demo: a Llama-family decoder, its checkpoints, the batch decode loop.

    from pallas_attn import lm

    model = lm.load()                                  # the small one inside the package
    texts = lm.generate(model, ["ROMEO:", "The sea"], max_new_tokens=40)

`lm.load(folder)` reads a checkpoint in Hugging Face's layout, which takes the extra `lm`.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from pallas_attn.errors import described
from pallas_attn.lm import checkpoint, decode, hf_config, machine, mesh, text
from pallas_attn.lm import mesh as lm_mesh
from pallas_attn.lm.config import Config, Params
from pallas_attn.lm.folder import Folder
from pallas_attn.lm.options import Options, check_dtype
from pallas_attn.lm.sampling import Sampling, at_least_1, is_int

__all__ = ["Model", "Options", "Sampling", "generate", "load", "mesh"]


class Model(NamedTuple):
    """A model as `load` returns it."""

    config: Config
    params: Params
    tokenizer: text.Tokenizer
    stop: tuple[int, ...]  # tokens that end a text
    dtype: str
    mesh: Mesh | None = None  # devices that its weights are split over


def load(
    folder: str | os.PathLike[str] = checkpoint.EMBEDDED,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Model:
    """Reads a model onto the default device, or over a mesh.

    Args:
      folder: config.json, weights, and tokenizer.json. Default: the model inside the package.
      dtype: of weights, cache and arithmetic: "bfloat16", "float16" or "float32". Default: bfloat16
        on a GPU, float32 elsewhere.
      mesh: a mesh with the axis "tp", over whose devices heads and columns are split.

    Raises:
      ValueError: a file is missing or not what it has to be; the message names it.
    """
    lm_mesh.check(mesh)
    dtype = machine.default_dtype() if dtype is None else dtype
    check_dtype(dtype)
    config, params = checkpoint.load(folder, dtype, mesh)
    stop = hf_config.stop_tokens(Folder(folder))
    return Model(config, params, text.tokenizer_of(folder), stop, dtype, mesh)


def generate(
    model: Model,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 200,
    sampling: Sampling = Sampling(),  # noqa: B008
    seed: int = 0,
    **options: Any,
) -> list[str]:
    """Continues prompts, side by side; the text after each, without the prompt.

    Args:
      model: from `load`.
      prompts: texts of any lengths.
      max_new_tokens: after each prompt, at most: a stop token of the model or the cache's capacity
        may end it before.
      sampling: the choice of tokens. Default: the likeliest. `Sampling(0.7, top_k=40)` draws.
      seed: of the tokens that are drawn. A sequence's tokens depend on its prompt's place in
        `prompts`, and on nothing else in the batch.
      **options: fields of `Options`: cache ("per_sequence", "stacked" or "paged"), slots (sequences
        at a time), capacity (rows of each), chunk (steps inside one jit), stop, draft="ngram",
        samples (answers to each prompt, which stand together in the result), ...

    Raises:
      ValueError: a prompt or an option cannot be; the message names it.
    """
    texts = _checked(model, prompts, max_new_tokens, seed)
    ids = [text.encoded(model.tokenizer, prompt, n) for n, prompt in enumerate(texts, 1)]
    longest = max(map(len, ids), default=0) + max_new_tokens
    samples = options.get("samples", 1)
    defaults: dict[str, Any] = {
        "slots": max(min(len(ids), 8), samples if is_int(samples) else 1, 1),
        "capacity": min(longest, model.config.positions),
        "dtype": model.dtype,
        "stop": model.stop,
        "mesh": model.mesh,
        "sampling": sampling,
    }
    asked = Options(**defaults | options)
    run = decode.Run(model.config, model.params, asked, ids, max_new_tokens, seed)
    with machine.matmul_precision(None, model.dtype):
        for _ in run:
            pass
    return [model.tokenizer.decode(sequence.tokens) for sequence in run.sequences]


def _checked(model: object, prompts: object, max_new_tokens: object, seed: object) -> list[str]:
    """The prompts; raises ValueError for arguments that would be another error later."""
    if isinstance(prompts, str):
        raise ValueError(f"prompts: expected a list of texts, got one; did you mean [{prompts!r}]?")
    if not isinstance(model, Model):
        raise ValueError(f"model: expected what lm.load returns, got {type(model).__name__}")
    texts = list(prompts) if isinstance(prompts, Iterable) else prompts
    if not isinstance(texts, list) or not all(isinstance(prompt, str) for prompt in texts):
        raise ValueError(f"prompts: expected a list of texts, got {described(texts)}")
    at_least_1("max_new_tokens", max_new_tokens)
    if not is_int(seed) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: expected an int of 64 bits, got {described(seed)}")
    return texts
