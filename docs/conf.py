"""Configuration of the documents, which ``python -m tests.site FOLDER`` builds.

Pages are Markdown (MyST); the API is read from docstrings. A page outside the index, a broken link
and a docstring that does not parse stop the build.
"""

import inspect
from pydoc import locate

from docutils import nodes
from pygments.lexers.python import PythonLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

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


class Api(SphinxDirective):
    """Document the public names in the body of a block."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return what autodoc makes of each name."""
        lines = [
            f".. auto{_kind_of(name)}:: lightning_otel.{name}"
            for name in " ".join(self.content).split()
        ]
        source = "\n".join(["```{eval-rst}", *lines, "```"])
        return self.parse_text_to_nodes(source)


def _kind_of(name: str) -> str:
    found = locate(f"lightning_otel.{name}")
    if not inspect.isclass(found):
        return "function"
    return "exception" if issubclass(found, Exception) else "class"


def setup(app: Sphinx) -> None:
    """Register the directive, and the colours of blocks that are a user's tests."""
    app.add_directive("api", Api)
    app.add_lexer("pytest", PythonLexer)
