"""Docstrings and comments begin with a noun phrase or a verb, names say what they hold, parameters
have a type: tests/project/words.py says which words are refused.
"""

import pytest

from tests.project import words

MOST_BARE_ANY = 199  # parameters of the package

REFUSED = '''"""Of a module."""
# who reads this

given = 1  # as it was


def one(found):
    """What it does."""
'''
ACCEPTED = '''"""Module of something."""
# Reads this
# of several lines.

width = 1  # columns of a tile


def add(left):
    """Sum of what is given."""
'''


@pytest.mark.parametrize("folder", words.FOLDERS)
def test_no_refused_word(folder):
    lines = []
    for path in words.files():
        if path.is_relative_to(words.ROOT / folder):
            lines += words.refused(path)
    assert not lines, "\n".join(["", *lines])


def test_few_parameters_are_any():
    paths = [path for path in words.files() if path.is_relative_to(words.ROOT / "pallas_attn")]
    assert sum(len(words.bare_any(path)) for path in paths) <= MOST_BARE_ANY


def test_refused_words_are_seen(tmp_path):
    for name, text, count in (("refused.py", REFUSED, 7), ("accepted.py", ACCEPTED, 0)):
        (tmp_path / name).write_text(text)
        assert len(words.refused(tmp_path / name)) == count
    (tmp_path / "any.py").write_text("def f(a: Any, b: Any | None, c: int): pass\n")
    assert len(words.bare_any(tmp_path / "any.py")) == 1
