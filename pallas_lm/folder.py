"""The folder of a checkpoint, which a stranger may have written: its files, and nothing outside."""

import json
import os
import pathlib
import reprlib
import stat
from typing import Any

_LARGEST = 2**26  # bytes; the index of the largest published models takes a sixth of it
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}

_short = reprlib.Repr(maxstring=80, maxother=80, maxlong=40, maxlevel=2, maxdict=3, maxlist=3)


def shown(value: object) -> str:
    """A value from a file in an error message: one line, and a short one."""
    text = _short.repr(value)
    return text if text.isprintable() else ascii(text)


def _read(path: pathlib.Path) -> bytes:
    """The bytes of a file that holds no weights."""
    size = path.stat().st_size
    if size > _LARGEST:
        raise ValueError(f"{path}: expected at most {_LARGEST} bytes, got {size}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


class Folder:
    """A checkpoint's folder. Every file is looked at before it is opened."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self._roots = [self.path.resolve()]
        if self._roots[0].parent.name == "snapshots":
            # A download cache of Hugging Face: the files of a snapshot are links to blobs/.
            self._roots.append(self._roots[0].parent.parent / "blobs")

    @classmethod
    def of(cls, argument: str, path: str | os.PathLike[str]) -> "Folder":
        """A folder that has to be there already. `argument`: names it in messages."""
        try:
            why = "" if stat.S_ISDIR(os.stat(path).st_mode) else "no folder"
        except (OSError, ValueError, TypeError) as error:
            why = getattr(error, "strerror", None) or str(error)
        if why:
            raise ValueError(
                f"{argument}: expected a folder with config.json, weights and tokenizer.json, got "
                f"{shown(path)} ({why}); a model that a hub names is downloaded first: "
                "huggingface_hub.snapshot_download(name) returns its folder"
            )
        return cls(path)

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name, of whatever kind."""
        return os.path.lexists(self.path / name)

    def file(self, name: str) -> pathlib.Path:
        """The path of a regular file in the folder. A ValueError says what else it is."""
        path = self.path / name
        try:
            mode, real = os.stat(path).st_mode, path.resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            why = f"a link that leads nowhere: {why}" if path.is_symlink() else why
            raise ValueError(f"{path}: {why}") from None
        if not any(real.is_relative_to(root) for root in self._roots):
            raise ValueError(f"{path}: is a link out of the folder, to {real}")
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "a device")
            raise ValueError(f"{path}: expected a file, got {kind}")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path}: Permission denied")
        return path

    def text(self, name: str) -> str:
        """A file of UTF-8."""
        path = self.file(name)
        try:
            return _read(path).decode("utf-8")
        except UnicodeError as error:
            raise ValueError(f"{path}: {error}") from None

    def json(self, name: str) -> dict[str, Any]:
        """A file that has to hold one JSON object."""
        path = self.file(name)
        data = _read(path)
        try:
            content = json.loads(data.decode("utf-8"))
        except RecursionError:
            raise ValueError(f"{path}: not JSON of any use: it is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}: expected a JSON object, got {shown(content)}")
        return content
