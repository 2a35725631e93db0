"""Addresses within a trace: which tab, which span, what is folded."""

from typing import Final
from urllib.parse import quote, urlencode

from starlette.requests import Request

from lightning_otel.serve.viewer.tree import Row

STATE: Final = ("tab", "span", "closed", "others")
MOST_CLOSED: Final = 200
"""Rows below which nothing is shown, in one address."""


class Links:
    """Addresses of a trace's pages that keep what else stands in the address."""

    def __init__(self, request: Request) -> None:
        self.path = f"/traces/{quote(request.path_params['trace_id'], safe='')}"
        given = request.query_params
        self._state = {name: given[name] for name in STATE if given.get(name)}

    @classmethod
    def to(cls, trace_id: str) -> "Links":
        """Addresses within another trace, for pages that are not its own."""
        found = cls.__new__(cls)
        found.path, found._state = f"/traces/{quote(trace_id, safe='')}", {}
        return found

    def __call__(self, **changes: object) -> str:
        """The page with some values changed; None takes one out."""
        state = {name: text for name, text in self._state.items() if name not in changes}
        state |= {name: str(text) for name, text in changes.items() if text is not None}
        return f"{self.path}?{urlencode(state)}" if state else self.path

    def rows(self, first: int) -> str:
        """The part with the rows from a position on."""
        # Which row is selected by then, the page knows.
        state = {name: text for name, text in self._state.items() if name != "span"}
        return f"{self.path}/rows?{urlencode({**state, 'first': first})}"

    def span(self, span_id: str, below: str = "", /, **query: object) -> str:
        """The page of one span, or a part of it."""
        at = f"{self.path}/spans/{quote(span_id, safe='')}{below}"
        return f"{at}?{urlencode(query)}" if query else at

    def toggle(self, row: Row, *, is_closed: bool) -> str:
        """The page with what is below a row shown, or not."""
        closed = [each for each in self._state.get("closed", "").split(",") if each]
        kept = [each for each in closed if each != row.span_id]
        closed = kept if is_closed else [*kept, row.span_id][-MOST_CLOSED:]
        return self(closed=",".join(closed) or None)
