"""Chat templates: the texts that transformers makes of them, their folders, and the sandbox."""

import json
import shutil

import pytest
import tokenizers

import pallas_lm as lm
from pallas_lm import chat, checkpoint
from pallas_lm.folder import Folder
from tests.lm.loops import refuses

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

HELLO = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello "},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Why <&>?"},
]
# Templates as published models have them, shortened. The texts are those that transformers 5.24's
# apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True) makes of them.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = """{%- if tools %}
    {{- 'tools: ' + tools | tojson }}
{%- endif %}
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- raise_exception('a system message first') }}
    {% endif %}
    {% if message.content == 'skip' %}{% continue %}{% endif %}
    {% generation %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endgeneration %}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{% endif %}
"""


def head(role):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def test_a_template_of_llama_3():
    template = chat.Template("", LLAMA3, {"bos_token": "<|begin_of_text|>"})
    assert template.text(HELLO) == (
        f"<|begin_of_text|>{head('system')}Be brief.<|eot_id|>{head('user')}Hello<|eot_id|>"
        f"{head('assistant')}Yes?<|eot_id|>{head('user')}Why <&>?<|eot_id|>{head('assistant')}"
    )


def test_a_template_with_all_that_transformers_gives_it():
    """Blocks leave no white space, loops may continue, generation is marked, JSON is no HTML."""
    template = chat.Template("here", CHATML, {})
    said = template.text([*HELLO, {"role": "user", "content": "skip"}])
    assert said == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nWhy <&>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.text(HELLO, enable_thinking=False).endswith("assistant\n<think></think>")
    tool = [{"name": "é<b>"}]
    assert template.text(HELLO, tools=tool).startswith('tools: [{"name": "é<b>"}]<|im')
    ended = template.text(HELLO, add_generation_prompt=False)
    assert ended.endswith("Why <&>?<|im_end|>\n")
    refuses("here: a system message first", template.text, HELLO[1:])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include 'config.json' %}",
        "{{ 1 // 0 }}",
        "{% for %}",
    ],
)
def test_a_template_of_a_stranger_stays_in_its_sandbox(source):
    template = chat.Template("here", source, {})
    with pytest.raises(ValueError, match="^here: ") as caught:
        template.text(HELLO)
    assert "\n" not in str(caught.value)


# ---- folders ------------------------------------------------------------------------------------

ROLES = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
)
TOKENS = {"bos_token": {"content": "^"}, "eos_token": "$", "pad_token": None}


def folder_of(path, files):
    shutil.copytree(checkpoint.EMBEDDED, path)
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": ROLES}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": TOKENS | {"chat_template": ROLES}},
        {"tokenizer_config.json": TOKENS | {"chat_template": NAMED}},
        {"tokenizer_config.json": TOKENS | {"chat_template": "no"}, "chat_template.jinja": ROLES},
    ],
    ids=["config", "by_name", "file"],
)
def test_a_conversation_is_a_prompt(tmp_path, files):
    model = lm.load(folder_of(tmp_path / "x", files))
    text = "^s: Be brief.\nu: Hello\n"
    messages = [HELLO[0], {"role": "user", "content": "Hello"}]
    assert bytes(model.chat(messages)).decode() == text
    made = lm.complete(model, [messages, text], max_new_tokens=4)
    assert made[0].text == made[1].text and made[0].prompt_tokens == list(text.encode())
    (alone,) = lm.complete(model, ["Hello"], max_new_tokens=1, chat=True)
    assert alone.prompt_tokens == list(b"^u: Hello\n")


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"tokenizer_config.json": {"chat_template": 3}},
         "tokenizer_config.json: chat_template: expected a text, or a list of texts by name with a "
         "'default' among them, got 3"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "with a 'default' among them"),
        ({"tokenizer_config.json": {"chat_template": "x", "bos_token": 3}},
         "tokenizer_config.json: bos_token: expected a token's text, got 3"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: not JSON"),
    ],
)  # fmt: skip
def test_a_broken_template_is_said(tmp_path, files, line):
    with pytest.raises(ValueError) as caught:
        lm.load(folder_of(tmp_path / "x", files))
    assert line in str(caught.value)


def test_a_template_outside_the_folder_is_not_read(tmp_path):
    (tmp_path / "secret").write_text("x")
    path = folder_of(tmp_path / "x", {})
    (path / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a link out of the folder"):
        chat.template_of(Folder(path))


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ("Hello", "messages: expected a list of messages"),
        ([], "messages: expected a list of messages"),
        ([{"role": "user"}], "messages: expected messages, "),
        (["Hello"], "messages: expected messages, "),
    ],
)
def test_messages_have_a_role_and_a_content(messages, line):
    with pytest.raises(ValueError, match=line):
        chat.Template("", ROLES, {}).text(messages)


def test_a_model_without_a_template_says_so():
    line = (
        "chat: the model's folder has no chat template, neither chat_template.jinja nor "
        "chat_template in tokenizer_config.json; give the prompt as a text"
    )
    refuses(line, lm.load().chat, HELLO)
    refuses(f"prompt 2: {line}", lm.generate, lm.load(), ["a", HELLO])


def test_special_tokens_are_put_once(tmp_path):
    """A tokenizer puts a start token before a text; a template has written its own."""
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "?": 2}, "?"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    built.add_special_tokens(["<s>"])
    source = "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %}"
    config = {"bos_token": "<s>", "chat_template": source}
    path = folder_of(tmp_path / "x", {"tokenizer_config.json": config})
    built.save(str(path / "tokenizer.json"))
    model = lm.load(path)
    assert model.tokenizer.encode("a a") == [0, 1, 1]
    assert model.chat([{"role": "user", "content": "a a"}]) == [0, 1, 1]
