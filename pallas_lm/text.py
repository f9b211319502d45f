"""Text to tokens and back, whole and as it comes."""

import operator
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from pallas_lm.folder import Folder, shown
from pallas_lm.hf_config import KEYS


class Tokenizer(Protocol):
    """The interface of a tokenizer. `special`: whether tokens are put around the text, as the start
    token of many models; a chat template writes them itself.
    """

    def encode(self, text: str, special: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """A token a byte of UTF-8."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        del special
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i & 255 for i in ids).decode("utf-8", "replace")


class Numbers:
    """Tokens as numbers, for random weights, whose tokens stand for no text."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        del special
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"without a tokenizer a prompt is token numbers, got {shown(text)}"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{i} " for i in ids)


class _HuggingFace:
    """A tokenizer.json, by the extra `tokenizers`."""

    def __init__(self, path: pathlib.Path):
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                f"{path}: reading it takes the package tokenizers: pip install 'pallas_attn[lm]'"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # the package raises nothing narrower, and Rust's panics
            raise ValueError(f"{path}: {shown(str(error))[1:-1]}") from None

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


def ids_of(value: object) -> list[int] | None:
    """Token ids of a list, or of an array of NumPy or jax; None of anything else."""
    if isinstance(value, (np.ndarray, jax.Array)):
        whole = value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
        return np.asarray(value).tolist() if whole else None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return None
    if any(isinstance(x, bool) for x in value):
        return None
    try:
        return [operator.index(x) for x in value]  # jax's integers are no ints
    except TypeError:
        return None


def encoded(tokenizer: Tokenizer, text: str, number: int) -> list[int]:
    """The tokens of prompt `number`, counted from 1."""
    try:
        if not isinstance(tokenizer, Bytes):
            text.encode("utf-8")
        return tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt {number}: not UTF-8 at character {error.start + 1}") from None
    except Exception as error:  # a tokenizer may raise anything
        raise ValueError(f"prompt {number}: {error}") from None


def tokenizer_of(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint's folder."""
    files, name = Folder(folder), "tokenizer.json"
    if files.has(name):
        return _HuggingFace(files.file(name))
    kind = files.json("config.json").get("tokenizer")
    if kind is None:
        raise ValueError(f"{files.path / name}: not there; without it prompts cannot become tokens")
    if not KEYS["tokenizer"].holds(kind):
        wanted = KEYS["tokenizer"].wanted
        raise ValueError(
            f"{files.path / 'config.json'}: tokenizer: expected {wanted}, got {shown(kind)}"
        )
    return Bytes()


class Stream:
    """Text of one sequence as its tokens come: a token may end within a character, and a tokenizer
    may treat the start of a text in its own way, so that pieces cannot be decoded alone.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoding starts here
        self._read = 0  # the text before this was returned

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens finish; with `last`, also what is left unfinished."""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        now = self._tokenizer.decode(self._ids[self._start :])
        if now.endswith("\ufffd") and not last:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]
