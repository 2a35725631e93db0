"""Forms that move a resource's aliases: promote the canary, roll back, or name a version."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.serve.bodies import form
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.addresses import path_of
from lightning_otel.serve.viewer.beside import required
from lightning_otel.serve.viewer.selecting import number

if TYPE_CHECKING:
    from lightning_otel.resources import Resources

_ACTS: Final = ("alias", "promote", "rollback")
_NONE: Final = "none"


async def change_aliases(request: Request) -> Response:
    """Do what a form asks for, and show the resource."""
    name = request.path_params["name"]
    given = await form(request)

    def work(store: Store) -> None:
        from lightning_otel.resources import Resources

        _move_aliases(Resources(required(store, f"resource {name!r}")), name, given)

    await page.run(request, work)
    return page.see(path_of("resources", name))


def _move_aliases(opened: "Resources", name: str, given: Mapping[str, str]) -> None:
    """Move aliases, unless one moved since the form's page was made.

    Raises:
        ChangedError: One did.
        ConfigError: The form asks for nothing that can be done.
        NotFoundError: There is no such resource or version, or no canary.
    """
    act, text = given.get("act", ""), given.get("last_move", "")
    last_move = int(text) if text.isdecimal() and len(text) < 19 else -1  # -1: never a move
    if act == "promote":
        opened.promote(name, last_move=last_move)
    elif act == "rollback":
        opened.rollback(name, last_move=last_move)
    elif act == "alias":
        alias, weight = given.get("alias", "").strip(), given.get("weight", "").strip()
        version = _parse_version(given.get("version", "").strip())
        share = number("weight", weight) if weight else None
        opened.set_alias(name, alias, version, weight=share, last_move=last_move)
    else:
        raise ConfigError(f"act is {act[:40]!r}; it is one of {', '.join(_ACTS)}")


def _parse_version(text: str) -> int | None:
    if text == _NONE:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"version is {text[:40]!r}; name its number, or {_NONE}")
    return int(text)


ROUTES: Final[list[Route]] = [
    Route("/resources/{name:path}@change", change_aliases, methods=["POST"]),
]
