"""Words that are refused in docstrings, comments and names, with the places where they stand.

`python -m tests.project.words [FILE ...]` prints them, for all Python files of the project or for
some, with the number of parameters whose type is a bare `Any`.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("pallas_attn", "pallas_lm", "benchmarks", "tests", "examples")
# A docstring or a comment begins with a noun phrase or a verb.
BEGINNINGS = ("Of", "What", "As", "Those", "That", "Who", "Whose", "Where", "So")
NAMES = ("found", "given", "one")  # a name says what it holds, a function what it does

_BEGINS = re.compile(rf"\W*({'|'.join(BEGINNINGS)})\b", re.IGNORECASE)
_PLACE = tuple[int, str]  # line number, what stands there


def files() -> list[pathlib.Path]:
    """Every Python file of the project."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def refused(path: pathlib.Path) -> list[str]:
    """A line for each refused word in the file: path, line number and text."""
    text = path.read_text()
    tree = ast.parse(text, str(path))
    places = [*_docstrings(tree), *_comments(text), *_names(tree)]
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [f"{name}:{line}: {what}" for line, what in sorted(places)]


def _docstrings(tree: ast.Module) -> Iterator[_PLACE]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and _BEGINS.match(text):
            yield getattr(node, "lineno", 1), f'"""{text.splitlines()[0]}'


def _comments(text: str) -> Iterator[_PLACE]:
    """A comment on lines of its own begins on the first of them."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = not token.line[:column].strip()
            continues = alone and last == line - 1
            last = line if alone else -1
            if not continues and _BEGINS.match(token.string.lstrip("#")):
                yield line, token.string


def _names(tree: ast.Module) -> Iterator[_PLACE]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield node.lineno, f"{node.id} = .."
        elif isinstance(node, ast.arg) and node.arg in NAMES:
            yield node.lineno, f"argument {node.arg}"
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in NAMES:
            yield node.lineno, f"def {node.name}"


def bare_any(path: pathlib.Path) -> list[str]:
    """The parameters whose annotation is `Any` and nothing more."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg)]
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [
        f"{name}:{node.lineno}: {node.arg}: Any"
        for node in nodes
        if isinstance(node.annotation, ast.Name) and node.annotation.id == "Any"
    ]


def main(names: list[str]) -> None:
    """Prints the refused words of the named files, or of all."""
    paths = [pathlib.Path(name).resolve() for name in names] or files()
    lines = [line for path in paths for line in refused(path)]
    count = sum(len(bare_any(path)) for path in paths)
    lines += [f"{len(lines)} refused words, {count} parameters of bare Any"]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
