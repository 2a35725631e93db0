"""The transitions in a trainer's format: what would be left out and why, and then the rows."""

import contextlib
import math
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lightning_otel import formats
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.formats.format import Format
from lightning_otel.serve.answers import busy
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.selecting import CHOICES, Chosen, chosen, number, registered
from lightning_otel.store.table import line

KINDS: Final = ("jsonl", "parquet")
OPTION: Final = "option."
"""What comes before the name of a format's own option in a query."""
_TYPES: Final = {"jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}
_PART_BYTES: Final = 1 << 16
_MOST_AT_ONCE: Final = 2
"""Downloads under way, beyond which others are asked to come again."""


def preview(store: Store, asked: Chosen, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Count what an export would write and leave out, with reasons; write nothing.

    Args:
        store: Where the spans are.
        asked: Which transitions.
        name: The format's name.
        options: Those of the format.
    """
    made = formats.get(name)
    done = store.export(name, None, **asked.keywords, **options)
    more = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    return {
        "title": f"Export as {name}",
        "format": name,
        "made": made,
        "formats": registered(),
        "done": done,
        "lost": sum(each.noun == "call" for each in done.report.dropped),
        "options": [(key, options.get(key, default)) for key, default in made.options().items()],
        "asked": asked.values,
        "choices": CHOICES,
        "shared": asked.query,
        "query_of": {
            **asked.query,
            "format": name,
            **{f"{OPTION}{key}": str(value) for key, value in options.items()},
        },
        "command": asked.command(store, name, "", *more),
    }


def options_of(made: Format, query: Mapping[str, str]) -> dict[str, Any]:
    """A format's own options in a query.

    Raises:
        ConfigError: There is no such option, or it cannot be understood.
    """
    known = made.options()
    found: dict[str, Any] = {}
    for key, text in query.items():
        if not key.startswith(OPTION) or not text.strip():
            continue
        name = key.removeprefix(OPTION)
        if name not in known:
            raise ConfigError(f"the format has no option {name[:60]!r}; see docs/exports.md")
        found[name] = _parse_option(name, text.strip(), known[name])
    return found


def _parse_option(name: str, text: str, default: object) -> object:
    """An option's value, of the kind its default is of."""
    if isinstance(default, bool):
        if text not in ("True", "False"):
            raise ConfigError(f"{name} is {text[:40]!r}; it is True or False")
        return text == "True"
    if isinstance(default, str):
        return text[:1000]
    value = number(name, text)
    if isinstance(default, int):
        if not value.is_integer() or abs(value) >= math.ldexp(1.0, 53):
            raise ConfigError(f"{name} is {text[:40]!r}; it is a whole number")
        return int(value)
    return value


def lines(
    store: Store, asked: Chosen, name: str, options: Mapping[str, Any]
) -> Generator[bytes, None, None]:
    """The rows as JSON lines, some at a time, as they are made."""
    held = bytearray()
    for row in store.rows(name, **asked.keywords, **options):
        held += line(row)
        if len(held) >= _PART_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def parquet(
    store: Store, asked: Chosen, name: str, options: Mapping[str, Any]
) -> Generator[bytes, None, None]:
    """The rows as Parquet, which is whole before any of it is sent."""
    with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
        place = Path(folder, "rows.parquet")
        store.export(name, place, kind="parquet", **asked.keywords, **options)
        with place.open("rb") as file:
            while part := file.read(_PART_BYTES):
                yield part


_MADE_BY: Final = {"jsonl": lines, "parquet": parquet}


class Downloads:
    """Sends exports, a few at a time."""

    def __init__(self) -> None:
        """Send none yet."""
        # Weak: one whose reader went away before it began ends like any other.
        self._under_way: WeakSet[_Rest] = WeakSet()

    async def answer(self, request: Request) -> Response:
        """The rows as a file.

        Raises:
            RefusalError: The query asks for nothing that can be written, or too many are sent now.
        """
        name = _choose_format(request)
        kind = page.choice(request, "as", KINDS)
        if len(self._under_way) >= _MOST_AT_ONCE:
            raise busy()
        rest = _Rest()
        self._under_way.add(rest)
        # The first rows come before the answer begins: from then on a fault can only break it off.
        await page.run(request, partial(_begin_download, request, name, kind, rest), is_long=True)
        headers = {
            "Content-Disposition": f'attachment; filename="{name}.{kind}"',
            "Cache-Control": "no-store",
        }
        return StreamingResponse(self._send_rest(rest), headers=headers, media_type=_TYPES[kind])

    async def _send_rest(self, rest: "_Rest") -> AsyncIterator[bytes]:
        try:
            async for part in iterate_in_threadpool(rest):
                yield part
        finally:
            self._under_way.discard(rest)
            rest.close()


def _begin_download(request: Request, name: str, kind: str, rest: "_Rest", store: Store) -> None:
    state = request.app.state
    state.rooms.give_waiting(state.intake.keep)
    asked = chosen(request.query_params, store)
    options = options_of(formats.get(name), request.query_params)
    rest.begin(_MADE_BY[kind](store, asked, name, options))


class _Rest(Iterator[bytes]):
    """The unsent rest of an export; its sender closes it."""

    def __init__(self) -> None:
        self._parts: Generator[bytes, None, None] | None = None
        self._first: bytes | None = None

    def begin(self, parts: Generator[bytes, None, None]) -> None:
        """Have the first part made."""
        self._parts = parts
        self._first = next(parts, b"")

    def __next__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._parts is None:
            raise StopIteration
        return next(self._parts)

    def close(self) -> None:
        """Let go of files and connections."""
        if self._parts is not None:
            with contextlib.suppress(ValueError):  # a thread is still in it: it ends by itself
                self._parts.close()


def _choose_format(request: Request) -> str:
    return page.choice(request, "format", tuple(name for name, _ in registered()))


async def export(request: Request) -> Response:
    """The page that says what would be written."""
    name = _choose_format(request)

    def work(store: Store) -> Mapping[str, object]:
        state = request.app.state
        state.rooms.give_waiting(state.intake.keep)
        options = options_of(formats.get(name), request.query_params)
        return preview(store, chosen(request.query_params, store), name, options)

    return await page.answer(request, "export.html", work, is_long=True)


ROUTES: Final[list[Route]] = [
    Route("/transitions/export", export, methods=["GET"]),
    Route("/transitions/download", Downloads().answer, methods=["GET"]),
]
