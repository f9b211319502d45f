"""How Sphinx makes the site: `python -m sphinx -W docs site`."""

project = "pallas_attn"
author = "The pallas_attn authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
toc_object_entries = False
highlight_language = "none"
default_role = "code"  # `x` in a docstring is code
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
html_theme = "alabaster"
html_theme_options = {
    "description": "Attention kernels for JAX",
    "page_width": "1120px",
    "body_max_width": "none",
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
