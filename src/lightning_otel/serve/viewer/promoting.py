"""What is to be live, or canary: said beforehand with what it will do, and done by form."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.serve.guard import form
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.addresses import path_of
from lightning_otel.serve.viewer.beside import required
from lightning_otel.serve.viewer.selecting import number

if TYPE_CHECKING:
    from lightning_otel.resources import Resources

ACTS: Final = ("alias", "promote", "rollback")
_NONE: Final = "none"


class Change(NamedTuple):
    """What is asked for.

    Attributes:
        act: ``alias`` names a version, ``promote`` and ``rollback`` are those of ``Resources``.
        alias: The alias, for ``alias``.
        version: The version as text; ``none`` takes the alias away.
        weight: The share of a canary as text; empty leaves it.
    """

    act: str
    alias: str = ""
    version: str = ""
    weight: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "Change":
        """What a query or a form asks for.

        Raises:
            ConfigError: It is nothing that can be done.
        """
        act = given.get("act", "")
        if act not in ACTS:
            raise ConfigError(f"act is {act[:40]!r}; it is one of {', '.join(ACTS)}")
        fields = (given.get(name, "").strip() for name in ("alias", "version", "weight"))
        return cls(act, *fields)


class Effect(NamedTuple):
    """What a change will do.

    Attributes:
        before: What each alias that it moves means now; None for nothing.
        after: What it will mean.
        told: The same in words, a sentence each.
        last_move: The last move of an alias that it was found out after: none may have come since
            when it is done.
    """

    before: Mapping[str, int | None]
    after: Mapping[str, int | None]
    told: tuple[str, ...]
    last_move: int


def effect(opened: "Resources", name: str, change: Change) -> Effect:
    """What a change will do, which does nothing yet.

    Raises:
        ConfigError: It cannot be done, or nothing would change.
        NotFoundError: There is no such resource or version, or no canary.
    """
    opened.get(name, opened.versions(name)[-1].version)
    last_move = opened.last_move(name)  # first: what moves from now on is refused, not overlooked
    aliases = opened.aliases(name)
    share = opened.canary_weight(name)
    after: dict[str, int | None] = {}
    if change.act == "promote":
        if "canary" not in aliases:
            raise NotFoundError(f"{name} has no canary; make a version live instead")
        after = {"live": aliases["canary"], "canary": None}
    elif change.act == "rollback":
        previous = opened.previous(name)
        if previous is None:
            raise ConfigError(f"nothing of {name} was live before; make another version live")
        after = {"live": previous}
    else:
        after = {_alias(change): _number(opened, name, change)}
    weight = _weight(change)
    new_share = share if weight is None else weight
    before = {alias: aliases.get(alias) for alias in after}
    is_same_share = "canary" not in after or after["canary"] is None or new_share == share
    if before == after and is_same_share and weight is None:
        raise ConfigError(f"{name} stands so already; nothing would change")
    canary = after.get("canary", aliases.get("canary"))
    told = tuple(
        _told(name, alias, before[alias], after[alias], weight, is_shared=canary is not None)
        for alias in after
    )
    return Effect(before, after, told, last_move)


def change_it(opened: "Resources", name: str, change: Change, last_move: int) -> None:
    """Do it, if what it was decided on still holds: in one transaction, so that of two one does.

    Args:
        opened: Where.
        name: The resource.
        change: What.
        last_move: As :class:`Effect` has it.

    Raises:
        ChangedError: Somebody changed it meanwhile.
        ConfigError: It cannot be done.
        NotFoundError: There is no such resource or version, or no canary.
    """
    if change.act == "promote":
        opened.promote(name, last_move=last_move)
    elif change.act == "rollback":
        opened.rollback(name, last_move=last_move)
    else:
        version = _number(opened, name, change)
        opened.set_alias(name, _alias(change), version, weight=_weight(change), last_move=last_move)


def _alias(change: Change) -> str:
    if not change.alias or len(change.alias) > 100:
        raise ConfigError("an alias is a word such as live or canary; name one")
    return change.alias


def _number(opened: "Resources", name: str, change: Change) -> int | None:
    if change.version == _NONE:
        return None
    if not change.version.isdecimal() or len(change.version) > 9:
        raise ConfigError(f"version is {change.version[:40]!r}; name its number, or {_NONE}")
    return opened.get(name, int(change.version)).version


def _weight(change: Change) -> float | None:
    if not change.weight:
        return None
    share = number("weight", change.weight)
    if not 0 <= share <= 1:
        raise ConfigError(f"weight is {share:g}; it is a share from 0 to 1")
    if change.alias != "canary" or change.act != "alias":
        raise ConfigError("only a canary has a weight; leave it out")
    return share


def _told(
    name: str,
    alias: str,
    before: int | None,
    after: int | None,
    weight: float | None,
    *,
    is_shared: bool,
) -> str:
    was = f"instead of {name}@{before}" if before is not None else "for the first time"
    if after is None:
        return {
            "live": f"No version is live any more: agents say what they say themselves, and not "
            f"{name}@{before}.",
            "canary": f"There is no canary any more: nobody is given {name}@{before} for a share.",
        }.get(alias, f"{alias} means nothing any more.")
    if alias == "live":
        but = ", but for the share that is given the canary" if is_shared else ""
        return f"Everybody is given {name}@{after} {was}{but}."
    if alias == "canary":
        share = "the share it has, else a tenth," if weight is None else f"{weight:.0%}"
        return f"{name}@{after} is given to {share} of rollouts as the canary."
    return f"{alias} means {name}@{after} {was}; nobody is given it unasked."


def _last_move(given: Mapping[str, str]) -> int:
    """Which move the page was made after; one that never was where the form does not say."""
    text = given.get("last_move", "")
    return int(text) if text.isdecimal() and len(text) < 19 else -1


def _opened(store: Store, name: str) -> "Resources":
    from lightning_otel.resources import Resources

    return Resources(required(store, f"resource {name!r}"))


async def ask(request: Request) -> Response:
    """What a change will do, with the button that does it."""
    name = request.path_params["name"]

    def work(store: Store) -> Mapping[str, object]:
        change = Change.of(request.query_params)
        found = effect(_opened(store, name), name, change)
        return {"title": f"Change {name}", "name": name, "change": change, "effect": found}

    return await page.answer(request, "resource_change.html", work)


async def do(request: Request) -> Response:
    """Do it, and go back to the resource."""
    name = request.path_params["name"]
    given = await form(request)

    def work(store: Store) -> None:
        change_it(_opened(store, name), name, Change.of(given), _last_move(given))

    await page.run(request, work)
    return page.see(path_of("resources", name))


ROUTES: Final[list[Route]] = [
    Route("/resources/{name:path}@change", ask, methods=["GET"]),
    Route("/resources/{name:path}@change", do, methods=["POST"]),
]
