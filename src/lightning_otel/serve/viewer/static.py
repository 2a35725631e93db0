"""Stylesheet, script and picture: read once, kept by browsers for good, named by their content."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.serve.answers import RefusalError

_FOLDER: Final = Path(__file__).with_name("static")
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _File(NamedTuple):
    content: bytes
    version: str


@cache
def _read_files() -> dict[str, _File]:
    """By name; a name that is not among them is no path."""
    contents = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}
    return {
        name: _File(content, hashlib.sha256(content).hexdigest()[:16])
        for name, content in contents.items()
    }


def address(name: str) -> str:
    """Return the address of a file; it changes with the content."""
    return f"/static/{name}?v={_read_files()[name].version}"


async def answer(request: Request) -> Response:
    """A file; for good only by the address that names its content."""
    name = request.path_params["name"]
    found = _read_files().get(name)
    if found is None:
        raise RefusalError(404, "there is no such file")
    is_exact = request.query_params.get("v") == found.version
    kept = "public, max-age=31536000, immutable" if is_exact else "no-cache"
    kind = _TYPES[Path(name).suffix]
    return Response(found.content, media_type=kind, headers={"Cache-Control": kept})


ROUTES: Final[list[Route]] = [Route("/static/{name:str}", answer, methods=["GET"])]
