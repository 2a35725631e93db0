"""Addresses of pages, whatever the ids in them are made of."""

from typing import Final, NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request

from lightning_otel.views.trace import Row

STATE: Final = ("tab", "span", "closed", "others", "q")
MOST_CLOSED: Final = 200
"""Rows below which nothing is shown, in one address."""


def page_path(noun: str, *parts: object) -> str:
    """The path of a page, such as ``/rollouts/r1``, whose parts after the noun are ids."""
    quoted = (quote(str(part).encode("utf-8", "replace"), safe="") for part in parts)
    return "/" + "/".join([noun, *quoted])


def resource_path(name: str, page: str) -> str:
    """Return the path of a page about a resource: ``diff``, ``edit``, ``uses``, ``change``.

    A name may be ``planner/diff``, but none holds an ``@``: what follows one is never its part.
    """
    return f"{page_path('resources', name)}@{page}"


class TraceLinks(NamedTuple):
    """Addresses of a trace's pages that keep its tab, its selected span and what is folded."""

    path: str
    state: dict[str, str]

    @classmethod
    def of(cls, request: Request) -> "TraceLinks":
        """Addresses within the trace that was asked for."""
        query = request.query_params
        state = {name: query[name] for name in STATE if query.get(name)}
        return cls(page_path("traces", request.path_params["trace_id"]), state)

    @classmethod
    def to(cls, trace_id: str) -> "TraceLinks":
        """Addresses within another trace."""
        return cls(page_path("traces", trace_id), {})

    def __call__(self, **changes: object) -> str:
        """The page with some values changed; None takes one out."""
        state = {name: text for name, text in self.state.items() if name not in changes}
        state |= {name: str(text) for name, text in changes.items() if text is not None}
        return f"{self.path}?{urlencode(state)}" if state else self.path or "?"

    @property
    def here(self) -> "TraceLinks":
        """The same relative to the page: shorter, as there may be thousands."""
        return self._replace(path="")

    def rows(self, first: int) -> str:
        """The part with the rows from a position on."""
        # Which row is selected by then, the page knows.
        state = {name: text for name, text in self.state.items() if name != "span"}
        return f"{self.path}/rows?{urlencode({**state, 'first': first})}"

    def span(self, span_id: str, below: str = "", /, **query: object) -> str:
        """The page of one span, or a part of it."""
        at = f"{self.path}/spans/{quote(span_id, safe='')}{below}"
        return f"{at}?{urlencode(query)}" if query else at

    def toggle(self, row: Row, *, is_closed: bool) -> str:
        """The page with what is below a row shown, or not."""
        closed = [span_id for span_id in self.state.get("closed", "").split(",") if span_id]
        remaining = [span_id for span_id in closed if span_id != row.span.span_id]
        closed = remaining if is_closed else [*remaining, row.span.span_id][-MOST_CLOSED:]
        return self(closed=",".join(closed) or None)
