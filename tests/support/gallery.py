"""Pictures of docs/gallery.md, each made by the program below it.

`python -m tests.support.gallery` writes them anew; a test compares them.
"""

import contextlib
import io
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
_PICTURE = re.compile(r"^!\[.*?\]\((pictures/\w+\.svg)\)\n\n```python\n(.*?)^```", re.S | re.M)


def pictures() -> dict[pathlib.Path, str]:
    """{file: SVG} of every picture of the page."""
    made = {}
    for name, program in _PICTURE.findall((ROOT / "docs" / "gallery.md").read_text("utf-8")):
        scope: dict = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(program, name, "exec"), scope)
        made[ROOT / "docs" / name] = scope["picture"].svg()
    return made


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg, "utf-8")
