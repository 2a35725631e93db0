"""Templates and what each of them may use, and the files that pages are made with."""

import hashlib
import json
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, emphasis
from markupsafe import Markup, escape
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.serve.responses import RefusalError
from lightning_otel.serve.viewer.urls import page_path, resource_path
from lightning_otel.types.text import (
    HIDDEN,
    count_noun,
    format_age,
    format_duration,
    format_number,
    format_size,
    visible,
)
from lightning_otel.views.previews import word_task

PLACES: Final = [
    {"path": path, "name": name, "key": key}
    for path, name, key in (
        ("/", "Home", "h"),
        ("/traces", "Traces", "t"),
        ("/transitions", "Transitions", "s"),
        ("/selections", "Data sets", "d"),
        ("/resources", "Resources", "p"),
        ("/runs", "Runs", "u"),
        ("/sql", "SQL", "q"),
        ("/settings", "Settings", "e"),
    )
]
"""Pages that the navigation leads to, by keys."""


def render(template: str, content: Mapping[str, object]) -> str:
    """A page in which everything is seen; the values of its fields stay what they are."""
    return _VALUE_OR_HIDDEN.sub(
        lambda match: (
            HIDDEN.sub(lambda hidden: f"&#{ord(hidden[0])};", match[0])
            if match[0][0] in " <"
            else visible(match[0])
        ),
        _ENVIRONMENT.get_template(template).render(content).replace("\r\n", "\n"),
    )


def ago(start_ns: int) -> str:
    """Word the time since then, in one unit."""
    return f"{format_age(start_ns, time.time_ns())} ago"


def money(amount: float | None) -> str:
    """Format a cost in dollars; cents of one are told in full."""
    if amount is None:
        return "–"
    if 0 < amount < 0.0001:
        return "< $0.0001"
    return f"${amount:,.4f}" if amount < 1 else f"${amount:,.2f}"


def moment(time_ns: int) -> str:
    """A time in full, in UTC."""
    return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def number(value: float | None) -> str:
    """A whole number with its thousands apart, another in four digits; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def mark(text: str, query: str) -> Markup:
    """Return a text with what was searched for marked."""
    if not query:
        return escape(text)
    parts = re.split(f"({re.escape(query)})", text, flags=re.IGNORECASE)
    pairs = (
        Markup("<mark>{}</mark>").format(piece) if n % 2 else piece for n, piece in enumerate(parts)
    )
    return Markup("").join(pairs)


def json_text(value: object, indent: int | None = 2) -> str:
    """A value as JSON for people; it is escaped like any text."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def render_markdown(text: str) -> Markup:
    """Lay a text out that may be Markdown; links and images in it stay text, and so does HTML."""
    tokens = _MARKDOWN.parse(visible(text))
    if any(token.level >= _DEEPEST for token in tokens):  # what is deeper would be dropped
        return Markup('<p class="data">{}</p>').format(visible(text))
    for token in tokens:
        # The page's policy refuses styles of columns, and it has headings of its own.
        token.info = ""
        token.attrs = {"class": "head"} if token.type == "heading_open" else {}
        token.tag = "p" if token.type.startswith("heading") else token.tag
    return Markup(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}).strip())


def _read_emphasis(state: StateInline, silent: bool) -> bool:  # noqa: FBT001
    """Read emphasis as Markdown does, but for stars between letters or digits, as in 17*23."""
    run = _STARS.match(state.src, state.pos)
    if run is None or not state.pos or not state.src[state.pos - 1].isalnum():
        return emphasis.tokenize(state, silent)
    if not silent:
        state.pending += run[0]
    state.pos = run.end()
    return True


def _make_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ago": ago, "moment": moment, "money": money, "number": number, "size": format_size,
        "duration": lambda length_ns: format_duration(length_ns / 1e9),
        "json": json_text, "mark": mark, "task": word_task,
        "visible": visible, "markdown": render_markdown,
    }  # fmt: skip
    environment.globals |= {
        "static": static_address,
        "places": PLACES,
        "count": count_noun,
        "page_path": page_path,
        "resource_path": resource_path,
        "program_version": version("lightning-otel"),
    }
    return environment


_FOLDER: Final = Path(__file__).with_name("static")
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def _read_files() -> dict[str, tuple[bytes, str]]:
    contents = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    return {
        name: (content, hashlib.sha256(content).hexdigest()[:16])
        for name, content in contents.items()
    }


def static_address(name: str) -> str:
    """Return the address of a file, which browsers keep for good; it changes with the content."""
    return f"/static/{name}?v={_read_files()[name][1]}"


async def static(request: Request) -> Response:
    """A file; for good only by the address that names its content."""
    name = request.path_params["name"]
    if name not in _read_files():
        raise RefusalError(404, "there is no such file")
    content, version = _read_files()[name]
    is_exact = request.query_params.get("v") == version
    caching = "public, max-age=31536000, immutable" if is_exact else "no-cache"
    kind = _TYPES[Path(name).suffix]
    return Response(content, media_type=kind, headers={"Cache-Control": caching})


# Pages are not compressed: their length would tell of the secrets beside what an address repeats.
ROUTES: Final[list[Route]] = [
    Route("/static/{name:str}", static, methods=["GET"], middleware=[Middleware(GZipMiddleware)])
]
_VALUE_OR_HIDDEN: Final = re.compile(rf' value="[^"]*"|<textarea[^>]*>[^<]*|{HIDDEN.pattern}')
_DEEPEST: Final = 16
"""Blocks within each other; the parser stops at 20."""
_STARS: Final = re.compile(r"\*+(?=[^\W_])")
_MARKDOWN: Final = MarkdownIt("commonmark", {"html": False, "breaks": True})
_MARKDOWN.disable(["link", "image", "autolink", "reference", "html_inline", "html_block"])
# What characters an entity stands for, and that a rule makes a heading, is not seen.
_MARKDOWN.disable(["entity", "lheading"]).enable(["table", "strikethrough"])
_MARKDOWN.inline.ruler.at("emphasis", _read_emphasis)
_ENVIRONMENT: Final = _make_environment()
