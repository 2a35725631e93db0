"""The viewer: pages of HTML over a store, read with the key.

A page is a module with ``ROUTES`` and a template of its name; :mod:`page` does the rest. Model text
is text: every template escapes, Markdown makes paragraphs, lists and tables, and nothing makes a
link of what a span holds, or asks another host for an image.
"""

from typing import Final

from starlette.routing import Route

from lightning_otel.serve.viewer import (
    export,
    home,
    label,
    prompts,
    resources,
    rollouts,
    runs,
    selections,
    spans,
    sql,
    templating,
    trace,
    traces,
    transitions,
)

_PAGES: Final = (
    export, home, label, prompts, resources, rollouts, runs, selections, spans, sql, templating,
    trace, traces, transitions,
)  # fmt: skip
ROUTES: Final[list[Route]] = [route for page in _PAGES for route in page.ROUTES]
