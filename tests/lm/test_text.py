"""Tokenizers, and text as its tokens come."""

import pytest
import tokenizers

from pallas_lm import text


def test_bytes_go_both_ways():
    line = "héllo €\n"
    assert text.Bytes().decode(text.Bytes().encode(line)) == line


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stream_gives_whole_characters_only(size):
    line = "aé€😀 end"
    ids = text.Bytes().encode(line)
    stream = text.Stream(text.Bytes())
    pieces = [stream.add(ids[n : n + size]) for n in range(0, len(ids), size)]
    assert "".join(pieces) == line and not any("\ufffd" in piece for piece in pieces)
    cut = text.Stream(text.Bytes())
    assert cut.add(ids[:2]) == ""
    assert cut.add([], last=True) == "a\ufffd"


def test_a_tokenizer_json_is_read_by_its_package(tmp_path):
    words = {"<s>": 0, "the": 1, "sea": 2, "was": 3, "[UNK]": 4}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    built.add_special_tokens(["<s>"])
    built.enable_padding(length=500)  # for batches of others: not for a prompt
    built.enable_truncation(2)
    built.save(str(tmp_path / "tokenizer.json"))
    tokenizer = text.tokenizer_of(tmp_path)
    assert tokenizer.encode("the sea was") == [0, 1, 2, 3]
    assert tokenizer.decode([0, 1, 2]) == "the sea"
    stream = text.Stream(tokenizer)
    assert "".join(stream.add([token]) for token in (1, 2, 3)) == "the sea was"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokenizer.json: "):
        text.tokenizer_of(tmp_path)


def test_a_prompt_that_is_no_text_is_named(tmp_path):
    """A shell hands over bytes that are no UTF-8; a tokenizer of bytes takes them."""
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    built.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="^prompt 3: not UTF-8 at character 2$"):
        text.encoded(text.tokenizer_of(tmp_path), "a\udcff", 3)
    assert text.encoded(text.Bytes(), "a\udcff", 3) == [97, 255]


def test_numbers_are_the_tokens_of_random_weights():
    assert text.Numbers().encode("3 1 4") == [3, 1, 4]
    line = "^prompt 1: without a tokenizer a prompt is token numbers, got 'one'"
    with pytest.raises(ValueError, match=line):
        text.encoded(text.Numbers(), "one", 1)


def test_no_tokenizer_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json: not there; without it prompts cannot"):
        text.tokenizer_of(tmp_path)
