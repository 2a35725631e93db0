"""How the documents are built: ``python -m tests.site FOLDER``, which needs the extra ``docs``.

Pages are Markdown (MyST); the API is read from docstrings. A page that
nothing leads to, a link that leads nowhere and a docstring that does not parse stop the build.
"""

from pygments.lexers.python import PythonLexer
from sphinx.application import Sphinx

import lightning_otel

project = "lightning-otel"
author = "The lightning-otel maintainers"
release = version = lightning_otel.__version__
html_title = f"lightning-otel {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
# Backticks in docstrings hold code, once or twice.
default_role = "code"
# What a transform drops is not what the reader asked for: `--flag` stays two dashes.
smartquotes = False

add_module_names = False
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = html_show_copyright = False
# No page asks anybody for anything: the theme's own fonts are the reader's.
html_theme_options = {"top_of_page_buttons": []}


def setup(app: Sphinx) -> None:
    """Colour blocks that are a user's tests as what they are."""
    app.add_lexer("pytest", PythonLexer)
