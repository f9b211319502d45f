"""How Sphinx makes the site: `python -m sphinx -W docs site`."""

import pathlib
import re

project = "pallas_attn"
author = "The pallas_attn authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
toc_object_entries = True
toc_object_entries_show_parents = "hide"
default_role = "code"  # `x` in a docstring is code
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
html_theme = "furo"
html_title = "pallas_attn"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"

_ROOT = pathlib.Path(__file__).parent.parent
_OUTSIDE = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")  # pages that lie in the root
_OF_THE_ROOT = {name.lower(): f"{name}.md" for name in _OUTSIDE}


def _read(_app, page, text):
    """Puts README.md and others in the place of their pages, with links of the site."""
    if page not in _OF_THE_ROOT:
        return
    source = (_ROOT / _OF_THE_ROOT[page]).read_text("utf-8")

    def link(match):
        label, target = match.groups()
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        if target.startswith("examples"):
            return f"[{label}](examples.md)"
        if target in _OF_THE_ROOT.values():
            return f"[{label}]({target.lower()})"
        return match[0] if target.startswith("http") else f"`{label}`"

    text[0] = re.sub(r"\[([^\]]*)\]\(([^)]*)\)", link, source)


def setup(app):
    app.connect("source-read", _read)
