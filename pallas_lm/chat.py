"""Chat templates: a conversation as the text that a model was trained on.

A template is a Jinja program in the checkpoint's folder, which a stranger may have written. It runs
in Jinja's sandbox, with the extensions and functions that transformers gives it.
"""

import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_attn.errors import described
from pallas_lm.folder import Folder, shown
from pallas_lm.text import Tokenizer, encoded, ids_of

Message = Mapping[str, Any]  # "role" and "content", and others that a template reads

_CONFIG, _OWN_FILE = "tokenizer_config.json", "chat_template.jinja"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")  # fmt: skip


class Template:
    """A chat template and the special tokens that it may write. It is compiled when it is used."""

    def __init__(self, where: str, source: str, tokens: Mapping[str, str]):
        self._where, self._source, self._tokens = where, source, dict(tokens)

    def text(self, messages: Sequence[Message], **variables: object) -> str:
        """The conversation as a text that ends where the answer begins. `variables` are the
        template's own, such as `tools` or `enable_thinking`.
        """
        check(messages)
        names: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        try:
            template = _compiled(self._source)
            return template.render(**self._tokens | names | variables, messages=list(messages))
        except ImportError:
            raise ValueError(
                f"{self._where}: a chat template takes the package jinja2: "
                "pip install 'pallas_attn[lm]'"
            ) from None
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{self._where}: {shown(str(error))[1:-1]}") from None


def check(messages: Sequence[Message]) -> None:
    """ValueError for anything but messages with a role and a content."""
    wanted = 'messages, {"role": "user", "content": ".."}'
    fits = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not fits or not messages:
        raise ValueError(f"messages: expected a list of {wanted}, got {described(messages)}")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages: expected {wanted}, got {described(message)}")


class Reader(NamedTuple):
    """Turns prompts (texts, conversations or token ids) into token ids."""

    tokenizer: Tokenizer
    template: Template | None
    messages: bool = False  # whether texts are messages of a user

    def tokens(self, prompt: object, number: int) -> list[int]:
        """The tokens of prompt `number`, counted from 1."""
        if isinstance(prompt, str) and not self.messages:
            return encoded(self.tokenizer, prompt, number)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        held = list(prompt) if isinstance(prompt, Iterator) else prompt
        if (ids := ids_of(held)) is not None:
            return ids
        if not isinstance(held, Sequence) or not all(isinstance(x, Mapping) for x in held):
            raise ValueError(
                f"prompt {number}: expected a text, a list of token ids or a list of messages, got "
                f"{described(prompt)}"
            )
        try:
            return self.conversation(held)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None

    def conversation(self, messages: Sequence[Message], **variables: object) -> list[int]:
        """The tokens of a conversation. The template writes special tokens itself."""
        if self.template is None:
            raise ValueError(
                f"chat: the model's folder has no chat template, neither {_OWN_FILE} nor "
                f"chat_template in {_CONFIG}; give the prompt as a text"
            )
        text = self.template.text(messages, **variables)
        return self.tokenizer.encode(text, special=False)


def template_of(folder: Folder) -> Template | None:
    """The chat template of a checkpoint's folder, None where it has none."""
    values = folder.json(_CONFIG) if folder.has(_CONFIG) else {}
    where, source = str(folder.path / _CONFIG), values.get("chat_template")
    if folder.has(_OWN_FILE):
        where, source = str(folder.path / _OWN_FILE), folder.text(_OWN_FILE)
    if isinstance(source, list):  # several by name
        named = [x for x in source if isinstance(x, dict) and x.get("name") == "default"]
        source = named[0].get("template") if named else source
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(
            f"{where}: chat_template: expected a text, or a list of texts by name with a "
            f"'default' among them, got {shown(source)}"
        )
    tokens = {name: values[name] for name in _TOKENS if values.get(name) is not None}
    for name, token in tokens.items():
        tokens[name] = token.get("content") if isinstance(token, dict) else token
        if not isinstance(tokens[name], str):
            raise ValueError(f"{where}: {name}: expected a token's text, got {shown(token)}")
    return Template(where, source, tokens)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """The program of a template, in the environment that transformers makes for it."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} .. {% endgeneration %}: marks text of the model, for training."""

        tags = {"generation"}

        def parse(self, parser: "jinja2.parser.Parser") -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(message: str) -> str:
    raise ValueError(message)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
