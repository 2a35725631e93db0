"""Pages: read in a thread, rendered there, refused with a reason. The address is the state."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date
from functools import partial, wraps
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, StoreMissingError
from lightning_otel.serve.heap import trim_heap
from lightning_otel.serve.responses import RefusalError, busy
from lightning_otel.serve.session import placed
from lightning_otel.serve.viewer.templating import render
from lightning_otel.store.source import at_moment
from lightning_otel.store.sql import ROLLOUT
from lightning_otel.types.instants import FORMS, instant_ns
from lightning_otel.types.values import suggest_name
from lightning_otel.views.table import Filter, View

T = TypeVar("T")

ROWS: Final = 50
"""Rows of a list on a page."""
_AT_ONCE: Final = 4
"""Reads at the same time: each has a DuckDB of its own."""
LONG_AT_ONCE: Final = 2
"""Of those that look at the whole store, which may need gigabytes where there are millions."""
MOST_SPANS: Final = 5_000
MOST_BYTES: Final = 64 << 20
"""What is read at once for a page, bodies and all."""
TOO_LARGE: Final = "too long to read here; its trace has it"
"""What is said in place of messages that were not read."""
_WEIGHTS: Final = f"""
SELECT {ROLLOUT} AS rollout_id, count(*) AS spans,
  coalesce(sum(coalesce(strlen(input_messages), 0) + coalesce(strlen(output_messages), 0)
    + strlen(attributes::VARCHAR)), 0)::BIGINT AS size
FROM spans WHERE {ROLLOUT} IN (SELECT unnest(?)) GROUP BY 1
"""
_MOST_WAITING: Final = 32
_TEXT: Final = 2000
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # Without one, a browser says of our own forms that they come from nowhere.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TITLES: Final = {
    400: "Invalid request",
    401: "Access key required",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Changed in the meantime",
    413: "Too large",
    415: "Unsupported content type",
    500: "Internal error",
    503: "Temporarily unavailable",
}


class Readers:
    """Threads in which pages read the store, a few at a time."""

    def __init__(
        self, at_once: int = _AT_ONCE, make_room: Callable[[], None] = lambda: None
    ) -> None:
        """Allow so many; ``make_room`` is called before each read."""
        self._at_once = at_once
        self._make_room = make_room
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="viewer")
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Do some work in a thread and return its result."""
        if self._waiting >= self._at_once + _MOST_WAITING:
            raise busy()
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._run_and_trim, work)
        finally:
            self._waiting -= 1

    def _run_and_trim(self, work: Callable[[], T]) -> T:
        self._make_room()
        try:
            return work()
        finally:
            trim_heap()


async def run(
    request: Request,
    work: Callable[[Store], T],
    *,
    is_long: bool = False,
    readers: Readers | None = None,
) -> T:
    """Call a function of the store in a reader's thread and return its result.

    One that ``is_long`` looks at the whole store: it waits for others such, and no page for it.
    ``readers`` are by default those of all who have the key.
    """
    state = request.app.state
    threads = state.long_readers if is_long else state.readers
    return await _run_unless_left(request, (readers or threads).run(partial(work, state.store)))


def require_state(request: Request, what: str) -> Any:
    """Return the state beside the store that is looked at; to look never makes one.

    Raises:
        StoreMissingError: There is none, and so not ``what`` is looked for, such as a rollout.
    """
    repositories = request.app.state.repositories
    if not repositories.is_made:
        raise StoreMissingError(f"there is no {what}; nothing was queued, published or trained yet")
    return repositories


async def _run_unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do some work, unless the reader leaves while it waits for its turn."""
    if request.method != "GET":
        return await work  # its body may be read yet
    working, leaving = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def answer(
    request: Request,
    template: str,
    read: Callable[[Store], Mapping[str, object]],
    *,
    title: str = "",
    status: int = 200,
    is_long: bool = False,
) -> Response:
    """Answer with a page, or a part of one.

    ``read`` gives, in a thread, what the template in ``templates/`` shows; its ``title`` counts
    more.
    """

    def work(store: Store) -> bytes:
        # In the thread, too: a long page takes its time to be made.
        content = read(at_moment(store))
        context = {"title": title, "store_name": store.name, **content}
        return _render_page(request, template, context)

    body = await run(request, work, is_long=is_long)
    return HTMLResponse(body, 400 if faults_of(request) else status, _HEADERS)


def refused(request: Request, refusal: RefusalError) -> Response:
    """The page that says why something is not shown."""
    what, _, remedy = str(refusal).partition("; ")
    title, status = _TITLES.get(refusal.status, "Not served"), refusal.status
    # Who has no key learns nothing, not even the store's name.
    content = {"title": title, "status": status, "what": what, "remedy": remedy, "store_name": ""}
    body = _render_page(request, "refused.html", content)
    return HTMLResponse(body, status, {**_HEADERS, **refusal.headers})


def _render_page(request: Request, template: str, content: Mapping[str, object]) -> bytes:
    always = {
        "here": request.url.path,
        "url": partial(url, request),
        "query": request.query_params,
        "faults": faults_of(request),
    }
    text = placed(request.scope, render(template, {**always, **content}))
    # A model may answer with half a character; a page shows it as a question mark.
    return text.encode("utf-8", "replace")


def select_small(store: Store, rollout_ids: Sequence[str]) -> list[str]:
    """Return as many of the rollouts, in order, as fit into memory together."""
    if not rollout_ids:
        return []
    weights = {row["rollout_id"]: row for row in store.sql(_WEIGHTS, [list(rollout_ids)])}
    small_ids: list[str] = []
    spans = size = 0
    for rollout_id in rollout_ids:
        weight = weights.get(rollout_id)
        own_spans, own_size = (weight["spans"], weight["size"]) if weight else (0, 0)
        if spans + own_spans <= MOST_SPANS and size + own_size <= MOST_BYTES:
            spans, size = spans + own_spans, size + own_size
            small_ids.append(rollout_id)
    return small_ids


def is_for_people(request: Request) -> bool:
    """Return whether the client is a browser that expects a page."""
    return "text/html" in request.headers.get("accept", "")


def see(address: str) -> Response:
    """Redirect to a page of this server after a form."""
    return RedirectResponse("/" + address.lstrip("/\\"), 303)


def with_form_faults(show: Callable[[Request], Awaitable[Response]]) -> Any:
    """Make a page keep its form: a fault is shown beside its field, an empty field is left out."""

    @wraps(show)
    async def wrapped(request: Request) -> Response:
        query = request.query_params
        if empty := [name for name, value in query.multi_items() if not value]:
            return see(url(request, **dict.fromkeys(empty)))
        request.state.faults = {}
        return await show(request)

    return wrapped


def faults_of(request: Request) -> dict[str, str]:
    """Return the faults of a form by field; none where the page keeps no form."""
    return getattr(request.state, "faults", {})


def refuse_field(request: Request, name: str, what: str) -> None:
    """Note a fault of a field; a page that keeps no form is refused."""
    if not hasattr(request.state, "faults"):
        raise RefusalError(400, f"{name}: {what}")
    request.state.faults[name] = what


def url(request: Request, **changes: object) -> str:
    """The address of this page with values of its query changed; None takes one out."""
    query = [item for item in request.query_params.multi_items() if item[0] not in changes]
    query += [(name, str(value)) for name, value in changes.items() if value is not None]
    path = request.url.path
    return f"{path}?{urlencode(query)}" if query else path


def integer(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number of the query."""
    value = request.query_params.get(name, "")
    if not value:
        return default
    if re.fullmatch(r"-?[0-9]{1,19}", value) is None or not least <= int(value) <= most:
        raise RefusalError(400, f"{name} is not a whole number from {least} to {most}; change it")
    return int(value)


def page_number(request: Request) -> int:
    """The number of a list's page, from 1."""
    return integer(request, "page", 1, 1, 10_000_000)


def show_part(request: Request, items: Sequence[T]) -> dict[str, Any]:
    """Show the page of a list that the address names, as the templates of lists take it."""
    number = page_number(request)
    rows = items[(number - 1) * ROWS : number * ROWS]
    return {"rows": rows, "total": len(items), "size": ROWS, "number": number}


def choice(request: Request, name: str, among: tuple[str, ...]) -> str:
    """One of some words of the query; the first one by default."""
    value = request.query_params.get(name) or among[0]
    if value not in among:
        refuse_field(request, name, f"unknown value; use one of {', '.join(filter(None, among))}")
        return among[0]
    return value


def text(request: Request, name: str, default: str = "") -> str:
    """A text of the query, without spaces around it."""
    value = request.query_params.get(name, default).strip()
    if max(map(len, value.split(","))) > _TEXT or "\0" in value:  # a list of ids may be longer
        refuse_field(request, name, f"not a text of at most {_TEXT} characters; shorten it")
        return default
    return value


def parse_number(name: str, text: str) -> float:
    """Return a finite number.

    Raises:
        ConfigError: The text is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {text[:40]!r}, which is not a number; use one such as 0.5")
    return number


_PARSERS: Final[Mapping[type, tuple[Callable[[str, str], object], str]]] = {
    date: (lambda name, text: instant_ns(text, name, zone=UTC), f"not a time; {FORMS}"),
    int: (lambda name, text: int(text), "not a whole number; use one such as 5"),
    float: (parse_number, "not a number; use one such as 0.5"),
}


def sort_of(request: Request, view: View) -> str:
    """Return the column that a list is sorted by, after a ``-`` the largest first; or nothing."""
    return choice(request, "sort", ("", *view.sorts, *(f"-{name}" for name in view.sorts)))


async def answer_list(
    request: Request, template: str, view: View, *, title: str,
    read_more: Callable[[Store, Mapping[str, Any]], Mapping[str, object]] | None = None,
    **more: object,
) -> Response:  # fmt: skip
    """A page of a view's rows, and more, as filters, order and number in its address say."""
    number = page_number(request)
    values, sort = read_filters(request, view.filters), sort_of(request, view)
    content = {"filters": view.filters, "number": number, "size": ROWS, **more}

    def read(store: Store) -> Mapping[str, object]:
        if faults_of(request):
            return content
        rows, total, _ = view.read(store, values, limit=ROWS, offset=(number - 1) * ROWS, sort=sort)
        others = read_more(store, values) if read_more is not None else {}
        return {**content, **others, "rows": rows, "total": total}

    return await answer(request, template, read, title=title)


def read_filters(
    request: Request,
    filters: Mapping[str, Filter],
    others: Collection[str] = ("page", "sort", "of", "show"),
) -> dict[str, Any]:
    """Return filters' values, None if not set; a query has no names besides ``others``."""
    names = (*filters, *others)
    for name in request.query_params:
        if name not in names:
            advice = suggest_name(name, names).removesuffix("?")
            refuse_field(request, name[:60], f"unknown; {advice}")

    def read(name: str, option: Filter) -> object:
        if option.kind in _PARSERS:
            (parse, fault), value = _PARSERS[option.kind], text(request, name)
            try:
                return parse(name, value) if value else None
            except (ConfigError, ValueError):
                refuse_field(request, name, fault)
                return None
        if option.kind is bool:
            return {"yes": True, "no": False}.get(choice(request, name, ("", "yes", "no")))
        if option.choices:
            return choice(request, name, ("", *option.choices)) or None
        if option.kind is tuple:
            texts = map(str.strip, text(request, name).split(","))
            return tuple(filter(None, texts)) or None
        return text(request, name) or None

    return {name: read(name, filter) for name, filter in filters.items()}
